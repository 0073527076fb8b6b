"""Ledger: where budgets that outlive a run keep their books.

A ledger counts what *accounts* have spent and reserved. Amounts are exact: integers of 1e-18 of a unit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from loopguard.exceptions import ConfigurationError

__all__ = [
    "Account",
    "Balance",
    "Entry",
    "Lease",
    "Ledger",
    "ListedLedger",
    "Shortfall",
    "WrongWindow",
    "check_amounts",
    "check_entries",
    "used_before",
]

LARGEST = 10**36
"""The largest amount of a request: 10**18 units, so that whole units fit into 64 bits."""


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
    """What a reservation asks of one account: 0 ≤ amount ≤ 10**36 of a unit, under the cap (None: no cap)."""

    account: Account
    unit: str
    amount: int
    cap: int | None
    begins: float | None = None
    """When the account's window begins, in seconds since the epoch; None: it is open at any time."""
    ends: float | None = None
    """When it is over."""

    def __post_init__(self) -> None:
        if not 0 <= self.amount <= LARGEST or (self.cap is not None and self.cap < 0):
            raise ConfigurationError(f"{self!r}: amounts and caps are at least 0, amounts at most 10**36")


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


@dataclass(frozen=True, slots=True)
class WrongWindow:
    """Why nothing was reserved: by the ledger's clock an entry's window isn't open."""

    now: float
    """What the ledger's clock says, in seconds since the epoch. The one who asked tries again in the window of it."""


class Ledger(Protocol):
    """Reserve before a call, settle after it, over all accounts of the call in one atomic step.

    A method may be plain or ``async def`` (then only async tools can use the ledger); a plain one may
    block, async code runs it off the event loop, unless the ledger has an attribute ``blocking = False``.
    Requests may be delivered twice, or late: the id of a reservation, which the caller makes and never uses
    again, makes every method idempotent. Leases and windows go by the ledger's clock, whatever the hosts'
    clocks say. A ledger is used from many threads; an async one from the event loop that its tools run in, and from
    one of loopguard's own, which renews leases.

    The guarantee, per account and unit: spent + reserved ≤ the largest cap asked under + overdraft.

    A ledger that can't be asked raises LedgerError, whose text names no password: `Budget(on_ledger_error=…)`
    says what happens then. `loopguard.testing.LedgerContract` is all of this as tests.
    """

    def reserve(
        self, id: str, entries: Sequence[Entry], lease: Lease
    ) -> tuple[Balance, ...] | Shortfall | WrongWindow | Awaitable[tuple[Balance, ...] | Shortfall | WrongWindow]:
        """Reserve all entries, or none; the balances after it, in the order of the entries.

        The first that doesn't fit, in their order, is the Shortfall. Entries name different accounts or units.
        One of amount 0 always fits: it says where a later charge goes. If an entry's window isn't open the
        answer is WrongWindow, whether they fit or not. After either the id may be tried again.
        An id that is held with the same entries is reserved already. Raises ConfigurationError for an id whose
        reservation is over or was released before it came, and for one that is held with other entries.
        """
        ...

    def settle(self, id: str, amounts: Mapping[str, int]) -> bool | Awaitable[bool]:
        """Book what the call cost, {unit: amount}, on every entry of that unit; a unit left out cost nothing.

        Only the first settle or release counts. True if the lease held until then; a settlement that comes
        after it ran out takes the place of what the expiry did, and gives False. A window that is over can
        still be settled. Raises LookupError for an id that isn't known, ConfigurationError for an amount
        below 0 or above 10**36; nothing is booked then.
        """
        ...

    def release(self, id: str) -> Awaitable[None] | None:
        """The call never ran: give everything back.

        An id that isn't known is over from then on: a reserve that was overtaken can't hold anything.
        """

    def renew(self, id: str, lease: Lease) -> bool | Awaitable[bool]:
        """Let the lease of a held reservation begin anew; False if it isn't held any more."""
        ...

    def balance(self, account: Account, unit: str) -> Balance | Awaitable[Balance]:
        """Where the account stands."""
        ...


class ListedLedger(Ledger, Protocol):
    """A ledger that can say which accounts it has, for `loopguard spend`. Optional."""

    def accounts(
        self, key: str | None = None
    ) -> Iterable[tuple[Account, str, Balance]] | Awaitable[Iterable[tuple[Account, str, Balance]]]:
        """(account, unit, balance) of all accounts, or of those of one key; in the order of the fields."""
        ...


# -- what every ledger refuses in the same words ------------------------------------------------------


def check_entries(id: str, entries: Sequence[Entry]) -> None:
    """ConfigurationError where two entries name one account and unit."""
    if len({(entry.account, entry.unit) for entry in entries}) < len(entries):
        raise ConfigurationError(f"the reservation {id!r} names an account and unit twice")


def check_amounts(id: str, amounts: Mapping[str, int]) -> None:
    """ConfigurationError where an amount can't be booked."""
    if not all(0 <= amount <= LARGEST for amount in amounts.values()):
        raise ConfigurationError(
            f"{id!r} can't be settled at {dict(amounts)}: give amounts of at least 0, at most 10**36"
        )


def used_before(id: str) -> ConfigurationError:
    """The error of an id that can't be reserved under any more."""
    return ConfigurationError(f"the reservation {id!r} was made before: use a new id for every call")
