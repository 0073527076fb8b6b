"""The test doubles of loopguard.testing: scripted people, a clock, and a look at what happened."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import trace

from loopguard import (
    Approval,
    ApproveTool,
    Budget,
    Guard,
    LoopLimit,
    LoopLimitExceeded,
    MaxSteps,
    Retry,
    ToolCallRefused,
    configure,
    loop,
    tool,
)
from loopguard._config import settings
from loopguard._events import QuestionAnswered, QuestionAsked, RunEnded, RunStarted, ToolRefused
from loopguard.exceptions import ConfigurationError, LoopGuardWarning
from loopguard.testing import Clock, Desk, ScriptedApprover, capture
from tests.conftest import Colour


def gated(approver: Any, timeout: float | None = None) -> Callable[[int], Any]:
    @tool(guard=Guard(LoopLimit(0), ApproveTool(approver, timeout=timeout)))
    def pay(amount: int) -> int:
        return amount

    return pay


def outcome(fn: Callable[..., Any], *args: Any) -> Any:
    """What it returned, or the code and reason of its refusal."""
    try:
        return fn(*args)
    except ToolCallRefused as refusal:
        return refusal.code, refusal.reason


# -- ScriptedApprover ------------------------------------------------------------------------------


def test_a_script_is_used_up_in_order(colour: Colour) -> None:
    """Every kind of answer works in every colour, and the questions are kept."""
    script = ScriptedApprover([True, (False, "why?"), Approval.edit({"amount": 5}), lambda call: call.name == "pay"])
    pay = tool(name="pay", guard=Guard(ApproveTool(script)))(colour.make(lambda amount: amount))
    answers = [outcome(colour.call, pay, amount) for amount in (1, 2, 3, 4)]
    assert answers == [1, ("approval_denied", "why?"), 5, 4]
    assert [(call.name, call.arguments) for call in script.calls] == [("pay", {"amount": n}) for n in (1, 2, 3, 4)]


def test_a_script_that_has_run_out_refuses() -> None:
    """A question too many is an approval_error that says so."""
    pay = gated(ScriptedApprover([True]))
    assert pay(1) == 1
    code, reason = outcome(pay, 2)
    assert code == "approval_error"
    assert "ScriptedApprover has run out: pay is asked about after 1 answers" in reason


@pytest.mark.parametrize("error", [RuntimeError("the line is dead"), RuntimeError])
def test_a_script_can_raise(error: Any) -> None:
    """An exception as an answer, object or class, is raised."""
    code, reason = outcome(gated(ScriptedApprover([error])), 1)
    assert code == "approval_error"
    assert "RuntimeError" in reason


def test_a_script_may_answer_by_tool() -> None:
    """A dict gives each tool answers of its own: a list is used up, anything else holds for good."""
    guard = Guard(ApproveTool(ScriptedApprover({"read": True, "write": [True, False]})))
    read, write, other = (tool(name=name, guard=guard)(lambda n: n) for name in ("read", "write", "other"))
    assert [read(1), write(1), read(2)] == [1, 1, 2]
    assert outcome(write, 2) == ("approval_denied", None)
    assert "has no answer for other; it has some for: read, write" in outcome(other, 1)[1]


def test_a_script_answers_many_threads() -> None:
    """Sixteen threads use up exactly the answers that there are."""
    script = ScriptedApprover([True] * 8)
    pay = gated(script)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: outcome(pay, n), range(16)))
    assert sum(isinstance(answer, int) for answer in answers) == 8
    assert sorted(call.arguments["amount"] for call in script.calls) == list(range(16))


def test_a_question_is_kept_as_it_was_asked() -> None:
    """What the body does to its arguments afterwards doesn't reach the recorded question."""
    script = ScriptedApprover(True)

    @tool(guard=Guard(ApproveTool(script)))
    def add(items: list[int]) -> None:
        items.append(2)

    add([1])
    assert script.calls[0].arguments == {"items": [1]}


