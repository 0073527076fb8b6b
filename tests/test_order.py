"""The order inside a call, observed from outside: who is asked before whom, and who never is.

span ▸ WrapTool ▸ admission (RateLimit, CircuitBreaker, MaxSteps, LoopLimit, Budget) ▸ ApproveTool ▸ Retry ▸ Timeout
▸ the tool
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loopguard import (
    Approval,
    ApproveTool,
    Budget,
    CircuitBreaker,
    ConfigurationError,
    Guard,
    LoopLimit,
    MaxSteps,
    RateLimit,
    Retry,
    Timeout,
    ToolCallRefused,
    ToolTimeout,
    WrapTool,
    charge,
    current_run,
    tool,
)
from tests.conftest import Colour


class Logged:
    """A limit that admits everything, and writes down what it is told."""

    def __init__(self, log: list[str], name: str = "") -> None:
        self.log = log
        self.name = name

    def bind(self, run: Any, tool: Any) -> Logged:
        """It stands for every run and tool."""
        return self

    def prepare(self, call: Any) -> None:
        self.log.append(f"{self.name}prepare")

    def check(self, call: Any) -> None:
        self.log.append(f"{self.name}check")

    def take(self, call: Any) -> str:
        self.log.append(f"{self.name}take")
        return "token"

    def undo(self, call: Any, token: Any) -> None:
        self.log.append(f"{self.name}undo {token}")

    def done(self, call: Any, token: Any, result: Any, error: Any) -> None:
        self.log.append(f"{self.name}done {token}")


def hook_into(log: list[str], name: str = "hook") -> WrapTool:
    """A hook that writes down when it is entered and left."""

    def hook(call: Any, proceed: Any) -> Any:
        log.append(f"{name} in")
        try:
            return (yield from proceed(call))
        finally:
            log.append(f"{name} out")

    return WrapTool(hook)


def approver_into(log: list[str], answer: Any = True, name: str = "ask") -> ApproveTool:
    """An approver that writes down when it is asked."""

    def approver(call: Any) -> Any:
        log.append(name)
        return answer

    return ApproveTool(approver)


# The limits in the order that they must be asked in, each such that one failed call of cost 1 uses it up.
LIMITS: dict[str, Callable[[], Any]] = {
    "rate_limited": lambda: RateLimit(1, seconds=3600),
    "circuit_open": lambda: CircuitBreaker(1, reset=3600),
    "max_steps": lambda: MaxSteps(1),
    "loop_limit": lambda: LoopLimit(1),
    "budget": lambda: Budget(usd=1),
}
CODES = list(LIMITS)


def failing(colour: Colour, **options: Any) -> Any:
    """A tool of cost 1 that pays it and raises."""

    def body() -> None:
        charge(usd=1)
        raise LookupError

    return tool(cost=1, **options)(colour.make(body))


def use_up(colour: Colour, decorated: Any) -> None:
    """The one call that every limit above admits."""
    with pytest.raises(LookupError):
        colour.call(decorated)


# -- one call from end to end ----------------------------------------------------------------------


def test_a_call_passes_everyone_in_order(colour: Colour, exporter: InMemorySpanExporter) -> None:
    """Hook, admission, approver, two attempts; settled, then out again; the span is around all of it."""
    log: list[str] = []
    spans: list[Any] = []

    def watch(call: Any, proceed: Any) -> Any:
        spans.append(trace.get_current_span())
        assert spans[0].is_recording()
        log.append("hook in")
        try:
            return (yield from proceed(call))
        finally:
            log.append("hook out")
            assert spans[0].is_recording()

    def body() -> str:
        log.append("body")
        if log.count("body") == 1:
            raise LookupError
        return "done"

    decorated = tool(idempotent=True)(colour.make(body))
    guard = Guard(Retry(1, wait=0), approver_into(log), Logged(log), WrapTool(watch), Timeout(30))
    with guard.scope() as run:
        assert colour.call(decorated) == "done"
        assert run.steps == 1
    assert log == ["hook in", "prepare", "check", "take", "ask", "body", "body", "done token", "hook out"]
    assert spans[0].name.startswith("execute_tool")
    assert not spans[0].is_recording()


def test_the_order_of_listing_changes_nothing_between_kinds(colour: Colour) -> None:
    """Within a kind the first listed is outermost; between kinds the order is fixed."""
    log: list[str] = []
    decorated = tool(colour.make(lambda: log.append("body")))
    rails = [hook_into(log, "a"), Logged(log), approver_into(log), hook_into(log, "b")]
    for listed in (rails, [*reversed(rails[1:3]), rails[0], rails[3]]):
        log.clear()
        with Guard(*listed).scope():
            colour.call(decorated)
        assert log == ["a in", "b in", "prepare", "check", "take", "ask", "body", "done token", "b out", "a out"]


def test_without_hooks_the_admission_is_the_same(colour: Colour) -> None:
    """The straight way asks the limits alike."""
    log: list[str] = []
    with Guard(Logged(log)).scope():
        colour.call(tool(colour.make(lambda: log.append("body"))))
    assert log == ["prepare", "check", "take", "body", "done token"]


def test_guardrails_merge_by_kind_root_first(colour: Colour) -> None:
    """Hooks of the outer run around hooks of the inner one, before any limit; limits and approvers likewise."""
    log: list[str] = []

    def rails(name: str) -> list[Any]:
        return [approver_into(log, name=f"{name} ask"), Logged(log, f"{name} "), hook_into(log, name)]

    decorated = tool(colour.make(lambda: log.append("body")))
    with Guard(*rails("outer")).scope(), Guard(*rails("inner")).scope():
        colour.call(decorated)
    assert log == [
        "outer in", "inner in",
        "outer prepare", "inner prepare", "outer check", "inner check", "outer take", "inner take",
        "outer ask", "inner ask",
        "body",
        "outer done token", "inner done token",
        "inner out", "outer out",
    ]  # fmt: skip


# -- the limits among themselves -------------------------------------------------------------------


@pytest.mark.parametrize("first", range(len(CODES)), ids=CODES)
def test_of_several_exhausted_limits_of_a_run_the_first_in_order_is_named(colour: Colour, first: int) -> None:
    """RateLimit, CircuitBreaker, MaxSteps, LoopLimit, Budget, in whatever order they are listed."""
    decorated = failing(colour)
    rails = [LIMITS[code]() for code in reversed(CODES[first:])]
    if first > CODES.index("loop_limit"):
        rails.append(LoopLimit(0))
    with Guard(*rails).scope() as run:
        use_up(colour, decorated)
        with pytest.raises(ToolCallRefused) as caught:
            colour.call(decorated)
        assert caught.value.code == CODES[first]
        assert caught.value.run_id in (run.id, None)
        assert (run.steps, run.refusals) == (1, 1)


def test_of_several_exhausted_limits_the_one_of_the_outermost_run_is_named(colour: Colour) -> None:
    """Whatever its kind: the parent's budget before the child's steps."""
    decorated = failing(colour)
    with Guard(Budget(usd=1)).scope("outer"), Guard(MaxSteps(1)).scope("inner"):
        use_up(colour, decorated)
        with pytest.raises(ToolCallRefused) as caught:
            colour.call(decorated)
    assert (caught.value.code, caught.value.source) == ("budget", "outer")


def test_a_guard_of_an_inner_run_and_of_its_tools_stands_only_there(colour: Colour) -> None:
    """Its one step is a new one in each inner run; it doesn't count in the outer run as well."""
    guard = Guard(MaxSteps(1))
    decorated = tool(guard=guard)(colour.make(lambda: "ran"))
    with Guard().scope("outer"):
        for _ in range(2):
            with guard.scope("inner"):
                assert colour.call(decorated) == "ran"


