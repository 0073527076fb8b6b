"""A body that swallows refusals can't spin: rows of refusals in tasks, threads, batches, turns and child runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from loopguard import (
    ApproveTool,
    ConfigurationError,
    Guard,
    LoopGuardWarning,
    LoopHalted,
    LoopLimit,
    LoopResult,
    LoopStopped,
    MaxSteps,
    MaxStepsExceeded,
    Run,
    ToolCallRefused,
    WrapTool,
    charge,
    current_run,
    loop,
    tool,
)
from loopguard import _events as events
from tests.conftest import Colour

both = pytest.mark.parametrize("colour", ["sync", "async"], indirect=True)


@tool
def look(n: int) -> int:
    """A tool."""
    return n


@tool
async def fetch(n: int) -> int:
    """An async tool."""
    await asyncio.sleep(0)
    return n


def closed(**options: Any) -> Guard:
    """A policy that refuses every call."""
    return Guard(MaxSteps(0), **options)


def spin(call: Callable[[int], Any]) -> int:
    """Swallow refusals for ever, as frameworks do."""
    for i in range(100_000):
        try:
            call(i)
        except Exception:  # what is tested: it catches everything it can
            continue
    raise AssertionError("it was never halted")


def test_a_body_that_swallows_refusals_is_halted_at_the_sixth() -> None:
    """Five refusals in a row, and the next call ends the loop from below: the result says so."""
    runs: list[Run] = []

    @loop(max=9, guard=closed())
    def step(n: int) -> int:
        run = current_run()
        assert run is not None
        runs.append(run)
        return spin(look)

    result = step.run(7)
    assert (result.stop_reason, result.completed, result.value, result.iterations) == ("halted", False, 7, 0)
    assert isinstance(result.error, MaxStepsExceeded)
    assert (len(runs), runs[0].refusals, runs[0].steps) == (1, 5, 0)


def test_an_async_body_that_swallows_refusals_is_halted() -> None:
    """The same in a task."""

    @loop(max=9, guard=closed(max_refusals=3))
    async def step(n: int) -> int:
        while True:
            try:
                await fetch(n)
            except ToolCallRefused:
                pass

    result = asyncio.run(step.run(0))
    assert result.stop_reason == "halted"


def test_a_plain_call_of_a_halted_loop_raises_loop_stopped() -> None:
    """No BaseException leaves a loop."""

    @loop(max=9, guard=closed())
    def step(n: int) -> int:
        return spin(look)

    with pytest.raises(LoopStopped, match="halted") as caught:
        step(0)
    assert caught.value.result.stop_reason == "halted"


@pytest.mark.parametrize("max_refusals", [1, 2, 7])
def test_max_refusals_says_how_long_a_row_may_be(max_refusals: int, colour: Colour) -> None:
    """Counted alike in every colour of tool."""
    guarded = tool(colour.make(lambda n: n))
    seen = 0
    with closed(max_refusals=max_refusals).scope("s"):
        for _ in range(max_refusals):
            with pytest.raises(MaxStepsExceeded):
                colour.call(guarded, 1)
            seen += 1
        if colour.name in ("sync", "generator"):
            with pytest.raises(LoopHalted) as caught:
                colour.call(guarded, 1)
            assert caught.value.count == max_refusals
        else:  # each call is a task of its own here: no row in any of them
            with pytest.raises(MaxStepsExceeded):
                colour.call(guarded, 1)
    assert seen == max_refusals


def test_the_halt_says_what_happened() -> None:
    """Data and a sentence: the run, the count, the last refusal."""
    with pytest.raises(LoopStopped) as stopped, closed().scope("agent") as run:
        spin(look)
    halted = stopped.value.__cause__
    assert isinstance(halted, LoopHalted)
    assert (halted.run_id, halted.run_name, halted.count) == (run.id, "agent", 5)
    assert isinstance(halted.refusal, MaxStepsExceeded)
    assert "'agent' was halted after 5 refused calls in a row" in str(halted)


def test_at_the_edge_of_a_scope_a_halt_becomes_an_ordinary_exception() -> None:
    """So that no BaseException reaches a web worker; its result says halted."""
    with pytest.raises(LoopStopped, match="halted") as caught, closed().scope("agent") as run:
        spin(look)
    result = caught.value.result
    assert isinstance(result, LoopResult)
    assert (result.stop_reason, result.run_id, result.name) == ("halted", run.id, "agent")
    assert result.completed is False
    assert isinstance(result.error, MaxStepsExceeded)


def test_at_the_edge_of_an_async_scope_a_halted_task_group_becomes_an_ordinary_exception() -> None:
    """A TaskGroup wraps the halt in a BaseExceptionGroup, which is no better for a web worker."""

    async def swallow() -> None:
        while True:
            try:
                await fetch(1)
            except ToolCallRefused:
                pass

    async def main() -> None:
        async with closed().scope("agent"), asyncio.TaskGroup() as group:
            group.create_task(swallow())
            group.create_task(swallow())

    with pytest.raises(LoopStopped, match="halted") as caught:
        asyncio.run(main())
    assert isinstance(caught.value.__cause__, BaseExceptionGroup)


def test_a_halt_passes_scopes_inside_a_loop_and_ends_the_loop() -> None:
    """A scope with a loop around it is not the edge."""

    @loop(max=9)
    def step(n: int) -> int:
        with closed().scope("detail"):
            return spin(look)

    assert step.run(0).stop_reason == "halted"


def test_a_call_that_comes_through_ends_the_row() -> None:
    """Four refusals, a success, four refusals: nobody is spinning."""
    with Guard(MaxSteps(0, only="look")).scope("s") as run:

        @tool
        def other(n: int) -> int:
            return n

        for i in range(10):
            for _ in range(4):
                with pytest.raises(MaxStepsExceeded):
                    look(1)
            other(i)
    assert (run.refusals, run.steps) == (40, 10)


def test_what_comes_through_elsewhere_does_not_end_the_row() -> None:
    """A thread that spins is halted, though the calls of others come through in between."""

    @tool
    def other(n: int) -> int:
        return n

    with Guard(MaxSteps(0, only="look")).scope("s") as run:
        for i in range(5):
            with pytest.raises(MaxStepsExceeded):
                look(i)
            beside = threading.Thread(target=run.bind(other), args=(i,))
            beside.start()
            beside.join()
        with pytest.raises(LoopHalted):
            look(5)


def test_a_call_that_itself_ends_in_a_refusal_doesnt_end_the_row() -> None:
    """A tool that calls a refused tool has done nothing: delegating doesn't keep a loop alive."""

    @tool
    def delegate(n: int) -> int:
        return look(n)

    with pytest.raises(LoopStopped, match="halted"), Guard(MaxSteps(0, only="look")).scope("s"):
        spin(delegate)


