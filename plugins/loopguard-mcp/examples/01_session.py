"""An agent's session with an MCP server, under a guard: refusals are results, and the agent goes on.

Prints:

    found 3 offers for tea
    found 3 offers for coffee
    not run: search_offers may cost $0.02, but only $0.01 is left of the budget of $0.05
    bought tea
    spent $0.04 in 3 calls, 1 refused
"""

from __future__ import annotations

import asyncio

from mcp import Client
from mcp.server import MCPServer

from loopguard import Budget, Guard
from loopguard_mcp import guard_session

server = MCPServer("shop", log_level="ERROR")  # any server, in this process so that the example is offline


@server.tool()
def search_offers(query: str) -> str:
    return f"found 3 offers for {query}"


@server.tool()
def buy(item: str) -> str:
    return f"bought {item}"


policy = Guard(Budget(usd=0.05), tools={"search_*": {"cost": 0.02}})


async def main() -> None:
    async with guard_session(Client(server), policy) as session:
        with policy.scope("shopping") as run:
            for name, arguments in [
                ("search_offers", {"query": "tea"}),
                ("search_offers", {"query": "coffee"}),
                ("search_offers", {"query": "milk"}),
                ("buy", {"item": "tea"}),
            ]:
                result = await session.call_tool(name, arguments)
                text = result.content[0].text
                print(text if not result.is_error else f"not run: {text.partition(' of run')[0]}")
            print(f"spent ${run.spent()} in {run.steps} calls, {run.refusals} refused")


asyncio.run(main())
