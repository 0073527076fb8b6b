"""An MCP server's tools, called through a session of loopguard-mcp by a hand-written agent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from mcp import Client
from mcp.server import MCPServer

from loopguard import Usage
from loopguard.metering import model_call
from loopguard_mcp import guard_session
from tests.scenarios.driver import MODEL, OUTPUT_TOKENS, PRICES, Agent, Call, Driver, Result

__all__ = ["McpSession"]


class McpSession(Driver):
    """The server runs in this process, and the SDK's own client talks to it. The model is a function."""

    name = "MCP session"
    unsupported: ClassVar[Mapping[str, str]] = {
        "*/stream": "MCP brings tools, no model whose answers could be streamed"
    }

    def run(self, agent: Agent) -> None:
        asyncio.run(self.arun(agent))

    async def arun(self, agent: Agent) -> None:
        server = MCPServer("tools", log_level="ERROR")
        for name, fn in agent.tools.items():
            server.add_tool(fn, name=name)
        results: list[Result] = []
        async with guard_session(Client(server), agent.guard) as session:
            while True:
                async with model_call(MODEL, {"messages": results}, max_tokens=OUTPUT_TOKENS, prices=PRICES) as call:
                    turn = agent.model(results)
                    call.settle(Usage(input_tokens=0, output_tokens=OUTPUT_TOKENS))
                if isinstance(turn, str):
                    return
                results += await asyncio.gather(*(_result(session, each) for each in turn))


async def _result(session: Any, call: Call) -> Result:
    result = await session.call_tool(call.name, dict(call.arguments))
    return Result(call.id, "".join(block.text for block in result.content), result.is_error)
