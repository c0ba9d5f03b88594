"""The engine on real ranks against plain attention on one process. Padding is poisoned with NaN throughout."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scheduler_service.domain import InvalidInputError
from tests.support.attention import (
    Case,
    dense_attention,
    dense_result,
    group_result,
    layout_of,
    shard,
    streams,
    worst_error,
)
from tests.support.ranks import run_ranks
from worker_agent.attention import ShardLayout, hybrid_attention
from worker_agent.groups import Group, GroupRegistry

EXACT = 1e-12

ALL_PADDING_CHUNK = (9, 8, 8, 8, 12, 12)  # on a ring of two; padded to 12, 8, 8, 8, 12, 12
LENGTHS: tuple[tuple[int, ...], ...] = (
    (1,),  # most ranks hold no token
    (),  # a dummy
    (1, 2, 3, 4, 5, 6, 7),
    (150, 3, 1, 47),
    ALL_PADDING_CHUNK,
)

PLAIN = Case((), heads=8, kv_heads=8)
LATENT = Case((), heads=8, kv_heads=8, d_qk=12, d_v=8)  # widths of keys and values differ, as in MLA
SHARED = Case((), heads=8, kv_heads=2)  # on four Ulysses ranks, fewer KV heads than ranks
HEADS = (
    PLAIN,
    LATENT,
    SHARED,
    Case((), heads=8, kv_heads=4),
    Case((), heads=8, kv_heads=1),
    Case((), heads=8, kv_heads=2, d_qk=4, d_v=8),
    Case((), heads=24, kv_heads=12, d_qk=4, d_v=4),  # on eight Ulysses ranks, three query heads are no whole pairs
)

CASES = (
    *(replace(PLAIN, lengths=lengths) for lengths in LENGTHS),
    *(replace(heads, lengths=lengths) for heads in HEADS[1:] for lengths in LENGTHS[3:]),
    *(replace(SHARED, lengths=lengths, causal=False) for lengths in LENGTHS),
    *(replace(LATENT, lengths=lengths, kernel="reference", scale=0.7) for lengths in LENGTHS[3:]),
    *(replace(PLAIN, lengths=lengths, sequence_parallel=3) for lengths in LENGTHS[1:4]),
)


def exact(rank: int, cuts: tuple[tuple[int, int, int], ...], cases: tuple[Case, ...]) -> int:
    """Check `cases` on every (start, degree, ulysses) that this rank is in; return how many it checked."""
    registry, checked = GroupRegistry(), 0
    for start, degree, ulysses in cuts:
        if start <= rank < start + degree:
            group = registry.group(start, degree, ulysses)
            for case in cases:
                error = worst_error(case, group)
                assert error < EXACT, f"off by {error} in {case} on {group}"
                checked += 1
    return checked


def test_a_group_of_one_needs_no_process_group() -> None:
    assert exact(0, ((0, 1, 1),), CASES) == len(CASES)


@pytest.mark.parametrize(
    ("ranks", "cuts"),
    [
        (2, ((0, 2, 2), (0, 2, 1))),
        (3, ((0, 3, 1),)),
        (4, ((0, 4, 4), (0, 4, 2), (0, 4, 1))),
        (6, ((0, 6, 2),)),
    ],
    ids=["2", "3", "4", "6"],
)
def test_output_and_gradients_equal_one_process(ranks: int, cuts: tuple[tuple[int, int, int], ...]) -> None:
    assert run_ranks(ranks, exact, cuts, CASES) == [len(cuts) * len(CASES)] * ranks


ON_EIGHT_RANKS = ((0, 8, 8), (0, 8, 4), (0, 8, 2), (0, 8, 1))


def test_output_and_gradients_equal_one_process_on_eight_ranks() -> None:
    cases = tuple(case for case in CASES if case.lengths in (ALL_PADDING_CHUNK, (1,), ()))
    assert run_ranks(8, exact, ON_EIGHT_RANKS, cases) == [4 * len(cases)] * 8


def exact_on_long_sequences(rank: int, case: Case, expected: list[npt.NDArray[np.float64]]) -> None:
    registry = GroupRegistry()
    for ulysses in (4, 2, 1):
        error = worst_error(case, registry.group(0, 4, ulysses), tuple(map(torch.from_numpy, expected)))
        assert error < EXACT, f"off by {error} on {ulysses} inner ranks"


def test_lengths_from_1_to_4096_in_one_stream() -> None:
    case = Case((4096, 1, 517, 2, 64), heads=4, kv_heads=2, d_qk=6, d_v=4)
    run_ranks(4, exact_on_long_sequences, case, [x.numpy() for x in dense_result(case)])


def test_698_tokens_on_four_ranks() -> None:
    run_ranks(4, exact, ((0, 4, 4), (0, 4, 2), (0, 4, 1)), (replace(SHARED, lengths=(698,)),))


def groups_at_different_paces(rank: int, seed: int) -> None:
    """Microbatch by microbatch other groups and shapes side by side, every rank delayed at random."""
    registry, plan, pace = GroupRegistry(), random.Random(seed), random.Random(seed + 1 + rank)
    for _ in range(12):
        degree = plan.choice((1, 2, 2, 4))
        for start in range(0, 4, degree):
            ulysses = plan.choice([u for u in (1, 2, 4) if u <= degree])
            lengths = tuple(plan.randint(1, 40) for _ in range(plan.randint(0, 4)))
            if start <= rank < start + degree:
                time.sleep(pace.choice((0, 0, 0.01)))
                assert worst_error(Case(lengths), registry.group(start, degree, ulysses)) < EXACT


def test_groups_side_by_side_with_random_delays_do_not_disturb_each_other() -> None:
    run_ranks(4, groups_at_different_paces, 3)


def repeated_runs(rank: int) -> None:
    registry = GroupRegistry()
    for ulysses in (1, 2, 4):
        case = Case((150, 3, 1, 47), kv_heads=2, dtype=torch.bfloat16)
        group = registry.group(0, 4, ulysses)
        first, second = (group_result(case, group, deterministic=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_deterministic_runs_are_equal_to_the_bit() -> None:
    run_ranks(4, repeated_runs)


RING_SIZES = (1, 2, 4, 8)


def low_precision_errors(rank: int, cases: list[Case]) -> list[list[list[float]]]:
    """By case and ring size: squared errors of output and gradients of this rank's tokens; last on 2 × 4 ranks."""
    registry = GroupRegistry()
    groups = [registry.group(rank - rank % size, size, 1) for size in RING_SIZES]
    return [[squared_errors(case, group) for group in (*groups, registry.group(0, 8, 2))] for case in cases]


