"""The contract, for every adapter that this machine can run; the others are skipped by name, with the reason."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from scheduler_service.domain import InvalidInputError
from tests.support.attention import dense_attention
from tests.support.varlen import StrictCpuKernel
from worker_agent.attention.kernels import KERNELS, AttentionKernel, describe_kernels, select_kernel
from worker_agent.attention.layout import Segments

CPU = torch.device("cpu")
DEVICES = (CPU, torch.device("cuda", 0)) if torch.cuda.is_available() else (CPU,)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


class Candidate(NamedTuple):
    """A kernel on a device and in a dtype that it does not refuse."""

    kernel: AttentionKernel
    device: torch.device
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.kernel.name}-{self.device.type}-{self.dtype}".replace("torch.", "")


CANDIDATES = [
    Candidate(kernel, device, dtype)
    for kernel in (*KERNELS, StrictCpuKernel())
    for device in DEVICES
    for dtype in TOLERANCE
    if kernel.refusal(device, dtype, 16, 8) is None
]
in_every_dtype = pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
in_the_best_dtype = pytest.mark.parametrize(
    "candidate", list({(c.kernel.name, c.device): c for c in reversed(CANDIDATES)}.values()), ids=str
)
"""Once for each kernel and device, in the most precise dtype that it has."""


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_adapter_is_held_to_the_contract_or_skipped_by_name(kernel: AttentionKernel) -> None:
    if not any(candidate.kernel is kernel for candidate in CANDIDATES):
        pytest.skip(f"{kernel.name} {kernel.refusal(DEVICES[-1], torch.bfloat16, 16, 8)}")


def segments(queries: list[int], keys: list[int]) -> Segments:
    return Segments(np.array(queries, np.int64), np.array(keys, np.int64))


def inputs(
    candidate: Candidate, queries: int, keys: int, heads: int, kv_heads: int, d_qk: int, d_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout; k and v are strided views of one buffer, as the engine passes them."""
    generator = torch.Generator().manual_seed(heads * 100 + kv_heads)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.to(candidate.device, candidate.dtype)

    k, v = normal(keys, kv_heads, d_qk + d_v).split((d_qk, d_v), -1)
    return normal(queries, heads, d_qk), k, v, normal(queries, heads, d_v)


def dense(x: tuple[Tensor, ...], lengths: tuple[int, ...], scale: float, causal: bool) -> list[Tensor]:
    q, k, v, dout = (t.double().cpu() for t in x)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = dense_attention(*leaves, lengths, scale, causal)
    out.backward(dout)
    return [out.detach(), *(t.grad for t in leaves)]


