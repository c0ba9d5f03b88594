"""Draws the pictures of docs/planning.md from real plans, and writes the figures that belong to them: `make pictures`.

One batch of paper-like lengths, planned by three policies: what each rank holds in each microbatch, and when each
pipeline stage works. And what a degree cap does to degrees and to the iteration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colors, ticker

from scheduler_service.domain import Batch, Plan, Pool
from scheduler_service.planning import memory_degree, plan_iteration
from scheduler_service.planning.degrees import own_degrees
from scheduler_service.planning.load_target import LoadTarget, choose_target
from scheduler_service.simulation import forecast, rank_loads
from scheduler_service.simulation.workloads import MICROBATCHES_PER_STAGE, TOKENS_PER_RANK
from tests.benchmarks.drawing import BLUE, GREY, INK, ORANGE, new_figure, save
from tests.benchmarks.lengths import paper_like, sequences_of
from tests.benchmarks.policies import COMPARED, COSTS
from tests.benchmarks.reporting import table, with_tables

FOLDER = Path("docs/images")
DOCUMENT = Path("docs/planning.md")
POOL = Pool(ranks=128, token_budget=8192, stages=4, ep=8)
LARGE = Pool(ranks=2048, token_budget=8192, stages=4, ep=8)
SLOTS = MICROBATCHES_PER_STAGE * POOL.stages


def main() -> None:
    """Draw all of them."""
    batch = Batch(sequences_of(paper_like, SLOTS * POOL.ranks * TOKENS_PER_RANK))
    plans = [plan_iteration(batch, POOL, policy=policy) for policy in COMPARED]
    draw_loads(plans, batch)
    draw_timelines(plans, batch)
    draw_target()
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), {"planning-figures": figures_table(plans, batch)}))


def figures_table(plans: list[Plan], batch: Batch) -> str:
    """What the pictures show, in numbers."""

    def line(plan: Plan) -> tuple[str, ...]:
        times, load = forecast(plan, batch), rank_loads(plan, batch).load / 1e6
        seconds = (times.forward_s + times.backward_s).max(axis=0)
        header = plan.header
        return (
            f"`{header.policy}`",
            f"{header.microbatches}",
            f"{load.max():,.0f} / {load.mean():,.0f}",
            f"{seconds.max():.2f} / {seconds.mean():.2f} s",
            f"{header.predicted_s:.1f} s",
            f"{header.predicted_s / header.lower_bound_s - 1:.1%}",
            f"{times.pp_bubble:.1%}",
        )

    head = (
        "policy", ">microbatches", ">attention load, 10⁶ token², largest / mean", ">microbatch, longest / mean",
        ">iteration", ">above the certificate", ">stages wait",
    )  # fmt: skip
    return table(head, map(line, plans))


def draw_loads(plans: list[Plan], batch: Batch) -> None:
    """Attention load of every rank and microbatch as a map, and above it the seconds of every microbatch."""
    figure, axes = new_figure(9, 4.6, 2, len(plans), height_ratios=(1, 2.6), sharey="row")
    loads = [rank_loads(plan, batch).load / 1e6 for plan in plans]
    norm = colors.PowerNorm(0.5, 0, max(load.max() for load in loads))
    for plan, load, bars, image in zip(plans, loads, *axes, strict=True):
        times = forecast(plan, batch)
        seconds = (times.forward_s + times.backward_s).max(axis=0)
        bars.bar(np.arange(len(seconds)), seconds, width=0.85, color=BLUE)
        bars.set_xlim(-0.5, len(seconds) - 0.5)
        bars.set_title(plan.header.policy, fontweight="bold", family="DejaVu Sans Mono")
        bars.tick_params(labelbottom=False)
        shown = image.imshow(load, aspect="auto", norm=norm, cmap="YlGnBu", interpolation="nearest", origin="lower")
        image.set_xlabel("microbatch")
        image.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
        image.set_yticks(range(0, POOL.ranks + 1, 32))
    axes[0, 0].set_ylabel("seconds\n(slowest group)")
    axes[1, 0].set_ylabel("rank")
    bar = figure.colorbar(shown, ax=axes[1], pad=0.01, aspect=18)
    bar.set_label("attention load, 10⁶ token²")
    bar.outline.set_visible(False)
    save(figure, FOLDER / "planning-loads.png")


def draw_timelines(plans: list[Plan], batch: Batch) -> None:
    """When each stage of the slowest pipeline runs forwards and backwards, on one time axis."""
    figure, axes = new_figure(9, 4.4, len(plans), 1, sharex=True)
    longest = max(plan.header.predicted_s for plan in plans)
    for plan, lanes in zip(plans, axes, strict=True):
        found = forecast(plan, batch)
        done = found.replay.operations(int(found.replay.span.argmax()))
        lanes.barh(
            done.stage, done.end_s - done.start_s, left=done.start_s, height=0.86,
            color=np.where(done.backward, ORANGE, BLUE), edgecolor="white", linewidth=0.35,
        )  # fmt: skip
        lanes.axvline(found.iteration_s, color=INK, linewidth=1)
        lanes.set_title(plan.header.policy, fontweight="bold", family="DejaVu Sans Mono", pad=3)
        lanes.set_title(
            f"{found.iteration_s:.1f} s, stages wait {found.pp_bubble:.0%} of it", loc="right", fontsize=9, pad=3
        )
        lanes.set(yticks=range(POOL.stages), ylim=(POOL.stages - 0.5, -0.5), xlim=(0, longest * 1.005), ylabel="stage")
        lanes.set_facecolor("#eef0f3")
        lanes.spines[:].set_visible(False)
        lanes.tick_params(left=False)
    axes[-1].set_xlabel("seconds")
    handles = [axes[0].barh([0], [0], color=colour) for colour in (BLUE, ORANGE, "#eef0f3")]
    figure.legend(handles, ("forward", "backward", "waiting"), loc="outside upper center", ncols=3)
    save(figure, FOLDER / "planning-timelines.png")


def draw_target() -> None:
    """What a degree cap does on a large pool: degrees of sequences, and iteration time."""
    batch = Batch(sequences_of(paper_like, SLOTS * LARGE.ranks * TOKENS_PER_RANK))
    figure, (degrees, caps) = new_figure(9, 3.4, 1, 2)
    _draw_degrees(degrees, batch)
    _draw_caps(caps, batch)
    save(figure, FOLDER / "planning-target.png")


def _draw_degrees(axes: Any, batch: Batch) -> None:
    """By memory, by load, and those of a plan: of its longest sequences, and of one in fifty."""
    plan = plan_iteration(batch, LARGE, policy="hydra")
    lengths = np.unique(np.geomspace(64, batch.longest, 4000).astype(int))
    by_load = own_degrees(lengths, LARGE, LoadTarget(batch.longest, plan.header.cap))
    order = np.argsort(-batch.lengths)
    some = np.append(order[:1000], order[1000::50])
    axes.scatter(batch.lengths[some], plan.degree[some], s=5, color=GREY, linewidths=0, label="as planned by hydra")
    axes.plot(lengths, [memory_degree(int(s), LARGE) for s in lengths], color=ORANGE, label="least that memory allows")
    axes.plot(lengths, by_load, color=BLUE, label=f"least that Λ allows, C = {plan.header.cap}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="tokens of the sequence", ylabel="degree", xlim=(64, None), ylim=(0.8, 8000))
    axes.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=7))
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}")
    axes.set_yticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.legend(loc="upper left")


def _draw_caps(axes: Any, batch: Batch) -> None:
    """Iteration time of hydra's plan at every cap, and the cap that the closed form chooses."""
    caps = [degree for degree in LARGE.degrees if degree >= memory_degree(batch.longest, LARGE)]
    for (name, cost), colour in zip(COSTS.items(), (BLUE, ORANGE), strict=True):
        seconds = [plan_iteration(batch, LARGE, policy="hydra", cost=cost, cap=cap).header.predicted_s for cap in caps]
        longer = {cap: 100 * (second / min(seconds) - 1) for cap, second in zip(caps, seconds, strict=True)}
        chosen = choose_target(batch, LARGE, cost).cap
        axes.plot(longer.keys(), longer.values(), color=colour, marker="o", markersize=4, label=name)
        axes.plot(chosen, longer[chosen], "o", color=colour, markersize=11, fillstyle="none")
    axes.plot([], [], "o", color=GREY, markersize=11, fillstyle="none", label="chosen by the closed form")
    axes.set_xscale("log", base=2)
    axes.set_xticks(caps, [f"{cap}" for cap in caps])
    axes.set(xlabel="degree cap C", ylabel="iteration, % above the best C", ylim=(-2, None))
    axes.legend()


if __name__ == "__main__":
    main()
