"""What the HyDra paper reports of a setting, to put beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files

import yaml


@dataclass(frozen=True)
class PaperSetting:
    """Figures of one cluster and data set; empty where the paper gives none."""

    gains: Mapping[str, float] = field(default_factory=dict)
    """System → throughput of hydra over it."""
    pp: Mapping[str, float] = field(default_factory=dict)
    """System → pipeline bubble."""
    dp: Mapping[str, float] = field(default_factory=dict)
    """System → data-parallel bubble."""


def paper_setting(preset: str, lengths: str) -> PaperSetting:
    """What is reported for a cluster preset and a workload."""
    text = (files("scheduler_service.simulation.published") / "paper.yaml").read_text(encoding="utf-8")
    for row in yaml.safe_load(text):
        if (row["preset"], row["lengths"]) == (preset.replace("-", "_"), lengths):
            return PaperSetting(*(row.get(name, {}) for name in ("gains", "pp", "dp")))
    return PaperSetting()
