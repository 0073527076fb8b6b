"""Runs and scopes from the user's side: where am I, what is left, and what crosses threads, tasks and processes."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import loopguard
from loopguard import (
    ApproveTool,
    Budget,
    ConfigurationError,
    Guard,
    LoopGuardWarning,
    LoopLimit,
    MaxSteps,
    MaxStepsExceeded,
    Run,
    ToolCallRefused,
    charge,
    configure,
    current_call,
    current_run,
    loop,
    tool,
)
from loopguard import _events as events
from loopguard._config import settings
from tests.conftest import Colour


@tool
def look(n: int) -> int:
    """A tool."""
    return n


@tool
async def fetch(n: int) -> int:
    """An async tool."""
    await asyncio.sleep(0)
    return n


@loop(max=3)
def count(n: int) -> int:
    """A loop."""
    return n + 1


class Agent:
    """Methods that are tools and loops."""

    def __init__(self, step: int = 1) -> None:
        self.size = step

    @tool
    def look(self, n: int) -> int:
        """A tool."""
        return n + self.size

    @loop(max=3)
    def count(self, n: int) -> int:
        """A loop."""
        return n + self.size

    @loop(max=3)
    @classmethod
    def of_class(cls, n: int) -> int:
        """A loop of the class."""
        return n + 1

    @tool
    @staticmethod
    def static(n: int) -> int:
        """A tool of nobody."""
        return n


# -- scopes ----------------------------------------------------------------------------------------


def test_a_scope_is_a_run_while_it_lasts() -> None:
    """Outside there is none; scopes nest; names needn't be unique, ids are."""
    assert current_run() is None
    with Guard().scope("agent") as outer:
        assert current_run() is outer
        assert (outer.name, outer.parent, outer.iteration, outer.max) == ("agent", None, 0, None)
        with Guard().scope("agent") as inner:
            assert current_run() is inner
            assert inner.parent is outer
            assert inner.id != outer.id
        assert current_run() is outer
    assert current_run() is None


@pytest.mark.parametrize("name", ["", 3, None])
def test_the_name_of_a_scope_is_a_text(name: Any) -> None:
    """Refusals and spans show it."""
    with pytest.raises(ConfigurationError, match=r"scope\(.*give a text"):
        Guard().scope(name)


def test_an_async_scope_is_the_same() -> None:
    """`async with` works alike."""

    async def main() -> None:
        async with Guard(MaxSteps(1)).scope("agent") as run:
            assert current_run() is run
            await fetch(1)
            with pytest.raises(MaxStepsExceeded):
                await fetch(2)
        assert current_run() is None

    asyncio.run(main())


def test_a_scope_lets_exceptions_pass_and_is_left_all_the_same() -> None:
    """Unchanged, refusals as well."""
    boom = ValueError("boom")
    with pytest.raises(ValueError, match="boom") as caught, Guard().scope("s"):
        raise boom
    assert caught.value is boom
    assert current_run() is None
    with pytest.raises(MaxStepsExceeded), Guard(MaxSteps(0)).scope("s"):
        look(1)


def test_a_scope_tells_its_beginning_and_its_end() -> None:
    """As events, with its parent and why it was left."""
    seen: list[events.Event] = []
    outer_scope, inner_scope = Guard(on_event=seen.append).scope("outer"), Guard(MaxSteps(0)).scope("inner")
    with pytest.raises(MaxStepsExceeded), outer_scope as outer, inner_scope:
        look(1)
    started = [event for event in seen if isinstance(event, events.RunStarted)]
    ended = [event for event in seen if isinstance(event, events.RunEnded)]
    assert [(event.name, event.kind, event.parent_id) for event in started] == [
        ("outer", "scope", None),
        ("inner", "scope", outer.id),
    ]
    assert [(event.stop_reason, event.duration >= 0) for event in ended] == [("max_steps", True)] * 2


def test_one_scope_object_may_be_entered_again_and_again() -> None:
    """One after another, and within itself: each time a run of its own."""
    scope = Guard(MaxSteps(1)).scope("s")
    runs = []
    for n in range(2):
        with scope as run:
            look(n)
            runs.append(run)
            with scope as inner:
                assert inner.parent is run
    assert runs[0] is not runs[1]
    assert current_run() is None


