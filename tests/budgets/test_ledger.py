"""MemoryLedger against a model of it: exact, atomic, idempotent, with leases that run out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from loopguard.budgets import ledger as ledgers
from loopguard.budgets.ledger import Account, Balance, Entry, Lease, Ledger, MemoryLedger, Shortfall
from loopguard.exceptions import ConfigurationError

TEAM = Account("spend", "team-a", "2026-11")
USER = Account("spend", "user-1", "2026-11-30")
CHARGE, RELEASE = Lease(60, "charge"), Lease(60, "release")


class Hands:
    """A clock that a test moves by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def team(amount: int, cap: int | None = 100, unit: str = "usd") -> Entry:
    return Entry(TEAM, unit, amount, cap)


def test_the_memory_ledger_is_a_ledger() -> None:
    """It has the protocol's shape; the type checkers see this assignment."""
    ledger: Ledger = MemoryLedger()
    assert ledger.reserve("a", [team(1)], CHARGE) is None


def test_settling_turns_what_was_reserved_into_what_was_spent() -> None:
    """A call that cost less than its estimate gives the rest back."""
    ledger = MemoryLedger()
    ledger.reserve("a", [team(60)], CHARGE)
    assert ledger.balance(TEAM, "usd") == Balance(0, 60, 0)
    ledger.settle("a", {"usd": 25})
    assert ledger.balance(TEAM, "usd") == Balance(25, 0, 0)


def test_all_entries_fit_or_none_is_taken() -> None:
    """The entry that doesn't fit is named with its balance, and those before it hold nothing."""
    ledger = MemoryLedger()
    tight = Entry(USER, "usd", 11, 10)
    assert ledger.reserve("a", [team(11), tight], CHARGE) == Shortfall(tight, Balance())
    assert ledger.balance(TEAM, "usd") == Balance()
    assert ledger.reserve("a", [team(11)], CHARGE) is None, "after a Shortfall the id may be tried again"


def test_nothing_costs_nothing_even_when_all_is_spent() -> None:
    """An entry of 0 fits an exhausted account, and says where a later charge goes."""
    ledger = MemoryLedger()
    assert ledger.reserve("a", [team(0, cap=0)], CHARGE) is None
    ledger.settle("a", {"usd": 7, "tokens": 5})
    assert ledger.balance(TEAM, "usd") == Balance(7, 0, 7)
    assert ledger.balance(TEAM, "tokens") == Balance()


def test_a_request_delivered_twice_changes_nothing() -> None:
    """Reserve, settle and release count once; a release doesn't undo a settlement."""
    ledger = MemoryLedger()
    for _ in range(2):
        assert ledger.reserve("a", [team(60)], CHARGE) is None
    for _ in range(2):
        ledger.settle("a", {"usd": 50})
    ledger.release("a")
    ledger.release("never reserved")
    assert ledger.balance(TEAM, "usd") == Balance(50, 0, 0)


@pytest.mark.parametrize("end", ["settle", "release", "expire", "hold"])
def test_an_id_can_not_be_used_for_a_second_call(end: str) -> None:
    """A second call under an old id would run without a reservation, so it is an error."""
    clock = Hands()
    ledger = MemoryLedger(clock)
    ledger.reserve("a", [team(1)], CHARGE)
    if end == "settle":
        ledger.settle("a", {})
    elif end == "release":
        ledger.release("a")
    elif end == "expire":
        clock.now = 61
    with pytest.raises(ConfigurationError, match="'a' was made before"):
        ledger.reserve("a", [team(2)], CHARGE)


@pytest.mark.parametrize(("lease", "expired"), [(CHARGE, Balance(60, 0, 0)), (RELEASE, Balance(0, 0, 0))])
def test_a_lease_that_runs_out_is_charged_or_released(lease: Lease, expired: Balance) -> None:
    """What a crashed worker held becomes spent, or free, when its lease is over and not before."""
    clock = Hands()
    ledger = MemoryLedger(clock)
    ledger.reserve("a", [team(60)], lease)
    clock.now = 59.9
    assert ledger.balance(TEAM, "usd") == Balance(0, 60, 0)
    clock.now = 60
    assert ledger.balance(TEAM, "usd") == expired
    assert ledger.renew("a", lease) is False


