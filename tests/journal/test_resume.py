"""Runs that were interrupted go on where they were, and nothing that had finished runs again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest

from loopguard import (
    Budget,
    CheckpointError,
    ConfigurationError,
    EvaluationFailed,
    Guard,
    JournalError,
    LoopLimit,
    LoopLimitExceeded,
    LoopStopped,
    MaxSteps,
    RecordedError,
    RunConflict,
    RunNotFound,
    StopReason,
    Verdict,
    charge,
    configure,
    current_call,
    current_run,
    journal,
    loop,
    result_of,
    tool,
)
from loopguard._config import settings
from loopguard.conditions import unchanged
from loopguard.testing import capture


class Killed(BaseException):
    """Stands for the death of the process, as far as one process can have it."""


@dataclass
class State:
    n: int
    notes: tuple[str, ...] = ()


@dataclass
class More(State):
    extra: int = 0


def test_a_failed_iteration_is_run_again_without_its_finished_calls(store: str, ran: list[str]) -> None:
    """C51: charge() finished, notify() raised; after the resume charge() ran once, and its result is the stored one."""
    failing = True

    @tool(cost=0.25)
    def take(n: int) -> str:
        ran.append(f"take {n}")
        return f"taken {len(ran)}"

    @tool
    def notify(n: int) -> None:
        ran.append(f"notify {n}")
        if failing and n == 2:
            raise ConnectionError("no route")

    @loop(max=3, store=store)
    def step(state: State) -> State:
        taken = take(state.n + 1)
        notify(state.n + 1)
        return State(state.n + 1, (*state.notes, taken))

    with pytest.raises(ConnectionError):
        step.run(State(0), run_id="r")
    assert step.pending() == ["r"]
    failing = False
    result = step.run(State(0), run_id="r")
    assert ran == ["take 1", "notify 1", "take 2", "notify 2", "notify 2", "take 3", "notify 3"]
    assert result.value == State(3, ("taken 1", "taken 3", "taken 6"))
    assert (result.iterations, result.cost, result.stop_reason) == (3, Decimal("0.75"), StopReason.MAX_ITERATIONS)
    assert step.pending() == []


def test_a_finished_run_returns_its_recorded_result(store: str, ran: list[str]) -> None:
    """Zero body calls: the result is equal to the one that was returned then, history and transitions included."""

    @loop(max=5, until=lambda s: s.n == 2, store=store, budget=Budget(usd=1))
    def step(state: State) -> State:
        ran.append("body")
        charge(usd=0.1)
        return State(state.n + 1)

    first = step.run(State(0), run_id="order/42")
    again = step.run(State(0), run_id="order/42")
    assert len(ran) == 2
    assert (again.value, again.history[0].value, again.stop_reason, again.completed, again.cost) == (
        first.value,
        State(1),
        StopReason.UNTIL,
        True,
        Decimal("0.2"),
    )
    assert again.transitions == first.transitions
    assert [each.cost for each in again.history] == [Decimal("0.1"), Decimal("0.1")]
    assert step.resume("order/42").value == first.value
    with pytest.raises(RunConflict, match="another state"):
        step.run(State(1), run_id="order/42")


def test_an_unknown_run_can_not_be_resumed(store: str) -> None:
    """RunNotFound, and no run comes of it; without any store it is a ConfigurationError."""

    @loop(max=1, store=store)
    def step(n: int) -> int:
        return n

    with pytest.raises(RunNotFound):
        step.resume("nobody")
    assert journal.open(store).runs() == []


def test_a_file_name_is_no_store_and_says_so_at_once() -> None:
    """Not at the first run; and what was set before stays."""
    before = settings.store
    with pytest.raises(
        ConfigurationError, match=r"configure\(store='runs\.db'\): give a URL, such as sqlite:///runs\.db"
    ):
        configure(store="runs.db")
    assert settings.store is before


def test_the_store_can_be_configured_or_come_from_the_environment(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOOPGUARD_STORE names it, configure(store=…) comes before that, the loop's own before both."""

    @loop(max=1)
    def step(n: int) -> int:
        return n + 1

    monkeypatch.setenv("LOOPGUARD_STORE", store)
    step.run(1, run_id="by-environment")
    monkeypatch.delenv("LOOPGUARD_STORE")
    monkeypatch.setattr(settings, "store", None)
    configure(store=store)
    step.run(1, run_id="by-configure")
    assert {run.run_id for run in journal.open(store).runs()} == {"by-environment", "by-configure"}


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_call_that_nobody_saw_the_end_of_parks_the_run(colour: str, store: str, ran: list[str]) -> None:
    """A start without a finish is uncertain: the run waits; what a person says of it decides."""
    dying = True

    def body(n: int) -> int:
        ran.append(f"pay {n}")
        if dying:
            raise Killed
        return n

    async def abody(n: int) -> int:
        return body(n)

    pay = tool(name="pay")(body if colour == "sync" else abody)

    async def astep(n: int) -> int:
        return n + await pay(5)  # type: ignore[misc]

    def sstep(n: int) -> int:
        return n + pay(5)  # type: ignore[operator]

    step: Any = loop(max=1, store=store, name="step")(sstep if colour == "sync" else astep)

    def run(made: Any) -> Any:
        return asyncio.run(_awaited(made)) if colour == "async" else made()

    with pytest.raises(Killed):
        run(lambda: step.run(1, run_id="r"))
    with _forgotten(store, "r"):
        dying = False
        parked = run(lambda: step.resume("r"))
        assert (parked.stop_reason, parked.iterations, parked.value) == (StopReason.WAITING, 0, 1)
        assert "nobody knows" in str(parked.error)
        assert step.waiting() == ["r"]
        again = run(lambda: step.run(1, run_id="r"))
        assert again.stop_reason is StopReason.WAITING
        book = journal.open(store)
        (question,) = book.questions()
        assert (question.tool, question.kind, question.arguments) == ("pay", "uncertain", {"n": 5})
        book.answer(question.id, "ran", result=70, by="ann")
        done = run(lambda: step.resume("r"))
        assert (done.value, done.completed) == (71, True)
        assert ran == ["pay 5"]
        assert book.story("r").root.steps == current_steps(done) == 1  # type: ignore[union-attr]
        with pytest.raises(Exception, match="answered already"):
            book.answer(question.id, "not_run")


