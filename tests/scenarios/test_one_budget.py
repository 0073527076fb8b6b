"""One budget over all of them: a LangChain agent, one of whose tools asks an MCP server, another runs a @loop."""

from __future__ import annotations

import asyncio
import importlib.util
from decimal import Decimal

import pytest

from loopguard import Budget, Guard, loop, tool
from tests.scenarios.driver import Agent, Call, ScriptedModel

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("loopguard_langchain", "loopguard_mcp"))),
    reason="`make plugins` installs loopguard-langchain and loopguard-mcp",
)


def test_a_budget_that_spans_frameworks_is_spent_exactly() -> None:
    """100 calls race for 90 credits through LangChain: half of them go to an MCP server, half through a plain loop."""
    from mcp import Client
    from mcp.server import MCPServer

    from loopguard_mcp import guard_session
    from tests.scenarios.langchain_agent import LangChain

    guard = Guard(Budget(usd=1, credits=90), tools={"search": {"cost": {"credits": 1}}})
    ran = {"mcp": 0, "loop": 0}
    server = MCPServer("web", log_level="ERROR")

    @server.tool()
    def search(query: str) -> str:
        ran["mcp"] += 1
        return f"found {query}"

    @tool(cost={"credits": 1})
    async def read(page: int) -> str:
        ran["loop"] += 1
        return f"page {page}"

    @loop(max=1)
    async def study(page: int) -> int:
        await read(page)
        return page

    async def main() -> None:
        async with guard_session(Client(server), guard) as session:

            async def ask(n: int) -> str:
                """Ask the MCP server."""
                result = await session.call_tool("search", {"query": str(n)})
                return str(result.content[0].text)

            async def research(n: int) -> str:
                """Run a loop."""
                result = await study.run(n)
                return str(result.stop_reason)

            await LangChain().arun(Agent(model, {"ask": ask, "research": research}, guard))

    calls = [Call(("ask", "research")[n % 2], {"n": n}) for n in range(100)]
    model = ScriptedModel([calls, "done"])
    with guard.scope("all of them") as run:
        asyncio.run(main())
    assert ran["mcp"] + ran["loop"] == 90
    assert min(ran.values()) >= 40
    assert (run.spent("credits"), run.reserved("credits"), run.remaining("credits")) == (90, 0, 0)
    assert run.spent("usd") == Decimal("0.02")  # two turns of the model
    assert run.steps == 100 + 90  # the agent's own calls, and what came of them
    assert model.turns == 2
    assert len(model.results) == 100