def forward_and_backward(
    candidate: Candidate, x: tuple[Tensor, ...], boundaries: Segments, scale: float = 0.3, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, lse, dq, dk, dv."""
    q, k, v, dout = x
    out, lse = candidate.kernel.forward(q, k, v, boundaries, scale=scale, causal=causal)
    grads = candidate.kernel.backward(
        dout, q, k, v, out.to(q.dtype), lse, boundaries, scale=scale, causal=causal, deterministic=True
    )
    return out, lse, *grads


def assert_close(ours: Tensor, expected: Tensor, candidate: Candidate, factor: float = 1) -> None:
    """Relative to the largest expected value, where that is above 1."""
    expected = expected.double().cpu()
    scale = expected.abs().max().clamp(min=1)
    tolerance = factor * TOLERANCE[candidate.dtype]
    torch.testing.assert_close(ours.double().cpu() / scale, expected / scale, rtol=0, atol=tolerance)


@in_every_dtype
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("d_qk", "d_v"), [(8, 8), (12, 8), (8, 16), (12, 16)])
def test_equal_plain_attention_whatever_the_heads_and_their_widths(
    candidate: Candidate, heads: int, kv_heads: int, d_qk: int, d_v: int, causal: bool
) -> None:
    lengths = (1, 37, 5)
    x = inputs(candidate, 43, 43, heads, kv_heads, d_qk, d_v)
    out, _, *grads = forward_and_backward(candidate, x, segments(list(lengths), list(lengths)), causal=causal)
    for ours, expected in zip((out, *grads), dense(x, lengths, 0.3, causal), strict=True):
        assert_close(ours, expected, candidate)


@in_every_dtype
def test_the_log_sum_exp_is_natural_and_by_head(candidate: Candidate) -> None:
    q, k, v, _ = inputs(candidate, 5, 7, 4, 2, 8, 8)
    _, lse = candidate.kernel.forward(q, k, v, segments([5], [7]), scale=0.5, causal=False)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) * 0.5
    assert lse.shape == (4, 5)
    assert lse.dtype == (torch.float64 if candidate.dtype == torch.float64 else torch.float32)
    assert_close(lse, scores.logsumexp(-1), candidate)


@in_every_dtype
def test_blocks_that_get_the_global_output_and_log_sum_exp_add_up_to_the_whole_gradient(candidate: Candidate) -> None:
    x = inputs(candidate, 9, 30, 4, 2, 12, 8)
    q, k, v, dout = x
    out, lse, *whole = forward_and_backward(candidate, x, segments([9], [30]))
    settings = {"scale": 0.3, "causal": False, "deterministic": True}
    parts = [
        candidate.kernel.backward(
            dout, q, k[keys], v[keys], out.to(q.dtype), lse, segments([9], [len(k[keys])]), **settings
        )
        for keys in (slice(0, 11), slice(11, 30))
    ]
    dq = parts[0][0].double() + parts[1][0].double()
    dk, dv = (torch.cat((parts[0][i], parts[1][i])) for i in (1, 2))
    for ours, expected in zip((dq, dk, dv), whole, strict=True):
        assert_close(ours, expected, candidate, factor=2)


@in_every_dtype
def test_sequences_without_keys_or_queries_and_tokens_beyond_the_last_are_never_read(candidate: Candidate) -> None:
    x = inputs(candidate, 6, 6, 2, 1, 8, 8)
    ragged = segments([2, 0, 3], [0, 1, 4])  # and the last query and the last key are in no segment
    lonely_queries, lonely_keys = [0, 1, 5], [0, 5]
    q, k, v, dout = x
    q[lonely_queries] = dout[lonely_queries] = torch.nan
    k[lonely_keys] = v[lonely_keys] = torch.nan
    out, lse, dq, dk, dv = forward_and_backward(candidate, x, ragged)
    assert (lse[:, lonely_queries] == -torch.inf).all()
    assert torch.isfinite(lse[:, 2:5]).all()
    for rows, lonely in ((out, lonely_queries), (dq, lonely_queries), (dk, lonely_keys), (dv, lonely_keys)):
        assert (rows[lonely] == 0).all()
        assert torch.isfinite(rows).all()
    alone = (q[2:5], k[1:5], v[1:5], dout[2:5])
    expected = forward_and_backward(candidate, alone, segments([3], [4]))
    for ours, theirs in zip((out[2:5], lse[:, 2:5], dq[2:5], dk[1:5], dv[1:5]), expected, strict=True):
        assert_close(ours, theirs, candidate)


@in_the_best_dtype
def test_a_block_in_which_nothing_meets_gives_zeros_and_minus_infinity(candidate: Candidate) -> None:
    x = inputs(candidate, 3, 2, 2, 1, 12, 8)
    for nothing in (segments([3, 0], [0, 2]), segments([], [])):
        out, lse, *grads = forward_and_backward(candidate, x, nothing)
        assert out.shape == (3, 2, 8)
        assert lse.shape == (2, 3)
        assert (lse == -torch.inf).all()
        assert [grad.shape for grad in grads] == [(3, 2, 12), (2, 1, 12), (2, 1, 8)]
        assert all((zero == 0).all() for zero in (out, *grads))


@in_the_best_dtype
def test_a_deterministic_backward_is_bit_equal_from_run_to_run(candidate: Candidate) -> None:
    x = inputs(candidate, 700, 700, 4, 2, 16, 16)
    boundaries = segments([300, 400], [300, 400])
    first, second = (forward_and_backward(candidate, x, boundaries, causal=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can be waited for")
@in_the_best_dtype
def test_nothing_waits_for_the_device(candidate: Candidate) -> None:
    if candidate.device.type != "cuda" or candidate.kernel.name == "reference":
        pytest.skip(f"{candidate.kernel.name} on {candidate.device} is no fast path of a GPU")
    x = inputs(candidate, 300, 300, 4, 2, 16, 16)
    forward_and_backward(candidate, x, segments([100, 200], [100, 200]), causal=True)  # loads and compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_and_backward(candidate, x, segments([100, 200], [100, 200]), causal=True)
        forward_and_backward(candidate, x, segments([100, 0, 199], [100, 10, 190]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@in_the_best_dtype
def test_a_sequence_longer_than_a_block_of_keys(candidate: Candidate) -> None:
    x = inputs(candidate, 1301, 1301, 2, 1, 8, 8)
    out, _, *grads = forward_and_backward(candidate, x, segments([1301], [1301]), causal=True)
    for ours, expected in zip((out, *grads), dense(x, (1301,), 0.3, True), strict=True):
        assert_close(ours, expected, candidate)


@in_the_best_dtype
def test_scores_far_beyond_the_range_of_exp_stay_finite(candidate: Candidate) -> None:
    q, k, v, dout = inputs(candidate, 20, 20, 2, 2, 8, 8)
    results = forward_and_backward(candidate, (100 * q, 100 * k, v, dout), segments([20], [20]), 1.0, causal=True)
    assert all(torch.isfinite(x).all() for x in results)


def test_the_fast_kernel_is_chosen_and_a_name_overrides() -> None:
    assert select_kernel(CPU, torch.float32, 192, 128).name == "torch-cpu-flash"
    assert select_kernel(CPU, torch.float32, 192, 128, "reference").name == "reference"


def test_a_kernel_that_cannot_run_says_why() -> None:
    with pytest.raises(InvalidInputError, match=r"torch-cpu-flash has no instance for torch\.float8"):
        select_kernel(CPU, torch.float8_e4m3fn, 8, 8, "torch-cpu-flash")
    with pytest.raises(InvalidInputError, match="there is none called 'nonesuch'"):
        select_kernel(CPU, torch.float32, 8, 8, "nonesuch")
    with pytest.raises(InvalidInputError, match="flash-attn-2 runs on NVIDIA GPUs, the tensors are on cpu"):
        select_kernel(CPU, torch.bfloat16, 128, 128, "flash-attn-2")


def test_the_report_names_every_adapter_its_package_and_what_keeps_it_from_running() -> None:
    reports = {report.name: report for report in describe_kernels(CPU, torch.float32)}
    assert list(reports) == [kernel.name for kernel in KERNELS]
    assert reports["reference"].refusal is None
    assert reports["torch-cpu-flash"].package == f"torch {torch.__version__}"
    assert reports["flash-attn-3"].refusal == "runs on NVIDIA GPUs, the tensors are on cpu"
