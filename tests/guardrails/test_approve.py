"""ApproveTool: nothing runs without an explicit yes, about exactly the arguments that run."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from loopguard import (
    Approval,
    ApprovalDenied,
    ApprovalTimeout,
    ApproveTool,
    Budget,
    ConfigurationError,
    Guard,
    LoopGuardError,
    LoopLimit,
    LoopLimitExceeded,
    MaxSteps,
    Run,
    StopReason,
    ToolCallRefused,
    WrapTool,
    current_run,
    loop,
    tool,
)
from loopguard._events import QuestionAnswered, QuestionAsked, ToolRefused
from loopguard.testing import Desk, ScriptedApprover, capture
from tests.conftest import Colour


def label(value: Any) -> str:
    """A parameter in a test's name: no address."""
    return repr(value).partition(" at 0x")[0]


class Till:
    """A tool `pay(amount)` of one colour, what its body was given, and what was said to those who called it."""

    def __init__(self, colour: Colour, **options: Any) -> None:
        self.colour = colour
        self.paid: list[Any] = []
        self.tool = tool(name="pay", **options)(colour.make(self._pay))

    def _pay(self, amount: Any) -> Any:
        self.paid.append(amount)
        return amount

    def pay(self, amount: Any) -> None:
        """Call the tool."""
        self.colour.call(self.tool, amount)

    def refused(self, amount: Any) -> ToolCallRefused:
        """Call the tool, which must be refused."""
        with pytest.raises(ToolCallRefused) as caught:
            self.pay(amount)
        return caught.value

    def outcome(self, amount: Any) -> str:
        """`paid`, or the code of the refusal."""
        try:
            self.pay(amount)
        except ToolCallRefused as refusal:
            return refusal.code
        return "paid"


@pytest.fixture
def till(colour: Colour) -> Till:
    """A till for each of the four kinds of callable."""
    return Till(colour)


def amounts(script: ScriptedApprover) -> list[Any]:
    """What the script was asked about, in order."""
    return [call.arguments["amount"] for call in script.calls]


# -- which calls are asked about -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only", "asked"),
    [
        (None, ["issue_refund", "issue_card", "search"]),
        ("issue_*", ["issue_refund", "issue_card"]),
        (("issue_card", "sea*"), ["issue_card", "search"]),
        ({"search"}, ["search"]),
        (lambda call: call.arguments["n"] > 1, ["issue_card", "search"]),
    ],
    ids=["all", "a pattern", "several", "a set", "a predicate"],
)
def test_only_says_which_calls_are_asked_about(colour: Colour, only: Any, asked: list[str]) -> None:
    """A pattern, several, or a predicate of the call; the others run unasked."""
    script = ScriptedApprover(True)
    with Guard(ApproveTool(script, only=only)).scope():
        for n, name in enumerate(("issue_refund", "issue_card", "search"), 1):
            assert colour.call(tool(name=name)(colour.make(lambda n: n)), n) == n
    assert [call.name for call in script.calls] == asked


def test_a_predicate_that_raises_refuses(till: Till) -> None:
    """When it can't be found out whether somebody must be asked, nobody may run the call."""

    def only(call: Any) -> bool:
        raise LookupError("no such customer")

    script = ScriptedApprover(True)
    with Guard(ApproveTool(script, only=only)).scope() as run:
        refusal = till.refused(1)
        assert (refusal.code, refusal.guardrail, run.steps) == ("approval_error", "ApproveTool", 0)
    assert "no such customer" in str(refusal)
    assert (script.calls, till.paid) == ([], [])


def test_a_predicate_answers_once_about_the_same_arguments(till: Till) -> None:
    """One that says yes the first time only, such as a sample of the calls: the approver is asked."""
    answers = [True, False, False]
    script = ScriptedApprover(False)
    with Guard(ApproveTool(script, only=lambda call: answers.pop(0))).scope():
        assert till.refused(1).code == "approval_denied"
    assert (len(script.calls), till.paid) == (1, [])


@pytest.mark.parametrize(
    "rails",
    [
        [],
        [ApproveTool(lambda call: True, only="something_else")],
        [ApproveTool(lambda call: True, only=lambda call: False)],
    ],
    ids=["nobody", "for another tool", "for another call"],
)
@pytest.mark.parametrize("mode", ["enforce", "observe"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_tool_that_wants_a_yes_does_not_run_where_nobody_can_give_it(
    colour: Colour, rails: list[Any], mode: Any, inside: bool
) -> None:
    """`approve=True` without a covering ApproveTool is refused, inside of runs and outside, and says what to do."""
    guard = Guard(*rails, mode=mode)
    till = Till(colour, approve=True, guard=guard)
    with ExitStack() as stack:
        run = stack.enter_context(guard.scope()) if inside else None
        refusal = till.refused(1)
        assert run is None or (run.steps, run.refusals) == (0, 1)
    assert refusal.code == "approval_error"
    assert "ApproveTool(ask_in_terminal)" in str(refusal)
    assert till.paid == []


def test_a_tool_that_wants_a_yes_runs_with_one(colour: Colour) -> None:
    """Of the loop's approver, or its own."""
    till = Till(colour, approve=True)
    with Guard(ApproveTool(lambda call: True)).scope():
        till.pay(1)
    own = Till(colour, approve=True, guard=Guard(ApproveTool(lambda call: True)))
    own.pay(2)
    assert (till.paid, own.paid) == ([1], [2])


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (["ask me"], {}),
        ([None], {}),
        ([print], {"only": 5}),
        ([print], {"only": ["a", 5]}),
        ([print], {"timeout": 0}),
        ([print], {"timeout": -1}),
        ([print], {"timeout": float("nan")}),
        ([print], {"timeout": float("inf")}),
        ([print], {"timeout": True}),
        ([print], {"timeout": "5"}),
    ],
)
def test_a_wrong_option_is_a_configuration_error(args: list[Any], options: dict[str, Any]) -> None:
    """It is said when the guardrail is made, and names ApproveTool."""
    with pytest.raises(ConfigurationError, match="ApproveTool"):
        ApproveTool(*args, **options)


# -- what is a yes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [True, (True, "go on"), (True, None), Approval.approve(), Approval.approve("run"), Approval.approve(by="ada")],
    ids=label,
)
def test_a_yes_is_true_a_pair_or_an_approval(till: Till, answer: Any) -> None:
    """The tool runs, once."""
    with Guard(ApproveTool(lambda call: answer)).scope():
        till.pay(1)
    assert till.paid == [1]


