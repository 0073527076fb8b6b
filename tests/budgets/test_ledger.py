"""The ledgers of the package under the contract of all ledgers, and what is their own."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from loopguard.budgets import _memory
from loopguard.budgets._memory import MemoryLedger
from loopguard.budgets._sqlite import SqliteLedger
from loopguard.exceptions import ConfigurationError
from loopguard.testing import Clock, LedgerContract
from loopguard.typing import Account, Balance, Entry, Lease, ListedLedger

TEAM = Account("spend", "team-a", "2026-11")
CHARGE = Lease(60, "charge")


class TestMemoryLedger(LedgerContract):
    """The one in memory."""

    def make_ledger(self) -> MemoryLedger:
        """See `LedgerContract`."""
        self.clock = Clock(1e9)
        return MemoryLedger(self.clock)

    def advance(self, seconds: float) -> None:
        """See `LedgerContract`."""
        self.clock.advance(seconds)


class TestSqliteLedger(LedgerContract):
    """The one in a file."""

    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.numbers = itertools.count()

    def make_ledger(self) -> SqliteLedger:
        """See `LedgerContract`."""
        self.clock = Clock(1e9)
        return SqliteLedger(str(self.folder / f"spend-{next(self.numbers)}.db"), clock=self.clock)

    def advance(self, seconds: float) -> None:
        """See `LedgerContract`."""
        self.clock.advance(seconds)

    def another(self, ledger: SqliteLedger) -> SqliteLedger:
        """See `LedgerContract`."""
        return SqliteLedger(ledger.path, clock=self.clock)


def test_the_memory_ledger_is_a_ledger() -> None:
    """It has the protocol's shape; the type checkers see this assignment."""
    ledger: ListedLedger = MemoryLedger()
    assert ledger.reserve("a", [Entry(TEAM, "usd", 1, 5)], CHARGE) == (Balance(0, 1, 0),)


def test_what_makes_no_sense_can_not_be_asked_for() -> None:
    """Negative and boundless amounts, negative caps, and leases that hold for no time."""
    for amount, cap in ((-1, 5), (1, -5), (10**36 + 1, None)):
        with pytest.raises(ConfigurationError, match="at least 0"):
            Entry(TEAM, "usd", amount, cap)
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ConfigurationError, match="above 0"):
            Lease(seconds)


def test_its_memory_of_what_is_over_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ids are forgotten first; their amounts stay booked."""
    monkeypatch.setattr(_memory, "REMEMBERED", 10)
    ledger = MemoryLedger()
    for number in range(30):
        ledger.reserve(str(number), [Entry(TEAM, "usd", 1, 100)], CHARGE)
        ledger.settle(str(number), {"usd": 1})
    ledger.settle("29", {"usd": 1})
    with pytest.raises(LookupError):
        ledger.settle("19", {"usd": 1})
    assert ledger.balance(TEAM, "usd").spent == 30
