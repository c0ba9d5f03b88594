"""Checkpoints of one rank: weights, optimizer state and the number of the next iteration.

The sampler and the planner are pure functions of the iteration, so nothing else has to be saved. A checkpoint is
for the pool, the EP size and the stages that wrote it.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from worker_agent.training.trainer import Trainer


def save_checkpoint(folder: Path, next_iteration: int, trainer: Trainer) -> None:
    """Write this rank's part under `folder`; a part is never seen half written."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, next_iteration, dist.get_rank())
    partial = path.with_suffix(".partial")
    torch.save({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, partial)
    partial.replace(path)


def load_checkpoint(folder: Path, next_iteration: int, trainer: Trainer) -> None:
    """Restore what `save_checkpoint` wrote before `next_iteration`. Raises `FileNotFoundError` naming the file."""
    state = torch.load(_path(folder, next_iteration, dist.get_rank()), weights_only=True)
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])


def _path(folder: Path, next_iteration: int, rank: int) -> Path:
    return folder / f"iteration-{next_iteration:06d}-rank-{rank}.pt"