@pytest.mark.parametrize(
    "answer",
    [
        None, 1, 0, 1.0, "yes", "", b"y", [True], {"approve": True}, object(), (), (True,), (1, None), (1, "ok"),
        ("yes", None), (True, 5), (True, "a", "b"), [True, "ok"], Approval, Approval.approve, lambda: True,
    ],
    ids=label,
)  # fmt: skip
def test_nothing_else_is_a_yes_nor_a_no(till: Till, answer: Any) -> None:
    """However truthy it is: the call is refused, and not in a person's name."""
    with capture() as seen, Guard(ApproveTool(lambda call: answer)).scope():
        refusal = till.refused(1)
    assert (refusal.code, till.paid) == ("approval_error", [])
    assert type(answer).__name__ in str(refusal)
    assert [event.decision for event in seen.events_of(QuestionAnswered)] == ["error"]


@pytest.mark.parametrize("answer", [(False, "use staging"), Approval.deny("use staging", by="ada")], ids=label)
def test_a_no_says_why_and_what_to_do(till: Till, answer: Any) -> None:
    """The text that the model gets has the approver's own words in it."""
    with Guard(ApproveTool(lambda call: answer)).scope() as run:
        refusal = till.refused(1)
        assert (refusal.source, refusal.run_id) == (run.name, run.id)
    assert isinstance(refusal, ApprovalDenied)
    assert (refusal.code, refusal.guardrail, refusal.tool) == ("approval_denied", "ApproveTool", "pay")
    assert refusal.reason == "use staging"
    assert str(refusal) == (
        "pay was not approved: use staging. It did not run; do something else instead of repeating it."
    )


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"decision": "maybe"}, r"'maybe'.*use Approval\.approve"),
        ({"decision": "approve", "grant": "for ever"}, "grant='for ever': give 'once' or 'run'"),
        ({"decision": "deny", "reason": 5}, "reason=5: give a text"),
        ({"decision": "edit"}, r"arguments=None.*use Approval\.edit"),
        ({"decision": "edit", "arguments": [("amount", 5)]}, r"use Approval\.edit"),
        ({"decision": "approve", "arguments": {"amount": 5}}, r"use Approval\.edit"),
    ],
    ids=str,
)
def test_an_approval_that_makes_no_sense_can_not_be_made(wrong: dict[str, Any], match: str) -> None:
    """An edit without arguments, a yes with some that would be dropped, a misspelt grant."""
    with pytest.raises(ConfigurationError, match=match):
        Approval(**wrong)


@pytest.mark.parametrize("arguments", [None, 5, [("amount", 5)], "amount"], ids=str)
def test_an_edit_is_a_mapping(arguments: Any) -> None:
    """Anything else is said where the approver makes it."""
    with pytest.raises(ConfigurationError, match="mapping"):
        Approval.edit(arguments)


# -- colours of approvers --------------------------------------------------------------------------


async def async_yes(call: Any) -> bool:
    """An async approver."""
    await asyncio.sleep(0)
    return True


class AsyncYes:
    """An object whose call is async."""

    async def __call__(self, call: Any) -> bool:
        return await async_yes(call)


class Awaitable:
    """Neither a coroutine nor a future, but to be awaited all the same."""

    def __await__(self) -> Any:
        return async_yes(None).__await__()


def coroutine_of(call: Any) -> Any:
    """A plain function that returns a coroutine."""
    return async_yes(call)


ASYNC_APPROVERS = {
    "async def": async_yes,
    "an object": AsyncYes(),
    "a plain function that gives a coroutine": coroutine_of,
    "a plain function that gives an awaitable": lambda call: Awaitable(),
}


@pytest.mark.parametrize("approver", ASYNC_APPROVERS.values(), ids=ASYNC_APPROVERS.keys())
@pytest.mark.parametrize("timeout", [None, 5])
def test_an_async_approver_answers_about_async_tools_only(till: Till, approver: Any, timeout: float | None) -> None:
    """For a sync tool it is a ConfigurationError, not a deadlock, and never a yes for being truthy."""
    with Guard(ApproveTool(approver, timeout=timeout)).scope() as run:
        if till.colour.name in ("async", "async generator"):
            till.pay(1)
            assert till.paid == [1]
        else:
            with pytest.raises(ConfigurationError, match="async"):
                till.pay(1)
            assert (till.paid, run.steps, run.paused) == ([], 0, False)


@pytest.mark.parametrize("colour", ["sync", "generator"], indirect=True)
def test_an_async_approver_of_other_tools_is_no_matter_to_a_sync_one(colour: Colour) -> None:
    """Even where the sync tool needs an approval: its own approver gives it."""
    till = Till(colour, approve=True)
    with Guard(ApproveTool(async_yes, only="other"), ApproveTool(lambda call: True, only="pay")).scope():
        till.pay(1)
    assert till.paid == [1]


@pytest.mark.parametrize("colour", ["async", "async generator"], indirect=True)
def test_a_blocking_approver_does_not_block_the_event_loop(till: Till) -> None:
    """It waits for what only the event loop can do."""
    free = threading.Event()

    def approver(call: Any) -> bool:
        return free.wait(10)

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, free.set)
        if till.colour.name == "async":
            await till.tool(1)
        else:
            async for _ in till.tool(1):
                pass

    with Guard(ApproveTool(approver)).scope():
        asyncio.run(main())
    assert till.paid == [1]


# -- it fails closed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("boom"),
        TimeoutError("boom"),
        StopIteration("boom"),
        StopAsyncIteration("boom"),
        ToolCallRefused("max_steps", "MaxSteps", "lookup", "boom"),
        ExceptionGroup("boom", [ValueError()]),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("timeout", [None, 5])