def current_steps(result: Any) -> int:
    return 1 if result.completed else 0


async def _awaited(made: Callable[[], Any]) -> Any:
    return await made()


class _forgotten:  # noqa: N801
    """Makes the journal look as if the process had died in the body of its last call."""

    def __init__(self, store: str, run_id: str) -> None:
        import sqlite3

        from loopguard.journal import _writer

        _writer.close_writers()
        path = store.removeprefix("sqlite:///")
        db = sqlite3.connect(path)
        rows = db.execute("SELECT seq, header FROM events WHERE run_id = ? ORDER BY seq", (run_id,)).fetchall()
        last = max(seq for seq, header in rows if b'"event":"ToolStarted"' in header)
        db.execute("DELETE FROM events WHERE run_id = ? AND seq > ?", (run_id, last))
        db.execute("UPDATE runs SET status = 'running' WHERE run_id = ?", (run_id,))
        db.commit()
        db.close()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


def test_an_idempotent_call_runs_again_with_the_same_key(store: str) -> None:
    """A start without a finish of an idempotent tool: it is run again, under the idempotency key of the first time."""
    keys: list[str] = []

    @tool(idempotent=True)
    def put(n: int) -> int:
        call = current_call()
        assert call is not None
        keys.append(call.idempotency_key)
        if len(keys) == 2:
            raise Killed
        return n

    @loop(max=1, store=store)
    def step(n: int) -> int:
        return put(7) + put(7) + n

    with pytest.raises(Killed):
        step.run(1, run_id="r")
    with _forgotten(store, "r"):
        result = step.resume("r")
    assert result.value == 15
    assert len(keys) == 3
    assert keys[0] != keys[1] == keys[2]
    story = journal.open(store).story("r")
    assert story.root is not None
    assert story.root.steps == 2


