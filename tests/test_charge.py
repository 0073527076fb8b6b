"""charge(): what a call really cost, and whose account it goes to."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from loopguard import Budget, ConfigurationError, Guard, WrapTool, charge, current_run, loop, tool
from tests.conftest import Colour

TWO = Decimal(2)


class Boom(Exception):
    """What a tool raises in these tests."""


def books(run: Any, unit: str = "usd") -> tuple[Decimal, Decimal]:
    """(spent, reserved)."""
    return run.spent(unit), run.reserved(unit)


@pytest.mark.parametrize(
    "bad", [-5, math.nan, math.inf, -math.inf, Decimal("NaN"), Decimal("sNaN"), True, "1", object()], ids=str
)
def test_what_is_no_amount_is_refused_and_charges_nothing(colour: Colour, bad: Any) -> None:
    """C18: a wrong amount is a ValueError at the caller's line, and the right one beside it isn't booked either."""
    with Guard(Budget(usd=10, tokens=10)).scope() as run:

        @tool(cost={"usd": 1, "tokens": 1})
        @colour.make
        def work() -> None:
            with pytest.raises(ValueError, match="charge") as raised:
                charge(usd=2, tokens=bad)
            assert isinstance(raised.value, ConfigurationError)
            assert books(run) == (0, 1)

        colour.call(work)
        with pytest.raises(ValueError, match="charge"):
            charge(usd=bad)
        assert books(run) == books(run, "tokens") == (1, 0)


@pytest.mark.parametrize("unit", ["steps", "tool_calls"])
def test_steps_are_counted_and_never_charged(unit: str) -> None:
    """A tool can't report calls that the run counts anyway."""
    with Guard().scope() as run:
        with pytest.raises(ConfigurationError, match="counted by loopguard"):
            charge(**{unit: 1})
        with pytest.raises(ConfigurationError, match="counted by loopguard"):
            tool(cost={unit: 1})(print)
        assert run.spent(unit) == 0


@pytest.mark.parametrize(
    ("reported", "settled"),
    [
        ([], {"usd": 1, "credits": 7}),
        ([{"usd": 0.25}], {"usd": Decimal("0.25"), "credits": 7}),
        ([{"usd": 0}], {"usd": 0, "credits": 7}),
        ([{"usd": 0.1}, {"usd": 0.2, "credits": 1}, {"credits": 2}], {"usd": Decimal("0.3"), "credits": 3}),
        ([{"usd": 2, "tokens": 9}], {"usd": 2, "credits": 7, "tokens": 9}),
    ],
)
def test_each_unit_is_settled_at_what_was_reported_else_at_the_estimate(
    colour: Colour, reported: list[dict[str, Any]], settled: dict[str, Any]
) -> None:
    """Several reports add up; a unit that nobody reported costs its estimate."""

    @tool(cost={"usd": 1, "credits": 7})
    @colour.make
    def work() -> None:
        for report in reported:
            charge(**report)

    with Guard(Budget(usd=100, credits=100)).scope() as run:
        colour.call(work)
        assert {unit: run.spent(unit) for unit in settled} == settled
        assert all(run.reserved(unit) == 0 for unit in ("usd", "credits", "tokens"))


def test_a_call_that_raised_pays_what_it_had_reported(colour: Colour) -> None:
    """What was bought before the error is paid, what was only estimated is not."""

    @tool(cost={"usd": 1, "credits": 7})
    @colour.make
    def work() -> None:
        charge(usd=0.5)
        raise Boom

    with Guard(Budget(usd=100)).scope() as run:
        with pytest.raises(Boom):
            colour.call(work)
        assert books(run) == (Decimal("0.5"), 0)
        assert books(run, "credits") == (0, 0)


def test_a_report_is_reserved_as_soon_as_it_outgrows_the_estimate(colour: Colour) -> None:
    """While the call goes on, nobody else can spend what it has already used."""
    seen: list[tuple[Decimal, Decimal]] = []

    @tool(cost=1)
    @colour.make
    def work() -> None:
        for amount in (0.5, 0.5, 3):
            charge(usd=amount)
            seen.append(books(current_run()))

    with Guard(Budget(usd=100)).scope() as run:
        colour.call(work)
        assert seen == [(0, 1), (0, 1), (0, 4)]
        assert books(run) == (4, 0)


