"""The four drivers: a guarded call behaves as the plain one did, straight and hooked."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest

from loopguard import (
    ApproveTool,
    Budget,
    ConfigurationError,
    Guard,
    LoopLimit,
    MaxSteps,
    MaxStepsExceeded,
    WrapTool,
    charge,
    current_call,
    current_run,
    loop,
    tool,
)
from loopguard.typing import Ask
from tests.conftest import Colour


def passing(call: Any, proceed: Any) -> Any:
    """A hook that does nothing, but sends calls the long way."""
    return (yield from proceed(call))


def swallowing(call: Any, proceed: Any) -> Any:
    """A hook that swallows whatever it can."""
    try:
        return (yield from proceed(call))
    except BaseException:
        return "swallowed"


STRAIGHT, HOOKED = Guard(), Guard(WrapTool(passing))


@pytest.fixture(params=[STRAIGHT, HOOKED], ids=["straight", "hooked"])
def guard(request: pytest.FixtureRequest) -> Guard:
    """A policy without a hook, and one with."""
    return request.param


class Falsy(Exception):
    """An exception that is false and empty."""

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0


def settled(run: Any) -> bool:
    """Nothing is left reserved."""
    return all(cell.reserved == 0 for cell in run.cells.values())


# -- exceptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("x"), Falsy("x"), KeyboardInterrupt(), SystemExit(3), ExceptionGroup("g", [ValueError("x")])]
)
def test_what_a_body_raises_reaches_the_caller_as_it_is(colour: Colour, guard: Guard, error: BaseException) -> None:
    """The very object, falsy ones included; the call used a step and left nothing reserved."""

    def body() -> None:
        raise error

    decorated = tool(cost=1)(colour.make(body))
    with guard.scope() as run:
        if colour.name in ("async", "async generator") and not isinstance(error, Exception):
            with pytest.raises(type(error)):  # asyncio raises these through its loop
                colour.call(decorated)
        else:
            with pytest.raises(type(error)) as caught:
                colour.call(decorated)
            assert caught.value is error
        assert run.steps == 1
        assert settled(run)
        assert run.spent() == 0


def test_stop_iteration_of_a_sync_tool_stays_stop_iteration(guard: Guard) -> None:
    """PEP 479 turns it into RuntimeError inside generators: the drivers undo that."""
    error = StopIteration("value")

    @tool
    def take(items: Iterator[int]) -> int:
        return next(items)

    @tool
    def stop() -> None:
        raise error

    with guard.scope() as run:
        items = iter([1])
        assert take(items) == 1
        with pytest.raises(StopIteration):
            take(items)
        with pytest.raises(StopIteration) as caught:
            stop()
        assert caught.value is error
        assert "RuntimeError" not in "".join(traceback.format_exception(error))
        assert run.steps == 3


def test_stop_iteration_keeps_its_cause_and_passes_nested_tools(guard: Guard) -> None:
    """A tool within a tool raises it through both; what it was raised from stays."""

    @tool
    def inner() -> None:
        try:
            raise KeyError("origin")
        except KeyError as origin:
            raise StopIteration(7) from origin

    @tool
    def outer() -> None:
        inner()

    with guard.scope(), pytest.raises(StopIteration) as caught:
        outer()
    assert caught.value.value == 7
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_runtime_error_from_a_stop_iteration_of_the_bodys_own_stays_one(guard: Guard) -> None:
    """Only what our own generators turned round is turned back."""

    @tool
    def body() -> None:
        raise RuntimeError("mine") from StopIteration(1)

    with guard.scope(), pytest.raises(RuntimeError, match="mine"):
        body()


@pytest.mark.parametrize("colour", ["async", "generator", "async generator"], indirect=True)
def test_stop_iteration_in_the_other_colours_is_what_python_makes_of_it(colour: Colour, guard: Guard) -> None:
    """A coroutine or generator that raises it raises RuntimeError, guarded or not."""

    def body() -> None:
        raise StopIteration

    plain = colour.make(body)
    with pytest.raises(RuntimeError) as unguarded:
        colour.call(plain)
    with guard.scope(), pytest.raises(RuntimeError) as guarded:
        colour.call(tool(plain))
    assert str(guarded.value) == str(unguarded.value)


def test_a_stop_iteration_of_a_callback_ends_nothing_early(colour: Colour) -> None:
    """A before= that runs out of an iterator is an error, never the end of a generator."""

    def before(call: Any) -> None:
        next(iter(()))

    bodies: list[int] = []
    decorated = tool(colour.make(lambda: bodies.append(1)))
    with Guard(WrapTool(before=before)).scope(), pytest.raises((StopIteration, RuntimeError)):
        colour.call(decorated)
    assert bodies == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_hook_that_swallows_an_interrupt_does_not_stop_it(error: type[BaseException]) -> None:
    """KeyboardInterrupt and SystemExit go on, whatever hooks do."""

    def body() -> None:
        raise error

    def obstinate(call: Any, proceed: Any) -> Any:
        for _ in range(8):
            try:
                return (yield from proceed(call))
            except BaseException:
                continue
        return "swallowed"

    def items() -> Iterator[int]:
        yield 1
        raise error

    for hook in (swallowing, obstinate):
        with Guard(WrapTool(hook), LoopLimit(0)).scope() as run:
            with pytest.raises(error):
                tool(body)()
            with pytest.raises(error):
                list(tool(items)())
            assert settled(run)


def test_a_hook_that_swallows_a_cancellation_does_not_stop_it() -> None:
    """The task is cancelled, whatever hooks do."""
    bodies: list[str] = []

    async def body() -> None:
        bodies.append("started")
        await asyncio.Event().wait()

    async def items() -> AsyncIterator[int]:
        yield 1
        await body()

    async def main(call: Callable[[], Any]) -> None:
        task = asyncio.ensure_future(call())
        while not bodies:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def exhaust() -> None:
        async for _ in tool(items)():
            pass

    for call in (tool(body), exhaust):
        bodies.clear()
        with Guard(WrapTool(swallowing)).scope() as run:
            asyncio.run(main(call))
            assert settled(run)
        assert bodies == ["started"]


def test_a_tool_that_swallows_its_cancellation_still_cancels_the_task(guard: Guard) -> None:
    """It returns normally; the cancellation goes on, no step after it runs, and its estimate is paid (C46)."""
    seen: list[str] = []

    @tool(cost=1)
    async def stubborn() -> str:
        try:
            seen.append("started")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("swallowed")
        return "done"

    @tool(cost=1)
    async def stubborn_items() -> AsyncIterator[str]:
        yield "first"
        yield await stubborn.__wrapped__()

    async def call() -> None:
        await stubborn()
        seen.append("went on")

    async def iterate() -> None:
        async for _ in stubborn_items():
            pass
        seen.append("went on")

    async def main(run: Callable[[], Any]) -> None:
        task = asyncio.ensure_future(run())
        while not seen:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for run_it in (call, iterate):
        seen.clear()
        with guard.scope() as run:
            asyncio.run(main(run_it))
            assert settled(run)
            assert run.spent() == 1
        assert seen == ["started", "swallowed"]


def test_a_swallowed_cancellation_ends_the_loop_around_it() -> None:
    """No further iteration starts, and the loop's task is cancelled."""
    iterations: list[int] = []

    @tool
    async def stubborn(n: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

    @loop(max=3)
    async def step(n: int) -> int:
        iterations.append(n)
        await stubborn(n)
        return n + 1

    async def main() -> None:
        task = asyncio.ensure_future(step(0))
        while not iterations:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert iterations == [0]


def test_an_approver_that_swallows_the_cancellation_runs_nothing() -> None:
    """Its yes comes from a cancelled task."""
    asked: list[str] = []
    bodies: list[int] = []

    async def approver(call: Any) -> bool:
        asked.append(call.name)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return True

    @tool
    async def work() -> None:
        bodies.append(1)

    async def main() -> None:
        task = asyncio.ensure_future(work())
        while not asked:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Guard(ApproveTool(approver)).scope() as run:
        asyncio.run(main())
        assert run.steps == 0
    assert bodies == []


def test_a_timeout_inside_an_async_tool_is_its_own(guard: Guard) -> None:
    """asyncio.timeout cancels and takes it back: that is no cancellation of the task."""

    @tool
    async def work() -> str:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            return "late"
        return "never"

    with guard.scope():
        assert asyncio.run(work()) == "late"


# -- generators keep their protocol ----------------------------------------------------------------


@pytest.fixture(params=[None, STRAIGHT, HOOKED], ids=["unguarded", "straight", "hooked"])
def decorate(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """The plain function as it is, and as a tool without and with a hook: all three must behave alike."""
    return (lambda fn: fn) if request.param is None else request.param.tool


def test_a_generator_keeps_send_and_its_return_value(decorate: Callable[[Any], Any]) -> None:
    """What is sent reaches the body, what it returns is the value of `yield from`."""

    def echo(first: Any) -> Generator[Any, Any, str]:
        got = first
        while got != "stop":
            got = yield ("got", got)
        return "returned"

    generator = decorate(echo)("a")
    assert next(generator) == ("got", "a")
    assert generator.send("b") == ("got", "b")
    assert generator.send(None) == ("got", None)
    with pytest.raises(StopIteration) as stop:
        generator.send("stop")
    assert stop.value.value == "returned"
    with pytest.raises(StopIteration):
        next(generator)


def test_a_generator_keeps_throw(decorate: Callable[[Any], Any]) -> None:
    """The body may handle what is thrown in and go on, or let it out."""

    def robust() -> Iterator[str]:
        for _ in range(2):
            try:
                yield "ready"
            except ValueError as exc:
                yield f"handled {exc}"

    generator = decorate(robust)()
    assert next(generator) == "ready"
    assert generator.throw(ValueError("one")) == "handled one"
    assert next(generator) == "ready"
    error = KeyError("out")
    with pytest.raises(KeyError) as caught:
        generator.throw(error)
    assert caught.value is error


def test_a_generator_keeps_close(decorate: Callable[[Any], Any]) -> None:
    """close() runs the body's finally, in order; what that raises comes out; one not started runs nothing."""
    seen: list[str] = []

    def careful(fail: bool) -> Iterator[int]:
        seen.append("started")
        try:
            yield 1
            yield 2
        finally:
            seen.append("closed")
            if fail:
                raise OSError("in close")

    generator = decorate(careful)(False)
    assert next(generator) == 1
    generator.close()
    assert seen == ["started", "closed"]
    generator = decorate(careful)(True)
    next(generator)
    with pytest.raises(OSError, match="in close"):
        generator.close()
    seen.clear()
    decorate(careful)(False).close()
    assert seen == []


def test_a_generator_that_ignores_close_is_told_off(decorate: Callable[[Any], Any]) -> None:
    """As Python does it."""

    def rude() -> Iterator[int]:
        for n in (1, 2):
            try:
                yield n
            except GeneratorExit:
                pass

    generator = decorate(rude)()
    next(generator)
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        generator.close()


def test_an_async_generator_keeps_asend_athrow_and_aclose(decorate: Callable[[Any], Any]) -> None:
    """The same protocol, awaited."""
    seen: list[str] = []

    async def echo(first: Any) -> Any:
        got = first
        try:
            while got != "stop":
                try:
                    got = yield ("got", got)
                except ValueError as exc:
                    got = str(exc)
        finally:
            seen.append("closed")

    async def main() -> None:
        generator = decorate(echo)("a")
        assert await generator.__anext__() == ("got", "a")
        assert await generator.asend("b") == ("got", "b")
        assert await generator.athrow(ValueError("c")) == ("got", "c")
        error = KeyError("out")
        with pytest.raises(KeyError) as caught:
            await generator.athrow(error)
        assert caught.value is error
        assert seen == ["closed"]
        with pytest.raises(StopAsyncIteration):
            await generator.__anext__()

        generator = decorate(echo)("a")
        await generator.__anext__()
        await generator.aclose()
        assert seen == ["closed"] * 2
        generator = decorate(echo)("a")
        await generator.aclose()  # never started: nothing runs
        assert seen == ["closed"] * 2
        generator = decorate(echo)("stop")
        with pytest.raises(StopAsyncIteration):
            await generator.__anext__()
        with pytest.raises(StopAsyncIteration):
            await generator.asend(None)

    asyncio.run(main())


@pytest.mark.parametrize("colour", ["generator", "async generator"], indirect=True)
def test_an_exception_after_some_items_comes_out(colour: Colour, decorate: Callable[[Any], Any]) -> None:
    """Items first, then the error."""
    error = ValueError("third")
    got: list[int] = []

    def items() -> Iterator[int]:
        yield from (1, 2)
        raise error

    async def async_items() -> AsyncIterator[int]:
        for item in (1, 2):
            yield item
        raise error

    def consume() -> None:
        got.extend(item for item in decorate(items)())

    async def async_consume() -> None:
        async for item in decorate(async_items)():
            got.append(item)  # noqa: PERF401  # what came before the error counts

    with pytest.raises(ValueError, match="third") as caught:
        consume() if colour.name == "generator" else asyncio.run(async_consume())
    assert caught.value is error
    assert got == [1, 2]


def test_a_generator_is_admitted_when_its_iteration_starts(guard: Guard) -> None:
    """Calling it uses nothing; a refusal comes with the first item, and only there."""

    @tool
    def items() -> Iterator[int]:
        yield 1
        yield 2

    inner = Guard(MaxSteps(1), *guard.guardrails)
    with inner.scope() as run:
        never, first, second = items(), items(), items()
        assert run.steps == 0
        assert next(first) == 1
        assert run.steps == 1
        with pytest.raises(MaxStepsExceeded):
            next(second)
        assert next(first) == 2
        assert list(first) == []
        never.close()
        assert (run.steps, run.refusals) == (1, 1)
    with inner.scope() as other:
        assert list(items()) == [1, 2]
        assert other.steps == 1


@pytest.mark.parametrize("colour", ["generator", "async generator"], indirect=True)
def test_a_generator_left_early_pays_like_one_that_returned(colour: Colour, guard: Guard) -> None:
    """Its estimate, or what it reported; never iterated, nothing."""

    @tool(cost=2)
    def items(report: bool) -> Iterator[int]:
        if report:
            charge(usd=1)
        yield 1
        yield 2

    @tool(cost=2)
    async def async_items(report: bool) -> AsyncIterator[int]:
        if report:
            charge(usd=1)
        yield 1
        yield 2

    async def leave(report: bool) -> None:
        generator = async_items(report)
        await generator.__anext__()
        await generator.aclose()

    for report, spent in ((False, 2), (True, 1)):
        with guard.scope() as run:
            if colour.name == "generator":
                generator = items(report)
                next(generator)
                assert run.reserved() == 2
                generator.close()
                items(report).close()
            else:
                asyncio.run(leave(report))
            assert (run.spent(), settled(run), run.steps) == (spent, True, 1)


@pytest.mark.parametrize("where", ["dropped", "another thread", "another context"])
def test_a_generator_may_be_closed_from_anywhere(guard: Guard, where: str) -> None:
    """Dropped, or closed by another thread or in another context: settled, cleaned up, nothing raised."""
    seen: list[Any] = []

    @tool(cost=1)
    def items() -> Iterator[int]:
        try:
            yield 1
        finally:
            seen.append(current_call())

    with guard.scope() as run:
        generator = items()
        next(generator)
        if where == "dropped":
            del generator
            gc.collect()
        elif where == "another thread":
            thread = threading.Thread(target=generator.close)
            thread.start()
            thread.join()
        else:
            contextvars.Context().run(generator.close)
        assert settled(run)
        assert run.spent() == 1
        assert current_call() is None
        assert current_run() is run
    assert len(seen) == 1
    assert seen[0] is not None
    assert seen[0].name == "items"


def test_an_async_generator_may_be_closed_by_another_task(guard: Guard) -> None:
    """Settled once, nothing raised."""

    @tool(cost=1)
    async def items() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def main() -> None:
        generator = items()
        assert await generator.__anext__() == 1
        await asyncio.create_task(generator.aclose())
        generator = items()
        assert await asyncio.create_task(generator.__anext__()) == 1
        assert await asyncio.create_task(generator.__anext__()) == 2
        with pytest.raises(StopAsyncIteration):
            await generator.__anext__()

    with guard.scope() as run:
        asyncio.run(main())
        assert settled(run)
        assert run.spent() == 2
        assert current_run() is run


def test_an_async_generator_dropped_on_a_closed_loop_is_settled(guard: Guard) -> None:
    """Nobody can run its cleanup any more; what it had reserved is not reserved for ever."""

    @tool(cost=1)
    async def items() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def first(generator: Any) -> int:
        return await generator.__anext__()

    with guard.scope() as run:
        for drive in (first, lambda generator: generator.asend(None)):  # known to the loop, and not
            loop_ = asyncio.new_event_loop()
            generator = items()
            assert loop_.run_until_complete(drive(generator)) == 1
            loop_.close()
            assert run.reserved() == 1
            del generator
            gc.collect()
            assert settled(run)
        assert (run.spent(), run.steps) == (2, 2)


def test_an_async_generator_dropped_while_its_hook_waits_takes_back_nothing_twice() -> None:
    """It was not admitted yet: there is nothing to give back."""
    bodies: list[int] = []

    async def before(call: Any) -> None:
        await asyncio.Event().wait()

    @tool(cost=1)
    async def items() -> AsyncIterator[int]:
        bodies.append(1)
        yield 1

    pending: list[Any] = []

    async def start(generator: Any) -> None:
        pending.append(asyncio.ensure_future(generator.__anext__()))
        for _ in range(3):
            await asyncio.sleep(0)

    with Guard(WrapTool(before=before)).scope() as run:
        loop_ = asyncio.new_event_loop()
        loop_.set_exception_handler(lambda *_: None)  # it complains of the pending task, rightly
        generator = items()
        loop_.run_until_complete(start(generator))
        loop_.close()
        pending.clear()
        del generator
        gc.collect()
        assert run.steps == 0
        assert settled(run)
    assert bodies == []


def test_a_coroutine_closed_in_another_context_is_settled_and_raises_nothing(guard: Guard) -> None:
    """As when its loop was closed and the garbage collector finds it."""

    @tool(cost=1)
    async def work() -> None:
        await asyncio.Event().wait()

    async def start() -> Any:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        return task

    with guard.scope() as run:
        loop_ = asyncio.new_event_loop()
        loop_.set_exception_handler(lambda *_: None)  # it complains of the pending task, rightly
        task = loop_.run_until_complete(start())
        loop_.close()
        assert run.reserved() == 1
        del task
        gc.collect()
        assert settled(run)
        assert run.spent() == 1


def test_an_async_tool_outside_asyncio_is_a_configuration_error(guard: Guard) -> None:
    """Driven by anything but asyncio it says so, and uses no step."""

    async def body() -> int:
        return 1

    async def items() -> AsyncIterator[int]:
        yield 1

    with guard.scope() as run:
        coroutine = tool(body)()
        with pytest.raises(ConfigurationError, match="asyncio"):
            coroutine.send(None)
        step = tool(items)().__anext__()
        with pytest.raises(ConfigurationError, match="asyncio"):
            step.send(None)
        assert run.steps == 0


# -- where am I ------------------------------------------------------------------------------------

PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="nowhere")


def test_context_variables_of_the_caller_are_seen_by_the_body(colour: Colour, guard: Guard) -> None:
    """In every colour, straight and hooked."""
    decorated = tool(colour.make(PLACE.get))
    token = PLACE.set("here")
    try:
        with guard.scope():
            assert colour.call(decorated) == "here"
    finally:
        PLACE.reset(token)


def test_a_sync_body_sets_context_variables_for_its_caller(guard: Guard) -> None:
    """As a plain function does."""

    @tool
    def move() -> None:
        PLACE.set("moved")

    def check() -> None:
        with guard.scope():
            move()
        assert PLACE.get() == "moved"

    contextvars.copy_context().run(check)


def test_body_hook_and_approver_know_their_call_and_run(colour: Colour) -> None:
    """current_call and current_run say the same everywhere in a call, and are restored after it."""
    seen: dict[str, tuple[Any, Any]] = {}

    def look(where: str) -> None:
        call, run = current_call(), current_run()
        seen[where] = (None if call is None else call.id, run)

    def hook(call: Any, proceed: Any) -> Any:
        look("hook before")
        try:
            return (yield from proceed(call))
        finally:
            look("hook after")

    def approver(call: Any) -> bool:
        look("approver")
        return True

    guard = Guard(
        WrapTool(hook),
        WrapTool(before=lambda call: look("before"), after=lambda call, result: look("after")),
        ApproveTool(approver),
    )
    decorated = tool(colour.make(lambda: look("body")))
    with guard.scope() as run:
        colour.call(decorated)
        assert current_call() is None
        assert current_run() is run
    assert current_run() is None
    assert sorted(seen) == ["after", "approver", "before", "body", "hook after", "hook before"]
    assert len(set(seen.values())) == 1
    assert next(iter(seen.values()))[0] is not None
    assert next(iter(seen.values()))[1] is run


def test_after_an_edit_the_current_call_is_the_edited_one(colour: Colour) -> None:
    """Inner hooks, approver and body see the arguments that will run, by current_call, too (C38)."""
    seen: dict[str, Any] = {}

    def hook(call: Any, proceed: Any) -> Any:
        return (yield from proceed(call.replace(arguments={"amount": 20})))

    def before(call: Any) -> None:
        current = current_call()
        assert current is not None
        seen["hook"] = (call.arguments, current.arguments)

    def approver(call: Any) -> bool:
        current = current_call()
        assert current is not None
        seen["approver"] = (call.arguments, current.arguments)
        return True

    def body(amount: int) -> int:
        current = current_call()
        assert current is not None
        seen["body"] = current.arguments
        return amount

    decorated = tool(colour.make(body))
    with Guard(WrapTool(hook), WrapTool(before=before), ApproveTool(approver)).scope():
        assert colour.call(decorated, 10) == 20
    edited = {"amount": 20}
    assert seen == {"hook": (edited, edited), "approver": (edited, edited), "body": edited}


def test_nested_tools_know_their_own_call(colour: Colour, guard: Guard) -> None:
    """And the outer one again after the inner one has returned or raised."""
    names: list[str] = []

    def look() -> None:
        call = current_call()
        names.append(call.name if call is not None else "none")

    @tool(name="inner")
    def inner(fail: bool) -> None:
        look()
        if fail:
            raise LookupError

    def body() -> None:
        look()
        inner(False)
        look()
        with pytest.raises(LookupError):
            inner(True)
        look()

    with guard.scope():
        colour.call(tool(name="outer")(colour.make(body)))
        look()
    assert names == ["outer", "inner", "outer", "inner", "outer", "none"]


def test_a_loop_inside_a_tool_is_a_child_of_the_tools_run(guard: Guard) -> None:
    """Its calls count in both; afterwards the tool's own call is current again."""
    runs: list[Any] = []

    @tool
    def leaf(n: int) -> int:
        runs.append(current_run())
        return n + 1

    @loop(max=2)
    def inner(n: int) -> int:
        return leaf(n)

    @tool
    def research(n: int) -> int:
        before = current_call(), current_run()
        result = inner(n)
        assert (current_call(), current_run()) == before
        return result

    with guard.scope("outer") as outer:
        assert research(1) == 3
        assert outer.steps == 3
    assert [run.name for run in runs] == ["inner", "inner"]
    assert all(run.parent is outer for run in runs)


def test_a_consumer_between_items_is_where_it_was(guard: Guard) -> None:
    """The tool's call is current while its body runs, never across a yield."""
    inside: list[Any] = []

    @tool
    def items() -> Iterator[int]:
        for n in range(2):
            inside.append(current_call())
            yield n

    @tool
    async def async_items() -> AsyncIterator[int]:
        for n in range(2):
            inside.append(current_call())
            yield n

    async def consume() -> None:
        async for _ in async_items():
            assert current_call() is None

    with guard.scope() as run:
        for _ in items():
            assert current_call() is None
            assert current_run() is run
        asyncio.run(consume())
    assert [call.name for call in inside] == ["items"] * 2 + ["async_items"] * 2


def test_a_scope_that_a_generator_holds_over_a_yield_stays_its_own(guard: Guard) -> None:
    """Calls it makes after the yield still count there; the consumer never sees that scope."""
    names: list[str] = []

    def look() -> None:
        run = current_run()
        names.append(run.name if run is not None else "none")

    @tool
    def items() -> Iterator[int]:
        with Guard().scope("inside"):
            look()
            yield 1
            look()
            yield 2
        look()

    with guard.scope("outside"):
        for _ in items():
            look()
    assert names == ["inside", "outside", "inside", "outside", "outside"]


def test_threads_see_the_run_through_bind_only(guard: Guard) -> None:
    """A bare thread has no run; run.bind carries it and the whole context along."""
    seen: list[Any] = []

    @tool
    def work(n: int) -> None:
        seen.append((current_run(), current_call() is not None, PLACE.get()))

    with guard.scope() as run:
        token = PLACE.set("bound")
        thread = threading.Thread(target=run.bind(work), args=(1,))
        thread.start()
        thread.join()
        PLACE.reset(token)
        assert run.steps == 1
    assert seen == [(run, True, "bound")]


def test_concurrent_calls_each_know_their_own(guard: Guard) -> None:
    """Twenty interleaved tasks never see one another's call."""

    @tool(repeatable=True)
    async def work(n: int) -> None:
        call = current_call()
        for _ in range(3):
            await asyncio.sleep(0)
            assert current_call() is call
            assert call is not None
            assert call.arguments == {"n": n}

    async def main() -> None:
        await asyncio.gather(*map(work, range(20)))

    with guard.scope() as run:
        asyncio.run(main())
        assert run.steps == 20


# -- counting --------------------------------------------------------------------------------------


def test_a_thousand_calls_from_threads_and_tasks_are_counted_exactly(guard: Guard) -> None:
    """20 threads × 50 calls, then 3 parallel async calls: 1003 steps, none lost (C02)."""

    @tool(repeatable=True, cost={"credits": 1})
    def work(n: int) -> int:
        return n

    @tool
    async def async_work(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async def main() -> None:
        await asyncio.gather(*map(async_work, range(3)))

    with Guard(Budget(credits=5000), *guard.guardrails).scope() as run:
        barrier = threading.Barrier(20)

        def fifty(n: int) -> None:
            barrier.wait()
            for i in range(50):
                work(50 * n + i)

        threads = [threading.Thread(target=run.bind(fifty), args=(n,)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asyncio.run(main())
        assert run.steps == 1003
        assert run.spent("credits") == 1000
        assert settled(run)


# -- effects ---------------------------------------------------------------------------------------


def test_an_async_callback_of_a_sync_tool_is_a_configuration_error(colour: Colour) -> None:
    """Not a deadlock: the message says what to make async."""
    ran: list[str] = []

    async def before(call: Any) -> None:
        ran.append("before")

    decorated = tool(colour.make(lambda: ran.append("body")))
    with Guard(WrapTool(before=before)).scope() as run:
        if colour.name in ("async", "async generator"):
            colour.call(decorated)
            assert ran == ["before", "body"]
        else:
            with pytest.raises(ConfigurationError, match="is async"):
                colour.call(decorated)
            assert (ran, run.steps) == ([], 0)


def test_an_async_callback_without_a_name_is_shown_as_it_is() -> None:
    """What to make a plain function of has to be recognised."""

    class Before:
        async def __call__(self, call: Any) -> None:
            """Never run."""

        def __repr__(self) -> str:
            return "<before of mine>"

    with Guard(WrapTool(before=Before())).scope(), pytest.raises(ConfigurationError, match="<before of mine> is async"):
        tool(lambda: None)()


def test_a_blocking_question_of_an_async_tool_leaves_the_event_loop() -> None:
    """Other tasks go on while a sync callback waits, and it sees the caller's context."""
    released = threading.Event()

    def blocking(call: Any) -> tuple[str, Any]:
        assert released.wait(5)
        assert threading.current_thread().name == "loopguard question"
        return PLACE.get(), current_call()

    def hook(call: Any, proceed: Any) -> Any:
        place, current = yield Ask(blocking, call, blocking=True)
        assert place == "asked"
        assert current.id == call.id
        return (yield from proceed(call))

    @tool
    async def work() -> int:
        return 1

    async def main() -> int:
        PLACE.set("asked")
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        released.set()
        return await task

    with Guard(WrapTool(hook)).scope():
        assert asyncio.run(main()) == 1


def test_an_effect_that_is_none_is_an_error_of_the_hook(colour: Colour) -> None:
    """A hook that yields something else is told so; nothing runs and nothing stays reserved."""
    bodies: list[int] = []

    def wrong(call: Any, proceed: Any) -> Any:
        yield "please"
        return (yield from proceed(call))

    decorated = tool(colour.make(lambda: bodies.append(1)))
    with Guard(WrapTool(wrong)).scope() as run:
        with pytest.raises(ConfigurationError, match="please"):
            colour.call(decorated)
        assert (run.steps, bodies) == (0, [])
