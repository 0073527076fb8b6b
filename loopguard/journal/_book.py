"""OpenJournal: a journal as people and programs read it: runs, events, questions, checks and exports."""

from __future__ import annotations

import builtins
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from loopguard._approval import Approval, read_answer
from loopguard._config import Codec, check_codec, settings
from loopguard._events import Event, QuestionAsked
from loopguard.exceptions import AlreadyDecided, JournalError, LoopGuardError, RunConflict, RunNotFound
from loopguard.journal._answers import Answer, Question, answered, check_key, opened, sealed, signer_of
from loopguard.journal._at_rest import letter, read_letter
from loopguard.journal._codec import shown
from loopguard.journal._export import TORN, line, records
from loopguard.journal._fold import Story, fold
from loopguard.journal._open import check_store, writer_of
from loopguard.journal._protocol import STOP, Journal, Row, RunInfo
from loopguard.journal._rows import PAYLOAD, Stored, first_broken, read_events
from loopguard.journal._states import State
from loopguard.journal._writer import Writer
from loopguard.redaction import redact_error

__all__ = ["OpenJournal", "Reading", "open"]

_UNFINISHED = ("running", "waiting", "error", "cancelled")
"""The states of runs that may go on."""


def open(  # noqa: A001  # journal.open reads like gzip.open
    url: str | Journal, key: bytes | None = None, codec: Codec | None = None
) -> OpenJournal:
    """The journal at a URL, such as ``sqlite:///runs.db``. ``key`` signs answers: give the one that the Inbox has.

    ``codec`` reads what was encrypted, and encrypts answers; by default the one given to `configure`. Without it runs
    can still be listed, verified, exported, stopped and deleted.

    Raises ConfigurationError for what is no store, and JournalError for a file that can't be read.
    """
    checked = check_key(key, "journal.open(key=…)")
    return OpenJournal(check_store(url, "journal.open(url"), checked, check_codec(codec, "journal.open(codec"))


