"""Metering through the real SDK over HTTP: admitted, counted and settled, whatever way the call is made."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import gzip
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import beta_tool

from loopguard import (
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    LoopHalted,
    LoopStopped,
    MaxSteps,
    ToolCallRefused,
    Usage,
    configure,
    current_run,
)
from loopguard import _events as events
from loopguard._config import settings
from loopguard._pipeline import LOCK
from loopguard.metering import PriceBook, meter
from loopguard.metering._estimates import survey
from loopguard.testing import MessagesServer, Reply, capture
from tests.metering.conftest import BODY, PRICES, Way, beta, create, raw
from tests.metering.conftest import events as events_of

USAGE = {"input_tokens": 20, "cache_read_input_tokens": 5, "output_tokens": 12}
"""Of C26: 20 × 3 + 5 × 0.30 + 12 × 15 millionths of a dollar."""
COST = Decimal("0.0002415")
RESERVED = (survey(BODY).input_tokens * 3 + 100 * 15) * Decimal("0.000001")
GONE = "http://127.0.0.1:1"
CREATE, EVENTS, RAW = Way(create, False), Way(events_of, False), Way(raw, False)


def c26(body: dict[str, Any]) -> Reply:
    """The answer of C26, streamed with usage that counts from the start each time."""
    if not body.get("stream"):
        return Reply.text("hello", usage=USAGE)
    start, *rest = Reply.text("hello", usage={**USAGE, "output_tokens": 1}).as_events(body)
    *content, _, stop = rest
    deltas: list[dict[str, Any]] = [
        {"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"output_tokens": 7}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": USAGE},
    ]
    return Reply.events([start, *content, *deltas, stop])


def numbers(usage: Usage) -> tuple[int | None, ...]:
    """What C26 looks at."""
    fresh = None if usage.input_tokens is None else usage.input_tokens - (usage.cache_read_tokens or 0)
    return fresh, usage.cache_read_tokens, usage.output_tokens, usage.model_calls


# -- counted once, the same in every way -----------------------------------------------------------


def test_a_call_counts_once_and_the_same_in_every_way(way: Way) -> None:
    """C26: in 20, read 5, out 12, streamed or not, sync or async, read by the SDK or by hand."""
    with MessagesServer(c26) as server, capture() as seen, Guard(Budget(usd=1)).scope() as run:
        way.call(server.url)
    assert numbers(run.usage) == (20, 5, 12, 1)
    assert run.usage.tokens == 37
    assert run.spent() == COST
    assert run.reserved() == run.reserved("tokens") == run.reserved("model_calls") == 0
    assert len(server.ledger) == 1
    (event,) = seen.events_of(events.ModelCalled)
    assert (event.model, event.cost, event.charged["usd"], event.partial) == ("m", COST, COST, False)
    assert numbers(event.usage) == (20, 5, 12, 1)


def test_every_field_is_counted_and_the_unknown_is_not_zero(basic: Way) -> None:
    """Thinking, searches and both kinds of cache writes; what the API didn't say stays None."""
    usage = {
        "input_tokens": 10,
        "output_tokens": 136,
        "output_tokens_details": {"thinking_tokens": 31},
        "cache_creation_input_tokens": 7,
        "cache_creation": {"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 3},
        "server_tool_use": {"web_search_requests": 2, "web_fetch_requests": 1},
    }
    with MessagesServer([Reply.text("x", usage=usage), "y"]) as server:
        with Guard().scope() as run:
            way_usage = (basic.call(server.url), run.usage)[1]
        assert way_usage == Usage(153, 17, 136, 0, 4, 3, 31, 2, 1, 1)
        with Guard().scope() as run:
            basic.call(server.url)
    assert (run.usage.thinking_tokens, run.usage.web_searches, run.usage.web_fetches) == (None, None, None)


def test_each_run_reports_its_own(basic: Way) -> None:
    """C22: one shared client; runs of 100 then 50 tokens, then three at once of 10, 20, 30."""

    def script(body: dict[str, Any]) -> Reply:
        return Reply.text("x", usage={"input_tokens": int(body["messages"][0]["content"]), "output_tokens": 0})

    def ask(client: Any, tokens: int) -> Any:
        return basic.fn(client, **{**BODY, "messages": [{"role": "user", "content": str(tokens)}]})

    with MessagesServer(script) as server:
        options: dict[str, Any] = {"base_url": server.url, "api_key": "test"}
        if basic.is_async:

            async def one(client: Any, tokens: int) -> int | None:
                async with Guard().scope() as run:
                    await ask(client, tokens)
                return run.usage.tokens

            async def main() -> list[int | None]:
                async with meter(anthropic.AsyncAnthropic(**options), prices=PRICES) as client:
                    first = [await one(client, 100), await one(client, 50)]
                    return [*first, *await asyncio.gather(*(one(client, n) for n in (10, 20, 30)))]

            got = asyncio.run(main())
        else:

            def sync_one(tokens: int) -> int | None:
                with Guard().scope() as run:
                    ask(client, tokens)
                return run.usage.tokens

            with meter(anthropic.Anthropic(**options), prices=PRICES) as client, ThreadPoolExecutor(3) as pool:
                got = [sync_one(100), sync_one(50), *pool.map(sync_one, (10, 20, 30))]
    assert got == [100, 50, 10, 20, 30]


def test_children_count_for_their_parents() -> None:
    """A call is booked in its run and in those above it."""
    with MessagesServer(c26) as server, Guard().scope() as outer:
        for _ in range(2):
            with Guard().scope() as inner:
                CREATE.call(server.url)
            assert inner.spent() == COST
    assert outer.spent() == 2 * COST
    assert outer.usage.model_calls == 2


# -- admission ---------------------------------------------------------------------------------------


def test_a_call_that_does_not_fit_is_not_sent(way: Way) -> None:
    """The refusal reaches the caller as it is, unretried, and says what would fit."""
    with (
        MessagesServer() as server,
        Guard(Budget(usd=Decimal("0.001"))).scope() as run,
        pytest.raises(BudgetExceeded) as caught,
    ):
        way.call(server.url, client={"max_retries": 2})
    assert server.ledger == []
    assert (caught.value.code, caught.value.tool, caught.value.run_id) == ("budget", "m", run.id)
    fits = (Decimal("0.001") / Decimal("0.000001") - survey(BODY).input_tokens * 3) // 15
    assert f"lower max_tokens from 100 to {fits}," in str(caught.value)
    assert (run.spent(), run.reserved(), run.refusals) == (0, 0, 1)


def test_the_number_that_would_fit_fits(basic: Way) -> None:
    """With max_tokens lowered as the refusal says, the call goes through; with one more it doesn't."""
    budget = Budget(usd=Decimal("0.001"), tokens=120)
    with (
        MessagesServer([Reply.text("x", usage={"input_tokens": 1, "output_tokens": 1})]) as server,
        Guard(budget).scope(),
    ):
        with pytest.raises(BudgetExceeded, match=r"to (\d+), or") as caught:
            basic.call(server.url)
        fits = int(str(caught.value).split(" to ")[1].split(",")[0])
        with pytest.raises(BudgetExceeded):
            basic.call(server.url, max_tokens=fits + 1)
        basic.call(server.url, max_tokens=fits)


@pytest.mark.parametrize(
    ("budget", "advice"),
    [
        (Budget(usd=0), "not even its input fits"),
        (Budget(input_tokens=10), "not even its input fits"),
        (Budget(output_tokens=99), "to 99,"),
        (Budget(model_calls=0), "answer with what you have"),
        (Budget(thinking_tokens=0), "answer with what you have"),
    ],
)
def test_every_unit_can_be_capped(budget: Budget, advice: str) -> None:
    """The units of a Usage are units of a budget; 0 refuses the first call."""
    with MessagesServer() as server, Guard(budget).scope(), pytest.raises(BudgetExceeded, match=advice):
        CREATE.call(server.url)
    assert server.ledger == []


def test_the_outermost_budget_that_says_no_is_named(basic: Way) -> None:
    """All budgets of the chain are asked, and nothing stays reserved where one refuses."""
    with (
        MessagesServer() as server,
        Guard(Budget(tokens=50)).scope("outer") as outer,
        Guard(Budget(tokens=10)).scope("inner") as inner,
        pytest.raises(BudgetExceeded) as caught,
    ):
        basic.call(server.url)
    assert caught.value.run_id == outer.id
    assert outer.reserved("tokens") == inner.reserved("tokens") == 0


def test_an_unknown_price_is_refused_under_a_cap_in_usd(basic: Way) -> None:
    """C24: "m.1" isn't m; under a USD cap it is refused before the request, and a `allow` lets it pass."""
    with MessagesServer(c26) as server:
        with Guard(Budget(usd=1)).scope() as run, pytest.raises(BudgetExceeded, match=r"m\.1 is unknown") as caught:
            basic.call(server.url, model="m.1")
        assert (caught.value.code, len(server.ledger), run.usage) == ("unknown_price", 0, Usage())
        with Guard(Budget(usd=1, on_unknown_price="allow")).scope() as run:
            basic.call(server.url, model="m.1")
        assert (run.cost, run.usage.tokens) == (None, 37)


def test_an_unknown_price_without_a_cap_in_usd_is_unknown(basic: Way) -> None:
    """C24: it runs, its cost is None and not 0, its tokens are metered; a later call doesn't make the cost known."""
    with (
        MessagesServer(c26) as server,
        capture() as seen,
        Guard(Budget(tokens=1000)).scope() as outer,
        Guard().scope() as run,
    ):
        basic.call(server.url, model="m.1")
        basic.call(server.url)
    assert run.cost is None
    assert outer.cost is None
    assert run.usage.tokens == 74
    assert [event.cost for event in seen.events_of(events.ModelCalled)] == [None, COST]


def test_a_model_for_nothing_runs_though_the_money_is_gone(basic: Way) -> None:
    """C24: what costs 0 asks nothing of a USD budget."""
    prices = {**PRICES, "free": {"input": 0, "output": 0}}
    with MessagesServer(c26) as server, Guard(Budget(usd=0)).scope() as run:
        basic.call(server.url, model="free", prices=prices)
    assert (run.cost, run.usage.tokens) == (0, 37)


def test_observing_lets_pass_and_tells() -> None:
    """A guard that observes records what it would have refused."""
    with MessagesServer(c26) as server, capture() as seen, Guard(Budget(usd=0), mode="observe").scope() as run:
        CREATE.call(server.url)
    (refused,) = seen.events_of(events.ToolRefused)
    assert (refused.observed, refused.code, run.refusals) == (True, "budget", 0)
    assert run.spent() == COST


def test_a_stopped_run_calls_no_model(basic: Way) -> None:
    """Latches stand before models as they stand before tools."""
    with MessagesServer() as server, Guard().scope() as run:
        run.stop("enough")
        with pytest.raises(ToolCallRefused, match="enough") as caught:
            basic.call(server.url)
    assert (caught.value.code, server.ledger) == ("stopped", [])


def test_a_run_that_has_ended_calls_no_model() -> None:
    """A task that outlives its run can't go on spending in its name."""
    with MessagesServer() as server:
        with Guard().scope():
            late = contextvars.copy_context()
        with pytest.raises(ToolCallRefused, match="too late"):
            late.run(CREATE.call, server.url)
    assert server.ledger == []


@pytest.mark.parametrize("fresh", [False, True], ids=["one thread", "a new thread each time"])
def test_a_body_that_swallows_refusals_for_ever_is_halted(fresh: bool) -> None:
    """While the budget is gone, `while True: try … except Exception` ends, whatever it runs in."""

    def swallow() -> BaseException | None:
        try:
            client.messages.create(**{**BODY, "max_tokens": 10_000})
        except Exception:  # what such bodies do
            return None
        except LoopHalted as halted:
            return halted
        raise AssertionError("it was sent")

    def attempt() -> BaseException | None:
        if not fresh:
            return swallow()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run.bind(swallow)).result()

    with (
        MessagesServer(c26) as server,
        Guard(Budget(usd=Decimal("0.01"))).scope() as run,
        meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES) as client,
    ):
        client.messages.create(**BODY)
        count = next(number for number in range(1000) if attempt() is not None)
    assert count == (500 if fresh else 5)


