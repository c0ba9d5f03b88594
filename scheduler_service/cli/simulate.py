"""`hydra-cp simulate`: how long an iteration takes under each scheduling system, where the time goes, what it costs.

With a preset, plans run on the model of operators; with a pool and three constants, on the simple cost model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from scheduler_service.cli.console import wide_console
from scheduler_service.cli.failures import reported
from scheduler_service.cli.length_files import read_batch
from scheduler_service.domain import (
    Batch,
    CostModel,
    HydraCpError,
    InfeasibleError,
    InvalidInputError,
    Pool,
    Reason,
)
from scheduler_service.planning import DEFAULT_POLICY, POLICIES, plan_iteration, warm_up
from scheduler_service.planning.comparison import Outcome, compare
from scheduler_service.simulation import forecast
from scheduler_service.simulation.cluster import Cluster, Engine
from scheduler_service.simulation.job import Simulation
from scheduler_service.simulation.memory import largest_budget
from scheduler_service.simulation.paper import paper_setting
from scheduler_service.simulation.pipeline import PipelineReplay
from scheduler_service.simulation.presets import load_cluster
from scheduler_service.simulation.trace_events import trace_events
from scheduler_service.simulation.workloads import WORKLOADS, paper_batch

BASELINE = "megatron"
"""What the others' throughput is compared with."""

TRUST = {
    "preset": "Operator model. Validated on: work per token (within 1 %), attention on an H100 (mean error 6.3 %), "
    "pipeline spans of a production job (within 1 %), 14 whole iterations in BF16 on 8 to 16,384 GPUs (error 12 % "
    "mean, 40 % largest): see `hydra-cp validate`. Outside the model: FP8, DualPipe. Not validated: unequal "
    "microbatches end to end, H20, memory.",
    "simple": "Simple cost model: three constants a stage, no exchanges; as good as these are.",
}
"""What each kind of prediction was validated on."""

CLUSTER_FIELDS = {
    "pool": "ranks", "budget": "token_budget", "stages": "stages", "ep": "ep", "heads": "model",
    "max_ulysses": "engine",
}  # fmt: skip
"""Option → field of a cluster file that says the same."""

SIMPLE_ALONE = ("max_degree", "cap", "theta", "tau", "overhead")
"""Options that say nothing to the model of operators, whose systems choose their largest degree themselves."""

PRESET_ALONE = ("engine", "train_tokens")
"""Options that say nothing to the simple cost model."""

SECONDS_PER_DAY, SECONDS_PER_HOUR = 86_400, 3_600
INTERRUPTED = 130


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
    rows: dict[str, Row] = field(default_factory=dict)
    errors: dict[str, HydraCpError] = field(default_factory=dict)
    replays: dict[str, PipelineReplay] = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=dict)
    """What the paper reports as hydra's throughput over that of others, where this is one of its settings."""


_COST = CostModel()


