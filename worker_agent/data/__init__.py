"""A rank's data: which microbatches it runs, how tokens get there and back, and what a token's loss weighs."""

from worker_agent.data.labels import IGNORE_INDEX, shift_labels
from worker_agent.data.loss import backward_scale, count_valid, mean_loss, summed_loss
from worker_agent.data.microbatches import Microbatch, microbatches
from worker_agent.data.rerouting import Rerouter, Routes, routes

__all__ = [
    "Microbatch",
    "microbatches",
    "Rerouter",
    "Routes",
    "routes",
    "IGNORE_INDEX",
    "shift_labels",
    "count_valid",
    "summed_loss",
    "backward_scale",
    "mean_loss",
]
