"""`hydra-cp validate`: the simulation against published and recorded numbers, each with its error."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from scheduler_service.cli.console import wide_console
from scheduler_service.cli.failures import reported
from scheduler_service.domain import InvalidInputError, Reason
from scheduler_service.simulation.validation import SECTIONS, Check, production_trace

SHOWN = 20
"""Rows of a section that are shown; of longer ones, those with the largest errors."""


def validate(
    trace: Annotated[
        Path | None, typer.Option(help="Also a recorded job: .npz with F, B, first_fwd_start, last_bwd_end.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the simulation against published and recorded numbers."""
    with reported(as_json):
        sections = {name: list(checks()) for name, checks in SECTIONS.items()}
        if trace is not None:
            sections["Recorded job"] = _recorded(trace)
        if as_json:
            rows = {name: [{**asdict(c), "error": c.error} for c in checks] for name, checks in sections.items()}
            typer.echo(json.dumps(rows))
        else:
            for name, checks in sections.items():
                _print(name, checks)


def _recorded(trace: Path) -> list[Check]:
    try:
        return list(production_trace(trace))
    except Exception as error:  # a damaged file may raise anything: of zip, of zlib, of numpy
        if isinstance(error, OSError) and error.strerror:
            raise InvalidInputError(Reason.INVALID_ARGUMENT, f"--trace {trace}: {error.strerror}") from error
        needed = "give an .npz file with F, B, first_fwd_start and last_bwd_end of each step"
        raise InvalidInputError(Reason.INVALID_ARGUMENT, f"--trace {trace}: is no recorded job; {needed}") from error


def _print(name: str, checks: list[Check]) -> None:
    errors = np.array([check.error for check in checks])
    worst = np.argsort(-np.abs(errors))[:SHOWN] if len(checks) > SHOWN else np.arange(len(checks))
    title = f"{name}: {len(checks)} figures, error {np.abs(errors).mean():.2%} mean, {np.abs(errors).max():.2%} largest"
    if len(checks) == 1:
        title = f"{name}: 1 figure, error {abs(checks[0].error):.2%}"
    if any(check.fitted for check in checks):
        title += "; constants fitted on these"
    if len(worst) < len(checks):
        title += f"; the {SHOWN} worst"
    table = Table("", box=None, pad_edge=False)
    for column in ("predicted", "published", "error"):
        table.add_column(column, justify="right")
    table.add_column("")
    for i in worst:
        check = checks[i]
        table.add_row(
            check.name, f"{check.predicted:.4g}", f"{check.published:.4g}", f"{check.error:+.2%}", check.unit
        )  # fmt: skip
    console = wide_console()
    console.print(f"[bold]{title}[/bold]")
    console.print(table)
    console.print()
