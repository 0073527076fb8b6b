"""The SQLite store: leases, fencing, the chain, and what is said when the file or the disk fails."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sqlite3
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopguard import JournalError, LeaseLost, Run, RunConflict, journal, loop, tool
from loopguard._events import Stopped
from loopguard.journal._holders import is_gone, me
from loopguard.journal._protocol import LEASE, Lease, Row
from loopguard.journal._rows import first_link, write_event
from loopguard.journal._sqlite import SQLiteJournal
from loopguard.journal._writer import Writer
from loopguard.testing import Clock


def row(run_id: str, seq: int, before: bytes | None = None, reason: bytes = b'"because"') -> Row:
    """An event of a run."""
    event = Stopped(run_id=run_id, at=1.0, code="stopped", reason="because")
    return write_event(event, seq, before or first_link(run_id), {"reason": reason}, None, {})


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file that isn't there yet."""
    return str(tmp_path / "runs.db")


def test_the_file_is_for_its_owner_alone(path: str) -> None:
    """Mode 0600, also that of the files beside it; they hold what people said."""
    store = SQLiteJournal(path)
    lease = store.acquire("r", "step", me(), create=True)
    store.append([(lease, row("r", 1))])
    for name in (path, f"{path}-wal", f"{path}-shm"):
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o600
    store.close()


def test_a_held_run_is_refused_naming_the_holder(path: str) -> None:
    """A second process, here a second holder, is told who drives the run."""
    store = SQLiteJournal(path)
    store.acquire("r", "step", me(), create=True)
    with pytest.raises(RunConflict, match=f"process {os.getpid()} on "):
        store.acquire("r", "step", me(), create=True)
    store.close()


def test_a_lost_lease_can_not_commit(path: str) -> None:
    """Fencing: once another holder has taken over, nothing of the former one is written, whatever it still tries."""
    clock = Clock(1000.0)
    store = SQLiteJournal(path, clock=clock)
    old = store.acquire("r", "step", me(), create=True)
    store.append([(old, first := row("r", 1))])
    clock.advance(LEASE + 1)
    new = store.acquire("r", "step", me(), create=True)
    assert new.fence > old.fence
    store.append([(old, row("r", 2, first.digest, b'"old"'))])
    assert old.lost
    store.append([(new, mine := row("r", 2, first.digest, b'"new"'))])
    store.append([(old, row("r", 3, mine.digest)), (old, row("r", 4, mine.digest))])
    assert [each.payload for each in store.rows("r")] == [first.payload, mine.payload]
    store.renew([new])
    assert not new.lost
    store.renew([old])
    assert old.lost
    store.close()


def test_a_renewed_lease_is_kept(path: str) -> None:
    """The heartbeat of a holder that is alive keeps others away past the lease."""
    clock = Clock(1000.0)
    store = SQLiteJournal(path, clock=clock)
    lease = store.acquire("r", "step", me(), create=True)
    clock.advance(LEASE - 1)
    store.renew([lease])
    clock.advance(LEASE - 1)
    with pytest.raises(RunConflict):
        store.acquire("r", "step", me(), create=True)
    store.close()


