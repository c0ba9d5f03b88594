"""What can be said of the adapters for GPUs without one: their calls, their refusals, and what they ask of tensors.

Tensors are fake: they have a device, a shape and strides, and no numbers. The numbers are the contract's, on a GPU.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from scheduler_service.domain import InvalidInputError
from tests.support.varlen import StrictCpuKernel
from worker_agent.attention.kernels import AttentionKernel
from worker_agent.attention.kernels.flash_attn_2 import FlashAttention2Kernel
from worker_agent.attention.kernels.flash_attn_3 import FlashAttention3Kernel
from worker_agent.attention.kernels.flash_attn_4 import FlashAttention4Kernel
from worker_agent.attention.kernels.library import Library
from worker_agent.attention.kernels.torch_varlen import TorchVarlenKernel
from worker_agent.attention.kernels.varlen import VarlenBlock
from worker_agent.attention.layout import Segments

GPU = torch.device("cuda", 0)
SHAPES = [(128, 128), (192, 128), (160, 100), (12, 16)]

PARAMETERS = {
    # flash_attn/flash_attn_interface.py, flash-attn 2.7.0 (2.7.3 to 2.8.4 add some with defaults at the end)
    "_flash_attn_varlen_forward": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale "
    "causal window_size_left= window_size_right= softcap= alibi_slopes= return_softmax= block_table= leftpad_k= "
    "seqused_k=",
    "_flash_attn_varlen_backward": "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q "
    "max_seqlen_k dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes deterministic "
    "rng_state=",
    # hopper/flash_attn_interface.py, flash_attn_3 3.0.0 (commit 0251105a)
    "_flash_attn_forward": "q k v k_new= v_new= qv= out_= cu_seqlens_q= cu_seqlens_k= cu_seqlens_k_new= seqused_q= "
    "seqused_k= max_seqlen_q= max_seqlen_k= page_table= kv_batch_idx= leftpad_k= rotary_cos= rotary_sin= "
    "seqlens_rotary= q_descale= k_descale= v_descale= softmax_scale= causal= window_size_left= window_size_right= "
    "attention_chunk= softcap= rotary_interleaved= scheduler_metadata= num_splits= pack_gqa= sm_margin=",
    "_flash_attn_backward": "dout q k v out softmax_lse cu_seqlens_q= cu_seqlens_k= sequed_q= sequed_k= max_seqlen_q= "
    "max_seqlen_k= dq= dk= dv= softmax_scale= is_causal= window_size_left= window_size_right= softcap= deterministic= "
    "sm_margin=",
    # flash_attn/cute/interface.py, flash-attn-4 4.0.0b36, as far as an adapter needs it
    "_flash_attn_fwd": "q k v qv= cu_seqlens_q= cu_seqlens_k= seqused_q= seqused_k= max_seqlen_q= max_seqlen_k= "
    "min_seqlen_k= page_table= softmax_scale= causal= softcap= window_size_left= window_size_right= return_lse=",
    "_flash_attn_bwd": "q k v out dout lse softmax_scale= causal= softcap= window_size_left= window_size_right= "
    "cu_seqlens_q= cu_seqlens_k= seqused_q= seqused_k= max_seqlen_q= max_seqlen_k= deterministic= dq= dk= dv=",
}
"""Parameters of the libraries' functions, in order; those with "=" have a default. Source and release beside each."""


@dataclass
class PublishedLibrary:
    """A library's functions as far as their parameters and the shapes of their results are published."""

    forward: str
    backward: str
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments of the last call of each, by the library's names."""

    def functions(self) -> dict[str, Any]:
        return {name: self._function(name) for name in (self.forward, self.backward)}

    def _function(self, name: str) -> Any:
        def function(*arguments: Any, **named: Any) -> Any:
            call = self.calls[name] = function.__signature__.bind(*arguments, **named).arguments  # type: ignore[attr-defined]
            q, k, v = call["q"], call["k"], call["v"]
            if name == self.forward:
                lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
                return q.new_empty((*q.shape[:2], v.shape[2])), lse, None, None
            return [x.new_empty(x.shape) for x in (q, k, v)]

        parameter = inspect.Parameter
        function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                parameter(word.rstrip("="), parameter.POSITIONAL_OR_KEYWORD, default=None)
                if word.endswith("=")
                else parameter(word, parameter.POSITIONAL_OR_KEYWORD)
                for word in PARAMETERS[name].split()
            ]
        )
        return function


ADAPTERS = {
    FlashAttention2Kernel: (
        "flash_attn.flash_attn_interface",
        "_flash_attn_varlen_forward",
        "_flash_attn_varlen_backward",
    ),
    FlashAttention3Kernel: ("flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward"),
    FlashAttention4Kernel: ("flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd"),
}


