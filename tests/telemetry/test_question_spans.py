"""The span of a wait for a person: below the tool's, only where somebody was waited for, with how it ended."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from loopguard import Approval, ApproveTool, Budget, Guard, ToolCallRefused, tool
from loopguard.telemetry import _questions
from tests.conftest import Colour


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question counts as one that was waited for, however fast the test's approver is."""
    monkeypatch.setattr(_questions, "_AT_ONCE", 0.0)


def found(exporter: InMemorySpanExporter, prefix: str) -> list[ReadableSpan]:
    """The ended spans of a name."""
    return [span for span in exporter.get_finished_spans() if span.name.startswith(prefix)]


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    """What it says."""
    return dict(span.attributes or {})


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("answer", "outcome", "verdict"),
    [
        (True, "granted", "allow"),
        (Approval.edit({"n": 2}, by="ann"), "granted", "modify"),
        ((False, "not now"), "denied", "deny"),
        ("perhaps", "error", None),
    ],
)
def test_a_wait_is_a_child_of_the_tool_with_its_outcome(
    colour: Colour, exporter: InMemorySpanExporter, answer: Any, outcome: str, verdict: str | None
) -> None:
    """Granted and denied are ordinary ends; an approver that fails is an error. Who it was isn't told."""
    pay = tool(name="pay")(colour.make(lambda n: n))
    with Guard(ApproveTool(lambda call: answer)).scope():
        try:
            colour.call(pay, 1)
        except ToolCallRefused:
            pass
    (wait,), (call,) = found(exporter, "approve_tool"), found(exporter, "execute_tool")
    assert wait.name == "approve_tool pay"
    assert wait.parent == call.context
    failed = outcome == "error"
    assert wait.status.status_code is (StatusCode.ERROR if failed else StatusCode.UNSET)
    assert attributes_of(wait) == {
        "loopguard.approval.outcome": outcome,
        "loopguard.approval.mode": "approval",
        "loopguard.guardrail.name": "ApproveTool",
        **({} if verdict is None else {"loopguard.verdict.type": verdict}),
        **({"error.type": "approval_error"} if failed else {}),
    }


def test_nobody_answering_in_time_is_an_error(exporter: InMemorySpanExporter) -> None:
    """It waited for the whole timeout, and the span is as long."""
    never = threading.Event()
    pay = tool(name="pay")(lambda: 1)
    with Guard(ApproveTool(lambda call: never.wait(), timeout=0.05)).scope(), pytest.raises(ToolCallRefused):
        pay()
    never.set()
    (wait,) = found(exporter, "approve_tool")
    assert wait.status.status_code is StatusCode.ERROR
    assert attributes_of(wait)["loopguard.approval.outcome"] == "timeout"
    assert attributes_of(wait)["error.type"] == "approval_timeout"
    assert wait.start_time is not None
    assert wait.end_time is not None
    assert wait.end_time - wait.start_time >= 50_000_000


@pytest.mark.usefixtures("patient")
def test_a_wait_that_is_cancelled_ends_its_span(exporter: InMemorySpanExporter) -> None:
    """As one that came to no answer."""
    asked = asyncio.Event()

    async def approver(call: Any) -> bool:
        asked.set()
        await asyncio.sleep(3600)
        return True

    async def pay() -> int:
        return 1

    async def main() -> None:
        async with Guard(ApproveTool(approver)).scope():
            task = asyncio.ensure_future(tool(pay)())
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    (wait,) = found(exporter, "approve_tool")
    assert attributes_of(wait)["loopguard.approval.outcome"] == "error"


def test_a_policy_that_answers_at_once_is_no_wait(
    colour: Colour, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was waited for; on the slowest machine, too."""
    monkeypatch.setattr(_questions, "_AT_ONCE", 60.0)
    with Guard(ApproveTool(lambda call: True)).scope():
        colour.call(tool(colour.make(lambda: 1)))
    assert found(exporter, "approve_tool") == []


@pytest.mark.usefixtures("patient")
def test_a_remembered_answer_is_no_wait(exporter: InMemorySpanExporter) -> None:
    """Granted for the whole run, it is asked once."""
    pay = tool(name="pay", repeatable=True)(lambda: 1)
    with Guard(ApproveTool(lambda call: Approval.approve(grant="run"))).scope():
        assert [pay(), pay()] == [1, 1]
    assert len(found(exporter, "approve_tool")) == 1


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("switch", "told"), [("", None), ("false", None), ("true", "ann@example.org")])
def test_who_answered_is_told_only_on_request(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, switch: str, told: str | None
) -> None:
    """Names of people are personal data."""
    monkeypatch.setenv("LOOPGUARD_CAPTURE_ACTOR", switch)
    _questions._capture_actor.cache_clear()
    try:
        with Guard(ApproveTool(lambda call: Approval.approve(by="ann@example.org"))).scope():
            tool(lambda: 1)()
    finally:
        _questions._capture_actor.cache_clear()
    (wait,) = found(exporter, "approve_tool")
    assert attributes_of(wait).get("loopguard.approval.actor") == told


@pytest.mark.usefixtures("patient")
def test_asking_for_more_budget_is_a_wait_too(exporter: InMemorySpanExporter) -> None:
    """Its mode says what was asked for."""
    work = tool(cost=2)(lambda: 1)
    with Guard(Budget(usd=1, extend=lambda call: True, extend_by=5)).scope():
        assert work() == 1
    (wait,), (call,) = found(exporter, "approve_tool"), found(exporter, "execute_tool")
    assert wait.name == "approve_tool extend_budget"
    assert wait.parent == call.context
    assert attributes_of(wait)["loopguard.approval.mode"] == "extension"
    assert attributes_of(wait)["loopguard.guardrail.name"] == "Budget"


@pytest.mark.usefixtures("patient", "untraced")
def test_without_a_provider_a_wait_is_just_a_wait() -> None:
    """And the call runs."""
    with Guard(ApproveTool(lambda call: True)).scope():
        assert tool(lambda: 1)() == 1