def test_recorded_failures_are_raised_again_as_what_they_were(store: str, ran: list[str]) -> None:
    """A builtin class, one declared in raises=, and RecordedError for any other: nothing is imported by name."""

    class Declared(Exception):
        pass

    class Unknown(Exception):
        pass

    kinds = {"builtin": KeyError("a"), "declared": Declared("b"), "unknown": Unknown("c"), "stop": StopIteration("d")}
    seen: list[tuple[str, str]] = []

    @tool(raises=(Declared,))
    def fail(kind: str) -> None:
        ran.append(kind)
        raise kinds[kind]

    @loop(max=1, store=store)
    def step(n: int) -> int:
        seen.clear()
        for kind in kinds:
            try:
                fail(kind)
            except Exception as exc:
                seen.append((type(exc).__name__, str(exc)))
        if dying:
            raise Killed
        return n

    dying = True
    with pytest.raises(Killed):
        step.run(1, run_id="r")
    dying = False
    step.resume("r")
    assert ran == ["builtin", "declared", "unknown", "stop"]
    assert seen == [
        ("KeyError", "'a'"),
        ("Declared", "b"),
        (RecordedError.__name__, "test_recorded_failures_are_raised_again_as_what_they_were.<locals>.Unknown: c"),
        ("StopIteration", "d"),
    ]


def test_a_stopped_run_goes_on_under_larger_limits(store: str, ran: list[str]) -> None:
    """max and budget of resume let a run go on that had reached its ceiling, or spent its budget."""

    @tool(cost=1)
    def buy(n: int) -> int:
        ran.append(f"buy {n}")
        return n + 1

    @loop(max=2, until=lambda n: n >= 4, guard=Guard(Budget(usd=3)), store=store)
    def step(n: int) -> int:
        return buy(n)

    first = step.run(0, run_id="r")
    assert (first.stop_reason, first.value) == (StopReason.MAX_ITERATIONS, 2)
    assert step.run(0, run_id="r").iterations == 2
    second = step.resume("r", max=10)
    assert (second.stop_reason, second.value, second.cost) == (StopReason.BUDGET, 3, Decimal(3))
    third = step.resume("r", max=10, budget=Budget(usd=10))
    assert (third.stop_reason, third.value, third.cost, third.iterations) == (StopReason.UNTIL, 4, Decimal(4), 4)
    assert ran == ["buy 0", "buy 1", "buy 2", "buy 3"]


def test_counters_and_budgets_are_those_of_all_processes(store: str) -> None:
    """Steps, refusals and spending of a resumed run begin where they had come to, so that its limits hold."""
    dying = True

    @tool(cost=0.5)
    def work(n: int) -> int:
        return n

    @loop(max=3, guard=Guard(MaxSteps(4), Budget(usd=2)), store=store)
    def step(n: int) -> int:
        work(n)
        if dying and n == 2:
            raise Killed
        work(n + 100)
        return n + 1

    with pytest.raises(Killed):
        step.run(1, run_id="r")
    dying = False
    with capture() as seen:
        result = step.resume("r")
    assert (result.stop_reason, result.value) == (StopReason.MAX_STEPS, 3)
    assert result.cost == Decimal(2)
    assert [call.arguments["n"] for call in seen.calls_of("work") if call.outcome == "returned"] == [102]
    story = journal.open(store).story("r")
    assert story.root is not None
    assert (story.root.steps, story.root.refusals) == (4, 1)
    assert journal.open(store).verify("r") is None


def test_nested_loops_are_taken_up_where_they_stood(store: str, ran: list[str]) -> None:
    """A child that had finished answers with its result; one that hadn't goes on after its last iteration."""
    dying = True

    @tool
    def work(n: int) -> int:
        ran.append(f"work {n}")
        return n

    @loop(max=2)
    def child(n: int) -> int:
        ran.append(f"child {n}")
        if dying and n == 21:
            raise Killed
        return work(n) + 1

    @loop(max=1, store=store)
    def parent(n: int) -> int:
        ran.append("parent")
        return child(10) + child(20)

    with pytest.raises(Killed):
        parent.run(0, run_id="r")
    assert ran == ["parent", "child 10", "work 10", "child 11", "work 11", "child 20", "work 20", "child 21"]
    dying = False
    ran.clear()
    result = parent.resume("r")
    assert result.value == 12 + 22
    assert ran == ["parent", "child 21", "work 21"]
    assert [run.run_id for run in journal.open(store).runs()] == ["r"]
    story = journal.open(store).story("r")
    assert [(run.started.name, run.steps) for run in story.runs.values()] == [("parent", 4), ("child", 2), ("child", 2)]


