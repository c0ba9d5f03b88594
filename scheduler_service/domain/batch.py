"""The lengths of one iteration's sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_service.domain.errors import InvalidInputError, Reason

MAX_LENGTH = 1 << 24
"""Longest sequence that is accepted, in tokens. Keeps squares times the largest pool inside 64 bits."""

MAX_SEQUENCES = 1 << 26
"""Most sequences of one batch. Keeps every column of a plan inside int32."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The global batch of one iteration: `lengths[i]` tokens (int64, read-only) in the sequence with id i.

    Raises `InvalidInputError` for an empty batch, and for a length that is not an integer in
    1 … `MAX_LENGTH`; the error names the sequence.
    """

    lengths: npt.NDArray[np.int64] = field(repr=False)

    def __init__(self, lengths: Sequence[int] | npt.NDArray[Any]) -> None:
        object.__setattr__(self, "lengths", validated_lengths(lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and np.array_equal(self.lengths, other.lengths)

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    @cached_property
    def tokens(self) -> int:
        """Σ s."""
        return int(self.lengths.sum())

    @cached_property
    def sum_of_squares(self) -> float:
        """Σ s², rounded once: a million sequences of 10⁷ tokens pass 64 bits.

        Summed in integers, since a float sum depends on the machine's vector width, and plans depend on this.
        """
        squares = np.square(self.lengths)
        high = int((squares >> 24).sum())
        return float((high << 24) + int((squares & (1 << 24) - 1).sum()))

    @cached_property
    def digest(self) -> str:
        """BLAKE2b-128 of the lengths as little-endian int64, in hexadecimal."""
        return hashlib.blake2b(self.lengths.astype("<i8").tobytes(), digest_size=16).hexdigest()


def validated_lengths(lengths: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Copy `lengths` to a read-only int64 column, or say which of them is wrong and why."""
    try:
        given = np.asarray(lengths)
    except ValueError as error:  # rows of different sizes
        raise InvalidInputError(Reason.INVALID_LENGTH, f"lengths must be a flat list of integers: {error}") from error
    if given.ndim != 1:
        raise InvalidInputError(
            Reason.INVALID_LENGTH, f"lengths must be a flat list of integers, not an array of shape {given.shape}"
        )
    if given.size == 0:
        raise InvalidInputError(Reason.EMPTY_BATCH, "the batch holds no sequence; give at least one length")
    if given.size > MAX_SEQUENCES:
        raise InvalidInputError(
            Reason.INVALID_LENGTH,
            f"the batch holds {given.size:,} sequences; the limit is {MAX_SEQUENCES:,}: plan it as several iterations",
        )
    shown = given
    if given.dtype.kind not in "iuf" or (isinstance(lengths, list | tuple) and bool in set(map(type, lengths))):
        shown = np.asarray(lengths, dtype=object)  # numpy would have made one text or number of a mixture
        given = _numbers(shown)
    if given.dtype == np.float16:
        given = given.astype(np.float64)  # the limits are no numbers of so narrow a type
    with np.errstate(invalid="ignore"):
        wrong = ~((given >= 1) & (given <= MAX_LENGTH) & (given == np.floor(given)))
    if wrong.any():
        sequence = int(wrong.argmax())
        raise InvalidInputError(Reason.INVALID_LENGTH, _complaint(sequence, shown[sequence]), sequence=sequence)
    column = given.astype(np.int64)
    column.flags.writeable = False
    return column


def _numbers(given: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Objects as floats (exact up to 2⁵³, far above the limit); texts and booleans are refused, not guessed at."""
    column = np.empty(given.size, np.float64)
    for sequence, value in enumerate(given.tolist()):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidInputError(Reason.INVALID_LENGTH, _complaint(sequence, value), sequence=sequence)
        column[sequence] = min(value, 2.0**53)
    return column


def _complaint(sequence: int, value: object) -> str:
    return (
        f"sequence {sequence} has length {_shown(value)}; a length is a whole number of tokens from 1 to "
        f"{MAX_LENGTH:,}: drop the sequence or mend its length"
    )


def _shown(value: object) -> str:
    """A value as a message can bear it: Python refuses to print the longest numbers."""
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, int) and plain.bit_length() > 128:
        return "of more than 128 bits"
    text = repr(plain)
    return text if len(text) <= 80 else f"{text[:80]}…"
