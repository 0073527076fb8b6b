"""Timeout, Retry, RateLimit and CircuitBreaker from the user's side, in every colour."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest

from loopguard import (
    Approval,
    ApproveTool,
    Budget,
    BudgetExceeded,
    CircuitBreaker,
    ConfigurationError,
    Guard,
    LoopLimit,
    LoopLimitExceeded,
    MaxSteps,
    MaxStepsExceeded,
    RateLimit,
    Retry,
    Run,
    Timeout,
    ToolCallRefused,
    ToolTimeout,
    WrapTool,
    charge,
    current_call,
    current_run,
    loop,
    tool,
)
from loopguard import _events as events
from loopguard.testing import Clock, Desk, capture
from tests.conftest import Colour

plain = pytest.mark.parametrize("colour", ["sync", "async"], indirect=True)
generators = pytest.mark.parametrize("colour", ["generator", "async generator"], indirect=True)

SHORT = 0.05
"""Seconds: a timeout that is meant to run out."""
LONG = 30
"""Seconds: one that isn't."""


def settled(run: Run) -> bool:
    """Nothing is left reserved."""
    return all(cell.reserved == 0 for cell in run.cells.values())


class Gate:
    """Holds bodies up until it is opened, in every colour."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.left = threading.Event()

    def hang(self, name: str, before: Callable[[], object] = lambda: None) -> Any:
        """A body of this colour that waits here; `before` runs first."""

        def sync(n: int = 0) -> str:
            before()
            self.event.wait(LONG)
            self.left.set()
            return "late"

        async def coroutine(n: int = 0) -> str:
            before()
            await asyncio.Event().wait()
            return "never"

        def generator(n: int = 0) -> Iterator[str]:
            before()
            time.sleep(SHORT * 1.2)
            yield "late"

        async def async_generator(n: int = 0) -> AsyncIterator[str]:
            before()
            await asyncio.Event().wait()
            yield "never"

        return {"sync": sync, "async": coroutine, "generator": generator, "async generator": async_generator}[name]


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate that is open again when the test is over."""
    made = Gate()
    yield made
    made.event.set()


class Flaky:
    """A far end that fails so many times and then answers."""

    def __init__(self, failures: int, error: type[BaseException] = ConnectionError) -> None:
        self.failures = failures
        self.error = error
        self.calls: list[Any] = []

    def __call__(self, n: int = 0) -> str:
        self.calls.append(n)
        if len(self.calls) <= self.failures:
            raise self.error(f"failure {len(self.calls)}")
        return f"answer {n}"


# -- Timeout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), True, "1", None])
def test_a_wrong_timeout_is_a_configuration_error(seconds: Any) -> None:
    """As a guardrail and as an option of a tool."""
    with pytest.raises(ConfigurationError, match="above 0"):
        Timeout(seconds)
    if seconds is not None:
        with pytest.raises(ConfigurationError, match="above 0"):
            tool(timeout=seconds)(print)


def test_a_tool_that_hangs_ends_at_its_timeout(colour: Colour, gate: Gate) -> None:
    """ToolTimeout, which is a TimeoutError, long before the body is over; its estimate is paid."""
    hanging = tool(timeout=SHORT, cost=2)(gate.hang(colour.name))
    started = time.monotonic()
    with Guard().scope() as run:
        with pytest.raises(TimeoutError) as caught:
            colour.call(hanging)
        assert time.monotonic() - started < 5
        assert isinstance(caught.value, ToolTimeout)
        assert caught.value.seconds == SHORT
        assert "may still be running" in str(caught.value)
        assert run.spent() == 2
        assert run.steps == 1
        assert settled(run)


def test_a_late_result_is_dropped_and_not_rerun(gate: Gate) -> None:
    """The record says that the tool timed out; its thread goes on alone and changes nothing."""
    bodies: list[int] = []
    hanging = tool(timeout=SHORT)(gate.hang("sync", lambda: bodies.append(1)))
    with capture() as seen, Guard().scope() as run:
        with pytest.raises(ToolTimeout):
            hanging()
        gate.event.set()
        assert gate.left.wait(LONG)
        assert [(call.outcome, call.result) for call in seen.calls] == [("timed_out", None)]
        assert bodies == [1]
        assert run.steps == 1


