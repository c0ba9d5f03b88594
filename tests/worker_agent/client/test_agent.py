"""Ranks against a real scheduler: one plan on all of them, whatever happens to the scheduler."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch.distributed as dist

from scheduler_service.domain import Batch, CostModel, HydraCpError, InvalidInputError, Pool, Reason, slice_plan
from scheduler_service.planning import plan_iteration
from tests.support.ranks import run_ranks
from tests.support.scheduler import Scheduler, scheduler
from worker_agent.client import AgentConfig, ForkedProcessError, PlanAgent, PlannerClient, PlanOrigin, PlanStep, Timing
from worker_agent.client.planner_client import FetchedPlan
from worker_agent.client.session import Session
from worker_agent.client.sources import ServiceSource

RANKS = 4
POOL = Pool(ranks=RANKS, token_budget=512, heads=2, ep=2)
WAIT_S = 60.0
Scenes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def service() -> Iterator[Scheduler]:
    """A scheduler that tests share: they use jobs of their own and leave it alive."""
    with scheduler() as process:
        yield process


def config(target: str, job: str, **other: Any) -> AgentConfig:
    """A job that the service plans as ranks plan on their own, so that whoever planned, the digest is known."""
    return AgentConfig(target=target, job=job, **{"pool": POOL, "policy": "hydra", "fetch_timeout_s": 20.0, **other})


def lengths(iteration: int, rank: int) -> list[int]:
    """What `rank` loads: of very different sizes, and on rank 2 sometimes nothing."""
    generator = np.random.default_rng([iteration, rank])
    count = 0 if rank == 2 and iteration % 2 else 5
    return np.exp(generator.uniform(0, np.log(1500), count)).astype(int).clip(1).tolist()


def digest(iteration: int, **other: Any) -> str:
    """The plan of the iteration, made here."""
    batch = Batch([length for rank in range(RANKS) for length in lengths(iteration, rank)])
    return plan_iteration(batch, POOL, policy="hydra", **other).digest


def meet(folder: str, word: str) -> None:
    """Say `word` to whoever waits for it in another process."""
    Path(folder, word).touch()


def wait_for(folder: str, word: str) -> None:
    until(Path(folder, word).exists)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def group() -> dist.ProcessGroup:
    return dist.new_group(range(dist.get_world_size()), backend="gloo")


def step(agent: PlanAgent, rank: int, iteration: int) -> PlanStep:
    agent.submit(iteration, lengths(iteration, rank))
    return agent.plan(iteration)


def timing_of(done: PlanStep, rank: int) -> Timing:
    return Timing(
        iteration=done.iteration,
        rank=rank,
        iteration_s=0.5,
        plan_wait_s=done.wait_s,
        origin=done.origin,
        fallback_reason=done.reason,
        digest=done.slice.digest,
    )


def told(steps: list[PlanStep]) -> list[tuple[str, str, str]]:
    return [(step.slice.digest, step.origin.value, step.reason) for step in steps]


class Wrapped(ServiceSource):
    """The service's source, through which a test interferes on one rank."""

    def __init__(self, config: AgentConfig, rank: int) -> None:
        self.client = PlannerClient(config.target)
        super().__init__(Session(self.client, config), rank)


class Withholding(Wrapped):
    """Keeps this rank's lengths of some iterations from the service, so that everybody's fetch parks there."""

    def __init__(self, config: AgentConfig, rank: int, withheld: set[int], parked: Callable[[], None]) -> None:
        super().__init__(config, rank)
        self.withheld, self.parked = withheld, parked

    def submit(self, iteration: int, lengths: npt.NDArray[np.int64]) -> None:
        if iteration not in self.withheld:
            super().submit(iteration, lengths)

    def fetch(self, iteration: int, timeout_s: float) -> FetchedPlan:
        if iteration in self.withheld:
            self.parked()
        return super().fetch(iteration, timeout_s)


class Diverging(Wrapped):
    """Brings a plan that is valid, and made from the same lengths, but another one."""

    def fetch(self, iteration: int, timeout_s: float) -> FetchedPlan:
        super().fetch(iteration, timeout_s)
        shards = [lengths(iteration, rank) for rank in range(RANKS)]
        batch = Batch([length for shard in shards for length in shard])
        plan = plan_iteration(batch, POOL, policy="hydra", cost=CostModel(theta=1e-9))
        return FetchedPlan(slice_plan(plan, batch, [len(shard) for shard in shards], [self._rank]), 0)


