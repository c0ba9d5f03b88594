"""The order in which microbatches run, improved by exchanging pairs of them.

Packed microbatches come close to the sizes of a profile and take its places by size. But they differ, too, in how much
of their time is forward, and two of nearly one size may do better in each other's place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_service.compiled import compiled
from scheduler_service.simulation.spans import span_of

Seconds = npt.NDArray[np.float64]
Order = npt.NDArray[np.int64]

MOST_OPERATIONS = 1 << 20
"""So many forwards and backwards are replayed at most: one or two milliseconds."""

_ROUNDING = 1e-9


def improved_order(forward: Seconds, backward: Seconds, stages: int, order: Order) -> Order:
    """Exchange two microbatches of `order`, near ones first, as long as the pipeline then ends earlier.

    `forward`, `backward`: seconds of each microbatch on every stage, (microbatches,). Never worse than `order`.
    """
    order = order.copy()
    replays = MOST_OPERATIONS // (2 * stages * (len(order) + stages))
    _exchange(forward[order], backward[order], stages, order, replays)
    return order


@compiled
def _exchange(forward: Seconds, backward: Seconds, stages: int, order: Order, replays: int) -> None:
    """Change `order`, and the seconds with it, until nothing gets better or all replays are used."""
    end, returned = np.empty(stages), np.empty(stages)
    best = span_of(forward, backward, stages, end, returned)
    better = True
    while better:
        better = False
        for apart in range(1, len(order)):
            for first in range(len(order) - apart):
                if replays == 0:
                    return
                replays -= 1
                _swap(forward, backward, order, first, first + apart)
                span = span_of(forward, backward, stages, end, returned)
                if span < best * (1.0 - _ROUNDING):
                    best, better = span, True
                else:
                    _swap(forward, backward, order, first, first + apart)


@compiled
def _swap(forward: Seconds, backward: Seconds, order: Order, first: int, second: int) -> None:
    forward[first], forward[second] = forward[second], forward[first]
    backward[first], backward[second] = backward[second], backward[first]
    order[first], order[second] = order[second], order[first]
