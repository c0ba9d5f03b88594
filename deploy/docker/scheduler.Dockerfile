# The scheduler with its dashboard, without torch.
#   docker build -f deploy/docker/scheduler.Dockerfile -t hydra-cp-scheduler:0.1.0 .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt hatch_build.py README.md LICENSE ./
COPY protos protos
COPY scheduler_service scheduler_service
COPY worker_agent worker_agent
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
RUN python -m venv /opt/hydra-cp \
 && /opt/hydra-cp/bin/pip install --no-cache-dir -c constraints.txt "$(echo /wheels/hydra_cp-*.whl)[service]"

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/hydra-cp /opt/hydra-cp
RUN groupadd --gid 65532 hydracp \
 && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin hydracp \
 && install -d -o 65532 -g 65532 /var/lib/hydra-cp /var/cache/numba
# Within a container, what is published decides who can connect.
ENV PATH=/opt/hydra-cp/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/var/cache/numba \
    HYDRACP_GRPC=0.0.0.0:7421 \
    HYDRACP_HTTP=0.0.0.0:7422 \
    HYDRACP_STORE=sqlite:////var/lib/hydra-cp/history.sqlite3
USER 65532:65532
WORKDIR /tmp
EXPOSE 7421 7422
ENTRYPOINT ["hydra-cp"]
CMD ["serve"]
