"""Pictures show every second of an iteration once."""

from __future__ import annotations

import pytest
from matplotlib.container import BarContainer

from scheduler_service.planning import plan_iteration
from scheduler_service.simulation.job import simulate
from scheduler_service.simulation.pictures import COLOURS, shown_activities, time_picture
from scheduler_service.simulation.presets import load_cluster
from scheduler_service.simulation.workloads import paper_batch


def test_every_activity_of_the_operator_model_has_a_colour() -> None:
    cluster = load_cluster("paper_512_h20")
    batch = paper_batch(cluster)
    found = simulate(plan_iteration(batch, cluster.pool, policy="hydra"), batch, cluster, scheduling_s=1.0)
    assert found.activity_s.keys() < COLOURS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS) - 1  # those of the two models are never in one picture


def test_bars_follow_each_other_up_to_the_iteration() -> None:
    activity_s = {"hydra": {"attention": 2.0, "PP wait": 1.0}, "megatron": {"attention": 2.0, "EP wait": 4.0}}
    (axes,) = time_picture(activity_s, "a job").axes
    bars = [bar for bar in axes.containers if isinstance(bar, BarContainer)]
    assert [bar.get_label() for bar in bars] == ["attention", "EP wait", "PP wait"]
    for row, parts in enumerate(activity_s.values()):
        ends = [bar.patches[row].get_x() + bar.patches[row].get_width() for bar in bars]
        assert ends == sorted(ends)
        assert ends[-1] == sum(parts.values())
    assert {text.get_text() for text in axes.texts} == {"3 s", "6 s"}


@pytest.mark.parametrize(("seconds", "shown"), [(0.0009, False), (0.0011, True)])
def test_what_no_system_spends_a_thousandth_on_is_left_out(seconds: float, shown: bool) -> None:
    parts = {"attention": 1 - seconds, "optimizer": seconds}
    assert ("optimizer" in shown_activities({"hydra": parts, "megatron": {"attention": 1.0}})) is shown


def test_an_iteration_that_takes_no_time_is_a_picture_too() -> None:
    (axes,) = time_picture({"hydra": {"microbatches": 0.0, "PP wait": 0.0}}, "nothing").axes
    assert axes.get_xlim()[1] > 0
