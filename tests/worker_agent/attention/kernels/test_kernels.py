"""The contract, for every adapter that this machine can run; the others are skipped by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from scheduler_service.domain import InvalidInputError
from tests.support.attention import dense_attention
from worker_agent.attention.kernels import KERNELS, AttentionKernel, select_kernel
from worker_agent.attention.layout import Segments

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@pytest.fixture(params=KERNELS, ids=lambda kernel: kernel.name)
def any_kernel(request: pytest.FixtureRequest) -> AttentionKernel:
    return request.param


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def kernel(any_kernel: AttentionKernel, dtype: torch.dtype) -> AttentionKernel:
    refusal = any_kernel.refusal(DEVICE, dtype, 16, 8)
    if refusal:
        pytest.skip(f"{any_kernel.name} {refusal}")
    return any_kernel


def segments(queries: list[int], keys: list[int]) -> Segments:
    return Segments(np.array(queries, np.int64), np.array(keys, np.int64))


def inputs(
    queries: int, keys: int, heads: int, kv_heads: int, d_qk: int, d_v: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout; k and v are strided views of one buffer, as the engine passes them."""
    generator = torch.Generator().manual_seed(heads * 100 + kv_heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    k, v = normal(keys, kv_heads, d_qk + d_v).split((d_qk, d_v), -1)
    return normal(queries, heads, d_qk), k, v, normal(queries, heads, d_v)


def dense(x: tuple[Tensor, ...], lengths: tuple[int, ...], scale: float, causal: bool) -> list[Tensor]:
    q, k, v, dout = (t.double().cpu() for t in x)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = dense_attention(*leaves, lengths, scale, causal)
    out.backward(dout)
    return [out.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("d_qk", "d_v"), [(8, 8), (12, 8), (8, 16)])
def test_forward_and_backward_equal_plain_attention(
    kernel: AttentionKernel, dtype: torch.dtype, heads: int, kv_heads: int, d_qk: int, d_v: int, causal: bool
) -> None:
    lengths = (1, 37, 5)
    x = inputs(43, 43, heads, kv_heads, d_qk, d_v, dtype)
    q, k, v, dout = x
    same = segments(list(lengths), list(lengths))
    out, lse = kernel.forward(q, k, v, same, scale=0.3, causal=causal)
    grads = kernel.backward(dout, q, k, v, out.to(dtype), lse, same, scale=0.3, causal=causal, deterministic=True)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for ours, expected in zip((out, *grads), dense(x, lengths, 0.3, causal), strict=True):
        scale = expected.abs().max().clamp(min=1)
        torch.testing.assert_close(ours.double().cpu() / scale, expected / scale, rtol=0, atol=TOLERANCE[dtype])


def test_the_log_sum_exp_is_natural_and_by_head(kernel: AttentionKernel, dtype: torch.dtype) -> None:
    q, k, v, _ = inputs(5, 7, 4, 2, 8, 8, dtype)
    _, lse = kernel.forward(q, k, v, segments([5], [7]), scale=0.5, causal=False)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) * 0.5
    assert lse.shape == (4, 5)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=TOLERANCE[dtype])


def test_blocks_that_get_the_global_output_and_log_sum_exp_add_up_to_the_whole_gradient(
    kernel: AttentionKernel, dtype: torch.dtype
) -> None:
    x = inputs(9, 30, 4, 2, 12, 8, dtype)
    q, k, v, dout = x
    out, lse = kernel.forward(q, k, v, segments([9], [30]), scale=0.3, causal=False)
    settings = {"scale": 0.3, "causal": False, "deterministic": True}
    parts = [
        kernel.backward(dout, q, k[keys], v[keys], out.to(dtype), lse, segments([9], [len(k[keys])]), **settings)
        for keys in (slice(0, 11), slice(11, 30))
    ]
    dq = parts[0][0].double() + parts[1][0].double()
    dk, dv = (torch.cat((parts[0][i], parts[1][i])).double() for i in (1, 2))
    whole = kernel.backward(dout, q, k, v, out.to(dtype), lse, segments([9], [30]), **settings)
    for ours, expected in zip((dq, dk, dv), whole, strict=True):
        torch.testing.assert_close(ours, expected.double(), rtol=0, atol=2 * TOLERANCE[dtype])


def test_segments_without_keys_or_queries_give_zeros_and_minus_infinity(
    kernel: AttentionKernel, dtype: torch.dtype
) -> None:
    q, k, v, dout = inputs(6, 5, 2, 1, 8, 8, dtype)
    ragged = segments([2, 0, 3], [0, 1, 4])  # and the last query is in no segment
    out, lse = kernel.forward(q, k, v, ragged, scale=0.3, causal=False)
    dq, dk, dv = kernel.backward(dout, q, k, v, out.to(dtype), lse, ragged, scale=0.3, causal=False, deterministic=True)
    lonely = [0, 1, 5]
    assert (out[lonely] == 0).all()
    assert (lse[:, lonely] == -torch.inf).all()
    assert (dq[lonely] == 0).all()
    assert (dk[0] == 0).all()
    assert (dv[0] == 0).all()
    assert torch.isfinite(lse[:, 2:5]).all()
    assert all(torch.isfinite(x).all() for x in (out, dq, dk, dv))


def test_a_sequence_longer_than_a_block_of_keys(any_kernel: AttentionKernel) -> None:
    if any_kernel.refusal(DEVICE, torch.float32, 8, 8):
        pytest.skip(any_kernel.name)
    x = inputs(1301, 1301, 2, 1, 8, 8, torch.float32)
    q, k, v, dout = x
    same = segments([1301], [1301])
    out, lse = any_kernel.forward(q, k, v, same, scale=0.3, causal=True)
    grads = any_kernel.backward(dout, q, k, v, out, lse, same, scale=0.3, causal=True, deterministic=True)
    for ours, expected in zip((out, *grads), dense(x, (1301,), 0.3, True), strict=True):
        scale = expected.abs().max()
        torch.testing.assert_close(ours.double().cpu() / scale, expected / scale, rtol=0, atol=2e-5)


def test_scores_far_beyond_the_range_of_exp_stay_finite(any_kernel: AttentionKernel) -> None:
    q, k, v, dout = inputs(20, 20, 2, 2, 8, 8, torch.float32)
    if any_kernel.refusal(DEVICE, torch.float32, 8, 8):
        pytest.skip(any_kernel.name)
    same = segments([20], [20])
    out, lse = any_kernel.forward(100 * q, 100 * k, v, same, scale=1.0, causal=True)
    grads = any_kernel.backward(dout, 100 * q, 100 * k, v, out, lse, same, scale=1.0, causal=True, deterministic=True)
    assert all(torch.isfinite(x).all() for x in (out, lse, *grads))


def test_the_fast_kernel_is_chosen_and_a_name_overrides() -> None:
    cpu = torch.device("cpu")
    assert select_kernel(cpu, torch.float32, 192, 128).name == "torch-cpu-flash"
    assert select_kernel(cpu, torch.float32, 192, 128, "reference").name == "reference"


def test_a_kernel_that_cannot_run_says_why() -> None:
    with pytest.raises(InvalidInputError, match=r"torch-cpu-flash has no instance for torch\.float8"):
        select_kernel(torch.device("cpu"), torch.float8_e4m3fn, 8, 8, "torch-cpu-flash")
    with pytest.raises(InvalidInputError, match="there is none called 'nonesuch'"):
        select_kernel(torch.device("cpu"), torch.float32, 8, 8, "nonesuch")
