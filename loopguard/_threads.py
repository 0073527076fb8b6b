"""Waiting with a bound: work in daemon threads of our own, and awaitables that are given up on."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from loopguard._halting import caller
from loopguard._pipeline import EffectTimeout
from loopguard.exceptions import ConfigurationError

__all__ = ["bounded", "cancelled_after", "in_thread", "running_task", "wait_in_thread"]

R = TypeVar("R")


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


def wait_in_thread(fn: Callable[[], R], name: str, timeout: float | None) -> R:
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
    result, exc = await bounded(future, timeout)
    if exc is not None:
        raise exc
    return result  # type: ignore[no-any-return]  # what fn returned


async def bounded(awaitable: Any, timeout: float | None) -> Any:
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


def running_task(name: str) -> asyncio.Task[Any] | None:
    """The current task; ConfigurationError where another library than asyncio runs us."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        raise ConfigurationError(f"{name}: loopguard runs under asyncio only, not under trio or curio") from None
