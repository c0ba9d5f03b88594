"""Real length distributions for the benchmarks: a mass of short documents, a few very long ones, at most 256K tokens.

`paper_like` needs no file (`simulation/workloads.py` says where it comes from). The others are read from a JSON file of
published distributions: objects with `kind` "quantiles" (`percent_and_length`) or "histogram" (`upper_edge_and_count`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_service.simulation.workloads import LOG_DEVIATION, LOG_MEAN, LONGEST, SHORTEST

WEB_SHARE_OF_LONGEST = 1.5e-4
"""The web histogram ends at 192K: as many documents as in `paper_like` are put at 256K."""

Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]
"""Draws that many lengths."""


def paper_like(random: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """The lengths of the HyDra paper's 256K data set."""
    return np.maximum(random.lognormal(LOG_MEAN, LOG_DEVIATION, count), SHORTEST)


def distributions(file: Path) -> dict[str, Draw]:
    """`paper_like`, and what the file holds where it is there."""
    drawn: dict[str, Draw] = {"paper_like": paper_like}
    if file.is_file():
        for name, published in json.loads(file.read_text()).items():
            drawn[name] = _quantiles(published) if published["kind"] == "quantiles" else _histogram(published)
    return drawn


def _quantiles(published: Mapping[str, Any]) -> Draw:
    """The logarithm of the length is interpolated between quantiles."""
    percent, length = np.array(published["percent_and_length"], float).T
    return lambda random, count: np.exp(np.interp(random.uniform(0, 100, count), percent, np.log(length)))


def _histogram(published: Mapping[str, Any]) -> Draw:
    """Log-uniform inside a bin, and the point mass of the longest."""
    edge, weight = np.array(published["upper_edge_and_count"], float).T
    lower = np.log(np.append(1.0, edge[:-1]))
    share = weight / weight.sum()

    def draw(random: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        row = random.choice(len(edge), count, p=share)
        lengths = np.exp(random.uniform(lower[row], np.log(edge[row])))
        lengths[random.uniform(size=count) < WEB_SHARE_OF_LONGEST] = LONGEST
        return lengths

    return draw


def sequences(draw: Draw, count: int) -> npt.NDArray[np.int64]:
    """`count` lengths, the same in every run."""
    return np.clip(draw(np.random.default_rng(0), count), 1, LONGEST).astype(np.int64)


def sequences_of(draw: Draw, tokens: int) -> npt.NDArray[np.int64]:
    """As many lengths as make up `tokens`, the same in every run."""
    count = 1024
    while (lengths := sequences(draw, count)).sum() < tokens:
        count *= 2
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