def test_one_scope_object_may_be_entered_by_many_tasks_at_once() -> None:
    """Each task leaves the run that it entered, in whatever order."""
    scope = Guard(MaxSteps(3)).scope("s")

    async def work(n: int, gate: asyncio.Event, after: asyncio.Event) -> int:
        async with scope as run:
            after.set()
            await gate.wait()
            assert current_run() is run
            for i in range(3):
                await fetch(10 * n + i)
            steps = run.steps
        assert current_run() is None
        return steps

    async def main() -> list[int]:
        gates = [asyncio.Event() for _ in range(3)]
        entered = [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.create_task(work(n, gates[n], entered[n])) for n in range(3)]
        for event in entered:
            await event.wait()
        for n in (0, 2, 1):  # not the order in which a stack would be left
            gates[n].set()
            await tasks[n]
        return [task.result() for task in tasks]

    assert asyncio.run(main()) == [3, 3, 3]


def test_leaving_a_scope_in_another_context_never_raises() -> None:
    """As fixtures, generators and servers' callbacks do."""
    scope = Guard().scope("s")
    run = contextvars.copy_context().run(scope.__enter__)
    scope.__exit__(None, None, None)
    assert run.ended
    assert current_run() is None

    async def main() -> None:
        async def items() -> AsyncIterator[int]:
            async with Guard().scope("s"):
                yield 1
                yield 2

        generator = items()
        await asyncio.create_task(generator.__anext__())  # type: ignore[arg-type]  # an awaitable of another kind
        await asyncio.create_task(generator.aclose())
        assert current_run() is None

    asyncio.run(main())


def test_leaving_a_scope_in_another_thread_never_raises() -> None:
    """The run is over for everybody."""
    scope = Guard().scope("s")
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(scope.__enter__).result()
        scope.__exit__(None, None, None)
        assert run.ended
        with pytest.raises(ToolCallRefused, match="has ended"):
            pool.submit(look, 1).result()


def test_a_scope_in_a_generator_leaks_nothing_to_its_consumer_when_it_is_dropped() -> None:
    """A generator that is abandoned inside its scope leaves the consumer where it was."""

    def items() -> Iterator[int]:
        with Guard().scope("s"):
            yield 1

    with Guard().scope("mine") as mine:
        generator = items()
        next(generator)
        generator.close()
        assert current_run() is mine


# -- ends and stops --------------------------------------------------------------------------------


def test_a_call_that_arrives_after_its_run_ended_is_refused(colour: Colour) -> None:
    """Whoever kept the context: the code is `stopped`, and the reason says why."""
    bodies = []
    guarded = tool(colour.make(bodies.append))
    with Guard().scope("agent") as run:
        colour.call(guarded, 1)
        late = run.bind(lambda: colour.call(guarded, 2))
    with pytest.raises(ToolCallRefused, match="'agent' has ended") as caught:
        late()
    assert (caught.value.code, caught.value.source, caught.value.run_id) == ("stopped", "agent", run.id)
    assert bodies == [1]


def test_a_task_that_outlives_its_loop_is_refused_its_tools() -> None:
    """Fire and forget doesn't escape the ceiling."""

    @loop(max=1)
    async def step(n: int) -> asyncio.Task[int]:
        async def straggler() -> int:
            await gate.wait()
            return await fetch(n)

        return asyncio.create_task(straggler())

    gate = asyncio.Event()

    async def main() -> None:
        task: Any = await step(1)
        gate.set()
        with pytest.raises(ToolCallRefused, match="has ended"):
            await task

    asyncio.run(main())


def test_a_child_of_an_ended_run_is_refused_too() -> None:
    """The latch of any run of the chain holds."""
    outer, inner = Guard().scope("outer"), Guard().scope("inner")
    outer.__enter__()
    elsewhere = contextvars.copy_context()
    call = elsewhere.run(inner.__enter__).bind(look)
    assert call(1) == 1
    outer.__exit__(None, None, None)
    with pytest.raises(ToolCallRefused, match="'outer' has ended"):
        call(2)
    elsewhere.run(inner.__exit__, None, None, None)


