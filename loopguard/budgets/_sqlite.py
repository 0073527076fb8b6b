"""The ledger in a SQLite file, for the processes of one host: `sqlite:///spend.db`."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from loopguard._amounts import SCALE
from loopguard._sqlite import explain, open_database, transaction
from loopguard.budgets.ledger import (
    Account,
    Balance,
    Entry,
    Lease,
    Shortfall,
    WrongWindow,
    check_amounts,
    check_entries,
    used_before,
)
from loopguard.exceptions import LedgerError

__all__ = ["SqliteLedger"]

REMEMBERED = 7 * 86400.0
"""Seconds for which reservations that are over are still known, so that a request delivered twice changes nothing."""
_SWEEP = 1000
"""After how many reservations the ones that are over for longer are forgotten."""
VERSION = 1
_SCHEMA = (
    "CREATE TABLE ledger_schema (version INTEGER NOT NULL)",
    # An amount is more than 64 bits: whole units, and grains of 1e-18. `cap` is the largest asked under, NULL is none.
    """
    CREATE TABLE ledger_accounts (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL, key TEXT NOT NULL, "window" TEXT NOT NULL, unit TEXT NOT NULL,
        spent INTEGER NOT NULL DEFAULT 0, spent_grains INTEGER NOT NULL DEFAULT 0,
        reserved INTEGER NOT NULL DEFAULT 0, reserved_grains INTEGER NOT NULL DEFAULT 0,
        overdraft INTEGER NOT NULL DEFAULT 0, overdraft_grains INTEGER NOT NULL DEFAULT 0,
        cap INTEGER, cap_grains INTEGER,
        UNIQUE (name, key, "window", unit),
        CONSTRAINT no_amount_is_negative CHECK (
            min(spent, spent_grains, reserved, reserved_grains, overdraft, overdraft_grains) >= 0),
        CONSTRAINT spent_and_reserved_fit_the_cap_and_the_overdraft CHECK (
            cap IS NULL
            OR spent + reserved + (spent_grains + reserved_grains) / 1000000000000000000
                < cap + overdraft + (cap_grains + overdraft_grains) / 1000000000000000000
            OR (spent + reserved + (spent_grains + reserved_grains) / 1000000000000000000
                    = cap + overdraft + (cap_grains + overdraft_grains) / 1000000000000000000
                AND (spent_grains + reserved_grains) % 1000000000000000000
                    <= (cap_grains + overdraft_grains) % 1000000000000000000))
    )
    """,
    # `state` is held, expired or over; `charge` says what becomes of it on expiry; `at` is when it expires or ended.
    """
    CREATE TABLE ledger_reservations (
        id TEXT PRIMARY KEY, state TEXT NOT NULL, charge INTEGER NOT NULL, late INTEGER NOT NULL, at REAL NOT NULL,
        entries TEXT NOT NULL
    ) WITHOUT ROWID
    """,
    "CREATE INDEX ledger_held ON ledger_reservations (at) WHERE state = 'held'",
    f"INSERT INTO ledger_schema VALUES ({VERSION})",
)
_AMOUNTS = "spent, spent_grains, reserved, reserved_grains, overdraft, overdraft_grains"


class _Row(NamedTuple):
    """An account's row, or what it would be."""

    id: int | None
    balance: Balance
    cap: int | None


