"""PeriodCap: one unit of one key's account in a ledger, hour by hour, day by day or month by month."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from loopguard import _events as events
from loopguard._amounts import SCALE, amount, decimal, money, plain
from loopguard._cells import NO_ALERT
from loopguard._pipeline import LOCK
from loopguard._run import Run
from loopguard.budgets._keeper import Charge, Hold, Keeper
from loopguard.budgets._windows import Window, window_at
from loopguard.budgets.ledger import Account, Balance, Entry
from loopguard.exceptions import BudgetExceeded, LedgerError
from loopguard.redaction import redact_error, redact_text

if TYPE_CHECKING:
    from loopguard.budgets.budget import Budget, Costed

__all__ = ["ADVICE", "PeriodCap", "charges"]

ADVICE = "It was not run: make a cheaper call, or answer with what you have."


class PeriodCap:
    """A cap on one unit of one key's account, in whatever window it is now."""

    partial = False
    external = True

    def __init__(self, budget: Budget, run: Run, unit: str, limit: int, key: str, keeper: Keeper) -> None:
        self.budget = budget
        self.run = run
        self.unit = unit
        self.limit = limit
        self.key = key
        self.keeper = keeper
        self.place = (keeper, budget.ledger_name, key, budget.per, budget.tz, unit)
        """Whose account it is, whatever the window."""
        share = budget.warn_at
        self.line = NO_ALERT if share is None or not limit else -(-limit * amount(share, "warn_at") // SCALE)
        self._warned: Window | None = None
        self._window: Window | None = None

    # -- where it stands -------------------------------------------------------------------------

    @property
    def window(self) -> Window:
        """The window that it is now, by the ledger's clock."""
        now = self.keeper.now()
        window = self._window
        if window is None or not window.holds(now):
            window = self._window = window_at(self.budget.per, self.budget.zone, now)
        return window

    def entry(self, exact: int, enforced: bool) -> Entry:
        """What a call asks of the account now."""
        window = self.window
        account = Account(self.budget.ledger_name, self.key, window.text)
        return Entry(account, self.unit, exact, self.limit if enforced else None, window.begins, window.ends)

    @property
    def known(self) -> Balance:
        """Where it stood in this window when the ledger last told."""
        return self.keeper.view(Account(self.budget.ledger_name, self.key, self.window.text), self.unit)

    def used(self) -> int:
        """What was spent and reserved, as far as it is known."""
        known = self.known
        return known.spent + known.reserved

    def spent(self) -> int:
        """What was spent, as far as it is known."""
        return self.known.spent

    def brief(self) -> str:
        """For `Run.brief`."""
        used, unit = self.used(), self.unit
        text = money(used, unit) if unit == "usd" else format(decimal(used), "f")
        return f"{text} of {money(self.limit, unit)} {self._period}"

    @property
    def _period(self) -> str:
        return "in total" if self.budget.per == "total" else f"per {self.budget.per}"

    def title(self, window: str) -> str:
        """The budget as a message calls it: its name, key and window, but no secret."""
        name = f" {self.budget.name!r}" if self.budget.name else ""
        key = f" for {redact_text(self.key)!r}" if self.key else ""
        where = "" if self.budget.per == "total" else f" ({window})"
        return f"the budget{name} of {plain(self.limit, self.unit)} {self._period}{key}{where}"

    def refusal(self, call: Costed, entry: Entry, stands: Balance, advice: str = ADVICE) -> BudgetExceeded:
        """The refusal of a call that doesn't fit beside what stands in the books."""
        title = self.title(entry.account.window)
        used, unit = stands.spent + stands.reserved, self.unit
        if unit == "tool_calls":
            reason = f"{call.name} was not run: {title} is used up. Answer now with what you have."
        else:
            left = plain(max(0, self.limit - used), unit)
            held = f" and {plain(stands.reserved, unit)} reserved by calls in flight" if stands.reserved else ""
            reason = (
                f"{call.name} may cost {plain(entry.amount, unit)}, but only {left} is left of {title} "
                f"({plain(stands.spent, unit)} spent{held}). {advice}"
            )
        return self._refuse(call, reason, used)

    def unknown(self, call: Costed, exc: LedgerError, exhausted: str) -> BudgetExceeded:
        """The refusal where nobody can say what is left."""
        title, name = self.title(self.window.text), self.keeper.name
        reason = (
            f"{call.name} was not run: what is left of {title} can't be found out, since its ledger {name} can't be "
            f"asked{exhausted} ({redact_error(exc)}). Answer with what you have."
        )
        return self._refuse(call, reason, None)

    def _refuse(self, call: Costed, reason: str, used: int | None) -> BudgetExceeded:
        value = None if used is None else decimal(used)
        return BudgetExceeded(
            "budget", "Budget", call.name, reason, decimal(self.limit), value, self.run.name, self.run.id
        )

    # -- what it tells ---------------------------------------------------------------------------

    def watch(self, entry: Entry) -> None:
        """Tell once in a window that `warn_at` was passed."""
        window, spent = self.window, self.keeper.view(entry.account, entry.unit).spent
        if spent < self.line or entry.account.window != window.text or self._warned == window:
            return
        with LOCK:
            if self._warned == window:
                return
            self._warned = window
        self.run.emit(
            events.BudgetWarned,
            budget=self.budget.name or self.unit,
            unit=self.unit,
            spent=decimal(spent),
            limit=decimal(self.limit),
        )

    def overdrawn(self, entry: Entry, exact: int, late: bool) -> None:
        """More was booked than was held for it."""
        if exact > 0:
            self.run.emit(
                events.BudgetOverdrawn,
                budget=self.budget.name or self.unit,
                unit=self.unit,
                key=redact_text(self.key),
                window=entry.account.window,
                amount=decimal(exact),
                late=late,
            )

    def charge(self, exact: int) -> None:
        """Book an amount that nothing was reserved for; soon, not at once."""
        for job in charges(self.keeper, None, [(self, self.entry(exact, True))], {self.unit: exact}):
            self.keeper.post(job)


def charges(
    keeper: Keeper, hold: Hold | None, entries: Sequence[tuple[PeriodCap, Entry]], charged: Mapping[str, int]
) -> Iterator[Charge]:
    """What books amounts that nothing is held for any more, or never was.

    Where it was allowed locally it counts against the allowance until it is booked.
    """
    caps = [cap for cap, entry in entries if charged.get(entry.unit)]
    asked = [replace(entry, amount=charged[entry.unit]) for _, entry in entries if charged.get(entry.unit)]
    local = [((entry.account, entry.unit), entry.amount) for entry in asked] if hold is not None and hold.local else []
    if hold is not None and not hold.local:  # the ledger has agreed to the window
        asked = [replace(entry, begins=None, ends=None) for entry in asked]
    at = time.time()

    def dated() -> list[Entry]:
        windows = [window_at(cap.budget.per, cap.budget.zone, at + keeper.offset) for cap in caps]
        anew = [replace(entry, begins=None, ends=None) for entry in asked]
        return [
            replace(entry, account=replace(entry.account, window=window.text))
            for entry, window in zip(anew, windows, strict=True)
        ]

    def booked(entries: Sequence[Entry], fits: bool) -> None:
        keeper.away = False
        keeper.allow([(place, -exact) for place, exact in local])
        for cap, entry in zip(caps, entries, strict=True):
            keeper.moved(entry.account, entry.unit, entry.amount, 0)
            cap.overdrawn(entry, 0 if fits else entry.amount, late=False)
            cap.watch(entry)

    if asked:
        keeper.allow(local)
        yield Charge(asked, dated, booked)
