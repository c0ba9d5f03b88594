"""The loss and its gradient do not depend on the plan, on padding, or on who has valid labels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scheduler_service.domain import Batch, Pool, slice_plan
from tests.support.plans import random_plan
from tests.support.ranks import run_ranks
from worker_agent.communication import ByteCounters
from worker_agent.data import (
    IGNORE_INDEX,
    Rerouter,
    backward_scale,
    count_valid,
    mean_loss,
    shift_labels,
    summed_loss,
)

VOCABULARY = 11
LENGTHS = [1, 30, 2, 7, 90, 3, 12, 25]
SHARDS = [3, 0, 4, 1]


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def labels_of(document: Tensor, masked: bool) -> Tensor:
    labels = shift_labels(document)
    return torch.full_like(labels, IGNORE_INDEX) if masked else labels


def weights() -> tuple[Tensor, Tensor]:
    """A model of one token at a time, so that only rerouting, labels and weights are at stake."""
    generator = torch.Generator().manual_seed(5)
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((VOCABULARY, 6), (6, VOCABULARY))
    )


def alone(masked: list[int]) -> tuple[float, np.ndarray]:
    embedding, head = weights()
    losses, valid = [], 0
    for sequence, document in enumerate(documents()):
        labels = labels_of(document, sequence in masked)
        keep = labels != IGNORE_INDEX
        logits = embedding[document] @ head
        picked = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        losses.append(((torch.logsumexp(logits, dim=1) - picked) * keep).sum())
        valid += int(keep.sum())
    loss = torch.stack(losses).sum() / max(valid, 1)
    loss.backward()
    return loss.item(), torch.cat([embedding.grad.flatten(), head.grad.flatten()]).numpy()  # type: ignore[union-attr]


def _planned(rank: int, pool: Pool, seed: int, masked: list[int]) -> tuple[float, np.ndarray]:
    batch = Batch(LENGTHS)
    cut = slice_plan(random_plan(np.random.default_rng(seed), batch, pool, 3), batch, SHARDS, [rank])
    rerouter = Rerouter(cut, pool, rank, dist.group.WORLD, ByteCounters())
    mine = [documents()[sequence] for sequence in cut.loaded]
    tokens = rerouter.route(mine, 0)
    labels = rerouter.route(
        [labels_of(document, sequence in masked) for sequence, document in zip(cut.loaded, mine, strict=True)],
        IGNORE_INDEX,
    )
    embedding, head = weights()
    valid = count_valid(labels, dist.group.WORLD)
    total = torch.zeros((), dtype=torch.float64)
    for columns, targets in zip(tokens, labels, strict=True):
        summed = summed_loss(embedding[columns] @ head, targets)
        (summed * backward_scale(valid)).backward()
        total += summed.detach()
    gradient = torch.cat([embedding.grad.flatten(), head.grad.flatten()])  # type: ignore[union-attr]
    dist.all_reduce(gradient)
    return mean_loss(total, valid, dist.group.WORLD), gradient.numpy()


def _all_plans(rank: int) -> list[tuple[float, np.ndarray]]:
    pools = [
        Pool(ranks=4, token_budget=1 << 20, heads=heads, max_ulysses=ulysses)
        for heads, ulysses in ((None, None), (2, 2), (1, 1))
    ]
    found = [_planned(rank, pool, seed, []) for pool in pools for seed in range(3)]
    found.append(_planned(rank, pools[0], 0, [0, 1, 2]))  # every label that rank 0 loaded is masked
    found.append(_planned(rank, pools[0], 0, list(range(len(LENGTHS)))))
    return found


def test_loss_and_gradient_are_those_of_one_process_for_every_shape_and_plan() -> None:
    whole, partly, nothing = alone([]), alone([0, 1, 2]), alone(list(range(len(LENGTHS))))
    for found in run_ranks(4, _all_plans):
        for (loss, gradient), (true_loss, true_gradient) in zip(found, [whole] * 9 + [partly, nothing], strict=True):
            assert loss == pytest.approx(true_loss, rel=1e-12, abs=1e-15)
            np.testing.assert_allclose(gradient, true_gradient, rtol=1e-10, atol=1e-14)
    assert nothing[0] == 0.0


def test_labels_are_the_next_token_and_the_last_token_has_none() -> None:
    assert shift_labels(torch.tensor([5, 6, 7])).tolist() == [6, 7, IGNORE_INDEX]
    assert shift_labels(torch.tensor([5]), ignore_index=-1).tolist() == [-1]


def test_all_labels_masked_is_a_loss_of_zero_with_gradients_of_zero() -> None:
    logits = torch.randn(4, VOCABULARY, requires_grad=True)
    labels = torch.full((4,), IGNORE_INDEX)
    valid = count_valid([labels])
    loss = summed_loss(logits, labels) * backward_scale(valid)
    loss.backward()
    assert valid == 0
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))  # type: ignore[arg-type]
    assert mean_loss(loss, valid) == 0.0


def test_what_is_reported_and_what_scales_the_gradient_are_two_quantities() -> None:
    logits = torch.zeros(4, VOCABULARY, requires_grad=True)
    labels = torch.tensor([1, 2, IGNORE_INDEX, 3])
    summed = summed_loss(logits, labels)
    assert mean_loss(summed, 3) == pytest.approx(math.log(VOCABULARY))
    # Averaging wrappers change the gradient's scale, never the report.
    assert backward_scale(3, gradient_copies=8) == pytest.approx(8 * backward_scale(3))


def test_half_precision_logits_are_summed_in_single_precision() -> None:
    logits = torch.randn(3000, VOCABULARY).to(torch.bfloat16)
    labels = torch.randint(VOCABULARY, (3000,))
    summed = summed_loss(logits, labels)
    assert summed.dtype == torch.float32
    torch.testing.assert_close(summed.double(), summed_loss(logits.double(), labels), rtol=1e-5, atol=0.0)