def test_limits_of_plugins_are_asked_after_our_own(colour: Colour) -> None:
    """Even after the last of them, a budget."""

    class Never(Logged):
        def check(self, call: Any) -> Any:
            return ToolCallRefused("rate_limited", "Never", call.name, "never")

    decorated = tool(cost=2)(colour.make(lambda: None))
    with Guard(Never([]), Budget(usd=1)).scope(), pytest.raises(ToolCallRefused) as caught:
        colour.call(decorated)
    assert caught.value.code == "budget"


# -- who is outside of whom ------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES)
def test_a_hook_sees_the_refusal_of_every_limit_and_people_are_not_asked(colour: Colour, code: str) -> None:
    """WrapTool is outside of the admission, ApproveTool inside: nobody is asked about a call that can't run."""
    log: list[str] = []
    seen: list[str] = []

    def watch(call: Any, proceed: Any) -> Any:
        try:
            return (yield from proceed(call))
        except ToolCallRefused as refusal:
            seen.append(refusal.code)
            raise

    decorated = failing(colour)
    with Guard(approver_into(log), LIMITS[code](), WrapTool(watch)).scope():
        use_up(colour, decorated)
        assert log == ["ask"]
        with pytest.raises(ToolCallRefused):
            colour.call(decorated)
    assert seen == [code]
    assert log == ["ask"]


