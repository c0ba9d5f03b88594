"""The three constants of the simple cost model that come closest to a cluster's operators.

Planners work with these: they replay thousands of candidates. The model of operators then judges their plans.
"""

from __future__ import annotations

import numpy as np

from scheduler_service.domain import CostModel
from scheduler_service.simulation.cluster import Cluster
from scheduler_service.simulation.layer_times import expert_layer, own_layer
from scheduler_service.simulation.operators import Documents


def simple_cost(cluster: Cluster) -> CostModel:
    """Constants of a mean stage's forward, without the head.

    theta: the kernel's rate on long documents. tau and overhead: the line through a rank with half a budget of tokens
    and one with all of it, in a group of one whose EP group is as full.
    """
    model, hardware = cluster.model, cluster.hardware
    layers = model.layers / cluster.stages
    width = model.attention.heads * (model.attention.d_qk + model.attention.d_v)
    tokens = np.array([cluster.token_budget / 2, cluster.token_budget])
    documents = Documents(tokens, np.zeros(2))
    seconds = np.zeros(2)
    for count, moe in ((model.dense_layers, False), (model.moe_layers, True)):
        if count:
            layer = own_layer(cluster, 1, documents, tokens, moe=moe).seconds[0]
            if moe:
                layer = layer + expert_layer(cluster, tokens, tokens).seconds[0]
            seconds += count / cluster.stages * layer
    tau = float(seconds[1] - seconds[0]) / (cluster.token_budget / 2)
    return CostModel(
        theta=layers * width / (cluster.tp * hardware.attention.forward_flops),
        tau=tau,
        overhead=max(0.0, float(seconds[1]) - tau * cluster.token_budget),
    )
