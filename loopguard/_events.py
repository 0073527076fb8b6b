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
    "BudgetOverdrawn",
    "BudgetWarned",
    "Charged",
    "Event",
    "IterationEnded",
    "IterationReturned",
    "IterationStarted",
    "ModelCalled",
    "ModelReplayed",
    "ModelStarted",
    "QuestionAnswered",
    "QuestionAsked",
    "RunEnded",
    "RunResumed",
    "RunStarted",
    "Stopped",
    "ToolFinished",
    "ToolRefused",
    "ToolReplayed",
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
    value: Any = None
    """Of a run that is kept in a journal: the state that it was given."""
    digest: str | None = None
    """The strict digest of that state."""
    code: str | None = None
    """What version of the function runs."""
    steps: tuple[str, ...] | None = None
    """Of a flow that is kept in a journal: the names of its steps."""
    occurrence: int = 0
    """Which run of this name and state it is in one iteration of the loop around it."""
    owner_id: str | None = None
    """The loop around it."""
    owner_iteration: int | None = None
    trace: str | None = None
    """The traceparent of its span: a resumed run links to it."""
    redacted: bool | None = None
    """In a journal: True where `configure(redact_payloads=True)` holds, so that the run can't be resumed."""
    master_key: str | None = None
    """In a journal: what the ids of the run's calls and questions are keyed with, so that nothing can be guessed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed(Event):
    """A run that is kept in a journal goes on, in this process; what was under way in the last one is over."""

    code: str | None = None


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
    raised: bool = False
    """Whether the error left the run as an exception."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationStarted(Event):
    """An iteration began: event.iteration says which."""

    value: Any = None
    """The state that the body is given."""
    feedback: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReturned(Event):
    """The body of an iteration returned, in a run that is kept in a journal: it is never run again."""

    value: Any = None
    duration: float = 0.0


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
    repeatable: bool | None = None
    """True where LoopLimit never counts it."""
    # of a run that is kept in a journal: what a resumed run finds the call again by
    digest: str | None = None
    """The strict digest of tool, self and arguments as they were asked for."""
    durable: bool = True
    """Whether another process would come to the same digest."""
    occurrence: int = 0
    """Which call of this digest it is in its iteration."""
    owner_id: str | None = None
    """The loop that it belongs to."""
    owner_iteration: int | None = None
    parent_call: str | None = None
    """The journal's own id of the call whose body made it."""
    key: str | None = None
    """The journal's own id of the call: its idempotency key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReplayed(Event):
    """A call of a resumed run was answered from its record: nothing ran, nothing was charged."""

    call_id: str
    tool: str
    key: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFinished(Event):
    """A tool call that had started is over, and settled."""

    call_id: str
    tool: str
    outcome: str
    """returned, raised, timed_out, cancelled, closed (a generator left early), or parked: it is run again on resume."""
    charged: Mapping[str, Decimal]
    overrun: bool = False
    """True when more was charged than had been reserved."""
    result: Any = None
    error: BaseException | None = None
    duration: float = 0.0
    attempt: int = 1
    items: Any = None
    """What a generator tool had yielded, in a run that is kept in a journal."""
    key: str | None = None


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
class ModelStarted(Event):
    """A metered model call was admitted and is about to be sent, in a run that is kept in a journal."""

    call_id: str
    model: str
    reserved: Mapping[str, Decimal]
    digest: str | None = None
    """The strict digest of the request."""
    occurrence: int = 0
    owner_id: str | None = None
    owner_iteration: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReplayed(Event):
    """A model call of a resumed run was answered from its record: nothing was sent, nothing was charged."""

    call_id: str
    model: str


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
    response: Any = None
    """What the API answered, in a run that is kept in a journal: {status, headers, body}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictGiven(Event):
    """A judge or an evaluator spoke."""

    by: str
    verdict: Verdict
    index: int = 0
    """Which verdict of its iteration it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionAsked(Event):
    """Somebody is being asked about a call."""

    question_id: str
    kind: str
    """approval, input, extension or uncertain."""
    call_id: str | None
    tool: str | None
    arguments: Mapping[str, Any]
    digest: str | None = None
    """The strict digest of tool, self and arguments: what the answer is about."""
    prompt: str | None = None
    """What is asked for, of an input."""
    expires_at: float | None = None
    """Until when an answer counts, in seconds since the epoch; None as long as the run waits."""
    signer: str | None = None
    """Whose key the answer must be signed with, as `loopguard.journal._answers.signer_of` names it; None: nobody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionAnswered(Event):
    """The question was answered, or nobody answered."""

    question_id: str
    kind: str
    tool: str | None
    decision: str
    """approve, deny, edit, timeout or error; of an uncertain call ran or not_run; given, of an input."""
    duration: float = 0.0
    """Seconds that it was open."""
    reason: str | None = None
    by: str | None = None
    arguments: Mapping[str, Any] | None = None
    """What the arguments were edited to; of an uncertain call and an input, {"result": …}."""
    grant: str = "once"
    """once, or run: for this tool and these arguments as long as the run lasts."""
    mac: str | None = None
    """What the answer was signed with, where it was."""


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
class BudgetOverdrawn(Event):
    """A call cost more than a ledger held for it: it had reported more, or its lease had run out before it ended."""

    budget: str
    unit: str
    key: str
    window: str
    amount: Decimal
    """What nothing was held for."""
    late: bool
    """Whether the lease had run out."""


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
    for name in ("arguments", "result", "value", "messages", "items"):
        payload = getattr(event, name, None)
        if payload is not None and not isinstance(event, ToolRefused if name == "value" else ()):
            changes[name] = redact(payload)
    for name in ("reason", "feedback", "prompt"):
        text = getattr(event, name, None)
        if isinstance(text, str):
            changes[name] = redact_text(text)
    if getattr(event, "response", None) is not None:
        changes["response"] = None
    return replace(event, **changes) if changes else event
