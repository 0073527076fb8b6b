"""The four drivers: they perform a pipeline's effects in the colour of the callable.

Nothing here knows a policy. Each colour has two ways through: straight (no hook waits: the
admission is called directly) and hooked (the composed generator is run effect by effect).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import queue
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, TypeVar

from loopguard._admission import Admission, latched
from loopguard._call import CURRENT, Tool, ToolCall
from loopguard._fingerprints import ItemDigest
from loopguard._halting import caller
from loopguard._pipeline import Ask, Effect, EffectTimeout, Invoke, Sleep, Steps
from loopguard._run import Run
from loopguard.exceptions import ConfigurationError, ToolCallRefused

__all__ = [
    "call_async",
    "call_async_generator",
    "call_generator",
    "call_sync",
    "cancelled_after",
    "drive_async",
    "drive_sync",
    "in_thread",
    "running_task",
]

R = TypeVar("R")


# -- threads ---------------------------------------------------------------------------------------


def _spawn(fn: Callable[[], R], name: str, deliver: Callable[[R | None, BaseException | None], object]) -> None:
    """Run fn in a daemon thread of our own with the context copied, and hand its outcome to deliver.

    Never in an executor: what hangs there would hold up the process's exit, and other people's work.
    """
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(fn)
        except BaseException as exc:  # carried to the waiting side, whatever it is
            deliver(None, exc)
        else:
            deliver(result, None)

    thread = threading.Thread(target=work, name=f"loopguard {name}", daemon=True)
    thread.row_of = caller()  # type: ignore[attr-defined]  # what it is refused counts for the one who waits
    thread.start()


def _wait_in_thread(fn: Callable[[], R], name: str, timeout: float | None) -> R:
    """The result of fn, run beside us; EffectTimeout if it takes longer. A late result is dropped."""
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    _spawn(fn, name, lambda result, exc: outcome.put((result, exc)))
    try:
        result, exc = outcome.get(timeout=timeout)
    except queue.Empty:
        raise EffectTimeout from None
    if exc is not None:
        raise exc
    return result  # type: ignore[no-any-return]  # what fn returned


async def in_thread(fn: Callable[[], R], name: str, timeout: float | None = None) -> R:
    """The result of fn, run in a daemon thread while the event loop goes on."""
    running_task(name)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, exc: BaseException | None) -> None:
        if future.done():  # timed out or cancelled: a late outcome is dropped
            return
        if exc is None:
            future.set_result((result, None))
        else:
            future.set_result((None, exc))  # not set_exception: StopIteration can't be, and nobody may look

    def deliver(result: Any, exc: BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(settle, result, exc)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass

    _spawn(fn, name, deliver)
    result, exc = await _bounded(future, timeout)
    if exc is not None:
        raise exc
    return result  # type: ignore[no-any-return]  # what fn returned


async def _bounded(awaitable: Any, timeout: float | None) -> Any:
    """Await it; EffectTimeout once the timeout is over, even if it swallows the cancellation."""
    if timeout is None:
        return await awaitable
    task = asyncio.ensure_future(awaitable)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        _forget(task)
        task.cancel()
        await asyncio.wait({task}, timeout=1)  # let it clean up, but never hang on one that won't
        raise
    if done:
        return task.result()
    _forget(task)
    task.cancel()
    await asyncio.wait({task}, timeout=0.05)  # a tool that swallows it doesn't hold us up
    raise EffectTimeout


async def cancelled_after(scope: asyncio.Timeout, awaitable: Awaitable[R]) -> R:
    """Await it within scope: EffectTimeout when the scope expired, its own TimeoutError as it is."""
    raised: BaseException | None = None
    try:
        async with scope:
            try:
                return await awaitable
            except BaseException as exc:
                raised = exc
                raise
    except TimeoutError as exc:
        if exc is raised or not scope.expired():
            raise
        raise EffectTimeout from None


def _forget(task: asyncio.Future[Any]) -> None:
    """Drop whatever comes of it, without a complaint that nobody looked."""
    task.add_done_callback(lambda t: t.cancelled() or t.exception())


# -- performing effects ----------------------------------------------------------------------------


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


def _perform_sync(effect: Effect) -> Any:
    if isinstance(effect, Invoke):
        call = effect.call
        body = functools.partial(call.fn, *call.args, **call.kwargs)
        result = body() if effect.timeout is None else _wait_in_thread(body, call.name, effect.timeout)
        _check_plain(result, call)
        return result
    if isinstance(effect, Ask):
        ask = functools.partial(effect.fn, *effect.args)
        result = ask() if effect.timeout is None else _wait_in_thread(ask, "question", effect.timeout)
        if _awaitable(result):
            _refuse_awaitable(result, getattr(effect.fn, "__qualname__", repr(effect.fn)))
        return result
    _check_sleep(effect)
    _sleep(effect.seconds)
    return None


async def _perform_async(effect: Effect) -> Any:
    if isinstance(effect, Invoke):
        call = effect.call
        return await _bounded(call.fn(*call.args, **call.kwargs), effect.timeout)
    if isinstance(effect, Ask):
        ask = functools.partial(effect.fn, *effect.args)
        if effect.blocking and not _is_async(effect.fn):
            result = await in_thread(ask, "question", effect.timeout)
        else:
            result = ask()
        if _awaitable(result):
            result = await _bounded(result, effect.timeout)
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


def running_task(name: str) -> asyncio.Task[Any] | None:
    """The current task; ConfigurationError where another library than asyncio runs us."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        raise ConfigurationError(f"{name}: loopguard runs under asyncio only, not under trio or curio") from None


