"""What the scripted Messages API can answer: a reply, as JSON or as the SSE events of a stream."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict, Unpack

from loopguard.exceptions import ConfigurationError

__all__ = ["Answer", "Event", "Options", "Reply", "prompt_tokens"]


class Options(TypedDict, total=False):
    """How a reply is sent: keyword arguments of every maker of a `Reply`."""

    usage: Mapping[str, Any]
    """Usage fields by their API names, over defaults estimated from the request and the content."""
    stop_reason: str
    """Default: ``tool_use`` if the content has a tool_use block, else ``end_turn``."""
    fields: Mapping[str, Any]
    """Other top-level fields of the message: id, model (default: the request's), stop_sequence, stop_details, …"""
    headers: Mapping[str, str]
    """Further HTTP headers."""
    delay: float | threading.Event
    """Seconds to wait before the answer, or an event to wait for."""
    disconnect_after: int
    """Close the connection after this many SSE events (a JSON body counts as one)."""
    disconnect_after_bytes: int
    """Close the connection after this many bytes of the body."""


Event: TypeAlias = Mapping[str, Any] | str | bytes | threading.Event
"""A step of `Reply.events`: the data of an SSE event, raw text or bytes sent as they are, or an event to wait for."""


_Part: TypeAlias = tuple[bytes, dict[str, Any] | None] | threading.Event
"""Bytes with the usage that they tell (None: a piece of an event), or an event to wait for."""


@dataclass(frozen=True)
class Answer:
    """A reply to one request, ready to be sent."""

    status: int
    headers: dict[str, str]
    delay: float | threading.Event
    parts: list[_Part]
    cut: bool
    """Whether the connection is closed before the answer is at its end."""


@dataclass(frozen=True)
class Reply:
    """One answer of the scripted API, made by one of the class methods.

    ``Reply.text("Let me look.") + Reply.tool_use("search", {"query": "x"})`` is one reply of two blocks; where both
    set an option, the right one wins.
    """

    content: tuple[Mapping[str, Any], ...] = ()
    options: Options = field(default_factory=Options)
    status: int = 200
    payload: bytes | tuple[Event, ...] | None = None
    """What is sent instead of a message: a body, or a stream even where the request asked for none."""

    @classmethod
    def text(cls, text: str, **options: Unpack[Options]) -> Reply:
        """A text block. In a script, a plain string is the same."""
        return cls.blocks({"type": "text", "text": text}, **options)

    @classmethod
    def tool_use(
        cls, name: str, input: Mapping[str, Any] | None = None, *, id: str | None = None, **options: Unpack[Options]
    ) -> Reply:
        """A tool_use block; without an id, it gets a new one each time that it is sent."""
        block = {"type": "tool_use", "name": name, "input": dict(input or {})}
        return cls.blocks(block if id is None else {**block, "id": id}, **options)

    @classmethod
    def thinking(cls, thinking: str, *, signature: str = "signature", **options: Unpack[Options]) -> Reply:
        """A thinking block."""
        return cls.blocks({"type": "thinking", "thinking": thinking, "signature": signature}, **options)

    @classmethod
    def redacted_thinking(cls, data: str = "redacted", **options: Unpack[Options]) -> Reply:
        """A redacted_thinking block."""
        return cls.blocks({"type": "redacted_thinking", "data": data}, **options)

    @classmethod
    def web_search(
        cls, query: str, results: Mapping[str, str] | None = None, *, id: str = "srvtoolu_1", **options: Unpack[Options]
    ) -> Reply:
        """A web search that the API ran itself, and its results, {URL: title}. The usage counts it."""
        found = [
            {"type": "web_search_result", "url": url, "title": title, "encrypted_content": "encrypted"}
            for url, title in (results or {}).items()
        ]
        return cls.blocks(
            {"type": "server_tool_use", "id": id, "name": "web_search", "input": {"query": query}},
            {"type": "web_search_tool_result", "tool_use_id": id, "content": found},
            **options,
        )

    @classmethod
    def blocks(cls, *blocks: Mapping[str, Any], **options: Unpack[Options]) -> Reply:
        """Any content blocks, as the API writes them, or none."""
        return cls(blocks, options)

    @classmethod
    def events(cls, events: Iterable[Event], **options: Unpack[Options]) -> Reply:
        """A stream of exactly these events; `as_events` makes some to start from."""
        return cls(options=options, payload=tuple(events))

    @classmethod
    def error(
        cls,
        status: int,
        message: str = "scripted error",
        *,
        type: str | None = None,
        retry_after: float | None = None,
        **options: Unpack[Options],
    ) -> Reply:
        """An HTTP error in the API's shape. The SDK waits `retry_after` seconds before it tries again."""
        kind = type or _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        if retry_after is not None:
            options["headers"] = {"retry-after": f"{retry_after:g}", **options.get("headers", {})}
        return cls.raw({"type": "error", "error": {"type": kind, "message": message}}, status, **options)

    @classmethod
    def raw(cls, body: bytes | Mapping[str, Any], status: int = 200, **options: Unpack[Options]) -> Reply:
        """Any body, sent as application/json unless `headers` say otherwise."""
        return cls(options=options, status=status, payload=body if isinstance(body, bytes) else _json(body))

    @classmethod
    def disconnect(cls, **options: Unpack[Options]) -> Reply:
        """No answer: the connection is closed after the request was read."""
        return cls(options=options, status=0)

    def __add__(self, other: Reply) -> Reply:
        if any(reply.payload is not None or reply.status != 200 for reply in (self, other)):
            raise ConfigurationError("only replies of content blocks can be added, not errors, events or raw bodies")
        return Reply(self.content + other.content, self.options | other.options)

    def as_message(self, request: Mapping[str, Any] | None = None, number: int = 0) -> dict[str, Any]:
        """The message that answers this request body; `number` keeps its ids apart from those of others."""
        request = request or {}
        content = [
            {"id": f"toolu_{number}_{index}", **block} if block["type"] == "tool_use" else dict(block)
            for index, block in enumerate(self.content)
        ]
        calls_tool = any(block["type"] == "tool_use" for block in content)
        return {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": request.get("model", "scripted"),
            "content": content,
            "stop_reason": self.options.get("stop_reason", "tool_use" if calls_tool else "end_turn"),
            "stop_sequence": None,
            "usage": _usage(self.options.get("usage", {}), content, request),
            **self.options.get("fields", {}),
        }

    def as_events(self, request: Mapping[str, Any] | None = None, number: int = 0) -> list[dict[str, Any]]:
        """The SSE events that this reply is streamed as, to alter and give to `events`."""
        return list(_streamed(self.as_message(request, number)))

    def answer(self, request: Mapping[str, Any], number: int) -> Answer:
        """What is sent to this request body, cut where the options say so."""
        kind = "application/json"
        parts: list[_Part]
        if isinstance(self.payload, bytes):
            parts = [(self.payload, {})]
        elif self.payload is None and not request.get("stream"):
            message = self.as_message(request, number)
            parts = [(_json(message), message["usage"])]
        else:
            kind = "text/event-stream; charset=utf-8"
            parts = [_encoded(e) for e in (self.as_events(request, number) if self.payload is None else self.payload)]
        given = {name.lower(): value for name, value in self.options.get("headers", {}).items()}
        headers = {"content-type": kind, "request-id": f"req_{number}", **given}
        kept, cut = _cut(
            parts,
            self.options.get("disconnect_after", sys.maxsize),
            self.options.get("disconnect_after_bytes", sys.maxsize),
        )
        return Answer(self.status, headers, self.options.get("delay", 0), kept, cut)


_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _tokens(value: Any) -> int:
    return max(1, len(_json(value)) // 4)  # four bytes a token, the usual rule of thumb


def prompt_tokens(request: Mapping[str, Any]) -> int:
    """About how many input tokens a request body has."""
    return _tokens([request.get(part) for part in ("system", "tools", "messages")])


def _usage(
    given: Mapping[str, Any], content: Sequence[Mapping[str, Any]], request: Mapping[str, Any]
) -> dict[str, Any]:
    served = [block["name"] for block in content if block["type"] == "server_tool_use"]
    searches, fetches = served.count("web_search"), served.count("web_fetch")
    usage: dict[str, Any] = {
        "input_tokens": prompt_tokens(request),
        "output_tokens": _tokens(content),
        "cache_creation_input_tokens": sum((given.get("cache_creation") or {}).values()),
        "cache_read_input_tokens": 0,
        "service_tier": "standard",
    }
    if searches or fetches:
        usage["server_tool_use"] = {"web_search_requests": searches, "web_fetch_requests": fetches}
    return {**usage, **given}


_KNOWN_AT_THE_END = ("output_tokens_details", "server_tool_use")
_CUMULATIVE = (
    "input_tokens",
    "output_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    *_KNOWN_AT_THE_END,
)
"""The usage fields of a message_delta."""


def _streamed(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a message in the API's order."""
    usage = message["usage"]
    opening = {name: value for name, value in usage.items() if name not in _KNOWN_AT_THE_END}
    opening["output_tokens"] = min(1, usage["output_tokens"])
    unsaid: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": opening}
    yield {"type": "message_start", "message": {**message, **unsaid}}
    yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        empty, deltas = _deltas(block)
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {name: message[name] for name in ("stop_reason", "stop_sequence", "stop_details") if name in message}
    totals = {name: usage[name] for name in _CUMULATIVE if name in usage}
    yield {"type": "message_delta", "delta": ending, "usage": totals}
    yield {"type": "message_stop"}


def _deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a streamed block has empty at its start, and the deltas that fill it."""
    match block["type"]:
        case "text":
            deltas = [{"type": "text_delta", "text": piece} for piece in _pieces(block["text"])]
            citations = block.get("citations") or []
            deltas += [{"type": "citations_delta", "citation": citation} for citation in citations]
            return {"text": "", **({"citations": []} if citations else {})}, deltas
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in _pieces(block["thinking"])]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
            return {"thinking": "", "signature": ""}, deltas
        case "tool_use" | "server_tool_use":
            pieces = ["", *_pieces(json.dumps(block["input"]))]  # the API's first one is empty, too
            return {"input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
        case _:
            return {}, []


def _pieces(text: str) -> list[str]:
    """A text in three pieces, or as many as it has characters."""
    size = -(-len(text) // 3) or 1
    return [text[start : start + size] for start in range(0, len(text), size)]


def _encoded(event: Event) -> _Part:
    """An event as it is sent, with the usage that it tells."""
    if isinstance(event, threading.Event):
        return event
    if isinstance(event, str | bytes):
        return (event if isinstance(event, bytes) else event.encode()), {}
    told = event.get("message", event).get("usage") or {}
    told = {name: value for name, value in told.items() if value is not None}  # None says nothing new
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _json(event)), told


def _cut(parts: Iterable[_Part], events: int, size: int) -> tuple[list[_Part], bool]:
    """The parts up to so many events and bytes, and whether a limit was met; waits at the cut are kept."""
    kept: list[_Part] = []
    for part in parts:
        if isinstance(part, threading.Event):
            kept.append(part)
            continue
        if not (events and size):
            break
        data, usage = part
        if data:  # an empty chunk would end the body
            kept.append((data[:size], usage if len(data) <= size else None))
            events, size = events - 1, max(0, size - len(data))
    return kept, not (events and size)
