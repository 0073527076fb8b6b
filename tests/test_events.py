"""Events: one stream that says what the live books say, built only when somebody listens."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopguard import (
    Approval,
    ApproveTool,
    Budget,
    Guard,
    LoopGuardWarning,
    LoopLimit,
    LoopResult,
    LoopStopped,
    MaxSteps,
    Run,
    ToolCallRefused,
    _events,
    charge,
    configure,
    current_run,
    loop,
    tool,
)
from loopguard._config import settings as config
from loopguard._events import (
    BudgetWarned,
    Charged,
    Event,
    IterationEnded,
    IterationStarted,
    ModelCalled,
    QuestionAnswered,
    QuestionAsked,
    RunEnded,
    RunStarted,
    Stopped,
    ToolFinished,
    ToolRefused,
    ToolStarted,
    Transitioned,
)
from tests.conftest import Colour

KINDS = [getattr(_events, name) for name in _events.__all__ if name != "Event"]


# -- the fold --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Folded:
    """What the events say about one run, its descendants counted."""

    steps: int = 0
    refusals: int = 0
    spent: Counter[str] = dataclasses.field(default_factory=Counter)
    values: list[Any] = dataclasses.field(default_factory=list)
    costs: dict[int, Fraction] = dataclasses.field(default_factory=lambda: defaultdict(Fraction))
    end: RunEnded | None = None


def fold(stream: list[Event]) -> dict[str, Folded]:
    """Every run's counters and result, from nothing but its events."""
    parents = {event.run_id: event.parent_id for event in stream if isinstance(event, RunStarted)}
    runs = {run_id: Folded() for run_id in parents}

    def chain(run_id: str | None) -> Iterator[Folded]:
        while run_id is not None:
            yield runs[run_id]
            run_id = parents[run_id]

    for event in stream:
        match event:
            case ToolStarted(attempt=1):
                for run in chain(event.run_id):
                    run.steps += 1
            case ToolRefused(observed=False):
                for run in chain(event.run_id):
                    run.refusals += 1
            case ToolFinished(charged=amounts) | Charged(amounts=amounts) | ModelCalled(charged=amounts):
                for run in chain(event.run_id):
                    run.spent.update({unit: Fraction(value) for unit, value in amounts.items()})
            case IterationEnded():
                runs[event.run_id].values.append(event.value)
            case RunEnded():
                assert runs[event.run_id].end is None, "a run ends once"
                runs[event.run_id].end = event
    return runs


def assert_the_books_agree(stream: list[Event], runs: list[Run], results: dict[str, LoopResult[Any]]) -> None:
    """The fold of the events, the runs' own counters and the loops' results are one and the same."""
    folded = fold(stream)
    assert set(folded) >= {run.id for run in runs}
    for run in runs:
        said = folded[run.id]
        assert (said.steps, said.refusals) == (run.steps, run.refusals)
        assert {unit: amount for unit, amount in said.spent.items() if amount} == {
            unit: Fraction(run.spent(unit)) for unit in run.cells if run.spent(unit)
        }
        assert all(run.reserved(unit) == 0 for unit in run.cells)
        assert said.end is not None
    for run_id, result in results.items():
        said, end = folded[run_id], folded[run_id].end
        assert end is not None
        assert (end.stop_reason, end.value, end.iterations) == (result.stop_reason, result.value, result.iterations)
        assert said.values == [iteration.value for iteration in result.history]
        assert end.error is result.error
        assert said.spent["usd"] == Fraction(result.cost or 0)


@dataclasses.dataclass(frozen=True)
class Act:
    """One thing that a body of the script does."""

    kind: str
    cost: int = 0
    reported: int | None = None
    fails: bool = False
    below: tuple[tuple[Act, ...], ...] = ()


