"""guard_session: an agent's calls to an MCP server pass a guard."""

from __future__ import annotations

from typing import Any, Self, TypeVar

import wrapt

from loopguard import ConfigurationError, Guard
from loopguard_mcp._calls import Tools

__all__ = ["guard_session"]

S = TypeVar("S")


class GuardedSession(wrapt.ObjectProxy):  # type: ignore[type-arg]  # generic in wrapt's stubs only
    """A session that is in all the session that it wraps, but for `call_tool`."""

    def __init__(self, session: Any, guard: Guard) -> None:
        super().__init__(session)
        self._self_tools = Tools(guard)

    async def call_tool(self, name: str, arguments: dict[str, Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The session's own `call_tool`, past the guard."""

        async def call(given: dict[str, Any]) -> Any:
            return await self.__wrapped__.call_tool(name, given, *args, **kwargs)

        return await self._self_tools.call(name, arguments or {}, call)

    async def __aenter__(self) -> Self:
        await self.__wrapped__.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> Any:
        return await self.__wrapped__.__aexit__(*exc_info)


def guard_session(session: S, guard: Guard) -> S:
    """The session, with its `call_tool` guarded: give this one to the agent, or to a framework's adapter.

    ``session`` is a ``ClientSession``, ``Client`` or ``ClientSessionGroup`` of the mcp SDK, or anything with an
    async ``call_tool(name, arguments)``. Calls count in the run that they are made in, so make them inside a
    ``@loop`` or ``guard.scope()``. A refusal comes back as a result with ``is_error``, whose text a model can act
    on; an agent that keeps being refused is stopped by LoopHalted. What the session does beside `call_tool`,
    ``send_request`` included, isn't guarded. Raises ConfigurationError for anything else.
    """
    if not isinstance(guard, Guard):
        raise ConfigurationError(f"guard_session(…, guard={guard!r}): give a Guard")
    if not callable(getattr(session, "call_tool", None)):
        raise ConfigurationError(f"guard_session({session!r}): give a session of the mcp SDK, which has call_tool")
    return GuardedSession(session, guard)  # type: ignore[return-value]  # it passes for the session in all respects
