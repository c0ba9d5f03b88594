"""Sizes of microbatches that start small, grow to a plateau, and shrink again: less waiting at both ends of 1F1B.

With f and b the forward and backward seconds of a microbatch and p stages, no stage waits at the start while

    (p−1)·f_k ≤ S₀ + Σ_{k−p<j<k} b_j        S₀ = (p−1)·f_0, the time until the last stage starts

and the end mirrors it with b and f exchanged and S₁ = (p−1)·b_{M−1}. A profile takes each size as large as the two
recurrences and a plateau allow, the plateau being what makes the sizes add up to the work. Three numbers span the
family: M, and the sizes of the first and the last microbatch. All on a fixed grid are replayed as one pipeline, the
mean of all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.compiled import compiled
from scheduler_service.simulation.spans import span_of

Seconds = npt.NDArray[np.float64]

ENDS = np.array([0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.75, 1.0])
"""Sizes of the first and of the last microbatch that are tried, as shares of the mean size."""

FINER = np.array([0.75, 0.87, 1.15, 1.33])
"""Factors by which each end is varied at last."""

_HALVINGS = 14
_ROUNDS = 2


class Profile(NamedTuple):
    """Sizes of microbatches in the order in which they run."""

    span_s: float
    """Span of the mean pipeline."""
    sizes: Seconds
    """Seconds of forward and backward without overheads."""
    ends: tuple[float, float]


class Shape(NamedTuple):
    """What profiles of one batch have in common."""

    stages: int
    work_s: float
    """Mean of all work on a rank, forward and backward, without overheads."""
    forward_share: float
    """Forward over forward and backward."""
    overhead_s: float


def best_profile(shape: Shape, microbatches: int, needs: Seconds) -> Profile:
    """The profile of the grid with the shortest span, found one end after the other.

    `needs`: seconds of the longest sequences on the whole pool, descending: a microbatch is at least as large as the
    longest that still waits.
    """
    if shape.stages == 1:
        return profile(shape, microbatches, needs, (1.0, 1.0))
    return profile(shape, microbatches, needs, _best_ends(shape, ENDS, FINER, needs, np.empty(microbatches)))


def profile(shape: Shape, microbatches: int, needs: Seconds, ends: tuple[float, float]) -> Profile:
    """One profile of the family."""
    sizes = np.empty(microbatches)
    _fill_profile(shape, ends[0], ends[1], needs, sizes)
    return Profile(float(mean_span(shape, sizes)), sizes, ends)


@compiled
def _best_ends(shape: Shape, ends: Seconds, finer: Seconds, needs: Seconds, sizes: Seconds) -> tuple[float, float]:
    """The best first and last size: line search in turns, from the middle of the grid, then between its points."""
    first = last = ends[len(ends) // 2]
    best = np.inf
    for step in range(_ROUNDS + 1):
        rows = finer if step == _ROUNDS else ends
        scale = last if step == _ROUNDS else 1.0
        for row in rows:
            _fill_profile(shape, first, row * scale, needs, sizes)
            span = mean_span(shape, sizes)
            if span < best:
                best, last = span, row * scale
        scale = first if step == _ROUNDS else 1.0
        for row in rows:
            _fill_profile(shape, row * scale, last, needs, sizes)
            span = mean_span(shape, sizes)
            if span < best:
                best, first = span, row * scale
    return first, last


@compiled
def mean_span(shape: Shape, sizes: Seconds) -> float:
    """Span of one pipeline with microbatches of these sizes."""
    forward = sizes * shape.forward_share + shape.overhead_s
    backward = sizes * (1.0 - shape.forward_share) + shape.overhead_s
    return span_of(forward, backward, shape.stages, np.empty(shape.stages), np.empty(shape.stages))


@compiled
def _fill_profile(shape: Shape, first: float, last: float, needs: Seconds, sizes: Seconds) -> None:
    mean = shape.work_s / len(sizes)
    _fill_to(shape, first * mean, last * mean, shape.work_s, sizes)
    if len(needs) == 0:
        return
    excess = _raise(sizes, needs)
    if excess > 0.0:
        _fill_to(shape, first * mean, last * mean, max(shape.work_s - excess, 0.5 * shape.work_s), sizes)
        _raise(sizes, needs)


@compiled
def _fill_to(shape: Shape, first: float, last: float, work: float, sizes: Seconds) -> None:
    """Bisect the plateau until the sizes add up to `work`."""
    low, high = work / len(sizes), 3.0 * work / len(sizes)
    if _fill_below(shape, first, last, high, sizes) < work:
        low, high = high, work
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        if _fill_below(shape, first, last, middle, sizes) < work:
            low = middle
        else:
            high = middle
    total = _fill_below(shape, first, last, high, sizes)
    if total > 0.0:
        sizes *= work / total  # the ends can be too small to ever reach it


@compiled
def _fill_below(shape: Shape, first: float, last: float, plateau: float, sizes: Seconds) -> float:
    """Largest sizes that keep both recurrences and the plateau: their sum."""
    stages, share, overhead = shape.stages, shape.forward_share, shape.overhead_s
    count = len(sizes)
    per_forward, per_backward = 1.0 / share, 1.0 / (1.0 - share)
    per_stage = 1.0 / max(1, stages - 1)
    if stages == 1:
        sizes[:] = plateau
        return plateau * count
    window = 0.0
    bubble = (stages - 1) * (first * share + overhead)
    for k in range(count):
        allowed = (bubble + window) * per_stage - overhead
        sizes[k] = min(plateau, max(0.0, allowed * per_forward))
        window += sizes[k] * (1.0 - share) + overhead
        if k >= stages - 1:
            window -= sizes[k - stages + 1] * (1.0 - share) + overhead
    window = 0.0
    bubble = (stages - 1) * (last * (1.0 - share) + overhead)
    total = 0.0
    for k in range(count - 1, -1, -1):
        allowed = (bubble + window) * per_stage - overhead
        sizes[k] = min(sizes[k], max(0.0, allowed * per_backward))
        total += sizes[k]
        window += sizes[k] * share + overhead
        if k + stages - 1 < count:
            window -= sizes[k + stages - 1] * share + overhead
    return total


@compiled
def _raise(sizes: Seconds, needs: Seconds) -> float:
    """Raise the largest sizes to what they must hold, the longest sequences first: what that adds."""
    order = np.argsort(-sizes, kind="mergesort")
    added = 0.0
    longest = 0
    for row in order:
        if longest == len(needs):
            break
        if needs[longest] > sizes[row]:
            added += needs[longest] - sizes[row]
            sizes[row] = needs[longest]
        left = sizes[row]
        while longest < len(needs) and needs[longest] <= left:
            left -= needs[longest]
            longest += 1
    return added