def test_an_approver_that_raises_refuses(till: Till, error: Any, timeout: float | None) -> None:
    """The refusal names the error, is this call's own, and isn't a person's no."""
    with capture() as seen, Guard(ApproveTool(ScriptedApprover([error]), timeout=timeout)).scope() as run:
        refusal = till.refused(1)
        assert (run.steps, run.refusals) == (0, 1)
    assert (refusal.code, refusal.tool, till.paid) == ("approval_error", "pay", [])
    assert not isinstance(refusal, ApprovalDenied)
    assert type(error).__name__ in str(refusal)
    assert [event.code for event in seen.events_of(ToolRefused)] == ["approval_error"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("timeout", [None, 5])
def test_what_must_never_be_swallowed_passes_through(till: Till, error: Any, timeout: float | None) -> None:
    """Ctrl-C at the question ends the program: nothing ran, nothing is held, no clock stands still."""
    approver = ScriptedApprover([error])
    with Guard(ApproveTool(approver, timeout=timeout), Budget(usd=5)).scope() as run:
        with pytest.raises(error):
            till.pay(1)
        assert (run.steps, run.reserved(), run.paused, till.paid) == (0, 0, False, [])


@pytest.fixture
def silent() -> Iterator[Callable[[Any], bool]]:
    """An approver that says yes when the test is over."""
    over = threading.Event()
    yield lambda call: over.wait(10)
    over.set()


def test_silence_is_not_a_no(till: Till, silent: Callable[[Any], bool]) -> None:
    """It has a code, a class and a text of its own."""
    with Guard(ApproveTool(silent, timeout=0.02)).scope() as run:
        refusal = till.refused(1)
        assert (run.steps, run.paused) == (0, False)
        assert (refusal.source, refusal.run_id) == (run.name, run.id)
    assert isinstance(refusal, ApprovalTimeout)
    assert (refusal.code, refusal.guardrail) == ("approval_timeout", "ApproveTool")
    assert str(refusal) == "nobody approved pay within 0.02 s, so it was not run"
    assert till.paid == []


@pytest.mark.parametrize("colour", ["async"], indirect=True)
def test_an_async_approver_that_is_silent_is_cancelled(till: Till) -> None:
    """Its time is up, and it hears of it."""
    heard: list[bool] = []

    async def approver(call: Any) -> bool:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append(True)
            raise
        return True

    with Guard(ApproveTool(approver, timeout=0.02)).scope():
        assert till.refused(1).code == "approval_timeout"
    assert (heard, till.paid) == ([True], [])


@pytest.mark.parametrize("colour", ["async", "async generator"], indirect=True)
def test_a_yes_that_held_up_the_clock_itself_is_late(till: Till) -> None:
    """An async approver that blocks the event loop, so that its timeout can't be noticed before it answers."""

    async def approver(call: Any) -> bool:
        threading.Event().wait(0.05)
        return True

    with Guard(ApproveTool(approver, timeout=0.02)).scope():
        assert till.refused(1).code == "approval_timeout"
    assert till.paid == []


@pytest.mark.parametrize("answer", [True, False, RuntimeError("boom")], ids=label)
def test_a_question_is_closed_once_nobody_waits_for_its_answer(till: Till, answer: Any) -> None:
    """An approver can see that, to give up; and while its answer is waited for, that it is."""
    seen: list[Any] = []

    def approver(call: Any) -> Any:
        seen.append((call.question, call.question.closed))
        return ScriptedApprover([answer])(call)

    with Guard(ApproveTool(approver)).scope():
        till.outcome(1)
    ((question, closed),) = seen
    assert (closed, question.closed, question.over) == (False, True, True)


@pytest.mark.parametrize("answer", [False, 1, RuntimeError("boom"), Approval.edit({"amount": 2}), None], ids=label)
def test_a_run_that_was_stopped_during_the_question_says_so(till: Till, answer: Any) -> None:
    """Whatever was answered: the latch is looked at after the wait."""

    def approver(call: Any) -> Any:
        call.run.stop("enough")
        return ScriptedApprover([answer])(call)

    with Guard(ApproveTool(approver)).scope() as run:
        assert till.refused(1).code == "stopped"
        assert (run.steps, till.paid) == (0, [])


def test_a_run_that_was_stopped_while_nobody_answered_says_so(till: Till, silent: Callable[[Any], bool]) -> None:
    """Silence, too, is looked at again."""

    def approver(call: Any) -> bool:
        call.run.stop("enough")
        return silent(call)

    with Guard(ApproveTool(approver, timeout=0.02)).scope():
        assert till.refused(1).code == "stopped"


@pytest.mark.parametrize(
    "answer",
    [False, None, RuntimeError("boom"), Approval.edit({"amount": 5000}), Approval.edit({"sum": 1})],
    ids=label,
)
def test_a_call_that_was_not_approved_has_used_nothing(colour: Colour, answer: Any) -> None:
    """Neither a step nor money: the next one has all of both."""
    till = Till(colour, cost=lambda call: call.arguments["amount"])
    with Guard(ApproveTool(ScriptedApprover([answer, True])), MaxSteps(1), Budget(usd=100)).scope() as run:
        till.refused(50)
        assert (run.steps, run.reserved(), run.spent()) == (0, 0, 0)
        till.pay(100)
        assert (run.steps, run.reserved(), run.spent()) == (1, 0, 100)
    assert till.paid == [100]


# -- editing ---------------------------------------------------------------------------------------


def everything(a: Any, /, b: Any, *rest: Any, c: Any, d: Any = 4, **more: Any) -> dict[str, Any]:
    """Every kind of parameter."""
    return {"a": a, "b": b, "rest": rest, "c": c, "d": d, "more": more}


def defaults(a: Any = 1, b: Any = 2, /, *rest: Any) -> dict[str, Any]:
    """Positional-only ones with defaults, and more."""
    return {"a": a, "b": b, "rest": rest}


GIVEN = {"a": 1, "b": 2, "rest": (3,), "c": 5, "d": 4, "more": {"x": 6}}


@pytest.mark.parametrize(
    ("fn", "edit", "ran"),
    [
        (everything, GIVEN, GIVEN),
        (everything, {**GIVEN, "a": 10, "c": 50}, {**GIVEN, "a": 10, "c": 50}),
        (everything, {**GIVEN, "rest": [7, 8], "more": {}}, {**GIVEN, "rest": (7, 8), "more": {}}),
        (everything, {**GIVEN, "more": {"a": 9}}, {**GIVEN, "more": {"a": 9}}),
        (everything, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "rest": (), "c": 3, "d": 4, "more": {}}),
        (everything, dict(reversed(GIVEN.items())), GIVEN),
        (defaults, {"b": 5}, {"a": 1, "b": 5, "rest": ()}),
        (defaults, {"rest": (8, 9)}, {"a": 1, "b": 2, "rest": (8, 9)}),
        (lambda a=1, *rest: {"a": a, "rest": rest}, {"rest": [8]}, {"a": 1, "rest": (8,)}),
        (lambda a=1, b=2, *, c=3: {"a": a, "b": b, "c": c}, {"b": 5}, {"a": 1, "b": 5, "c": 3}),
    ],
)
def test_an_edit_has_the_shape_of_the_arguments(
    colour: Colour, fn: Callable[..., Any], edit: dict[str, Any], ran: dict[str, Any]
) -> None:
    """Varargs as a sequence, further keywords as a mapping; what is left out takes its default."""
    decorated = tool(colour.make(fn))
    with Guard(ApproveTool(lambda call: Approval.edit(edit))).scope():
        given = ((1, 2, 3), {"c": 5, "x": 6}) if fn is everything else ((), {})
        assert colour.call(decorated, *given[0], **given[1]) == ran


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({**GIVEN, "amount": 5}, "no parameter amount"),
        ({**GIVEN, "self": 5}, "no parameter self"),
        ({**GIVEN, "name": "other_tool"}, "no parameter name"),
        ({**GIVEN, 5: 5}, "no parameter 5"),
        ({"a": 1, "b": 2}, "no value for the parameter c"),
        ({}, "no value for the parameter a"),
        ({**GIVEN, "rest": 5}, "not iterable"),
        ({**GIVEN, "more": 5}, "mapping"),
        ({**GIVEN, "more": "xy"}, "mapping"),
        ({**GIVEN, "more": {"c": 5000}}, "multiple values"),
        ({**GIVEN, "more": {"b": 5000}}, "multiple values"),
        ({**GIVEN, "more": {5: 5}}, "must be strings"),
    ],
)
def test_an_edit_that_does_not_fit_refuses(colour: Colour, edit: dict[Any, Any], says: str) -> None:
    """Unknown names, missing ones, and shapes that aren't those of the parameters."""
    bodies: list[Any] = []
    decorated = tool(name="work", cost=1)(colour.make(lambda a, /, b, *rest, c, d=4, **more: bodies.append(a)))
    with Guard(ApproveTool(lambda call: Approval.edit(edit))).scope() as run:
        with pytest.raises(ToolCallRefused) as caught:
            colour.call(decorated, 1, 2, 3, c=5, x=6)
        assert (run.steps, run.reserved(), run.refusals) == (0, 0, 1)
    assert (caught.value.code, bodies) == ("approval_error", [])
    assert says in str(caught.value)


