"""Driving generator tools of both colours: the context is theirs only while their body runs."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar

from loopguard._call import CURRENT, Tool, ToolCall
from loopguard._drivers import (
    Stops,
    close_steps,
    perform_async,
    perform_sync,
    plan_of,
    raise_on,
    refused,
    restore,
    uncancelled,
)
from loopguard._fingerprints import ItemDigest
from loopguard._pipeline import Effect, EffectTimeout, Invoke, Steps
from loopguard._threads import cancelled_after, running_task

__all__ = ["call_async_generator", "call_generator"]

R = TypeVar("R")


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
        self.items: ItemDigest | None = None
        self.left: float | None = None
        """Seconds that the body may still run; the consumer's own time between the items doesn't count."""
        if plan.proceed is None:
            refusal = plan.admit(call)
            if refusal is not None:
                raise refused(plan, call, refusal, start_ns)
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
            return await uncancelled(fn(*args))
        finally:
            self._leave(*entered)

    def _enter(self) -> tuple[contextvars.Token[Any], Any]:
        return CURRENT.set(self.here), self.tracer.attach(self.span) if self.tracer is not None else None

    def _leave(self, before: contextvars.Token[Any], attached: Any) -> None:
        self.here = CURRENT.get()
        if self.tracer is not None and attached is not None:
            self.span = self.tracer.current()
            self.tracer.detach(attached)
        restore(before)

    def begin(self, effect: Invoke) -> ToolCall:
        """The body is about to run, for the first time or once more."""
        self.call, self.left, self.items = effect.call, effect.timeout, None
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
        if self.items is None:
            self.items = self.call.items = ItemDigest(self.call.ignored)
        self.items.add(item)
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
    stops = Stops()
    try:
        effect = it.step(steps.send, None)
        while True:
            try:
                if isinstance(effect, Invoke):
                    value = yield from _items(it, effect)
                else:
                    value = it.step(perform_sync, effect)
            except BaseException as exc:  # every outcome belongs to the pipeline, which raises it on
                effect = it.step(raise_on, stops, steps, exc)
            else:
                effect = it.step(steps.send, value)
    except StopIteration as stop:
        return stop.value
    finally:
        close_steps(steps)


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
    stops = Stops()
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
                    value = await it.astep(perform_async, effect)
            except BaseException as exc:
                if steps is None:
                    it.plan.failed(it.call, exc)
                    raise
                effect = it.step(raise_on, stops, steps, exc)
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
            close_steps(steps)
        it.close(error)
