"""Everything that happens, as frozen data: one stream, no second book.

Amounts are ``{unit: Decimal}`` (usd in USD, tokens in tokens). ``run_id`` is always the run that
did the thing; its ancestors count it too. Subscribers of `on_event` get redacted copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from loopguard._outcomes import StopReason, Transition, Verdict
from loopguard._usage import Usage
from loopguard.redaction import redact, redact_text

__all__ = [
    "BudgetExtended",
    "BudgetWarned",
    "Charged",
    "Event",
    "IterationEnded",
    "IterationStarted",
    "ModelCalled",
    "QuestionAnswered",
    "QuestionAsked",
    "RunEnded",
    "RunStarted",
    "Stopped",
    "ToolFinished",
    "ToolRefused",
    "ToolStarted",
    "Transitioned",
    "VerdictGiven",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What all events have."""

    run_id: str
    at: float
    """Seconds since the epoch."""
    iteration: int | None = None
    """The iteration of that run in which it happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """A loop, a flow or a scope began."""

    name: str
    kind: str
    """``loop``, ``flow`` or ``scope``."""
    parent_id: str | None = None
    max: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """A run ended."""

    name: str
    kind: str
    stop_reason: StopReason | None
    """None for a scope that was left normally."""
    iterations: int = 0
    value: Any = None
    error: BaseException | None = None
    duration: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationStarted(Event):
    """An iteration began: event.iteration says which."""

    value: Any = None
    """The state that the body is given."""
    feedback: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationEnded(Event):
    """An iteration's body returned."""

    value: Any = None
    accepted: bool = True
    duration: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStarted(Event):
    """A tool call was admitted and its body is about to run: one step."""

    call_id: str
    tool: str
    arguments: Mapping[str, Any]
    reserved: Mapping[str, Decimal]
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFinished(Event):
    """A tool call that had started is over, and settled."""

    call_id: str
    tool: str
    outcome: str
    """returned, raised, timed_out, cancelled or closed (a generator left early)."""
    charged: Mapping[str, Decimal]
    overrun: bool = False
    """True when more was charged than had been reserved."""
    result: Any = None
    error: BaseException | None = None
    duration: float = 0.0
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRefused(Event):
    """A guardrail refused a call, or would have (observed)."""

    call_id: str
    tool: str
    arguments: Mapping[str, Any]
    code: str
    guardrail: str
    reason: str | None
    limit: Any = None
    value: Any = None
    owner_id: str | None = None
    """The run that owns the limit."""
    observed: bool = False
    """True in observe mode: the call went on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charged(Event):
    """An amount was charged outside a settlement: in a loop body, or after the call had ended."""

    amounts: Mapping[str, Decimal]
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalled(Event):
    """A metered model call is over, and settled."""

    call_id: str
    model: str
    usage: Usage
    charged: Mapping[str, Decimal]
    cost: Decimal | None
    messages: Any = None
    """What the model was asked, where `configure(prompt_snapshots=True)` says so."""
    partial: bool = False
    error: BaseException | None = None
    duration: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictGiven(Event):
    """A judge or an evaluator spoke."""

    by: str
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionAsked(Event):
    """Somebody is being asked about a call."""

    question_id: str
    kind: str
    """approval, input, extension or uncertain."""
    call_id: str | None
    tool: str | None
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionAnswered(Event):
    """The question was answered, or nobody answered."""

    question_id: str
    kind: str
    tool: str | None
    decision: str
    """approve, deny, edit, timeout or error."""
    duration: float = 0.0
    """Seconds that it was open."""
    reason: str | None = None
    by: str | None = None
    arguments: Mapping[str, Any] | None = None
    """What the arguments were edited to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetWarned(Event):
    """A budget passed its `warn_at`."""

    budget: str
    unit: str
    spent: Decimal
    limit: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetExtended(Event):
    """A person raised the cap of a budget."""

    budget: str
    unit: str
    limit: Decimal
    """The cap from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitioned(Event):
    """A loop went from one state to another."""

    transition: Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Event):
    """A run was stopped from outside: every later call of it is refused."""

    code: str
    reason: str


def redacted(event: Event) -> Event:
    """The event as people and exporters may see it."""
    changes: dict[str, Any] = {}
    for name in ("arguments", "result", "value", "messages"):
        payload = getattr(event, name, None)
        if payload is not None and not isinstance(event, ToolRefused if name == "value" else ()):
            changes[name] = redact(payload)
    for name in ("reason", "feedback"):
        text = getattr(event, name, None)
        if isinstance(text, str):
            changes[name] = redact_text(text)
    return replace(event, **changes) if changes else event
