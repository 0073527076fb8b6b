"""The ledger in the memory of this process: `memory:`."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from loopguard._pipeline import LOCK
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

__all__ = ["MemoryLedger"]

REMEMBERED = 100_000
"""Reservations that are over, and still known, so that a request delivered twice changes nothing."""


@dataclass(slots=True)
class _Book:
    spent: int = 0
    reserved: int = 0
    overdraft: int = 0

    def balance(self) -> Balance:
        return Balance(self.spent, self.reserved, self.overdraft)


@dataclass(slots=True)
class _Reservation:
    entries: tuple[Entry, ...]
    lease: Lease
    expires: float
    state: Literal["held", "expired", "over"] = "held"
    late: bool = False

    def due(self, entry: Entry) -> int:
        """What was booked as spent when the lease ran out."""
        return entry.amount if self.lease.on_expiry == "charge" else 0


class MemoryLedger:
    """A `Ledger` in the memory of this process, safe to use from many threads.

    ``clock`` gives seconds since the epoch. Accounts are kept as long as the ledger.
    """

    blocking = False
    """It answers at once: async code needs no thread for it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._books: dict[tuple[Account, str], _Book] = {}
        self._held: dict[str, _Reservation] = {}
        self._past: OrderedDict[str, _Reservation] = OrderedDict()
        self._expiries: list[tuple[float, str]] = []

    def reserve(self, id: str, entries: Sequence[Entry], lease: Lease) -> tuple[Balance, ...] | Shortfall | WrongWindow:
        """See `Ledger`."""
        entries = tuple(entries)
        check_entries(id, entries)
        with LOCK:
            now = self._expire()
            known = self._held.get(id) or self._past.get(id)
            if known is not None:
                if known.state == "held" and known.entries == entries:
                    return self._balances(entries)
                raise used_before(id)
            for entry in entries:
                if (entry.begins is not None and now < entry.begins) or (entry.ends is not None and now >= entry.ends):
                    return WrongWindow(now)
            for entry in entries:
                book = self._book(entry)
                left = None if entry.cap is None else entry.cap - book.spent - book.reserved
                if entry.amount and left is not None and entry.amount > left:
                    return Shortfall(entry, book.balance())
            for entry in entries:
                self._book(entry).reserved += entry.amount
            self._hold(id, _Reservation(entries, lease, now + lease.seconds))
            return self._balances(entries)

    def settle(self, id: str, amounts: Mapping[str, int]) -> bool:
        """See `Ledger`."""
        check_amounts(id, amounts)
        with LOCK:
            self._expire()
            if id not in self._held and id not in self._past:
                raise LookupError(f"there is no reservation {id!r}")
            return not self._end(id, amounts).late

    def release(self, id: str) -> None:
        """See `Ledger`."""
        with LOCK:
            now = self._expire()
            if id in self._held or id in self._past:
                self._end(id, {})
            else:
                self._over(id, _Reservation((), Lease(1), now, "over"))

    def renew(self, id: str, lease: Lease) -> bool:
        """See `Ledger`."""
        with LOCK:
            now = self._expire()
            held = self._held.get(id)
            if held is None:
                return False
            held.lease, held.expires = lease, now + lease.seconds
            self._hold(id, held)
            return True

    def balance(self, account: Account, unit: str) -> Balance:
        """See `Ledger`."""
        with LOCK:
            self._expire()
            book = self._books.get((account, unit))
            return book.balance() if book is not None else Balance()

    def accounts(self, key: str | None = None) -> list[tuple[Account, str, Balance]]:
        """See `ListedLedger`."""
        with LOCK:
            self._expire()
            listed = [
                (account, unit, book.balance())
                for (account, unit), book in self._books.items()
                if key is None or account.key == key
            ]
        return sorted(listed, key=lambda row: (row[0].name, row[0].key, row[0].window, row[1]))

    # -- under the lock ------------------------------------------------------------------------

    def _book(self, entry: Entry) -> _Book:
        return self._books.setdefault((entry.account, entry.unit), _Book())

    def _balances(self, entries: Sequence[Entry]) -> tuple[Balance, ...]:
        return tuple([self._book(entry).balance() for entry in entries])

    def _hold(self, id: str, reservation: _Reservation) -> None:
        self._held[id] = reservation
        heapq.heappush(self._expiries, (reservation.expires, id))

    def _over(self, id: str, reservation: _Reservation) -> None:
        self._past[id] = reservation
        if len(self._past) > REMEMBERED:
            self._past.popitem(last=False)

    def _expire(self) -> float:
        """End every lease that has run out; the time."""
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            expires, name = heapq.heappop(self._expiries)
            held = self._held.get(name)
            if held is None or held.expires != expires:
                continue  # it is over, or was renewed
            del self._held[name]
            held.state, held.late = "expired", True
            for entry in held.entries:
                book = self._book(entry)
                book.reserved -= entry.amount
                book.spent += held.due(entry)
            self._over(name, held)
        return now

    def _end(self, id: str, amounts: Mapping[str, int]) -> _Reservation:
        """Book the amounts in the place of what is held, or of what the expiry charged."""
        ended = self._held.pop(id, None) or self._past[id]
        if ended.state == "over":
            return ended
        for entry in ended.entries:
            book, paid = self._book(entry), amounts.get(entry.unit, 0)
            if ended.state == "held":
                book.reserved -= entry.amount
                covered = entry.amount
            else:
                covered = ended.due(entry)
                book.spent -= covered
            book.spent += paid
            book.overdraft += max(0, paid - covered)
        ended.state = "over"
        self._over(id, ended)
        return ended