class SqliteLedger:
    """A `Ledger` in a SQLite file (WAL, mode 0600): one transaction for each request, for many processes of one host.

    ``durability`` is about power loss only: ``normal`` may lose what was booked last, ``full`` waits for the disk.
    ``clock`` gives seconds since the epoch. A file on a network drive isn't safe: use a ledger on a server there.
    """

    def __init__(self, path: str, durability: str = "normal", clock: Callable[[], float] = time.time) -> None:
        self._db: sqlite3.Connection | None = None
        self.path = os.path.abspath(path)
        self._durability = durability
        self._clock = clock
        self._lock = threading.Lock()
        self._reserved = 0
        _ledgers.add(self)

    def reserve(self, id: str, entries: Sequence[Entry], lease: Lease) -> tuple[Balance, ...] | Shortfall | WrongWindow:
        """See `Ledger`."""
        check_entries(id, entries)
        text = json.dumps([_plain(entry) for entry in entries])
        with self._transaction() as db:
            now = self._expire(db)
            known = self._reservation(db, id)
            if known is not None:
                if known[0] == "held" and known[2] == text:
                    return tuple([self._row(db, entry.account, entry.unit).balance for entry in entries])
                raise used_before(id)
            for entry in entries:
                if (entry.begins is not None and now < entry.begins) or (entry.ends is not None and now >= entry.ends):
                    return WrongWindow(now)
            rows = [self._row(db, entry.account, entry.unit) for entry in entries]
            for entry, row in zip(entries, rows, strict=True):
                used = row.balance.spent + row.balance.reserved
                if entry.amount and entry.cap is not None and used + entry.amount > entry.cap:
                    return Shortfall(entry, row.balance)
            after = []
            for entry, row in zip(entries, rows, strict=True):
                spent, reserved, overdraft = row.balance.spent, row.balance.reserved, row.balance.overdraft
                after.append(Balance(spent, reserved + entry.amount, overdraft))
                self._open_account(db, entry, row, after[-1])
            db.execute(
                "INSERT INTO ledger_reservations VALUES (?, 'held', ?, 0, ?, ?)",
                (id, lease.on_expiry == "charge", now + lease.seconds, text),
            )
            self._sweep(db, now)
            return tuple(after)

    def settle(self, id: str, amounts: Mapping[str, int]) -> bool:
        """See `Ledger`."""
        check_amounts(id, amounts)
        with self._transaction() as db:
            now = self._expire(db)
            known = self._reservation(db, id)
            if known is None:
                raise LookupError(f"there is no reservation {id!r}")
            if known[0] != "over":
                self._end(db, id, known, amounts, now)
            return not known[3]

    def release(self, id: str) -> None:
        """See `Ledger`."""
        with self._transaction() as db:
            now = self._expire(db)
            known = self._reservation(db, id)
            if known is None:
                db.execute("INSERT INTO ledger_reservations VALUES (?, 'over', 0, 0, ?, '[]')", (id, now))
            elif known[0] != "over":
                self._end(db, id, known, {}, now)

    def renew(self, id: str, lease: Lease) -> bool:
        """See `Ledger`."""
        with self._transaction() as db:
            now = self._expire(db)
            done = db.execute(
                "UPDATE ledger_reservations SET at = ?, charge = ? WHERE id = ? AND state = 'held'",
                (now + lease.seconds, lease.on_expiry == "charge", id),
            )
            return done.rowcount == 1

    def balance(self, account: Account, unit: str) -> Balance:
        """See `Ledger`."""
        with self._transaction() as db:
            self._expire(db)
            return self._row(db, account, unit).balance

    def accounts(self, key: str | None = None) -> list[tuple[Account, str, Balance]]:
        """See `ListedLedger`."""
        with self._transaction() as db:
            self._expire(db)
            found = db.execute(
                f'SELECT name, key, "window", unit, {_AMOUNTS} FROM ledger_accounts WHERE ? IS NULL OR key = ? '
                f'ORDER BY name, key, "window", unit',
                (key, key),
            ).fetchall()
        return [(Account(*row[:3]), row[3], _balance(row[4:])) for row in found]

    def close(self) -> None:
        """Let go of the file; it is opened again when it is needed."""
        with self._lock:
            self._close()

    def __repr__(self) -> str:
        return f"SqliteLedger({self.path!r})"

    def __del__(self) -> None:
        self._close()

    # -- under the lock --------------------------------------------------------------------------

    def _close(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                db = self._db
                if db is None:
                    db = self._db = self._opened()
                with transaction(db):
                    yield db
            except (sqlite3.Error, OSError, OverflowError) as exc:
                raise LedgerError(f"{self.path}: {explain(exc)} ({exc})") from exc

    def _opened(self) -> sqlite3.Connection:
        db = open_database(self.path, self._durability)
        try:
            db.execute("PRAGMA busy_timeout = 0")  # `transaction` waits, and more fairly
            with transaction(db):  # another process may be making the same file right now
                made = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'ledger_schema'").fetchone()
                for statement in () if made else _SCHEMA:
                    db.execute(statement)
                version = db.execute("SELECT version FROM ledger_schema").fetchone()[0]
            if version > VERSION:
                raise LedgerError(
                    f"{self.path} was written by a newer loopguard (ledger {version}, this one knows {VERSION}): "
                    f"upgrade loopguard, or name another ledger"
                )
        except BaseException:
            db.close()
            raise
        return db

    def _row(self, db: sqlite3.Connection, account: Account, unit: str) -> _Row:
        found = db.execute(
            f"SELECT id, cap, cap_grains, {_AMOUNTS} FROM ledger_accounts "
            f'WHERE name = ? AND key = ? AND "window" = ? AND unit = ?',
            (account.name, account.key, account.window, unit),
        ).fetchone()
        if found is None:
            return _Row(None, Balance(), 0)
        return _Row(found[0], _balance(found[3:]), None if found[1] is None else found[1] * SCALE + found[2])

    def _open_account(self, db: sqlite3.Connection, entry: Entry, row: _Row, after: Balance) -> None:
        """Book the reservation, under the largest cap that was ever asked under."""
        cap = None if entry.cap is None or row.cap is None else max(entry.cap, row.cap)
        caps = (None, None) if cap is None else divmod(cap, SCALE)
        if row.id is None:
            account = entry.account
            db.execute(
                'INSERT INTO ledger_accounts (name, key, "window", unit, reserved, reserved_grains, cap, cap_grains) '
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (account.name, account.key, account.window, entry.unit, *divmod(after.reserved, SCALE), *caps),
            )
        elif entry.amount or cap != row.cap:
            db.execute(
                "UPDATE ledger_accounts SET reserved = ?, reserved_grains = ?, cap = ?, cap_grains = ? WHERE id = ?",
                (*divmod(after.reserved, SCALE), *caps, row.id),
            )

    def _reservation(self, db: sqlite3.Connection, id: str) -> tuple[str, bool, str, bool] | None:
        """(state, whether its expiry charges, entries, whether it expired), or None."""
        found = db.execute(
            "SELECT state, charge, entries, late FROM ledger_reservations WHERE id = ?", (id,)
        ).fetchone()
        return None if found is None else (found[0], bool(found[1]), found[2], bool(found[3]))

    def _expire(self, db: sqlite3.Connection) -> float:
        """End every lease that has run out; the time."""
        now = self._clock()
        due = db.execute(
            "SELECT id, charge, entries FROM ledger_reservations WHERE state = 'held' AND at <= ?", (now,)
        ).fetchall()
        for name, charge, text in due:
            for account, unit, amount in _entries(text):
                balance = self._row(db, account, unit).balance
                spent = balance.spent + (amount if charge else 0)
                self._book(db, account, unit, Balance(spent, balance.reserved - amount, balance.overdraft))
            db.execute("UPDATE ledger_reservations SET state = 'expired', late = 1, at = ? WHERE id = ?", (now, name))
        return now

    def _end(
        self,
        db: sqlite3.Connection,
        id: str,
        known: tuple[str, bool, str, bool],
        amounts: Mapping[str, int],
        now: float,
    ) -> None:
        """Book the amounts in the place of what is held, or of what the expiry charged."""
        state, charge, text, _ = known
        for account, unit, amount in _entries(text):
            balance, paid = self._row(db, account, unit).balance, amounts.get(unit, 0)
            held = amount if state == "held" else 0
            covered = amount if state == "held" or charge else 0
            spent = balance.spent + paid - (covered - held)
            overdraft = balance.overdraft + max(0, paid - covered)
            self._book(db, account, unit, Balance(spent, balance.reserved - held, overdraft))
        db.execute("UPDATE ledger_reservations SET state = 'over', at = ? WHERE id = ?", (now, id))

    def _book(self, db: sqlite3.Connection, account: Account, unit: str, after: Balance) -> None:
        db.execute(
            "UPDATE ledger_accounts SET spent = ?, spent_grains = ?, reserved = ?, reserved_grains = ?, "
            'overdraft = ?, overdraft_grains = ? WHERE name = ? AND key = ? AND "window" = ? AND unit = ?',
            (
                *divmod(after.spent, SCALE),
                *divmod(after.reserved, SCALE),
                *divmod(after.overdraft, SCALE),
                account.name,
                account.key,
                account.window,
                unit,
            ),
        )

    def _sweep(self, db: sqlite3.Connection, now: float) -> None:
        self._reserved += 1
        if self._reserved % _SWEEP == 0:
            db.execute("DELETE FROM ledger_reservations WHERE state <> 'held' AND at < ?", (now - REMEMBERED,))


def _plain(entry: Entry) -> list[Any]:
    account = entry.account
    amount, cap = str(entry.amount), None if entry.cap is None else str(entry.cap)
    return [account.name, account.key, account.window, entry.unit, amount, cap, entry.begins, entry.ends]


def _entries(text: str) -> Iterable[tuple[Account, str, int]]:
    for name, key, window, unit, amount, *_ in json.loads(text):
        yield Account(name, key, window), unit, int(amount)


def _balance(columns: Sequence[int]) -> Balance:
    spent, spent_grains, reserved, reserved_grains, overdraft, overdraft_grains = columns
    return Balance(
        spent * SCALE + spent_grains, reserved * SCALE + reserved_grains, overdraft * SCALE + overdraft_grains
    )


_ledgers: weakref.WeakSet[SqliteLedger] = weakref.WeakSet()
_forking: list[SqliteLedger] = []


def _before_fork() -> None:
    """No connection may live on both sides of a fork: SQLite would take the parent's locks for the child's own."""
    for ledger in list(_ledgers):
        ledger._lock.acquire()
        _forking.append(ledger)
        try:
            ledger._close()
        except sqlite3.Error:  # what could not be closed here is no worse than before
            pass


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop()._lock.release()


def _after_fork_in_child() -> None:
    while _forking:
        _forking.pop()._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
