"""ApproveTool: nothing risky runs without an explicit yes, about exactly the arguments that run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import islice
from typing import Any

from loopguard._admission import mismatch
from loopguard._approval import Approval, ask, is_keeper
from loopguard._call import CURRENT, Tool, ToolCall, structural_copy
from loopguard._pipeline import LOCK, Effect, EffectTimeout, Proceed, Steps
from loopguard._run import Run
from loopguard.exceptions import ApprovalDenied, ApprovalTimeout, ConfigurationError, ToolCallRefused
from loopguard.guardrails._only import Only, Which
from loopguard.redaction import redact_error

__all__ = ["Approval", "ApproveTool", "approvals"]

REMEMBERED = 10_000
"""Calls that a run remembers at least to have asked about."""
MAX_QUESTIONS = 3
"""How often one and the same call may be asked about in a run: a model can't ask all night."""


class ApproveTool:
    """Ask ``approver(call)`` before a tool runs; `only` says about which calls, None is every call.

    The approver, sync or async, returns True, False, ``(bool, reason)`` or an `Approval`; nothing else
    is a yes. It fails closed: an exception refuses with ``approval_error``, no answer within `timeout`
    seconds with ``approval_timeout``, a no with ``approval_denied``, and arguments that changed between
    the answer and the run with ``approval_mismatch``.
    """

    def __init__(self, approver: Callable[[ToolCall], Any], only: Only = None, timeout: float | None = None) -> None:
        if not callable(approver):
            raise ConfigurationError(f"ApproveTool({approver!r}): give a callable that answers about a call")
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e9
        ):
            raise ConfigurationError(f"ApproveTool(timeout={timeout!r}): give seconds above 0, or None to wait")
        self.approver = approver
        self.which = Which(only, "ApproveTool")
        self.timeout = timeout

    def __repr__(self) -> str:
        only = f", only={self.which.text!r}" if self.which.text else ""
        return f"ApproveTool({getattr(self.approver, '__name__', self.approver)!s}{only})"


class _Record:
    """What was said in one run about one exact call."""

    __slots__ = ("answer", "asked", "news")

    def __init__(self) -> None:
        self.asked = 0
        self.answer: Approval | None = None
        self.news = -1
        """How much the run had done when it was said: a denial holds until it has done something new."""


def _record(approver: ApproveTool, run: Run, digest: str) -> _Record:
    """What this run remembers of one exact call; of calls that nothing was settled about, the latest."""
    records: dict[str, _Record] = run.slot(approver, dict)
    with LOCK:
        if digest not in records:
            if len(records) >= 2 * REMEMBERED:
                unsettled = (old for old, record in list(records.items()) if record.answer is None)
                for old in list(islice(unsettled, REMEMBERED)):
                    del records[old]
            records[digest] = _remembered(approver, run, digest)
        return records[digest]


def _remembered(approver: ApproveTool, run: Run, digest: str) -> _Record:
    """What a resumed run has in its journal about this call, from iterations that are over."""
    record = _Record()
    if run.recorder is not None and run.recorder.story.questions:
        key = approver.approver.key if is_keeper(approver.approver) else None
        record.asked, said, news = run.recorder.questions.said_before(digest, key)
        if said is not None and (said.grant == "run" or said.decision == "deny"):
            if said.decision in ("approve", "deny"):
                record.answer = Approval(said.decision, said.reason, None, said.grant, said.by)
                record.news = -1 if news else run.news
    return record


def approvals(tool: Tool, entries: Sequence[tuple[ApproveTool, Run]]) -> Callable[[ToolCall, Proceed], Steps]:
    """All approvers of a call as one hook, in the order of the chain."""

    def approve(call: ToolCall, proceed: Proceed) -> Steps:
        concerned = [_covers(approver, call) for approver, _ in entries]
        if not any(concerned):
            if tool.approve:
                reason = (
                    f"{call.name} runs only on an explicit yes, and nobody is there to give it. (For people: put "
                    f"ApproveTool(ask_in_terminal) or your own approver into the guard of this run or tool.)"
                )
                raise _refuse(call, "approval_error", reason)
            return (yield from proceed(call))
        call = _swap(call, structural_copy(call.arguments))
        digest = _digest(call)
        yes: dict[int, str] = {}
        edited: set[int] = set()
        while True:
            for index, (approver, run) in enumerate(entries):
                if yes.get(index) == digest or not concerned[index]:
                    continue
                answer = yield from _answer(approver, run, call, digest)
                if answer.decision == "edit":
                    if index in edited:
                        raise _refuse(call, "approval_error", f"an approver of {call.name} edited its arguments twice")
                    edited.add(index)
                    call = yield from _edited(call, answer)
                    digest = yes[index] = _digest(call)
                    concerned = [_covers(approver, call) for approver, _ in entries]
                    break  # whoever had approved other arguments is asked again, and whom the new ones concern
                yes[index] = digest
            else:
                break
        if _digest(call) != digest:
            raise call.plan.refuse(call, mismatch(call))
        call.approved = digest
        return (yield from proceed(call))

    return approve