def test_verdicts_are_not_asked_for_twice(store: str, ran: list[str]) -> None:
    """A body that had returned and an evaluator that had spoken stay as they are; only what came later is asked."""
    dying = True

    def valid(n: int) -> Verdict:
        ran.append(f"valid {n}")
        return Verdict(n > 1, "too small")

    def second(n: int) -> bool:
        ran.append(f"second {n}")
        if dying:
            raise Killed
        return True

    @loop(max=5, evaluate=(valid, second), store=store)
    def step(n: int) -> int:
        run = current_run()
        assert run is not None
        ran.append(f"body {run.feedback}")
        return run.iteration

    with pytest.raises(Killed):
        step.run(0, run_id="r")
    assert ran == ["body None", "valid 1", "body too small", "valid 2", "second 2"]
    dying = False
    ran.clear()
    result = step.resume("r")
    assert ran == ["second 2"]
    assert (result.value, result.stop_reason, result.iterations) == (2, StopReason.EVALUATED, 2)
    assert [len(each.verdicts) for each in result.history] == [1, 2]


def test_a_recorded_failure_of_the_evaluators_is_raised_again(store: str) -> None:
    """A run that ended with EvaluationFailed ends so again, without a body."""
    bodies = []

    @loop(max=5, evaluate=lambda n: (False, "no"), max_retries=1, store=store)
    def step(n: int) -> int:
        bodies.append(n)
        return n

    for _ in range(2):
        with pytest.raises(EvaluationFailed) as failed:
            step.run(0, run_id="r")
        assert failed.value.result.stop_reason is StopReason.EVALUATION_FAILED
    assert len(bodies) == 2


def test_a_number_of_more_digits_than_python_writes_is_an_argument_like_any_other(store: str) -> None:
    """Other processes know the call by it."""

    @tool
    def digits(n: int) -> int:
        return n % 10

    @loop(max=1, store=store)
    def step(state: int) -> int:
        return digits(10**5000 + 7)

    assert step.run(0, run_id="r").value == 7


def test_a_run_that_is_cancelled_while_it_is_opened_is_let_go_again(store: str) -> None:
    """Whenever the cancellation comes, somebody else can drive it: here, too, though this process lives on."""

    @loop(max=1, store=store)
    async def step(state: int) -> int:
        return state + 1

    async def cancelled_after(turns: int, run_id: str) -> None:
        task = asyncio.ensure_future(step.run(0, run_id=run_id))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    journal.open(store)  # its writer goes on for good; other threads end
    before = set(threading.enumerate())
    for turns in range(12):
        asyncio.run(cancelled_after(turns, f"r{turns}"))
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
        assert asyncio.run(step.run(0, run_id=f"r{turns}")).value == 1


def test_generator_tools_give_their_recorded_items_again(store: str, ran: list[str]) -> None:
    """Sync and async generators replay items, result and failure, and run no body."""
    dying = True

    @tool
    def pages(n: int) -> Iterator[str]:
        ran.append("pages")
        for i in range(n):
            yield f"page {i}"

    @tool
    async def apages(n: int) -> AsyncIterator[int]:
        ran.append("apages")
        for i in range(n):
            yield i
        raise ValueError("end of pages")

    @loop(max=1, store=store)
    async def step(state: list[str]) -> list[str]:
        found = [*pages(2)]
        try:
            async for page in apages(3):
                found = [*found, str(page)]
        except ValueError as exc:
            found.append(str(exc))
        if dying:
            raise Killed
        return found

    with pytest.raises(Killed):
        asyncio.run(step.run([], run_id="r"))
    dying = False
    assert asyncio.run(step.resume("r")).value == ["page 0", "page 1", "0", "1", "2", "end of pages"]
    assert ran == ["pages", "apages"]


