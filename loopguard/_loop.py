"""@loop: run a function again and again, its result the next argument, until it is done or stopped."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar, overload

from loopguard._drivers import drive_async, drive_sync
from loopguard._guard import Guard
from loopguard._loop_journal import PENDING, runs_that_are
from loopguard._loop_options import LoopOptions
from loopguard._loop_run import LoopRun
from loopguard._outcomes import LoopResult, Transition
from loopguard._threads import in_thread, running_task
from loopguard._wrapped import BoundWrapper, Wrapper, takes_class
from loopguard.budgets import Budget
from loopguard.exceptions import ConfigurationError, JournalError, LoopGuardWarning, RunConflict
from loopguard.redaction import check_id

__all__ = ["AsyncLoop", "Loop", "Runnable", "call_loop", "call_loop_async", "loop"]

P = ParamSpec("P")
P2 = ParamSpec("P2")
R = TypeVar("R")
T = TypeVar("T")
S = TypeVar("S")


class _Unsaid(int):
    """The default of max, told apart from a max that somebody gave."""


DEFAULT_MAX = _Unsaid(10)


def _drive(run: LoopRun) -> None:
    if run.open(run.store):
        run.recorded_outcome()
        return
    try:
        with run:
            run.outcome = drive_sync(run.steps())
    except BaseException as exc:
        _let_go(run, exc)
        raise
    try:
        run.ended()
    except JournalError as exc:
        run.keep(exc)
        raise


async def _drive_async(run: LoopRun) -> None:
    running_task(run.run.name)
    store = run.store
    if store is None:
        over = run.open(store)
    else:
        over = await _open_async(run, store)
    if over:
        run.recorded_outcome()
        return
    try:
        with run:
            run.outcome = await drive_async(run.steps())
    except BaseException as exc:
        _let_go(run, exc)
        raise
    try:
        if run.recorder is not None:
            await in_thread(run.ended, "journal")
        elif run.run.recorder is not None:
            await run.run.recorder.settled_async()
    except JournalError as exc:
        run.keep(exc)
        raise


async def _open_async(run: LoopRun, store: Any) -> bool:
    """Open the journal off the event loop. Where we are cancelled meanwhile it is let go again: nobody drives it."""
    first = threading.Lock()  # taken by what happens first: it is open, or nobody waits for that any more

    def open_or_let_go() -> bool:
        over = run.open(store)
        if not first.acquire(blocking=False):
            run.never_begun()
        return over

    try:
        return await in_thread(open_or_let_go, "journal")
    except BaseException:
        if not first.acquire(blocking=False):
            run.never_begun()
        raise


def _let_go(run: LoopRun, exc: BaseException) -> None:
    """Write down how it ended, and let go of the journal; what fails there must not hide what was raised."""
    try:
        run.ended()
    except JournalError as later:
        if later is not exc:
            exc.add_note(f"and the journal could not be written: {later}")


def call_loop(options: LoopOptions, fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run it, and give its last state."""
    run = LoopRun(options, fn, instance, args, kwargs)
    _drive(run)
    return run.plain_value()


