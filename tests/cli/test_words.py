"""Recorded events in words."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from loopguard import StopReason, Usage, Verdict
from loopguard import _events as events
from loopguard.cli import _words as words

AT: dict[str, Any] = {"run_id": "r1", "at": 1.0}
REFUSED: dict[str, Any] = {
    **AT,
    "call_id": "c1",
    "tool": "fetch",
    "arguments": {"page": 3},
    "code": "max_steps",
    "guardrail": "MaxSteps",
    "reason": "none is left",
}
QUESTION: dict[str, Any] = {**AT, "question_id": "q1", "kind": "approval", "tool": "pay"}


@pytest.mark.parametrize(
    ("event", "line", "wrong"),
    [
        (events.ToolRefused(**REFUSED), "fetch(page=3) refused (max_steps): none is left", True),
        (
            events.ToolRefused(**REFUSED, observed=True),
            "fetch(page=3) ! would have been refused (max_steps): none is left",
            False,
        ),
        (
            events.ToolReplayed(**AT, call_id="c", tool="fetch", key="k", outcome="returned"),
            "fetch from the record",
            False,
        ),
        (events.ModelReplayed(**AT, call_id="c", model="m"), "model m from the record", False),
        (
            events.QuestionAsked(**QUESTION, call_id="c", arguments={"to": "anna"}),
            '? approval of pay(to="anna") (q1)',
            False,
        ),
        (
            events.QuestionAnswered(**QUESTION, decision="deny", by="anna", reason="no"),
            "? approval: deny by anna: no",
            False,
        ),
        (
            events.VerdictGiven(**AT, by="judge", verdict=Verdict(None, "who knows")),
            "judge says undecided: who knows",
            False,
        ),
        (
            events.BudgetWarned(**AT, budget="usd", unit="usd", spent=Decimal("1.6"), limit=Decimal(2)),
            "! the budget usd is nearly used: $1.6 of $2",
            False,
        ),
        (
            events.BudgetExtended(**AT, budget="team", unit="pages", limit=Decimal(9)),
            "the budget team was raised to 9 pages",
            False,
        ),
        (events.Charged(**AT, amounts={"pages": Decimal(2), "usd": Decimal("0.1")}), "charged $0.1, 2 pages", False),
        (events.Charged(**AT, amounts={}), "charged nothing", False),
        (events.Stopped(**AT, code="stopped", reason="enough"), "stopped: enough", True),
        (events.RunResumed(**AT), "taken up again", False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, events.Event) else None,
)
def test_an_event_is_a_line(event: events.Event, line: str, wrong: bool) -> None:
    """What happened, and whether it was refused."""
    assert words.said(event, 100) == (line, wrong)


def test_what_nobody_reads_is_no_line() -> None:
    """An iteration's own return, say: its end tells the same."""
    assert words.said(events.IterationReturned(**AT, value=1), 100) is None


@pytest.mark.parametrize(
    ("outcome", "said"),
    [("timed_out", " timed out"), ("cancelled", " cancelled"), ("closed", " left early"), ("parked", " parked")],
)
def test_a_call_that_did_not_return_says_how_it_ended(outcome: str, said: str) -> None:
    """And what it cost: a unit of one's own, too, and more than was reserved."""
    charged = {"usd": Decimal("0.5"), "tokens": Decimal(12), "input_tokens": Decimal(10)}
    event = events.ToolFinished(
        **AT, call_id="c", tool="fetch", outcome=outcome, charged=charged, overrun=True, duration=0.0123
    )
    assert words.outcome(event, 100) == said
    assert words.finished(event) == ["$0.5", "12 tokens", "more than was reserved", "12 ms"]


def test_a_model_call_says_what_is_not_known() -> None:
    """A price, and the rest of a stream that broke."""
    error: Any = {"type": "ConnectionError", "text": "reset"}
    event = events.ModelCalled(
        **AT, call_id="c", model="m", usage=Usage(), charged={}, cost=None, partial=True, error=error, duration=61
    )
    assert words.modelled(event, 100) == ["failed: ConnectionError: reset", "cost unknown", "partial", "1 min 01 s"]


@pytest.mark.parametrize(
    ("reason", "completed", "line"),
    [
        (None, False, ("over", False)),
        (StopReason.WAITING, False, ("waits for a person", False)),
        (StopReason.UNTIL, True, ("completed: until", False)),
        (StopReason.BUDGET, False, ("stopped: budget", True)),
    ],
)
def test_a_run_says_why_it_ended(reason: StopReason | None, completed: bool, line: tuple[str, bool]) -> None:
    """A scope is over, a loop completes, waits or is stopped."""
    event = events.RunEnded(**AT, name="agent", kind="loop", stop_reason=reason)
    assert words.ended(event, completed, 100) == line
