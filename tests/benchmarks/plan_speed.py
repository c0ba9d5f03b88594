"""How fast `hydra` and `hydra_search` plan, from lengths to a verified plan with its prediction, on one core.

Each row of the result is measured in a fresh process (`python -m tests.benchmarks.plan_speed ROW`), after warm-up:

* seconds: CPU time, best of some runs, from the lengths to the digest of the verified plan (sort, packing,
  verification, digest), and of the whole `plan_iteration`, which adds the forecast and the certificate;
* memory: the peak that tracemalloc sees above the input, in a run of its own. It sees all arrays of numpy and all
  objects of Python; the compiled loops allocate nothing that grows with the batch;
* the iteration by the simple cost model, and its gap to the certificate.

The scheduler of megatron-core is the installed package's (`megatron_core` says how it gets there), on the same lengths
in the same run, where it takes less than minutes. Its groups are charged one pipeline slot for each micro-step, as
those of `megatron_hybrid` are.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from scheduler_service.domain import Batch, CostModel, Plan, Pool
from scheduler_service.planning import POLICIES, PlanningConfig, plan_iteration, verify_plan, warm_up
from scheduler_service.planning.certificate import lower_bound_s
from scheduler_service.planning.load_target import choose_target
from scheduler_service.planning.packing import pack
from scheduler_service.planning.reference import pack_linearly
from scheduler_service.simulation import forecast
from tests.benchmarks.drawing import BLUE, GREY, INK, ORANGE, new_figure, save
from tests.benchmarks.lengths import paper_like, sequences
from tests.benchmarks.megatron_core import balanced_scheduler, groups_of_ranks, plan_of_groups
from tests.benchmarks.reporting import FOLDER, Check, best_s, checks_table, shown_s, table, write_json

BUDGET = 8192
REFERENCE_SIZE = (128, 4000)
MEGATRON = "megatron-core"


class Size(NamedTuple):
    """One row of the table of speeds, with what it is to reach."""

    ranks: int
    sequences: int
    goals_s: dict[str, float]
    paper_s: dict[str, float]
    """What the HyDra paper measured on its own machines."""

    @property
    def pool(self) -> Pool:
        """Nine stages and expert parallelism of 8."""
        return Pool(self.ranks, BUDGET, stages=9, ep=8)

    def measured(self, plan_s: float, iteration_s: float) -> dict[str, Any]:
        """To a verified plan, and the whole `plan_iteration`."""
        return {
            "ranks": self.ranks,
            "sequences": self.sequences,
            "plan_s": plan_s,
            "iteration_s": iteration_s,
            "ns_per_sequence": iteration_s / self.sequences * 1e9,
        }


SIZES = (
    Size(512, 32_000, {"hydra": 0.010, "hydra_search": 0.150}, {"hydra": 0.34, MEGATRON: 0.78}),
    Size(4096, 262_144, {"hydra": 0.100, "hydra_search": 1.0}, {}),
    Size(16_384, 1_048_576, {"hydra": 0.5, "hydra_search": 4.0}, {"hydra": 4.12, MEGATRON: 47.85}),
)
RUNS = {"hydra": (15, 7, 5), "hydra_search": (9, 5, 3), MEGATRON: (2, 0, 0)}
"""Runs of each size; 0 where it would take minutes."""

Rows = dict[str, list[dict[str, Any]]]
"""What was measured, by planner and size."""

LEAST_RATIO = 500
"""Times that `plan_iteration` of hydra is to be faster than megatron-core's scheduler."""


def measure_policy(policy: str, row: int) -> dict[str, Any]:
    """One of our policies at one size, in this process."""
    warm_up()
    size, runs = SIZES[row], RUNS[policy][row]
    lengths = sequences(paper_like, size.sequences)

    def place_and_verify() -> None:
        batch = Batch(lengths)
        verify_plan(POLICIES[policy](batch, size.pool, PlanningConfig()), batch)

    whole = partial(plan_anew, policy, lengths, size.pool)
    plan = whole()
    return {
        **size.measured(best_s(place_and_verify, runs), best_s(whole, runs)),
        "predicted_s": plan.header.predicted_s,
        "gap": plan.header.predicted_s / plan.header.lower_bound_s - 1,
        "bytes_per_sequence": peak_bytes(lambda batch: plan_iteration(batch, size.pool, policy=policy), lengths),
    }


def plan_anew(policy: str, lengths: np.ndarray, pool: Pool) -> Plan:
    """`plan_iteration` from lengths, nothing kept from the last call."""
    forecast.cache_clear()
    return plan_iteration(Batch(lengths), pool, policy=policy)


