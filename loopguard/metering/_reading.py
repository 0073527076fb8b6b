"""Reads what the API reports: usage, as JSON, as stream events, as lines of a batch's results."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from loopguard._usage import Usage
from loopguard.metering._estimates import tokens_of

__all__ = ["Bill", "BatchReader", "EventReader", "MessageReader", "Reader", "parts", "reader_for"]


# -- usage -----------------------------------------------------------------------------------------


def parts(usage: Any, model: str) -> list[tuple[str, Usage]]:
    """The SDK's usage, an object or a dict, as (model, Usage) for each model that worked on it.

    The total comes first. Iterations that it leaves out, compactions and an advisor's, come after it.
    """
    total = _read(usage, calls=1)
    others = []
    iterations = _get(usage, "iterations")
    for entry in iterations if isinstance(iterations, list) else ():
        modes = {name: getattr(total, name) for name in ("service_tier", "speed", "inference_geo")}
        match _get(entry, "type"):
            case "compaction":
                others.append((model, replace(_read(entry), **modes)))
            case "advisor_message":
                others.append((_text(entry, "model") or model, replace(_read(entry), **modes)))
            case "fallback_message":  # another model has answered, and the total is its own
                model = _text(entry, "model") or model
    return [(model, total), *others]


def _read(usage: Any, calls: int | None = None) -> Usage:
    fresh = _count(usage, "input_tokens")
    output = _count(usage, "output_tokens")
    read = _count(usage, "cache_read_input_tokens")
    written = _count(usage, "cache_creation_input_tokens")
    split = _get(usage, "cache_creation")
    write_5m, write_1h = _count(split, "ephemeral_5m_input_tokens"), _count(split, "ephemeral_1h_input_tokens")
    if written is None and (write_5m is not None or write_1h is not None):
        written = (write_5m or 0) + (write_1h or 0)
    if written is not None:  # what no split says is written for five minutes, the default
        write_1h = min(write_1h or 0, written)
        write_5m = written - write_1h
    prompt = None if fresh is None else fresh + (read or 0) + (written or 0)
    served = _get(usage, "server_tool_use")
    return Usage(
        tokens=None if prompt is None or output is None else prompt + output,
        input_tokens=prompt,
        output_tokens=output,
        cache_read_tokens=read,
        cache_write_5m_tokens=write_5m,
        cache_write_1h_tokens=write_1h,
        thinking_tokens=_count(_get(usage, "output_tokens_details"), "thinking_tokens"),
        web_searches=_count(served, "web_search_requests"),
        web_fetches=_count(served, "web_fetch_requests"),
        model_calls=calls,
        service_tier=_text(usage, "service_tier"),
        speed=_text(usage, "speed"),
        inference_geo=_text(usage, "inference_geo"),
    )


def _get(obj: Any, name: str) -> Any:
    return obj.get(name) if isinstance(obj, dict) else getattr(obj, name, None)


def _count(obj: Any, name: str) -> int | None:
    value = _get(obj, name)
    return value if type(value) is int and value >= 0 else None


def _text(obj: Any, name: str) -> str | None:
    value = _get(obj, name)
    return value if isinstance(value, str) else None


# -- bodies ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bill:
    """What a response told of its usage."""

    usage: Any = None
    """As the API wrote it; None where nothing was told."""
    model: str | None = None
    partial: bool = True
    """Whether the response was cut before its usage was final."""
    content_tokens: int = 0
    """An upper estimate of the output received, where the usage isn't final."""
    failed: bool = False
    """Whether the API reported an error before any usage."""


class Reader:
    """Is fed the bytes of a body, in pieces of any size."""

    done = False
    """Whether all that matters has been read."""

    def feed(self, chunk: bytes) -> None:
        """The next bytes."""
        raise NotImplementedError

    def bill(self) -> Bill:
        """What they have told so far."""
        return Bill()