def test_a_script_answers_a_budget_that_asks_to_be_extended() -> None:
    """The question of `Budget(extend=…)` has the name extend_budget, and is answered like any other."""
    script = ScriptedApprover({"extend_budget": [True, False]})

    @tool(cost=1)
    def search(query: str) -> str:
        return query

    with Guard(Budget(usd=1, extend=script, extend_by=1)).scope():
        assert [outcome(search, query) for query in "ab"] == ["a", "b"]
        assert outcome(search, "c")[0] == "budget"
    assert [call.arguments["for_tool"] for call in script.calls] == ["search", "search"]


# -- Desk ------------------------------------------------------------------------------------------


def test_a_desk_is_answered_in_any_order() -> None:
    """Questions wait, and each answer goes to its own call, by id or by place."""
    desk = Desk()
    pay = gated(desk)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(outcome, pay, 1)
        desk.wait(1)
        second = pool.submit(outcome, pay, 2)
        assert [call.arguments["amount"] for call in desk.wait(2)] == [1, 2]
        desk.answer(1, (False, "no"))
        assert second.result(5) == ("approval_denied", "no")
        assert [call.arguments["amount"] for call in desk.pending] == [1]
        desk.answer(desk.calls[0].id, True)
        assert first.result(5) == 1
    assert desk.pending == []


def test_a_desk_takes_an_answer_once() -> None:
    """Answering what doesn't wait is a LookupError that names what does."""
    desk = Desk()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gated(desk), 1)
        (call,) = desk.wait()
        with pytest.raises(LookupError, match=f"no question 'call_x' waits for an answer; waiting: {call.id}"):
            desk.answer("call_x", True)
        desk.answer(call.id, True)
        with pytest.raises(LookupError, match="waiting: none"):
            desk.answer(call.id, False)
        assert asked.result(5) == 1


def test_a_question_that_timed_out_leaves_the_desk() -> None:
    """After its timeout a question is refused, and can't be answered any more."""
    desk = Desk()
    code, _ = outcome(gated(desk, timeout=0.05), 1)
    assert code == "approval_timeout"
    with desk._changed:
        assert desk._changed.wait_for(lambda: not desk._open, 5)
    with pytest.raises(LookupError):
        desk.answer(0, True)


def test_a_stopped_run_leaves_the_desk() -> None:
    """Stopping the run ends the question: the call is refused as stopped, not as an approver's failure."""
    desk, guard = Desk(), Guard()
    pay = gated(desk)
    with ThreadPoolExecutor(1) as pool, guard.scope() as run:
        asked = pool.submit(run.bind(outcome), pay, 1)
        desk.wait()
        run.stop("enough")
        assert asked.result(5) == ("stopped", "enough")
    assert desk.pending == []


def test_a_desk_that_stays_empty_says_so() -> None:
    """Waiting for a question that nobody asks is a TimeoutError with the count."""
    with pytest.raises(TimeoutError, match=r"0 of 2 questions were on the desk after 0\.01 s"):
        Desk().wait(2, timeout=0.01)


# -- Clock -----------------------------------------------------------------------------------------


def test_a_clock_goes_only_when_told() -> None:
    """It is a timer for whatever takes one, and never goes back."""
    clock = Clock(100)
    assert (clock(), clock.now) == (100, 100)
    clock.advance(0.5)
    assert clock() == 100.5
    for seconds in (-1, float("nan")):
        with pytest.raises(ConfigurationError, match="never goes back"):
            clock.advance(seconds)
    assert clock.now == 100.5


def test_a_clock_drives_a_loop_limit() -> None:
    """`LoopLimit(ttl=…, timer=clock)` forgets a call once the clock was advanced."""
    clock = Clock()

    @tool
    def read(path: str) -> str:
        return path

    with Guard(LoopLimit(1, ttl=60, timer=clock)).scope():
        read("a")
        with pytest.raises(LoopLimitExceeded):
            read("a")
        clock.advance(61)
        assert read("a") == "a"


# -- capture ---------------------------------------------------------------------------------------


