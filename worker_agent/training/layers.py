"""The layers that attention and the rest of the model share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """Root-mean-square norm with a learned scale (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """(…, size) → (…, size)."""
        return F.rms_norm(x, self.scale.shape, self.scale, eps=1e-6)


class Linear(nn.Module):
    """x·W without a bias; `weight` is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        return x @ self.weight
