"""The contract of journals: SQLite and a list in memory keep it, and it finds those that don't."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from loopguard import Approval, ApproveTool, Guard, Inbox, StopReason, journal, loop, tool
from loopguard.journal import STOP, Journal, Lease, Row, RunInfo
from loopguard.journal._sqlite import SQLiteJournal
from loopguard.testing import Clock, JournalContract
from loopguard.testing.journals import _History
from tests.journal.memory import MemoryJournal


class TestSQLiteJournal(JournalContract):
    """A file."""

    @pytest.fixture(autouse=True)
    def _in(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.made = 0

    def make_journal(self) -> SQLiteJournal:
        self.clock = Clock(1e9)
        self.made += 1
        return SQLiteJournal(str(self.folder / f"{self.made}.db"), clock=self.clock)

    def another(self, journal: Any) -> SQLiteJournal:
        return SQLiteJournal(journal.path, clock=self.clock)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)


class TestMemoryJournal(JournalContract):
    """No database at all."""

    def make_journal(self) -> Journal:
        self.clock = Clock(1e9)
        return MemoryJournal(self.clock)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)


def test_a_loop_is_kept_in_whatever_keeps_the_contract(ran: list[str]) -> None:
    """The reference journal carries a run through a failure, a parked approval and a resume."""
    store = MemoryJournal()

    @tool
    def look(word: str) -> str:
        ran.append(word)
        return word.upper()

    @tool
    def pay(word: str) -> str:
        ran.append(f"pay {word}")
        return f"paid {word}"

    @loop(max=1, store=store, guard=Guard(ApproveTool(Inbox(), only="pay")))
    def step(state: str) -> str:
        found = look("heron")
        if ran == ["heron"]:
            ran.append("failed")
            raise RuntimeError
        return pay(found)

    with pytest.raises(RuntimeError):
        step.run("", run_id="r")
    assert step.resume("r").stop_reason is StopReason.WAITING
    book = journal.open(store)
    (question,) = book.questions()
    book.answer(question.id, Approval.approve())
    assert step.resume("r").value == "paid HERON"
    assert ran == ["heron", "failed", "pay HERON"]
    assert book.verify("r") is None


# -- it can fail -----------------------------------------------------------------------------------


class Unfenced(MemoryJournal):
    """Whoever once had the run may write on."""

    def append(self, batch: Sequence[tuple[Lease, Row]]) -> None:
        for lease, _ in batch:
            run = self.kept.get(lease.run_id)
            if run is not None:
                lease.fence = run.fence
        super().append(batch)


class FencedByNumber(MemoryJournal):
    """A run that was deleted and made again has the same fence."""

    def owned(self, lease: Lease) -> Any:
        run = self.kept.get(lease.run_id)
        return run if run is not None and run.fence == lease.fence else None


class Forgiving(MemoryJournal):
    """Doesn't tell that a lease is lost."""

    def append(self, batch: Sequence[tuple[Lease, Row]]) -> None:
        super().append(batch)
        for lease, _ in batch:
            lease.lost = False


class Strict(MemoryJournal):
    """Takes a commit that is repeated for another holder's."""

    def append(self, batch: Sequence[tuple[Lease, Row]]) -> None:
        for lease, row in batch:
            lease.lost = lease.lost or row.seq <= len(self.rows(lease.run_id))
        super().append([(lease, row) for lease, row in batch if not lease.lost])


class Overwriting(MemoryJournal):
    """The last one who writes a number is right."""

    def append(self, batch: Sequence[tuple[Lease, Row]]) -> None:
        for lease, row in batch:
            run = self.owned(lease)
            if run is not None:
                del run.rows[row.seq - 1 :]
        super().append(batch)


class AllOrNone(MemoryJournal):
    """One lost lease keeps everybody from writing."""

    def append(self, batch: Sequence[tuple[Lease, Row]]) -> None:
        if all(self.owned(lease) for lease, _ in batch):
            return super().append(batch)
        for lease, _ in batch:
            lease.lost = True
        return None


class Eternal(MemoryJournal):
    """A lease never ends."""

    def holder(self, run: Any) -> str | None:
        held: str | None = run.holder
        return held


class Hasty(MemoryJournal):
    """A lease that has run out can't write, though nobody has taken over."""

    def owned(self, lease: Lease) -> Any:
        run = super().owned(lease)
        return run if run is not None and run.ends > self.clock() else None


class Deaf(MemoryJournal):
    """Renews nothing."""

    def renew(self, leases: Iterable[Lease]) -> None:
        pass


class LastWins(MemoryJournal):
    """The second answer replaces the first."""

    def post(self, run_id: str, name: str, body: bytes, instead_of: bytes | None = None) -> bytes:
        self.found(run_id).mail[name] = body
        return body


class Echoing(MemoryJournal):
    """Says that each answer was the first."""

    def post(self, run_id: str, name: str, body: bytes, instead_of: bytes | None = None) -> bytes:
        super().post(run_id, name, body, instead_of)
        return body


class NeverReplacing(MemoryJournal):
    """Forged mail blocks the question for ever."""

    def post(self, run_id: str, name: str, body: bytes, instead_of: bytes | None = None) -> bytes:
        return super().post(run_id, name, body)


class Unstoppable(MemoryJournal):
    """A stop never arrives."""

    def append(self, batch: Sequence[tuple[Lease, Row]]) -> None:
        super().append(batch)
        for lease, _ in batch:
            lease.stop = None


class StopsTwice(MemoryJournal):
    """A stop that was obeyed stops the next one who resumes, too."""

    def release(self, lease: Lease, status: str) -> None:
        run = self.owned(lease)
        stop = run.mail.get(STOP) if run is not None else None
        super().release(lease, status)
        if run is not None and stop is not None:
            run.mail[STOP] = stop