def test_a_capture_has_the_calls_with_their_outcomes(colour: Colour) -> None:
    """Each call once: its arguments, how it ended, and why."""
    failure = ValueError("no such order")

    def refund(order: str) -> str:
        if order == "bad":
            raise failure
        return f"refunded {order}"

    pay = tool(name="refund", guard=Guard(MaxSteps(2)))(colour.make(refund))
    with capture() as seen, Guard().scope("desk") as run:
        colour.call(pay, "A-1")
        with pytest.raises(ValueError, match="no such order"):
            colour.call(pay, "bad")
        with pytest.raises(ToolCallRefused):
            colour.call(pay, "A-2")
    returned, raised, refused = seen.calls_of("refund")
    assert (returned.outcome, returned.arguments, returned.run_id) == ("returned", {"order": "A-1"}, run.id)
    assert (raised.outcome, raised.error) == ("raised", failure)
    assert (refused.outcome, refused.code, refused.arguments) == ("refused", "max_steps", {"order": "A-2"})
    assert refused.reason == seen.events_of(ToolRefused)[0].reason
    assert seen.calls_of("other") == []
    if colour.name in ("sync", "async"):
        assert returned.result == "refunded A-1"


def test_a_call_under_way_is_running() -> None:
    """A call that has started and not ended is there already."""

    @tool
    def look() -> str:
        return seen.calls[0].outcome

    with capture() as seen:
        assert look() == "running"
    assert seen.calls[0].outcome == "returned"


def test_attempts_of_a_retry_are_one_call() -> None:
    """A retried call counts its attempts and tells how the last one ended."""
    failures = [OSError("1"), OSError("2")]

    @tool(idempotent=True, guard=Guard(Retry(2, wait=0)))
    def fetch() -> str:
        if failures:
            raise failures.pop()
        return "page"

    with capture() as seen:
        fetch()
    (call,) = seen.calls
    assert (call.outcome, call.attempts, call.result) == ("returned", 3, "page")


def test_an_observed_refusal_is_no_refusal() -> None:
    """In observe mode the call went on, and so says its outcome."""

    @tool
    def search(query: str) -> str:
        return query

    with capture() as seen, Guard(MaxSteps(1), mode="observe").scope():
        search("a")
        search("b")
    assert [call.outcome for call in seen.calls] == ["returned", "returned"]
    assert [event.observed for event in seen.events_of(ToolRefused)] == [True]


def test_a_capture_sees_every_thread_and_task() -> None:
    """Calls and spans of tasks and of threads arrive, with nothing lost between them."""

    @tool
    async def wait(n: int) -> int:
        await asyncio.sleep(0)
        return n

    @tool
    def work(n: int) -> int:
        return n

    async def main() -> None:
        await asyncio.gather(*map(wait, range(20)))

    with capture() as seen:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(200)))
        asyncio.run(main())
    assert sorted(call.arguments["n"] for call in seen.calls_of("work")) == list(range(200))
    assert len(seen.calls_of("wait")) == len(seen.spans_of("execute_tool wait")) == 20


def test_a_capture_has_the_spans_that_ended() -> None:
    """Spans of loops and tools are found by name; those of others are there too."""

    @tool
    def search(query: str) -> str:
        return query

    @loop(max=1)
    def improve(draft: str) -> str:
        return search(draft)

    with capture() as seen:
        improve("a")
        trace.get_tracer("app").start_span("theirs").end()
    (search_span,) = seen.spans_of("execute_tool search")
    (improve_span,) = seen.spans_of("invoke_agent improve")
    assert search_span.context.trace_id == improve_span.context.trace_id
    assert len(seen.spans_of("theirs")) == 1


def test_a_capture_ends_with_its_block() -> None:
    """Runs that start later, and runs that go on, add nothing, and no subscriber is left behind."""

    @tool
    def search(query: str) -> str:
        return query

    scope = Guard().scope()
    before = settings.listeners
    with capture() as seen:
        run = scope.__enter__()
        search("a")
    events, spans = len(seen.events), len(seen.spans)
    search("b")
    scope.__exit__(None, None, None)
    search("c")
    assert run.steps == 2
    assert (len(seen.events), len(seen.spans)) == (events, spans)
    assert settings.listeners == before


