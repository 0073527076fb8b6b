"""ApproveTool against the faults that people met: what is asked about is what runs, each call by itself."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from loopguard import (
    Approval,
    ApprovalDenied,
    ApprovalTimeout,
    ApproveTool,
    Guard,
    LoopGuardError,
    ToolCallRefused,
    WrapTool,
    loop,
    tool,
)
from loopguard._events import QuestionAnswered
from loopguard.testing import Desk, ScriptedApprover, capture
from tests.conftest import Colour


@pytest.fixture
def ran() -> list[Any]:
    """What the bodies of a test were given, in order."""
    return []


def recorder(ran: list[Any]) -> Callable[[Any], None]:
    """A body that notes what it was given."""

    def pay(order: Any) -> None:
        ran.append(order)

    return pay


def rewrite(call: Any, proceed: Any) -> Any:
    """A hook that asks for 20 instead of 10."""
    return (yield from proceed(call.replace(arguments={"order": 20})))


# -- C38 -------------------------------------------------------------------------------------------


def test_the_approver_sees_what_a_hook_made_of_the_arguments(colour: Colour, ran: list[Any]) -> None:
    """A WrapTool hook rewrites 10 to 20: the approver is asked about 20, and 20 runs."""
    script = ScriptedApprover([True])
    pay = tool(guard=Guard(WrapTool(rewrite), ApproveTool(script)))(colour.make(recorder(ran)))
    colour.call(pay, 10)
    assert script.calls[0].arguments == {"order": 20}
    assert ran == [20]


def test_what_the_caller_changes_while_waiting_does_not_run(colour: Colour, ran: list[Any]) -> None:
    """The caller's dict is changed while the approver is asked: what was asked about runs."""
    order = {"amount": 10, "to": ["ada"]}

    def approver(call: Any) -> bool:
        order["amount"] = 1_000_000
        order["to"].append("mallory")  # type: ignore[attr-defined]  # the list above
        return bool(call.arguments == {"order": {"amount": 10, "to": ["ada"]}})

    pay = tool(guard=Guard(ApproveTool(approver)))(colour.make(recorder(ran)))
    colour.call(pay, order)
    assert ran == [{"amount": 10, "to": ["ada"]}]


def test_another_thread_that_changes_the_arguments_meanwhile_is_too_late(ran: list[Any]) -> None:
    """The caller's own thread waits at the desk while another one changes the dict."""
    desk, order = Desk(), {"amount": 10}
    pay = tool(guard=Guard(ApproveTool(desk)))(lambda order: ran.append(dict(order)))
    with ThreadPoolExecutor(1) as pool:
        paid = pool.submit(pay, order)
        desk.wait()
        order["amount"] = 20
        desk.answer(0, True)
        paid.result(5)
    assert ran == [{"amount": 10}]


def test_a_leaf_that_changes_while_waiting_is_a_mismatch(colour: Colour, ran: list[Any]) -> None:
    """An object among the arguments, which can't be copied, changed after the question: nothing runs."""
    order = SimpleNamespace(amount=10)

    def approver(call: Any) -> bool:
        order.amount = 1_000_000
        return True

    pay = tool(colour.make(recorder(ran)))
    with Guard(ApproveTool(approver)).scope() as run, pytest.raises(ToolCallRefused) as caught:
        colour.call(pay, order)
    refusal = caught.value
    assert (refusal.code, refusal.guardrail, refusal.tool) == ("approval_mismatch", "ApproveTool", "pay")
    assert (refusal.source, refusal.run_id) == (run.name, run.id)
    assert ran == []


# -- C42 -------------------------------------------------------------------------------------------