def test_a_hook_sees_the_denial_too(colour: Colour) -> None:
    """And a denied call gives back what the admission had taken."""
    log: list[str] = []
    with Guard(hook_into(log), Logged(log), approver_into(log, answer=False)).scope() as run:
        with pytest.raises(ToolCallRefused):
            colour.call(tool(cost=1)(colour.make(lambda: log.append("body"))))
        assert (run.steps, run.reserved()) == (0, 0)
    assert log == ["hook in", "prepare", "check", "take", "ask", "undo token", "hook out"]


def test_the_question_is_asked_with_everything_admitted(colour: Colour) -> None:
    """While a person thinks, step and money are held."""
    held: list[Any] = []

    def approver(call: Any) -> bool:
        run = current_run()
        assert run is not None
        held.append((run.steps, run.reserved()))
        return True

    with Guard(ApproveTool(approver), MaxSteps(1), Budget(usd=5)).scope():
        colour.call(tool(cost=3)(colour.make(lambda: None)))
    assert held == [(1, 3)]


def test_an_edited_call_is_admitted_again_in_one_step(colour: Colour) -> None:
    """What the old arguments took goes back as the new ones take; approvers of the old ones are asked again."""
    log: list[str] = []
    answers = [True, Approval.edit({"n": 2}), True]

    def approver(name: str) -> ApproveTool:
        def answer(call: Any) -> Any:
            log.append(f"{name} asked about {call.arguments['n']}")
            return answers.pop(0)

        return ApproveTool(answer)

    decorated = tool(colour.make(lambda n: log.append(f"body {n}")))
    with Guard(Logged(log), approver("first"), approver("second")).scope() as run:
        colour.call(decorated, 1)
        assert run.steps == 1
    assert log == [
        "prepare", "check", "take", "first asked about 1", "second asked about 1",
        "prepare", "undo token", "check", "take", "first asked about 2",
        "body 2", "done token",
    ]  # fmt: skip


def test_an_edit_over_the_budget_is_refused(colour: Colour) -> None:
    """A refund of 50, approved and edited to 5000 under a budget of 100: the body never runs."""
    bodies: list[int] = []

    def refund(amount: int) -> None:
        bodies.append(amount)

    decorated = tool(cost=lambda call: call.arguments["amount"])(colour.make(refund))
    edit = ApproveTool(lambda call: Approval.edit({"amount": 5000}))
    with Guard(Budget(usd=100), edit).scope() as run:
        with pytest.raises(ToolCallRefused) as caught:
            colour.call(decorated, 50)
        assert caught.value.code == "budget"
        assert (run.steps, run.reserved(), run.spent(), bodies) == (0, 0, 0, [])


def test_nobody_else_is_asked_about_an_edit_of_a_run_that_was_stopped(colour: Colour) -> None:
    """The cost of the edited arguments is found to be too much for the whole run: the second approver sleeps on."""
    log: list[str] = []

    def cost(call: Any) -> int:
        if call.arguments["n"] == 2:
            call.run.stop()
        return 1

    edit = ApproveTool(lambda call: Approval.edit({"n": 2}), only=lambda call: call.arguments["n"] == 1)
    decorated = tool(cost=cost)(colour.make(lambda n: log.append("body")))
    with Guard(edit, approver_into(log)).scope() as run:
        with pytest.raises(ToolCallRefused) as caught:
            colour.call(decorated, 1)
        assert (caught.value.code, run.steps, run.reserved(), log) == ("stopped", 0, 0, [])


def test_attempts_are_neither_new_steps_nor_new_questions_nor_seen_by_hooks(colour: Colour) -> None:
    """Retry is inside of all of them; each attempt pays for itself."""
    log: list[str] = []
    decorated = failing(colour, idempotent=True)
    guard = Guard(hook_into(log), approver_into(log), MaxSteps(1), Budget(usd=9), Retry(2, wait=0))
    with guard.scope() as run:
        use_up(colour, decorated)
        assert (run.steps, run.spent(), run.reserved()) == (1, 3, 0)
    assert log == ["hook in", "ask", "hook out"]


def test_a_run_that_was_stopped_between_two_attempts_says_what_the_first_one_raised(colour: Colour) -> None:
    """The refusal that ends the call has the tool's error for its cause."""
    error = LookupError("gone")

    def body() -> None:
        raise error

    def wait(failures: int) -> float:
        run.stop()
        return 0

    decorated = tool(idempotent=True)(colour.make(body))
    with Guard(Retry(2, wait=wait)).scope() as run:
        with pytest.raises(ToolCallRefused) as caught:
            colour.call(decorated)
        assert (caught.value.code, caught.value.__cause__, run.steps) == ("stopped", error, 1)


