"""`make gpu-check`: what the attention engine does on this machine's GPUs.

    python -m tests.benchmarks.gpu_check

Three parts: the contract of every kernel that runs here, the time of each on the head shapes of two kinds of model,
and, with two GPUs or more, whether exchanges run beside computation. Ends with 0 if all is well, with 1 if a kernel
breaks its contract or an exchange hides nothing, and with 2 on a machine that has no GPU for it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from tests.support.ranks import run_ranks
from worker_agent.attention import ShardLayout, gradient_anchor, start_exchange
from worker_agent.attention.kernels import KERNELS, AttentionKernel, KernelReport, describe_kernels
from worker_agent.attention.layout import Segments
from worker_agent.groups import GroupRegistry

CONTRACT = "tests/worker_agent/attention/kernels"
RUNS = 10


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model on one rank."""

    model: str
    query: int
    kv: int
    d_qk: int
    d_v: int


GROUPED = Heads("GQA 32/8 × 128", 32, 8, 128, 128)
LATENT = Heads("MLA 16 × 192/128", 16, 16, 192, 128)
STREAMS = {"1 × 16,384": [16384], "64 × 256": [256] * 64}
"""Sequences of a stream of 16,384 tokens: one long, or many short."""


def main() -> int:
    """Run what this machine allows; see the module's docstring for the result."""
    console = Console()
    if not torch.cuda.is_available():
        console.print(_kernel_table(describe_kernels(torch.device("cpu"))))
        console.print(
            f"gpu-check needs an NVIDIA GPU; PyTorch {torch.__version__} sees none here. Nothing was checked."
        )
        return 2
    device = torch.device("cuda", 0)
    console.print(f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}")
    console.print(_kernel_table(describe_kernels(device)))
    kept, verdicts = contract()
    console.print(_contract_table(verdicts))
    timings = [
        (kernel.name, heads, stream, time_kernel(kernel, device, torch.bfloat16, heads, lengths))
        for kernel in KERNELS
        for heads in (GROUPED, LATENT)
        if kernel.name != "reference" and kernel.refusal(device, torch.bfloat16, heads.d_qk, heads.d_v) is None
        for stream, lengths in STREAMS.items()
    ]
    console.print(_timing_table(timings))
    if torch.cuda.device_count() < 2:
        console.print("Overlap was not measured: it needs two GPUs, there is one.")
        return 0 if kept else 1
    hidden = measure_overlap("cuda", 1 << (torch.cuda.device_count().bit_length() - 1), tokens=8192)
    console.print(_overlap_table(hidden))
    return 0 if kept and all(part.hidden > 0 for part in hidden) else 1


def contract() -> tuple[bool, dict[str, Counter[str]]]:
    """Whether all tests of the kernels passed, and how many did what for each kernel that runs here."""
    verdicts: dict[str, Counter[str]] = {}

    class Tally:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            name = next((kernel.name for kernel in KERNELS if f"[{kernel.name}-" in report.nodeid), None)
            if name is not None and (report.when == "call" or report.failed):
                verdicts.setdefault(name, Counter())[report.outcome] += 1

    code = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", CONTRACT], plugins=[Tally()])
    return code == pytest.ExitCode.OK, verdicts


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, and the floating-point operations of its matrix products."""

    forward_s: float
    backward_s: float
    forward_flop: float

    @property
    def forward_tflops(self) -> float:
        """10¹² operations a second."""
        return self.forward_flop / self.forward_s / 1e12

    @property
    def backward_tflops(self) -> float:
        """The backward has five matrix products where the forward has two."""
        return 2.5 * self.forward_flop / self.backward_s / 1e12


def time_kernel(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, heads: Heads, lengths: list[int]
) -> Timing:
    """Causal attention of packed sequences. Half of the scores are masked, and not counted."""
    tokens = sum(lengths)
    q = torch.randn(tokens, heads.query, heads.d_qk, device=device, dtype=dtype)
    both = torch.randn(tokens, heads.kv, heads.d_qk + heads.d_v, device=device, dtype=dtype)
    k, v = both.split((heads.d_qk, heads.d_v), -1)
    counts = np.array(lengths, np.int64)
    segments, scale = Segments(counts, counts), heads.d_qk**-0.5
    out, lse = kernel.forward(q, k, v, segments, scale=scale, causal=True)
    out, dout = out.to(dtype), torch.randn_like(out)

    def backward() -> object:
        settings = {"scale": scale, "causal": True, "deterministic": False}
        return kernel.backward(dout.to(dtype), q, k, v, out, lse, segments, **settings)

    return Timing(
        forward_s=_median_s(lambda: kernel.forward(q, k, v, segments, scale=scale, causal=True), device),
        backward_s=_median_s(backward, device),
        forward_flop=heads.query * (heads.d_qk + heads.d_v) * float((counts**2).sum()),
    )


@dataclass(frozen=True)
class Overlap:
    """Seconds of an exchange, of a computation, and of the two at once, on the slowest rank."""

    direction: str
    exchange_s: float
    compute_s: float
    together_s: float

    @property
    def hidden(self) -> float:
        """The share of the shorter of the two that took no time of its own."""
        saved = self.exchange_s + self.compute_s - self.together_s
        return saved / min(self.exchange_s, self.compute_s)


def measure_overlap(device_type: str, ranks: int, tokens: int, runs: int = RUNS) -> list[Overlap]:
    """Exchanges of Ulysses beside matrix products, forward and backward, in one process per device; a power of two."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    by_rank = run_ranks(ranks, _overlap_on_rank, device_type, tokens, runs, backend=backend)
    return [max(parts, key=lambda part: part.together_s) for parts in zip(*by_rank, strict=True)]


