"""The public API as type checkers see it. Checked by mypy and pyright, never executed.

A `type: ignore` here is a test: both checkers complain if the line is no error after all.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnusedFunction=false

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Generator, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, assert_type

from loopguard import (
    ApproveTool,
    Budget,
    Flow,
    Guard,
    LoopLimit,
    LoopResult,
    LoopStopped,
    MaxSteps,
    Run,
    StopReason,
    Usage,
    ask_in_terminal,
    await_input,
    configure,
    current_call,
    current_run,
    dispatch,
    journal,
    llm,
    loop,
    receive_dispatch,
    result_of,
    step,
    tool,
    what_if,
)
from loopguard.budgets import MemoryLedger, SqliteLedger, Standing, spend
from loopguard.metering import MeteredCall, model_call
from loopguard.typing import Codec, Ledger, ListedLedger


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


async def check_foreign_tools() -> None:
    """A body that comes with the call gives the call its type."""

    async def body(arguments: dict[str, object]) -> bytes:
        return bytes(len(arguments))

    lookup = guard.foreign("lookup", cost=0.01)
    assert_type(lookup.call({"q": "x"}, len), int)
    assert_type(await lookup.acall({"q": "x"}, body, "toolu_1"), bytes)
    lookup.call("x", len)  # type: ignore[arg-type]  # the arguments are a mapping


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


# --- what is stored ------------------------------------------------------------------------------


class Backwards:
    """A codec, by its shape."""

    name = "backwards"

    def encode(self, data: bytes) -> bytes:
        return data[::-1]

    def decode(self, data: bytes) -> bytes:
        return data[::-1]


class OneWay:
    """Nothing that it has encoded comes back."""

    name = "one way"

    def encode(self, data: bytes) -> bytes:
        return b""


def check_codecs() -> None:
    """Whatever has a name, encodes and decodes is one."""
    codec: Codec = Backwards()
    configure(codec=codec, redact_payloads=True)
    assert_type(journal.open("sqlite:///runs.db", codec=Backwards()).verify("r"), int | None)
    configure(codec=OneWay())  # type: ignore[arg-type]  # it has no decode


# --- flows ---------------------------------------------------------------------------------------


def check_flows(client: object) -> None:
    """Steps are functions, loops, tools and flows, and what the makers make."""
    steps: list[Any] = [
        polish,
        search,
        step(polish, name="again", max_retries=2, verify=bool),
        await_input("ok", "Ready?"),
    ]
    flow = Flow("f", steps, store="sqlite:///f.db", max_retries=1, delete_on_success=True, budget=Budget(usd=1))
    around = Flow("g", [flow, llm("{state}", client=client), dispatch("http://x"), dispatch(flow), Agent().act])
    assert_type(around.pending(), list[str])
    assert_type(flow.results("r"), dict[str, Any])
    assert_type(flow.name, str)
    flow.resume_with("r", {"any": "value"}, by="ann")
    flow.resume("r", budget=Budget(usd=2))
    receive_dispatch(flow, b"{}", {})
    Flow("f", 5)  # type: ignore[arg-type]  # a list of steps
    Flow("f", [5])  # type: ignore[list-item]  # a step is callable


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


def check_what_if() -> None:
    """What a policy would have said is data."""
    said = what_if(journal.open("sqlite:///runs.db").events("order-42"), guard)
    assert_type(said.calls, int)
    assert_type(said.saved, dict[str, Decimal])
    assert_type(str(said), str)
    if said.first is not None:
        assert_type(said.first.code, str)


# --- policies and adapters -------------------------------------------------------------------------


async def check_adapters() -> None:
    """What a policy file makes is a Guard; a model call is a context manager in either colour."""
    assert_type(Guard.from_toml("policy.toml"), Guard)
    assert_type(Guard(tools={"search_*": {"cost": 0.01}}).policy_hash, str | None)
    with model_call("m", {"messages": []}, max_tokens=10) as call:
        assert_type(call, MeteredCall)
    async with model_call("m", {"messages": []}, max_tokens=None, provider="openai") as call:
        call.settle(Usage(input_tokens=1, output_tokens=1), {"text": "x"})
    model_call("m", {})  # type: ignore[call-arg]  # max_tokens has to be thought of