class OpenJournal:
    """See `open`."""

    def __init__(self, store: Any, key: bytes | None = None, codec: Codec | None = None) -> None:
        self._writer = writer_of(store)
        self._key = key
        self._codec = codec if codec is not None else settings.codec
        self._writer.use(lambda journal: None)  # what can't be opened says so now

    def runs(self) -> list[RunInfo]:
        """All runs, the latest first."""
        return self._writer.use(lambda journal: journal.runs())

    def events(self, run_id: str) -> list[Event]:
        """Everything that happened in a run, in order, payloads as plain JSON data. Raises RunNotFound."""
        return [_plain(event) for event in read_events(self._rows(run_id), self._codec)]

    def run(self, run_id: str) -> RunInfo:
        """One run, as `runs` lists it. Raises RunNotFound."""
        found = self._writer.use(lambda journal: journal.runs(run_id))
        if not found:
            raise RunNotFound(f"there is no run {run_id!r}")
        return found[0]

    def reading(self, run_id: str) -> Reading:
        """What happens in a run, as it is written: for who follows a run that another process drives."""
        self.run(run_id)
        return Reading(self._writer, run_id, self._codec)

    def story(self, run_id: str) -> Story:
        """What those events come to: counters, iterations, calls."""
        return fold(read_events(self._rows(run_id), self._codec))

    # -- questions -------------------------------------------------------------------------------

    def questions(self, status: str = "pending") -> list[Question]:
        """The questions of runs that go on or wait, the oldest first: ``pending``, ``answered`` or ``expired`` ones.

        ``all`` gives those of runs that are over, too.
        """
        if status not in ("pending", "answered", "expired", "all"):
            raise JournalError(f"questions(status={status!r}): ask for pending, answered, expired or all")
        found = [
            question
            for run in self.runs()
            if status == "all" or run.status in _UNFINISHED
            for question, _ in self._asked(run)
            if status in ("all", question.status)
        ]
        return sorted(found, key=lambda question: question.asked_at)

    def question(self, question_id: str) -> Question:
        """One question. JournalError where there is none: its run may be gone."""
        return self._find(question_id)[1]

    def answer(
        self, question_id: str, answer: Any, *, result: Any = None, by: str | None = None, allow_hidden: bool = False
    ) -> Question:
        """Answer a question, once; the run takes the answer up where it waits, or when it is resumed.

        - an approval or a budget's extension: an `Approval`, or True, False or ``(bool, reason)``;
        - an uncertain call: ``"ran"``, with the ``result`` that it returned, or ``"not_run"``;
        - an input: the value, as JSON data.

        ``by`` says who answered, as they say themselves. Where something in the question is hidden, a yes needs
        ``allow_hidden=True``. Raises AlreadyDecided the second time and when it has expired, RunConflict when its run
        is over, and JournalError for a question that isn't there, and an answer that doesn't fit it.
        """
        run, question, asked = self._find(question_id)
        said = _read(question, answer, result, by)
        if asked.signer not in (None, signer_of(self._key)):
            raise JournalError(
                f"only an answer that is signed with the Inbox's key counts for {question_id}: give it to "
                f"journal.open(url, key=…) (--key-file)"
            )
        if question.hidden and said.decision in ("approve", "edit") and not allow_hidden:
            raise JournalError(
                f"something in {question_id} is hidden, and a yes would be about what can't be seen: look at the "
                f"arguments elsewhere, and approve with allow_hidden=True (--allow-hidden)"
            )
        if question.answer is not None:
            raise AlreadyDecided(f"{question_id} was answered already: {_told(question.answer)}")
        if question.status == "expired":
            raise AlreadyDecided(f"{question_id} has expired: nobody answered in time, and the call was refused")
        if run.status not in _UNFINISHED:
            raise RunConflict(f"the run {run.run_id!r} is over ({run.status}): nothing waits for this answer")
        body = letter(self._codec, sealed(said, asked, self._key), question_id)
        before = self._writer.use(lambda journal: journal.mail(run.run_id)).get(question_id)
        if before is not None and self._opened(before, asked) is not None:
            before = None  # only what isn't an answer, by this key, may be replaced
        there = self._writer.use(lambda journal: journal.post(run.run_id, question_id, body, before))
        if there != body:
            other = self._opened(there, asked)
            raise AlreadyDecided(f"{question_id} was answered already: {_told(other) if other else 'by somebody'}")
        return replace(question, status="answered", answer=said)

    def stop(
        self, run_id: str | None = None, reason: str = "stopped by a person", *, by: str | None = None
    ) -> list[str]:
        """Ask a run to stop, or (None) all that are under way; their ids.

        The process that drives it notices at its next step; one that nobody drives ends as soon as it is resumed.
        """
        runs = self.runs()
        if run_id is not None:
            runs = [run for run in runs if run.run_id == run_id]
            if not runs:
                raise RunNotFound(f"there is no run {run_id!r}")
            if runs[0].status not in _UNFINISHED:
                raise RunConflict(f"the run {run_id!r} is over ({runs[0].status}): there is nothing to stop")
        body = letter(self._codec, shown({"reason": reason, "by": by, "at": time.time()}), STOP)
        stopped = [run.run_id for run in runs if run.status in _UNFINISHED]
        for name in stopped:
            self._writer.use(lambda journal, name=name: journal.post(name, STOP, body))  # type: ignore[misc]  # bound now
        return stopped

    def _find(self, question_id: str) -> tuple[RunInfo, Question, QuestionAsked]:
        for run in self.runs():
            for question, asked in self._asked(run):
                if question.id == question_id:
                    return run, question, asked
        raise JournalError(
            f"there is no question {question_id!r}: look at the id again (loopguard pending); or its run was deleted"
        )

    def _opened(self, stored: bytes, asked: QuestionAsked) -> Answer | None:
        return opened(read_letter(self._codec, stored, asked.question_id), asked, self._key)

    def _asked(self, run: RunInfo) -> list[tuple[Question, QuestionAsked]]:
        """The questions of one run, with what was said of them: in its journal, or by mail."""
        story = self.story(run.run_id)
        mail = self._writer.use(lambda journal: journal.mail(run.run_id)) if story.questions else {}
        found = []
        for name, asked in story.questions.items():
            event = story.answers.get(name)
            if event is not None:
                answer: Answer | None = answered(event)
            else:
                answer = self._opened(mail[name], asked) if name in mail else None
            found.append((Question.of(asked, run.run_id, run.name, answer), asked))
        return found

    # -- checks and copies -----------------------------------------------------------------------

    def verify(self, run_id: str) -> int | None:
        """None if the chain of the run's events is whole, else the number of the first event that isn't as written."""
        return first_broken(run_id, self._rows(run_id))

    def export(self, path: str | os.PathLike[str], run_id: str | None = None) -> int:
        """Append the events of a run, or of all runs, to a JSON Lines file, each once; how many were added.

        A last line that was torn by a crash is left as it is, and ends before the first new one.
        """
        target = Path(path)
        torn: list[int] = []
        done = {(record["run_id"], record["seq"]) for record in records(target, torn)} if target.exists() else set()
        names = [run_id] if run_id is not None else [run.run_id for run in reversed(self.runs())]
        added = 0
        with builtins.open(target, "ab", opener=_private) as file:
            if file.tell() and not target.read_bytes().endswith(b"\n"):
                ends_torn = bool(torn) and torn[-1] == target.read_bytes().count(b"\n") + 1
                file.write(b"\n" + (TORN + b"\n" if ends_torn else b""))
            for name in names:
                for row in self._rows(name):
                    if (name, row.seq) not in done:
                        file.write(line(name, row))
                        added += 1
            file.flush()
            os.fsync(file.fileno())
        return added

    def purge(self, older_than: float) -> list[str]:
        """Delete the runs that are over and were last touched more than this many seconds ago; their ids.

        Runs that are pending, wait for a person or are being driven stay.
        """
        before = time.time() - older_than
        gone = []
        for run in self.runs():
            over = run.status not in _UNFINISHED and run.holder is None
            if over and run.updated_at < before:
                self.delete(run.run_id)
                gone.append(run.run_id)
        return gone

    def delete(self, run_id: str) -> None:
        """Delete one run, whatever became of it. Raises RunConflict while it is being driven, and RunNotFound."""
        if self.run(run_id).holder is not None:
            raise RunConflict(f"the run {run_id!r} is being driven: it can't be deleted now")
        self._writer.use(lambda journal: journal.delete(run_id))

    def close(self) -> None:
        """Let go of the file, for this whole process; it is opened again when something is read or written."""
        self._writer.close()

    def _rows(self, run_id: str) -> list[Row]:
        def work(journal: Journal) -> list[Row]:
            journal.salt(run_id)  # RunNotFound
            return list(journal.rows(run_id))

        return self._writer.use(work)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # what is made here is as private as a store


