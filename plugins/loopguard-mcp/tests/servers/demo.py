"""A server as people write them: tools, a resource, progress, and a request for sampling."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import SamplingMessage, TextContent

server = MCPServer("demo")


def note(word: str) -> None:
    """Leave a trace of what ran where the test looks."""
    if path := os.environ.get("DEMO_RAN"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{word}\n")


@server.tool()
async def search(query: str, top: int = 3) -> str:
    """Search for something."""
    note(f"search {query}")
    await asyncio.sleep(0)
    return f"found {query} {top}"


@server.tool()
def pay(order: str, amount: int) -> str:
    """Pay for an order."""
    note(f"pay {order} {amount}")
    return f"paid {amount} for {order}"


@server.tool()
def environment() -> list[str]:
    """The names of the environment's variables."""
    return sorted(os.environ)


@server.tool()
async def slow(seconds: float, ctx: Context) -> str:
    """Report progress, and wait."""
    note("slow began")
    await ctx.report_progress(1, 2, "half of it")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        note("slow was cancelled")
        raise
    return "done"


@server.tool()
async def ask_model(ctx: Context) -> str:
    """Ask the agent's model."""
    message = SamplingMessage(role="user", content=TextContent(type="text", text="Who are you?"))
    capable = ctx.session.client_capabilities
    note(f"may ask: {capable is not None and capable.sampling is not None}")
    result = await ctx.session.create_message(messages=[message], max_tokens=10)
    return f"the model said {result.content}"


@server.tool()
def crash() -> str:
    """Take the server down."""
    sys.stderr.write("\x1b[31mgoing down\x1b[0m api_key=sk-live-abcdefghijklmnop\n")
    sys.stderr.flush()
    os._exit(7)


@server.resource("note://one")
def one() -> str:
    """A resource."""
    return "the note"


if __name__ == "__main__":
    server.run()
