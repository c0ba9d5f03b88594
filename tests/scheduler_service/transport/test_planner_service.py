"""Every method of hydracp.v1.PlannerService against a real scheduler."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from hydracp.v1 import plan_pb2, planner_pb2

from scheduler_service.domain import Batch, CostModel, Plan, Pool, slice_plan
from scheduler_service.planning import DEFAULT_POLICY, plan_iteration, plan_statistics, verify_plan
from tests.support.planner_client import (
    SMALL_POOL,
    TIMEOUT_S,
    error_info,
    fetch_request,
    planner,
    register,
    submit,
)
from worker_agent.client.codec import pool_message

SHARDS = ([100, 3000, 50], [70, 2000])
LENGTHS = [*SHARDS[0], *SHARDS[1]]
DOMAIN_POOL = Pool(ranks=4, token_budget=4096, stages=2, ep=2)


def plan_batch(stub, **request):  # type: ignore[no-untyped-def]
    return stub.PlanBatch(planner_pb2.PlanBatchRequest(**request), timeout=TIMEOUT_S)


def test_plan_batch_answers_with_plan_statistics_and_certificate(stub):
    answer = plan_batch(stub, lengths=LENGTHS, pool=SMALL_POOL)
    mine = plan_iteration(Batch(LENGTHS), DOMAIN_POOL)
    figures = plan_statistics(mine, Batch(LENGTHS))
    assert answer.plan.digest == mine.digest
    for name in ("microbatch", "start", "degree"):
        np.testing.assert_array_equal(getattr(answer.plan, name), getattr(mine, name))
    assert answer.plan.header.pool == plan_pb2.Pool(
        ranks=4, token_budget=4096, stages=2, ep=2, microbatch_multiple=1, sequence_parallel=1
    )
    assert (answer.plan.header.format, answer.plan.header.policy) == (1, DEFAULT_POLICY)
    assert answer.plan.header.batch_digest == Batch(LENGTHS).digest
    assert answer.statistics.tokens == sum(LENGTHS)
    assert list(answer.statistics.degrees) == list(figures.degrees)
    assert list(answer.statistics.degree_sequences) == list(figures.degree_sequences.values())
    assert answer.statistics.load_max == figures.load_max
    certificate = answer.certificate
    assert certificate.predicted_s == mine.header.predicted_s
    assert certificate.gap == pytest.approx(certificate.predicted_s / certificate.lower_bound_s - 1)


def test_plan_batch_honours_policy_cost_and_cap(stub):
    cost = plan_pb2.CostModel(theta=1e-9, tau=1e-5, overhead=1e-3)
    answer = plan_batch(stub, lengths=LENGTHS, pool=SMALL_POOL, policy="hydra", cost=cost, cap=4)
    mine = plan_iteration(Batch(LENGTHS), DOMAIN_POOL, policy="hydra", cost=CostModel(1e-9, 1e-5, 1e-3), cap=4)
    assert (answer.plan.digest, answer.plan.header.cap, answer.plan.header.cost) == (mine.digest, 4, cost)
    assert plan_batch(stub, lengths=LENGTHS, pool=SMALL_POOL, policy="static_cp").plan.header.policy == "static_cp"


def test_slow_and_excluded_ranks_travel(stub):
    pool = Pool(ranks=4, token_budget=4096, stages=2, ep=2, speeds={1: 0.5, 3: 0})
    answer = plan_batch(stub, lengths=LENGTHS, pool=pool_message(pool))
    assert answer.plan.digest == plan_iteration(Batch(LENGTHS), pool).digest
    assert answer.plan.header.pool.speeds == [
        plan_pb2.RankSpeed(rank=1, speed=0.5),
        plan_pb2.RankSpeed(rank=3, speed=0),
    ]


@pytest.mark.parametrize(
    ("request_", "code", "reason", "words", "sequence"),
    [
        ({"lengths": [5, 7, 0]}, "INVALID_ARGUMENT", "INVALID_LENGTH", ["sequence 2", "length 0"], "2"),
        ({"lengths": [5, -3]}, "INVALID_ARGUMENT", "INVALID_LENGTH", ["sequence 1", "-3"], "1"),
        ({"lengths": []}, "INVALID_ARGUMENT", "EMPTY_BATCH", ["no sequence"], None),
        (
            {"lengths": [5, 99_999]},
            "FAILED_PRECONDITION",
            "SEQUENCE_TOO_LONG",
            ["sequence 1", "99,999", "pool 4", "4096"],
            "1",
        ),
        ({"lengths": [5], "policy": "best"}, "INVALID_ARGUMENT", "UNKNOWN_POLICY", ["'best'", "hydra"], None),
        ({"lengths": [5], "pool": {"ranks": 4}}, "INVALID_ARGUMENT", "INVALID_POOL", ["token_budget"], None),
        (
            {"lengths": [5], "pool": {"ranks": 4, "token_budget": 8, "speeds": [{"rank": 4, "speed": 0}]}},
            "INVALID_ARGUMENT",
            "INVALID_POOL",
            ["rank 4", "0 … 3"],
            None,
        ),
        (
            {"lengths": [5], "pool": {"ranks": 4, "token_budget": 8, "speeds": [{"rank": 2}]}},
            "INVALID_ARGUMENT",
            "INVALID_POOL",
            ["rank 2 without a speed"],
            None,
        ),
        (
            {
                "lengths": [5],
                "pool": {"ranks": 4, "token_budget": 8, "speeds": [{"rank": 3, "speed": 0.5}]},
                "policy": "megatron",
            },
            "FAILED_PRECONDITION",
            "INFEASIBLE",
            ["policy megatron", "hydra or hydra_search"],
            None,
        ),
        ({"lengths": [5], "pool": {}}, "INVALID_ARGUMENT", "INVALID_POOL", ["ranks is 0"], None),
        (
            {"lengths": [5], "pool": {"ranks": 6, "token_budget": 8, "ep": 4}},
            "INVALID_ARGUMENT",
            "INVALID_POOL",
            ["ep 4", "6 ranks"],
            None,
        ),
        ({"lengths": [5], "cost": {"theta": -1.0}}, "INVALID_ARGUMENT", "INVALID_COST_MODEL", ["theta", "-1.0"], None),
        (
            {"lengths": [5], "cost": {"theta": 1e308}},
            "INVALID_ARGUMENT",
            "INVALID_COST_MODEL",
            ["theta", "1e+308"],
            None,
        ),
        ({"lengths": [5], "policy": "x" * 100_000}, "INVALID_ARGUMENT", "UNKNOWN_POLICY", ["'xxx", "…"], None),
        ({"lengths": [5], "policy": "€" * 100_000}, "INVALID_ARGUMENT", "UNKNOWN_POLICY", ["'€€€", "…"], None),
        ({"lengths": [5], "cap": -4}, "INVALID_ARGUMENT", "INVALID_ARGUMENT", ["cap", "-4"], None),
    ],
)
def test_errors_name_the_thing_and_carry_a_reason(stub, request_, code, reason, words, sequence):
    with pytest.raises(grpc.RpcError) as caught:
        plan_batch(stub, **{"pool": SMALL_POOL, **request_})
    error = caught.value
    assert error.code().name == code
    for word in words:
        assert word in error.details()
    expected = error_details_pb2.ErrorInfo(domain="hydracp", reason=reason)
    if sequence is not None:
        expected.metadata["sequence"] = sequence
    assert error_info(error) == expected


def test_a_job_from_registration_to_its_slices(stub, job):
    registered = stub.RegisterJob(
        planner_pb2.RegisterJobRequest(job=job, pool=SMALL_POOL, loader_shards=2, plan_formats=[1, 2]),
        timeout=TIMEOUT_S,
    )
    assert (registered.plan_format, registered.window, registered.policy) == (1, 8, DEFAULT_POLICY)
    assert registered.cost.theta == CostModel().theta
    epoch = registered.epoch
    assert register(stub, job) == epoch, "registering is idempotent"
    answer = submit(stub, job, epoch, 3, SHARDS)
    assert answer.missing_shards == 0
    plan = plan_iteration(Batch(LENGTHS), DOMAIN_POOL)
    for ranks in ([0], [1, 3], []):
        fetched = stub.FetchPlan(fetch_request(job, epoch, 3, ranks), timeout=TIMEOUT_S)
        assert fetched.state == planner_pb2.ITERATION_STATE_READY
        assert fetched.epoch == epoch
        expected = slice_plan(plan, Batch(LENGTHS), (3, 2), ranks or range(4))
        for name in ("ranks", "group_start", "group_offset", "members", "loaded", "loaded_stream_offset"):
            np.testing.assert_array_equal(getattr(fetched.slice, name), getattr(expected, name), err_msg=name)
        assert (fetched.slice.digest, fetched.slice.target) == (plan.digest, plan.header.target)


def test_the_same_slice_is_sent_byte_for_byte(stub, job):
    epoch = register(stub, job)
    submit(stub, job, epoch, 0, SHARDS)
    answers = {
        stub.FetchPlan(fetch_request(job, epoch, 0, [1]), timeout=TIMEOUT_S).SerializeToString() for _ in range(5)
    }
    assert len(answers) == 1


def test_a_fetch_whose_time_is_up_says_where_the_iteration_stands(stub, job):
    epoch = register(stub, job)
    stub.SubmitLengths(
        planner_pb2.SubmitLengthsRequest(job=job, epoch=epoch, iteration=0, shard=1, lengths=[5]), timeout=TIMEOUT_S
    )
    answer = stub.FetchPlan(fetch_request(job, epoch, 0, [0], wait_s=0), timeout=TIMEOUT_S)
    assert (answer.state, answer.missing_shards) == (planner_pb2.ITERATION_STATE_COLLECTING, 1)
    assert not answer.HasField("slice")


def test_a_plan_that_failed_is_an_error_of_the_fetch(stub, job):
    epoch = register(stub, job)
    submit(stub, job, epoch, 0, ([5], [6, 99_999]))
    with pytest.raises(grpc.RpcError) as caught:
        stub.FetchPlan(fetch_request(job, epoch, 0, [0]), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error_info(caught.value).reason == "SEQUENCE_TOO_LONG"
    assert error_info(caught.value).metadata["sequence"] == "2"


def test_wrong_ranks_are_refused_by_name_and_right_ones_still_served(stub, job):
    epoch = register(stub, job)
    submit(stub, job, epoch, 0, SHARDS)
    with pytest.raises(grpc.RpcError, match=r"ranks \[4\] are not all in 0 … 3") as caught:
        stub.FetchPlan(fetch_request(job, epoch, 0, [4]), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert stub.FetchPlan(fetch_request(job, epoch, 0, [3]), timeout=TIMEOUT_S).HasField("slice")


def test_conflicts_fences_and_unknown_names_have_their_codes(stub, job):
    def code_and_reason(call, request):  # type: ignore[no-untyped-def]
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=TIMEOUT_S)
        return caught.value.code().name, error_info(caught.value).reason

    shard = planner_pb2.SubmitLengthsRequest(job=job, epoch="?", iteration=0, shard=0, lengths=[5])
    assert code_and_reason(stub.SubmitLengths, shard) == ("NOT_FOUND", "UNKNOWN_JOB")
    epoch = register(stub, job)
    assert code_and_reason(stub.SubmitLengths, shard) == ("FAILED_PRECONDITION", "STALE_EPOCH")
    run = epoch.partition(".")[2]
    for nonsense in ("²", "9" * 5000, ""):
        shard.epoch = f"{nonsense}.{run}"
        assert code_and_reason(stub.SubmitLengths, shard) == ("FAILED_PRECONDITION", "STALE_EPOCH")
    shard.epoch = epoch
    stub.SubmitLengths(shard, timeout=TIMEOUT_S)
    shard.lengths[:] = [6]
    assert code_and_reason(stub.SubmitLengths, shard) == ("ALREADY_EXISTS", "SHARD_CONFLICT")
    other = planner_pb2.RegisterJobRequest(job=job, pool=SMALL_POOL, loader_shards=3)
    assert code_and_reason(stub.RegisterJob, other) == ("ALREADY_EXISTS", "JOB_CONFLICT")
    register(stub, job, attempt=1)
    assert code_and_reason(stub.SubmitLengths, shard) == ("FAILED_PRECONDITION", "ATTEMPT_FENCED")
    read = planner_pb2.StreamPlanRequest(job=job, iteration=9)
    assert code_and_reason(lambda *a, **k: list(stub.StreamPlan(*a, **k)), read) == ("NOT_FOUND", "UNKNOWN_ITERATION")
    late = planner_pb2.ReportTimingsRequest(job=job, epoch=epoch)
    assert code_and_reason(stub.ReportTimings, late) == ("FAILED_PRECONDITION", "ATTEMPT_FENCED")


def test_bytes_that_are_no_message_are_refused_by_name(service):
    with grpc.insecure_channel(service.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/hydracp.v1.PlannerService/PlanBatch")(b"\xff\xff", timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "is no hydracp.v1.PlanBatchRequest" in caught.value.details()


def test_a_cap_that_no_plan_can_have_is_refused_at_registration(stub, job):
    with pytest.raises(grpc.RpcError, match=r"cap 3 is no degree of its pool; choose one of 1, 2, 4"):
        register(stub, job, cap=3)


def test_a_stream_of_a_later_version_is_refused(stub, job):
    epoch = register(stub, job)
    request = fetch_request(job, epoch, 0)
    request.stream = 17
    with pytest.raises(grpc.RpcError, match="stream 17 is not known"):
        stub.FetchPlan(request, timeout=TIMEOUT_S)


def test_timings_make_an_iteration_executed(stub, job):
    epoch = register(stub, job)
    submit(stub, job, epoch, 0, SHARDS)
    stub.FetchPlan(fetch_request(job, epoch, 0, [0]), timeout=TIMEOUT_S)
    timings = [
        planner_pb2.IterationTiming(
            iteration=0, rank=rank, iteration_s=1 + rank, origin=planner_pb2.PLAN_ORIGIN_SERVICE, loss=3.5
        )
        for rank in range(4)
    ]
    stub.ReportTimings(planner_pb2.ReportTimingsRequest(job=job, epoch=epoch, timings=timings), timeout=TIMEOUT_S)
    fetched = stub.FetchPlan(fetch_request(job, epoch, 0, [0]), timeout=TIMEOUT_S)
    assert fetched.state == planner_pb2.ITERATION_STATE_EXECUTED
    assert fetched.HasField("slice")


def test_a_hundred_thousand_sequences_by_both_ways(service, job):
    """The streamed pieces pass a client that keeps gRPC's default limit of 4 MiB."""
    pool = plan_pb2.Pool(ranks=64, token_budget=8192, stages=4)
    lengths = np.minimum(np.random.default_rng(7).lognormal(6.5, 1.3, 100_000).astype(int) + 1, 200_000)
    with planner(service.grpc) as stub:
        whole = plan_batch(stub, lengths=lengths.tolist(), pool=pool)
        epoch = register(stub, job, shards=4, pool=pool)
        submit(stub, job, epoch, 0, np.array_split(lengths, 4))
        fetched = stub.FetchPlan(fetch_request(job, epoch, 0, [0]), timeout=TIMEOUT_S)
    assert fetched.slice.digest == whole.plan.digest
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(service.grpc, options=options) as channel:
        from hydracp.v1.planner_pb2_grpc import PlannerServiceStub

        request = planner_pb2.StreamPlanRequest(job=job, epoch=epoch, piece_sequences=30_000)
        pieces = list(PlannerServiceStub(channel).StreamPlan(request, timeout=TIMEOUT_S))
    assert [piece.first for piece in pieces] == [0, 30_000, 60_000, 90_000]
    columns = [np.concatenate([getattr(p.plan, name) for p in pieces]) for name in ("microbatch", "start", "degree")]
    batch = Batch(np.concatenate([piece.lengths for piece in pieces]))
    np.testing.assert_array_equal(batch.lengths, lengths)
    mine = plan_iteration(batch, Pool(ranks=64, token_budget=8192, stages=4))
    streamed = Plan(*columns, header=mine.header)
    assert streamed.digest == whole.plan.digest == pieces[0].plan.digest
    verify_plan(streamed, batch)
