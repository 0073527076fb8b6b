"""what_if: what a policy would have said of a recorded run is what it says of the same run live."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import anthropic
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from loopguard import (
    Budget,
    CircuitBreaker,
    ConfigurationError,
    Guard,
    JournalError,
    LoopLimit,
    MaxSteps,
    PriceBook,
    RateLimit,
    Retry,
    ToolCallRefused,
    Usage,
    WrapTool,
    charge,
    current_run,
    journal,
    loop,
    meter,
    tool,
    what_if,
)
from loopguard import _events as events
from loopguard.journal import _writer
from loopguard.journal._fold import fold
from loopguard.testing import MessagesServer

# -- a scripted run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A tool call: what it is given, and what comes of it."""

    tool: str
    argument: int
    outcome: int
    """What it returns; below 0 it raises."""
    charged: int = 0
    """Cents, of a tool that reports."""


@dataclass(frozen=True)
class Ask:
    """A model call."""

    max_tokens: int


@dataclass(frozen=True)
class Wait:
    """Time passes."""

    seconds: int


@dataclass(frozen=True)
class Child:
    """A loop inside, of one iteration."""

    steps: tuple[Any, ...]


class Told(Exception):
    """The first refusal, on its way out of the loop."""

    def __init__(self, refusal: ToolCallRefused) -> None:
        super().__init__(refusal)
        self.refusal = refusal


@dataclass
class Stage:
    """Where a script is played."""

    client: anthropic.Anthropic
    clock: float = 1_000_000.0
    now: Any = None
    spent: dict[str, Decimal] = field(default_factory=dict)

    def play(self, script: list[list[Any]], guard: Guard, **options: Any) -> ToolCallRefused | None:
        """Play it, an iteration for each list, up to its first refusal."""

        @loop(max=len(script), guard=guard, **options)
        def scripted(done: int) -> int:
            for step in script[done]:
                self.take(step)
            return done + 1

        self.clock, self.spent = 1_000_000.0, {}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(time, "time", lambda: self.clock)
            try:
                scripted.run(0, **({"run_id": "recorded"} if options else {}))
            except Told as told:
                return told.refusal
        return None

    def take(self, step: Any) -> None:
        """One step of a script."""
        try:
            match step:
                case Call():
                    self.now = step
                    TOOLS[step.tool](step.argument)
                case Ask():
                    message = {"role": "user", "content": "hi"}
                    self.client.messages.create(model="m", max_tokens=step.max_tokens, messages=[message])  # type: ignore[typeddict-item]  # built from a text
                case Wait():
                    self.clock += step.seconds
                case Child():
                    self.inside(step)
        except ToolCallRefused as refusal:
            root = current_run().chain[0]  # type: ignore[union-attr]  # inside a loop
            self.spent = {unit: root.spent(unit) for unit, cell in root.cells.items() if cell.spent}
            raise Told(refusal) from None
        except ZeroDivisionError:
            pass
        finally:
            self.clock += 0.25

    def inside(self, child: Child) -> None:
        """A loop within the loop."""

        @loop(max=1)
        def inner(n: int) -> int:
            for step in child.steps:
                self.take(step)
            return n

        inner(0)


STAGE: list[Stage] = []


def outcome(n: int) -> int:
    """What the script says."""
    call = STAGE[-1].now
    if call.charged and call.tool in ("reported", "surprising"):
        charge(usd=Decimal(call.charged) / 100)
    if call.outcome < 0:
        raise ZeroDivisionError(call.outcome)
    return int(call.outcome)


TOOLS: dict[str, Callable[[int], int]] = {
    "free": tool(name="free")(outcome),
    "cheap": tool(name="cheap", cost=0.1)(outcome),
    "reported": tool(name="reported", cost=0.5)(outcome),
    "surprising": tool(name="surprising")(outcome),
    "paged": tool(name="paged", cost={"usd": 0.02, "pages": 3})(outcome),
    "counted": tool(name="counted", cost=lambda call: call.arguments["n"] / 10)(outcome),
    "poll": tool(name="poll", repeatable=True)(outcome),
}

