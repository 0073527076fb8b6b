"""Guard and @tool: a policy, and the choke point that every call of a tool passes.

`compile_plan` is the one function that orders the guardrails of a call.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import Token
from decimal import Decimal
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, Self, TypeAlias, TypeVar, overload

import wrapt

from loopguard._admission import Admission, admission_hook, invoke
from loopguard._amounts import costs
from loopguard._call import ASYNC, ASYNC_GENERATOR, GENERATOR, SYNC, Tool, ToolCall, check_callable, new_id
from loopguard._config import settings
from loopguard._drivers import call_async, call_async_generator, call_generator, call_sync, in_thread, running_task
from loopguard._events import Event, ToolRefused
from loopguard._halting import BATCH, Batch, check_halted, end_row, note_refusal, refused
from loopguard._outcomes import LoopResult, StopReason, only_refusals, stop_reason_of
from loopguard._pipeline import LOCK, Hook, compose
from loopguard._run import Run, current_run, only_elsewhere, publish, subscribers
from loopguard._schemas import InvalidArguments, ToolUse, UnknownTool, tool_result, tool_uses, unknown_tool
from loopguard._warn import warn
from loopguard.budgets import Budget
from loopguard.exceptions import ConfigurationError, LoopHalted, LoopStopped, ToolCallRefused
from loopguard.guardrails import (
    ApproveTool,
    CircuitBreaker,
    LoopLimit,
    MaxSteps,
    RateLimit,
    Retry,
    Timeout,
    WrapTool,
)
from loopguard.guardrails.approve import approvals
from loopguard.redaction import redact_error
from loopguard.telemetry._runs import RunSpan
from loopguard.telemetry._spans import provider_is_set
from loopguard.telemetry._tools import TOOL_SPANS

__all__ = ["Guard", "GuardedTool", "Scope", "tool"]

P = ParamSpec("P")
P2 = ParamSpec("P2")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])
Cost: TypeAlias = float | Decimal | Mapping[str, float | Decimal]

LIMITS: tuple[type, ...] = (RateLimit, CircuitBreaker, MaxSteps, LoopLimit, Budget)
"""The limits of one run in the order they are asked; those of plugins come after them."""

DEFAULT_LOOP_LIMIT = LoopLimit()


# -- the order of a call ---------------------------------------------------------------------------


def compile_plan(tool: Tool, run: Run | None) -> Admission:
    """Everything that a call of this tool passes in this run: the one place that orders it.

    span ▸ WrapTool ▸ admission (limits, outermost run first) ▸ ApproveTool ▸ Retry ▸ Timeout ▸ the tool
    """
    if run is None:
        _warn_of_lost_run(tool)
        return _outside_plan(tool)
    stations = _stations(tool, run)
    if any(ancestor.ended for ancestor in run.chain):
        run.root.alarm = True  # so that the latch of the ended run is looked at
    listeners = run.listeners
    for guard in tool.guards:
        if guard.listener is not None and guard.listener not in listeners:
            listeners = (*listeners, guard.listener)
    plan = _assemble(tool, run.chain, stations, listeners, default_loop_limit=True)
    if not run.ended:
        run.plans[tool] = plan
    return plan


def _stations(tool: Tool, run: Run) -> list[tuple[Run, tuple[Any, ...]]]:
    """Which guards stand on which run, outermost first; a tool's own where they stand, else on the outermost."""
    standing = {guard for ancestor in run.chain for guard in ancestor.guards}
    own = tuple(guard for guard in tool.guards if guard not in standing)
    root = run.chain[0]
    for guard in own:
        if guard not in root.adopted:
            root.adopted = (*root.adopted, guard)
            if root.max_refusals is None and not isinstance(guard.max_refusals, _Inherited):
                root.max_refusals = guard.max_refusals
            if guard.listener is not None and guard.listener not in root.listeners:
                root.listeners = (*root.listeners, guard.listener)
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
                    repeats.setdefault(guardrail.settings, (guardrail, guard))
                elif isinstance(guardrail, WrapTool):
                    wraps[guardrail] = None
                elif isinstance(guardrail, ApproveTool):
                    approvers.setdefault(guardrail, _station_of(guardrail, stations))
    if not repeats and default_loop_limit:
        repeats[None] = DEFAULT_LOOP_LIMIT, None
    inner = chain[-1]
    for run, guards in stations or [(inner, ())]:
        here: list[tuple[Any, Guard | None]] = [
            (guardrail, guard) for guard in guards for guardrail in guard.guardrails if hasattr(guardrail, "bind")
        ]
        here = [(guardrail, guard) for guardrail, guard in here if not isinstance(guardrail, LoopLimit)]
        if run is inner:  # repeats are counted by the run that makes the call
            here += repeats.values()
        for guardrail, owner in sorted(here, key=lambda pair: _rank(pair[0])):
            bound = guardrail.bind(run, tool)
            if bound is not None and not any(bound is known for known in limits):
                limits.append(bound if owner is None or owner.mode == "enforce" else _Observed(bound))
    plan = Admission(tool, chain, limits, listeners, TOOL_SPANS if provider_is_set() else None)
    asks = tool.approve or any(approver.which.covers_tool(tool) for approver in approvers)
    _check_colours(tool, approvers)
    retries = retry is not None and tool.idempotent
    if timeouts:
        plan.timeout, plan.timeout_source = min(timeouts)
    recorder = inner.recorder
    if (
        recorder is not None
        or wraps
        or asks
        or retries
        or timeouts
        or any(getattr(x, "curable", False) for x in limits)
    ):
        hooks: list[Hook] = [*(wrap.hook for wrap in wraps)]
        if recorder is not None:  # what is recorded is answered before anything is asked, taken or charged
            hooks.append(recorder.hook)
        hooks.append(admission_hook)
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


