"""GuardMiddleware: the tools of a server in Python, called by the SDK's own client."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import mcp_types as types
import pytest
from mcp import Client
from mcp.server import MCPServer, Server, ServerRequestContext

from loopguard import (
    Approval,
    ApproveTool,
    Budget,
    ConfigurationError,
    Guard,
    LoopLimit,
    MaxSteps,
    charge,
    current_call,
    current_run,
)
from loopguard.testing import capture
from loopguard_mcp import GuardMiddleware


def text(result: Any) -> str:
    """The text of a result."""
    return "".join(block.text for block in result.content)


def serve(guard: Guard, **options: Any) -> tuple[MCPServer, list[Any], GuardMiddleware]:
    """A server with a tool that says what it saw."""
    ran: list[Any] = []
    middleware = GuardMiddleware(guard, **options)
    server = MCPServer("shop", middleware=[middleware])

    @server.tool()
    async def buy(item: str, price: float = 0.5) -> str:
        """Buy something."""
        await asyncio.sleep(0)
        charge(usd=price)
        call, run = current_call(), current_run()
        assert call is not None
        assert run is not None
        ran.append((call.name, call.arguments))
        return f"bought {item} in {run.name}"

    @server.tool()
    def fail() -> str:
        """Fail."""
        raise ValueError("no luck")

    return server, ran, middleware


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_refusals_are_results_and_the_limit_holds_over_clients(mode: Any) -> None:
    """A refused call is an error result with the guard's text; another client has no allowance of its own."""
    server, ran, middleware = serve(Guard(MaxSteps(2)))

    async def main() -> list[Any]:
        results = []
        for item in ("tea", "milk", "honey"):
            async with Client(server, mode=mode) as client:
                results.append(await client.call_tool("buy", {"item": item}))
        return results

    one, two, three = asyncio.run(main())
    assert (text(one), text(two)) == ("bought tea in mcp server", "bought milk in mcp server")
    assert three.is_error
    assert "'mcp server' allows 2 tool calls per run, and none is left" in text(three)
    assert ran == [("buy", {"item": "tea"}), ("buy", {"item": "milk"})]
    middleware.close()
    asyncio.run(main())
    assert len(ran) == 4  # a new run
    middleware.close()


def test_what_a_tool_charges_is_booked() -> None:
    """charge() inside a tool reports to the server's guard."""
    server, _, middleware = serve(Guard(Budget(usd=1)))

    async def main() -> list[bool]:
        async with Client(server) as client:
            return [(await client.call_tool("buy", {"item": str(n)})).is_error for n in range(3)]

    assert asyncio.run(main()) == [False, False, True]
    middleware.close()


def test_an_edit_reaches_the_tool() -> None:
    """An approver sees the arguments as the client sent them, and what it makes of them runs."""
    guard = Guard(ApproveTool(lambda call: Approval.edit({**call.arguments, "price": 0.25}), only="buy"))
    server, ran, middleware = serve(guard)

    async def main() -> Any:
        async with Client(server) as client:
            return await client.call_tool("buy", {"item": "tea", "price": 99})

    assert not asyncio.run(main()).is_error
    assert ran == [("buy", {"item": "tea", "price": 0.25})]
    middleware.close()


def test_a_failing_tool_is_the_servers_to_report() -> None:
    """The SDK's own error result passes through."""
    server, _, middleware = serve(Guard(MaxSteps(5)))

    async def main() -> Any:
        async with Client(server) as client:
            return await client.call_tool("fail", {})

    result = asyncio.run(main())
    assert result.is_error
    assert "Error executing tool fail" in text(result)
    middleware.close()


def test_a_halted_run_answers_instead_of_taking_the_server_down() -> None:
    """LoopHalted becomes an error result, for good, and everything else is still served."""
    server, ran, middleware = serve(Guard(MaxSteps(0), max_refusals=1))

    async def main() -> list[str]:
        async with Client(server) as client:
            said = [text(await client.call_tool("buy", {"item": str(n)})) for n in range(3)]
            assert len((await client.list_tools()).tools) == 2
            return said

    said = asyncio.run(main())
    assert "allows 0 tool calls" in said[0]
    assert said[-1].startswith(
        "This session was stopped after 1 refused calls in a row. No further tool will run in it"
    )
    assert ran == []
    middleware.close()


def test_sessions_have_runs_of_their_own_and_the_oldest_are_forgotten() -> None:
    """session= tells clients apart, by what the server knows of them."""
    who = "alice"
    server, _, middleware = serve(Guard(MaxSteps(1)), session=lambda ctx: who, sessions=2, name="shop")

    async def main() -> list[bool]:
        nonlocal who
        told = []
        async with Client(server) as client:
            for who in ("alice", "alice", "bob", "carol", "alice"):
                told.append((await client.call_tool("buy", {"item": who})).is_error)
        return told

    with capture() as seen:
        assert asyncio.run(main()) == [False, True, False, False, False]
        middleware.close()
    kinds = [type(event).__name__ for event in seen.events if type(event).__name__ in ("RunStarted", "RunEnded")]
    assert kinds.count("RunStarted") == kinds.count("RunEnded") == 4


def test_a_server_inside_a_run_counts_there() -> None:
    """Where the program that serves has a run, the calls are its calls."""
    guard = Guard(MaxSteps(5))
    server, _, _ = serve(guard)

    async def main() -> tuple[str, int]:
        with guard.scope("mine") as run:
            async with Client(server) as client:
                return text(await client.call_tool("buy", {"item": "tea"})), run.steps

    assert asyncio.run(main()) == ("bought tea in mine", 1)


def test_the_low_level_server_takes_it_too() -> None:
    """Server.middleware of the low-level server is the same seam."""

    async def call(ctx: ServerRequestContext[Any, Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(type="text", text=str(params.arguments))])

    async def tools(ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(name="any", input_schema={"type": "object"})])

    server = Server("low", on_call_tool=call, on_list_tools=tools)
    middleware = GuardMiddleware(Guard(LoopLimit(1)))
    server.middleware.append(middleware)

    async def main() -> list[bool]:
        async with Client(server) as client:
            return [(await client.call_tool("any", {"a": 1})).is_error for _ in range(3)]

    assert asyncio.run(main())[-1] is True
    middleware.close()


@pytest.mark.parametrize("options", [{"session": "id"}, {"sessions": 0}, {"sessions": True}])
def test_wrong_options_are_found_at_once(options: Any) -> None:
    """ConfigurationError names the option and the value."""
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        GuardMiddleware(Guard(), **options)
    with pytest.raises(ConfigurationError, match="GuardMiddleware"):
        GuardMiddleware(None)  # type: ignore[arg-type]  # what is wrong about it


def test_its_spans_are_out_before_the_process_is() -> None:
    """The run ends with the process, before what exports its span is shut down."""
    program = """
import asyncio, sys
from loopguard import Guard, MaxSteps, configure_telemetry
from loopguard_mcp import GuardMiddleware
from mcp import Client
from mcp.server import MCPServer

server = MCPServer("shop", middleware=[GuardMiddleware(Guard(MaxSteps(1)), name="my shop")])
configure_telemetry(console=True)

@server.tool()
def buy() -> str:
    return "bought"

async def main():
    async with Client(server) as client:
        await client.call_tool("buy", {})

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "invoke_agent my shop" in done.stderr