def test_a_refund_that_is_worded_differently_is_not_paid_twice(store: str, ran: list[str]) -> None:
    """A non-idempotent call that matches no record, while one of the same tool is left, is uncertain."""
    words = iter(["50 dollars", "fifty dollars"])

    @tool
    def refund(amount: str) -> str:
        ran.append(amount)
        return "done"

    @loop(max=1, store=store)
    def step(n: int) -> int:
        try:
            refund(next(words))
        except Exception:  # as many frameworks do
            pass
        if len(ran) == 1 and dying:
            raise Killed
        return n + 1

    dying = True
    with pytest.raises(Killed):
        step.run(0, run_id="r")
    dying = False
    result = step.resume("r")
    assert (result.stop_reason, result.iterations) == (StopReason.WAITING, 0)
    assert ran == ["50 dollars"]


def test_calls_of_objects_are_told_apart_by_their_self_key(store: str, ran: list[str]) -> None:
    """With self_key= methods are replayed; without it another process can't know them, and the run parks."""
    dying = True

    class Account:
        def __init__(self, name: str) -> None:
            self.name = name

        @tool(self_key=lambda self: self.name)
        def pay(self, n: int) -> str:
            ran.append(f"{self.name} {n}")
            return self.name

        @tool
        def unkeyed(self, n: int) -> str:
            ran.append(f"unkeyed {n}")
            return self.name

    @loop(max=1, store=store)
    def keyed(n: int) -> str:
        names = Account("a").pay(1) + Account("b").pay(1)
        if dying:
            raise Killed
        return names

    @loop(max=1, store=store)
    def anonymous(n: int) -> int:
        Account("a").unkeyed(1)
        if dying:
            raise Killed
        return n

    for step in (keyed, anonymous):
        with pytest.raises(Killed):
            step.run(0, run_id=step.__name__)
    dying = False
    assert keyed.resume("keyed").value == "ab"
    assert anonymous.resume("anonymous").stop_reason is StopReason.WAITING
    assert ran == ["a 1", "b 1", "unkeyed 1"]


def test_a_result_that_can_not_be_kept_is_said_when_it_is_needed(store: str, ran: list[str]) -> None:
    """C55: the tool runs with hostile arguments, the caller gets the original; only a resume that needs it fails."""
    dying = True

    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    @tool
    def odd(argument: Any) -> Any:
        ran.append(type(argument).__name__)
        return "\ud83d"

    results: list[str] = []
    arguments: list[Any] = [lambda: 1, b"\xff", Hostile()]

    @loop(max=1, store=store)
    def step(n: int) -> int:
        results.extend(odd(argument) for argument in arguments[1:2])
        if dying:
            raise Killed
        return n

    @loop(max=1, store=store)
    def all_of_them(n: int) -> int:
        results.extend(odd(argument) for argument in arguments)
        return n

    assert all_of_them.run(0, run_id="all").completed
    assert results == ["\ud83d"] * 3
    shown = [event for event in journal.open(store).events("all") if type(event).__name__ == "ToolStarted"]
    assert "Hostile" in str(shown[2].arguments)  # type: ignore[attr-defined]
    with pytest.raises(Killed):
        step.run(0, run_id="r")
    dying = False
    with pytest.raises(CheckpointError, match="odd has run, but its result could not be recorded"):
        step.resume("r")
    assert step.pending() == ["r"]
    assert len(ran) == 4


@pytest.mark.parametrize("dies_in", [2, 3, 4])
def test_unchanged_remembers_the_states_of_earlier_processes(dies_in: int, store: str, ran: list[str]) -> None:
    """The loop stops in the iteration in which it would have stopped uninterrupted; rejected states don't count."""
    dying = True

    @loop(
        max=9,
        until=unchanged(2),
        evaluate=lambda state: (len(ran) != 3, "not that"),
        on_reject="retry",
        store=store,
    )
    def step(state: list[int]) -> list[int]:
        if dying and len(ran) + 1 == dies_in:
            raise Killed
        ran.append("body")
        return state or [1]  # the same object again: what counts is what it was

    with pytest.raises(Killed):
        step.run([], run_id="r")
    dying = False
    result = step.resume("r")
    assert (result.stop_reason, result.iterations, len(ran)) == (StopReason.UNTIL, 4, 4)


