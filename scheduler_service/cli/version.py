"""`hydra-cp version`."""

from __future__ import annotations

from importlib.metadata import version as installed_version

import typer


def version() -> None:
    """Print the version of the installed distribution."""
    typer.echo(installed_version("hydra-cp"))
