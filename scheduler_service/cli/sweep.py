"""`hydra-cp sweep`: systems × clusters × length files, in parallel, kept as they come.

Results go to a file of JSON lines; a sweep that was interrupted goes on where it stopped. Presets of one model at
growing sizes are a weak-scaling study.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from scheduler_service.cli.console import wide_console
from scheduler_service.cli.failures import ExitCode, reported
from scheduler_service.cli.length_files import read_batch
from scheduler_service.domain import HydraCpError, InvalidInputError, Reason
from scheduler_service.planning import POLICIES, warm_up
from scheduler_service.planning.comparison import compare
from scheduler_service.simulation.presets import load_cluster
from scheduler_service.simulation.workloads import WORKLOADS, paper_batch


@dataclass(frozen=True)
class Case:
    """One simulation of a sweep."""

    preset: str
    lengths: str
    policy: str


Done = tuple[Case, dict[str, Any]]


def sweep(
    preset: Annotated[list[str], typer.Option(help="Cluster preset or .yaml file; give it several times.")],
    lengths: Annotated[list[str], typer.Option(help="Length file or workload; give it several times.")],
    out: Annotated[Path, typer.Option(help="Results, one JSON line each; what is there already is not run again.")],
    policy: Annotated[list[str], typer.Option(help="System; give it several times. None: all.")] = [],  # noqa: B006
    field: Annotated[str | None, typer.Option(help="Field of .jsonl or column of .parquet files.")] = None,
    jobs: Annotated[int, typer.Option(help="Simulations at a time; 0: one for each core.", min=0)] = 0,
    ray: Annotated[str | None, typer.Option(help="Run on this Ray cluster; needs hydra-cp[ray].")] = None,
) -> None:
    """Simulate all combinations of systems, clusters and length files."""
    with reported():
        unknown = sorted(set(policy) - set(POLICIES))
        if unknown:
            raise InvalidInputError(
                Reason.UNKNOWN_POLICY, f"policy {unknown[0]!r} is unknown; choose of {', '.join(POLICIES)}"
            )
        for name in preset:
            load_cluster(name)
        done = _read(out)
        cases = [Case(*names) for names in product(preset, lengths, policy or list(POLICIES))]
        waiting = [case for case in cases if case not in done]
        complete = _watched(waiting, done, out, field, jobs, ray)
        _print([(case, done[case]) for case in cases if case in done])
    if not complete:
        typer.echo(f"Interrupted; the same command goes on from {out}", err=True)
        raise typer.Exit(ExitCode.FAILURE)


def run_case(case: Case, field: str | None = None) -> dict[str, Any]:
    """Simulate one case, in this process. A system that cannot plan gives an `error`."""
    warm_up()
    cluster = load_cluster(case.preset)
    if case.lengths in WORKLOADS:
        batch = paper_batch(cluster, WORKLOADS[case.lengths])
    else:
        batch = read_batch(case.lengths, field)
    (outcome,) = compare(batch, cluster, [case.policy])
    figures = {"gpus": cluster.gpus, "sequences": len(batch), "tokens": batch.tokens, "engine": str(outcome.engine)}
    if outcome.simulation is None or outcome.plan is None:
        return {**figures, "error": str(outcome.error)}
    found = outcome.simulation
    return {
        **figures,
        "iteration_s": found.iteration_s,
        "pp_bubble": found.pp_bubble,
        "dp_bubble": found.dp_bubble,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
        "mfu": found.mfu,
        "microbatches": outcome.plan.header.microbatches,
        "largest_degree": int(outcome.plan.degree.max()),
        "plan_s": outcome.plan_s,
    }


def _watched(
    cases: list[Case], done: dict[Case, dict[str, Any]], out: Path, field: str | None, jobs: int, ray: str | None
) -> bool:
    """Run the cases and keep each result; False if the user interrupted them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress, _appending(out) as append:
        task = progress.add_task("simulating", total=len(cases))
        results = _on_ray(cases, field, ray) if ray is not None else _on_cores(cases, field, jobs)
        try:
            for case, result in results:
                append(json.dumps({**asdict(case), **result}))
                done[case] = result
                progress.update(task, advance=1, description=f"{case.preset} {case.policy}")
        except KeyboardInterrupt:
            return False
    return True


def _on_cores(cases: list[Case], field: str | None, jobs: int) -> Iterator[Done]:
    workers = min(jobs or os.cpu_count() or 1, max(1, len(cases)))
    if workers == 1:
        yield from ((case, run_case(case, field)) for case in cases)
        return
    # Spawned, since numba's threads and a fork do not go together.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run_case, case, field): case for case in cases}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _on_ray(cases: list[Case], field: str | None, address: str) -> Iterator[Done]:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise InvalidInputError(Reason.INVALID_ARGUMENT, "--ray needs Ray: pip install 'hydra-cp[ray]'") from error
    try:
        ray.init(address=address, logging_level="ERROR")
    except Exception as error:  # Ray raises bare ones too
        raise HydraCpError(Reason.UNREACHABLE, f"--ray {address}: cannot join this Ray cluster: {error}") from error
    remote = ray.remote(run_case)
    waiting = {remote.remote(case, field): case for case in cases}
    while waiting:
        (ready, *_), _ = ray.wait(list(waiting))
        yield waiting.pop(ready), ray.get(ready)


@contextmanager
def _appending(out: Path) -> Iterator[Callable[[str], None]]:
    try:
        with out.open("a", encoding="utf-8") as file:

            def append(line: str) -> None:
                file.write(line + "\n")
                file.flush()

            yield append
    except OSError as error:
        raise HydraCpError(Reason.INTERNAL, f"cannot write {out}: {error.strerror or error}") from error


def _read(out: Path) -> dict[Case, dict[str, Any]]:
    """Results of an earlier run. A last line that was cut off in the middle is taken back."""
    if not out.exists():
        return {}
    done: dict[Case, dict[str, Any]] = {}
    lines = out.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            done[Case(row.pop("preset"), row.pop("lengths"), row.pop("policy"))] = row
        except (ValueError, KeyError, AttributeError):
            if number < len(lines):
                raise InvalidInputError(
                    Reason.INVALID_ARGUMENT, f"line {number} of {out} is no result of a sweep; name another file"
                ) from None
            out.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")
    return done


def _print(results: list[Done]) -> None:
    table = Table("cluster", "lengths", "system", box=None, pad_edge=False)
    for name in ("GPUs", "iteration", "PP bubble", "DP bubble", "tokens/s/GPU", "MFU", "planned in"):
        table.add_column(name, justify="right")
    for case, row in results:
        if "error" in row:
            table.add_row(case.preset, case.lengths, case.policy, f"{row['gpus']:,}", "no plan")
            continue
        table.add_row(
            case.preset, case.lengths, case.policy, f"{row['gpus']:,}", f"{row['iteration_s']:.4g} s",
            f"{row['pp_bubble']:.1%}", f"{row['dp_bubble']:.1%}", f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['mfu']:.1%}", f"{row['plan_s']:.2f} s",
        )  # fmt: skip
    wide_console().print(table)