def test_a_call_that_raises_an_error_of_its_own_ends_the_row() -> None:
    """It ran: the body is trying something."""

    @tool
    def fail(n: int) -> int:
        raise ValueError(n)

    with Guard(MaxSteps(0, only="look")).scope("s") as run:
        for i in range(10):
            with pytest.raises(MaxStepsExceeded):
                look(i)
            with pytest.raises(ValueError, match=str(i)):
                fail(i)
    assert run.refusals == 10


@pytest.mark.parametrize("how", ["gather", "task group"])
def test_many_parallel_refusals_are_no_row(how: str) -> None:
    """200 tasks on a cap of 100 with max_refusals=5: 100 bodies, 100 refusals, no halt."""
    bodies, refused = [], []

    @tool
    async def work(n: int) -> None:
        bodies.append(n)
        await asyncio.sleep(0)

    async def one(n: int) -> None:
        try:
            await work(n)
        except MaxStepsExceeded:
            refused.append(n)

    async def main() -> int:
        async with Guard(MaxSteps(100), max_refusals=5).scope("s") as run:
            if how == "gather":
                await asyncio.gather(*map(one, range(200)))
            else:
                async with asyncio.TaskGroup() as group:
                    for n in range(200):
                        group.create_task(one(n))
            return run.refusals

    assert asyncio.run(main()) == 100
    assert (len(bodies), len(refused)) == (100, 100)


def test_gathered_refusals_of_a_loop_body_end_it_gracefully() -> None:
    """Without anybody swallowing: the first refusal ends the loop, with its own reason."""

    @loop(max=9, guard=Guard(MaxSteps(100), max_refusals=5))
    async def step(n: int) -> int:
        await asyncio.gather(*(fetch(1000 * n + i) for i in range(200)))
        return n + 1

    result = asyncio.run(step.run(0))
    assert (result.stop_reason, result.iterations) == ("max_steps", 0)


def test_threads_have_rows_of_their_own() -> None:
    """Twenty threads, two refusals each, are no row of forty."""
    with closed().scope("s") as run:

        def twice(n: int) -> int:
            caught = 0
            for i in range(2):
                try:
                    look(n + i)
                except MaxStepsExceeded:
                    caught += 1
            return caught

        fresh = [threading.Thread(target=run.bind(twice), args=(n,)) for n in range(20)]
        for thread in fresh:
            thread.start()
        for thread in fresh:
            thread.join()
        assert run.refusals == 40
        assert run.halted is None


