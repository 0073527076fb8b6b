"""Recorded events in words: what of them people read, redacted, and with nothing in it that steers a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from loopguard import _events as events
from loopguard._amounts import amount, plain
from loopguard._tree import took
from loopguard._usage import Usage
from loopguard.journal._rows import plain as unpacked
from loopguard.redaction import display, display_name, display_value, redact, redact_text

__all__ = ["WRONG", "amounts", "called", "ended", "failure", "finished", "lasted", "modelled", "said", "text"]

WRONG = "✗"
"""Marks what was refused or failed, until it is drawn with the marks of a terminal."""
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


def failure(error: Any, limit: int | None) -> str:
    """An exception as it is recorded."""
    data = unpacked(error)
    if isinstance(data, dict):
        return f"{text(data.get('type'), 200)}: {text(data.get('text') or '', limit)}".rstrip(": ")
    return f"{type(data).__name__}: {text(data, limit)}".rstrip(": ")


def finished(event: events.ToolFinished, limit: int | None) -> list[str]:
    """How a call ended, what it cost and how long it took."""
    how = {"timed_out": "timed out", "cancelled": "was cancelled", "closed": "was left early"}.get(event.outcome)
    if event.outcome == "raised":
        how = f"raised {failure(event.error, limit)}"
    elif event.outcome == "returned":
        result = unpacked(event.result if event.items is None else event.items)
        how = None if result is None else f"→ {display_value(result, limit)}"
    cost = [*amounts(event.charged), *(["more than was reserved"] if event.overrun else [])]
    return [*([how] if how else []), *cost, lasted(event.duration)]


def modelled(event: events.ModelCalled, limit: int | None) -> list[str]:
    """What a model call used, cost and took."""
    cost = amounts(event.charged) + (["cost unknown"] if event.cost is None else [])
    how = [f"failed: {failure(event.error, limit)}"] if event.error is not None else []
    return [*how, *cost, *(["partial"] if event.partial else []), lasted(event.duration)]


def ended(event: events.RunEnded, completed: bool, limit: int | None) -> list[str]:
    """Why a run ended."""
    if event.stop_reason is None:
        return [lasted(event.duration)]
    why = f"{'completed' if completed else 'stopped'}: {event.stop_reason}"
    if event.error is not None:
        why += f": {failure(event.error, limit)}"
    return [lasted(event.duration), why]


def said(event: events.Event, limit: int | None) -> str | None:
    """An event in a line of its own, marked where something was refused; None where nobody wants to read it."""
    match event:
        case events.ToolRefused():
            verb = "would have been refused" if event.observed else "refused"
            mark = "!" if event.observed else WRONG
            why = f": {text(event.reason, limit)}" if event.reason else ""
            return f"{mark} {called(event.tool, event.arguments, limit)} {verb} ({text(event.code, 200)}){why}"
        case events.ToolReplayed():
            return f"{display_name(event.tool)} from the record"
        case events.ModelReplayed():
            return f"model {text(event.model, 200)} from the record"
        case events.QuestionAsked():
            what = "" if event.tool is None else f" of {called(event.tool, event.arguments, limit)}"
            return f"? {text(event.kind, 200)}{what} asked ({text(event.question_id, 200)})"
        case events.QuestionAnswered():
            by = f" by {text(event.by, 200)}" if event.by else ""
            why = f": {text(event.reason, limit)}" if event.reason else ""
            return f"? {text(event.kind, 200)} answered{by}: {text(event.decision, 200)}{why}"
        case events.VerdictGiven():
            passed = {True: "yes", False: "no", None: "undecided"}[event.verdict.passed]
            why = f": {text(event.verdict.reason, limit)}" if event.verdict.reason else ""
            return f"{text(event.by, 200)} says {passed}{why}"
        case events.BudgetWarned():
            used, cap = (plain(amount(value, event.unit), event.unit) for value in (event.spent, event.limit))
            return f"! the budget {text(event.budget, 200)} is nearly used: {display(used)} of {display(cap)}"
        case events.BudgetExtended():
            cap = plain(amount(Decimal(event.limit), event.unit), event.unit)
            return f"the budget {text(event.budget, 200)} was raised to {display(cap)}"
        case events.Charged():
            return f"charged {', '.join(amounts(event.amounts)) or 'nothing'}"
        case events.Stopped():
            return f"{WRONG} stopped: {text(event.reason, limit)}"
        case events.RunResumed():
            return "taken up again"
    return None
