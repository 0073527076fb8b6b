"""The span of a wait for a person: drawn when it is over, and only where there was one."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

from loopguard.telemetry import _constants as names
from loopguard.telemetry import _spans as spans

__all__ = ["GUARDRAILS", "VERDICTS", "outcome_of", "waited"]

_AT_ONCE = 0.005
"""Seconds within which a policy has answered, not a person: that is no wait."""

GUARDRAILS = {"approval": "ApproveTool", "extension": "Budget"}
"""Who asks, by the kind of the question."""
VERDICTS = {"approve": names.ALLOW, "edit": names.MODIFY, "deny": names.DENY}
"""What a decision about a call is."""


def outcome_of(decision: str) -> str:
    """A decision of QuestionAnswered as the value of loopguard.approval.outcome."""
    return {"deny": names.DENIED, "timeout": names.TIMED_OUT, "error": names.FAILED}.get(decision, names.GRANTED)


def waited(seconds: float, kind: str, tool: str, decision: str, by: str | None) -> None:
    """A question about `tool` was open for so long until now; below the current span, the tool's own."""
    if seconds < _AT_ONCE or not spans.provider_is_set():
        return
    now = time.time_ns()
    outcome = outcome_of(decision)
    attributes: dict[str, Any] = {
        names.APPROVAL_OUTCOME: outcome,
        names.APPROVAL_MODE: kind,
        names.APPROVAL_ACTOR: by if _capture_actor() else None,
        names.GUARDRAIL_NAME: GUARDRAILS.get(kind),
        names.VERDICT_TYPE: VERDICTS.get(decision),
    }
    span = spans.start_span(f"{names.APPROVE_TOOL} {tool}", attributes, start_time_ns=now - int(seconds * 1e9))
    if outcome in (names.TIMED_OUT, names.FAILED):
        spans.end_unanswered(span, f"approval_{outcome}", now)
    else:
        spans.end_ok(span, now)


@cache
def _capture_actor() -> bool:
    """Whether spans may say who answered. The environment is read once."""
    return os.environ.get(names.CAPTURE_ACTOR, "").strip().lower() in ("1", "true", "on")
