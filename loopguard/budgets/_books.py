"""Books: what one call reserves and settles in the ledgers of its chain, all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from loopguard._amounts import SCALE, plain
from loopguard._call import ToolCall, new_id
from loopguard._pipeline import LOCK, Effect, Proceed, Steps
from loopguard._warn import warn
from loopguard.budgets._keeper import Hold, Job, Keeper, Release, Settlement, deliver
from loopguard.budgets._period import ADVICE, PeriodCap, charges
from loopguard.budgets.ledger import Entry, Lease, Shortfall, WrongWindow
from loopguard.exceptions import BudgetExceeded, LedgerError
from loopguard.redaction import redact_error

if TYPE_CHECKING:
    from loopguard.budgets.budget import Budget

__all__ = ["Books", "Reservation", "ToolBooks"]

_TRIES = 3
"""How often a reservation is asked for in another window, should midnight come between."""


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
        advice: Callable[[PeriodCap], str] = lambda cap: ADVICE,
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
            return cap.refusal(call, answer.entry, answer.balance, advice(cap))
        hold = Hold(keeper, name, [entry for _, entry in entries], lease)
        keeper.hold(hold)
        made.parts.append((keeper, hold, entries))
        for (cap, enforced), (_, entry), balance in zip(caps, entries, answer, strict=True):
            keeper.saw(entry.account, entry.unit, balance)
            if not enforced and entry.amount and balance.spent + balance.reserved > cap.limit:
                observed.append(cap.refusal(call, entry, replace(balance, reserved=balance.reserved - entry.amount)))
            cap.watch(entry)
        return None

    def settle(self, made: Reservation, charged: Mapping[str, int] | None) -> Steps:
        """Turn what was reserved into what was spent, once; None gives it back, the call never ran."""
        yield from deliver(list(_closing(made, charged)))

    def post(self, made: Reservation, charged: Mapping[str, int] | None) -> None:
        """The same where nothing can be waited for: it is done soon."""
        for keeper, job in _closing(made, charged):
            keeper.post(job)

    def late(self, made: Reservation, charged: Mapping[str, int]) -> None:
        """A call that is settled has reported more: it goes where the call went."""
        for keeper, hold, entries in made.parts:
            for job in charges(keeper, hold, entries, charged):
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
            yield from ((keeper, job) for job in charges(keeper, hold, entries, charged or {}))
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
