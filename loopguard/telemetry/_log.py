"""The event stream as structured log lines: one JSON object each, through stdlib logging."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from typing import Any

from opentelemetry import trace

from loopguard import _events as events
from loopguard.redaction import redact_error, redact_text

__all__ = ["LOGGER", "event_data", "log_event", "log_is_wanted", "plain_data"]

LOGGER = logging.getLogger("loopguard.events")
"""Everything goes there at level INFO."""


def log_is_wanted() -> bool:
    """Whether the log is switched on; a run asks once, when it starts."""
    return LOGGER.isEnabledFor(logging.INFO)


def log_event(event: events.Event) -> None:
    """Log one event, redacted, with the ids of its run and trace."""
    try:
        line = _line(events.redacted(event))
    except Exception as exc:  # whatever is wrong with a payload of the user's, the program goes on
        line = json.dumps({"event": type(event).__name__, "run_id": event.run_id, "unreadable": redact_error(exc)})
    LOGGER.info(line)


def _line(event: events.Event) -> str:
    context = trace.get_current_span().get_span_context()
    trace_id = format(context.trace_id, "032x") if context.is_valid else None
    return json.dumps({"event": type(event).__name__, "trace_id": trace_id, **event_data(event)}, allow_nan=False)


def event_data(event: events.Event) -> dict[str, Any]:
    """The event as JSON data, as it is: not redacted."""
    shown = {field.name: getattr(event, field.name) for field in fields(event)}
    return {"event": type(event).__name__, **plain_data(shown)}


def plain_data(value: Any, depth: int = 0) -> Any:
    """The value in what JSON has: no NaN, no lone surrogate, and a text for what has no form of its own."""
    if value is None or isinstance(value, bool | int):
        return value if not isinstance(value, Enum) else str(value)
    if isinstance(value, str):
        return str(value).encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, BaseException):
        return redact_error(value)
    if depth < 20:
        if isinstance(value, dict):
            return {str(plain_data(key, depth + 1)): plain_data(item, depth + 1) for key, item in list(value.items())}
        if isinstance(value, list | tuple | set | frozenset):
            return [plain_data(item, depth + 1) for item in list(value)]
        if is_dataclass(value) and not isinstance(value, type):
            return {field.name: plain_data(getattr(value, field.name), depth + 1) for field in fields(value)}
    try:
        return redact_text(repr(value)[:2000])
    except Exception:  # a repr of the user's
        return f"<{type(value).__name__}>"
