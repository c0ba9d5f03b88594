"""`hydra-cp simulate`: how long an iteration takes under each scheduling system, where the time goes, what it costs.

With a preset, plans run on the model of operators; with a pool and three constants, on the simple cost model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scheduler_service.cli.failures import plain_interruptions, reported
from scheduler_service.cli.length_files import read_batch
from scheduler_service.cli.rank_speeds import rank_speeds
from scheduler_service.cli.simulate_report import Report, Row, print_report
from scheduler_service.domain import (
    Batch,
    CostModel,
    HydraCpError,
    InfeasibleError,
    InvalidInputError,
    Plan,
    Pool,
    Reason,
)
from scheduler_service.planning import DEFAULT_POLICY, POLICIES, plan_iteration, warm_up
from scheduler_service.planning.comparison import Outcome, compare
from scheduler_service.planning.iteration import POLICIES_FOR_SLOW_RANKS
from scheduler_service.simulation import Forecast, forecast
from scheduler_service.simulation.cluster import Cluster, Engine
from scheduler_service.simulation.job import Simulation
from scheduler_service.simulation.memory import largest_budget, plan_memory
from scheduler_service.simulation.paper import paper_setting
from scheduler_service.simulation.pictures import figure_class, time_picture
from scheduler_service.simulation.presets import load_cluster
from scheduler_service.simulation.trace_events import trace_events
from scheduler_service.simulation.workloads import WORKLOADS, paper_batch

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

PICTURES = (".png", ".svg", ".pdf")
"""What --plot can be."""

MOST_TRAIN_TOKENS = 1e18
"""Most tokens of a whole training."""

SECONDS_PER_DAY, SECONDS_PER_HOUR = 86_400, 3_600
INTERRUPTED = 130


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
    rank_speed: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK=SPEED", help="A rank that is slower than the fastest, as 3=0.5. Repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="RANKS", help="Ranks that get no sequence, as 3,17 or 8-15. Repeatable."),
    ] = None,
    field: Annotated[str | None, typer.Option(help="Field of a .jsonl or column of a .parquet file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw where each system's time goes: .png, .svg or .pdf; needs matplotlib.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write one policy's schedule for Perfetto to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate an iteration under one scheduling system, or compare all."""
    with reported(as_json):
        policies = _policies(policy)
        if train_tokens is not None and not 0 <= train_tokens <= MOST_TRAIN_TOKENS:
            raise _invalid(f"--train-tokens is {train_tokens}; give a number from 0 to {MOST_TRAIN_TOKENS:g}")
        speeds = rank_speeds(rank_speed or (), exclude or ())
        if preset is not None:
            _refuse_beside_preset(context, preset)
            cluster = _with_speeds(load_cluster(preset), speeds)
            batch = paper_batch(cluster, WORKLOADS[lengths]) if lengths in WORKLOADS else read_batch(lengths, field)
            setting = {**_job_figures(cluster), **_batch_figures(batch)}
            report = Report(setting, TRUST["preset"], paper=paper_setting(preset, lengths))
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
                max_degree=max_degree, speeds=speeds,
            )  # fmt: skip
            batch = read_batch(lengths, field)
            setting = {"gpus": pool * stages, **_speed_figures(shape), **_batch_figures(batch)}
            report = Report(setting, TRUST["simple"])
            steps = _on_simple_cost(report, batch, shape, policies, CostModel(theta, tau, overhead), cap)
        _check_outputs(plot, trace)
        complete = _watched(steps, policies)
        if not report.rows and report.errors:
            raise next(iter(report.errors.values()))
        if report.rows:
            _write_trace(report, trace)
            _write_picture(report, plot)
            print_report(report, as_json)
    if not complete:
        raise typer.Exit(INTERRUPTED)


def _with_speeds(cluster: Cluster, speeds: list[tuple[int, float]]) -> Cluster:
    """What the options say of a rank goes over what the cluster's file says of it."""
    named = dict(speeds)
    return replace(cluster, speeds=[*(pair for pair in dict(cluster.speeds).items() if pair[0] not in named), *speeds])


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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        warm_up()
        task = progress.add_task(policies[0], total=len(policies))
        try:
            with plain_interruptions():
                for done, _ in enumerate(steps, 1):
                    following = policies[done] if done < len(policies) else "done"
                    progress.update(task, completed=done, description=following)
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
            report.rows[outcome.policy] = _row(outcome, outcome.simulation, batch, cluster, train_tokens)
            report.replays[outcome.policy] = outcome.simulation.replay
        yield outcome.policy


def _row(
    outcome: Outcome, found: Simulation, batch: Batch, cluster: Cluster, train_tokens: float | None
) -> Row:  # fmt: skip
    assert outcome.plan is not None
    details: dict[str, Any] = {
        "engine": outcome.engine,
        "mfu": found.mfu,
        "dollars_per_million_tokens": dollars_per_million_tokens(found, cluster),
        "dp_bubble_worst": float(found.dp_bubbles.max()),
        "gradient_sync_s": found.gradient_sync_s,
        "optimizer_s": found.optimizer_s,
        **memory_figures(outcome.plan, batch, cluster.with_engine(outcome.engine)),
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
        outcome.plan.header.microbatches, outcome.plan_s, int(outcome.plan.degree.max()), found.activity_s, details,
    )  # fmt: skip