def test_captures_nest() -> None:
    """An inner capture has its own part, the outer one everything."""

    @tool
    def search(query: str) -> str:
        return query

    with capture() as outer:
        search("a")
        with capture() as inner:
            search("b")
        search("c")
    assert [call.arguments["query"] for call in inner.calls] == ["b"]
    assert [call.arguments["query"] for call in outer.calls] == ["a", "b", "c"]
    assert (len(inner.spans), len(outer.spans)) == (1, 3)


def test_a_capture_keeps_payloads_as_they_were_and_in_full() -> None:
    """A list that is changed later is recorded as it was, secrets and all, and nothing nests too deeply."""

    @tool
    def add(items: list[Any], password: str) -> list[Any]:
        items.append("new")
        return items

    deep: Any = ()
    for _ in range(20_000):
        deep = (deep,)
    with capture() as seen:
        add(mine := ["old"], "hunter2")
        mine.append("later")
        add([deep], "hunter2")
    first, second = seen.calls
    assert first.arguments == {"items": ["old"], "password": "hunter2"}
    assert first.result == ["old", "new"]
    assert second.outcome == "returned"


def test_a_capture_has_runs_and_questions() -> None:
    """The other events are found by class, the questions outside any run too."""
    pay = gated(ScriptedApprover([True, (False, "no")]))
    with capture() as seen:
        with Guard().scope("desk"):
            pay(1)
        outcome(pay, 2)
    assert [event.name for event in seen.events_of(RunStarted)] == ["desk"]
    assert len(seen.events_of(RunEnded)) == 1
    assert [event.arguments for event in seen.events_of(QuestionAsked)] == [{"amount": 1}, {"amount": 2}]
    assert [(event.decision, event.reason) for event in seen.events_of(QuestionAnswered)] == [
        ("approve", None),
        ("deny", "no"),
    ]


def test_a_process_without_a_provider_gets_one() -> None:
    """Where no TracerProvider is set, the first capture sets one, and the next ones use it."""
    program = """
from opentelemetry import trace
from loopguard import tool
from loopguard.testing import capture

@tool
def search(query): return query

for _ in range(3):
    with capture() as seen:
        search("a")
    assert len(seen.spans) == 1, seen.spans
assert len(trace.get_tracer_provider()._active_span_processor._span_processors) == 1
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=30)


def test_a_foreign_provider_gives_no_spans() -> None:
    """A provider that isn't the SDK's is left alone; events and calls are recorded all the same."""
    program = """
from opentelemetry import trace
trace.set_tracer_provider(trace.NoOpTracerProvider())
from loopguard import tool
from loopguard.testing import capture

@tool
def search(query): return query

with capture() as seen:
    search("a")
assert (len(seen.spans), len(seen.calls)) == (0, 1)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=30)


def test_importing_the_doubles_is_light() -> None:
    """`loopguard.testing` loads neither the SDK of OpenTelemetry nor that of Anthropic."""
    program = "import sys, loopguard.testing; sys.exit(not {'opentelemetry.sdk', 'anthropic'}.isdisjoint(sys.modules))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


# -- subscribers of users, beside those of capture ---------------------------------------------------


@pytest.fixture
def subscribed() -> Iterator[list[Any]]:
    """A process-wide subscriber that fails after each event."""
    events: list[Any] = []

    def on_event(event: Any) -> None:
        events.append(event)
        raise RuntimeError

    before = settings.on_event
    configure(on_event=on_event)
    yield events
    settings.on_event = before
    settings.version += 1


def test_a_subscriber_of_configure_gets_redacted_events_and_alters_nothing(subscribed: list[Any]) -> None:
    """Events of `configure(on_event=…)` are redacted, and its failures are a warning, nothing else."""

    @tool
    def login(password: str) -> str:
        return "ok"

    with pytest.warns(LoopGuardWarning, match="on_event raised RuntimeError"), Guard().scope():
        assert login("hunter2") == "ok"
    with pytest.warns(LoopGuardWarning):
        assert login("hunter2") == "ok"
    arguments = [event.arguments for event in subscribed if hasattr(event, "reserved")]
    assert arguments == [{"password": "[hidden, 7 characters]"}] * 2