async def _uncancelled(awaitable: Any) -> Any:
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


class _Stops:
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
    stops = _Stops()
    try:
        effect = steps.send(None)
        while True:
            try:
                value = _perform_sync(effect)
            except BaseException as exc:  # every outcome belongs to the pipeline, which raises it on
                effect = _raise_on(stops, steps, exc)
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
        _close(steps)


async def drive_async(steps: Steps) -> Any:
    """Run a pipeline to its end in this task."""
    stops = _Stops()
    try:
        effect = steps.send(None)
        while True:
            try:
                value = await _uncancelled(_perform_async(effect))
            except BaseException as exc:  # every outcome belongs to the pipeline, which raises it on
                effect = _raise_on(stops, steps, exc)
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
        _close(steps)


def _close(steps: Steps) -> None:
    """Close a pipeline, though its hooks may answer that by asking for more."""
    for _ in range(10):
        try:
            steps.close()
            return
        except RuntimeError:  # it ignored GeneratorExit
            pass


def _raise_on(stops: _Stops, steps: Steps, exc: BaseException) -> Effect:
    """Throw exc into the pipeline. What must never be swallowed goes on even if a hook swallows it."""
    if not isinstance(exc, KeyboardInterrupt | SystemExit | GeneratorExit | asyncio.CancelledError):
        return stops.throw(steps, exc)
    try:
        steps.throw(exc)
    except StopIteration:
        pass  # a hook swallowed it and returned
    else:
        _close(steps)  # a hook swallowed it and asked for more
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


def _refused(plan: Admission, call: ToolCall, refusal: ToolCallRefused, start_ns: int) -> ToolCallRefused:
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
            raise _refused(plan, call, refusal, start_ns)
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
            tracer.close(call.span, plan, _latest(call), error, result)
        CURRENT.reset(before)


def _latest(call: ToolCall) -> ToolCall:
    """The call as its hooks left it."""
    here = CURRENT.get()
    return here if isinstance(here, ToolCall) and here.span is call.span else call


def _restore(token: contextvars.Token[Any]) -> None:
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
            raise _refused(plan, call, refusal, start_ns)
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
            tracer.close(call.span, plan, _latest(call), error, result)
        _restore(before)


