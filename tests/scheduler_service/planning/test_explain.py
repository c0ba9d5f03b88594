import numpy as np
import pytest

from scheduler_service.domain import Batch, CostModel, InvalidInputError, Pool
from scheduler_service.planning import POLICIES, explain, plan_iteration

POOL = Pool(ranks=2, token_budget=10)


def words(lengths: list[int], sequence: int, pool: Pool = POOL, cap: int | None = None) -> str:
    batch = Batch(lengths)
    return explain(plan_iteration(batch, pool, policy="hydra", cap=cap), batch, sequence)


def test_says_that_a_sequence_opened_a_group_on_free_ranks() -> None:
    assert words([10, 9, 1], 1, cap=1) == (
        "One rank holds its 9 tokens, and its attention load of 81 is within the target of 100. "
        "A free rank was left, so it opened the group on rank 1 of microbatch 0."
    )


def test_says_whom_a_sequence_joined_and_why() -> None:
    assert words([10, 9, 1], 2, cap=1) == (
        "One rank holds its 1 token, and its attention load of 1 is within the target of 100. "
        "No free rank was left. Of the groups of degree 1 with room, the one on rank 1 of microbatch 0, opened by "
        "sequence 1 (9 tokens), had the least load: it joined that."
    )


def test_says_why_a_smaller_degree_would_not_do() -> None:
    pool = Pool(ranks=4, token_budget=20)
    assert words([40, 25, 10], 0, pool, cap=4).startswith(
        "On 2 ranks its 40 tokens make an attention load of 800, over the target of 400; "
    )
    assert words([40, 25, 10], 1, pool, cap=2).startswith("On one rank its 25 tokens pass the budget of 20 per rank; ")


def test_says_what_was_rejected_on_the_way_to_a_larger_group() -> None:
    # Microbatch 1: the 39 on all four ranks takes the 1, for which no rank is free and no smaller group open.
    text = words([40, 39, 1], 2, Pool(ranks=4, token_budget=11), cap=4)
    assert "No free rank was left. No group of degree 1 was open. No group of degree 2 was open." in text
    assert "In microbatch 0, neither free ranks nor a group with room was left when its turn came." in text


def test_counts_what_the_rejected_groups_lacked() -> None:
    # Ranks 0–1 hold the 24, 2–3 the 18, 4 the 12: the 4 finds no token left on rank 4, but six on ranks 2–3.
    text = words([24, 18, 12, 4], 3, Pool(ranks=5, token_budget=12), cap=2)
    assert "Groups of degree 1: 1 open, of which 1 lacked tokens and 0 would have passed the load target." in text
    assert "the one on ranks 2 … 3 of microbatch 0, opened by sequence 1 (18 tokens)" in text


def test_says_how_full_the_ranks_are_where_some_are_slow() -> None:
    batch = Batch([10**7, 5 * 10**6, 5])
    pool = Pool(ranks=2, token_budget=1 << 24, speeds={0: 0.3, 1: 0.3})
    for sequence in range(3):
        text = explain(plan_iteration(batch, pool, policy="hydra"), batch, sequence)
        assert "the fullest ranks of the microbatch have" in text


def test_says_that_no_group_without_an_excluded_rank_was_free() -> None:
    pool = Pool(ranks=8, token_budget=10, speeds={7: 0})  # ranks 6 and 7 are no pair
    assert "No free group of 2 ranks was left." in words([20, 15, 12, 12, 12], 4, pool, cap=4)


def test_says_how_full_the_ranks_are_where_no_load_target_holds_for_all_microbatches() -> None:
    batch = Batch([10, 5, 4, 3, 3])
    plan = plan_iteration(batch, POOL, policy="static_cp", cap=1)
    assert (plan.microbatch.tolist(), plan.start.tolist()) == ([0, 0, 0, 1, 1], [0, 1, 1, 0, 1])
    assert explain(plan, batch, 2) == (
        "Policy static_cp runs its 4 tokens on rank 1 in microbatch 0; the token budget alone asks for degree 1, and "
        "at degree 1 its attention load is 16. With what it shares them with, its ranks have 41; the fullest ranks of "
        "the microbatch have 100."
    )


def test_gives_hydras_reasons_where_the_search_found_nothing_better_than_its_plan() -> None:
    batch = Batch([10, 9, 1])
    plan = plan_iteration(batch, POOL, policy="hydra_search", cost=CostModel(0.0, 0.0, 0.0))
    assert plan.header.target > 0
    assert "is within the target of" in explain(plan, batch, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_has_words_for_every_sequence_of_every_policy(policy: str) -> None:
    batch = Batch(np.random.default_rng(2).integers(1, 4000, 60))
    pool = Pool(ranks=8, token_budget=1024, stages=4)
    plan = plan_iteration(batch, pool, policy=policy, cost=CostModel(theta=1e-5))
    for sequence in range(len(batch)):
        text = explain(plan, batch, sequence)
        assert f"microbatch {plan.microbatch[sequence]}" in text
        assert f"its {batch.lengths[sequence]:,} tokens" in text


def test_an_unknown_sequence_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="sequence 3 is not in this plan; ids run from 0 to 2"):
        words([1, 2, 3], 3)
