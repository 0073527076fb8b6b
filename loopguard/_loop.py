"""@loop: run a function again and again, its result the next argument, until it is done or stopped."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
import typing
import warnings
from collections.abc import Callable, Coroutine, Generator, Mapping
from decimal import Decimal
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar, overload

import wrapt

from loopguard import _events as events
from loopguard._amounts import SCALE, decimal
from loopguard._call import ASYNC, ASYNC_GENERATOR, GENERATOR, check_callable, colour_of, plain_function
from loopguard._drivers import cancelled_after, drive_async, drive_sync
from loopguard._guard import Guard
from loopguard._outcomes import (
    TRANSITIONS,
    Iteration,
    LoopResult,
    LoopState,
    StopReason,
    Transition,
    Verdict,
    attach_result,
    only_refusals,
    read_verdict,
    stop_reason_of,
)
from loopguard._pipeline import Ask, Effect, EffectTimeout, Invoke, Steps
from loopguard._run import Run, current_run
from loopguard._usage import Usage
from loopguard.budgets import Budget
from loopguard.exceptions import (
    ConfigurationError,
    JudgeError,
    LoopGuardWarning,
    LoopHalted,
    LoopStopped,
    ToolCallRefused,
)
from loopguard.judges import AnthropicJudge
from loopguard.redaction import check_id, redact_error
from loopguard.telemetry._runs import IterationSpan, RunSpan
from loopguard.telemetry._spans import provider_is_set

__all__ = ["AsyncLoop", "Loop", "loop"]

P = ParamSpec("P")
P2 = ParamSpec("P2")
R = TypeVar("R")
T = TypeVar("T")
S = TypeVar("S")

DEFAULT_MAX = 10
_UNSET: Any = object()
_log = logging.getLogger("loopguard")


class _Spec:
    """What a decorator says about one loop. Immutable; holds no state of any run."""

    def __init__(self, fn: Any, options: Mapping[str, Any]) -> None:
        check_callable(fn, "@loop")
        self.fn = plain_function(fn)
        colour = colour_of(fn)
        if colour in (GENERATOR, ASYNC_GENERATOR):
            raise ConfigurationError(
                f"@loop: {_name(self.fn)} is a {colour} function; a loop step returns its next state, it doesn't yield"
            )
        self.is_async = colour == ASYNC
        name = options["name"]
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigurationError(f"loop(name={name!r}): give a text")
        self.name: str = name or _name(self.fn)
        self.max = _positive(options["max"], "loop(max")
        self.until = _condition(options["until"])
        self.until_takes_iteration = self.until is not None and _takes_iteration(self.until)
        self.question, self.judge = _judge(options["until_llm"], options["judge"], self.is_async)
        self.guards = _guards(options["guard"], options["budget"])
        self.timeout = _seconds(options["timeout"])
        self.on_iteration = _callable(options["on_iteration"], "on_iteration")
        self.on_transition = _callable(options["on_transition"], "on_transition")
        if options["on_limit"] not in ("return", "raise"):
            raise ConfigurationError(f"loop(on_limit={options['on_limit']!r}): give 'return' or 'raise'")
        self.on_limit: str = options["on_limit"]
        self.signature = inspect.signature(self.fn)
        self.takes_self = not hasattr(self.fn, "__self__") and not isinstance(self.fn, functools.partial)
        feedback = self.signature.parameters.get("feedback")
        self.takes_feedback = feedback is not None and feedback.kind is feedback.KEYWORD_ONLY
        self.state = options["state"]
        if self.state is not None and self.state not in self.signature.parameters:
            known = ", ".join(self.signature.parameters) or "none"
            raise ConfigurationError(f"loop(state={self.state!r}): {self.name} has no such parameter; it has: {known}")

    @property
    def conditional(self) -> bool:
        """Whether anything but the ceiling can say that the loop is done."""
        return self.until is not None or self.question is not None

    def state_parameter(self, bound: bool) -> inspect.Parameter | None:
        """The parameter that each iteration's result replaces; None where there is no parameter."""
        parameters = list(self.signature.parameters.values())
        if bound and self.takes_self:
            parameters = parameters[1:]
        if self.state is not None:
            return self.signature.parameters[self.state]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                return parameter
        return None

    @functools.cached_property
    def may_return_none(self) -> bool:
        """Whether an annotation of the state or the result admits None."""
        try:
            hints = typing.get_type_hints(self.fn)
        except Exception:  # annotations are the user's, and may name what can't be found from here
            hints = getattr(self.fn, "__annotations__", {})
        first = self.state or next(iter(self.signature.parameters), None)
        return any(_admits_none(hints[name]) for name in ("return", first) if name in hints)