simple_acts = st.one_of(
    st.builds(
        Act,
        kind=st.sampled_from(["sync", "generator", "priced", "undeclared", "denied", "twice"]),
        cost=st.integers(0, 9),
        reported=st.one_of(st.none(), st.integers(0, 12)),
        fails=st.booleans(),
    ),
    st.builds(Act, kind=st.sampled_from(["charge", "stop"]), cost=st.integers(1, 9)),
)
acts = st.recursive(
    simple_acts,
    lambda inner: st.builds(
        Act,
        kind=st.sampled_from(["gather", "threads", "loop", "scope"]),
        below=st.lists(st.lists(inner, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),
    ),
    max_leaves=12,
)


class Boom(Exception):
    """What a tool of the script raises."""


class Script:
    """Random loops that call tools, alone and in parallel, nest, swallow refusals and fail."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.results: dict[str, LoopResult[Any]] = {}
        self.lock = threading.Lock()

        def body(cost: int, reported: int | None, fails: bool) -> int:
            if reported is not None:
                charge(usd=reported)
            if fails:
                raise Boom
            return cost

        def items(cost: int, reported: int | None, fails: bool) -> Iterator[int]:
            yield 1
            yield body(cost, reported, fails)

        self.tools: dict[str, Callable[..., Any]] = {
            "sync": tool(cost={"usd": 3, "credits": 1}, name="sync")(body),
            "generator": tool(cost=2, name="generator")(items),
            "priced": tool(cost=lambda call: call.arguments["cost"], name="priced")(body),
            "undeclared": tool(name="undeclared")(body),
            "denied": tool(cost=1, name="denied", approve=True)(body),
        }

    def note(self, run: Run | None) -> None:
        assert run is not None
        with self.lock:
            if run not in self.runs:
                self.runs.append(run)

    def perform(self, act: Act) -> None:
        """Do it, and swallow what every agent swallows."""
        try:
            if act.kind == "charge":
                charge(usd=act.cost, credits=act.cost)
            elif act.kind == "stop":
                run = current_run()
                assert run is not None
                run.stop("the script says so")
            elif act.kind == "loop":
                self.loop(act.below)
            elif act.kind == "scope":
                with Guard(Budget(credits=20)).scope() as run:
                    self.note(run)
                    for batch in act.below:
                        self.each(batch)
            elif act.kind == "gather":
                context = contextvars.copy_context()
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(context.run, asyncio.run, self.gather(act.below)).result(30)
            elif act.kind == "threads":
                run = current_run()
                assert run is not None
                with ThreadPoolExecutor(len(act.below)) as pool:
                    for future in [pool.submit(run.bind(self.each), batch) for batch in act.below]:
                        future.result(30)
            else:
                for _ in range(2 if act.kind == "twice" else 1):
                    result = self.tools["sync" if act.kind == "twice" else act.kind](act.cost, act.reported, act.fails)
                    if act.kind == "generator":
                        for _item in result:
                            break
                        del result
        except (ToolCallRefused, Boom):
            pass

    def each(self, batch: tuple[Act, ...]) -> None:
        for act in batch:
            self.perform(act)

    async def gather(self, batches: tuple[tuple[Act, ...], ...]) -> None:
        async def one(batch: tuple[Act, ...]) -> None:
            for act in batch:
                await asyncio.sleep(0)
                self.perform(act)

        await asyncio.gather(*map(one, batches))

    def loop(self, batches: tuple[tuple[Act, ...], ...]) -> None:
        """One iteration for each batch; the last act of it isn't guarded, so that its refusal may end the loop."""

        @loop(max=4, until=lambda n: n >= len(batches), guard=Guard(MaxSteps(12), Budget(usd=60, credits=12)))
        def agent(n: int) -> int:
            self.note(current_run())
            batch = batches[n]
            self.each(batch[:-1])
            for act in batch[-1:]:
                if act.kind in self.tools and act.kind != "generator":
                    self.tools[act.kind](act.cost, act.reported, act.fails)
                else:
                    self.perform(act)
            return n + 1

        result = agent.run(0)
        with self.lock:
            self.results[result.run_id] = result


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.lists(acts, max_size=4).map(tuple), min_size=1, max_size=4).map(tuple))
def test_the_events_say_what_the_books_say(batches: tuple[tuple[Act, ...], ...]) -> None:
    """Folding the stream gives every run's counters and every loop's result, whatever ran in parallel."""
    stream: list[Event] = []
    script = Script()
    deny = ApproveTool(lambda call: Approval.deny("no"), only="denied")
    policy = Guard(LoopLimit(2), deny, Budget(usd=100), max_refusals=10**6, on_event=stream.append)
    with policy.scope("top") as top:
        script.note(top)
        try:
            script.loop(batches)
        except (ToolCallRefused, Boom, LoopStopped):
            pass
    assert_the_books_agree(stream, script.runs, script.results)


