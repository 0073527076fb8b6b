"""The admission: one decision over all limits of a call's chain, and its settlement.

Everything here is written for speed: it runs on every tool call. What can be known when a run and
a tool first meet is compiled then; see `_order.compile_plan`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from loopguard import _events as events
from loopguard._amounts import decimals, plain
from loopguard._call import CURRENT, ToolCall
from loopguard._halting import came_through, check_halted, refused
from loopguard._outcomes import only_refusals
from loopguard._pipeline import LOCK, EffectTimeout, Invoke, Proceed, Steps
from loopguard._warn import warn
from loopguard.exceptions import LoopHalted, ToolCallRefused, ToolTimeout

if TYPE_CHECKING:
    from loopguard._call import Tool
    from loopguard._run import Run

__all__ = ["Admission", "Tracer", "admission_hook", "book", "invoke", "latched", "mismatch", "ring"]


def ring(root: Run) -> None:
    """Tell the budgets of this tree whose line was reached; not under the lock, since users listen."""
    with LOCK:
        cells, root.alerts = root.alerts, []
        due = [watcher for cell in cells for watcher in cell.reached()]
    for watcher in due:
        watcher.warn()


def latched(chain: Sequence[Run], name: str) -> ToolCallRefused | None:
    """The refusal of the outermost run on the chain that was stopped, has ended, or is past its deadline."""
    for run in chain:
        latch = run.latch
        if latch is None and run.deadline is not None and run.overdue():
            latch = run.timed_out()
        if latch is not None:
            return ToolCallRefused(
                latch.code, latch.guardrail, name, latch.reason, latch.limit, latch.value, run.name, run.id
            )
    return None


def mismatch(call: ToolCall) -> ToolCallRefused:
    """The refusal of a call whose arguments aren't those that were approved."""
    reason = f"the arguments of {call.name} changed after they were approved"
    return ToolCallRefused(
        "approval_mismatch", "ApproveTool", call.name, reason, None, None, call.run.name, call.run.id
    )


def book(chain: Sequence[Run], reserved: Mapping[str, int], charged: Mapping[str, int]) -> None:
    """Turn what was reserved on every run of the chain into what was spent. Under the lock; `ring` after it."""
    for unit in {**reserved, **charged}:
        for run in chain:
            cell = run.cell(unit)
            cell.reserved -= reserved.get(unit, 0)
            cell.spent += charged.get(unit, 0)
            if cell.spent >= cell.alert:
                chain[0].alerts.append(cell)


class Tracer(Protocol):
    """What a plan needs of telemetry, so that the pipeline doesn't import it."""

    def open(self, plan: Admission, call: ToolCall, start_ns: int) -> Any:
        """A span for this call, started at start_ns."""

    def attach(self, span: Any) -> Any:
        """Make it current; a token for detach."""

    def detach(self, token: Any) -> None:
        """Make current what was."""

    def current(self) -> Any:
        """The span that is current."""

    def close(
        self, span: Any, plan: Admission, call: ToolCall, error: BaseException | None, result: Any = None
    ) -> None:
        """End it: with the refusal, the error or, for None, well."""


