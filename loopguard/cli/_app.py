"""The command as a whole: its subcommands, ours and those of plugins, and what errors exit with."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from loopguard._plugins import COMMANDS, available, load_plugin
from loopguard.cli._output import complain, say
from loopguard.exceptions import ConfigurationError, LoopGuardError, LoopStopped
from loopguard.redaction import display
from loopguard.telemetry._constants import VERSION

__all__ = ["run"]

OURS = {
    place.partition(":")[2].replace("_", "-"): place
    for place in (
        "_demo:demo",
        "_runs:runs",
        "_runs:show",
        "_runs:tail",
        "_questions:pending",
        "_questions:approve",
        "_questions:deny",
        "_questions:answer",
        "_questions:stop",
        "_resume:resume",
        "_audit:spend",
        "_audit:verify",
        "_audit:export",
        "_audit:purge",
        "_policy:what_if",
    )
}
"""Our own, in the order in which they are listed; only what is asked for is loaded."""


class _Commands(TyperGroup):
    """Subcommands that are loaded when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*OURS, *available(COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in OURS:
            module, _, function = OURS[cmd_name].partition(":")
            return _command(cmd_name, getattr(import_module(f"loopguard.cli.{module}"), function))
        if cmd_name not in available(COMMANDS):
            return None
        try:
            return _command(cmd_name, load_plugin(COMMANDS, cmd_name, f"the command {cmd_name}"))
        except ConfigurationError as exc:  # a plugin that is broken says so, and breaks nothing else
            return _command(cmd_name, _broken(cmd_name, exc))


def _command(name: str, made: Any) -> Any:
    command = get_command(made if isinstance(made, typer.Typer) else _alone(name, made))
    command.name = name
    return command


def _alone(name: str, function: Any, help: str | None = None) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command(name, help=help)(function)
    return app


def _broken(name: str, why: Exception) -> typer.Typer:
    def fail() -> None:
        raise why

    return _alone(name, fail, f"Can't be loaded: {display(str(why), 200)}")


app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


def _version(asked: bool) -> None:
    if asked:
        say(f"loopguard {VERSION}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which it is.")
    ] = False,
) -> None:
    """See what agent loops did and cost, answer what they ask, go on with them, and try policies on them."""


def run() -> int:
    """Run the command; its exit code."""
    try:
        app(prog_name="loopguard")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 0
    except LoopGuardError as exc:
        complain(str(exc))
        return 2 if isinstance(exc, ConfigurationError) else 3 if isinstance(exc, LoopStopped) else 1
    return 0
