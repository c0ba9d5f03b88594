"""Models by hand; the presets' parameters are checked in test_validation."""

from __future__ import annotations

import pytest

from scheduler_service.domain import InvalidInputError
from scheduler_service.simulation.models import Experts, GroupedQuery, Latent, Model, weights
from scheduler_service.simulation.presets import load_model, preset_names


@pytest.mark.parametrize("name", preset_names("models"))
def test_every_packaged_model_is_valid(name: str) -> None:
    model = load_model(name)
    assert model.active_parameters <= model.parameters


def test_projections_of_grouped_query_attention_are_its_formula() -> None:
    attention = GroupedQuery(heads=6, kv_heads=2, head_dim=5)
    assert weights(attention.matrices(7)) == 7 * 5 * (6 + 2 * 2) + 6 * 5 * 7


def test_a_gate_costs_one_projection_of_the_output_s_width() -> None:
    plain, gated = GroupedQuery(6, 2, 5), GroupedQuery(6, 2, 5, gated=True)
    assert weights(gated.matrices(7)) - weights(plain.matrices(7)) == 7 * 6 * 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"dense_layers": 5}, "give 0 to 4"),
        ({"dense_layers": 4}, "dense_width 0"),
        ({"experts": None}, "4 of 4 layers have no feed-forward network"),
    ],
)
def test_a_model_that_cannot_be_says_what_is_wrong(fields: dict, message: str) -> None:
    right = {"layers": 4, "hidden": 8, "vocabulary": 16, "dense_layers": 0, "experts": Experts(4, 2, 8)}
    with pytest.raises(InvalidInputError, match=message):
        Model(name="small", attention=GroupedQuery(2, 1, 4), **(right | fields))


def test_counts_of_attention_and_experts_are_whole_and_above_zero() -> None:
    assert Experts(4, 4, 8, shared=0).shared == 0
    assert Latent(2, 8, 8, nope=4, rope=0, v=4).d_qk == 4
    for build, message in (
        (lambda: GroupedQuery(2, 0, 4), "attention: kv_heads is 0; give a whole number, 1 or more"),
        (lambda: Latent(2, 8, -1, 4, 4, 4), "attention: kv_lora is -1"),
        (lambda: Experts(0, 0, 8), "experts: count is 0"),
        (lambda: Experts(4, 2, 8, shared=-1), "shared is -1; give a whole number, 0 or more"),
        (lambda: Experts(4, 5, 8), "top_k is 5; give at most 4"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            build()
