"""The event stream as metrics: a subscriber while a MeterProvider is set."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from loopguard import _events as events
from loopguard._call import CURRENT
from loopguard.telemetry import _constants as names
from loopguard.telemetry import _metrics as metrics
from loopguard.telemetry._questions import GUARDRAILS, VERDICTS, outcome_of

__all__ = ["measure"]


def measure(event: events.Event) -> None:
    """Count and time what the event says."""
    if isinstance(event, events.ToolFinished):
        metrics.tool_duration(
            event.duration, event.tool, type(event.error).__qualname__ if event.error is not None else None
        )
        _consumed(event.run_id, event.charged)
        if event.overrun:
            metrics.decision("Budget", names.WARN, event.tool)
    elif isinstance(event, events.ToolRefused):
        tool = names.UNKNOWN_TOOL if event.code == names.CODE_UNKNOWN_TOOL else event.tool
        metrics.decision(event.guardrail, names.WARN if event.observed else names.DENY, tool)
    elif isinstance(event, events.RunEnded):
        if event.kind == "loop":
            metrics.loop_done(event.duration, event.name, event.iterations, str(event.stop_reason))
    elif isinstance(event, events.QuestionAnswered):
        metrics.approval_duration(event.duration, outcome_of(event.decision), event.kind, event.tool or "")
        if event.decision in ("approve", "edit"):  # a no is counted as the refusal that follows
            _asked(event, VERDICTS[event.decision])
    elif isinstance(event, events.QuestionAsked):
        _asked(event, names.ESCALATE)
    elif isinstance(event, events.ModelCalled):
        _consumed(event.run_id, event.charged)
    elif isinstance(event, events.Charged):
        _consumed(event.run_id, event.amounts)


def _asked(event: events.QuestionAsked | events.QuestionAnswered, verdict: str) -> None:
    if event.kind in GUARDRAILS:
        metrics.decision(GUARDRAILS[event.kind], verdict, event.tool or "")


def _consumed(run_id: str, amounts: Mapping[str, Decimal]) -> None:
    for unit, amount in amounts.items():
        for name in _budgets(run_id, unit) or (unit,):
            metrics.budget_consumed(name, unit, amount)


def _budgets(run_id: str, unit: str) -> set[str]:
    """The names of the budgets that an amount counts against: of the run that the event is about and those above."""
    here = CURRENT.get()
    run = next((run for run in here.run.chain if run.id == run_id), None) if here is not None else None
    caps = [cap for each in run.chain for cap in each.caps] if run is not None else []
    return {cap.budget.name or unit for cap in caps if cap.unit == unit and not cap.partial}