def test_an_edited_method_keeps_its_object(colour: Colour) -> None:
    """`self` isn't among the arguments: an edit can change neither it nor the tool."""

    class Account:
        def __init__(self, owner: str) -> None:
            self.owner = owner

        pay = tool(colour.make(lambda self, amount: (self.owner, amount)))

    with Guard(ApproveTool(lambda call: Approval.edit({"amount": 2}))).scope():
        assert colour.call(Account("ada").pay, 1) == ("ada", 2)
        assert colour.call(Account.pay, Account("bob"), 1) == ("bob", 2)


def test_an_edited_call_takes_what_its_new_arguments_cost(colour: Colour) -> None:
    """What the old ones had reserved is free again, in the same step."""
    held: list[Any] = []

    def pay(amount: int) -> None:
        run = current_run()
        assert run is not None
        held.append((amount, run.steps, run.spent(), run.reserved()))

    decorated = tool(cost=lambda call: call.arguments["amount"])(colour.make(pay))
    script = ScriptedApprover([Approval.edit({"amount": 4}), True])
    with Guard(ApproveTool(script), Budget(usd=10), MaxSteps(2)).scope() as run:
        colour.call(decorated, 10)
        colour.call(decorated, 6)
        assert (run.steps, run.spent(), run.reserved()) == (2, 10, 0)
    assert held == [(4, 1, 0, 4), (6, 2, 4, 6)]


def test_an_edited_call_may_ask_for_more_money(colour: Colour) -> None:
    """A budget that can be extended asks before it refuses the new arguments, as it would have for the old ones."""
    till = Till(colour, cost=lambda call: call.arguments["amount"])
    more = ScriptedApprover([True])
    edit = ScriptedApprover([Approval.edit({"amount": 14})])
    with Guard(ApproveTool(edit), Budget(usd=10, extend=more, extend_by=5), MaxSteps(1)).scope() as run:
        till.pay(9)
        assert (run.steps, run.spent(), run.reserved(), run.remaining()) == (1, 14, 0, 1)
    assert (till.paid, len(more.calls)) == ([14], 1)


def test_an_edited_call_that_gets_no_more_money_has_used_nothing(colour: Colour) -> None:
    """The extension is denied: the refusal is the budget's."""
    till = Till(colour, cost=lambda call: call.arguments["amount"])
    edit = ScriptedApprover([Approval.edit({"amount": 14})])
    with Guard(ApproveTool(edit), Budget(usd=10, extend=lambda _: False, extend_by=5), MaxSteps(1)).scope() as run:
        assert till.refused(9).code == "budget"
        assert (run.steps, run.spent(), run.reserved()) == (0, 0, 0)
    assert till.paid == []


def test_an_edited_call_counts_as_what_it_became(till: Till) -> None:
    """For LoopLimit the new arguments have been used once, and the old ones never."""
    script = ScriptedApprover([Approval.edit({"amount": 2}), True, Approval.edit({"amount": 2})])
    with Guard(ApproveTool(script), LoopLimit(1, strict=True)).scope() as run:
        till.pay(1)  # becomes 2
        assert isinstance(till.refused(2), LoopLimitExceeded)
        till.pay(1)
        assert isinstance(till.refused(3), LoopLimitExceeded)  # becomes 2
        assert run.steps == 2
    assert (amounts(script), till.paid) == ([1, 1, 3], [2, 1])


@pytest.mark.parametrize(("amount", "observed"), [(4, 0), (60, 1)])
def test_an_observed_limit_judges_the_edited_call(colour: Colour, amount: int, observed: int) -> None:
    """In observe mode, too, the new arguments take the place of the old ones."""
    till = Till(colour, cost=lambda call: call.arguments["amount"])
    edit = ApproveTool(lambda call: Approval.edit({"amount": amount}))
    with capture() as seen, Guard(Budget(usd=10), edit, mode="observe").scope():
        till.pay(50)
    assert till.paid == [amount]
    assert [event.arguments for event in seen.events_of(ToolRefused)] == [{"amount": amount}] * observed


