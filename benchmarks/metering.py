"""What metering costs, against the same SDK call unmetered, over HTTP to 127.0.0.1: ``python benchmarks/metering.py``.

The server runs in a process of its own. Times are of this process's processor, medians in µs.
"""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic

from loopguard import Budget, Guard, PriceBook, Usage, meter

ROUNDS, CALLS = 7, 100
PRICES = PriceBook({"m": {"input": 3, "output": 15}})
QUESTION = "What does the archive say about lighthouses, and who wrote it? " * 30
BODY: dict[str, Any] = {"model": "m", "max_tokens": 1000, "messages": [{"role": "user", "content": QUESTION}]}
SERVER = """
from loopguard.testing import MessagesServer, Reply
events = Reply.text("x", usage={"input_tokens": 500, "output_tokens": 300}).as_events({"model": "m"})
delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a lighthouse "}}
answers = Reply.text("a lighthouse " * 60), Reply.events([*events[:3], *[delta] * 60, *events[-3:]])
with MessagesServer(lambda body: answers[bool(body.get("stream"))]) as server:
    print(server.url, flush=True)
    input()
"""


def create(client: Any) -> None:
    """A plain call."""
    client.messages.create(**BODY)


def stream(client: Any) -> None:
    """A stream of 60 deltas, read to its end."""
    for _ in client.messages.create(stream=True, **BODY):
        pass


async def create_async(client: Any) -> None:
    """The same, async."""
    await client.messages.create(**BODY)


async def stream_async(client: Any) -> None:
    """The same, async."""
    async for _ in await client.messages.create(stream=True, **BODY):
        pass


def pass_on(request: Any, call_next: Any) -> Any:
    """The SDK's seam with nothing in it."""
    return call_next(request)


async def pass_on_async(request: Any, call_next: Any) -> Any:
    """The same, async."""
    return await call_next(request)


def us(run: Callable[[int], object], calls: int = CALLS) -> float:
    """µs of one call."""
    started = time.process_time()
    run(calls)
    return (time.process_time() - started) / calls * 1e6


def in_turn(call: Callable[[Any], Any], *clients: Any) -> list[float]:
    """Medians of all clients, measured in turn so that none has the quieter moments."""

    def run(client: Any) -> Callable[[int], None]:
        def sync(calls: int) -> None:
            for _ in range(calls):
                call(client)

        async def loop(calls: int) -> None:
            for _ in range(calls):
                await call(client)

        here = contextvars.copy_context()  # with the current run in it
        return (lambda calls: runner.run(loop(calls), context=here)) if asyncio.iscoroutinefunction(call) else sync

    rounds = [[us(run(client)) for client in clients] for _ in range(ROUNDS)]
    return [sorted(times)[ROUNDS // 2] for times in zip(*rounds, strict=True)]


def main() -> None:
    """Measure and print."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=-1, stdout=-1, text=True) as server:
        assert server.stdout is not None
        options: dict[str, Any] = {"base_url": server.stdout.readline().strip(), "api_key": "none"}
        sync, asynchronous = anthropic.Anthropic(**options), anthropic.AsyncAnthropic(**options)
        print(f"{'':<14} {'plain':>8} {'passed on':>10} {'metered':>8}  of plain  of passed on")
        with Guard(Budget(usd=10**6)).scope("bench") as run:
            for call in (create, stream, create_async, stream_async):
                plain: Any = asynchronous if asyncio.iscoroutinefunction(call) else sync
                passing = plain.with_middleware(pass_on_async if plain is asynchronous else pass_on)
                base, seam, metered = in_turn(call, plain, passing, meter(plain, prices=PRICES))
                print(
                    f"{call.__name__:<14} {base:>8.0f} {seam:>10.0f} {metered:>8.0f} "
                    f"{metered / base:>8.3f}× {metered / seam:>12.3f}×"
                )
        assert run.usage.model_calls == 4 * ROUNDS * CALLS
        assert run.reserved() == 0 < run.spent()
        server.communicate("stop\n")

    usage = Usage(input_tokens=1000, cache_read_tokens=300, output_tokens=100, web_searches=1)
    for what, book, model in (("your table", PRICES, "m-20250101"), ("genai-prices", PriceBook(), "claude-opus-5")):
        assert book.cost(model, usage)
        priced = partial(book.cost, model, usage)
        took = us(lambda calls, priced=priced: [priced() for _ in range(calls)], 10_000)  # type: ignore[misc]  # a default
        print(f"price of a call, {what:<12} {took:>8.2f}")


with asyncio.Runner() as runner:
    main()
