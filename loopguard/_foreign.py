"""ForeignTool: a tool whose body lives elsewhere, in a framework or on a server, and comes with each call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from loopguard._drivers import call_async, call_sync
from loopguard._tool import DEFAULTS, make_tool, tool_of

if TYPE_CHECKING:
    from loopguard._guard import Guard

__all__ = ["ForeignTool"]

R = TypeVar("R")


class ForeignTool:
    """A tool by name alone: it takes what the model gave, and `Guard.foreign` makes it.

    ``call.arguments`` is the mapping of arguments itself, for approvers, ``only=`` and events alike.
    """

    def __init__(self, name: str, options: Mapping[str, Any], guards: tuple[Guard, ...]) -> None:
        options = {**DEFAULTS, **options, "name": name or ""}
        self._sync = tool_of(make_tool(_sync, options, guards, open=True))
        self._async = tool_of(make_tool(_async, options, guards, open=True))
        self.name = name

    def call(self, arguments: Mapping[str, Any], body: Callable[[dict[str, Any]], R], id: str | None = None) -> R:
        """Run ``body(arguments)`` as one call of this tool; `id` is the model's own for it.

        The body gets a dict of its own, edited where an approver edited it. Raises what the body raises,
        and ToolCallRefused.
        """
        result: R = call_sync(self._sync, body, None, (dict(arguments),), {}, id)
        return result

    async def acall(
        self, arguments: Mapping[str, Any], body: Callable[[dict[str, Any]], Awaitable[R]], id: str | None = None
    ) -> R:
        """`call` for async bodies."""
        result: R = await call_async(self._async, body, None, (dict(arguments),), {}, id)
        return result


def _sync(arguments: Mapping[str, Any]) -> Any:
    """Stands for the body, which comes with the call."""


async def _async(arguments: Mapping[str, Any]) -> Any:
    """Stands for the body, which comes with the call."""


_sync.__qualname__ = _async.__qualname__ = "foreign"  # one tool to whatever counts it, however it is called
