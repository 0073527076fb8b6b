"""Asking a person: the question, its clock, and the strict reading of the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard

from loopguard import _events as events
from loopguard._call import new_id, structural_copy
from loopguard._pipeline import Ask, Effect, EffectTimeout
from loopguard._run import Run
from loopguard.exceptions import ConfigurationError, LoopGuardError, ToolCallRefused
from loopguard.telemetry._questions import waited

__all__ = ["Approval", "Keeper", "Question", "Subject", "ask", "is_keeper", "read_answer"]


@dataclass(frozen=True, slots=True)
class Approval:
    """An approver's answer: made by `approve`, `deny` or `edit`."""

    decision: Literal["approve", "deny", "edit"]
    reason: str | None = None
    arguments: Mapping[str, Any] | None = None
    grant: Literal["once", "run"] = "once"
    by: str | None = None
    """Who answered, as they say themselves."""

    def __post_init__(self) -> None:
        if self.decision not in ("approve", "deny", "edit"):
            raise ConfigurationError(f"Approval({self.decision!r}): use Approval.approve(), .deny() or .edit()")
        if self.grant not in ("once", "run"):
            raise ConfigurationError(f"grant={self.grant!r}: give 'once' or 'run'")
        if self.reason is not None and not isinstance(self.reason, str):
            raise ConfigurationError(f"reason={self.reason!r}: give a text or None")
        if not isinstance(self.arguments, Mapping if self.decision == "edit" else type(None)):
            raise ConfigurationError(f"Approval({self.decision!r}, arguments={self.arguments!r}): use Approval.edit()")

    @classmethod
    def approve(cls, grant: Literal["once", "run"] = "once", *, by: str | None = None) -> Approval:
        """Yes: for this one execution, or (grant="run") for this tool with these arguments in this run."""
        return cls("approve", None, None, grant, by)

    @classmethod
    def deny(
        cls, reason: str | None = None, grant: Literal["once", "run"] = "once", *, by: str | None = None
    ) -> Approval:
        """No. The reason goes to the model. With grant="run" it is final for this run."""
        return cls("deny", reason, None, grant, by)

    @classmethod
    def edit(cls, arguments: Mapping[str, Any], reason: str | None = None, *, by: str | None = None) -> Approval:
        """Yes, but with these arguments, in the shape of `call.arguments`."""
        if not isinstance(arguments, Mapping):
            raise ConfigurationError(f"Approval.edit({arguments!r}): give a mapping of parameter to value")
        return cls("edit", reason, structural_copy(dict(arguments)), "once", by)


class Question:
    """A question while it is open."""

    __slots__ = ("_run", "id", "over")

    def __init__(self, run: Run) -> None:
        self.id = new_id("question")
        self.over = False
        """True once nobody waits for the answer any more."""
        self._run = run

    @property
    def closed(self) -> bool:
        """True once an answer would come too late: nobody waits for it, or its run was stopped."""
        return self.over or any(run.latch is not None for run in self._run.chain)


class Subject(Protocol):
    """What a question is about: a tool call, or something that looks like one to an approver."""

    question: Any

    @property
    def id(self) -> str:
        """The call's id."""
        ...

    @property
    def name(self) -> str:
        """What is to be done."""
        ...

    @property
    def arguments(self) -> dict[str, Any]:
        """With what."""
        ...


class Keeper(Protocol):
    """An approver that keeps its questions itself, where they outlive the process: an Inbox."""

    key: bytes | None
    """What its answers are signed with: it counts no others."""

    def keep(
        self, subject: Any, run: Run, kind: str, digest: str | None, timeout: float | None
    ) -> Generator[Effect, Any, Approval]:
        """The answer, waited for in place or found when the run was resumed; else the refusal that parks the run."""
        ...


def is_keeper(approver: Any) -> TypeGuard[Keeper]:
    """Whether the approver keeps its questions itself."""
    return callable(getattr(type(approver), "keep", None))


def ask(
    approver: Callable[[Any], Any], subject: Subject, run: Run, kind: str, digest: str | None, timeout: float | None
) -> Generator[Effect, Any, Approval]:
    """The approver's answer about the subject; the clocks of the run stand still meanwhile.

    Raises EffectTimeout when nobody answered in time, and whatever the approver raised: never a yes.
    """
    started = time.monotonic()
    decision, by = "error", None
    run.asking()
    try:
        if is_keeper(approver):
            answer = yield from approver.keep(subject, run, kind, digest, timeout)
        else:
            answer = yield from _ask(approver, subject, run, kind, digest, timeout)
        decision, by = answer.decision, answer.by
        return answer
    except EffectTimeout:
        decision = "timeout"
        raise
    except ToolCallRefused:
        decision = "parked" if is_keeper(approver) else "error"
        raise
    finally:
        run.asked()
        if decision != "parked":  # nobody waited here
            waited(time.monotonic() - started, kind, subject.name, decision, by)


def _ask(
    approver: Callable[[Any], Any], subject: Subject, run: Run, kind: str, digest: str | None, timeout: float | None
) -> Generator[Effect, Any, Approval]:
    question = subject.question = Question(run)
    run.emit(
        events.QuestionAsked,
        question_id=question.id,
        kind=kind,
        call_id=subject.id,
        tool=subject.name,
        arguments=subject.arguments,
        digest=digest,
    )
    started = time.monotonic()
    decision, answer = "error", None
    try:
        said = yield Ask(approver, subject, blocking=True, timeout=timeout)
        if timeout is not None and time.monotonic() - started > timeout:
            raise EffectTimeout
        answer = read_answer(said)
        decision = answer.decision
        return answer
    except EffectTimeout:
        decision = "timeout"
        raise
    finally:
        question.over = True
        run.emit(
            events.QuestionAnswered,
            question_id=question.id,
            kind=kind,
            tool=subject.name,
            duration=max(0.0, time.monotonic() - started),
            decision=decision,
            reason=answer.reason if answer is not None else None,
            by=answer.by if answer is not None else None,
            arguments=answer.arguments if answer is not None else None,
            grant=answer.grant if answer is not None else "once",
        )


def read_answer(said: Any) -> Approval:
    """What an approver returned, read strictly: only True, Approval and (True, reason) can be a yes."""
    if said is True:
        return Approval.approve()
    if said is False:
        return Approval.deny()
    if isinstance(said, Approval):
        return said
    if isinstance(said, tuple) and len(said) == 2 and isinstance(said[0], bool):
        if said[1] is None or isinstance(said[1], str):
            return Approval("approve" if said[0] else "deny", said[1])
    raise LoopGuardError(
        f"it returned a {type(said).__name__}; an approver returns True, False, (bool, reason) or an Approval"
    )