async def call_loop_async(
    options: LoopOptions, fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The same for what is async."""
    run = LoopRun(options, fn, instance, args, kwargs)
    await _drive_async(run)
    return run.plain_value()


def _run_whole(run: LoopRun) -> Any:
    """The LoopResult, or what is to be awaited for it."""
    if run.options.is_async:
        return _result_async(run)
    _drive(run)
    return run.outcome


async def _result_async(run: LoopRun) -> LoopResult[Any] | None:
    await _drive_async(run)
    return run.outcome


class Loop(Protocol[P, R]):
    """A decorated loop step: a plain call gives the last state, `run` the whole LoopResult."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the loop and return its last state."""
        ...

    @overload
    def run(self, *args: P.args, **kwargs: P.kwargs) -> LoopResult[R]: ...
    @overload
    def run(self, *args: Any, run_id: str | None, **kwargs: Any) -> LoopResult[R]:
        """Run the loop and return how it went."""
        ...

    def resume(
        self, run_id: str, *other: Any, max: int | None = None, budget: Budget | None = None, **kwargs: Any
    ) -> LoopResult[R]:
        """Go on with a run that was interrupted or stopped, under larger limits where they are given."""
        ...

    def pending(self) -> list[str]:
        """The ids of its runs that were interrupted."""
        ...

    def waiting(self) -> list[str]:
        """The ids of its runs that wait for a person."""
        ...

    def resume_pending(self, *other: Any, **kwargs: Any) -> dict[str, LoopResult[R] | Exception]:
        """Resume all that are pending: {run id: LoopResult, or the exception it raised}."""
        ...

    @overload
    def __get__(self, instance: None, owner: type | None = None, /) -> Self: ...
    @overload
    def __get__(self: Loop[Concatenate[S, P2], T], instance: S, owner: type | None = None, /) -> Loop[P2, T]: ...


class AsyncLoop(Protocol[P, R]):
    """A decorated async loop step."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run the loop and return its last state."""
        ...

    @overload
    def run(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, LoopResult[R]]: ...
    @overload
    def run(self, *args: Any, run_id: str | None, **kwargs: Any) -> Coroutine[Any, Any, LoopResult[R]]:
        """Run the loop and return how it went."""
        ...

    def resume(
        self, run_id: str, *other: Any, max: int | None = None, budget: Budget | None = None, **kwargs: Any
    ) -> Coroutine[Any, Any, LoopResult[R]]:
        """Go on with a run that was interrupted or stopped, under larger limits where they are given."""
        ...

    def pending(self) -> list[str]:
        """The ids of its runs that were interrupted."""
        ...

    def waiting(self) -> list[str]:
        """The ids of its runs that wait for a person."""
        ...

    def resume_pending(self, *other: Any, **kwargs: Any) -> Coroutine[Any, Any, dict[str, LoopResult[R] | Exception]]:
        """Resume all that are pending: {run id: LoopResult, or the exception it raised}."""
        ...

    @overload
    def __get__(self, instance: None, owner: type | None = None, /) -> Self: ...
    @overload
    def __get__(
        self: AsyncLoop[Concatenate[S, P2], T], instance: S, owner: type | None = None, /
    ) -> AsyncLoop[P2, T]: ...


class Runnable:
    """What a decorated loop or a flow can do beside being called."""

    @property
    def _options(self) -> LoopOptions:
        raise NotImplementedError

    def _whose(self, args: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
        """The function that is run, the object that it belongs to, and the arguments that are left."""
        raise NotImplementedError

    def run(self, *args: Any, run_id: str | None = None, **kwargs: Any) -> Any:
        """Run the loop and return how it went, as a LoopResult; for async loops, await it.

        ``run_id`` names the run; by default it gets a unique id. With a store, a run of this id that is over returns
        its recorded result and runs nothing; one that was interrupted goes on where it was. Raises RunConflict for
        another state than it was started with, and while another process drives it.
        """
        if run_id is not None:
            check_id(run_id, "run_id")
        fn, instance, args = self._whose(args)
        return _run_whole(LoopRun(self._options, fn, instance, args, kwargs, run_id))

    def resume(
        self, run_id: str, *other: Any, max: int | None = None, budget: Budget | None = None, **kwargs: Any
    ) -> Any:
        """Go on with a run that was interrupted or stopped, and return how it went; for async loops, await it.

        Its state comes from the journal; ``other`` are the arguments beside it. ``max`` and ``budget`` let a run go
        on that had reached its ceiling, or spent its budget. A run that had come to its goal returns its recorded
        result. Raises RunNotFound.
        """
        check_id(run_id, "run_id")
        fn, instance, other = self._whose(other)
        if budget is not None and not isinstance(budget, Budget):
            raise ConfigurationError(f"resume(budget={budget!r}): give a Budget(…)")
        options = self._options.larger(max)
        parameter = options.state_parameter(instance is not None)
        if parameter is not None and parameter.name == options.state:
            kwargs[parameter.name] = PENDING
        elif parameter is not None:
            other = (PENDING, *other)
        return _run_whole(LoopRun(options, fn, instance, other, kwargs, run_id, True, budget))

    def pending(self) -> list[str]:
        """The ids of its runs that were interrupted, or failed, and that nobody drives now; the oldest first."""
        return runs_that_are(self._options, "pending")

    def waiting(self) -> list[str]:
        """The ids of its runs that wait for a person; the oldest first."""
        return runs_that_are(self._options, "waiting")

    def resume_pending(self, *other: Any, **kwargs: Any) -> Any:
        """Resume all that are pending, one after the other: {run id: LoopResult, or the exception it raised}.

        For async loops, await it. Runs that another process takes up meanwhile are left out.
        """
        if self._options.is_async:
            return self._resume_pending_async(other, kwargs)
        done: dict[str, Any] = {}
        for run_id in self.pending():
            try:
                done[run_id] = self.resume(run_id, *other, **kwargs)
            except RunConflict:
                continue
            except Exception as exc:  # one that fails again must not keep the others from going on
                done[run_id] = exc
        return done

    async def _resume_pending_async(self, other: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        done: dict[str, Any] = {}
        for run_id in self.pending():
            try:
                done[run_id] = await self.resume(run_id, *other, **kwargs)
            except RunConflict:
                continue
            except Exception as exc:  # as above
                done[run_id] = exc
        return done


class _BoundLoop(Runnable, BoundWrapper):
    """A decorated method, bound to its object or class."""

    @property
    def _options(self) -> LoopOptions:
        options: LoopOptions = self._self_parent._self_options
        return options

    def _whose(self, args: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
        fn = self.__wrapped__
        of_object = self._self_binding == "function"
        instance = self._self_instance if of_object else getattr(fn, "__self__", None)
        if of_object and instance is None and args and isinstance(args[0], self._self_owner):  # Class.step.run(obj, …)
            instance, args = args[0], args[1:]
            fn = functools.partial(fn, instance)
        return fn, instance, args


class _LoopFunction(Runnable, Wrapper):
    """A decorated function."""

    __bound_function_wrapper__ = _BoundLoop

    @property
    def _options(self) -> LoopOptions:
        options: LoopOptions = self._self_options
        return options

    def _whose(self, args: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
        fn = self.__wrapped__
        if takes_class(fn) and not (args and isinstance(args[0], type)):
            raise ConfigurationError(f"{self._options.name}.run doesn't know its class: put @loop above @classmethod")
        return fn, getattr(fn, "__self__", None), args

    def __init__(self, wrapped: Any, options: LoopOptions) -> None:
        super().__init__(wrapped, functools.partial(call_loop_async if options.is_async else call_loop, options))
        self._self_options = options


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
    evaluate: Callable[[Any], object] | Sequence[Callable[[Any], object]] = (),
    max_retries: int = 2,
    on_reject: Literal["retry", "continue"] = "retry",
    on_failure: Literal["raise", "return"] = "raise",
    best: Callable[[Any], Any] | None = None,
    fallback: Callable[[LoopResult[Any]], Any] | None = None,
    guard: Guard | None = None,
    budget: Budget | None = None,
    timeout: float | None = None,
    state: str | None = None,
    on_iteration: Callable[[Any, int], object] | None = None,
    on_transition: Callable[[Transition], object] | None = None,
    on_limit: Literal["return", "raise"] = "return",
    store: Any = None,
    name: str | None = None,
) -> _LoopDecorator: ...
def loop(
    fn: Any = None,
    /,
    *,
    max: int = DEFAULT_MAX,
    until: Any = None,
    until_llm: str | None = None,
    judge: Any = None,
    evaluate: Any = (),
    max_retries: int = 2,
    on_reject: str = "retry",
    on_failure: str = "raise",
    best: Any = None,
    fallback: Any = None,
    guard: Guard | None = None,
    budget: Budget | None = None,
    timeout: float | None = None,
    state: str | None = None,
    on_iteration: Any = None,
    on_transition: Any = None,
    on_limit: str = "return",
    store: Any = None,
    name: str | None = None,
) -> Any:
    """Turn a function into a loop step: its return value is the next iteration's argument.

    - ``max``: the ceiling of iterations, an int of at least 1 (default 10). With a max and no condition,
      reaching it completes the loop.
    - ``until(state)`` or ``until(state, iteration)``: done? Sync or async; see `loopguard.conditions`.
    - ``until_llm``: the question whether it is done, which ``judge(question, state)`` answers: by default a
      model, see `loopguard.judges`. Its reason, when it says no, is the next iteration's feedback.
    - ``evaluate``: evaluators of each value, see `loopguard.evaluators`. One that fails gives the body the same
      argument again plus the reason (``current_run().feedback``, or a keyword-only parameter ``feedback``);
      ``on_reject="continue"`` lets the rejected value flow on. Without until and until_llm, passing ends the loop.
    - ``max_retries``: after more failures in a row, or one at the ceiling, the loop ends: ``on_failure="raise"``
      raises EvaluationFailed, ``"return"`` returns the value with the highest ``best(value)`` (else the latest),
      ``fallback(result)`` supplies one.
    - ``guard``, ``budget``: limits of each run. ``timeout``: seconds for the whole loop, waits for people
      excluded.
    - ``state``: the parameter that carries the state, by default the first positional one.
    - ``on_iteration(state, iteration)``, ``on_transition(transition)``: callbacks.
    - ``on_limit="raise"``: raise LoopStopped at the ceiling instead of returning the latest state.
    - ``store``: where its runs are kept, such as ``sqlite:///runs.db``: a run that was interrupted goes on where it
      was, see `loopguard.journal`.
    - ``name``: how spans, messages and the journal call it.

    The decorated function is called as before and returns the last state; ``.run(…)`` takes the same
    arguments and returns a LoopResult. A wrong option is a ConfigurationError at decoration.
    """
    given = max is not DEFAULT_MAX
    options = {
        "max": max,
        "until": until,
        "until_llm": until_llm,
        "judge": judge,
        "evaluate": evaluate,
        "max_retries": max_retries,
        "on_reject": on_reject,
        "on_failure": on_failure,
        "best": best,
        "fallback": fallback,
        "guard": guard,
        "budget": budget,
        "timeout": timeout,
        "state": state,
        "on_iteration": on_iteration,
        "on_transition": on_transition,
        "on_limit": on_limit,
        "store": store,
        "name": name,
    }

    def decorate(function: Any) -> Any:
        checked = LoopOptions(function, options)
        if not given and not checked.conditional:
            warnings.warn(
                f"@loop on {checked.name} has neither max= nor a condition: it will run {DEFAULT_MAX} times",
                LoopGuardWarning,
                stacklevel=2 if fn is None else 3,
            )
        return _LoopFunction(function, checked)

    return decorate if fn is None else decorate(fn)
