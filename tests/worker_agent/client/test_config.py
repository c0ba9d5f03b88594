"""A configuration that cannot work is refused where it is written, with the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.domain import InvalidInputError, Pool
from worker_agent.client import AgentConfig

POOL = Pool(ranks=4, token_budget=64)


@pytest.mark.parametrize(
    "times",
    [
        {"fetch_timeout_s": 120.0},
        {"call_timeout_s": 11.0},
        {"call_timeout_s": 0.0},
        {"agreement_timeout_s": 150.0},
        {"plan_timeout_s": float("inf")},
        {"fetch_timeout_s": float("nan")},
    ],
)
def test_time_outs_in_the_wrong_order_are_refused_and_the_chain_is_shown(times: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        AgentConfig(target="localhost:1", job="j", pool=POOL, **times)  # type: ignore[arg-type]
    for name in ("call_timeout_s", "fetch_timeout_s", "agreement_timeout_s", "plan_timeout_s", "watchdog"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"loader_shards": 5}, "loader_shards is 5; .* 1 to 4"),
        ({"loader_shards": 0}, "loader_shards is 0"),
        ({"target": ""}, "target is ''"),
        ({"report_queue": 0}, "report_queue is 0"),
    ],
)
def test_what_no_service_could_do_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        AgentConfig(**{"target": "localhost:1", "job": "j", "pool": POOL, **wrong})


def test_every_rank_loads_data_unless_told_otherwise() -> None:
    assert AgentConfig(target="localhost:1", job="j", pool=POOL).shards == 4
    assert AgentConfig(target="localhost:1", job="j", pool=POOL, loader_shards=1).shards == 1