def test_an_idempotent_call_whose_result_was_not_kept_runs_again(store: str, ran: list[str]) -> None:
    """As the error of one that isn't idempotent says: marked so, it can be called once more."""

    @tool(idempotent=True)
    def odd() -> object:
        ran.append("odd")
        return {1: "one"}

    @loop(max=1, store=store)
    def step(n: int) -> int:
        if odd() != {1: "one"} or len(ran) == 1:
            raise RuntimeError
        return n + 1

    with pytest.raises(RuntimeError):
        step.run(0, run_id="r")
    assert step.resume("r").value == 1
    assert ran == ["odd", "odd"]


def test_a_state_that_would_lose_something_is_a_checkpoint_error(store: str, ran: list[str]) -> None:
    """The result so far stays reachable, and with the annotation put right the run goes on from its last checkpoint."""

    @tool
    def work(n: int) -> int:
        ran.append(f"work {n}")
        return n

    def body(state: Any) -> Any:
        work(state.n)
        return More(state.n + 1, (), 5) if state.n == 1 else State(state.n + 1)

    def wrong(state: State) -> State:
        return body(state)  # type: ignore[no-any-return]

    def right(state: State) -> State | More:
        return body(state)  # type: ignore[no-any-return]

    with pytest.raises(CheckpointError, match="More"):
        loop(max=2, store=store, name="step")(wrong).run(State(0), run_id="r")
    result = loop(max=2, store=store, name="step")(right).resume("r")
    assert result.value == More(2, (), 5)
    assert ran == ["work 0", "work 1"]


@pytest.mark.parametrize(
    ("limit", "answers", "looks"),
    [
        (LoopLimit(3), ["same"], 3),
        (LoopLimit(3, strict=True), ["a", "b", "c"], 3),
        (LoopLimit(3), ["a", "b", "c"], 6),
        (LoopLimit(3), [1.5, {"a": [1, None]}], 6),
        (LoopLimit(2), [{"a": [1, None]}], 2),
    ],
)
@pytest.mark.parametrize("dies_in", [2, 3])
def test_a_loop_that_began_in_another_process_is_still_one(
    limit: LoopLimit, answers: list[Any], looks: int, dies_in: int, store: str, ran: list[str]
) -> None:
    """A resumed run knows how often it made the same call, and what came of it: polling is no loop there, either."""
    dying = True
    refused: list[Any] = []

    @tool
    def look(at: str, options: dict[str, int]) -> Any:
        ran.append(at)
        return answers[len(ran) % len(answers)]

    @loop(max=6, guard=Guard(limit), store=store)
    def step(n: int) -> int:
        try:
            look("there", {"depth": 1})
        except LoopLimitExceeded as exc:
            refused.append(exc.value)
        if dying and n == dies_in - 1:
            raise Killed
        return n + 1

    with pytest.raises(Killed):
        step.run(0, run_id="r")
    dying = False
    refused.clear()
    assert step.resume("r").value == 6
    assert len(ran) == looks
    assert refused == [limit.n] * (6 - max(looks, dies_in - 1))


def test_a_call_that_fails_in_every_process_is_no_loop(store: str, ran: list[str]) -> None:
    """Each resume tries the call again that had failed; that somebody wants it so often is not the run's doing."""

    @tool
    def connect(host: str) -> str:
        ran.append(host)
        raise ConnectionError("no route")

    @loop(max=1, guard=Guard(LoopLimit(1)), store=store)
    def step(n: str) -> str:
        return connect(n)

    for _ in range(5):
        with pytest.raises(ConnectionError):
            step.run("there", run_id="r")
    assert len(ran) == 5


