"""Floating-point operations of packed documents, causal inside each.

Counts what is needed, not what a kernel does beside it. A multiply-add is two operations. The backward of a matrix
product is two products; recomputation of activations is counted by its caller.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from scheduler_service.simulation.models import Attention, Model, weights

Number = TypeVar("Number", float, npt.NDArray[np.float64])

FORWARD, FORWARD_AND_BACKWARD, WITH_FULL_RECOMPUTE = 2, 6, 8
"""Operations per multiply-add of a weight matrix and token: see the module's text."""


def causal_pairs(tokens: Number, squares: Number) -> Number:
    """Σ L(L+1)/2 of documents: pairs of a query and a key that it sees, from Σ L and Σ L²."""
    return (squares + tokens) / 2


def attention_forward(attention: Attention, pairs: Number) -> Number:
    """Operations of the two products of one layer's attention: 2·n_q·(d_qk + d_v) for each pair."""
    return 2 * attention.heads * (attention.d_qk + attention.d_v) * pairs


def attention_backward(attention: Attention, pairs: Number) -> Number:
    """Operations that are done: scores again, and the gradients of queries, keys, scores and values."""
    return 2 * attention.heads * (3 * attention.d_qk + 2 * attention.d_v) * pairs


def multiply_adds_per_token(model: Model) -> int:
    """Multiply-adds of one token's forward with all weight matrices that it meets, the head's included."""
    moe = model.router_matrices + model.shared_matrices
    routed = (model.experts.top_k if model.experts else 0) * weights(model.expert_matrices)
    return (
        model.layers * weights(model.attention_matrices)
        + model.dense_layers * weights(model.dense_matrices)
        + model.moe_layers * (weights(moe) + routed)
        + model.head_matrix.parameters
    )


def model_flops(model: Model, tokens: float, squares: float) -> float:
    """Operations of training on documents with Σ L tokens and Σ L² as MFU counts them.

    The convention takes attention's backward as twice its forward, without the scores that a kernel makes again.
    """
    attention = model.layers * attention_forward(model.attention, causal_pairs(tokens, squares))
    return FORWARD_AND_BACKWARD * multiply_adds_per_token(model) * tokens + 3 * attention
