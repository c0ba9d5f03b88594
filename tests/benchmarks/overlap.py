"""What of a slow exchange is hidden: the attention layers of the reference model on two ranks, forward and backward.

Every exchange is made to take `DELAY_S` from its launch, without using the processor, as a network would. Each layer
runs three ways in turn, in one run: without the delay (what computes), with it (overlapped), and with it where every
launch is waited for at once (blocking). An exchange is hidden where the overlapped time is below the sum of what
computes and what the exchanges take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.reporting import shown_s, table, write_json
from tests.support.exchanges import Waited, delayed, intercepted
from tests.support.ranks import run_ranks
from worker_agent.attention import ShardLayout
from worker_agent.groups import GroupRegistry
from worker_agent.training.attention import GroupedQueryAttention, LatentAttention, Rotary
from worker_agent.training.config import ModelConfig
from worker_agent.training.initialisation import draw

RANKS = 2
LENGTHS = (512, 256, 256)
DELAY_S = 0.03
RUNS = 30

GATHERED = ModelConfig(
    hidden=512, heads=8, attention="mla", q_rank=384, kv_rank=256, nope_dim=64, rope_dim=32, value_dim=64
)
LAYERS = {
    "MLA, keys and values exchanged": replace(GATHERED, kv_rank=640),
    "MLA, latents gathered": GATHERED,
    "GQA": replace(GATHERED, attention="gqa", kv_heads=2, head_dim=64),
}
WAYS = ("computing", "overlapped", "blocking")


class Measured(NamedTuple):
    """One run of one layer on one rank."""

    forward_s: float
    backward_s: float
    forward_exchanges: int
    backward_exchanges: int


class Counting:
    """Starts collectives one way, and counts them."""

    def __init__(self, way: str) -> None:
        self.way, self.count = way, 0

    def __call__(self, received: Tensor, collective: Callable[[], dist.Work]) -> Waited:
        """For `intercepted`."""
        self.count += 1
        pending = delayed(received, collective, 0.0 if self.way == "computing" else DELAY_S)
        if self.way == "blocking":
            pending.wait()
            return Waited(lambda: None)
        return pending


def measure(rank: int) -> dict[tuple[str, str], list[Measured]]:
    """All runs of every layer, each way, on this rank."""
    group = GroupRegistry().group(0, RANKS)
    layout = ShardLayout(LENGTHS, RANKS, 1, rank)
    found: dict[tuple[str, str], list[Measured]] = {}
    for name, config in LAYERS.items():
        layer = (LatentAttention if config.attention == "mla" else GroupedQueryAttention)(config)
        for parameter_name, parameter in layer.named_parameters():
            draw(parameter.data, 0, parameter_name)
        rotary = Rotary(
            layout.positions,
            config.rope_dim if config.attention == "mla" else config.head_dim,
            config.rope_base,
            torch.float32,
        )
        run = partial(layer, rotary=rotary, layout=layout, group=group)
        x = torch.randn(layout.tokens, config.hidden, requires_grad=True)
        timed(run, x, "computing")
        for _ in range(RUNS):
            for way in WAYS:
                found.setdefault((name, way), []).append(timed(run, x, way))
    return found


def timed(layer: Callable[[Tensor], Tensor], x: Tensor, way: str) -> Measured:
    """A forward and a backward; both ranks begin each together."""
    with intercepted(start := Counting(way)):
        dist.barrier()
        began = time.perf_counter()
        out = layer(x)
        forward_s, forward_exchanges = time.perf_counter() - began, start.count
        loss = out.square().sum()
        dist.barrier()
        began = time.perf_counter()
        loss.backward()
        return Measured(forward_s, time.perf_counter() - began, forward_exchanges, start.count - forward_exchanges)


def run() -> dict[str, str]:
    """Measure; the table by its name in the documents."""
    by_rank = run_ranks(RANKS, measure, timeout_s=600)
    rows = []
    for name in LAYERS:
        for direction in ("forward", "backward"):
            taken = dict(fastest_s(by_rank, name, direction))
            count = getattr(by_rank[0][name, "computing"][0], f"{direction}_exchanges")
            rows.append({"layer": name, "direction": direction, "exchanges": count, **taken})
    write_json("overlap", {"delay_s": DELAY_S, "ranks": RANKS, "lengths": LENGTHS, "runs": RUNS, "rows": rows})
    head = ("layer", "", ">computes", ">exchanges", ">sum", ">blocking", ">overlapped", ">of the sum", ">of blocking")
    return {"overlap": table(head, map(shown, rows))}


def fastest_s(
    by_rank: list[dict[tuple[str, str], list[Measured]]], name: str, direction: str
) -> Iterator[tuple[str, float]]:
    """By way: seconds of the slower rank in the fastest run, which others on the machine disturbed least."""
    for way in WAYS:
        runs = zip(*(found[name, way] for found in by_rank), strict=True)
        yield way, min(max(getattr(measured, f"{direction}_s") for measured in ranks) for ranks in runs)


def shown(row: dict[str, float]) -> tuple[object, ...]:
    """A line of the table."""
    exchanges_s = row["exchanges"] * DELAY_S
    total_s = row["computing"] + exchanges_s
    return (
        row["layer"],
        row["direction"],
        shown_s(row["computing"]),
        f"{row['exchanges']} × {shown_s(DELAY_S)}",
        shown_s(total_s),
        shown_s(row["blocking"]),
        shown_s(row["overlapped"]),
        f"{row['overlapped'] / total_s:.2f}",
        f"{row['overlapped'] / row['blocking']:.2f}",
    )


if __name__ == "__main__":
    print("\n".join(run().values()))
