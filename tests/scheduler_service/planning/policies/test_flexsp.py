"""FlexSP: programs worked by hand, and plans that are no slower than one degree."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, CostModel, InvalidInputError, Pool
from scheduler_service.planning.feasibility import memory_degree
from scheduler_service.planning.policies import static_cp
from scheduler_service.planning.policies.flexsp import _buckets, _chunks, plan, solve
from scheduler_service.planning.policy import PlanningConfig
from scheduler_service.simulation import forecast
from tests.support.strategies import batches, costs, pools

LINEAR = CostModel(theta=0.0, tau=1.0, overhead=0.0)


def solved(lengths: list[int], pool: Pool, cost: CostModel = LINEAR) -> set[tuple[int, tuple[int, ...]]] | None:
    """Degree and lengths of each group of a microbatch."""
    batch = Batch(lengths)
    groups = solve(np.argsort(-batch.lengths, kind="stable"), batch, pool, cost)
    return groups and {(degree, tuple(sorted(batch.lengths[members].tolist())[::-1])) for degree, members in groups}


def test_the_blaster_cuts_into_chunks_of_about_equal_tokens() -> None:
    lengths = np.array([3, 9, 1, 7, 5])
    order = np.argsort(-lengths)
    assert [lengths[chunk].tolist() for chunk in _chunks(order, lengths, 2)] == [[9, 7], [5, 3, 1]]
    assert [lengths[chunk].tolist() for chunk in _chunks(order, lengths, 3)] == [[9], [7], [5, 3, 1]]
    assert [lengths[chunk].tolist() for chunk in _chunks(order, lengths, 9)] == [[9], [7], [5, 3, 1]]


def test_buckets_add_few_tokens() -> None:
    lengths = np.array([20, 19, 10, 9, 9, 2])
    order = np.arange(6)
    assert [lengths[bucket].tolist() for bucket in _buckets(order, lengths, 3)] == [[20, 19], [10, 9, 9], [2]]
    assert [lengths[bucket].tolist() for bucket in _buckets(order, lengths, 16)] == [[20], [19], [10], [9, 9], [2]]


def test_groups_of_one_rank_save_the_exchange_where_they_balance() -> None:
    # 20 tokens on two ranks are 10 each either way, but only a group of two has to exchange them.
    assert solved([10, 6, 4], Pool(2, 10)) == {(1, (10,)), (1, (6, 4))}


def test_a_long_sequence_gets_the_ranks_that_it_needs_and_the_others_theirs() -> None:
    assert solved([20, 10, 9], Pool(4, 10)) == {(2, (20,)), (1, (10,)), (1, (9,))}


def test_attention_is_spread_where_it_outweighs_the_exchange() -> None:
    # 10² on one rank, beside three of 1², or all on four: 25.75.
    assert solved([10, 1, 1, 1], Pool(4, 16), CostModel(theta=1.0, tau=0.1, overhead=0.0)) == {(4, (10, 1, 1, 1))}


def test_what_does_not_fit_one_microbatch_has_no_groups() -> None:
    assert solved([6, 6, 6], Pool(2, 10, max_degree=1)) is None


def test_where_nothing_is_better_it_is_the_plan_of_one_degree() -> None:
    batch, pool, config = Batch([5, 4, 9, 2, 2]), Pool(4, 10), PlanningConfig(CostModel(0.0, 0.0, 0.0))
    ours, same_degree = plan(batch, pool, config), static_cp.plan(batch, pool, config)
    assert ours.header.policy == "flexsp"
    for column in ("microbatch", "start", "degree"):
        assert getattr(ours, column).tolist() == getattr(same_degree, column).tolist()


def test_pools_beyond_the_size_of_a_program_get_the_plan_of_one_degree() -> None:
    batch, pool, config = Batch(np.arange(1, 400)), Pool(256, 1000), PlanningConfig()
    assert len(set(plan(batch, pool, config).degree.tolist())) == 1


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(InvalidInputError, match=r"hydra-cp\[service\]"):
        plan(Batch([1, 2]), Pool(2, 10), PlanningConfig())


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_it_is_no_slower_than_the_plan_of_one_degree(data: st.DataObject) -> None:
    pool = data.draw(pools(most_ranks=6))
    batch = data.draw(batches(pool, most_sequences=12))
    config = PlanningConfig(data.draw(costs()))
    if memory_degree(batch.longest, pool) is not None:
        ours, same_degree = plan(batch, pool, config), static_cp.plan(batch, pool, config)
        assert forecast(ours, batch).iteration_s <= forecast(same_degree, batch).iteration_s


def test_what_the_solver_prints_is_kept_out_of_standard_output() -> None:
    """HiGHS writes to the file descriptor itself, where a caller may be writing JSON."""
    program = (
        "import ctypes, sys\n"
        "from scheduler_service.planning.policies import flexsp\n"
        "with flexsp._native_output_to_stderr():\n"
        "    ctypes.CDLL(None).printf(b'a note of the solver\\n')\n"
        "print('{}')\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert (found.stdout, found.stderr) == ("{}\n", "a note of the solver\n")
