"""Budgets that ask for more: one question for all, a grant that holds, a no that is final."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest

from loopguard import (
    Approval,
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    Retry,
    charge,
    current_run,
    loop,
    tool,
)
from loopguard import _events as events
from loopguard.testing import Desk, ScriptedApprover, capture
from tests.conftest import Colour


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"extend": print}, r"^Budget: extend= and extend_by= go together"),
        ({"extend_by": 1}, r"^Budget: extend= and extend_by= go together"),
        ({"extend": "me", "extend_by": 1}, r"^Budget\(extend='me'\): give an approver"),
        ({"extend": print, "extend_by": 0}, r"^Budget\(extend_by=0\): name units"),
        ({"extend": print, "extend_by": {"credits": 5}}, r"^Budget\(extend_by=\{'credits': 5\}\): name units"),
        ({"extend": print, "extend_by": -1}, r"^Budget\(extend_by=-1\) is not an amount"),
        ({"extend": print, "extend_by": float("nan")}, r"^Budget\(extend_by=nan\) is not an amount"),
        ({"extend": print, "extend_by": True}, r"^Budget\(extend_by=True\) is not an amount"),
    ],
)
def test_a_wrong_extension_is_a_configuration_error(options: dict[str, Any], match: str) -> None:
    """Whom to ask and how much more go together; the amount is of a unit that is capped."""
    with pytest.raises(ConfigurationError, match=match):
        Budget(usd=1, **options)


def test_a_call_that_does_not_fit_asks_for_more(colour: Colour) -> None:
    """Granted, it runs; the question says what is wanted, and the new cap is an event."""
    ask = ScriptedApprover([True])
    work = tool(cost=3)(colour.make(lambda n: n))
    with capture() as seen, Guard(Budget(usd=5, extend=ask, extend_by=5, name="day")).scope() as run:
        assert [colour.call(work, n) for n in range(3)] == [0, 1, 2]
        assert run.remaining() == 1
        assert run.spent() == 9
    assert [(call.name, dict(call.arguments)) for call in map(as_call, ask.calls)] == [
        (
            "extend_budget",
            {
                "budget": "day",
                "unit": "usd",
                "limit": 5,
                "spent": 3,
                "reserved": 0,
                "extend_by": 5,
                "for_tool": work.__name__,
            },
        )
    ]
    assert [(event.budget, event.unit, event.limit) for event in seen.events_of(events.BudgetExtended)] == [
        ("day", "usd", 10)
    ]
    assert [event.kind for event in seen.events_of(events.QuestionAsked)] == ["extension"]
    assert [event.decision for event in seen.events_of(events.QuestionAnswered)] == ["approve"]


def as_call(question: Any) -> Any:
    """What an approver is given looks like a call."""
    return question


def test_a_no_is_final_for_the_run(colour: Colour) -> None:
    """It is asked once; the refusal carries the reason; another run may ask again."""
    ask = ScriptedApprover([(False, "not this month"), (False, None)])
    guard = Guard(Budget(usd=5, extend=ask, extend_by=5))
    work = tool(cost=6)(colour.make(lambda n: n))
    with guard.scope() as run:
        for n in range(3):
            with pytest.raises(BudgetExceeded, match=r"not granted: not this month\."):
                colour.call(work, n)
        assert run.spent() == 0
        assert run.reserved() == 0
    assert len(ask.calls) == 1
    with guard.scope(), pytest.raises(BudgetExceeded, match=r"not granted\."):
        colour.call(work, 1)


@pytest.mark.parametrize("answer", [None, "yes", 1, RuntimeError("no line"), Approval.edit({"extend_by": -5})])
def test_whatever_is_no_yes_grants_nothing(colour: Colour, answer: Any) -> None:
    """It fails closed, and says that the approver failed."""
    work = tool(cost=6)(colour.make(lambda n: n))
    with Guard(Budget(usd=5, extend=ScriptedApprover([answer]), extend_by=5)).scope() as run:
        with pytest.raises(BudgetExceeded, match="the approver failed"):
            colour.call(work, 1)
        assert run.remaining() == 5


def test_a_person_may_grant_another_amount(colour: Colour) -> None:
    """By editing extend_by; what isn't enough is asked about again."""
    ask = ScriptedApprover([Approval.edit({"extend_by": 0.5}), Approval.edit({"extend_by": Decimal("0.5")})])
    work = tool(cost=6)(colour.make(lambda n: n))
    with Guard(Budget(usd=5, extend=ask, extend_by=5)).scope() as run:
        assert colour.call(work, 1) == 1
        assert run.remaining() == 0
    assert len(ask.calls) == 2


def test_parallel_calls_share_one_question_in_threads() -> None:
    """Twenty threads that don't fit: one person is asked once, and one yes serves them as far as it goes."""
    desk = Desk()
    bodies: list[int] = []

    @tool(cost=1)
    def work(n: int) -> None:
        bodies.append(n)

    with (
        Guard(Budget(usd=0, extend=desk, extend_by=20), max_refusals=99).scope() as run,
        ThreadPoolExecutor(20) as pool,
    ):
        outcomes = [pool.submit(run.bind(work), n) for n in range(20)]
        desk.wait()
        desk.answer(0, True)
        assert [outcome.exception() for outcome in outcomes] == [None] * 20
        assert run.spent() == 20
    assert len(desk.calls) == 1
    assert sorted(bodies) == list(range(20))


