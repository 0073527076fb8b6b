"""A scripted Anthropic Messages API on 127.0.0.1: the real SDK talks to it, no key and no network needed.

with MessagesServer([Reply.tool_use("search", {"query": "x"}), "Found it."]) as server:
    client = anthropic.Anthropic(base_url=server.url, api_key="test")
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Self, TypeAlias, TypedDict

from loopguard.exceptions import ConfigurationError
from loopguard.testing.replies import Answer, Reply, prompt_tokens

__all__ = ["Exchange", "MessagesServer", "Reply", "Request", "Script"]

_POLL = 0.02
"""Seconds between two looks at whether the server was closed."""


class Request(TypedDict):
    """A request as it arrived."""

    path: str
    """Without the query: ``/v1/messages`` or ``/v1/messages/count_tokens``."""
    query: str
    """What follows the question mark, if anything does."""
    headers: dict[str, str]
    """Names in lower case."""
    body: dict[str, Any]


@dataclass(slots=True)
class Exchange:
    """A request and what it was answered with, as far as the server got rid of it.

    Up to date before the client can see the answer.
    """

    request: Request
    status: int = 0
    """The HTTP status; 0 while there is no answer, and for good if there never is one."""
    usage: dict[str, Any] | None = None
    """The usage told: of a stream, its message_delta events over its message_start. None if none was told.

    What was cut off is not in it, nor what raw text or bytes told.
    """
    events: int = 0
    """SSE events sent in full; a JSON body counts as one."""
    sent_bytes: int = 0
    """Bytes of the body sent."""
    complete: bool = False
    """The whole answer was handed to the socket; whether the client read it, only the client knows."""


Script: TypeAlias = Iterable[Reply | str] | Callable[[dict[str, Any]], Reply | str]
"""Replies in order, or a function from a request's body to the reply (called from several threads at once)."""


class MessagesServer:
    """Answers ``POST /v1/messages`` as scripted, as JSON or, where the request asks for it, as a stream.

    A script that has run out answers with HTTP 400, one that raises with a 500; the SDK retries neither. A plain
    string in a script is a `Reply.text`. ``count_tokens``, a number or a function from the request's body to one
    (default: an estimate), answers that endpoint, which takes nothing from the script. The server runs from
    construction until `close`, in daemon threads.
    """

    url: str
    """The SDK's ``base_url``."""
    ledger: list[Exchange]
    """Every request in order of arrival, with what it was answered."""

    def __init__(
        self, script: Script = (), *, count_tokens: int | Callable[[dict[str, Any]], int] | None = None
    ) -> None:
        if isinstance(script, str | bytes | Reply):
            raise ConfigurationError(f"MessagesServer takes a list of replies or a function, not {script!r}")
        self.ledger = []
        self._decide = script if callable(script) else _in_order(script)
        self._count_tokens = count_tokens
        self._numbers = itertools.count(1)
        self._closing = threading.Event()
        self._connections: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", 0), functools.partial(_Handler, self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL,), daemon=True)
        self._thread.start()

    @property
    def requests(self) -> list[Request]:
        """Every request in order of arrival."""
        return [exchange.request for exchange in self.ledger]

    def close(self) -> None:
        """Stop at once: answers under way are cut off, waiting ones never come."""
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for connection in self._connections.copy():
            with contextlib.suppress(OSError):  # the client may have left first
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _answer(self, request: Request) -> Answer:
        body, number = request["body"], next(self._numbers)
        try:
            return self._reply(request["path"], body).answer(body, number)
        except Exception as exc:  # the user's script: its failure is an answer, not the end of a thread
            message = f"the script of MessagesServer failed: {type(exc).__name__}: {exc}"
            return Reply.error(500, message, headers={"x-should-retry": "false"}).answer(body, number)

    def _reply(self, path: str, body: dict[str, Any]) -> Reply:
        if path == "/v1/messages":
            reply = self._decide(body)
            if isinstance(reply, Reply):
                return reply
            if isinstance(reply, str):
                return Reply.text(reply)
            raise ConfigurationError(f"a script gives a Reply or a string, not {reply!r}")
        if path == "/v1/messages/count_tokens":
            count = self._count_tokens(body) if callable(self._count_tokens) else self._count_tokens
            return Reply.raw({"input_tokens": prompt_tokens(body) if count is None else count})
        return Reply.error(404, f"MessagesServer has no {path}")

    def _wait(self, until: float | threading.Event) -> None:
        if isinstance(until, threading.Event):
            while not until.wait(_POLL) and not self._closing.is_set():
                pass
        else:
            self._closing.wait(until)
        if self._closing.is_set():
            raise ConnectionAbortedError("the server was closed")


def _in_order(script: Iterable[Reply | str]) -> Callable[[dict[str, Any]], Reply | str]:
    replies, lock = iter(script), threading.Lock()
    run_out = Reply.error(400, "the script of MessagesServer has run out: it has no reply left for this request")

    def decide(_body: dict[str, Any]) -> Reply | str:
        with lock:
            return next(replies, run_out)

    return decide


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    """One connection: reads requests and sends the answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes, which Nagle would hold 40 ms apart

    def __init__(self, owner: MessagesServer, *args: Any) -> None:
        self._owner = owner
        super().__init__(*args)

    def handle(self) -> None:
        owner = self._owner
        owner._connections.add(self.connection)
        try:
            if not owner._closing.is_set():
                super().handle()
        except OSError:
            pass  # the client left, or the server was closed
        finally:
            owner._connections.discard(self.connection)

    def do_POST(self) -> None:
        path, _, query = self.path.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        raw = self.rfile.read(int(headers.get("content-length", 0)))
        exchange = Exchange(Request(path=path, query=query, headers=headers, body=json.loads(raw or b"{}")))
        self._owner.ledger.append(exchange)
        answer = self._owner._answer(exchange.request)
        self._owner._wait(answer.delay)
        if not answer.status:
            self.close_connection = True
            return
        exchange.status = answer.status
        self._send(answer, exchange)

    def do_GET(self) -> None:
        self.do_POST()  # a 404: the SDK would retry the 501 of a missing method

    def _send(self, answer: Answer, exchange: Exchange) -> None:
        self.send_response(answer.status)
        for name, value in {**answer.headers, "transfer-encoding": "chunked"}.items():
            self.send_header(name, value)
        self.end_headers()
        for place, part in enumerate(answer.parts, 1):
            if isinstance(part, threading.Event):
                self._owner._wait(part)
                continue
            data, usage = part
            exchange.sent_bytes += len(data)
            if usage is not None:
                exchange.events += 1
                exchange.usage = {**(exchange.usage or {}), **usage} or None
            exchange.complete = place == len(answer.parts) and not answer.cut
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        if answer.cut:
            self.close_connection = True
        else:
            exchange.complete = True
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a test's output is its own."""