def three_at_once(colour: Colour, guard: Guard, calls: list[tuple[str, Any]], answer: Callable[[], None]) -> list[Any]:
    """Three calls of `pay` by (id, arguments), at once, and their outcomes in call order."""
    if colour.name in ("async", "async generator"):

        async def main() -> list[Any]:
            waiting = [asyncio.ensure_future(guard.acall("pay", args, id=name)) for name, args in calls]
            await asyncio.to_thread(answer)
            return await asyncio.gather(*waiting, return_exceptions=True)

        return asyncio.run(main())

    def one(call: tuple[str, Any]) -> Any:
        try:
            return guard.call("pay", call[1], id=call[0])
        except ToolCallRefused as refusal:
            return refusal

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(contextvars.copy_context().run, one, call) for call in calls]
        answer()
        return [future.result(5) for future in waiting]


@pytest.mark.parametrize("amounts", [(1, 1, 3), (1, 2, 1), (1, 2, 2)])
def test_three_calls_at_once_each_get_their_own_answer(
    colour: Colour, ran: list[Any], amounts: tuple[int, int, int]
) -> None:
    """Two of three are identical; yes, no, yes in reverse order: bodies 1 and 3 run, each result in its place."""
    desk = Desk()
    guard = Guard(ApproveTool(desk))

    def pay(amount: int) -> str:
        ran.append(amount)
        return f"paid {amount}"

    guard.tool(colour.make(pay), name="pay")

    def answer() -> None:
        asked = desk.wait(3)
        assert sorted(call.id for call in asked) == ["call-1", "call-2", "call-3"]
        for call, yes in (("call-3", True), ("call-2", False), ("call-1", True)):
            desk.answer(call, yes)

    with capture() as seen, guard.scope():
        calls = [(f"call-{place}", {"amount": amount}) for place, amount in enumerate(amounts, 1)]
        first, second, third = three_at_once(colour, guard, calls, answer)
    paid = [f"paid {amounts[0]}", f"paid {amounts[2]}"]
    items = paid if colour.name in ("sync", "async") else [[text] for text in paid]
    assert [first, third] == items
    assert isinstance(second, ApprovalDenied)
    assert sorted(ran) == sorted([amounts[0], amounts[2]])
    assert {call.id: call.outcome for call in seen.calls} == {
        "call-1": "returned",
        "call-2": "refused",
        "call-3": "returned",
    }


def test_a_model_s_parallel_calls_come_back_in_order(ran: list[Any]) -> None:
    """`arun_tools` of three gated tool_use blocks, answered in reverse: three results, in the order of the blocks."""
    desk = Desk()
    guard = Guard(ApproveTool(desk))

    @guard.tool
    async def pay(amount: int) -> str:
        ran.append(amount)
        return f"paid {amount}"

    uses = [{"type": "tool_use", "id": f"toolu_{n}", "name": "pay", "input": {"amount": 7}} for n in (1, 2, 3)]

    async def main() -> list[dict[str, Any]]:
        results = asyncio.ensure_future(guard.arun_tools({"role": "assistant", "content": uses}))
        await asyncio.to_thread(desk.wait, 3)
        for use, answer in (("toolu_3", True), ("toolu_2", (False, "twice is enough")), ("toolu_1", True)):
            desk.answer(use, answer)
        return await results

    with guard.scope():
        results = asyncio.run(main())
    assert [result["tool_use_id"] for result in results] == ["toolu_1", "toolu_2", "toolu_3"]
    assert [result.get("is_error", False) for result in results] == [False, True, False]
    assert "twice is enough" in results[1]["content"]
    assert ran == [7, 7]


# -- C43 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["use staging", None])
def test_the_reason_of_a_denial_goes_everywhere(colour: Colour, ran: list[Any], reason: str | None) -> None:
    """The approver's text is in the refusal, the events and the tool_result; without one it is None in the data."""
    guard = Guard(ApproveTool(ScriptedApprover((False, reason))))
    guard.tool(colour.make(lambda: ran.append(1)), name="deploy")
    message = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "deploy", "input": {}}]}
    with capture() as seen:
        if colour.name in ("sync", "generator"):
            (result,) = guard.run_tools(message)
        else:
            (result,) = asyncio.run(guard.arun_tools(message))
    (answered,) = seen.events_of(QuestionAnswered)
    (call,) = seen.calls_of("deploy")
    assert (answered.decision, answered.reason) == ("deny", reason)
    assert (call.outcome, call.code, call.reason) == ("refused", "approval_denied", reason)
    assert result["is_error"]
    assert ("use staging" in result["content"]) == (reason is not None)
    assert "None" not in result["content"]
    assert ran == []