def test_model_calls_are_the_turns_in_which_refusals_are_counted() -> None:
    """A model that is asked again and again while every tool call is refused: halted after five turns."""
    policy = Guard(MaxSteps(0))

    @policy.tool
    def act() -> None: ...

    def turn() -> None:
        client.messages.create(**BODY)
        with ThreadPoolExecutor(1) as pool, contextlib.suppress(ToolCallRefused):  # a new thread for each call
            pool.submit(run.bind(act)).result()

    with (
        MessagesServer(c26) as server,
        meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES) as client,
        contextlib.suppress(LoopStopped),
        policy.scope() as run,
    ):
        for _ in range(20):
            turn()
    assert len(server.ledger) == 5


def test_a_cheaper_call_ends_the_row() -> None:
    """A program that tries the dear call first each time, and then the cheap one, isn't halted."""
    with (
        MessagesServer(c26) as server,
        meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES) as c,
        Guard(Budget(usd=Decimal("0.01"))).scope() as run,
    ):
        for _ in range(8):
            with pytest.raises(BudgetExceeded):
                c.messages.create(**{**BODY, "max_tokens": 10_000})
            c.messages.create(**BODY)
    assert run.refusals == run.usage.model_calls == 8


def test_a_person_may_extend_the_budget(basic: Way) -> None:
    """`extend=` is asked for model calls, too, and the call goes on when it is granted."""
    asked: list[Any] = []

    def approve(question: Any) -> bool:
        asked.append(question.arguments["for_tool"])
        return True

    budget = Budget(usd=Decimal("0.001"), extend=approve, extend_by=Decimal("0.01"))
    with MessagesServer(c26) as server, Guard(budget).scope() as run:
        basic.call(server.url)
    assert asked == ["m"]
    assert run.spent() == COST


