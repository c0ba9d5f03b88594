"""`hydra-cp quickstart`: a scheduler and a training job on this machine, from nothing to a trained iteration.

Prepares real documents, starts `hydra-cp serve` and the reference trainer under torchrun, and prints what each
iteration's plan was, what it cost and what it is predicted to gain. Everything it writes is under one folder.
Its children end with it, whatever ends it. It shows nothing that was not measured or asked of the service.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import typer
from rich.console import Console

from scheduler_service.cli.failures import reported
from scheduler_service.cli.processes import Child, Interruption
from scheduler_service.cli.quickstart_report import IterationLine, Summary
from scheduler_service.domain import Batch, InvalidInputError, Pool, Reason
from scheduler_service.planning import DEFAULT_POLICY, POLICIES, plan_iteration
from worker_agent.training.config import RunConfig
from worker_agent.training.documents import CorpusConfig, Documents, prepare_documents

READY_TIMEOUT_S = 120.0
LAUNCHER_VERDICT = "failed (exitcode"
"""Where torchrun says which worker failed; what the workers said stands before, and its own traceback after."""

ROW_TIMEOUT_S = 2.0
SUMMARY_TIMEOUT_S = 30.0
"""Longest waits for the service's predictions of other policies, which it makes after the plan: per row, and for
those that are still missing once training is over."""

_DEFAULTS = RunConfig()
_CORPUS = CorpusConfig()


def quickstart(
    exit_: Annotated[bool, typer.Option("--exit", help="Stop after the summary instead of serving on.")] = False,
    iterations: Annotated[int, typer.Option(min=1, help="Training iterations.")] = _DEFAULTS.iterations,
    workers: Annotated[int, typer.Option(min=1, help="Ranks of the pool, one process each.")] = _DEFAULTS.pool.ranks,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that share one copy of the experts.")] = _DEFAULTS.pool.ep,
    budget: Annotated[
        int, typer.Option(min=1, help="Token budget of a rank and microbatch.")
    ] = _DEFAULTS.pool.token_budget,
    batch: Annotated[int, typer.Option(min=1, help="Documents of a global batch.")] = _DEFAULTS.batch,
    context: Annotated[int, typer.Option(min=64, help="Longest document, in tokens.")] = _CORPUS.longest,
    policy: Annotated[str, typer.Option(help="Scheduling policy; empty for the service's default.")] = "",
    grpc_port: Annotated[
        int, typer.Option(min=0, max=65535, help="gRPC port; another one is taken if it is in use.")
    ] = 7421,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="REST and dashboard port; likewise.")] = 7422,
    output: Annotated[Path, typer.Option(help="Folder for everything that is written.")] = Path("build/run"),
) -> None:
    """Start the scheduler, train a small mixture-of-experts model through it, and show what the plans did."""
    options = [f"--iterations={iterations}", f"--batch={batch}", f"--budget={budget}", f"--ep={ep}"]
    options += [f"--policy={policy}"] if policy else []
    console = Console(highlight=False)
    with Interruption() as interruption, reported():
        pool = _checked(workers, budget, ep, batch, policy)
        with _own_folder(output):
            code = _run(
                console, interruption, output.resolve(), options, pool, policy, context, (grpc_port, http_port), exit_
            )
    raise typer.Exit(code)


def _checked(workers: int, budget: int, ep: int, batch: int, policy: str) -> Pool:
    """The pool, if the workers can run it: what is wrong is said now, not by all of them in half a minute."""
    pool = replace(_DEFAULTS.pool, ranks=workers, token_budget=budget, ep=ep)
    _DEFAULTS.model.local_experts(ep)
    if batch < workers:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"--batch {batch} with --workers {workers}: every worker loads a part of each batch; give a batch of "
            f"{workers} or more",
        )
    if policy and policy not in POLICIES:
        raise InvalidInputError(
            Reason.UNKNOWN_POLICY, f"policy {policy!r} is unknown; choose one of {', '.join(POLICIES)}"
        )
    return pool


@contextlib.contextmanager
def _own_folder(output: Path) -> Iterator[None]:
    """Make the folder, and hold it against other quick starts: they would overwrite each other's files."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / "lock").open("w")
    except OSError as error:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT, f"--output {output}: cannot be a folder to write to: {error.strerror}"
        ) from error
    with lock:  # the kernel lets go of it, however the command ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT,
                f"--output {output}: another quick start runs there; end it, or give another folder",
            ) from error
        yield


