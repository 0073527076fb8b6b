"""Budget: what it refuses, what a call costs, and how it says so."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pytest

from loopguard import (
    Approval,
    ApproveTool,
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    LoopGuardWarning,
    LoopLimit,
    MaxSteps,
    MaxStepsExceeded,
    Retry,
    ToolCall,
    charge,
    current_run,
    loop,
    tool,
)
from loopguard._events import BudgetWarned, Event, ToolFinished, ToolRefused
from tests.conftest import Colour


class Boom(Exception):
    """What a tool raises in these tests."""


@contextmanager
def refused(match: str | None = None) -> Iterator[pytest.ExceptionInfo[BudgetExceeded]]:
    """The call inside is refused by a budget."""
    with pytest.raises(BudgetExceeded, match=match) as raised:
        yield raised
    assert raised.value.code == "budget"


def policy(*guardrails: Any, **options: Any) -> Guard:
    """Guardrails beside which neither repeats nor refusals in a row matter."""
    return Guard(*guardrails, LoopLimit(0), max_refusals=10_000, **options)


def books(run: Any, unit: str = "usd") -> tuple[Decimal, Decimal]:
    """(spent, reserved)."""
    return run.spent(unit), run.reserved(unit)


# -- caps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["usd", "tokens", "credits", "model_calls", "tool_calls"])
@pytest.mark.parametrize("cap", [-1, float("nan"), float("inf"), True, "1", Decimal("NaN"), [1]], ids=str)
def test_a_cap_is_an_amount(unit: str, cap: Any) -> None:
    """C18: what can't be compared can't be a limit, and the error names it."""
    with pytest.raises(ConfigurationError, match=rf"Budget\({unit}=.*\) is not an amount"):
        Budget(**{unit: cap})


@pytest.mark.parametrize("warn_at", [0, -0.1, 1.1, True, "80%", float("nan")])
def test_warn_at_is_a_share(warn_at: Any) -> None:
    """80 is not 80 %."""
    with pytest.raises(ConfigurationError, match="warn_at"):
        Budget(usd=1, warn_at=warn_at)


@pytest.mark.parametrize("per", ["week", "", None, 1])
def test_what_an_allowance_is_for_is_no_unit(per: Any) -> None:
    """Each run has its own: `per="run"` says so, anything else is refused by what is allowed."""
    assert Budget(usd=1, per="run").limits.keys() == {"usd"}
    with pytest.raises(ConfigurationError, match=r"Budget\(per=.*give 'run'"):
        Budget(usd=1, per=per)


def test_steps_are_capped_by_name() -> None:
    """A cap on a unit that nothing ever charges would be no cap at all."""
    with pytest.raises(ConfigurationError, match="tool_calls"):
        Budget(steps=5)


def test_a_cap_of_nothing_refuses_the_first_costed_call(colour: Colour) -> None:
    """C08: 0 is a limit; what costs nothing still runs, and None is unlimited."""
    ran: list[str] = []

    @tool(cost=0.01)
    @colour.make
    def costed() -> None:
        ran.append("costed")

    @tool(cost=0)
    @colour.make
    def free() -> None:
        ran.append("free")

    @tool
    @colour.make
    def uncosted() -> None:
        ran.append("uncosted")

    with policy(Budget(usd=0)).scope() as run:
        with refused():
            colour.call(costed)
        colour.call(free)
        colour.call(uncosted)
        assert books(run) == (0, 0)
    with policy(Budget(usd=None)).scope() as run:
        colour.call(costed)
        assert run.remaining("usd") is None
    assert ran == ["free", "uncosted", "costed"]


def test_each_run_has_an_allowance_of_its_own(colour: Colour) -> None:
    """Runs of one guard share nothing, one after the other and side by side."""

    @tool(cost=1)
    @colour.make
    def work() -> None: ...

    guard = policy(Budget(usd=1))
    for _ in range(2):
        with guard.scope():
            colour.call(work)
            with refused():
                colour.call(work)


def test_a_budget_counts_every_unit_on_its_own(colour: Colour) -> None:
    """The unit that is used up is the one named; what a budget doesn't cap it doesn't look at."""

    @tool(cost={"usd": 0.5, "credits": 4, "tokens": 1000})
    @colour.make
    def work() -> None: ...

    with policy(Budget(usd=10, credits=10)).scope() as run:
        colour.call(work)
        colour.call(work)
        with refused("4 credits") as raised:
            colour.call(work)
        assert (raised.value.limit, raised.value.value) == (10, 8)
        assert [run.spent(unit) for unit in ("usd", "credits", "tokens")] == [1, 8, 2000]


def test_tool_calls_counts_every_started_call(colour: Colour) -> None:
    """Costed or not, raised or returned: it was started. A refused one wasn't."""

    @tool
    @colour.make
    def work(fail: bool) -> None:
        if fail:
            raise Boom

    with policy(Budget(tool_calls=3)).scope() as run:
        colour.call(work, False)
        with pytest.raises(Boom):
            colour.call(work, True)
        assert run.remaining("tool_calls") == 1
        colour.call(work, False)
        for _ in range(2):
            with refused("work was not run: the budget of 3 tool calls of run 'scope' is used up"):
                colour.call(work, False)
        assert (run.steps, run.refusals, run.remaining("tool_calls")) == (3, 2, 0)
        assert run.brief() == "Used so far: 3 of 3 tool calls."


