"""OpenJournal: a journal as people and programs read it: runs, events, questions, checks and exports."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from loopguard._events import Event, QuestionAnswered, QuestionAsked
from loopguard.exceptions import AlreadyDecided, JournalError, RunConflict, RunNotFound
from loopguard.journal._codec import shown
from loopguard.journal._export import TORN, line, records
from loopguard.journal._fold import Story, fold
from loopguard.journal._holders import me
from loopguard.journal._open import check_store, writer_of
from loopguard.journal._protocol import Journal, Row, RunInfo
from loopguard.journal._rows import PAYLOAD, Stored, first_broken, first_link, read_events, write_event
from loopguard.journal._states import State
from loopguard.journal._writer import Writer

__all__ = ["OpenJournal", "open"]

_LIVE = ("running", "waiting")


def open(  # noqa: A001  # journal.open reads like gzip.open
    url: str | Journal, key: bytes | None = None
) -> OpenJournal:
    """The journal at a URL, such as ``sqlite:///runs.db``. ``key`` will sign answers; it isn't used yet.

    Raises ConfigurationError for what is no store, and JournalError for a file that can't be read.
    """
    return OpenJournal(check_store(url, "journal.open(url"))


class OpenJournal:
    """See `open`."""

    def __init__(self, store: Any) -> None:
        self._writer = writer_of(store)
        self._writer.use(lambda journal: None)  # what can't be opened says so now

    def runs(self) -> list[RunInfo]:
        """All runs, the latest first."""
        return self._writer.use(lambda journal: journal.runs())

    def events(self, run_id: str) -> list[Event]:
        """Everything that happened in a run, in order, payloads as plain JSON data. Raises RunNotFound."""
        return [_plain(event) for event in read_events(self._rows(run_id))]

    def run(self, run_id: str) -> RunInfo:
        """One run, as `runs` lists it. Raises RunNotFound."""
        found = self._writer.use(lambda journal: journal.runs(run_id))
        if not found:
            raise RunNotFound(f"there is no run {run_id!r}")
        return found[0]

    def reading(self, run_id: str) -> Reading:
        """What happens in a run, as it is written: for who follows a run that another process drives."""
        self.run(run_id)
        return Reading(self._writer, run_id)

    def story(self, run_id: str) -> Story:
        """What those events come to: counters, iterations, calls."""
        return fold(read_events(self._rows(run_id)))

    def questions(self, status: str = "pending") -> list[QuestionAsked]:
        """The questions of runs that wait for a person: ``pending`` ones, ``answered`` ones, or ``all``."""
        if status not in ("pending", "answered", "all"):
            raise JournalError(f"questions(status={status!r}): ask for pending, answered or all")
        found: list[QuestionAsked] = []
        for run in reversed(self.runs()):
            if status == "pending" and run.status not in _LIVE:
                continue
            story = self.story(run.run_id)
            for question_id, question in story.questions.items():
                if status == "all" or (question_id in story.answers) == (status == "answered"):
                    found.append(_plain(question))  # type: ignore[arg-type]  # of the same class
        return found

    def answer(self, question_id: str, decision: str, *, result: Any = None, by: str | None = None) -> None:
        """Say what became of an uncertain call: ``ran``, with the result that it returned, or ``not_run``.

        A call that has run is answered with that result when the run is resumed, one that hasn't is run then.
        Raises AlreadyDecided the second time, and RunConflict while the run is being driven.
        """
        if decision not in ("ran", "not_run"):
            raise JournalError(f"answer({decision!r}): say 'ran' or 'not_run'")
        run_id, question, story = self._question(question_id)
        if question_id in story.answers:
            raise AlreadyDecided(f"{question_id} was answered already: {story.answers[question_id].decision}")
        arguments = {"result": result} if decision == "ran" else None
        said = QuestionAnswered(
            run_id=question.run_id,
            at=time.time(),
            iteration=question.iteration,
            question_id=question_id,
            kind=question.kind,
            tool=question.tool,
            decision=decision,
            by=by,
            arguments=arguments,
        )
        self._append(run_id, said)

    def _question(self, question_id: str) -> tuple[str, QuestionAsked, Story]:
        for run in self.runs():
            story = self.story(run.run_id)
            if question_id in story.questions:
                return run.run_id, story.questions[question_id], story
        raise JournalError(f"there is no question {question_id!r}")

    def _append(self, run_id: str, event: QuestionAnswered) -> None:
        """Add an event to a run that nobody drives, under a lease of its own."""

        def work(journal: Journal) -> None:
            status = next(run.status for run in journal.runs() if run.run_id == run_id)
            lease = journal.acquire(run_id, "", me(), create=False)
            try:
                rows = list(journal.rows(run_id))
                if any(_is_answer(one, event.question_id) for one in read_events(rows)):
                    raise AlreadyDecided(f"{event.question_id} was answered already")
                seq, before = (rows[-1].seq, rows[-1].digest) if rows else (0, first_link(run_id))
                payload = {} if event.arguments is None else {"arguments": shown(event.arguments)}
                journal.append([(lease, write_event(event, seq + 1, before, payload, None, {}))])
            finally:
                journal.release(lease, status)

        self._writer.use(work)

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
        with target.open("ab") as file:
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
            over = run.status not in (*_LIVE, "error", "cancelled") and run.holder is None
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


class Reading:
    """The events of one run, a part at a time."""

    def __init__(self, writer: Writer, run_id: str) -> None:
        self._writer = writer
        self._run_id = run_id
        self._after = 0
        self._states: dict[int, State] = {}

    def read(self) -> list[Event]:
        """What was committed since it was last asked; payloads as they are stored."""
        rows = self._writer.use(lambda journal: list(journal.rows(self._run_id, self._after)))
        if rows:
            self._after = rows[-1].seq
        return list(read_events(rows, self._states))


def _is_answer(event: Event, question_id: str) -> bool:
    return isinstance(event, QuestionAnswered) and event.question_id == question_id


def _plain(event: Event) -> Event:
    """The event with its payloads as plain JSON data."""
    changes: dict[str, Any] = {}
    for name in PAYLOAD & set(event.__dataclass_fields__):
        value = getattr(event, name)
        if isinstance(value, Stored):
            changes[name] = value.show()
        elif name == "verdict" and isinstance(value.value, Stored):
            changes[name] = replace(value, value=value.value.show())
    return replace(event, **changes) if changes else event