class _Iteration:
    """A generator tool's call: the context is ours only while its body runs, never across a yield."""

    __slots__ = ("call", "here", "items", "left", "plan", "span", "tracer", "yielded_ns")

    def __init__(
        self, tool: Tool, fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], id: str | None = None
    ) -> None:
        plan = self.plan = plan_of(tool)
        call = self.call = ToolCall(plan, fn, instance, args, kwargs, id)
        tracer = self.tracer = plan.tracer
        start_ns = time.time_ns() if tracer is not None else 0
        self.yielded_ns = 0
        self.items = ItemDigest()
        self.left: float | None = None
        """Seconds that the body may still run; the consumer's own time between the items doesn't count."""
        if plan.proceed is None:
            refusal = plan.admit(call)
            if refusal is not None:
                raise _refused(plan, call, refusal, start_ns)
        if tracer is not None:
            call.span = tracer.open(plan, call, start_ns)
        self.here: Any = call
        self.span = call.span
        """What the last resume left current, and the next one finds current again."""

    def step(self, fn: Callable[..., R], *args: Any) -> R:
        """One resume of the body, or of the hooks, in the call's own context."""
        entered = self._enter()
        try:
            return fn(*args)
        finally:
            self._leave(*entered)

    async def astep(self, fn: Callable[..., Any], *args: Any) -> Any:
        """One resume of an async body."""
        entered = self._enter()
        try:
            return await _uncancelled(fn(*args))
        finally:
            self._leave(*entered)

    def _enter(self) -> tuple[contextvars.Token[Any], Any]:
        return CURRENT.set(self.here), self.tracer.attach(self.span) if self.tracer is not None else None

    def _leave(self, before: contextvars.Token[Any], attached: Any) -> None:
        self.here = CURRENT.get()
        if self.tracer is not None and attached is not None:
            self.span = self.tracer.current()
            self.tracer.detach(attached)
        _restore(before)

    def begin(self, effect: Invoke) -> ToolCall:
        """The body is about to run, for the first time or once more."""
        self.call, self.left, self.items = effect.call, effect.timeout, ItemDigest()
        return self.call

    def resume(self, close: Callable[[], Any], fn: Callable[..., R], *args: Any) -> R:
        """Let the body go on to its next item; EffectTimeout, and the body closed, once its time is used up."""
        if self.left is None:
            return self.step(fn, *args)
        begun = time.monotonic()
        try:
            item = self.step(fn, *args)
        except StopIteration:
            if self._late(begun):
                raise EffectTimeout from None
            raise
        if self._late(begun):
            self.step(close)
            raise EffectTimeout
        return item

    async def aresume(self, close: Callable[[], Any], fn: Callable[..., Any], *args: Any) -> Any:
        """The same for an async body, which is cancelled; what it yields after swallowing that is dropped."""
        if self.left is None:
            return await self.astep(fn, *args)
        begun = time.monotonic()
        try:
            item = await cancelled_after(asyncio.timeout(max(0.0, self.left)), self.astep(fn, *args))
        except StopAsyncIteration:
            if self._late(begun):
                raise EffectTimeout from None
            raise
        if self._late(begun):
            await self.astep(close)
            raise EffectTimeout
        return item

    def _late(self, begun: float) -> bool:
        assert self.left is not None
        self.left -= time.monotonic() - begun
        return self.left < 0

    def saw(self, item: Any) -> None:
        self.items.add(item)
        self.call.items = self.items
        if self.tracer is not None:
            self.yielded_ns = time.time_ns()

    def close(self, error: BaseException | None, result: Any = None) -> None:
        """End the span, once."""
        if self.tracer is not None:
            tracer, self.tracer = self.tracer, None
            latest = self.here if isinstance(self.here, ToolCall) and self.here.span is self.call.span else self.call
            tracer.close(self.call.span, self.plan, latest, error, result)

    def abandon(self) -> None:
        """The generator went away without being closed."""
        if self.plan.proceed is None:  # a pipeline goes away with it, and settles
            self.plan.failed(self.call, GeneratorExit())
        if self.tracer is not None:
            self.call.ended_ns = self.yielded_ns
            self.close(GeneratorExit())


