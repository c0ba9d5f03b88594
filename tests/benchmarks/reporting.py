"""What the benchmarks share: timing, JSON in build/bench/, and tables that the documentation holds.

A document marks the place of a table by `<!-- NAME: COMMAND -->` and `<!-- end -->`; what stands between is replaced.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("build/bench")


def best_s(action: Callable[[], object], runs: int) -> float:
    """CPU seconds of this process in the fastest run: what others do on the machine counts little."""
    taken = []
    for _ in range(runs):
        began = time.process_time()
        action()
        taken.append(time.process_time() - began)
    return min(taken)


def write_json(name: str, document: object) -> None:
    """Keep the figures as build/bench/NAME.json."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. Columns whose head starts with `>` hold numbers."""
    lines = [[name.lstrip(">") for name in head], ["--:" if name.startswith(">") else "---" for name in head], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


class Check(NamedTuple):
    """A figure, and what it is to be."""

    what: str
    goal: str
    measured: str
    met: bool | None
    """None where there is no goal."""


def checks_table(found: Iterable[Check]) -> str:
    """Goals and whether they are met."""
    verdict = {True: "met", False: "missed", None: ""}
    return table(("what", ">goal", ">measured", ""), ((*check[:3], verdict[check.met]) for check in found))


def shown_s(seconds: float) -> str:
    """Three digits."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def with_tables(text: str, tables: dict[str, str]) -> str:
    """`text` with each table in its place, where it has one."""
    for name, lines in tables.items():
        place = re.compile(rf"(<!-- {re.escape(name)}: .*? -->\n).*?(<!-- end -->)", re.DOTALL)
        text = place.sub(lambda found, lines=lines: f"{found[1]}{lines}\n{found[2]}", text)
    return text