def simulate(
    context: typer.Context,
    lengths: Annotated[
        str, typer.Argument(help=f"A file as for `plan`, - for stdin, or drawn for the preset: {', '.join(WORKLOADS)}.")
    ],
    preset: Annotated[str | None, typer.Option(help="A cluster preset, or the path of a .yaml file like one.")] = None,
    pool: Annotated[int | None, typer.Option(help="Without a preset: ranks that share the batch, G.")] = None,
    budget: Annotated[int | None, typer.Option(help="Without a preset: token budget, B.")] = None,
    policy: Annotated[str, typer.Option(help=f"all, or one of {', '.join(POLICIES)}.")] = "all",
    engine: Annotated[
        Engine | None, typer.Option(help="With a preset: run all plans on this engine instead of the system's own.")
    ] = None,
    train_tokens: Annotated[
        float | None, typer.Option(help="With a preset: tokens of the whole training, for days and dollars.")
    ] = None,
    stages: Annotated[int, typer.Option(help="Without a preset: pipeline stages, p.")] = 1,
    ep: Annotated[int, typer.Option(help="Without a preset: ranks of an expert-parallel group, E.")] = 1,
    heads: Annotated[int | None, typer.Option(help="Without a preset: query heads of one TP rank.")] = None,
    max_ulysses: Annotated[int | None, typer.Option(help="Without a preset: most ranks of a Ulysses group.")] = None,
    max_degree: Annotated[int | None, typer.Option(help="Without a preset: largest degree of any sequence.")] = None,
    cap: Annotated[int | None, typer.Option(help="Without a preset: fix the degree cap C.")] = None,
    theta: Annotated[
        float, typer.Option(help="Without a preset: forward seconds per token²/degree and stage.")
    ] = _COST.theta,
    tau: Annotated[
        float, typer.Option(help="Without a preset: forward seconds per token of a rank and stage.")
    ] = _COST.tau,
    overhead: Annotated[
        float, typer.Option(help="Without a preset: fixed seconds per microbatch and stage.")
    ] = _COST.overhead,
    field: Annotated[str | None, typer.Option(help="Field of a .jsonl or column of a .parquet file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write one policy's schedule for Perfetto to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate an iteration under one scheduling system, or compare all."""
    with reported(as_json):
        policies = _policies(policy)
        if preset is not None:
            _refuse_beside_preset(context, preset)
            cluster = load_cluster(preset)
            batch = paper_batch(cluster, WORKLOADS[lengths]) if lengths in WORKLOADS else read_batch(lengths, field)
            setting = {
                "cluster": cluster.name, "model": cluster.model.name, "gpus": cluster.gpus,
                "token_budget": cluster.token_budget, "token_budget_that_fits": _budget_that_fits(cluster),
            }  # fmt: skip
            gains = paper_setting(preset, lengths).gains
            report = Report({**setting, **_batch_figures(batch)}, TRUST["preset"], gains=gains)
            steps: Iterator[str] = _on_cluster(report, batch, cluster, policies, engine, train_tokens)
        else:
            if pool is None or budget is None:
                raise _invalid("give either --preset, or --pool and --budget")
            if given := _given(context, PRESET_ALONE):
                raise _invalid(f"{_spelled(given)} belong to a cluster: give --preset, or leave them out")
            if lengths in WORKLOADS:
                raise _invalid(f"{lengths} is drawn for a preset's cluster; give --preset, or a file of lengths")
            shape = Pool(
                ranks=pool, token_budget=budget, stages=stages, ep=ep, heads=heads, max_ulysses=max_ulysses,
                max_degree=max_degree,
            )  # fmt: skip
            batch = read_batch(lengths, field)
            report = Report({"gpus": pool * stages, **_batch_figures(batch)}, TRUST["simple"])
            steps = _on_simple_cost(report, batch, shape, policies, CostModel(theta, tau, overhead), cap)
        if trace is not None and not trace.parent.is_dir():
            raise _invalid(f"--trace {trace}: the folder {trace.parent} does not exist")
        complete = _watched(steps, policies)
        if not report.rows and report.errors:
            raise next(iter(report.errors.values()))
        if trace is not None and report.replays:
            _write_trace(report, trace)
        _print(report, as_json)
    if not complete:
        raise typer.Exit(INTERRUPTED)


def _refuse_beside_preset(context: typer.Context, preset: str) -> None:
    """Refuse options that would be ignored, since the preset fixes what they say."""
    if given := _given(context, CLUSTER_FIELDS):
        wanted = " and ".join(f"`{CLUSTER_FIELDS[name]}`" for name in given)
        raise _invalid(
            f"--preset {preset} fixes what {_spelled(given)} would say: leave them out, or give --preset a .yaml file "
            f"with `base: {preset}` and its own {wanted}"
        )
    if given := _given(context, SIMPLE_ALONE):
        raise _invalid(
            f"--preset {preset} fixes what {_spelled(given)} would say, by its model, hardware and engine: leave them "
            f"out; a .yaml file with `base: {preset}` changes those, and without --preset they hold as given"
        )


def _given(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of the options that the user gave, whatever the value."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


def _spelled(names: Iterable[str]) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name in names)


def _budget_that_fits(cluster: Cluster) -> int:
    try:
        return largest_budget(cluster).tokens
    except InfeasibleError:
        return 0


def _policies(asked: str) -> list[str]:
    if asked == "all":
        return list(POLICIES)
    if asked not in POLICIES:
        raise InvalidInputError(
            Reason.UNKNOWN_POLICY, f"policy {asked!r} is unknown; choose all or one of {', '.join(POLICIES)}"
        )
    return [asked]


def _watched(steps: Iterator[str], policies: list[str]) -> bool:
    """Take all steps, showing which one is under way on stderr; False if the user interrupted them."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        warm_up()
        task = progress.add_task(policies[0], total=len(policies))
        try:
            for done, _ in enumerate(steps, 1):
                following = policies[done] if done < len(policies) else "done"
                progress.update(task, completed=done, description=f"{done}/{len(policies)} simulated; {following}")
        except KeyboardInterrupt:
            return False
    return True


def _on_cluster(
    report: Report, batch: Batch, cluster: Cluster, policies: Iterable[str], engine: Engine | None,
    train_tokens: float | None,
) -> Iterator[str]:  # fmt: skip
    for outcome in compare(batch, cluster, policies, engine=engine):
        if outcome.error is not None:
            report.errors[outcome.policy] = outcome.error
        else:
            assert outcome.simulation is not None
            report.rows[outcome.policy] = _row(outcome, outcome.simulation, cluster, train_tokens)
            report.replays[outcome.policy] = outcome.simulation.replay
        yield outcome.policy


def _row(outcome: Outcome, found: Simulation, cluster: Cluster, train_tokens: float | None) -> Row:
    assert outcome.plan is not None
    details: dict[str, Any] = {
        "engine": outcome.engine,
        "mfu": found.mfu,
        "dp_bubble_worst": float(found.dp_bubbles.max()),
        "gradient_sync_s": found.gradient_sync_s,
        "optimizer_s": found.optimizer_s,
        "activity_s": found.activity_s,
        "traffic_bytes": {
            name: {"node": inside, "network": outside} for name, (inside, outside) in found.traffic_bytes.items()
        },
        "degree_share": found.degree_share,
        "padding": found.padding,
        "load": {"min": found.load_min, "mean": found.load_mean, "max": found.load_max},
    }
    if train_tokens is not None:
        seconds = train_tokens / (found.tokens_per_s_per_gpu * cluster.gpus)
        details["days"] = seconds / SECONDS_PER_DAY
        details["dollars"] = seconds / SECONDS_PER_HOUR * cluster.gpus * cluster.dollars_per_gpu_hour
    return Row(
        found.iteration_s, found.pp_bubble, found.dp_bubble, found.tokens_per_s_per_gpu,
        outcome.plan.header.microbatches, outcome.plan_s, int(outcome.plan.degree.max()), details,
    )  # fmt: skip


def _on_simple_cost(
    report: Report, batch: Batch, pool: Pool, policies: Iterable[str], cost: CostModel, cap: int | None
) -> Iterator[str]:
    for policy in policies:
        try:
            plan = plan_iteration(batch, pool, policy=policy, cost=cost, cap=cap)
        except HydraCpError as error:
            report.errors[policy] = error
        else:
            found = forecast(plan, batch)
            speed = batch.tokens / (found.iteration_s * pool.ranks * pool.stages) if found.iteration_s else 0.0
            report.rows[policy] = Row(
                found.iteration_s, found.pp_bubble, found.dp_bubble, speed, plan.header.microbatches,
                plan.header.plan_s, int(plan.degree.max()),
            )  # fmt: skip
            report.replays[policy] = found.replay
        yield policy


def _memory_warning(setting: Mapping[str, Any]) -> str | None:
    budget, fits = setting.get("token_budget", 0), setting.get("token_budget_that_fits", 0)
    if budget <= fits:
        return None
    return (
        f"Memory: a budget of {budget:,} tokens is over the {fits:,} that fit with all microbatches in flight full; "
        "`hydra-cp budget` says what fills a GPU."
    )


def _batch_figures(batch: Batch) -> dict[str, int]:
    return {"sequences": len(batch), "tokens": batch.tokens, "longest_tokens": batch.longest}


def _write_trace(report: Report, path: Path) -> None:
    """The schedule of the only policy, or of the default one among several."""
    name = DEFAULT_POLICY if DEFAULT_POLICY in report.replays else next(iter(report.replays))
    try:
        path.write_text(json.dumps(trace_events(report.replays[name]), default=float))
    except OSError as error:
        raise HydraCpError(Reason.INTERNAL, f"cannot write {path}: {error.strerror or error}") from error
    typer.echo(f"Schedule of {name} written to {path}: open it at https://ui.perfetto.dev", err=True)


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        policies: dict[str, Any] = {name: row.as_json() for name, row in report.rows.items()}
        policies |= {name: {"error": {"reason": e.reason, "message": str(e)}} for name, e in report.errors.items()}
        typer.echo(json.dumps({**report.setting, "policies": policies, "validated": report.trust}))
        return
    console = wide_console()
    shown = report.setting
    where = f"{shown['cluster']} ({shown['model']}), " if "cluster" in shown else ""
    console.print(
        f"{where}{shown['gpus']:,} GPUs; {shown['sequences']:,} sequences, {shown['tokens']:,} tokens, "
        f"longest {shown['longest_tokens']:,}\n"
    )
    console.print(_systems(report.rows, report.gains))
    if any(row.details for row in report.rows.values()):
        console.print()
        console.print(_activities(report.rows))
    for name, error in report.errors.items():
        console.print(f"\n{name}: no plan. {error}")
    if warning := _memory_warning(shown):
        console.print(f"\n{warning}")
    console.print(f"\n{report.trust}")


COLUMNS: dict[str, Callable[[Row], str]] = {
    "iteration": lambda row: f"{row.iteration_s:.4g} s",
    "PP bubble": lambda row: f"{row.pp_bubble:.1%}",
    "DP bubble": lambda row: f"{row.dp_bubble:.1%}",
    "tokens/s/GPU": lambda row: f"{row.tokens_per_s_per_gpu:,.0f}",
    "MBs": lambda row: f"{row.microbatches:,}",
    "degree ≤": lambda row: f"{row.largest_degree:,}",
    "planned in": lambda row: f"{row.plan_s:.2f} s",
}
DETAIL_COLUMNS: dict[str, Callable[[Row], str]] = {
    "MFU": lambda row: f"{row.details['mfu']:.1%}",
    "engine": lambda row: str(row.details["engine"]),
}
MONEY_COLUMNS: dict[str, Callable[[Row], str]] = {
    "days": lambda row: f"{row.details['days']:.1f}",
    "dollars": lambda row: f"{row.details['dollars']:,.0f}",
}


def _gain(slower: Row, faster: Row) -> str:
    """How many times as fast; nothing to compare where an iteration takes no time."""
    return f"{slower.iteration_s / faster.iteration_s:.2f}" if faster.iteration_s else "–"


def _systems(rows: dict[str, Row], gains: Mapping[str, float]) -> Table:
    columns = dict(COLUMNS)
    details = next(iter(rows.values())).details
    columns |= (DETAIL_COLUMNS if details else {}) | (MONEY_COLUMNS if "days" in details else {})
    table = Table("system", box=None, pad_edge=False)
    against, ours = rows.get(BASELINE), rows.get("hydra")
    if against is not None and len(rows) > 1:
        columns = {f"× {BASELINE}": lambda row: _gain(against, row), **columns}
    for name in columns:
        table.add_column(name, justify="right")
    beside_paper = ours is not None and not rows.keys().isdisjoint(gains)
    if beside_paper:
        table.add_column("hydra is ×", justify="right")
        table.add_column("paper: ×", justify="right")
    for name, row in rows.items():
        cells = [shown(row) for shown in columns.values()]
        if ours is not None and beside_paper:
            reported_gain = f"{gains[name]:.2f}" if name in gains else ""
            cells += [_gain(row, ours), reported_gain]
        table.add_row(name, *cells)
    return table


def _activities(rows: dict[str, Row]) -> Table:
    """Shares of the iteration, mean over GPUs: what no system spends a thousandth on is left out."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row.details["activity_s"]))
    share = {
        name: [row.details["activity_s"].get(name, 0.0) / row.iteration_s for row in rows.values()] for name in names
    }
    table = Table("share of the iteration", box=None, pad_edge=False)
    for name in rows:
        table.add_column(name, justify="right")
    for name, shares in share.items():
        if max(shares) >= 1e-3:
            table.add_row(name, *(f"{each:.1%}" for each in shares))
    return table


def _invalid(message: str) -> InvalidInputError:
    return InvalidInputError(Reason.INVALID_ARGUMENT, message)