def _covers(approver: ApproveTool, call: ToolCall) -> bool:
    try:
        return approver.which.covers(call)
    except Exception as exc:  # a predicate of the user's: when it can't tell, nobody may run the call
        reason = f"whether {call.name} needs an approval could not be found out: {redact_error(exc)}"
        raise _refuse(call, "approval_error", reason) from exc


def _digest(call: ToolCall) -> str:
    try:
        return call.digest()[0]
    except Exception as exc:  # self_key is the user's
        raise _refuse(call, "approval_error", f"self_key of {call.name} failed: {redact_error(exc)}") from exc


def _swap(call: ToolCall, arguments: Mapping[str, Any]) -> ToolCall:
    """The call with other argument objects, in force in place of the old one and of what it took."""
    new = call.replace(arguments=arguments)
    new.step, new.amounts, new.tokens = call.step, call.amounts, call.tokens
    new.loose, new.marks, new.repeats = call.loose, call.marks, call.repeats
    new.held = call.held
    if call.line is not None:
        call.line.append(new)
    call.settled = True
    CURRENT.set(new)
    return new


def _edited(call: ToolCall, answer: Approval) -> Generator[Effect, Any, ToolCall]:
    assert answer.arguments is not None
    try:
        new = call.replace(arguments=structural_copy(dict(answer.arguments)))
    except TypeError as exc:
        raise _refuse(call, "approval_error", f"{call.name} was edited to arguments that don't fit: {exc}") from exc
    refusal = call.plan.readmit(call, new)
    new.held = call.held
    if call.line is not None:
        call.line.append(new)
    CURRENT.set(new)
    while refusal is not None and refusal.cure is not None:  # as for any call, see `admission_hook`
        yield from refusal.cure(new)
        refusal = call.plan.admit(new)
        new.settled = refusal is not None
    books = call.plan.books
    if refusal is None and books is not None:
        yield from books.close(new)  # what was held for the old arguments
        refusal = yield from books.admit(new)
        if refusal is not None:
            call.plan.undo(new)
    if refusal is not None:
        raise call.plan.refuse(new, refusal)
    return new


def _answer(approver: ApproveTool, run: Run, call: ToolCall, digest: str) -> Generator[Effect, Any, Approval]:
    """The approver's yes or edit: from a grant, or by asking. Everything else is raised."""
    # outside a run nothing is remembered: the next call may be somebody else's
    record = _Record() if run.outside else _record(approver, run, digest)
    held = record.answer
    if held is not None and held.grant == "run" and held.decision == "approve":
        return held
    if held is not None and held.decision == "deny" and (held.grant == "run" or record.news >= run.news):
        raise _denied(call, held.reason)
    if record.asked >= MAX_QUESTIONS:
        raise _denied(call, f"it was asked about {MAX_QUESTIONS} times in this run already")
    record.asked += 1
    answer = yield from _ask(approver, call, digest)
    latched = call.plan.latched() if call.plan.root.alarm else None
    if latched is not None:
        raise call.plan.refuse(call, latched)
    held = record.answer
    if held is not None and held.decision == "deny" and held.grant == "run":
        answer = held  # said meanwhile, about the same call
    if answer.decision == "deny" or (answer.decision == "approve" and answer.grant == "run"):
        record.answer, record.news = answer, run.news
    if answer.decision == "deny":
        raise _denied(call, answer.reason)
    return answer


def _ask(approver: ApproveTool, call: ToolCall, digest: str) -> Generator[Effect, Any, Approval]:
    """The answer, or the refusal that stands for none: it fails closed."""
    try:
        return (yield from ask(approver.approver, call, call.run, "approval", digest, approver.timeout))
    except ConfigurationError:
        raise
    except Exception as exc:  # the approver is the user's: whatever it raises isn't a yes
        if isinstance(exc, ToolCallRefused) and is_keeper(approver.approver):
            raise call.plan.refuse(call, exc) from None
        latched = call.plan.latched()
        if latched is not None:  # it gave up, since the run was stopped
            raise call.plan.refuse(call, latched) from exc
        if isinstance(exc, EffectTimeout):
            text = f"nobody approved {call.name} within {approver.timeout:g} s, so it was not run"
            raise _refuse(call, "approval_timeout", text) from None
        text = f"the approver of {call.name} failed, so it was not run: {redact_error(exc)}"
        raise _refuse(call, "approval_error", text) from exc


def _denied(call: ToolCall, reason: str | None) -> ToolCallRefused:
    return call.plan.refuse(
        call,
        ApprovalDenied("approval_denied", "ApproveTool", call.name, reason, None, None, call.run.name, call.run.id),
    )


def _refuse(call: ToolCall, code: str, reason: str) -> ToolCallRefused:
    kind = ApprovalTimeout if code == "approval_timeout" else ToolCallRefused
    return call.plan.refuse(call, kind(code, "ApproveTool", call.name, reason, None, None, call.run.name, call.run.id))
