"""The `hydra-cp` command line: one module per sub-command, imported only when it is asked for.

So `hydra-cp plan` needs neither torch nor the extras of the service, and a command whose extra is missing says
which one to install. Exit codes: 0 ok, 1 failure, 2 usage or invalid input, 3 unreachable, 4 infeasible.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import typer
import typer.core
import typer.main


class SubCommand(NamedTuple):
    """Where a sub-command lives: function `name` of module `scheduler_service.cli.<name>`."""

    extra: str | None = None
    """The extra of the distribution that its imports need."""


SUB_COMMANDS = {
    "quickstart": SubCommand(extra="training"),
    "serve": SubCommand(extra="service"),
    "plan": SubCommand(),
    "simulate": SubCommand(),
    "sweep": SubCommand(),
    "budget": SubCommand(),
    "validate": SubCommand(),
    "version": SubCommand(),
}


class LazyCommands(typer.core.TyperGroup):
    """Sub-commands by name, each module imported on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help page."""
        return list(SUB_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The sub-command, or None if there is none of this name."""
        if cmd_name not in SUB_COMMANDS:
            return None
        app = typer.Typer(add_completion=False)
        try:
            function = getattr(import_module(f"scheduler_service.cli.{cmd_name}"), cmd_name)
        except ModuleNotFoundError as error:
            # Still listed by --help; `invoke` says what is missing.
            ignored = {"allow_extra_args": True, "ignore_unknown_options": True}
            app.command(cmd_name, help=f"(needs the module {error.name})", context_settings=ignored)(_raising(error))
        else:
            app.command(cmd_name)(function)
        return typer.main.get_command(app)

    def invoke(self, ctx: Any) -> Any:
        """Run the sub-command; where an extra is missing, say which one."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            command = SUB_COMMANDS[ctx.invoked_subcommand]
            if command.extra is None:
                raise
            name = ctx.invoked_subcommand
            message = f"hydra-cp {name} needs the module {error.name}: pip install 'hydra-cp[{command.extra}]'"
            typer.echo(message, err=True)
            raise typer.Exit(1) from None


def _raising(error: Exception) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


main = typer.Typer(cls=LazyCommands, no_args_is_help=True, add_completion=False)


@main.callback()
def _root() -> None:
    """Plan hybrid context parallelism for long-context LLM training, and run the plans."""
    # A terminal without Λ or × still gets its figures.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