class Admission:
    """All limits of one run's chain for one tool: what is decided together, and settled together."""

    __slots__ = (
        "_ends",
        "attempt_checks",
        "attempt_takers",
        "attempt_undoers",
        "books",
        "call_finishers",
        "chain",
        "checks",
        "finishers",
        "listeners",
        "name",
        "preparers",
        "proceed",
        "reservations",
        "root",
        "run",
        "spans",
        "takers",
        "timeout",
        "timeout_source",
        "tool",
        "tracer",
        "undeclared",
        "undoers",
    )

    def __init__(
        self,
        tool: Tool,
        chain: tuple[Run, ...],
        limits: Sequence[Any],
        listeners: tuple[Callable[[events.Event], object], ...],
        tracer: Tracer | None,
    ) -> None:
        self.tool = tool
        self.name = tool.name
        self.chain = chain
        self.root = chain[0]
        self.run = chain[-1]
        self.listeners = listeners
        self.tracer = tracer
        self.spans: tuple[str, dict[str, Any], dict[str, Any]] | None = None
        """What every span of these calls has in common; made by telemetry."""
        self.proceed: Proceed | None = None
        """The composed pipeline, or None where no hook waits."""
        self.timeout: float | None = None
        self.timeout_source: str | None = None
        self.books: Any = None
        """The ledgers of its budgets, or None where none is outside this process: see `ToolBooks`."""
        self.undeclared = tool.cost_fn is None and not tool.cost
        self.reservations = tuple((run.cell(unit), exact) for unit, exact in tool.cost for run in chain)
        methods: dict[str, list[Any]] = {}
        for slot in ("prepare", "check", "take", "undo", "done"):
            methods[slot] = [getattr(limit, slot, None) for limit in limits]
        present: dict[str, tuple[Any, ...]] = {k: tuple(m for m in v if m is not None) for k, v in methods.items()}
        self.preparers = present["prepare"]
        if not any(getattr(limit, "binds", False) for limit in limits):
            self.preparers = (ToolCall.bind, *self.preparers)
        self.checks = present["check"]
        self.takers = present["take"]
        # undo and done get the token of the same limit's take: its index, or -1 where it takes nothing
        taking = [i for i, take in enumerate(methods["take"]) if take is not None]
        index = {i: n for n, i in enumerate(taking)}
        self.undoers = tuple((index.get(i, -1), m) for i, m in enumerate(methods["undo"]) if m is not None)
        ends = [(i, m) for i, m in enumerate(methods["done"]) if m is not None]
        self.finishers = tuple((index.get(i, -1), m) for i, m in ends)
        # Retry: what is asked, taken and told of each attempt, and what only of the call as a whole
        each = [i for i, limit in enumerate(limits) if getattr(limit, "per_attempt", False)]
        self.attempt_checks = tuple(methods["check"][i] for i in each if methods["check"][i] is not None)
        self.attempt_takers = tuple((index[i], methods["take"][i]) for i in each if i in index)
        undoing = [i for i in each if methods["undo"][i] is not None]
        self.attempt_undoers = tuple((index.get(i, -1), methods["undo"][i]) for i in undoing)
        self.call_finishers: tuple[tuple[int, Any], ...] = ()
        self._ends = ends, each, index

    def retried(self) -> None:
        """A Retry acts on this plan: limits that count calls hear of the last attempt only, by `finish`."""
        ends, each, index = self._ends
        self.finishers = tuple((index.get(i, -1), m) for i, m in ends if i in each)
        self.call_finishers = tuple((index.get(i, -1), m) for i, m in ends if i not in each)

    def finish(self, call: ToolCall, result: Any, error: BaseException | None) -> None:
        """The last attempt is over."""
        if call.started:
            for index, done in self.call_finishers:
                done(call, call.tokens[index] if index >= 0 else None, result, error)

    # -- before the body -----------------------------------------------------------------------

    def admit(self, call: ToolCall) -> ToolCallRefused | None:
        """Take what the call needs from every limit, or nothing at all; the refusal if any says no."""
        root = self.root
        if root.restless:
            check_halted(self.chain)
        if self.tool.cost_fn is not None or root.largest:
            call.amounts = self._estimate(call)
        for prepare in self.preparers:
            prepare(call)
        with LOCK:
            if root.alarm:
                refusal = self.latched()
                if refusal is not None:
                    return refusal
            for check in self.checks:
                refusal = check(call)
                if refusal is not None:
                    return refusal  # type: ignore[no-any-return]  # a limit's check is duck-typed
            self._take(call)
        return None

    def _take(self, call: ToolCall) -> None:
        for run in self.chain:
            run.steps += 1
        call.step = self.run.steps
        if call.amounts is self.tool.cost:
            for cell, exact in self.reservations:
                cell.reserved += exact
        else:
            for unit, exact in call.amounts:
                for run in self.chain:
                    run.cell(unit).reserved += exact
        if self.takers:
            call.tokens = [take(call) for take in self.takers]

    def _estimate(self, call: ToolCall) -> tuple[tuple[str, int], ...]:
        tool = self.tool
        if tool.cost_fn is not None:
            return tool.estimate(call)
        # a tool that charges without a cost reserves the largest amount seen
        return tool.cost or tuple(self.root.largest.get(tool.ident, {}).items())

    def latched(self) -> ToolCallRefused | None:
        """See `latched`."""
        return latched(self.chain, self.name)

    def undo(self, call: ToolCall) -> None:
        """The body never started: everything taken goes back."""
        with LOCK:
            self._undo(call)

    def _undo(self, call: ToolCall) -> None:
        if call.settled:
            return
        call.settled = True
        first = call.attempt == 1  # the step of a retried call was used by its first attempt
        if first:
            for run in self.chain:
                run.steps -= 1
        for unit, exact in call.amounts:
            for run in self.chain:
                run.cell(unit).reserved -= exact
        for index, undo in self.undoers if first else self.attempt_undoers:
            undo(call, call.tokens[index] if index >= 0 else None)

    def readmit(self, old: ToolCall, new: ToolCall) -> ToolCallRefused | None:
        """Admit an edited call in the place of the old one, in one step."""
        new.observed = None
        new.amounts = self._estimate(new)
        for prepare in self.preparers:
            prepare(new)
        with LOCK:
            self._undo(old)
            refusal = self.latched() if self.root.alarm else None
            for check in self.checks:
                if refusal is None:
                    refusal = check(new)
            if refusal is None:
                self._take(new)
            else:
                new.settled = True
        return refusal

    def again(self, call: ToolCall) -> tuple[ToolCall, ToolCallRefused | None]:
        """The next attempt of a call whose last one is settled: no new step, its own cost."""
        new = call.replace(arguments=call.arguments)
        new.attempt = call.attempt + 1
        new.step, new.loose, new.marks, new.repeats = call.step, call.loose, call.marks, call.repeats
        new.approved = call.approved
        new.amounts = self._estimate(new)
        changed = mismatch(new) if call.approved is not None and new.digest()[0] != call.approved else None
        with LOCK:
            refusal = (self.latched() if self.root.alarm else None) or changed
            for check in self.attempt_checks:
                if refusal is None:
                    refusal = check(new)
            if refusal is None:
                new.tokens = list(call.tokens)
                for index, take in self.attempt_takers:
                    new.tokens[index] = take(new)
                for unit, exact in new.amounts:
                    for run in self.chain:
                        run.cell(unit).reserved += exact
            else:
                new.settled = True
        return new, refusal

    def refuse(self, call: ToolCall, refusal: ToolCallRefused) -> ToolCallRefused:
        """Book the refusal; the caller raises it."""
        call.refused = refusal
        with LOCK:
            for run in self.chain:
                run.refusals += 1
        refused(self.chain, refusal, call.provider_id)
        if self.listeners:
            self._emit_refusal(call, refusal, False)
        return refusal

    def _emit_refusal(self, call: ToolCall, refusal: ToolCallRefused, observed: bool) -> None:
        self.emit(
            events.ToolRefused(
                run_id=self.run.id,
                at=time.time(),
                iteration=self.run.iteration or None,
                call_id=call.id,
                tool=self.name,
                arguments=call.arguments_or_raw(),
                code=refusal.code,
                guardrail=refusal.guardrail,
                reason=refusal.reason,
                limit=refusal.limit,
                value=refusal.value,
                owner_id=refusal.run_id,
                observed=observed,
            )
        )

    # -- the body ------------------------------------------------------------------------------

    def start(self, call: ToolCall) -> None:
        """The body is about to run: from here on the call is settled, not undone."""
        call.started = True
        if self.listeners:
            for refusal in call.observed or ():
                self._emit_refusal(call, refusal, True)
            call.started_at = time.perf_counter()
            self.emit(
                events.ToolStarted(
                    run_id=self.run.id,
                    at=time.time(),
                    iteration=self.run.iteration or None,
                    call_id=call.id,
                    tool=self.name,
                    arguments=call.arguments_or_raw(),
                    reserved=decimals(call.amounts),
                    attempt=call.attempt,
                    repeatable=self.tool.repeatable or None,
                    **call.place,
                )
            )

    def returned(self, call: ToolCall, result: Any) -> None:
        """Settle a call whose body returned."""
        with LOCK:
            # asked under the lock: a thread that the body left behind may be reporting right now
            as_estimated = call.reported is None and call.amounts is self.tool.cost
            if as_estimated:
                call.settled = True
                for cell, exact in self.reservations:
                    cell.reserved -= exact
                    cell.spent += exact
                    if cell.spent >= cell.alert:
                        self.root.alerts.append(cell)
        if as_estimated:
            for index, done in self.finishers:
                done(call, call.tokens[index] if index >= 0 else None, result, None)
            if self.root.restless:
                came_through(self.chain, call.provider_id)
            if self.root.alerts:
                ring(self.root)
            if self.listeners:
                self._emit_finished(call, "returned", dict(call.amounts), result, None)
        else:
            self.settle(call, "returned", result, None)

    def failed(self, call: ToolCall, error: BaseException) -> None:
        """Settle a call whose body raised, timed out, was cancelled, or was left (a generator)."""
        if isinstance(error, GeneratorExit):
            outcome = "closed"
        elif isinstance(error, asyncio.CancelledError):
            outcome = "cancelled"
        elif isinstance(error, ToolTimeout) and error is call.timed_out:
            outcome = "timed_out"
        else:
            cause = only_refusals(error)
            parked = isinstance(cause, ToolCallRefused) and cause.code in ("waiting", "uncertain")
            outcome = "parked" if parked else "raised"
        self.settle(call, outcome, None, error)

    def settle(self, call: ToolCall, outcome: str, result: Any, error: BaseException | None) -> None:
        """Turn what was reserved into what was spent, once."""
        with LOCK:
            if call.settled:
                return
            call.settled = True
            charged = self._charged(call, outcome)
            book(self.chain, dict(call.amounts), charged)
            call.charged = charged
            overrun = self._learn(call)
            surprised = bool(overrun) and self.undeclared and self.tool.ident not in self.root.warned
            if surprised:
                self.root.warned.add(self.tool.ident)
        for index, done in self.finishers:
            done(call, call.tokens[index] if index >= 0 else None, result, error)
        if self.root.restless and not isinstance(error, ToolCallRefused | LoopHalted):
            came_through(self.chain, call.provider_id)
        if self.root.alerts:
            ring(self.root)
        if surprised:
            warn(
                f"the tool {self.name} charged {', '.join(plain(a, u) for u, a in overrun.items())} more than was "
                f"reserved for it: declare the most it may cost, @tool(cost=…), so that a budget can refuse it before",
                (self.root,),
            )
        if self.listeners:
            self._emit_finished(call, outcome, charged, result, error, bool(overrun))

    @staticmethod
    def _charged(call: ToolCall, outcome: str) -> dict[str, int]:
        reported = call.reported or {}
        if outcome in ("raised", "parked"):
            return dict(reported)
        # unknown what a cancelled or timed out body did: it pays its estimate, or more if it said so
        if outcome in ("cancelled", "timed_out"):
            estimate = dict(call.estimate)
            return {unit: max(estimate.get(unit, 0), reported.get(unit, 0)) for unit in {**estimate, **reported}}
        return {**dict(call.estimate), **reported}

    def _learn(self, call: ToolCall) -> dict[str, int]:
        """What was reported above the estimate; remember the largest for tools without a cost."""
        if not call.reported:
            return {}
        estimate = dict(call.estimate)
        if self.undeclared:
            seen = self.root.largest.get(self.tool.ident, {})
            larger = {unit: max(seen.get(unit, 0), exact) for unit, exact in call.reported.items()}
            self.root.largest[self.tool.ident] = {**seen, **larger}  # never changed in place: read without the lock
        return {u: a - estimate.get(u, 0) for u, a in call.reported.items() if a > estimate.get(u, 0)}

    def report(self, call: ToolCall, amounts: Sequence[tuple[str, int]]) -> None:
        """`charge()` inside the body: what outgrows the reservation is reserved at once."""
        with LOCK:
            late = call.settled
            if late:
                book(self.chain, {}, dict(amounts))
            else:
                reported = call.reported = call.reported or {}
                reserved = dict(call.amounts)
                for unit, exact in amounts:
                    reported[unit] = reported.get(unit, 0) + exact
                    more = reported[unit] - reserved.get(unit, 0)
                    if more > 0:
                        reserved[unit] = reported[unit]
                        for run in self.chain:
                            run.cell(unit).reserved += more
                if call.estimated is None:
                    call.estimated = call.amounts
                call.amounts = tuple(reserved.items())
        if late:
            if self.books is not None:
                self.books.reported(call, amounts)
            if self.root.alerts:
                ring(self.root)
            if self.listeners:
                self.emit(
                    events.Charged(
                        run_id=self.run.id, at=time.time(), amounts=decimals(tuple(amounts)), call_id=call.id
                    )
                )

    # -- afterwards ----------------------------------------------------------------------------

    def _emit_finished(
        self,
        call: ToolCall,
        outcome: str,
        charged: Mapping[str, int],
        result: Any,
        error: BaseException | None,
        overrun: bool = False,
    ) -> None:
        self.emit(
            events.ToolFinished(
                run_id=self.run.id,
                at=time.time(),
                iteration=self.run.iteration or None,
                call_id=call.id,
                tool=self.name,
                outcome=outcome,
                charged=decimals(charged),
                overrun=overrun,
                result=result,
                error=error,
                duration=max(0.0, time.perf_counter() - call.started_at),
                attempt=call.attempt,
                items=call.yielded,
                key=call.place.get("key"),
            )
        )

    def emit(self, event: events.Event) -> None:
        """Hand the event to every subscriber."""
        for listener in self.listeners:
            listener(event)


