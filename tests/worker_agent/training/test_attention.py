"""The attention layers of the reference model: exact on every shape of group, and what hides which exchange."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.exchanges import Recorder, intercepted
from tests.support.ranks import run_ranks
from worker_agent.attention import ShardLayout
from worker_agent.groups import Group, GroupRegistry
from worker_agent.training.attention import GroupedQueryAttention, LatentAttention, Rotary
from worker_agent.training.config import ModelConfig
from worker_agent.training.initialisation import draw
from worker_agent.training.layers import Linear

LENGTHS = (13, 1, 40, 5)
GATHERED = ModelConfig(hidden=16, heads=4, attention="mla", q_rank=12, kv_rank=6, nope_dim=6, rope_dim=4, value_dim=5)
MODELS = {
    "latents gathered": GATHERED,
    "keys and values exchanged": replace(GATHERED, kv_rank=40),
    "grouped queries": replace(GATHERED, attention="gqa", kv_heads=2, head_dim=6),
}


def layer_of(config: ModelConfig) -> LatentAttention | GroupedQueryAttention:
    layer = (LatentAttention if config.attention == "mla" else GroupedQueryAttention)(config).double()
    for name, parameter in layer.named_parameters():
        draw(parameter.data, 3, name)
    return layer


def stream(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Input and gradient of the output for the whole packed stream."""
    generator = torch.Generator().manual_seed(0)
    x, dout = (torch.randn(sum(LENGTHS), config.hidden, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, dout


class Result(NamedTuple):
    """Output and gradient of the input, in the slots of a rank, and the weights' gradients over the whole group."""

    out: Tensor
    dx: Tensor
    weights: dict[str, Tensor]


def run(config: ModelConfig, group: Group, *, checkpointed: bool = False) -> Result:
    layout = ShardLayout(LENGTHS, group.ulysses, group.ring, group.rank)
    real = layout.token_index >= 0
    layer = layer_of(config)
    x, dout = (torch.zeros(layout.tokens, config.hidden, dtype=torch.float64) for _ in range(2))
    for own, whole in zip((x, dout), stream(config), strict=True):
        own[real] = whole[layout.token_index[real]]
    elements = config.rope_dim if config.attention == "mla" else config.head_dim
    rotary = Rotary(layout.positions, elements, config.rope_base, torch.float64)
    x.requires_grad_()
    out: Any = (
        checkpoint(layer, x, rotary, layout, group, use_reentrant=False)
        if checkpointed
        else layer(x, rotary, layout, group)
    )
    out.backward(dout)
    weights = {name: parameter.grad for name, parameter in layer.named_parameters()}
    for gradient in weights.values():
        if group.process_group is not None:
            dist.all_reduce(gradient, group=group.process_group)
    return Result(out.detach(), x.grad, weights)  # type: ignore[arg-type]


def check_exact(config: ModelConfig, group: Group, alone: Group) -> None:
    layout = ShardLayout(LENGTHS, group.ulysses, group.ring, group.rank)
    real, index = layout.token_index >= 0, layout.token_index[layout.token_index >= 0]
    expected = run(config, alone)
    for checkpointed in (False, True):
        found = run(config, group, checkpointed=checkpointed)
        for ours, theirs in ((found.out, expected.out), (found.dx, expected.dx)):
            torch.testing.assert_close(ours[real], theirs[index], rtol=1e-12, atol=1e-12)
        for name, gradient in found.weights.items():
            torch.testing.assert_close(gradient, expected.weights[name], rtol=1e-12, atol=1e-12)


def order(config: ModelConfig, group: Group) -> tuple[list[str], list[str]]:
    """What ran in a forward and in a backward, in order."""
    layout = ShardLayout(LENGTHS, group.ulysses, group.ring, group.rank)
    layer = layer_of(config)
    elements = config.rope_dim if config.attention == "mla" else config.head_dim
    rotary = Rotary(layout.positions, elements, config.rope_base, torch.float64)
    names = {name: child.weight for name, child in layer.named_children() if isinstance(child, Linear)}
    x = torch.randn(layout.tokens, config.hidden, dtype=torch.float64, requires_grad=True)
    with Recorder({**names, "rotary": rotary.cos}) as recorder, intercepted(recorder.start):
        out = layer(x, rotary, layout, group)
        forward = recorder.take()
        out.sum().backward()
        return forward, recorder.take()


def on_four_ranks(rank: int) -> dict[str, tuple[list[str], list[str]]]:
    """Checks every layer on every shape; what each did, in order, on two inner ranks."""
    registry = GroupRegistry()
    pair = registry.group(rank // 2 * 2, 2)
    for config in MODELS.values():
        for group in (*(registry.group(0, 4, ulysses) for ulysses in (1, 2, 4)), pair):
            check_exact(config, group, registry.group(rank, 1))
    return {name: order(config, pair) for name, config in MODELS.items()}


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, tuple[list[str], list[str]]]]:
    return run_ranks(4, on_four_ranks)


def test_layers_and_checkpointed_layers_equal_one_process_on_every_shape(
    by_rank: list[dict[str, tuple[list[str], list[str]]]],
) -> None:
    assert len(by_rank) == 4, "checked where the ranks are"


ORDER = {
    # Exchanges by number. Forward: queries, values, keys, outputs. Backward: outputs, keys, values, queries.
    "keys and values exchanged": (
        "q_down q_up rotary [1 kv_down kv_up [2 rotary [3 gate 1] 2] 3] attention [4 4] output",
        "output [1 1] attention [2 [3 [4 gate 2] rotary 3] kv_up kv_down 4] rotary q_up q_down",
    ),
    # Forward: latents, queries, outputs. Backward: outputs, queries, latents.
    "latents gathered": (
        "kv_down rotary [1 q_down q_up rotary [2 1] kv_up 2] attention [3 gate 3] output",
        "output [1 gate 1] attention [2 kv_up [3 2] rotary q_up q_down 3] rotary kv_down",
    ),
    # Forward: queries, values, keys, outputs. Backward: outputs, keys, values, queries.
    "grouped queries": (
        "query rotary [1 values [2 key rotary [3 1] 2] 3] attention [4 gate 4] output",
        "output [1 gate 1] attention [2 [3 [4 2] rotary key 3] values 4] rotary query",
    ),
}
"""What runs between the launch of exchange n, written [n, and the wait for it, n]."""


@pytest.mark.parametrize("name", MODELS)
def test_the_same_projections_hide_an_exchange_and_its_way_back(
    name: str, by_rank: list[dict[str, tuple[list[str], list[str]]]]
) -> None:
    for found in by_rank:
        assert tuple(" ".join(map(shown, events)) for events in found[name]) == ORDER[name]


def shown(event: str) -> str:
    kind, _, number = event.partition(" ")
    return {"launch": f"[{number}", "wait": f"{number}]"}.get(kind, event)
