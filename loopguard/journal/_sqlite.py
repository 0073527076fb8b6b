"""The journal in a SQLite file: `sqlite:///runs.db`."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from loopguard._sqlite import explain, open_database, transaction
from loopguard.exceptions import JournalError, RunConflict, RunNotFound
from loopguard.journal._holders import is_gone, said
from loopguard.journal._protocol import LEASE, STOP, Lease, Row, RunInfo
from loopguard.journal._states import Delta

__all__ = ["SQLiteJournal"]

MIGRATIONS = (
    """
    CREATE TABLE runs (
        run_id TEXT PRIMARY KEY, name TEXT NOT NULL, status TEXT NOT NULL, salt BLOB NOT NULL,
        holder TEXT, fence INTEGER NOT NULL, expires REAL NOT NULL, started_at REAL NOT NULL, updated_at REAL NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX runs_by_name ON runs (name, status);
    CREATE TABLE events (
        run_id TEXT NOT NULL, seq INTEGER NOT NULL, header BLOB NOT NULL, payload BLOB, salt BLOB,
        payload_hash BLOB NOT NULL, digest BLOB NOT NULL, base INTEGER, head INTEGER, tail INTEGER, middle BLOB,
        PRIMARY KEY (run_id, seq)
    ) WITHOUT ROWID;
    """,
    """
    CREATE TABLE mail (
        run_id TEXT NOT NULL, name TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (run_id, name)
    ) WITHOUT ROWID;
    """,
)
"""What makes each version of the schema out of the one before; ``PRAGMA user_version`` counts them."""

_INSERT = """
    INSERT OR IGNORE INTO events (run_id, seq, header, payload, salt, payload_hash, digest, base, head, tail, middle)
    SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?
    WHERE EXISTS (SELECT 1 FROM runs WHERE run_id = ? AND fence = ? AND salt = ?)
    RETURNING (SELECT body FROM mail WHERE mail.run_id = events.run_id AND name = 'stop')
"""


class SQLiteJournal:
    """See `Journal`. WAL; ``durability`` is about power loss only: see `loopguard.journal`."""

    def __init__(self, path: str, durability: str = "normal", clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        with self._explained():
            self._db = open_database(path, durability)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        db = self._db
        version = self._version()
        if version > len(MIGRATIONS):
            raise JournalError(
                f"{self.path} was written by a newer loopguard (schema {version}, this one knows {len(MIGRATIONS)}): "
                f"upgrade loopguard, or name another store"
            )
        if version < len(MIGRATIONS):
            with transaction(self._db):
                for number in range(self._version(), len(MIGRATIONS)):  # another process may have been faster
                    for statement in filter(str.strip, MIGRATIONS[number].split(";")):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {number + 1}")

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's errors as JournalErrors that say what to do."""
        try:
            yield
        except (sqlite3.Error, OSError) as exc:
            raise JournalError(f"{self.path}: {explain(exc)} ({exc})") from exc

    # -- leases ----------------------------------------------------------------------------------

    def acquire(self, run_id: str, name: str, holder: str, *, create: bool) -> Lease:
        """See `Journal`."""
        with self._explained(), transaction(self._db):
            db, now = self._db, self._clock()
            found = db.execute("SELECT holder, fence, expires, salt FROM runs WHERE run_id = ?", (run_id,)).fetchone()
            if found is None:
                if not create:
                    raise RunNotFound(f"{self.path} has no run {run_id!r}")
                salt = os.urandom(16)
                db.execute(
                    "INSERT INTO runs VALUES (?, ?, 'running', ?, ?, 1, ?, ?, ?)",
                    (run_id, name, salt, holder, now + LEASE, now, now),
                )
                return Lease(run_id, 1, salt, True)
            other, fence, expires, salt = found
            if other is not None and expires > now and not is_gone(other):
                raise RunConflict(
                    f"the run {run_id!r} is being driven by {said(other)}; its lease ends in {expires - now:.0f} s "
                    f"unless it is renewed"
                )
            db.execute(
                "UPDATE runs SET holder = ?, fence = ?, expires = ?, status = 'running', updated_at = ? "
                "WHERE run_id = ?",
                (holder, fence + 1, now + LEASE, now, run_id),
            )
            return Lease(run_id, fence + 1, salt, False)

    def renew(self, leases: Iterable[Lease]) -> None:
        """See `Journal`."""
        with self._explained(), transaction(self._db):
            now = self._clock()
            for lease in leases:
                done = self._db.execute(
                    "UPDATE runs SET expires = ?, updated_at = ? WHERE run_id = ? AND fence = ? AND salt = ?",
                    (now + LEASE, now, lease.run_id, lease.fence, lease.salt),
                )
                lease.lost = lease.lost or done.rowcount == 0

    def release(self, lease: Lease, status: str) -> None:
        """See `Journal`."""
        with self._explained(), transaction(self._db):
            done = self._db.execute(
                "UPDATE runs SET holder = NULL, expires = 0, status = ?, updated_at = ? "
                "WHERE run_id = ? AND fence = ? AND salt = ?",
                (status, self._clock(), lease.run_id, lease.fence, lease.salt),
            )
            if done.rowcount:  # whoever asked it to stop has what they wanted
                self._db.execute("DELETE FROM mail WHERE run_id = ? AND name = ?", (lease.run_id, STOP))

    # -- writing ---------------------------------------------------------------------------------

    def append(self, batch: Sequence[tuple[Lease, Row]]) -> None:
        """See `Journal`."""
        with self._explained():
            if len(batch) == 1:  # the commonest case: one statement is a transaction of its own
                done = self._insert(*batch[0])
                lost = [] if done else [batch[0]]
            else:
                with transaction(self._db):
                    lost = [(lease, row) for lease, row in batch if not self._insert(lease, row)]
            for lease, row in lost:
                # either it is there already (we were interrupted after the commit), or somebody else drives the run
                found = self._db.execute(
                    "SELECT digest FROM events WHERE run_id = ? AND seq = ?", (lease.run_id, row.seq)
                ).fetchone()
                lease.lost = lease.lost or found is None or found[0] != row.digest

    def _insert(self, lease: Lease, row: Row) -> bool:
        state = row.state
        delta = (None, None, None, None) if state is None else (state.base, state.head, state.tail, state.middle)
        values = (lease.run_id, row.seq, row.header, row.payload, row.salt, row.payload_hash, row.digest, *delta)
        done = self._db.execute(_INSERT, (*values, lease.run_id, lease.fence, lease.salt)).fetchall()
        if done and done[0][0] is not None:
            lease.stop = bytes(done[0][0])
        return bool(done)

    def delete(self, run_id: str) -> None:
        """See `Journal`."""
        with self._explained(), transaction(self._db):
            self._db.execute("DELETE FROM events WHERE run_id = ?", (run_id,))
            self._db.execute("DELETE FROM mail WHERE run_id = ?", (run_id,))
            self._db.execute("DELETE FROM runs WHERE run_id = ?", (run_id,))

    # -- mail ------------------------------------------------------------------------------------

    def post(self, run_id: str, name: str, body: bytes, instead_of: bytes | None = None) -> bytes:
        """See `Journal`."""
        with self._explained(), transaction(self._db):
            db = self._db
            if db.execute("SELECT 1 FROM runs WHERE run_id = ?", (run_id,)).fetchone() is None:
                raise RunNotFound(f"{self.path} has no run {run_id!r}")
            db.execute("DELETE FROM mail WHERE run_id = ? AND name = ? AND body = ?", (run_id, name, instead_of))
            db.execute("INSERT OR IGNORE INTO mail VALUES (?, ?, ?)", (run_id, name, body))
            found = db.execute("SELECT body FROM mail WHERE run_id = ? AND name = ?", (run_id, name)).fetchone()
            return bytes(found[0])

    def mail(self, run_id: str) -> dict[str, bytes]:
        """See `Journal`."""
        with self._explained():
            found = self._db.execute("SELECT name, body FROM mail WHERE run_id = ?", (run_id,)).fetchall()
        return {name: bytes(body) for name, body in found}

    # -- reading ---------------------------------------------------------------------------------

    def runs(self, run_id: str | None = None) -> list[RunInfo]:
        """See `Journal`."""
        which, given = ("", ()) if run_id is None else ("WHERE run_id = ? ", (run_id,))
        with self._explained():
            found = self._db.execute(
                f"SELECT run_id, name, status, started_at, updated_at, holder, expires FROM runs {which}"
                f"ORDER BY started_at DESC, run_id",
                given,
            ).fetchall()
        now = self._clock()
        return [
            RunInfo(
                run_id,
                name,
                status,
                started,
                updated,
                holder if holder and expires > now and not is_gone(holder) else None,
            )
            for run_id, name, status, started, updated, holder, expires in found
        ]

    def salt(self, run_id: str) -> bytes:
        """See `Journal`."""
        with self._explained():
            found = self._db.execute("SELECT salt FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        if found is None:
            raise RunNotFound(f"{self.path} has no run {run_id!r}")
        return bytes(found[0])

    def rows(self, run_id: str, after: int = 0) -> list[Row]:
        """See `Journal`."""
        with self._explained():
            found = self._db.execute(
                "SELECT seq, header, payload, salt, payload_hash, digest, base, head, tail, middle FROM events "
                "WHERE run_id = ? AND seq > ? ORDER BY seq",
                (run_id, after),
            ).fetchall()
        return [_row(*columns) for columns in found]

    def close(self) -> None:
        """See `Journal`."""
        self._db.close()


def _row(
    seq: int,
    header: bytes,
    payload: bytes | None,
    salt: bytes | None,
    payload_hash: bytes,
    digest: bytes,
    base: int | None,
    head: int,
    tail: int,
    middle: bytes | None,
) -> Row:
    state = None if middle is None else Delta(base, head, tail, middle)
    return Row(seq, header, payload, salt, payload_hash, digest, state)
