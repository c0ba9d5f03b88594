"""The client against a real scheduler: deadlines, reasons, forks, proxies."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from hydracp.v1 import planner_pb2, planner_pb2_grpc

from scheduler_service.domain import Batch, CostModel, HydraCpError, Pool, Reason, slice_plan
from scheduler_service.planning import plan_iteration
from tests.support.ranks import run_ranks
from tests.support.scheduler import Scheduler, scheduler
from worker_agent.client import ForkedProcessError, PlannerClient
from worker_agent.client.planner_client import Registration

POOL = Pool(ranks=4, token_budget=512, heads=2, node=2)
LENGTHS = [[300, 5], [], [1500], [17, 40, 2]]


@pytest.fixture(scope="module")
def service() -> Iterator[Scheduler]:
    with scheduler() as process:
        yield process


@pytest.fixture
def client(service: Scheduler) -> Iterator[PlannerClient]:
    client = PlannerClient(service.grpc)
    yield client
    client.close()


def register(
    client: PlannerClient, job: str, attempt: int = 0, pool: Pool = POOL, policy: str = "hydra"
) -> Registration:
    return client.register_job(
        job, attempt, pool, policy=policy, cost=CostModel(), cap=None, loader_shards=4, timeout_s=5
    )


def test_a_fetched_slice_is_the_slice_of_the_same_plan_made_here(client: PlannerClient) -> None:
    epoch = register(client, "same").epoch
    for shard, lengths in enumerate(LENGTHS):
        client.submit_lengths("same", epoch, 12, shard, np.array(lengths, np.int64), timeout_s=5)
    batch = Batch([length for shard in LENGTHS for length in shard])
    plan = plan_iteration(batch, POOL, policy="hydra")
    for ranks in ([0], [2], [1, 3]):
        fetched = client.fetch_plan("same", epoch, 12, ranks, wait_s=20, timeout_s=25).slice
        assert fetched is not None
        here = slice_plan(plan, batch, [len(shard) for shard in LENGTHS], ranks)
        for name, value in vars(here).items():
            np.testing.assert_array_equal(getattr(fetched, name), value, err_msg=name)
            if isinstance(value, np.ndarray):
                assert getattr(fetched, name).dtype == value.dtype, name


def test_an_iteration_that_lacks_shards_says_how_many(client: PlannerClient) -> None:
    epoch = register(client, "lacking").epoch
    client.submit_lengths("lacking", epoch, 0, 2, np.array([5], np.int64), timeout_s=5)
    fetched = client.fetch_plan("lacking", epoch, 0, [0], wait_s=0.1, timeout_s=5)
    assert fetched.slice is None
    assert fetched.missing_shards == 3


def test_refusals_carry_the_services_reason_and_the_sequence(client: PlannerClient) -> None:
    epoch = register(client, "refused").epoch
    with pytest.raises(HydraCpError) as conflict:
        register(client, "refused", pool=Pool(ranks=4, token_budget=1024))
    assert conflict.value.reason is Reason.JOB_CONFLICT
    with pytest.raises(HydraCpError) as unknown:
        register(client, "other", policy="alphabetical")
    assert unknown.value.reason is Reason.UNKNOWN_POLICY
    with pytest.raises(HydraCpError) as stale:
        client.fetch_plan("refused", "of-another-run", 0, [0], wait_s=1, timeout_s=5)
    assert stale.value.reason is Reason.STALE_EPOCH
    for shard in range(4):
        client.submit_lengths("refused", epoch, 0, shard, np.array([7, 4 * 512 + 1], np.int64), timeout_s=5)
    with pytest.raises(HydraCpError) as too_long:
        client.fetch_plan("refused", epoch, 0, [0], wait_s=20, timeout_s=25)
    assert too_long.value.reason is Reason.SEQUENCE_TOO_LONG
    assert too_long.value.sequence == 1
    register(client, "refused", attempt=1)
    with pytest.raises(HydraCpError) as fenced:
        client.fetch_plan("refused", epoch, 0, [0], wait_s=1, timeout_s=5)
    assert fenced.value.reason is Reason.ATTEMPT_FENCED


def test_a_proxy_in_the_environment_is_ignored(service: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        proxy = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, proxy)
        client = PlannerClient(service.grpc)
        assert register(client, "proxied").epoch
        client.close()
        # The proxy would have been taken: an ordinary channel does not get through.
        with grpc.insecure_channel(service.grpc) as ordinary:
            stub = planner_pb2_grpc.PlannerServiceStub(ordinary)
            with pytest.raises(grpc.RpcError) as caught:
                stub.RegisterJob(planner_pb2.RegisterJobRequest(), timeout=1)
            assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def test_nobody_there_and_nobody_who_answers_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        silent = PlannerClient(f"127.0.0.1:{port}")
        with pytest.raises(HydraCpError) as caught:
            client_call(silent)
        assert caught.value.reason in (Reason.DEADLINE_EXCEEDED, Reason.UNREACHABLE)
        silent.close()
    gone = PlannerClient(f"127.0.0.1:{port}")
    with pytest.raises(HydraCpError, match=f"no connection to the scheduler at 127.0.0.1:{port}") as caught:
        client_call(gone)
    assert caught.value.reason is Reason.UNREACHABLE
    gone.close()


def client_call(client: PlannerClient) -> None:
    client.submit_lengths("job", "epoch", 0, 0, np.array([1], np.int64), timeout_s=1)


def test_a_message_over_the_limit_names_the_setting(service: Scheduler) -> None:
    client = PlannerClient(service.grpc, max_message_bytes=1000)
    with pytest.raises(HydraCpError, match="max_message_bytes") as caught:
        client.submit_lengths("big", "epoch", 0, 0, np.full(5000, 1000), timeout_s=5)
    assert caught.value.reason is Reason.MESSAGE_TOO_LARGE
    client.close()


def test_importing_the_client_turns_grpcs_fork_handlers_off_and_needs_no_torch() -> None:
    script = (
        "import os, sys; import worker_agent.client; "
        "print(os.environ['GRPC_ENABLE_FORK_SUPPORT'], 'grpc' in sys.modules, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["0", "True", "False"]


def test_a_closed_client_says_so(service: Scheduler) -> None:
    client = PlannerClient(service.grpc)
    register(client, "closed")
    client.close()
    with pytest.raises(HydraCpError, match="closed"):
        register(client, "closed")


def _use(client: PlannerClient) -> None:
    try:
        register(client, "forked")
    except ForkedProcessError as error:
        os._exit(0 if error.reason is Reason.FORKED_PROCESS and "child" in str(error) else 3)
    os._exit(4)


def _use_unopened(client: PlannerClient) -> None:
    register(client, "forked")
    client.close()


def _fork(rank: int, target: str) -> tuple[int | None, int | None]:
    """Exit codes of a child that opens its own connection, and of one that uses ours."""
    unopened, client = PlannerClient(target), PlannerClient(target)
    fork = multiprocessing.get_context("fork")
    first = fork.Process(target=_use_unopened, args=(unopened,))
    first.start()
    first.join(30)
    register(client, "forked")
    second = fork.Process(target=_use, args=(client,))
    second.start()
    second.join(30)
    for process in (first, second):
        process.kill()
    client.close()
    return first.exitcode, second.exitcode


def test_a_forked_child_opens_its_own_connection_and_is_refused_its_parents(service: Scheduler) -> None:
    # In a process of its own: no channel may be open before the first fork.
    assert run_ranks(1, _fork, service.grpc) == [(0, 0)]