def measure_megatron(row: int) -> dict[str, Any]:
    """The released scheduler of megatron-core at one size; ImportError without the package.

    Ours plan the same lengths in this process too, for the ratios: whatever slows the machine slows all of them.
    """
    size, lengths = SIZES[row], sequences(paper_like, SIZES[row].sequences)
    scheduler, samples = balanced_scheduler(size.pool), list(enumerate(lengths.tolist()))
    found: list[Any] = []

    def schedule(_: object = None) -> None:
        found[:] = [scheduler.get_groups_and_subsamples(samples, None)[1]]

    warm_up()
    seconds = best_s(schedule, RUNS[MEGATRON][row])
    over = {
        policy: seconds / best_s(partial(plan_anew, policy, lengths, size.pool), RUNS[policy][row])
        for policy in ("hydra", "hydra_search")
    }
    batch = Batch(lengths)
    plan = plan_of_groups([groups_of_ranks(ranks) for ranks in found[0]], batch, size.pool)
    predicted_s = forecast(plan, batch).iteration_s
    found.clear()
    return {
        **size.measured(seconds, seconds),
        "predicted_s": predicted_s,
        "gap": predicted_s / lower_bound_s(batch, size.pool, CostModel()) - 1,
        "bytes_per_sequence": peak_bytes(schedule, lengths),
        "over": over,
    }


def peak_bytes(action: Callable[[Batch], object], lengths: np.ndarray) -> float:
    """Most bytes above the batch while `action` plans it, per sequence."""
    batch = Batch(lengths)
    forecast.cache_clear()
    gc.collect()
    tracemalloc.start()
    try:
        action(batch)
        return tracemalloc.get_traced_memory()[1] / len(batch)
    finally:
        tracemalloc.stop()


def linear_over_heaps() -> float:
    """How much slower the linear reference packs than the heaps, on a batch that it can still do."""
    ranks, count = REFERENCE_SIZE
    pool, batch = Pool(ranks, BUDGET, stages=9, ep=8), Batch(sequences(paper_like, count))
    target = choose_target(batch, pool, CostModel())
    heaps_s = best_s(lambda: pack(batch, pool, target), runs=5)
    return best_s(lambda: pack_linearly(batch, pool, target), runs=1) / heaps_s


def parts_s() -> dict[str, float]:
    """Seconds of what `plan_iteration` of hydra does, at the first size."""
    pool, batch = SIZES[0].pool, Batch(sequences(paper_like, SIZES[0].sequences))
    plan = POLICIES["hydra"](batch, pool, PlanningConfig())
    actions: dict[str, Callable[[], object]] = {
        "sort and pack": lambda: POLICIES["hydra"](batch, pool, PlanningConfig()),
        "verify and digest": lambda: verify_plan(replace(plan), batch),  # a copy has no digest yet
        "forecast": lambda: (forecast.cache_clear(), forecast(plan, batch)),
        "certificate": lambda: lower_bound_s(batch, pool, CostModel()),
    }
    return {name: best_s(action, RUNS["hydra"][0]) for name, action in actions.items()}


def run() -> dict[str, str]:
    """Measure all rows, each in a process of its own; write JSON and a plot; the tables by name."""
    rows = {name: list(_measured(name)) for name in RUNS}
    parts = parts_s()
    found = [*checks(rows, linear_over_heaps()), _of_parts(parts)]
    write_json("plan_speed", {"rows": rows, "parts_s": parts, "checks": [check._asdict() for check in found]})
    draw(rows)
    return {
        "plan-speed": speed_table(rows),
        "plan-speed-checks": checks_table(found),
        "plan-speed-short": short_table(rows),
    }


