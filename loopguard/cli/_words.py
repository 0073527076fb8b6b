"""Recorded events in words: what of them people read, redacted, and with nothing in it that steers a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from loopguard import _events as events
from loopguard._amounts import amount, plain
from loopguard._outcomes import StopReason
from loopguard._tree import took
from loopguard._usage import Usage
from loopguard.journal._rows import plain as unpacked
from loopguard.redaction import display, display_name, display_value, redact, redact_text

__all__ = [
    "FAILED",
    "Line",
    "amounts",
    "answered",
    "asked",
    "called",
    "ended",
    "failure",
    "finished",
    "lasted",
    "modelled",
    "outcome",
    "said",
    "text",
]

FAILED = ("raised", "timed_out", "cancelled")
"""Outcomes of calls that went wrong."""


class Line(NamedTuple):
    """An event in words."""

    text: str
    wrong: bool = False
    """Whether something was refused, or failed."""


_HOW = {"timed_out": "timed out", "cancelled": "cancelled", "closed": "left early", "parked": "parked"}
_DETAILS = frozenset(Usage.__slots__) - {"tokens"}
"""Units of model calls that are left out where tokens are shown."""


def text(value: Any, limit: int | None) -> str:
    """Somebody's text on one line."""
    return display(redact_text(str(value)), limit)


def lasted(seconds: float) -> str:
    """A duration."""
    return took(int(seconds * 1e9))


def amounts(spent: Mapping[str, Decimal]) -> list[str]:
    """What was spent: ``$0.25``, ``12 tokens``."""
    order = sorted(spent, key=lambda unit: (unit != "usd", unit))
    return [display(plain(amount(spent[unit], unit), unit)) for unit in order if spent[unit] and unit not in _DETAILS]


def called(tool: str, arguments: Any, limit: int | None) -> str:
    """A call as one would write it: ``look_up(page=3)``."""
    given = redact(unpacked(arguments) or {})
    return (
        f"{display_name(tool)}({', '.join(f'{display(name)}={display_value(given[name], limit)}' for name in given)})"
    )


def because(reason: str | None, limit: int | None) -> str:
    """A reason, where there is one."""
    return f": {text(reason, limit)}" if reason else ""


def asked(event: events.QuestionAsked, limit: int | None) -> str:
    """What somebody is asked."""
    what = "" if event.tool is None else f" of {called(event.tool, event.arguments, limit)}"
    return f"? {text(event.kind, 200)}{what}{because(event.prompt, limit)}"


def answered(event: events.QuestionAnswered, limit: int | None) -> str:
    """What was said of a question."""
    by = f" by {text(event.by, 200)}" if event.by else ""
    return f"{text(event.decision, 200)}{by}{because(event.reason, limit)}"


def failure(error: Any, limit: int | None) -> str:
    """An exception as it is recorded."""
    data = unpacked(error)
    if not isinstance(data, dict):
        return "what was erased"
    return f"{text(data.get('type'), 200)}: {text(data.get('text') or '', limit)}".rstrip(": ")


def outcome(event: events.ToolFinished, limit: int | None) -> str:
    """What came of a call, to be written behind it."""
    if event.outcome == "raised":
        return f" raised {failure(event.error, limit)}"
    if event.outcome == "returned":
        result = unpacked(event.result if event.items is None else event.items)
        return "" if result is None else f" → {display_value(result, limit)}"
    return f" {_HOW.get(event.outcome) or text(event.outcome, 200)}"


def finished(event: events.ToolFinished) -> list[str]:
    """What a call cost, and how long it took."""
    return [*amounts(event.charged), *(["more than was reserved"] if event.overrun else []), lasted(event.duration)]


def modelled(event: events.ModelCalled, limit: int | None) -> list[str]:
    """What a model call used, cost and took."""
    cost = amounts(event.charged) + (["cost unknown"] if event.cost is None else [])
    how = [f"failed: {failure(event.error, limit)}"] if event.error is not None else []
    return [*how, *cost, *(["partial"] if event.partial else []), lasted(event.duration)]


def ended(event: events.RunEnded, completed: bool, limit: int | None) -> Line:
    """Why a run ended."""
    if event.stop_reason is None:
        return Line("over")
    if event.stop_reason is StopReason.WAITING:
        return Line("waits for a person")
    why = f": {failure(event.error, limit)}" if event.error is not None else ""
    return Line(f"{'completed' if completed else 'stopped'}: {event.stop_reason}{why}", not completed)


def said(event: events.Event, limit: int | None) -> Line | None:
    """An event in a line of its own; None where nobody wants to read it."""
    match event:
        case events.ToolRefused():
            verb = "! would have been refused" if event.observed else "refused"
            call = called(event.tool, event.arguments, limit)
            return Line(f"{call} {verb} ({text(event.code, 200)}){because(event.reason, limit)}", not event.observed)
        case events.ToolReplayed():
            return Line(f"{display_name(event.tool)} from the record")
        case events.ModelReplayed():
            return Line(f"model {text(event.model, 200)} from the record")
        case events.QuestionAsked():
            return Line(f"{asked(event, limit)} ({text(event.question_id, 200)})")
        case events.QuestionAnswered():
            return Line(f"? {text(event.kind, 200)}: {answered(event, limit)}")
        case events.VerdictGiven() if event.verdict is None:  # erased
            return Line(f"{text(event.by, 200)} says what was erased")
        case events.VerdictGiven():
            passed = {True: "yes", False: "no", None: "undecided"}[event.verdict.passed]
            return Line(f"{text(event.by, 200)} says {passed}{because(event.verdict.reason, limit)}")
        case events.BudgetWarned():
            used, cap = (plain(amount(value, event.unit), event.unit) for value in (event.spent, event.limit))
            return Line(f"! the budget {text(event.budget, 200)} is nearly used: {display(used)} of {display(cap)}")
        case events.BudgetExtended():
            cap = plain(amount(Decimal(event.limit), event.unit), event.unit)
            return Line(f"the budget {text(event.budget, 200)} was raised to {display(cap)}")
        case events.Charged():
            return Line(f"charged {', '.join(amounts(event.amounts)) or 'nothing'}")
        case events.Stopped():
            return Line(f"stopped{because(event.reason, limit)}", True)
        case events.RunResumed():
            return Line("taken up again")
    return None