def test_a_loop_that_raises_at_its_ceiling_ends_the_same_in_its_events() -> None:
    """on_limit="raise" is told apart from an error: the events say max_iterations, as the result does."""
    stream: list[Event] = []

    @loop(max=2, until=lambda n: False, on_limit="raise", guard=Guard(on_event=stream.append))
    def agent(n: int) -> int:
        return n + 1

    with pytest.raises(LoopStopped) as raised:
        agent(0)
    (end,) = [event for event in stream if isinstance(event, RunEnded)]
    assert (end.stop_reason, end.iterations, end.value) == (raised.value.result.stop_reason, 2, 2)
    assert end.stop_reason == "max_iterations"


def test_an_error_that_leaves_a_loop_is_in_its_last_event() -> None:
    """The run ended with `error`, after the iterations that were completed."""
    stream: list[Event] = []
    error = Boom("broken")

    @loop(max=3, guard=Guard(on_event=stream.append))
    def agent(n: int) -> int:
        if n == 1:
            raise error
        return n + 1

    with pytest.raises(Boom):
        agent(0)
    (end,) = [event for event in stream if isinstance(event, RunEnded)]
    assert (end.stop_reason, end.iterations, end.value, end.error) == ("error", 1, 1, error)


# -- the stream ------------------------------------------------------------------------------------


def test_the_stream_tells_one_call_in_order(colour: Colour) -> None:
    """Started before the body, finished after it, with what was reserved and what was charged."""
    stream: list[Event] = []

    @tool(cost={"usd": 2})
    @colour.make
    def work(query: str) -> str:
        assert isinstance(stream[-1], ToolStarted)
        charge(usd=0.5, tokens=7)
        return query.upper()

    @loop(max=1, guard=Guard(on_event=stream.append))
    def agent(n: int) -> int:
        colour.call(work, "x")
        return n

    agent(0)
    assert [type(event) for event in stream] == [
        RunStarted, Transitioned, IterationStarted, ToolStarted, ToolFinished, IterationEnded, Transitioned, RunEnded,
    ]  # fmt: skip
    started, finished = stream[3:5]
    assert isinstance(started, ToolStarted)
    assert isinstance(finished, ToolFinished)
    assert (started.tool, started.arguments, started.reserved, started.attempt) == (
        "work",
        {"query": "x"},
        {"usd": 2},
        1,
    )
    assert (finished.outcome, finished.charged, finished.overrun) == (
        "returned", {"usd": Decimal("0.5"), "tokens": 7}, True,
    )  # fmt: skip
    assert started.call_id == finished.call_id
    assert {event.run_id for event in stream} == {started.run_id}
    assert (started.iteration, finished.iteration) == (1, 1)
    assert finished.duration >= 0


@pytest.mark.parametrize("outcome", ["returned", "raised", "cancelled", "closed"])
def test_an_outcome_is_named(outcome: str) -> None:
    """A call returned, raised, was cancelled, or (a generator) was left early."""
    stream: list[Event] = []

    @tool
    async def work() -> Any:
        if outcome == "raised":
            raise Boom
        if outcome == "cancelled":
            await asyncio.Event().wait()

    @tool
    def items() -> Iterator[int]:
        yield 1
        yield 2

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with Guard(on_event=stream.append).scope():
        if outcome == "closed":
            for _ in items():
                break
        elif outcome == "cancelled":
            asyncio.run(main())
        else:
            asyncio.run(_ignoring(work))
    (finished,) = [event for event in stream if isinstance(event, ToolFinished)]
    assert finished.outcome == outcome


