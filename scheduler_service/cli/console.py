"""The console that tables are printed to."""

from __future__ import annotations

import sys

from rich.console import Console

PIPED_WIDTH = 160
"""Columns where no terminal says how many there are: a pager or a file takes more than rich's 80."""


def wide_console() -> Console:
    """As wide as the terminal, or wide enough for our tables where the output goes elsewhere."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
