"""Budgets of a period: one allowance for many runs, kept in a ledger."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loopguard import (
    Approval,
    ApprovalDenied,
    ApproveTool,
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    LedgerError,
    LoopGuardWarning,
    LoopLimit,
    MaxSteps,
    Retry,
    ToolCall,
    ToolCallRefused,
    ToolTimeout,
    charge,
    current_run,
    loop,
    tool,
)
from loopguard.budgets import MemoryLedger, SqliteLedger, spend
from loopguard.budgets import _keeper as keepers
from loopguard.budgets._open import keeper_of
from loopguard.testing import Clock, Desk, capture
from loopguard.typing import Account, Balance, BudgetOverdrawn, BudgetWarned, Entry, Lease, ToolRefused
from tests.conftest import Colour

MIDDAY = 1_795_953_600.0  # 2026-11-29T12:00Z
USD = 10**18


class Spy(MemoryLedger):
    """A ledger that keeps what it was asked, and can be away."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        super().__init__(clock or Clock(MIDDAY))
        self.asked: list[str] = []
        self.error: Exception | None = None
        self.renewed = threading.Event()

    def _heard(self, what: str) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error

    def reserve(self, id: str, entries: Any, lease: Lease) -> Any:
        self._heard("reserve")
        return super().reserve(id, entries, lease)

    def settle(self, id: str, amounts: Any) -> bool:
        self._heard("settle")
        return super().settle(id, amounts)

    def release(self, id: str) -> None:
        self._heard("release")
        super().release(id)

    def renew(self, id: str, lease: Lease) -> bool:
        self._heard("renew")
        held = super().renew(id, lease)
        self.renewed.set()
        return held

    def there(self) -> dict[str, Any]:
        """{unit: (spent, reserved, overdraft)} of the one account with them."""
        return {
            unit: tuple(each / USD for each in (balance.spent, balance.reserved, balance.overdraft))
            for _, unit, balance in self.accounts()
        }


class AsyncSpy:
    """The same with methods to await."""

    def __init__(self) -> None:
        self.spy = Spy()
        self.closed = 0

    async def reserve(self, id: str, entries: Any, lease: Lease) -> Any:
        await asyncio.sleep(0)
        return self.spy.reserve(id, entries, lease)

    async def settle(self, id: str, amounts: Any) -> bool:
        await asyncio.sleep(0)
        return self.spy.settle(id, amounts)

    async def release(self, id: str) -> None:
        await asyncio.sleep(0)
        self.spy.release(id)

    async def renew(self, id: str, lease: Lease) -> bool:
        await asyncio.sleep(0)
        return self.spy.renew(id, lease)

    async def balance(self, account: Account, unit: str) -> Balance:
        return self.spy.balance(account, unit)

    async def accounts(self, key: str | None = None) -> Any:
        return self.spy.accounts(key)

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def ledger() -> Spy:
    """A ledger of its own."""
    return Spy()


@pytest.fixture(autouse=True)
def _delivered() -> Iterator[None]:
    """Nothing of one test is delivered in another."""
    yield
    keepers.flush_all()


def daily(ledger: Any, usd: float = 1, **options: Any) -> Budget:
    return Budget(usd=usd, per="day", key="team-a", ledger=ledger, name="team", **options)


def delivered(ledger: Any) -> None:
    """What could not be delivered in place is."""
    keeper_of(ledger).flush(5)


