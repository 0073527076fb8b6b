"""Asking in a run that is kept: questions stand in its journal, answers come by mail, and who waits long is parked."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loopguard import _events as events
from loopguard._admission import latched
from loopguard._pipeline import Ask, Effect, EffectTimeout, Sleep, Steps
from loopguard._run import Run
from loopguard.exceptions import ConfigurationError, JournalError, LoopGuardError, ToolCallRefused
from loopguard.journal._answers import Answer, Question, answered, opened, sealed, signer_of
from loopguard.journal._at_rest import letter, read_letter
from loopguard.journal._protocol import STOP
from loopguard.redaction import redact_error

if TYPE_CHECKING:
    from loopguard.journal._recorder import Recorder

__all__ = ["INSIDE", "Matter", "Questions"]

INSIDE: ContextVar[tuple[str, ...]] = ContextVar("loopguard_journal_calls", default=())
"""The keys of the recorded calls that we are inside of, the outermost first."""
POLL = 0.1
"""Seconds between two looks for an answer that is waited for in place."""
DRAIN = 30.0
"""Seconds that a run which is to be parked gives its other calls in flight to come to their end."""
_VERBS = {"approval": "approve or deny", "extension": "approve or deny", "input": "answer", "uncertain": "answer"}
"""How questions are answered in a shell, by kind."""
_log = logging.getLogger("loopguard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matter:
    """What a question is about, and how it is asked."""

    kind: str
    place: str
    """Where in the run it stands: the same when the run is resumed. With the digest it makes the question's id."""
    tool: str | None = None
    call_id: str | None = None
    arguments: Mapping[str, Any]
    digest: str | None = None
    prompt: str | None = None
    timeout: float | None = None
    """Seconds to wait in place; None parks the run."""
    key: bytes | None = None
    """What the answer must be signed with."""
    notify: Callable[[Question], object] | None = None
    drain: float = DRAIN
    code: str = "waiting"
    why: str = ""
    """Of a parked run: what the refusal says of it."""
    hint: str = ""
    """What people could do beside answering."""