def test_who_had_approved_other_arguments_is_asked_again(till: Till) -> None:
    """And may say no to the edited ones; whoever edited isn't asked about the edit."""
    first, second = ScriptedApprover([True, (False, "too much")]), ScriptedApprover([Approval.edit({"amount": 2})])
    with Guard(ApproveTool(first), ApproveTool(second)).scope() as run:
        assert till.refused(1).reason == "too much"
        assert run.steps == 0
    assert (amounts(first), amounts(second), till.paid) == ([1, 2], [1], [])


@pytest.mark.parametrize("first", [True, False])
def test_whom_only_the_edited_arguments_concern_is_asked_too(till: Till, first: bool) -> None:
    """An approver for large amounts, and another who makes a small amount large, in either order."""
    large, any_amount = ScriptedApprover([(False, "too much")]), ScriptedApprover([Approval.edit({"amount": 500})])
    rails = [ApproveTool(large, only=lambda call: call.arguments["amount"] > 100), ApproveTool(any_amount)]
    with Guard(*(rails if first else reversed(rails))).scope():
        assert till.refused(50).reason == "too much"
    assert (amounts(large), amounts(any_amount), till.paid) == ([500], [50], [])


def test_whom_the_edited_arguments_do_not_concern_is_not_asked_again(till: Till) -> None:
    """`only` holds for edited calls as for any other."""
    large = ScriptedApprover([True])
    rails = [ApproveTool(large, only=lambda call: call.arguments["amount"] > 100)]
    rails += [ApproveTool(lambda call: Approval.edit({"amount": 50}))]
    with Guard(*rails).scope():
        till.pay(500)
    assert (amounts(large), till.paid) == ([500], [50])


def test_each_approver_may_edit_once(till: Till) -> None:
    """Two who edit, each in view of the other's edit."""
    first = ScriptedApprover([Approval.edit({"amount": 2}), True])
    second = ScriptedApprover([Approval.edit({"amount": 3})])
    with Guard(ApproveTool(first), ApproveTool(second)).scope() as run:
        till.pay(1)
        assert run.steps == 1
    assert (amounts(first), amounts(second), till.paid) == ([1, 3], [2], [3])


def test_two_who_undo_each_other_s_edits_come_to_an_end(till: Till) -> None:
    """The second edit of one approver is refused."""
    first = ScriptedApprover(Approval.edit({"amount": 1}))
    second = ScriptedApprover(Approval.edit({"amount": 2}))
    with Guard(ApproveTool(first), ApproveTool(second)).scope() as run:
        refusal = till.refused(2)
        assert run.steps == 0
    assert (refusal.code, till.paid) == ("approval_error", [])
    assert "edited its arguments twice" in str(refusal)
    assert (amounts(first), amounts(second)) == ([2, 2], [1])


def test_an_edit_that_changes_nothing_asks_nobody_again(till: Till) -> None:
    """What was approved is what runs."""
    first, second = ScriptedApprover([True]), ScriptedApprover([Approval.edit({"amount": 1})])
    with Guard(ApproveTool(first), ApproveTool(second)).scope():
        till.pay(1)
    assert (amounts(first), till.paid) == ([1], [1])


def test_an_edit_is_what_it_was_when_it_was_given(till: Till) -> None:
    """The approver goes on working on its dict while the next one is asked."""
    draft = {"amount": {"usd": 5}}

    def second(call: Any) -> bool:
        draft["amount"]["usd"] = 5000
        return bool(call.arguments == {"amount": {"usd": 5}})

    with Guard(ApproveTool(lambda call: Approval.edit(draft)), ApproveTool(second)).scope():
        till.pay({"usd": 1})
    assert till.paid == [{"usd": 5}]


# -- grants and denials ----------------------------------------------------------------------------


def test_a_grant_holds_for_this_tool_and_these_arguments_in_this_run(colour: Colour) -> None:
    """Not for others; a child run is part of the run on which the approver stands."""
    till, other = Till(colour, repeatable=True), tool(name="other")(colour.make(lambda amount: amount))
    script = ScriptedApprover(lambda call: Approval.approve(grant="run"))
    guard = Guard(ApproveTool(script))
    with guard.scope():
        for amount in (1, 1, 1, 1, 1, 2, 1):
            till.pay(amount)
        colour.call(other, 1)
        with Guard().scope():
            till.pay(1)
    assert [(call.name, call.arguments["amount"]) for call in script.calls] == [("pay", 1), ("pay", 2), ("other", 1)]
    with guard.scope():
        till.pay(1)
    assert len(script.calls) == 4
    assert till.paid == [1, 1, 1, 1, 1, 2, 1, 1, 1]


def test_a_grant_is_for_what_was_asked_about_and_not_for_a_like_of_it(till: Till) -> None:
    """1, 1.0 and True are one to LoopLimit, and three to whoever approves."""
    script = ScriptedApprover(lambda call: Approval.approve(grant="run"))
    with Guard(ApproveTool(script)).scope():
        for amount in (1, 1.0, True, "1", 1):
            till.pay(amount)
    assert len(script.calls) == 4


@pytest.mark.parametrize(
    ("self_key", "asked"), [(None, ["ada", "bob"]), (lambda self: self.bank, ["ada"])], ids=["identity", "a key"]
)
def test_a_grant_for_one_object_s_method_is_none_for_another_s(colour: Colour, self_key: Any, asked: list[str]) -> None:
    """Equal objects are two, unless `self_key` says what makes them one."""

    class Account:
        bank = "bank"

        def __init__(self, owner: str) -> None:
            self.owner = owner

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 1

        pay = tool(repeatable=True, self_key=self_key)(colour.make(lambda self, amount: amount))

    questions: list[str] = []

    def approver(call: Any) -> Approval:
        questions.append(call.instance.owner)
        return Approval.approve(grant="run")

    ada, bob = Account("ada"), Account("bob")
    with Guard(ApproveTool(approver)).scope():
        for account in (ada, ada, bob, bob, ada):
            colour.call(account.pay, 1)
    assert questions == asked