def test_a_warning_is_given_once() -> None:
    """`warn_at` counts what models cost."""
    with MessagesServer(c26) as server, capture() as seen, Guard(Budget(model_calls=4, warn_at=0.5)).scope():
        for _ in range(4):
            CREATE.call(server.url)
    (warned,) = seen.events_of(events.BudgetWarned)
    assert (warned.unit, warned.spent) == ("model_calls", 2)


# -- outside ---------------------------------------------------------------------------------------


def test_outside_any_run_nothing_is_counted(way: Way) -> None:
    """A metered client works everywhere."""
    with MessagesServer(c26) as server:
        way.call(server.url, model="whoever")
    assert len(server.ledger) == 1
    assert current_run() is None


def test_other_requests_pass() -> None:
    """Counting tokens is free, and refused by nobody."""
    with (
        MessagesServer(count_tokens=7) as server,
        Guard(Budget(usd=0, model_calls=0)).scope() as run,
        meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES) as client,
    ):
        assert client.messages.count_tokens(model="m", messages=BODY["messages"]).input_tokens == 7
    assert run.usage == Usage()


def test_a_copy_stays_metered_and_nothing_is_metered_twice() -> None:
    """with_options(), copy(), with_middleware() and a second meter() count each call once."""
    with (
        MessagesServer(c26) as server,
        meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES) as c,
    ):
        assert type(c) is anthropic.Anthropic
        copies = (c.with_options(timeout=9), c.copy(max_retries=1), c.with_middleware(lambda request, go: go(request)))
        for client in (*copies, meter(c, prices=PRICES)):
            with Guard().scope() as run:
                client.messages.create(**BODY)
            assert run.spent() == COST