class MessageReader(Reader):
    """A message as JSON."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def feed(self, chunk: bytes) -> None:
        self._chunks.append(chunk)

    def bill(self) -> Bill:
        message = _json(b"".join(self._chunks))
        return Bill(_get(message, "usage"), _text(message, "model"), partial=not isinstance(message, dict))


class EventReader(Reader):
    """A stream: the usage of message_start, and over it that of every message_delta, which counts from the start.

    An event counts once its blank line has come. What the model wrote is looked at only if the usage stays unknown.
    """

    def __init__(self) -> None:
        self._lines = Lines()
        self._name = b""
        self._data: list[bytes] = []
        self._written: list[bytes] = []
        self._usage: dict[str, Any] = {}
        self._model: str | None = None
        self._final = False
        self._failed = False
        self._content = 0

    def feed(self, chunk: bytes) -> None:
        for line in self._lines.split(chunk):
            if line.startswith(b"data:"):
                self._data.append(line[5:])
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                if self._name == b"content_block_delta":
                    self._written.append(data)
                else:
                    self._take(data)

    def _take(self, data: bytes) -> None:
        event = _json(data)
        if isinstance(event, dict):
            self.event(event)

    def event(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        match event.get("type"):
            case "content_block_delta":
                self._content += _text_bytes(event.get("delta"))
            case "content_block_start":
                self._content += _text_bytes(event.get("content_block"))
            case "message_start":
                message = event.get("message")
                self._model = _text(message, "model")
                self._merge(_get(message, "usage"))
            case "message_delta":
                self._merge(event.get("usage"))
                self._final = self._final or _get(event.get("delta"), "stop_reason") is not None
            case "message_stop":
                self.done = self._final = True
            case "error":
                self._failed = True

    def _merge(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self._usage.update((name, value) for name, value in usage.items() if value is not None)

    def bill(self) -> Bill:
        self.feed(self._lines.end())
        if not self._final:
            written, self._written = self._written, []
            for data in written:
                self._take(data)
        return Bill(
            self._usage or None,
            self._model,
            partial=not self._final,
            content_tokens=0 if self._final else tokens_of(self._content),
            failed=self._failed and not self._usage,
        )


class BedrockReader(EventReader):
    """The same events in the frames of Bedrock (application/vnd.amazon.eventstream).

    A frame: its length and that of its headers (4 bytes each), a checksum (4), headers, payload, checksum (4).
    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/RESTSelectObjectAppendix.html
    """

    def __init__(self) -> None:
        super().__init__()
        self._frames = b""

    def feed(self, chunk: bytes) -> None:
        self._frames += chunk
        while len(self._frames) >= 16:
            size, head = int.from_bytes(self._frames[:4]), int.from_bytes(self._frames[4:8])
            if size < 16 or len(self._frames) < size:
                return
            payload, self._frames = _json(self._frames[12 + head : size - 4]), self._frames[size:]
            try:
                event = _json(base64.b64decode(_text(payload, "bytes") or ""))
            except ValueError:  # not base64: a frame of another kind
                continue
            if isinstance(event, dict):
                self.event(event)


class BatchReader(Reader):
    """The results of a batch, a JSON object a line: hands on every message once its line is complete."""

    def __init__(self, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._lines = Lines()
        self._on_message = on_message

    def feed(self, chunk: bytes) -> None:
        for line in self._lines.split(chunk):
            message = _get(_get(_json(line), "result"), "message")
            if isinstance(message, dict):
                self._on_message(message)

    def bill(self) -> Bill:
        self.feed(b"\n")  # the last line may lack its end
        return super().bill()


def reader_for(content_type: str) -> Reader:
    """The reader of a message response."""
    if content_type.startswith("text/event-stream"):
        return EventReader()
    if content_type.startswith("application/vnd.amazon.eventstream"):
        return BedrockReader()
    return MessageReader()


class Lines:
    """Cuts bytes into lines that end in LF, CR or CRLF, whatever pieces they come in."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, chunk: bytes) -> list[bytes]:
        """The lines that are complete now, without their ends."""
        lines = (self._rest + chunk).splitlines(keepends=True)
        # a last CR may be half of a CRLF
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        return [line.rstrip(b"\r\n") for line in lines]

    def end(self) -> bytes:
        """What makes a last line complete that ends in CR."""
        return b"\n" if self._rest.endswith(b"\r") else b""


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # malformed, or cut: the SDK tells the caller
        return None


def _text_bytes(block: Any) -> int:
    """The bytes of what the model wrote in a block or a delta."""
    values = (_get(block, name) for name in ("text", "thinking", "partial_json", "name", "data", "content"))
    return sum(len(value.encode("utf-8", "surrogatepass")) for value in values if isinstance(value, str))