def test_stop_refuses_every_later_call_and_ends_the_loop() -> None:
    """However often the refusal is swallowed; the reason is in it."""
    seen = []

    @loop(max=9)
    def step(n: int) -> int:
        run = current_run()
        assert run is not None
        look(n)
        run.stop("the user pressed stop")
        for i in range(3):
            try:
                look(100 + i)
            except ToolCallRefused as refusal:
                seen.append((refusal.code, refusal.reason))
        return n + 1

    result = step.run(0)
    assert seen == [("stopped", "the user pressed stop")] * 3
    assert (result.stop_reason, result.completed, result.value, result.iterations) == ("stopped", False, 1, 1)
    assert "the user pressed stop" in str(result.error)


def test_stop_in_the_last_iteration_is_told_as_such() -> None:
    """Whatever has been swallowed: a stopped loop hasn't come to its end."""

    @loop(max=1)
    def step(n: int) -> int:
        run = current_run()
        assert run is not None
        run.stop()
        return n + 1

    result = step.run(0)
    assert (result.stop_reason, result.completed, result.value) == ("stopped", False, 1)


def test_stop_works_from_another_thread() -> None:
    """Which is where a user interface lives."""
    runs: list[Run] = []
    entered, stopped = threading.Event(), threading.Event()

    def press() -> None:
        entered.wait()
        runs[0].stop("from outside")
        stopped.set()

    @loop(max=9)
    def step(n: int) -> int:
        run = current_run()
        assert run is not None
        runs.append(run)
        entered.set()
        stopped.wait()
        return n + 1

    thread = threading.Thread(target=press)
    thread.start()
    result = step.run(0)
    thread.join()
    assert (result.stop_reason, result.iterations) == ("stopped", 1)


def test_stopping_an_outer_run_ends_its_loop_and_stopping_an_inner_one_only_that() -> None:
    """A stop reaches downwards, never upwards."""

    def make(level: str) -> Any:
        @loop(max=9)
        def inner(n: int) -> int:
            run = current_run()
            assert run is not None
            assert run.parent is not None
            (run.parent if level == "outer" else run).stop()
            look(n)
            return n + 1

        @loop(max=2)
        def outer(n: int) -> int:
            return n + inner.run(0).iterations + 1

        return outer.run(0)

    stopped, ran = make("outer"), make("inner")
    assert (stopped.stop_reason, stopped.iterations) == ("stopped", 0)
    assert (ran.stop_reason, ran.value) == ("max_iterations", 2)


# -- threads ---------------------------------------------------------------------------------------


def test_bind_carries_the_run_into_a_thread_and_an_executor() -> None:
    """The calls count there, and the context comes along."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    seen = []

    def work(n: int) -> None:
        seen.append((current_run(), variable.get(), look(n)))

    with Guard(MaxSteps(3)).scope("s") as run, ThreadPoolExecutor(2) as pool:
        variable.set("set")
        thread = threading.Thread(target=run.bind(work), args=(1,))
        thread.start()
        thread.join()
        list(pool.map(run.bind(work), [2, 3]))
        with pytest.raises(MaxStepsExceeded):
            pool.submit(run.bind(work), 4).result()
        assert run.steps == 3
    assert sorted(n for _, _, n in seen) == [1, 2, 3]
    assert all(where is run and value == "set" for where, value, _ in seen)


def test_one_bound_function_runs_in_many_threads_at_once() -> None:
    """A context can be entered only once, so each call gets a copy."""
    barrier = threading.Barrier(4)
    with Guard().scope("s") as run, ThreadPoolExecutor(4) as pool:
        bound = run.bind(lambda n: (barrier.wait(), look(n))[1])
        assert sorted(pool.map(bound, range(4))) == [0, 1, 2, 3]
        assert run.steps == 4


def test_bind_keeps_name_and_kind() -> None:
    """Tools, methods, lambdas and coroutine functions."""
    with Guard().scope("s") as run:
        assert run.bind(look).__name__ == "look"
        assert run.bind(Agent(2).look)(1) == 3
        assert asyncio.run(run.bind(fetch)(1)) == 1
        assert run.steps == 2


def test_a_bound_coroutine_function_runs_in_its_run_from_anywhere() -> None:
    """Another event loop in another thread."""

    async def work(n: int) -> Run | None:
        await fetch(n)
        return current_run()

    with Guard().scope("s") as run, ThreadPoolExecutor(1) as pool:
        bound = run.bind(work)
        assert pool.submit(lambda: asyncio.run(bound(1))).result() is run
        assert run.steps == 1


def test_whatever_is_called_can_be_bound_but_generators_say_how() -> None:
    """A generator's body would run where it is consumed: bind what consumes it."""

    class Caller:
        async def __call__(self, n: int) -> int:
            return await fetch(n)

    def items(n: int) -> Iterator[int]:
        yield look(n)

    async def async_items(n: int) -> AsyncIterator[int]:
        yield look(n)

    with Guard().scope("s") as run:
        assert asyncio.run(run.bind(Caller())(1)) == 1
        assert asyncio.run(run.bind(functools.partial(fetch, 1))()) == 1
        for generator in (items, async_items, tool(items)):
            with pytest.raises(ConfigurationError, match="bind the function that iterates"):
                run.bind(generator)
        assert run.bind(lambda: list(items(1)))() == [1]
        assert run.steps == 3


