"""MaxSteps: exactly n tool executions in a run, whatever runs in parallel."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loopguard import (
    ApprovalDenied,
    ApproveTool,
    ConfigurationError,
    Guard,
    LoopLimit,
    MaxSteps,
    MaxStepsExceeded,
    RateLimit,
    ToolCallRefused,
    current_run,
    loop,
    tool,
)
from loopguard import _events as events
from tests.conftest import Colour


@tool
def look(n: int) -> int:
    """A tool."""
    return n


@pytest.mark.parametrize("n", [-1, True, None, 2.0, "3", MaxSteps])
def test_n_is_an_int_of_at_least_zero(n: Any) -> None:
    """Anything else is a ConfigurationError that names it and says what is allowed."""
    with pytest.raises(ConfigurationError) as caught:
        MaxSteps(n)
    assert all(part in str(caught.value) for part in ("MaxSteps(n=", repr(n), "int of at least 0"))


@pytest.mark.parametrize("per", ["loop", None, 1])
def test_per_is_run_or_iteration(per: Any) -> None:
    """Nothing else."""
    with pytest.raises(ConfigurationError, match=r"per=.*'run' or 'iteration'"):
        MaxSteps(1, per=per)


@pytest.mark.parametrize("only", [5, [5], ["search_*", None], "", [], ["search_*", ""]])
def test_only_is_names_or_a_predicate(only: Any) -> None:
    """What can't be read is an error at once, not a limit on nothing."""
    with pytest.raises(ConfigurationError, match=r"only=.*name pattern, several, or a function"):
        MaxSteps(1, only=only)


def test_the_call_after_the_last_is_refused_before_its_body(colour: Colour) -> None:
    """n bodies run, in every colour; the refusal is data and a sentence."""
    bodies = []
    guarded = tool(name="search")(colour.make(bodies.append))
    with Guard(MaxSteps(2)).scope("agent") as run:
        colour.call(guarded, 1)
        colour.call(guarded, 2)
        with pytest.raises(MaxStepsExceeded) as caught:
            colour.call(guarded, 3)
    assert bodies == [1, 2]
    refusal = caught.value
    assert (refusal.code, refusal.guardrail, refusal.tool, refusal.limit, refusal.value) == (
        "max_steps", "MaxSteps", "search", 2, 2,
    )  # fmt: skip
    assert (refusal.source, refusal.run_id) == ("agent", run.id)
    assert "search was not run" in str(refusal)
    assert "2 tool calls" in str(refusal)
    assert (run.steps, run.refusals) == (2, 1)


def test_a_refusal_survives_pickling() -> None:
    """All its data goes to another process."""
    with Guard(MaxSteps(0)).scope("agent"), pytest.raises(MaxStepsExceeded) as caught:
        look(1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is MaxStepsExceeded
    assert vars(copy) == vars(caught.value)
    assert str(copy) == str(caught.value)


def test_zero_allows_nothing() -> None:
    """The tightest limit there is."""
    with Guard(MaxSteps(0)).scope("s") as run, pytest.raises(MaxStepsExceeded):
        look(1)
    assert run.steps == 0


def test_a_refused_call_uses_no_step_and_a_raising_one_does() -> None:
    """Whoever refused it."""

    @tool
    def fail(n: int) -> None:
        raise ValueError(n)

    with Guard(MaxSteps(3), LoopLimit(1)).scope("s") as run:
        with pytest.raises(ValueError, match="1"):
            fail(1)
        look(1)
        with pytest.raises(ToolCallRefused, match="looping"):
            look(1)
        look(2)
        with pytest.raises(MaxStepsExceeded):
            look(3)
    assert run.steps == 3


def test_eight_gathered_calls_on_a_cap_of_six() -> None:
    """Six bodies, two refused before their body, six counted."""
    done = []

    @tool
    async def work(n: int) -> None:
        await asyncio.sleep(0)
        done.append(n)

    async def main() -> tuple[int, int]:
        async with Guard(MaxSteps(6)).scope("s") as run:
            outcomes = await asyncio.gather(*map(work, range(8)), return_exceptions=True)
            return sum(isinstance(outcome, MaxStepsExceeded) for outcome in outcomes), run.steps

    assert asyncio.run(main()) == (2, 6)
    assert sorted(done) == [0, 1, 2, 3, 4, 5]


def test_exactly_n_bodies_run_under_threads() -> None:
    """Sixteen threads behind a barrier, a cap of ten."""
    bodies = []
    barrier = threading.Barrier(16)

    @tool
    def work(n: int) -> None:
        bodies.append(n)

    def one(n: int) -> bool:
        barrier.wait()
        try:
            work(n)
        except MaxStepsExceeded:
            return False
        return True

    with Guard(MaxSteps(10)).scope("s") as run, ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(run.bind(one), range(16))) == 10
        assert run.steps == 10
    assert len(bodies) == 10


