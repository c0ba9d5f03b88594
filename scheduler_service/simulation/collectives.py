"""Seconds and bytes of exchanges between GPUs: rings, all-to-alls and single messages.

Nodes are filled in rank order. Each GPU has its own network card. Bytes are those that one GPU sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.simulation.hardware import Hardware

Column = npt.NDArray[np.float64]


class Transfer(NamedTuple):
    """What an exchange costs each of its GPUs."""

    seconds: Column
    node_bytes: Column
    """Sent to GPUs of the same node."""
    network_bytes: Column
    """Sent to others."""


@dataclass(frozen=True)
class Team:
    """GPUs that exchange: `size` of them, `local` on each node."""

    size: int
    local: int

    @property
    def nodes(self) -> int:
        """Nodes that they are on."""
        return -(-self.size // self.local)


def team_of(hardware: Hardware, size: int, stride: int = 1) -> Team:
    """A team whose members are `stride` GPUs apart, from the beginning of a node."""
    return Team(size, max(1, min(size, hardware.gpus_per_node // stride)))


def no_transfer(like: Column) -> Transfer:
    """Nothing is sent."""
    zero = np.zeros_like(like)
    return Transfer(zero, zero, zero)


def all_to_all(hardware: Hardware, sent_bytes: Column, team: Team) -> Transfer:
    """Each GPU sends `sent_bytes` to the others in equal parts, to all of them at once.

    What stays in the node goes over its links while the rest goes over the network card: the slower of the two counts.
    """
    if team.size == 1:
        return no_transfer(sent_bytes)
    away = (team.size - team.local) / (team.size - 1)
    node_bytes, network_bytes = (1 - away) * sent_bytes, away * sent_bytes
    hop = hardware.network_hop_s if away else hardware.node_hop_s
    seconds = np.maximum(node_bytes / hardware.node_bandwidth, network_bytes / hardware.network_bandwidth)
    return Transfer(seconds + hardware.collective_launch_s + hop, node_bytes, network_bytes)


def ring_collective(hardware: Hardware, whole_bytes: Column, team: Team) -> Transfer:
    """All-gather or reduce-scatter of `whole_bytes` (what all have together) over a ring: S·(n − 1)/n pass each link.

    The latency of a ring is that of its steps, which is why large teams are slow on small messages: with the constants
    of NCCL it gives the published shares of the peak (design of the simulation, section 2) within a third.
    """
    if team.size == 1:
        return no_transfer(whole_bytes)
    sent = whole_bytes * (team.size - 1) / team.size
    steps = (team.nodes - 1) * hardware.network_hop_s + (team.size - team.nodes) * hardware.node_hop_s
    seconds = sent / _ring_bandwidth(hardware, team) + hardware.collective_launch_s + steps
    away = 1 / team.local if team.nodes > 1 else 0.0  # of every node's links in the ring, one leaves it
    return Transfer(seconds, (1 - away) * sent, away * sent)


def _ring_bandwidth(hardware: Hardware, team: Team) -> float:
    """Rings run in parallel, each leaving a node by another card, so a node's cards are shared by its members."""
    inside = hardware.node_bandwidth if team.local > 1 else np.inf
    outside = team.local * hardware.network_bandwidth if team.nodes > 1 else np.inf
    return float(min(inside, outside))


def message(hardware: Hardware, sent_bytes: Column, *, crosses_nodes: bool) -> Transfer:
    """Each GPU sends `sent_bytes` to one other."""
    nothing = np.zeros_like(sent_bytes)
    if crosses_nodes:
        seconds = sent_bytes / hardware.network_bandwidth + hardware.network_hop_s
        return Transfer(seconds + hardware.collective_launch_s, nothing, sent_bytes)
    seconds = sent_bytes / hardware.node_bandwidth + hardware.node_hop_s
    return Transfer(seconds + hardware.collective_launch_s, sent_bytes, nothing)
