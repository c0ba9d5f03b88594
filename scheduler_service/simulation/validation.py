"""The simulation against numbers that others published or recorded: predicted, published, error.

The figures are inside the package, with their sources. Only the production trace is not: it is 43 steps of a job whose
traces ByteDance published with its straggler study (OSDI 2025), reduced to arrays F and B (step, replica, stage,
microbatch), first_fwd_start (step, replica) and last_bwd_end (step, replica, stage), in seconds.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import yaml

from scheduler_service.domain import Batch, CostModel, Plan, PlanHeader
from scheduler_service.simulation.cluster import Cluster, Engine, Recompute
from scheduler_service.simulation.collectives import ring_collective, team_of
from scheduler_service.simulation.flops import model_flops
from scheduler_service.simulation.hardware import AttentionKernel
from scheduler_service.simulation.job import simulate
from scheduler_service.simulation.models import GroupedQuery, Model
from scheduler_service.simulation.operators import Documents, GroupCut, attention_forward_s
from scheduler_service.simulation.pipeline import replay_pipeline
from scheduler_service.simulation.presets import load_hardware, load_model

PUBLISHED = "scheduler_service.simulation.published"

FLASH_ATTENTION_2 = AttentionKernel(launch_s=1.82e-5, walk_s=8.37e-10, forward_flops=344.8e12, backward_flops=327.6e12)
"""On an H100. Launch, walk, forward: fitted on 144 published points; backward: 0.95 of it (design, section 2)."""

PARAMETERS = {
    "deepseek_v3": (671, 37.6), "kimi_k2": (1026, 32.9), "qwen3_30b_a3b": (30.5, 3.4), "qwen3_235b_a22b": (235.1, 22.2),
    "llama3_8b": (8.0, None), "llama3_70b": (70.6, None), "llama3_405b": (405.8, None), "glm_4_5": (352.8, None),
    "hy3_preview": (295.0, 20.7),
}  # fmt: skip
"""Billions, in all and active, from the models' own pages."""

TRAINING_GFLOP = {
    ("llama3_8b", 8192): 51.5, ("llama3_70b", 8192): 448.8, ("llama3_405b", 8192): 2521.5,
    ("qwen3_30b_a3b", 4096): 23.0, ("qwen3_235b_a22b", 4096): 147.9, ("deepseek_v3", 4096): 249.7,
}  # fmt: skip
"""Model and length → GFLOP per token with the backward as MFU counts it (design of the simulation, section 1)."""

BUBBLE_RATES = {
    (8, 24, 18.522, 27.423, 0.601): 0.2431, (8, 64, 18.546, 27.418, 0.762): 0.1240,
    (8, 32, 29.802, 48.958, 0.577): 0.1898, (16, 48, 11.347, 19.380, 0.377): 0.2552,
    (16, 128, 11.325, 19.417, 0.378): 0.1251, (32, 96, 10.419, 17.922, 0.408): 0.2646,
    (32, 256, 10.402, 17.946, 0.460): 0.1352,
}  # fmt: skip
"""Stages, microbatches, forward, backward, latency in ms → 1F1B's bubble, from the zero-bubble pipeline's authors."""

RING_SHARES = {
    2: (0.32, 0.67, 0.92), 8: (0.13, 0.54, 0.90), 32: (0.044, 0.205, 0.74), 128: (0.0087, 0.053, 0.315),
}  # fmt: skip
"""Nodes of eight H100 → share of the peak of a ring at 16 MB, 128 MB, 1 GB (design of the simulation, section 2)."""

RING_SIZES = (16e6, 128e6, 1e9)
NODE_PEAK = 400e9
"""Bytes per second of a node's eight 400 Gb/s cards."""

MICROBATCH_SEQUENCES = (1, 2, 4, 8)
"""Where a source does not say how many sequences a microbatch has, the fastest of these that divides the batch."""


