"""Which documents make up the global batch of an iteration, and which shard loads which of them.

Guarantees: a batch is a pure function of (seed, iteration), so a run that resumes at iteration k sees the very
samples that it would have seen; every epoch holds every document exactly once, in its own order; batches follow
each other without a gap, also across epochs. The sampler has no state to save but the number of the iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import InvalidInputError, Reason

Column = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """What one shard loads: sample numbers, counted over the whole run, and the documents behind them."""

    ids: Column
    documents: Column


@dataclass(frozen=True)
class Sampler:
    """Global batches of `batch` documents out of `documents`, loaded by `shards` shards.

    Sample number n is place n mod `documents` of epoch n div `documents`; iteration t holds the samples
    [t·batch, (t + 1)·batch), and shard j a contiguous part of them, so that the global order is (shard, local
    order). Raises `InvalidInputError` when a shard would have nothing to load.
    """

    documents: int
    batch: int
    shards: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.documents < 1 or not 1 <= self.shards <= self.batch:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT,
                f"{self.shards} loader shards cannot share batches of {self.batch} out of {self.documents} "
                "documents: give at least one document, and a batch of at least one per shard",
            )

    def shard_sizes(self) -> list[int]:
        """Number of samples of each shard; they differ by at most one."""
        return np.diff(self._bounds()).tolist()

    def shard(self, iteration: int, shard: int) -> Samples:
        """What shard `shard` loads for `iteration`, both counted from 0."""
        bounds = self._bounds()
        first = iteration * self.batch
        return self._samples(np.arange(first + bounds[shard], first + bounds[shard + 1]))

    def global_batch(self, iteration: int) -> Samples:
        """All samples of `iteration`, in their global order."""
        return self._samples(np.arange(iteration * self.batch, (iteration + 1) * self.batch))

    def _bounds(self) -> Column:
        return np.arange(self.shards + 1) * self.batch // self.shards

    def _samples(self, ids: Column) -> Samples:
        epochs, places = np.divmod(ids, self.documents)
        documents = np.empty_like(ids)
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            documents[inside] = _epoch_order(self.documents, self.seed, epoch)[places[inside]]
        return Samples(ids, documents)


@lru_cache(maxsize=4)
def _epoch_order(documents: int, seed: int, epoch: int) -> Column:
    # numpy keeps the raw stream of a bit generator stable across versions, but not `permutation`.
    return np.argsort(np.random.PCG64((seed, epoch)).random_raw(documents), kind="stable")
