"""guard_session: an agent's calls, by whatever the SDK calls a session."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mcp import Client, ClientSession
from mcp.server import MCPServer

from loopguard import (
    Approval,
    ApproveTool,
    ConfigurationError,
    Guard,
    LoopHalted,
    MaxSteps,
    StopReason,
    current_run,
    loop,
)
from loopguard_mcp import guard_session
from loopguard_mcp._calls import Tools


def text(result: Any) -> str:
    """The text of a result."""
    return "".join(block.text for block in result.content)


def shop() -> tuple[MCPServer, list[str]]:
    """Somebody else's server."""
    server, ran = MCPServer("shop"), []

    @server.tool()
    async def buy(item: str) -> str:
        """Buy something."""
        ran.append(item)
        return f"bought {item}"

    return server, ran


def test_calls_count_in_the_run_they_are_made_in() -> None:
    """Each scope has its own allowance, and a refusal is a result that a model can act on."""
    server, ran = shop()
    guard = Guard(MaxSteps(1))

    async def main() -> list[Any]:
        results = []
        async with guard_session(Client(server), guard) as client:
            for name in ("one", "two"):
                with guard.scope(name):
                    results += [await client.call_tool("buy", {"item": f"{name} {n}"}) for n in range(2)]
        return results

    results = asyncio.run(main())
    assert [result.is_error for result in results] == [False, True, False, True]
    assert "'two' allows one tool call per run" in text(results[-1])
    assert ran == ["one 0", "two 0"]


def test_it_passes_for_the_session() -> None:
    """Whoever asks gets the session's own answers; call_tool alone is another."""
    server, ran = shop()

    async def main() -> None:
        async with Client(server) as client:
            guarded = guard_session(client.session, Guard(MaxSteps(0)))
            assert isinstance(guarded, ClientSession)
            assert guarded.protocol_version == client.session.protocol_version
            assert [tool.name for tool in (await guarded.list_tools()).tools] == ["buy"]
            assert (await guarded.call_tool(name="buy", arguments={"item": "tea"})).is_error
            assert not (await client.session.call_tool("buy", {"item": "milk"})).is_error

    asyncio.run(main())
    assert ran == ["milk"]


def test_other_arguments_of_call_tool_are_passed_on_and_edits_run() -> None:
    """Timeouts and callbacks reach the session; an approver's edit reaches the server."""
    server, ran = shop()

    async def main() -> str:
        guard = Guard(ApproveTool(lambda call: Approval.edit({"item": call.arguments["item"].upper()})))
        async with guard_session(Client(server), guard) as client:
            return text(await client.call_tool("buy", {"item": "tea"}, 5.0, progress_callback=None))

    assert asyncio.run(main()) == "bought TEA"
    assert ran == ["TEA"]


def test_parallel_calls_stop_exactly_at_the_cap() -> None:
    """Two hundred at once, and as many run as may."""
    server, ran = shop()
    guard = Guard(MaxSteps(120))

    async def main() -> list[Any]:
        async with guard_session(Client(server), guard) as client:
            with guard.scope():
                return await asyncio.gather(*(client.call_tool("buy", {"item": str(n)}) for n in range(200)))

    assert sum(not result.is_error for result in asyncio.run(main())) == len(ran) == 120


def test_an_agent_that_goes_on_regardless_is_halted() -> None:
    """Refusals are results, but not forever: LoopHalted ends the loop that can't stop."""
    server, ran = shop()

    @loop(max=1, guard=Guard(MaxSteps(1)))
    async def agent(state: int) -> int:
        async with Client(server) as client:
            guarded = guard_session(client, Guard())
            while True:
                await guarded.call_tool("buy", {"item": f"{len(ran)}"})

    result = asyncio.run(agent.run(0))
    assert result.stop_reason is StopReason.HALTED
    assert ran == ["0"]


def test_the_steps_are_the_loops() -> None:
    """Calls of a session and other tools share the run's counters."""
    server, _ = shop()
    guard = Guard(MaxSteps(5))

    async def main() -> int:
        async with guard_session(Client(server), guard) as client:
            with guard.scope() as run:
                await client.call_tool("buy", {"item": "a"})
                await guard.tool(client.list_tools, name="list")()
                assert current_run() is run
                return run.steps

    assert asyncio.run(main()) == 2


@pytest.mark.parametrize(("session", "guard"), [(object(), Guard()), (None, Guard()), (Client(shop()[0]), None)])
def test_what_is_no_session_is_refused(session: Any, guard: Any) -> None:
    """The error names what was given."""
    with pytest.raises(ConfigurationError, match="guard_session"):
        guard_session(session, guard)


def test_halting_is_raised_where_there_is_no_loop() -> None:
    """In a scope of the agent's own it comes out of the call."""
    server, _ = shop()
    guard = Guard(MaxSteps(0), max_refusals=2)

    async def main() -> None:
        async with guard_session(Client(server), guard) as client:
            with guard.scope():
                for n in range(2):
                    await client.call_tool("buy", {"item": str(n)})
                with pytest.raises(LoopHalted):
                    await client.call_tool("buy", {"item": "3"})

    asyncio.run(main())


def test_made_up_names_fill_no_memory() -> None:
    """A tool needs a name, and whoever makes ten thousand up is not given one more."""
    tools = Tools(Guard(MaxSteps(0)))

    async def body(arguments: dict[str, Any]) -> str:
        return "ran"

    async def main() -> list[str]:
        for n in range(10_000):
            await tools.call(f"tool {n}", {}, body)
        return [text(await tools.call(name, {}, body)) for name in ("", "one more", "tool 1")]

    nameless, more, known = asyncio.run(main())
    assert "a call needs the name of a tool" in nameless
    assert "one more was not run: more than 10,000 different tools were called already" in more
    assert "allows no tool calls" in known or "allows 0 tool calls" in known
