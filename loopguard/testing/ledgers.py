"""LedgerContract: what every `Ledger` has to do, as tests. Needs pytest and hypothesis."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from loopguard.exceptions import ConfigurationError
from loopguard.typing import Account, Balance, Entry, Lease, Shortfall, WrongWindow

__all__ = ["LedgerContract"]

TEAM = Account("spend", "team-a", "2026-11")
USER = Account("spend", "user-1", "2026-11-30")
USD = 10**18
CHARGE, RELEASE = Lease(60, "charge"), Lease(60, "release")


def _team(amount: int, cap: int | None = 100, unit: str = "usd") -> Entry:
    return Entry(TEAM, unit, amount, cap)


class LedgerContract:
    """The conformance suite for ledgers: subclass it in a test module, and say how to make one.

    ::

        class TestMyLedger(LedgerContract):
            def make_ledger(self) -> MyLedger:
                self.clock = Clock(1e9)
                return MyLedger(clock=self.clock)

            def advance(self, seconds: float) -> None:
                self.clock.advance(seconds)

    A fixture of yours that runs by itself (``autouse=True``) may put on ``self`` what `make_ledger` needs. Ledgers
    are closed after each test, where they have a ``close``. Async ledgers are driven in one event loop a test, but
    for one that uses three.
    """

    examples = 30
    """How many random histories are tried."""

    def make_ledger(self) -> Any:
        """A new ledger whose books are empty; called once for a test, and once for each random history."""
        raise NotImplementedError

    def advance(self, seconds: float) -> None:
        """Let the clock of the ledger that was made last go on."""
        raise NotImplementedError

    def another(self, ledger: Any) -> Any:
        """The same books, opened once more, as another process would; or the same object."""
        return ledger

    # -- driving -------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _closing(self) -> Any:
        self._opened: list[Any] = []
        with asyncio.Runner() as self._runner:
            yield
            for ledger in self._opened:
                self._close(ledger)

    def _close(self, ledger: Any) -> None:
        if hasattr(ledger, "close"):
            self._do(ledger.close())

    def _do(self, answer: Any) -> Any:
        """What a method answers, plain or async."""
        if not inspect.isawaitable(answer):
            return answer

        async def main() -> Any:
            return await answer

        return self._runner.run(main())

    def _open(self) -> Any:
        self._opened.append(self.make_ledger())
        return self._opened[-1]

    def _now(self, ledger: Any) -> float:
        answer = self._do(ledger.reserve("clock", [Entry(TEAM, "usd", 0, None, 1e17, 2e17)], CHARGE))
        assert isinstance(answer, WrongWindow), answer
        return answer.now

    def _check(self, ledger: Any, account: Account, unit: str, expected: Balance) -> None:
        found = self._do(ledger.balance(account, unit))
        assert found == expected, f"{account} {unit}: {found}, not {expected}"

    # -- the contract --------------------------------------------------------------------------

    def test_settling_turns_what_was_reserved_into_what_was_spent(self) -> None:
        """A call that cost less than its estimate gives the rest back; a reservation says where it left the account."""
        ledger = self._open()
        assert self._do(ledger.reserve("a", [_team(60)], CHARGE)) == (Balance(0, 60, 0),)
        self._check(ledger, TEAM, "usd", Balance(0, 60, 0))
        assert self._do(ledger.settle("a", {"usd": 25})) is True
        self._check(ledger, TEAM, "usd", Balance(25, 0, 0))
        two = [Entry(USER, "usd", 1, None), _team(3)]
        assert self._do(ledger.reserve("b", two, CHARGE)) == (Balance(0, 1, 0), Balance(25, 3, 0))

    def test_all_entries_fit_or_none_is_taken(self) -> None:
        """The first entry that doesn't fit is named with its balance, and the others hold nothing."""
        ledger = self._open()
        tight = Entry(USER, "usd", 11, 10)
        for entries in ([_team(11), tight], [tight, _team(101)]):
            answer = self._do(ledger.reserve("a", entries, CHARGE))
            assert answer == Shortfall(tight, Balance()), answer
        self._check(ledger, TEAM, "usd", Balance())
        assert self._do(ledger.reserve("a", [_team(11)], CHARGE)) == (Balance(0, 11, 0),), "the id may be tried again"

    def test_the_cap_itself_fits(self) -> None:
        """To the last 1e-18 of a unit, spent and reserved together."""
        ledger = self._open()
        cap = 12 * USD + 5
        self._do(ledger.reserve("a", [_team(7 * USD, cap)], CHARGE))
        self._do(ledger.settle("a", {"usd": 7 * USD}))
        assert self._do(ledger.reserve("b", [_team(2 * USD, cap)], CHARGE)) == (Balance(7 * USD, 2 * USD, 0),)
        full = Balance(7 * USD, 2 * USD, 0)
        above = _team(3 * USD + 6, cap)
        assert self._do(ledger.reserve("c", [above], CHARGE)) == Shortfall(above, full)
        assert self._do(ledger.reserve("c", [_team(3 * USD + 5, cap)], CHARGE)) == (Balance(7 * USD, 5 * USD + 5, 0),)

    def test_amounts_are_exact_however_large(self) -> None:
        """A grain beside the largest amount isn't lost, and sums may be larger than that."""
        ledger = self._open()
        for number in range(3):
            self._do(ledger.reserve(str(number), [_team(10**36, None), _team(1, None, "tokens")], CHARGE))
        self._do(ledger.settle("0", {"usd": 10**36 - 1, "tokens": 1}))
        self._do(ledger.settle("1", {"usd": 1, "tokens": 10**36}))
        self._check(ledger, TEAM, "usd", Balance(10**36, 10**36, 0))
        self._check(ledger, TEAM, "tokens", Balance(10**36 + 1, 1, 10**36 - 1))

    def test_nothing_costs_nothing_even_when_all_is_spent(self) -> None:
        """An entry of 0 fits an exhausted account, and says where a later charge goes."""
        ledger = self._open()
        assert self._do(ledger.reserve("a", [_team(0, cap=0)], CHARGE)) == (Balance(),)
        self._do(ledger.settle("a", {"usd": 7, "tokens": 5}))
        self._check(ledger, TEAM, "usd", Balance(7, 0, 7))
        self._check(ledger, TEAM, "tokens", Balance())

    def test_a_cap_may_change_between_calls(self) -> None:
        """Each reservation is held to the cap that it names: a lower one refuses, a higher one or none lets through."""
        ledger = self._open()
        self._do(ledger.reserve("a", [_team(60, 100)], CHARGE))
        assert isinstance(self._do(ledger.reserve("b", [_team(1, 50)], CHARGE)), Shortfall)
        assert self._do(ledger.reserve("b", [_team(60, 120)], CHARGE)) == (Balance(0, 120, 0),)
        assert self._do(ledger.reserve("c", [_team(60, None)], CHARGE)) == (Balance(0, 180, 0),)
        for name in "abc":
            self._do(ledger.settle(name, {"usd": 60}))
        self._check(ledger, TEAM, "usd", Balance(180, 0, 0))

    def test_a_request_delivered_twice_changes_nothing(self) -> None:
        """Reserve, settle and release count once; a release doesn't undo a settlement."""
        ledger = self._open()
        for _ in range(2):
            assert self._do(ledger.reserve("a", [_team(60)], CHARGE)) == (Balance(0, 60, 0),)
        for _ in range(2):
            assert self._do(ledger.settle("a", {"usd": 50})) is True
        self._do(ledger.release("a"))
        self._check(ledger, TEAM, "usd", Balance(50, 0, 0))

    @pytest.mark.parametrize("end", ["settle", "release", "expire", "hold"])
    def test_an_id_can_not_be_used_for_a_second_call(self, end: str) -> None:
        """A second call under an old id would run without a reservation, so it is an error."""
        ledger = self._open()
        self._do(ledger.reserve("a", [_team(1)], CHARGE))
        if end == "settle":
            self._do(ledger.settle("a", {}))
        elif end == "release":
            self._do(ledger.release("a"))
        elif end == "expire":
            self.advance(61)
        with pytest.raises(ConfigurationError, match="made before"):
            self._do(ledger.reserve("a", [_team(2)], CHARGE))

    def test_a_reservation_that_was_overtaken_by_its_release_holds_nothing(self) -> None:
        """Of a caller that gave up, the release may arrive first."""
        ledger = self._open()
        self._do(ledger.release("a"))
        with pytest.raises(ConfigurationError, match="made before"):
            self._do(ledger.reserve("a", [_team(1)], CHARGE))
        self._check(ledger, TEAM, "usd", Balance())

    @pytest.mark.parametrize(("lease", "expired"), [(CHARGE, Balance(60, 0, 0)), (RELEASE, Balance(0, 0, 0))])
    def test_a_lease_that_runs_out_is_charged_or_released(self, lease: Lease, expired: Balance) -> None:
        """What a crashed worker held becomes spent, or free, when its lease is over and not before."""
        ledger = self._open()
        self._do(ledger.reserve("a", [_team(60)], lease))
        self.advance(50)
        self._check(ledger, TEAM, "usd", Balance(0, 60, 0))
        self.advance(11)
        self._check(ledger, TEAM, "usd", expired)
        assert self._do(ledger.renew("a", lease)) is False

    def test_what_an_expiry_gave_back_can_be_reserved(self) -> None:
        """Nobody has to look at the account before."""
        ledger = self._open()
        self._do(ledger.reserve("a", [_team(100)], RELEASE))
        self.advance(61)
        assert self._do(ledger.reserve("b", [_team(100)], RELEASE)) == (Balance(0, 100, 0),)

    @pytest.mark.parametrize(
        ("lease", "paid", "after"),
        [
            (CHARGE, 45, Balance(45, 0, 0)),
            (CHARGE, 70, Balance(70, 0, 10)),
            (RELEASE, 45, Balance(45, 0, 45)),
            (RELEASE, 0, Balance(0, 0, 0)),
        ],
    )
    def test_a_settlement_after_expiry_takes_its_place(self, lease: Lease, paid: int, after: Balance) -> None:
        """The true cost stands, once; what nothing was held for is the overdraft; the caller is told each time."""
        ledger = self._open()
        self._do(ledger.reserve("a", [_team(60)], lease))
        self.advance(100)
        for _ in range(2):
            assert self._do(ledger.settle("a", {"usd": paid})) is False
        self._check(ledger, TEAM, "usd", after)

    def test_a_late_settlement_comes_on_top_of_what_others_took(self) -> None:
        """Spent may exceed the cap then, by no more than the overdraft, and nobody gets anything more."""
        ledger = self._open()
        self._do(ledger.reserve("a", [_team(60)], RELEASE))
        self.advance(61)
        self._do(ledger.reserve("b", [_team(100)], RELEASE))
        self._do(ledger.settle("a", {"usd": 60}))
        self._do(ledger.settle("b", {"usd": 100}))
        self._check(ledger, TEAM, "usd", Balance(160, 0, 60))
        assert isinstance(self._do(ledger.reserve("c", [_team(1)], RELEASE)), Shortfall)

    def test_a_call_that_never_ran_gets_back_what_its_expiry_charged(self) -> None:
        """A worker that was only asleep says that nothing was bought."""
        ledger = self._open()
        self._do(ledger.reserve("a", [_team(60)], CHARGE))
        self.advance(100)
        self._check(ledger, TEAM, "usd", Balance(60, 0, 0))
        self._do(ledger.release("a"))
        self._check(ledger, TEAM, "usd", Balance())

    def test_a_renewed_lease_begins_anew(self) -> None:
        """A person may take longer than one lease, as long as somebody renews it; the last policy holds."""
        ledger = self._open()
        self._do(ledger.reserve("a", [_team(60)], RELEASE))
        for _ in range(3):
            self.advance(50)
            assert self._do(ledger.renew("a", CHARGE)) is True
        self.advance(50)
        self._check(ledger, TEAM, "usd", Balance(0, 60, 0))
        self.advance(11)
        self._check(ledger, TEAM, "usd", Balance(60, 0, 0))
        assert self._do(ledger.renew("never", CHARGE)) is False

    def test_a_window_opens_and_closes_by_the_clock_of_the_ledger(self) -> None:
        """Hosts whose clocks differ book on the same day; what was reserved in time is settled in its window."""
        ledger = self._open()
        now = self._now(ledger)
        today = Entry(TEAM, "usd", 10, 100, now - 50, now + 50)
        tomorrow = Entry(USER, "usd", 10, 100, now + 50, now + 150)
        assert self._do(ledger.reserve("a", [today], CHARGE)) == (Balance(0, 10, 0),)
        early = self._do(ledger.reserve("b", [_team(10), tomorrow], CHARGE))
        assert isinstance(early, WrongWindow), early
        assert now <= early.now < now + 50
        self.advance(55)
        late = self._do(ledger.reserve("c", [today], CHARGE))
        assert isinstance(late, WrongWindow), late
        assert now + 50 <= late.now < now + 150
        assert self._do(ledger.reserve("b", [tomorrow], CHARGE)) == (Balance(0, 10, 0),), "the id may be tried again"
        assert self._do(ledger.reserve("a", [today], CHARGE)) == (Balance(0, 10, 0),), "delivered twice"
        assert self._do(ledger.settle("a", {"usd": 4})) is True
        self._check(ledger, TEAM, "usd", Balance(4, 0, 0))
        full = Entry(TEAM, "usd", 97, 100, now - 50, now + 50)
        assert isinstance(self._do(ledger.reserve("d", [full], CHARGE)), WrongWindow), "not what a past window lacks"

    def test_what_can_not_be_booked_changes_nothing(self) -> None:
        """Unknown ids, amounts out of range and doubled accounts are errors."""
        ledger = self._open()
        self._do(ledger.reserve("a", [_team(5), _team(5, unit="tokens")], CHARGE))
        for wrong in (-1, 10**36 + 1):
            with pytest.raises(ConfigurationError, match="at least 0"):
                self._do(ledger.settle("a", {"tokens": 1, "usd": wrong}))
        with pytest.raises(LookupError):
            self._do(ledger.settle("b", {"usd": 1}))
        with pytest.raises(ConfigurationError, match="twice"):
            self._do(ledger.reserve("c", [_team(1), _team(2)], CHARGE))
        self._check(ledger, TEAM, "usd", Balance(0, 5, 0))
        self._check(ledger, TEAM, "tokens", Balance(0, 5, 0))

    def test_accounts_differ_in_every_field(self) -> None:
        """Names, keys and windows that look alike when they are joined are still different accounts."""
        ledger = self._open()
        odd = [Account(f"a{joint}b", "c", "d") for joint in _JOINTS]
        odd += [Account("a", f"b{joint}c", "d") for joint in _JOINTS]
        odd += [Account("a", "b", f"c{joint}d") for joint in _JOINTS]
        odd += [Account(*each) for end in _ENDS for each in ((end, "", ""), ("", end, ""), ("", "", end))]
        for number, account in enumerate(odd):
            entries = [Entry(account, "usd", number + 1, None), Entry(account, "total", 9, None)]
            self._do(ledger.reserve(str(number), entries, CHARGE))
        for number, account in enumerate(odd):
            self._check(ledger, account, "usd", Balance(0, number + 1, 0))

    def test_the_books_are_the_same_for_all_who_open_them(self) -> None:
        """What one reserved the other sees, settles and renews."""
        ledger = self._open()
        other = self.another(ledger)
        self._opened.insert(0, other)
        self._do(ledger.reserve("a", [_team(60)], CHARGE))
        self._check(other, TEAM, "usd", Balance(0, 60, 0))
        assert self._do(other.renew("a", CHARGE)) is True
        assert self._do(other.settle("a", {"usd": 50})) is True
        self._check(ledger, TEAM, "usd", Balance(50, 0, 0))

    def test_an_async_ledger_is_used_in_more_than_one_event_loop(self) -> None:
        """loopguard renews leases in a loop of its own, while the program's is running, and again after that."""
        ledger = self._open()
        if not inspect.iscoroutinefunction(ledger.reserve):
            pytest.skip("this ledger isn't async")

        async def elsewhere() -> None:
            assert await ledger.renew("a", CHARGE) is True
            if hasattr(ledger, "close"):
                await ledger.close()

        async def main() -> None:
            await ledger.reserve("a", [_team(3)], CHARGE)
            await asyncio.to_thread(asyncio.run, elsewhere())
            assert await ledger.settle("a", {"usd": 2}) is True

        self._runner.run(main())
        asyncio.run(self._again(ledger))

    async def _again(self, ledger: Any) -> None:
        assert await ledger.balance(TEAM, "usd") == Balance(2, 0, 0)
        if hasattr(ledger, "close"):
            await ledger.close()

    @pytest.mark.parametrize("wave", range(5), ids=lambda wave: f"wave {wave + 1}")  # a race isn't lost each time
    def test_many_at_once_never_reserve_more_than_the_cap(self, wave: int) -> None:
        """Of 32 that ask at once, as eight processes would, exactly as many get through as fit."""
        ledger = self._open()
        opened = [ledger, *(self.another(ledger) for _ in range(7))]
        self._opened[:0] = opened[1:]
        entries = [_team(3, 50), Entry(USER, "usd", 3, None)]
        if inspect.iscoroutinefunction(ledger.reserve):

            async def spend(number: int) -> bool:
                mine = opened[number % 8]
                if isinstance(await mine.reserve(str(number), entries, CHARGE), Shortfall):
                    return False
                await mine.settle(str(number), {"usd": 3})
                return True

            async def all_at_once() -> list[bool]:
                return await asyncio.gather(*(spend(number) for number in range(32)))

            through = self._runner.run(all_at_once())
        else:

            def spend_here(number: int) -> bool:
                mine = opened[number % 8]
                if isinstance(mine.reserve(str(number), entries, CHARGE), Shortfall):
                    return False
                mine.settle(str(number), {"usd": 3})
                return True

            through = self._in_threads(32, spend_here)
        assert sum(through) == 16, through
        for account in (TEAM, USER):
            self._check(ledger, account, "usd", Balance(48, 0, 0))

    @staticmethod
    def _in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
        barrier = threading.Barrier(count)
        results: list[Any] = []

        def run(number: int) -> None:
            barrier.wait(30)
            results.append(work(number))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(results) == count, "a thread failed, see above"
        return results

    def test_accounts_are_listed(self) -> None:
        """Where the ledger can list its accounts, each stands there once, with its balance, in order."""
        ledger = self._open()
        if not hasattr(ledger, "accounts"):
            pytest.skip("this ledger doesn't list its accounts")
        self._do(ledger.reserve("a", [Entry(USER, "usd", 5, None), _team(7), _team(1, None, "tokens")], CHARGE))
        self._do(ledger.settle("a", {"usd": 4}))
        self._do(ledger.reserve("b", [_team(2)], CHARGE))
        team = [(TEAM, "tokens", Balance()), (TEAM, "usd", Balance(4, 2, 0))]
        assert list(self._do(ledger.accounts())) == [*team, (USER, "usd", Balance(4, 0, 0))]
        assert list(self._do(ledger.accounts("team-a"))) == team
        assert list(self._do(ledger.accounts("nobody"))) == []
        self.advance(61)
        assert list(self._do(ledger.accounts("team-a")))[1] == (TEAM, "usd", Balance(6, 0, 0)), "the lease ran out"

    def test_any_history_keeps_the_books(self) -> None:
        """Any order of requests, deliveries in duplicate and passing time, against plain sums."""
        run_state_machine_as_test(
            type("History", (_History,), {"contract": self}),
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )


_JOINTS = ":/|.,-_% \t\n\x1f"
_ENDS = ("x", "X", "x ", "x\n", "x\\", "x'", 'x"', "x*", "x%", "é", "e\u0301", "É")
_CAPS = {(TEAM, "usd"): 100, (TEAM, "tokens"): 40, (USER, "usd"): 30, (USER, "tokens"): None}
_PLACES = st.dictionaries(st.sampled_from(list(_CAPS)), st.integers(0, 30))
_AMOUNTS = st.dictionaries(st.sampled_from(["usd", "tokens"]), st.integers(0, 60))


class _History(RuleBasedStateMachine):
    """What a ledger should say, worked out anew from everything that was asked of it."""

    contract: LedgerContract
    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = self.contract.make_ledger()
        self.do = self.contract._do
        self.now = 0.0
        self.entries: dict[str, tuple[Entry, ...]] = {}
        self.leases: dict[str, Lease] = {}
        self.ends: dict[str, float] = {}
        self.states: dict[str, str] = {}
        self.late: dict[str, bool] = {}
        self.paid: dict[str, dict[str, int]] = {}
        self.overdraft = dict.fromkeys(_CAPS, 0)

    def teardown(self) -> None:
        self.contract._close(self.ledger)

    def expected(self, account: Account, unit: str) -> Balance:
        spent = reserved = 0
        for call, entries in self.entries.items():
            for entry in entries:
                if (entry.account, entry.unit) != (account, unit):
                    continue
                state = self.states[call]
                reserved += entry.amount if state == "held" else 0
                spent += entry.amount if state == "expired" and self.leases[call].on_expiry == "charge" else 0
                spent += self.paid[call].get(unit, 0) if state == "over" else 0
        return Balance(spent, reserved, self.overdraft[account, unit])

    def balances(self, entries: Sequence[Entry]) -> tuple[Balance, ...]:
        return tuple(self.expected(entry.account, entry.unit) for entry in entries)

    @rule(
        target=ids,
        asked=_PLACES,
        # never a whole number: a lease doesn't run out just when somebody looks
        seconds=st.integers(1, 30).map(lambda whole: whole + 0.5),
        on_expiry=st.sampled_from(["charge", "release"]),
    )
    def reserve(self, asked: dict[tuple[Account, str], int], seconds: float, on_expiry: Any) -> Any:
        call = f"call-{len(self.entries)}"
        entries = tuple(Entry(*place, amount, _CAPS[place]) for place, amount in asked.items())
        lease = Lease(seconds, on_expiry)
        short = next((entry for entry in entries if self.above(entry)), None)
        answer = self.do(self.ledger.reserve(call, entries, lease))
        if short is not None:
            assert answer == Shortfall(short, self.expected(short.account, short.unit)), answer
            return multiple()
        self.entries[call], self.leases[call], self.states[call] = entries, lease, "held"
        self.late[call] = False
        self.ends[call] = self.now + seconds
        assert answer == self.balances(entries), answer
        assert self.do(self.ledger.reserve(call, entries, lease)) == answer, "delivered twice"
        return call

    def above(self, entry: Entry) -> bool:
        now = self.expected(entry.account, entry.unit)
        return bool(entry.amount and entry.cap is not None and now.spent + now.reserved + entry.amount > entry.cap)

    @rule(id=ids, amounts=_AMOUNTS)
    def settle(self, id: str, amounts: dict[str, int]) -> None:
        assert self.do(self.ledger.settle(id, amounts)) is not self.late[id]
        self.end(id, amounts)

    @rule(id=ids)
    def release(self, id: str) -> None:
        self.do(self.ledger.release(id))
        self.end(id, {})

    def end(self, id: str, amounts: dict[str, int]) -> None:
        if self.states[id] == "over":
            return
        held = self.states[id] == "held" or self.leases[id].on_expiry == "charge"
        for entry in self.entries[id]:
            above = amounts.get(entry.unit, 0) - (entry.amount if held else 0)
            self.overdraft[entry.account, entry.unit] += max(0, above)
        self.states[id], self.paid[id] = "over", amounts

    @rule(id=ids, seconds=st.integers(1, 30).map(lambda whole: whole + 0.5))
    def renew(self, id: str, seconds: float) -> None:
        lease = Lease(seconds, self.leases[id].on_expiry)
        held = self.states[id] == "held"
        assert self.do(self.ledger.renew(id, lease)) is held
        if held:
            self.ends[id] = self.now + seconds

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        self.contract.advance(seconds)
        self.now += seconds
        for call, state in self.states.items():
            if state == "held" and self.ends[call] <= self.now:
                self.states[call], self.late[call] = "expired", True

    @invariant()
    def the_books_are_right(self) -> None:
        for (account, unit), cap in _CAPS.items():
            balance = self.do(self.ledger.balance(account, unit))
            assert balance == self.expected(account, unit), (account, unit, balance)
            assert cap is None or balance.spent + balance.reserved <= cap + balance.overdraft