def call_generator(
    tool: Tool, fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], id: str | None = None
) -> Generator[Any, Any, Any]:
    """Call a generator tool: admitted, refused and charged once, when its iteration starts."""
    it = _Iteration(tool, fn, instance, args, kwargs, id)
    error: BaseException | None = None
    result: Any = None
    try:
        if it.plan.proceed is not None:
            result = yield from _hooked_generator(it, it.step(it.plan.proceed, it.call))
            return result
        try:
            it.plan.start(it.call)
            result = yield from _items(it, Invoke(it.call))
        except BaseException as exc:
            it.plan.failed(it.call, exc)
            raise
        it.plan.returned(it.call, result)
        return result
    except BaseException as exc:
        error = exc
        raise
    finally:
        it.close(error, result)


def _items(it: _Iteration, effect: Invoke) -> Generator[Any, Any, Any]:
    call = it.begin(effect)
    generator = it.step(functools.partial(call.fn, *call.args, **call.kwargs))
    try:
        item = it.resume(generator.close, next, generator)
        while True:
            it.saw(item)
            try:
                sent = yield item
            except GeneratorExit:
                it.step(generator.close)
                raise
            except BaseException as exc:  # thrown in by the consumer: the body's to handle
                item = it.resume(generator.close, generator.throw, exc)
            else:
                item = it.resume(generator.close, generator.send, sent)
    except StopIteration as stop:
        return stop.value


def _hooked_generator(it: _Iteration, steps: Steps) -> Generator[Any, Any, Any]:
    stops = _Stops()
    try:
        effect = it.step(steps.send, None)
        while True:
            try:
                if isinstance(effect, Invoke):
                    value = yield from _items(it, effect)
                else:
                    value = it.step(_perform_sync, effect)
            except BaseException as exc:  # every outcome belongs to the pipeline, which raises it on
                effect = it.step(_raise_on, stops, steps, exc)
            else:
                effect = it.step(steps.send, value)
    except StopIteration as stop:
        return stop.value
    finally:
        _close(steps)


def call_async_generator(
    tool: Tool, fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], id: str | None = None
) -> AsyncGenerator[Any, Any]:
    """Call an async generator tool. One that is dropped on a closed event loop is still settled."""
    started: list[_Iteration] = []
    generator = _run_async_generator(started, tool, fn, instance, args, kwargs, id)
    weakref.finalize(generator, _abandon, started)
    return generator


def _abandon(started: list[_Iteration]) -> None:
    for it in started:
        it.abandon()


async def _run_async_generator(
    started: list[_Iteration],
    tool: Tool,
    fn: Any,
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    id: str | None,
) -> AsyncGenerator[Any, Any]:
    running_task(tool.name)
    it = _Iteration(tool, fn, instance, args, kwargs, id)
    started.append(it)
    error: BaseException | None = None
    steps: Steps | None = None
    stops = _Stops()
    effect: Effect = Invoke(it.call)
    try:
        if it.plan.proceed is not None:
            steps = it.step(it.plan.proceed, it.call)
            effect = it.step(steps.send, None)
        while True:
            try:
                value = None
                if isinstance(effect, Invoke):
                    call = it.begin(effect)
                    if steps is None:
                        it.plan.start(call)
                    generator = it.step(functools.partial(call.fn, *call.args, **call.kwargs))
                    try:
                        item = await it.aresume(generator.aclose, generator.__anext__)
                        while True:
                            it.saw(item)
                            try:
                                sent = yield item
                            except GeneratorExit:
                                await it.astep(generator.aclose)
                                raise
                            except BaseException as exc:  # thrown in by the consumer: the body's to handle
                                item = await it.aresume(generator.aclose, generator.athrow, exc)
                            else:
                                item = await it.aresume(generator.aclose, generator.asend, sent)
                    except StopAsyncIteration:
                        pass
                else:
                    value = await it.astep(_perform_async, effect)
            except BaseException as exc:
                if steps is None:
                    it.plan.failed(it.call, exc)
                    raise
                effect = it.step(_raise_on, stops, steps, exc)
            else:
                if steps is None:
                    it.plan.returned(it.call, value)
                    return
                effect = it.step(steps.send, value)
    except StopIteration:
        return
    except BaseException as exc:
        error = exc
        raise
    finally:
        started.clear()
        if steps is not None:
            _close(steps)
        it.close(error)
