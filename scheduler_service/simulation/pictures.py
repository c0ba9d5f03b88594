"""A picture of where the time of an iteration goes: one bar for each system, one colour for each activity.

Needs matplotlib, which is asked for only when a picture is drawn. Draws, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from scheduler_service.domain import InvalidInputError, Reason

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "microbatches": "#2f6fb3", "attention": "#1d4e89", "linear": "#2f6fb3", "experts": "#6fa3d8",
        "head and loss": "#a5c8ea", "optimizer": "#cfe1f3", "CP exchange": "#c46a1b", "TP exchange": "#e08a2b",
        "EP exchange": "#f0b06a", "gradient sync": "#f8d9b0", "CP wait": "#4d5661", "EP wait": "#6f7883",
        "PP wait": "#98a1ab", "DP wait": "#c3c9d0", "scheduling": "#8e5ea2",
    }
)  # fmt: skip
"""Activity → colour, in the order of the bar: what is computed is blue, exchanged orange, waited for grey."""

SMALLEST_SHARE = 1e-3
"""Activities that no system spends more of its time on are left out of pictures and tables."""

_INK, _WIDTH, _BAR_INCHES = "#1f2933", 8.5, 0.36


def time_picture(activity_s: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Bars of `activity_s`: system → activity → seconds, which add up to its iteration.

    Raises `InvalidInputError` where matplotlib is not installed.
    """
    # Without pyplot: no global state, no window system.
    figure = figure_class()((_WIDTH, 1.5 + _BAR_INCHES * len(activity_s)), layout="constrained")
    axes = figure.subplots()
    totals = np.array([sum(parts.values()) for parts in activity_s.values()])
    ends = np.zeros(len(totals))
    for name in shown_activities(activity_s):
        seconds = np.array([parts.get(name, 0.0) for parts in activity_s.values()])
        axes.barh(list(activity_s), seconds, left=ends, color=COLOURS[name], label=name)
        ends += seconds
    for row, total in enumerate(totals):
        axes.annotate(f"{total:.4g} s", (total, row), (4, 0), textcoords="offset points", va="center", color=_INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * totals.max() or 1)
    axes.set_xlabel("seconds of an iteration, mean over GPUs")
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.containers:
        figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


def shown_activities(activity_s: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Activities that some system spends time on, in the order of the bars."""

    def share(name: str, parts: Mapping[str, float]) -> float:
        total = sum(parts.values())
        return parts.get(name, 0.0) / total if total > 0 else 0.0

    return [name for name in COLOURS if any(share(name, parts) >= SMALLEST_SHARE for parts in activity_s.values())]


def figure_class() -> type[Figure]:
    """Matplotlib's figure. Raises `InvalidInputError` where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT, "a picture needs matplotlib, which is not installed: install hydra-cp[plots]"
        ) from error
    return Figure