def test_a_hanging_tool_does_not_hold_up_the_end_of_the_process() -> None:
    """Sync, through acall, and in a thread behind an async loop: the interpreter exits at once."""
    program = """
import asyncio, threading
from loopguard import ToolTimeout, loop, tool

@tool(timeout=0.05)
def hang() -> None:
    threading.Event().wait()

@loop(max=1)
async def step(n: int) -> int:
    try:
        await hang.acall()
    except ToolTimeout as exc:
        print(exc)
    return n

try:
    hang()
except ToolTimeout as exc:
    print(exc)
asyncio.run(step(1))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.count("hang did not finish within 0.05 s") == 2
    assert done.stderr == ""


def test_of_two_timeouts_the_one_that_expired_is_named(colour: Colour, gate: Gate) -> None:
    """The tool's own or the guard's, whichever is shorter."""
    own = tool(timeout=SHORT, name="own")(gate.hang(colour.name))
    guards = tool(timeout=LONG, name="guards")(gate.hang(colour.name))
    with Guard(Timeout(LONG)).scope("outer"), pytest.raises(ToolTimeout, match=r"@tool\(timeout=…\) of own"):
        colour.call(own)
    with (
        Guard(Timeout(LONG)).scope("outer"),
        Guard(Timeout(SHORT)).scope("inner"),
        pytest.raises(ToolTimeout, match=r"Timeout\(0.05\) of run 'inner'"),
    ):
        colour.call(guards)


@plain
@pytest.mark.parametrize("expires", ["inner", "outer"])
def test_of_two_nested_tools_the_one_whose_time_is_up_is_named(colour: Colour, gate: Gate, expires: str) -> None:
    """An inner ToolTimeout passes through the outer tool as it is; an outer one names the outer tool."""
    body = gate.hang(colour.name)
    inner = tool(name="inner", timeout=SHORT if expires == "inner" else LONG)(body)
    outer_timeout = SHORT if expires == "outer" else LONG

    if colour.name == "sync":

        @tool(timeout=outer_timeout)
        def outer() -> Any:
            return inner()
    else:

        @tool(timeout=outer_timeout)
        async def outer() -> Any:
            return await inner()

    with Guard().scope(), pytest.raises(ToolTimeout) as caught:
        colour.call(outer)
    assert caught.value.tool == expires
    assert caught.value.source == f"@tool(timeout=…) of {expires}"


@pytest.mark.parametrize("error", [TimeoutError("mine"), ToolTimeout("other", 1.0)])
def test_a_tools_own_timeout_error_arrives_as_the_same_object(colour: Colour, error: BaseException) -> None:
    """Under a timeout and without; it is a failure of the tool, not ours."""

    def body() -> None:
        raise error

    for timeout in (LONG, None):
        with capture() as seen, Guard().scope() as run:
            with pytest.raises(type(error)) as caught:
                colour.call(tool(timeout=timeout, cost=1)(colour.make(body)))
            assert caught.value is error
            assert run.spent() == 0
        assert [call.outcome for call in seen.calls] == ["raised"]


def test_a_sync_body_under_a_timeout_has_its_callers_context() -> None:
    """ContextVars, the current run and call, and the span: a child span's parent is the tool's."""
    from opentelemetry import trace

    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")
    name.set("Ada")

    @tool(timeout=LONG)
    def look() -> tuple[str, Any, Any]:
        with trace.get_tracer("test").start_as_current_span("child"):
            call = current_call()
            return name.get(), call and call.name, current_run()

    with capture() as seen, Guard().scope() as run:
        assert look() == ("Ada", "look", run)
    child, of_tool = seen.spans_of("child")[0], seen.spans_of("execute_tool look")[0]
    assert child.parent is not None
    assert child.parent.span_id == of_tool.context.span_id


def test_a_late_charge_is_recorded_in_full_above_the_estimate(gate: Gate) -> None:
    """Nobody knew what the call did; what it says later comes on top."""

    @tool(timeout=SHORT, cost=1)
    def work() -> None:
        gate.event.wait(LONG)
        charge(usd=3)
        gate.left.set()

    with capture() as seen, Guard().scope() as run:
        with pytest.raises(ToolTimeout):
            work()
        assert run.spent() == 1
        gate.event.set()
        assert gate.left.wait(LONG)
        assert run.spent() == 4
        assert [event.amounts for event in seen.events_of(events.Charged)] == [{"usd": 3}]


def test_what_a_call_had_reported_before_it_timed_out_counts_if_it_is_more(colour: Colour, gate: Gate) -> None:
    """The larger of its estimate and its report, unit by unit."""
    hanging = tool(timeout=SHORT, cost={"usd": 1, "credits": 5})(
        gate.hang(colour.name, lambda: charge(usd=3, credits=2))
    )
    with Guard().scope() as run, pytest.raises(ToolTimeout):
        colour.call(hanging)
    assert (run.spent(), run.spent("credits")) == (3, 5)
    assert settled(run)


@pytest.mark.parametrize("colour", ["async", "async generator"], indirect=True)
def test_an_async_tool_that_swallows_its_cancellation_is_timed_out_all_the_same(colour: Colour) -> None:
    """Its late result is dropped, and the task that called it isn't cancelled."""

    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return "late"

    async def stubborn_items() -> AsyncIterator[str]:
        yield "first"
        yield await stubborn()
        yield "never asked for"

    with Guard().scope() as run, pytest.raises(ToolTimeout):
        colour.call(tool(timeout=SHORT, cost=1)(stubborn if colour.name == "async" else stubborn_items))
    assert run.spent() == 1
    assert settled(run)


def test_an_async_tool_that_hangs_in_its_cleanup_does_not_hold_the_caller_up() -> None:
    """It is left behind after a moment; the result says that it may still be running."""

    async def main() -> None:
        release = asyncio.Event()

        @tool(timeout=SHORT)
        async def hang() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await release.wait()

        with pytest.raises(ToolTimeout):
            await asyncio.wait_for(hang(), 5)
        release.set()
        await asyncio.sleep(0)

    with Guard().scope():
        asyncio.run(main())


def test_an_async_tool_that_hangs_in_its_cleanup_does_not_hold_up_the_cancellation_of_its_caller() -> None:
    """It is given a second for that, and left behind."""

    async def main() -> None:
        begun, release = asyncio.Event(), asyncio.Event()

        @tool(timeout=LONG)
        async def hang() -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                await release.wait()

        task = asyncio.create_task(hang())
        await begun.wait()
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled()
        release.set()
        await asyncio.sleep(0)

    with Guard().scope():
        asyncio.run(main())


@pytest.mark.parametrize("timeout", [LONG, None])
@pytest.mark.parametrize("swallows", [True, False])
def test_a_cancelled_tool_pays_its_estimate_and_leaves_nothing_reserved(timeout: float | None, swallows: bool) -> None:
    """Also one that catches the cancellation and returns: it goes on, and its span is ended once."""

    async def main() -> Run:
        entered = asyncio.Event()

        @tool(cost=2, timeout=timeout, idempotent=True)
        async def work() -> str:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not swallows:
                    raise
            return "survived"

        async with Guard(Budget(usd=10), Retry(3, wait=0)).scope() as run:
            task = asyncio.create_task(work())
            await entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return run

    with capture() as seen:
        run = asyncio.run(main())
    assert run.spent() == 2
    assert settled(run)
    assert [call.outcome for call in seen.calls] == ["cancelled"]
    assert len(seen.spans_of("execute_tool work")) == 1