CALLS = st.builds(Call, st.sampled_from(sorted(TOOLS)), st.integers(0, 2), st.integers(-2, 2), st.integers(0, 60))
STEPS = st.one_of(
    CALLS,
    CALLS,
    CALLS,
    st.builds(Ask, st.integers(1, 400)),
    st.builds(Wait, st.integers(1, 30)),
    st.builds(Child, st.lists(CALLS, max_size=4).map(tuple)),
)
SCRIPTS = st.lists(st.lists(STEPS, min_size=5, max_size=9), min_size=1, max_size=3)


def clock() -> float:
    """The stage's time, by which limits count while they are live."""
    return time.time()


LIMITS = st.lists(
    st.one_of(
        st.builds(MaxSteps, st.integers(0, 8), st.sampled_from([None, "c*", lambda call: call.arguments["n"] == 1])),
        st.builds(MaxSteps, st.integers(0, 4), per=st.just("iteration")),
        st.builds(LoopLimit, st.integers(0, 3), ttl=st.sampled_from([None, 10]), timer=st.just(clock)),
        st.builds(LoopLimit, st.integers(1, 3), strict=st.just(True)),
        st.builds(RateLimit, st.integers(1, 3), st.integers(1, 20), timer=st.just(clock)),
        st.builds(CircuitBreaker, st.integers(1, 2), st.integers(1, 20), timer=st.just(clock)),
        st.builds(Budget, usd=st.integers(0, 150).map(lambda cents: Decimal(cents) / 100)),
        st.builds(Budget, tokens=st.integers(0, 900)),
        st.builds(Budget, usd=st.just(1), pages=st.integers(0, 9), tool_calls=st.integers(0, 9)),
    ),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """A stage with a model on it."""
    with MessagesServer(itertools.repeat("a word")) as server:
        client = meter(
            anthropic.Anthropic(base_url=server.url, api_key="test"),
            prices=PriceBook({"m": {"input": 100, "output": 500}}),
        )
        STAGE.append(Stage(client))
        yield STAGE[-1]
        STAGE.pop()


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(script=SCRIPTS, limits=LIMITS)
@example(script=[[Call("free", 0, 0)] * 9], limits=[])  # the default LoopLimit counts
@example(script=[[Call("poll", 0, 0)] * 9], limits=[])
@example(script=[[Ask(300)] * 4], limits=[Budget(usd=Decimal("0.2"))])
@example(  # two caps of one budget are used up at once
    script=[[Ask(1)] * 3 + [Call("cheap", 0, 0), Call("cheap", 0, 0), Call("reported", 0, 0), Call("reported", 0, 0)]],
    limits=[Budget(usd=1, pages=0, tool_calls=3)],
)
def test_a_policy_says_of_the_record_what_it_says_live(
    stage: Stage, tmp_path_factory: pytest.TempPathFactory, script: list[list[Any]], limits: list[Any]
) -> None:
    """The same first refusal, code, limit and owner, and the same amounts spent up to it, in every unit."""
    store = f"sqlite:///{tmp_path_factory.mktemp('store') / 'runs.db'}"
    assert stage.play(script, Guard(LoopLimit(0)), store=store) is None
    guard = Guard(*limits)
    said = what_if(journal.open(store).events("recorded"), guard)
    root = journal.open(store).story("recorded").root
    _writer.close_writers()
    live = stage.play(script, guard)
    assert said.all_spent == {unit: Decimal(spent) / 10**18 for unit, spent in root.spent.items() if spent}  # type: ignore[union-attr]  # there is one
    if live is None:
        assert said.first is None
        assert (said.spent, said.calls) == (said.all_spent, said.all_calls)
        return
    assert said.first is not None
    first = said.first
    assert (first.code, first.tool, first.guardrail) == (live.code, live.tool, live.guardrail)
    assert (first.limit, first.value) == (live.limit, live.value)
    assert said.spent == stage.spent


# -- what else it says -----------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store."""
    yield f"sqlite:///{tmp_path / 'runs.db'}"
    _writer.close_writers()


def recorded(store: str, body: Callable[[int], int], *limits: Any, **options: Any) -> journal.OpenJournal:
    """A journal with one run of one iteration."""
    loop(max=1, guard=Guard(LoopLimit(0), *limits), store=store, name="agent", **options)(body).run(0, run_id="r")
    return journal.open(store)


@tool(cost=0.25)
def fetch(page: int) -> int:
    """Costs a quarter."""
    return page


def fetch_four(n: int) -> int:
    """A body of four calls."""
    return sum(fetch(page) for page in range(4))


def test_it_says_where_it_would_have_stopped_and_what_that_saves(store: str) -> None:
    """The first refusal, the calls before it, what was spent until then, and what after."""
    said = what_if(recorded(store, fetch_four).events("r"), Guard(Budget(usd=0.60)))
    assert (said.run_id, said.name, said.calls, said.all_calls) == ("r", "agent", 2, 4)
    assert (said.spent, said.saved) == ({"usd": Decimal("0.5")}, {"usd": Decimal("0.5")})
    assert [(refusal.code, refusal.arguments, refusal.iteration) for refusal in said.refusals] == [
        ("budget", {"page": 2}, 1),
        ("budget", {"page": 3}, 1),
    ]
    assert str(said) == (
        "agent would have been refused fetch in iteration 1 (budget), after 2 of 4 calls and $0.5; ending there would "
        "have saved $0.5"
    )


def test_a_refusal_has_the_time_of_the_recorded_call(store: str) -> None:
    """Not of the moment at which somebody asks."""
    book = recorded(store, fetch_four).events("r")
    first = what_if(book, Guard(MaxSteps(0))).first
    assert first is not None
    assert first.at == next(event.at for event in book if type(event).__name__ == "ToolStarted")


def test_a_policy_that_lets_all_pass_saves_nothing(store: str) -> None:
    """No refusal, and everything spent."""
    said = what_if(recorded(store, fetch_four).events("r"), Guard(MaxSteps(4), Budget(usd=1)))
    assert (said.first, said.saved, said.calls) == (None, {}, 4)
    assert str(said) == "agent would have gone through: 4 calls, $1"


def test_hooks_take_no_part(store: str) -> None:
    """Nobody is asked, nothing is wrapped: only limits decide with data."""

    def forbidden(call: Any, proceed: Any) -> Any:
        raise AssertionError("what is recorded isn't run")
        yield

    said = what_if(recorded(store, fetch_four).events("r"), Guard(WrapTool(forbidden), Retry(2), MaxSteps(3)))
    assert [refusal.code for refusal in said.refusals] == ["max_steps"]


def test_nobody_hears_of_it(store: str) -> None:
    """Subscribers of the guard hear of what happens, not of what might have."""
    heard: list[Any] = []
    events = recorded(store, fetch_four).events("r")
    what_if(events, Guard(MaxSteps(1), on_event=heard.append))
    assert heard == []


def test_a_guard_in_use_is_not_used_up(store: str) -> None:
    """A RateLimit and a CircuitBreaker belong to the process: a question about the past leaves them as they are."""
    events = recorded(store, fetch_four).events("r")
    guard = Guard(RateLimit(2, 3600))
    assert what_if(events, guard).calls == 2
    with guard.scope("live"):
        assert [fetch(0), fetch(1)] == [0, 1]
    assert what_if(events, guard).calls == 2


def test_attempts_of_one_call_are_one_call(store: str) -> None:
    """A retried call is one step and one repeat; each attempt reserves its own cost."""
    failures = [1, 1]

    @tool(cost=0.1, idempotent=True)
    def shaky(n: int) -> int:
        if failures:
            failures.pop()
            charge(usd=0.1)
            raise ConnectionError
        return n

    book = recorded(store, lambda n: shaky(1) + shaky(1), Retry(2, wait=0)).events("r")
    assert what_if(book, Guard(MaxSteps(2), LoopLimit(2))).first is None
    said = what_if(book, Guard(Budget(usd=0.25)))
    assert [(refusal.code, refusal.tool) for refusal in said.refusals] == [("budget", "shaky")] * 2
    assert (said.calls, said.all_calls, said.spent) == (0, 2, {"usd": Decimal("0.2")})


def test_two_objects_are_not_taken_for_one(store: str) -> None:
    """The same method of two objects is two calls, as it is live."""

    class Feed:
        @tool
        def read(self) -> int:
            return 0

    def body(n: int) -> int:
        feeds = [Feed() for _ in range(3)]
        return sum(feed.read() for feed in feeds)

    book = recorded(store, body).events("r")
    assert what_if(book, Guard(LoopLimit(1))).first is None


def test_erased_arguments_are_not_taken_for_the_same(store: str) -> None:
    """Of what was erased nobody can say that it was repeated."""
    book = recorded(store, fetch_four)
    with contextlib.closing(sqlite3.connect(store.removeprefix("sqlite:///"), isolation_level=None)) as db:
        db.execute("UPDATE events SET payload = NULL, salt = NULL")
    assert what_if(book.events("r"), Guard(LoopLimit(1))).first is None


def test_an_interrupted_call_gives_back_its_step(store: str) -> None:
    """A resumed run counts as it does live: what the interruption left open isn't a step."""
    trouble = [KeyboardInterrupt()]

    @tool(cost=0.1, idempotent=True)
    def slow(n: int) -> int:
        if trouble:
            raise trouble.pop()
        return n

    @loop(max=1, store=store, name="agent")
    def agent(n: int) -> int:
        return slow(1)

    with pytest.raises(KeyboardInterrupt):
        agent.run(0, run_id="r")
    agent.resume("r")
    book = journal.open(store)
    root = book.story("r").root
    assert root is not None
    said = what_if(book.events("r"), Guard(MaxSteps(root.steps)))
    assert said.first is None
    assert said.all_spent == {unit: Decimal(spent) / 10**18 for unit, spent in root.spent.items() if spent}


def test_what_an_interruption_leaves_open_counts_as_it_does_on_resume() -> None:
    """A tool gives back its step, until a person says that it ran; a model may have been billed."""
    at: dict[str, Any] = {"run_id": "r", "at": 1.0}
    cost = {"usd": Decimal("0.5")}
    sent: dict[str, Any] = {**at, "tool": "send", "arguments": {}, "reserved": cost, "key": "k", "digest": "d"}
    stream = [
        events.RunStarted(**at, name="agent", kind="loop"),
        events.ToolStarted(**sent, call_id="c1"),
        events.ModelStarted(**at, call_id="m1", model="m", reserved={"usd": Decimal(2), "tokens": Decimal(7)}),
        events.RunResumed(**at),
        events.QuestionAsked(**at, question_id="q", kind="uncertain", call_id="k", tool="send", arguments={}),
        events.QuestionAnswered(**at, question_id="q", kind="uncertain", tool="send", decision="ran"),
        events.ModelCalled(**at, call_id="batch", model="m", usage=Usage(), charged=cost, cost=Decimal("0.5")),
    ]
    root = fold(stream).root
    assert root is not None
    assert root.steps == 1
    assert what_if(stream, Guard()).all_spent == {unit: Decimal(spent) / 10**18 for unit, spent in root.spent.items()}
    once_more = [*stream, events.ToolStarted(**{**sent, "digest": "e"}, call_id="c2")]
    assert what_if(once_more, Guard(MaxSteps(2))).first is None
    assert what_if(once_more, Guard(MaxSteps(1))).calls == 2


def test_generators_are_known_by_what_they_yield(store: str) -> None:
    """A repeat that yields something else is new."""
    pages = itertools.count()

    @tool
    def stream() -> Iterator[int]:
        yield next(pages)

    def body(n: int) -> int:
        return sum(sum(stream()) for _ in range(6))

    assert what_if(recorded(store, body).events("r"), Guard(LoopLimit(2))).first is None


def test_what_is_no_guard_is_an_error(store: str) -> None:
    """The message says what to give."""
    with pytest.raises(ConfigurationError, match="give a Guard"):
        what_if([], MaxSteps(3))  # type: ignore[arg-type]  # the point


def test_a_budget_of_a_period_is_an_error(store: str) -> None:
    """What it would have said depends on other runs, and its ledger is in use."""
    budget = Budget(usd=1)
    budget.per = "day"  # type: ignore[assignment,misc]  # as one of a day is
    with pytest.raises(ConfigurationError, match="limits per run"):
        what_if(recorded(store, fetch_four).events("r"), Guard(budget))


def test_events_of_no_run_are_an_error(store: str) -> None:
    """Neither an empty list, nor one that begins in the middle, is a run."""
    book = recorded(store, fetch_four).events("r")
    with pytest.raises(JournalError, match="no events"):
        what_if([], Guard())
    with pytest.raises(JournalError, match="before it starts"):
        what_if(book[2:], Guard())