def _run(
    console: Console,
    interruption: Interruption,
    output: Path,
    options: list[str],
    pool: Pool,
    policy: str,
    context: int,
    ports: tuple[int, int],
    exit_: bool,
) -> int:
    """Everything between the options and the exit code."""
    job = time.strftime("quickstart-%Y%m%d-%H%M%S")  # runs stay apart in the history
    finished = False
    try:
        documents = _prepare(console, output, context)
        # Whether the longest can be planned at all: else the run would end at the first batch that holds it.
        plan_iteration(Batch([int(documents.lengths.max())]), pool, policy=policy or DEFAULT_POLICY)
        interruption.defer()
        with _start_scheduler(output, ports) as scheduler:
            addresses = _wait_until_ready(interruption, scheduler, output / "scheduler.json")
            dashboard = f"http://{addresses['http']}"
            _say(console, "scheduler", f"gRPC {addresses['grpc']}, dashboard {dashboard}", scheduler.log)
            with _start_training(output, pool.ranks, addresses["grpc"], job, options) as training:
                _say(console, "training", f"{pool.ranks} workers: {' '.join(options)}", training.log)
                service = Service(dashboard, job)
                lines = _follow(console, interruption, training, output / "metrics.jsonl", service)
                code = training.poll()
            if code:
                console.print(f"\ntraining failed with exit code {code}; the end of {training.log}:", style="bold red")
                console.print(training.tail(around=LAUNCHER_VERDICT), markup=False, soft_wrap=True)
                return 1
            _complete(interruption, lines, service, SUMMARY_TIMEOUT_S)
            summary = Summary(lines, dashboard=dashboard, grpc=addresses["grpc"], documents=len(documents))
            (output / "summary.json").write_text(json.dumps(summary.as_json(), indent=2) + "\n")
            console.print()
            for row in summary.rows():
                console.print(row, soft_wrap=True)
            finished = True
            return _serve_on(console, interruption, scheduler, exit_)
    except KeyboardInterrupt:
        console.print("\nstopped" if finished else "\nstopped before the end of training")
        return 0 if finished else 130
    except StartError as error:
        console.print(str(error), style="bold red", markup=False, soft_wrap=True)
        return 1


class StartError(Exception):
    """The scheduler did not come up; the message has the end of its log."""


def _prepare(console: Console, output: Path, context: int) -> Documents:
    path = output / "documents.npz"
    documents = prepare_documents(path, CorpusConfig(longest=context))
    lengths = sorted(documents.lengths.tolist())
    _say(
        console,
        "documents",
        f"{len(lengths)} Python source files of {lengths[0]:,} to {lengths[-1]:,} tokens, "
        f"half of them under {lengths[len(lengths) // 2]:,}",
        path,
    )
    return documents


def _start_scheduler(output: Path, ports: tuple[int, int]) -> Child:
    grpc_port, http_port = (port if _is_free(port) else 0 for port in ports)
    ready = output / "scheduler.json"
    ready.unlink(missing_ok=True)
    command = [
        sys.executable, "-c", "from scheduler_service.cli import main; main()", "serve",
        "--grpc", f"127.0.0.1:{grpc_port}", "--http", f"127.0.0.1:{http_port}",
        "--store", f"sqlite:///{output / 'history.db'}", "--ready-file", str(ready),
    ]  # fmt: skip
    return Child("scheduler", command, output / "scheduler.log", os.environ)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do, so that a port whose last connections are still fading away counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _wait_until_ready(interruption: Interruption, scheduler: Child, ready: Path) -> dict[str, str]:
    end = time.monotonic() + READY_TIMEOUT_S
    while True:
        if scheduler.poll() is not None:
            raise StartError(f"the scheduler ended with exit code {scheduler.poll()}:\n{scheduler.tail()}")
        if time.monotonic() > end:
            raise StartError(f"the scheduler was not ready within {READY_TIMEOUT_S:g} s:\n{scheduler.tail()}")
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # not there, or half written
            addresses: dict[str, str] = json.loads(ready.read_text())
            return addresses
        interruption.pause(0.05)