async def _ignoring(fn: Callable[[], Any]) -> None:
    await asyncio.gather(fn(), return_exceptions=True)


def test_a_question_and_its_answer_are_events() -> None:
    """Who was asked about what, and what they said."""
    stream: list[Event] = []
    edit = ApproveTool(lambda call: Approval.edit({"amount": 5}, "too much", by="kim"))

    @tool(approve=True)
    def refund(amount: int) -> int:
        return amount

    with Guard(edit, on_event=stream.append).scope() as run:
        assert refund(10) == 5
    (asked,) = [event for event in stream if isinstance(event, QuestionAsked)]
    (answered,) = [event for event in stream if isinstance(event, QuestionAnswered)]
    assert (asked.kind, asked.tool, asked.arguments, asked.run_id) == ("approval", "refund", {"amount": 10}, run.id)
    assert (answered.question_id, answered.decision, answered.reason, answered.by) == (
        asked.question_id, "edit", "too much", "kim",
    )  # fmt: skip
    assert answered.arguments == {"amount": 5}


def test_a_stop_is_an_event_and_what_it_refuses_too() -> None:
    """run.stop() says why; later calls are refused in the name of the run that was stopped."""
    stream: list[Event] = []

    @tool
    def work() -> None: ...

    with Guard(on_event=stream.append).scope() as outer, Guard().scope() as inner:
        outer.stop("enough")
        with pytest.raises(ToolCallRefused):
            work()
    (stopped,) = [event for event in stream if isinstance(event, Stopped)]
    (refused,) = [event for event in stream if isinstance(event, ToolRefused)]
    assert (stopped.run_id, stopped.reason) == (outer.id, "enough")
    assert (refused.run_id, refused.owner_id, refused.code) == (inner.id, outer.id, "stopped")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_event_is_frozen_data(kind: type[Event]) -> None:
    """No subscriber can change what another one sees."""
    blank = {field.name: None for field in dataclasses.fields(kind)}
    event = kind(**blank)  # type: ignore[arg-type]  # only the shape matters here
    for name in (*blank, "anything"):
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            setattr(event, name, 1)
    assert all(not inspect.ismethod(getattr(event, name)) for name in blank)


# -- subscribers -----------------------------------------------------------------------------------


@contextmanager
def counting_events() -> Iterator[list[type[Event]]]:
    """The classes of all events that are built inside, seen by the interpreter's own profiler."""
    built: list[type[Event]] = []

    def profile(frame: Any, what: str, arg: Any) -> None:
        if what == "call" and frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), Event):
            built.append(type(frame.f_locals["self"]))

    sys.setprofile(profile)
    try:
        yield built
    finally:
        sys.setprofile(None)


def _busy(guard: Guard) -> None:
    """A loop with nearly everything in it that can be an event."""

    @tool(cost=1)
    def work() -> None: ...

    @tool(approve=True)
    def gated() -> None: ...

    @loop(max=2, guard=guard)
    def agent(n: int) -> int:
        work()
        gated()
        charge(usd=8)
        with suppress(ToolCallRefused):
            for _ in range(4):
                work()
        return n + 1

    agent(0)


@pytest.mark.parametrize("subscribed", [False, True])
def test_events_are_built_only_for_subscribers(subscribed: bool) -> None:
    """Nobody listens: not one event object is made."""
    stream: list[Event] = []
    guardrails = [Budget(usd=10), ApproveTool(lambda call: True), LoopLimit(2)]
    guard = Guard(*guardrails, on_event=stream.append if subscribed else None)
    with counting_events() as built:
        _busy(guard)
    kinds = {ToolStarted, ToolFinished, ToolRefused, Charged, BudgetWarned, QuestionAsked, RunEnded, Transitioned}
    assert {type(event) for event in stream} >= (kinds if subscribed else set())
    assert set(built) >= {type(event) for event in stream}
    assert bool(built) == bool(stream) == subscribed