def test_a_dead_holder_of_this_machine_is_known_to_be_gone() -> None:
    """A run whose process was killed needn't wait for its lease to end; of other machines nothing is known."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        holder = pool.apply(me)
        assert not is_gone(holder)
    pool.join()
    assert is_gone(holder)
    assert not is_gone(me())
    assert not is_gone(holder.replace('"host": "', '"host": "another '))
    assert not is_gone("nonsense")


def test_an_interrupted_commit_is_not_written_twice(path: str) -> None:
    """Rows that are there already, since we were interrupted right after their commit, are no conflict."""
    store = SQLiteJournal(path)
    lease = store.acquire("r", "step", me(), create=True)
    batch = [(lease, row("r", 1))]
    store.append(batch)
    store.append(batch)
    assert not lease.lost
    assert len(store.rows("r")) == 1
    store.close()


def test_verify_names_the_first_event_that_was_changed(store: str) -> None:
    """A changed payload, header, type or order is found; an erased payload isn't damage."""

    @loop(max=3, store=store)
    def step(n: int) -> int:
        return n + 1

    step.run(0, run_id="r")
    book = journal.open(store)
    assert book.verify("r") is None
    db = sqlite3.connect(store.removeprefix("sqlite:///"), isolation_level=None)
    db.execute("UPDATE events SET payload = NULL, salt = NULL, middle = NULL WHERE seq = 4")
    assert book.verify("r") is None
    (original,) = db.execute("SELECT header FROM events WHERE seq = 6").fetchone()
    db.execute("UPDATE events SET header = ? WHERE seq = 6", (original.replace(b'"r"', b'"s"'),))
    assert book.verify("r") == 6
    db.execute("UPDATE events SET header = ? WHERE seq = 6", (original,))
    db.execute("UPDATE events SET middle = X'39' WHERE seq = 5")
    assert book.verify("r") == 5
    db.execute("UPDATE events SET header = CAST(header AS TEXT) WHERE seq = 3")
    assert book.verify("r") == 3
    db.execute("DELETE FROM events WHERE seq = 2")
    assert book.verify("r") == 2
    db.close()