def test_an_attempt_is_not_a_call() -> None:
    """Retry's attempts each pay what they report, and together are one of tool_calls."""
    attempts: list[int] = []

    @tool(idempotent=True, cost={"usd": 1, "credits": 9})
    def work() -> None:
        attempts.append(1)
        charge(usd=0.5)
        if len(attempts) < 3:
            raise Boom

    with policy(Budget(tool_calls=1, usd=9, credits=20), Retry(5, wait=0)).scope() as run:
        work()
        assert (run.steps, len(attempts)) == (1, 3)
        assert books(run) == (Decimal("1.5"), 0)
        assert books(run, "credits") == (9, 0)
        with refused("is used up"):
            work()


# -- what a call costs -----------------------------------------------------------------------------


def test_a_refused_call_takes_nothing(colour: Colour) -> None:
    """When the last of several limits says no, those before it have nothing to give back."""

    @tool(cost={"usd": 1, "credits": 5})
    @colour.make
    def work() -> None:
        raise AssertionError("it must not run")

    with policy(MaxSteps(3), Budget(usd=5), Budget(credits=4)).scope() as run:
        with refused("credits"):
            colour.call(work)
        assert books(run) == books(run, "credits") == (0, 0)
        assert (run.steps, run.refusals) == (0, 1)


def test_the_outermost_budget_is_named(colour: Colour) -> None:
    """C20: a parent's budget binds its children; spend survives an exception in the inner loop."""

    @tool(cost={"units": 4})
    @colour.make
    def work(fail: bool = False) -> None:
        charge(units=4)
        if fail:
            raise Boom

    @loop(max=1, budget=Budget(units=100), name="inner")
    def inner(fail: bool) -> bool:
        colour.call(work, fail)
        return fail

    with policy(Budget(units=10)).scope("outer") as outer:
        inner(False)
        with pytest.raises(Boom):
            inner(True)
        result = inner.run(False)
        assert (result.stop_reason, result.iterations) == ("budget", 0)
        assert isinstance(result.error, BudgetExceeded)
        assert (result.error.run_id, result.error.limit, result.error.value) == (outer.id, 10, 8)
        assert books(outer, "units") == (8, 0)


def test_both_books_say_the_same(colour: Colour) -> None:
    """C20: what a child spends, every run above it has spent."""

    @tool(cost={"units": 4})
    @colour.make
    def work() -> None: ...

    with policy(Budget(units=10)).scope("outer") as outer, policy(Budget(units=100)).scope("inner") as inner:
        colour.call(work)
        colour.call(work)
        with refused("of run 'outer'"):
            colour.call(work)
        assert books(outer, "units") == books(inner, "units") == (8, 0)
        assert (outer.remaining("units"), inner.remaining("units")) == (2, 2)