def _killed_and_restarted(rank: int, target: str, folder: str) -> Any:
    settings = config(target, "restarted", fetch_timeout_s=8.0)
    source = Withholding(settings, rank, {9} if rank == 3 else set(), lambda: meet(folder, "parked"))
    with PlanAgent(settings, rank, group(), source=source) as agent:
        # As a loader that runs ahead; iterations start where a checkpoint ended.
        for iteration in (7, 8):
            agent.submit(iteration, lengths(iteration, rank))
        until(lambda: agent.statistics().served == 2)  # before any step asks
        steps = [agent.plan(7), agent.plan(8)]
        steps.append(step(agent, rank, 9))  # killed while every rank's fetch is parked
        steps.append(step(agent, rank, 10))
        for done in steps:
            agent.report(timing_of(done, rank))
        meet(folder, f"alone-{rank}")
        wait_for(folder, "restarted")
        until(lambda: agent.statistics().reports_sent == 4)
        iteration, end = 10, time.monotonic() + WAIT_S
        while steps[-1].origin is PlanOrigin.LOCAL and time.monotonic() < end:
            iteration += 1
            steps.append(step(agent, rank, iteration))
            time.sleep(0.1)
        counted = agent.statistics()
    source.client.close()
    return told(steps), counted.served, counted.fallbacks


@pytest.mark.slow
def test_a_scheduler_killed_while_fetches_are_parked_costs_local_plans_and_is_used_again_after_its_restart(
    tmp_path: Path,
) -> None:
    with scheduler() as service, ThreadPoolExecutor(1) as background:
        running = background.submit(run_ranks, RANKS, _killed_and_restarted, service.grpc, str(tmp_path))
        wait_for(str(tmp_path), "parked")
        time.sleep(0.3)
        service.kill()
        for rank in range(RANKS):
            wait_for(str(tmp_path), f"alone-{rank}")
        service.start()
        meet(str(tmp_path), "restarted")
        results = running.result(timeout=120)
        fallback = httpx.get(f"http://{service.http}/api/v1/jobs/restarted/iterations/9").json()

    steps, served, fallbacks = results[0]
    assert all(result == results[0] for result in results)
    origins = [origin for _, origin, _ in steps]
    assert origins[:4] == ["service", "service", "local", "local"]
    assert origins[-1] == "service"
    # Whoever planned, it is the plan that this process makes of the same lengths.
    assert [found for found, _, _ in steps] == [digest(iteration) for iteration in range(7, 7 + len(steps))]
    assert "ranks 0–3 cannot reach the scheduler" in steps[2][2]
    assert (served, fallbacks) == (origins.count("service"), origins.count("local"))
    # Telemetry outlives the restart too: the new process hears of the fallbacks that it was not there for.
    assert fallback["origin"] == "local"
    assert fallback["fallback_reason"] == steps[2][2]


def _without_scheduler(rank: int, target: str) -> Any:
    settings = config(target, "alone", policy="", fetch_timeout_s=1.0, call_timeout_s=0.5)
    with PlanAgent(settings, rank, group()) as agent:
        for iteration in range(6):
            agent.submit(iteration, lengths(iteration, rank))
        steps = [agent.plan(iteration) for iteration in range(6)]
        agent.report(Timing(iteration=0, rank=rank, iteration_s=1.0))
        agent.close(timeout_s=0.2)
    return told(steps), agent.statistics()