@dataclass(frozen=True)
class Check:
    """One number, ours and theirs."""

    name: str
    predicted: float
    published: float
    unit: str
    fitted: bool = False
    """Whether constants were fitted on it."""

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.published - 1


def parameters() -> Iterator[Check]:
    """Parameters of the model presets."""
    for name, (total, active) in PARAMETERS.items():
        model = load_model(name)
        yield Check(f"{model.name}, all", model.parameters / 1e9, total, "billion")
        if active is not None:
            yield Check(f"{model.name}, active", model.active_parameters / 1e9, active, "billion")


def training_work() -> Iterator[Check]:
    """Work per token."""
    for (name, length), published in TRAINING_GFLOP.items():
        model = load_model(name)
        found = model_flops(model, length, length**2) / length / 1e9
        yield Check(f"{model.name}, {length:,} tokens", found, published, "GFLOP/token")


def bubble_rates() -> Iterator[Check]:
    """Bubbles of uniform pipelines with latency."""
    for (stages, microbatches, forward, backward, latency), published in BUBBLE_RATES.items():
        ones = np.ones((1, stages, microbatches))
        replay = replay_pipeline(forward * ones, backward * ones, p2p_latency=latency)
        yield Check(
            f"{stages} stages, {microbatches} microbatches", float(replay.pp_bubble[0]), published, "of the span"
        )


def ring_shares() -> Iterator[Check]:
    """How far large rings fall below the peak."""
    hardware, sizes = load_hardware("h100"), np.array(RING_SIZES)
    for nodes, shares in RING_SHARES.items():
        team = team_of(hardware, hardware.gpus_per_node * nodes)
        rates = sizes * (team.size - 1) / team.size / ring_collective(hardware, sizes, team).seconds / NODE_PEAK
        for size, predicted, published in zip(RING_SIZES, rates, shares, strict=True):
            yield Check(f"{nodes} nodes, {size / 1e6:,.0f} MB", float(predicted), published, "of the peak")


def attention_times() -> Iterator[Check]:
    """Attention of one document on an H100."""
    hardware = replace(load_hardware("h100"), attention=FLASH_ATTENTION_2)
    attention = GroupedQuery(heads=64, kv_heads=4, head_dim=128)
    lines = (files(PUBLISHED) / "attention_h100.csv").read_text().splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        length, cp, tp = (int(row[name]) for name in ("length_tokens", "cp", "tp"))
        documents = Documents(np.array([float(length)]), np.array([float(length) ** 2]))
        seconds = attention_forward_s(hardware, attention, documents, GroupCut(tp=tp, ring=cp))[0]
        yield Check(
            f"{length:,} tokens, cp {cp}, tp {tp}", seconds * 1e3, float(row["milliseconds"]), "ms", fitted=True
        )


def iterations() -> Iterator[Check]:
    """Whole iterations of published runs, as the model has them: in BF16, under 1F1B."""
    return _iterations(outside=False)


def iterations_outside() -> Iterator[Check]:
    """Whole iterations of published runs with what the model has not, to say how far off it is there."""
    return _iterations(outside=True)


def _iterations(*, outside: bool) -> Iterator[Check]:
    for row in yaml.safe_load((files(PUBLISHED) / "iterations.yaml").read_text()):
        if ("outside" in row) is not outside:
            continue
        job, model = _published_job(row)
        iteration_s = _best_iteration_s(job, row)
        predicted = iteration_s
        if row["unit"] == "TFLOPS/GPU":
            predicted = _counted_flops(row, model) / (iteration_s * job.gpus) / 1e12
        name = f"{row['name']}, {job.gpus:,} {job.hardware.name} ({row['source']})"
        if outside:
            name += f": {row['outside']}"
        yield Check(name, predicted, row["value"], row["unit"])