def test_a_charge_in_a_loop_body_is_the_runs() -> None:
    """Outside any tool there is no reservation to settle: the run and those above it have spent it."""

    @loop(max=3)
    def inner(n: int) -> int:
        charge(usd=0.1, tokens=5)
        return n + 1

    with Guard().scope() as run:
        result = inner.run(0)
        assert books(run) == (Decimal("0.3"), 0)
    assert result.cost == Decimal("0.3")
    assert [iteration.cost for iteration in result.history] == [Decimal("0.1")] * 3
    assert result.usage.tokens == 15


def test_a_charge_that_is_nowhere_does_nothing() -> None:
    """Without a tool and without a run there is nobody to charge; a wrong amount is still an error."""
    charge(usd=5)
    with pytest.raises(ConfigurationError):
        charge(usd=-5)


def test_a_tools_cost_is_its_own(colour: Colour) -> None:
    """What a tool's inner calls cost is theirs: its own estimate isn't touched by their reports."""

    @tool(cost=1)
    def inner() -> None:
        charge(usd=0.25)

    @tool(cost=2)
    @colour.make
    def outer() -> None:
        inner()
        with Guard().scope("below"):
            charge(usd=0.5)
        assert books(current_run()) == (Decimal("0.75"), 2)

    with Guard(Budget(usd=100)).scope() as run:
        colour.call(outer)
        assert books(run) == (Decimal("2.75"), 0)


def test_a_charge_in_a_hook_is_booked_once(colour: Colour) -> None:
    """Before the body the run pays, after it the call does, on top of its settlement."""

    def before(call: Any) -> None:
        charge(usd=0.01)

    def after(call: Any, result: Any) -> None:
        charge(usd=0.1)

    @tool(cost=2)
    @colour.make
    def work() -> None:
        charge(usd=1)

    with Guard(WrapTool(before=before, after=after), Budget(usd=100)).scope() as run:
        colour.call(work)
        assert books(run) == (Decimal("1.11"), 0)


def test_a_late_charge_is_recorded_in_full(colour: Colour) -> None:
    """What a thread reports after its call has ended is spent above the settlement, by every run on the chain."""
    over, charged = threading.Event(), threading.Event()

    @tool(cost=1)
    @colour.make
    def work() -> None:
        def later() -> None:
            over.wait(10)
            charge(usd=0.5)
            charged.set()

        threading.Thread(target=_in_context(later)).start()

    with Guard(Budget(usd=100)).scope("outer") as outer, Guard().scope("inner") as inner:
        colour.call(work)
        assert books(outer) == (1, 0)
        over.set()
        assert charged.wait(10)
        assert books(outer) == books(inner) == (Decimal("1.5"), 0)


def _in_context(fn: Callable[[], None]) -> Callable[[], None]:
    context = contextvars.copy_context()
    return lambda: context.run(fn)


def test_a_task_that_outlives_its_run_still_pays() -> None:
    """Money that is spent is spent: a charge after the run's end counts in it and above it."""

    async def main() -> tuple[Any, Any]:
        go = asyncio.Event()

        async def later() -> None:
            await go.wait()
            charge(usd=0.5)

        with Guard().scope("outer") as outer:
            with Guard().scope("inner") as inner:
                task = asyncio.create_task(later())
            go.set()
            await task
            return outer, inner

    outer, inner = asyncio.run(main())
    assert books(outer) == books(inner) == (Decimal("0.5"), 0)


def test_concurrent_reports_of_one_call_add_up() -> None:
    """Threads that share a call report into the same settlement, and none is lost."""

    @tool(cost=1)
    def work() -> None:
        threads = [
            threading.Thread(target=_in_context(lambda: [charge(usd=0.01) for _ in range(25)])) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with Guard(Budget(usd=100)).scope() as run:
        work()
        assert books(run) == (TWO, 0)
