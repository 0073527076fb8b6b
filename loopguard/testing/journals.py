"""JournalContract: what every `Journal` has to do, as tests. Needs pytest and hypothesis."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from loopguard.exceptions import RunConflict, RunNotFound
from loopguard.journal import LEASE, STOP, Delta, Journal, Lease, Row, RunInfo

__all__ = ["JournalContract"]


def _holder(pid: int) -> str:
    """A process of a machine that nothing is known of."""
    return json.dumps({"host": "elsewhere", "pid": pid, "born": None, "id": "0a1b2c3d"})


ANN, BOB = _holder(4711), _holder(4712)


def _row(seq: int, payload: bytes | None = b"{}", state: Delta | None = None) -> Row:
    digest = hashlib.sha256(b"%d %s" % (seq, payload or b"")).digest()
    return Row(seq, b'{"event":"Stopped","n":%d}' % seq, payload, b"s" * 16, digest[::-1], digest, state)


class JournalContract:
    """The conformance suite for journals: subclass it in a test module, and say how to make one.

    ::

        class TestMyJournal(JournalContract):
            def make_journal(self) -> MyJournal:
                self.clock = Clock(1e9)
                return MyJournal(clock=self.clock)

            def advance(self, seconds: float) -> None:
                self.clock.advance(seconds)

    A fixture of yours that runs by itself (``autouse=True``) may put on ``self`` what `make_journal` needs. Journals
    are closed after each test.
    """

    examples = 30
    """How many random histories are tried."""

    def make_journal(self) -> Journal:
        """A new journal without any run; called once for a test, and once for each random history."""
        raise NotImplementedError

    def advance(self, seconds: float) -> None:
        """Let the clock of the journal that was made last go on."""
        raise NotImplementedError

    def another(self, journal: Journal) -> Journal:
        """The same journal, opened once more, as another process would; or the same object."""
        return journal

    @pytest.fixture(autouse=True)
    def _closing(self) -> Any:
        self._opened: list[Journal] = []
        yield
        self._close()

    def _close(self) -> None:
        for journal in {id(each): each for each in self._opened}.values():
            journal.close()

    def _open(self) -> Journal:
        self._opened.append(self.make_journal())
        return self._opened[-1]

    def _again(self, journal: Journal) -> Journal:
        self._opened.append(self.another(journal))
        return self._opened[-1]

    # -- runs and their rows -------------------------------------------------------------------

    def test_a_run_is_made_by_whoever_acquires_it_first(self) -> None:
        """It is running, held, empty and salted; nobody has asked it to stop."""
        journal = self._open()
        lease = journal.acquire("r", "step", ANN, create=True)
        assert (lease.run_id, lease.created, lease.written, lease.lost, lease.stop) == ("r", True, 0, False, None)
        assert len(lease.salt) >= 16
        assert journal.salt("r") == lease.salt
        assert (list(journal.rows("r")), journal.mail("r")) == ([], {})
        (run,) = journal.runs()
        assert (run.run_id, run.name, run.status, run.holder) == ("r", "step", "running", ANN)
        assert run.started_at <= run.updated_at
        assert journal.acquire("s", "step", ANN, create=True).salt != lease.salt

    def test_a_run_that_is_not_there_is_not_found(self) -> None:
        """Who only wants to resume it, write to it or read its salt is told, and no run comes of it."""
        journal = self._open()
        attempts: list[Callable[[], Any]] = [
            lambda: journal.acquire("r", "step", ANN, create=False),
            lambda: journal.salt("r"),
            lambda: journal.post("r", "question", b"yes"),
        ]
        for attempt in attempts:
            with pytest.raises(RunNotFound):
                attempt()
        assert (journal.runs(), list(journal.rows("r")), journal.mail("r")) == ([], [], {})

    def test_rows_come_back_to_the_byte_and_in_order(self) -> None:
        """Bytes that are no text, empty ones, erased ones and states survive; `after` leaves out the first."""
        journal = self._open()
        lease = journal.acquire("r", "step", ANN, create=True)
        rows = [
            _row(1, b"\x00\xff\xfe not text, 'quoted'; \\"),
            _row(2, b"", Delta(None, 0, 0, b"\x00")),
            _row(3, None),
            _row(4, b"x" * 100_000, Delta(2, 10**9, 7, b"")),
            *(_row(seq) for seq in range(5, 13)),
        ]
        rows[2] = Row(3, "{ä\u2028😀}".encode(), None, None, b"h", b"d" * 32)
        journal.append([(lease, rows[0])])
        journal.append([(lease, row) for row in rows[1:]])
        assert not lease.lost
        assert list(journal.rows("r")) == rows
        assert list(journal.rows("r", 9)) == rows[9:]
        assert list(journal.rows("r", 12)) == []

    def test_runs_whose_ids_look_alike_are_kept_apart(self) -> None:
        """Ids are told apart to the letter, case included, and may be 200 characters long."""
        journal = self._open()
        ids = ["a", "A", "a/b", "a:b", "a_b", "a.b", "a-b", "..", "x" * 200, "x" * 199 + "y"]
        leases = [journal.acquire(run_id, "step", ANN, create=True) for run_id in ids]
        journal.append([(lease, _row(1, lease.run_id.encode())) for lease in leases])
        for run_id in ids:
            journal.post(run_id, "question", run_id.encode())
        for run_id in ids:
            assert [row.payload for row in journal.rows(run_id)] == [run_id.encode()]
            assert journal.mail(run_id) == {"question": run_id.encode()}
            assert [run.run_id for run in journal.runs(run_id)] == [run_id]

    def test_runs_are_listed_the_latest_first(self) -> None:
        """With their names; or one of them, or none."""
        journal = self._open()
        for run_id in ("first", "second", "third"):
            journal.acquire(run_id, f"name of {run_id}", ANN, create=True)
            self.advance(1)
        assert [(run.run_id, run.name) for run in journal.runs()] == [
            ("third", "name of third"),
            ("second", "name of second"),
            ("first", "name of first"),
        ]
        assert [run.run_id for run in journal.runs("second")] == ["second"]
        assert journal.runs("fourth") == []

    def test_a_run_says_when_it_was_last_touched(self) -> None:
        """By its holder: `purge` spares what isn't old."""
        journal = self._open()
        lease = journal.acquire("r", "step", ANN, create=True)
        touched = [journal.runs("r")[0].updated_at - journal.runs("r")[0].started_at]
        touches: list[Callable[[], None]] = [lambda: journal.renew([lease]), lambda: journal.release(lease, "error")]
        for touch in touches:
            self.advance(5)
            touch()
            run = journal.runs("r")[0]
            touched.append(run.updated_at - run.started_at)
        assert touched[0] < 5 <= touched[1] < touched[2]

    def test_a_deleted_run_is_gone_with_its_rows_and_mail(self) -> None:
        """Others stay; under its id another can be made, and whoever still holds the old one can't write there."""
        journal = self._open()
        old, other = (journal.acquire(run_id, "step", ANN, create=True) for run_id in ("r", "s"))
        journal.append([(old, _row(1)), (other, _row(1))])
        journal.post("r", "question", b"yes")
        journal.post("s", "question", b"no")
        journal.delete("r")
        assert ([run.run_id for run in journal.runs()], list(journal.rows("r")), journal.mail("r")) == (["s"], [], {})
        assert (list(journal.rows("s")), journal.mail("s")) == ([_row(1)], {"question": b"no"})
        new = journal.acquire("r", "step", BOB, create=True)
        assert (new.created, new.salt != old.salt, list(journal.rows("r")), journal.mail("r")) == (True, True, [], {})
        journal.renew([old])
        assert old.lost
        old.lost = False
        journal.append([(old, _row(1, b"stale"))])
        assert old.lost
        journal.release(old, "until")
        assert (list(journal.rows("r")), journal.runs("r")[0].status) == ([], "running")
        journal.append([(new, _row(1, b"fresh"))])
        assert [row.payload for row in journal.rows("r")] == [b"fresh"]

    # -- leases --------------------------------------------------------------------------------

    def test_a_held_run_is_refused_naming_its_holder(self) -> None:
        """Whether it is to be made or to be resumed, and by the same process too."""
        journal = self._open()
        lease = journal.acquire("r", "step", ANN, create=True)
        for holder in (ANN, BOB):
            for create in (True, False):
                with pytest.raises(RunConflict, match="4711"):
                    self._again(journal).acquire("r", "step", holder, create=create)
        journal.append([(lease, _row(1))])
        assert not lease.lost

    def test_a_released_run_can_be_taken_over_at_once(self) -> None:
        """It shows how it ended until then; rows and salt stay, the fence rises, and nobody holds it between."""
        journal = self._open()
        first = journal.acquire("r", "step", ANN, create=True)
        journal.append([(first, _row(1))])
        journal.release(first, "waiting")
        (run,) = journal.runs()
        assert (run.status, run.holder, list(journal.rows("r"))) == ("waiting", None, [_row(1)])
        second = journal.acquire("r", "step", BOB, create=False)
        assert (second.created, second.salt, second.fence > first.fence) == (False, first.salt, True)
        (run,) = journal.runs()
        assert (run.status, run.holder) == ("running", BOB)
        journal.append([(first, _row(2, b"late"))])
        assert first.lost
        assert list(journal.rows("r")) == [_row(1)]

    def test_a_lease_that_runs_out_can_be_taken_over(self) -> None:
        """Not before; then nothing of the former holder is written, whatever it still tries."""
        journal = self._open()
        old = journal.acquire("r", "step", ANN, create=True)
        journal.append([(old, _row(1))])
        self.advance(LEASE - 1)
        with pytest.raises(RunConflict):
            journal.acquire("r", "step", BOB, create=True)
        self.advance(2)
        assert journal.runs()[0].holder is None
        new = journal.acquire("r", "step", BOB, create=True)
        assert (new.created, new.fence > old.fence) == (False, True)
        journal.append([(old, _row(2, b"old"))])
        assert old.lost
        journal.append([(new, _row(2, b"new"))])
        journal.append([(old, _row(3, b"old")), (old, _row(4, b"old"))])
        assert [row.payload for row in journal.rows("r")] == [b"{}", b"new"]
        assert not new.lost

    def test_a_renewed_lease_is_kept(self) -> None:
        """As long as its holder gives signs of life; one that is lost is told so, and stays lost."""
        journal = self._open()
        lease, other = (journal.acquire(run_id, "step", ANN, create=True) for run_id in ("r", "s"))
        for _ in range(3):
            self.advance(LEASE - 1)
            journal.renew([lease])
        with pytest.raises(RunConflict):
            journal.acquire("r", "step", BOB, create=True)
        taken = journal.acquire("s", "step", BOB, create=True)
        journal.renew([other, lease, taken])
        assert (lease.lost, other.lost, taken.lost) == (False, True, False)
        self.advance(LEASE - 1)
        with pytest.raises(RunConflict, match="4712"):
            journal.acquire("s", "step", ANN, create=True)

    def test_a_lease_that_nobody_took_over_is_still_good(self) -> None:
        """A laptop that slept goes on writing when it wakes up."""
        journal = self._open()
        lease = journal.acquire("r", "step", ANN, create=True)
        self.advance(LEASE * 100)
        journal.append([(lease, _row(1))])
        journal.append([(lease, _row(2)), (lease, _row(3))])
        journal.renew([lease])
        assert not lease.lost
        assert len(list(journal.rows("r"))) == 3
        with pytest.raises(RunConflict):
            journal.acquire("r", "step", BOB, create=True)

    def test_a_former_holder_releases_nothing(self) -> None:
        """What it says of the run's end doesn't count, nor does it take the mail or the lease of its successor."""
        journal = self._open()
        old = journal.acquire("r", "step", ANN, create=True)
        self.advance(LEASE + 1)
        new = journal.acquire("r", "step", BOB, create=True)
        journal.post("r", STOP, b"enough")
        journal.release(old, "until")
        (run,) = journal.runs()
        assert (run.status, run.holder, journal.mail("r")) == ("running", BOB, {STOP: b"enough"})
        journal.append([(new, _row(1))])
        assert not new.lost

    def test_one_lost_lease_does_not_keep_the_others_from_writing(self) -> None:
        """A batch holds rows of all runs of a process."""
        journal = self._open()
        lost, good = (journal.acquire(run_id, "step", ANN, create=True) for run_id in ("r", "s"))
        self.advance(LEASE + 1)
        journal.acquire("r", "step", BOB, create=True)
        journal.append([(good, _row(1)), (lost, _row(1)), (good, _row(2))])
        assert (lost.lost, good.lost) == (True, False)
        assert (list(journal.rows("r")), list(journal.rows("s"))) == ([], [_row(1), _row(2)])

    def test_of_many_at_once_one_gets_the_run(self) -> None:
        """Each through a journal of its own, if there is such a thing; the others are told who has it."""
        journal = self._open()

        def acquire(number: int, mine: Journal) -> Any:
            try:
                return mine.acquire("r", "step", _holder(4700 + number), create=True)
            except RunConflict as exc:
                return exc

        said = self._in_threads(journal, acquire)
        assert len([each for each in said if isinstance(each, Lease)]) == 1, said

    # -- writing twice -------------------------------------------------------------------------

    def test_an_interrupted_commit_is_not_written_twice(self) -> None:
        """Rows that are there to the byte are no conflict, alone or among new ones."""
        journal = self._open()
        lease = journal.acquire("r", "step", ANN, create=True)
        rows = [_row(seq) for seq in range(1, 5)]
        journal.append([(lease, rows[0])])
        journal.append([(lease, rows[0])])
        journal.append([(lease, row) for row in rows[:3]])
        journal.append([(lease, row) for row in rows])
        assert not lease.lost
        assert list(journal.rows("r")) == rows

    @pytest.mark.parametrize("size", [1, 2])
    def test_another_row_of_the_same_number_means_that_the_lease_is_lost(self, size: int) -> None:
        """Nothing that was committed is ever changed."""
        journal = self._open()
        lease = journal.acquire("r", "step", ANN, create=True)
        journal.append([(lease, _row(1, b"first")), (lease, _row(2, b"first"))])
        journal.append([(lease, _row(seq, b"second")) for seq in range(1, size + 1)])
        assert lease.lost
        assert [row.payload for row in journal.rows("r")] == [b"first", b"first"]

    # -- mail ----------------------------------------------------------------------------------

    def test_the_first_mail_of_a_name_stays(self) -> None:
        """Whoever comes later gets what is there; other names and runs are apart, and bytes stay as they are."""
        journal = self._open()
        journal.acquire("r", "step", ANN, create=True)
        journal.acquire("s", "step", ANN, create=True)
        first = b"\x00yes\xff'"
        assert journal.post("r", "question", first) == first
        assert self._again(journal).post("r", "question", b"no") == first
        assert journal.post("r", "other", b"no") == b"no"
        assert journal.post("s", "question", b"maybe") == b"maybe"
        assert (journal.mail("r"), journal.mail("s")) == ({"question": first, "other": b"no"}, {"question": b"maybe"})

    def test_mail_is_replaced_only_where_it_is_exactly_as_expected(self) -> None:
        """Of two that would replace the same, one does, and the other gets what that has left."""
        journal = self._open()
        journal.acquire("r", "step", ANN, create=True)
        journal.post("r", "question", b"forged")
        journal.post("r", "other", b"forged")
        assert journal.post("r", "question", b"yes", b"forge") == b"forged"
        assert journal.post("r", "question", b"yes", b"forged") == b"yes"
        assert journal.post("r", "question", b"no", b"forged") == b"yes"
        assert journal.post("r", "new", b"yes", b"forged") == b"yes"
        assert journal.mail("r") == {"question": b"yes", "other": b"forged", "new": b"yes"}

    def test_mail_waits_for_a_run_that_nobody_drives(self) -> None:
        """It outlives releases and takeovers; only a stop is done with when its run has stopped."""
        journal = self._open()
        lease = journal.acquire("r", "step", ANN, create=True)
        journal.release(lease, "waiting")
        journal.post("r", "question", b"yes")
        journal.post("r", STOP, b"enough")
        again = journal.acquire("r", "step", BOB, create=False)
        assert journal.mail("r") == {"question": b"yes", STOP: b"enough"}
        journal.release(again, "stopped")
        assert journal.mail("r") == {"question": b"yes"}

    @pytest.mark.parametrize("size", [1, 2])
    def test_a_stop_reaches_the_holder_with_its_next_commit(self, size: int) -> None:
        """From another process; its own lease and no other gets the mail, until the run is released."""
        journal = self._open()
        lease, other = (journal.acquire(run_id, "step", ANN, create=True) for run_id in ("r", "s"))
        journal.post("r", "question", b"yes")
        journal.append([(lease, _row(1)), (other, _row(1))])
        assert [each.stop for each in (lease, other)] == [None, None]
        self._again(journal).post("r", STOP, b"enough")
        for turn in (0, 1):
            lease.stop = None
            first = 2 + turn * size
            journal.append([(lease, _row(seq)) for seq in range(first, first + size)])
            journal.append([(other, _row(seq)) for seq in range(first, first + size)])
            assert [each.stop for each in (lease, other)] == [b"enough", None]
        journal.release(lease, "stopped")
        again = journal.acquire("r", "step", BOB, create=False)
        journal.append([(again, _row(2 + 2 * size))])
        assert (again.lost, again.stop) == (False, None)

    def test_of_many_answers_at_once_one_counts(self) -> None:
        """All are told the same."""
        journal = self._open()
        journal.acquire("r", "step", ANN, create=True)
        said = self._in_threads(journal, lambda number, mine: mine.post("r", "question", b"answer %d" % number))
        assert len(set(said)) == 1, said
        assert journal.mail("r") == {"question": said[0]}

    # -- many ----------------------------------------------------------------------------------

    def test_a_journal_is_the_same_for_all_who_open_it(self) -> None:
        """What one has committed the others read, and what another took over is lost for the first."""
        journal = self._open()
        other = self._again(journal)
        lease = journal.acquire("r", "step", ANN, create=True)
        journal.append([(lease, _row(1))])
        assert (list(other.rows("r")), other.salt("r")) == ([_row(1)], lease.salt)
        self.advance(LEASE + 1)
        taken = other.acquire("r", "step", BOB, create=False)
        other.append([(taken, _row(2))])
        journal.append([(lease, _row(2, b"stale"))])
        assert lease.lost
        assert list(journal.rows("r")) == [_row(1), _row(2)]

    def _in_threads(self, journal: Journal, work: Callable[[int, Journal], Any], count: int = 8) -> list[Any]:
        """What the work gave in so many threads at once; a journal that they share is used by one at a time."""
        journals = [self._again(journal) for _ in range(count)]
        locks = {id(mine): threading.Lock() for mine in journals}
        barrier = threading.Barrier(count)
        said: list[Any] = []

        def run(number: int, mine: Journal) -> None:
            barrier.wait(30)
            with locks[id(mine)]:
                said.append(work(number, mine))

        threads = [threading.Thread(target=run, args=each) for each in enumerate(journals)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(said) == count, "a thread failed, see above"
        return said

    def test_any_history_is_kept(self) -> None:
        """Any order of holders, commits, stops, mail, deletions and passing time, against a plain list."""
        run_state_machine_as_test(
            type("History", (_History,), {"contract": self}),
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )


@dataclass
class _Run:
    """What a journal should say of a run."""

    salt: bytes
    holder: str | None
    ends: float
    token: int
    status: str = "running"
    rows: list[Row] = field(default_factory=list)
    mail: dict[str, bytes] = field(default_factory=dict)


_IDS = st.sampled_from(["r", "s"])
_SAID = st.sampled_from([b"yes", b"no"])


class _History(RuleBasedStateMachine):
    """What a journal should say, after everything that was done to it."""

    contract: JournalContract
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.journal = self.contract._open()
        self.now = 0.0
        self.runs: dict[str, _Run] = {}
        self.tokens: dict[int, int] = {}
        """Which of all acquisitions a lease comes from."""
        self.kept: list[Lease] = []
        """So that no id of a lease is given twice."""
        self.written = 0

    def teardown(self) -> None:
        self.contract._opened.remove(self.journal)
        self.journal.close()

    def owned(self, lease: Lease) -> _Run | None:
        """Its run, if nobody has taken over."""
        run = self.runs.get(lease.run_id)
        return run if run is not None and run.token == self.tokens[id(lease)] else None

    @rule(target=leases, run_id=_IDS, holder=st.sampled_from([ANN, BOB]), create=st.booleans())
    def acquire(self, run_id: str, holder: str, create: bool) -> Any:
        run = self.runs.get(run_id)
        if run is None and not create:
            with pytest.raises(RunNotFound):
                self.journal.acquire(run_id, "step", holder, create=create)
            return multiple()
        if run is not None and run.holder is not None and run.ends > self.now:
            with pytest.raises(RunConflict):
                self.journal.acquire(run_id, "step", holder, create=create)
            return multiple()
        lease = self.journal.acquire(run_id, "step", holder, create=create)
        assert lease.created is (run is None)
        if run is None:
            run = self.runs[run_id] = _Run(lease.salt, holder, 0, 0)
        assert lease.salt == run.salt
        run.holder, run.ends, run.status = holder, self.now + LEASE, "running"
        self.kept.append(lease)
        self.tokens[id(lease)] = run.token = len(self.kept)
        return lease

    @rule(batch=st.lists(st.tuples(leases, st.integers(1, 2)), min_size=1, max_size=3), twice=st.booleans())
    def append(self, batch: list[tuple[Lease, int]], twice: bool) -> None:
        rows: list[tuple[Lease, Row]] = []
        added: dict[str, list[Row]] = {}
        for lease, count in batch:
            run = self.owned(lease)
            new = added.setdefault(lease.run_id, [])
            for _ in range(count):
                self.written += 1
                there = len(run.rows) + len(new) if run is not None else 0
                row = _row(there + 1, b"%d" % self.written)
                rows.append((lease, row))
                if run is not None:
                    new.append(row)
        for lease, _ in batch:
            lease.lost, lease.stop = False, None
        for _ in range(1 + twice):
            self.journal.append(rows)
        for lease, _ in batch:
            run = self.owned(lease)
            assert lease.lost is (run is None)
            assert lease.stop == (None if run is None else run.mail.get(STOP))
        for run_id, new in added.items():
            if new:
                self.runs[run_id].rows += new

    @rule(chosen=st.lists(leases, min_size=1, max_size=3))
    def renew(self, chosen: list[Lease]) -> None:
        for lease in chosen:
            lease.lost = False
        self.journal.renew(chosen)
        for lease in chosen:
            run = self.owned(lease)
            assert lease.lost is (run is None)
            if run is not None and run.holder is not None:
                run.ends = self.now + LEASE

    @rule(lease=leases, status=st.sampled_from(["until", "waiting"]))
    def release(self, lease: Lease, status: str) -> None:
        self.journal.release(lease, status)
        run = self.owned(lease)
        if run is not None:
            run.holder, run.ends, run.status = None, 0, status
            run.mail.pop(STOP, None)

    @rule(run_id=_IDS, name=st.sampled_from(["question", STOP]), body=_SAID, before=st.none() | _SAID)
    def post(self, run_id: str, name: str, body: bytes, before: bytes | None) -> None:
        run = self.runs.get(run_id)
        if run is None:
            with pytest.raises(RunNotFound):
                self.journal.post(run_id, name, body, before)
            return
        if run.mail.get(name) in (None, before):
            run.mail[name] = body
        assert self.journal.post(run_id, name, body, before) == run.mail[name]

    @rule(run_id=_IDS)
    def delete(self, run_id: str) -> None:
        if run_id in self.runs:
            self.journal.delete(run_id)
            del self.runs[run_id]

    @rule(seconds=st.sampled_from([1.5, LEASE - 0.5, LEASE + 0.5]))
    def wait(self, seconds: float) -> None:
        self.contract.advance(seconds)
        self.now += seconds

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        listed: Sequence[RunInfo] = self.journal.runs()
        assert {run.run_id for run in listed} == set(self.runs)
        for info in listed:
            run = self.runs[info.run_id]
            holder = run.holder if run.ends > self.now else None
            assert (info.status, info.holder) == (run.status, holder), info
            assert list(self.journal.rows(info.run_id)) == run.rows
            assert self.journal.mail(info.run_id) == run.mail