def test_fresh_tasks_for_every_call_are_halted_too() -> None:
    """`while True: await gather(*map(swallow, calls))`: no task has a row, but the run gets nowhere."""
    rounds = 0

    async def swallow(n: int) -> None:
        try:
            await fetch(n)
        except ToolCallRefused:
            pass

    @loop(max=9, guard=closed(max_refusals=2))
    async def step(n: int) -> int:
        nonlocal rounds
        while rounds < 10_000:
            rounds += 1
            await asyncio.gather(*map(swallow, range(5)))
        return n

    result = asyncio.run(step.run(0))
    assert result.stop_reason == "halted"
    assert 40 <= rounds <= 42  # 100 × max_refusals refusals with nothing admitted between


def test_refusals_in_fresh_tasks_are_forgotten_once_something_comes_through() -> None:
    """199 of them before each success, under a ceiling of 200: nobody is halted."""

    @tool
    async def other(n: int) -> int:
        return n

    async def main() -> None:
        with Guard(MaxSteps(0, only="fetch"), max_refusals=2).scope("s"):
            for n in range(3):
                seen = await asyncio.gather(*map(fetch, range(199)), return_exceptions=True)
                assert all(isinstance(outcome, MaxStepsExceeded) for outcome in seen)
                await other(n)

    asyncio.run(main())


def test_a_halted_scope_tells_what_it_had_to_warn_of() -> None:
    """The result that LoopStopped carries has the warnings of the run."""

    @tool
    def unpriced(n: int) -> int:
        charge(usd=1)
        return n

    def spin() -> None:
        with pytest.warns(LoopGuardWarning, match="unpriced"):
            unpriced(1)
        while True:
            with contextlib.suppress(ToolCallRefused):
                unpriced(2)

    with pytest.raises(LoopStopped) as caught, Guard(MaxSteps(1), max_refusals=1).scope("s"):
        spin()
    assert any("unpriced" in warning for warning in caught.value.result.warnings)


def test_a_halt_is_latched_however_often_it_is_swallowed() -> None:
    """Fresh tasks, a success in a sibling run, a garbage collection: the halted run stays halted."""

    async def call() -> str:
        try:
            await fetch(1)
        except ToolCallRefused:
            return "refused"
        except LoopHalted:
            return "halted"
        return "ran"

    async def row() -> list[str]:
        return [await call() for _ in range(6)]

    async def main() -> list[str]:
        async with Guard().scope("parent"):
            with closed().scope("child"):
                seen = await asyncio.create_task(row())
                gc.collect()
            async with Guard().scope("sibling"):
                seen.append(await call())
            return seen

    async def one() -> list[str]:
        async with Guard().scope("parent") as parent:
            child = closed().scope("child")
            with child as run:
                await asyncio.create_task(row())
            gc.collect()
            assert run.halted is not None
            assert parent.halted is None
            inside = run.bind(call)
            sibling = await call()
            return [sibling, await inside()]

    assert asyncio.run(main()) == ["refused"] * 5 + ["halted", "ran"]
    assert asyncio.run(one())[0] == "ran"


def test_a_halted_run_stays_halted_after_its_task_is_gone_and_a_sibling_came_through() -> None:
    """The row went with its task, the latch didn't."""

    async def call() -> str:
        try:
            await fetch(1)
        except ToolCallRefused:
            return "refused"
        except LoopHalted:
            return "halted"
        return "ran"

    async def row() -> str:
        return [await call() for _ in range(6)][-1]

    async def main() -> tuple[str, str, str]:
        async with Guard().scope("parent") as parent:
            with closed().scope("child"):
                first = await asyncio.create_task(row())
                gc.collect()
                between = await parent.bind(call)()
                return first, between, await call()

    assert asyncio.run(main()) == ("halted", "ran", "halted")


def test_the_row_runs_through_child_runs_and_stops_the_innermost_that_is_long_enough() -> None:
    """Inner loops that are refused once each end gracefully, but the outer one isn't getting anywhere."""
    inner_runs = []

    @loop(max=2, guard=closed())
    def inner(n: int) -> int:
        run = current_run()
        assert run is not None
        inner_runs.append(run)
        return look(n)

    @loop(max=3, name="outer")
    def outer(n: int) -> int:
        while len(inner_runs) < 1000:
            assert inner.run(n).stop_reason == "max_steps"
        return n

    result = outer.run(0)
    assert (result.stop_reason, result.name, len(inner_runs)) == ("halted", "outer", 6)