class Questions:
    """The questions of one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.key: bytes | None = None
        """What answers about inputs and uncertain calls must be signed with: an Inbox of the run has the key."""
        self._times: Counter[tuple[str, str | None, str | None]] = Counter()
        self._before: Mapping[str, bytes] = {}
        """The mail that was there when the run was resumed."""
        self._ignored: set[bytes] = set()
        self._used: set[str] = set()
        self._flying: set[str] = set()
        """The calls whose bodies are running, and the model calls."""
        self._blocked: set[str] = set()
        """Those of them that wait for a parked one."""
        self._draining = 0
        self._changed = threading.Condition()

    def id_of(self, place: str, digest: str | None, key: bytes | None) -> str:
        """The id of the next question here about this: another process that comes here finds the same.

        Whoever asks with another key asks another question, and never finds an answer that was signed for this one.
        """
        signer = signer_of(key)
        text = f"{place} {digest} {self._times[place, digest, signer]}{f' {signer}' if signer else ''}"
        return f"question_{self._recorder.opaque(hashlib.sha256(text.encode()).hexdigest())[:16]}"

    def knows(self, place: str, digest: str | None, key: bytes | None) -> bool:
        """Whether that question was asked already, maybe by another process."""
        return self.id_of(place, digest, key) in self._recorder.story.questions

    def ask(self, run: Run, matter: Matter) -> Generator[Effect, Any, Answer]:
        """The answer: from the journal, by mail, or waited for.

        Raises EffectTimeout where nobody answered in time, LoopGuardError where the run was stopped meanwhile, and
        where it isn't waited for in place the refusal that parks the run, once its other calls have come to an end.
        """
        story, number = self._recorder.story, self.id_of(matter.place, matter.digest, matter.key)
        self._times[matter.place, matter.digest, signer_of(matter.key)] += 1
        self._used.add(number)
        known = self._known(number, matter)
        if known is None:
            if matter.timeout is None and self._recorder.redacts:
                raise ConfigurationError(
                    f"{matter.tool or 'an input'} would park the run until somebody answers, but a run whose payloads "
                    f"are redacted can't be resumed: wait in place with a timeout, or leave redact_payloads=True out"
                )
            asked = story.questions.get(number) or (yield from self._put(run, number, matter))
            answer = yield from self._arrived(asked, matter.key)
            if answer is None and asked.expires_at is not None:
                answer = yield from self._wait(run, asked, matter.key)
            if answer is None:
                yield from self._park(number, matter)
            assert answer is not None
            known = answered(self._take_up(run, asked, answer))
        if known.decision == "timeout":
            raise EffectTimeout
        return known

    def _known(self, number: str, matter: Matter) -> Answer | None:
        """What an earlier process has taken up. JournalError where that isn't what was asked, or said, then."""
        story = self._recorder.story
        asked, event = story.questions.get(number), story.answers.get(number)
        if asked is None:
            return None
        same = (asked.kind, asked.call_id, asked.digest) == (matter.kind, matter.call_id, matter.digest)
        if not same or (event is not None and not self._signed(asked, event, matter.key)):
            raise JournalError(f"what the journal says of {number} isn't what was asked and answered: it was changed")
        return None if event is None else answered(event)

    def _signed(self, asked: events.QuestionAsked, event: events.QuestionAnswered, key: bytes | None) -> bool:
        """Whether the mail that an answer came by is signed: whoever can write mail can write events, too."""
        if key is None:
            return True
        mail = opened(self._before.get(asked.question_id, b""), asked, key)
        told = answered(event)
        return mail is not None and replace(mail, at=0.0) == replace(told, at=0.0)

    def input(self, run: Run, key: str, prompt: str | None = None) -> Generator[Effect, Any, Any]:
        """The value that somebody gives; the run is parked where nobody has yet. ``key`` names it in this run."""
        matter = Matter(
            kind="input",
            place=f"{run.id}:{key}",
            arguments={"key": key},
            prompt=prompt,
            key=self.key,
            why=f"{run.name} waits for {key}",
        )
        return (yield from self.ask(run, matter)).result

    # -- asking ----------------------------------------------------------------------------------

    def _put(self, run: Run, id: str, matter: Matter) -> Generator[Effect, Any, events.QuestionAsked]:
        """Write the question down; when it is committed, tell about it."""
        recorder = self._recorder
        now = time.time()
        asked = events.QuestionAsked(
            run_id=run.id,
            at=now,
            iteration=run.iteration or None,
            question_id=id,
            kind=matter.kind,
            call_id=matter.call_id,
            tool=matter.tool,
            arguments=matter.arguments,
            digest=matter.digest,
            prompt=matter.prompt,
            expires_at=None if matter.timeout is None else now + matter.timeout,
            signer=signer_of(matter.key),
        )
        recorder.story.questions[id] = asked
        self._emit(run, asked)
        yield Ask(recorder.settled, blocking=True)
        if matter.notify is not None:
            question = Question.of(asked, recorder.run.id, recorder.run.name, None)
            try:
                yield Ask(matter.notify, question, blocking=True)
            except Exception as exc:  # the callback is the user's: the question is listed without it, too
                _log.warning("nobody was notified of the question %s: %s", id, redact_error(exc))
        return asked

    def _take_up(self, run: Run, asked: events.QuestionAsked, answer: Answer) -> events.QuestionAnswered:
        """From now on the answer is part of the run."""
        told = {"result": answer.result} if answer.decision in ("ran", "given") else answer.arguments
        event = events.QuestionAnswered(
            run_id=asked.run_id,
            at=time.time(),
            iteration=asked.iteration,
            question_id=asked.question_id,
            kind=asked.kind,
            tool=asked.tool,
            decision=answer.decision,
            duration=max(0.0, (answer.at or time.time()) - asked.at),
            reason=answer.reason,
            by=answer.by,
            arguments=told,
            grant=answer.grant,
            mac=answer.mac,
        )
        self._recorder.story.answers[asked.question_id] = event
        self._emit(run, event)
        return event

    def _emit(self, run: Run, event: events.Event) -> None:
        record = self._recorder.record
        for listener in run.listeners if record in run.listeners else (record, *run.listeners):
            listener(event)

    def collect(self, run: Run) -> None:
        """Take up what came by mail since the run was left, and can't wait: a stop, and what is said of uncertain
        calls, since the counters depend on it."""
        story, mail = self._recorder.story, self._mail()
        self._before = mail
        if STOP in mail:
            run.stop(stop_reason(mail[STOP]))
        open_ones = {
            name: asked
            for name, asked in story.questions.items()
            if asked.kind == "uncertain" and name not in story.answers
        }
        for name, asked in open_ones.items():
            answer = self._read(mail.get(name), asked, self.key)
            if answer is not None:
                story.add(self._take_up(run, asked, answer))

    # -- waiting ---------------------------------------------------------------------------------

    def _mail(self) -> dict[str, bytes]:
        recorder = self._recorder
        mail = recorder.writer.use(lambda journal: journal.mail(recorder.lease.run_id))
        return {name: read_letter(recorder.codec, stored, name) for name, stored in mail.items()}

    def _read(self, mail: bytes | None, asked: events.QuestionAsked, key: bytes | None) -> Answer | None:
        answer = None if mail is None else opened(mail, asked, key)
        if mail is not None and answer is None and mail not in self._ignored:
            self._ignored.add(mail)
            _log.warning(
                "an answer to %s was ignored: unreadable, or it isn't signed with the Inbox's key", asked.question_id
            )
        return answer

    def _arrived(self, asked: events.QuestionAsked, key: bytes | None) -> Generator[Effect, Any, Answer | None]:
        mail: dict[str, bytes] = yield Ask(self._mail, blocking=True)
        return self._read(mail.get(asked.question_id), asked, key)

    def _wait(self, run: Run, asked: events.QuestionAsked, key: bytes | None) -> Generator[Effect, Any, Answer]:
        """Look again and again, until the question expires: then no answer can come any more."""
        assert asked.expires_at is not None
        deadline = time.monotonic() + asked.expires_at - time.time()
        while (left := deadline - time.monotonic()) > 0:
            yield Sleep(min(POLL, left))
            if run.root.alarm and latched(run.chain, "") is not None:
                raise LoopGuardError("the run was stopped before anybody answered")
            answer: Answer | None = yield from self._arrived(asked, key)
            if answer is not None:
                return answer
        last: Answer = yield Ask(self._expire, asked, key, blocking=True)
        return last

    def _expire(self, asked: events.QuestionAsked, key: bytes | None) -> Answer:
        """Close the question in the store, unless an answer was faster."""
        recorder = self._recorder
        late = Answer("timeout", at=time.time())
        codec, run_id, name = recorder.codec, recorder.lease.run_id, asked.question_id
        body = letter(codec, sealed(late, asked, key), name)
        there = recorder.writer.use(lambda journal: journal.post(run_id, name, body))
        return opened(read_letter(codec, there, name), asked, key) or late

    def _park(self, question_id: str, matter: Matter) -> Steps:
        """Stop the run here, for days if need be, once its other calls in flight have come to their end."""
        recorder = self._recorder
        root = recorder.run
        goes_on = "waits for a person, and goes on when it is resumed"
        command = f"loopguard {_VERBS[matter.kind]} {question_id}"
        reason = f"{matter.why}. The run {goes_on}. (For people: {command}{matter.hint})"
        recorder.latch(f"the run {root.name!r} {goes_on}", matter.code)
        with self._changed:
            self._blocked.update(INSIDE.get())
            self._changed.notify_all()
        yield Ask(self._drain, matter.drain, blocking=True)
        guardrail = "journal" if matter.kind == "uncertain" else "Inbox"
        raise ToolCallRefused(matter.code, guardrail, matter.tool or "", reason, None, None, root.name, root.id)

    # -- other calls in flight -------------------------------------------------------------------

    @contextmanager
    def in_flight(self, key: str) -> Iterator[None]:
        """While a generator makes an item; between them it waits for its consumer, who may be parked."""
        self.took_off(key)
        try:
            yield
        finally:
            self.landed(key)

    def took_off(self, key: str) -> None:
        """A body begins, or a model is asked."""
        self._flying.add(key)

    def landed(self, key: str) -> None:
        """It is over."""
        self._flying.discard(key)
        if self._draining:
            with self._changed:
                self._changed.notify_all()

    def _drain(self, limit: float) -> None:
        with self._changed:
            self._draining += 1
            try:
                if not self._changed.wait_for(lambda: self._flying.copy() <= self._blocked, limit):
                    left = len(self._flying - self._blocked)
                    _log.warning("%d calls were still running when the run was parked, %g s later", left, limit)
            finally:
                self._draining -= 1

    # -- what was said before --------------------------------------------------------------------

    def said_before(self, digest: str, key: bytes | None) -> tuple[int, events.QuestionAnswered | None, bool]:
        """Of this exact call, in iterations that are over: how often an Inbox with this key asked about it, what was
        said last, and whether a tool call has come to its end since."""
        recorder = self._recorder
        story = recorder.story
        asked = [
            question
            for question in story.questions.values()
            if question.kind == "approval"
            and (question.digest, question.signer) == (digest, signer_of(key))
            and not recorder.recall.runs_again(question)
        ]
        found = [(question, story.answers.get(question.question_id)) for question in asked]
        answers = [said for question, said in found if said is not None and self._signed(question, said, key)]
        last = max(answers, key=lambda answer: answer.at, default=None)
        ended = [call.finished.at for call in story.calls.values() if call.finished is not None]
        return len(asked), last, last is not None and any(at > last.at for at in ended)

    def unused_yes(self, tool: str, key: bytes | None) -> events.QuestionAsked | None:
        """An approval of this tool, given in the iteration that is run again, that no call has come for yet.

        It is used up by that: a call with other arguments may be the one that was meant, and is refused once.
        """
        story = self._recorder.story
        mail: Mapping[str, bytes] | None = None
        for name, asked in story.questions.items():
            if name in self._used or (asked.kind, asked.tool, asked.signer) != ("approval", tool, signer_of(key)):
                continue
            if asked.call_id in story.calls or not self._recorder.recall.runs_again(asked):
                continue
            answer = story.answers.get(name)
            decision = None if answer is None else answer.decision
            if answer is None:
                mail = self._mail() if mail is None else mail
                found = opened(mail[name], asked, key) if name in mail else None
                decision = None if found is None else found.decision
            if decision in ("approve", "edit"):
                self._used.add(name)
                return asked
        return None


def stop_reason(mail: bytes) -> str:
    """What somebody who stopped the run has said."""
    try:
        return str(json.loads(mail)["reason"])
    except (ValueError, KeyError, TypeError):
        return "stopped by a person"