def production_trace(trace: Path) -> Iterator[Check]:
    """Recorded steps of a 128-GPU job: the pipelines' span and the DP bubble, mean over all steps."""
    recorded = np.load(trace)
    spans, bubbles = [], []
    for forward, backward, start, last in zip(
        *(recorded[name] for name in ("F", "B", "first_fwd_start", "last_bwd_end")), strict=True
    ):
        start = start.astype(float)
        replay = replay_pipeline(forward, backward, start=start)
        end = last.max(axis=1).astype(float)
        spans.append((replay.span.max(), (end - start).max()))
        bubbles.append((replay.dp_bubble.mean(), ((end.max() - end) / (end.max() - start.min())).mean()))
    for name, values, unit in (("pipeline span", spans, "s"), ("DP bubble", bubbles, "of the step")):
        predicted, published = np.mean(values, axis=0)
        yield Check(f"{name}, {len(values)} steps", float(predicted), float(published), unit)


SECTIONS: Mapping[str, Callable[[], Iterator[Check]]] = MappingProxyType(
    {
        "Parameters": parameters,
        "Work per token": training_work,
        "Bubbles of 1F1B": bubble_rates,
        "Rings": ring_shares,
        "Attention (FlashAttention-2 on H100)": attention_times,
        "Whole iterations": iterations,
        "Whole iterations outside the model's scope": iterations_outside,
    }
)
"""All checks that need no file."""


def _published_job(row: Mapping[str, Any]) -> tuple[Cluster, Model]:
    if "model" in row:
        model = load_model(row["model"])
    else:
        hidden, heads = row["hidden"], row["heads"]
        model = Model(
            row["name"], row["layers"], hidden, row["vocabulary"], GroupedQuery(heads, heads, hidden // heads),
            dense_layers=row["layers"], dense_width=4 * hidden, gated_ffn=False, tied_embedding=True,
        )  # fmt: skip
    full = row.get("count") == "recompute" or row.get("recompute") == "full"
    return Cluster(
        row["name"], model, load_hardware(row["gpu"]), ranks=row["ranks"], token_budget=8 * row["sequence"],
        tp=row["tp"], stages=row["stages"], ep=row.get("ep", 1), chunks=row.get("chunks", 1), engine=Engine.RING,
        recompute=Recompute.FULL if full else Recompute.NONE,
    ), model  # fmt: skip


def _best_iteration_s(job: Cluster, row: Mapping[str, Any]) -> float:
    degree, batch = row.get("degree", 1), Batch([row["sequence"]] * row["batch"])
    groups = job.ranks // degree
    found = []
    for each in MICROBATCH_SEQUENCES:
        microbatches, rest = divmod(len(batch), groups * each)
        if rest == 0 and (job.chunks == 1 or microbatches % job.stages == 0):
            found.append(simulate(_even_plan(job, batch, degree, each, microbatches), batch, job).iteration_s)
    return min(found)


def _even_plan(job: Cluster, batch: Batch, degree: int, each: int, microbatches: int) -> Plan:
    """`each` sequences for every group in every microbatch."""
    groups = job.ranks // degree
    header = PlanHeader(
        "static_cp", replace(job.pool, max_ulysses=1), CostModel(), microbatches, len(batch), batch.digest
    )
    sequence = np.arange(len(batch), dtype=np.int32)
    microbatch, start = sequence // (groups * each), sequence // each % groups * degree
    return Plan(microbatch.astype(np.int32), start.astype(np.int32), np.full(len(batch), degree, np.int32), header)


def _counted_flops(row: Mapping[str, Any], model: Model) -> float:
    """Work of an iteration as the source counts it."""
    tokens = row["batch"] * row["sequence"]
    if row["count"] == "model":
        return model_flops(model, tokens, tokens * row["sequence"])
    layers, hidden, length = model.layers, model.hidden, row["sequence"]
    return (
        96 * tokens * layers * hidden**2 * (1 + length / (6 * hidden) + model.vocabulary / (16 * layers * hidden))
    )  # fmt: skip