@pytest.mark.parametrize(
    ("lease", "paid", "after"),
    [
        (CHARGE, 45, Balance(45, 0, 0)),
        (CHARGE, 70, Balance(70, 0, 10)),
        (RELEASE, 45, Balance(45, 0, 45)),
        (RELEASE, 0, Balance(0, 0, 0)),
    ],
)
def test_a_settlement_after_expiry_takes_its_place(lease: Lease, paid: int, after: Balance) -> None:
    """The true cost stands, once, and what nothing was held for is the overdraft."""
    clock = Hands()
    ledger = MemoryLedger(clock)
    ledger.reserve("a", [team(60)], lease)
    clock.now = 100
    ledger.settle("a", {"usd": paid})
    ledger.settle("a", {"usd": paid})
    assert ledger.balance(TEAM, "usd") == after


def test_a_call_that_never_ran_gets_back_what_its_expiry_charged() -> None:
    """A worker that was only asleep says that nothing was bought."""
    clock = Hands()
    ledger = MemoryLedger(clock)
    ledger.reserve("a", [team(60)], CHARGE)
    clock.now = 100
    assert ledger.balance(TEAM, "usd").spent == 60
    ledger.release("a")
    assert ledger.balance(TEAM, "usd") == Balance()


def test_a_renewed_lease_begins_anew() -> None:
    """A person may take longer than one lease, as long as somebody renews it."""
    clock = Hands()
    ledger = MemoryLedger(clock)
    ledger.reserve("a", [team(60)], RELEASE)
    for clock.now in (50, 100, 150):
        assert ledger.renew("a", RELEASE) is True
    clock.now = 209
    assert ledger.balance(TEAM, "usd").reserved == 60
    clock.now = 210
    assert ledger.balance(TEAM, "usd").reserved == 0


def test_what_can_not_be_booked_changes_nothing() -> None:
    """Unknown ids, negative amounts, doubled accounts and senseless leases are errors."""
    ledger = MemoryLedger()
    ledger.reserve("a", [team(5), team(5, unit="tokens")], CHARGE)
    with pytest.raises(ConfigurationError, match="at least 0"):
        ledger.settle("a", {"tokens": 1, "usd": -1})
    with pytest.raises(LookupError, match="'b'"):
        ledger.settle("b", {"usd": 1})
    with pytest.raises(ConfigurationError, match="twice"):
        ledger.reserve("c", [team(1), team(2)], CHARGE)
    for amount, cap in ((-1, 5), (1, -5)):
        with pytest.raises(ConfigurationError, match="at least 0"):
            Entry(TEAM, "usd", amount, cap)
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ConfigurationError, match="above 0"):
            Lease(seconds)
    assert ledger.balance(TEAM, "usd") == Balance(0, 5, 0)


