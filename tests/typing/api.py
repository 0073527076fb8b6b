"""The public API as type checkers see it. Checked by mypy and pyright, never executed.

A `type: ignore` here is a test: both checkers complain if the line is no error after all.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnusedFunction=false

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Generator, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import assert_type

from loopguard import (
    ApproveTool,
    Budget,
    Guard,
    LoopLimit,
    LoopResult,
    LoopStopped,
    MaxSteps,
    Run,
    StopReason,
    ask_in_terminal,
    current_call,
    current_run,
    loop,
    result_of,
    tool,
)
from loopguard.budgets import MemoryLedger, SqliteLedger, Standing, spend
from loopguard.typing import Ledger, ListedLedger


@dataclass
class Draft:
    """A state."""

    quality: int = 0


guard = Guard(
    MaxSteps(20),
    LoopLimit(3),
    ApproveTool(ask_in_terminal, only="issue_*"),
    Budget(usd=2.00, tokens=200_000),
)


# --- budgets of a period and their ledgers -------------------------------------------------------


def whose(run: Run) -> str:
    """A key."""
    return run.name


Budget(
    usd=5,
    per="day",
    key=whose,
    tz="Europe/Berlin",
    ledger="sqlite:///spend.db",
    on_ledger_error="allow_local",
    local_allowance={"usd": 0.5},
)
Budget(credits=5, per="month", key="team-a", ledger=MemoryLedger(), lease=10, on_expiry="charge")
Budget(usd=5, per="week")  # type: ignore[arg-type]  # there is no such period
ledgers: list[Ledger] = [MemoryLedger(), SqliteLedger("spend.db")]
listed: list[ListedLedger] = [MemoryLedger(), SqliteLedger("spend.db")]
assert_type(spend(key="team-a"), list[Standing])


# --- @tool keeps the signature -------------------------------------------------------------------


@tool
def search(query: str, limit: int = 10) -> list[str]:
    """A plain function, decorated barely."""
    return [query] * limit


@tool(cost=0.01, timeout=5)
async def fetch(url: str, *, retries: int = 0) -> bytes:
    """A coroutine function, decorated with arguments."""
    return url.encode() * retries


@tool(cost={"credits": 7}, idempotent=True)
def pages(query: str) -> Iterator[str]:
    """A generator function."""
    yield query


@tool(cost=lambda call: 0.5 if call.attempt == 1 else 0)
def conversation(opening: str) -> Generator[str, int, bool]:
    """A generator function that is talked to."""
    return (yield opening) > 0


@tool(approve=True)
async def events(topic: str) -> AsyncIterator[int]:
    """An async generator function."""
    yield len(topic)


@guard.tool
def count(text: str) -> int:
    """A tool of a guard, decorated barely."""
    return len(text)


@guard.tool(name="double", repeatable=True)
async def twice(n: int) -> int:
    """A tool of a guard, decorated with arguments."""
    return 2 * n


class Shop:
    """Methods that are tools."""

    @tool
    def refund(self, order: str, amount: int) -> str:
        """A method."""
        return order * amount

    @tool(cost=1)
    async def ship(self, order: str) -> bool:
        """An async method."""
        return bool(order)


def check_sync_tools() -> None:
    """Calls type as those of the bare function do."""
    assert_type(search("x"), list[str])
    assert_type(search(query="x", limit=3), list[str])
    search(1)  # type: ignore[arg-type]  # query is a str
    search("x", page=2)  # type: ignore[call-arg]  # there is no page
    search()  # type: ignore[call-arg]  # query has no default
    assert_type(count("x"), int)
    count(1)  # type: ignore[arg-type]  # text is a str
    assert_type(pages("x"), Iterator[str])
    assert_type(conversation("x"), Generator[str, int, bool])
    assert_type(events("x"), AsyncIterator[int])
    assert_type(Shop().refund("a", 5), str)
    assert_type(Shop.refund(Shop(), "a", amount=5), str)
    Shop().refund("a")  # type: ignore[call-arg]  # amount is missing
    Shop().refund(5, 5)  # type: ignore[arg-type]  # order is a str


async def check_async_tools() -> None:
    """Async tools give what they are awaited for, and sync ones can be called off the event loop."""
    assert_type(await fetch("x"), bytes)
    assert_type(await fetch("x", retries=2), bytes)
    await fetch("x", 2)  # type: ignore[call-arg]  # retries is keyword-only
    assert_type(await twice(2), int)
    assert_type(await Shop().ship("a"), bool)
    assert_type(await search.acall("x", limit=2), list[str])
    assert_type(await Shop().refund.acall("a", 5), str)
    await search.acall(1)  # type: ignore[arg-type]  # query is a str


# --- @loop keeps the signature, and adds run -----------------------------------------------------


@loop
def polish(draft: Draft) -> Draft:
    """A loop, decorated barely."""
    return draft


@loop(max=5, until=lambda draft: draft.quality >= 90, guard=guard)
def improve(draft: Draft, tone: str = "dry") -> Draft:
    """A loop with a condition and another argument."""
    return Draft(draft.quality + len(tone))


@loop(max=3, budget=Budget(usd=1), on_limit="raise")
async def research(notes: list[str], *, feedback: str | None = None) -> list[str]:
    """An async loop that wants feedback."""
    return [*notes, feedback or ""]


@loop(max=3)
def tick() -> None:
    """A loop without a state."""


class Agent:
    """Methods that are loops."""

    @loop(max=3)
    def think(self, thought: str) -> str:
        """A method."""
        return thought

    @loop(max=3)
    async def act(self, step: int) -> int:
        """An async method."""
        return step + 1


def check_sync_loops() -> None:
    """A call types as before; run gives a LoopResult of the same type, with or without a run id."""
    assert_type(polish(Draft()), Draft)
    assert_type(improve(Draft(), tone="wry"), Draft)
    improve("draft")  # type: ignore[arg-type]  # a Draft is wanted
    result = improve.run(Draft())
    assert_type(result, LoopResult[Draft])
    assert_type(result.value, Draft)
    assert_type(result.history[0].value, Draft)
    assert_type(result.stop_reason, StopReason)
    assert_type(result.cost, Decimal | None)
    assert_type(improve.run(Draft(), tone="wry"), LoopResult[Draft])
    assert_type(improve.run(Draft(), run_id="order-42"), LoopResult[Draft])
    assert_type(improve.run(Draft(), "wry", run_id=None), LoopResult[Draft])
    improve.run("draft")  # type: ignore[call-overload]  # a Draft is wanted here too
    assert_type(tick.run(), LoopResult[None])
    assert_type(Agent().think("x"), str)
    assert_type(Agent().think.run("x"), LoopResult[str])
    Agent().think(1)  # type: ignore[arg-type]  # thought is a str


async def check_async_loops() -> None:
    """An async loop is awaited, and so is its run."""
    assert_type(await research([]), list[str])
    assert_type(await research.run(["x"]), LoopResult[list[str]])
    assert_type(await research.run(["x"], run_id="r1"), LoopResult[list[str]])
    assert_type(await Agent().act(1), int)
    assert_type(await Agent().act.run(1), LoopResult[int])
    running: Awaitable[LoopResult[list[str]]] = research.run([])
    await running


# --- where am I ----------------------------------------------------------------------------------


def check_current() -> None:
    """Outside a run and a call there is none."""
    run = current_run()
    if run is not None:
        assert_type(run.spent("usd"), Decimal)
        assert_type(run.remaining("usd"), Decimal | None)
        assert_type(run.feedback, str | None)
        assert_type(run.brief(), str)
    call = current_call()
    if call is not None:
        assert_type(call.name, str)
        assert_type(call.attempt, int)


def check_errors() -> None:
    """A stopped loop still has a value."""
    try:
        polish(Draft())
    except LoopStopped as stopped:
        assert_type(stopped.result.completed, bool)
    except ValueError as error:
        if (partial := result_of(error)) is not None:
            assert_type(partial.run_id, str)