@generators
def test_the_consumers_own_time_between_the_items_uses_no_timeout(colour: Colour) -> None:
    """Only the seconds in which the body runs count."""

    @tool(timeout=SHORT)
    def items() -> Iterator[int]:
        yield from range(3)

    @tool(timeout=SHORT)
    async def async_items() -> AsyncIterator[int]:
        for n in range(3):
            yield n

    def consume() -> list[int]:
        seen = []
        for n in items():
            time.sleep(SHORT)
            seen.append(n)
        return seen

    async def aconsume() -> list[int]:
        seen = []
        async for n in async_items():
            await asyncio.sleep(SHORT)
            seen.append(n)
        return seen

    with Guard().scope():
        assert (consume() if colour.name == "generator" else asyncio.run(aconsume())) == [0, 1, 2]


@generators
def test_a_generator_that_hangs_after_some_items_is_closed_at_its_timeout(colour: Colour) -> None:
    """The items so far have arrived; its cleanup ran; it pays its estimate once."""
    got: list[int] = []
    cleaned: list[str] = []

    @tool(timeout=SHORT, cost=1)
    def items() -> Iterator[int]:
        try:
            yield 1
            time.sleep(SHORT * 1.2)
            yield 2
        finally:
            cleaned.append("sync")

    @tool(timeout=SHORT, cost=1)
    async def async_items() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            cleaned.append("async")

    def consume() -> None:
        got.extend(iter(items()))

    async def aconsume() -> None:
        got.append(await anext(generator := async_items()))
        await anext(generator)

    with Guard().scope() as run, pytest.raises(ToolTimeout):
        consume() if colour.name == "generator" else asyncio.run(aconsume())
    assert cleaned == ["sync" if colour.name == "generator" else "async"]
    assert got == [1]
    assert run.spent() == 1
    assert settled(run)


@generators
def test_a_generator_that_ends_too_late_is_timed_out(colour: Colour) -> None:
    """As a plain function that returns too late would be."""

    @tool(timeout=SHORT)
    def items() -> Iterator[int]:
        yield 1
        time.sleep(SHORT * 1.2)

    @tool(timeout=SHORT)
    async def async_items() -> AsyncIterator[int]:
        yield 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

    with Guard().scope(), pytest.raises(ToolTimeout):
        colour.call(items if colour.name == "generator" else async_items)


# -- clocks and people -----------------------------------------------------------------------------


@plain
def test_waiting_for_a_person_uses_no_timeout(colour: Colour) -> None:
    """Neither the tool's own, nor the guard's, nor the loop's; each still acts afterwards."""
    desk = Desk()
    bodies: list[int] = []

    @tool(timeout=SHORT)
    def pay(n: int) -> int:
        bodies.append(n)
        return n

    @tool(timeout=SHORT)
    async def apay(n: int) -> int:
        bodies.append(n)
        return n

    @loop(max=2, timeout=0.15, guard=Guard(ApproveTool(desk), Timeout(SHORT * 2)))
    def step(n: int) -> int:
        return pay(n)

    @loop(max=2, timeout=0.15, guard=Guard(ApproveTool(desk), Timeout(SHORT * 2)))
    async def astep(n: int) -> int:
        return await apay(n)

    def person() -> None:
        for number in range(2):
            desk.wait()
            time.sleep(0.2)  # what a person takes: longer than every timeout
            desk.answer(number, True)

    thread = threading.Thread(target=person, daemon=True)
    thread.start()
    result = step.run(7) if colour.name == "sync" else asyncio.run(astep.run(7))
    thread.join(5)
    assert result.completed
    assert bodies == [7, 7]


def test_forty_people_asked_in_threads_leave_an_async_server_alone() -> None:
    """Questions wait in threads of their own: the default executor and the event loop stay free."""
    desk = Desk()
    guard = Guard(ApproveTool(desk))

    @tool
    async def pay(n: int) -> int:
        return n

    async def main() -> tuple[list[str], list[int]]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, guard.scope():
            calls = [asyncio.create_task(pay(n)) for n in range(40)]
            while len(desk.pending) < 40:
                await asyncio.sleep(0.01)
            started = time.monotonic()
            replies = [await asyncio.to_thread(request, port) for _ in range(5)]
            assert time.monotonic() - started < 2
            for number in range(40):
                desk.answer(number, True)
            return replies, await asyncio.gather(*calls)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(await asyncio.to_thread(lambda: b"pong\n"))
        await writer.drain()
        writer.close()

    def request(port: int) -> str:
        import socket

        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"ping\n")
            return connection.makefile().readline()

    replies, results = asyncio.run(main())
    assert replies == ["pong\n"] * 5
    assert results == list(range(40))


def test_sync_work_leaves_the_event_loop_running() -> None:
    """A 200 ms approver, judge, evaluator and acall tool beside a 10 ms ticker; two such tools overlap."""
    ticks: list[float] = []

    def slow(*args: Any) -> bool:
        time.sleep(0.2)
        return True

    @tool
    async def gated() -> None:
        return None

    @tool
    def work(n: int) -> int:
        time.sleep(0.2)
        return n

    @loop(max=1, until_llm="Done?", judge=slow)
    async def judged(n: int) -> int:
        return n

    @loop(max=1, evaluate=slow)
    async def evaluated(n: int) -> int:
        return n

    async def ticker() -> None:
        while True:
            await asyncio.sleep(0.01)
            ticks.append(time.monotonic())

    async def main() -> None:
        beside = asyncio.create_task(ticker())
        async with Guard(ApproveTool(slow, only="gated")).scope():
            for wait in (gated(), judged(1), evaluated(1), work.acall(1)):
                ticks.clear()
                await wait
                assert len(ticks) >= 5, wait
            started = time.monotonic()
            assert await asyncio.gather(work.acall(1), work.acall(2)) == [1, 2]
            assert time.monotonic() - started < 0.35
        beside.cancel()

    asyncio.run(main())


