"""What adapters of varlen GPU libraries share: everything but the call itself.

Such libraries take packed streams and int32 boundaries on the device, as the contract does, and differ from it in the
same few ways, which are evened out here once:

* segments without queries or keys hang them, divide by zero or leave memory unwritten, and rows beyond the last
  boundary stay unwritten: they are given only the rows of segments that have both, and the others are filled in;
* heads must be as wide as one of their instances: narrower ones are padded with zeros, which changes neither scores
  (the scale is explicit) nor the columns that are kept;
* rows are loaded 16 bytes at a time: views whose rows begin elsewhere are copied;
* their causal mask is aligned to the last key and ours to the first: the same where a segment has as many keys as
  queries, which is checked;
* the log-sum-exp is read as packed memory: it is made contiguous, and its shape and dtype are checked on return.

Nothing waits for the device: shapes and boundaries are known on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from scheduler_service.domain import InvalidInputError, Reason
from worker_agent.attention.kernels.contract import accumulation_dtype
from worker_agent.attention.kernels.library import Library, gpu_refusal
from worker_agent.attention.layout import Rows, Segments

WIDTH_MULTIPLE = 8
"""Head widths are multiples of this: 16 bytes of a half-precision type."""


@dataclass(frozen=True)
class VarlenBlock:
    """What a varlen library is told of a block beside its tensors. Every sequence has a query and a key."""

    cu_q: Tensor
    """int32 on the device, one more than there are sequences."""
    cu_k: Tensor
    longest_q: int
    longest_k: int
    scale: float
    causal: bool
    """Only where all sequences have as many keys as queries."""

    @property
    def arguments(self) -> dict[str, Any]:
        """All but the mask, by the names that every release of FlashAttention has for them."""
        return {
            "cu_seqlens_q": self.cu_q,
            "cu_seqlens_k": self.cu_k,
            "max_seqlen_q": self.longest_q,
            "max_seqlen_k": self.longest_k,
            "softmax_scale": self.scale,
        }


class VarlenKernel(ABC):
    """An `AttentionKernel` made of the varlen forward and backward of a library for NVIDIA GPUs."""

    name: str
    distribution: str
    oldest_gpu: int
    """Major compute capability."""
    newest_gpu: int | None = None
    """Major compute capability; None: all that follow."""
    widest: int = 256
    """Widest head."""
    widest_deterministic: int = 256
    """Widest head whose backward can be deterministic."""

    def refusal(
        self, device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int, *, deterministic: bool = False
    ) -> str | None:
        """Half precision on a GPU that the library is for, with heads that it has, where it is installed."""
        width, widest = max(self._widths(d_qk, d_v)), self.widest_deterministic if deterministic else self.widest
        refusal = gpu_refusal(device, dtype, self.oldest_gpu, self.newest_gpu)
        if refusal is None and width > widest:
            backward = " in a deterministic backward" if widest < self.widest else ""
            refusal = f"has heads up to a width of {widest}{backward}, these need {width}"
        return refusal or self._library_refusal()

    @abstractmethod
    def _library_refusal(self) -> str | None:
        """Why the library cannot be called, on whatever GPU; None if it can."""

    def _widths(self, d_qk: int, d_v: int) -> tuple[int, int]:
        """Widths of the instance that serves such heads: here, of a library whose heads are all of one width."""
        return equal_widths(d_qk, d_v)

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, block: VarlenBlock) -> tuple[Tensor, Tensor]:
        """The library's output (t_q, h, d_v) and natural-log LSE (h, t_q), fp32."""

    @abstractmethod
    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: VarlenBlock,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The library's dq, dk, dv."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Output in the input's dtype; log-sum-exp in fp32 (fp64 for fp64)."""
        total, heads = q.shape[:2]
        rows, keys, segments = segments.nonempty
        if len(segments) == 0:
            lse = q.new_full((heads, total), -torch.inf, dtype=accumulation_dtype(q.dtype))
            return q.new_zeros((total, heads, v.shape[2])), lse
        d_qk, d_v = self._widths(q.shape[2], v.shape[2])
        out, lse = self._forward(
            _fitted(rows.take(q), d_qk),
            _fitted(keys.take(k), d_qk),
            _fitted(keys.take(v), d_v),
            _block(segments, q.device, scale, causal),
        )
        self._check_lse(lse, (heads, len(rows)), accumulation_dtype(q.dtype))
        return _filled(out.narrow(2, 0, v.shape[2]), rows, total), _filled(lse, rows, total, -torch.inf, dim=1)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        *,
        scale: float,
        causal: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In the input's dtype. Rows left out get gradient 0."""
        rows, keys, segments = segments.nonempty
        if len(segments) == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        d_qk, d_v = self._widths(q.shape[2], v.shape[2])
        dq, dk, dv = self._backward(
            _fitted(rows.take(dout), d_v),
            _fitted(rows.take(q), d_qk),
            _fitted(keys.take(k), d_qk),
            _fitted(keys.take(v), d_v),
            _fitted(rows.take(out), d_v),
            rows.take(lse, dim=1).contiguous(),
            _block(segments, q.device, scale, causal),
            deterministic,
        )
        return (
            _filled(dq.narrow(2, 0, q.shape[2]), rows, q.shape[0]),
            _filled(dk.narrow(2, 0, k.shape[2]), keys, k.shape[0]),
            _filled(dv.narrow(2, 0, v.shape[2]), keys, v.shape[0]),
        )

    def _check_lse(self, lse: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
        if lse.shape != shape or lse.dtype != dtype:
            raise InvalidInputError(
                Reason.INTERNAL,
                f"{self.name} returned a log-sum-exp of shape {tuple(lse.shape)} in {lse.dtype} instead of (heads, "
                f"tokens) = {shape} in {dtype}: this release of {self.distribution} has another layout; choose "
                "another kernel by name, and report the release",
            )


class PackageKernel(VarlenKernel):
    """A `VarlenKernel` whose library is a package of its own, which may be missing."""

    library: Library

    def _library_refusal(self) -> str | None:
        return self.library.refusal


def equal_widths(d_qk: int, d_v: int) -> tuple[int, int]:
    """The next width that a library of equal ones has."""
    width = -(-max(d_qk, d_v) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    return width, width


def equal_or_latent_widths(d_qk: int, d_v: int) -> tuple[int, int]:
    """Widths for a library that has, beside equal ones, the instance of latent attention: 192 and 128."""
    return (192, 128) if 128 < d_qk <= 192 and d_v <= 128 else equal_widths(d_qk, d_v)


def _block(segments: Segments, device: torch.device, scale: float, causal: bool) -> VarlenBlock:
    if causal and not segments.are_square:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            "a causal block whose segments have other numbers of keys than of queries: libraries align the mask to "
            "the last key, the engine to the first; split the block so that the numbers are equal",
        )
    return VarlenBlock(*segments.on(device), segments.longest_q, segments.longest_k, scale, causal)


def _fitted(x: Tensor, width: int) -> Tensor:
    """`x` with heads of `width`, padded with zeros, every one of which begins at a multiple of 16 bytes."""
    if x.shape[2] < width:
        return pad(x, (0, width - x.shape[2]))
    step = 16 // x.element_size()
    aligned = not any(start % step for start in (x.storage_offset(), x.stride(0), x.stride(1)))
    return x if aligned and x.stride(2) == 1 else x.clone(memory_format=torch.contiguous_format)


def _filled(x: Tensor, rows: Rows, total: int, value: float = 0.0, dim: int = 0) -> Tensor:
    """`x` as `rows` of a tensor that has `total` of them along `dim`, and `value` in the others."""
    if len(rows) == total:
        return x
    shape = (*x.shape[:dim], total, *x.shape[dim + 1 :])
    filled = x.new_full(shape, value)
    rows.put(filled, x, dim)
    return filled
