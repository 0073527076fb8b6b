"""Budgets of a period: caps on accounts in ledgers, reserved and settled for each call."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from loopguard import _events as events
from loopguard._amounts import SCALE, amount, decimal, money, plain
from loopguard._call import ToolCall, new_id
from loopguard._cells import NO_ALERT
from loopguard._pipeline import LOCK, Effect, Proceed, Steps
from loopguard._run import Run
from loopguard._warn import warn
from loopguard.budgets._keeper import Charge, Hold, Job, Keeper, Release, Settlement
from loopguard.budgets._windows import Window, window_at
from loopguard.budgets.ledger import Account, Entry, Lease, Shortfall, WrongWindow
from loopguard.exceptions import BudgetExceeded, LedgerError
from loopguard.redaction import redact_error, redact_text

if TYPE_CHECKING:
    from loopguard.budgets.budget import Budget, Costed

__all__ = ["Books", "PeriodCap", "Reservation", "ToolBooks"]

_TRIES = 3
"""How often a reservation is asked for in another window, should midnight come between."""
_ADVICE = "It was not run: make a cheaper call, or answer with what you have."


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

    def used(self) -> int:
        """What was spent and reserved in this window when the ledger last told."""
        known = self.keeper.view(Account(self.budget.ledger_name, self.key, self.window.text), self.unit)
        return known.spent + known.reserved

    def spent(self) -> int:
        """What was spent."""
        return self.keeper.view(Account(self.budget.ledger_name, self.key, self.window.text), self.unit).spent

    def brief(self) -> str:
        """For `Run.brief`."""
        used, unit = self.used(), self.unit
        text = money(used, unit) if unit == "usd" else format(decimal(used), "f")
        return f"{text} of {money(self.limit, unit)} {self._period}"

    @property
    def _period(self) -> str:
        return "in total" if self.budget.per == "total" else f"per {self.budget.per}"

    @property
    def title(self) -> str:
        """The budget as a message calls it: its name, key and window, but no secret."""
        name = f" {self.budget.name!r}" if self.budget.name else ""
        key = f" for {redact_text(self.key)!r}" if self.key else ""
        window = "" if self.budget.per == "total" else f" ({self.window.text})"
        return f"the budget{name} of {plain(self.limit, self.unit)} {self._period}{key}{window}"

    def refusal(self, call: Costed, exact: int, advice: str = _ADVICE) -> BudgetExceeded:
        """The refusal of a call that doesn't fit."""
        known = self.keeper.view(Account(self.budget.ledger_name, self.key, self.window.text), self.unit)
        if self.unit == "tool_calls":
            reason = f"{call.name} was not run: {self.title} is used up. Answer now with what you have."
        else:
            left = plain(max(0, self.limit - known.spent - known.reserved), self.unit)
            held = f" and {plain(known.reserved, self.unit)} reserved by calls in flight" if known.reserved else ""
            reason = (
                f"{call.name} may cost {plain(exact, self.unit)}, but only {left} is left of {self.title} "
                f"({plain(known.spent, self.unit)} spent{held}). {advice}"
            )
        return self._refuse(call, reason, known.spent + known.reserved)

    def unknown(self, call: Costed, exc: LedgerError, exhausted: str) -> BudgetExceeded:
        """The refusal where nobody can say what is left."""
        reason = (
            f"{call.name} was not run: what is left of {self.title} can't be found out, since its ledger "
            f"{self.keeper.name} can't be asked{exhausted} ({redact_error(exc)}). Answer with what you have."
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
        for job in _charges(self.keeper, None, [(self, self.entry(exact, True))], {self.unit: exact}):
            self.keeper.post(job)


class Reservation:
    """What one call holds in the ledgers of its chain."""

    __slots__ = ("amounts", "open", "parts")

    def __init__(self, amounts: Mapping[str, int]) -> None:
        self.amounts = amounts
        self.parts: list[tuple[Keeper, Hold | None, list[tuple[PeriodCap, Entry]]]] = []
        """Ledger by ledger what is held there, None where nothing had to be, and where its charges go."""
        self.open = True


class Books:
    """The caps of one chain that are in ledgers, outermost first, ledger by ledger.

    The generators yield effects, in the colour of whatever drives them.
    """

    def __init__(self, caps: Iterable[tuple[PeriodCap, bool]]) -> None:
        tightest: dict[Any, tuple[PeriodCap, bool]] = {}
        for cap, enforced in caps:  # one account may stand on a chain more than once
            known = tightest.setdefault(cap.place, (cap, enforced))
            if (not enforced, cap.limit) < (not known[1], known[0].limit):
                tightest[cap.place] = (cap, enforced)
        self.ledgers: dict[Keeper, list[tuple[PeriodCap, bool]]] = {}
        for cap, enforced in tightest.values():
            self.ledgers.setdefault(cap.keeper, []).append((cap, enforced))

    def reserve(
        self,
        call: Any,
        amounts: Mapping[str, int],
        crashed: Literal["charge", "release"],
        observed: list[BudgetExceeded],
        advice: Callable[[PeriodCap], str] = lambda cap: _ADVICE,
    ) -> Generator[Effect, Any, Reservation | BudgetExceeded]:
        """Reserve in every ledger, outermost first, or in none; the refusal of the first that says no.

        ``crashed``: what becomes of it if this process dies and the budget doesn't say. ``observed`` gets the
        refusals of budgets that don't enforce.
        """
        made = Reservation(amounts)
        try:
            for keeper, caps in self.ledgers.items():
                refusal = yield from self._reserve(keeper, caps, call, made, crashed, observed, advice)
                if refusal is not None:
                    yield from self.settle(made, None)
                    return refusal
        except BaseException:
            self.post(made, None)
            raise
        return made

    def _reserve(
        self,
        keeper: Keeper,
        caps: Sequence[tuple[PeriodCap, bool]],
        call: Any,
        made: Reservation,
        crashed: Literal["charge", "release"],
        observed: list[BudgetExceeded],
        advice: Callable[[PeriodCap], str],
    ) -> Generator[Effect, Any, BudgetExceeded | None]:
        def asked() -> list[tuple[PeriodCap, Entry]]:
            return [(cap, cap.entry(made.amounts.get(cap.unit, 0), enforced)) for cap, enforced in caps]

        entries = asked()
        if not any(entry.amount for _, entry in entries):  # what it may report nevertheless is booked then
            made.parts.append((keeper, None, entries))
            return None
        yield from keeper.drain()
        name, lease = new_id("hold"), _lease([cap.budget for cap, _ in caps], crashed)
        try:
            for _ in range(_TRIES):
                answer = yield keeper.ask(keeper.ledger.reserve, name, [entry for _, entry in entries], lease)
                if not isinstance(answer, WrongWindow):
                    break
                keeper.heard(answer.now)
                entries = asked()
            else:
                raise LedgerError(f"by its clock it was another window {_TRIES} times")
        except LedgerError as exc:
            keeper.post(Release(name))  # it may have come through
            refusal = _allow(keeper, caps, entries, call, exc, observed)
            if refusal is None:
                hold = Hold(keeper, name, [entry for _, entry in entries], lease)
                hold.local = True
                made.parts.append((keeper, hold, entries))
            return refusal
        except BaseException:  # whether it came through nobody knows
            keeper.post(Release(name))
            raise
        keeper.away = False
        if isinstance(answer, Shortfall):
            keeper.saw(answer.entry.account, answer.entry.unit, answer.balance)
            cap = next(cap for cap, entry in entries if entry == answer.entry)
            return cap.refusal(call, answer.entry.amount, advice(cap))
        hold = Hold(keeper, name, [entry for _, entry in entries], lease)
        keeper.hold(hold)
        made.parts.append((keeper, hold, entries))
        for (cap, enforced), (_, entry), balance in zip(caps, entries, answer, strict=True):
            keeper.saw(entry.account, entry.unit, balance)
            if not enforced and entry.amount and balance.spent + balance.reserved > cap.limit:
                observed.append(cap.refusal(call, entry.amount))
            cap.watch(entry)
        return None

    def settle(self, made: Reservation, charged: Mapping[str, int] | None) -> Steps:
        """Turn what was reserved into what was spent, once; None gives it back, the call never ran."""
        jobs = list(_closing(made, charged))
        for number, (keeper, job) in enumerate(jobs):
            try:
                yield from keeper.deliver([job])
            except BaseException:
                for other, left in jobs[number + 1 :]:
                    other.post(left)
                raise

    def post(self, made: Reservation, charged: Mapping[str, int] | None) -> None:
        """The same where nothing can be waited for: it is done soon."""
        for keeper, job in _closing(made, charged):
            keeper.post(job)

    def late(self, made: Reservation, charged: Mapping[str, int]) -> None:
        """A call that is settled has reported more: it goes where the call went."""
        for keeper, hold, entries in made.parts:
            for job in _charges(keeper, hold, entries, charged):
                keeper.post(job)


class ToolBooks(Books):
    """The same for the calls of one tool, as a hook inside the admission."""

    def hook(self, call: ToolCall, proceed: Proceed) -> Steps:
        """Reserve for an admitted call; settle when it is over, or give back what it didn't use."""
        line = call.line
        assert line is not None
        refusal = yield from self.admit(call)
        if refusal is not None:
            raise call.plan.refuse(call, refusal)
        try:
            result = yield from proceed(call)
            yield from self.close(line[-1])
            return result
        except Exception:
            yield from self.close(line[-1])
            raise
        finally:  # nothing can be waited for when it was cancelled or left
            if line[-1].held is not None:
                self.post(line[-1].held, _charged(line[-1]))

    def admit(self, call: ToolCall) -> Generator[Effect, Any, BudgetExceeded | None]:
        """Reserve what an admitted call may cost; the refusal if a ledger says no."""
        observed: list[BudgetExceeded] = []
        made = yield from self.reserve(call, _counted(call, call.amounts), "release", observed)
        if observed:
            call.observed = [*(call.observed or ()), *observed]
        if isinstance(made, BudgetExceeded):
            return made
        call.held = made
        return None

    def close(self, call: ToolCall) -> Steps:
        """The call is over: settled like its run's own cells, or given back where its body never started."""
        if call.held is not None:
            yield from self.settle(call.held, _charged(call))

    def reported(self, call: ToolCall, amounts: Sequence[tuple[str, int]]) -> None:
        """A call that is over has reported more."""
        if call.held is not None:
            self.late(call.held, dict(amounts))


def _counted(call: ToolCall, amounts: Sequence[tuple[str, int]]) -> dict[str, int]:
    """With the call itself, which an attempt after the first isn't."""
    return {**dict(amounts), "tool_calls": SCALE} if call.attempt == 1 else dict(amounts)


def _charged(call: ToolCall) -> dict[str, int] | None:
    if not call.started:
        return None
    return _counted(call, call.amounts if call.charged is None else tuple(call.charged.items()))


def _lease(budgets: Sequence[Budget], crashed: Literal["charge", "release"]) -> Lease:
    """One lease for all of them: the longest, and charged if one says so."""
    ends = {budget.on_expiry or crashed for budget in budgets}
    return Lease(max(budget.lease for budget in budgets), "charge" if "charge" in ends else "release")


# -- what is delivered -----------------------------------------------------------------------------


def _closing(made: Reservation, charged: Mapping[str, int] | None) -> Iterator[tuple[Keeper, Job]]:
    """What has to be delivered at the end of a call, the last ledger first where it is given back."""
    with LOCK:
        first, made.open = made.open, False
    if not first:
        return
    for keeper, hold, entries in made.parts if charged is not None else reversed(made.parts):
        if hold is not None and not keeper.let_go(hold):
            continue
        if hold is None or hold.local:
            if hold is not None:
                keeper.allow([((entry.account, entry.unit), -entry.amount) for entry in hold.entries])
            yield from ((keeper, job) for job in _charges(keeper, hold, entries, charged or {}))
        elif charged is None:
            yield keeper, _release(keeper, hold)
        else:
            yield keeper, _settlement(keeper, hold, entries, charged)


def _release(keeper: Keeper, hold: Hold) -> Release:
    for entry in hold.entries:
        keeper.moved(entry.account, entry.unit, 0, -entry.amount)
    return Release(hold.id)


def _settlement(
    keeper: Keeper, hold: Hold, entries: Sequence[tuple[PeriodCap, Entry]], charged: Mapping[str, int]
) -> Settlement:
    paid = {entry.unit: charged[entry.unit] for _, entry in entries if entry.unit in charged}

    def settled(held: bool | None) -> None:
        for cap, entry in entries:
            exact = paid.get(entry.unit, 0)
            keeper.moved(entry.account, entry.unit, exact, -entry.amount)
            covered = entry.amount if held or hold.lease.on_expiry == "charge" else 0
            cap.overdrawn(entry, exact - covered, late=not held)
            cap.watch(entry)

    return Settlement(hold.id, paid, settled)


def _charges(
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


# -- without the ledger ----------------------------------------------------------------------------


def _allow(
    keeper: Keeper,
    caps: Sequence[tuple[PeriodCap, bool]],
    entries: Sequence[tuple[PeriodCap, Entry]],
    call: Any,
    exc: LedgerError,
    observed: list[BudgetExceeded],
) -> BudgetExceeded | None:
    """Take it from what each budget allows while its ledger is away, or give the refusal."""
    with LOCK:
        for (cap, enforced), (_, entry) in zip(caps, entries, strict=True):
            refusal = _disallowed(keeper, cap, entry, call, exc)
            if refusal is not None and enforced:
                return refusal
            if refusal is not None:
                observed.append(refusal)
        keeper.allow([((entry.account, entry.unit), entry.amount) for _, entry in entries])
        known, keeper.away = keeper.away, True
    if not known:
        warn(
            f"the ledger {keeper.name} can't be asked ({redact_error(exc)}): this process goes on with what its "
            f"budgets allow meanwhile, and tells the ledger later",
            (call.run.root,),
        )
    return None


def _disallowed(keeper: Keeper, cap: PeriodCap, entry: Entry, call: Any, exc: LedgerError) -> BudgetExceeded | None:
    if not entry.amount:
        return None
    if cap.budget.on_ledger_error == "refuse":
        return cap.unknown(call, exc, "")
    allowed = cap.budget.allowance.get(entry.unit, 0)
    if keeper.local.get((entry.account, entry.unit), 0) + entry.amount <= allowed:
        return None
    return cap.unknown(call, exc, f", and the {plain(allowed, entry.unit)} that is allowed meanwhile are used up")