def test_every_call_is_counted_where_nothing_is_limited() -> None:
    """Twenty threads of fifty calls and three parallel async calls: exactly 1003."""

    @tool
    async def work(n: int) -> None:
        await asyncio.sleep(0)

    async def three() -> None:
        await asyncio.gather(*map(work, range(3)))

    with Guard().scope("s") as run:
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(run.bind(lambda i: [look(50 * i + j) for j in range(50)]), range(20)))
        asyncio.run(three())
        assert run.steps == 1003


def test_a_tool_wrapped_twice_by_one_guard_is_guarded_once(colour: Colour) -> None:
    """One body and one step a call; the third is refused."""
    seen: list[events.Event] = []
    guard = Guard(MaxSteps(2), on_event=seen.append)
    bodies = []
    guarded = guard.wrap(guard.wrap(guard.tool(colour.make(bodies.append))))
    with guard.scope("s") as run:
        colour.call(guarded, 1)
        colour.call(guarded, 2)
        with pytest.raises(MaxStepsExceeded):
            colour.call(guarded, 3)
        assert run.steps == 2
    assert bodies == [1, 2]
    assert len([event for event in seen if isinstance(event, events.ToolStarted)]) == 2


def test_a_guard_on_the_loop_and_on_its_tools_counts_once() -> None:
    """A run isn't charged twice for the same policy."""
    guard = Guard(MaxSteps(3))
    guarded = guard.tool(lambda n: n)

    @loop(max=9, guard=guard)
    def step(n: int) -> int:
        guarded(n)
        return n + 1

    assert step.run(0).value == 3


def test_a_sync_tool_in_an_async_loop_is_one_step() -> None:
    """A plain value is no coroutine."""

    @loop(max=5, guard=Guard(MaxSteps(2)))
    async def step(n: int) -> int:
        return look(n) + 1

    result = asyncio.run(step.run(0))
    assert (result.value, result.stop_reason) == (2, "max_steps")


def test_a_parents_cap_bounds_its_children_and_is_named() -> None:
    """The calls of children count for the parent; of two exhausted caps the outermost is named."""
    with Guard(MaxSteps(3)).scope("outer") as outer:
        for _ in range(3):
            with Guard(MaxSteps(1)).scope("inner") as inner:
                look(outer.steps)
                with pytest.raises(MaxStepsExceeded) as caught:
                    look(100)
        assert (outer.steps, inner.steps) == (3, 1)
        assert (caught.value.source, caught.value.run_id, caught.value.limit) == ("outer", outer.id, 3)


def test_a_guard_on_two_runs_of_a_chain_counts_in_each() -> None:
    """A fresh allowance for the child, within what is left of the parent's."""
    guard = Guard(MaxSteps(3))
    with guard.scope("outer"):
        look(1)
        with guard.scope("inner") as inner:
            look(2)
            look(3)
            with pytest.raises(MaxStepsExceeded) as caught:
                look(4)
            assert inner.steps == 2
    assert caught.value.source == "outer"


def test_a_tools_own_guard_counts_in_the_outermost_run() -> None:
    """Where nothing on the chain lists it."""
    guarded = tool(guard=Guard(MaxSteps(3)))(lambda n: n)
    with Guard().scope("outer") as outer:
        for i in range(2):
            with Guard().scope("inner"):
                guarded(i)
        guarded(10)
        with pytest.raises(MaxStepsExceeded) as caught:
            guarded(11)
    assert caught.value.run_id == outer.id


def test_a_tools_own_guard_counts_process_wide_outside_any_run() -> None:
    """Its listed guardrails, and only those."""
    guarded = tool(guard=Guard(MaxSteps(2)))(lambda n: n)
    guarded(1)
    with Guard().scope("a run of its own"):
        guarded(1)
    guarded(1)
    with pytest.raises(MaxStepsExceeded):
        guarded(1)


@pytest.mark.parametrize(
    "only", ["search_*", ["search_web", "search_f*"], lambda call: call.name.startswith("search_")], ids=str
)
def test_only_limits_and_counts_some_tools(only: Any) -> None:
    """By pattern, by several, or by what a predicate says of the call."""

    @tool
    def search_web(n: int) -> int:
        return n

    @tool
    def search_files(n: int) -> int:
        return n

    with Guard(MaxSteps(2, only=only)).scope("s") as run:
        for i in range(5):
            look(i)
        search_web(1)
        search_files(1)
        with pytest.raises(MaxStepsExceeded):
            search_web(2)
        look(9)
        assert run.steps == 8


def test_a_predicate_sees_the_arguments() -> None:
    """It decides call by call, and its own error is the caller's, with nothing taken."""

    def risky(call: Any) -> bool:
        return call.arguments["n"] / (call.arguments["n"] - 7) > 1

    with Guard(MaxSteps(1, only=risky)).scope("s") as run:
        look(1)
        look(8)
        with pytest.raises(MaxStepsExceeded):
            look(9)
        with pytest.raises(ZeroDivisionError):
            look(7)
        assert (run.steps, run.reserved("steps")) == (2, 0)