class FakeSegments(Segments):
    """Boundaries that are on the fake device already: a CPU build of PyTorch cannot even pretend to copy them."""

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        cu_q, cu_k = (torch.empty(len(self) + 1, dtype=torch.int32, device=device) for _ in range(2))
        return cu_q, cu_k


def run_fake(
    kernel: AttentionKernel, d_qk: int, d_v: int, deterministic: bool = True, watch: Any = nullcontext()
) -> None:
    """Forward and backward of two sequences with 8 query and 2 KV heads; fails unless all results have their shapes."""
    lengths = np.array([5, 7])
    segments = FakeSegments(lengths, lengths)
    with FakeTensorMode(), watch:
        q = torch.empty(12, 8, d_qk, device=GPU, dtype=torch.bfloat16)
        k, v = torch.empty(12, 2, d_qk + d_v, device=GPU, dtype=torch.bfloat16).split((d_qk, d_v), -1)
        out, lse = kernel.forward(q, k, v, segments, scale=0.3, causal=True)
        dout = torch.empty_like(out)
        grads = kernel.backward(dout, q, k, v, out, lse, segments, scale=0.3, causal=True, deterministic=deterministic)
    assert out.shape == (12, 8, d_v)
    assert lse.shape == (8, 12)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    assert all(x.device == GPU for x in (out, lse, *grads))