# -- Retry -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((-1,), "max_retries"), ((True,), "max_retries"), ((1.5,), "max_retries"), ((1, -1), "wait"), ((1, "1"), "wait")],
)
def test_a_wrong_retry_is_a_configuration_error(arguments: tuple[Any, ...], said: str) -> None:
    """The message names the parameter and the value."""
    with pytest.raises(ConfigurationError, match=said):
        Retry(*arguments)


def test_a_failing_tool_is_tried_again(colour: Colour) -> None:
    """The caller sees one call; every attempt is an event with its number, and all carry one key."""
    flaky = Flaky(2)
    keys: list[tuple[int, str]] = []

    def body(n: int) -> str:
        call = current_call()
        assert call is not None
        keys.append((call.attempt, call.idempotency_key))
        return flaky(n)

    with capture() as seen, Guard(Retry(2, wait=0)).scope() as run:
        assert colour.call(tool(idempotent=True, cost=1)(colour.make(body)), 7) == "answer 7"
    assert flaky.calls == [7, 7, 7]
    assert [attempt for attempt, _ in keys] == [1, 2, 3]
    assert len({key for _, key in keys}) == 1
    assert run.steps == 1
    assert run.spent() == 1  # the attempts that raised had reported nothing
    assert [event.attempt for event in seen.events_of(events.ToolStarted)] == [1, 2, 3]
    assert [(event.outcome, event.attempt) for event in seen.events_of(events.ToolFinished)] == [
        ("raised", 1), ("raised", 2), ("returned", 3),
    ]  # fmt: skip
    assert [call.attempts for call in seen.calls] == [3]


def test_two_calls_of_a_retrying_tool_make_six_attempts_at_most(colour: Colour) -> None:
    """`MaxSteps(2)` and `Retry(2)`: attempts are no steps; each reserves and settles its own cost."""
    flaky = Flaky(99)
    reserved: list[Decimal] = []

    def body(n: int) -> str:
        run = current_run()
        assert run is not None
        reserved.append(run.reserved())
        charge(usd=1)
        return flaky(n)

    work = tool(idempotent=True, cost=3)(colour.make(body))
    with Guard(MaxSteps(2), Retry(2, wait=0), Budget(usd=100)).scope() as run:
        for n in range(2):
            with pytest.raises(ConnectionError, match="failure"):
                colour.call(work, n)
        with pytest.raises(MaxStepsExceeded):
            colour.call(work, 2)
        assert flaky.calls == [0, 0, 0, 1, 1, 1]
        assert reserved == [3] * 6
        assert run.spent() == 6
        assert run.steps == 2
        assert settled(run)


def test_two_retries_on_the_chain_never_multiply(colour: Colour) -> None:
    """Of all Retries only the innermost acts, the tool's own guard counting as the outermost run's."""
    flaky = Flaky(99)
    own = Guard(Retry(5, wait=0))
    work = tool(idempotent=True, guard=own)(colour.make(flaky.__call__))
    outer, inner = Guard(Retry(3, wait=0)).scope("outer"), Guard(Retry(1, wait=0)).scope("inner")
    with outer, inner, pytest.raises(ConnectionError):
        colour.call(work)
    assert len(flaky.calls) == 2


def test_a_tool_that_is_not_idempotent_is_never_tried_again(colour: Colour) -> None:
    """Running it twice could do harm."""
    flaky = Flaky(1)
    with Guard(Retry(5, wait=0)).scope(), pytest.raises(ConnectionError):
        colour.call(tool(colour.make(flaky.__call__)))
    assert len(flaky.calls) == 1


@pytest.mark.parametrize(
    "error",
    [ToolCallRefused("stopped", "x", "y", "no"), ConfigurationError("wrong"), KeyboardInterrupt(), SystemExit(3)],
)
def test_what_is_no_failure_is_not_retried(colour: Colour, error: BaseException) -> None:
    """A refusal from within, a wrong set-up, and what is meant to end the process."""
    calls: list[int] = []

    def body() -> None:
        calls.append(1)
        raise error

    work = tool(idempotent=True, cost=1)(colour.make(body))
    with Guard(Retry(5, wait=0), Budget(usd=9)).scope() as run, pytest.raises(type(error)):
        colour.call(work)
    assert calls == [1]
    assert settled(run)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_inside_a_retrying_loop_ends_it(error: type[BaseException]) -> None:
    """It propagates, nothing is retried or left reserved, no further iteration starts."""
    flaky = Flaky(99, error)
    work = tool(idempotent=True, cost=1, timeout=LONG)(flaky.__call__)
    iterations: list[int] = []
    runs: list[Any] = []

    @loop(max=3, guard=Guard(Retry(3, wait=0), Budget(usd=9)))
    def step(n: int) -> int:
        iterations.append(n)
        runs.append(current_run())
        work(n)
        return n

    with capture() as seen, pytest.raises(error):
        step(0)
    assert iterations == [0]
    assert len(flaky.calls) == 1
    assert settled(runs[0])
    assert len(seen.spans_of("execute_tool __call__")) == 1


def test_a_loop_cancelled_in_a_retrying_tool_stops_there() -> None:
    """In the body, and in the wait between two attempts."""

    async def cancelled_in(where: str) -> tuple[list[int], Run]:
        entered = asyncio.Event()
        calls: list[int] = []
        runs: list[Any] = []

        def wait(failures: int) -> float:
            entered.set()
            return LONG

        @tool(idempotent=True, cost=1)
        async def work() -> None:
            calls.append(1)
            if where == "wait":
                raise ConnectionError
            entered.set()
            await asyncio.Event().wait()

        @loop(max=3, guard=Guard(Retry(3, wait), Budget(usd=9)))
        async def step(n: int) -> int:
            runs.append(current_run())
            await work()
            return n

        task = asyncio.create_task(step(0))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return calls, runs[0]

    for where, spent in (("body", 1), ("wait", 0)):
        calls, run = asyncio.run(cancelled_in(where))
        assert calls == [1]
        assert run.spent() == spent
        assert settled(run)