def test_runs_share_the_allowance_of_their_key(colour: Colour, ledger: Spy) -> None:
    """What one run has spent the next one doesn't have; another key has its own."""
    buy = tool(cost=0.4)(colour.make(lambda n: n))
    guard = Guard(daily(ledger))
    for n in range(2):
        with guard.scope("a"):
            assert colour.call(buy, n) == n
    with guard.scope("b") as run:
        with pytest.raises(BudgetExceeded) as refused:
            colour.call(buy, 3)
        assert (run.steps, run.spent(), run.reserved()) == (0, 0, 0)
    assert refused.value.code == "budget"
    assert (refused.value.limit, refused.value.value, refused.value.source) == (1, Decimal("0.8"), "b")
    assert str(refused.value).startswith(
        "<lambda> may cost $0.4, but only $0.2 is left of the budget 'team' of $1 per day for 'team-a' (2026-11-29) "
        "($0.8 spent). It was not run"
    )
    with Guard(Budget(usd=1, per="day", key="team-b", ledger=ledger, name="team")).scope("c"):
        assert colour.call(buy, 4) == 4
    assert [(account.key, balance.spent) for account, _, balance in ledger.accounts()] == [
        ("team-a", 8 * USD // 10),
        ("team-b", 4 * USD // 10),
    ]


def test_a_call_is_settled_at_what_it_did_cost(colour: Colour, ledger: Spy) -> None:
    """Reported, raised, free and counted: as for the budget of a run."""

    def body(reported: float | None, fails: bool) -> None:
        if reported is not None:
            charge(reported)
        if fails:
            raise ValueError("no")

    paid = tool(cost=0.5, name="paid")(colour.make(body))
    with Guard(daily(ledger, 10, tool_calls=100)).scope("a") as run:
        for reported, fails in ((None, False), (0.2, False), (0.7, False), (0.1, True), (None, True)):
            try:
                colour.call(paid, reported, fails)
            except ValueError:
                pass
        assert run.spent() == Decimal("1.5")
    assert ledger.there() == {"usd": (1.5, 0, 0.2), "tool_calls": (5, 0, 0)}


def test_a_free_call_asks_no_ledger(ledger: Spy) -> None:
    """What it reports nevertheless is booked."""
    free = tool(name="free")(lambda: None)
    costly = tool(name="costly")(lambda: charge(0.3))
    with Guard(daily(ledger)).scope("a"):
        free()
        assert ledger.asked == []
        costly()
        assert ledger.there() == {"usd": (0.3, 0, 0)}
        costly()
        assert ledger.there() == {"usd": (0.6, 0, 0)}, "the second one reserves what the first had cost"
        assert ledger.asked[-2:] == ["reserve", "settle"]


def test_limits_in_memory_decide_first(ledger: Spy) -> None:
    """What they refuse no ledger hears of; what a ledger refuses uses nothing of theirs."""
    buy = tool(cost=0.6, name="buy")(lambda n: n)
    with Guard(MaxSteps(2), Budget(usd=2), daily(ledger)).scope("a") as run:
        buy(1)
        with pytest.raises(BudgetExceeded, match="per day"):
            buy(2)
        assert (run.steps, run.spent(), run.reserved()) == (1, Decimal("0.6"), 0)
        tool(name="free")(lambda: None)()
        asked = len(ledger.asked)
        with pytest.raises(Exception, match="2 tool calls"):
            buy(3)
        assert len(ledger.asked) == asked


def test_the_ledger_is_asked_before_a_person_and_renewed_meanwhile(ledger: Spy) -> None:
    """Nobody is asked about what can't be paid; while somebody thinks, the money stays reserved."""
    desk = Desk()
    buy = tool(cost=0.6, approve=True, name="buy")(lambda n: n)
    with Guard(ApproveTool(desk), daily(ledger, lease=0.05)).scope("a") as run:
        thread = threading.Thread(target=run.bind(buy), args=(1,))
        thread.start()
        (call,) = desk.wait()
        ledger.renewed.clear()
        assert ledger.renewed.wait(5)
        assert ledger.there() == {"usd": (0, 0.6, 0)}
        with pytest.raises(BudgetExceeded, match=r"\$0\.6 reserved by calls in flight"):
            buy(2)
        assert len(desk.calls) == 1
        desk.answer(call.id, True)
        thread.join(5)
    assert ledger.there() == {"usd": (0.6, 0, 0)}


def test_what_is_not_approved_is_given_back(colour: Colour, ledger: Spy) -> None:
    """At once, and so is what an approver's failure leaves."""
    buy = tool(cost=0.6, approve=True, name="buy")(colour.make(lambda n: n))
    with Guard(ApproveTool(lambda call: (False, "no")), daily(ledger)).scope("a"), pytest.raises(ApprovalDenied):
        colour.call(buy, 1)
    assert ledger.there() == {"usd": (0, 0, 0)}


def test_an_edited_call_is_reserved_anew(colour: Colour, ledger: Spy) -> None:
    """At the cost of its new arguments, where they fit."""
    buy = tool(cost=lambda call: call.arguments["usd"], approve=True, name="buy")(colour.make(lambda usd: usd))
    for edited, fits in ((0.9, True), (0.2, False)):
        with Guard(ApproveTool(lambda call: Approval.edit({"usd": edited})), daily(ledger)).scope("a"):  # noqa: B023
            if fits:
                assert colour.call(buy, 0.5) == edited
            else:
                with pytest.raises(BudgetExceeded, match=r"may cost \$0\.2, but only \$0\.1"):
                    colour.call(buy, 0.1)
        assert ledger.there() == {"usd": (0.9, 0, 0)}


def test_each_attempt_reserves_and_settles(colour: Colour, ledger: Spy) -> None:
    """Failed attempts pay what they reported; the call counts once; an attempt that doesn't fit is refused."""
    tries: list[int] = []

    def body() -> str:
        tries.append(1)
        charge(0.3)
        if len(tries) < 3:
            raise OSError("again")
        return "done"

    work = tool(cost=0.4, idempotent=True, name="work")(colour.make(body))
    with Guard(Retry(5, wait=0), daily(ledger, 1.0, tool_calls=9)).scope("a"):
        assert colour.call(work) == "done"
        assert ledger.there() == {"usd": (0.9, 0, 0), "tool_calls": (1, 0, 0)}
        tries.clear()
        with pytest.raises(BudgetExceeded):
            colour.call(work)
    with Guard(Retry(5, wait=0), daily(Spy(), 0.7)).scope("b") as run:
        tries.clear()
        with pytest.raises(BudgetExceeded):
            colour.call(work)
        assert (len(tries), run.reserved(), run.spent()) == (2, 0, Decimal("0.6"))


def test_a_cancelled_call_pays_its_estimate_soon(ledger: Spy) -> None:
    """Nothing can be waited for then: it is delivered behind its back, and before anything more is asked."""

    @tool(cost=0.6)
    async def hang() -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(hang())
        while not ledger.there().get("usd"):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(BudgetExceeded, match=r"\(\$0\.6 spent\)"):
            await hang()

    with Guard(daily(ledger)).scope("a"):
        asyncio.run(main())
    assert ledger.there() == {"usd": (0.6, 0, 0)}


def test_a_call_cancelled_before_it_ran_gives_back_what_it_held() -> None:
    """While somebody is asked."""
    ledger = AsyncSpy()
    desk = Desk()

    @tool(cost=0.6, approve=True)
    async def buy() -> None:
        """Never runs."""

    async def main() -> None:
        task = asyncio.create_task(buy())
        await asyncio.to_thread(desk.wait)
        assert ledger.spy.there() == {"usd": (0, 0.6, 0)}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Guard(ApproveTool(desk), daily(ledger)).scope("a"):
        asyncio.run(main())
    delivered(ledger)
    assert ledger.spy.there() == {"usd": (0, 0, 0)}


def test_a_timed_out_call_pays_its_estimate_and_what_it_reports_later(ledger: Spy) -> None:
    """The late report of the thread that goes on goes into the same account."""
    go, done = threading.Event(), threading.Event()

    @tool(cost=0.2, timeout=0.05)
    def slow() -> None:
        go.wait(5)
        charge(0.3)
        done.set()

    with Guard(daily(ledger)).scope("a"):
        with pytest.raises(ToolTimeout):
            slow()
        assert ledger.there() == {"usd": (0.2, 0, 0)}
        go.set()
        assert done.wait(5)
        delivered(ledger)
        assert ledger.there() == {"usd": (0.5, 0, 0)}


def test_a_generator_that_is_left_settles(ledger: Spy) -> None:
    """Closed or dropped, it pays like a call that returned."""

    @tool(cost=0.2)
    def items() -> Iterator[int]:
        yield 1
        yield 2

    with Guard(daily(ledger), LoopLimit(0)).scope("a"):
        for left in (items(), items()):
            assert next(left) == 1
            left.close() if left is not None else None
        dropped = items()
        next(dropped)
        del dropped
        delivered(ledger)
        assert ledger.there() == {"usd": (0.6, 0, 0)}


def test_what_a_loop_body_charges_goes_to_the_ledger(ledger: Spy) -> None:
    """Outside any tool, and once for an account that stands on the chain twice."""
    guard = Guard(daily(ledger))

    @loop(max=1, guard=guard)
    def body(n: int) -> int:
        charge(0.3)
        return n

    with guard.scope("outer"):
        body(0)
    delivered(ledger)
    assert ledger.there() == {"usd": (0.3, 0, 0)}


def test_an_account_that_stands_on_a_chain_twice_is_asked_once(ledger: Spy) -> None:
    """Under the tightest of its caps."""
    buy = tool(cost=0.4, name="buy")(lambda n: n)
    with Guard(daily(ledger, 5)).scope("outer"), Guard(daily(ledger, 0.5), daily(ledger, 3)).scope("inner"):
        buy(1)
        with pytest.raises(BudgetExceeded, match=r"of \$0\.5 per day"):
            buy(2)
    assert ledger.there() == {"usd": (0.4, 0, 0)}


def test_one_reservation_covers_all_accounts_of_a_ledger(ledger: Spy) -> None:
    """An hour, a day and a month, of a team and of a user, in one step."""
    buy = tool(cost=0.4, name="buy")(lambda n: n)
    budgets = [
        Budget(usd=5, per="month", key="team-a", ledger=ledger),
        Budget(usd=3, per="day", key="team-a", ledger=ledger),
        Budget(usd=0.5, per="hour", key="user-1", ledger=ledger),
        Budget(usd=9, per="total", ledger=ledger),
    ]
    with Guard(*budgets).scope("a"):
        buy(1)
        with pytest.raises(BudgetExceeded, match=r"of \$0\.5 per hour for 'user-1' \(2026-11-29T12\)"):
            buy(2)
    assert ledger.asked[-3:] == ["reserve", "settle", "reserve"]
    assert {account.window: balance for account, _, balance in ledger.accounts()} == {
        window: Balance(4 * USD // 10, 0, 0) for window in ("2026-11", "2026-11-29", "2026-11-29T12", "total")
    }


def test_a_new_day_has_a_new_allowance(ledger: Spy) -> None:
    """A call that spans midnight is settled in the day that it was reserved in."""
    clock: Any = ledger._clock
    started, go = threading.Event(), threading.Event()

    @tool(cost=0.6)
    def slow() -> None:
        started.set()
        go.wait(5)

    buy = tool(cost=0.7, name="buy")(lambda n: n)
    with Guard(daily(ledger, lease=1e6)).scope("a") as run:
        thread = threading.Thread(target=run.bind(slow))
        thread.start()
        assert started.wait(5)
        with pytest.raises(BudgetExceeded):
            buy(1)
        clock.advance(13 * 3600)
        buy(2)
        assert run.remaining() == Decimal("0.3")
        go.set()
        thread.join(5)
    assert [(account.window, balance) for account, _, balance in ledger.accounts()] == [
        ("2026-11-29", Balance(6 * USD // 10, 0, 0)),
        ("2026-11-30", Balance(7 * USD // 10, 0, 0)),
    ]


def test_the_day_is_that_of_the_zone() -> None:
    """Half past eleven at night in London is tomorrow in Berlin."""
    ledger = Spy(Clock(MIDDAY + 11.5 * 3600))
    with Guard(Budget(usd=1, per="day", tz="Europe/Berlin", ledger=ledger)).scope("a"):
        tool(cost=0.1)(lambda: None)()
    assert [account.window for account, *_ in ledger.accounts()] == ["2026-11-30 Europe/Berlin"]


def test_a_late_settlement_is_an_overdraft_and_an_event(ledger: Spy) -> None:
    """The lease has run out, somebody else has taken the money, and then the call ends."""
    clock: Any = ledger._clock

    @tool(cost=0.8)
    def slow() -> None:
        clock.advance(61)
        tool(cost=0.9, name="other")(lambda: None)()

    with capture() as seen, Guard(daily(ledger)).scope("a"):
        slow()
    assert ledger.there() == {"usd": (1.7, 0, 0.8)}
    (event,) = seen.events_of(BudgetOverdrawn)
    assert (event.budget, event.key, event.window, event.amount, event.late) == (
        "team",
        "team-a",
        "2026-11-29",
        Decimal("0.8"),
        True,
    )


@pytest.mark.parametrize(("on_expiry", "spent"), [(None, 0), ("release", 0), ("charge", 0.8)])
def test_what_becomes_of_a_crashed_tool_call_can_be_chosen(on_expiry: Any, spent: float, ledger: Spy) -> None:
    """By default its reservation is released."""
    clock: Any = ledger._clock
    seen: list[Any] = []

    @tool(cost=0.8)
    def slow() -> None:
        clock.advance(61)
        seen.append(ledger.there())

    with Guard(daily(ledger, on_expiry=on_expiry)).scope("a"):
        slow()
    assert seen == [{"usd": (spent, 0, 0)}]


def test_what_is_left_is_said_to_whoever_asks(ledger: Spy) -> None:
    """`remaining`, `brief` and the warning know what the ledger last told, in later runs, too."""
    buy = tool(cost=0.3, name="buy")(lambda n: n)
    guard = Guard(daily(ledger), Budget(usd=5))
    with capture() as seen:
        with guard.scope("a") as run:
            assert (run.remaining(), run.brief()) == (1, "Used so far: $0.00 of $1.00 per day.")
            buy(1)
            assert run.remaining() == Decimal("0.7")
        with guard.scope("b") as run:
            assert run.brief() == "Used so far: $0.30 of $1.00 per day."
            buy(2)
            buy(3)
            assert (run.spent(), run.remaining()) == (Decimal("0.6"), Decimal("0.1"))
            assert run.brief() == "Used so far: $0.90 of $1.00 per day."
            assert run.nearly_done()
    assert [(event.budget, event.spent, event.limit) for event in seen.events_of(BudgetWarned)] == [
        ("team", Decimal("0.9"), Decimal(1))
    ]


def test_observing_refuses_nothing(ledger: Spy) -> None:
    """What would have been refused is recorded, and booked."""
    buy = tool(cost=0.7, name="buy")(lambda n: n)
    with capture() as seen, Guard(daily(ledger), mode="observe").scope("a"):
        buy(1)
        buy(2)
        ledger.error = LedgerError("away")
        with pytest.warns(LoopGuardWarning, match="can't be asked"):
            buy(3)
        ledger.error = None
    delivered(ledger)
    refused = seen.events_of(ToolRefused)
    assert [(event.code, event.observed) for event in refused] == [("budget", True)] * 2
    assert ledger.there() == {"usd": (2.1, 0, 0)}


def test_a_refusal_says_in_the_trace_where_the_budget_stands(ledger: Spy, exporter: InMemorySpanExporter) -> None:
    """Like that of a run's budget."""
    buy = tool(cost=0.6, name="buy")(lambda n: n)
    with Guard(daily(ledger)).scope("a"):
        buy(1)
        with pytest.raises(BudgetExceeded):
            buy(2)
    (span,) = [s for s in exporter.get_finished_spans() if "loopguard.budget.name" in (s.attributes or {})]
    assert {name: value for name, value in (span.attributes or {}).items() if ".budget." in name} == {
        "loopguard.budget.name": "team",
        "loopguard.budget.unit": "usd",
        "loopguard.budget.limit": 1.0,
        "loopguard.budget.spent": 0.6,
        "loopguard.budget.remaining": 0.4,
    }


# -- several ledgers -----------------------------------------------------------------------------


def test_a_refusal_by_the_last_ledger_leaves_nothing_in_the_others(colour: Colour, tmp_path: Path) -> None:
    """The run's budget in memory, the day's in a file, the month's in another: root first, compensated."""
    day, month = SqliteLedger(str(tmp_path / "day.db")), Spy(time.time)
    buy = tool(cost=0.4, name="buy")(colour.make(lambda n: n))
    outer = Guard(Budget(usd=5, per="day", key="team-a", ledger=day))
    with outer.scope("outer") as run, Guard(Budget(usd=9), daily(month)).scope("inner") as inner:
        for n in range(2):
            colour.call(buy, n)
        for n in range(2, 4):
            with pytest.raises(BudgetExceeded, match="'team'"):
                colour.call(buy, n)
        assert (run.reserved(), inner.reserved(), inner.spent()) == (0, 0, Decimal("0.8"))
    ((_, _, balance),) = day.accounts()
    assert balance == Balance(8 * USD // 10, 0, 0)
    assert month.there() == {"usd": (0.8, 0, 0)}


def test_the_outermost_ledger_is_named(ledger: Spy) -> None:
    """Of two that refuse."""
    inner = Spy()
    buy = tool(cost=2, name="buy")(lambda n: n)
    outer = Guard(daily(ledger)).scope("outer")
    with outer, Guard(daily(inner)).scope("inner"), pytest.raises(BudgetExceeded) as refused:
        buy(1)
    assert refused.value.source == "outer"
    assert inner.asked == []


# -- ledgers that fail ---------------------------------------------------------------------------


def test_a_ledger_that_can_not_be_asked_refuses(colour: Colour, ledger: Spy) -> None:
    """It says why, without the password; nothing stays reserved anywhere."""
    first = Spy()
    ledger.error = LedgerError("redis://team:hunter22@10.0.0.1:6379 refused the connection")
    buy = tool(cost=0.4, name="buy")(colour.make(lambda n: n))
    with Guard(Budget(usd=5, per="month", ledger=first), daily(ledger)).scope("a") as run:
        with pytest.raises(BudgetExceeded) as refused:
            colour.call(buy, 1)
        assert (run.reserved(), run.steps) == (0, 0)
    assert "buy was not run: what is left of the budget 'team' of $1 per day" in str(refused.value)
    assert "10.0.0.1:6379 refused the connection" in str(refused.value)
    assert "hunter22" not in str(refused.value)
    assert (refused.value.code, refused.value.value) == ("budget", None)
    assert first.there() == {"usd": (0, 0, 0)}
    ledger.error = None


def test_a_bug_in_a_ledger_is_no_refusal(ledger: Spy) -> None:
    """Only LedgerError says that it can't be asked; nothing stays reserved either way."""
    ledger.error = ZeroDivisionError("a bug")
    with Guard(daily(ledger)).scope("a") as run:
        with pytest.raises(ZeroDivisionError):
            tool(cost=0.4)(lambda: None)()
        assert (run.reserved(), run.steps) == (0, 0)
    ledger.error = None


def test_a_settlement_that_fails_is_delivered_later(
    colour: Colour, ledger: Spy, caplog: pytest.LogCaptureFixture
) -> None:
    """The call's result isn't touched; the money stays reserved until the ledger knows."""

    def body() -> str:
        ledger.error = LedgerError("away")
        return "done"

    with caplog.at_level(logging.WARNING, "loopguard"), Guard(daily(ledger)).scope("a"):
        assert colour.call(tool(cost=0.4, name="buy")(colour.make(body))) == "done"
    assert "didn't take it, and is asked again: LedgerError: away" in caplog.text
    assert ledger.there() == {"usd": (0, 0.4, 0)}
    ledger.error = None
    delivered(ledger)
    assert ledger.there() == {"usd": (0.4, 0, 0)}


def test_a_local_allowance_is_bounded_and_told_later(ledger: Spy) -> None:
    """Each process may spend so much for each key and window; then it is refused; then the ledger hears of it."""
    budget = daily(ledger, 2, on_ledger_error="allow_local", local_allowance=0.5)
    buy = tool(cost=0.2, name="buy")(lambda n: n)
    ledger.error = LedgerError("away")
    with Guard(budget, LoopLimit(0)).scope("a") as run:
        with pytest.warns(LoopGuardWarning, match="can't be asked .LedgerError: away.: this process goes on"):
            buy(1)
        buy(2)
        with pytest.raises(BudgetExceeded, match=r"the \$0\.5 that is allowed meanwhile are used up"):
            buy(3)
        ledger.error = None
        delivered(ledger)
        assert ledger.there() == {"usd": (0.4, 0, 0)}
        buy(4)
        assert ledger.there() == {"usd": (0.6, 0, 0)}
        ledger.error = LedgerError("away again")
        with pytest.warns(LoopGuardWarning):
            buy(5)
        buy(6)
        ledger.error = None
        assert run.spent() == 1
    delivered(ledger)
    assert ledger.there() == {"usd": (1, 0, 0)}


def test_what_was_allowed_locally_above_the_cap_is_an_overdraft(ledger: Spy) -> None:
    """It was spent, so it is booked."""
    budget = daily(ledger, on_ledger_error="allow_local", local_allowance={"usd": 0.5})
    buy = tool(cost=0.4, name="buy")(lambda n: n)
    with capture() as seen, Guard(budget).scope("a"):
        buy(1)
        buy(2)
        ledger.error = LedgerError("away")
        with pytest.warns(LoopGuardWarning):
            buy(3)
        ledger.error = None
        delivered(ledger)
    assert ledger.there() == {"usd": (1.2, 0, 0.4)}
    assert [(event.amount, event.late) for event in seen.events_of(BudgetOverdrawn)] == [(Decimal("0.4"), False)]


def test_a_local_call_that_is_not_approved_gives_the_allowance_back(ledger: Spy) -> None:
    """As a reservation would be."""
    budget = daily(ledger, on_ledger_error="allow_local", local_allowance=0.5)
    buy = tool(cost=0.4, name="buy", approve=True)(lambda n: n)
    ledger.error = LedgerError("away")
    answers = iter([False, False, True])
    with Guard(budget, ApproveTool(lambda call: next(answers))).scope("a"):
        with pytest.warns(LoopGuardWarning), pytest.raises(ApprovalDenied):
            buy(1)
        with pytest.raises(ApprovalDenied):
            buy(2)
        buy(3)
    ledger.error = None
    delivered(ledger)
    assert ledger.there() == {"usd": (0.4, 0, 0)}


# -- async ledgers -------------------------------------------------------------------------------


def test_an_async_ledger_serves_async_tools() -> None:
    """Its leases are renewed, and what can't be waited for is delivered, from an event loop of the keeper's own."""
    ledger = AsyncSpy()
    budget = daily(ledger, lease=0.05)

    @tool(cost=0.3)
    async def slow() -> None:
        ledger.spy.renewed.clear()
        await asyncio.to_thread(ledger.spy.renewed.wait, 5)

    async def main() -> None:
        with Guard(budget).scope("a"):
            await slow()
            assert ledger.spy.there() == {"usd": (0.3, 0, 0)}
            assert ledger.spy.renewed.is_set()
            charge(0.2)

    asyncio.run(main())
    delivered(ledger)
    assert ledger.spy.there() == {"usd": (0.5, 0, 0)}
    assert [(row.budget, row.spent) for row in spend(ledger, key="team-a")] == [("team", Decimal("0.5"))]
    assert ledger.closed == 1


@pytest.mark.parametrize("make", [lambda: lambda: None, lambda: _one_item], ids=["sync", "generator"])
def test_an_async_ledger_and_a_sync_tool_are_an_error(make: Any) -> None:
    """Not a deadlock: it is told at the first call, and names both."""
    said = r"the ledger .*AsyncSpy.* is async, but the tool .* is sync"
    with Guard(daily(AsyncSpy())).scope("a"), pytest.raises(ConfigurationError, match=said):
        list(tool(cost=0.3)(make())() or ())


def _one_item() -> Iterator[int]:
    yield 1


# -- what is named -------------------------------------------------------------------------------


def test_a_ledger_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOOPGUARD_LEDGER; there is no default file."""
    monkeypatch.delenv("LOOPGUARD_LEDGER", raising=False)
    with pytest.raises(ConfigurationError, match="give ledger=, or set LOOPGUARD_LEDGER"):
        Budget(usd=1, per="day")
    monkeypatch.setenv("LOOPGUARD_LEDGER", f"sqlite:///{tmp_path}/spend.db")
    with Guard(Budget(usd=1, per="total")).scope("a"):
        tool(cost=0.5)(lambda: None)()
    assert (tmp_path / "spend.db").stat().st_mode & 0o777 == 0o600
    ((budget, key, window, unit, *amounts),) = [
        (row.budget, row.key, row.window, row.unit, row.spent, row.reserved, row.overdraft) for row in spend()
    ]
    assert (budget, key, window, unit, amounts) == ("budget", "", "total", "usd", [Decimal("0.5"), 0, 0])


def test_budgets_that_name_one_file_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However its path is written; `memory:` is one for the process."""
    monkeypatch.chdir(tmp_path)
    one, other = (
        Budget(usd=1, per="day", ledger="sqlite:///s.db"),
        Budget(usd=1, per="day", ledger=f"sqlite:///{tmp_path}/s.db"),
    )
    assert one.keeper is other.keeper
    here = Budget(usd=1, per="day", ledger="memory:", name="here")
    assert here.keeper is Budget(usd=2, per="day", ledger="memory:").keeper
    with Guard(here).scope("a"):
        tool(cost=0.5)(lambda: None)()
    assert [row.spent for row in spend("memory:") if row.budget == "here"] == [Decimal("0.5")]


@pytest.mark.parametrize(
    ("ledger", "said"),
    [
        ("redis://team:hunter22@host", r"Budget\(ledger=redis:…\): 'redis' needs the package loopguard-redis"),
        ("postgresql://team:hunter22@host/db", "needs the package loopguard-postgres"),
        ("oracle://team:hunter22@host", r"no installed package has 'oracle' in loopguard\.ledgers"),
        ("sqlite:///", "give memory:"),
        ("sqlite://team:hunter22@spend.db", "give memory:"),
        ("memory:x", "give memory:"),
        ("spend.db", "give memory:"),
        (5, "give a URL, or an object that is a Ledger"),
    ],
)
def test_a_ledger_that_is_none_is_an_error(ledger: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names what to install or to give, and never the user info of a URL."""
    from loopguard import _plugins

    monkeypatch.setattr(_plugins, "_found", lambda group: {})
    with pytest.raises(ConfigurationError, match=said) as error:
        Budget(usd=1, per="day", ledger=ledger)
    assert "hunter22" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"per": "week"},
        {"per": None},
        {"key": ""},
        {"key": "a b"},
        {"key": 5},
        {"tz": "Mars"},
        {"lease": 0},
        {"lease": math.nan},
        {"lease": True},
        {"on_expiry": "forget"},
        {"on_ledger_error": "allow"},
        {"on_ledger_error": "allow_local"},
        {"local_allowance": 1},
        {"on_ledger_error": "allow_local", "local_allowance": 0},
        {"on_ledger_error": "allow_local", "local_allowance": {"tokens": 5}},
        {"extend": lambda call: True, "extend_by": 1},
        {"usd": 10**19},
        {"name": "half an emoji: \ud83d"},
        {"name": "x" * 201},
        {"per": "run", "ledger": "memory:"},
        {"per": "run", "ledger": None, "key": "team-a"},
        {"per": "run", "ledger": None, "tz": "Europe/Berlin"},
        {"per": "run", "ledger": None, "on_ledger_error": "allow_local", "local_allowance": 1},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_an_error(options: dict[str, Any]) -> None:
    """At construction, and it names the parameter."""
    given = {"usd": 1, "per": "day", "ledger": "memory:", **options}
    with pytest.raises(ConfigurationError, match="Budget"):
        Budget(**given)


def test_the_key_may_depend_on_the_run(ledger: Spy) -> None:
    """It is asked once for each run; what it gives is checked, and hidden where it looks like a secret."""
    asked: list[str] = []

    def key(run: Any) -> str:
        asked.append(run.name)
        return f"user-{run.name}" if len(run.name) < 20 else str(run.name)

    guard = Guard(Budget(usd=1, per="day", key=key, ledger=ledger))
    buy = tool(cost=0.6, name="buy")(lambda n: n)
    for name in ("ann", "bob"):
        with guard.scope(name):
            buy(1)
            with pytest.raises(BudgetExceeded, match=f"for 'user-{name}'"):
                buy(2)
    assert asked == ["ann", "bob"]
    with guard.scope("sk-ant-api03-aaaaaaaaaaaaaaaaaaaaaaaa"):
        buy(1)
        with pytest.raises(BudgetExceeded) as refused:
            buy(2)
    assert "aaaa" not in str(refused.value)
    wrong: list[tuple[Any, str]] = [
        (lambda run: "no key", r"what Budget\(key=…\) gave is"),
        (lambda run: 1 / 0, "the function failed: ZeroDivisionError"),
    ]
    for fn, said in wrong:
        odd = Guard(Budget(usd=1, per="day", key=fn, ledger=ledger))
        with odd.scope("a"), pytest.raises(ConfigurationError, match=said):
            buy(1)


def test_a_stop_iteration_arrives_as_one(ledger: Spy) -> None:
    """Through one more generator, too; and what the call reported is settled."""

    @tool(cost=0.5)
    def stops() -> None:
        charge(0.2)
        next(iter(()))

    with Guard(daily(ledger)).scope("a"), pytest.raises(StopIteration):
        stops()
    assert ledger.there() == {"usd": (0.2, 0, 0)}


def test_a_run_that_is_stopped_while_its_ledger_is_asked_runs_nothing(ledger: Spy) -> None:
    """Latches are looked at again after the wait; what was reserved is given back."""
    ran: list[int] = []
    buy = tool(cost=0.5, name="buy")(ran.append)

    class Stopping(Spy):
        def reserve(self, id: str, entries: Any, lease: Lease) -> Any:
            run.stop("enough")
            return super().reserve(id, entries, lease)

    stopping = Stopping(time.time)
    with Guard(daily(stopping)).scope("a") as run:
        with pytest.raises(ToolCallRefused) as refused:
            buy(1)
        assert (refused.value.code, ran, run.steps, run.reserved()) == ("stopped", [], 0, 0)
    assert stopping.there() == {"usd": (0, 0, 0)}


def test_a_tool_outside_any_run_answers_to_its_own_guard(ledger: Spy) -> None:
    """Process-wide, like any guardrail."""
    buy = Guard(daily(ledger)).tool(cost=0.6, name="buy")(lambda n: n)
    buy(1)
    with pytest.raises(BudgetExceeded):
        buy(2)
    assert current_run() is None
    assert ledger.there() == {"usd": (0.6, 0, 0)}


def test_a_guard_that_goes_round_again_reserves_again(ledger: Spy) -> None:
    """A hook that calls proceed twice pays twice."""
    from loopguard import WrapTool

    def twice(call: ToolCall, proceed: Any) -> Any:
        yield from proceed(call)
        return (yield from proceed(call))

    with Guard(WrapTool(twice), daily(ledger)).scope("a"):
        tool(cost=0.3)(lambda: None)()
    assert ledger.there() == {"usd": (0.6, 0, 0)}


def test_a_resumed_run_charges_nothing_twice(tmp_path: Path, ledger: Spy) -> None:
    """What is answered from the journal asks no ledger."""
    ran: list[int] = []
    cut: list[bool] = []

    @tool(cost=0.2, idempotent=True)
    def step(n: int) -> int:
        ran.append(n)
        return n

    @loop(max=2, store=f"sqlite:///{tmp_path}/runs.db", guard=Guard(daily(ledger)), name="paid")
    def work(state: int) -> int:
        step(state * 10)
        if len(ran) == 3 and not cut:
            cut.append(True)
            raise KeyboardInterrupt
        step(state * 10 + 1)
        return state + 1

    with pytest.raises(KeyboardInterrupt):
        work.run(0, run_id="r")
    assert ledger.there() == {"usd": (0.6, 0, 0)}
    result = work.resume("r")
    assert (result.value, ran, result.cost) == (2, [0, 1, 10, 11], Decimal("0.8"))
    assert ledger.there() == {"usd": (0.8, 0, 0)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_has_nothing_of_its_parents(tmp_path: Path) -> None:
    """What was held or still to be delivered is the parent's; both can use the ledger."""
    ledger = SqliteLedger(str(tmp_path / "s.db"))
    guard = Guard(daily(ledger, 2))
    buy = tool(cost=0.3, name="buy")(lambda n: n)

    @tool(cost=0.5)
    def forks() -> int:
        child = os.fork()
        if child == 0:
            with guard.scope("child"):
                buy(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with guard.scope("a"):
        buy(1)
        assert forks() == 0
        buy(2)
    ((_, _, balance),) = ledger.accounts()
    assert balance == Balance(14 * USD // 10, 0, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_does_not_settle_for_its_parent(tmp_path: Path) -> None:
    """It comes to the end of the same call, and leaves the reservation alone."""
    ledger = SqliteLedger(str(tmp_path / "s.db"))

    @tool(cost=0.5)
    def forks() -> int:
        child = os.fork()
        if child != 0:
            os.waitpid(child, 0)
            charge(0.4)
        return child

    with Guard(daily(ledger)).scope("a"):
        if forks() == 0:
            os._exit(0)
    ((_, _, balance),) = ledger.accounts()
    assert balance == Balance(4 * USD // 10, 0, 0)


def test_a_reservation_is_not_made_after_its_caller_gave_up(tmp_path: Path) -> None:
    """Cancelled while a blocking ledger is asked: whatever comes first, nothing stays held."""
    asked, go = threading.Event(), threading.Event()

    class Slow(SqliteLedger):
        def reserve(self, id: str, entries: Any, lease: Lease) -> Any:
            asked.set()
            go.wait(5)
            return super().reserve(id, entries, lease)

    ledger = Slow(str(tmp_path / "s.db"))

    @tool(cost=0.5)
    async def buy() -> None:
        """Never runs."""

    async def main() -> None:
        with Guard(daily(ledger)).scope("a") as run:
            task = asyncio.create_task(buy())
            await asyncio.to_thread(asked.wait, 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (run.reserved(), run.steps) == (0, 0)

    asyncio.run(main())
    delivered(ledger)
    go.set()
    day = keeper_of(ledger)
    entry = Entry(Account("team", "team-a", "x"), "usd", 1, None)
    assert day.ledger.reserve("probe", [entry], Lease(1)) == (Balance(0, 1, 0),)
    assert all(balance.reserved == 0 for account, _, balance in ledger.accounts() if account.window != "x")