def test_a_scope_around_a_durable_loop_keeps_its_own_counters(store: str) -> None:
    """A loop with a store inside a scope: the journal is the loop's, the scope counts what ran in this process."""

    @tool
    def work(n: int) -> int:
        return n

    @loop(max=2, store=store)
    def step(n: int) -> int:
        return work(n) + 1

    with Guard(MaxSteps(1)).scope("outside") as run:
        result = step.run(0, run_id="r")
        assert run.steps == 1
    assert result.stop_reason is StopReason.MAX_STEPS
    assert step.resume("r").value == 2


def test_resume_pending_goes_on_with_all(store: str) -> None:
    """One that fails again doesn't keep the others from going on."""
    failing = True

    @loop(max=2, store=store)
    def step(n: int) -> int:
        if failing or n == 7:
            raise ValueError(str(n))
        return n + 1

    for n in (1, 7, 3):
        with pytest.raises(ValueError, match=str(n)):
            step.run(n, run_id=f"run-{n}")
    assert step.pending() == ["run-1", "run-7", "run-3"]
    failing = False
    done = step.resume_pending()
    assert (done["run-1"].value, done["run-3"].value) == (3, 5)
    assert isinstance(done["run-7"], ValueError)
    assert step.pending() == ["run-7"]


def test_other_arguments_are_given_again_to_resume(store: str) -> None:
    """The state comes from the journal, what stands beside it from the caller; methods and named states, too."""
    dying = True

    class Writer:
        def __init__(self, name: str) -> None:
            self.name = name

        @loop(max=2, store=store)
        def write(self, text: str, mark: str, *, end: str = "") -> str:
            if dying and len(text) > 1:
                raise Killed
            return text + mark + end

    @loop(max=2, store=store, state="text")
    def named(mark: str, text: str) -> str:
        if dying and len(text) > 1:
            raise Killed
        return text + mark

    with pytest.raises(Killed):
        Writer("a").write.run("x", "!", run_id="method")
    with pytest.raises(Killed):
        named.run("?", "x", run_id="named")
    dying = False
    assert Writer("b").write.resume("method", "-", end=".").value == "x!-."
    assert named.resume("named", "+").value == "x?+"


def test_the_live_counters_and_the_fold_say_the_same(store: str) -> None:
    """The journal keeps no second book: folded, its events give the counters that the run had."""
    counters: dict[str, Any] = {}

    @tool(cost={"usd": 0.1, "credits": 2})
    def work(n: int) -> int:
        charge(usd=0.3)
        if n == 2:
            raise ValueError(n)
        return n

    @loop(max=2)
    def child(n: int) -> int:
        return work(n) + 1

    @loop(max=3, guard=Guard(MaxSteps(5)), store=store)
    def step(n: int) -> int:
        run = current_run()
        assert run is not None
        charge(tokens=5)
        try:
            with Guard().scope("inner"):
                child(n)
        except ValueError:
            pass
        finally:
            counters.update(steps=run.steps, refusals=run.refusals, spent={u: c.spent for u, c in run.cells.items()})
        return n + 1

    step.run(0, run_id="r")
    root = journal.open(store).story("r").root
    assert root is not None
    assert (root.steps, root.refusals, root.spent) == (counters["steps"], counters["refusals"], counters["spent"])


def test_a_plain_call_is_kept_too(store: str) -> None:
    """Without a run id it gets one, and the journal has it."""

    @loop(max=1, store=store)
    def step(n: int) -> int:
        return n + 1

    assert step(1) == 2
    assert [run.status for run in journal.open(store).runs()] == ["max_iterations"]


def test_a_run_that_ended_before_its_first_iteration_says_so_again(store: str) -> None:
    """What a plain call raises then isn't hidden by the record."""

    @tool
    def work() -> None:
        """Nothing."""

    @loop(max=1, guard=Guard(MaxSteps(0)), store=store)
    def step(n: int) -> int:
        work()
        return n

    with pytest.raises(LoopStopped):
        step(1)
    result = step.run(1, run_id="r")
    assert step.run(1, run_id="r").stop_reason is result.stop_reason is StopReason.MAX_STEPS


