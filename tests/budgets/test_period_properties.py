"""Any history over several ledgers, with failures and interruptions anywhere: nothing stays held, nothing is lost."""

from __future__ import annotations

import asyncio
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loopguard import Budget, BudgetExceeded, Guard, LedgerError, LoopGuardWarning
from loopguard.budgets import MemoryLedger
from loopguard.budgets._books import Books, Reservation
from loopguard.budgets._period import PeriodCap
from loopguard.typing import Ask, Lease

USD = 10**18
LEDGERS = 3


class Flaky(MemoryLedger):
    """Fails before or after it has done what it was asked, as the script says."""

    def __init__(self, script: Iterator[str]) -> None:
        super().__init__()
        self.script = script

    def _try(self, work: Any) -> Any:
        fate = next(self.script, "fine")
        if fate == "request lost":
            raise LedgerError(fate)
        done = work()
        if fate == "answer lost":
            raise LedgerError(fate)
        return done

    def reserve(self, id: str, entries: Any, lease: Lease) -> Any:
        return self._try(lambda: super(Flaky, self).reserve(id, entries, lease))

    def settle(self, id: str, amounts: Any) -> Any:
        return self._try(lambda: super(Flaky, self).settle(id, amounts))

    def release(self, id: str) -> Any:
        return self._try(lambda: super(Flaky, self).release(id))


@dataclass(frozen=True)
class Step:
    """One call: what it asks, how it ends, and when it is interrupted."""

    usd: int
    tokens: int
    paid: int
    end: str
    cut: int | None
    """At which request to a ledger it is interrupted."""
    late: int


steps = st.builds(
    Step,
    usd=st.integers(0, 5),
    tokens=st.integers(0, 5),
    paid=st.integers(0, 7),
    end=st.sampled_from(["settle", "post", "release", "abandon", "stay"]),
    cut=st.none() | st.integers(0, 6),
    late=st.integers(0, 1) | st.just(0),
)
fates = st.lists(st.sampled_from(["fine", "fine", "fine", "request lost", "answer lost"]), max_size=60)
caps = st.tuples(*[st.integers(0, 30)] * LEDGERS)


def drive(generator: Any, cut: int | None) -> Any:
    """Perform its effects, and interrupt it before, or after, one of them."""
    count = 0
    value: Any = None
    error: BaseException | None = None
    try:
        while True:
            effect: Ask = generator.throw(error) if error is not None else generator.send(value)
            value = error = None
            if cut is not None and count >= cut:
                if count % 2:  # it was done, and nobody heard of it
                    try:
                        effect.fn(*effect.args)
                    except Exception:  # as lost as the answer
                        pass
                generator.throw(asyncio.CancelledError())
                raise AssertionError("it went on")
            count += 1
            try:
                value = effect.fn(*effect.args)
            except Exception as exc:  # the generator's to handle
                error = exc
    except StopIteration as stop:
        return stop.value


@given(script=st.lists(steps, max_size=12), fates=fates, caps=caps, local=st.booleans())
def test_any_history_over_three_ledgers_balances(
    script: list[Step], fates: list[str], caps: tuple[int, ...], local: bool
) -> None:
    """Once all is delivered: spent is what the calls cost, nothing is reserved, and only overdrafts exceed a cap."""
    fate = iter(fates)
    options: dict[str, Any] = {}
    if local:
        options = {"on_ledger_error": "allow_local", "local_allowance": {"usd": 4, "tokens": 4}}
    ledgers = [Flaky(fate) for _ in range(LEDGERS)]
    budgets = [
        Budget(usd=cap, tokens=cap, per="total", ledger=ledger, lease=1e6, **options)
        for cap, ledger in zip(caps, ledgers, strict=True)
    ]
    paid: dict[str, int] = defaultdict(int)
    staying: list[tuple[Reservation, dict[str, int]]] = []
    with warnings.catch_warnings(), Guard(*budgets).scope("property") as run:
        warnings.simplefilter("ignore", LoopGuardWarning)
        books = Books([(cap, True) for budget in budgets for cap in budget.caps(run) if isinstance(cap, PeriodCap)])
        call = SimpleNamespace(name="call", run=run)
        for step in script:
            asked = {"usd": step.usd * USD, "tokens": step.tokens * USD}
            charged = {"usd": step.paid * USD, "tokens": step.tokens * USD}
            try:
                made = drive(books.reserve(call, asked, "release", []), step.cut)
            except asyncio.CancelledError:
                continue
            if isinstance(made, BudgetExceeded):
                continue
            try:
                if step.end == "settle":
                    drive(books.settle(made, charged), None if step.cut is None else step.cut - 3)
                elif step.end == "release":
                    drive(books.settle(made, None), None if step.cut is None else step.cut - 3)
            except asyncio.CancelledError:
                pass
            if step.end in ("settle", "release"):  # as the hook does, whatever came of it: it is said once
                books.post(made, charged)
            if step.end in ("post", "abandon"):
                books.post(made, charged if step.end == "post" else None)
            if step.end == "stay":
                staying.append((made, charged))
            if step.end in ("settle", "post", "stay"):
                for unit, exact in charged.items():
                    paid[unit] += exact
            if step.late and step.end in ("settle", "post"):
                books.late(made, {"usd": USD})
                paid["usd"] += USD
        for made, charged in staying:
            drive(books.settle(made, charged), None)
            drive(books.settle(made, charged), None)  # however often it is said
        for ledger, budget, cap in zip(ledgers, budgets, caps, strict=True):
            ledger.script = iter(())
            while budget.keeper._outbox:
                budget.keeper.flush(5)
            budget.keeper.flush(5)
            assert not budget.keeper.local
            assert not budget.keeper._holds
            found = {unit: balance for _, unit, balance in ledger.accounts()}
            for unit, balance in found.items():
                assert balance.reserved == 0
                assert balance.spent == paid[unit], unit
                assert balance.spent <= cap * USD + balance.overdraft
            assert {unit for unit, exact in paid.items() if exact} <= set(found)
