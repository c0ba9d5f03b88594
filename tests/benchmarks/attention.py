"""Attention forward and backward through our engine and through its peers: same work, ranks, kernel and threads.

Four gloo ranks with a thread each run one causal sequence, cut as Ulysses 4, ring 4 and Ulysses 2 × ring 2, in bf16
(in fp32 yunchang's ring overwrites the gradients that it sums). All run in one process group and take turns, in an
order drawn for each, so that noise of the machine hits all of them alike. The time of a turn is that of its slowest
rank, its CPU time the sum over the ranks; the best of the turns counts. Outputs and gradients are compared first. Bytes
are counted at the dispatcher, as they leave, whoever sends them; ours are held against the formulas of the engine's
documentation. What is replaced in the peers so that they run here at all is in `peers`.

axolotl-ringmaster and yunchang are not ours to depend on: `make bench` puts them into a folder of their own. Whatever
is not there is not compared.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.benchmarks import peers
from tests.benchmarks.reporting import Check, checks_table, shown_s, table, write_json
from tests.support.ranks import run_ranks
from worker_agent.attention import ShardLayout, hybrid_attention
from worker_agent.groups import Group, GroupRegistry

RANKS = 4
CUTS = ((4, 1), (1, 4), (2, 2))
"""Ulysses × ring."""
TOKENS = (1024, 4096)
HEADS, WIDTH = 8, 64
DTYPE = torch.bfloat16
TOLERANCE = 0.02
"""Largest difference from our output and gradients, over their largest element: bf16 has steps of 0.008."""
TURNS = 40
OURS = "hydra-cp"


@dataclass(frozen=True)
class Contender:
    """One library's attention on this rank."""

    name: str
    attention: peers.Attention
    contiguous: bool = False
    """Whether rank r holds tokens r·t … (r + 1)·t − 1 instead of those of our layout."""
    surroundings: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Row:
    """What one library needed for one piece of work."""

    library: str
    ulysses: int
    ring: int
    tokens: int
    best_s: float
    median_s: float
    cpu_s: float
    """Best CPU time of all ranks together: does not see how busy the machine is."""
    over_ours: float
    """Its best time over ours."""
    cpu_over_ours: float
    sent_bytes: int
    """By this rank, forward and backward."""
    formula_bytes: int
    """What the documentation says that ours sends."""
    difference: float
    """Largest from ours, of output and gradients, each over its largest element."""
    error: float
    """Root mean square of the difference from attention in fp32, over that of the latter; the worst of the four."""


class SentBytes(TorchDispatchMode):
    """Counts what leaves this rank, at the dispatcher, in both directions of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.total += self._sent(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Any) -> int:
        match name:
            case "send":
                return sum(map(_bytes, args[0]))
            case "alltoall_base_":
                return _away(args[1], dist.ProcessGroup.unbox(args[2]), args[4])
            case "all_to_all_single":
                group = dist.distributed_c10d._resolve_process_group(args[3])
                return _away(args[0], group, args[2])
            case "all_gather_into_tensor":  # a ring of it: everybody's part passes everybody but its owner's neighbour
                return _bytes(args[0]) * (args[1] - 1)
            case "allgather_" | "allreduce_" | "all_reduce" | "reduce_scatter_tensor":
                raise NotImplementedError(f"{name} is not counted")
        return 0


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _away(x: Tensor, group: Any, splits: list[int]) -> int:
    """Bytes of an all-to-all that do not stay."""
    size, rank = group.size(), group.rank()
    rows = splits or [x.shape[0] // size] * size
    return (x.shape[0] - rows[rank]) * _bytes(x) // x.shape[0]


def contenders(ulysses: int, ring: int, group: Group, layout: ShardLayout) -> Iterator[Contender]:
    """Ours first. Collective: process groups are made."""
    yield Contender(OURS, lambda q, k, v: hybrid_attention(q, k, v, layout, group))
    if find_spec("yunchang"):
        yield Contender("yunchang", peers.yunchang_attention(ulysses, ring, dist.get_rank()))
    if find_spec("ringmaster"):
        theirs = peers.ringmaster_attention(ulysses, ring, *inner_and_outer(ulysses, ring))
        yield Contender("ringmaster", theirs, contiguous=min(ulysses, ring) > 1, surroundings=peers.gpu_like)
    if ulysses == 1:
        yield Contender("torch, hop by hop", peers.torch_attention(group.process_group, rotate=True))
        yield Contender("torch, all-gather", peers.torch_attention(group.process_group, rotate=False))


def inner_and_outer(ulysses: int, ring: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's process groups of both levels, as peers want them. Collective."""
    inner, _ = dist.new_subgroups_by_enumeration([[r * ulysses + u for u in range(ulysses)] for r in range(ring)])
    outer, _ = dist.new_subgroups_by_enumeration([[r * ulysses + u for r in range(ring)] for u in range(ulysses)])
    return inner, outer


def compare(rank: int, turns: int) -> list[Row]:
    """All cuts and lengths on one rank."""
    registry = GroupRegistry()
    rows = []
    for ulysses, ring in CUTS:
        group = registry.group(0, RANKS, ulysses)
        for tokens in TOKENS:
            layout = ShardLayout([tokens], ulysses, ring, rank)
            rows += compare_on(list(contenders(ulysses, ring, group, layout)), layout, turns)
    return rows


