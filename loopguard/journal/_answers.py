"""Questions and answers as people and stores have them: redacted to read, sealed to send."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from loopguard._approval import Approval
from loopguard._events import QuestionAnswered, QuestionAsked
from loopguard.exceptions import ConfigurationError
from loopguard.journal._codec import shown
from loopguard.journal._rows import Stored
from loopguard.redaction import display_value, redact, redact_text

__all__ = ["Answer", "Question", "answered", "check_key", "opened", "sealed", "signer_of"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said of a question, by whom and when."""

    decision: str
    """approve, deny or edit; ran or not_run, of an uncertain call; given, of an input; timeout: nobody answered."""
    reason: str | None = None
    arguments: Mapping[str, Any] | None = None
    """What the arguments were edited to."""
    result: Any = None
    """What the call returned, where it ran; the value, of an input."""
    grant: str = "once"
    by: str | None = None
    """Who answered, as they say themselves."""
    at: float = 0.0
    """Seconds since the epoch."""
    mac: str | None = None
    """What it was signed with, where it was."""

    @classmethod
    def of(cls, said: Approval, by: str | None) -> Answer:
        """The answer that an approval is."""
        return cls(said.decision, said.reason, said.arguments, None, said.grant, by or said.by, time.time())

    @property
    def approval(self) -> Approval:
        """The answer to an approver's question."""
        decision: Any = self.decision
        grant: Any = self.grant
        return Approval(decision, self.reason, self.arguments, grant, self.by)


def check_key(key: Any, what: str) -> bytes | None:
    """The key if it is one: at least 16 bytes, or None. ConfigurationError otherwise, which doesn't show it."""
    if key is None or (isinstance(key, bytes) and len(key) >= 16):
        return key
    kind = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
    raise ConfigurationError(f"{what}: got {kind}; give at least 16 secret bytes, such as secrets.token_bytes(32)")


def signer_of(key: bytes | None) -> str | None:
    """A name for the key that tells nothing of it."""
    return None if key is None else hmac.new(key, b"loopguard signer", hashlib.sha256).hexdigest()[:16]


def sealed(answer: Answer, question: QuestionAsked, key: bytes | None) -> bytes:
    """The answer as mail, bound to the question's run, call and digest, signed where there is a key."""
    said = shown({**asdict(replace(answer, mac=None)), **_bound(question)})
    mac = None if key is None else hmac.new(key, said, hashlib.sha256).hexdigest()
    return shown({"said": said.decode(), "mac": mac})


def opened(mail: bytes, question: QuestionAsked, key: bytes | None) -> Answer | None:
    """The answer in this mail; None where it isn't one to this question, or isn't signed with this key."""
    from pydantic_core import from_json

    try:
        outer = from_json(mail)
        said, mac = outer["said"], outer["mac"]
        if key is not None:
            right = hmac.new(key, said.encode(), hashlib.sha256).hexdigest()
            if not isinstance(mac, str) or not hmac.compare_digest(mac.encode(), right.encode()):
                return None
        fields = from_json(said)
        bound = {name: fields.pop(name) for name in _bound(question)}
        if bound != _bound(question):
            return None
        return Answer(**{**fields, "mac": mac})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _bound(question: QuestionAsked) -> dict[str, Any]:
    return {
        "question": question.question_id,
        "run": question.run_id,
        "kind": question.kind,
        "call": question.call_id,
        "digest": question.digest,
    }


@dataclass(frozen=True, slots=True)
class Question:
    """A question as people see it: redacted, with what was said of it."""

    id: str
    kind: str
    """approval, input, extension or uncertain."""
    run_id: str
    """The run whose journal it stands in."""
    run_name: str
    call_id: str | None
    tool: str | None
    arguments: Mapping[str, Any]
    """Redacted, as plain JSON data."""
    hidden: bool
    """Whether something in the arguments is hidden: who approves, approves what they can't see."""
    prompt: str | None
    asked_at: float
    """Seconds since the epoch."""
    expires_at: float | None
    """Until when an answer counts; None as long as the run waits."""
    status: str
    """pending, answered or expired."""
    answer: Answer | None = None

    @classmethod
    def of(cls, asked: QuestionAsked, run_id: str, run_name: str, answer: Answer | None) -> Question:
        """The question that was asked in this run."""
        given: Any = asked.arguments
        arguments = redact(given.show() if isinstance(given, Stored) else given)
        expired = asked.expires_at is not None and time.time() > asked.expires_at
        return cls(
            id=asked.question_id,
            kind=asked.kind,
            run_id=run_id,
            run_name=run_name,
            call_id=asked.call_id,
            tool=asked.tool,
            arguments=arguments,
            hidden="[hidden" in display_value(arguments, None),
            prompt=None if asked.prompt is None else redact_text(asked.prompt),
            asked_at=asked.at,
            expires_at=asked.expires_at,
            status="answered" if answer is not None else "expired" if expired else "pending",
            answer=answer,
        )


def answered(event: QuestionAnswered) -> Answer:
    """The answer that a run has taken up."""
    given: Any = event.arguments
    arguments = given.show() if isinstance(given, Stored) else given
    told = event.kind in ("uncertain", "input") and isinstance(arguments, Mapping)
    return Answer(
        decision=event.decision,
        reason=event.reason,
        arguments=None if told else arguments,
        result=arguments.get("result") if told else None,
        grant=event.grant,
        by=event.by,
        at=event.at,
        mac=event.mac,
    )