def test_each_attempt_has_its_own_timeout_and_pays_its_estimate(gate: Gate) -> None:
    """Timeout stands inside Retry; what an attempt that timed out charges later comes on top."""
    attempts: list[int] = []

    @tool(idempotent=True, cost=2, timeout=SHORT)
    def work() -> str:
        attempts.append(1)
        if len(attempts) < 3:
            gate.event.wait(LONG)
            charge(usd=5)
            gate.left.set()
        return "done"

    with Guard(Retry(2, wait=0), Budget(usd=100)).scope() as run:
        assert work() == "done"
        assert run.spent() == 6
        gate.event.set()
        deadline = time.monotonic() + 5
        while run.spent() < 16 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert run.spent() == 16


def test_loop_limit_counts_a_retried_call_once(colour: Colour) -> None:
    """Three calls that each took two attempts are three; the fourth is refused."""
    flaky = Flaky(0)

    def body(n: int) -> str:
        flaky(n)
        if len(flaky.calls) % 2:
            raise ConnectionError
        return "same"

    work = tool(idempotent=True)(colour.make(body))
    with Guard(Retry(1, wait=0), LoopLimit(3)).scope():
        for _ in range(3):
            assert colour.call(work, 1) == "same"
        with pytest.raises(LoopLimitExceeded):
            colour.call(work, 1)
    assert len(flaky.calls) == 6


def test_a_retried_call_whose_result_is_new_is_no_repeat(colour: Colour) -> None:
    """Polling through a flaky connection is never refused."""
    flaky = Flaky(0)

    def poll(n: int) -> str:
        flaky(n)
        if len(flaky.calls) % 2:
            raise ConnectionError
        return f"{len(flaky.calls)} %"

    work = tool(idempotent=True)(colour.make(poll))
    with Guard(Retry(1, wait=0), LoopLimit(3)).scope():
        for _ in range(10):
            colour.call(work, 1)


def test_a_call_whose_retries_were_cut_short_still_counts(colour: Colour) -> None:
    """A wait that fails, or a stop while waiting, leaves no call behind that LoopLimit never hears of."""

    def body(n: int) -> None:
        raise ConnectionError

    work = tool(idempotent=True)(colour.make(body))
    with Guard(Retry(1, wait=lambda failures: -1), LoopLimit(3)).scope():
        for _ in range(3):
            with pytest.raises(ConfigurationError, match="wait"):
                colour.call(work, 1)
        with pytest.raises(LoopLimitExceeded):
            colour.call(work, 1)


def test_waits_double_up_to_a_minute_or_are_the_users() -> None:
    """`wait` is the first one, in seconds; a function gets the number of failures so far."""
    assert [Retry(9, wait=0.5).seconds(n) for n in (1, 2, 3, 9, 5000)] == [0.5, 1, 2, 60, 60]
    assert Retry(9).seconds(1) == 0.1
    assert Retry(9, wait=lambda failures: failures * 10).seconds(3) == 30


def test_a_retry_that_the_budget_cannot_pay_is_refused(colour: Colour) -> None:
    """The refusal says so, and carries the failure that came before it."""
    flaky = Flaky(99)

    def body() -> str:
        charge(usd=3)
        return flaky()

    work = tool(idempotent=True, cost=3)(colour.make(body))
    with Guard(Retry(5, wait=0), Budget(usd=7)).scope() as run, pytest.raises(BudgetExceeded) as caught:
        colour.call(work)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert len(flaky.calls) == 2
    assert run.spent() == 6
    assert settled(run)
    assert (run.steps, run.refusals) == (1, 1)


def test_a_run_stopped_while_a_retry_waits_makes_no_further_attempt(colour: Colour) -> None:
    """Latches are looked at again after every wait."""
    flaky = Flaky(99)

    def wait(failures: int) -> float:
        run.stop("enough")
        return 0

    with Guard(Retry(5, wait)).scope() as run, pytest.raises(ToolCallRefused) as caught:
        colour.call(tool(idempotent=True)(colour.make(flaky.__call__)))
    assert caught.value.code == "stopped"
    assert len(flaky.calls) == 1
    assert run.steps == 1


@plain
@pytest.mark.parametrize("guardrail", [Retry(5, wait=LONG), RateLimit(1, LONG, wait=LONG)])
def test_no_wait_outlasts_the_loops_deadline(colour: Colour, guardrail: Any) -> None:
    """Neither that of Retry nor that for a turn."""

    def body(n: int) -> None:
        if isinstance(guardrail, Retry):
            raise ConnectionError

    work = tool(idempotent=True)(colour.make(body))

    @loop(max=5, timeout=0.1, guard=Guard(guardrail))
    def step(n: int) -> int:
        work(n)
        return n + 1

    @loop(max=5, timeout=0.1, guard=Guard(guardrail))
    async def astep(n: int) -> int:
        await work(n)
        return n + 1

    started = time.monotonic()
    result = step.run(0) if colour.name == "sync" else asyncio.run(astep.run(0))
    assert time.monotonic() - started < 5
    assert result.stop_reason == "timeout"


@generators
def test_a_generator_is_not_retried_once_an_item_is_out(colour: Colour) -> None:
    """Before the first item it is; after it the consumer would see items twice."""
    attempts: list[int] = []

    @tool(idempotent=True)
    def items(fail_first: bool) -> Iterator[int]:
        attempts.append(1)
        if fail_first and len(attempts) == 1:
            raise ConnectionError("before the first item")
        yield 1
        if not fail_first:
            raise ConnectionError("after the first item")

    @tool(idempotent=True)
    async def async_items(fail_first: bool) -> AsyncIterator[int]:
        for item in items.__wrapped__(fail_first):  # type: ignore[attr-defined]  # wrapt's own
            yield item

    work = items if colour.name == "generator" else async_items
    with Guard(Retry(3, wait=0)).scope():
        assert colour.call(work, True) == 1
        assert len(attempts) == 2
        attempts.clear()
        with pytest.raises(ConnectionError, match="after the first item"):
            colour.call(work, False)
        assert len(attempts) == 1


