"""`loopguard mcp-proxy`: a policy before any MCP server on stdio, without a line of code."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from mcp import StdioServerParameters, stdio_client, stdio_server

from loopguard import ConfigurationError, Guard, configure_telemetry
from loopguard.redaction import display
from loopguard_mcp import _keeper
from loopguard_mcp._calls import Tools
from loopguard_mcp._definitions import Definitions, approver_of
from loopguard_mcp._lines import Input, ServerLog, say
from loopguard_mcp._pins import Pins, pins_beside
from loopguard_mcp._relay import Relay

__all__ = ["mcp_proxy"]


def mcp_proxy(
    server: Annotated[list[str], typer.Argument(help="The command that starts the MCP server, after --.")],
    policy: Annotated[Path, typer.Option(help="The policy file, TOML.", show_default=False)],
    pins: Annotated[
        Path | None, typer.Option(help="Where the tools' definitions are pinned; by default beside the policy.")
    ] = None,
    repin: Annotated[bool, typer.Option(help="Forget the pins: what the server offers now is approved.")] = False,
    allow_sampling: Annotated[bool, typer.Option(help="Let the server ask the agent's model.")] = False,
) -> None:
    """Put a policy's limits and approvals before an MCP server on stdio.

    loopguard mcp-proxy --policy policy.toml -- SERVER COMMAND…
    """
    logging.getLogger("mcp").addHandler(logging.NullHandler())  # the relay tells what the SDK would
    try:
        command = _resolved(server)
        guard = Guard.from_toml(policy)
        file = pins if pins is not None else pins_beside(policy, server)
        known = Pins(file)
    except ConfigurationError as exc:
        say(str(exc))
        raise typer.Exit(2) from None
    if repin:
        known.forget()
    _trace()
    more = " …" if server[1:] else ""  # arguments may be secret
    say(f"policy {policy} {guard.policy_hash}, server {display(server[0])}{more}, pins {file}")
    by_agent = asyncio.run(serve(guard, known, command, sampling=allow_sampling))
    raise typer.Exit(0 if by_agent else 1)


def _resolved(server: Sequence[str]) -> list[str]:
    found = shutil.which(server[0])
    if found is None:
        raise ConfigurationError(f"the server can't be started: there is no command {server[0]!r}")
    if sys.platform == "win32":
        return [found, *server[1:]]
    return [sys.executable, "-I", "-S", _keeper.__file__, str(os.getpid()), found, *server[1:]]


def _trace() -> None:
    """Export spans where the standard variables name a collector; that it can't be reached is no reason to stop."""
    if any(name in os.environ for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        try:
            configure_telemetry("loopguard mcp-proxy")
        except ConfigurationError as exc:
            say(f"no traces: {exc}")


def _environment() -> dict[str, str]:
    """The environment for the server: ours, but for what is loopguard's own, its stores and keys."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("LOOPGUARD_")}


async def serve(guard: Guard, pins: Pins, command: Sequence[str], *, sampling: bool = False) -> bool:
    """Relay between standard input and output and the server until one side ends; whether that was the agent."""
    log, lines = ServerLog(), Input()
    parameters = StdioServerParameters(command=command[0], args=list(command[1:]), env=_environment())
    by_agent = True
    with guard.scope("mcp-proxy") as run:
        try:
            async with (
                stdio_server(stdin=lines) as (from_agent, to_agent),  # type: ignore[arg-type]  # it is iterated over
                stdio_client(parameters, errlog=log.file) as (from_server, to_server),
            ):
                log.started()
                relay = Relay(
                    Tools(guard),
                    Definitions(pins, approver_of(guard), say),
                    sampling=sampling,
                    to_agent=to_agent,
                    to_server=to_server,
                    tell=say,
                )
                by_agent = await relay.run(from_agent, from_server)
                lines.close()
                await to_agent.aclose()  # what was sent is written before the transport ends
                async for _ in from_agent:
                    pass
        except* ConnectionError:
            say("the agent is gone")
        finally:
            log.flush()
    say(
        f"{run.steps} tool calls, {run.refusals} refused, ${run.spent()} spent, {run.spent('resources')} resources read"
    )
    return by_agent