def squared_errors(case: Case, group: Group) -> list[float]:
    layout = layout_of(case, group)
    real = layout.token_index >= 0
    return [
        (ours[real].double() - truth[layout.token_index[real]]).square().sum().item()
        for ours, truth in zip(group_result(case, group), truth_of(case), strict=True)
    ]


@cache
def truth_of(case: Case) -> list[Tensor]:
    """Output, dq, dk, dv in fp64 of the inputs as they are after rounding to the case's dtype."""
    q, k, v, dout = (x.double() for x in streams(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = dense_attention(*leaves, case.lengths, case.d_qk**-0.5, case.causal)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]  # backward ran: no gradient is None


def test_low_precision_error_is_flat_in_ring_size_and_below_that_of_plain_attention() -> None:
    """Two blocks round their results, and then their sum is rounded: up to √2 times the error of one block, and no
    more with every further one. Accumulation in bf16 would give 1.3 to 1.5 times as much on a ring of eight as on one
    of two.
    """
    whole = Case((301, 64, 5), causal=False, dtype=torch.bfloat16)
    causal = [Case((301, 64, 5), kv_heads=h_kv, d_qk=12, d_v=8, dtype=torch.bfloat16) for h_kv in (4, 2)]
    cases = [whole, replace(whole, dtype=torch.float32), *causal]
    squares = torch.tensor(run_ranks(8, low_precision_errors, cases))  # rank, case, ring size, tensor
    for number, case in enumerate(cases):
        plain = torch.stack([(a.double() - b).norm() for a, b in zip(dense_result(case), truth_of(case), strict=True)])
        alone, pair, *others = (
            squares[:ranks, number, position].sum(0).sqrt() for position, ranks in enumerate((*RING_SIZES, 8))
        )
        assert (pair <= 2**0.5 * alone).all(), f"{case}: {pair} on two ranks against {alone} alone"
        for error in others:
            assert (error <= 1.1 * pair).all(), f"{case}: {error} on more ranks against {pair} on two"
        assert (torch.stack([alone, pair, *others]) <= 2 * plain).all(), f"{case}: {others} against {plain}"


def checkpointed(rank: int) -> None:
    registry = GroupRegistry()
    for ulysses in (1, 2):
        compare_with_checkpoint(registry.group(0, 2, ulysses))


def compare_with_checkpoint(group: Group) -> None:
    case = Case((50, 3, 9), kv_heads=2)
    layout = layout_of(case, group)
    q, k, v, dout = (shard(x, layout) for x in streams(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hybrid_attention(2 * q, k, v, layout, group)

    plain = layer(*leaves)
    expected = torch.autograd.grad(plain, leaves, dout)
    out = checkpoint(layer, *leaves, use_reentrant=False)
    for ours, theirs in zip(torch.autograd.grad(out, leaves, dout), expected, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    with torch.no_grad():
        assert torch.equal(layer(*leaves), plain)


def test_under_activation_checkpointing_and_without_gradients() -> None:
    run_ranks(2, checkpointed)


def sent_bytes(rank: int, cases: list[Case]) -> list[list[tuple[int, int, dict[str, int], dict[str, int]]]]:
    """For each case and P_u: (P_u, P_r, bytes of the forward, bytes of the backward) of this rank."""
    registry = GroupRegistry()
    return [[sent_bytes_on(registry.group(0, 4, ulysses), case) for ulysses in (1, 2, 4)] for case in cases]


def sent_bytes_on(group: Group, case: Case) -> tuple[int, int, dict[str, int], dict[str, int]]:
    layout = layout_of(case, group)
    q, k, v, dout = (shard(x, layout) for x in streams(case))
    before = group.counters.snapshot()
    out = hybrid_attention(*(x.requires_grad_() for x in (q, k, v)), layout, group)
    between = group.counters.snapshot()
    out.backward(dout)
    after = group.counters.snapshot()
    return group.ulysses, group.ring, difference(between, before), difference(after, between)


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {kind: after.get(kind, 0) - before.get(kind, 0) for kind in ("ulysses", "ring")}


KV_HEADS_SENT = {(8, 8): (8, 8, 8), (8, 2): (2, 2, 4), (8, 1): (1, 2, 4), (24, 12): (12, 12, 12), (12, 6): (6, 6, 12)}
"""h' for P_u = 1, 2, 4, by (h, h_kv). With h = 12, h_kv = 6 and P_u = 4, three query heads do not divide into twos."""


def test_the_bytes_sent_are_those_of_the_formulas() -> None:
    cases = [
        Case((64, 8, 24), heads=h, kv_heads=h_kv, d_qk=12, d_v=8, dtype=dtype)
        for h, h_kv in KV_HEADS_SENT
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    ]
    for results in run_ranks(4, sent_bytes, cases):
        for case, by_cut in zip(cases, results, strict=True):
            for (ulysses, ring, forward, backward), heads_sent in zip(
                by_cut, KV_HEADS_SENT[case.heads, case.kv_heads], strict=True
            ):
                t, e = sum(case.lengths) // 4, case.dtype.itemsize
                kv = heads_sent * (case.d_qk + case.d_v)
                inner = t * e * (case.heads * case.d_qk + kv + case.heads * case.d_v)
                assert forward["ulysses"] == backward["ulysses"] == (ulysses - 1) * inner // ulysses
                assert forward["ring"] == (ring - 1) * t * kv * e
                assert backward["ring"] == (ring - 1) * t * kv * (e + max(e, 4)), "keys, and their gradients in fp32"


def test_what_does_not_fit_is_refused_by_name() -> None:
    group = GroupRegistry().group(0, 1)
    layout = ShardLayout([5], 1, 1, 0)
    x = torch.zeros(5, 4, 8)
    with pytest.raises(InvalidInputError, match="the layout is that of rank 1 of 2 × 1 ranks, the group that of"):
        hybrid_attention(x, x, x, ShardLayout([5], 2, 1, 1), group)
    with pytest.raises(InvalidInputError, match="for a layout of 5 slots"):
        hybrid_attention(x[:4], x[:4], x[:4], layout, group)
    with pytest.raises(InvalidInputError, match="of one dtype"):
        hybrid_attention(x, x, x.double(), layout, group)
    with pytest.raises(InvalidInputError, match="on one device"):
        hybrid_attention(x, x.to("meta"), x.to("meta"), layout, group)
    for q, k, v in ((x[:, :0], x, x), (x, x[:, :0], x[:, :0]), (x[..., :0], x[..., :0], x), (x, x, x[..., :0])):
        with pytest.raises(InvalidInputError, match="heads and widths of 1 or more"):
            hybrid_attention(q, k, v, layout, group)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInputError, match="softmax_scale is"):
            hybrid_attention(x, x, x, layout, group, softmax_scale=scale)
    with pytest.raises(InvalidInputError, match="4 query heads over 3 KV heads"):
        hybrid_attention(x, x[:, :3], x[:, :3], layout, group)
    with pytest.raises(InvalidInputError, match="there is none called"):
        hybrid_attention(x, x, x, layout, group, kernel="nonesuch")