@plain
def test_an_approval_is_asked_once_for_all_attempts(colour: Colour) -> None:
    """Attempts are no new approvals."""
    flaky = Flaky(2)
    asked: list[Any] = []

    def approve(call: Any) -> bool:
        asked.append(call.arguments)
        return True

    with Guard(ApproveTool(approve), Retry(2, wait=0)).scope():
        assert colour.call(tool(idempotent=True)(colour.make(flaky.__call__)), 5) == "answer 5"
    assert asked == [{"n": 5}]


@plain
def test_an_attempt_that_changed_its_approved_arguments_is_the_last(colour: Colour) -> None:
    """What would run next is not what was approved: approval_mismatch; the caller's own list is untouched."""
    mine = [1, 2]
    seen: list[list[int]] = []

    def body(orders: list[int]) -> None:
        seen.append(list(orders))
        orders.append(3)
        raise ConnectionError

    work = tool(idempotent=True)(colour.make(body))
    with Guard(ApproveTool(lambda call: True), Retry(2, wait=0)).scope(), pytest.raises(ToolCallRefused) as caught:
        colour.call(work, mine)
    assert caught.value.code == "approval_mismatch"
    assert seen == [[1, 2]]
    assert mine == [1, 2]


@plain
def test_the_arguments_that_an_approver_edited_are_those_of_every_attempt(colour: Colour) -> None:
    """The edit holds for the call, not for one attempt."""
    flaky = Flaky(2)
    edit = ApproveTool(lambda call: Approval.edit({"n": 8}))
    with Guard(edit, Retry(2, wait=0)).scope() as run:
        assert colour.call(tool(idempotent=True)(colour.make(flaky.__call__)), 5) == "answer 8"
    assert flaky.calls == [8, 8, 8]
    assert run.steps == 1


def test_an_attempt_that_was_stopped_at_the_last_moment_gives_back_no_step(colour: Colour) -> None:
    """The first attempt used the step: a later one that never starts leaves it used."""
    flaky = Flaky(99)

    def timer() -> float:
        if flaky.calls:
            run.stop()  # after the latch was looked at, while the second attempt is admitted
        return 0.0

    with (
        Guard(Retry(1, wait=0), RateLimit(9, 60, timer=timer)).scope() as run,
        pytest.raises(ToolCallRefused, match="stopped"),
    ):
        colour.call(tool(idempotent=True)(colour.make(flaky.__call__)))
    assert len(flaky.calls) == 1
    assert run.steps == 1


# -- RateLimit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(0, 1), (True, 1), (1.0, 1), (1, 0), (1, -1), (1, float("nan")), (1, 1, -1)])
def test_a_wrong_rate_limit_is_a_configuration_error(arguments: tuple[Any, ...]) -> None:
    """n is an int of at least 1; seconds and wait are numbers."""
    with pytest.raises(ConfigurationError, match="RateLimit"):
        RateLimit(*arguments)


def test_calls_above_the_rate_are_refused_until_the_window_has_moved(colour: Colour) -> None:
    """n in any `seconds`; a refusal uses nothing and says when it may be tried again."""
    clock = Clock()
    work = tool(colour.make(Flaky(0).__call__))
    with Guard(RateLimit(2, 10, timer=clock)).scope() as run:
        colour.call(work, 1)
        clock.advance(4)
        colour.call(work, 2)
        for _ in range(2):
            with pytest.raises(ToolCallRefused, match=r"not run; it may be in 6\.0 s") as caught:
                colour.call(work, 3)
        assert (caught.value.code, caught.value.retry_after, caught.value.limit) == ("rate_limited", 6, 2)
        assert run.steps == 2
        clock.advance(6)
        colour.call(work, 3)
        with pytest.raises(ToolCallRefused):
            colour.call(work, 4)


def test_a_rate_is_kept_per_tool_across_runs_and_threads(colour: Colour) -> None:
    """It protects the far end: process-wide, for each tool."""
    limit = RateLimit(3, 60, timer=Clock())
    one, other = (tool(name=name)(colour.make(Flaky(0).__call__)) for name in ("one", "other"))
    outside = Guard(limit).wrap(one)
    with Guard(limit).scope(), Guard(limit).scope():
        colour.call(one, 1)  # the same limit twice on the chain counts once
    with Guard(limit).scope():
        colour.call(one, 2)
    colour.call(outside, 3)
    with Guard(limit).scope(), pytest.raises(ToolCallRefused, match="one may be called"):
        colour.call(one, 4)
    with Guard(limit).scope():
        colour.call(other, 5)


def test_parallel_calls_never_exceed_the_rate() -> None:
    """Twenty threads and twenty tasks: exactly n bodies run."""
    bodies: list[int] = []
    guard = Guard(RateLimit(5, 60, timer=Clock()))

    @tool
    def work(n: int) -> None:
        bodies.append(n)

    with guard.scope(), ThreadPoolExecutor(20) as pool:
        run = current_run()
        assert run is not None
        outcomes = [pool.submit(run.bind(work), n) for n in range(20)]
        assert sum(outcome.exception() is not None for outcome in outcomes) == 15
    assert len(bodies) == 5


