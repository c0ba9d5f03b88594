"""Parity of training: whatever the plan, the same loss curve and the same gradient norms, iteration after iteration.

Trains the reference model for 1,000 iterations on real documents: in one process that holds every expert, and on a
pool of four gloo ranks with expert parallelism 2, by the plans of four policies; each in fp64 and in fp32. Plans come
straight from `plan_iteration`, in the process of each rank: delivery through the service has tests of its own. Sample
and iteration numbers are those of the sampler, so that iteration t holds the same documents in every run.

Compared is the spread at one iteration: the largest value of any run over the smallest, less one. In fp64 it is taken
pointwise; in fp32, where a rounding that sends one token to another expert leaves its mark, over means of 50
iterations. Writes build/parity/parity.json and parity.png, prints a table, and exits with 1 where a spread is above
1e-3. `--docs` puts table and picture into the documents.

    python -m tests.benchmarks.parity [--iterations N] [--docs]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scheduler_service.domain import Batch, Pool, slice_plan
from scheduler_service.planning import plan_iteration
from tests.benchmarks.reporting import Check, checks_table, table, with_tables
from tests.support.ranks import run_ranks
from worker_agent.data import shift_labels
from worker_agent.training.config import CPU_COST, ModelConfig, OptimizerConfig
from worker_agent.training.documents import CorpusConfig, Documents, prepare_documents
from worker_agent.training.model import LanguageModel
from worker_agent.training.sampler import Sampler
from worker_agent.training.topology import build_topology
from worker_agent.training.trainer import Trainer

Curve = npt.NDArray[np.float64]

LIMIT = 1e-3
WINDOW = {"float64": 1, "float32": 50}
"""Iterations of each mean that is compared, by type."""

BATCH = 12
CORPUS = CorpusConfig(vocabulary=512, shortest=16, longest=512, documents=300)
MODEL = ModelConfig(
    vocabulary=512, hidden=32, layers=2, dense_layers=1, heads=2, q_rank=16, kv_rank=16, nope_dim=8, rope_dim=4,
    value_dim=8, dense_width=64, experts=8, top_k=2, expert_width=16,
)  # fmt: skip
OPTIMIZER = OptimizerConfig(learning_rate=3e-4, warmup=100, bias_step=3e-5)
"""Slow enough that fp32 runs stay together: a routing choice that rounding flips may move an expert's bias by a whole
step, and training amplifies what follows by its rate. What others gave: docs/engine.md, Parity."""

FOLDER = Path("build/parity")
PICTURE = Path("docs/images/parity.png")
DOCUMENT = Path("docs/engine.md")
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Way:
    """One way of running the same training."""

    pool: Pool
    policy: str


FOUR = Pool(ranks=4, token_budget=192, ep=2, heads=2, max_ulysses=2)
WAYS = {
    "one process": Way(Pool(ranks=1, token_budget=1024), "static_cp"),
    **{policy: Way(FOUR, policy) for policy in ("static_cp", "megatron", "hydra", "hydra_search")},
}


@dataclass
class Curves:
    """What one run left: a value per iteration, and what took part."""

    loss: list[float]
    gradient_norm: list[float]
    microbatches: int
    degrees: dict[int, int]
    """Degree to number of sequences, over the whole run."""
    bytes_sent: dict[str, int]
    """By rank 0, by kind."""
    seconds: float


def train(rank: int, way: Way, dtype: torch.dtype, documents: Path, iterations: int) -> Curves:
    """One rank's run; the curves are the same on all of them."""
    began = time.perf_counter()
    corpus = Documents.load(documents)
    sampler = Sampler(len(corpus), BATCH, way.pool.ranks, seed=1)
    topology = build_topology(way.pool)
    model = LanguageModel(MODEL, seed=2, experts=topology.experts, dtype=dtype)
    trainer = Trainer(model, way.pool, topology, OPTIMIZER)
    loss, norm, microbatches, degrees = [], [], 0, Counter[int]()
    for iteration in range(iterations):
        batch = Batch(corpus.lengths[sampler.global_batch(iteration).documents])
        plan = plan_iteration(batch, way.pool, policy=way.policy, cost=CPU_COST)
        tokens = [torch.from_numpy(corpus[document]) for document in sampler.shard(iteration, rank).documents.tolist()]
        piece = slice_plan(plan, batch, sampler.shard_sizes(), [rank])
        result = trainer.step(iteration, piece, tokens, [shift_labels(sequence) for sequence in tokens])
        loss.append(result.loss)
        norm.append(result.gradient_norm)
        microbatches += plan.header.microbatches
        degrees.update(plan.degree.tolist())
    sent = topology.counters.snapshot()
    return Curves(loss, norm, microbatches, dict(degrees), sent, time.perf_counter() - began)


def means(values: list[float], window: int) -> Curve:
    """Means of `window` neighbours; what is left over at the end makes none."""
    whole = len(values) // window * window
    return np.asarray(values[:whole]).reshape(-1, window).mean(axis=1)


def spread(runs: list[list[float]], window: int) -> Curve:
    """Largest over smallest of all runs, less one, for every mean."""
    curves = np.stack([means(values, window) for values in runs])
    return curves.max(axis=0) / curves.min(axis=0) - 1


