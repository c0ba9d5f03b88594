"""Ranks and their speeds as options name them: `3`, `8-15`, `3,8-15`; `3=0.5`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from scheduler_service.domain import MAX_RANKS, InvalidInputError, Reason

_RANKS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def rank_speeds(slow: Sequence[str], excluded: Sequence[str]) -> list[tuple[int, float]]:
    """Pairs for `Pool.speeds`: of RANKS=SPEED, and of RANKS that are excluded.

    Raises `InvalidInputError` for a text of another form. Whether the pool has such ranks, and whether the speeds
    are any, the pool says.
    """
    pairs = []
    for text in slow:
        listed, _, speed = text.partition("=")
        try:
            pairs += [(rank, float(speed)) for rank in ranks_of(listed)]
        except ValueError:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"--rank-speed {text}: give RANK=SPEED, for example 3=0.5 or 8-15=0.9"
            ) from None
    for text in excluded:
        try:
            pairs += [(rank, 0.0) for rank in ranks_of(text)]
        except ValueError:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"--exclude {text}: give ranks, for example 3,17 or 8-15"
            ) from None
    return pairs


def ranks_of(text: str) -> list[int]:
    """Ranks in the order in which they are named. Raises `ValueError` for anything but numbers and ranges."""
    ranks: list[int] = []
    for part in text.split(","):
        found = _RANKS.fullmatch(part.strip())
        if not found:
            raise ValueError(part)
        first = int(found[1])
        last = int(found[2] or first)
        if not first <= last < MAX_RANKS:
            raise ValueError(part)
        ranks += range(first, last + 1)
    return ranks
