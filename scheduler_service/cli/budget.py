"""`hydra-cp budget`: the largest token budget that a cluster's GPUs have memory for, and what fills them."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Annotated

import typer
from rich.table import Table

from scheduler_service.cli.console import wide_console
from scheduler_service.cli.failures import reported
from scheduler_service.simulation.cluster import Cluster, Recompute
from scheduler_service.simulation.memory import StageMemory, TokenBudget, largest_budget
from scheduler_service.simulation.presets import load_cluster


def budget(
    preset: Annotated[str, typer.Option(help="A cluster preset, or the path of a .yaml file like one.")],
    recompute: Annotated[
        Recompute | None, typer.Option(help="What the backward computes again, instead of the preset's choice.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the largest token budget that fits in GPU memory."""
    with reported(as_json):
        cluster = load_cluster(preset)
        if recompute is not None:
            cluster = replace(cluster, recompute=recompute)
        found = largest_budget(cluster)
        if as_json:
            typer.echo(json.dumps(_as_json(cluster, found)))
        else:
            _print(cluster, found)


def _as_json(cluster: Cluster, found: TokenBudget) -> dict[str, object]:
    return {
        "cluster": cluster.name,
        "recompute": cluster.recompute,
        "token_budget": found.tokens,
        "binding_stage": found.binding_stage,
        "binding_term": found.stages[found.binding_stage].largest,
        "memory_bytes": cluster.hardware.memory_bytes,
        "stages": [{**asdict(stage), "total": stage.total} for stage in found.stages],
    }


def _print(cluster: Cluster, found: TokenBudget) -> None:
    console = wide_console()
    binding = found.stages[found.binding_stage]
    capacity = cluster.hardware.memory_bytes
    console.print(
        f"{cluster.name}: {found.tokens:,} tokens a rank and microbatch fill stage {found.binding_stage}; "
        f"{binding.largest} take {getattr(binding, binding.largest) / capacity:.0%} of its {capacity / 1e9:.0f} GB "
        f"(recompute: {cluster.recompute})."
    )
    if found.tokens < cluster.token_budget:
        console.print(
            f"The preset's budget is {cluster.token_budget:,}: it fits only if microbatches in flight are "
            f"{found.tokens / cluster.token_budget:.0%} full on average, or with more recomputation."
        )
    names = [field.name for field in fields(StageMemory)] + ["total"]
    table = Table("GB of a GPU", *names, box=None, pad_edge=False)
    for number, stage in enumerate(found.stages):
        table.add_row(f"stage {number}", *(f"{getattr(stage, name) / 1e9:.1f}" for name in names))
    console.print(table)
    console.print("All microbatches in flight full. Counted, not validated against a measured job.")