def draw(runs: dict[str, dict[str, Curves]], path: Path) -> None:
    """Loss curves on top of each other, and how far apart they are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    for column, (dtype, by_way) in enumerate(runs.items()):
        above, below = figure.add_subplot(2, 2, 1 + column), figure.add_subplot(2, 2, 3 + column)
        for width, (name, curves) in zip((7, 5, 3.6, 2.2, 1), by_way.items(), strict=True):
            smooth = means(curves.loss, min(10, len(curves.loss)))
            above.plot((np.arange(len(smooth)) + 0.5) * 10, smooth, label=name, linewidth=width)
        above.set_title(f"{dtype}: training loss, means of 10 iterations")
        above.legend()
        window = min(WINDOW[dtype], len(curves.loss))
        for field in ("loss", "gradient_norm"):
            apart = spread([getattr(curves, field) for curves in by_way.values()], window)
            at = (np.arange(len(apart)) + 0.5) * window
            below.semilogy(at, np.maximum(apart, 1e-16), label=field.replace("_", " "))
        below.axhline(LIMIT, color="black", linestyle=":", label="limit")
        below.set_title("apart by (largest over smallest, less one)" + f", means of {window}" * (window > 1))
        below.set_xlabel("iteration")
        below.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def train_all(iterations: int, documents: Path) -> dict[str, dict[str, Curves]]:
    """Every way in every type, one after the other."""
    runs: dict[str, dict[str, Curves]] = {}
    for dtype in WINDOW:
        runs[dtype] = {}
        for name, way in WAYS.items():
            arguments = (way, getattr(torch, dtype), documents, iterations)
            curves = runs[dtype][name] = run_ranks(way.pool.ranks, train, *arguments, timeout_s=TIMEOUT_S)[0]
            print(
                f"{dtype}, {name}: loss {curves.loss[0]:.4f} → {curves.loss[-1]:.4f}, {curves.seconds:.0f} s",
                flush=True,
            )
    return runs


def main() -> int:
    """Run all, write, print; 0 if every spread is within the limit."""
    asked = argparse.ArgumentParser(prog="make parity", description=__doc__)
    asked.add_argument("--iterations", type=int, default=1000)
    asked.add_argument("--docs", action="store_true", help="put table and picture into the documents")
    given = asked.parse_args()
    documents = FOLDER / "documents.npz"
    lengths = prepare_documents(documents, CORPUS).lengths
    runs = train_all(given.iterations, documents)
    worst = {
        dtype: {
            field: float(spread([getattr(curves, field) for curves in by_way.values()], window).max())
            for field in ("loss", "gradient_norm")
        }
        for dtype, by_way in runs.items()
        for window in [min(WINDOW[dtype], given.iterations)]
    }
    document: dict[str, Any] = {
        "iterations": given.iterations,
        "batch": BATCH,
        "longest_tokens": int(lengths.max()),
        "median_tokens": int(np.median(lengths)),
        "model": asdict(MODEL),
        "optimizer": asdict(OPTIMIZER),
        "limit": LIMIT,
        "largest_spread": worst,
        "runs": {dtype: {name: asdict(curves) for name, curves in by_way.items()} for dtype, by_way in runs.items()},
    }
    (FOLDER / "parity.json").write_text(json.dumps(document) + "\n")
    draw(runs, FOLDER / "parity.png")
    tables = {"parity": figures(runs), "parity-checks": checks_table(checks(worst))}
    for lines in tables.values():
        print(f"\n{lines}")
    if given.docs:
        DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), tables))
        shutil.copyfile(FOLDER / "parity.png", PICTURE)
    return 0 if max(value for values in worst.values() for value in values.values()) <= LIMIT else 1


def figures(runs: dict[str, dict[str, Curves]]) -> str:
    """What each run was, as a table."""
    head = ("type", "run", ">first loss", ">last 50", ">microbatches", ">degree 1, 2, 4", ">MB sent by rank 0", ">time")
    return table(
        head,
        (
            (
                dtype,
                name,
                f"{curves.loss[0]:.6f}",
                f"{np.mean(curves.loss[-50:]):.6f}",
                f"{curves.microbatches / len(curves.loss):.1f}",
                ", ".join(
                    f"{curves.degrees.get(degree, 0) / sum(curves.degrees.values()):.0%}" for degree in (1, 2, 4)
                ),
                ", ".join(f"{kind} {count / 1e6:.0f}" for kind, count in sorted(curves.bytes_sent.items())) or "0",
                f"{curves.seconds:.0f} s",
            )
            for dtype, by_way in runs.items()
            for name, curves in by_way.items()
        ),
    )


def checks(worst: dict[str, dict[str, float]]) -> list[Check]:
    """Goals and what came out."""
    return [
        Check(
            f"{dtype}, {field.replace('_', ' ')}, "
            + (f"means of {WINDOW[dtype]}" if WINDOW[dtype] > 1 else "pointwise"),
            f"≤ {LIMIT:.0e}",
            f"{value:.1e}",
            value <= LIMIT,
        )
        for dtype, values in worst.items()
        for field, value in values.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