def test_without_a_scheduler_all_ranks_make_the_same_plans_by_the_policy_for_that(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
    for steps, counted in run_ranks(RANKS, _without_scheduler, nobody):
        assert [found for found, _, _ in steps] == [digest(iteration) for iteration in range(6)]
        assert {origin for _, origin, _ in steps} == {"local"}
        assert {reason for _, _, reason in steps} == {"ranks 0–3 cannot reach the scheduler"}
        assert (counted.served, counted.fallbacks) == (0, 6)
        assert (counted.reports_sent, counted.reports_dropped) == (0, 1)


def _one_is_slow(rank: int, target: str) -> Any:
    with PlanAgent(config(target, "slow", fetch_timeout_s=5.0), rank, group()) as agent:
        if rank == 1:
            time.sleep(7)
        return told([step(agent, rank, iteration) for iteration in (0, 1)])


def test_a_slow_loader_delays_the_plan_and_is_no_reason_to_fall_back(scenes: Scenes) -> None:
    for steps in scenes["slow"]:
        assert steps == [(digest(0), "service", ""), (digest(1), "service", "")]


def _one_diverges(rank: int, target: str) -> Any:
    settings = config(target, "diverging")
    source = Diverging(settings, rank) if rank == 2 else None
    with PlanAgent(settings, rank, group(), source=source) as agent:
        return told([step(agent, rank, iteration) for iteration in (4, 5)])


def test_different_plans_on_the_ranks_are_noticed_and_none_of_them_is_used(scenes: Scenes) -> None:
    other = digest(4, cost=CostModel(theta=1e-9))
    for steps in scenes["diverging"]:
        assert [(found, origin) for found, origin, _ in steps] == [(digest(4), "local"), (digest(5), "local")]
        assert steps[0][2] == f"the ranks hold different plans: {digest(4)} on ranks 0, 1, 3; {other} on rank 2"


def _withheld_for_good(rank: int, target: str) -> Any:
    settings = config(target, "withheld", fetch_timeout_s=5.0)
    source = Withholding(settings, rank, {0} if rank == 0 else set(), lambda: None)
    with PlanAgent(settings, rank, group(), source=source) as agent:
        return told([step(agent, rank, iteration) for iteration in (0, 1)])


def test_a_shard_that_never_reaches_the_scheduler_costs_one_local_plan(scenes: Scenes) -> None:
    for steps in scenes["withheld"]:
        assert steps == [
            (digest(0), "local", "ranks 0–3 got no plan from the scheduler in time"),
            (digest(1), "service", ""),
        ]


STAGES = Pool(ranks=2, token_budget=1024, stages=2)


def _stages_load_different_data(rank: int, target: str) -> Any:
    """Pool ranks 0 and 1, twice; the second stage's rank 1 has read another file."""
    with PlanAgent(config(target, "apart", pool=STAGES), rank % 2, group()) as agent:
        first = told([step(agent, rank % 2, 0)])
        agent.submit(1, [77] if rank == 3 else lengths(1, rank % 2))
        with pytest.raises(HydraCpError) as error:
            agent.plan(1)
        return first, error.value.reason, str(error.value)


def test_stages_that_load_different_data_get_an_error_instead_of_a_plan(scenes: Scenes) -> None:
    assert all(first == scenes["apart"][0][0] for first, _, _ in scenes["apart"])
    assert scenes["apart"][0][0][0][1] == "service"
    for _, reason, words in scenes["apart"]:
        assert reason is Reason.RANKS_DISAGREE
        assert "the same sequences as others of its pool rank" in words
    assert "sequences than the 1 that rank 1 submitted" in scenes["apart"][3][2]


def _errors(rank: int, target: str) -> Any:
    caught = []
    with PlanAgent(config(target, "wrong"), rank, group()) as agent:
        agent.submit(0, [5, RANKS * 512 + 1] if rank == 1 else [7])
        agent.submit(1, [])
        agent.submit(2, lengths(2, rank))
        for iteration in (0, 1):
            with pytest.raises(HydraCpError) as error:
                agent.plan(iteration)
            caught.append((error.value.reason, error.value.sequence))
        found = told([agent.plan(2)])
        for wrong in (lambda: agent.plan(2), lambda: agent.plan(77)):
            with pytest.raises(InvalidInputError, match="submit"):
                wrong()
        with pytest.raises(InvalidInputError, match="length 0"):
            agent.submit(3, [0])
        agent.submit(2, lengths(2, rank))  # again, as after a rewind
        with pytest.raises(InvalidInputError, match="submitted already"):
            agent.submit(2, lengths(2, rank))
        return caught, found == told([agent.plan(2)])


def test_a_batch_that_cannot_be_planned_is_the_same_error_on_every_rank_and_the_next_one_is_planned(
    scenes: Scenes,
) -> None:
    for caught, again in scenes["wrong"]:
        assert caught == [(Reason.SEQUENCE_TOO_LONG, 2), (Reason.EMPTY_BATCH, None)]
        assert again


def _fenced(rank: int, target: str) -> Any:
    with PlanAgent(config(target, "fenced", loader_shards=1), rank, group()) as agent:
        agent.submit(0, [4, 700] if rank == 0 else [])
        first = agent.plan(0).origin.value
        if rank == 0:
            client = PlannerClient(target)
            client.register_job(
                "fenced", 1, POOL, policy="hydra", cost=CostModel(), cap=None, loader_shards=4, timeout_s=5
            )
            client.close()
        else:
            with pytest.raises(InvalidInputError, match="loader_shards 1"):
                agent.submit(1, [4])
        dist.barrier()
        agent.submit(1, [4, 700] if rank == 0 else [])
        with pytest.raises(HydraCpError) as error:
            agent.plan(1)
        return first, error.value.reason


def test_a_superseded_attempt_stops_on_every_rank_instead_of_planning_on(scenes: Scenes) -> None:
    assert scenes["fenced"] == [("service", Reason.ATTEMPT_FENCED)] * RANKS


def _one_hangs(rank: int, target: str) -> Any:
    settings = config(target, "hanging", fetch_timeout_s=5.0, call_timeout_s=0.5, agreement_timeout_s=8.0)
    with PlanAgent(settings, rank, group()) as agent:
        step(agent, rank, 0)
        if rank == 3:
            dist.barrier()
            return None
        agent.submit(1, lengths(1, rank))
        with pytest.raises(HydraCpError) as error:
            agent.plan(1)
        agent.submit(2, lengths(2, rank))
        with pytest.raises(HydraCpError):
            agent.plan(2)
        dist.barrier()
        return error.value.reason, str(error.value)


def test_a_rank_that_hangs_is_an_error_that_says_what_was_waited_for(service: Scheduler) -> None:
    *others, _ = run_ranks(RANKS, _one_hangs, service.grpc)
    for reason, words in others:
        assert reason is Reason.RANKS_DISAGREE
        for part in ("within 8 s", "waiting for the other ranks' lengths", "own plan none", "[1]", "plan_timeout_s"):
            assert part in words


SCENES = {
    "slow": _one_is_slow,
    "diverging": _one_diverges,
    "withheld": _withheld_for_good,
    "wrong": _errors,
    "apart": _stages_load_different_data,
    "fenced": _fenced,
}


def _play(rank: int, target: str) -> dict[str, Any]:
    return {name: scene(rank, target) for name, scene in SCENES.items()}


@pytest.fixture(scope="module")
def scenes(service: Scheduler) -> Scenes:
    """What each rank told of each scene: the ranks start once for all of them, with a job per scene."""
    ranks = run_ranks(RANKS, _play, service.grpc, timeout_s=200)
    return {name: [told[name] for told in ranks] for name in SCENES}


POOL_OF_ONE = dataclasses.replace(POOL, ranks=1, ep=1, token_budget=4096)


def _in_child(agent: PlanAgent) -> None:
    for use in (lambda: agent.submit(0, [1]), lambda: agent.plan(0)):
        try:
            use()
        except ForkedProcessError:
            continue
        os._exit(3)
    agent.close()


def _forks_while_fetching(rank: int, target: str) -> tuple[list[int | None], int]:
    fork = multiprocessing.get_context("fork")
    children = []
    with PlanAgent(config(target, "forks", pool=POOL_OF_ONE), 0) as agent:
        for iteration in range(200):
            agent.submit(iteration, lengths(iteration, 0))
            if iteration % 10 == 5:
                child = fork.Process(target=_in_child, args=(agent,))
                child.start()
                children.append(child)
            if iteration >= 3:
                agent.plan(iteration - 3)
        for child in children:
            child.join(30)
        codes = [child.exitcode for child in children]
        for child in children:
            child.kill()
        return codes, agent.statistics().served


def test_workers_forked_during_200_fetches_exit_cleanly_and_are_told_not_to_use_the_agent(service: Scheduler) -> None:
    [(codes, served)] = run_ranks(1, _forks_while_fetching, service.grpc)
    assert codes == [0] * 20
    assert served >= 197