def compare_on(field: list[Contender], layout: ShardLayout, turns: int) -> list[Row]:
    """One piece of work."""
    runs = [run_of(contender, layout) for contender in field]
    sent, results = [], []
    for run in runs:
        with SentBytes() as counted:
            results.append(run())
        sent.append(counted.total)
    seconds: list[list[float]] = [[] for _ in field]
    cpu_seconds: list[list[float]] = [[] for _ in field]
    order = random.Random(turns)  # the same on every rank
    for _ in range(turns):
        for which in order.sample(range(len(runs)), len(runs)):
            dist.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            runs[which]()
            slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            together = torch.tensor(time.process_time() - cpu_began, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(together)
            seconds[which].append(float(slowest))
            cpu_seconds[which].append(float(together))
    wholes = [gathered(contender, layout, result) for contender, result in zip(field, results, strict=True)]
    exact = exactly(layout)
    return [
        Row(
            library=contender.name,
            ulysses=layout.ulysses,
            ring=layout.ring,
            tokens=layout.total,
            best_s=min(taken),
            median_s=median(taken),
            cpu_s=min(used),
            over_ours=min(taken) / min(seconds[0]),
            cpu_over_ours=min(used) / min(cpu_seconds[0]),
            sent_bytes=bytes_sent,
            formula_bytes=formula(layout),
            difference=max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(whole, wholes[0], strict=True)),
            error=max(float((a - b).norm() / b.norm()) for a, b in zip(whole, exact, strict=True)),
        )
        for contender, taken, used, bytes_sent, whole in zip(field, seconds, cpu_seconds, sent, wholes, strict=True)
    ]


def inputs(layout: ShardLayout) -> list[Tensor]:
    """q, k, v and the output's gradient of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(layout.total, HEADS, WIDTH, generator=generator).to(DTYPE) for _ in range(4)]


def exactly(layout: ShardLayout) -> list[Tensor]:
    """Output and gradients by one call of the kernel in fp32."""
    q, k, v, dout = (x.float().unsqueeze(0) for x in inputs(layout))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = peers.FlashAttention.apply(*leaves, WIDTH**-0.5, True)
    return [out.detach()[0], *(gradient[0] for gradient in torch.autograd.grad(out, leaves, dout))]


def run_of(contender: Contender, layout: ShardLayout) -> Callable[[], tuple[Tensor, ...]]:
    """A forward and backward of it on this rank's tokens: output and gradients."""
    q, k, v, dout = (x[positions(contender, layout)] for x in inputs(layout))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run() -> tuple[Tensor, ...]:
        with contender.surroundings():
            out = contender.attention(*leaves)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return run


def positions(contender: Contender, layout: ShardLayout) -> Tensor:
    """Which tokens this rank holds."""
    if not contender.contiguous:
        return layout.token_index
    return torch.arange(layout.rank * layout.tokens, (layout.rank + 1) * layout.tokens)


def gathered(contender: Contender, layout: ShardLayout, result: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients of all ranks in the order of the tokens."""
    order = [torch.empty_like(layout.token_index) for _ in range(RANKS)]
    dist.all_gather(order, positions(contender, layout))
    whole = []
    for x in result:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(RANKS)]
        dist.all_gather(parts, x.contiguous())
        whole.append(torch.cat(parts).float()[torch.cat(order).argsort()])
    return whole


def formula(layout: ShardLayout) -> int:
    """Bytes that a rank of our engine sends, forward and backward, with as many KV heads as query heads.

    The ring's backward sends keys and values again, and their gradients in fp32.
    """
    element = DTYPE.itemsize
    t, inner, outer = layout.tokens, layout.ulysses, layout.ring
    all_to_all = (inner - 1) * t * element * HEADS * WIDTH * 4 // inner
    hops = (outer - 1) * t * HEADS * 2 * WIDTH * element
    return 2 * all_to_all + hops * (2 + 4 // element)


def run() -> dict[str, str]:
    """Measure, write JSON; figures and goals as tables by name."""
    print("attention: our engine and its peers", file=sys.stderr, flush=True)
    rows = run_ranks(RANKS, compare, TURNS, timeout_s=1800)[0]
    write_json("attention", {"turns": TURNS, "rows": [asdict(row) for row in rows]})
    head = (
        "Ulysses × ring",
        ">tokens",
        "library",
        ">best",
        ">median",
        ">over ours",
        ">CPU over ours",
        ">MB sent",
        ">error",
    )
    lines = (
        (
            f"{row.ulysses} × {row.ring}",
            f"{row.tokens:,}",
            row.library,
            shown_s(row.best_s),
            shown_s(row.median_s),
            f"{row.over_ours:.2f}",
            f"{row.cpu_over_ours:.2f}",
            f"{row.sent_bytes / 1e6:.2f}",
            f"{row.error:.1e}",
        )
        for row in rows
    )
    return {"attention-peers": table(head, lines), "attention-checks": checks_table(checks(rows))}


def checks(rows: list[Row]) -> list[Check]:
    """Goals and what came out."""
    ours, others = [row for row in rows if row.library == OURS], [row for row in rows if row.library != OURS]
    off = max(abs(row.sent_bytes / row.formula_bytes - 1) for row in ours)
    apart = max((row.difference for row in others), default=0.0)
    found = [
        Check("bytes that we send, from the formulas", "≤ 1 % off", f"{off:.2%}", off <= 0.01),
        Check("outputs and gradients of all, from ours", f"≤ {TOLERANCE}", f"{apart:.4f}", apart <= TOLERANCE),
    ]
    for row in others:
        what = f"{row.library}, {row.ulysses} × {row.ring}, {row.tokens:,} tokens: its time over ours"
        found.append(Check(what, "≥ 1", f"{row.over_ours:.2f}", row.over_ours >= 1))
    return found