def test_bound_inside_a_tool_it_stays_in_that_tool() -> None:
    """What a helper thread charges is the tool's cost."""

    @tool(cost=1)
    def pay(n: int) -> None:
        run = current_run()
        assert run is not None
        calls = []

        def helper() -> None:
            calls.append(current_call())
            charge(usd=0.25)

        thread = threading.Thread(target=run.bind(helper))
        thread.start()
        thread.join()
        assert calls == [current_call()]

    with Guard(Budget(usd=5)).scope("s") as run:
        pay(1)
        assert run.spent() == Decimal("0.25")


def test_a_thread_that_lost_its_run_is_warned_about_once() -> None:
    """The warning names run.bind; the call goes on, outside."""

    @tool
    def lost(n: int) -> int:
        return n

    with Guard(MaxSteps(0)).scope("s") as run, ThreadPoolExecutor(1, thread_name_prefix="worker") as pool:
        with pytest.warns(LoopGuardWarning, match=r"lost .* thread 'worker_0'.*run\.bind") as caught:
            assert list(pool.map(lost, [1, 2])) == [1, 2]
        assert len(caught) == 1
        with pytest.raises(MaxStepsExceeded):
            pool.submit(run.bind(lost), 3).result()


def test_nobody_is_warned_where_no_run_was_lost() -> None:
    """No run elsewhere, a task beside a run, our own threads, a thread with a run of its own."""

    @tool
    def fine(n: int) -> int:
        return n

    async def beside() -> None:
        entered, done = asyncio.Event(), asyncio.Event()

        async def other() -> None:
            async with Guard().scope("other"):
                entered.set()
                await done.wait()

        task = asyncio.create_task(other())
        await entered.wait()
        fine(1)
        await fine.acall(2)
        done.set()
        await task

    def own() -> None:
        with Guard().scope("own"):
            fine(1)
        fine(2)

    gc.collect()  # a scope that another test entered and never left is over with its last reference
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(fine, 1).result()
            pool.submit(own).result()
            with Guard().scope("s") as run:
                pool.submit(run.bind(fine), 1).result()
        asyncio.run(beside())
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.parametrize("how", ["option", "configure"])
def test_require_run_refuses_calls_outside_any_run(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code no_run, and inside a run all is well."""
    monkeypatch.setattr(settings, "require_run", False)
    guarded = tool(require_run=how == "option")(lambda n: n)
    if how == "configure":
        assert guarded(0) == 0
        configure(require_run=True)
    with pytest.raises(ToolCallRefused, match="inside a loop or scope") as caught:
        guarded(1)
    assert caught.value.code == "no_run"
    with Guard().scope("s"):
        assert guarded(1) == 1


# -- other libraries' event loops ------------------------------------------------------------------


def drive(awaitable: Any) -> Any:
    """Run a coroutine without asyncio, as trio would."""
    step = awaitable.__await__()
    try:
        while True:
            next(step)
    except StopIteration as stop:
        return stop.value


def _outside_asyncio() -> dict[str, Callable[[], Any]]:
    guard = Guard()
    guard.tool(look)

    @loop(max=2)
    async def step(n: int) -> int:
        return n

    @tool
    async def items(n: int) -> AsyncIterator[int]:
        yield n

    async def scope() -> None:
        async with Guard().scope("s"):
            pass

    return {
        "loop": lambda: step(1),
        "loop.run": lambda: step.run(1),
        "tool": lambda: fetch(1),
        "generator": lambda: items(1).__anext__(),
        "acall": lambda: look.acall(1),
        "guard.acall": lambda: guard.acall("look", {"n": 1}),
        "scope": scope,
    }


@pytest.mark.parametrize("name", _outside_asyncio())
def test_without_asyncio_it_is_a_configuration_error(name: str) -> None:
    """Under trio everything async says so at once, and nothing has been counted."""
    with Guard().scope("s") as run:
        with pytest.raises(ConfigurationError, match="asyncio only"):
            drive(_outside_asyncio()[name]())
        assert (run.steps, run.children) == (0, 0)


# -- what is left ----------------------------------------------------------------------------------


def test_brief_says_what_is_left_in_one_sentence() -> None:
    """As it goes to a model: tool calls, money, iterations."""
    said = []

    @tool(cost=0.04)
    def pay(n: int) -> None: ...

    @loop(max=5, guard=Guard(MaxSteps(20), Budget(usd=2)))
    def step(n: int) -> int:
        pay(n)
        run = current_run()
        assert run is not None
        said.append(run.brief())
        return n + 1

    step(0)
    assert said[2] == "Used so far: 3 of 20 tool calls, $0.12 of $2.00, iteration 3 of 5."


def test_a_question_moves_the_deadline_by_the_time_it_took() -> None:
    """And by no more."""
    started = time.monotonic()
    run = Run("agent", timeout=60)
    before = run.deadline
    run.asking()
    run.asked()
    assert before is not None
    assert run.deadline is not None
    assert 0 <= run.deadline - before <= time.monotonic() - started


def test_brief_names_the_tightest_limit_of_each_kind() -> None:
    """A child's own large allowance is no comfort where the parent's is nearly used up."""
    with Guard(MaxSteps(3)).scope("outer") as outer:
        look(1)
        look(2)
        with Guard(MaxSteps(100)).scope("inner") as inner:
            assert inner.brief() == "Used so far: 2 of 3 tool calls."
            assert inner.remaining("steps") == 1
        with Guard(MaxSteps(1)).scope("inner") as inner:
            look(3)
            assert inner.brief() == "Used so far: 1 of 1 tool calls."
        assert outer.remaining("steps") == 0


def test_brief_is_empty_where_nothing_is_limited() -> None:
    """No limits, nothing to say."""
    with Guard().scope("s") as run:
        look(1)
        assert run.brief() == ""
        assert run.remaining() is None
        assert run.remaining("steps") is None


def test_a_limit_on_some_tools_is_not_what_is_left_for_all() -> None:
    """`only=` bounds some calls, not the run."""
    with Guard(MaxSteps(1, only="nothing_*"), MaxSteps(5)).scope("s") as run:
        look(1)
        assert run.brief() == "Used so far: 1 of 5 tool calls."
        assert run.remaining("steps") == 4
    with Guard(MaxSteps(1, only="nothing_*")).scope("s") as run:
        assert run.remaining("steps") is None


def test_steps_and_tool_calls_are_one_thing() -> None:
    """MaxSteps and Budget(tool_calls=) cap the same count."""
    with Guard(MaxSteps(5), Budget(tool_calls=3)).scope("s") as run:
        look(1)
        assert run.spent("steps") == run.spent("tool_calls") == 1
        assert run.remaining("steps") == run.remaining("tool_calls") == 2


def test_spent_reserved_and_remaining_are_decimals_of_the_tightest_chain() -> None:
    """A call in flight is reserved; what is over is spent; a parent bounds its child."""
    seen = []

    @tool(cost=1)
    def pay(n: int) -> None:
        run = current_run()
        assert run is not None
        seen.append((run.spent(), run.reserved(), run.remaining()))

    with Guard(Budget(usd=3)).scope("outer") as outer, Guard(Budget(usd=100)).scope("inner") as inner:
        pay(1)
        assert (inner.spent(), inner.reserved(), inner.remaining()) == (1, 0, 2)
        assert outer.spent("usd") == 1
        assert inner.spent("credits") == 0
        assert inner.remaining("credits") is None
        assert all(isinstance(inner.spent(unit), Decimal) for unit in ("usd", "steps", "credits"))
    assert seen == [(0, 1, 2)]


def test_past_four_fifths_of_a_limit_run_tools_asks_to_finish() -> None:
    """The last result of the turn says what is left; before that nothing is said."""
    guard = Guard(MaxSteps(5))
    guard.tool(look)

    def turn(n: int) -> str:
        block = {"type": "tool_use", "id": f"toolu_{n}", "name": "look", "input": {"n": n}}
        return str(guard.run_tools({"role": "assistant", "content": [block]})[-1]["content"])

    with guard.scope("s"):
        said = [turn(n) for n in range(5)]
    assert said[:3] == ["0", "1", "2"]
    assert "4 of 5 tool calls" in said[3]
    assert "finish now" in said[3]


# -- identity --------------------------------------------------------------------------------------


def test_run_id_names_a_run() -> None:
    """`.run(…, run_id=)`; by default ids are unique."""

    @loop(max=1)
    def step(n: int) -> int:
        run = current_run()
        assert run is not None
        return n + (run.id == "order-42")

    assert step.run(0, run_id="order-42").value == 1
    assert step.run(0, run_id="order-42").run_id == "order-42"
    assert len({step.run(0).run_id for _ in range(100)}) == 100


@pytest.mark.parametrize("run_id", ["", "a b", "ä", "x" * 201, "a\n", 5])
def test_a_run_id_that_could_be_mistaken_is_refused(run_id: Any) -> None:
    """Ids match [A-Za-z0-9_.:@/-]{1,200}, fully."""
    with pytest.raises((ConfigurationError, ValueError), match="run_id"):
        count.run(0, run_id=run_id)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("thing", [look, fetch, count], ids=["tool", "async tool", "loop"])
def test_decorated_functions_pickle_by_name(thing: Any, protocol: int) -> None:
    """They come back as themselves."""
    assert pickle.loads(pickle.dumps(thing, protocol)) is thing


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_decorated_methods_pickle_with_their_object(protocol: int) -> None:
    """As plain methods do: for executors of processes."""

    def travel(thing: Any) -> Any:
        return pickle.loads(pickle.dumps(thing, protocol))

    agent = Agent(10)
    assert travel(agent.look)(1) == 11
    assert travel(agent.count)(1) == 31
    assert travel(agent.count).run(1).value == 31
    assert travel(Agent.count)(agent, 1) == 31
    assert travel(Agent.of_class)(1) == 4
    assert travel(agent.of_class)(1) == 4
    assert travel(Agent.static)(1) == 1
    assert travel(agent.static)(1) == 1


def test_copies_of_decorated_functions_are_themselves() -> None:
    """copy and deepcopy, as for functions."""
    for thing in (look, fetch, count):
        assert copy.copy(thing) is thing
        assert copy.deepcopy(thing) is thing
        assert copy.deepcopy({"fn": [thing]})["fn"][0] is thing


def test_a_deep_copy_of_a_bound_method_is_bound_to_the_copy() -> None:
    """An agent that keeps its own method as a callback can be copied."""
    agent = Agent(1)
    agent.callback = agent.look  # type: ignore[attr-defined]  # what is tested
    agent.looped = agent.count  # type: ignore[attr-defined]  # what is tested
    other: Any = copy.deepcopy(agent)
    other.size = 100
    assert (other.callback(1), other.looped(1)) == (101, 301)
    assert copy.copy(agent.look)(1) == 2


def test_a_local_function_refuses_to_pickle_like_any_local_function() -> None:
    """With Python's own error."""
    with pytest.raises((pickle.PicklingError, AttributeError), match="local"):
        pickle.dumps(loop(max=1)(lambda n: n))


def program(source: str) -> str:
    """What a fresh interpreter says to this."""
    path = os.pathsep.join(filter(None, [str(Path(loopguard.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
        capture_output=True,
        encoding="utf-8",
        timeout=30,
    )
    return done.stdout.strip() + done.stderr.strip()


FORK = """
import os, sys
from loopguard import Guard, LoopLimit, MaxSteps, ToolCallRefused, current_run, loop, tool

@tool
def look(n):
    return n

@loop(max=2)
def count(n):
    look(object())
    return n + 1

def report():
    with Guard(MaxSteps(1)).scope("s") as run:
        look(1)
        try:
            look(2)
            raise AssertionError("not refused")
        except ToolCallRefused:
            pass
    return run.id, count.run(0).run_id

read, write = os.pipe()
with Guard().scope("parent") as parent:
    look(1)
    pid = os.fork()
    if pid == 0:
        ids = report() if current_run() is None else ("still in the parent's run", "")
        os.write(write, " ".join(ids).encode())
        os._exit(0)
    ids = report()
    os.waitpid(pid, 0)
    assert current_run() is parent and parent.steps == 4, parent.steps
os.close(write)
child = os.read(read, 1000).decode().split()
assert len(child) == 2 and len({*child, *ids, parent.id}) == 5, (child, ids)
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_has_no_run_and_makes_ids_of_its_own() -> None:
    """Its calls aren't the parent's."""
    assert program(FORK) == "fine"


LOCKED = """
import os, threading, warnings
from loopguard import Guard, current_run, loop, tool

warnings.simplefilter("ignore", DeprecationWarning)  # that threads are running is the point

@tool
def look(n):
    return n

stop = threading.Event()
def busy():
    with Guard().scope("busy"):
        while not stop.is_set():
            look(object())

threads = [threading.Thread(target=busy, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        with Guard().scope("child"):
            look(object())
        os._exit(7)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7
stop.set()
for thread in threads:
    thread.join()
with Guard().scope("unwound") as run:
    pid = os.fork()
    if pid == 0:
        pass
if pid == 0:
    assert current_run() is None
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_beside_busy_threads_leaves_the_child_no_locked_locks() -> None:
    """Whatever the other threads were doing then; and leaving the parent's scope in the child is harmless."""
    assert program(LOCKED) == "fine"


def test_the_loop_limit_of_a_scope_is_on_by_default_and_its_listeners_are_told() -> None:
    """A run's counters and its events say the same."""
    seen: list[events.Event] = []
    with Guard(LoopLimit(1), on_event=seen.append).scope("s") as run:
        look(1)
        with pytest.raises(ToolCallRefused):
            look(1)
        assert (run.steps, run.refusals) == (1, 1)
    kinds = [type(event).__name__ for event in seen]
    assert kinds == ["RunStarted", "ToolStarted", "ToolFinished", "ToolRefused", "RunEnded"]


def test_calls_outside_any_run_leave_nothing_behind() -> None:
    """A tool that is made for one call, as run_tools makes them, is forgotten with it."""
    guard = Guard()
    made = []

    def turn(n: int) -> None:
        def answer(n: int) -> int:
            return n

        made.append(weakref.ref(answer))
        block = {"type": "tool_use", "id": f"toolu_{n}", "name": "answer", "input": {"n": n}}
        guard.run_tools({"role": "assistant", "content": [block]}, tools=[answer])

    for n in range(5):
        turn(n)
    gc.collect()
    assert [ref() for ref in made] == [None] * 5
    assert guard.schemas() == []


def test_while_a_person_thinks_the_runs_other_calls_go_on() -> None:
    """The deadline stands still for the whole run: a call beside the question is not refused for the time it takes."""
    asked, answered = asyncio.Event(), asyncio.Event()

    async def person(call: Any) -> bool:
        asked.set()
        await answered.wait()
        return True

    @tool
    async def risky() -> str:
        return "risky"

    @tool
    async def harmless() -> str:
        return "harmless"

    @loop(max=1, timeout=0.2, guard=Guard(ApproveTool(person, only="risky")))
    async def agent(state: list[str]) -> list[str]:
        waiting = asyncio.create_task(risky())
        await asked.wait()
        await asyncio.sleep(0.3)
        beside = await harmless()
        answered.set()
        return [await waiting, beside]

    assert asyncio.run(agent.run([])).value == ["risky", "harmless"]