@pytest.mark.parametrize(("before", "halted"), [(0, "inner"), (2, "outer")])
def test_a_run_counts_only_refusals_since_it_began(before: int, halted: str) -> None:
    """Five in the inner loop halt that; two before it and three in it are five of the outer loop only."""
    results = []

    @loop(max=9, guard=closed())
    def inner(n: int) -> int:
        return spin(look)

    @loop(max=1, guard=Guard(max_refusals=5))
    def outer(n: int) -> int:
        for _ in range(before):
            with closed().scope("before"), pytest.raises(MaxStepsExceeded):
                look(n)
        results.append(inner.run(n))
        return n + 1

    results.append(outer.run(0))
    assert [result.name for result in results if result.stop_reason == "halted"] == [halted]


def test_the_innermost_guard_that_sets_max_refusals_decides() -> None:
    """One that leaves it alone inherits, and a tool's own guard stands on the outermost run."""
    for outer, inner, expected in ((3, None, 3), (3, 2, 2), (2, 4, 4), (None, None, 5)):
        outer_guard = Guard() if outer is None else Guard(max_refusals=outer)
        inner_guard = closed() if inner is None else closed(max_refusals=inner)
        with pytest.raises(LoopStopped), outer_guard.scope("outer"), inner_guard.scope("inner") as run:
            spin(look)
        assert run.refusals == expected

    guarded = tool(guard=closed(max_refusals=2))(lambda n: n)
    with pytest.raises(LoopStopped), Guard().scope("s") as run:
        spin(guarded)
    assert run.refusals == 2


def test_outside_any_run_nothing_is_halted() -> None:
    """There is nobody to halt: each call is refused."""
    guarded = tool(guard=closed(max_refusals=2))(lambda n: n)
    for _ in range(20):
        with pytest.raises(MaxStepsExceeded):
            guarded(1)


@both
def test_sync_tools_called_off_the_event_loop_are_one_row(colour: Colour) -> None:
    """acall runs each in a thread of its own; the row belongs to the task that awaits them."""
    if colour.name == "sync":
        guard = closed()
        guard.tool(look)

        async def call(n: int) -> Any:
            return await guard.acall("look", {"n": n})
    else:
        guard = closed()

        async def call(n: int) -> Any:
            return await look.acall(n)

    calls = 0

    @loop(max=9, guard=guard)
    async def step(n: int) -> int:
        nonlocal calls
        while calls < 1000:
            calls += 1
            try:
                await call(n)
            except ToolCallRefused:
                pass
        return n

    result = asyncio.run(step.run(0))
    assert (result.stop_reason, calls) == ("halted", 6)


def test_a_hook_sees_the_refusals_and_the_row_is_the_same() -> None:
    """Through a WrapTool the row is counted once."""
    seen = []

    def watch(call: Any, proceed: Any) -> Any:
        try:
            return (yield from proceed(call))
        except ToolCallRefused as refusal:
            seen.append(refusal.code)
            raise

    with pytest.raises(LoopStopped), Guard(MaxSteps(0), WrapTool(watch)).scope("s") as run:
        spin(look)
    assert seen == ["max_steps"] * 5
    assert run.refusals == 5


# -- a model's mistakes ----------------------------------------------------------------------------


def message(*uses: tuple[str, Any]) -> dict[str, Any]:
    """A model's turn that wants these tools."""
    blocks = [
        {"type": "tool_use", "id": f"toolu_{i}", "name": name, "input": given} for i, (name, given) in enumerate(uses)
    ]
    return {"role": "assistant", "content": blocks}


@both
def test_a_model_that_misspells_an_argument_for_ever_is_halted(colour: Colour) -> None:
    """Through run_tools and arun_tools: a turn is one refusal, the sixth turn ends the loop."""
    guard = Guard()
    guard.tool(look)
    turns = 0

    def body(n: int) -> int:
        nonlocal turns
        while turns < 1000:
            turns += 1
            results = guard.run_tools(message(("look", {"m": 1}), ("look", {"m": 2})))
            assert [block["is_error"] for block in results] == [True, True]
        return n

    async def async_body(n: int) -> int:
        nonlocal turns
        while turns < 1000:
            turns += 1
            results = await guard.arun_tools(message(("look", {"m": 1}), ("look", {"m": 2})))
            assert [block["is_error"] for block in results] == [True, True]
        return n

    step = loop(max=3, guard=guard)(body if colour.name == "sync" else async_body)
    result = colour.call(step.run, 0)
    assert (result.stop_reason, turns) == ("halted", 6)