def _admits_none(hint: Any) -> bool:
    if isinstance(hint, str):
        return any(word in hint for word in ("None", "Optional", "Any", "object"))
    if hint in (None, type(None), Any, object) or isinstance(hint, TypeVar):
        return True
    return any(_admits_none(part) for part in typing.get_args(hint) if part is not Ellipsis) and (
        typing.get_origin(hint) is typing.Union or type(hint).__name__ == "UnionType"
    )


def _name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _positive(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{what}={value!r}): give an int of at least 1")
    return value


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigurationError(f"loop(timeout={value!r}): give seconds above 0, or None")
    return float(value)


def _callable(value: Any, what: str) -> Any:
    if value is not None and not callable(value):
        raise ConfigurationError(f"loop({what}={value!r}): give a function")
    return value


def _condition(until: Any) -> Any:
    if until is not None and not callable(until):
        raise ConfigurationError(
            f"loop(until={until!r}): give a function of the state, or conditions joined by | and &"
        )
    return until


def _judge(question: Any, judge: Any, is_async: bool) -> tuple[str | None, Any]:
    if question is None:
        if judge is not None:
            raise ConfigurationError("loop(judge=…) answers a question: give it as until_llm=")
        return None, None
    if not isinstance(question, str) or not question.strip():
        raise ConfigurationError(f"loop(until_llm={question!r}): give the question as a text")
    if judge is None:
        judge = AnthropicJudge()
    if not callable(judge):
        raise ConfigurationError(f"loop(judge={judge!r}): give a function (question, state)")
    if inspect.iscoroutinefunction(judge) and not is_async:
        raise ConfigurationError(f"loop(judge={judge!r}): it is async, but the loop is sync; make one like the other")
    return question, judge


def _takes_iteration(until: Any) -> bool:
    """Whether until wants the iteration: as its second required positional parameter, or one of that name."""
    try:
        parameters = list(inspect.signature(until).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    if any(p.name == "iteration" and p.kind is not p.VAR_KEYWORD for p in parameters[1:]):
        return True
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) >= 2


def _guards(guard: Any, budget: Any) -> tuple[Guard, ...]:
    if guard is not None and not isinstance(guard, Guard):
        raise ConfigurationError(f"loop(guard={guard!r}): give a Guard(…)")
    if budget is not None and not isinstance(budget, Budget):
        raise ConfigurationError(f"loop(budget={budget!r}): give a Budget(…)")
    return (*((guard,) if guard is not None else ()), *((Guard(budget),) if budget is not None else ()))


# -- one run ---------------------------------------------------------------------------------------