@pytest.mark.parametrize("error", [Boom("x"), ToolCallRefused("budget", "x", "y"), RecursionError()], ids=repr)
def test_a_subscriber_that_raises_changes_nothing(colour: Colour, error: Exception) -> None:
    """It warns; results, counters and the other subscribers are as they were."""
    stream: list[Event] = []

    def broken(event: Event) -> None:
        raise error

    @tool(cost=1)
    @colour.make
    def work() -> int:
        return 7

    def main() -> None:
        with Guard(Budget(usd=1), on_event=broken).scope(), Guard(on_event=stream.append).scope() as run:
            assert colour.call(work) == 7
            with pytest.raises(ToolCallRefused, match=r"work may cost \$1"):
                colour.call(work)
            assert (run.spent("usd"), run.reserved("usd"), run.steps, run.refusals) == (1, 0, 1, 1)

    with pytest.warns(LoopGuardWarning, match=f"on_event raised {type(error).__name__}"):
        main()
    assert {ToolStarted, ToolFinished, ToolRefused} <= {type(event) for event in stream}


def test_a_process_wide_subscriber_is_treated_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """configure(on_event=…): redacted copies, and what it raises changes nothing."""
    monkeypatch.setattr(config, "on_event", ())
    seen: list[Event] = []

    def listener(event: Event) -> None:
        seen.append(event)
        raise Boom

    configure(on_event=listener)

    @tool
    def work(api_key: str) -> int:
        return 7

    def main() -> None:
        with Guard().scope():
            assert work("sk-secret-0123456789") == 7
        assert work("sk-secret-0123456789") == 7, "outside any run, too"

    with pytest.warns(LoopGuardWarning, match="on_event raised Boom"):
        main()
    assert sum(isinstance(event, ToolFinished) for event in seen) == 2
    assert "secret" not in repr(seen)


def test_subscribers_see_masks_and_the_tool_the_originals(colour: Colour) -> None:
    """Arguments, results, states and reasons are masked in events; the caller's objects are never changed."""
    stream: list[Event] = []
    secret = "sk-ant-api03-abcdefghijklmnopqrstuvwxyz0123456789"
    state = {"password": secret, "n": 1}

    @tool
    @colour.make
    def login(password: str, options: dict[str, Any]) -> dict[str, Any]:
        assert password == secret
        assert options is passed
        return {"access_token": secret, "user": "kim"}

    passed = {"authorization": secret, "page": 2}

    @loop(max=1, guard=Guard(on_event=stream.append))
    def agent(state: dict[str, Any]) -> dict[str, Any]:
        assert colour.call(login, secret, passed) == {"access_token": secret, "user": "kim"}
        run = current_run()
        assert run is not None
        run.stop(f"the key {secret} leaked")
        return state

    assert agent(state) is state
    assert (state["password"], passed["authorization"]) == (secret, secret)
    shown = [dataclasses.replace(event, error=None) if hasattr(event, "error") else event for event in stream]
    assert secret not in repr(shown), "an exception stays the object it is: who shows it redacts its text"
    (started,) = [event for event in stream if isinstance(event, ToolStarted)]
    (finished,) = [event for event in stream if isinstance(event, ToolFinished)]
    assert started.arguments["options"]["page"] == 2
    if "generator" not in colour.name:
        assert finished.result["user"] == "kim"


def test_a_guard_that_stands_twice_hears_everything_once() -> None:
    """On a loop, on its tools and on an outer scope it is one subscriber."""
    stream: list[Event] = []
    guard = Guard(Budget(usd=10), on_event=stream.append)

    @guard.tool(cost=1)
    def work() -> None: ...

    @loop(max=1, guard=guard)
    def agent(n: int) -> int:
        work()
        return n

    with guard.scope():
        agent(0)
    once = (IterationStarted, ToolStarted, ToolFinished, IterationEnded)
    assert Counter(map(type, stream)) == {**dict.fromkeys(once, 1), RunStarted: 2, Transitioned: 2, RunEnded: 2}