def test_per_iteration_counts_afresh_in_each() -> None:
    """Two calls in every iteration, the third ends the loop."""
    seen = []

    @loop(max=3, guard=Guard(MaxSteps(2, per="iteration")))
    def step(n: int) -> int:
        run = current_run()
        assert run is not None
        for i in range(3 if n == 2 else 2):
            look(10 * n + i)
        seen.append((run.iteration, run.steps))
        return n + 1

    result = step.run(0)
    assert seen == [(1, 2), (2, 4)]
    assert (result.stop_reason, result.value) == ("max_steps", 2)
    assert "per iteration" in str(result.error)


def test_a_child_loops_calls_count_in_the_parents_iteration() -> None:
    """The count belongs to the run that the limit stands on."""

    @loop(max=2)
    def inner(n: int) -> int:
        look(n)
        return n + 1

    @loop(max=3, guard=Guard(MaxSteps(2, per="iteration")))
    def outer(n: int) -> int:
        return inner(n)

    assert outer.run(0).stop_reason == "max_iterations"


def test_what_an_observed_limit_took_is_given_back_by_a_no() -> None:
    """A call that was admitted and then not approved counts nowhere, not even where nothing is enforced."""
    seen: list[events.Event] = []
    with Guard(RateLimit(1, 60), mode="observe", on_event=seen.append).scope("outer"):
        with Guard(ApproveTool(lambda call: False)).scope("inner"), pytest.raises(ApprovalDenied):
            look(1)
        assert look(2) == 2
    assert [event.code for event in seen if isinstance(event, events.ToolRefused)] == ["approval_denied"]


def test_observe_mode_refuses_nothing_and_tells_what_it_would_have() -> None:
    """As events, with the code, before the call went on."""
    seen: list[events.Event] = []
    with Guard(MaxSteps(1), mode="observe", on_event=seen.append).scope("s") as run:
        for i in range(3):
            assert look(i) == i
        assert (run.steps, run.refusals) == (3, 0)
    told = [event for event in seen if isinstance(event, events.ToolRefused)]
    assert [(event.code, event.observed, event.limit) for event in told] == [("max_steps", True, 1)] * 2


def test_an_observing_guard_inside_an_enforcing_one_changes_nothing() -> None:
    """Each guard has its own mode."""
    with Guard(MaxSteps(2)).scope("outer"), Guard(MaxSteps(0), mode="observe").scope("inner"):
        look(1)
        look(2)
        with pytest.raises(MaxStepsExceeded):
            look(3)


@pytest.mark.parametrize("mode", ["off", None, True])
def test_mode_is_enforce_or_observe(mode: Any) -> None:
    """Anything else is a ConfigurationError."""
    with pytest.raises(ConfigurationError, match=r"mode=.*'enforce' or 'observe'"):
        Guard(mode=mode)


def test_a_guardrail_class_instead_of_an_object_is_explained() -> None:
    """The commonest slip: forgetting the call."""
    with pytest.raises(ConfigurationError, match=r"write MaxSteps\(…\)"):
        Guard(MaxSteps)
    with pytest.raises(ConfigurationError, match="not a guardrail"):
        Guard(3)


def test_a_dropped_generator_has_used_its_step() -> None:
    """Once iteration has started; a generator that nobody iterates uses none."""

    @tool
    def items(n: int) -> Any:
        yield from range(n)

    with Guard(MaxSteps(1)).scope("s") as run:
        items(3)
        assert run.steps == 0
        for _ in items(3):
            break
        assert run.steps == 1
        with pytest.raises(MaxStepsExceeded):
            list(items(3))


@pytest.mark.parametrize("cancel", [False, True])
def test_a_cancelled_call_has_used_its_step(cancel: bool) -> None:
    """It started, so its effects may have happened."""

    @tool
    async def slow(n: int) -> None:
        await asyncio.Event().wait()

    async def main() -> int:
        async with Guard(MaxSteps(1)).scope("s") as run:
            task = asyncio.create_task(slow(1))
            await asyncio.sleep(0)
            if cancel:
                task.cancel()
                await asyncio.wait({task})
            with pytest.raises(MaxStepsExceeded):
                await slow(2)
            task.cancel()
            await asyncio.wait({task})
            return run.steps

    assert asyncio.run(main()) == 1


def test_repr_reads_like_the_code_that_made_it() -> None:
    """For messages and the console."""
    made: list[Callable[[], MaxSteps]] = [
        lambda: MaxSteps(3),
        lambda: MaxSteps(3, only="a_*"),
        lambda: MaxSteps(3, per="iteration"),
    ]
    assert [repr(make()) for make in made] == ["MaxSteps(3)", "MaxSteps(3, only='a_*')", "MaxSteps(3, per='iteration')"]
