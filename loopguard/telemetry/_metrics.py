"""The instruments: what is counted and timed, with labels of few values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from decimal import Decimal

from opentelemetry import metrics

from loopguard.telemetry import _constants as names
from loopguard.telemetry._spans import sanitise

__all__ = [
    "approval_duration",
    "budget_consumed",
    "decision",
    "loop_done",
    "metrics_are_set",
    "tool_duration",
]

_log = logging.getLogger("loopguard.telemetry")

_meter = metrics.get_meter(names.SCOPE, names.VERSION, schema_url=names.SCHEMA_URL)
_tool_duration = _meter.create_histogram(
    names.TOOL_DURATION,
    "s",
    "How long tool calls took, from the decision to the result.",
    explicit_bucket_boundaries_advisory=names.TOOL_DURATION_BUCKETS,
)
_agent_duration = _meter.create_histogram(
    names.AGENT_DURATION,
    "s",
    "How long runs of loops took.",
    explicit_bucket_boundaries_advisory=names.AGENT_DURATION_BUCKETS,
)
_iterations = _meter.create_histogram(
    names.ITERATIONS,
    "{iteration}",
    "How many iterations loops completed.",
    explicit_bucket_boundaries_advisory=names.ITERATIONS_BUCKETS,
)
_decisions = _meter.create_counter(names.DECISIONS, "{decision}", "What guardrails decided about tool calls.")
_approval_duration = _meter.create_histogram(
    names.APPROVAL_DURATION,
    "s",
    "How long calls waited for a person.",
    explicit_bucket_boundaries_advisory=names.APPROVAL_DURATION_BUCKETS,
)
_budget_consumed = _meter.create_counter(names.BUDGET_CONSUMED, "", "What was spent, in the budget's own unit.")

_recording = False
"""True from the moment that a provider was seen: OpenTelemetry lets it be set only once."""


def metrics_are_set() -> bool:
    """Whether a MeterProvider was set that records. While none is, asking costs 1 µs: ask once a run.

    The functions below needn't be guarded by it: without a provider each costs a few tenths of a µs.
    """
    global _recording
    if not _recording:
        # The API's own providers, the proxy and the no-op one, record nothing.
        _recording = not type(metrics.get_meter_provider()).__module__.startswith("opentelemetry.metrics")
    return _recording


def tool_duration(seconds: float, tool: str, error_type: str | None = None) -> None:
    """A tool call took `seconds`; error_type is the refusal's code or the exception's class, if it ended in one."""
    labels = {names.OPERATION_NAME: names.EXECUTE_TOOL, names.TOOL_NAME: tool}
    if error_type is not None:
        labels[names.ERROR_TYPE] = error_type
    _record(_tool_duration, seconds, labels)


def loop_done(seconds: float, name: str, iterations: int, stop_reason: str) -> None:
    """A run of the loop `name` ended after `iterations` and `seconds`."""
    stop_reason = str(stop_reason)  # a StopReason hashes differently from its text, and labels are compared
    labels = {names.OPERATION_NAME: names.INVOKE_AGENT, names.AGENT_NAME: name, names.LOOP_STOP_REASON: stop_reason}
    _record(_agent_duration, seconds, labels)
    _record(_iterations, iterations, {names.LOOP_NAME: name, names.LOOP_STOP_REASON: stop_reason})


def decision(guardrail: str, verdict: str, tool: str) -> None:
    """A guardrail decided about a call: verdict is allow, deny, modify, warn or escalate."""
    _add(_decisions, 1, {names.GUARDRAIL_NAME: guardrail, names.VERDICT_TYPE: verdict, names.TOOL_NAME: tool})


def approval_duration(seconds: float, outcome: str, mode: str, tool: str) -> None:
    """A call waited `seconds` for a person; outcome is granted, denied, timeout or error."""
    labels = {names.APPROVAL_OUTCOME: outcome, names.APPROVAL_MODE: mode, names.TOOL_NAME: tool}
    _record(_approval_duration, seconds, labels)


def budget_consumed(name: str, unit: str, amount: float | Decimal) -> None:
    """A budget was charged `amount` of its unit; counters only rise, so anything below zero is left out."""
    _add(_budget_consumed, amount, {names.BUDGET_NAME: name, names.BUDGET_UNIT: unit})


def _record(histogram: metrics.Histogram, value: float, labels: Mapping[str, str]) -> None:
    try:
        histogram.record(value, _encodable(labels))
    except Exception:  # an SDK or a view of the user's
        _log.debug("recording a metric failed", exc_info=True)


def _add(counter: metrics.Counter, value: float | Decimal, labels: Mapping[str, str]) -> None:
    try:
        if value > 0:
            counter.add(value if isinstance(value, int) else float(value), _encodable(labels))
    except Exception:  # an SDK or a view of the user's
        _log.debug("recording a metric failed", exc_info=True)


def _encodable(labels: Mapping[str, str]) -> Mapping[str, str]:
    """A label with a lone surrogate would spoil every later export: sums and histograms are sent again each time."""
    return labels if all(map(str.isascii, labels.values())) else sanitise(labels)
