"""model_call: metering for adapters, which call models without the anthropic SDK."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from loopguard import (
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    LoopHalted,
    PriceBook,
    ToolCallRefused,
    Usage,
    current_run,
    loop,
)
from loopguard.metering import model_call
from loopguard.testing import capture
from loopguard.typing import ModelCalled, ModelReplayed

PRICES = {"m": {"input": 3, "output": 15}}
REQUEST = {"messages": [{"role": "user", "content": "hi"}]}
USED = Usage(input_tokens=1_000, output_tokens=100)
"""Costs $0.0045."""

Call = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Call:
    """One call: what happens inside is given."""

    def sync_call(inside: Callable[[Any], Any] = lambda made: made.settle(USED), **options: Any) -> Any:
        with model_call("m", REQUEST, **{"max_tokens": 100, "prices": PRICES, **options}) as made:
            inside(made)
        return made

    def async_call(inside: Callable[[Any], Any] = lambda made: made.settle(USED), **options: Any) -> Any:
        async def main() -> Any:
            async with model_call("m", REQUEST, **{"max_tokens": 100, "prices": PRICES, **options}) as made:
                await asyncio.sleep(0)
                inside(made)
            return made

        with asyncio.Runner() as runner:
            return runner.run(main(), context=contextvars.copy_context())

    return sync_call if request.param == "sync" else async_call


def test_a_call_is_reserved_and_settled_at_what_it_used(call: Call) -> None:
    """While it is under way its worst case is reserved; afterwards its usage is spent, and everybody is told."""
    reserved: list[Decimal] = []

    def inside(made: Any) -> None:
        run = current_run()
        assert run is not None
        reserved.append(run.reserved("usd"))
        made.settle(USED)

    with capture() as seen, Guard(Budget(usd=1)).scope() as run:
        call(inside)
        assert reserved[0] > Decimal("0.0015")  # the output alone
        assert run.reserved("usd") == 0
        assert run.spent("usd") == Decimal("0.0045")
        assert run.usage == Usage(tokens=1_100, input_tokens=1_000, output_tokens=100, model_calls=1)
    event = seen.events_of(ModelCalled)[0]
    assert (event.model, event.cost, event.partial) == ("m", Decimal("0.0045"), False)


def test_what_does_not_fit_is_not_sent(call: Call) -> None:
    """The refusal says which max_tokens would fit."""
    sent: list[Any] = []
    with Guard(Budget(usd=0.001)).scope() as run:
        with pytest.raises(BudgetExceeded, match="lower max_tokens from 100 to"):
            call(sent.append)
        assert (sent, run.refusals, run.spent("usd")) == ([], 1, 0)


@pytest.mark.parametrize("usage", [None, Usage(), Usage(input_tokens=5)])
def test_unknown_usage_costs_the_reservation(call: Call, usage: Usage | None) -> None:
    """Unknown is not zero."""
    with Guard(Budget(usd=1)).scope() as run:
        call(lambda made: made.settle(usage))
        assert run.spent("usd") > Decimal("0.0015")
        assert run.usage.output_tokens == 100


def test_a_call_that_breaks_off_costs_its_reservation_unless_it_is_released(call: Call) -> None:
    """The exception is the caller's own; what the API refused costs nothing."""

    def broken(made: Any) -> None:
        raise ConnectionError("gone")

    def refused(made: Any) -> None:
        made.release()
        broken(made)

    with Guard(Budget(usd=1)).scope() as run:
        with pytest.raises(ConnectionError):
            call(refused)
        assert run.spent("usd") == 0
        with pytest.raises(ConnectionError):
            call(broken)
        assert run.spent("usd") > 0
        assert run.reserved("usd") == 0


def test_an_unknown_price_is_refused_under_a_cap_in_usd(call: Call) -> None:
    """As for a metered client."""
    with Guard(Budget(usd=1)).scope(), pytest.raises(BudgetExceeded) as caught:
        call(prices={"other": PRICES["m"]})
    assert caught.value.code == "unknown_price"


