# The worker agent with torch and the reference trainer.
#   docker build -f deploy/docker/agent.Dockerfile -t hydra-cp-agent:0.1.0 .
# torch is the default wheel, which runs on CPUs and GPUs. For a small CPU-only image, add
# --build-arg TORCH_INDEX_URL=… with the index of CPU wheels that PyTorch's installation page names.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH_INDEX_URL=""
WORKDIR /src
COPY pyproject.toml constraints.txt hatch_build.py README.md LICENSE ./
COPY protos protos
COPY scheduler_service scheduler_service
COPY worker_agent worker_agent
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
RUN python -m venv /opt/hydra-cp \
 && /opt/hydra-cp/bin/pip install --no-cache-dir -c constraints.txt \
      ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$(echo /wheels/hydra_cp-*.whl)[training]"

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/hydra-cp /opt/hydra-cp
RUN groupadd --gid 65532 hydracp \
 && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin hydracp \
 && install -d -o 65532 -g 65532 /var/cache/numba
ENV PATH=/opt/hydra-cp/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/var/cache/numba
USER 65532:65532
WORKDIR /tmp
CMD ["python", "-m", "worker_agent.training", "--help"]
