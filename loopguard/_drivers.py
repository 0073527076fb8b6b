"""The drivers: they perform a pipeline's effects in the colour of the callable.

Nothing here knows a policy. Each colour has two ways through: straight (no hook waits: the
admission is called directly) and hooked (the composed generator is run effect by effect).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import time
from typing import Any, TypeVar

from loopguard._admission import Admission, latched
from loopguard._call import CURRENT, Tool, ToolCall
from loopguard._pipeline import Ask, Effect, Invoke, Sleep, Steps
from loopguard._run import Run
from loopguard._threads import bounded, in_thread, running_task, wait_in_thread
from loopguard.exceptions import ConfigurationError, ToolCallRefused

__all__ = [
    "Stops",
    "call_async",
    "call_sync",
    "close_steps",
    "drive_async",
    "drive_sync",
    "latest",
    "perform_async",
    "perform_sync",
    "plan_of",
    "raise_on",
    "refused",
    "restore",
    "uncancelled",
]

R = TypeVar("R")


def _refuse_awaitable(result: Any, what: str) -> None:
    if inspect.iscoroutine(result):
        result.close()
    raise ConfigurationError(
        f"{what} is async, but what it belongs to is sync: it can't be awaited here. "
        f"Make the tool or loop `async def`, or this callback a plain function."
    )


def _awaitable(result: Any) -> bool:
    try:
        return hasattr(type(result), "__await__")
    except Exception:  # a metaclass of the user's that answers nothing
        return False


def _check_plain(result: Any, call: Any) -> None:
    """A plain def that returns a coroutine must not pass for a call that is over."""
    if _awaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise ConfigurationError(
            f"{call.name} is a plain function that returned a {type(result).__name__}: its body would run unguarded, "
            f"later. Declare it `async def`, or mark a wrapper with functools.wraps and inspect.markcoroutinefunction."
        )


def perform_sync(effect: Effect) -> Any:
    if isinstance(effect, Invoke):
        call = effect.call
        body = functools.partial(call.fn, *call.args, **call.kwargs)
        result = body() if effect.timeout is None else wait_in_thread(body, call.name, effect.timeout)
        _check_plain(result, call)
        return result
    if isinstance(effect, Ask):
        ask = functools.partial(effect.fn, *effect.args)
        result = ask() if effect.timeout is None else wait_in_thread(ask, "question", effect.timeout)
        if _awaitable(result):
            _refuse_awaitable(result, getattr(effect.fn, "__qualname__", repr(effect.fn)))
        return result
    _check_sleep(effect)
    _sleep(effect.seconds)
    return None


async def perform_async(effect: Effect) -> Any:
    if isinstance(effect, Invoke):
        call = effect.call
        return await bounded(call.fn(*call.args, **call.kwargs), effect.timeout)
    if isinstance(effect, Ask):
        ask = functools.partial(effect.fn, *effect.args)
        if effect.blocking and not _is_async(effect.fn):
            result = await in_thread(ask, "question", effect.timeout)
        else:
            result = ask()
        if _awaitable(result):
            result = await bounded(result, effect.timeout)
        return result
    _check_sleep(effect)
    await asyncio.sleep(effect.seconds)
    return None


def _sleep(seconds: float) -> None:
    """Wait, but not on when the run is stopped or past its deadline: nothing could interrupt a longer sleep."""
    here = CURRENT.get()
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if here is not None and here.run.root.alarm and latched(here.run.chain, "") is not None:
            return
        time.sleep(min(left, 0.05))


def _check_sleep(effect: Any) -> None:
    if not isinstance(effect, Sleep):
        raise ConfigurationError(
            f"a hook yielded {effect!r}: say `result = yield from proceed(call)`, or yield an effect (loopguard.typing)"
        )


def _is_async(fn: Any) -> bool:
    if isinstance(fn, functools.partial):
        return _is_async(fn.func)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


async def uncancelled(awaitable: Any) -> Any:
    """Await it; if it swallowed a cancellation of our task, the cancellation goes on."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a generator that is closed after its loop was
        task = None
    before = task.cancelling() if task is not None else 0
    result = await awaitable
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


class Stops:
    """Undoes PEP 479: a StopIteration thrown into a generator comes out as a RuntimeError."""

    __slots__ = ("thrown",)

    def __init__(self) -> None:
        self.thrown: list[BaseException] = []

    def throw(self, steps: Steps, exc: BaseException) -> Effect:
        if isinstance(exc, StopIteration):
            self.thrown.append(exc)
        return steps.throw(exc)

    def original(self, error: RuntimeError) -> BaseException:
        return next((exc for exc in self.thrown if error.__cause__ is exc), error)


def drive_sync(steps: Steps) -> Any:
    """Run a pipeline to its end in this thread."""
    stops = Stops()
    try:
        effect = steps.send(None)
        while True:
            try:
                value = perform_sync(effect)
            except BaseException as exc:  # every outcome belongs to the pipeline, which raises it on
                effect = raise_on(stops, steps, exc)
            else:
                effect = steps.send(value)
    except StopIteration as stop:
        return stop.value
    except RuntimeError as exc:
        original = stops.original(exc)
        if original is exc:
            raise
        raise original from original.__cause__
    finally:
        close_steps(steps)


