"""How fast `hydra` and `hydra_search` plan: sort, packing, verification and digest, on one core, after warm-up.

Prints JSON and writes it to build/bench/plan_speed.json: seconds and nanoseconds per sequence for pools of growing
size, the growth per sequence from the first to the last, and the ratio of the linear reference to the heaps on a
batch that it can still do. Best of a few runs, in CPU time of this process. Lengths are log-normal with one of 256K:
a mass of short documents and a long tail.

    python -m tests.benchmarks.plan_speed
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scheduler_service.domain import Batch, CostModel, Pool
from scheduler_service.planning import POLICIES, PlanningConfig, verify_plan, warm_up
from scheduler_service.planning.load_target import choose_target
from scheduler_service.planning.packing import pack
from scheduler_service.planning.reference import pack_linearly

SIZES = ((512, 32_000), (4096, 262_144), (16_384, 1_048_576))
REFERENCE_SIZE = (128, 4000)
LONGEST = 262_144
OUTPUT = Path("build/bench/plan_speed.json")


def lengths_of(count: int) -> np.ndarray:
    """The benchmark's lengths."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 1.6, count), 1, LONGEST).astype(np.int64)
    lengths[0] = LONGEST
    return lengths


def best_s(action: Callable[[], object], runs: int) -> float:
    """CPU seconds of the fastest run."""
    taken = []
    for _ in range(runs):
        began = time.process_time()
        action()
        taken.append(time.process_time() - began)
    return min(taken)


def planned(policy: str, lengths: np.ndarray, pool: Pool) -> None:
    """From lengths to a verified plan with its digest."""
    batch = Batch(lengths)
    verify_plan(POLICIES[policy](batch, pool, PlanningConfig()), batch)


def speeds(policy: str, runs: int) -> dict[str, object]:
    """One policy over all sizes."""
    rows = []
    for ranks, count in SIZES:
        pool, lengths = Pool(ranks=ranks, token_budget=8192, stages=9, ep=8), lengths_of(count)
        seconds = best_s(lambda pool=pool, lengths=lengths: planned(policy, lengths, pool), runs)
        rows.append({"ranks": ranks, "sequences": count, "plan_s": seconds, "ns_per_sequence": seconds / count * 1e9})
    return {"rows": rows, "growth_per_sequence": rows[-1]["ns_per_sequence"] / rows[0]["ns_per_sequence"]}


def main() -> None:
    """Measure, write and print."""
    warm_up()
    ranks, count = REFERENCE_SIZE
    pool, batch = Pool(ranks=ranks, token_budget=8192, stages=9, ep=8), Batch(lengths_of(count))
    target = choose_target(batch, pool, CostModel())
    heaps_s = best_s(lambda: pack(batch, pool, target), runs=5)
    linear_s = best_s(lambda: pack_linearly(batch, pool, target), runs=1)
    document = {
        "hydra": speeds("hydra", runs=5),
        "hydra_search": speeds("hydra_search", runs=3),
        "linear_over_heaps": linear_s / heaps_s,
    }
    text = json.dumps(document, indent=2)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
