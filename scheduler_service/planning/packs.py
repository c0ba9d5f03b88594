"""Packs of whole sequences, up to a capacity in tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

Packs = list[list[int]]
"""Ids of the sequences of each pack, in the order in which they were placed."""


def best_fit(sequences: Iterable[tuple[int, int]], capacity: int) -> Packs:
    """Pack (id, tokens) in the order given: each goes to the fullest pack with room, the oldest on a tie.

    No sequence may have more tokens than `capacity`. Cost: O(N log N) comparisons.
    """
    packs: Packs = []
    rooms: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for sequence, tokens in sequences:
        best = bisect_left(rooms, (tokens, 0))
        if best == len(rooms):
            room, pack = capacity, len(packs)
            packs.append([])
        else:
            room, pack = rooms.pop(best)
        packs[pack].append(sequence)
        insort(rooms, (room - tokens, pack))
    return packs