@pytest.mark.parametrize("client", [None, object(), anthropic])
def test_what_is_no_client_is_refused(client: Any) -> None:
    """And so is an estimator that isn't one."""
    with pytest.raises(ConfigurationError):
        meter(client)
    with anthropic.Anthropic(api_key="x") as real, pytest.raises(ConfigurationError):
        meter(real, estimate="guess")  # type: ignore[call-overload, unused-ignore]  # what is being tested


def test_prices_may_be_configured_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """`configure(prices=…)` is what meter takes where it is given none."""
    monkeypatch.setattr(settings, "prices", None)
    configure(prices=PriceBook({"m": {"input": 1, "output": 1}}))
    with MessagesServer(c26) as server, Guard().scope() as run:
        CREATE.call(server.url, prices=None)
    assert run.spent() == Decimal("0.0000325")


# -- estimates ---------------------------------------------------------------------------------------


def test_the_api_may_be_asked_for_the_estimate(basic: Way) -> None:
    """`estimate="count_tokens"` reserves what the API counts, and counts nothing for asking."""
    held: list[Decimal] = []

    def script(body: dict[str, Any]) -> Reply:
        held.append(run.reserved("input_tokens"))
        return c26(body)

    with MessagesServer(script, count_tokens=1234) as server, Guard().scope() as run:
        basic.call(server.url, estimate="count_tokens", system="be brief", tools=[])
    counting, sending = server.requests
    assert counting["path"] == "/v1/messages/count_tokens"
    assert counting["body"] == {"model": "m", "messages": BODY["messages"], "system": "be brief", "tools": []}
    assert sending["body"] == {**sending["body"], **BODY}
    assert held == [1234]
    assert numbers(run.usage) == (20, 5, 12, 1)


def test_counting_leaves_nothing_open(way: Way) -> None:
    """Whatever way the call itself is made, the count is read, and the connection given back."""
    held: list[Decimal] = []

    def script(body: dict[str, Any]) -> Reply:
        held.append(run.reserved("input_tokens"))
        return c26(body)

    with MessagesServer(script, count_tokens=1234) as server, Guard().scope() as run:
        way.call(server.url, estimate="count_tokens")
    assert held == [1234]
    assert run.spent() == COST


def test_no_lock_is_held_while_prices_are_asked() -> None:
    """A price source may wait, or meter a call itself."""
    held: list[bool] = []

    class Source:
        def tariff(self, model: str, *, batch: bool = False, fast: bool = False) -> Any:
            thread = threading.Thread(target=lambda: held.append(not LOCK.acquire(blocking=False) or LOCK.release()))
            thread.start()
            thread.join()
            return PriceBook(PRICES).tariff(model)

    with MessagesServer(c26) as server, Guard(Budget(usd=Decimal("0.002"))).scope():
        CREATE.call(server.url, prices=Source())
        with pytest.raises(BudgetExceeded):
            CREATE.call(server.url, prices=Source(), max_tokens=1000)
    assert held
    assert not any(held)


def test_where_the_api_does_not_count_the_bound_stands_in(basic: Way) -> None:
    """An estimate that can't be had changes nothing about the call."""
    held: list[Decimal] = []

    def script(body: dict[str, Any]) -> Reply:
        held.append(run.reserved("input_tokens"))
        return c26(body)

    def broken(body: dict[str, Any]) -> int:
        raise ValueError("no count today")

    with MessagesServer(script, count_tokens=broken) as server, Guard().scope() as run:
        basic.call(server.url, estimate="count_tokens")
    assert held == [survey(BODY).input_tokens]


def test_your_own_function_may_estimate(basic: Way) -> None:
    """It is given the body; for an async client it may be async."""

    async def later(body: Any) -> int:
        return len(body["messages"]) * 1000

    with (
        MessagesServer() as server,
        Guard(Budget(input_tokens=999)).scope(),
        pytest.raises(BudgetExceeded, match="may cost 1000 input tokens"),
    ):
        basic.call(server.url, estimate=later if basic.is_async else lambda body: 1000)
    assert server.ledger == []


@pytest.mark.parametrize("estimate", [-1, 1.5, None, True, "7"])
def test_an_estimate_is_a_number_of_tokens(estimate: Any) -> None:
    """Anything else is a mistake in the program, and nothing is sent."""
    with (
        MessagesServer() as server,
        Guard().scope() as run,
        pytest.raises(ConfigurationError, match="number of tokens"),
    ):
        CREATE.call(server.url, estimate=lambda body: estimate)
    assert (server.ledger, run.reserved("input_tokens")) == ([], 0)