def test_a_key_that_can_not_be_told_refuses(colour: Colour) -> None:
    """What was approved must be nameable."""
    bodies: list[Any] = []

    def self_key(self: Any) -> str:
        raise LookupError("not saved yet")

    class Account:
        pay = tool(self_key=self_key)(colour.make(lambda self, amount: bodies.append(amount)))

    with Guard(ApproveTool(lambda call: True)).scope(), pytest.raises(ToolCallRefused) as caught:
        colour.call(Account().pay, 1)
    assert (caught.value.code, bodies) == ("approval_error", [])
    assert "not saved yet" in str(caught.value)


@pytest.mark.parametrize(
    "rail",
    [None, LoopLimit(0), LoopLimit(2, strict=True), LoopLimit(5, ttl=60)],
    ids=["by default", "without", "strict", "ttl"],
)
def test_a_denial_holds_until_another_new_call_has_completed(colour: Colour, rail: LoopLimit | None) -> None:
    """Until then nobody is asked: not after a refused call, nor one of a repeatable tool, nor the same one again."""
    till = Till(colour)
    script = ScriptedApprover([(False, "not yet"), (False, "nor this"), True])
    look = tool(colour.make(lambda place: place))
    think = tool(repeatable=True)(colour.make(lambda: None))
    with Guard(ApproveTool(script, only="pay"), *([rail] if rail else [])).scope():
        if rail is None or rail.n:
            colour.call(look, "here")
        assert till.outcome(1) == "approval_denied"
        assert till.refused(1).reason == "not yet"
        assert till.outcome(2) == "approval_denied"
        assert till.refused(1).reason == "not yet"
        colour.call(think)
        if rail is None or rail.n:
            colour.call(look, "here")
        assert till.refused(1).reason == "not yet"
        assert amounts(script) == [1, 2]
        colour.call(look, "there")
        assert till.outcome(1) == "paid"
    assert amounts(script) == [1, 2, 1]


def test_a_call_that_failed_is_news_too(till: Till) -> None:
    """It ran, and something is known that wasn't before."""
    script = ScriptedApprover([False, True])

    def fail() -> None:
        raise OSError

    with Guard(ApproveTool(script, only="pay")).scope():
        till.refused(1)
        with pytest.raises(OSError):  # noqa: PT011  # the body's own
            till.colour.call(tool(till.colour.make(fail)))
        till.pay(1)
    assert (amounts(script), till.paid) == ([1, 1], [1])


def test_news_of_a_child_run_is_news(till: Till) -> None:
    """What a nested loop finds out lifts a denial of the outer one."""
    script = ScriptedApprover([False, True])
    with Guard(ApproveTool(script, only="pay")).scope():
        till.refused(1)
        with Guard(LoopLimit(0)).scope():
            till.colour.call(tool(till.colour.make(lambda: None)))
        till.pay(1)
    assert till.paid == [1]


def test_a_denial_for_the_run_is_final(till: Till) -> None:
    """Whatever comes of the run: nobody is asked again; another run is another matter."""
    script = ScriptedApprover([Approval.deny("never", grant="run"), True])
    guard = Guard(ApproveTool(script, only="pay"))
    with guard.scope():
        for place in range(4):
            assert till.refused(1).reason == "never"
            till.colour.call(tool(till.colour.make(lambda place: place)), place)
    assert len(script.calls) == 1
    with guard.scope():
        till.pay(1)
    assert till.paid == [1]


@pytest.mark.parametrize("later", [True, Approval.approve(grant="run"), Approval.edit({"amount": 1})], ids=label)
def test_a_final_denial_holds_for_the_same_question_that_is_open(later: Any) -> None:
    """Two identical calls at once: a yes that comes after the final no runs nothing, and lifts nothing."""
    desk, paid = Desk(), []

    @tool
    def pay(amount: int) -> None:
        paid.append(amount)

    with Guard(ApproveTool(desk)).scope(), ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(contextvars.copy_context().run, pay, 1) for _ in range(2)]
        desk.wait(2)
        desk.answer(0, Approval.deny("never", grant="run"))
        wait(calls, 5, FIRST_COMPLETED)
        desk.answer(1, later)
        assert [str(call.exception(5)) for call in calls] == [
            "pay was not approved: never. It did not run; do something else instead of repeating it."
        ] * 2
        with pytest.raises(ApprovalDenied):
            pay(1)
    assert (paid, len(desk.calls)) == ([], 2)


def test_an_old_denial_is_not_given_as_the_reason_of_a_later_refusal(colour: Colour) -> None:
    """Denied once, approved twice; the fourth time nobody is asked, and not because of that denial."""
    till = Till(colour, repeatable=True)
    script = ScriptedApprover([(False, "not yet"), True, True])
    with Guard(ApproveTool(script, only="pay")).scope():
        till.refused(1)
        colour.call(tool(colour.make(lambda: None)))
        till.pay(1)
        till.pay(1)
        assert till.refused(1).reason == "it was asked about 3 times in this run already"
        assert till.outcome(2) == "approval_error"  # the script has run out: about another call it is asked
    assert len(script.calls) == 4


@pytest.mark.parametrize("colour", ["sync", "async"], indirect=True)
def test_a_hook_that_goes_round_again_needs_another_yes(till: Till) -> None:
    """An approval holds for one execution."""

    def twice(call: Any, proceed: Any) -> Any:
        yield from proceed(call)
        return (yield from proceed(call))

    script = ScriptedApprover([True, False])
    with Guard(WrapTool(twice), ApproveTool(script)).scope():
        assert till.refused(1).code == "approval_denied"
    assert (len(script.calls), till.paid) == (2, [1])


# -- what runs is what was approved ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda value: value.append(2)),
        ({"n": 1}, lambda value: value.update(n=2)),
        ({1}, lambda value: value.add(2)),
        (([1],), lambda value: value[0].append(2)),
        ({"n": [{"m": {1}}]}, lambda value: value["n"][0]["m"].add(2)),
    ],
    ids=["list", "dict", "set", "list in a tuple", "set deep down"],
)
def test_an_approver_that_changes_the_arguments_in_place_refuses(
    till: Till, value: Any, change: Callable[[Any], object]
) -> None:
    """It was asked about one thing and left another: to change it is to edit."""

    def approver(call: Any) -> bool:
        change(call.arguments["amount"])
        return True

    before = label(value)
    with Guard(ApproveTool(approver)).scope("shop") as run:
        refusal = till.refused(value)
        assert (refusal.code, refusal.guardrail, refusal.limit, refusal.value) == (
            *("approval_mismatch", "ApproveTool"),
            *(None, None),
        )
        assert (refusal.source, refusal.run_id) == ("shop", run.id)
        assert (run.steps, till.paid) == (0, [])
    assert label(value) == before


