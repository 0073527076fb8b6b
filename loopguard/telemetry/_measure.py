"""The event stream as metrics: a subscriber while a MeterProvider is set."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from loopguard import _events as events
from loopguard.telemetry import _constants as names
from loopguard.telemetry import _metrics as metrics

__all__ = ["measure"]

_OUTCOMES = {"approve": "granted", "edit": "granted", "deny": "denied", "timeout": "timeout", "error": "error"}


def measure(event: events.Event) -> None:
    """Count and time what the event says."""
    if isinstance(event, events.ToolFinished):
        metrics.tool_duration(
            event.duration, event.tool, type(event.error).__qualname__ if event.error is not None else None
        )
        _consumed(event.charged)
    elif isinstance(event, events.ToolRefused):
        metrics.decision(event.guardrail, names.WARN if event.observed else names.DENY, event.tool)
    elif isinstance(event, events.RunEnded):
        if event.kind == "loop":
            metrics.loop_done(event.duration, event.name, event.iterations, str(event.stop_reason))
    elif isinstance(event, events.QuestionAnswered):
        metrics.approval_duration(event.duration, _OUTCOMES[event.decision], event.kind, event.tool or "")
    elif isinstance(event, events.ModelCalled):
        _consumed(event.charged)
    elif isinstance(event, events.Charged):
        _consumed(event.amounts)


def _consumed(amounts: Mapping[str, Decimal]) -> None:
    for unit, amount in amounts.items():
        metrics.budget_consumed(unit, unit, amount)
