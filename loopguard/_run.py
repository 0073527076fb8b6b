"""Run: the tree of loops, flows and scopes, and what each of them has used."""

from __future__ import annotations

import contextvars
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from loopguard import _events as events
from loopguard._admission import Admission, book, latched, ring
from loopguard._amounts import SCALE, costs, decimal, decimals
from loopguard._call import (
    ASYNC,
    ASYNC_GENERATOR,
    CURRENT,
    GENERATOR,
    Tool,
    ToolCall,
    colour_of,
    forget_identity,
    new_id,
)
from loopguard._cells import Cell
from loopguard._config import settings
from loopguard._halting import check_halted
from loopguard._outcomes import Iteration, StopReason
from loopguard._pipeline import LOCK
from loopguard._usage import Usage
from loopguard._warn import warn
from loopguard.exceptions import ConfigurationError, LoopHalted, ToolCallRefused

__all__ = ["WIND_DOWN", "Run", "charge", "current_run", "only_elsewhere", "publish", "subscribers"]

P = ParamSpec("P")
R = TypeVar("R")
Listener = Callable[[events.Event], object]
WIND_DOWN = "Little is left: finish now with what you have."
"""What a model is told, after the run's `brief`, once it is nearly done."""


class Run:
    """One invocation of a loop or flow, or one scope: a node of the tree that limits stand on.

    Counters count the run's own tool calls and those of its descendants.
    """

    # Defaults live on the class: a run pays only for what it uses.
    kind: str = "scope"
    """loop, flow or scope."""
    max: int | None = None
    """The ceiling of iterations, None for a scope."""
    iteration: int = 0
    """The iteration under way, counted from 1; 0 outside a loop."""
    feedback: str | None = None
    """Why the last value was rejected, or None."""
    rejected: Any = None
    """The last rejected value."""
    history: Sequence[Iteration[Any]] = ()
    """What the iterations before did, of a loop: for `loopguard.context.feedback_messages`."""
    steps: int = 0
    """Tool calls that were admitted."""
    refusals: int = 0
    """Tool calls that were refused."""
    news: int = 0
    """Calls completed that this run had never seen before."""
    unknown_cost: bool = False
    outside: bool = False
    max_refusals: int | None = None
    deadline: float | None = None
    timeout: float | None = None
    latch: ToolCallRefused | None = None
    halted: LoopHalted | None = None
    ended: bool = False
    recorder: Any = None
    """What keeps this run in a journal, or None: see loopguard.journal."""
    place: Mapping[str, Any] = MappingProxyType({})
    """Where it stands in a journal: what its RunStarted event says of that."""
    past: Sequence[tuple[str, bool]] = ()
    """The tool calls of earlier processes, where the run was resumed: (tool, whether in this iteration)."""
    outcomes: Sequence[tuple[str, Any]] = ()
    """What this run's own calls in earlier processes came to: (strict digest of the call, JSON data)."""
    states: Sequence[Any] = ()
    """The states that were accepted in earlier processes, in order."""
    raised: Mapping[str, int] = MappingProxyType({})
    """Caps that were raised when the run was resumed, by unit."""
    resumes: str | None = None
    """The traceparent of the span under which an earlier process ran it, where it was resumed."""
    span: Any = None
    trace_id: str | None = None
    """The trace of this run, 32 hex digits, where tracing is on."""
    # a row of refusals, see _admission
    barren: int = 0
    barren_turns: int = 0
    barren_turn: int = -1
    turn: int = 0
    born: int = 0
    # a pause of the deadline while a person is asked
    _thread: int = 0
    _asking: int = 0
    _asked_at: float = 0.0
    on_deadline_moved: Callable[[], object] | None = None
    # of the root, for the whole tree
    alarm: bool = False
    restless: bool = False
    stuck: bool = False
    """Some run of the tree was halted, for good."""
    refusal_count: int = 0
    last_refusal: ToolCallRefused | None = None
    last_model_refusal: ToolCallRefused | None = None
    alerts: list[Cell]
    rows: weakref.WeakKeyDictionary[Any, list[int]]
    largest: dict[str, dict[str, int]]
    warned: set[str]

    def __init__(
        self,
        name: str,
        parent: Run | None = None,
        guards: tuple[Any, ...] = (),
        *,
        kind: str = "scope",
        max: int | None = None,
        timeout: float | None = None,
        id: str | None = None,
    ) -> None:
        self.name = name
        self.parent = parent
        self.guards = guards
        self.kind = kind
        self.max = max
        self._id = id
        self.cells: dict[str, Cell] = {}
        self.plans: dict[Tool, Admission] = {}
        self.slots: dict[Any, Any] = {}
        self.adopted: tuple[Any, ...] = ()
        """Guards of tools, which stand here because no run of the chain lists them."""
        self.warnings: list[str] = []
        self.started_at = time.monotonic()
        self.children = 0
        if parent is None:
            self.root: Run = self
            self.chain: tuple[Run, ...] = (self,)
            self.listeners: tuple[Listener, ...] = subscribers()
            self.alerts = []
            self.rows = weakref.WeakKeyDictionary()
            self.largest = {}
            self.warned = set()
        else:
            self.root = parent.root
            self.chain = (*parent.chain, self)
            self.listeners = parent.listeners
            if parent.recorder is not None:
                self.recorder = parent.recorder
            self.born = self.root.refusal_count
        for guard in guards:
            guard.join(self)
        if timeout is not None:
            self.timeout = timeout
            self.deadline = self.started_at + timeout
            self.root.alarm = True

    @property
    def run(self) -> Run:
        """Itself: wherever we are, `.run` is the run."""
        return self

    @property
    def id(self) -> str:
        """The id of this run, unique among all processes."""
        if self._id is None:
            with LOCK:
                if self._id is None:
                    self._id = new_id("run")
        return self._id

    @property
    def caps(self) -> list[Any]:
        """The caps that stand on this run: of MaxSteps and Budgets."""
        return [
            cap
            for guard in (*self.guards, *self.adopted)
            for guardrail in guard.guardrails
            if hasattr(guardrail, "caps")
            for cap in guardrail.caps(self)
        ]

    # -- what it has used ------------------------------------------------------------------------

    def cell(self, unit: str) -> Cell:
        """The book of one unit."""
        cell = self.cells.get(unit)
        if cell is None:
            cell = self.cells.setdefault(unit, Cell())
        return cell

    def spent(self, unit: str = "usd") -> Decimal:
        """What this run and its children have spent of a unit."""
        if unit in _STEPS:
            return Decimal(self.steps)
        cell = self.cells.get(unit)
        return decimal(cell.spent) if cell else Decimal(0)

    def reserved(self, unit: str = "usd") -> Decimal:
        """What calls in flight may still spend."""
        cell = self.cells.get(unit)
        return decimal(cell.reserved) if cell else Decimal(0)

    def remaining(self, unit: str = "usd") -> Decimal | None:
        """What is left under the tightest limit of this run and those above it; None when unlimited."""
        same = _STEPS if unit in _STEPS else (unit,)
        caps = [cap for run in self.chain for cap in run.caps if cap.unit in same and not cap.partial]
        with LOCK:
            left = [cap.limit - cap.used() for cap in caps]
        return decimal(max(0, min(left))) if left else None

    @property
    def usage(self) -> Usage:
        """Tokens and model calls of this run and its children: a view of the same book."""
        counted: dict[str, Any] = {unit: self.cells[unit].spent // SCALE for unit in _USAGE if unit in self.cells}
        return Usage(**counted)

    @property
    def cost(self) -> Decimal | None:
        """USD spent, or None once a model of unknown price has run."""
        return None if self.unknown_cost else self.spent("usd")

    def brief(self) -> str:
        """A sentence for the model about what is used and what is left; empty when nothing is limited."""
        tightest: dict[str, Any] = {}
        caps = [cap for run in reversed(self.chain) for cap in run.caps if not cap.partial]
        with LOCK:
            for cap in caps:
                known = tightest.setdefault(cap.unit, cap)
                if cap.limit - cap.used() < known.limit - known.used():
                    tightest[cap.unit] = cap
            parts = [cap.brief() for cap in tightest.values()]
        for run in reversed(self.chain):
            if run.max is not None and run.iteration:
                parts.append(f"iteration {run.iteration} of {run.max}")
                break
        return f"Used so far: {', '.join(parts)}." if parts else ""

    def nearly_done(self, share: float = 0.8) -> bool:
        """Whether any limit above this run is used up to this share."""
        caps = [cap for run in self.chain for cap in run.caps]
        with LOCK:
            if any(cap.limit and cap.used() >= share * cap.limit for cap in caps):
                return True
        return any(run.max and run.iteration > 1 and run.iteration >= share * run.max for run in self.chain)

    # -- stopping --------------------------------------------------------------------------------

    def stop(self, reason: str = "stopped by the program") -> None:
        """Refuse every later tool and model call of this run and its children, and end its loop."""
        with LOCK:
            if self.latch is None:
                self.latch = ToolCallRefused("stopped", "stop", "", reason, None, None, self.name, self.id)
            self.root.alarm = True
        self.emit(events.Stopped, code="stopped", reason=reason)

    def check(self) -> None:
        """Raise what stops this run: the refusal of whatever was latched on it or above it, or LoopHalted.

        For adapters of frameworks, which swallow exceptions: ask when the framework returns.
        """
        check_halted(self.chain)
        refusal = latched(self.chain, self.name)
        if refusal is not None:
            raise refusal

    def adopt(self, guards: tuple[Any, ...]) -> tuple[Any, ...]:
        """Have those guards stand on the outermost run that no run of the chain lists; those come back."""
        standing = {guard for run in self.chain for guard in run.guards}
        own = tuple(guard for guard in guards if guard not in standing)
        root = self.root
        with LOCK:
            new = tuple(guard for guard in own if guard not in root.adopted)
            root.adopted += new
        for guard in new:
            guard.join(root)
        return own

    def overdue(self) -> bool:
        """Whether the deadline has passed, waits for people excluded."""
        return self.deadline is not None and not self._asking and time.monotonic() >= self.deadline

    def timed_out(self) -> ToolCallRefused:
        """The refusal of calls after the deadline."""
        reason = f"the run {self.name!r} has used its {self.timeout:g} s. Give your final answer now, without tools."
        return ToolCallRefused("timeout", "timeout", "", reason, self.timeout, None, self.name, self.id)

    def asking(self) -> None:
        """A person is being asked: the clocks of this run and those above it stand still."""
        with LOCK:
            for run in self.chain:
                run._asking += 1
                if run._asking == 1:
                    run._asked_at = time.monotonic()
                    run._deadline_moved()

    def asked(self) -> None:
        """The person has answered, or has not."""
        with LOCK:
            for run in self.chain:
                run._asking -= 1
                if run._asking == 0 and run.deadline is not None:
                    run.deadline += time.monotonic() - run._asked_at
                    run._deadline_moved()

    def _deadline_moved(self) -> None:
        if self.on_deadline_moved is not None:
            self.on_deadline_moved()

    @property
    def paused(self) -> bool:
        """Whether a person is being asked right now."""
        return self._asking > 0

    # -- entering and leaving --------------------------------------------------------------------

    def enter(self) -> contextvars.Token[Any]:
        """Make this the current run; the token goes to `leave`."""
        self._thread = threading.get_ident()
        with LOCK:
            _active.add(self)
            if self.parent is not None:
                self.parent.children += 1
        if self.listeners:
            parent = self.parent.id if self.parent is not None else None
            self.emit(events.RunStarted, name=self.name, kind=self.kind, parent_id=parent, max=self.max, **self.place)
        return CURRENT.set(self)

    def leave(
        self,
        token: contextvars.Token[Any],
        stop_reason: StopReason | None,
        value: Any = None,
        error: BaseException | None = None,
        iterations: int = 0,
        raised: bool = False,
    ) -> None:
        """End the run: calls that arrive later are refused. Never raises, in whatever context."""
        try:
            CURRENT.reset(token)
        except ValueError:  # left in another context than it was entered in: there is nothing to restore there
            if CURRENT.get() is self:
                CURRENT.set(self.parent)
        with LOCK:
            _active.discard(self)
            self.ended = True
            if self.latch is None:
                self.latch = ToolCallRefused(
                    "stopped", "stop", "", f"the run {self.name!r} has ended; this call came too late", source=self.name
                )
            if self.parent is not None:
                self.parent.children -= 1
            if self.children:
                self.root.alarm = True
            self.plans = {}
        if self.listeners:
            duration = max(0.0, time.monotonic() - self.started_at)
            self.emit(
                events.RunEnded,
                name=self.name,
                kind=self.kind,
                stop_reason=stop_reason,
                iterations=iterations,
                value=value,
                error=error,
                duration=duration,
                raised=raised,
                warnings=tuple(self.warnings),
            )

    def bind(self, fn: Callable[P, R]) -> Callable[P, R]:
        """fn, made to run inside this run wherever it is called: hand it to a thread or an executor.

        The whole context (the current span, too) is carried along, as it is now; a coroutine function
        keeps that of its task, and gets the run. Raises ConfigurationError for generator functions.
        """
        here = CURRENT.get()
        place = here if here is not None and here.run is self else self  # in a tool's body: its call
        snapshot = contextvars.copy_context()
        snapshot.run(CURRENT.set, place)
        colour = colour_of(fn)
        if colour in (GENERATOR, ASYNC_GENERATOR):
            raise ConfigurationError(f"run.bind({fn!r}): bind the function that iterates over it, not the generator")
        if colour == ASYNC:
            coroutine_function: Any = fn

            @functools.wraps(fn)
            async def bound_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                before = CURRENT.set(place)
                try:
                    return await coroutine_function(*args, **kwargs)
                finally:
                    CURRENT.reset(before)

            return bound_async  # type: ignore[return-value]  # a coroutine function stands for fn: it is one

        @functools.wraps(fn)
        def bound(*args: P.args, **kwargs: P.kwargs) -> R:
            return snapshot.copy().run(fn, *args, **kwargs)  # a copy: one Context can't be entered twice

        return bound

    # -- charging and events ---------------------------------------------------------------------

    def charge(self, charged: Sequence[tuple[str, int]]) -> None:
        """Record an amount that no tool call reserved."""
        self.charge_ledgers(dict(charged))  # first, since it makes the caps: budgets watch from then on
        with LOCK:
            book(self.chain, {}, dict(charged))
        if self.root.alerts:
            ring(self.root)
        self.emit(events.Charged, amounts=decimals(tuple(charged)))

    def charge_ledgers(self, charged: Mapping[str, int]) -> None:
        """Tell the ledgers outside this process of an amount that nothing was reserved for; each account once."""
        caps = [cap for run in self.chain for cap in run.caps]
        for cap in {cap.place: cap for cap in caps if cap.external and charged.get(cap.unit)}.values():
            cap.charge(charged[cap.unit])

    def emit(self, event: type[events.Event], **fields: Any) -> None:
        """Build the event and hand it out, if anybody listens."""
        if self.listeners:
            made = event(run_id=self.id, at=time.time(), iteration=self.iteration or None, **fields)
            for listener in self.listeners:
                listener(made)

    def slot(self, key: Any, make: Callable[[], Any]) -> Any:
        """State that a guardrail keeps in this run."""
        with LOCK:
            if key not in self.slots:
                self.slots[key] = make()
            return self.slots[key]

    def __repr__(self) -> str:
        return f"<Run {self.name} {self.id}>"


_USAGE = tuple(Usage.__slots__)
_STEPS = ("steps", "tool_calls")
_active: weakref.WeakSet[Run] = weakref.WeakSet()
"""The runs that are under way; one that was never left is forgotten with its last reference."""


def only_elsewhere() -> bool:
    """Whether runs are under way, but none that this thread, or the one it works for, has begun."""
    if not _active or hasattr(threading.current_thread(), "row_of"):
        return False
    here = threading.get_ident()
    with LOCK:
        return all(run._thread != here for run in _active)


def publish(on_event: Callable[[events.Event], object]) -> Listener:
    """A listener that hands redacted copies to a user's callback, whose failures change nothing."""

    def listener(event: events.Event) -> None:
        try:
            on_event(events.redacted(event))
        except Exception as exc:  # a subscriber observes and never alters
            warn(f"on_event raised {type(exc).__name__}: the event was lost to it, nothing else")

    return listener


def subscribers() -> tuple[Listener, ...]:
    """Who listens to the whole process, as it is configured now."""
    watching = (listener for wanted, listener in settings.watchers if wanted())
    return (*settings.listeners, *watching, *map(publish, settings.on_event))


def current_run() -> Run | None:
    """The innermost run that is under way here, or None."""
    here = CURRENT.get()
    run = here.run if isinstance(here, ToolCall) else here
    return None if run is None or run.outside else run


def charge(usd: Any = None, **units: Any) -> None:
    """Report what the current tool call really cost, in USD and other units; may be called repeatedly.

    In a loop body outside any tool it charges the run. Where there is neither, it does nothing.
    Raises ConfigurationError (a ValueError) for a negative, infinite or NaN amount; nothing is charged then.
    """
    charged = costs({"usd": usd, **units}, "charge")
    here = CURRENT.get()
    if here is None or not charged:
        return
    if isinstance(here, ToolCall):
        if here.started:
            here.plan.report(here, charged)
        else:
            here.run.charge(charged)
    else:
        here.charge(charged)


def _after_fork() -> None:
    LOCK.release()
    _active.clear()
    forget_identity()
    CURRENT.set(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=_after_fork)
