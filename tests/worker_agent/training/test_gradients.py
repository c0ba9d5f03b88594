"""Loss and gradients are those of one process on the whole batch, whatever the plan."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scheduler_service.domain import Batch, Plan, Pool, slice_plan
from scheduler_service.planning import POLICIES, plan_iteration
from tests.support.exchanges import intercepted
from tests.support.ranks import run_ranks
from worker_agent.attention import ShardLayout
from worker_agent.data import IGNORE_INDEX, microbatches, shift_labels
from worker_agent.groups import Group, GroupRegistry
from worker_agent.training import attention as attention_module
from worker_agent.training.config import ModelConfig, OptimizerConfig
from worker_agent.training.mixture import Experts
from worker_agent.training.model import LanguageModel
from worker_agent.training.topology import Topology, build_topology
from worker_agent.training.trainer import Trainer

Array = npt.NDArray[np.float64]

RANKS = 4
POOL = Pool(ranks=RANKS, token_budget=24, ep=2, heads=4, max_ulysses=2)
MLA = ModelConfig(
    vocabulary=61, hidden=16, layers=2, dense_layers=1, heads=4, attention="mla", q_rank=12, kv_rank=8, nope_dim=6,
    rope_dim=4, value_dim=5, dense_width=24, experts=8, top_k=2, expert_width=8,
)  # fmt: skip
GQA = replace(MLA, attention="gqa", kv_heads=2, head_dim=6, dense_layers=0)
DEEP = replace(MLA, layers=4)
MODELS = {"mla": MLA, "gqa": GQA}

MIXED = (61, 40, 33, 20, 9, 7, 5, 3, 1, 12, 2, 30)
FEW = (20, 3)
"""Fewer sequences than ranks: some ranks have no work in any microbatch."""


@dataclass(frozen=True)
class Case:
    """A batch and whose labels are masked."""

    lengths: tuple[int, ...]
    masked: tuple[int, ...] = ()

    def sequences(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tokens and labels of every sequence."""
        generator = torch.Generator().manual_seed(7)
        tokens = [torch.randint(MLA.vocabulary, (length,), generator=generator) for length in self.lengths]
        labels = [shift_labels(sequence) for sequence in tokens]
        for sequence in self.masked:
            labels[sequence] = torch.full_like(labels[sequence], IGNORE_INDEX)
        return tokens, labels

    def shard_sizes(self) -> list[int]:
        """Sequences that each rank loads; uneven."""
        n = len(self.lengths)
        return [n // 2, n - n // 2, 0, 0]


@dataclass(frozen=True)
class Gradients:
    """What one way of running the batch gave."""

    loss: float
    norm: float
    by_name: dict[str, Array]
    counts: dict[str, Array]
    """Tokens sent to each expert, by the mixture layer's name."""


def one_process(model_config: ModelConfig, case: Case, monkeypatch: pytest.MonkeyPatch) -> Gradients:
    """Sequence by sequence through a model that holds every expert, with attention written out."""
    monkeypatch.setattr(attention_module, "ring_attention", _explicit_attention)
    model = LanguageModel(model_config, seed=5, dtype=torch.float64)
    group = GroupRegistry().group(0, 1)
    tokens, labels = case.sequences()
    losses = [
        model(sequence, label, ShardLayout([len(sequence)], 1, 1, 0), group)
        for sequence, label in zip(tokens, labels, strict=True)
    ]
    count = max(1, sum(int((label != IGNORE_INDEX).sum()) for label in labels))
    loss = torch.stack(losses).sum() / count
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    return Gradients(float(loss.detach()), float(norm), _named_gradients(model), _counts(model))


def _explicit_attention(q: Tensor, k: Tensor, v: Tensor, layout: ShardLayout, group: Group) -> Tensor:
    """softmax(q·kᵀ/√d)·v of one sequence, causal, with the keys and values of grouped heads repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def _named_gradients(model: LanguageModel) -> dict[str, Array]:
    """Gradients by global name: an expert's by its number in the whole layer."""
    found = {}
    routed = {id(parameter) for parameter in model.expert_parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in routed:
            found[name] = _gradient(parameter)
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            for own, parameter in module.named_parameters():
                for index, gradient in enumerate(_gradient(parameter)):
                    found[f"{name}.{module.first + index}.{own}"] = gradient
    return found


def _gradient(parameter: Tensor) -> Array:
    return np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy().copy()


def _counts(model: LanguageModel) -> dict[str, Array]:
    return {name: buffer.numpy() for name, buffer in model.named_buffers() if name.endswith(".counts")}


Planned = tuple[Case, list[Plan]]
Shape = tuple[int, int] | None
"""Ulysses × ring of a rank's microbatch; None for a dummy."""


def _run_cases(
    rank: int, model_config: ModelConfig, pool: Pool, planned: list[Planned]
) -> list[list[tuple[Gradients, list[Shape]]]]:
    """On one rank: for each case and each of its plans, the gradients and this rank's microbatches."""
    topology = build_topology(pool)
    return [[_run_plan(model_config, pool, case, plan, topology) for plan in plans] for case, plans in planned]


def _run_plan(
    model_config: ModelConfig, pool: Pool, case: Case, plan: Plan, topology: Topology
) -> tuple[Gradients, list[Shape]]:
    rank, sizes = topology.rank, case.shard_sizes()
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    tokens, labels = case.sequences()
    model = LanguageModel(
        model_config,
        seed=5,
        experts=topology.experts,
        dtype=torch.float64,
        stage=topology.pipeline.stage,
        stages=pool.stages,
    )
    trainer = Trainer(model, pool, topology, OptimizerConfig())
    piece = slice_plan(plan, Batch(case.lengths), sizes, [rank])
    result = trainer.compute_gradients(piece, tokens[own], labels[own])
    shapes = [None if part.is_dummy else (part.ulysses, part.ring) for part in microbatches(piece, pool, rank)]
    return Gradients(result.loss, result.gradient_norm, _named_gradients(model), _counts(model)), shapes


def _assert_equal(got: list[Gradients], expected: Gradients) -> None:
    """Every rank's gradients, all experts between them, against one process: 1e-10 of each parameter's scale."""
    seen: set[str] = set()
    for gradients in got:
        assert gradients.loss == pytest.approx(expected.loss, rel=1e-12, abs=1e-15)
        assert gradients.norm == pytest.approx(expected.norm, rel=1e-10, abs=1e-15)
        for name, gradient in gradients.by_name.items():
            scale = np.abs(expected.by_name[name]).max()
            error = np.abs(gradient - expected.by_name[name]).max()
            assert error <= 1e-10 * scale + 1e-16, f"{name}: off by {error:.2e} at a scale of {scale:.2e}"
        seen |= gradients.by_name.keys()
    assert seen == expected.by_name.keys()
    for name, counts in expected.counts.items():
        assert np.array_equal(sum(gradients.counts[name] for gradients in got if name in gradients.counts), counts)


CASES = {
    "mixed": Case(MIXED),
    "one sequence masked": Case(MIXED, masked=(1,)),
    "only the longest has labels": Case(MIXED, masked=tuple(range(1, len(MIXED)))),
    "fewer sequences than ranks": Case(FEW),
    "nothing has labels": Case(FEW, masked=(0, 1)),
}


@pytest.fixture(scope="module", params=MODELS)
def attempt(request: pytest.FixtureRequest) -> tuple[ModelConfig, dict[str, Any]]:
    """A model, and for each case what every rank got under every policy's plan: the ranks start once for all."""
    model_config = MODELS[request.param]
    planned = [
        (case, [plan_iteration(Batch(case.lengths), POOL, policy=policy) for policy in POLICIES])
        for case in CASES.values()
    ]
    by_rank = run_ranks(RANKS, _run_cases, model_config, POOL, planned, timeout_s=240)
    return model_config, {name: [results[number] for results in by_rank] for number, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_one_process(
    name: str, attempt: tuple[ModelConfig, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    model_config, results = attempt
    case, by_rank = CASES[name], results[name]
    expected = one_process(model_config, case, monkeypatch)
    for number in range(len(POLICIES)):
        _assert_equal([plans[number][0] for plans in by_rank], expected)
    shapes = {shape for plans in by_rank for _, parts in plans for shape in parts}
    if case.lengths == MIXED:
        assert {(1, 1), (2, 1), (2, 2)} <= shapes, "degrees 1, 2 and 4, the last as Ulysses 2 × ring 2"
    else:
        assert None in shapes, "some rank ran a dummy"


CUTS = [replace(POOL, max_ulysses=inner) for inner in (1, 2, 4)]


def _run_cuts(rank: int, case: Case, plans: list[Plan]) -> list[tuple[Gradients, list[Shape]]]:
    topology = build_topology(POOL)
    return [_run_plan(GQA, pool, case, plan, topology) for pool, plan in zip(CUTS, plans, strict=True)]


def test_loss_and_gradients_are_the_same_for_every_cut_of_a_group_into_ulysses_and_ring(
    monkeypatch: pytest.MonkeyPatch,
):
    case = CASES["one sequence masked"]
    plans = [plan_iteration(Batch(case.lengths), pool, policy="hydra") for pool in CUTS]
    by_rank = run_ranks(RANKS, _run_cuts, case, plans, timeout_s=240)
    expected = one_process(GQA, case, monkeypatch)
    for number in range(len(CUTS)):
        _assert_equal([results[number][0] for results in by_rank], expected)
    shapes = [{shape for results in by_rank for shape in results[number][1]} for number in range(len(CUTS))]
    assert all(cut in seen for cut, seen in zip(((1, 4), (2, 2), (4, 1)), shapes, strict=True))


def test_gradients_through_two_pipeline_stages_equal_those_of_one_process(monkeypatch: pytest.MonkeyPatch):
    """1F1B over two stages × a pool of four; microbatches differ in shape, dummies and a batch of one among them."""
    pool = replace(POOL, stages=2)
    cases = [CASES[name] for name in ("mixed", "only the longest has labels", "fewer sequences than ranks")]
    planned = [
        (case, [plan_iteration(Batch(case.lengths), pool, policy=policy) for policy in ("hydra", "static_cp")])
        for case in cases
    ]
    counts = {plan.header.microbatches for _, plans in planned for plan in plans}
    assert min(counts) < pool.stages < max(counts), "fewer microbatches than stages, and more"
    by_rank = run_ranks(RANKS * pool.stages, _run_cases, DEEP, pool, planned, timeout_s=240)
    for number, (case, plans) in enumerate(planned):
        expected = one_process(DEEP, case, monkeypatch)
        for which in range(len(plans)):
            _assert_equal([results[number][which][0] for results in by_rank], expected)


def _run_late(
    rank: int, model_config: ModelConfig, pool: Pool, planned: list[Planned]
) -> list[list[tuple[Gradients, list[Shape]]]]:
    """`_run_cases`, with each rank late at random for every exchange of every kind."""
    pace, post = random.Random(rank), dist.batch_isend_irecv

    def late(received: Tensor, collective: Callable[[], dist.Work]) -> dist.Work:
        time.sleep(pace.choice((0, 0, 0.003)))
        return collective()

    def posted_late(operations: list[dist.P2POp]) -> list[dist.Work]:
        time.sleep(pace.choice((0, 0, 0.003)))
        return post(operations)

    dist.batch_isend_irecv = posted_late
    with intercepted(late):
        return _run_cases(rank, model_config, pool, planned)


def test_random_delays_before_every_exchange_of_two_stages_change_nothing(monkeypatch: pytest.MonkeyPatch):
    pool, case = replace(POOL, stages=2), CASES["mixed"]
    planned = [(case, [plan_iteration(Batch(case.lengths), pool, policy="hydra")])]
    by_rank = run_ranks(RANKS * pool.stages, _run_late, DEEP, pool, planned, timeout_s=240)
    _assert_equal([results[0][0][0] for results in by_rank], one_process(DEEP, case, monkeypatch))


def test_weights_do_not_depend_on_the_number_of_ep_ranks():
    whole = LanguageModel(MLA, seed=3)
    parts = run_ranks(2, _half_of_the_experts)
    for name, weight in whole.named_parameters():
        if ".experts." in name:
            joined = np.concatenate([part[name] for part in parts])
        else:
            assert np.array_equal(parts[0][name], parts[1][name])
            joined = parts[0][name]
        assert np.array_equal(weight.detach().numpy(), joined), name


def _half_of_the_experts(rank: int) -> dict[str, Array]:
    topology = build_topology(Pool(ranks=2, token_budget=24, ep=2))
    weights = LanguageModel(MLA, seed=3, experts=topology.experts).state_dict()
    return {name: weight.numpy() for name, weight in weights.items()}