@pytest.mark.parametrize("colour", ["sync"], indirect=True)
def test_each_attempt_has_the_whole_timeout(colour: Colour) -> None:
    """Timeout is inside of Retry: a timed-out attempt is a failure like any other, and tried again."""
    release = threading.Event()
    attempts: list[int] = []

    def body() -> str:
        attempts.append(1)
        if len(attempts) == 1:
            release.wait(10)
        return "second"

    try:
        with Guard(Retry(1, wait=0), Timeout(0.05)).scope():
            assert colour.call(tool(idempotent=True)(body)) == "second"
    finally:
        release.set()
    assert len(attempts) == 2


@pytest.mark.parametrize("colour", ["sync", "async"], indirect=True)
def test_a_wait_for_a_person_uses_nothing_of_the_timeout(colour: Colour) -> None:
    """Timeout is inside of ApproveTool; the tool itself has it all."""
    never = threading.Event()

    def slow(call: Any) -> bool:
        never.wait(0.1)  # longer than the tool's timeout
        return True

    with Guard(ApproveTool(slow), Timeout(0.05)).scope():
        assert colour.call(tool(colour.make(lambda: "in time"))) == "in time"


@pytest.mark.parametrize("colour", ["sync"], indirect=True)
def test_a_timeout_reaches_hooks_as_what_it_is(colour: Colour) -> None:
    """They are outside of it: ToolTimeout, after everything was settled at the estimate."""
    release = threading.Event()
    seen: list[Any] = []

    def watch(call: Any, proceed: Any) -> Any:
        try:
            return (yield from proceed(call))
        except ToolTimeout:
            run = current_run()
            assert run is not None
            seen.append((run.spent(), run.reserved()))
            raise

    try:
        with Guard(WrapTool(watch), Timeout(0.05)).scope(), pytest.raises(ToolTimeout):
            tool(cost=2)(lambda: release.wait(10))()
    finally:
        release.set()
    assert seen == [(2, 0)]


def test_a_run_that_was_stopped_while_a_person_thought_runs_nothing(colour: Colour) -> None:
    """Latches are looked at again after every wait."""
    bodies: list[int] = []

    def approver(call: Any) -> bool:
        call.run.stop("enough")
        return True

    with Guard(ApproveTool(approver)).scope() as run:
        with pytest.raises(ToolCallRefused) as caught:
            colour.call(tool(cost=1)(colour.make(lambda: bodies.append(1))))
        assert caught.value.code == "stopped"
        assert (run.steps, run.reserved(), bodies) == (0, 0, [])


def test_a_run_that_a_hook_stops_before_the_body_runs_nothing(colour: Colour) -> None:
    """The admission is inside of the hooks."""
    bodies: list[int] = []
    stop = WrapTool(before=lambda call: call.run.stop("enough"))
    with Guard(stop).scope(), pytest.raises(ToolCallRefused) as caught:
        colour.call(tool(colour.make(lambda: bodies.append(1))))
    assert (caught.value.code, bodies) == ("stopped", [])


@pytest.mark.parametrize("colour", ["sync", "generator"], indirect=True)
def test_an_async_approver_of_a_sync_tool_is_found_out_before_any_limit_is_asked(colour: Colour) -> None:
    """Nothing could await its answer: that is the program's mistake, and shows before anything is taken."""
    log: list[str] = []

    async def approver(call: Any) -> bool:
        return True

    decorated = tool(colour.make(lambda: None))
    with Guard(Logged(log), ApproveTool(approver)).scope(), pytest.raises(ConfigurationError, match="async"):
        colour.call(decorated)
    assert log == []


def test_arguments_that_do_not_bind_reach_no_limit_and_no_person(colour: Colour) -> None:
    """The hook sees the TypeError; nobody behind it is asked."""
    log: list[str] = []
    with Guard(hook_into(log), MaxSteps(5), approver_into(log)).scope() as run:
        with pytest.raises(TypeError):
            colour.call(tool(colour.make(lambda n: n)))
        assert (run.steps, run.refusals) == (0, 0)
    assert log == ["hook in", "hook out"]


def test_a_call_that_is_refused_leaves_every_limit_as_it_was(colour: Colour) -> None:
    """All are taken, or none."""
    log: list[str] = []
    decorated = failing(colour)
    with Guard(MaxSteps(1), Logged(log)).scope():
        use_up(colour, decorated)
        log.clear()
        with pytest.raises(ToolCallRefused):
            colour.call(decorated)
    assert log == ["prepare"]
