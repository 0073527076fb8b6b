"""One tools/call past a guard: what a refusal looks like in MCP, and a guard's tools by their names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from mcp_types import CallToolResult, TextContent

from loopguard import Guard, LoopHalted, ToolCallRefused, ToolTimeout
from loopguard.redaction import display_name
from loopguard.typing import ForeignTool

__all__ = ["Tools", "error_result", "halted_result"]

R = TypeVar("R")

MOST = 10_000
"""Names that one set of tools remembers: whoever calls may make names up, and memory is bounded."""


def error_result(text: str) -> CallToolResult:
    """A result that tells the model what went wrong: ``isError``, and one block of text."""
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)


def halted_result(halted: LoopHalted) -> CallToolResult:
    """For where LoopHalted, a BaseException, would take a whole server down: the run stays halted."""
    return error_result(
        f"This session was stopped after {halted.count} refused calls in a row. No further tool will run in it: give "
        f"your final answer now. The last refusal: {halted.refusal}"
    )


class Tools:
    """The tools behind one guard, made when they are first called."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._tools: dict[str, ForeignTool] = {}

    async def call(
        self, name: str, arguments: dict[str, Any], body: Callable[[dict[str, Any]], Awaitable[R]]
    ) -> R | CallToolResult:
        """What ``body(arguments)`` returns, or the result that says why it was refused. Raises what it raises."""
        tool = self._tools.get(name)
        if tool is None:
            if not name:
                return error_result("Nothing was run: a call needs the name of a tool.")
            if len(self._tools) >= MOST:
                why = f"more than {MOST:,} different tools were called already"
                return error_result(f"{display_name(name)} was not run: {why}.")
            tool = self._tools[name] = self._guard.foreign(name)
        try:
            return await tool.acall(arguments, body)
        except (ToolCallRefused, ToolTimeout) as exc:
            return error_result(str(exc))