def _start_training(output: Path, workers: int, scheduler: str, job: str, options: list[str]) -> Child:
    (output / "metrics.jsonl").unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers),
        "-m", "worker_agent.training", "--scheduler", scheduler, "--job", job, "--output", str(output), *options,
    ]  # fmt: skip
    # Workers share the cores; the rendezvous stays on this machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return Child("training", command, output / "workers.log", environment)


class Service:
    """The REST API of the scheduler, as far as this command reads it."""

    def __init__(self, address: str, job: str) -> None:
        self._iterations = f"{address}/api/v1/jobs/{job}/iterations"
        self._opener = build_opener(ProxyHandler({}))  # loopback never goes through a proxy

    def predictions(self, iteration: int) -> tuple[float, dict[str, float]] | None:
        """Predicted seconds of the plan, and of other policies on the same batch; None if the service has none."""
        try:
            with self._opener.open(f"{self._iterations}/{iteration}?stream=train", timeout=5) as response:
                summary: dict[str, Any] = json.load(response)
        except (URLError, OSError, ValueError):
            return None
        return summary["predicted_s"], summary["baselines_s"]


def _follow(
    console: Console, interruption: Interruption, training: Child, metrics: Path, service: Service
) -> list[IterationLine]:
    """Print each iteration as the workers finish it, until they are done."""
    lines: list[IterationLine] = []
    console.print()
    for row in IterationLine.heading():
        console.print(row, style="bold", soft_wrap=True)
    for record in _records(interruption, training, metrics):
        line = IterationLine(record)
        _complete(interruption, [line], service, ROW_TIMEOUT_S)
        console.print(line.row(), style="" if line.origin == "service" else "yellow", soft_wrap=True)
        lines.append(line)
    return lines


def _records(interruption: Interruption, training: Child, metrics: Path) -> Iterator[dict[str, Any]]:
    """Lines of `metrics` as they are written; ends when the workers have ended and nothing is left to read."""
    read = 0
    while True:
        ended = training.poll() is not None  # asked first, so that the last lines are not missed
        text = metrics.read_text() if metrics.exists() else ""
        whole = text.rfind("\n") + 1
        for line in text[read:whole].splitlines():
            yield json.loads(line)
        read = max(read, whole)
        if ended:
            return
        interruption.pause(0.2)


def _complete(interruption: Interruption, lines: list[IterationLine], service: Service, timeout_s: float) -> None:
    """Ask for predictions until every line has them, the service knows none of the rest, or time is up."""
    end = time.monotonic() + timeout_s
    waiting = [line for line in lines if not line.is_complete]
    while waiting:
        asked = [(line, service.predictions(line.iteration)) for line in waiting]
        for line, predictions in asked:
            if predictions:
                line.add_predictions(*predictions)
        waiting = [line for line, predictions in asked if predictions and not line.is_complete]
        if time.monotonic() > end:
            return
        if waiting:
            interruption.pause(0.1)


def _serve_on(console: Console, interruption: Interruption, scheduler: Child, exit_: bool) -> int:
    """Until Ctrl-C, or not at all. A scheduler that has ended by itself is a failure."""
    console.print("\nstopping; without --exit the dashboard stays up" if exit_ else "\nserving on; Ctrl-C ends it")
    while scheduler.poll() is None:
        if exit_:
            return 0
        interruption.pause(0.2)
    console.print(
        f"\nthe scheduler ended with exit code {scheduler.poll()}; the end of {scheduler.log}:", style="bold red"
    )
    console.print(scheduler.tail(), markup=False, soft_wrap=True)
    return 1


def _say(console: Console, what: str, text: str, where: Path) -> None:
    shown = where.relative_to(Path.cwd()) if where.is_relative_to(Path.cwd()) else where
    console.print(f"[bold]{what:<10}[/bold] {text}  [dim]{shown}[/dim]", soft_wrap=True)