async def drive_async(steps: Steps) -> Any:
    """Run a pipeline to its end in this task."""
    stops = Stops()
    try:
        effect = steps.send(None)
        while True:
            try:
                value = await uncancelled(perform_async(effect))
            except BaseException as exc:  # every outcome belongs to the pipeline, which raises it on
                effect = raise_on(stops, steps, exc)
            else:
                effect = steps.send(value)
    except StopIteration as stop:
        return stop.value
    except RuntimeError as exc:
        original = stops.original(exc)
        if original is exc:
            raise
        raise original from original.__cause__
    finally:
        close_steps(steps)


def close_steps(steps: Steps) -> None:
    """Close a pipeline, though its hooks may answer that by asking for more."""
    for _ in range(10):
        try:
            steps.close()
            return
        except RuntimeError:  # it ignored GeneratorExit
            pass


def raise_on(stops: Stops, steps: Steps, exc: BaseException) -> Effect:
    """Throw exc into the pipeline. What must never be swallowed goes on even if a hook swallows it."""
    if not isinstance(exc, KeyboardInterrupt | SystemExit | GeneratorExit | asyncio.CancelledError):
        return stops.throw(steps, exc)
    try:
        steps.throw(exc)
    except StopIteration:
        pass  # a hook swallowed it and returned
    else:
        close_steps(steps)  # a hook swallowed it and asked for more
    raise exc


# -- calls -----------------------------------------------------------------------------------------


def plan_of(tool: Tool) -> Admission:
    """The compiled admission of this tool where we are."""
    here = CURRENT.get()
    if here is not None:
        run = here if type(here) is Run else here.run
        if not run.outside:
            plan = run.plans.get(tool)
            return plan if plan is not None else tool.compile(tool, run)
    return tool.compile(tool, None)


def refused(plan: Admission, call: ToolCall, refusal: ToolCallRefused, start_ns: int) -> ToolCallRefused:
    """Book the refusal, with a span of its own."""
    plan.refuse(call, refusal)
    tracer = plan.tracer
    if tracer is not None:
        tracer.close(tracer.open(plan, call, start_ns), plan, call, refusal)
    return refusal


def call_sync(
    tool: Tool, fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], id: str | None = None
) -> Any:
    """Call a sync tool."""
    plan = plan_of(tool)
    call = ToolCall(plan, fn, instance, args, kwargs, id)
    tracer = plan.tracer
    start_ns = time.time_ns() if tracer is not None else 0
    if plan.proceed is None:
        refusal = plan.admit(call)
        if refusal is not None:
            raise refused(plan, call, refusal, start_ns)
    before = CURRENT.set(call)
    attached = None
    if tracer is not None:
        call.span = tracer.open(plan, call, start_ns)
        attached = tracer.attach(call.span)
    error: BaseException | None = None
    result: Any = None
    try:
        if plan.proceed is not None:
            result = drive_sync(plan.proceed(call))
            return result
        try:
            if plan.listeners:
                plan.start(call)
            else:
                call.started = True
            result = fn(*args, **kwargs)
            _check_plain(result, call)
        except BaseException as exc:
            plan.failed(call, exc)
            raise
        plan.returned(call, result)
        return result
    except BaseException as exc:
        error = exc
        raise
    finally:
        if tracer is not None:
            tracer.detach(attached)
            tracer.close(call.span, plan, latest(call), error, result)
        CURRENT.reset(before)


def latest(call: ToolCall) -> ToolCall:
    """The call as its hooks left it."""
    here = CURRENT.get()
    return here if isinstance(here, ToolCall) and here.span is call.span else call


def restore(token: contextvars.Token[Any]) -> None:
    """Make current what was. In another context than it was set in (closed from elsewhere) there is nothing to undo."""
    try:
        CURRENT.reset(token)
    except ValueError:
        pass


async def call_async(
    tool: Tool, fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], id: str | None = None
) -> Any:
    """Call an async tool."""
    task = running_task(tool.name)
    plan = plan_of(tool)
    call = ToolCall(plan, fn, instance, args, kwargs, id)
    tracer = plan.tracer
    start_ns = time.time_ns() if tracer is not None else 0
    if plan.proceed is None:
        refusal = plan.admit(call)
        if refusal is not None:
            raise refused(plan, call, refusal, start_ns)
    before = CURRENT.set(call)
    attached = None
    if tracer is not None:
        call.span = tracer.open(plan, call, start_ns)
        attached = tracer.attach(call.span)
    error: BaseException | None = None
    result: Any = None
    try:
        if plan.proceed is not None:
            result = await drive_async(plan.proceed(call))
            return result
        try:
            plan.start(call)
            cancelling = task.cancelling() if task is not None else 0
            result = await fn(*args, **kwargs)
            if task is not None and task.cancelling() > cancelling:
                raise asyncio.CancelledError  # the tool swallowed it; it goes on
        except BaseException as exc:
            plan.failed(call, exc)
            raise
        plan.returned(call, result)
        return result
    except BaseException as exc:
        error = exc
        raise
    finally:
        if tracer is not None:
            tracer.detach(attached)
            tracer.close(call.span, plan, latest(call), error, result)
        restore(before)