class Releasing(MemoryJournal):
    """Anybody may say how the run ended."""

    def release(self, lease: Lease, status: str) -> None:
        if lease.run_id in self.kept:
            lease = replace(lease, fence=self.kept[lease.run_id].fence, salt=self.kept[lease.run_id].salt)
        super().release(lease, status)


class Forgetful(MemoryJournal):
    """Loses an empty piece of state."""

    def rows(self, run_id: str, after: int = 0) -> list[Row]:
        return [
            row if row.state is None or row.state.middle else replace(row, state=None)
            for row in super().rows(run_id, after)
        ]


class Textual(MemoryJournal):
    """Keeps payloads as text."""

    def rows(self, run_id: str, after: int = 0) -> list[Row]:
        rows = super().rows(run_id, after)
        return [replace(row, payload=row.payload and row.payload.decode("utf-8", "replace").encode()) for row in rows]


class CaseBlind(MemoryJournal):
    """Takes a and A for one run."""

    def acquire(self, run_id: str, name: str, holder: str, *, create: bool) -> Lease:
        return super().acquire(run_id.lower(), name, holder, create=create)


class OldestFirst(MemoryJournal):
    """Lists runs the wrong way round."""

    def runs(self, run_id: str | None = None) -> list[RunInfo]:
        return super().runs(run_id)[::-1]


class Littering(MemoryJournal):
    """Deletes a run, but leaves its mail to the next one of its id."""

    def __init__(self, clock: Any) -> None:
        super().__init__(clock)
        self.left: dict[str, dict[str, bytes]] = {}

    def delete(self, run_id: str) -> None:
        self.left[run_id] = self.mail(run_id)
        super().delete(run_id)

    def acquire(self, run_id: str, name: str, holder: str, *, create: bool) -> Lease:
        lease = super().acquire(run_id, name, holder, create=create)
        self.kept[run_id].mail.update(self.left.pop(run_id, {}))
        return lease


class MakingUp(MemoryJournal):
    """Makes a run where one was to be resumed."""

    def acquire(self, run_id: str, name: str, holder: str, *, create: bool) -> Lease:
        return super().acquire(run_id, name, holder, create=True)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (Unfenced, "a_lease_that_runs_out_can_be_taken_over"),
        (FencedByNumber, "a_deleted_run_is_gone_with_its_rows_and_mail"),
        (Forgiving, "a_released_run_can_be_taken_over_at_once"),
        (Strict, "an_interrupted_commit_is_not_written_twice"),
        (Overwriting, "another_row_of_the_same_number_means_that_the_lease_is_lost"),
        (AllOrNone, "one_lost_lease_does_not_keep_the_others_from_writing"),
        (Eternal, "a_lease_that_runs_out_can_be_taken_over"),
        (Hasty, "a_lease_that_nobody_took_over_is_still_good"),
        (Deaf, "a_renewed_lease_is_kept"),
        (LastWins, "the_first_mail_of_a_name_stays"),
        (Echoing, "of_many_answers_at_once_one_counts"),
        (NeverReplacing, "mail_is_replaced_only_where_it_is_exactly_as_expected"),
        (Unstoppable, "a_stop_reaches_the_holder_with_its_next_commit"),
        (StopsTwice, "mail_waits_for_a_run_that_nobody_drives"),
        (Releasing, "a_former_holder_releases_nothing"),
        (Forgetful, "rows_come_back_to_the_byte_and_in_order"),
        (Textual, "rows_come_back_to_the_byte_and_in_order"),
        (CaseBlind, "runs_whose_ids_look_alike_are_kept_apart"),
        (OldestFirst, "runs_are_listed_the_latest_first"),
        (Littering, "a_deleted_run_is_gone_with_its_rows_and_mail"),
        (MakingUp, "a_run_that_is_not_there_is_not_found"),
    ],
)
def test_a_broken_journal_fails_the_contract(broken: type[MemoryJournal], found: str) -> None:
    """The test that is named after what is broken finds it."""
    assert found in failures(broken)


@pytest.mark.parametrize("broken", [Hasty, LastWins, Unstoppable])
def test_random_histories_find_a_broken_journal_too(broken: type[MemoryJournal]) -> None:
    """Without knowing what to look for."""
    contract = contract_of(broken)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_state_machine_as_test(
            type("History", (_History,), {"contract": contract}),
            settings=settings(max_examples=500, stateful_step_count=30, phases=[Phase.generate], derandomize=True),
        )


def test_the_reference_fails_nothing() -> None:
    """As it is run by the tests of the broken ones."""
    assert failures(MemoryJournal) == set()


def contract_of(kind: type[MemoryJournal]) -> JournalContract:
    """The contract of a journal, outside of pytest."""

    class Contract(JournalContract):
        def make_journal(self) -> Journal:
            self.clock = Clock(1e9)
            return kind(self.clock)

        def advance(self, seconds: float) -> None:
            self.clock.advance(seconds)

    contract = Contract()
    contract._opened = []
    return contract


def failures(kind: type[MemoryJournal]) -> set[str]:
    """The tests of the contract that a journal fails, without the random histories."""
    failed = set()
    for name, test in inspect.getmembers(JournalContract, inspect.isfunction):
        if not name.startswith("test_") or name == "test_any_history_is_kept":
            continue
        for arguments in ((1,), (2,)) if "size" in inspect.signature(test).parameters else ((),):
            try:
                test(contract_of(kind), *arguments)
            except (Exception, pytest.fail.Exception):  # whatever it raises, it isn't passed
                failed.add(name.removeprefix("test_"))
    return failed