def _overlap_on_rank(rank: int, device_type: str, tokens: int, runs: int) -> list[Overlap]:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return ExchangeProbe(device, tokens, runs).measure()


class ExchangeProbe:
    """One exchange of queries and a chain of matrix products that takes about as long, on one rank."""

    def __init__(self, device: torch.device, tokens: int, runs: int) -> None:
        self._device, self._runs = device, runs
        ranks = dist.get_world_size()
        self._group = GroupRegistry().group(0, ranks)
        self._layout = ShardLayout([tokens * ranks], ranks, 1, dist.get_rank())
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._x = torch.randn(self._layout.tokens, 64, 128, device=device, dtype=dtype, requires_grad=True)
        width = 4096 if device.type == "cuda" else 256
        self._start = torch.randn(width, width, device=device, dtype=dtype, requires_grad=True)
        self._factor = torch.randn(width, width, device=device, dtype=dtype) / width**0.5
        self._products = 1

    def measure(self) -> list[Overlap]:
        """Forward and backward."""
        exchange, product = self._median_s(exchange=True, compute=False), self._median_s(exchange=False, compute=True)
        needed = torch.tensor(max(1.0, exchange[0] / product[0]), device=self._device)
        dist.all_reduce(needed, dist.ReduceOp.MAX)
        self._products = min(256, int(needed.ceil()))
        compute = self._median_s(exchange=False, compute=True)
        together = self._median_s(exchange=True, compute=True)
        return [
            Overlap(direction, exchange[i], compute[i], together[i])
            for i, direction in enumerate(("forward", "backward"))
        ]

    def _median_s(self, *, exchange: bool, compute: bool) -> tuple[float, float]:
        runs = [self._step_s(exchange=exchange, compute=compute) for _ in range(self._runs + 1)][1:]
        forward_s, backward_s = zip(*runs, strict=True)
        return statistics.median(forward_s), statistics.median(backward_s)

    def _step_s(self, *, exchange: bool, compute: bool) -> tuple[float, float]:
        """Seconds of a forward and of its backward; what is computed stands between launch and wait."""
        dist.barrier()
        began = self._now()
        result = self._start
        pending = start_exchange(self._x, self._layout, self._group, gradient_anchor(self._x)) if exchange else None
        for _ in range(self._products if compute else 0):
            result = result @ self._factor
        outputs = [result] + ([pending.wait()] if pending is not None else [])
        forward_s = self._now() - began
        loss = torch.stack([output.sum() for output in outputs]).sum()
        dist.barrier()
        began = self._now()
        loss.backward()
        return forward_s, self._now() - began

    def _now(self) -> float:
        _synchronise(self._device)
        return time.perf_counter()


def _median_s(action: Callable[[], object], device: torch.device) -> float:
    action()  # compiles and allocates
    taken = []
    for _ in range(RUNS):
        _synchronise(device)
        began = time.perf_counter()
        action()
        _synchronise(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _kernel_table(reports: Iterable[KernelReport]) -> Table:
    table = Table("kernel", "package", "here", title="Kernels, in the order of choice", title_justify="left")
    for report in reports:
        table.add_row(report.name, report.package, "runs" if report.refusal is None else report.refusal)
    return table


def _contract_table(verdicts: dict[str, Counter[str]]) -> Table:
    table = Table("kernel", "passed", "failed", title="Contract", title_justify="left")
    for name, counts in verdicts.items():
        table.add_row(name, str(counts["passed"]), str(counts["failed"]))
    return table


def _timing_table(timings: Iterable[tuple[str, Heads, str, Timing]]) -> Table:
    head = ("kernel", "heads", "sequences", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s")
    table = Table(*head, title="Time of 16,384 tokens, causal, bfloat16", title_justify="left")
    for name, heads, stream, timing in timings:
        table.add_row(
            name,
            heads.model,
            stream,
            f"{timing.forward_s * 1e3:.3f}",
            f"{timing.forward_tflops:.0f}",
            f"{timing.backward_s * 1e3:.3f}",
            f"{timing.backward_tflops:.0f}",
        )
    return table


def _overlap_table(parts: Iterable[Overlap]) -> Table:
    head = ("direction", "exchange ms", "compute ms", "together ms", "hidden")
    table = Table(*head, title="Exchange beside computation", title_justify="left")
    for part in parts:
        times = (f"{seconds * 1e3:.3f}" for seconds in (part.exchange_s, part.compute_s, part.together_s))
        table.add_row(part.direction, *times, f"{part.hidden:.0%}")
    return table


if __name__ == "__main__":
    sys.exit(main())
