"""Exchanges by hand; large rings are compared with published ones in test_validation."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_service.simulation.collectives import all_to_all, message, ring_collective, team_of
from scheduler_service.simulation.presets import load_hardware

H100 = load_hardware("h100")


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
