"""`make bench`: measures, writes JSON and pictures to build/bench/, and prints the tables that the documents hold.

    python -m tests.benchmarks [PART…] [--lengths FILE] [--docs]

Parts: plan_speed, policies, megatron_core (does our megatron_hybrid plan what the released scheduler plans?), overlap
(how much of an exchange is hidden), attention (our engine and its peers); all of them without any. `--docs` puts the
tables and the plot into the documents.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks import attention, megatron_core, overlap, plan_speed, policies
from tests.benchmarks.reporting import FOLDER, with_tables

DOCUMENTS = (Path("docs/benchmarks.md"), Path("docs/planning.md"), Path("docs/engine.md"), Path("README.md"))
PLOT = Path("docs/images/plan-speed.png")
LENGTHS = Path("../shared/data/lengths/distributions.json")


def main() -> int:
    """Run the parts that were asked for."""
    asked = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parts: dict[str, Callable[[], dict[str, str]]] = {
        "plan_speed": plan_speed.run,
        "policies": lambda: policies.run(given.lengths),
        "megatron_core": megatron_core.run,
        "overlap": overlap.run,
        "attention": attention.run,
    }
    asked.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    asked.add_argument("--lengths", type=Path, default=LENGTHS, help="JSON of published length distributions")
    asked.add_argument("--docs", action="store_true", help="put the tables into the documents")
    given = asked.parse_args()
    if unknown := set(given.parts) - set(parts):
        asked.error(f"no part {', '.join(unknown)}; there are {', '.join(parts)}")

    tables: dict[str, str] = {}
    for part in given.parts or parts:
        tables |= parts[part]()
    for name, lines in tables.items():
        print(f"\n{name}\n\n{lines}")
    if given.docs:
        for document in DOCUMENTS:
            document.write_text(with_tables(document.read_text(), tables))
        if "plan-speed" in tables:
            shutil.copyfile(FOLDER / "plan_speed.png", PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