def test_a_thousand_small_charges_add_up(colour: Colour) -> None:
    """A tenth of a cent, a thousand times, is a dollar to the last digit, and the next one is refused."""

    @tool(cost=0.001)
    @colour.make
    def work() -> None: ...

    with policy(Budget(usd=1)).scope() as run:
        for _ in range(1000):
            colour.call(work)
        assert books(run) == (Decimal(1), 0)
        with refused():
            colour.call(work)


def test_calls_that_raise_are_free_and_still_counted(colour: Colour) -> None:
    """Five hundred failures at an estimate of 0.01 cost nothing of 1 USD, but MaxSteps stops them."""

    @tool(cost=0.01)
    @colour.make
    def work() -> None:
        raise Boom

    with policy(MaxSteps(500), Budget(usd=1)).scope() as run:
        for _ in range(500):
            with pytest.raises(Boom):
                colour.call(work)
        with pytest.raises(MaxStepsExceeded):
            colour.call(work)
        assert books(run) == (0, 0)


@pytest.mark.parametrize(("reported", "paid"), [(None, 3), (1, 3), (5, 5)])
@pytest.mark.parametrize("kind", ["async", "async generator"])
def test_a_call_that_is_cancelled_after_its_start_pays_its_estimate(kind: str, reported: int | None, paid: int) -> None:
    """Nobody knows what it did: it pays its estimate, more if it had said so, and a late report on top."""

    async def main() -> None:
        started, release = asyncio.Event(), asyncio.Event()
        late: list[asyncio.Task[None]] = []

        async def report_late() -> None:
            await release.wait()
            charge(usd=0.5)

        async def body() -> None:
            late.append(asyncio.create_task(report_late()))
            charge(usd=reported)
            started.set()
            await asyncio.Event().wait()

        if kind == "async":
            work: Any = tool(cost=3, name="work")(body)
        else:

            async def items() -> Any:
                yield await body()

            generator = tool(cost=3, name="work")(items)

            async def work() -> list[Any]:
                return [item async for item in generator()]

        with policy(Budget(usd=100)).scope() as run:
            task = asyncio.create_task(work())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert books(run) == (paid, 0)
            release.set()
            await late[0]
            assert books(run) == (paid + Decimal("0.5"), 0)

    asyncio.run(main())