def put_modules(monkeypatch: pytest.MonkeyPatch, name: str, functions: dict[str, Any]) -> None:
    """Let `name`, and the packages that it is in, be modules with these functions."""
    for end in [i for i, letter in enumerate(name) if letter == "."]:
        monkeypatch.setitem(sys.modules, name[:end], ModuleType(name[:end]))
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(("d_qk", "d_v"), SHAPES)
def test_calls_fit_the_parameters_that_the_library_has_published(
    adapter: type[AttentionKernel], d_qk: int, d_v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, forward, backward = ADAPTERS[adapter]
    library = PublishedLibrary(forward, backward)
    put_modules(monkeypatch, module, library.functions())
    run_fake(adapter(), d_qk, d_v)
    for call in library.calls.values():
        assert call.get("causal", call.get("is_causal")) is True
        assert call["softmax_scale"] == 0.3
        assert call["max_seqlen_q"] == call["max_seqlen_k"] == 7
        assert call["cu_seqlens_q"].dtype == call["cu_seqlens_k"].dtype == torch.int32
        for x in (call["q"], call["k"], call["v"]):
            assert x.stride(2) == 1
            assert x.shape[2] % 8 == 0
            assert all(number % 8 == 0 for number in (x.storage_offset(), *x.stride()[:2]))
    assert library.calls[backward]["deterministic"] is True
    lse = library.calls[backward].get("softmax_lse", library.calls[backward].get("lse"))
    assert lse.is_contiguous()


def test_aligned_keys_and_values_of_one_buffer_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    module, forward, backward = ADAPTERS[FlashAttention3Kernel]
    library = PublishedLibrary(forward, backward)
    put_modules(monkeypatch, module, library.functions())
    run_fake(FlashAttention3Kernel(), 192, 128)
    for call in library.calls.values():
        assert call["k"].stride(0) == call["v"].stride(0) == 2 * (192 + 128)
        assert call["v"].storage_offset() == 192


@pytest.mark.parametrize(("d_qk", "d_v"), SHAPES)
def test_calls_fit_the_operators_of_the_installed_pytorch(d_qk: int, d_v: int) -> None:
    run_fake(TorchVarlenKernel(), d_qk, d_v)


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_pytorch_is_deterministic_for_the_call_that_asks_for_it_and_then_as_it_was(
    deterministic: bool, before: tuple[bool, bool]
) -> None:
    backward = ModeOf(torch.ops.aten._flash_attention_backward.default)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        run_fake(TorchVarlenKernel(), 128, 128, deterministic=deterministic, watch=backward)
        after = determinism()
    finally:
        torch.use_deterministic_algorithms(False)
    assert backward.seen == [(True, False) if deterministic else before]
    assert after == before


class ModeOf(TorchDispatchMode):
    """Notes PyTorch's deterministic mode at each call of one operator."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator
        self.seen: list[tuple[bool, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.operator:
            self.seen.append(determinism())
        return func(*args, **(kwargs or {}))


def determinism() -> tuple[bool, bool]:
    """Whether it is asked for, and whether for a warning only."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A machine whose GPU is of this compute capability, as PyTorch tells it."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")


@pytest.mark.parametrize(
    ("gpu", "adapter", "dtype", "widths", "reason"),
    [
        (
            (7, 5),
            FlashAttention2Kernel,
            torch.float16,
            (64, 64),
            "is for compute capability 8.0 and later; Some GPU has 7.5",
        ),
        (
            (8, 0),
            FlashAttention3Kernel,
            torch.float16,
            (64, 64),
            "is for compute capability 9.0 to 9.x; Some GPU has 8.0",
        ),
        (
            (10, 0),
            FlashAttention3Kernel,
            torch.float16,
            (64, 64),
            "is for compute capability 9.0 to 9.x; Some GPU has 10.0",
        ),
        (
            (12, 0),
            FlashAttention4Kernel,
            torch.float16,
            (64, 64),
            "is for compute capability 9.0 to 11.x; Some GPU has 12.0",
        ),
        ((9, 0), TorchVarlenKernel, torch.float32, (64, 64), "computes in float16 and bfloat16, not in torch.float32"),
        ((9, 0), TorchVarlenKernel, torch.bfloat16, (256, 257), "has heads up to a width of 256, these need 264"),
        ((9, 0), TorchVarlenKernel, torch.bfloat16, (192, 128), None),
    ],
    indirect=["gpu"],
)
@pytest.mark.usefixtures("gpu")
def test_a_refusal_names_the_limit_and_what_was_asked(
    adapter: type[AttentionKernel], dtype: torch.dtype, widths: tuple[int, int], reason: str | None
) -> None:
    assert adapter().refusal(GPU, dtype, *widths) == reason


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
@pytest.mark.usefixtures("gpu")
def test_heads_without_a_deterministic_backward_are_refused_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, forward, backward = ADAPTERS[FlashAttention3Kernel]
    put_modules(monkeypatch, module, PublishedLibrary(forward, backward).functions())
    kernel = FlashAttention3Kernel()
    assert kernel.refusal(GPU, torch.bfloat16, 256, 256) is None
    assert kernel.refusal(GPU, torch.bfloat16, 192, 128, deterministic=True) is None
    refusal = kernel.refusal(GPU, torch.bfloat16, 256, 256, deterministic=True)
    assert refusal == "has heads up to a width of 192 in a deterministic backward, these need 256"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_no_library_is_imported() -> None:
    for adapter in ADAPTERS:
        assert adapter().refusal(torch.device("cpu"), torch.bfloat16, 128, 128) is not None
        refusal = adapter().refusal(GPU, torch.bfloat16, 128, 128)
        assert refusal == f"needs an NVIDIA GPU that PyTorch sees; PyTorch {torch.__version__} sees none"
    assert not {"flash_attn", "flash_attn_interface"} & set(sys.modules)


def test_a_library_that_is_missing_broken_or_old_is_refused_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_kernels.py").write_text("raise ImportError('undefined symbol: c10')")
    (tmp_path / "needy_kernels.py").write_text("import no_such_package")
    (tmp_path / "old_kernels.py").write_text("def attend(q, causal): ...")
    monkeypatch.syspath_prepend(tmp_path)

    def refusal(module: str, **calls: tuple[str, ...]) -> str | None:
        return Library(module, "pip install it", calls).refusal

    assert refusal("missing_kernels.interface") == "is not installed: pip install it"
    assert refusal("broken_kernels") == (
        "cannot be imported, most often because it was built for another PyTorch: undefined symbol: c10"
    )
    assert refusal("needy_kernels") == "cannot be imported: No module named 'no_such_package'"
    assert refusal("old_kernels", attend=("is_causal",)) == "has a attend without is_causal: pip install it"
    assert (
        refusal("old_kernels", attend_backward=()) == "has no function attend_backward in old_kernels: pip install it"
    )
    assert refusal("old_kernels", attend=("causal",)) is None


def test_a_log_sum_exp_in_another_layout_is_an_error_not_a_wrong_number() -> None:
    class TokensFirst(StrictCpuKernel):
        def _forward(self, q: Tensor, k: Tensor, v: Tensor, block: VarlenBlock) -> tuple[Tensor, Tensor]:
            out, lse = super()._forward(q, k, v, block)
            return out, lse.T

    x = torch.ones(3, 2, 8, dtype=torch.float64)
    with pytest.raises(InvalidInputError, match=r"shape \(3, 2\) .* instead of \(heads, tokens\) = \(2, 3\)"):
        TokensFirst().forward(x, x, x, Segments(np.array([3]), np.array([3])), scale=1.0, causal=True)


def test_a_causal_block_with_other_numbers_of_keys_than_queries_is_refused() -> None:
    q, k = torch.ones(3, 2, 8, dtype=torch.float64), torch.ones(4, 2, 8, dtype=torch.float64)
    with pytest.raises(InvalidInputError, match="other numbers of keys than of queries"):
        StrictCpuKernel().forward(q, k, k, Segments(np.array([3]), np.array([4])), scale=1.0, causal=True)