def test_the_dict_of_arguments_is_the_approver_s_own(till: Till) -> None:
    """Assigning in it changes nothing: that isn't how to edit."""

    def approver(call: Any) -> bool:
        call.arguments["amount"] = 5000
        return True

    with Guard(ApproveTool(approver)).scope():
        till.pay(1)
    assert till.paid == [1]


def test_a_leaf_that_one_approver_saw_and_another_did_not_is_a_mismatch(till: Till) -> None:
    """It changed between two questions: the first approved something else."""
    order = SimpleNamespace(amount=10)

    def first(call: Any) -> bool:
        return bool(call.arguments["amount"].amount == 10)

    def second(call: Any) -> bool:
        order.amount = 5000
        return True

    with Guard(ApproveTool(first), ApproveTool(second)).scope():
        assert till.refused(order).code == "approval_mismatch"
    assert till.paid == []


def test_the_containers_are_copies_and_the_leaves_are_not(till: Till) -> None:
    """Under an approval the tool gets builtin containers of its own, and every other object as it is."""
    leaf = SimpleNamespace()
    given = {"list": [leaf], "tuple": (leaf, [1]), "set": {1}, "dict": {"leaf": leaf}}
    with Guard(ApproveTool(lambda call: True)).scope():
        till.pay(given)
    (got,) = till.paid
    assert got == given
    assert got is not given
    for name in ("list", "set", "dict"):
        assert got[name] is not given[name]
    assert got["tuple"][1] is not given["tuple"][1]
    assert got["list"][0] is got["tuple"][0] is got["dict"]["leaf"] is leaf


@pytest.mark.parametrize("only", ["other", lambda call: False], ids=["another tool", "not this call"])
def test_where_no_approval_applies_the_tool_gets_the_originals(till: Till, only: Any) -> None:
    """Nothing is copied for nobody."""
    given = {"list": [1]}
    with Guard(ApproveTool(lambda call: True, only=only)).scope():
        till.pay(given)
    assert till.paid[0] is given


# -- modes and clocks ------------------------------------------------------------------------------


def test_observing_guards_ask_all_the_same(till: Till) -> None:
    """`mode="observe"` is about limits: approvals are always enforced."""
    script = ScriptedApprover([(False, "no"), True])
    with Guard(ApproveTool(script), mode="observe").scope():
        assert till.refused(1).code == "approval_denied"
        till.pay(2)
    assert (amounts(script), till.paid) == ([1, 2], [2])


@pytest.mark.parametrize("colour", ["sync", "async"], indirect=True)
def test_the_clock_of_the_loop_stands_still_while_a_person_is_asked(till: Till) -> None:
    """One who takes longer than the loop may; and the time goes on afterwards."""
    person = threading.Event()

    def approver(call: Any) -> bool:
        person.wait(0.15)
        return True

    guard = Guard(ApproveTool(approver))
    if till.colour.name == "sync":

        @loop(max=1, timeout=0.1, guard=guard)
        def agent(n: int) -> int:
            till.tool(n)
            return n

        result = agent.run(1)
    else:

        @loop(max=1, timeout=0.1, guard=guard)
        async def async_agent(n: int) -> int:
            await till.tool(n)
            return n

        result = asyncio.run(async_agent.run(1))
    assert (result.stop_reason, till.paid) == (StopReason.MAX_ITERATIONS, [1])


def test_a_denial_ends_a_loop_that_lets_it_through(till: Till) -> None:
    """With `approval`, and the state it had."""

    @loop(max=5, guard=Guard(ApproveTool(ScriptedApprover([True, False]))))
    def agent(n: int) -> int:
        till.pay(n)
        return n + 1

    result = agent.run(0)
    assert (result.stop_reason, result.value, till.paid) == (StopReason.APPROVAL, 1, [0])


# -- several approvers -----------------------------------------------------------------------------


def test_the_approvers_of_the_loop_and_of_the_tool_are_both_asked(colour: Colour) -> None:
    """In the order of the chain, a tool's own with the outermost; after a no nobody else is troubled."""
    asked: list[str] = []

    def approver(name: str, *answers: Any) -> ApproveTool:
        left = list(answers)

        def answer(call: Any) -> Any:
            asked.append(name)
            return left.pop(0)

        return ApproveTool(answer)

    till = Till(colour, guard=Guard(approver("tool", True, False, True)))
    with Guard(approver("outer", True, True, True, False)).scope(), Guard(approver("inner", True, False)).scope():
        assert till.outcome(1) == "paid"
        assert [till.outcome(amount) for amount in (2, 3, 4)] == ["approval_denied"] * 3
    assert asked == ["outer", "tool", "inner", "outer", "tool", "outer", "tool", "inner", "outer"]
    assert till.paid == [1]


def test_one_approver_on_two_runs_is_asked_once(colour: Colour) -> None:
    """The same ApproveTool stands on the loop, in a loop within it, and on the tool."""
    script = ScriptedApprover(lambda call: Approval.approve(grant="run"))
    one = ApproveTool(script)
    till = Till(colour, guard=Guard(one), repeatable=True)
    with Guard(one).scope():
        with Guard(one).scope():
            till.pay(1)
        with Guard(one).scope():
            till.pay(1)  # granted for the outermost run on which it stands
    assert (amounts(script), till.paid) == ([1], [1, 1])


def test_two_who_grant_the_same_are_remembered_apart(till: Till) -> None:
    """One grants for the run, the other has to be asked each time."""
    first, second = ScriptedApprover([Approval.approve(grant="run")]), ScriptedApprover([True, False])
    with Guard(ApproveTool(first), ApproveTool(second)).scope():
        assert [till.outcome(1), till.outcome(1)] == ["paid", "approval_denied"]
    assert (len(first.calls), len(second.calls)) == (1, 2)


# -- approvers that do things ----------------------------------------------------------------------


