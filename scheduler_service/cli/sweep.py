"""`hydra-cp sweep`: systems × clusters × length files, in parallel, kept as they come.

Results go to a file of JSON lines; a sweep that was interrupted goes on where it stopped. Presets of one model at
growing sizes are a weak-scaling study.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from scheduler_service.cli.console import wide_console
from scheduler_service.cli.failures import ExitCode, plain_interruptions, reported
from scheduler_service.cli.length_files import read_batch
from scheduler_service.cli.simulate import dollars_per_million_tokens, memory_figures
from scheduler_service.domain import Batch, HydraCpError, InvalidInputError, Reason
from scheduler_service.planning import POLICIES, warm_up
from scheduler_service.planning.comparison import compare
from scheduler_service.simulation.cluster import Cluster
from scheduler_service.simulation.presets import load_cluster
from scheduler_service.simulation.workloads import WORKLOADS, paper_batch


@dataclass(frozen=True)
class Case:
    """One simulation of a sweep, by the names that the user gave."""

    preset: str
    lengths: str
    policy: str


@dataclass(frozen=True, eq=False)
class Job:
    """What a case's names stand for."""

    cluster: Cluster
    batch: Batch

    @cached_property
    def digest(self) -> str:
        """Another one where the cluster or the lengths have changed since."""
        return blake2b(f"{self.cluster!r} {self.batch.digest}".encode(), digest_size=8).hexdigest()


BEGINNING = b'{"preset": '
"""Of every line of results."""

Done = tuple[Case, dict[str, Any]]
Jobs = Mapping[Case, Job]


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
        cases = _jobs(preset, lengths, policy or list(POLICIES), field)
        done = _read(out)
        for case, job in cases.items():
            if case in done and done[case].get("input") != job.digest:
                raise InvalidInputError(
                    Reason.INVALID_ARGUMENT,
                    f"{out} has a result of {case.policy} on {case.preset} with {case.lengths}, and the cluster or the "
                    "lengths have changed since: name another file",
                )
        waiting = {case: job for case, job in cases.items() if case not in done}
        complete = _watched(waiting, done, out, jobs, ray)
        _print([(case, done[case]) for case in cases if case in done])
    if not complete:
        typer.echo(f"Interrupted; the same command goes on from {out}", err=True)
        raise typer.Exit(ExitCode.FAILURE)


def run_case(policy: str, job: Job) -> dict[str, Any]:
    """Simulate one case, in this process. A system that cannot plan gives an `error`."""
    warm_up()
    cluster, batch = job.cluster, job.batch
    with plain_interruptions():
        (outcome,) = compare(batch, cluster, [policy])
    figures = {
        "input": job.digest, "gpus": cluster.gpus, "sequences": len(batch), "tokens": batch.tokens,
        "engine": str(outcome.engine),
    }  # fmt: skip
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
        "dollars_per_million_tokens": dollars_per_million_tokens(found, cluster),
        "microbatches": outcome.plan.header.microbatches,
        "largest_degree": int(outcome.plan.degree.max()),
        "plan_s": outcome.plan_s,
        **memory_figures(outcome.plan, batch, cluster.with_engine(outcome.engine)),
    }


def _jobs(presets: list[str], lengths: list[str], policies: list[str], field: str | None) -> dict[Case, Job]:
    """All combinations. Every file is read here and once, so that a bad one is refused before anything runs."""
    clusters = {name: load_cluster(name) for name in presets}
    files = {name: read_batch(name, field) for name in lengths if name not in WORKLOADS}
    jobs: dict[Case, Job] = {}
    for (preset, cluster), name in product(clusters.items(), lengths):
        job = Job(cluster, files[name] if name in files else paper_batch(cluster, WORKLOADS[name]))
        jobs |= {Case(preset, name, policy): job for policy in policies}
    return jobs