def test_its_memory_of_what_is_over_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ids are forgotten first; their amounts stay booked."""
    monkeypatch.setattr(ledgers, "REMEMBERED", 10)
    ledger = MemoryLedger()
    for number in range(30):
        ledger.reserve(str(number), [team(1)], CHARGE)
        ledger.settle(str(number), {"usd": 1})
    ledger.settle("29", {"usd": 1})
    with pytest.raises(LookupError):
        ledger.settle("19", {"usd": 1})
    assert ledger.balance(TEAM, "usd").spent == 30


def test_threads_never_reserve_more_than_the_cap() -> None:
    """Of 64 threads that ask at once, exactly as many get through as fit."""
    ledger = MemoryLedger()
    barrier = threading.Barrier(64)

    def ask(number: int) -> bool:
        barrier.wait()
        if ledger.reserve(str(number), [team(3), Entry(USER, "usd", 3, None)], CHARGE) is not None:
            return False
        ledger.settle(str(number), {"usd": 3})
        return True

    with ThreadPoolExecutor(64) as pool:
        assert sum(pool.map(ask, range(64))) == 33
    assert ledger.balance(TEAM, "usd") == ledger.balance(USER, "usd") == Balance(99, 0, 0)


ACCOUNTS = (TEAM, USER)
UNITS = ("usd", "tokens")
CAPS = {(TEAM, "usd"): 100, (TEAM, "tokens"): 40, (USER, "usd"): 30, (USER, "tokens"): None}
AMOUNTS = st.dictionaries(st.sampled_from(UNITS), st.integers(0, 60))


class LedgerMachine(RuleBasedStateMachine):
    """Any order of requests, deliveries in duplicate and passing time, against plain sums."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Hands()
        self.ledger = MemoryLedger(self.clock)
        self.entries: dict[str, tuple[Entry, ...]] = {}
        self.leases: dict[str, Lease] = {}
        self.ends: dict[str, float] = {}
        self.states: dict[str, str] = {}
        self.paid: dict[str, dict[str, int]] = {}
        self.overdraft = dict.fromkeys(CAPS, 0)

    def expected(self, place: tuple[Account, str]) -> Balance:
        spent = reserved = 0
        for call, entries in self.entries.items():
            for entry in entries:
                if (entry.account, entry.unit) != place:
                    continue
                state = self.states[call]
                reserved += entry.amount if state == "held" else 0
                spent += entry.amount if state == "expired" and self.leases[call].on_expiry == "charge" else 0
                spent += self.paid[call].get(entry.unit, 0) if state == "over" else 0
        return Balance(spent, reserved, self.overdraft[place])

    @rule(
        target=ids,
        asked=st.dictionaries(st.tuples(st.sampled_from(ACCOUNTS), st.sampled_from(UNITS)), st.integers(0, 30)),
        seconds=st.integers(1, 30),
        on_expiry=st.sampled_from(["charge", "release"]),
    )
    def reserve(self, asked: dict[tuple[Account, str], int], seconds: int, on_expiry: str) -> object:
        call = f"call-{len(self.entries)}"
        entries = tuple(Entry(*place, amount, CAPS[place]) for place, amount in asked.items())
        lease = Lease(seconds, on_expiry)  # type: ignore[arg-type]  # one of the two
        short = next((e for e in entries if self.over_cap(e)), None)
        answer = self.ledger.reserve(call, entries, lease)
        if short is not None:
            assert answer == Shortfall(short, self.expected((short.account, short.unit)))
            return multiple()
        assert answer is None
        self.entries[call], self.leases[call], self.states[call] = entries, lease, "held"
        self.ends[call] = self.clock.now + seconds
        assert self.ledger.reserve(call, entries, lease) is None, "delivered twice"
        return call

    def over_cap(self, entry: Entry) -> bool:
        now = self.expected((entry.account, entry.unit))
        return bool(entry.amount and entry.cap is not None and now.spent + now.reserved + entry.amount > entry.cap)

    @rule(id=ids, amounts=AMOUNTS)
    def settle(self, id: str, amounts: dict[str, int]) -> None:
        self.ledger.settle(id, amounts)
        self.end(id, amounts)

    @rule(id=ids)
    def release(self, id: str) -> None:
        self.ledger.release(id)
        self.end(id, {})

    def end(self, id: str, amounts: dict[str, int]) -> None:
        if self.states[id] == "over":
            return
        held = self.states[id] == "held" or self.leases[id].on_expiry == "charge"
        for entry in self.entries[id]:
            above = amounts.get(entry.unit, 0) - (entry.amount if held else 0)
            self.overdraft[entry.account, entry.unit] += max(0, above)
        self.states[id], self.paid[id] = "over", amounts

    @rule(id=ids, seconds=st.integers(1, 30))
    def renew(self, id: str, seconds: int) -> None:
        lease = Lease(seconds, self.leases[id].on_expiry)
        held = self.states[id] == "held"
        assert self.ledger.renew(id, lease) is held
        if held:
            self.ends[id] = self.clock.now + seconds

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        for call, state in self.states.items():
            if state == "held" and self.ends[call] <= self.clock.now:
                self.states[call] = "expired"

    @invariant()
    def the_books_are_right(self) -> None:
        for place, cap in CAPS.items():
            balance = self.ledger.balance(*place)
            assert balance == self.expected(place)
            assert min(balance.spent, balance.reserved, balance.overdraft) >= 0
            if cap is not None:
                assert balance.spent + balance.reserved <= cap + balance.overdraft


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
