"""Budget: a cap on what a run, or a key in a period, may spend, reserved before a call and settled after it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol

from loopguard import _events as events
from loopguard._amounts import SCALE, amount, amounts, decimal, money, plain
from loopguard._approval import Approval, ask
from loopguard._call import Tool, ToolCall, new_id
from loopguard._cells import NO_ALERT, Cell
from loopguard._pipeline import LOCK, Effect, Sleep
from loopguard._run import Run
from loopguard.budgets._keeper import Keeper
from loopguard.budgets._open import check_ledger, keeper_of
from loopguard.budgets._period import PeriodCap
from loopguard.budgets._windows import PERIODS, zone
from loopguard.budgets.ledger import LARGEST, Ledger
from loopguard.exceptions import BudgetExceeded, ConfigurationError, LoopGuardError, ToolCallRefused
from loopguard.redaction import check_id, redact_error

__all__ = ["Budget"]


class Budget:
    """A cap on USD, tokens, calls, or any unit of your own (``credits=100``), for each run or for a period.

    What a call may cost at most is *reserved* before its body runs, in one atomic step over all
    budgets of the chain, and *settled* afterwards at what it did cost. So parallel calls can't
    overshoot: spent ≤ cap + what calls reported above their own reservation. Refuses with ``budget``.

    - ``usd``: USD. ``tokens``, ``input_tokens``, ``output_tokens``, ``model_calls``: of metered models.
      ``tool_calls``: every started call. None is unlimited, 0 refuses the first costed call.
    - ``name``: how messages and spans call it; ``warn_at``: the share at which BudgetWarned is emitted.
    - ``on_unknown_price``: what a USD cap does with models whose price nobody knows. ``refuse`` them
      (`unknown_price`), or ``allow`` them, at a cost of None.
    - ``extend``: an approver that is asked to raise the cap by ``extend_by`` (USD or {unit: amount}) instead
      of refusing; calls in parallel share one question, and a no is final for the run.

    With ``per="hour"``, ``"day"``, ``"month"`` or ``"total"`` all runs share the cap, in whatever process or on
    whatever host they are, as far as they name the same ledger, name and key:

    - ``key``: whose budget it is, a team, a user, a session: a text, or ``fn(run)`` that gives one.
    - ``tz``: the time zone whose hours, days and months count. A call is settled in the window of its reservation.
    - ``ledger``: ``sqlite:///spend.db`` for the processes of one host, a plugin's ``redis://…`` for many,
      ``memory:`` for this process, or a `Ledger`; by default what LOOPGUARD_LEDGER says.
    - ``lease``: the seconds after which the reservation of a crashed process is over; a living one renews it.
      ``on_expiry``: what is done with it then, ``charge`` or ``release``. By default what a model call had reserved
      is charged, since it may have been billed, and a tool's is released.
    - ``on_ledger_error``: while the ledger can't be asked, ``refuse``, or ``allow_local``: each process may spend
      ``local_allowance`` (USD or {unit: amount}) for each key and window on its own, and tells the ledger later.

    A NaN, infinite, negative or bool cap is a ConfigurationError.
    """

    def __init__(
        self,
        usd: Any = None,
        tokens: Any = None,
        input_tokens: Any = None,
        output_tokens: Any = None,
        model_calls: Any = None,
        tool_calls: Any = None,
        *,
        per: Literal["run", "hour", "day", "month", "total"] = "run",
        key: str | Callable[[Run], str] | None = None,
        tz: str = "UTC",
        ledger: str | Ledger | None = None,
        name: str | None = None,
        warn_at: float | None = 0.8,
        on_unknown_price: Literal["refuse", "allow"] = "refuse",
        extend: Callable[[Any], Any] | None = None,
        extend_by: Any = None,
        lease: float = 60.0,
        on_expiry: Literal["charge", "release"] | None = None,
        on_ledger_error: Literal["refuse", "allow_local"] = "refuse",
        local_allowance: Any = None,
        **units: Any,
    ) -> None:
        caps = {
            "usd": usd,
            "tokens": tokens,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "model_calls": model_calls,
            "tool_calls": tool_calls,
            **units,
        }
        self.limits = {unit: amount(cap, f"Budget({unit}") for unit, cap in caps.items() if cap is not None}
        if "steps" in self.limits:
            raise ConfigurationError("Budget(steps=…): to cap tool calls use tool_calls=, or MaxSteps")
        if per != "run" and per not in PERIODS:
            raise ConfigurationError(f"Budget(per={per!r}): give 'run', 'hour', 'day', 'month' or 'total'")
        if warn_at is not None and (
            isinstance(warn_at, bool) or not isinstance(warn_at, int | float) or not 0 < warn_at <= 1
        ):
            raise ConfigurationError(f"Budget(warn_at={warn_at!r}): give a share above 0 and up to 1, or None")
        if name is not None and not isinstance(name, str):
            raise ConfigurationError(f"Budget(name={name!r}): give a text")
        if on_unknown_price not in ("refuse", "allow"):
            raise ConfigurationError(f"Budget(on_unknown_price={on_unknown_price!r}): give 'refuse' or 'allow'")
        if (extend is None) != (extend_by is None):
            raise ConfigurationError("Budget: extend= and extend_by= go together: whom to ask, and for how much more")
        if extend is not None and not callable(extend):
            raise ConfigurationError(f"Budget(extend={extend!r}): give an approver")
        self.on_unknown_price = on_unknown_price
        self.extend = extend
        self.extend_by = dict(amounts(extend_by, "Budget(extend_by"))
        if not all(unit in self.limits and exact for unit, exact in self.extend_by.items()):
            raise ConfigurationError(f"Budget(extend_by={extend_by!r}): name units that the budget caps, above 0")
        self.name = name
        self.warn_at = warn_at
        self.per = per
        self.key = key
        self.tz = tz
        self.ledger_name = name or "budget"
        """How the accounts of its ledger call it."""
        self.lease = lease
        self.on_expiry = on_expiry
        self.on_ledger_error = on_ledger_error
        self.allowance: Mapping[str, int] = dict(amounts(local_allowance, "Budget(local_allowance"))
        if per == "run":
            self._check_run(ledger, local_allowance)
        else:
            self._check_period()
            self._ledger = check_ledger(ledger, "Budget(ledger")

    def _check_run(self, ledger: Any, local_allowance: Any) -> None:
        """What only a period has isn't silently without effect."""
        given = {"key": self.key, "ledger": ledger, "on_expiry": self.on_expiry, "local_allowance": local_allowance}
        named = [name for name, value in given.items() if value is not None]
        defaults = {"tz": "UTC", "lease": 60.0, "on_ledger_error": "refuse"}
        named += [name for name, default in defaults.items() if getattr(self, name) != default]
        if named:
            raise ConfigurationError(
                f"Budget({named[0]}=…): that is for a period, give per='hour', 'day', 'month' or 'total', too"
            )

    def _check_period(self) -> None:
        if len(self.ledger_name) > 200 or re.search("[\ud800-\udfff]", self.ledger_name):
            raise ConfigurationError(
                f"Budget(name={self.ledger_name[:80]!r}): give at most 200 characters, and no lone surrogates"
            )
        if isinstance(self.key, str):
            check_id(self.key, "Budget(key")
        elif self.key is not None and not callable(self.key):
            raise ConfigurationError(f"Budget(key={self.key!r}): give a text, or a function of the run")
        if self.extend is not None:
            raise ConfigurationError("Budget(extend=…): that is for per='run'; the cap of a period is raised for all")
        if isinstance(self.lease, bool) or not isinstance(self.lease, int | float) or not 0 < self.lease < 1e9:
            raise ConfigurationError(f"Budget(lease={self.lease!r}): give seconds above 0")
        if self.on_expiry not in ("charge", "release", None):
            raise ConfigurationError(f"Budget(on_expiry={self.on_expiry!r}): give 'charge', 'release' or None")
        if self.on_ledger_error not in ("refuse", "allow_local"):
            raise ConfigurationError(
                f"Budget(on_ledger_error={self.on_ledger_error!r}): give 'refuse' or 'allow_local'"
            )
        local = self.on_ledger_error == "allow_local"
        if local != any(self.allowance.values()) or not set(self.allowance) <= set(self.limits):
            raise ConfigurationError(
                "Budget: on_ledger_error='allow_local' and local_allowance= go together: how much of the units that "
                "the budget caps each process may spend on its own"
            )
        for unit, limit in self.limits.items():
            if limit > LARGEST:
                raise ConfigurationError(f"Budget({unit}=…): the cap of a period is at most 10**18")
        self.zone = zone(self.tz)

    @cached_property
    def keeper(self) -> Keeper:
        """Of a period: what deals with its ledger in this process."""
        return keeper_of(self._ledger)

    def _key_of(self, run: Run) -> str:
        if not callable(self.key):
            return self.key or ""
        try:
            key = self.key(run)
        except Exception as exc:  # the user's function: without a key nobody knows whose money it is
            raise ConfigurationError(f"Budget(key=…): the function failed: {redact_error(exc)}") from exc
        return check_id(key, "what Budget(key=…) gave")

    def caps(self, run: Run) -> Sequence[_Cap | PeriodCap]:
        """The caps of this budget on one run."""
        if self.per == "run":
            return self._run_caps(run)
        if self in run.slots:
            return run.slots[self]  # type: ignore[no-any-return]  # what is made below
        key, keeper = self._key_of(run), self.keeper  # the user's function, and files: not under the lock
        made = [PeriodCap(self, run, unit, limit, key, keeper) for unit, limit in self.limits.items()]
        return run.slot(self, lambda: made)  # type: ignore[no-any-return]  # it was made above

    def _run_caps(self, run: Run) -> Sequence[_Cap]:
        limits = {**self.limits, **{unit: run.raised[unit] for unit in self.limits if unit in run.raised}}
        return run.slot(self, lambda: [_cap(self, run, unit, limit) for unit, limit in limits.items()])  # type: ignore[no-any-return]  # what the lambda makes

    def bind(self, run: Run, tool: Tool) -> _Bound | None:
        """See `Limit`."""
        if self.per != "run":
            return None  # it is asked after the admission, see `ToolBooks`
        caps = self._run_caps(run)
        if not caps:
            return None
        bound: _Bound
        if tool.cost_fn is None and tool.cost:
            cost = dict(tool.cost)
            fixed = [(cap, SCALE if cap.unit == "tool_calls" else cost.get(cap.unit, 0)) for cap in caps]
            fixed = [(cap, exact) for cap, exact in fixed if exact]
            if not fixed:
                return None
            one = len(fixed) == 1 and self.extend is None
            bound = _OneCheck(self, *fixed[0]) if one else _FixedCheck(self, fixed)
        else:
            bound = _Check(self, {cap.unit: cap for cap in caps})
        bound.done = next((cap.done for cap in caps if isinstance(cap, _StepsCap) and cap.line != NO_ALERT), None)
        return bound

    def __repr__(self) -> str:
        per = "" if self.per == "run" else f", per={self.per!r}"
        return f"Budget({', '.join(f'{unit}={decimal(limit):f}' for unit, limit in self.limits.items())}{per})"


