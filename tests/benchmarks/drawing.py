"""How the benchmarks' pictures look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

BLUE, ORANGE, GREY, INK = "#2f6fb3", "#e08a2b", "#8b94a0", "#1f2933"

matplotlib.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.edgecolor": GREY,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.color": INK,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "svg.hashsalt": "hydra-cp",
    }
)


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure of so many inches, and its axes: one, or an array of them."""
    return pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained", **options)


def save(figure: Any, file: Path) -> None:
    """Write a PNG without a date, so that the same picture is the same file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130, metadata={"Software": None})
    pyplot.close(figure)
