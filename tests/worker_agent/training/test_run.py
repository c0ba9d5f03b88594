"""Training through a real scheduler, over real process boundaries: sample order, resume, and a scheduler that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from scheduler_service.domain import Pool
from tests.support.ranks import run_ranks
from tests.support.scheduler import Scheduler, scheduler
from worker_agent.client import AgentConfig, PlanAgent, PlannerClient
from worker_agent.client.planner_client import FetchedPlan
from worker_agent.client.session import Session
from worker_agent.client.sources import ServiceSource
from worker_agent.training.config import ModelConfig, RunConfig
from worker_agent.training.documents import CorpusConfig, Documents, prepare_documents
from worker_agent.training.model import LanguageModel
from worker_agent.training.run import Run
from worker_agent.training.topology import build_topology
from worker_agent.training.trainer import Trainer

CORPUS = CorpusConfig(vocabulary=512, longest=512, documents=150)
BATCH = 16
RANKS = 4
POOL = Pool(ranks=RANKS, token_budget=192, ep=2, heads=2, max_ulysses=2)
CONFIG = RunConfig(
    pool=POOL, model=ModelConfig(vocabulary=512, hidden=32), iterations=8, batch=BATCH, policy="hydra", lookahead=2
)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents") / "documents.npz"
    prepare_documents(path, CORPUS)
    return path


@dataclass(frozen=True)
class Part:
    """One stretch of training, as one start of `python -m worker_agent.training` makes it."""

    config: RunConfig
    attempt: int
    output: Path
    first: int = 0
    checkpoint_every: int = 0
    late: bool = False
    """Whether the last rank of the job is too late for the plan of `LATE_AT`."""


LATE_AT = 1


class Late(ServiceSource):
    """The service's source, through which one plan does not come in time."""

    def fetch(self, iteration: int, timeout_s: float) -> FetchedPlan:
        if iteration != LATE_AT:
            return super().fetch(iteration, timeout_s)
        time.sleep(timeout_s)
        return FetchedPlan(None, 0)


def _train(rank: int, parts: Sequence[Part], target: str, documents: Path) -> None:
    """On one rank: every part from a fresh model, one after the other."""
    for part in parts:
        config = part.config
        topology = build_topology(config.pool)
        stage, stages = topology.pipeline.stage, config.pool.stages
        model = LanguageModel(config.model, experts=topology.experts, stage=stage, stages=stages)
        trainer = Trainer(model, config.pool, topology, config.optimizer)
        agent_config = AgentConfig(
            target=target,
            job="test",
            attempt=part.attempt,
            pool=config.pool,
            policy=config.policy,
            cost=config.cost,
            fetch_timeout_s=config.fetch_timeout_s,
        )
        is_late = part.late and rank == dist.get_world_size() - 1
        source = Late(Session(PlannerClient(target), agent_config), topology.rank) if is_late else None
        with PlanAgent(agent_config, topology.rank, topology.agent, source=source) as agent:
            run = Run(config, Documents.load(documents), trainer, agent, part.output)
            run.train(part.first, part.checkpoint_every)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be written to."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def trained_samples(output: Path, iteration: int) -> list[int]:
    """Ids of the samples that all ranks together trained in `iteration`, sorted."""
    return sorted(
        sample
        for rank in range(RANKS)
        for line in read_lines(output / f"ledger-{rank}.jsonl")
        if line["iteration"] == iteration
        for sample in line["samples"]
    )


def test_a_run_is_planned_by_the_service_learns_and_resumes_where_it_stopped(documents: Path, tmp_path: Path):
    with scheduler() as service:
        # Then the same folder and job again, from the checkpoint before iteration 5, as another attempt.
        parts = [Part(CONFIG, 0, tmp_path, checkpoint_every=5), Part(CONFIG, 1, tmp_path, first=5)]
        run_ranks(RANKS, _train, parts, service.grpc, documents)
    written = read_lines(tmp_path / "metrics.jsonl")
    records, resumed = written[: CONFIG.iterations], written[CONFIG.iterations :]

    assert [record["iteration"] for record in records] == list(range(8))
    assert {record["origin"] for record in records} == {"service"}
    assert {"1", "2", "4"} <= {degree for record in records for degree in record["degrees"]}
    assert all(record["bytes_sent"][kind] > 0 for kind in ("ulysses", "ep", "reroute") for record in records)
    assert sum(record["bytes_sent"]["ring"] for record in records) > 0
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    for iteration in range(5):
        assert trained_samples(tmp_path, iteration) == list(range(iteration * BATCH, (iteration + 1) * BATCH))

    assert [record["iteration"] for record in resumed] == [5, 6, 7]
    for again, before in zip(resumed, records[5:], strict=True):
        for field in ("loss", "gradient_norm", "digest", "labels", "tokens", "degrees"):
            assert again[field] == before[field], field
    for iteration in range(5, 8):
        once = range(iteration * BATCH, (iteration + 1) * BATCH)
        assert trained_samples(tmp_path, iteration) == sorted([*once, *once]), "before, and again after the resume"


