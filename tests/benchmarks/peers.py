"""Other context-parallel attentions, called with our inputs, our process groups and our CPU kernel.

axolotl-ringmaster and yunchang (long-context-attention) are written for GPUs. What runs here is their own code for
layouts, exchanges, merges and autograd; what is put in is
* the kernel: PyTorch's CPU flash operator, the one that our engine uses, in the place of flash-attn's functions;
* for ringmaster the answers to its questions whether tensors are on a GPU (yes: else it falls back to explicit softmax)
  and whether the backend is gloo (no: else it sends all-gathers instead of all-to-alls).
The third peer is the ring of PyTorch's own `context_parallel`, which takes the kernel as an argument.

Nothing of ours depends on these packages; `attention` says how to get them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (t, h, d) of this rank's slots → (t, h, d), causal, differentiable."""


def flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(1, s, h, d) → output (1, s, h, d) and log-sum-exp (1, h, s)."""
    out, lse = _kernel(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, (1, s, h, d) as they."""
    turned = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    return tuple(x.transpose(1, 2) for x in _kernel_backward(*turned, lse, 0.0, causal, scale=scale))


class FlashAttention(torch.autograd.Function):
    """The kernel alone, differentiable: what Ulysses calls between its exchanges."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        out, lse = flash_forward(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = (scale, causal)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *flash_backward(dout, *ctx.saved_tensors, *ctx.settings), None, None


def yunchang_attention(ulysses: int, ring: int, rank: int) -> Attention:
    """Ulysses alone, or Ulysses with its balanced (zigzag) ring. Tokens lie as in our layout. Collective."""
    library = importlib.import_module("yunchang")
    library.set_seq_parallel_pg(ulysses, ring, rank, ulysses * ring)

    def select(attn_type: Any, stage: str, **_: Any) -> Callable[..., Any]:
        def forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, *, causal: bool, **_: Any) -> Any:
            return flash_forward(q, k, v, scale, causal)

        def backward(
            dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **_: Any
        ) -> None:
            *into, _, scale, causal = rest[:6]
            for buffer, gradient in zip(into, flash_backward(dout, q, k, v, out, lse, scale, causal), strict=True):
                buffer.copy_(gradient)

        def whole(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, **_: Any) -> Tensor:
            return FlashAttention.apply(q, k, v, softmax_scale, causal)  # type: ignore[no-any-return]

        return {"fwd-only": forward, "bwd-only": backward, "fwd-bwd": whole}[stage]

    for module in ("yunchang.ring.zigzag_ring_flash_attn", "yunchang.ulysses.attn_layer"):
        importlib.import_module(module).select_flash_attn_impl = select  # type: ignore[attr-defined]
    if ring == 1:
        groups = importlib.import_module("yunchang.globals").PROCESS_GROUP
        layer = importlib.import_module("yunchang.ulysses").UlyssesAttention(groups.ULYSSES_PG)
    else:
        layer = library.LongContextAttention(ring_impl_type="zigzag")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return layer(*(x.unsqueeze(0) for x in (q, k, v)), causal=True)[0]  # type: ignore[no-any-return]

    return attention


def ringmaster_attention(ulysses: int, ring: int, inner: dist.ProcessGroup, outer: dist.ProcessGroup) -> Attention:
    """Ulysses, its balanced (zigzag) ring, or both levels (USP, whose ring is not balanced: contiguous shards).

    To be run, forward and backward, inside `gpu_like`.
    """
    runtime = SimpleNamespace(ulysses_group=inner, ring_group=outer, ring_size=ring, varlen=None)

    def forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, causal: bool, *_: Any) -> Any:
        return *flash_forward(q, k, v, scale, causal), None, None

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> None:
        *into, _, scale, causal = rest[:6]
        for buffer, gradient in zip(into, flash_backward(dout, q, k, v, out, lse, scale, causal), strict=True):
            buffer.copy_(gradient)

    def kernel(_: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **settings: Any) -> tuple[Tensor, None]:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return FlashAttention.apply(*turned, q.shape[-1] ** -0.5, True), None

    modules = {
        name: importlib.import_module(f"ringmaster.{name}")
        for name in ("config", "runtime", "ring.p2p_attn", "ring.zigzag", "strategies.ulysses", "strategies.usp")
    }
    modules["ring.p2p_attn"]._flash_ops = modules["ring.zigzag"]._flash_ops = lambda *_: (forward, backward)
    modules["runtime"].get_runtime = modules["strategies.ulysses"].get_runtime = lambda: runtime
    modules["strategies.ulysses"]._resolve_inner = lambda _: kernel
    module = SimpleNamespace()
    if ulysses == 1:
        call = partial(modules["ring.zigzag"].zigzag_ring_attention, group=outer, scaling=None)
    elif ring == 1:
        call = partial(modules["strategies.ulysses"].make_ulysses_attention("sdpa"), module, attention_mask=None)
    else:
        rotate = modules["config"].RotateMethod.ALLTOALL
        make = modules["strategies.usp"].make_usp_attention
        call = partial(make("hf_kernels", "flash_attention_2", rotate), module, attention_mask=None)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turned = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = call(**dict(zip(("q", "k", "v") if ulysses == 1 else ("query", "key", "value"), turned, strict=True)))
        return (out if ulysses == 1 else out[0])[0]  # type: ignore[no-any-return]

    return attention


@contextmanager
def gpu_like() -> Iterator[None]:
    """ringmaster's questions answered so that it takes the paths that it takes on GPUs."""

    class Distributed:
        def __getattr__(self, name: str) -> Any:
            return (lambda _=None: "nccl") if name == "get_backend" else getattr(dist, name)

    comm = importlib.import_module("ringmaster.comm")
    on_gpu = property(lambda _: True)
    with mock.patch.object(comm, "dist", Distributed()), mock.patch.object(torch.Tensor, "is_cuda", on_gpu):
        yield


class _TorchRing(torch.autograd.Function):
    """Forward and backward of torch.distributed.tensor.experimental's ring, with the kernel as its operator."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        def operator(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Any:
            return _kernel(q, k, v, 0.0, is_causal, scale=scale)

        ctx.group, ctx.scale = group, q.shape[-1] ** -0.5
        out, lse = _torch_ring()._templated_ring_attention(group, 2, operator, q, k, v, True, scale=ctx.scale)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        def operator(*, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, **more: Any) -> Any:
            inputs = (more["dout"], query, key, value, out, logsumexp)
            return _kernel_backward(*inputs, 0.0, more["is_causal"], scale=more["scale"])

        q, k, v, out, lse = ctx.saved_tensors
        backward = _torch_ring()._templated_ring_attention_backward
        gradients = backward(ctx.group, 2, operator, dout, "dout", q, k, v, out, lse, True, scale=ctx.scale)
        return *gradients[:3], None


def _torch_ring() -> ModuleType:
    return importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")


def torch_attention(group: dist.ProcessGroup, *, rotate: bool) -> Attention:
    """PyTorch's balanced ring: keys and values hop by hop (`rotate`), or gathered at once as is its default."""
    module = _torch_ring()
    method = module._RotateMethod.ALL_TO_ALL if rotate else module._RotateMethod.ALL_GATHER

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        module._cp_options.rotate_method = method
        out = _TorchRing.apply(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), group)
        return out[0].transpose(0, 1)  # type: ignore[no-any-return]

    return attention