def test_what_the_call_may_turn_into_is_reserved() -> None:
    """Writes into the cache, searches, and a fallback to a dearer model cost more than the plain call."""
    held: list[Decimal] = []

    def script(body: dict[str, Any]) -> Reply:
        held.append(run.reserved())
        return Reply.text("x", usage=USAGE)

    prompt = survey(BODY).input_tokens
    prices = {**PRICES, "dear": {"input": 30, "output": 150}}
    marked = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    search = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]
    with MessagesServer(script) as server, Guard().scope() as run:
        CREATE.call(server.url, messages=[{"role": "user", "content": marked}])
        CREATE.call(server.url, tools=search)
        Way(beta, False).call(server.url, fallbacks=[{"model": "dear"}], prices=prices)
    long = survey({"messages": [{"role": "user", "content": marked}]}).input_tokens
    searching = survey({**BODY, "tools": search}).input_tokens
    assert held == [
        (long * 6 + 1500) * Decimal("0.000001"),
        (searching * 3 + 1500) * Decimal("0.000001") + Decimal("0.03"),
        (prompt * 30 + 15_000) * Decimal("0.000001"),
    ]


def test_a_fallback_of_unknown_price_is_refused() -> None:
    """Whichever model answers has to have a price."""
    with MessagesServer() as server, Guard(Budget(usd=1)).scope(), pytest.raises(BudgetExceeded, match="unknown"):
        Way(beta, False).call(server.url, fallbacks=[{"model": "nobody"}])


def test_a_fallback_is_charged_at_its_own_price() -> None:
    """The total of a fallback that answered is that of its own model."""
    tokens = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "input_tokens": 10, "output_tokens": 10}
    usage = {
        **USAGE,
        "iterations": [{"type": "message", **tokens}, {"type": "fallback_message", "model": "dear", **tokens}],
    }
    prices = {**PRICES, "dear": {"input": 30, "output": 150, "cache_read": 3}}
    with MessagesServer([Reply.text("x", usage=usage)]) as server, Guard().scope() as run:
        Way(beta, False).call(server.url, fallbacks=[{"model": "dear"}], prices=prices)
    assert run.spent() == 10 * COST


def test_a_mode_of_unknown_price_costs_the_reservation() -> None:
    """The API may run a call faster than was asked for: the cost is unknown, and the budget isn't spared."""
    with (
        MessagesServer([Reply.text("x", usage={**USAGE, "speed": "fast"})]) as server,
        Guard(Budget(usd=1)).scope() as run,
    ):
        CREATE.call(server.url)
    assert (run.cost, run.spent(), run.usage.tokens) == (None, RESERVED, 37)


# -- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 413, 429, 500, 529])
def test_an_http_error_costs_nothing(status: int, basic: Way) -> None:
    """What the API refused isn't billed, and the SDK's own error reaches the caller."""
    with (
        MessagesServer([Reply.error(status)]) as server,
        capture() as seen,
        Guard(Budget(usd=1)).scope() as run,
        pytest.raises(anthropic.APIStatusError),
    ):
        basic.call(server.url)
    assert (run.spent(), run.reserved(), run.spent("model_calls"), run.spent("tokens")) == (0, 0, 0, 0)
    (event,) = seen.events_of(events.ModelCalled)
    assert (event.cost, event.usage, event.partial) == (0, Usage(), False)


def test_retries_are_attempts_of_their_own(basic: Way) -> None:
    """A rate limit and an overload, each retried by the SDK: one response, counted once."""
    script = [Reply.error(429, retry_after=0.001), Reply.error(529, headers={"retry-after-ms": "1"}), None]
    replies = iter(script)
    with MessagesServer(lambda body: next(replies) or c26(body)) as server, Guard(Budget(usd=1)).scope() as run:
        basic.call(server.url, client={"max_retries": 2})
    assert len(server.ledger) == 3
    assert numbers(run.usage) == (20, 5, 12, 1)
    assert run.spent() == COST


@pytest.mark.parametrize("url", ["http://name.invalid", GONE, "ftp://127.0.0.1"])
def test_a_request_that_never_left_costs_nothing(url: str, basic: Way) -> None:
    """A dead name server, nobody at the port, a protocol that doesn't exist."""
    with Guard(Budget(usd=1)).scope() as run, pytest.raises(anthropic.APIConnectionError):
        basic.call(url)
    assert (run.spent(), run.reserved(), run.spent("tokens")) == (0, 0, 0)


def test_a_connection_that_breaks_after_sending_costs_the_reservation(basic: Way) -> None:
    """Nobody knows what became of it."""
    with (
        MessagesServer([Reply.disconnect()]) as server,
        capture() as seen,
        Guard(Budget(usd=1)).scope() as run,
        pytest.raises(anthropic.APIConnectionError),
    ):
        basic.call(server.url)
    assert (run.spent(), run.reserved()) == (RESERVED, 0)
    assert run.spent("tokens") == survey(BODY).input_tokens + 100
    (event,) = seen.events_of(events.ModelCalled)
    assert (event.partial, event.cost, event.usage) == (True, RESERVED, Usage(model_calls=1))


