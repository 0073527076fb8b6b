"""The command as a whole: its subcommands, ours and those of plugins, and what errors exit with."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from loopguard.cli._output import complain
from loopguard.exceptions import ConfigurationError, LoopGuardError, LoopStopped
from loopguard.redaction import display

__all__ = ["GROUP", "run"]

GROUP = "loopguard.commands"
"""The entry points of plugins: each a typer.Typer, or a function that typer can read."""
COMMANDS = {
    place.partition(":")[2].replace("_", "-"): f"loopguard.cli.{place}"
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
"""Our own, in the order in which they are listed: entry points as well, for only what is asked for is to be loaded."""


class _Commands(TyperGroup):
    """Subcommands that are loaded when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *sorted(found.name for found in entry_points(group=GROUP))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS:
            return _loaded(EntryPoint(cmd_name, COMMANDS[cmd_name], GROUP))
        return next((_loaded(found) for found in entry_points(group=GROUP) if found.name == cmd_name), None)


def _loaded(found: EntryPoint) -> Any:
    try:
        made = found.load()
        command = get_command(made if isinstance(made, typer.Typer) else _alone(found.name, made))
    except Exception as exc:  # a plugin that is broken says so, and breaks nothing else
        command = get_command(_broken(found, f"{type(exc).__name__}: {exc}"))
    command.name = found.name
    return command


def _alone(name: str, function: Any, help: str | None = None) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command(name, help=help)(function)
    return app


def _broken(found: EntryPoint, why: str) -> typer.Typer:
    def fail() -> None:
        raise ConfigurationError(f"the command {found.name} ({found.value}) can't be loaded: {why}")

    return _alone(found.name, fail, f"Can't be loaded: {display(why, 200)}")


app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def _about() -> None:
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