def test_the_loss_does_not_depend_on_the_policy(documents: Path, tmp_path: Path):
    parts = []
    for attempt, policy in enumerate(("hydra_search", "static_cp", "megatron")):
        (tmp_path / policy).mkdir()
        parts.append(Part(replace(CONFIG, policy=policy, iterations=3), attempt, tmp_path / policy))
    with scheduler() as service:
        run_ranks(RANKS, _train, parts, service.grpc, documents)
    expected, *others = (read_lines(part.output / "metrics.jsonl") for part in parts)
    for records in others:
        assert [r["digest"] for r in records] != [r["digest"] for r in expected]
        assert [r["labels"] for r in records] == [r["labels"] for r in expected]
        assert [r["loss"] for r in records] == pytest.approx([r["loss"] for r in expected], rel=1e-4)
        assert [r["gradient_norm"] for r in records] == pytest.approx([r["gradient_norm"] for r in expected], rel=1e-3)


@pytest.mark.slow
def test_two_stages_run_by_the_plans_of_the_service_and_fall_back_together_if_one_rank_of_one_stage_has_none(
    documents: Path, tmp_path: Path
):
    one_stage = replace(CONFIG, iterations=3)
    staged = replace(one_stage, pool=replace(POOL, stages=2), fetch_timeout_s=3.0)
    folders = calm, disturbed, whole = tmp_path / "calm", tmp_path / "disturbed", tmp_path / "whole"
    for folder in folders:
        folder.mkdir()
    with scheduler() as service:
        parts = [Part(staged, 0, calm), Part(staged, 1, disturbed, late=True)]
        run_ranks(2 * RANKS, _train, parts, service.grpc, documents)
        run_ranks(RANKS, _train, [Part(one_stage, 2, whole)], service.grpc, documents)
    planned, fell_back, expected = (read_lines(folder / "metrics.jsonl") for folder in folders)

    assert [record["origin"] for record in planned] == ["service"] * 3
    assert [record["origin"] for record in fell_back] == ["service", "local", "service"]
    assert fell_back[LATE_AT]["reason"] == "rank 7 got no plan from the scheduler in time"
    # By the policy of local plans, so that it is the same plan, and the same training bit for bit.
    for field in ("digest", "loss", "gradient_norm"):
        assert [record[field] for record in fell_back] == [record[field] for record in planned], field
    for staged_record, record in zip(planned, expected, strict=True):
        for field in ("iteration", "labels", "sequences", "tokens", "longest_tokens"):
            assert staged_record[field] == record[field], field
        assert staged_record["loss"] == pytest.approx(record["loss"], rel=1e-4)
        assert staged_record["bytes_sent"]["pipeline"] > 0 == record["bytes_sent"]["pipeline"]
        samples = trained_samples(calm, record["iteration"])
        assert samples == trained_samples(disturbed, record["iteration"]) == trained_samples(whole, record["iteration"])


@contextmanager
def torchrun(target: str, documents: Path, output: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Four workers under the real launcher; ended with everything they started."""
    output.mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
        "-m", "worker_agent.training", "--scheduler", target, "--documents", str(documents), "--output", str(output),
        "--budget", str(POOL.token_budget), "--batch", str(BATCH), "--policy", "hydra", *options,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (output / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes], log: Path, what: str) -> None:
    """Until `condition`; fails by name after two minutes, or when `process` ends before."""
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f"the run ended with {process.returncode} before {what}:\n{log.read_text()}"
        assert time.monotonic() < end, f"no {what} within two minutes:\n{log.read_text()}"
        time.sleep(0.05)


@pytest.mark.slow
def test_training_goes_on_without_a_killed_scheduler_and_returns_to_a_restarted_one(documents: Path, tmp_path: Path):
    disturbed, calm = tmp_path / "disturbed", tmp_path / "calm"
    metrics = disturbed / "metrics.jsonl"

    def origins() -> list[str]:
        return [record["origin"] for record in read_lines(metrics)]

    with scheduler() as service:
        options = ("--iterations", "100000", "--fetch-timeout", "3")
        with torchrun(service.grpc, documents, disturbed, *options) as process:
            log = disturbed / "log"
            wait_for(lambda: len(origins()) >= 5, process, log, "five iterations")
            _kill_with_calls_parked(service, origins, lambda done, what: wait_for(done, process, log, what))
            wait_for(lambda: origins().count("local") >= 5, process, log, "five iterations without a scheduler")
            service.start()
            wait_for(lambda: origins()[-3:] == ["service"] * 3, process, log, "plans from the restarted scheduler")

    records = read_lines(metrics)[:-1]  # the last one may have been cut short before every rank wrote its ledger
    assert [record["iteration"] for record in records] == list(range(len(records)))
    assert all(record["reason"] for record in records if record["origin"] == "local")
    for iteration in range(len(records)):
        assert trained_samples(disturbed, iteration) == list(range(iteration * BATCH, (iteration + 1) * BATCH))

    with scheduler() as service, torchrun(service.grpc, documents, calm, "--iterations", str(len(records))) as process:
        assert process.wait(240) == 0, (calm / "log").read_text()
    undisturbed = read_lines(calm / "metrics.jsonl")
    assert {record["origin"] for record in undisturbed} == {"service"}
    assert [record["digest"] for record in records] == [record["digest"] for record in undisturbed]
    assert [record["loss"] for record in records] == [record["loss"] for record in undisturbed], "bit for bit"


def _kill_with_calls_parked(
    service: Scheduler, origins: Callable[[], list[str]], wait: Callable[[Callable[[], object], str], None]
) -> None:
    """Freeze the scheduler until the run has used up its plans and waits on the wire, then kill -9 it."""
    os.kill(service.pid, signal.SIGSTOP)
    frozen_at = len(origins())
    wait(lambda: len(origins()) > frozen_at, "an iteration with the scheduler frozen")
    service.kill()