def test_limits_on_some_tools_or_of_one_iteration_are_those_of_all_processes(store: str, ran: list[str]) -> None:
    """MaxSteps with only= or per="iteration" counts what earlier processes have used."""
    dying = True

    @tool
    def search(n: int) -> int:
        ran.append(f"search {n}")
        return n

    @tool
    def other(n: int) -> int:
        ran.append(f"other {n}")
        return n

    @loop(max=3, guard=Guard(MaxSteps(3, only="search*"), MaxSteps(3, per="iteration")), store=store)
    def step(n: int) -> int:
        search(n)
        other(n)
        if dying and n == 2:
            raise Killed
        search(n + 10)
        search(n + 20)
        return n + 1

    with pytest.raises(Killed):
        step.run(2, run_id="r")
    dying = False
    result = step.resume("r")
    assert result.stop_reason is StopReason.MAX_STEPS
    assert ran == ["search 2", "other 2", "search 12"]
    assert "per iteration" in str(result.error)


def test_calls_between_the_items_of_a_generator_are_not_run_again(store: str, ran: list[str]) -> None:
    """They are the consumer's own, each with its record, though the generator is answered from one, too."""
    dying = True

    @tool
    def pages() -> Iterator[int]:
        yield 1
        yield 2

    @tool
    def pay(n: int) -> int:
        ran.append(f"pay {n}")
        return n

    @tool
    def outer(n: int) -> int:
        ran.append(f"outer {n}")
        return pay(n + 10)

    @loop(max=1, store=store)
    def step(n: int) -> int:
        total = sum(pay(page) for page in pages()) + outer(5)
        if dying:
            raise Killed
        return total + pay(99)

    with pytest.raises(Killed):
        step.run(0, run_id="r")
    dying = False
    assert step.resume("r").value == 3 + 15 + 99
    assert ran == ["pay 1", "pay 2", "outer 5", "pay 15", "pay 99"]


def test_the_head_of_the_chain_stands_on_the_span(store: str) -> None:
    """Whoever keeps the spans can tell a journal whose chain was made anew."""

    @loop(max=1, store=store)
    def step(n: int) -> int:
        return n

    with capture() as seen:
        step.run(0, run_id="r")
    (span,) = seen.spans_of("invoke_agent step")
    assert span.attributes is not None
    rows = journal.open(store)._rows("r")
    assert span.attributes["loopguard.journal.head"] == rows[-1].digest.hex()


def test_a_state_that_no_longer_decodes_leaves_the_run_pending(store: str) -> None:
    """Another version of the program can't read it: a clear error, and with the right version it goes on."""
    dying = True

    def old(n: int) -> int:
        if dying and n == 2:
            raise Killed
        return n + 1

    def new(n: list[str]) -> list[str]:
        return n

    with pytest.raises(Killed):
        loop(max=3, store=store, name="step")(old).run(1, run_id="r")
    dying = False
    renewed = loop(max=3, store=store, name="step")(new)
    with pytest.raises(CheckpointError, match=r"can't be read as list\[str\]"):
        renewed.resume("r")
    assert renewed.pending() == ["r"]
    assert loop(max=3, store=store, name="step")(old).resume("r").value == 4


def test_what_the_disk_would_not_take_is_found_on_the_exception(store: str) -> None:
    """A commit fails: JournalError, with the result so far. Once the disk takes it, what was kept is written first."""
    from loopguard.journal import _writer

    @loop(max=2, store=store)
    def step(n: int) -> int:
        if n == 1:
            writable(False)
        return n + 1

    def writable(yes: bool) -> None:
        path = store.removeprefix("sqlite:///")
        (writer,) = [each for key, each in _writer._writers.items() if key[0] == path]
        writer._journal._db.execute(f"PRAGMA query_only = {'OFF' if yes else 'ON'}")  # type: ignore[union-attr]

    with pytest.raises(JournalError, match="read-only") as failed:
        step.run(0, run_id="r")
    result = result_of(failed.value)
    assert result is not None
    assert result.history[0].value == 1
    writable(True)
    assert step.run(0, run_id="r").value == 2
    assert journal.open(store).verify("r") is None
