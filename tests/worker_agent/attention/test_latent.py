"""Attention that gathers latents, against attention written out on one process. Padding is poisoned with NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scheduler_service.domain import InvalidInputError
from tests.support.attention import dense_attention, shard
from tests.support.ranks import run_ranks
from worker_agent.attention import ShardLayout, hybrid_attention, latent_attention
from worker_agent.attention.latent import add_position, expand_latent, latent_is_cheaper
from worker_agent.groups import Group, GroupRegistry

EXACT = 1e-12


@dataclass(frozen=True)
class Latent:
    lengths: tuple[int, ...]
    heads: int = 4
    kv_lora: int = 7
    nope: int = 6
    rope: int = 4
    d_v: int = 5
    dtype: torch.dtype = torch.float64

    @property
    def d_qk(self) -> int:
        return self.nope + self.rope


CASES = tuple(Latent(lengths) for lengths in ((1,), (), (1, 2, 3, 4, 5, 6, 7), (150, 3, 1, 47), (9, 8, 8, 8, 12, 12)))
SHAPES = (4, 2, 1)
"""P_u on four ranks."""


class Streams(NamedTuple):
    """Inputs of the unpadded packed stream, and the gradient of its output; the same on every rank."""

    q: Tensor
    c_kv: Tensor
    k_rope: Tensor
    w_up: Tensor
    dout: Tensor


def streams(case: Latent) -> Streams:
    generator, t = torch.Generator().manual_seed(0), sum(case.lengths)
    shapes = (
        (t, case.heads, case.d_qk),
        (t, case.kv_lora),
        (t, case.rope),
        (case.kv_lora, case.heads * (case.nope + case.d_v)),
        (t, case.heads, case.d_v),
    )
    return Streams(*(torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype) for shape in shapes))


def dense(case: Latent, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Output and gradients of q, c_kv, k_rope and w_up on one process; of the case's inputs, computed in `dtype`."""
    q, c_kv, k_rope, w_up, dout = (x.to(dtype or case.dtype).requires_grad_() for x in streams(case))
    both = (c_kv @ w_up).reshape(len(c_kv), case.heads, case.nope + case.d_v)
    k = torch.cat((both[..., : case.nope], k_rope[:, None].repeat(1, case.heads, 1)), -1)
    out = dense_attention(q, k, both[..., case.nope :], case.lengths, case.d_qk**-0.5, causal=True)
    out.backward(dout.detach())
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in (q, c_kv, k_rope, w_up))]


def through_the_engine(case: Latent, group: Group, *, gathered: bool, padding: float) -> list[Tensor]:
    """The same on this rank: slots, but for w_up."""
    layout = ShardLayout(case.lengths, group.ulysses, group.ring, group.rank)
    given = streams(case)
    q, c_kv, k_rope = (shard(x, layout, padding).requires_grad_() for x in given[:3])
    w_up = given.w_up.requires_grad_()
    if gathered:
        out = latent_attention(q, c_kv, k_rope, w_up, layout, group, deterministic=True)
    else:
        k_nope, v = expand_latent(c_kv, w_up, case.heads, case.nope)
        out = hybrid_attention(q, add_position(k_nope, k_rope), v, layout, group)
    out.backward(shard(given.dout, layout))
    return [out.detach(), *(x.grad for x in (q, c_kv, k_rope, w_up))]  # type: ignore[misc]


def check_exact(case: Latent, group: Group) -> None:
    layout = ShardLayout(case.lengths, group.ulysses, group.ring, group.rank)
    real = layout.token_index >= 0
    expected = dense(case)
    gathered = through_the_engine(case, group, gathered=True, padding=torch.nan)
    plain = through_the_engine(case, group, gathered=False, padding=0.0)
    for name, ours, theirs, truth in zip(("out", "dq", "dc_kv", "dk_rope"), gathered, plain, expected, strict=False):
        assert (ours[~real] == 0).all(), f"{name}: padding is not 0 in {case} on {group}"
        assert close(ours, theirs), f"{name} is not that of the plain path in {case} on {group}"
        assert close(ours[real], truth[layout.token_index[real]]), f"{name} is off in {case} on {group}"
    by_head = gathered[-1].unflatten(1, (group.ulysses, -1))
    others = [index for index in range(group.ulysses) if index != group.ulysses_index]
    assert (by_head[:, others] == 0).all(), "only this rank's heads"
    for weight_gradient in (gathered[-1], plain[-1]):
        if group.process_group is not None:
            dist.all_reduce(weight_gradient, group=group.process_group)
        assert close(weight_gradient, expected[-1]), f"dw_up is off in {case} on {group}"


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=EXACT, atol=EXACT)


def sent_bytes(case: Latent, group: Group, *, gathered: bool) -> int:
    """Bytes of a forward and a backward together."""
    before = group.counters.snapshot().get("ulysses", 0)
    through_the_engine(case, group, gathered=gathered, padding=0.0)
    return group.counters.snapshot().get("ulysses", 0) - before


LOW = Latent((150, 3, 1, 47), dtype=torch.bfloat16)


