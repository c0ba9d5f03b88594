"""Sample order: explicit, resumable, nothing repeated and nothing lost."""

import numpy as np
import pytest

from scheduler_service.domain import InvalidInputError
from worker_agent.training.sampler import Sampler


def test_shards_make_up_the_global_batch_in_order():
    sampler = Sampler(documents=100, batch=13, shards=4, seed=3)
    for iteration in range(20):
        shards = [sampler.shard(iteration, shard) for shard in range(4)]
        whole = sampler.global_batch(iteration)
        assert [len(shard.ids) for shard in shards] == sampler.shard_sizes()
        assert np.array_equal(np.concatenate([shard.ids for shard in shards]), whole.ids)
        assert np.array_equal(np.concatenate([shard.documents for shard in shards]), whole.documents)


def test_every_epoch_holds_every_document_once_also_when_batches_straddle_epochs():
    sampler = Sampler(documents=50, batch=16, shards=2, seed=1)
    batches = [sampler.global_batch(iteration) for iteration in range(25)]
    ids = np.concatenate([batch.ids for batch in batches])
    documents = np.concatenate([batch.documents for batch in batches])
    assert np.array_equal(ids, np.arange(400))
    orders = documents.reshape(8, 50)
    assert all(np.array_equal(np.sort(order), np.arange(50)) for order in orders)
    assert len({order.tobytes() for order in orders}) == 8, "each epoch has its own order"


def test_an_iteration_depends_on_seed_and_number_only():
    walked = Sampler(documents=64, batch=8, shards=4, seed=9)
    for iteration in range(40):
        walked.shard(iteration, 0)
    resumed = Sampler(documents=64, batch=8, shards=4, seed=9)
    assert np.array_equal(walked.shard(37, 2).documents, resumed.shard(37, 2).documents)
    other = Sampler(documents=64, batch=8, shards=4, seed=10)
    assert not np.array_equal(walked.global_batch(0).documents, other.global_batch(0).documents)


def test_the_order_is_the_same_on_every_machine():
    # Written down once: a resumed run on another version of numpy must not see other samples.
    assert Sampler(documents=10, batch=10, shards=1, seed=0).global_batch(0).documents.tolist() == [
        3,
        2,
        1,
        8,
        6,
        0,
        7,
        4,
        5,
        9,
    ]


@pytest.mark.parametrize(("documents", "batch", "shards"), [(0, 4, 2), (10, 3, 4), (10, 4, 0)])
def test_a_shard_without_samples_is_refused(documents: int, batch: int, shards: int):
    with pytest.raises(InvalidInputError, match="loader shards"):
        Sampler(documents=documents, batch=batch, shards=shards)
