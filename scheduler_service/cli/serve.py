"""`hydra-cp serve`: runs the service until it is told to stop."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer


def serve(
    grpc: Annotated[
        str | None,
        typer.Option(help="gRPC address; port 0 takes a free one [default: 127.0.0.1:7421]", metavar="HOST:PORT"),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(help="REST and dashboard; port 0 likewise [default: 127.0.0.1:7422]", metavar="HOST:PORT"),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Plan history: sqlite:///FILE, or off [default: hydracp.sqlite3 in this folder]", metavar="URL"
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings", metavar="FILE")] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write the bound addresses here as JSON, once plans can be had", metavar="PATH")
    ] = None,
) -> None:
    """Run the scheduler: gRPC for agents, REST and a dashboard for people.

    Settings come from flags, then HYDRACP_* in the environment, then --config, then defaults.
    """
    # The imports below take seconds; a signal that comes meanwhile ends us as any other would.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    # gRPC's fork handlers hang processes that fork while calls run, and we spawn.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

    import asyncio
    import logging

    from scheduler_service.config import load
    from scheduler_service.domain import HydraCpError
    from scheduler_service.observability.logging import configure
    from scheduler_service.runtime import Runtime

    try:
        settings = load(config, grpc=grpc, http=http, store=store, ready_file=ready_file)
    except HydraCpError as error:
        typer.echo(f"hydra-cp serve: {error}", err=True)
        raise typer.Exit(2) from None
    configure(settings.log_level, settings.log_format)

    async def run() -> None:
        await Runtime(settings).run()

    try:
        asyncio.run(run())
    except HydraCpError as error:
        typer.echo(f"hydra-cp serve: {error}", err=True)
        raise typer.Exit(1) from None
    except Exception:
        logging.getLogger(__name__).exception("ended by a failure")
        raise typer.Exit(1) from None