class Reading:
    """The events of one run, a part at a time."""

    def __init__(self, writer: Writer, run_id: str, codec: Codec | None) -> None:
        self._writer = writer
        self._codec = codec
        self._run_id = run_id
        self._after = 0
        self._states: dict[int, State] = {}

    def read(self) -> list[Event]:
        """What was committed since it was last asked; payloads as they are stored."""
        rows = self._writer.use(lambda journal: list(journal.rows(self._run_id, self._after)))
        if rows:
            self._after = rows[-1].seq
        return list(read_events(rows, self._codec, self._states))


def _read(question: Question, said: Any, result: Any, by: str | None) -> Answer:
    """What was said, if it fits the question. JournalError otherwise."""
    kind, now = question.kind, time.time()
    if kind in ("approval", "extension"):
        try:
            return Answer.of(read_answer(said), by)
        except LoopGuardError:
            raise JournalError(
                f"{question.id} is an {kind}: answer with Approval.approve(), .deny(reason) or .edit(arguments); in a "
                f"shell, loopguard approve or deny"
            ) from None
    if kind == "input":
        if isinstance(said, Approval):
            raise JournalError(
                f"{question.id} asks for a value, not for a yes or no: answer with the value; in a shell, loopguard "
                f"answer {question.id} VALUE"
            )
        return Answer("given", result=_json(said, question), by=by, at=now)
    if said not in ("ran", "not_run"):
        raise JournalError(
            f"{question.id} is about a call that may have run: answer 'ran', with its result, or 'not_run'"
        )
    return Answer(said, result=_json(result, question) if said == "ran" else None, by=by, at=now)


def _json(value: Any, question: Question) -> Any:
    """The value as the run will read it. JournalError where JSON has nothing for it."""
    try:
        return from_json(to_json(value, inf_nan_mode="strings", bytes_mode="base64"))
    except ValueError as exc:
        raise JournalError(f"{question.id} is answered with JSON data: {redact_error(exc)}") from None


def _told(answer: Answer) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(answer.at))
    return f"{answer.decision}{f' by {answer.by}' if answer.by else ''}, {when}"


def _plain(event: Event) -> Event:
    """The event with its payloads as plain JSON data."""
    changes: dict[str, Any] = {}
    for name in PAYLOAD & set(event.__dataclass_fields__):
        value = getattr(event, name)
        if isinstance(value, Stored):
            changes[name] = value.show()
        elif name == "verdict" and value is not None and isinstance(value.value, Stored):
            changes[name] = replace(value, value=value.value.show())
    return replace(event, **changes) if changes else event
