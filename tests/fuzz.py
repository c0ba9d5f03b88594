"""Random and adversarial batches through every policy: no plan that the verifier refuses, no error without a type.

    make fuzz ARGS="--batches 100000 --seed 0 --processes 2"

Every batch goes to every policy, except that Megatron's two get none of more than 200 sequences (they take time with
its square and more), and flexsp, whose solver takes seconds, every 10th on pools of up to 6 ranks and 12 sequences.
Pools with slow or excluded ranks go to the policies that know of such.
Beyond validity: each certificate is below its forecast, `hydra_search` is not slower than `hydra`, what a refusal
offers as a way out is one, and every 20th batch, planned again, gives the same bytes (`tests.support.claims`).

A batch depends on the seed and its number alone. Prints progress, and for each failure the command that repeats it;
writes build/fuzz/summary.json; exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from scheduler_service.domain import Plan
from scheduler_service.planning import POLICIES, warm_up
from scheduler_service.planning.iteration import POLICIES_FOR_SLOW_RANKS
from tests.support.claims import planned
from tests.support.problems import Problem, problem, wide_problem

OUTPUT = Path("build/fuzz/summary.json")
CHUNK = 100
MEGATRON_SEQUENCES = 200
FLEXSP_EVERY, FLEXSP_RANKS, FLEXSP_SEQUENCES = 10, 6, 12
TWICE_EVERY = 20
HANG_S = 900.0
"""A chunk that takes longer ends its process, with a traceback of where it was."""


@dataclass
class Tally:
    """What one policy has answered."""

    plans: int = 0
    refusals: int = 0
    left_out: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    slowest_batch: int = -1

    def add(self, other: Tally) -> None:
        """Count what another process has found as well."""
        for name in ("plans", "refusals", "left_out", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest_batch = other.slowest_s, other.slowest_batch


@dataclass
class Findings:
    """What some batches have shown."""

    batches: int = 0
    tallies: dict[str, Tally] = field(default_factory=lambda: {policy: Tally() for policy in POLICIES})
    failures: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Count what another process has found as well."""
        self.batches += other.batches
        self.failures += other.failures
        for policy, tally in other.tallies.items():
            self.tallies[policy].add(tally)


def posed(seed: int, number: int) -> Problem:
    """Batch `number`: a third of them small, so that every corner of a small problem is looked into."""
    rng = np.random.default_rng([seed, number])
    return problem(rng) if number % 3 == 0 else wide_problem(rng)


def policies_for(number: int, posed: Problem) -> Iterator[str]:
    """The policies that get this batch."""
    size, ranks = len(posed.batch), posed.pool.ranks
    for policy in POLICIES_FOR_SLOW_RANKS if posed.pool.speeds else POLICIES:
        if policy.startswith("megatron") and size > MEGATRON_SEQUENCES:
            continue
        if policy == "flexsp" and (number % FLEXSP_EVERY or ranks > FLEXSP_RANKS or size > FLEXSP_SEQUENCES):
            continue
        yield policy


def check(seed: int, numbers: Iterable[int]) -> Findings:
    """Put these batches to the policies."""
    findings = Findings()
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    for number in numbers:
        findings.batches += 1
        batch = posed(seed, number)
        chosen = list(policies_for(number, batch))
        predicted: dict[str, float] = {}
        for policy, tally in findings.tallies.items():
            if policy not in chosen:
                tally.left_out += 1
                continue
            began = time.perf_counter()
            try:
                plan = planned(batch, policy, twice=number % TWICE_EVERY == 0)
                predicted |= _judge(plan, policy, predicted, tally)
            except Exception:
                findings.failures.append(_failure(seed, number, policy, batch))
            taken = time.perf_counter() - began
            tally.seconds += taken
            if taken > tally.slowest_s:
                tally.slowest_s, tally.slowest_batch = taken, number
    faulthandler.cancel_dump_traceback_later()
    return findings


def _judge(plan: Plan | None, policy: str, predicted: dict[str, float], tally: Tally) -> dict[str, float]:
    if plan is None:
        tally.refusals += 1
        return {}
    tally.plans += 1
    if policy == "hydra_search":
        assert plan.header.predicted_s <= predicted["hydra"], "hydra_search is slower than hydra"
    return {policy: plan.header.predicted_s}


def _failure(seed: int, number: int, policy: str, posed: Problem) -> str:
    return (
        f'{policy}: make fuzz ARGS="--seed {seed} --first {number} --batches 1"\n'
        f"{posed.pool} {posed.cost} cap={posed.cap} {posed.batch.lengths.tolist()}\n{traceback.format_exc()}"
    )


def run(seed: int, first: int, batches: int, processes: int) -> Findings:
    """Batches `first` … first + batches − 1, over some processes."""
    began, findings = time.monotonic(), Findings()
    chunks = [range(k, min(k + CHUNK, first + batches)) for k in range(first, first + batches, CHUNK)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=warm_up) as pool:
        for done in as_completed([pool.submit(check, seed, chunk) for chunk in chunks]):
            found = done.result()
            findings.add(found)
            for failure in found.failures:
                print(f"\nFAILED {failure}", flush=True)
            taken = time.monotonic() - began
            print(
                f"seed {seed}: {findings.batches:,} of {batches:,} batches, {len(findings.failures)} failures, "
                f"{taken:.0f} s, about {taken * (batches / findings.batches - 1):.0f} s left",
                end="\r" if sys.stdout.isatty() else "\n",
                flush=True,
            )
    return findings


def main() -> None:
    """Check, print and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first batch")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    findings = run(options.seed, options.first, options.batches, options.processes)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps({"seed": options.seed, "first": options.first, **asdict(findings)}, indent=2) + "\n")
    print(f"\n{'policy':<16}{'plans':>9}{'refusals':>10}{'left out':>10}{'ms each':>9}{'slowest':>10}  batch")
    for policy, tally in findings.tallies.items():
        each_ms = 1e3 * tally.seconds / max(1, tally.plans + tally.refusals)
        print(
            f"{policy:<16}{tally.plans:>9,}{tally.refusals:>10,}{tally.left_out:>10,}{each_ms:>9.1f}"
            f"{tally.slowest_s:>8.2f} s  {tally.slowest_batch}"
        )
    print(f"{findings.batches:,} batches, {len(findings.failures)} failures; {OUTPUT}")
    sys.exit(bool(findings.failures))


if __name__ == "__main__":
    main()
