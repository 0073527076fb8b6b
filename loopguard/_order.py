"""The order of a call: the one place that puts guardrails one inside the other."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from loopguard._admission import Admission, admission_hook, invoke
from loopguard._call import ASYNC, ASYNC_GENERATOR, Tool, ToolCall
from loopguard._config import settings
from loopguard._events import Event
from loopguard._pipeline import LOCK, Hook, compose
from loopguard._run import Run, only_elsewhere, subscribers
from loopguard._warn import warn
from loopguard.budgets import Budget
from loopguard.budgets._books import ToolBooks
from loopguard.budgets._period import PeriodCap
from loopguard.exceptions import ConfigurationError, ToolCallRefused
from loopguard.guardrails import ApproveTool, CircuitBreaker, LoopLimit, MaxSteps, RateLimit, Retry, Timeout, WrapTool
from loopguard.guardrails.approve import approvals
from loopguard.telemetry._spans import provider_is_set
from loopguard.telemetry._tools import TOOL_SPANS

if TYPE_CHECKING:
    from loopguard._guard import Guard

__all__ = ["LIMITS", "NOWHERE", "compile_plan"]

LIMITS: tuple[type, ...] = (RateLimit, CircuitBreaker, MaxSteps, LoopLimit, Budget)
"""The limits of one run in the order they are asked; those of plugins come after them."""

DEFAULT_LOOP_LIMIT = LoopLimit()


def compile_plan(tool: Tool, run: Run | None) -> Admission:
    """Everything that a call of this tool passes in this run: the one place that orders it.

    span ▸ WrapTool ▸ admission (limits, outermost run first) ▸ ledgers ▸ ApproveTool ▸ Retry ▸ Timeout ▸ the tool
    """
    if run is None:
        _warn_of_lost_run(tool)
        return _outside_plan(tool)
    stations = _stations(tool, run)
    if any(ancestor.ended for ancestor in run.chain):
        run.root.alarm = True  # so that the latch of the ended run is looked at
    for guard in tool.guards:
        guard.listen(run)
    plan = _assemble(tool, run.chain, stations, run.listeners, default_loop_limit=True)
    if not run.ended:
        run.plans[tool] = plan
    return plan


def _stations(tool: Tool, run: Run) -> list[tuple[Run, tuple[Any, ...]]]:
    """Which guards stand on which run, outermost first; a tool's own where they stand, else on the outermost."""
    own, root = run.adopt(tool.guards), run.root
    return [
        (ancestor, tuple(dict.fromkeys((*ancestor.guards, *(own if ancestor is root else ())))))
        for ancestor in run.chain
    ]


def _outside_plan(tool: Tool) -> Admission:
    """Outside any run only the tool's own guards count, process-wide."""
    known = tool.outside
    if known is not None and known[0] == settings.version and (known[1].tracer is not None or not provider_is_set()):
        return known[1]
    chain = tuple(guard.outside for guard in tool.guards) or (NOWHERE,)
    stations = [(guard.outside, (guard,)) for guard in tool.guards]
    listeners = (*subscribers(), *(guard.listener for guard in tool.guards if guard.listener is not None))
    for outside in chain:
        outside.listeners = listeners  # those that were there when it was made may have gone
    plan = _assemble(tool, chain, stations, listeners, default_loop_limit=False)
    if tool.require_run or settings.require_run:
        plan.checks = (_refuse_no_run,)
    tool.outside = settings.version, plan
    return plan


def _warn_of_lost_run(tool: Tool) -> None:
    key = f"run.bind {tool.ident}"
    if key not in NOWHERE.warned and only_elsewhere():
        NOWHERE.warned.add(key)
        warn(
            f"the tool {tool.name} was called in thread {threading.current_thread().name!r}, which belongs to no run, "
            f"while a run is under way in another: its limits don't count there. Threads don't inherit a run; if this "
            f"one works for it, hand it run.bind(fn) instead of fn."
        )


def _refuse_no_run(call: ToolCall) -> ToolCallRefused:
    reason = f"{call.name} runs only inside a loop or scope: call it from a @loop, or `with guard.scope(…)`"
    return ToolCallRefused("no_run", "require_run", call.name, reason)


