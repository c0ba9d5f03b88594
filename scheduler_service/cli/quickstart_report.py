"""What `hydra-cp quickstart` says of its iterations: one row each, and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

BASELINES = ("static_cp", "megatron")
"""Policies that the gain is stated over."""

UNKNOWN = "–"

_COLUMNS = (
    ("", "it", 3), ("", "loss", 6), ("longest", "tokens", 7), ("", "MBs", 3), ("degree ×", "sequences", 18),
    ("load per MB", "Λ, token²", 15), ("planned", "by", 7), ("waited", "s", 6), ("took", "s", 6),
    ("gain over", BASELINES[0], 9), ("gain over", BASELINES[1], 9),
)  # fmt: skip
"""Two lines of heading and the width of each column."""


class IterationLine:
    """One iteration: the workers' record, and the service's predictions once they are there."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.iteration: int = record["iteration"]
        self.origin: str = record["origin"]
        self._predicted_s = 0.0
        self._baselines_s: dict[str, float] = {}

    def add_predictions(self, predicted_s: float, baselines_s: dict[str, float]) -> None:
        """Seconds that the service predicts for the plan, and for other policies on the same batch."""
        self._predicted_s, self._baselines_s = predicted_s, baselines_s

    @property
    def is_complete(self) -> bool:
        """Whether a gain over every baseline can be stated."""
        return all(self.gain(name) is not None for name in BASELINES)

    def gain(self, baseline: str) -> float | None:
        """How many times longer the baseline is predicted to take; None without a prediction."""
        if baseline == self.record["policy"]:
            return 1.0
        if not self._predicted_s or baseline not in self._baselines_s:
            return None
        return self._baselines_s[baseline] / self._predicted_s

    @staticmethod
    def heading() -> Iterator[str]:
        """The lines above the rows."""
        for line in zip(*(column[:2] for column in _COLUMNS), strict=True):
            yield " ".join(f"{name:>{column[2]}}" for name, column in zip(line, _COLUMNS, strict=True))

    def row(self) -> str:
        """The iteration in one line."""
        record = self.record
        degrees = " ".join(f"{degree}×{n}" for degree, n in sorted(_degrees(record).items()))
        values = (
            self.iteration, f"{record['loss']:.3f}", f"{record['longest_tokens']:,}", record["microbatches"], degrees,
            _range(record["microbatch_loads"]), self.origin, f"{record['wait_s']:.2f}",
            f"{record['iteration_s']:.2f}", *(_times(self.gain(name)) for name in BASELINES),
        )  # fmt: skip
        return " ".join(f"{value:>{width}}" for value, (*_, width) in zip(values, _COLUMNS, strict=True))


class Summary:
    """The run as a whole. `lines` holds every iteration, in order, and at least one."""

    def __init__(self, lines: Sequence[IterationLine], *, dashboard: str, grpc: str, documents: int) -> None:
        self._dashboard, self._grpc, self._documents = dashboard, grpc, documents
        records = [line.record for line in lines]
        self.iterations = len(records)
        self.loss = (records[0]["loss"], records[-1]["loss"])
        # The first plans cannot be ahead of anything; a run of one iteration has no steady state.
        steady = records[2:] or records
        self.steady_from = steady[0]["iteration"]
        self.wait_share = sum(r["wait_s"] for r in steady) / sum(r["iteration_s"] for r in steady)
        self.bytes_sent: Counter[str] = sum((Counter(r["bytes_sent"]) for r in records), Counter())
        self.degrees: Counter[int] = sum((Counter(_degrees(r)) for r in records), Counter())
        self.fallbacks = sum(record["origin"] != "service" for record in records)
        self.gains = {name: [g for line in lines if (g := line.gain(name)) is not None] for name in BASELINES}
        self.training_s = sum(record["iteration_s"] for record in records)

    def as_json(self) -> dict[str, Any]:
        """Plain values, as `summary.json` holds them; a gain is null where the service predicted none."""
        return {
            "iterations": self.iterations,
            "documents": self._documents,
            "training_s": self.training_s,
            "loss_first": self.loss[0],
            "loss_last": self.loss[1],
            "wait_share": self.wait_share,
            "bytes_sent": dict(self.bytes_sent),
            "degrees": {str(degree): n for degree, n in sorted(self.degrees.items())},
            "fallbacks": self.fallbacks,
            "gain": {name: _middle(gains) for name, gains in self.gains.items()},
            "grpc": self._grpc,
            "dashboard": self._dashboard,
        }

    def rows(self) -> Iterator[str]:
        """The summary as lines of text."""
        sent = self.bytes_sent
        gains = ", ".join(f"{_times(_middle(gains))} over {name}" for name, gains in self.gains.items())
        facts = {
            "loss": f"{self.loss[0]:.3f} → {self.loss[1]:.3f} in {self.iterations} iterations, {self.training_s:.0f} s",
            "waited for plans": f"{self.wait_share:.2%} of the time from iteration {self.steady_from} on",
            "bytes sent": f"Ulysses {_mega(sent['ulysses'])}, ring {_mega(sent['ring'])}, experts {_mega(sent['ep'])}, "
            f"rerouting {_mega(sent['reroute'])}",
            "degrees": ", ".join(f"{degree} ({n} sequences)" for degree, n in sorted(self.degrees.items())),
            "fallbacks": f"{self.fallbacks} of {self.iterations} plans were made by the workers themselves",
            "predicted gain": f"{gains} (median of the iterations)",
            "dashboard": self._dashboard,
        }
        yield from (f"{name:<18}{text}" for name, text in facts.items())


def _degrees(record: dict[str, Any]) -> dict[int, int]:
    """Degree to sequences; JSON has made the degrees texts."""
    return {int(degree): n for degree, n in record["degrees"].items()}


def _range(loads: Sequence[float]) -> str:
    """What the fullest rank of a microbatch was filled up to: the least, and the most."""
    return f"{min(loads):.1e}…{max(loads):.1e}"


def _middle(values: Sequence[float]) -> float | None:
    """The median, as on the dashboard."""
    return median(values) if values else None


def _times(gain: float | None) -> str:
    return UNKNOWN if gain is None else f"{gain:.2f}×"


def _mega(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
