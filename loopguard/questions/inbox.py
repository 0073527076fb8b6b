"""Inbox: an approver that keeps its questions in a store, where they are answered from anywhere, days later."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loopguard import _events as events
from loopguard._approval import Approval
from loopguard._call import Binder, ToolCall
from loopguard._config import settings
from loopguard._pipeline import Effect
from loopguard._run import Run
from loopguard.exceptions import CheckpointError, ConfigurationError, LoopGuardError, ToolCallRefused
from loopguard.redaction import display_value

if TYPE_CHECKING:
    from loopguard.journal._answers import Answer, Question
    from loopguard.journal._asking import Matter
    from loopguard.journal._recorder import Recorder

__all__ = ["Inbox", "key_of"]


class Inbox:
    """An approver whose questions outlive the process: ``ApproveTool(Inbox())``, ``Budget(extend=Inbox())``.

    The question stands in the journal of the run. Without a timeout the run is *parked*: once its other calls in
    flight have come to their end, the outermost loop or flow ends with the stop reason ``waiting``. Somebody answers
    (`loopguard approve`, or `journal.open(url).answer(…)`), and the run, when it is resumed, takes the answer up where
    it stood: the call runs once, with exactly the arguments that were approved.

    With ``ApproveTool(Inbox(), timeout=60)`` the call waits in place instead, for so many seconds, and is refused
    then; an answer that comes later is none.

    - ``store``: where questions of runs are kept that keep no journal themselves, by default in
      ``configure(store=…)`` or LOOPGUARD_STORE; they can only be waited for in place.
    - ``key``: at least 16 secret bytes: an answer counts only if it is signed with it. That protects a store which
      others can write; it doesn't protect against a program that can read the key, such as an agent with a shell.
    - ``notify(question)``: called with each new `loopguard.journal.Question`, to send a mail or a message. Sync or
      async; what it raises is logged, and the question stays.
    - ``drain``: seconds that a run which is to be parked gives its other calls in flight to come to their end.
    """

    def __init__(
        self,
        store: Any = None,
        key: bytes | None = None,
        *,
        notify: Callable[[Question], object] | None = None,
        drain: float = 30.0,
    ) -> None:
        from loopguard.journal._answers import check_key
        from loopguard.journal._open import check_store

        self._store = None if store is None else check_store(store, "Inbox(store")
        self.key = check_key(key, "Inbox(key=…)")
        if notify is not None and not callable(notify):
            raise ConfigurationError(f"Inbox(notify={notify!r}): give a callable that gets the question")
        if isinstance(drain, bool) or not isinstance(drain, int | float) or not 0 <= drain < 1e6:
            raise ConfigurationError(f"Inbox(drain={drain!r}): give seconds, at least 0")
        self._notify = notify
        self._drain = drain

    def __repr__(self) -> str:
        return "Inbox()"

    def __call__(self, call: ToolCall) -> Approval:
        """An Inbox isn't called: ApproveTool and Budget(extend=) know how to ask it."""
        raise ConfigurationError(
            "give the Inbox itself to ApproveTool(…) or Budget(extend=…), not a function around it"
        )

    def keep(
        self, subject: Any, run: Run, kind: str, digest: str | None, timeout: float | None
    ) -> Generator[Effect, Any, Approval]:
        """See `loopguard._approval.Keeper`."""
        from loopguard.journal._asking import Matter

        recorder: Recorder | None = run.recorder
        if timeout is None:
            recorder = self._parkable(subject, run, kind)
        matter = Matter(
            kind=kind,
            place=subject.idempotency_key,
            tool=subject.name,
            call_id=subject.idempotency_key,
            arguments=subject.arguments,
            digest=digest,
            timeout=timeout,
            key=self.key,
            notify=self._notify,
            drain=self._drain,
            why=f"{subject.name} was not run: it needs an approval",
        )
        if recorder is not None:
            if kind == "approval":
                self._check_same(recorder, subject, matter.digest)
            return (yield from _asked(recorder, run, subject, matter))
        with self._alone(subject) as recorder:
            return (yield from _asked(recorder, run, subject, matter))

    def _parkable(self, subject: Any, run: Run, kind: str) -> Recorder:
        recorder: Recorder | None = run.recorder
        if recorder is None:
            raise ConfigurationError(
                f"{subject.name} needs an answer that may take days, and nothing here can wait for it: call it in a "
                f"loop or flow with store='sqlite:///runs.db' (or LOOPGUARD_STORE), or wait in place, with "
                f"ApproveTool(Inbox(store=…), timeout=60)"
            )
        if isinstance(subject, ToolCall) and not subject.digest()[1]:
            raise LoopGuardError(
                f"another process couldn't tell that it is the same call: {subject.name} gets an object that can't be "
                f"written down. Give @tool(self_key=…) for a method, or plain arguments"
            )
        return recorder

    def _check_same(self, recorder: Recorder, call: ToolCall, digest: str | None) -> None:
        """A yes that was given before the interruption holds for the arguments that it was given about."""
        questions = recorder.questions
        if recorder.recall.resuming is None or questions.knows(call.idempotency_key, digest, self.key):
            return
        other = questions.unused_yes(call.name, self.key)
        if other is not None:
            raise ToolCallRefused(
                "approval_mismatch",
                "ApproveTool",
                call.name,
                f"{call.name} was approved with other arguments before the run was interrupted ({other.question_id}), "
                f"so it was not run. Call it with those, or again to ask about these",
                None,
                None,
                recorder.run.name,
                recorder.run.id,
            )

    @contextmanager
    def _alone(self, subject: Any) -> Iterator[Recorder]:
        """A journal for one question of a run that keeps none."""
        from loopguard.journal._open import default_store, keep

        store = self._store if self._store is not None else default_store()
        if store is None:
            raise ConfigurationError(
                f"the question about {subject.name} has nowhere to stand: give Inbox(store='sqlite:///runs.db'), or "
                f"LOOPGUARD_STORE"
            )
        holder = Run("inbox")
        recorder = keep(store, settings.durability, holder, create=True)
        holder.listeners = (recorder.record,)
        holder.emit(events.RunStarted, name=holder.name, kind=holder.kind)
        try:
            yield recorder
        finally:
            holder.emit(events.RunEnded, name=holder.name, kind=holder.kind, stop_reason=None)
            recorder.close("stopped")