def test_a_newer_schema_is_refused(path: str) -> None:
    """A file of a later version is left alone, and the message says what to do."""
    SQLiteJournal(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(JournalError, match=r"newer loopguard.*upgrade"):
        SQLiteJournal(path)


def test_a_file_that_is_no_database_is_an_error_that_says_so(path: str) -> None:
    """The file is left as it is."""
    Path(path).write_bytes(b"not a database, but long enough to be looked at as one" * 50)
    with pytest.raises(JournalError, match="damaged, or no SQLite file"):
        journal.open(f"sqlite:///{path}")
    assert Path(path).read_bytes().startswith(b"not a database")


def test_a_missing_folder_is_an_error_that_says_so(tmp_path: Path) -> None:
    """No folder is made up."""
    with pytest.raises(JournalError, match="can't be opened"):
        journal.open(f"sqlite:///{tmp_path}/nowhere/runs.db")


@pytest.mark.parametrize(
    ("break_it", "mend_it", "said"),
    [
        ("PRAGMA max_page_count = 1", "PRAGMA max_page_count = 1000000", "disk is full"),
        ("PRAGMA query_only = ON", "PRAGMA query_only = OFF", "read-only"),
    ],
)
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_failing_disk_loses_nothing_in_memory(break_it: str, mend_it: str, said: str, colour: str, path: str) -> None:
    """The waiter is told what to do; once that is done, what was pending is written first."""
    made: list[SQLiteJournal] = []

    def connect() -> SQLiteJournal:
        made.append(SQLiteJournal(path))
        return made[-1]

    writer = Writer(("test", path), connect)
    lease = writer.use(lambda journal: journal.acquire("r", "step", me(), create=True))

    def wait(seq: int) -> None:
        if colour == "async":
            asyncio.run(writer.wait_async(lease, seq))
        else:
            writer.wait(lease, seq)

    before = first_link("r")
    rows = []
    for seq in range(1, 200):
        rows.append(row("r", seq, before, b'"%s"' % (b"x" * 1000)))
        before = rows[-1].digest
    made[0]._db.execute(break_it)
    for each in rows:
        writer.put(lease, each)
    with pytest.raises(JournalError, match=said):
        wait(199)
    made[0]._db.execute(mend_it)
    wait(199)
    assert [each.digest for each in made[0].rows("r")] == [each.digest for each in rows]
    writer.close()


def test_what_waits_in_many_threads_is_committed_together(path: str) -> None:
    """Every waiter finds its own row committed when its wait is over."""
    writer = Writer(("test", path), lambda: SQLiteJournal(path))
    leases = [writer.use(_acquire(f"run-{i}")) for i in range(8)]
    barrier = threading.Barrier(8)
    failed: list[int] = []

    def work(lease: Lease) -> None:
        barrier.wait()
        before = first_link(lease.run_id)
        for seq in range(1, 51):
            made = row(lease.run_id, seq, before)
            before = made.digest
            writer.put(lease, made)
            writer.wait(lease, seq)
            if lease.written < seq:
                failed.append(seq)

    threads = [threading.Thread(target=work, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for lease in leases:
        assert len(list(writer.use(_rows(lease.run_id)))) == 50
    writer.close()


def _acquire(run_id: str) -> Callable[[Any], Lease]:
    return lambda journal: journal.acquire(run_id, "step", me(), create=True)


def _rows(run_id: str) -> Callable[[Any], Any]:
    return lambda journal: journal.rows(run_id)


def test_a_run_that_was_taken_over_is_stopped(store: str) -> None:
    """The first process to lose its lease is told by LeaseLost, and every later call of its run is refused."""
    bodies = []

    @tool
    def work(n: int) -> int:
        bodies.append(n)
        db = sqlite3.connect(store.removeprefix("sqlite:///"), isolation_level=None)
        db.execute("UPDATE runs SET fence = fence + 1")
        db.close()
        return n

    @loop(max=2, store=store)
    def step(n: int) -> int:
        try:
            work(n)
        finally:
            work(n + 10)
        return n

    with pytest.raises(Exception, match="taken over") as failed:
        step.run(1, run_id="r")
    assert isinstance(failed.value, LeaseLost) or isinstance(failed.value.__context__, LeaseLost)
    assert bodies == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_write_its_parents_journal(store: str) -> None:
    """After a fork the child has no run, no lease and no connection; it may open the store afresh."""

    @tool
    def split(n: int) -> int:
        child = os.fork()
        if child == 0:  # pragma: no cover
            status = 1
            try:
                found = journal.open(store).runs()
                status = 0 if [run.run_id for run in found] == ["r"] and Run is not None else 2
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    @loop(max=2, store=store)
    def step(n: int) -> int:
        return n + split(n)

    assert step.run(0, run_id="r").value == 0
    assert journal.open(store).verify("r") is None


def _make(path: str, start: Any, said: Any) -> None:
    start.wait()
    try:
        SQLiteJournal(path).close()
    except JournalError as exc:  # pragma: no cover
        said.put(str(exc))


def test_many_processes_may_make_the_same_store_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of a fleet of workers: each finds the file made, or makes it; none is told that it is locked."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])  # where a child finds this module
    context = multiprocessing.get_context("spawn")
    said = context.SimpleQueue()
    for turn in range(2):
        start = context.Barrier(4)
        makers = [context.Process(target=_make, args=(str(tmp_path / f"{turn}.db"), start, said)) for _ in range(4)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        assert [maker.exitcode for maker in makers] == [0] * 4
    assert said.empty()


def test_start_and_outcome_are_committed_before_they_are_handed_on(store: str) -> None:
    """Seen from another connection: the start when the body runs, the result when its caller has it, the iteration."""
    seen: list[list[str]] = []

    def committed() -> list[str]:
        db = sqlite3.connect(store.removeprefix("sqlite:///"))
        rows = db.execute("SELECT json_extract(header, '$.event') FROM events ORDER BY seq").fetchall()
        db.close()
        return [kind for (kind,) in rows if kind != "Transitioned"]

    @tool
    def work(n: int) -> int:
        seen.append(committed())
        return n + 1

    def until(n: int) -> bool:
        seen.append(committed())
        return True

    @loop(max=2, until=until, store=store)
    def step(n: int) -> int:
        made = work(n)
        seen.append(committed())
        return made

    step.run(0, run_id="r")
    begun = ["RunStarted", "IterationStarted", "ToolStarted"]
    assert seen == [begun, [*begun, "ToolFinished"], [*begun, "ToolFinished", "IterationReturned"]]
    assert committed()[-2:] == ["IterationEnded", "RunEnded"]
