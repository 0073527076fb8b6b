"""The middleware that meters: it sees every HTTP attempt of the anthropic SDK, sync and async."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from datetime import timedelta
from typing import Any

import httpx2
from anthropic import APIConnectionError, APIResponse, AsyncAPIResponse, Middleware

from loopguard._call import ASYNC, SYNC
from loopguard._drivers import drive_async, drive_sync
from loopguard._pipeline import LOCK, Ask, Effect, Steps
from loopguard._run import Run, current_run
from loopguard.exceptions import ConfigurationError
from loopguard.metering._calls import ModelCall
from loopguard.metering._estimates import survey
from loopguard.metering._reading import BatchReader, Bill, Reader, reader_for
from loopguard.metering.prices import PriceSource
from loopguard.telemetry._spans import attach, detach

__all__ = ["Meter"]

_UNSENT = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.PoolTimeout,
    httpx2.ProxyError,
    httpx2.UnsupportedProtocol,
    httpx2.InvalidURL,
    httpx2.LocalProtocolError,
)
_COUNTED = ("messages", "model", "system", "thinking", "tool_choice", "tools", "mcp_servers", "output_config")
"""What of a request's body count_tokens takes."""


class Meter(Middleware):
    """See `meter`."""

    def __init__(self, prices: PriceSource, estimate: Any, client: Any) -> None:
        self.prices = prices
        self.estimate = estimate
        self.client = client

    def handle(self, request: Any, call_next: Callable[[Any], Any]) -> Any:
        steps = self._steps(request, call_next, SYNC)
        return call_next(request) if steps is None else drive_sync(steps)

    async def handle_async(self, request: Any, call_next: Callable[[Any], Any]) -> Any:
        steps = self._steps(request, call_next, ASYNC)
        return await (call_next(request) if steps is None else drive_async(steps))

    def _steps(self, request: Any, send: Callable[[Any], Any], colour: str) -> Steps | None:
        """How this request is metered; None if it isn't."""
        run = current_run()
        if run is None:
            return None
        path = request.url.partition("?")[0]
        if path.endswith("/v1/messages") and request.method.lower() == "post":
            return self._message(request, send, run, colour)
        if path.endswith("/results") and "/v1/messages/batches/" in path:
            return self._batch(request, send, run)
        return None

    def _message(self, request: Any, send: Callable[[Any], Any], run: Run, colour: str) -> Steps:
        body = request.json if isinstance(request.json, dict) else {}
        call = ModelCall(run, str(body.get("model", "")), self.prices)
        recorder = run.recorder
        recorded = call.recorded([request.url, body])
        if recorded is not None:
            return self._again(request, recorded, colour)
        seen = survey(body)
        if self.estimate == "count_tokens":
            seen = seen._replace(input_tokens=(yield from _counted(request, send, body)) or seen.input_tokens)
        elif self.estimate is not None:
            tokens = yield Ask(self.estimate, body)
            if type(tokens) is not int or tokens < 0:
                raise ConfigurationError(f"meter(estimate=…) gave {tokens!r}: it has to give a number of tokens")
            seen = seen._replace(input_tokens=tokens)
        call.reserve(body, seen)
        yield from call.admitted()
        token = attach(call.span)
        try:
            yield from call.announced(colour)
            response = yield Ask(send, request)
        except BaseException as exc:
            (call.lost if _sent(exc) else call.released)(exc)
            if isinstance(exc, Exception):
                yield from call.close()
            else:
                call.drop()
            raise
        finally:
            detach(token)
        http = getattr(response, "http_response", None)
        if http is None or not http.is_success:  # answered by another middleware, or refused by the API
            call.released()
        else:
            reader = reader_for(http.headers.get("content-type", ""))
            end = _End(call, recorder)
            if recorder is None:
                _watch(http, reader, call.received, end)
            else:
                tape = _Tape(reader)
                _watch(http, tape, functools.partial(_received, call, http, tape), end)
        if not call.open:
            yield from call.close()
        if recorder is not None:
            yield recorder.commit(colour)
        return response

    def _again(self, request: Any, recorded: Mapping[str, Any], colour: str) -> Any:
        """The recorded answer, in the shape of one that has just arrived."""
        http = httpx2.Response(
            recorded["status"],
            headers=recorded["headers"],
            content=recorded["body"].encode(),
            request=httpx2.Request("POST", "https://recorded.invalid/v1/messages"),
        )
        http.elapsed = timedelta(0)
        return (AsyncAPIResponse if colour == ASYNC else APIResponse)(
            raw=http,
            cast_to=request.cast_to,
            client=self.client,
            stream=request.stream,
            stream_cls=request.stream_cls,
            options=request.options,
            retries_taken=request.retries_taken,
        )

    def _batch(self, request: Any, send: Callable[[Any], Any], run: Run) -> Steps:
        """Results of a batch are charged while they are read, each once in a tree of runs."""
        charged: set[Any] = run.root.slot(BatchReader, set)
        for one in run.chain:
            list(one.caps)  # made now where no call has made them: budgets watch from then on

        def charge(message: dict[str, Any]) -> None:
            with LOCK:
                if message.get("id") in charged:
                    return
                charged.add(message.get("id"))
            ModelCall(run, str(message.get("model", "")), self.prices).received(
                Bill(message.get("usage"), partial=False)
            )

        response = yield Ask(send, request)
        http = getattr(response, "http_response", None)
        if http is not None and http.is_success:
            _watch(http, BatchReader(charge), lambda bill, error: None, None)
        return response