@pytest.mark.parametrize("answer", [False, (False, None), Approval.deny()])
def test_a_denial_without_a_reason_has_none(colour: Colour, answer: Any) -> None:
    """However it is said, the refusal's reason is None, and its message reads well all the same."""
    deploy = tool(name="deploy", guard=Guard(ApproveTool(ScriptedApprover([answer]))))(colour.make(lambda: None))
    with pytest.raises(ApprovalDenied) as denied:
        colour.call(deploy)
    assert denied.value.reason is None
    assert str(denied.value).startswith("deploy was not approved. It did not run")


def test_an_approver_that_fails_is_nobody_s_no(colour: Colour) -> None:
    """An exception refuses, but neither the refusal nor the event says that somebody denied it."""
    script = ScriptedApprover([LoopGuardError("the policy engine is down")])
    deploy = tool(name="deploy", guard=Guard(ApproveTool(script)))(colour.make(lambda: None))
    with capture() as seen, pytest.raises(ToolCallRefused) as refusal:
        colour.call(deploy)
    assert refusal.value.code == "approval_error"
    assert "the policy engine is down" in str(refusal.value)
    assert [event.decision for event in seen.events_of(QuestionAnswered)] == ["error"]


# -- an approver slower than its timeout -----------------------------------------------------------


@pytest.fixture
def slow() -> Iterator[tuple[Callable[[Any], bool], threading.Event, threading.Event]]:
    """An approver that says yes only once it is let go, and the two events: let it go, it has answered."""
    let_go, answered = threading.Event(), threading.Event()

    def approver(call: Any) -> bool:
        let_go.wait(10)
        answered.set()
        return True

    yield approver, let_go, answered
    let_go.set()


def test_a_yes_after_the_timeout_runs_nothing(
    colour: Colour, ran: list[Any], slow: tuple[Callable[[Any], bool], threading.Event, threading.Event]
) -> None:
    """The call is refused when the time is over, and the late yes changes nothing."""
    approver, let_go, answered = slow
    pay = tool(name="pay", guard=Guard(ApproveTool(approver, timeout=0.05)))(colour.make(lambda: ran.append(1)))
    with capture() as seen, pytest.raises(ApprovalTimeout) as refusal:
        colour.call(pay)
    assert refusal.value.code == "approval_timeout"
    let_go.set()
    assert answered.wait(5)
    assert ran == []
    assert [event.decision for event in seen.events_of(QuestionAnswered)] == ["timeout"]


# -- what is remembered ----------------------------------------------------------------------------


def test_outside_a_run_every_call_is_asked_about() -> None:
    """Without a run there is nothing that a denial, a grant or a count of questions could hold for."""
    answers = [False, True, Approval.approve(grant="run"), *[True] * 4, Approval.deny(grant="run"), True]
    script = ScriptedApprover(list(answers))
    pay = tool(guard=Guard(ApproveTool(script)))(lambda amount: amount)
    outcomes = []
    for _ in answers:
        try:
            outcomes.append(pay(1))
        except ApprovalDenied:
            outcomes.append(None)
    assert outcomes == [None, 1, 1, 1, 1, 1, 1, None, 1]
    assert len(script.calls) == len(answers)


def test_a_fourth_question_about_one_call_is_not_asked() -> None:
    """In one run, the same call is asked about three times; the fourth is refused, and says why."""
    script = ScriptedApprover(True)
    pay = tool(name="pay", guard=Guard(ApproveTool(script)), repeatable=True)(lambda amount: amount)

    @loop(max=4)
    def agent(paid: int) -> int:
        return paid + pay(1)

    result = agent.run(0)
    assert (result.value, len(script.calls)) == (3, 3)
    assert isinstance(result.error, ApprovalDenied)
    assert result.error.reason == "it was asked about 3 times in this run already"