def _watched(cases: Jobs, done: dict[Case, dict[str, Any]], out: Path, jobs: int, ray: str | None) -> bool:
    """Run the cases and keep each result; False if the user interrupted them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress, _appending(out) as append:
            task = progress.add_task("simulating", total=len(cases))
            for case, result in _on_ray(cases, ray) if ray is not None else _on_cores(cases, jobs):
                append(json.dumps({**asdict(case), **result}))
                done[case] = result
                progress.update(task, advance=1, description=f"{case.preset} {case.policy}")
    except KeyboardInterrupt:
        return False
    return True


def _on_cores(cases: Jobs, jobs: int) -> Iterator[Done]:
    workers = min(jobs or os.cpu_count() or 1, max(1, len(cases)))
    if workers == 1:
        yield from ((case, run_case(case.policy, job)) for case, job in cases.items())
        return
    # Spawned, since numba's threads and a fork do not go together.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        with _ctrl_c_deferred():
            futures = {pool.submit(run_case, case.policy, job): case for case, job in cases.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise HydraCpError(
                Reason.INTERNAL,
                "the process of a simulation was ended from outside, for want of memory perhaps: what was done is "
                "kept, and the same command goes on; with a smaller --jobs it needs less memory",
            ) from error
        except BaseException:  # Ctrl-C here or where results go: nobody waits for what still runs
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            raise


@contextmanager
def _ctrl_c_deferred() -> Iterator[None]:
    """It comes after the block; processes that are started inside never see it, though a terminal sends it to all."""
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))  # other threads still receive it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which a new process takes over
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if came:
            signal.raise_signal(signal.SIGINT)


def _on_ray(cases: Jobs, address: str) -> Iterator[Done]:
    """On the nodes of a Ray cluster, which have hydra-cp but not the user's files: clusters and batches are sent."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise InvalidInputError(Reason.INVALID_ARGUMENT, "--ray needs Ray: pip install 'hydra-cp[ray]'") from error
    try:
        ray.init(address=address, logging_level="ERROR")
    except Exception as error:  # Ray raises bare ones too
        raise HydraCpError(Reason.UNREACHABLE, f"--ray {address}: cannot join this Ray cluster: {error}") from error
    try:
        remote = ray.remote(run_case)
        sent = {job: ray.put(job) for job in dict.fromkeys(cases.values())}
        waiting = {remote.remote(case.policy, sent[job]): case for case, job in cases.items()}
        while waiting:
            (ready, *_), _ = ray.wait(list(waiting))
            case = waiting.pop(ready)
            try:
                yield case, ray.get(ready)
            except ray.exceptions.RayError as error:
                raise HydraCpError(
                    Reason.INTERNAL, f"--ray {address}: {case.policy} on {case.preset} failed there: {error}"
                ) from error
    finally:
        ray.shutdown()


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
    """Results of an earlier run. A last line of ours that was cut off, so that its end is missing, is taken back."""
    done: dict[Case, dict[str, Any]] = {}
    try:
        content = out.read_bytes() if out.exists() else b""
        *lines, cut_off = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                done[Case(row.pop("preset"), row.pop("lengths"), row.pop("policy"))] = row
            except (ValueError, KeyError, AttributeError, TypeError):
                raise _no_result(number, out) from None
        if cut_off:
            if not cut_off.startswith(BEGINNING[: len(cut_off)]):
                raise _no_result(len(lines) + 1, out)
            os.truncate(out, len(content) - len(cut_off))
    except OSError as error:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT, f"--out {out}: cannot be read: {error.strerror or error}; name another file"
        ) from error
    return done


def _no_result(number: int, out: Path) -> InvalidInputError:
    return InvalidInputError(
        Reason.INVALID_ARGUMENT, f"line {number} of {out} is no result of a sweep; name another file"
    )


def _print(results: list[Done]) -> None:
    table = Table("cluster", "lengths", "system", box=None, pad_edge=False)
    for name in (
        "GPUs",
        "iteration",
        "PP bubble",
        "DP bubble",
        "tokens/s/GPU",
        "MFU",
        "$/M tokens",
        "memory",
        "planned in",
    ):
        table.add_column(name, justify="right")
    for case, row in results:
        if "error" in row:
            table.add_row(case.preset, case.lengths, case.policy, f"{row['gpus']:,}", "no plan")
            continue
        table.add_row(
            case.preset, case.lengths, case.policy, f"{row['gpus']:,}", f"{row['iteration_s']:.4g} s",
            f"{row['pp_bubble']:.1%}", f"{row['dp_bubble']:.1%}", f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['mfu']:.1%}", f"{row['dollars_per_million_tokens']:.3g}",
            f"{row['peak_memory_bytes'] / 1e9:.0f} GB" + ("" if row["memory_fits"] else " !"),
            f"{row['plan_s']:.2f} s",
        )  # fmt: skip
    console = wide_console()
    console.print(table)
    if not all(row.get("memory_fits", True) for _, row in results):
        console.print("! more memory than a GPU of the cluster has: `hydra-cp budget` says what fills it")