def _measured(name: str) -> Iterator[dict[str, Any]]:
    """The rows of one planner, up to the first that is not run."""
    for row, runs in enumerate(RUNS[name]):
        if not runs:
            return
        print(f"plan speed: {name}, {SIZES[row].sequences:,} sequences", file=sys.stderr, flush=True)
        child = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.plan_speed", name, str(row)]
        try:
            done = subprocess.run(child, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
        except subprocess.SubprocessError as error:
            if name != MEGATRON:
                raise
            print(f"plan speed: {name} is not measured, {error}", file=sys.stderr)
            return
        yield json.loads(done.stdout)


def checks(rows: Rows, reference_ratio: float) -> list[Check]:
    """The figures besides the seconds."""
    found = []
    for name in ("hydra", "hydra_search"):
        growth = rows[name][-1]["ns_per_sequence"] / rows[name][0]["ns_per_sequence"]
        found.append(
            Check(f"time per sequence, last size over first: `{name}`", "< 1.5", f"{growth:.2f}", growth < 1.5)
        )
    most = max(row["bytes_per_sequence"] for row in rows["hydra"])
    found.append(Check("peak bytes per sequence above the input: `hydra`", "≤ 64", f"{most:.0f}", most <= 64))
    for name, ratio in rows[MEGATRON][0]["over"].items() if rows[MEGATRON] else ():
        goal = LEAST_RATIO if name == "hydra" else None
        what = f"{MEGATRON}'s scheduler over `plan_iteration` of `{name}`, {SIZES[0].sequences:,} sequences"
        found.append(Check(what, f"≥ {goal}" if goal else "–", f"{ratio:,.0f}", ratio >= goal if goal else None))
    what = f"linear reference over heaps, packing {REFERENCE_SIZE[1]:,} sequences"
    return [*found, Check(what, "–", f"{reference_ratio:,.0f}", None)]


def _of_parts(parts: dict[str, float]) -> Check:
    what = f"`plan_iteration` of `hydra`, {SIZES[0].sequences:,} sequences: {', '.join(parts)}"
    return Check(what, "–", " + ".join(f"{1e3 * seconds:.1f}" for seconds in parts.values()) + " ms", None)


def speed_table(rows: Rows) -> str:
    """All figures of all rows."""

    def line(name: str, row: int, size: Size) -> list[str]:
        shown = [f"{size.ranks:,}", f"{size.sequences:,}", label(name)]
        if row >= len(rows[name]):
            return [*shown, "not run", *["–"] * 6]
        found = rows[name][row]
        growth = found["ns_per_sequence"] / rows[name][0]["ns_per_sequence"]
        return [
            *shown,
            shown_s(found["plan_s"]),
            f"{shown_s(size.goals_s[name])}: {_verdict(found, size, name)}" if name in size.goals_s else "–",
            shown_s(found["iteration_s"]),
            f"{found['ns_per_sequence']:,.0f}",
            f"{growth:.2f}",
            f"{found['bytes_per_sequence']:,.0f}",
            f"{found['predicted_s']:.2f} s (+{found['gap']:.1%})",
        ]

    head = (
        ">pool", ">sequences", "planner", ">to a verified plan", "goal", ">`plan_iteration`", ">ns per sequence",
        ">growth", ">bytes per sequence", ">iteration (above the certificate)",
    )  # fmt: skip
    return table(head, (line(name, row, size) for row, size in enumerate(SIZES) for name in RUNS))


def short_table(rows: Rows) -> str:
    """Seconds to a verified plan."""

    def cell(name: str, row: int, size: Size) -> str:
        if row >= len(rows[name]):
            return "not run"
        found = rows[name][row]
        return shown_s(found["plan_s"]) + (" (missed)" if _verdict(found, size, name) == "missed" else "")

    return table(
        (">pool", ">sequences", *(f">{label(name)}" for name in RUNS)),
        (
            (f"{size.ranks:,}", f"{size.sequences:,}", *(cell(name, row, size) for name in RUNS))
            for row, size in enumerate(SIZES)
        ),
    )


def _verdict(found: dict[str, Any], size: Size, name: str) -> str:
    return "met" if found["plan_s"] <= size.goals_s.get(name, float("inf")) else "missed"


def label(name: str) -> str:
    """Our policies are code."""
    return f"`{name}`" if name in POLICIES else name


def draw(rows: Rows) -> None:
    """Seconds over sequences: what was measured, the goals, and what the paper measured."""
    figure, axes = new_figure(8.5, 3.8)
    for name, colour in ((MEGATRON, GREY), ("hydra_search", ORANGE), ("hydra", BLUE)):
        axes.plot(
            [row["sequences"] for row in rows[name]], [row["plan_s"] for row in rows[name]],
            color=colour, marker="o", label=f"{name}, measured",
        )  # fmt: skip
        published = [(size.sequences, size.paper_s[name]) for size in SIZES if name in size.paper_s]
        if published:
            axes.plot(*zip(*published, strict=True), color=colour, marker="x", linestyle=":", label=f"{name}, paper")
        goals = [(size.sequences, size.goals_s[name]) for size in SIZES if name in size.goals_s]
        if goals:
            axes.plot(*zip(*goals, strict=True), color=colour, marker="_", markersize=16, linestyle="none")
    axes.plot([], [], color=INK, marker="_", markersize=16, linestyle="none", label="goal")
    axes.set(xscale="log", yscale="log", xlabel="sequences (ranks)", ylabel="seconds to a verified plan")
    axes.set_xticks(
        [size.sequences for size in SIZES], [f"{size.sequences:,}\n({size.ranks:,})" for size in SIZES]
    )  # fmt: skip
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda seconds, _: shown_s(seconds).replace(".00", ""))
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    figure.legend(loc="outside right upper")
    save(figure, FOLDER / "plan_speed.png")


if __name__ == "__main__":
    planner, at = sys.argv[1:]
    print(json.dumps(measure_megatron(int(at)) if planner == MEGATRON else measure_policy(planner, int(at))))
