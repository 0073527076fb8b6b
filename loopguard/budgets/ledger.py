"""Ledger: where budgets that outlive a run keep their books, and the one in memory.

A ledger counts what *accounts* have spent and reserved. Amounts are exact: integers of 1e-18 of a unit.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from loopguard.exceptions import ConfigurationError

__all__ = ["Account", "Balance", "Entry", "Lease", "Ledger", "MemoryLedger", "Shortfall"]

REMEMBERED = 100_000
"""Reservations that are over, and still known, so that a request delivered twice changes nothing."""


@dataclass(frozen=True, slots=True)
class Account:
    """Whose money it is: one key in one window of one budget."""

    name: str
    """The budget's name."""
    key: str
    """A team, a user, a session; empty where the budget has no key."""
    window: str
    """The hour, day or month as the caller writes it; ``total`` for none."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a reservation asks of one account: amount ≥ 0 of a unit, under the cap (None: no cap)."""

    account: Account
    unit: str
    amount: int
    cap: int | None

    def __post_init__(self) -> None:
        if self.amount < 0 or (self.cap is not None and self.cap < 0):
            raise ConfigurationError(f"{self!r}: amounts and caps are at least 0")


@dataclass(frozen=True, slots=True)
class Lease:
    """How long a reservation holds without being renewed, and what becomes of it then."""

    seconds: float
    on_expiry: Literal["charge", "release"] = "charge"
    """``charge`` what was reserved (a model call may have been billed), or ``release`` it (a tool)."""

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.on_expiry not in ("charge", "release"):
            raise ConfigurationError(f"{self!r}: give seconds above 0, and 'charge' or 'release'")


@dataclass(frozen=True, slots=True)
class Balance:
    """Where one unit of an account stands."""

    spent: int = 0
    reserved: int = 0
    overdraft: int = 0
    """What was settled above what was held for it: overruns, and settlements after the lease had run out."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why nothing was reserved: this entry didn't fit beside what is spent and reserved."""

    entry: Entry
    balance: Balance


class Ledger(Protocol):
    """Reserve before a call, settle after it, over all accounts of the call in one atomic step.

    A method may be plain or ``async def`` (then only async tools can use the ledger); a plain one may
    block, async code runs it off the event loop. Requests may be delivered twice: the id of a
    reservation, which the caller makes and never uses again, makes every method idempotent.

    The guarantee, per account and unit: spent + reserved ≤ the largest cap asked under + overdraft.
    """

    def reserve(
        self, id: str, entries: Sequence[Entry], lease: Lease
    ) -> Shortfall | Awaitable[Shortfall | None] | None:
        """Reserve all entries, or none: the first that doesn't fit, in their order, is the Shortfall.

        Entries name different accounts or units. One of amount 0 always fits: it says where a later
        charge goes. After a Shortfall the id may be tried again. Raises ConfigurationError for an id whose
        reservation is over, and for one that is held with other entries.
        """
        ...

    def settle(self, id: str, amounts: Mapping[str, int]) -> Awaitable[None] | None:
        """Book what the call cost, {unit: amount}, on every entry of that unit; a unit left out cost nothing.

        Only the first settle or release counts. One that comes after the lease ran out takes the place of
        what the expiry did. Raises LookupError for an id that isn't known, ConfigurationError for an amount
        below 0; nothing is booked then.
        """

    def release(self, id: str) -> Awaitable[None] | None:
        """The call never ran: give everything back. An id that isn't known is left alone."""

    def renew(self, id: str, lease: Lease) -> bool | Awaitable[bool]:
        """Let the lease of a held reservation begin anew; False if it isn't held any more."""
        ...

    def balance(self, account: Account, unit: str) -> Balance | Awaitable[Balance]:
        """Where the account stands."""
        ...


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
    state: Literal["held", "expired", "over"] = field(default="held")

    def due(self, entry: Entry) -> int:
        """What was booked as spent when the lease ran out."""
        return entry.amount if self.lease.on_expiry == "charge" else 0


class MemoryLedger:
    """A `Ledger` in the memory of this process, safe to use from many threads.

    ``clock`` gives seconds that never go back. Accounts are kept as long as the ledger.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._books: dict[tuple[Account, str], _Book] = {}
        self._held: dict[str, _Reservation] = {}
        self._past: OrderedDict[str, _Reservation] = OrderedDict()
        self._expiries: list[tuple[float, str]] = []

    def reserve(self, id: str, entries: Sequence[Entry], lease: Lease) -> Shortfall | None:
        """See `Ledger`."""
        entries = tuple(entries)
        if len({(entry.account, entry.unit) for entry in entries}) < len(entries):
            raise ConfigurationError(f"the reservation {id!r} names an account and unit twice")
        with self._lock:
            now = self._expire()
            known = self._held.get(id) or self._past.get(id)
            if known is not None:
                if known.state == "held" and known.entries == entries:
                    return None
                raise ConfigurationError(f"the reservation {id!r} was made before: use a new id for every call")
            for entry in entries:
                book = self._book(entry)
                left = None if entry.cap is None else entry.cap - book.spent - book.reserved
                if entry.amount and left is not None and entry.amount > left:
                    return Shortfall(entry, book.balance())
            for entry in entries:
                self._book(entry).reserved += entry.amount
            self._hold(id, _Reservation(entries, lease, now + lease.seconds))
            return None

    def settle(self, id: str, amounts: Mapping[str, int]) -> None:
        """See `Ledger`."""
        if any(amount < 0 for amount in amounts.values()):
            raise ConfigurationError(f"{id!r} can't be settled at {dict(amounts)}: give amounts of at least 0")
        with self._lock:
            self._expire()
            if id not in self._held and id not in self._past:
                raise LookupError(f"there is no reservation {id!r}")
            self._end(id, amounts)

    def release(self, id: str) -> None:
        """See `Ledger`."""
        with self._lock:
            self._expire()
            self._end(id, {})

    def renew(self, id: str, lease: Lease) -> bool:
        """See `Ledger`."""
        with self._lock:
            now = self._expire()
            held = self._held.get(id)
            if held is None:
                return False
            held.lease, held.expires = lease, now + lease.seconds
            self._hold(id, held)
            return True

    def balance(self, account: Account, unit: str) -> Balance:
        """See `Ledger`."""
        with self._lock:
            self._expire()
            book = self._books.get((account, unit))
            return book.balance() if book is not None else Balance()

    # -- under the lock ------------------------------------------------------------------------

    def _book(self, entry: Entry) -> _Book:
        return self._books.setdefault((entry.account, entry.unit), _Book())

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
            held.state = "expired"
            for entry in held.entries:
                book = self._book(entry)
                book.reserved -= entry.amount
                book.spent += held.due(entry)
            self._over(name, held)
        return now

    def _end(self, id: str, amounts: Mapping[str, int]) -> None:
        """Book the amounts in the place of what is held, or of what the expiry charged."""
        ended = self._held.pop(id, None) or self._past.get(id)
        if ended is None or ended.state == "over":
            return
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
