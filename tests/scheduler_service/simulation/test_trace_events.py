"""Traces hold every operation, arrow and counter, once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import numpy as np

from scheduler_service.simulation import replay_pipeline
from scheduler_service.simulation.trace_events import trace_events


def test_slowest_median_and_fastest_replica_have_a_lane_for_each_stage() -> None:
    forward = np.ones((5, 3, 4)) * np.arange(1, 6)[:, None, None]
    trace = json.loads(json.dumps(trace_events(replay_pipeline(forward, 2 * forward))))["traceEvents"]
    names = [event["args"]["name"] for event in trace if event["name"] == "process_name"]
    assert [name.split(",")[0] for name in names] == [
        "EP group 4 (slowest",
        "EP group 2 (median",
        "EP group 0 (fastest",
    ]
    kinds = Counter(event["ph"] for event in trace)
    assert kinds["X"] == 3 * 2 * 3 * 4
    assert kinds["s"] == kinds["f"] == 3 * 2 * 2 * 4  # every forward and backward but those of the ends
    assert kinds["C"] == kinds["X"]


def test_operations_of_a_lane_follow_each_other_and_arrows_point_forward_in_time() -> None:
    forward = np.random.default_rng(0).random((1, 4, 6))
    trace = trace_events(replay_pipeline(forward, forward, p2p_latency=0.1))["traceEvents"]
    for stage in range(4):
        lane = sorted((e["ts"], e["dur"]) for e in trace if e["ph"] == "X" and e["tid"] == stage)
        assert all(ts + dur <= later + 1e-6 for (ts, dur), (later, _) in pairwise(lane))
    begins = {event["id"]: event["ts"] for event in trace if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in trace if event["ph"] == "f"}
    assert all(ends[arrow] >= begins[arrow] + 0.1e6 - 1e-6 for arrow in begins)


def test_a_stage_never_holds_more_than_the_stages_behind_it_and_one() -> None:
    forward = np.ones((1, 4, 6))
    trace = trace_events(replay_pipeline(forward, forward))["traceEvents"]
    for stage in range(4):
        held = [e["args"]["microbatches"] for e in trace if e["ph"] == "C" and e["name"].endswith(f"stage {stage}")]
        assert max(held) == 4 - stage
        assert held[-1] == 0