def repeats(group: Group) -> bool:
    first, second = (through_the_engine(LOW, group, gathered=True, padding=torch.nan) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def squared_errors(group: Group) -> Tensor:
    layout = ShardLayout(LOW.lengths, group.ulysses, group.ring, group.rank)
    real, index = layout.token_index >= 0, layout.token_index[layout.token_index >= 0]
    found = through_the_engine(LOW, group, gathered=True, padding=torch.nan)
    truth = dense(LOW, torch.float64)  # of the inputs as they are after rounding to bf16
    return torch.stack([(a[real].double() - b[index]).square().sum() for a, b in zip(found[:4], truth, strict=False)])


WIDE = {kv_lora: Latent((64, 32), kv_lora=kv_lora) for kv_lora in (10, 11, 12, 25, 26, 27)}
"""On two inner ranks and on four, either side of the width from which latents are more to send, and at it."""
NARROW = {dtype: Latent((64, 32), dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}


class Found(NamedTuple):
    """What a rank has to tell."""

    checked: int
    """Cases that were exact, by group."""
    by_dtype: dict[tuple[int, torch.dtype], int]
    """Bytes sent, by P_u and dtype."""
    repeats: list[bool]
    """Whether a second run in bf16 gave the same to the bit, by group."""
    squared_errors: dict[int, Tensor]
    """In bf16, of output and the gradients of q, c_kv and k_rope, in this rank's slots, by P_u."""
    both_paths: dict[tuple[int, int], tuple[int, int]]
    """Bytes sent with gathered latents and without, by P_u and kv_lora."""


def on_four_ranks(rank: int) -> Found:
    registry = GroupRegistry()
    groups = [registry.group(0, 4, ulysses) for ulysses in SHAPES]
    checked = 0
    for group in (*groups, registry.group(rank // 2 * 2, 2), registry.group(rank, 1)):
        for case in CASES:
            check_exact(case, group)
            checked += 1
    return Found(
        checked,
        {
            (group.ulysses, dtype): sent_bytes(case, group, gathered=True)
            for group in groups
            for dtype, case in NARROW.items()
        },
        [repeats(group) for group in groups],
        {group.ulysses: squared_errors(group) for group in groups},
        {
            (group.ulysses, kv_lora): (sent_bytes(case, group, gathered=True), sent_bytes(case, group, gathered=False))
            for group in groups
            for kv_lora, case in WIDE.items()
        },
    )


@pytest.fixture(scope="module")
def by_rank() -> list[Found]:
    return run_ranks(4, on_four_ranks)


def test_equals_the_plain_path_and_one_process_on_every_shape(by_rank: list[Found]) -> None:
    assert [found.checked for found in by_rank] == [5 * len(CASES)] * 4


def test_deterministic_runs_are_equal_to_the_bit(by_rank: list[Found]) -> None:
    assert all(all(found.repeats) for found in by_rank)


def test_the_error_in_bf16_is_near_that_of_one_process_whatever_the_cut(by_rank: list[Found]) -> None:
    truth = dense(LOW, torch.float64)
    alone = torch.stack([(a.double() - b).norm() for a, b in zip(dense(LOW)[:4], truth, strict=False)])
    for ulysses in SHAPES:
        error = sum(found.squared_errors[ulysses] for found in by_rank).sqrt()  # type: ignore[union-attr]  # no empty sum
        assert (error <= 2 * alone).all(), f"{error} on {ulysses} inner ranks, {alone} on one process"


def test_the_bytes_sent_are_those_of_the_formula(by_rank: list[Found]) -> None:
    for found in by_rank:
        for (ulysses, dtype), sent in found.by_dtype.items():
            case = NARROW[dtype]
            t, e = sum(case.lengths) // 4, dtype.itemsize
            latents = (ulysses - 1) * t * (case.kv_lora + case.rope) * e
            queries_and_outputs = (ulysses - 1) * t * case.heads * (case.d_qk + case.d_v) * e // ulysses
            assert sent == 2 * (latents + queries_and_outputs), "forward, and as much backward"


def test_the_choice_is_the_path_that_sends_fewer_bytes(by_rank: list[Found]) -> None:
    choices = set()
    for found in by_rank:
        for (ulysses, kv_lora), (gathered, plain) in found.both_paths.items():
            case = WIDE[kv_lora]
            choice = latent_is_cheaper(ulysses, case.heads, kv_lora + case.rope, case.d_qk, case.d_v)
            assert choice == (gathered < plain), (ulysses, kv_lora)
            choices.add((ulysses, kv_lora, choice))
    assert {(2, 25, True), (2, 26, False), (4, 10, True), (4, 11, False), (1, 10, False)} <= choices


def test_the_choice_for_a_model_of_128_heads() -> None:
    """kv_lora 512, rope 64, head widths 192 and 128, as in DeepSeek-V3: 8.9 times fewer bytes on 8 ranks."""
    choices = [latent_is_cheaper(ulysses, 128, 512 + 64, 192, 128) for ulysses in (1, 8, 64, 128)]
    assert choices == [False, True, True, False]
    times_fewer = 128 * (192 + 128) / (8 * (512 + 64))
    assert times_fewer == pytest.approx(8.9, abs=0.02)


def test_what_does_not_fit_is_refused_by_name() -> None:
    group, layout = GroupRegistry().group(0, 1), ShardLayout([5], 1, 1, 0)
    q, c_kv, k_rope, w_up = (torch.zeros(*shape) for shape in ((5, 4, 10), (5, 7), (5, 4), (7, 44)))
    latent_attention(q, c_kv, k_rope, w_up, layout, group)
    with pytest.raises(InvalidInputError, match=r"expected \(t, width\) with t = 5"):
        latent_attention(q, c_kv[:4], k_rope, w_up, layout, group)
    for given in (
        (q, c_kv, k_rope, w_up.T),
        (q, c_kv, k_rope, w_up[:, :24]),  # nothing left for the values
        (q, c_kv, k_rope, w_up[:, :43]),
        (q, c_kv, k_rope, w_up.double()),
        (q[..., :3], c_kv, k_rope, w_up),
    ):
        with pytest.raises(InvalidInputError, match=r"w_up \(kv_lora, h·\(nope \+ d_v\)\)"):
            latent_attention(*given, layout, group)
    with pytest.raises(InvalidInputError, match="softmax_scale is"):
        latent_attention(q, c_kv, k_rope, w_up, layout, group, softmax_scale=0.0)
