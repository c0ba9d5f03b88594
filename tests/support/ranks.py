"""Runs a function in several real processes that form a process group."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Forked from one process that has torch imported and no threads: ranks start in a fraction of a second.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "numpy"])


def run_ranks(
    world_size: int, body: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0, backend: str = "gloo"
) -> list[Any]:
    """Call `body(rank, *arguments)` in `world_size` processes; return what each returned, by rank.

    `body` is a module-level function; the default process group is of `backend`. An exception or the death of any rank
    fails the caller with that rank's traceback, and a run longer than `timeout_s` fails by name: nothing hangs.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks, pipes = [], []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_run,
                args=(theirs, rank, world_size, backend, str(Path(folder, "store")), timeout_s, body, arguments),
            )
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(ours)
        try:
            return _collect(pipes, timeout_s)
        finally:
            for process in ranks:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + timeout_s
    while len(results) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise TimeoutError(f"ranks {missing} did not finish within {timeout_s} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                failure, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word") from None
            if failure:
                raise AssertionError(f"rank {rank} failed:\n{failure}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _run(
    pipe: Connection,
    rank: int,
    world_size: int,
    backend: str,
    store: str,
    timeout_s: float,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        value = body(rank, *arguments)
        dist.barrier()
        # Plain bytes: tensors that `send` would share through their own process cannot be had once that has ended.
        pipe.send_bytes(pickle.dumps((None, value)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        raise