def _check_colours(tool: Tool, approvers: Iterable[ApproveTool]) -> None:
    if tool.colour in (ASYNC, ASYNC_GENERATOR):
        return
    for approver in approvers:
        if inspect.iscoroutinefunction(approver.approver) and (tool.approve or approver.which.covers_tool(tool)):
            raise ConfigurationError(
                f"{approver!r} is async, but the tool {tool.name} is sync: nothing could await the answer. "
                f"Make the tool `async def`, or the approver a plain function."
            )


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


# -- decorated tools -------------------------------------------------------------------------------


class GuardedTool(Protocol[P, R_co]):
    """A function whose every call passes the guardrails: it is called as before."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call it."""
        ...

    @overload
    def acall(
        self: GuardedTool[P2, Coroutine[Any, Any, T]], *args: P2.args, **kwargs: P2.kwargs
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def acall(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]:
        """Call it from async code: a sync tool runs in a thread of its own, off the event loop."""
        ...

    @overload
    def __get__(self, instance: None, owner: type | None = None, /) -> Self: ...
    @overload
    def __get__(
        self: GuardedTool[Concatenate[S, P2], T], instance: S, owner: type | None = None, /
    ) -> GuardedTool[P2, T]: ...


class _Decorated:
    """What a decorated tool can do beside being called, bound to an object or not."""

    # No annotations in this class body: they would hide those of the wrapped function.

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """Call it from async code: a sync tool runs in a thread of its own, off the event loop."""
        colour = _tool_of(self).colour
        call: Any = self  # a wrapt proxy of a callable
        if colour == ASYNC:
            return await call(*args, **kwargs)
        if colour == SYNC:
            return await in_thread(functools.partial(call, *args, **kwargs), _tool_of(self).name)
        raise ConfigurationError(f"{_tool_of(self).name} is a generator: iterate over it, acall is for plain functions")

    def __reduce_ex__(self, protocol: Any) -> str:
        return self.__qualname__  # type: ignore[attr-defined, no-any-return]  # pickled by name, as functions are

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class _BoundTool(_Decorated, wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]  # wrapt's classes are generic in stubs only
    """A decorated method, bound to its object or class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner = self._self_owner if self._self_instance is None else self._self_instance
        return getattr, (owner, self.__wrapped__.__name__)

    def __deepcopy__(self, memo: Any) -> Any:
        return getattr(copy.deepcopy(self._self_instance, memo), self.__wrapped__.__name__, self)


class _Tool(_Decorated, wrapt.FunctionWrapper):  # type: ignore[type-arg]  # as above
    """A decorated function."""

    __bound_function_wrapper__ = _BoundTool

    def __init__(self, wrapped: Any, tool: Tool) -> None:
        super().__init__(wrapped, functools.partial(_CALLS[tool.colour], tool))
        self._self_tool = tool


_CALLS: dict[str, Callable[..., Any]] = {
    SYNC: call_sync,
    ASYNC: call_async,
    GENERATOR: call_generator,
    ASYNC_GENERATOR: call_async_generator,
}


def _tool_of(decorated: Any) -> Tool:
    if isinstance(decorated, _BoundTool):
        return decorated._self_parent._self_tool  # type: ignore[no-any-return]  # wrapt keeps the unbound one there
    return decorated._self_tool  # type: ignore[no-any-return]  # set in _Tool.__init__


def _name_of(fn: Any, name: str | None) -> str:
    if name is None:
        inner = fn
        while isinstance(inner, functools.partial | staticmethod | classmethod):
            inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
        name = getattr(inner, "__name__", type(inner).__name__)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"tool(name={name!r}): give a text")
    return name


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what}={value!r}: give True or False")
    return value


def _callback(value: Any, what: str) -> Any:
    if value is not None and not callable(value):
        raise ConfigurationError(f"{what}={value!r}): give a function, or None")
    return value


def _exceptions(value: Any) -> tuple[type[BaseException], ...]:
    if not isinstance(value, tuple) or not all(
        isinstance(kind, type) and issubclass(kind, Exception) for kind in value
    ):
        raise ConfigurationError(f"tool(raises={value!r}): give a tuple of exception classes")
    return value


def _make_tool(fn: Any, options: Mapping[str, Any], guards: tuple[Guard, ...]) -> Any:
    check_callable(fn, "@tool")
    if isinstance(fn, _Tool | _BoundTool):
        raise ConfigurationError(f"{_tool_of(fn).name} is decorated with @tool already: give one @tool all the options")
    cost = options["cost"]
    return _Tool(
        fn,
        Tool(
            fn,
            name=_name_of(fn, options["name"]),
            cost=() if callable(cost) else costs(cost, "tool(cost"),
            cost_fn=cost if callable(cost) else None,
            approve=_flag(options["approve"], "tool(approve"),
            idempotent=_flag(options["idempotent"], "tool(idempotent"),
            repeatable=_flag(options["repeatable"], "tool(repeatable"),
            require_run=_flag(options["require_run"], "tool(require_run"),
            timeout=None if options["timeout"] is None else Timeout(options["timeout"]).seconds,
            raises=_exceptions(options["raises"]),
            self_key=_callback(options["self_key"], "tool(self_key"),
            guards=guards,
            compile=compile_plan,
        ),
    )


@overload
def tool(fn: Callable[P, R], /) -> GuardedTool[P, R]: ...
@overload
def tool(
    fn: None = None,
    /,
    *,
    name: str | None = None,
    cost: Cost | Callable[[ToolCall], Cost] | None = None,
    approve: bool = False,
    timeout: float | None = None,
    idempotent: bool = False,
    repeatable: bool = False,
    require_run: bool = False,
    raises: tuple[type[BaseException], ...] = (),
    self_key: Callable[[Any], str] | None = None,
    guard: Guard | None = None,
) -> Callable[[Callable[P, R]], GuardedTool[P, R]]: ...
def tool(
    fn: Any = None,
    /,
    *,
    name: str | None = None,
    cost: Cost | Callable[[ToolCall], Cost] | None = None,
    approve: bool = False,
    timeout: float | None = None,
    idempotent: bool = False,
    repeatable: bool = False,
    require_run: bool = False,
    raises: tuple[type[BaseException], ...] = (),
    self_key: Callable[[Any], str] | None = None,
    guard: Guard | None = None,
) -> Any:
    """Make a function a tool: every call of it passes the guardrails of the runs it is called in.

    Works on functions, methods, class and static methods, partials and callable objects; sync, async,
    generators and async generators. Signature, name and kind stay as they are.

    - ``name``: the tool's name, by default the function's.
    - ``cost``: the most that a call may cost: a number of USD, ``{unit: amount}``, or ``fn(call)`` that
      returns either. Report inside with `charge` what it did cost.
    - ``approve``: run only on an explicit yes of an ApproveTool that covers it.
    - ``idempotent``: running it twice does no harm. ``repeatable``: LoopLimit never counts it.
    - ``require_run``: refuse calls outside any run (``no_run``). ``guard``: a Guard of its own.
    - ``timeout``: seconds for each attempt, see `Timeout`. ``raises``: exception classes that a resumed
      run may raise again. ``self_key``: ``fn(self)`` names a method's object for durable approvals.

    Raises ConfigurationError at decoration for a wrong option.
    """
    options = {
        "name": name,
        "cost": cost,
        "approve": approve,
        "timeout": timeout,
        "idempotent": idempotent,
        "repeatable": repeatable,
        "require_run": require_run,
        "raises": raises,
        "self_key": self_key,
    }
    if guard is not None:
        if not isinstance(guard, Guard):
            raise ConfigurationError(f"tool(guard={guard!r}): give a Guard")
        return guard.tool(fn, **options)
    if fn is None:
        return lambda function: _make_tool(function, options, ())
    return _make_tool(fn, options, ())


# -- Guard -----------------------------------------------------------------------------------------


class _Inherited(int):
    """The default of max_refusals, which leaves the decision to an outer guard."""


_INHERITED = _Inherited(5)


class Guard:
    """A policy: guardrails in one place, for the loops, scopes and tools that are given it.

    - ``mode="observe"`` refuses no limit and records what it would have refused; approvals are always
      enforced.
    - ``max_refusals``: after so many refusals in a row the run is halted.
    - ``on_event``: called with every event of the runs it stands on, redacted.
    """

    def __init__(
        self,
        *guardrails: Any,
        mode: Literal["enforce", "observe"] = "enforce",
        max_refusals: int = _INHERITED,
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        for guardrail in guardrails:
            known = isinstance(guardrail, WrapTool | ApproveTool | Retry | Timeout) or callable(
                getattr(guardrail, "bind", None)
            )
            if isinstance(guardrail, type) or not known:
                hint = f": write {guardrail.__name__}(…)" if isinstance(guardrail, type) else ""
                raise ConfigurationError(f"Guard({guardrail!r}) is not a guardrail{hint}")
        if mode not in ("enforce", "observe"):
            raise ConfigurationError(f"Guard(mode={mode!r}): give 'enforce' or 'observe'")
        if not isinstance(max_refusals, int) or isinstance(max_refusals, bool) or max_refusals < 1:
            raise ConfigurationError(f"Guard(max_refusals={max_refusals!r}): give an int of at least 1")
        if on_event is not None and not callable(on_event):
            raise ConfigurationError(f"Guard(on_event={on_event!r}): give a callable")
        self.guardrails = guardrails
        self.mode = mode
        self.max_refusals = max_refusals
        self.listener = publish(on_event) if on_event is not None else None
        self._tools: dict[tuple[str, Any], Any] = {}

    def __repr__(self) -> str:
        return f"Guard({', '.join(map(repr, self.guardrails))})"

    @functools.cached_property
    def outside(self) -> Run:
        """Where the calls of its tools count outside of any run: process-wide."""
        run = Run("no run", None, (self,))
        run.outside = True
        return run

    def join(self, run: Run) -> None:
        """Stand on a run."""
        if self.listener is not None and self.listener not in run.listeners:
            run.listeners = (*run.listeners, self.listener)
        if not isinstance(self.max_refusals, _Inherited):
            run.max_refusals = self.max_refusals

    # -- making tools ----------------------------------------------------------------------------

    @overload
    def tool(self, fn: Callable[P, R], /) -> GuardedTool[P, R]: ...
    @overload
    def tool(
        self,
        fn: None = None,
        /,
        *,
        name: str | None = None,
        cost: Cost | Callable[[ToolCall], Cost] | None = None,
        approve: bool = False,
        timeout: float | None = None,
        idempotent: bool = False,
        repeatable: bool = False,
        require_run: bool = False,
        raises: tuple[type[BaseException], ...] = (),
        self_key: Callable[[Any], str] | None = None,
    ) -> Callable[[Callable[P, R]], GuardedTool[P, R]]: ...
    def tool(
        self,
        fn: Any = None,
        /,
        *,
        name: str | None = None,
        cost: Cost | Callable[[ToolCall], Cost] | None = None,
        approve: bool = False,
        timeout: float | None = None,
        idempotent: bool = False,
        repeatable: bool = False,
        require_run: bool = False,
        raises: tuple[type[BaseException], ...] = (),
        self_key: Callable[[Any], str] | None = None,
    ) -> Any:
        """Like `loopguard.tool`, under this guard, and known to `call`, `run_tools` and `schemas`."""
        options = {
            "name": name,
            "cost": cost,
            "approve": approve,
            "timeout": timeout,
            "idempotent": idempotent,
            "repeatable": repeatable,
            "require_run": require_run,
            "raises": raises,
            "self_key": self_key,
        }
        if fn is None:
            return lambda function: self.tool(function, **options)
        if isinstance(fn, _Tool | _BoundTool):
            return self._know(self._under(fn))
        return self._know(_make_tool(fn, options, (self,)))

    @overload
    def wrap(self, tools: list[Any], /) -> list[Any]: ...
    @overload
    def wrap(self, tools: dict[str, Any], /) -> dict[str, Any]: ...
    @overload
    def wrap(self, tools: F, /) -> F: ...
    def wrap(self, tools: Any, /) -> Any:
        """Guard functions that exist: one, a list of them, or {name: function}.

        Tools of the anthropic SDK's tool runner (`beta_tool`) are copied, with their `call` guarded.
        Guarding twice by the same guard is guarding once.
        """
        if isinstance(tools, Mapping):
            return {name: self._wrap_one(fn, name) for name, fn in tools.items()}
        if isinstance(tools, list | tuple):
            return type(tools)(self._wrap_one(fn, None) for fn in tools)
        return self._wrap_one(tools, None)

    def _wrap_one(self, fn: Any, name: str | None) -> Any:
        guarded = self._guarded(fn, name)
        return self._know(guarded) if isinstance(guarded, _Tool | _BoundTool) else guarded

    def _guarded(self, fn: Any, name: str | None = None) -> Any:
        if isinstance(fn, _Tool | _BoundTool):
            return self._under(fn)
        if not inspect.isroutine(fn) and callable(getattr(fn, "to_dict", None)) and callable(getattr(fn, "call", None)):
            runnable = copy.copy(fn)
            runnable.call = (
                self._under(fn.call)
                if isinstance(fn.call, _Tool | _BoundTool)
                else _make_tool(fn.call, {**_DEFAULTS, "name": name or fn.name}, (self,))
            )
            return runnable
        return _make_tool(fn, {**_DEFAULTS, "name": name}, (self,))

    def _under(self, decorated: Any) -> Any:
        known = _tool_of(decorated)
        if self in known.guards:
            return decorated
        return _Tool(decorated.__wrapped__, known.with_guards((*known.guards, self)))

    def _know(self, decorated: Any) -> Any:
        known = _tool_of(decorated)
        owner = _instance_of(decorated) if known.own is None else known.own
        self._tools[known.name, (known.ident, id(owner))] = decorated
        return decorated

    # -- calling tools by name -------------------------------------------------------------------

    def call(self, name: str, arguments: Mapping[str, Any] | str, id: str | None = None) -> Any:
        """Call a tool by name with a model's arguments, an object or JSON text, and return its result.

        Raises what the tool raises, ToolCallRefused, and InvalidArguments (a ValueError that a model can
        act on) for an unknown name or arguments that don't fit; such a call uses no step.
        """
        return self._call(_Named(self._by_name(None)), name, arguments, id)

    async def acall(self, name: str, arguments: Mapping[str, Any] | str, id: str | None = None) -> Any:
        """`call` for async code: sync tools run off the event loop."""
        return await self._acall(_Named(self._by_name(None)), name, arguments, id)

    def run_tools(
        self, message: Any, tools: Iterable[Any] | None = None, *, max_chars: int | None = None
    ) -> list[dict[str, Any]]:
        """Run the tool_use blocks of an Anthropic message and return their tool_result blocks, in order.

        ``tools``: those that this guard made, or the ones given (functions are guarded by it). Refusals,
        unknown names, arguments that don't fit and errors become ``is_error`` results, so that every
        pending id gets one. Past 80 % of a limit the last result says what is left. ``max_chars`` caps the
        text of each result: more is cut, and the model is told how much.
        """
        named = _Named(self._by_name(tools))
        _check_chars(max_chars)
        results = []
        uses = tool_uses(message)
        with _Turn(uses):
            for use in uses:
                try:
                    value = self._call(named, use.name, use.input, use.id)
                    results.append(tool_result(use.id, value, limit=max_chars))
                except Exception as exc:  # whatever a tool raises is the model's to know
                    results.append(_error_result(use, exc, max_chars))
        return _wind_down(results)

    async def arun_tools(
        self, message: Any, tools: Iterable[Any] | None = None, *, max_chars: int | None = None
    ) -> list[dict[str, Any]]:
        """`run_tools` for async code: all at once, results in the order of the blocks."""
        named = _Named(self._by_name(tools))
        _check_chars(max_chars)

        async def one(use: ToolUse) -> dict[str, Any]:
            try:
                return tool_result(use.id, await self._acall(named, use.name, use.input, use.id), limit=max_chars)
            except Exception as exc:  # whatever a tool raises is the model's to know
                return _error_result(use, exc, max_chars)

        uses = tool_uses(message)
        with _Turn(uses):
            done = await asyncio.gather(*map(one, uses), return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        return _wind_down([outcome for outcome in done if not isinstance(outcome, BaseException)])

    def schemas(self) -> list[dict[str, Any]]:
        """The ``tools=`` list of the Messages API for the tools that this guard made."""
        return [target.arguments.tool_definition(name) for name, target in sorted(self._by_name(None).items())]

    def _by_name(self, tools: Iterable[Any] | None) -> dict[str, _Target]:
        if tools is None:
            chosen = [decorated for decorated in self._tools.values() if not _needs_self(decorated)]
        else:
            chosen = [self._guarded(fn) for fn in tools]
        named: dict[str, _Target] = {}
        for decorated in chosen:
            target = _Target(decorated)
            name = target.tool.name
            if name in named and named[name].decorated is not decorated:
                raise ConfigurationError(f"two tools are called {name!r}: give one of them another name=")
            named[name] = target
        return named

    def _prepare(
        self, named: _Named, name: str, arguments: Mapping[str, Any] | str, id: str | None
    ) -> tuple[_Target, Callable[..., Any]]:
        target = named.targets.get(name)
        try:
            if target is None:
                raise UnknownTool(unknown_tool(name, list(named.targets)))
            args, kwargs = target.arguments.to_call(target.arguments.validate(arguments))
        except InvalidArguments as exc:
            _count_invalid(name, arguments, id, exc)
            raise
        return target, functools.partial(target.call, args, kwargs, id)

    def _call(self, named: _Named, name: str, arguments: Mapping[str, Any] | str, id: str | None) -> Any:
        target, call = self._prepare(named, name, arguments, id)
        if target.tool.colour == GENERATOR:
            return list(call())
        if target.tool.colour != SYNC:
            raise ConfigurationError(f"{name} is async: use `await guard.acall(…)` or `await guard.arun_tools(…)`")
        return call()

    async def _acall(self, named: _Named, name: str, arguments: Mapping[str, Any] | str, id: str | None) -> Any:
        target, call = self._prepare(named, name, arguments, id)
        if target.tool.colour == ASYNC:
            return await call()
        if target.tool.colour == ASYNC_GENERATOR:
            return [item async for item in call()]
        if target.tool.colour == GENERATOR:
            return await in_thread(lambda: list(call()), name)
        return await in_thread(call, name)

    # -- scopes and files ------------------------------------------------------------------------

    def scope(self, name: str = "scope") -> Scope:
        """``with guard.scope("name") as run:`` (or ``async with``): a run without a loop."""
        return Scope(name, (self,))


_DEFAULTS = {
    "name": None,
    "cost": None,
    "approve": False,
    "timeout": None,
    "idempotent": False,
    "repeatable": False,
    "require_run": False,
    "raises": (),
    "self_key": None,
}
NOWHERE = Run("no run")
NOWHERE.outside = True


class _Target:
    """A tool that can be called by name."""

    __slots__ = ("arguments", "decorated", "tool")

    def __init__(self, decorated: Any) -> None:
        self.decorated = decorated
        self.tool = _tool_of(decorated)
        skip_first = _instance_of(decorated) is not None and self.tool.takes_self
        self.arguments = self.tool.schema(skip_first)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], id: str | None) -> Any:
        drive = _CALLS[self.tool.colour]
        return drive(self.tool, self.decorated.__wrapped__, _instance_of(self.decorated), args, kwargs, id)


class _Named:
    """The tools of one dispatch."""

    __slots__ = ("targets",)

    def __init__(self, targets: dict[str, _Target]) -> None:
        self.targets = targets


def _instance_of(decorated: Any) -> Any:
    if isinstance(decorated, _BoundTool):
        return decorated._self_instance
    return getattr(decorated.__wrapped__, "__self__", None)


def _needs_self(decorated: Any) -> bool:
    """Whether this is a function in a class body, which can't be called by name alone."""
    tool = _tool_of(decorated)
    where = getattr(tool.fn, "__qualname__", "").rpartition(".")[0]
    in_class = bool(where) and not where.endswith("<locals>")
    return in_class and not isinstance(decorated, _BoundTool) and inspect.isfunction(decorated.__wrapped__)


def _check_chars(max_chars: Any) -> None:
    if max_chars is not None and (not isinstance(max_chars, int) or isinstance(max_chars, bool) or max_chars < 0):
        raise ConfigurationError(f"run_tools(max_chars={max_chars!r}): give an int of at least 0, or None")


def _error_result(use: ToolUse, exc: Exception, max_chars: int | None) -> dict[str, Any]:
    if isinstance(exc, ConfigurationError):
        raise exc  # the program is set up wrongly: that isn't the model's to mend
    if isinstance(exc, ToolCallRefused | InvalidArguments):
        return tool_result(use.id, str(exc), is_error=True, limit=max_chars)
    return tool_result(use.id, f"{type(exc).__name__}: {redact_error(exc)}", is_error=True, limit=max_chars)


def _wind_down(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    run = current_run()
    if run is not None and results and run.nearly_done():
        note = f"{run.brief()} Little is left: finish now with what you have.".lstrip()
        content = results[-1]["content"]
        if isinstance(content, str):
            results[-1]["content"] = f"{content}\n\n{note}" if content else note
        else:
            results[-1]["content"] = [*content, {"type": "text", "text": note}]
    return results


def _count_invalid(name: str, arguments: Any, id: str | None, exc: InvalidArguments) -> None:
    """A call that can't be made counts as a refusal, so that a model that keeps making it is halted."""
    run = current_run()
    if run is None:
        return
    check_halted(run.chain)
    refusal = ToolCallRefused("invalid_arguments", "Guard", name, str(exc), None, None, run.name, run.id)
    with LOCK:
        for ancestor in run.chain:
            ancestor.refusals += 1
    refused(run.chain, refusal, id)
    run.emit(
        ToolRefused,
        call_id=id or new_id("call"),
        tool=name,
        arguments=arguments if isinstance(arguments, Mapping) else {"arguments": arguments},
        code=refusal.code,
        guardrail=refusal.guardrail,
        reason=refusal.reason,
        owner_id=run.id,
    )


class _Turn:
    """A batch of calls: if all of them were refused, that is one refusal in the row."""

    def __init__(self, uses: Sequence[ToolUse]) -> None:
        self.batch = Batch({use.id for use in uses})

    def __enter__(self) -> None:
        self.run = current_run()
        if self.run is not None:
            check_halted(self.run.chain)
        self.token = BATCH.set(self.batch)

    def __exit__(self, *exc_info: object) -> None:
        BATCH.reset(self.token)
        if self.run is None:
            return
        if self.batch.admitted:
            end_row(self.run.chain)
        elif self.batch.refusal is not None:
            note_refusal(self.run.chain, self.batch.refusal)


def _halted(run: Run, cause: ToolCallRefused | LoopHalted) -> LoopResult[None]:
    overdue = any(ancestor.overdue() for ancestor in run.chain)
    reason = StopReason.TIMEOUT if overdue else StopReason.HALTED
    return LoopResult(
        None,
        reason,
        False,
        0,
        usage=run.usage,
        cost=run.cost,
        warnings=tuple(run.warnings),
        error=cause.refusal if isinstance(cause, LoopHalted) else cause,
        run_id=run.id,
        trace_id=run.trace_id,
        name=run.name,
    )


class Scope:
    """A run without a loop, as a context manager: sync and async."""

    def __init__(self, name: str, guards: tuple[Guard, ...]) -> None:
        self._name = name
        self._guards = guards
        self._entered: dict[Run, tuple[Token[Any], Any]] = {}

    def __enter__(self) -> Run:
        run = Run(self._name, current_run(), self._guards)
        span = RunSpan(run) if provider_is_set() else None
        self._entered[run] = run.enter(), span
        return run

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        run = current_run()
        if run is None or run not in self._entered:  # left in another context than it was entered in
            run = next(reversed(self._entered))
        token, span = self._entered.pop(run)
        stopped = None
        cause = only_refusals(exc) if exc is not None and not isinstance(exc, Exception) else None
        if cause is not None and all(ancestor.kind == "scope" for ancestor in run.chain):
            stopped = LoopStopped(_halted(run, cause), str(cause) if isinstance(cause, LoopHalted) else None)
        run.leave(token, stop_reason_of(exc), error=exc)
        if span is not None:
            span.end(run, stop_reason_of(exc), None if exc is None or only_refusals(exc) is not None else exc)
        if stopped is not None:
            raise stopped from exc

    async def __aenter__(self) -> Run:
        running_task(self._name)
        return self.__enter__()

    async def __aexit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        self.__exit__(kind, exc, traceback)
