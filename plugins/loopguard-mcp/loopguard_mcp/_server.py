"""GuardMiddleware: the tools of an MCP server written in Python pass a guard."""

from __future__ import annotations

import atexit
import contextvars
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from cachetools import LRUCache
from mcp import MCPError
from mcp.server import ServerRequestContext
from mcp.server.context import CallNext, HandlerResult
from mcp_types import INVALID_PARAMS

from loopguard import ConfigurationError, Guard, LoopHalted, Run, current_run
from loopguard_mcp._calls import Tools, halted_result

__all__ = ["GuardMiddleware"]


class GuardMiddleware:
    """Middleware for ``MCPServer(middleware=[GuardMiddleware(policy)])``, or the low-level ``Server.middleware``.

    A refused call answers with a result whose ``isError`` is true and whose text a model can act on. Inside a
    tool, `loopguard.charge` reports what the call really cost.

    Calls count in one run from the first one to the end of the process, which for a server on stdio is its
    session. A server with many clients gives ``session``, a function of the request's context, whose values
    (whom the token belongs to, say, never what a client may choose) each get a run of their own; the
    `sessions` least recently used are remembered.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        session: Callable[[ServerRequestContext[Any, Any]], Hashable] | None = None,
        sessions: int = 10_000,
        name: str = "mcp server",
    ) -> None:
        if not isinstance(guard, Guard):
            raise ConfigurationError(f"GuardMiddleware({guard!r}): give a Guard")
        if session is not None and not callable(session):
            raise ConfigurationError(f"GuardMiddleware(session={session!r}): give a function of the context, or None")
        if not isinstance(sessions, int) or isinstance(sessions, bool) or sessions < 1:
            raise ConfigurationError(f"GuardMiddleware(sessions={sessions!r}): give an int of at least 1")
        self._guard = guard
        self._session = session
        self._name = name
        self._tools = Tools(guard)
        self._runs = _Runs(sessions)

    async def __call__(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        """Pass on whatever isn't a call of a tool."""
        if ctx.method != "tools/call" or ctx.request_id is None:
            return await call_next(ctx)
        params = ctx.params or {}
        name, arguments = params.get("name"), params.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            raise MCPError(code=INVALID_PARAMS, message="tools/call needs a name, and arguments in an object")

        async def call(given: dict[str, Any]) -> HandlerResult:
            return await call_next(replace(ctx, params={**params, "arguments": given}))

        try:
            return await self._run(ctx).bind(self._tools.call)(name, arguments or {}, call)
        except LoopHalted as halted:
            return halted_result(halted)

    def _run(self, ctx: ServerRequestContext[Any, Any]) -> Run:
        """The run that a request counts in: the one that the server was started in, or its session's own."""
        run = current_run()
        return run if run is not None else self._runs.of(self._guard, self._name, self._session and self._session(ctx))

    def close(self) -> None:
        """End its runs, and their spans, before the process does; the next call begins a new one."""
        self._runs.clear()


class _Runs(LRUCache[Hashable, tuple[Run, Callable[[], None]]]):
    """The run of each session, ended when it is forgotten."""

    def of(self, guard: Guard, name: str, session: Hashable) -> Run:
        known = self.get(session)
        if known is None:
            if not self:
                atexit.register(self.clear)  # now rather than earlier: before what exports the spans is shut down
            context, scope = contextvars.Context(), guard.scope(name)  # of its own, not part of the first request
            run = context.run(scope.__enter__)
            known = self[session] = run, lambda: context.run(scope.__exit__, None, None, None)
        return known[0]

    def __delitem__(self, session: Hashable) -> None:
        _, end = self[session]
        super().__delitem__(session)
        end()

    def clear(self) -> None:
        atexit.unregister(self.clear)
        for session in list(self):
            del self[session]