def test_a_timeout_and_a_retry_are_two_calls(basic: Way) -> None:
    """The server handled two requests: two reservations are settled, the caller sees one response."""
    slow = threading.Event()
    replies = iter([Reply.text("late", delay=slow), None])
    with MessagesServer(lambda body: next(replies) or c26(body)) as server, Guard(Budget(usd=1)).scope() as run:
        basic.call(server.url, client={"max_retries": 1, "timeout": 0.3})
        assert len(server.ledger) == 2
        assert (run.spent(), run.reserved()) == (RESERVED + COST, 0)
        assert run.usage.model_calls == 2
        slow.set()


@pytest.mark.parametrize("reply", [Reply.raw(b"<html>"), Reply.raw({"type": "message"}), Reply.raw(b"")])
def test_a_response_that_tells_no_usage_costs_the_reservation(reply: Reply) -> None:
    """Unknown isn't nothing."""
    with MessagesServer([reply]) as server, Guard(Budget(usd=1)).scope() as run:
        RAW.call(server.url)
    assert (run.spent(), run.reserved()) == (RESERVED, 0)


def test_a_cancelled_call_costs_the_reservation() -> None:
    """The request was under way: the API may have answered it."""

    async def main() -> Any:
        async with (
            meter(anthropic.AsyncAnthropic(base_url=server.url, api_key="x"), prices=PRICES) as client,
            Guard(Budget(usd=1)).scope() as run,
        ):
            task = asyncio.create_task(client.messages.create(**BODY))
            while not server.ledger:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return run.spent(), run.reserved()

    with MessagesServer([Reply.text("late", delay=threading.Event())]) as server:
        assert asyncio.run(main()) == (RESERVED, 0)


def test_a_call_made_while_another_failure_is_handled_stands_alone() -> None:
    """Python links every error to the one being handled: that an earlier call never left says nothing of this one."""

    def interrupt(request: Any, call_next: Any) -> Any:
        call_next(request)
        raise KeyboardInterrupt

    with MessagesServer(c26) as server, Guard(Budget(usd=1)).scope() as run:
        client = meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES)
        try:
            CREATE.call(GONE)
        except anthropic.APIConnectionError:
            with client, pytest.raises(KeyboardInterrupt):
                client.with_middleware(interrupt).messages.create(**BODY)
    assert (run.spent(), run.reserved()) == (RESERVED, 0)


def test_errors_before_sending_cost_nothing() -> None:
    """A body that can't be encoded, a middleware that refuses: the request never left."""

    def refuse(request: Any, call_next: Any) -> Any:
        raise KeyError("mine")

    with (
        MessagesServer() as server,
        Guard(Budget(usd=1)).scope() as run,
        meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES) as client,
        pytest.raises(KeyError, match="mine"),
    ):
        client.with_middleware(refuse).messages.create(**BODY)
    assert (run.spent(), run.reserved(), server.ledger) == (0, 0, [])


def test_a_response_from_another_middleware_costs_nothing() -> None:
    """What was answered from a cache never left."""
    with (
        MessagesServer() as server,
        Guard(Budget(usd=1)).scope() as run,
        meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES) as client,
    ):
        cached = client.with_middleware(lambda request, call_next: "cached")
        assert cached.messages.create(**BODY) == "cached"  # type: ignore[comparison-overlap, unused-ignore]  # a stand-in
    assert (run.spent(), run.reserved(), server.ledger) == (0, 0, [])


# -- tool runner, batches, other platforms -----------------------------------------------------------


def test_every_turn_of_the_tool_runner_is_metered() -> None:
    """Two turns, two calls; the refusal of a third reaches the caller unchanged."""

    @beta_tool
    def search(query: str) -> str:
        """Search.

        Args:
            query: what for
        """
        return "nothing"

    script = [Reply.tool_use("search", {"query": "x"}, usage=USAGE)] * 3
    with (
        MessagesServer(script) as server,
        Guard(Budget(model_calls=2)).scope() as run,
        meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES) as client,
        pytest.raises(BudgetExceeded, match="model calls"),
    ):
        client.beta.messages.tool_runner(tools=[search], **BODY).until_done()
    assert (run.usage.model_calls, run.spent(), len(server.ledger)) == (2, 2 * COST, 2)


def batch_line(number: int, kind: str = "succeeded") -> str:
    """A result of a batch."""
    usage = {"input_tokens": 1000, "output_tokens": 1000, "service_tier": "batch"}
    message = {**Reply.text("x", usage=usage).as_message({"model": "m"}), "id": f"msg_{number}"}
    result = {"type": kind, "message": message} if kind == "succeeded" else {"type": kind}
    return json.dumps({"custom_id": str(number), "result": result})


@pytest.mark.parametrize("end", ["\n", ""])
def test_results_of_a_batch_are_charged_once(end: str) -> None:
    """C31: half price each; those that failed cost nothing, and reading them again costs nothing more."""
    lines = [batch_line(1), batch_line(2, "errored"), batch_line(3)]

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/results"):
            return httpx2.Response(200, stream=Chunks("\n".join(lines).encode() + end.encode()))
        url = "https://api.anthropic.com/v1/messages/batches/b/results"
        batch = {"id": "b", "processing_status": "ended", "results_url": url}
        return httpx2.Response(200, json=batch)

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http, Guard(Budget(usd=1)).scope() as run:
        client = meter(anthropic.Anthropic(api_key="x", http_client=http), prices=PRICES)
        for _ in range(2):
            assert len(list(client.messages.batches.results("b"))) == 3
    assert run.spent() == 2 * Decimal("0.009")
    assert run.usage.model_calls == 2


