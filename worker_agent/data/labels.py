"""Labels of next-token prediction. They are shifted before a sequence is cut: no shard knows its neighbour's token."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that no loss is taken at: torch's own default."""


def shift_labels(tokens: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Label i of one whole sequence (s,) is token i + 1; the last has none. Same type and device.

    Masked positions (prompts in SFT) are set to `ignore_index` in `tokens` beforehand, or in the labels afterwards.
    """
    last = tokens.new_full((1,), ignore_index)
    return torch.cat((tokens[1:], last))