class _Body:
    """The body of one iteration, as the drivers invoke it."""

    __slots__ = ("args", "fn", "kwargs", "name")

    def __init__(self, name: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        self.fn = fn
        self.args = args
        self.kwargs = kwargs


class _Machine:
    """One run of a loop, from its first iteration to its result."""

    def __init__(
        self, spec: _Spec, fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run_id: str | None
    ) -> None:
        self.spec = spec
        self.fn = fn
        self.args = list(args)
        self.kwargs = dict(kwargs)
        parameter = spec.state_parameter(instance is not None)
        self.stateful = parameter is not None
        self.place: int | str = 0
        if parameter is not None:
            self.place = self._find(parameter, instance is not None)
        self.value: Any = self._get() if self.stateful else None
        self.initial = self.value
        self.run = Run(
            spec.name, current_run(), spec.guards, kind="loop", max=spec.max, timeout=spec.timeout, id=run_id
        )
        self.history: list[Iteration[Any]] = []
        self.transitions: list[Transition] = []
        self.state = LoopState.READY
        self.completed = 0
        self.satisfied: bool | None = None
        self.undecided = 0

    def _find(self, parameter: inspect.Parameter, bound: bool) -> int | str:
        """Where the state stands among the arguments; an omitted one is put there with its default."""
        positions = [
            p.name
            for p in self.spec.signature.parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        position = positions.index(parameter.name) if parameter.name in positions else -1
        if bound and self.spec.takes_self:
            position -= 1
        if 0 <= position < len(self.args):
            return position
        if parameter.name not in self.kwargs:
            if parameter.default is parameter.empty:
                self.fn_binding_error()
            if parameter.kind is parameter.POSITIONAL_ONLY:
                self.args.append(parameter.default)
                return len(self.args) - 1
            self.kwargs[parameter.name] = parameter.default
        return parameter.name

    def fn_binding_error(self) -> None:
        """The function's own TypeError, as a plain call of it would raise."""
        try:
            inspect.signature(self.fn).bind(*self.args, **self.kwargs)
        except TypeError as exc:
            raise TypeError(f"{self.spec.name}() {exc}") from None

    def _get(self) -> Any:
        return self.args[self.place] if isinstance(self.place, int) else self.kwargs[self.place]

    def _set(self, value: Any) -> None:
        self.value = value
        if isinstance(self.place, int):
            if self.stateful:
                self.args[self.place] = value
        else:
            self.kwargs[self.place] = value

    def move(self, trigger: str) -> None:
        """Go from state to state, by the table of legal transitions."""
        source = self.state
        self.state = TRANSITIONS[source, trigger]
        made = Transition(source, self.state, trigger, self.run.iteration, time.time())
        self.transitions.append(made)
        self.run.emit(events.Transitioned, transition=made)
        if self.spec.on_transition is not None:
            self.spec.on_transition(made)

    def steps(self) -> Steps:
        """The iterations, as effects; evaluates to why it stopped."""
        spec, run = self.spec, self.run
        if hasattr(spec.judge, "prepare"):
            spec.judge.prepare()
        self.move("start")
        while True:
            self.check_stopped()
            if run.iteration:
                self.move("next")
            run.iteration += 1
            stop = yield from self.iterate()
            if stop is not None:
                return stop
            if run.iteration >= spec.max:
                return StopReason.MAX_ITERATIONS

    def iterate(self) -> Steps:
        """One iteration: the body, on_iteration, until. (Evaluators and judges will stand between them.)"""
        spec, run = self.spec, self.run
        run.emit(events.IterationStarted, value=self.value, feedback=run.feedback)
        span = IterationSpan(run) if run.span is not None else None
        before = {unit: cell.spent for unit, cell in list(run.cells.items())}
        started = time.perf_counter()
        self.satisfied = None
        self.feedback = run.feedback
        error: BaseException | None = None
        try:
            kwargs = {**self.kwargs, "feedback": run.feedback} if spec.takes_feedback else self.kwargs
            value = yield Invoke(_Body(spec.name, self.body, tuple(self.args), kwargs))
            if value is None and self.stateful and self.value is not None and not spec.may_return_none:
                raise ConfigurationError(
                    f"{spec.name} returned None: return the state, it is the next iteration's argument "
                    f"(or annotate that None is meant)"
                )
            self._set(value)
            self.completed += 1
            self.record(value, before, started)
            if spec.on_iteration is not None:
                yield Ask(spec.on_iteration, value, run.iteration)
            if spec.until is not None:
                arguments = (value, run.iteration) if spec.until_takes_iteration else (value,)
                self.satisfied = bool((yield Ask(spec.until, *arguments)))
                if self.satisfied:
                    return StopReason.UNTIL
            if spec.question is not None:
                verdict = yield from self.ask_judge(value)
                self.note(verdict, before, started)
                self.satisfied = verdict.passed is True
                if self.satisfied:
                    return StopReason.UNTIL_LLM
            return None
        except BaseException as exc:
            error = exc
            raise
        finally:
            if span is not None:
                span.end(self.satisfied, None if error is None or only_refusals(error) is not None else error)

    def ask_judge(self, value: Any) -> Generator[Effect, Any, Verdict]:
        """Ask whether the loop is done. Only a clean yes is one; three times undecided in a row is an error."""
        judge, run = self.spec.judge, self.run
        try:
            said = yield Ask(judge, self.spec.question, value, blocking=True)
        except (ToolCallRefused, ConfigurationError):
            raise
        except Exception as exc:  # the judge is the user's, or a network: a failure is no verdict
            verdict = Verdict(None, f"the judge failed: {redact_error(exc)}")
        else:
            verdict = read_verdict(said, f"the judge of {run.name}")
        run.emit(events.VerdictGiven, by=_name(judge), verdict=verdict)
        run.feedback = verdict.reason if verdict.passed is False else None
        self.undecided = self.undecided + 1 if verdict.passed is None else 0
        if self.undecided == 3:
            raise JudgeError(f"the judge of {run.name!r} was undecided three times in a row: {verdict.reason}")
        return verdict

    @property
    def body(self) -> Any:
        """The function, for async loops bounded by the deadline."""
        if self.spec.is_async and self.run.deadline is not None:
            return functools.partial(_within_deadline, self.run, self.fn)
        return self.fn

    def record(self, value: Any, before: Mapping[str, int], started: float) -> None:
        """Note what the iteration did and cost."""
        self.history.append(self.iteration(value, (), before, started))
        self.run.emit(events.IterationEnded, value=value, duration=self.history[-1].duration)

    def note(self, verdict: Verdict, before: Mapping[str, int], started: float) -> None:
        """Add a verdict to the iteration, with what the judge cost."""
        last = self.history[-1]
        self.history[-1] = self.iteration(last.value, (*last.verdicts, verdict), before, started)

    def iteration(
        self, value: Any, verdicts: tuple[Verdict, ...], before: Mapping[str, int], started: float
    ) -> Iteration[Any]:
        """The iteration so far."""
        run = self.run
        spent = {
            unit: cell.spent - before.get(unit, 0)
            for unit, cell in list(run.cells.items())
            if cell.spent != before.get(unit, 0)
        }
        usage = Usage(**{u: n // SCALE for u, n in spent.items() if u in _USAGE}) if spent else _NO_USAGE
        cost = None if run.unknown_cost else decimal(spent["usd"]) if "usd" in spent else _NOTHING
        duration = max(0.0, time.perf_counter() - started)
        return Iteration(run.iteration, value, self.feedback, verdicts, usage, cost, duration)

    def check_stopped(self) -> None:
        """Raise the refusal that ends this loop or one around it, if there is one."""
        run = self.run
        if run.root.alarm:
            for ancestor in run.chain:
                latch = ancestor.latch
                if latch is None and ancestor.overdue():
                    latch = ancestor.timed_out()
                if latch is not None:
                    raise ToolCallRefused(
                        latch.code, latch.guardrail, run.name, latch.reason, None, None, ancestor.name, ancestor.id
                    )

    def result(self, reason: StopReason, error: BaseException | None) -> LoopResult[Any]:
        """What the loop has come to."""
        completed = reason in _DONE or (reason is StopReason.MAX_ITERATIONS and not self.spec.conditional)
        run = self.run
        return LoopResult(
            value=self.value,
            stop_reason=reason,
            completed=completed,
            iterations=self.completed,
            history=tuple(self.history),
            transitions=tuple(self.transitions),
            usage=run.usage,
            cost=run.cost,
            warnings=tuple(run.warnings),
            error=error,
            run_id=run.id,
            trace_id=run.trace_id,
            name=run.name,
        )

    def finish(self, reason: StopReason) -> LoopResult[Any]:
        """The result of a loop that ended by its own rules."""
        if reason is StopReason.MAX_ITERATIONS and self.spec.conditional:
            self.move("stop")
        else:
            self.move("complete")
        result = self.result(reason, None)
        if not result.completed:
            _log.warning(
                "loop %s reached its ceiling of %d iterations without being done", self.run.name, self.spec.max
            )
            if self.spec.on_limit == "raise":
                stopped = LoopStopped(result)
                attach_result(stopped, result)
                raise stopped
        return result

    def stopped(self, exc: BaseException) -> LoopResult[Any] | None:
        """The result if exc is a refusal or halt that ends just this loop; None if it must go on upwards."""
        cause = only_refusals(exc)
        if cause is None or not _ends_here(self.run, cause):
            return None
        if isinstance(cause, LoopHalted):
            overdue = any(run.overdue() or _timed_out(run) for run in self.run.chain)
            reason = StopReason.TIMEOUT if overdue else StopReason.HALTED
            cause = cause.refusal
        else:
            reason = StopReason.of_refusal(cause)
        self.move("stop")
        _log.warning("loop %s was stopped after %d iterations (%s): %s", self.run.name, self.completed, reason, cause)
        return self.result(reason, cause)

    def failed(self, exc: BaseException) -> None:
        """Leave the partial result, and where it happened, on an exception that goes on upwards."""
        if self.state in (LoopState.RUNNING, LoopState.RETRY):
            try:
                self.move("fail")
            except Exception:  # on_transition is the user's; exc is what has to arrive
                _log.debug("on_transition failed", exc_info=True)
        attach_result(exc, self.result(stop_reason_of(exc) or StopReason.ERROR, exc))
        if isinstance(exc, Exception) and only_refusals(exc) is None:
            exc.add_note(f"in loop {self.run.name!r}, iteration {self.run.iteration} of at most {self.spec.max}")


_DONE = (StopReason.UNTIL, StopReason.UNTIL_LLM, StopReason.EVALUATED)
_USAGE = frozenset(Usage.__slots__)
_NO_USAGE = Usage()
_NOTHING = Decimal(0)

_OWNED = frozenset({"max_steps", "budget", "unknown_price", "timeout", "stopped", "waiting", "uncertain"})
"""Refusals that end the outermost loop at or below the run that owns the limit; others end the nearest."""


def _ends_here(run: Run, cause: ToolCallRefused | LoopHalted) -> bool:
    if isinstance(cause, ToolCallRefused) and cause.code not in _OWNED:
        return True
    for index, ancestor in enumerate(run.chain):
        if ancestor.id == cause.run_id:
            return next(below for below in run.chain[index:] if below.kind in ("loop", "flow")) is run
    return True


def _timed_out(run: Run) -> bool:
    return run.latch is not None and run.latch.code == "timeout"


async def _within_deadline(run: Run, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Await the body, cancelled when the run's deadline passes; waits for people stop the clock."""
    loop = asyncio.get_running_loop()
    scope = asyncio.timeout(None)

    async def body() -> Any:
        aim()
        run.on_deadline_moved = lambda: loop.call_soon_threadsafe(aim)
        try:
            return await fn(*args, **kwargs)
        finally:
            run.on_deadline_moved = None

    def aim() -> None:
        if not scope.expired():
            assert run.deadline is not None
            scope.reschedule(None if run.paused else loop.time() + max(0.0, run.deadline - time.monotonic()))

    try:
        return await cancelled_after(scope, body())
    except EffectTimeout:
        raise run.timed_out() from None


# -- driving it ------------------------------------------------------------------------------------


def _open(machine: _Machine) -> tuple[Any, RunSpan | None]:
    run = machine.run
    if provider_is_set():
        run.span = RunSpan(run)
    return run.enter(), run.span


def _close(machine: _Machine, token: Any, span: RunSpan | None, outcome: LoopResult[Any] | BaseException) -> None:
    run = machine.run
    if isinstance(outcome, LoopResult):
        run.leave(token, outcome.stop_reason, outcome.value, outcome.error, machine.completed)
    else:
        run.leave(token, stop_reason_of(outcome), machine.value, outcome, machine.completed)
    if span is not None:
        raised = outcome if isinstance(outcome, BaseException) and only_refusals(outcome) is None else None
        span.end(run, outcome.stop_reason if isinstance(outcome, LoopResult) else stop_reason_of(outcome), raised)


def _run_sync(
    spec: _Spec, fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run_id: str | None = None
) -> LoopResult[Any]:
    machine = _Machine(spec, fn, instance, args, kwargs, run_id)
    token, span = _open(machine)
    outcome: LoopResult[Any] | BaseException | None = None
    try:
        try:
            outcome = machine.finish(drive_sync(machine.steps()))
        except BaseException as exc:
            outcome = machine.stopped(exc)
            if outcome is None:
                raise
        return outcome
    except BaseException as exc:
        outcome = exc
        machine.failed(exc)
        raise
    finally:
        assert outcome is not None
        _close(machine, token, span, outcome)


async def _run_async(
    spec: _Spec, fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run_id: str | None = None
) -> LoopResult[Any]:
    machine = _Machine(spec, fn, instance, args, kwargs, run_id)
    _check_asyncio(spec.name)
    token, span = _open(machine)
    outcome: LoopResult[Any] | BaseException | None = None
    try:
        try:
            outcome = machine.finish(await drive_async(machine.steps()))
        except BaseException as exc:
            outcome = machine.stopped(exc)
            if outcome is None:
                raise
        return outcome
    except BaseException as exc:
        outcome = exc
        machine.failed(exc)
        raise
    finally:
        assert outcome is not None
        _close(machine, token, span, outcome)


def _check_asyncio(name: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(f"{name}: loopguard runs under asyncio only, not under trio or curio") from None


def _value(result: LoopResult[Any]) -> Any:
    """What a plain call returns: never the untouched argument in the guise of a result."""
    if not result.iterations and not result.completed:
        stopped = LoopStopped(result, f"{result.name} was stopped before its first iteration was completed: {result}")
        attach_result(stopped, result)
        raise stopped from result.error
    return result.value


def _call_sync(spec: _Spec, fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _value(_run_sync(spec, fn, instance, args, kwargs))


async def _call_async(spec: _Spec, fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _value(await _run_async(spec, fn, instance, args, kwargs))


# -- the decorator ---------------------------------------------------------------------------------


class Loop(Protocol[P, R]):
    """A decorated loop step: a plain call gives the last state, `run` the whole LoopResult."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the loop and return its last state."""

    @overload
    def run(self, *args: P.args, **kwargs: P.kwargs) -> LoopResult[R]: ...
    @overload
    def run(self, *args: Any, run_id: str | None, **kwargs: Any) -> LoopResult[R]:
        """Run the loop and return how it went."""

    @overload
    def __get__(self, instance: None, owner: type | None = None, /) -> Self: ...
    @overload
    def __get__(self: Loop[Concatenate[S, P2], T], instance: S, owner: type | None = None, /) -> Loop[P2, T]: ...


class AsyncLoop(Protocol[P, R]):
    """A decorated async loop step."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run the loop and return its last state."""

    @overload
    def run(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, LoopResult[R]]: ...
    @overload
    def run(self, *args: Any, run_id: str | None, **kwargs: Any) -> Coroutine[Any, Any, LoopResult[R]]:
        """Run the loop and return how it went."""

    @overload
    def __get__(self, instance: None, owner: type | None = None, /) -> Self: ...
    @overload
    def __get__(
        self: AsyncLoop[Concatenate[S, P2], T], instance: S, owner: type | None = None, /
    ) -> AsyncLoop[P2, T]: ...


class _Runnable:
    """What a decorated loop can do beside being called, bound to an object or not."""

    def run(self, *args: Any, run_id: str | None = None, **kwargs: Any) -> Any:
        """Run the loop and return how it went, as a LoopResult; for async loops, await it.

        ``run_id`` names the run; by default it gets a unique id.
        """
        if run_id is not None:
            check_id(run_id, "run_id")
        bound = isinstance(self, _BoundLoop)
        spec: _Spec = self._self_parent._self_spec if bound else self._self_spec  # type: ignore[attr-defined]  # wrapt's own
        fn = self.__wrapped__  # type: ignore[attr-defined]  # wrapt's own
        instance = self._self_instance if bound else getattr(fn, "__self__", None)  # type: ignore[attr-defined]  # wrapt's own
        if bound and instance is None and self._self_binding == "function" and args:  # type: ignore[attr-defined]  # Class.step.run(obj, …)
            instance, args = args[0], args[1:]
            fn = functools.partial(fn, instance)
        return (_run_async if spec.is_async else _run_sync)(spec, fn, instance, args, kwargs, run_id)

    def __reduce_ex__(self, protocol: Any) -> str:
        return self.__qualname__  # type: ignore[attr-defined, no-any-return]  # pickled by name, as functions are

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class _BoundLoop(_Runnable, wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]  # wrapt's classes are generic in stubs only
    """A decorated method, bound to its object or class."""


class _LoopFunction(_Runnable, wrapt.FunctionWrapper):  # type: ignore[type-arg]  # as above
    """A decorated function."""

    __bound_function_wrapper__ = _BoundLoop

    def __init__(self, wrapped: Any, spec: _Spec) -> None:
        super().__init__(wrapped, functools.partial(_call_async if spec.is_async else _call_sync, spec))
        self._self_spec = spec


class _LoopDecorator(Protocol):
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /) -> AsyncLoop[P, T]: ...  # type: ignore[overload-overlap]  # async is the narrower case
    @overload
    def __call__(self, fn: Callable[P, T], /) -> Loop[P, T]: ...


_Condition = Callable[[Any], object] | Callable[[Any, int], object]


@overload
def loop(fn: Callable[P, Coroutine[Any, Any, T]], /) -> AsyncLoop[P, T]: ...  # type: ignore[overload-overlap]  # async is the narrower case
@overload
def loop(fn: Callable[P, T], /) -> Loop[P, T]: ...
@overload
def loop(
    fn: None = None,
    /,
    *,
    max: int = DEFAULT_MAX,
    until: _Condition | None = None,
    until_llm: str | None = None,
    judge: Callable[[str, Any], object] | None = None,
    guard: Guard | None = None,
    budget: Budget | None = None,
    timeout: float | None = None,
    state: str | None = None,
    on_iteration: Callable[[Any, int], object] | None = None,
    on_transition: Callable[[Transition], object] | None = None,
    on_limit: Literal["return", "raise"] = "return",
    name: str | None = None,
) -> _LoopDecorator: ...
def loop(
    fn: Any = None,
    /,
    *,
    max: Any = _UNSET,
    until: Any = None,
    until_llm: str | None = None,
    judge: Any = None,
    guard: Guard | None = None,
    budget: Budget | None = None,
    timeout: float | None = None,
    state: str | None = None,
    on_iteration: Any = None,
    on_transition: Any = None,
    on_limit: str = "return",
    name: str | None = None,
) -> Any:
    """Turn a function into a loop step: its return value is the next iteration's argument.

    - ``max``: the ceiling of iterations, an int of at least 1 (default 10). With a max and no condition,
      reaching it completes the loop.
    - ``until(state)`` or ``until(state, iteration)``: done? Sync or async; see `loopguard.conditions`.
    - ``until_llm``: the question whether it is done, which ``judge(question, state)`` answers: by default a
      model, see `loopguard.judges`. Its reason, when it says no, is the next iteration's feedback.
    - ``guard``, ``budget``: limits of each run. ``timeout``: seconds for the whole loop, waits for people
      excluded.
    - ``state``: the parameter that carries the state, by default the first positional one.
    - ``on_iteration(state, iteration)``, ``on_transition(transition)``: callbacks.
    - ``on_limit="raise"``: raise LoopStopped at the ceiling instead of returning the latest state.
    - ``name``: how spans, messages and the journal call it.

    The decorated function is called as before and returns the last state; ``.run(…)`` takes the same
    arguments and returns a LoopResult. A wrong option is a ConfigurationError at decoration.
    """
    given = max is not _UNSET
    options = {
        "max": max if given else DEFAULT_MAX,
        "until": until,
        "until_llm": until_llm,
        "judge": judge,
        "guard": guard,
        "budget": budget,
        "timeout": timeout,
        "state": state,
        "on_iteration": on_iteration,
        "on_transition": on_transition,
        "on_limit": on_limit,
        "name": name,
    }

    def decorate(function: Any) -> Any:
        spec = _Spec(function, options)
        if not given and not spec.conditional:
            warnings.warn(
                f"@loop on {spec.name} has neither max= nor a condition: it will run {DEFAULT_MAX} times",
                LoopGuardWarning,
                stacklevel=2 if fn is None else 3,
            )
        return _LoopFunction(function, spec)

    return decorate if fn is None else decorate(fn)
