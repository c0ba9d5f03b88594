"""`hydra-cp plan`: plan one batch of lengths on this machine, without a service."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from scheduler_service.cli.failures import reported
from scheduler_service.cli.length_files import read_batch
from scheduler_service.cli.rank_speeds import rank_speeds
from scheduler_service.domain import CostModel, HydraCpError, InvalidInputError, Plan, Pool, Reason
from scheduler_service.planning import (
    DEFAULT_POLICY,
    POLICIES,
    PlanStatistics,
    plan_iteration,
    plan_statistics,
    warm_up,
)

COLUMNS = ("microbatch", "start", "degree")

_COST = CostModel()


def plan(
    lengths: Annotated[str, typer.Argument(help=".txt, .npy, .json, .jsonl, .parquet or Megatron .idx; - for stdin.")],
    pool: Annotated[int, typer.Option(help="Ranks that share the batch (DP×CP), G.")],
    budget: Annotated[int, typer.Option(help="Most padded tokens of a rank in one microbatch, B.")],
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")] = DEFAULT_POLICY,
    stages: Annotated[int, typer.Option(help="Pipeline stages, p.")] = 1,
    ep: Annotated[int, typer.Option(help="Ranks of an expert-parallel group, E.")] = 1,
    heads: Annotated[int | None, typer.Option(help="Query heads of one TP rank.")] = None,
    max_ulysses: Annotated[int | None, typer.Option(help="Most ranks of an inner Ulysses group.")] = None,
    cap: Annotated[int | None, typer.Option(help="Fix the degree cap C instead of choosing it.")] = None,
    max_degree: Annotated[int | None, typer.Option(help="Largest degree of any sequence.")] = None,
    microbatch_multiple: Annotated[int, typer.Option(help="The number of microbatches is a multiple of this.")] = 1,
    rank_speed: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK=SPEED", help="A rank that is slower than the fastest, as 3=0.5. Repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="RANKS", help="Ranks that get no sequence, as 3,17 or 8-15. Repeatable."),
    ] = None,
    theta: Annotated[float, typer.Option(help="Forward seconds per token²/degree and stage.")] = _COST.theta,
    tau: Annotated[float, typer.Option(help="Forward seconds per token of a rank and stage.")] = _COST.tau,
    overhead: Annotated[float, typer.Option(help="Fixed seconds per microbatch and stage.")] = _COST.overhead,
    field: Annotated[str | None, typer.Option(help="Field of a .jsonl or column of a .parquet file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this .npz or .json file.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; with the columns, unless --out has them.")
    ] = False,
) -> None:
    """Plan a batch: microbatch, group and degree of every sequence."""
    with reported(as_json):
        if out is not None:
            _check_output(out)
        batch = read_batch(lengths, field)
        shape = Pool(
            ranks=pool, token_budget=budget, stages=stages, ep=ep, heads=heads, max_ulysses=max_ulysses,
            max_degree=max_degree, microbatch_multiple=microbatch_multiple,
            speeds=rank_speeds(rank_speed or (), exclude or ()),
        )  # fmt: skip
        warm_up()  # so that the planning time that is shown is that of planning
        made = plan_iteration(batch, shape, policy=policy, cost=CostModel(theta, tau, overhead), cap=cap)
        statistics = plan_statistics(made, batch)
        if out is not None:
            write_plan(made, out)
        if as_json:
            columns = {} if out is not None else _columns_as_lists(made)
            typer.echo(json.dumps({**made.header_json(), "statistics": asdict(statistics), **columns}))
        else:
            _print_summary(made, statistics, out)


def write_plan(plan: Plan, path: Path) -> None:
    """Write the columns and the header to `path` (.npz or .json); all of it or nothing.

    Raises `HydraCpError` where the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            if path.suffix == ".npz":
                columns = {name: getattr(plan, name) for name in COLUMNS}
                np.savez(file, header=np.array(json.dumps(plan.header_json())), **columns)
            else:
                file.write(json.dumps({"header": plan.header_json(), **_columns_as_lists(plan)}).encode())
        temporary.replace(path)
    except OSError as error:
        raise HydraCpError(Reason.INTERNAL, f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _check_output(path: Path) -> None:
    if path.suffix not in (".npz", ".json"):
        raise InvalidInputError(Reason.INVALID_ARGUMENT, f"--out {path}: name a .npz or a .json file")
    if not path.parent.is_dir():
        raise InvalidInputError(Reason.INVALID_ARGUMENT, f"--out {path}: the folder {path.parent} does not exist")


def _columns_as_lists(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name).tolist() for name in COLUMNS}


def _speeds(pool: Pool) -> str:
    excluded = len(pool.excluded)
    return f"{len(pool.speeds) - excluded} slow, {excluded} excluded; worth {pool.total_speed:.5g} ranks of full speed"


def _print_summary(plan: Plan, statistics: PlanStatistics, out: Path | None) -> None:
    header = plan.header
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (
        ("policy", header.policy),
        (
            "pool",
            f"{header.pool.ranks} ranks × {header.pool.token_budget:,} tokens, "
            f"{header.pool.stages} stage{'s' if header.pool.stages > 1 else ''}",
        ),
        *((("rank speeds", _speeds(header.pool)),) if header.pool.speeds else ()),
        (
            "batch",
            f"{statistics.sequences:,} sequences, {statistics.tokens:,} tokens, longest {statistics.longest_tokens:,}",
        ),
        ("microbatches", f"{header.microbatches:,}, {statistics.idle_share:.1%} of the rank slots idle"),
        *((("load target Λ", f"{header.target:.4g} token² at degree cap {header.cap}"),) if header.target else ()),
        (
            "attention load",
            f"{statistics.peak_min:.4g} … {statistics.load_max:.4g} token² on the fullest rank of a microbatch, mean "
            f"of all ranks {statistics.load_mean:.4g} ({statistics.imbalance:.2f}×)",
        ),
        ("padding", f"{statistics.padding - 1:.2%}"),
        ("predicted", f"{header.predicted_s:.4g} s; no plan is below {header.lower_bound_s:.4g} s (simple cost model)"),
        ("bubbles", f"pipeline {statistics.pp_bubble:.1%}, data parallel {statistics.dp_bubble:.1%}"),
        ("planned in", f"{header.plan_s * 1e3:.1f} ms"),
        ("digest", plan.digest),
        *((("written to", str(out)),) if out is not None else ()),
    ):
        table.add_row(name, value)
    console.print(table)

    degrees = Table("degree", "sequences", "share of the busy slots", box=None, pad_edge=False)
    for degree, sequences in statistics.degree_sequences.items():
        degrees.add_row(str(degree), f"{sequences:,}", f"{statistics.degree_share[degree]:.1%}")
    console.print()
    console.print(degrees)
