"""The relay between an agent and a server: every message passes here, or doesn't."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import secrets
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeAlias

import anyio
from mcp import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    CallToolResult,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)
from opentelemetry.context import attach
from pydantic import ValidationError

from loopguard import ConfigurationError, LoopHalted, charge, telemetry
from loopguard.redaction import display, display_name, redact_error
from loopguard_mcp import _methods as methods
from loopguard_mcp._calls import Tools, error_result, halted_result
from loopguard_mcp._definitions import Definitions

__all__ = ["Relay"]


class Reads(Protocol):
    """The messages of one side, exceptions for what is no message."""

    def __aiter__(self) -> Any: ...


class Writes(Protocol):
    """Where the messages to one side go."""

    async def send(self, item: SessionMessage, /) -> None: ...


Answer: TypeAlias = dict[str, Any]
PAGES = 1_000
"""Of a listing, at most."""


class Relay:
    """One session between an agent and a server, within the run that is current."""

    def __init__(
        self,
        tools: Tools,
        definitions: Definitions,
        *,
        sampling: bool,
        to_agent: Writes,
        to_server: Writes,
        tell: Callable[[str], None],
    ) -> None:
        self._tools = tools
        self._definitions = definitions
        self._sampling = sampling
        self._to_agent = to_agent
        self._to_server = to_server
        self._tell = tell
        self._listing = asyncio.Lock()
        self._requests: dict[RequestId, asyncio.Task[None]] = {}
        """The agent's, under way."""
        self._waiting: dict[RequestId, asyncio.Future[Answer]] = {}
        """Those that the server has."""
        self._asked: set[RequestId] = set()
        """The server's, that the agent has."""
        self._own_ids = (f"loopguard-{secrets.token_hex(8)}" for _ in itertools.repeat(None))
        """Of requests that the agent didn't make."""
        self._handshake = False
        self._questions: set[asyncio.Task[None]] = set()
        """About definitions that changed."""
        self._over = False
        """Whether one of the sides has ended,"""
        self._ended = False
        """and whether that was the server."""

    async def run(self, from_agent: Reads, from_server: Reads) -> bool:
        """Pass messages on until one side ends; whether that was the agent. If not, each request gets an error."""
        async with asyncio.TaskGroup() as self._group:
            agent = self._group.create_task(self._read(from_agent, self._from_agent, self._unread_from_agent))
            server = self._group.create_task(self._read(from_server, self._from_server, self._unread_from_server))
            await asyncio.wait({agent, server}, return_when=asyncio.FIRST_COMPLETED)
            self._over = True
            by_agent = agent.done()
            if not by_agent:
                self._ended = True
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(MCPError(CONNECTION_CLOSED, ENDED))
                if self._requests:
                    await asyncio.wait(self._requests.values(), timeout=1)
            for task in {agent, server, *self._questions, *self._requests.values()}:
                task.cancel()
        return by_agent

    async def _read(
        self,
        side: Reads,
        handle: Callable[[Any], Coroutine[Any, Any, None]],
        unread: Callable[[RequestId, bool], Coroutine[Any, Any, None]],
    ) -> None:
        with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async for item in side:
                if isinstance(item, Exception):
                    self._tell(f"dropped a line that is no message of MCP: {display(redact_error(item), 200)}")
                    for name, asks in _meant(item):
                        await unread(name, asks)
                else:
                    await handle(item.message)

    async def _send(self, side: Writes, message: JSONRPCMessage) -> None:
        """Send a message; where the side has ended meanwhile, its reader says so."""
        with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            await side.send(SessionMessage(message))

    # -- from the agent --------------------------------------------------------------------------

    async def _from_agent(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCRequest):
            if message.id in self._requests:
                await self._send(self._to_agent, _error(message.id, INVALID_REQUEST, "this id is in use already"))
                return
            task = self._group.create_task(self._request(message))
            self._requests[message.id] = task
            task.add_done_callback(lambda _: self._requests.pop(message.id, None))
        elif isinstance(message, JSONRPCNotification):
            if message.method == "notifications/cancelled":
                which = (message.params or {}).get("requestId")
                if isinstance(which, int | str) and which in self._requests:
                    self._requests[which].cancel()
            elif message.method in methods.AGENT_NOTIFICATIONS:
                self._send_server(message)
            else:
                self._drop("the agent", message.method)
        elif message.id in self._asked:
            self._asked.discard(message.id)
            self._send_server(message)

    async def _unread_from_agent(self, id: RequestId, asks: bool) -> None:
        """Whoever waits for what couldn't be read gets an error, or it would wait for ever."""
        if asks and id not in self._requests:
            await self._send(self._to_agent, _error(id, INVALID_REQUEST, UNREAD))
        elif not asks and id in self._asked:
            self._asked.discard(id)
            self._send_server(_error(id, INVALID_REQUEST, UNREAD))

    async def _request(self, request: JSONRPCRequest) -> None:
        answer: JSONRPCMessage
        try:
            answer = JSONRPCResponse(jsonrpc="2.0", id=request.id, result=await self._answer(request))
        except MCPError as exc:
            answer = JSONRPCError(jsonrpc="2.0", id=request.id, error=exc.error)
        except asyncio.CancelledError:
            if not self._ended:
                raise  # by the agent, which wants no answer
            answer = _error(request.id, CONNECTION_CLOSED, ENDED)  # a person was being asked
        except ConfigurationError as exc:
            self._tell(display(str(exc)))
            answer = _error(request.id, INTERNAL_ERROR, str(exc))
        except Exception as exc:  # whatever a guardrail of a plugin's or an approver raises: the session goes on
            self._tell(f"{display(request.method)} failed: {display(redact_error(exc))}")
            answer = _error(request.id, INTERNAL_ERROR, "loopguard mcp-proxy failed; its log says how")
        await self._send(self._to_agent, answer)

    async def _answer(self, request: JSONRPCRequest) -> Answer:
        method, params = request.method, request.params
        if method not in methods.AGENT_REQUESTS:
            self._drop("the agent", method)
            raise MCPError(METHOD_NOT_FOUND, f"loopguard mcp-proxy doesn't pass on {display(method, 200)}")
        if method == "tools/call":
            return await self._call_tool(request.id, params or {})
        if method == "resources/read":
            charge(resources=1)
        self._handshake = self._handshake or method == "initialize"
        result = methods.server_result(method, await self._ask_server(request.id, method, params))
        return self._shown(result) if method == "tools/list" else result

    async def _call_tool(self, id: RequestId, params: dict[str, Any]) -> Answer:
        name, arguments = params.get("name"), params.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            raise MCPError(INVALID_PARAMS, "tools/call needs a name, and arguments in an object")
        if "task" in params:
            raise MCPError(INVALID_PARAMS, "loopguard mcp-proxy doesn't pass on tasks: call the tool without one")
        meta = params.get("_meta")
        await self._list_tools(meta if isinstance(meta, dict) else None)
        why_not = self._definitions.why_not(name)
        if why_not is not None:
            return self._refused(name, error_result(why_not))
        if isinstance(meta, dict) and "traceparent" in meta:
            attach(telemetry.extract(meta))  # the agent's trace; for the rest of this request's own task
        ids = itertools.chain([id], self._own_ids)  # Retry asks again, and an id is used once

        async def call(given: dict[str, Any]) -> Answer:
            return await self._ask_server(next(ids), "tools/call", methods.traced({**params, "arguments": given}))

        try:
            result = await self._tools.call(name, arguments or {}, call)
        except LoopHalted as halted:
            result = halted_result(halted)
        return self._refused(name, result) if isinstance(result, CallToolResult) else result

    def _refused(self, name: str, result: CallToolResult) -> Answer:
        answer: Answer = result.model_dump(by_alias=True, mode="json", exclude_none=True)
        self._tell(f"refused {display_name(name)}: {display(answer['content'][0]['text'])}")
        return answer

    # -- the tools' definitions ------------------------------------------------------------------

    async def _list_tools(self, meta: dict[str, Any] | None) -> None:
        """Know the definitions before a tool is called, whether the agent asked for them or not."""
        async with self._listing:
            changes = self._definitions.changes
            if self._definitions.listed == changes:
                return
            envelope = {key: value for key, value in (meta or {}).items() if key.startswith("io.modelcontextprotocol/")}
            params: dict[str, Any] = {"_meta": envelope} if envelope else {}
            for _ in range(PAGES):
                page = await self._ask_server(next(self._own_ids), "tools/list", params)
                self._shown(page)
                if page.get("nextCursor") is None:
                    self._definitions.listed = changes
                    return
                params = {**params, "cursor": page["nextCursor"]}
            raise MCPError(INTERNAL_ERROR, f"the server's list of tools doesn't end after {PAGES} pages")

    def _shown(self, listing: Answer) -> Answer:
        """A listing without the tools that changed; somebody is asked about these."""
        tools, changed = self._definitions.look(listing.get("tools"))
        for definition in changed:
            # In a context of its own: the question is no call of this session's run.
            task = self._group.create_task(self._ask_about(definition), context=contextvars.Context())
            self._questions.add(task)
            task.add_done_callback(self._questions.discard)
        return {**listing, "tools": tools}

    async def _ask_about(self, definition: dict[str, Any]) -> None:
        if await self._definitions.ask(definition) and self._handshake:
            changed = JSONRPCNotification(jsonrpc="2.0", method="notifications/tools/list_changed")
            await self._send(self._to_agent, changed)

    # -- to the server ---------------------------------------------------------------------------

    def _send_server(self, message: JSONRPCMessage) -> None:
        """Send it without waiting: a server that doesn't read must not keep us from hearing the agent."""
        if not self._over:
            self._group.create_task(self._send(self._to_server, message))

    async def _ask_server(self, id: RequestId, method: str, params: dict[str, Any] | None) -> Answer:
        """The server's result. Raises MCPError for an error, or if the server has ended."""
        if self._over:
            raise MCPError(CONNECTION_CLOSED, ENDED)
        params = methods.client_params(method, params, self._sampling)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[id] = future
        try:
            await self._send(self._to_server, JSONRPCRequest(jsonrpc="2.0", id=id, method=method, params=params))
            result = await future
        except asyncio.CancelledError:  # by the agent, or by a Timeout of the policy
            params = {"requestId": id}
            self._send_server(JSONRPCNotification(jsonrpc="2.0", method="notifications/cancelled", params=params))
            raise
        finally:
            del self._waiting[id]
        if not self._sampling:
            methods.check_input_requests(result)
        return result

    # -- from the server -------------------------------------------------------------------------

    async def _from_server(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            future = self._waiting.get(message.id) if message.id is not None else None
            if future is None or future.done():
                return  # an answer to what was cancelled, or to nothing
            if isinstance(message, JSONRPCError):
                future.set_exception(MCPError.from_jsonrpc_error(message))
            else:
                future.set_result(message.result)
        elif isinstance(message, JSONRPCNotification):
            if message.method not in methods.SERVER_NOTIFICATIONS:
                self._drop("the server", message.method)
                return
            if message.method == "notifications/tools/list_changed":
                self._definitions.changes += 1
            await self._send(self._to_agent, message)
        elif message.method not in methods.SERVER_REQUESTS:
            self._drop("the server", message.method)
            self._send_server(_error(message.id, METHOD_NOT_FOUND, "the proxy doesn't pass this on"))
        elif message.method == methods.SAMPLING and not self._sampling:
            self._drop("the server", message.method)
            self._send_server(_error(message.id, INVALID_REQUEST, "sampling is denied"))
        else:
            self._asked.add(message.id)
            await self._send(self._to_agent, message)

    async def _unread_from_server(self, id: RequestId, asks: bool) -> None:
        future = self._waiting.get(id)
        if asks:
            self._send_server(_error(id, INVALID_REQUEST, UNREAD))
        elif future is not None and not future.done():
            future.set_exception(MCPError(INTERNAL_ERROR, f"the server's answer can't be passed on: {UNREAD}"))

    def _drop(self, side: str, method: str) -> None:
        self._tell(f"not passed on, from {side}: {display(method, 200)}")


ENDED = "the MCP server has ended; what loopguard mcp-proxy wrote to standard error says how"
UNREAD = "it is no message of MCP; what loopguard mcp-proxy wrote to standard error says why"


def _meant(error: Exception) -> Iterator[tuple[RequestId, bool]]:
    """(id, whether it is a request) of what stands in a line that the SDK couldn't read, a batch too.

    It refuses half an emoji, for example, which JSON allows and JavaScript writes.
    """
    for each in error.errors(include_url=False) if isinstance(error, ValidationError) else ():
        given, place = each["input"], each["loc"]
        if each["type"] == "json_invalid":
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                return
        elif len(place) != (2 if each["type"] == "missing" else 1):
            continue  # about a part of it
        for message in given if isinstance(given, list) else [given]:
            name: Any = message.get("id") if isinstance(message, dict) else None
            if type(name) in (int, str) and str(name).isprintable():
                yield name, "method" in message
        return


def _error(id: RequestId, code: int, message: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=id, error=ErrorData(code=code, message=message))