@pytest.mark.parametrize("granted", [True, False])
def test_parallel_calls_share_one_question_in_tasks(granted: bool) -> None:
    """And one answer: after a no all of them are refused with its reason."""
    desk = Desk()

    @tool(cost=1)
    async def work(n: int) -> int:
        return n

    async def main() -> list[Any]:
        async with Guard(Budget(usd=0, extend=desk, extend_by=20)).scope():
            tasks = [asyncio.create_task(work(n)) for n in range(20)]
            await asyncio.to_thread(desk.wait)
            await asyncio.sleep(0.05)
            assert len(desk.pending) == 1
            desk.answer(0, (granted, "because"))
            return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(main())
    if granted:
        assert outcomes == list(range(20))
    else:
        assert all(isinstance(outcome, BudgetExceeded) and "because" in str(outcome) for outcome in outcomes)
    assert len(desk.calls) == 1


def test_each_cap_asks_its_own_question() -> None:
    """Two units, two budgets: whichever is short, outermost first."""
    outer, inner = ScriptedApprover([True]), ScriptedApprover([True, True])
    work = tool(cost={"usd": 1, "credits": 1})(lambda n: n)
    with (
        Guard(Budget(usd=0, extend=outer, extend_by=1, name="outer")).scope(),
        Guard(Budget(usd=0, credits=0, extend=inner, extend_by={"usd": 1, "credits": 1}, name="inner")).scope() as run,
    ):
        assert work(1) == 1
        assert run.remaining("usd") == 0
    assert [question.arguments["budget"] for question in outer.calls] == ["outer"]
    assert sorted(question.arguments["unit"] for question in inner.calls) == ["credits", "usd"]


def test_a_unit_that_is_not_to_be_extended_is_refused_at_once() -> None:
    """`extend_by` names what may be raised."""
    ask = ScriptedApprover([True])
    work = tool(cost={"usd": 1, "credits": 1})(lambda n: n)
    with Guard(Budget(usd=0, credits=5, extend=ask, extend_by={"credits": 1})).scope(), pytest.raises(BudgetExceeded):
        work(1)
    assert ask.calls == []


def test_waiting_for_an_extension_stops_the_loops_clock() -> None:
    """Waiting for a person uses no timeout."""
    desk = Desk()

    @tool(cost=1)
    def work(n: int) -> int:
        return n

    @loop(max=1, timeout=0.1, budget=Budget(usd=0, extend=desk, extend_by=1))
    def step(n: int) -> int:
        return work(n)

    def person() -> None:
        desk.wait()
        threading.Event().wait(0.2)  # what a person takes: longer than the loop may
        desk.answer(0, True)

    thread = threading.Thread(target=person, daemon=True)
    thread.start()
    assert step.run(1).completed
    thread.join(5)


def test_a_call_that_is_cancelled_while_it_asks_leaves_the_question_to_the_next() -> None:
    """Nothing stays reserved, and whoever waited with it asks anew."""
    desk = Desk()

    @tool(cost=1)
    async def work(n: int) -> int:
        return n

    async def main() -> None:
        async with Guard(Budget(usd=0, extend=desk, extend_by=5)).scope() as run:
            first = asyncio.create_task(work(1))
            await asyncio.to_thread(desk.wait)
            second = asyncio.create_task(work(2))
            await asyncio.sleep(0.02)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            while not desk.pending or len(desk.calls) < 2:
                await asyncio.sleep(0.01)
            desk.answer(len(desk.calls) - 1, True)
            assert await second == 2
            assert (run.spent(), run.reserved(), run.steps) == (1, 0, 1)

    asyncio.run(main())


def test_a_retry_that_does_not_fit_asks_too(colour: Colour) -> None:
    """Each attempt reserves its own cost."""
    ask = ScriptedApprover([True])
    attempts: list[int] = []

    def body() -> str:
        attempts.append(1)
        charge(usd=3)
        if len(attempts) == 1:
            raise ConnectionError
        return "done"

    work = tool(cost=3, idempotent=True)(colour.make(body))
    with Guard(Budget(usd=4, extend=ask, extend_by=5), Retry(1, wait=0)).scope() as run:
        assert colour.call(work) == "done"
        assert (run.spent(), run.reserved(), run.steps) == (6, 0, 1)
    assert len(ask.calls) == 1


def test_tool_calls_can_be_extended(colour: Colour) -> None:
    """A cap of calls is a cap like the others."""
    ask = ScriptedApprover([True, False])
    work = tool(colour.make(lambda n: n))
    with Guard(Budget(tool_calls=1, extend=ask, extend_by={"tool_calls": 1})).scope() as run:
        colour.call(work, 1)
        colour.call(work, 2)
        with pytest.raises(BudgetExceeded):
            colour.call(work, 3)
        assert run.steps == 2


def test_an_extension_of_a_parents_budget_holds_for_all_its_children() -> None:
    """The cap that is raised is the one of the run that owns it."""
    ask = ScriptedApprover([True])

    @tool(cost=1)
    def work(n: int) -> int:
        return n

    @loop(max=1)
    def child(n: int) -> int:
        return work(n)

    with Guard(Budget(usd=1, extend=ask, extend_by=2)).scope() as run:
        for n in range(3):
            child(n)
        assert run.remaining() == 0
        result = child.run(9)
    assert result.completed is False if ask.calls[1:] else result.stop_reason == "budget"


def test_warn_at_is_told_once_for_each_run() -> None:
    """At the share given, when it is spent; other runs have their own."""
    guard = Guard(Budget(usd=10, warn_at=0.5, name="small"))
    work = tool(cost=2)(lambda n: n)
    with capture() as seen:
        for _ in range(2):
            with guard.scope():
                for n in range(5):
                    work(n)
    warned = [(event.budget, event.unit, event.spent, event.limit) for event in seen.events_of(events.BudgetWarned)]
    assert warned == [("small", "usd", 6, 10)] * 2
    assert current_run() is None