def test_an_approver_may_call_tools_itself(till: Till) -> None:
    """They are calls of the same run, and leave the one that is asked about as it was."""
    runs: list[Run | None] = []
    lookup = tool(name="lookup")(lambda amount: amount < 10)

    def approver(call: Any) -> bool:
        runs.append(current_run())
        return bool(lookup(call.arguments["amount"]))

    with Guard(ApproveTool(approver, only="pay"), MaxSteps(4)).scope() as run:
        assert [till.outcome(1), till.outcome(10)] == ["paid", "approval_denied"]
        assert run.steps == 3
    assert (runs, till.paid) == ([run, run], [1])


@pytest.mark.parametrize("colour", ["async", "async generator"], indirect=True)
def test_an_async_approver_may_call_async_tools(till: Till) -> None:
    """In the same task."""

    @tool
    async def lookup(amount: int) -> bool:
        await asyncio.sleep(0)
        return amount < 10

    async def approver(call: Any) -> bool:
        return await lookup(call.arguments["amount"])

    with Guard(ApproveTool(approver, only="pay")).scope() as run:
        assert [till.outcome(1), till.outcome(10)] == ["paid", "approval_denied"]
        assert run.steps == 3
    assert till.paid == [1]


def test_an_approver_whose_own_tool_is_refused_has_not_answered(till: Till) -> None:
    """The refusal of the call that was asked about is its own, and says what the approver met."""
    lookup = tool(name="lookup", cost=5)(lambda amount: True)
    with Guard(ApproveTool(lambda call: lookup(1), only="pay"), Budget(usd=1)).scope() as run:
        refusal = till.refused(1)
        assert (run.steps, run.refusals) == (0, 2)
    assert (refusal.tool, refusal.code, till.paid) == ("pay", "approval_error", [])
    assert "lookup" in str(refusal)


@pytest.mark.parametrize("colour", ["sync", "generator"], indirect=True)
def test_an_approver_that_calls_what_it_is_asked_about_comes_to_an_end(till: Till) -> None:
    """It is asked about that call three times, and then nobody is."""
    questions: list[Any] = []

    def approver(call: Any) -> bool:
        questions.append(call)
        till.pay(1)
        return True

    with Guard(ApproveTool(approver)).scope() as run:
        assert till.refused(1).code == "approval_error"
        assert (run.steps, run.reserved()) == (0, 0)
    assert (len(questions), till.paid) == (3, [])


# -- events ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (True, ("approve", None, None, None)),
        ((True, "fine"), ("approve", "fine", None, None)),
        (Approval.approve(by="ada"), ("approve", None, "ada", None)),
        (Approval.deny("no", by="ada"), ("deny", "no", "ada", None)),
        (Approval.edit({"amount": 2}, "less", by="ada"), ("edit", "less", "ada", {"amount": 2})),
        (LoopGuardError("boom"), ("error", None, None, None)),
        ("yes", ("error", None, None, None)),
    ],
    ids=label,
)
def test_a_question_and_its_answer_are_events(till: Till, answer: Any, said: tuple[Any, ...]) -> None:
    """Who was asked about what, and what was said, how long it took."""
    with capture() as seen, Guard(ApproveTool(ScriptedApprover([answer]))).scope() as run:
        till.outcome(1)
    (asked,), (answered,) = seen.events_of(QuestionAsked), seen.events_of(QuestionAnswered)
    (call,) = seen.calls
    assert (asked.kind, asked.tool, asked.run_id, asked.call_id) == ("approval", "pay", run.id, call.id)
    assert asked.arguments == {"amount": 1}
    assert (answered.kind, answered.tool, answered.run_id) == ("approval", "pay", run.id)
    assert answered.question_id == asked.question_id
    assert (answered.decision, answered.reason, answered.by, answered.arguments) == said
    assert 0 <= answered.duration < 5
    assert seen.events.index(asked) < seen.events.index(answered)


@pytest.mark.parametrize("colour", ["sync", "async"], indirect=True)
def test_an_answer_says_how_long_it_took(till: Till, silent: Callable[[Any], bool]) -> None:
    """Seconds from the question to the answer, or to the end of its time."""
    with capture() as seen, Guard(ApproveTool(silent, timeout=0.05)).scope():
        till.refused(1)
    (answered,) = seen.events_of(QuestionAnswered)
    assert answered.decision == "timeout"
    assert 0.04 <= answered.duration < 5


def test_what_is_remembered_is_no_question(till: Till) -> None:
    """A grant, a denial that holds: nobody was asked, so no event says so."""
    script = ScriptedApprover([Approval.approve(grant="run"), Approval.deny(grant="run")])
    with capture() as seen, Guard(ApproveTool(script)).scope():
        assert [till.outcome(1), till.outcome(1), till.outcome(2), till.outcome(2)] == [
            "paid",
            "paid",
            "approval_denied",
            "approval_denied",
        ]
    assert [event.decision for event in seen.events_of(QuestionAnswered)] == ["approve", "deny"]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_listener_of_a_tool_s_own_guard_hears_its_questions(colour: Colour, depth: int) -> None:
    """However deep in runs, that know nothing of that guard, the tool is called."""
    heard: list[str] = []
    guard = Guard(ApproveTool(lambda call: True), on_event=lambda event: heard.append(type(event).__name__))
    till = Till(colour, guard=guard)
    with ExitStack() as stack:
        for _ in range(depth):
            stack.enter_context(Guard().scope())
        till.pay(1)
    kinds = ["QuestionAsked", "QuestionAnswered", "ToolStarted", "ToolFinished"]
    assert [kind for kind in heard if kind in kinds] == kinds


def test_a_run_remembers_no_end_of_approved_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy engine that approves a million distinct calls must not fill the memory; denials are kept."""
    monkeypatch.setattr("loopguard.guardrails.approve.REMEMBERED", 50)
    guard = ApproveTool(lambda call: call.arguments["n"] != 0)

    @tool
    def work(n: int) -> int:
        return n

    with Guard(guard, LoopLimit(0), max_refusals=1000).scope("long") as run:
        with pytest.raises(ApprovalDenied):
            work(0)
        for n in range(1, 500):
            work(n)
        records = run.slot(guard, dict)
        assert len(records) <= 100
        assert sum(record.answer is not None for record in records.values()) == 1