_ADVICE = "It was not run: make a cheaper call, or answer with what you have."


class Costed(Protocol):
    """What a budget is asked about: a tool call or a model call."""

    @property
    def name(self) -> str:
        """The tool or the model."""
        ...

    @property
    def run(self) -> Run:
        """Whose call it is."""
        ...


class _Cap:
    """A cap on one cell of one run."""

    partial = False
    external = False

    def __init__(self, budget: Budget, run: Run, unit: str, limit: int, cell: Cell) -> None:
        self.budget = budget
        self.run = run
        self.unit = unit
        self.limit = limit
        self.cell = cell
        self.question: _Extension | None = None
        self.denied: str | None = None
        self.line = NO_ALERT
        if budget.warn_at is not None and limit:
            self.line = -(-limit * amount(budget.warn_at, "warn_at") // SCALE)
            cell.watch(self)

    def used(self) -> int:
        return self.cell.spent + self.cell.reserved

    def spent(self) -> int:
        return self.cell.spent

    def warn(self) -> None:
        """See `Watcher`."""
        spent, limit = decimal(self.cell.spent), decimal(self.limit)
        self.run.emit(
            events.BudgetWarned, budget=self.budget.name or self.unit, unit=self.unit, spent=spent, limit=limit
        )

    def brief(self) -> str:
        used = money(self.cell.spent, self.unit) if self.unit == "usd" else format(decimal(self.cell.spent), "f")
        return f"{used} of {money(self.limit, self.unit)}"

    @property
    def title(self) -> str:
        """The budget as a message calls it."""
        name = f" {self.budget.name!r}" if self.budget.name else ""
        return f"the budget{name} of {plain(self.limit, self.unit)} of run {self.run.name!r}"

    def reason(self, call: Costed, exact: int, advice: str) -> str:
        """Why this call doesn't fit, for a model to act on."""
        left = plain(max(0, self.limit - self.used()), self.unit)
        held = f" and {plain(self.cell.reserved, self.unit)} reserved by calls in flight" if self.cell.reserved else ""
        return (
            f"{call.name} may cost {plain(exact, self.unit)}, but only {left} is left of {self.title} "
            f"({plain(self.cell.spent, self.unit)} spent{held}). {advice}"
        )

    def refusal(self, call: Costed, exact: int, advice: str = _ADVICE) -> BudgetExceeded | None:
        """The refusal of a call that doesn't fit."""
        used = self.used()
        reason = self.reason(call, exact, advice)
        if self.denied is not None:
            reason += f" More was asked for and not granted{': ' if self.denied else ''}{self.denied}."
        refusal = BudgetExceeded(
            "budget", "Budget", call.name, reason, decimal(self.limit), decimal(used), self.run.name, self.run.id
        )
        if self.unit in self.budget.extend_by and self.denied is None:
            limit = self.limit
            refusal.cure = lambda call: self.extend(call, limit)
        return refusal

    def extend(self, call: Costed, limit: int) -> Generator[Effect, Any, None]:
        """Ask for more, once for all calls that need it; then they are admitted afresh, or refused for good."""
        with LOCK:
            if self.limit != limit or self.denied is not None:
                return  # somebody else has asked meanwhile
            question = self.question
            asking = question is None
            if question is None:
                question = self.question = _Extension(self, call)
        if asking:
            yield from self._ask(question, call)
            return
        call.run.asking()
        try:
            while not question.over:
                yield Sleep(0.01)
        finally:
            call.run.asked()

    def _ask(self, question: _Extension, call: Costed) -> Generator[Effect, Any, None]:
        assert self.budget.extend is not None
        try:
            answer = yield from ask(self.budget.extend, question, call.run, "extension", question.digest, None)
            self._decide(self._granted(answer), answer.reason)
        except ToolCallRefused as refusal:  # the run is parked
            raise call.plan.refuse(call, refusal) if isinstance(call, ToolCall) else refusal  # noqa: B904
        except ConfigurationError:
            raise
        except Exception as exc:  # the approver is the user's: whatever it raises isn't a yes
            self._decide(0, f"the approver failed: {redact_error(exc)}")
        finally:
            with LOCK:
                self.question = None
            question.over = True

    def _granted(self, answer: Approval) -> int:
        if answer.decision != "edit":
            return self.budget.extend_by[self.unit] if answer.decision == "approve" else 0
        assert answer.arguments is not None
        try:
            return amount(answer.arguments.get("extend_by"), f"the extension of {self.unit}")
        except ConfigurationError as exc:
            raise LoopGuardError(str(exc)) from None  # a person's slip, not the program's

    def _decide(self, granted: int, reason: str | None) -> None:
        with LOCK:
            self.limit += granted
            if not granted:
                self.denied = reason or ""
        if granted:
            self.run.emit(
                events.BudgetExtended, budget=self.budget.name or self.unit, unit=self.unit, limit=decimal(self.limit)
            )


class _Extension:
    """The question whether a cap may be raised, in the shape of a call, for any approver."""

    name = "extend_budget"

    def __init__(self, cap: _Cap, call: Costed) -> None:
        self.id = new_id("extension")
        self.run = call.run
        self.idempotency_key = f"{cap.run.id}:{cap.unit}:{decimal(cap.limit)}"
        """Where it stands in its run, for an approver that keeps its questions."""
        self.digest = hashlib.sha256(f"{cap.budget.name} {self.idempotency_key}".encode()).hexdigest()
        self.question: Any = None
        self.over = False
        self.arguments = {
            "budget": cap.budget.name or cap.unit,
            "unit": cap.unit,
            "limit": decimal(cap.limit),
            "spent": decimal(cap.cell.spent),
            "reserved": decimal(cap.cell.reserved),
            "extend_by": decimal(cap.budget.extend_by[cap.unit]),
            "for_tool": call.name,
        }


class _StepsCap(_Cap):
    """`tool_calls` caps the run's own count of steps."""

    def brief(self) -> str:
        return f"{self.run.steps} of {plain(self.limit, self.unit)}"

    def reason(self, call: Costed, exact: int, advice: str) -> str:
        return f"{call.name} was not run: {self.title} is used up. Answer now with what you have."

    def refusal(self, call: Costed, exact: int, advice: str = _ADVICE) -> BudgetExceeded | None:
        again = isinstance(call, ToolCall) and call.attempt > 1  # an attempt isn't a new call
        return None if again else super().refusal(call, exact, advice)

    def done(self, call: ToolCall, token: Any, result: Any, error: BaseException | None) -> None:
        """See `BoundLimit`."""
        if self.cell.spent >= self.cell.alert:
            with LOCK:
                call.plan.root.alerts.append(self.cell)  # the settlement, which is under way, looks after it


class _Steps(Cell):
    """The run's steps, read like a cell."""

    __slots__ = ("run",)

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    @property
    def spent(self) -> int:
        return self.run.steps * SCALE

    @spent.setter
    def spent(self, value: int) -> None:
        """Steps are counted by the admission."""


def _cap(budget: Budget, run: Run, unit: str, limit: int) -> _Cap:
    if unit == "tool_calls":
        return _StepsCap(budget, run, unit, limit, _Steps(run))
    return _Cap(budget, run, unit, limit, run.cell(unit))


class _Bound:
    """A budget as it stands for one run and tool."""

    per_attempt = True
    done: Callable[..., None] | None = None


class _Check(_Bound):
    """The answer for tools whose cost is known only call by call."""

    def __init__(self, budget: Budget, caps: dict[str, _Cap]) -> None:
        self.curable = budget.extend is not None
        self.by_unit = caps

    def check(self, call: ToolCall) -> BudgetExceeded | None:
        amounts = {**dict(call.amounts), "tool_calls": SCALE}
        for unit, cap in self.by_unit.items():  # in the order of the others, whatever the tool says of its cost
            exact = amounts.get(unit)
            if exact and cap.used() + exact > cap.limit:
                refusal = cap.refusal(call, exact)
                if refusal is not None:
                    return refusal
        return None


class _FixedCheck(_Bound):
    """The answer for tools of a fixed cost."""

    def __init__(self, budget: Budget, fixed: list[tuple[_Cap, int]]) -> None:
        self.curable = budget.extend is not None
        self.fixed = fixed

    def check(self, call: ToolCall) -> BudgetExceeded | None:
        for cap, exact in self.fixed:
            if cap.used() + exact > cap.limit:
                refusal = cap.refusal(call, exact)
                if refusal is not None:
                    return refusal
        return None


class _OneCheck(_Bound):
    """The commonest case: a fixed cost in one unit."""

    def __init__(self, budget: Budget, cap: _Cap, exact: int) -> None:
        self.cap = cap
        self.cell = cap.cell
        self.most = cap.limit - exact

    def check(self, call: ToolCall) -> BudgetExceeded | None:
        cell = self.cell
        if cell.spent + cell.reserved <= self.most:
            return None
        return self.cap.refusal(call, self.cap.limit - self.most)