def _assemble(
    tool: Tool,
    chain: tuple[Run, ...],
    stations: Sequence[tuple[Run, tuple[Guard, ...]]],
    listeners: tuple[Callable[[Event], object], ...],
    *,
    default_loop_limit: bool,
) -> Admission:
    limits: list[Any] = []
    wraps: dict[WrapTool, None] = {}
    approvers: dict[ApproveTool, Run] = {}
    retry: Retry | None = None
    timeouts = [(tool.timeout, f"@tool(timeout=…) of {tool.name}")] if tool.timeout is not None else []
    repeats: dict[Any, tuple[LoopLimit, Guard | None]] = {}
    for run, guards in stations:
        for guard in guards:
            for guardrail in guard.guardrails:
                if isinstance(guardrail, Retry):
                    retry = guardrail  # the innermost
                elif isinstance(guardrail, Timeout):
                    timeouts.append((guardrail.seconds, f"{guardrail!r} of run {run.name!r}"))
                elif isinstance(guardrail, LoopLimit):
                    repeats.setdefault((guardrail.settings, guard.mode), (guardrail, guard))
                elif isinstance(guardrail, WrapTool):
                    wraps[guardrail] = None
                elif isinstance(guardrail, ApproveTool):
                    approvers.setdefault(guardrail, _station_of(guardrail, stations))
    if not repeats and default_loop_limit:
        repeats[None] = DEFAULT_LOOP_LIMIT, None
    if not any(limit.n for limit, _ in repeats.values()):
        repeats[_News] = _News(), None  # type: ignore[assignment]  # it stands in LoopLimit's place
    inner = chain[-1]
    books: list[tuple[PeriodCap, bool]] = []
    for run, guards in stations or [(inner, ())]:
        here: list[tuple[Any, Guard | None]] = [
            (guardrail, guard) for guard in guards for guardrail in guard.guardrails if hasattr(guardrail, "bind")
        ]
        here = [(guardrail, guard) for guardrail, guard in here if not isinstance(guardrail, LoopLimit)]
        if run is inner:  # repeats are counted by the run that makes the call
            here += repeats.values()
        for guardrail, owner in sorted(here, key=lambda pair: _rank(pair[0])):
            if isinstance(guardrail, Budget) and guardrail.per != "run":
                enforced = owner is None or owner.mode == "enforce"
                books += [(cap, enforced) for cap in guardrail.caps(run) if isinstance(cap, PeriodCap)]
            bound = guardrail.bind(run, tool)
            if bound is not None and not any(bound is known for known in limits):
                limits.append(bound if owner is None or owner.mode == "enforce" else _Observed(bound))
    plan = Admission(tool, chain, limits, listeners, TOOL_SPANS if provider_is_set() else None)
    asks = tool.approve or any(approver.which.covers_tool(tool) for approver in approvers)
    _check_colours(tool, approvers, books)
    retries = retry is not None and tool.idempotent
    if timeouts:
        plan.timeout, plan.timeout_source = min(timeouts)
    recorder = inner.recorder
    waits = any(getattr(limit, "curable", False) for limit in limits)
    if recorder is not None or wraps or asks or retries or timeouts or waits or books:
        hooks: list[Hook] = [*(wrap.hook for wrap in wraps)]
        if recorder is not None:  # what is recorded is answered before anything is asked, taken or charged
            hooks.append(recorder.hook)
        hooks.append(admission_hook)
        if books:
            plan.books = ToolBooks(books)
            hooks.append(plan.books.hook)
        if asks:
            hooks.append(approvals(tool, list(approvers.items())))
        if retry is not None and retries:
            plan.retried()
            hooks.append(retry.hook)
        plan.proceed = compose(hooks, invoke)
    return plan


def _rank(guardrail: Any) -> int:
    return next((i for i, kind in enumerate(LIMITS) if isinstance(guardrail, kind)), len(LIMITS))


def _station_of(guardrail: ApproveTool, stations: Sequence[tuple[Run, tuple[Guard, ...]]]) -> Run:
    return next(run for run, guards in stations if any(guardrail in guard.guardrails for guard in guards))


def _check_colours(tool: Tool, approvers: Iterable[ApproveTool], books: Iterable[tuple[PeriodCap, bool]]) -> None:
    if tool.colour in (ASYNC, ASYNC_GENERATOR):
        return
    for cap, _ in books:
        if cap.keeper.is_async:
            raise ConfigurationError(
                f"the ledger {cap.keeper.name} of {cap.budget!r} is async, but the tool {tool.name} is sync: nothing "
                f"could await it. Make the tool `async def`, or name a ledger with plain methods."
            )
    for approver in approvers:
        if inspect.iscoroutinefunction(approver.approver) and approver.which.covers_tool(tool):
            raise ConfigurationError(
                f"{approver!r} is async, but the tool {tool.name} is sync: nothing could await the answer. "
                f"Make the tool `async def`, or the approver a plain function."
            )


class _News:
    """Where no LoopLimit tells new calls from old ones: every call that ends is new. (A denial holds until then.)"""

    n = 0

    def bind(self, run: Run, tool: Tool) -> _News | None:
        return None if tool.repeatable else self

    def done(self, call: ToolCall, token: Any, result: Any, error: BaseException | None) -> None:
        with LOCK:
            for run in call.run.chain:
                run.news += 1


class _Observed:
    """A limit that says what it would have refused, and lets the call pass."""

    def __init__(self, limit: Any) -> None:
        for method in ("prepare", "take", "undo", "done"):
            if hasattr(limit, method):
                setattr(self, method, getattr(limit, method))
        self.binds = getattr(limit, "binds", False)
        self.per_attempt = getattr(limit, "per_attempt", False)
        self.limit = limit

    def check(self, call: ToolCall) -> None:
        refusal = self.limit.check(call) if hasattr(self.limit, "check") else None
        if refusal is not None:
            call.observed = [*(call.observed or ()), refusal]


NOWHERE = Run("no run")
NOWHERE.outside = True