def test_a_call_waits_for_its_turn_as_long_as_it_may(colour: Colour) -> None:
    """`wait` seconds in all; who would have to wait longer is refused at once."""
    guard = Guard(RateLimit(1, 0.1, wait=0.15))
    flaky = Flaky(0)
    work = tool(colour.make(flaky.__call__))
    with guard.scope() as run:
        started = time.monotonic()
        for n in range(3):
            colour.call(work, n)
        assert 0.19 < time.monotonic() - started < 2
        assert run.steps == 3
    with Guard(RateLimit(1, 60, wait=5)).scope():
        colour.call(work, 1)
        started = time.monotonic()
        with pytest.raises(ToolCallRefused, match="may be called 1 times in 60 s"):
            colour.call(work, 2)
        assert time.monotonic() - started < 1


def test_a_wait_ends_even_if_the_clock_stands_still(colour: Colour) -> None:
    """Rounding errors and stopped clocks make no endless loop: what was waited counts."""
    clock = Clock(0.1)
    work = tool(colour.make(Flaky(0).__call__))
    with Guard(RateLimit(1, 0.2, wait=0.005, timer=clock)).scope():
        colour.call(work, 1)
        clock.now = 0.3  # 0.3 - 0.1 < 0.2, and 0.1 + 0.2 - 0.3 is 5e-17
        with pytest.raises(ToolCallRefused, match="may be called"):
            colour.call(work, 2)


def test_parallel_calls_wait_for_their_turns() -> None:
    """Six calls at two in 50 ms with a long wait: all run, never more than two in a window."""
    starts: list[float] = []

    @tool
    async def work(n: int) -> None:
        starts.append(time.monotonic())

    async def main() -> None:
        async with Guard(RateLimit(2, SHORT, wait=LONG)).scope():
            await asyncio.gather(*(work(n) for n in range(6)))

    asyncio.run(main())
    assert len(starts) == 6
    assert all(later - earlier > SHORT * 0.9 for earlier, later in zip(starts, starts[2:], strict=False))


@plain
def test_a_turn_is_given_back_when_the_call_does_not_run(colour: Colour) -> None:
    """Refused by another limit, or denied by a person: the rate is untouched."""
    answers = [False, True]
    guard = Guard(RateLimit(1, 60, timer=Clock()), Budget(usd=1), ApproveTool(lambda call: answers.pop(0)))
    cheap = tool(name="work", cost=1)(colour.make(Flaky(0).__call__))
    dear = tool(name="work", cost=2)(colour.make(Flaky(0).__call__))
    with guard.scope():
        with pytest.raises(BudgetExceeded):
            colour.call(dear, 1)
        with pytest.raises(ToolCallRefused, match="not approved"):
            colour.call(cheap, 1)
        assert colour.call(cheap, 2) == "answer 2"
        with pytest.raises(ToolCallRefused, match="may be called 1 times"):
            colour.call(cheap, 3)


def test_every_attempt_takes_a_turn_and_the_waits_of_a_call_add_up(colour: Colour) -> None:
    """The far end sees attempts, not calls."""
    flaky = Flaky(99)
    clock = Clock()
    guard = Guard(RateLimit(2, 10, wait=0.01, timer=clock), Retry(5, wait=0))
    with guard.scope(), pytest.raises(ToolCallRefused) as caught:
        colour.call(tool(idempotent=True)(colour.make(flaky.__call__)))
    assert caught.value.code == "rate_limited"
    assert len(flaky.calls) == 2
    flaky.calls.clear()
    clock.now = 9.995
    with guard.scope(), pytest.raises(ToolCallRefused):  # the clock stands still: 5 ms and 5 ms, then no more
        colour.call(tool(idempotent=True)(colour.make(flaky.__call__)))
    assert flaky.calls == []


# -- CircuitBreaker --------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(0, 1), (True, 1), (2.5, 1), (1, 0), (1, None), (1, True)])
def test_a_wrong_circuit_breaker_is_a_configuration_error(arguments: tuple[Any, ...]) -> None:
    """failures is an int of at least 1, reset is seconds."""
    with pytest.raises(ConfigurationError, match="CircuitBreaker"):
        CircuitBreaker(*arguments)


def test_a_circuit_opens_lets_one_call_try_and_closes_again(colour: Colour) -> None:
    """Open after so many failures in a row, half open after `reset`, closed when the probe succeeds."""
    clock = Clock()
    flaky = Flaky(3)
    work = tool(colour.make(flaky.__call__))
    with Guard(CircuitBreaker(2, 30, timer=clock)).scope() as run:
        for n in range(2):
            with pytest.raises(ConnectionError):
                colour.call(work, n)
        with pytest.raises(ToolCallRefused, match="failed 2 times in a row") as caught:
            colour.call(work, 2)
        assert (caught.value.code, caught.value.retry_after) == ("circuit_open", 30)
        clock.advance(30)
        with pytest.raises(ConnectionError):
            colour.call(work, 3)  # the probe fails: open for another 30 s
        clock.advance(29)
        with pytest.raises(ToolCallRefused, match=r"in 1\.0 s"):
            colour.call(work, 4)
        clock.advance(1)
        assert colour.call(work, 5) == "answer 5"
        assert colour.call(work, 6) == "answer 6"
        assert flaky.calls == [0, 1, 3, 5, 6]
        assert run.steps == 5


def test_failures_are_counted_in_a_row_and_per_tool(colour: Colour) -> None:
    """A success in between sets them back, and another tool has its own circuit."""
    breaker = CircuitBreaker(2, 30, timer=Clock())
    outcomes = [ConnectionError(), None, ConnectionError(), None]

    def body(n: int) -> None:
        error = outcomes.pop(0)
        if error is not None:
            raise error

    work = tool(colour.make(body))
    broken = tool(name="broken")(colour.make(Flaky(9).__call__))
    with Guard(breaker).scope():
        for n in range(4):
            if outcomes[0] is None:
                colour.call(work, n)
            else:
                with pytest.raises(ConnectionError):
                    colour.call(work, n)
        for n in range(2):
            with pytest.raises(ConnectionError):
                colour.call(broken, n)
    with Guard(breaker).scope():  # process-wide: another run finds it open
        with pytest.raises(ToolCallRefused, match="broken failed 2 times"):
            colour.call(broken, 2)
        outcomes.append(None)
        colour.call(work, 9)


