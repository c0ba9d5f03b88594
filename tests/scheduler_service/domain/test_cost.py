import math

import pytest

from scheduler_service.domain import CostModel, InvalidInputError, Reason


def test_theta_over_c_counts_forward_and_backward() -> None:
    assert CostModel(theta=2e-10, tau=1.0, overhead=1e-2).theta_over_c == 3.5 * 2e-10 / 2e-2
    assert CostModel(theta=1.0, overhead=0).theta_over_c == math.inf
    assert CostModel(theta=0, overhead=0).theta_over_c == 0


@pytest.mark.parametrize("value", [-1e-9, 1e-320, 1e-31, 1e308, math.nan, math.inf, "1", None])
@pytest.mark.parametrize("name", ["theta", "tau", "overhead"])
def test_constants_are_zero_or_seconds_that_predictions_can_be_made_of(name: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=f"cost model: {name} is") as caught:
        CostModel(**{name: value})  # type: ignore[arg-type]
    assert caught.value.reason == Reason.INVALID_COST_MODEL


def test_the_digest_tells_models_apart() -> None:
    models = [CostModel(), CostModel(theta=1), CostModel(tau=1), CostModel(overhead=1)]
    assert len({model.digest for model in models}) == 4
    assert CostModel(theta=1).digest == CostModel(theta=1.0).digest
