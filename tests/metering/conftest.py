"""What the tests of metering share: every way to call a model through the SDK, and synthetic prices."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from loopguard.metering import meter

PRICES = {
    "m": {
        "input": 3,
        "output": 15,
        "cache_read": 0.30,
        "cache_write_5m": 3.75,
        "cache_write_1h": 6,
        "web_search": 10,
    }
}
"""USD per million tokens, and per 1,000 searches."""
BODY: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}


def create(client: Any, **body: Any) -> Any:
    """A plain call."""
    return client.messages.create(**body)


def parse(client: Any, **body: Any) -> Any:
    """The call for structured output, without any."""
    return client.messages.parse(**body)


def beta(client: Any, **body: Any) -> Any:
    """The beta surface."""
    return client.beta.messages.create(**body)


def raw(client: Any, **body: Any) -> Any:
    """The response before it is parsed."""
    return client.messages.with_raw_response.create(**body)


def body(client: Any, **body: Any) -> Any:
    """A response whose body is read by hand."""
    with client.messages.with_streaming_response.create(**body) as response:
        return response.read()


def events(client: Any, **body: Any) -> Any:
    """Streamed events."""
    return list(client.messages.create(stream=True, **body))


def helper(client: Any, **body: Any) -> Any:
    """The stream that accumulates a message."""
    with client.messages.stream(**body) as stream:
        return stream.get_final_message()


def beta_helper(client: Any, **body: Any) -> Any:
    """The same on the beta surface."""
    with client.beta.messages.stream(**body) as stream:
        return stream.get_final_message()


def lines(client: Any, **body: Any) -> Any:
    """The lines of a stream, read by hand."""
    with client.messages.with_streaming_response.create(stream=True, **body) as response:
        return list(response.iter_lines())


def raw_events(client: Any, **body: Any) -> Any:
    """Streamed events, from the response before it is parsed."""
    return list(client.messages.with_raw_response.create(stream=True, **body).parse())


async def async_body(client: Any, **body: Any) -> Any:
    """A response whose body is read by hand."""
    async with client.messages.with_streaming_response.create(**body) as response:
        return await response.read()


async def async_events(client: Any, **body: Any) -> Any:
    """Streamed events."""
    return [event async for event in await client.messages.create(stream=True, **body)]


async def async_helper(client: Any, **body: Any) -> Any:
    """The stream that accumulates a message."""
    async with client.messages.stream(**body) as stream:
        return await stream.get_final_message()


async def async_lines(client: Any, **body: Any) -> Any:
    """The lines of a stream, read by hand."""
    async with client.messages.with_streaming_response.create(stream=True, **body) as response:
        return [line async for line in response.iter_lines()]


SYNC = (create, parse, beta, raw, body, events, helper, beta_helper, lines, raw_events)
ASYNC = (create, parse, beta, raw, async_body, async_events, async_helper, async_lines)


class Way:
    """One way to call a model: `call` makes the call on a fresh metered client, in the current run."""

    def __init__(self, fn: Callable[..., Any], is_async: bool) -> None:
        self.fn = fn
        self.is_async = is_async

    def call(self, url: str, *, prices: Any = PRICES, estimate: Any = None, client: Any = None, **changes: Any) -> Any:
        """What the way returns, or raises what it raises. ``client``: options of the SDK's client."""
        options = {"base_url": url, "api_key": "test", "max_retries": 0, **(client or {})}
        changes = {**BODY, **changes}
        if not self.is_async:
            with meter(anthropic.Anthropic(**options), prices=prices, estimate=estimate) as sync_client:
                return self.fn(sync_client, **changes)

        async def main() -> Any:
            async with meter(anthropic.AsyncAnthropic(**options), prices=prices, estimate=estimate) as async_client:
                return await self.fn(async_client, **changes)

        with asyncio.Runner() as runner:
            return runner.run(main(), context=contextvars.copy_context())


def _ways(sync: tuple[Callable[..., Any], ...], asynchronous: tuple[Callable[..., Any], ...]) -> list[Any]:
    ways = [(fn, False) for fn in sync] + [(fn, True) for fn in asynchronous]
    return [pytest.param(way, id=f"{'async ' * way[1]}{way[0].__name__.removeprefix('async_')}") for way in ways]


@pytest.fixture(params=_ways(SYNC, ASYNC))
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """Every way to call a model."""
    return Way(*request.param)


@pytest.fixture(params=_ways((create, events), (create, async_events)))
def basic(request: pytest.FixtureRequest) -> Iterator[Way]:
    """Sync and async, streaming and not."""
    return Way(*request.param)


@pytest.fixture(params=_ways((events, helper, lines), (async_events, async_helper, async_lines)))
def streaming(request: pytest.FixtureRequest) -> Iterator[Way]:
    """Every way to stream."""
    return Way(*request.param)