def test_a_call_that_is_cancelled_before_its_start_pays_nothing() -> None:
    """While a person is still being asked, nothing has been bought."""

    async def main() -> None:
        asked = asyncio.Event()

        async def approver(call: ToolCall) -> bool:
            asked.set()
            await asyncio.Event().wait()
            return True

        @tool(cost=3)
        async def work() -> None:
            raise AssertionError("it must not run")

        with policy(ApproveTool(approver), Budget(usd=100)).scope() as run:
            task = asyncio.create_task(work())
            await asked.wait()
            assert books(run) == (0, 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert books(run) == (0, 0)
            assert run.steps == 0

    asyncio.run(main())


@pytest.mark.parametrize("end", ["close", "drop", "exhaust"])
def test_a_generator_left_early_pays_like_one_that_returned(end: str) -> None:
    """However it is left, what was reported is settled, the estimate where nothing was."""

    @tool(cost={"usd": 3, "credits": 2})
    def items() -> Iterator[int]:
        charge(usd=1)
        yield from range(3)

    with policy(Budget(usd=100)).scope() as run:
        iterator: Any = items()
        assert books(run) == (0, 0), "nothing is admitted before its iteration starts"
        next(iterator)
        assert books(run) == (0, 3)
        if end == "close":
            iterator.close()
        elif end == "exhaust":
            list(iterator)
        del iterator
        assert books(run) == (1, 0)
        assert books(run, "credits") == (2, 0)
        assert run.steps == 1


@pytest.mark.parametrize("end", ["break", "aclose", "loop closed"])
def test_an_async_generator_left_early_pays_like_one_that_returned(end: str) -> None:
    """Even one that is dropped on a closed event loop is settled, once."""

    @tool(cost=3)
    async def items() -> Any:
        for n in range(3):
            yield n

    kept: list[Any] = []

    async def main() -> None:
        iterator = items()
        kept.append(iterator)
        await anext(iterator)
        if end == "aclose":
            await iterator.aclose()

    with policy(Budget(usd=100)).scope() as run:
        runner = asyncio.new_event_loop()
        runner.run_until_complete(main())
        if end == "break":
            runner.run_until_complete(runner.shutdown_asyncgens())
        runner.close()
        kept.clear()
        assert books(run) == (3, 0)


def test_what_a_subscriber_raises_leaves_nothing_reserved(colour: Colour) -> None:
    """Ctrl-C while the start of a call is being reported ends the call, and its reservation with it."""

    def on_event(event: Event) -> None:
        if type(event).__name__ == "ToolStarted":
            raise KeyboardInterrupt

    @tool(cost=1)
    @colour.make
    def work() -> None:
        raise AssertionError("it must not run")

    with pytest.raises(KeyboardInterrupt), policy(Budget(usd=5), on_event=on_event).scope() as run:
        colour.call(work)
    assert books(run) == (0, 0)


# -- costs that are functions, or nobody declared ---------------------------------------------------


def test_a_cost_can_depend_on_the_call(colour: Colour) -> None:
    """cost=fn(call) sees the bound arguments and gives USD or {unit: amount}."""

    def cost(call: ToolCall) -> Any:
        return call.arguments["n"] if call.arguments["n"] < 10 else {"usd": 10, "credits": 1}

    @tool(cost=cost)
    @colour.make
    def work(n: int = 2) -> None: ...

    with policy(Budget(usd=20)).scope() as run:
        colour.call(work)
        colour.call(work, 3)
        assert books(run) == (5, 0)
        colour.call(work, n=50)
        assert books(run) == (15, 0)
        assert books(run, "credits") == (1, 0)
        with refused(r"work may cost \$6, but only \$5 is left"):
            colour.call(work, 6)


def test_a_cost_function_that_raises_takes_nothing(colour: Colour) -> None:
    """Its own exception reaches the caller, as the same object, and the body doesn't run."""
    error = Boom("no price")

    def cost(call: ToolCall) -> float:
        raise error

    @tool(cost=cost)
    @colour.make
    def work() -> None:
        raise AssertionError("it must not run")

    with policy(MaxSteps(5), Budget(usd=20)).scope() as run:
        with pytest.raises(Boom) as raised:
            colour.call(work)
        assert raised.value is error
        assert books(run) == (0, 0)
        assert (run.steps, run.refusals) == (0, 0)


async def _async_cost() -> float:
    return 1.0


@pytest.mark.parametrize(
    "garbage",
    ["0.01", -1, float("nan"), [1], object(), {1: 2}, {"usd": -1}, {"usd": "1"}, {"steps": 1}, None, True, _async_cost],
    ids=str,
)
def test_a_cost_function_that_returns_garbage_is_an_error(colour: Colour, garbage: Any) -> None:
    """A forgotten return or an async function must not make a call free."""

    @tool(cost=lambda call: garbage() if callable(garbage) else garbage)
    @colour.make
    def work() -> None:
        raise AssertionError("it must not run")

    with policy(Budget(usd=20)).scope() as run:
        with pytest.raises(ConfigurationError, match="work"):
            colour.call(work)
        assert books(run) == (0, 0)
        assert run.steps == 0


@pytest.mark.parametrize(
    "cost", ["0.01", -1, float("inf"), True, {"usd": -1}, {"": 1}, {("usd",): 1}, b"1", [1]], ids=str
)
def test_a_declared_cost_is_an_amount(cost: Any) -> None:
    """A wrong price is an error at decoration, before anything runs."""
    with pytest.raises(ConfigurationError, match="tool"):
        tool(cost=cost)(print)


def test_an_edited_call_is_priced_again() -> None:
    """A refund of 50 that is approved and edited to 5000 under a budget of 100 is refused."""
    ran: list[int] = []

    @tool(cost=lambda call: call.arguments["amount"])
    def refund(amount: int) -> None:
        ran.append(amount)

    edits = iter([5000, 60])
    approver = ApproveTool(lambda call: Approval.edit({"amount": next(edits)}))
    with policy(Budget(usd=100), approver).scope() as run:
        with refused(r"refund may cost \$5000, but only \$100 is left"):
            refund(50)
        assert books(run) == (0, 0)
        assert run.steps == 0
        refund(50)
        assert books(run) == (60, 0)
    assert ran == [60]


def test_a_call_edited_by_one_whose_price_fails_gives_everything_back() -> None:
    """The price of the edited call is asked while the first one is still reserved."""

    def cost(call: ToolCall) -> int:
        if call.arguments["amount"] > 99:
            raise Boom
        return int(call.arguments["amount"])

    @tool(cost=cost)
    def refund(amount: int) -> None:
        raise AssertionError("it must not run")

    with policy(Budget(usd=100), ApproveTool(lambda call: Approval.edit({"amount": 5000}))).scope() as run:
        with pytest.raises(Boom):
            refund(50)
        assert books(run) == (0, 0)
        assert run.steps == 0


def test_an_undeclared_cost_is_learned_from_what_was_charged(colour: Colour) -> None:
    """After the first surprise the largest amount seen is reserved, so that the cap holds again."""
    events: list[Event] = []

    @tool
    @colour.make
    def work(usd: float) -> None:
        charge(usd=usd)

    with policy(Budget(usd=10), on_event=events.append).scope() as run:
        with pytest.warns(LoopGuardWarning, match=r"work charged \$5 more.*declare.*@tool\(cost="):
            colour.call(work, 5)
        colour.call(work, 4)
        assert len(run.warnings) == 1
        assert books(run) == (9, 0)
        with refused(r"work may cost \$5, but only \$1 is left"):
            colour.call(work, 0.5)
    assert [event.overrun for event in events if isinstance(event, ToolFinished)] == [True, False]


@pytest.mark.parametrize("threads", [False, True])
def test_undeclared_calls_in_flight_are_an_overrun_recorded_in_full(threads: bool) -> None:
    """cost=None with charge(usd=5) inside, 20 at once: all are booked, one warning, then costed calls are refused."""
    together = threading.Barrier(20) if threads else None

    @tool
    def work_sync() -> None:
        assert together is not None
        together.wait(10)
        charge(usd=5)

    @tool
    async def work() -> None:
        await asyncio.sleep(0)
        charge(usd=5)

    @tool(cost=0.01)
    def costed() -> None: ...

    async def main() -> None:
        if threads:
            await asyncio.gather(*(work_sync.acall() for _ in range(20)))
        else:
            await asyncio.gather(*(work() for _ in range(20)))

    with policy(Budget(usd=2)).scope() as run:
        with pytest.warns(LoopGuardWarning, match="declare") as warned:
            asyncio.run(main())
        assert len(warned) == 1
        assert books(run) == (100, 0)
        assert run.remaining("usd") == 0
        with refused(r"only \$0 is left of the budget of \$2 of run 'scope' \(\$100 spent\)"):
            costed()
        with refused("may cost"):
            work_sync() if threads else asyncio.run(work())


def test_an_overrun_of_a_declared_cost_is_recorded_in_full(colour: Colour) -> None:
    """What was reported above the reservation is spent and marked, and the cap refuses from then on."""
    events: list[Event] = []

    @tool(cost=1)
    @colour.make
    def work(usd: float) -> None:
        charge(usd=usd)
        charge(usd=0)

    with policy(Budget(usd=2), on_event=events.append).scope() as run:
        colour.call(work, 1)
        colour.call(work, 7.5)
        assert books(run) == (Decimal("8.5"), 0)
        with refused():
            colour.call(work, 0)
        assert run.warnings == []
    finished = [event for event in events if isinstance(event, ToolFinished)]
    assert [(event.charged["usd"], event.overrun) for event in finished] == [(1, False), (Decimal("7.5"), True)]


# -- what people and models read -------------------------------------------------------------------


def test_a_run_says_what_is_left() -> None:
    """Spent, reserved, remaining and brief are the numbers a person would write down."""
    seen: list[tuple[Any, ...]] = []

    @tool(cost=0.5)
    def work() -> None:
        run = current_run()
        assert run is not None
        seen.append((run.spent("usd"), run.reserved("usd"), run.remaining("usd"), run.brief()))

    with policy(MaxSteps(20), Budget(usd=2, tokens=200_000)).scope() as run:
        work()
        charge(tokens=1500)
        assert (run.spent("usd"), run.reserved("usd"), run.remaining("usd")) == (Decimal("0.5"), 0, Decimal("1.5"))
        assert (run.remaining("tokens"), run.remaining("credits")) == (198_500, None)
        assert run.brief() == "Used so far: 1 of 20 tool calls, $0.50 of $2.00, 1500 of 200000 tokens."
        assert run.cost == Decimal("0.5")
        assert run.usage.tokens == 1500
    assert seen == [
        (0, Decimal("0.5"), Decimal("1.5"), "Used so far: 1 of 20 tool calls, $0.00 of $2.00, 0 of 200000 tokens.")
    ]


def test_the_tightest_limit_decides_what_is_left() -> None:
    """A child can't have more than its parent has left."""
    with policy(Budget(usd=5)).scope(), policy(Budget(usd=100), Budget(usd=3)).scope() as run:
        charge(usd=1)
        assert run.remaining("usd") == 2
        charge(usd=10)
        assert run.remaining("usd") == 0, "never negative"


@pytest.mark.parametrize(
    ("cost", "cap", "words"),
    [
        (1e-7, 1e-8, r"search may cost \$0\.0000001, but only \$0\.00000001 is left of the budget of \$0\.00000001 "),
        (Decimal("2.50"), Decimal("1E+0"), r"search may cost \$2\.5, but only \$1 is left of the budget of \$1 "),
        ({"tokens": 10**6}, {"tokens": 1000}, "search may cost 1000000 tokens, but only 1000 tokens is left "),
        ({"api_calls": 2}, {"api_calls": 1}, "search may cost 2 api calls, but only 1 api calls is left "),
    ],
)
def test_a_refusal_shows_plain_amounts(cost: Any, cap: Any, words: str) -> None:
    """No exponents and no trailing zeros, whatever the number was written as."""

    @tool(cost=cost, name="search")
    def search() -> None: ...

    caps = cap if isinstance(cap, dict) else {"usd": cap}
    with policy(Budget(**caps)).scope("agent"), refused(words) as raised:
        search()
    refusal = raised.value
    assert (refusal.guardrail, refusal.tool, refusal.source) == ("Budget", "search", "agent")
    assert refusal.limit == Decimal(str(next(iter(caps.values()))))
    assert "E" not in str(refusal).replace("E+", "E")


def test_a_refusal_says_what_is_spent_and_what_is_held() -> None:
    """The message tells a budget that is used up from one that is waiting for other calls, by its name."""

    @tool(cost=0.75)
    def outer() -> None:
        with refused(
            r"inner may cost \$1\.5, but only \$0\.25 is left of the budget 'team' of \$1 of run 'agent' "
            r"\(\$0 spent and \$0\.75 reserved by calls in flight\)\. It was not run: make a cheaper call"
        ) as raised:
            inner()
        assert (raised.value.limit, raised.value.value) == (1, Decimal("0.75"))

    @tool(cost=1.5)
    def inner() -> None: ...

    with policy(Budget(usd=1, name="team")).scope("agent"):
        outer()


def test_a_refusal_pickles_and_copies(colour: Colour) -> None:
    """It may cross a process; what the pipeline hung on to it doesn't."""

    @tool(cost=5)
    @colour.make
    def work() -> None: ...

    if colour.name != "sync":
        ask: dict[str, Any] = {}
    else:
        ask = {"extend": lambda call: False, "extend_by": 10}
    with policy(Budget(usd=1, **ask)).scope() as run, refused() as raised:
        colour.call(work)
    for twin in (pickle.loads(pickle.dumps(raised.value)), copy.copy(raised.value)):
        assert type(twin) is BudgetExceeded
        assert (twin.args, str(twin)) == (raised.value.args, str(raised.value))
        assert twin.run_id == run.id


@pytest.mark.parametrize(
    ("budget", "spends", "warned_by"),
    [
        (Budget(usd=1), [0.5, 0.29, 0.01, 0.1, 0.1], 3),
        (Budget(usd=1), [1], 1),
        (Budget(usd=1), [0.79], None),
        (Budget(usd=1, warn_at=1), [0.99, 0.01], 2),
        (Budget(usd=0.01, warn_at=0.56), [0.0056], 1),
        (Budget(usd=1, warn_at=None), [1], None),
        (Budget(usd=0), [0], None),
    ],
    ids=repr,
)
@pytest.mark.parametrize("how", ["settled", "reported", "late", "in the body"])
def test_a_warning_is_emitted_once(how: str, budget: Budget, spends: list[float], warned_by: int | None) -> None:
    """BudgetWarned comes with the amount that reaches the share, the last one included, and never again."""
    events: list[Event] = []

    @tool(cost=lambda call: call.arguments["usd"] if how == "settled" else 0)
    def work(usd: float) -> ToolCall | None:
        if how == "reported":
            charge(usd=usd)
        return None

    late: list[Callable[[float], None]] = []

    @tool
    def charged_later() -> None:
        run_in = current_run()
        assert run_in is not None
        import contextvars

        context = contextvars.copy_context()
        late.append(lambda usd: context.run(charge, usd))

    with policy(budget, on_event=events.append).scope() as run:
        if how == "late":
            charged_later()
        for number, usd in enumerate(spends, start=1):
            if how == "in the body":
                charge(usd=usd)
            elif how == "late":
                late[0](usd)
            else:
                work(usd)
            warnings = [event for event in events if isinstance(event, BudgetWarned)]
            assert len(warnings) == (warned_by is not None and number >= warned_by)
    if warned_by is not None:
        assert warnings[0].run_id == run.id
        assert (warnings[0].budget, warnings[0].unit) == ("usd", "usd")
        assert warnings[0].spent == sum(Decimal(str(usd)) for usd in spends[:warned_by])
        assert warnings[0].limit == Decimal(str(budget.limits["usd"])) / 10**18


def test_a_warning_about_tool_calls_is_emitted_once(colour: Colour) -> None:
    """The fourth of five calls is the 80 %."""
    events: list[Event] = []

    @tool
    @colour.make
    def work() -> None: ...

    with policy(Budget(tool_calls=5, name="few"), on_event=events.append).scope():
        counts = []
        for _ in range(5):
            colour.call(work)
            counts.append(sum(isinstance(event, BudgetWarned) for event in events))
    assert counts == [0, 0, 0, 1, 1]
    (warned,) = [event for event in events if isinstance(event, BudgetWarned)]
    assert (warned.budget, warned.unit, warned.spent, warned.limit) == ("few", "tool_calls", 4, 5)


def test_the_budget_of_a_tool_warns_its_own_subscriber() -> None:
    """A tool's guard stands on the outermost run, and hears there what its budget has to say."""
    events: list[Event] = []
    guard = policy(Budget(usd=1), on_event=events.append)

    @guard.tool(cost=0.9)
    def work() -> None: ...

    @loop(max=1)
    def agent(n: int) -> int:
        work()
        return n

    with Guard().scope("outer") as outer:
        agent(1)
    (warned,) = [event for event in events if isinstance(event, BudgetWarned)]
    assert warned.run_id == outer.id


def test_several_budgets_on_one_unit_warn_each() -> None:
    """Each at its own share of its own cap."""
    events: list[Event] = []

    @tool(cost=1)
    def work() -> None: ...

    with policy(Budget(usd=5, name="a"), Budget(usd=10, name="b", warn_at=0.2), on_event=events.append).scope():
        for _ in range(5):
            work()
    assert [event.budget for event in events if isinstance(event, BudgetWarned)] == ["b", "a"]


def test_observe_mode_refuses_nothing_and_says_what_it_would_have(colour: Colour) -> None:
    """The call goes on, is paid for, and the refusal that wasn't is an event."""
    events: list[Event] = []

    @tool(cost=1)
    @colour.make
    def work() -> None: ...

    with policy(Budget(usd=1), mode="observe", on_event=events.append).scope() as run:
        for _ in range(3):
            colour.call(work)
        assert books(run) == (3, 0)
        assert (run.steps, run.refusals) == (3, 0)
    seen = [event for event in events if isinstance(event, ToolRefused)]
    assert [(event.code, event.observed, event.owner_id) for event in seen] == [("budget", True, run.id)] * 2


def test_an_enforced_budget_stands_beside_an_observed_one(colour: Colour) -> None:
    """What is observed isn't booked apart: both look at the same run."""

    @tool(cost=1)
    @colour.make
    def work() -> None: ...

    with policy(Budget(usd=2)).scope() as outer, policy(Budget(usd=1), mode="observe").scope() as inner:
        colour.call(work)
        colour.call(work)
        with refused():
            colour.call(work)
        assert books(outer) == books(inner) == (2, 0)


def test_a_budget_outside_any_run_is_the_guards_own(colour: Colour) -> None:
    """Listed on a tool's own guard it counts process-wide; current_run() stays None."""
    guard = Guard(Budget(usd=2))

    @guard.tool(cost=1)
    @colour.make
    def work() -> None:
        assert current_run() is None
        charge(usd=0.5)

    for _ in range(3):
        colour.call(work)
    with refused():
        colour.call(work)
    assert books(guard.outside) == (Decimal("1.5"), 0)


def test_a_guard_on_loop_and_tool_counts_once() -> None:
    """One guard in two places on one run is one budget."""
    guard = policy(Budget(usd=2))

    @guard.tool(cost=1)
    def work() -> None: ...

    @loop(max=2, guard=guard)
    def agent(n: int) -> int:
        work()
        return n + 1

    result = agent.run(0)
    assert (result.stop_reason, result.cost) == ("max_iterations", 2)


def test_a_loop_that_runs_out_of_money_ends_with_its_last_state() -> None:
    """The refusal that escapes the body is the loop's stop reason, not an error."""

    @tool(cost=0.4)
    def work() -> None: ...

    @loop(max=10, budget=Budget(usd=1))
    def agent(n: int) -> int:
        work()
        return n + 1

    result = agent.run(0)
    assert (result.value, result.stop_reason, result.completed, result.cost) == (2, "budget", False, Decimal("0.8"))
    assert isinstance(result.error, BudgetExceeded)


def test_runs_of_one_client_report_their_own_tokens() -> None:
    """C22: runs of 100 then 50 tokens, then three at once of 10, 20 and 30: each has its own usage."""

    @tool
    async def model(tokens: int) -> None:
        await asyncio.sleep(0)
        charge(tokens=tokens, input_tokens=tokens)

    @loop(max=1)
    async def agent(tokens: int) -> int:
        await model(tokens)
        await model(0)
        return tokens

    async def main() -> list[Any]:
        one_by_one = [await agent.run(100), await agent.run(50)]
        return [*one_by_one, *await asyncio.gather(*map(agent.run, (10, 20, 30)))]

    with pytest.warns(LoopGuardWarning, match="declare"):
        results = asyncio.run(main())
    assert [(result.usage.tokens, result.usage.input_tokens) for result in results] == [
        (n, n) for n in (100, 50, 10, 20, 30)
    ]