# -- the admission and the body as parts of a composed pipeline ------------------------------------


def admission_hook(call: ToolCall, proceed: Proceed) -> Steps:
    """Admit the call, or wait for what would cure the refusal with nothing held, and admit it afresh."""
    plan = call.plan
    if call.line is not None:  # admitted before: a hook goes round again
        call = call.replace(arguments=call.arguments)
        CURRENT.set(call)
    call.observed = call.refused = None
    while True:
        refusal = plan.admit(call)
        if refusal is None:
            break
        if refusal.cure is None:
            raise plan.refuse(call, refusal)
        yield from refusal.cure(call)
    call.line = line = [call]
    try:
        return (yield from proceed(call))
    finally:
        if not line[-1].started:
            plan.undo(line[-1])


def invoke(call: ToolCall) -> Steps:
    """Run the body and settle: the innermost part."""
    plan = call.plan
    if plan.root.alarm:
        refusal = plan.latched()  # looked at again: something may have waited since the admission
        if refusal is not None:
            raise plan.refuse(call, refusal)
    CURRENT.set(call)  # what hooks replaced; the driver restores what was current before the call
    try:
        plan.start(call)
        if plan.run.recorder is not None:
            yield plan.run.recorder.commit(call.tool.colour)
            if plan.root.alarm and (refusal := plan.latched()) is not None:
                raise plan.refuse(call, refusal)
        result = yield Invoke(call, plan.timeout)
    except EffectTimeout:
        assert plan.timeout is not None
        call.timed_out = error = ToolTimeout(call.name, plan.timeout, plan.timeout_source)
        plan.failed(call, error)
        raise error from None
    except BaseException as exc:
        plan.failed(call, exc)
        raise
    plan.returned(call, result)
    return result