def test_one_call_at_a_time_tries_a_broken_far_end() -> None:
    """Of twenty calls after `reset` one is the probe; the others are refused until it is over."""
    clock = Clock()
    release = asyncio.Event()
    bodies: list[int] = []

    @tool
    async def work(n: int) -> str:
        bodies.append(n)
        if n < 2:
            raise ConnectionError
        await release.wait()
        return "up"

    async def main() -> None:
        async with Guard(CircuitBreaker(2, 30, timer=clock)).scope():
            for n in range(2):
                with pytest.raises(ConnectionError):
                    await work(n)
            clock.advance(30)
            tasks = [asyncio.create_task(work(n)) for n in range(10, 30)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            release.set()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [outcome for outcome in outcomes if outcome == "up"] == ["up"]
            refused = [str(outcome) for outcome in outcomes if isinstance(outcome, ToolCallRefused)]
            assert len(refused) == 19
            assert "when the call that is trying it now has succeeded" in refused[0]
            assert await work(50) == "up"

    asyncio.run(main())
    assert bodies == [0, 1, 10, 50]


def test_calls_that_were_under_way_when_the_circuit_opened_do_not_close_it() -> None:
    """Only the probe says how the far end is now."""
    clock = Clock()
    release = asyncio.Event()

    @tool
    async def work(n: int) -> str:
        if n < 2:
            raise ConnectionError
        await release.wait()
        return "slow"

    async def main() -> None:
        async with Guard(CircuitBreaker(2, 30, timer=clock)).scope():
            early = asyncio.create_task(work(9))
            await asyncio.sleep(0)
            for n in range(2):
                with pytest.raises(ConnectionError):
                    await work(n)
            release.set()
            assert await early == "slow"
            with pytest.raises(ToolCallRefused, match="failed 2 times"):
                await work(10)
            clock.advance(30)
            assert await work(11) == "slow"

    asyncio.run(main())


@plain
def test_refusals_and_interrupts_are_no_failures(colour: Colour) -> None:
    """Only the far end's own failures and our ToolTimeout count; a probe that isn't run frees its place."""
    clock = Clock()
    answers: list[Any] = [False, False, False, True]
    errors: list[BaseException | None] = [ToolCallRefused("budget", "b", "inner", "no")] * 3

    def body(n: int) -> str:
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        return "fine"

    work = tool(colour.make(body))
    gated = tool(name="gated")(colour.make(Flaky(1).__call__))
    guard = Guard(CircuitBreaker(1, 30, timer=clock), ApproveTool(lambda call: answers.pop(0), only="gated"))
    with guard.scope() as run:
        for n in range(3):
            with pytest.raises(ToolCallRefused, match="no"):
                colour.call(work, n)
        assert colour.call(work, 5) == "fine"
        for n in range(3):
            with pytest.raises(ToolCallRefused, match="not approved"):
                colour.call(gated, n)
        with pytest.raises(ConnectionError):
            colour.call(gated, 4)
        clock.advance(30)
        answers += [False, True]
        with pytest.raises(ToolCallRefused, match="not approved"):
            colour.call(gated, 5)  # it would have been the probe
        assert colour.call(gated, 6) == "answer 6"
        assert run.steps == 6


def test_a_timeout_is_a_failure_and_a_cancellation_is_none() -> None:
    """A cancelled probe leaves the circuit as it was: the next call is the probe."""
    clock = Clock()

    @tool(timeout=SHORT)
    async def work(hang: bool) -> str:
        if hang:
            entered.set()
            await asyncio.Event().wait()
        return "fine"

    async def main() -> None:
        nonlocal entered
        entered = asyncio.Event()
        async with Guard(CircuitBreaker(1, 30, timer=clock)).scope():
            with pytest.raises(ToolTimeout):
                await work(True)
            with pytest.raises(ToolCallRefused, match="failed 1 times in a row"):
                await work(False)
            clock.advance(30)
            entered.clear()
            probe = asyncio.create_task(work(True))
            await entered.wait()
            probe.cancel()
            with pytest.raises(asyncio.CancelledError):
                await probe
            assert await work(False) == "fine"

    entered = asyncio.Event()
    asyncio.run(main())


def test_a_circuit_that_opens_ends_the_retries(colour: Colour) -> None:
    """Attempts count as failures; once the circuit is open the rest aren't made."""
    flaky = Flaky(99)
    guard = Guard(CircuitBreaker(2, 30, timer=Clock()), Retry(5, wait=0))
    with guard.scope(), pytest.raises(ToolCallRefused) as caught:
        colour.call(tool(idempotent=True)(colour.make(flaky.__call__)))
    assert caught.value.code == "circuit_open"
    assert len(flaky.calls) == 2


# -- together --------------------------------------------------------------------------------------


def test_the_guardrails_stand_in_their_order_whatever_the_list_says(colour: Colour) -> None:
    """WrapTool ▸ admission ▸ ApproveTool ▸ Retry ▸ Timeout ▸ the tool."""
    order: list[str] = []
    flaky = Flaky(1)

    def hook(call: Any, proceed: Any) -> Any:
        order.append("wrap")
        return (yield from proceed(call))

    def approve(call: Any) -> bool:
        order.append("approve")
        return True

    def body(n: int) -> str:
        order.append(f"body in {threading.current_thread().name}")
        return flaky(n)

    def wait(failures: int) -> float:
        order.append("retry")
        return 0

    guard = Guard(Timeout(LONG), Retry(1, wait), ApproveTool(approve), WrapTool(hook), MaxSteps(1))
    with guard.scope():
        colour.call(tool(idempotent=True)(colour.make(body)), 1)
    thread = "loopguard body" if colour.name == "sync" else "MainThread"
    assert order == ["wrap", "approve", f"body in {thread}", "retry", f"body in {thread}"]