class Chunks(httpx2.SyncByteStream):
    """A body in pieces of seven bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __iter__(self) -> Any:
        for start in range(0, len(self.content), 7):
            yield self.content[start : start + 7]


def platforms() -> list[Any]:
    """A client of every other platform, made from an HTTP client."""

    def bedrock(http: Any) -> Any:
        return anthropic.AnthropicBedrock(api_key="x", aws_region="us-east-1", http_client=http)

    def mantle(http: Any) -> Any:
        return anthropic.AnthropicBedrockMantle(api_key="x", aws_region="us-east-1", http_client=http)

    def vertex(http: Any) -> Any:
        return anthropic.AnthropicVertex(region="global", project_id="p", access_token="x", http_client=http)

    def foundry(http: Any) -> Any:
        return anthropic.AnthropicFoundry(api_key="x", resource="r", http_client=http)

    def aws(http: Any) -> Any:
        return anthropic.AnthropicAWS(api_key="x", aws_region="us-east-1", workspace_id="w", http_client=http)

    return [
        pytest.param(bedrock, "us.anthropic.claude-sonnet-4-5-20250929-v1:0", "0.0033", id="bedrock"),
        pytest.param(mantle, "anthropic.claude-sonnet-4-5-20250929-v1:0", "0.0033", id="mantle"),
        pytest.param(vertex, "claude-sonnet-4@20250514", "0.003", id="vertex"),
        pytest.param(foundry, "claude-opus-5", "0.005", id="foundry"),
        pytest.param(aws, "claude-opus-5", "0.005", id="aws"),
    ]


@pytest.mark.parametrize(("make", "model", "usd"), platforms())
def test_every_platform_is_metered(make: Any, model: str, usd: str) -> None:
    """Bedrock, Vertex, Foundry and AWS: the same class, the price of that platform; refused before it is sent."""
    sent: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request)
        usage = {"input_tokens": 1000, "output_tokens": 0}
        return httpx2.Response(200, json=Reply.text("x", usage=usage).as_message({"model": "claude-sonnet-4-5"}))

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http:
        plain = make(http)
        client = meter(plain, prices=PriceBook(stale_after=None))
        assert type(client) is type(plain)
        with Guard(Budget(usd=1)).scope() as run:
            client.messages.create(**{**BODY, "model": model})
        assert run.spent() == Decimal(usd)
        with Guard(Budget(usd=0)).scope(), pytest.raises(BudgetExceeded):
            client.with_options(max_retries=1).messages.create(**{**BODY, "model": model})
    assert len(sent) == 1


# -- streams that end early --------------------------------------------------------------------------


def long_stream(gate: threading.Event, size: int = 16_000) -> Reply:
    """A stream that stops in the middle until the gate opens: about 4,000 tokens of English before it."""
    message = Reply.text("word " * (size // 5), usage={"input_tokens": 20, "output_tokens": 9_000})
    start, ping, block, delta, *rest = message.as_events({"model": "m"})
    delta["delta"]["text"] = "word " * (size // 5)
    return Reply.events([start, ping, block, delta, gate, *rest])


def leave_by_break(stream: Any) -> None:
    """Stop reading."""
    with stream:
        for event in stream:
            if event.type == "content_block_delta":
                break


def leave_by_close(stream: Any) -> None:
    """Close it."""
    while next(stream).type != "content_block_delta":
        pass
    stream.close()


def leave_to_the_collector(stream: Any) -> None:
    """Forget it."""
    for event in stream:
        if event.type == "content_block_delta":
            break
    del stream
    gc.collect()


def leave_by_error(stream: Any) -> None:
    """Fail while reading."""
    with contextlib.suppress(ZeroDivisionError), stream:
        for event in stream:
            1 // (event.type != "content_block_delta")


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_close, leave_to_the_collector, leave_by_error])
def test_leaving_a_stream_early_is_not_nearly_free(leave: Any) -> None:
    """After 4,000 tokens the estimate of what was received is paid, marked partial; the reservation is given back."""
    gate = threading.Event()
    with (
        MessagesServer([long_stream(gate)]) as server,
        capture() as seen,
        Guard(Budget(usd=1)).scope() as run,
        meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES) as client,
    ):
        leave(client.messages.create(stream=True, **{**BODY, "max_tokens": 20_000}))
        (event,) = seen.events_of(events.ModelCalled)
        gate.set()
    assert event.partial
    assert event.usage.output_tokens == 8_000  # two bytes a token
    assert run.spent() == Decimal("0.00006") + 8_000 * Decimal("0.000015")
    assert run.reserved() == 0


def test_an_estimate_is_never_more_than_was_asked_for() -> None:
    """max_tokens bounds what a stream can have been worth: an estimate can't overdraw a budget."""
    gate = threading.Event()
    with (
        MessagesServer([long_stream(gate)]) as server,
        Guard(Budget(usd=1)).scope() as run,
        meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES) as client,
    ):
        leave_by_break(client.messages.create(stream=True, **{**BODY, "max_tokens": 5_000}))
        gate.set()
    assert run.usage.output_tokens == 5_000


