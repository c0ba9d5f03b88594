"""Initial weights that depend on the seed and the parameter's global name only, not on the rank or the pool."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def draw(weight: Tensor, seed: int, name: str) -> None:
    """Fill `weight` (inputs, outputs) with a normal of deviation 1/sqrt(inputs); vectors with ones (norm scales).

    Drawn in fp32 whatever the weight's type, so that fp64 runs start from the same model.
    """
    if weight.ndim == 1:
        weight.fill_(1.0)
        return
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[0] ** -0.5)