def _counted(request: Any, send: Callable[[Any], Any], body: Mapping[str, Any]) -> Generator[Effect, Any, int | None]:
    """The number of input tokens that the API counts; None where it doesn't say."""
    path, mark, query = request.url.partition("?")
    counting = request.copy(
        url=f"{path}/count_tokens{mark}{query}", body={name: body[name] for name in _COUNTED if name in body}
    )
    counting.stream, counting.stream_cls, counting.cast_to = False, None, object
    try:
        response = yield Ask(send, counting)
        counted = json.loads((yield Ask(response.read)))["input_tokens"]
    except Exception:  # whatever is wrong, the call itself will show it
        return None
    return counted if type(counted) is int else None


def _sent(exc: BaseException) -> bool:
    """Whether the request may have reached the API before this was raised."""
    seen: set[int] = set()
    cause: BaseException | None = exc
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, _UNSENT):
            return False
        if isinstance(cause, httpx2.RequestError):
            return True
        seen.add(id(cause))
        cause = cause.__cause__  # not the context: that may be of an earlier call
    # cancelled or interrupted while it was under way, or broken in a way that httpx2 doesn't know; what other
    # errors there are come from preparing the request
    return isinstance(exc, APIConnectionError) or not isinstance(exc, Exception)


# -- bodies ----------------------------------------------------------------------------------------


class _Tape(Reader):
    """A reader that keeps what it reads, for the journal."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._chunks: list[bytes] = []

        self.done = reader.done

    def feed(self, chunk: bytes) -> None:
        """See `Reader`."""
        self._chunks.append(chunk)
        self._reader.feed(chunk)
        self.done = self._reader.done

    def bill(self) -> Bill:
        """See `Reader`."""
        return self._reader.bill()

    def text(self) -> str:
        """All of it."""
        return b"".join(self._chunks).decode()


class _End:
    """What waits for the end of a body: the journal's commit, and the ledgers of the budgets."""

    def __init__(self, call: ModelCall, recorder: Any) -> None:
        self._call = call
        self._recorder = recorder
        self.waits = call.held or recorder is not None

    def drop(self) -> None:
        """The body was left: the ledgers hear of it soon."""
        self._call.drop()

    def wait(self) -> None:
        """Until both know of it."""
        drive_sync(self._call.close())
        if self._recorder is not None:
            self._recorder.settled()

    async def wait_async(self) -> None:
        """The same without holding up the event loop."""
        await drive_async(self._call.close())
        if self._recorder is not None:
            await self._recorder.settled_async()


def _received(call: ModelCall, http: httpx2.Response, tape: _Tape, bill: Bill, error: BaseException | None) -> None:
    """Settle the call; what came whole is recorded, and can be given again."""
    if error is None and not bill.partial and not bill.failed:
        kept = ("content-type", "request-id")
        headers = {name: http.headers[name] for name in kept if name in http.headers}
        call.response = {"status": http.status_code, "headers": headers, "body": tape.text()}
    call.received(bill, error)


def _watch(
    http: httpx2.Response,
    reader: Reader,
    settle: Callable[[Bill, BaseException | None], None],
    end: _End | None,
) -> None:
    """Have the body read along, now if it is here, else while the caller reads it."""
    try:
        content = http.content
    except httpx2.ResponseNotRead:
        source: Any = http.stream
        if "content-encoding" in http.headers:
            # a response of its own, so that httpx2 decodes what is compressed before we and the caller see it
            source = httpx2.Response(http.status_code, headers=http.headers, stream=source, request=http.request)
            del http.headers["content-encoding"]
        watched = _AsyncBody if isinstance(http.stream, httpx2.AsyncByteStream) else _SyncBody
        http.stream = watched(source, reader, settle, end)
    else:
        reader.feed(content)
        settle(reader.bill(), None)


class _Body:
    """A body that is read along; however its reading ends, that is settled once."""

    def __init__(
        self,
        source: Any,
        reader: Reader,
        settle: Callable[[Bill, BaseException | None], None],
        end: _End | None,
    ) -> None:
        self._last = end if end is not None and end.waits else None
        self._source = source
        self._reader = reader
        self._settle = settle
        self._open = True

    @property
    def elapsed(self) -> Any:
        """Response.elapsed looks for it here."""
        return getattr(getattr(self._source, "stream", self._source), "elapsed", None)

    def _feed(self, chunk: bytes) -> None:
        if self._open:
            self._reader.feed(chunk)
            if self._reader.done:
                self._end(waited=True)

    def _end(self, error: BaseException | None = None, *, waited: bool = False) -> None:
        if self._open:
            self._open = False
            left = isinstance(error, GeneratorExit)  # the caller has read enough
            self._settle(self._reader.bill(), None if left else error)
            if self._last is not None and not waited:
                self._last.drop()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._end()


class _SyncBody(_Body, httpx2.SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        try:
            for chunk in self._source.iter_bytes() if isinstance(self._source, httpx2.Response) else self._source:
                self._feed(chunk)
                if self._last is not None and not self._open:
                    self._last.wait()  # committed before its end is handed on
                yield chunk
        except BaseException as exc:
            self._end(exc)
            raise
        self._end()

    def close(self) -> None:
        self._end()
        self._source.close()


class _AsyncBody(_Body, httpx2.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        source = self._source
        chunks = source.aiter_bytes() if isinstance(source, httpx2.Response) else source.__aiter__()
        try:
            async for chunk in chunks:
                self._feed(chunk)
                if self._last is not None and not self._open:
                    await self._last.wait_async()  # committed before its end is handed on
                yield chunk
        except BaseException as exc:
            self._end(exc)
            raise
        finally:
            if isinstance(chunks, AsyncGenerator):  # closed here, not some time by the loop
                await chunks.aclose()
        self._end()

    async def aclose(self) -> None:
        self._end()
        await self._source.aclose()