def test_a_stream_nobody_read_costs_the_reservation() -> None:
    """It was sent, and told nothing."""
    gate = threading.Event()
    with (
        MessagesServer([long_stream(gate)]) as server,
        Guard(Budget(usd=1)).scope() as run,
        meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES) as client,
    ):
        client.messages.create(stream=True, **BODY).close()
        gate.set()
    assert (run.spent(), run.reserved()) == (RESERVED, 0)


def test_an_async_stream_left_to_the_collector_is_settled() -> None:
    """The loop closes what nobody reads any more; at the latest when it ends."""

    async def main() -> Any:
        client = meter(anthropic.AsyncAnthropic(base_url=server.url, api_key="x"), prices=PRICES)
        async with client, Guard(Budget(usd=1)).scope() as run:
            async for event in await client.messages.create(stream=True, **{**BODY, "max_tokens": 20_000}):
                if event.type == "content_block_delta":
                    break
            gc.collect()
        return run

    gate = threading.Event()
    with MessagesServer([long_stream(gate)]) as server:
        run = asyncio.run(main())
        gate.set()
    assert (run.usage.output_tokens, run.reserved()) == (8_000, 0)


def test_a_cancelled_stream_is_settled_once() -> None:
    """The task that reads it is cancelled while it waits for more."""

    async def read(client: Any, got: asyncio.Event) -> None:
        async for event in await client.messages.create(stream=True, **{**BODY, "max_tokens": 20_000}):
            if event.type == "content_block_delta":
                got.set()

    async def main() -> Any:
        async with (
            meter(anthropic.AsyncAnthropic(base_url=server.url, api_key="x"), prices=PRICES) as client,
            Guard(Budget(usd=1)).scope() as run,
        ):
            got = asyncio.Event()
            task = asyncio.create_task(read(client, got))
            await got.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return run.usage.output_tokens, run.reserved()

    gate = threading.Event()
    with MessagesServer([long_stream(gate)]) as server, capture() as seen:
        assert asyncio.run(main()) == (8_000, 0)
        gate.set()
    assert len(seen.events_of(events.ModelCalled)) == 1


def test_a_final_usage_stands_though_the_stream_is_cut_before_its_end() -> None:
    """Cut after the last message_delta: what the API reported, not an estimate."""
    *kept, _ = Reply.text("a" * 1000, usage=USAGE).as_events({"model": "m"})
    with (
        MessagesServer([Reply.events(kept, disconnect_after=len(kept))]) as server,
        Guard(Budget(usd=1)).scope() as run,
        pytest.raises(httpx2.RemoteProtocolError),
    ):
        EVENTS.call(server.url)
    assert run.spent() == COST


def test_an_error_event_before_any_usage_costs_nothing(streaming: Way) -> None:
    """An overload may come as an event of a stream: it was refused like with a 529."""
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    with (
        MessagesServer([Reply.events([error])]) as server,
        Guard(Budget(usd=1)).scope() as run,
        contextlib.suppress(anthropic.APIStatusError),
    ):  # who reads lines by hand sees a line
        streaming.call(server.url)
    assert (run.spent(), run.reserved()) == (0, 0)


def test_a_malformed_event_is_the_callers_and_the_rest_is_settled() -> None:
    """The SDK's own error comes through; what was received before is paid."""
    start, *_ = Reply.text("x", usage=USAGE).as_events({"model": "m"})
    with (
        MessagesServer([Reply.events([start, "event: content_block_delta\ndata: {\n\n"])]) as server,
        Guard(Budget(usd=1)).scope() as run,
        pytest.raises(json.JSONDecodeError),
    ):
        EVENTS.call(server.url)
    assert (run.usage.output_tokens, run.reserved()) == (1, 0)


def test_compressed_responses_are_read() -> None:
    """The caller gets the same bytes, and the usage is counted."""
    text = "".join(
        f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
        for event in Reply.text("hello", usage=USAGE).as_events({"model": "m"})
    )

    def answer(request: httpx2.Request) -> httpx2.Response:
        headers = {"content-type": "text/event-stream", "content-encoding": "gzip"}
        return httpx2.Response(200, headers=headers, stream=Chunks(gzip.compress(text.encode())))

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http, Guard().scope() as run:
        client = meter(anthropic.Anthropic(api_key="x", http_client=http), prices=PRICES)
        with client.messages.stream(**BODY) as stream:
            assert stream.get_final_text() == "hello"
        with client.messages.with_streaming_response.create(stream=True, **BODY) as response:
            assert b"".join(response.iter_bytes()).decode() == text
    assert run.spent() == 2 * COST


def test_a_halt_reaches_the_caller() -> None:
    """LoopHalted is no Exception: the SDK neither wraps nor retries it."""
    with MessagesServer() as server, contextlib.suppress(LoopStopped), Guard(Budget(usd=0), max_refusals=1).scope():
        with pytest.raises(BudgetExceeded):
            CREATE.call(server.url)
        with pytest.raises(LoopHalted):
            CREATE.call(server.url, client={"max_retries": 2})