def dollars_per_million_tokens(found: Simulation, cluster: Cluster) -> float:
    """Of training, by what a GPU-hour costs."""
    return 1e6 / found.tokens_per_s_per_gpu / SECONDS_PER_HOUR * cluster.dollars_per_gpu_hour


def memory_figures(plan: Plan, batch: Batch, cluster: Cluster) -> dict[str, Any]:
    """Memory of the fullest GPU under a plan, and whether it has that much."""
    stages = plan_memory(plan, batch, cluster)
    fullest = max(range(len(stages)), key=lambda stage: stages[stage].total)
    needed = stages[fullest].total
    return {
        "peak_memory_bytes": needed, "fullest_stage": fullest, "largest_term": stages[fullest].largest,
        "memory_fits": needed <= cluster.hardware.memory_bytes,
    }  # fmt: skip


def _on_simple_cost(
    report: Report, batch: Batch, pool: Pool, policies: Iterable[str], cost: CostModel, cap: int | None
) -> Iterator[str]:
    for policy in policies:
        planned_for = pool if policy in POLICIES_FOR_SLOW_RANKS else pool.evened
        try:
            plan = plan_iteration(batch, planned_for, policy=policy, cost=cost, cap=cap)
        except HydraCpError as error:
            report.errors[policy] = error
        else:
            found = forecast(replace(plan, header=replace(plan.header, pool=pool)), batch)
            speed = batch.tokens / (found.iteration_s * pool.ranks * pool.stages) if found.iteration_s else 0.0
            report.rows[policy] = Row(
                found.iteration_s, found.pp_bubble, found.dp_bubble, speed, plan.header.microbatches,
                plan.header.plan_s, int(plan.degree.max()), _simple_activities(found),
            )  # fmt: skip
            report.replays[policy] = found.replay
        yield policy


def _simple_activities(found: Forecast) -> dict[str, float]:
    """Microbatches are not split further: they hold what ranks wait for each other inside an EP group."""
    busy = float((found.forward_s + found.backward_s).sum(axis=1).mean())
    dp_wait = found.dp_bubble * found.iteration_s
    return {"microbatches": busy, "PP wait": max(0.0, found.iteration_s - dp_wait - busy), "DP wait": dp_wait}


def _job_figures(cluster: Cluster) -> dict[str, Any]:
    return {
        "cluster": cluster.name, "model": cluster.model.name, "hardware": cluster.hardware.name, "gpus": cluster.gpus,
        "pool": cluster.ranks, "tp": cluster.tp, "stages": cluster.stages, "ep": cluster.ep,
        "recompute": cluster.recompute, "token_budget": cluster.token_budget,
        "token_budget_that_fits": _budget_that_fits(cluster), "memory_bytes": cluster.hardware.memory_bytes,
        **_speed_figures(cluster.pool),
    }  # fmt: skip


def _speed_figures(pool: Pool) -> dict[str, Any]:
    return {"speeds": dict(pool.speeds)} if pool.speeds else {}


def _batch_figures(batch: Batch) -> dict[str, int]:
    return {"sequences": len(batch), "tokens": batch.tokens, "longest_tokens": batch.longest}


def _check_outputs(plot: Path | None, trace: Path | None) -> None:
    for option, path in (("--plot", plot), ("--trace", trace)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise _invalid(f"{option} {path}: the folder {path.parent} does not exist")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise _invalid(f"{option} {path}: cannot be written; name a file that can")
    if plot is not None:
        if plot.suffix not in PICTURES:
            raise _invalid(f"--plot {plot}: name a {', '.join(PICTURES)} file")
        figure_class()  # if matplotlib is missing, say so now, not after minutes of planning


def _write_trace(report: Report, path: Path | None) -> None:
    """The schedule of the only policy, or of the default one among several."""
    if path is None:
        return
    name = DEFAULT_POLICY if DEFAULT_POLICY in report.replays else next(iter(report.replays))
    with _writing(path):
        path.write_text(json.dumps(trace_events(report.replays[name]), default=float))
    typer.echo(f"Schedule of {name} written to {path}: open it at https://ui.perfetto.dev", err=True)


def _write_picture(report: Report, path: Path | None) -> None:
    if path is None:
        return
    with _writing(path):
        time_picture(report.activity_s, report.title).savefig(path, dpi=150)
    typer.echo(f"Where the time goes is drawn in {path}", err=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HydraCpError(Reason.INTERNAL, f"cannot write {path}: {error.strerror or error}") from error


def _invalid(message: str) -> InvalidInputError:
    return InvalidInputError(Reason.INVALID_ARGUMENT, message)
