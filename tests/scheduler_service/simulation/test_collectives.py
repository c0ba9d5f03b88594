"""Exchanges against published shares of the peak, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_service.simulation.collectives import all_to_all, message, ring_collective, team_of
from scheduler_service.simulation.presets import load_hardware

H100 = load_hardware("h100")
PEAK = 400e9
"""Bytes per second of a node's eight 400 Gb/s cards."""

PUBLISHED = {
    2: (0.32, 0.67, 0.92),
    8: (0.13, 0.54, 0.90),
    32: (0.044, 0.205, 0.74),
    128: (0.0087, 0.053, 0.315),
}
"""Nodes → share of the peak at 16 MB, 128 MB and 1 GB (design of the simulation, section 2)."""


@pytest.mark.parametrize("nodes", PUBLISHED)
def test_large_rings_fall_below_the_peak_as_published(nodes: int) -> None:
    sizes = np.array([16e6, 128e6, 1e9])
    team = team_of(H100, 8 * nodes)
    shares = sizes * (team.size - 1) / team.size / ring_collective(H100, sizes, team).seconds / PEAK
    assert shares == pytest.approx(np.array(PUBLISHED[nodes]), rel=0.35)


def test_an_all_to_all_that_crosses_nodes_is_about_ten_times_dearer() -> None:
    inside = all_to_all(H100, np.array([100e6]), team_of(H100, 8)).seconds[0]
    outside = all_to_all(H100, np.array([100e6]), team_of(H100, 64)).seconds[0]
    assert 5 < outside / inside < 12


def test_bytes_of_an_all_to_all_are_split_by_where_the_peers_are() -> None:
    sent = all_to_all(H100, np.array([15.0]), team_of(H100, 16))
    assert (sent.node_bytes[0], sent.network_bytes[0]) == (7, 8)


def test_peers_that_are_a_node_apart_meet_on_the_network_only() -> None:
    sent = all_to_all(H100, np.array([3.0]), team_of(H100, 4, stride=8))
    assert (sent.node_bytes[0], sent.network_bytes[0]) == (0, 3)


def test_a_team_of_one_sends_nothing() -> None:
    for exchange in (all_to_all, ring_collective):
        assert [column.tolist() for column in exchange(H100, np.array([8.0]), team_of(H100, 1))] == [[0], [0], [0]]


def test_a_message_takes_latency_and_its_bytes() -> None:
    near = message(H100, np.array([370.8e9]), crosses_nodes=False)
    far = message(H100, np.array([48.5e9]), crosses_nodes=True)
    assert near.seconds[0] == pytest.approx(1 + 8.4e-6 + 3.4e-6)
    assert far.seconds[0] == pytest.approx(1 + 8.4e-6 + 14e-6)
    assert (near.network_bytes[0], far.node_bytes[0]) == (0, 0)
