"""The command as a whole: its subcommands, those of plugins, and what errors exit with."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from loopguard.cli import _runs
from loopguard.cli._output import complain
from loopguard.exceptions import ConfigurationError, LoopGuardError, LoopStopped
from loopguard.redaction import display

__all__ = ["run"]

COMMANDS = (
    _runs.runs,
    _runs.show,
    _runs.tail,
)
"""The subcommands, in the order in which they are listed."""


class _Commands(TyperGroup):
    """Our subcommands, then those of plugins, which are loaded when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(_plugins())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known = super().get_command(ctx, cmd_name)
        found = _plugins().get(cmd_name) if known is None else None
        return known if found is None else _loaded(found)


def _plugins() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group="loopguard.commands")}


def _loaded(found: EntryPoint) -> Any:
    """The plugin's command: a typer.Typer, or a function that typer can read."""
    try:
        made = found.load()
        if not isinstance(made, typer.Typer):
            made, function = typer.Typer(), made
            made.command(found.name)(function)
        command = get_command(made)
    except Exception as exc:  # a plugin that is broken says so, and breaks nothing else
        command = get_command(_broken(found, f"{type(exc).__name__}: {exc}"))
    command.name = found.name
    return command


def _broken(found: EntryPoint, why: str) -> typer.Typer:
    broken = typer.Typer()

    @broken.command(found.name, help=f"Can't be loaded: {display(why, 200)}")
    def fail() -> None:
        raise ConfigurationError(f"the plugin command {found.name} ({found.value}) can't be loaded: {why}")

    return broken


app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def _about() -> None:
    """See what agent loops did and cost, answer what they ask, go on with them, and try policies on them."""


for _command in COMMANDS:
    app.command()(_command)


def run() -> int:
    """Run the command; its exit code."""
    try:
        app()
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 0
    except LoopGuardError as exc:
        complain(str(exc))
        return 2 if isinstance(exc, ConfigurationError) else 3 if isinstance(exc, LoopStopped) else 1
    return 0