def test_unbounded_output_is_an_error_only_under_a_budget_that_asks(call: Call) -> None:
    """Nobody can reserve what nobody knows."""
    for budget in (Budget(usd=1), Budget(tokens=10), Budget(output_tokens=10)):
        with Guard(budget).scope(), pytest.raises(ConfigurationError, match="give max_tokens"):
            call(max_tokens=None)
    with Guard(Budget(model_calls=1)).scope() as run:
        call(max_tokens=None)
        assert run.spent("tokens") == 1_100


@pytest.mark.parametrize("bad", [-1, 1.5, True, "1"])
def test_max_tokens_is_a_number(call: Call, bad: Any) -> None:
    """Anything else is told at once."""
    with pytest.raises(ConfigurationError, match=r"model_call\(max_tokens="):
        call(max_tokens=bad)


def test_outside_a_run_nothing_is_counted(call: Call) -> None:
    """It is an ordinary call there."""
    made = call(max_tokens=None)
    assert made.recorded is None
    call(lambda made: made.release())


def test_a_stopped_run_sends_nothing(call: Call) -> None:
    """The latch is looked at before each call, and run.check() raises it for adapters."""
    sent: list[Any] = []
    with Guard().scope() as run:
        run.check()
        run.stop("enough")
        with pytest.raises(ToolCallRefused, match="enough"):
            call(sent.append)
        with pytest.raises(ToolCallRefused, match="enough"):
            run.check()
    assert sent == []


def test_check_raises_the_halt() -> None:
    """A row of refusals that is too long halts the run, whoever swallowed them."""

    def swallow() -> None:
        with pytest.raises(BudgetExceeded), model_call("m", REQUEST, max_tokens=1, prices=PRICES):
            pass

    with Guard(Budget(model_calls=0), max_refusals=2).scope() as run:
        swallow()
        run.check()
        swallow()
        with pytest.raises(LoopHalted):
            run.check()


def test_a_guard_of_the_call_stands_on_the_run(call: Call) -> None:
    """As the guard of a tool does: once, however many calls name it."""
    guard = Guard(Budget(model_calls=2))
    with Guard().scope():
        call(guard=guard)
        call(guard=guard)
        with pytest.raises(BudgetExceeded):
            call(guard=guard)


def test_a_resumed_run_gets_the_recorded_response(call: Call, tmp_path: Path) -> None:
    """The model isn't asked again, and nothing is charged twice."""
    answers: list[Any] = []

    def inside(made: Any) -> None:
        if made.recorded is None:
            made.settle(USED, {"text": "yes"})
            answers.append("live")
        else:
            answers.append(made.recorded)

    @loop(max=2, store=f"sqlite:///{tmp_path}/runs.db", guard=Guard(Budget(usd=1)))
    def ask(n: int) -> int:
        call(inside)
        if len(answers) == 1:
            raise ConnectionError("killed")
        return n + 1

    with pytest.raises(ConnectionError):
        ask.run(0, run_id="a")
    with capture() as seen:
        result = ask.run(0, run_id="a")
    assert answers == ["live", {"text": "yes"}, "live"]
    assert result.cost == Decimal("0.009")
    assert len(seen.events_of(ModelReplayed)) == 1


# --- prices of other vendors -----------------------------------------------------------------------


def test_other_vendors_have_their_own_prices() -> None:
    """By genai-prices' id of the vendor, to the exact name; what has no price of its own costs as much as input."""
    book = PriceBook(provider="openai", stale_after=None)
    million = Usage(input_tokens=1_000_000, output_tokens=0)
    cached = Usage(input_tokens=1_000_000, output_tokens=0, cache_read_tokens=1_000_000)
    assert book.cost("gpt-4o", million) == Decimal("2.5")
    assert book.cost("gpt-4o", cached) == Decimal("1.25")
    assert book.cost("gpt-4o-2024-08-06", million) == Decimal("2.5")
    assert book.cost("gpt-4o-2024-05-13", cached) == 5
    assert book.cost("gpt-4o-ultra", million) is None
    assert PriceBook(provider="nobody", stale_after=None).cost("gpt-4o", million) is None
