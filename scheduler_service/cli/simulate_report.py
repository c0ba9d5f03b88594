"""What `hydra-cp simulate` prints: figures of every system, as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import typer
from rich.table import Table

from scheduler_service.cli.console import wide_console
from scheduler_service.domain import HydraCpError
from scheduler_service.planning.iteration import POLICIES_FOR_SLOW_RANKS
from scheduler_service.simulation.paper import PaperSetting
from scheduler_service.simulation.pictures import shown_activities
from scheduler_service.simulation.pipeline import PipelineReplay

BASELINE = "megatron"
"""What the others' throughput is compared with."""


@dataclass(frozen=True)
class Row:
    """One system's figures, as `--json` prints them."""

    iteration_s: float
    pp_bubble: float
    dp_bubble: float
    tokens_per_s_per_gpu: float
    microbatches: int
    plan_s: float
    largest_degree: int
    activity_s: Mapping[str, float]
    """Where the time goes, mean over GPUs; adds up to the iteration."""
    details: dict[str, Any] = field(default_factory=dict)
    """What only the model of operators knows."""

    def as_json(self) -> dict[str, Any]:
        """All in one mapping."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "details"}
        return {**own, **self.details}


@dataclass
class Report:
    """What was simulated so far."""

    setting: dict[str, Any]
    trust: str
    """What this kind of prediction was validated on."""
    paper: PaperSetting = field(default_factory=PaperSetting)
    """What the paper reports, where this is one of its settings."""
    rows: dict[str, Row] = field(default_factory=dict)
    errors: dict[str, HydraCpError] = field(default_factory=dict)
    replays: dict[str, PipelineReplay] = field(default_factory=dict)

    @property
    def activity_s(self) -> dict[str, Mapping[str, float]]:
        """System → activity → seconds."""
        return {name: row.activity_s for name, row in self.rows.items()}

    @property
    def known(self) -> Collection[str]:
        """Names of the details that every row has."""
        return next(iter(self.rows.values())).details.keys()

    @property
    def title(self) -> str:
        """Cluster and batch in a line."""
        shown = self.setting
        where = f"{shown['cluster']} ({shown['model']}), " if "cluster" in shown else ""
        return (
            f"{where}{shown['gpus']:,} GPUs; {shown['sequences']:,} sequences, {shown['tokens']:,} tokens, "
            f"longest {shown['longest_tokens']:,}"
        )


def print_report(report: Report, as_json: bool) -> None:
    """All that was simulated, to standard output."""
    if as_json:
        policies: dict[str, Any] = {name: row.as_json() for name, row in report.rows.items()}
        policies |= {name: {"error": {"reason": e.reason, "message": str(e)}} for name, e in report.errors.items()}
        typer.echo(json.dumps({**report.setting, "policies": policies, "validated": report.trust}))
        return
    console = wide_console()
    console.print(report.title)
    if "cluster" in report.setting:
        console.print(_job(report.setting))
    for table in (_systems(report), _plans(report), _shares(report.activity_s)):
        console.print()
        console.print(table)
    for name, error in report.errors.items():
        console.print(f"\n{name}: no plan. {error}")
    for note in (_slow_ranks(report.setting), _memory(report)):
        if note:
            console.print(f"\n{note}")
    console.print(f"\n{report.trust}")


def _job(setting: Mapping[str, Any]) -> str:
    return (
        f"{setting['hardware']}; pool {setting['pool']:,}, tp {setting['tp']}, pp {setting['stages']}, "
        f"ep {setting['ep']}, token budget {setting['token_budget']:,}, recompute {setting['recompute']}"
    )


Columns = Mapping[str, Callable[[Row], str]]

COLUMNS: Columns = {
    "iteration": lambda row: f"{row.iteration_s:.4g} s",
    "PP bubble": lambda row: f"{row.pp_bubble:.1%}",
    "DP bubble": lambda row: f"{row.dp_bubble:.1%}",
    "tokens/s/GPU": lambda row: f"{row.tokens_per_s_per_gpu:,.0f}",
}
DETAIL_COLUMNS: Columns = {
    "MFU": lambda row: f"{row.details['mfu']:.1%}",
    "$/M tokens": lambda row: f"{row.details['dollars_per_million_tokens']:.3g}",
}
MONEY_COLUMNS: Columns = {
    "days": lambda row: f"{row.details['days']:.1f}",
    "dollars": lambda row: f"{row.details['dollars']:,.0f}",
}
PLAN_COLUMNS: Columns = {
    "MBs": lambda row: f"{row.microbatches:,}",
    "degree ≤": lambda row: f"{row.largest_degree:,}",
    "planned in": lambda row: f"{row.plan_s:.2f} s",
}
PLAN_DETAIL_COLUMNS: Columns = {
    "engine": lambda row: str(row.details["engine"]),
    "load max / mean": lambda row: f"{row.details['load']['max'] / row.details['load']['mean']:.2f}",
    "padding": lambda row: f"{row.details['padding'] - 1:.2%}",
    "sent in nodes": lambda row: f"{_sent_bytes(row, 'node') / 1e9:.1f} GB",
    "over the network": lambda row: f"{_sent_bytes(row, 'network') / 1e9:.1f} GB",
    "memory": lambda row: (
        f"{row.details['peak_memory_bytes'] / 1e9:.0f} GB" + ("" if row.details["memory_fits"] else " !")
    ),
}


def _sent_bytes(row: Row, level: str) -> float:
    """Of a GPU in an iteration, for all purposes."""
    return sum(each[level] for each in row.details["traffic_bytes"].values())


def _table(rows: Mapping[str, Row], title: str, cells: Mapping[str, list[str]]) -> Table:
    """A row for each system; `cells` by column."""
    table = Table(title, box=None, pad_edge=False)
    for name in cells:
        table.add_column(name, justify="right")
    for number, name in enumerate(rows):
        table.add_row(name, *(column[number] for column in cells.values()))
    return table


def _plans(report: Report) -> Table:
    columns = {**PLAN_COLUMNS, **(PLAN_DETAIL_COLUMNS if "mfu" in report.known else {})}
    return _table(report.rows, "plan", _cells(report.rows, columns))


def _systems(report: Report) -> Table:
    """Ours, what it gains, and the paper's figures beside them."""
    rows, paper, known = report.rows, report.paper, report.known
    cells = _cells(
        rows,
        {**COLUMNS, **(DETAIL_COLUMNS if "mfu" in known else {}), **(MONEY_COLUMNS if "days" in known else {})},
    )
    if (baseline := rows.get(BASELINE)) is not None and len(rows) > 1:
        cells = {f"× {BASELINE}": [_gain(baseline, row) for row in rows.values()], **cells}
    for name, published in (("PP bubble", paper.pp), ("DP bubble", paper.dp)):
        if not rows.keys().isdisjoint(published):
            cells[name] = [
                f"{cell} (paper: {published[system]:.1%})" if system in published else cell
                for system, cell in zip(rows, cells[name], strict=True)
            ]
    if (ours := rows.get("hydra")) is not None and not rows.keys().isdisjoint(paper.gains):
        cells["hydra is ×"] = [_gain(row, ours) for row in rows.values()]
        cells["paper: ×"] = [f"{paper.gains[name]:.2f}" if name in paper.gains else "" for name in rows]
    return _table(rows, "system", cells)