@pytest.mark.parametrize(("name", "arguments"), [("look", {"m": 1}), ("look", "{"), ("lok", {"n": 1})])
def test_a_wrong_call_by_name_uses_no_step_and_counts_as_a_refusal(name: str, arguments: Any) -> None:
    """Misspelt, malformed or unknown: five of them, and the next is the halt. Events say the same."""
    seen: list[events.Event] = []
    guard = Guard(on_event=seen.append)
    guard.tool(look)
    with guard.scope("s") as run:
        for _ in range(5):
            with pytest.raises(ValueError, match="n" if name == "look" else "look"):
                guard.call(name, arguments)
        with pytest.raises(LoopHalted):
            guard.call(name, arguments)
    assert (run.steps, run.refusals) == (0, 5)
    refused = [event for event in seen if isinstance(event, events.ToolRefused)]
    assert [(event.tool, event.code, event.guardrail) for event in refused] == [
        (name, "invalid_arguments" if name == "look" else "unknown_tool", "Guard")
    ] * 5


def test_a_batch_with_a_good_call_in_it_ends_the_row() -> None:
    """A model that gets one thing right in every turn is getting somewhere."""
    guard = Guard()
    guard.tool(look)
    with guard.scope("s") as run:
        for i in range(20):
            good, bad = guard.run_tools(message(("look", {"n": i}), ("look", {"m": i})))
            assert ("is_error" in good and good["is_error"], bad["is_error"]) == (False, True)
    assert (run.steps, run.refusals) == (20, 20)


def test_a_batch_of_many_refusals_is_one_refusal_of_the_row() -> None:
    """Thirty parallel refusals in one turn don't halt anybody; five such turns do."""
    guard = closed()
    guard.tool(look)
    turn = message(*(("look", {"n": i}) for i in range(30)))
    with guard.scope("s") as run:
        for _ in range(5):
            assert all(block["is_error"] for block in guard.run_tools(turn))
        with pytest.raises(LoopHalted):
            guard.run_tools(turn)
    assert run.refusals == 150


def test_an_agent_inside_a_batch_is_halted_like_any_other() -> None:
    """The turn's leniency is for its own calls, not for what a sub-agent in it swallows."""
    guard = Guard(MaxSteps(0, only="look"))
    guard.tool(look)
    results = []

    @guard.tool
    def delegate(n: int) -> int:
        @loop(max=2)
        def sub(n: int) -> int:
            return spin(look)

        results.append(sub.run(n))
        return n

    @guard.tool
    def swallow(n: int) -> int:
        return spin(look)

    with guard.scope("s"):
        guard.run_tools(message(("delegate", {"n": 1})))
    assert [result.stop_reason for result in results] == ["halted"]

    with pytest.raises(LoopStopped), guard.scope("s"):
        guard.run_tools(message(("swallow", {"n": 1})))


def test_a_halt_inside_run_tools_is_no_error_result() -> None:
    """A model can't talk its way around it."""
    guard = closed(max_refusals=1)
    guard.tool(look)
    with guard.scope("s"):
        guard.run_tools(message(("look", {"n": 1})))
        with pytest.raises(LoopHalted):
            guard.run_tools(message(("look", {"n": 1})))


def test_observed_refusals_are_no_row() -> None:
    """What isn't refused isn't swallowed."""
    with Guard(MaxSteps(0), LoopLimit(1), mode="observe").scope("s") as run:
        for _ in range(50):
            look(1)
    assert (run.steps, run.refusals) == (50, 0)


@pytest.mark.parametrize("value", [0, -1, True, None, 2.0, "5"])
def test_max_refusals_is_an_int_of_at_least_one(value: Any) -> None:
    """Anything else is a ConfigurationError that says so."""
    with pytest.raises(ConfigurationError, match=r"max_refusals=.*int of at least 1"):
        Guard(max_refusals=value)


def test_a_turn_in_which_something_ran_ends_the_row_before_it() -> None:
    """Refusals of turns before and after a good one are two rows, neither of which is long enough."""
    guard = Guard(ApproveTool(lambda call: call.arguments["n"] > 0), LoopLimit(0), max_refusals=3)

    @guard.tool
    def work(n: int) -> int:
        return n

    def turn(*numbers: int) -> list[dict[str, Any]]:
        blocks = [{"type": "tool_use", "id": f"t{n}", "name": "work", "input": {"n": n}} for n in numbers]
        return guard.run_tools(blocks)

    with guard.scope("turns"):
        turn(-1)
        turn(-2)
        assert [result.get("is_error", False) for result in turn(-3, 1)] == [True, False]
        turn(-4)
        turn(-5)
        assert turn(2)[0]["content"].startswith("2")