def _asked(recorder: Recorder, run: Run, subject: Any, matter: Matter) -> Generator[Effect, Any, Approval]:
    """What was said. An edit that doesn't fit is neither yes nor no: the question is put once more, and says why."""
    while True:
        answer: Answer = yield from recorder.questions.ask(run, matter)
        if answer.decision != "edit" or not isinstance(subject, ToolCall):
            return answer.approval
        try:
            return replace(answer, arguments=_edited(subject, answer.arguments or {})).approval
        except LoopGuardError as exc:
            matter = replace(matter, prompt=f"The edit before didn't fit: {exc}")


def _edited(call: ToolCall, edit: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments with those that were edited, which came as JSON, in the types that the tool declares."""
    from loopguard.journal._codec import codec_for, hints_of, shown

    hints, binder = hints_of(call.tool.fn), call.tool.binder(call.bound)
    kinds = {p.name: p.kind for p in binder.signature.parameters.values()} if isinstance(binder, Binder) else {}
    made = dict(call.arguments)
    for name, value in edit.items():
        text = shown(value)
        if name in made and text == shown(made[name]):
            continue  # it was left as it is
        hint: Any = hints.get(name, Any)
        if kinds.get(name) is inspect.Parameter.VAR_POSITIONAL:
            hint = types.GenericAlias(tuple, (hint, ...))
        elif kinds.get(name) is inspect.Parameter.VAR_KEYWORD:
            hint = types.GenericAlias(dict, (str, hint))
        try:
            made[name] = codec_for(hint).decode(text)
        except CheckpointError:
            raise LoopGuardError(
                f"{name} was edited to {display_value(value, 200)}, which isn't what it takes"
            ) from None
    try:
        call.replace(arguments=made)
    except TypeError as exc:
        raise LoopGuardError(str(exc)) from None
    return made


def key_of(guards: Iterable[Any]) -> bytes | None:
    """The key of an Inbox in these guards: what answers to the run's other questions must be signed with, too."""
    for guard in guards:
        for guardrail in guard.guardrails:
            inbox = getattr(guardrail, "approver", None) or getattr(guardrail, "extend", None)
            if isinstance(inbox, Inbox) and inbox.key is not None:
                return inbox.key
    return None
