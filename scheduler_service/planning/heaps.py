"""Binary min-heaps on one flat array: heap h occupies entries [first[h], first[h] + size[h]).

An entry is one integer, key · 2¹⁶ + item, so that one comparison orders by (key, item): −2⁴⁷ ≤ key < 2⁴⁷ and
0 ≤ item < 2¹⁶. The caller sees to it that heaps do not grow into each other and that none is read when empty.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.compiled import compiled

LongColumn = npt.NDArray[np.int64]

ITEM_BITS = 16
ITEM_MASK = (1 << ITEM_BITS) - 1


class Heaps(NamedTuple):
    """State of all heaps."""

    entry: LongColumn
    first: LongColumn
    size: LongColumn


def new_heaps(most: LongColumn) -> Heaps:
    """Empty heaps; heap h has room for `most[h]` entries."""
    return Heaps(np.empty(int(most.sum()), np.int64), np.cumsum(most) - most, np.zeros_like(most))


@compiled
def top_key(heaps: Heaps, heap: int) -> int:
    """Smallest key."""
    return heaps.entry[heaps.first[heap]] >> ITEM_BITS


@compiled
def top_item(heaps: Heaps, heap: int) -> int:
    """Item of the smallest key, the lowest on a tie."""
    return heaps.entry[heaps.first[heap]] & ITEM_MASK


@compiled
def push(heaps: Heaps, heap: int, key: int, item: int) -> None:
    """Add an entry."""
    heaps.size[heap] += 1
    _rise(heaps.entry, heaps.first[heap], heaps.size[heap] - 1, (key << ITEM_BITS) + item)


@compiled
def pop(heaps: Heaps, heap: int) -> int:
    """Remove the top entry and return its item."""
    first = heaps.first[heap]
    item = heaps.entry[first] & ITEM_MASK
    heaps.size[heap] -= 1
    _rise(heaps.entry, first, _sink_gap(heaps, heap), heaps.entry[first + heaps.size[heap]])
    return item


@compiled
def replace_top(heaps: Heaps, heap: int, key: int, item: int) -> None:
    """Put another entry in the place of the top."""
    _rise(heaps.entry, heaps.first[heap], _sink_gap(heaps, heap), (key << ITEM_BITS) + item)


@compiled
def _sink_gap(heaps: Heaps, heap: int) -> int:
    """Move the gap at the top down to a leaf, along the smaller children, and return its place.

    What fills the gap then rises. It mostly belongs near the leaves, so this takes half the comparisons of sinking
    the entry itself, and none that the processor has to guess.
    """
    entry, first, size = heaps.entry, heaps.first[heap], heaps.size[heap]
    gap = 0
    child = 1
    while child + 1 < size:
        child += entry[first + child + 1] < entry[first + child]
        entry[first + gap] = entry[first + child]
        gap = child
        child = 2 * gap + 1
    if child < size:
        entry[first + gap] = entry[first + child]
        gap = child
    return gap


@compiled
def _rise(entries: LongColumn, first: int, place: int, entry: int) -> None:
    """Put `entry` at `place`, or above it while it is smaller than its parent."""
    while place > 0 and entry < entries[first + ((place - 1) >> 1)]:
        entries[first + place] = entries[first + ((place - 1) >> 1)]
        place = (place - 1) >> 1
    entries[first + place] = entry