def _cells(rows: Mapping[str, Row], columns: Columns) -> dict[str, list[str]]:
    return {name: [shown(row) for row in rows.values()] for name, shown in columns.items()}


def _gain(slower: Row, faster: Row) -> str:
    """How many times as fast; nothing to compare where an iteration takes no time."""
    return f"{slower.iteration_s / faster.iteration_s:.2f}" if faster.iteration_s else "–"


def _shares(activity_s: Mapping[str, Mapping[str, float]]) -> Table:
    """Shares of the iteration, mean over GPUs."""
    table = Table("share of the iteration", box=None, pad_edge=False)
    for name in activity_s:
        table.add_column(name, justify="right")
    for activity in shown_activities(activity_s):
        table.add_row(
            activity,
            *(f"{parts.get(activity, 0.0) / (sum(parts.values()) or 1):.1%}" for parts in activity_s.values()),
        )
    return table


def _slow_ranks(setting: Mapping[str, Any]) -> str | None:
    if "speeds" not in setting:
        return None
    excluded = sum(speed == 0 for speed in setting["speeds"].values())
    others = "have no plan without them" if excluded else "are run at the true speeds with the plans that they make so"
    return (
        f"Ranks: {len(setting['speeds']) - excluded} slow, {excluded} excluded. "
        f"{' and '.join(POLICIES_FOR_SLOW_RANKS)} plan for that; the others take all ranks for equal, and {others}."
    )


def _memory(report: Report) -> str | None:
    budget, fits = report.setting.get("token_budget", 0), report.setting.get("token_budget_that_fits", 0)
    full = [name for name, row in report.rows.items() if not row.details.get("memory_fits", True)]
    if budget <= fits and not full:
        return None
    sentences = [f"Memory: {report.setting['memory_bytes'] / 1e9:.0f} GB a GPU."]
    if budget > fits:
        sentences.append(
            f"A budget of {budget:,} tokens is over the {fits:,} that fit with all microbatches in flight full."
        )
    sentences.append(f"Too much (!): {', '.join(full)}." if full else "These plans fit: not all of theirs are.")
    return " ".join((*sentences, "`hydra-cp budget` says what fills a GPU."))
