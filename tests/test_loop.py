"""@loop from the user's side: state, order, conditions, ceilings, refusals, errors and time."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import inspect
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Annotated, Any, Literal, Optional

import pytest

from loopguard import (
    Budget,
    ConfigurationError,
    Guard,
    LoopGuardWarning,
    LoopHalted,
    LoopLimit,
    LoopState,
    LoopStopped,
    MaxSteps,
    MaxStepsExceeded,
    StopReason,
    ToolCallRefused,
    Transition,
    Verdict,
    charge,
    current_run,
    loop,
    result_of,
    tool,
)
from loopguard import _events as events
from loopguard.conditions import at_least
from tests.conftest import Colour

both = pytest.mark.parametrize("colour", ["sync", "async"], indirect=True)


def never(state: Any) -> bool:
    """A condition that is never met."""
    return False


@tool
def look(n: int) -> int:
    """A tool whose every new argument is news."""
    return n


# -- decoration ------------------------------------------------------------------------------------


async def async_callback(*args: Any) -> None:
    """For places that can't await."""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"max": value}, ["max", repr(value), "int of at least 1"]) for value in (0, -1, True, None, 1.5, "3")),
        *(
            ({"timeout": value}, ["timeout", repr(value), "seconds above 0"])
            for value in (0, -1, float("nan"), float("inf"), True, "1")
        ),
        *(({"until": value}, ["until", repr(value), "function"]) for value in (5, "done", True)),
        *(({"on_iteration": value}, ["on_iteration", repr(value), "function"]) for value in (5, "print")),
        *(({"on_transition": value}, ["on_transition", repr(value), "function"]) for value in (5, "print")),
        ({"on_transition": async_callback}, ["on_transition", "async_callback", "plain function"]),
        *(({"on_limit": value}, ["on_limit", repr(value), "'return' or 'raise'"]) for value in ("stop", None, True)),
        *(({"state": value}, ["state", repr(value), "draft"]) for value in ("nope", 5, ["draft"], "rest", "more")),
        *(({"guard": value}, ["guard", repr(value), "Guard("]) for value in (5, MaxSteps(3), [Guard()], Guard)),
        *(({"budget": value}, ["budget", repr(value), "Budget("]) for value in (2.0, Guard(), Budget)),
        *(({"name": value}, ["name", repr(value), "text"]) for value in ("", 5)),
    ],
)
def test_a_wrong_option_is_an_error_at_decoration_that_says_what_is_allowed(
    options: dict[str, Any], said: list[str]
) -> None:
    """The message names the parameter, the value, and what is allowed."""

    def improve(draft: int, *rest: int, **more: int) -> int:
        return draft

    with pytest.raises(ConfigurationError) as caught:
        loop(**{"max": 3, **options})(improve)
    assert all(part in str(caught.value) for part in said), str(caught.value)


def test_a_configuration_error_is_a_value_error() -> None:
    """Whoever knows nothing of loopguard can still catch it."""
    with pytest.raises(ValueError, match="max"):
        loop(max=0)(lambda n: n)


def test_a_generator_function_is_no_loop_step() -> None:
    """A step returns its next state; both kinds of generator are refused at decoration."""

    def steps(n: int) -> Any:
        yield n

    async def async_steps(n: int) -> Any:
        yield n

    for fn in (steps, async_steps, functools.partial(steps, 1)):
        with pytest.raises(ConfigurationError, match=r"steps is a(n async)? generator function"):
            loop(max=2)(fn)


@pytest.mark.parametrize("thing", [5, "text", [1]])
def test_only_callables_can_be_loops(thing: Any) -> None:
    """`@loop` of something else says what it was given."""
    with pytest.raises(ConfigurationError, match="@loop decorates"):
        loop(thing)


def test_a_bare_loop_warns_once_where_it_is_written_and_runs_ten_times() -> None:
    """With neither max nor a condition the default ceiling is a guess, so it is said."""
    with pytest.warns(LoopGuardWarning, match="count has neither max= nor a condition") as caught:

        @loop
        def count(n: int) -> int:
            return n + 1

    assert [warning.filename for warning in caught] == [__file__]
    result = count.run(0)
    assert (result.value, result.iterations, result.stop_reason, result.completed) == (10, 10, "max_iterations", True)


def test_a_loop_with_brackets_and_no_ceiling_warns_where_it_is_written() -> None:
    """`@loop()` and `@loop(name=…)` warn like `@loop`."""
    with pytest.warns(LoopGuardWarning, match="neither max= nor") as caught:
        loop(name="x")(lambda n: n)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_ceiling_or_a_condition_is_enough() -> None:
    """Either of them silences the warning, and so does max=10 written out."""
    with warnings.catch_warnings(record=True) as caught:
        loop(max=10)(lambda n: n)
        loop(until=never)(lambda n: n)
    assert caught == []


def test_a_decorated_function_keeps_its_name_and_signature() -> None:
    """It is a drop-in replacement."""

    @loop(max=1)
    def improve(draft: int, *, tone: str = "dry") -> int:
        """Improve it."""
        return draft

    assert improve.__name__ == "improve"
    assert improve.__doc__ == "Improve it."
    assert "tone" in improve.__annotations__


# -- state -----------------------------------------------------------------------------------------


@both
def test_the_first_argument_becomes_what_the_body_returned_and_the_others_stay(colour: Colour) -> None:
    """State flows; everything else is as the caller gave it."""
    seen = []

    def improve(draft: str, mark: str, *, tone: str) -> str:
        seen.append((draft, mark, tone))
        return draft + mark

    assert colour.call(loop(max=3)(colour.make(improve)), "a", "+", tone="dry") == "a+++"
    assert seen == [("a", "+", "dry"), ("a+", "+", "dry"), ("a++", "+", "dry")]


@pytest.mark.parametrize(
    ("args", "kwargs"), [((1, 10), {}), ((), {"step": 1, "total": 10}), ((1,), {"total": 10})], ids=str
)
def test_state_names_the_parameter_that_flows(args: tuple[int, ...], kwargs: dict[str, int]) -> None:
    """`state=` may name any parameter, however it is passed."""

    @loop(max=3, state="total")
    def add(step: int, total: int) -> int:
        return total + step

    assert add(*args, **kwargs) == 13


def test_the_state_may_be_keyword_only() -> None:
    """`state=` reaches behind the star."""

    @loop(max=3, state="total")
    def add(step: int, *, total: int = 100) -> int:
        return total + step

    assert add(1, total=10) == 13
    assert add(1) == 103


def test_the_state_may_be_given_by_keyword() -> None:
    """The first parameter is the state however it is passed."""

    @loop(max=3)
    def add(total: int, step: int = 1) -> int:
        return total + step

    assert add(step=2, total=10) == 16


def test_an_omitted_state_starts_at_its_default() -> None:
    """Defaults are state like any other, also of positional-only parameters."""

    @loop(max=3)
    def add(total: int = 10) -> int:
        return total + 1

    @loop(max=3)
    def add_only(total: int = 10, step: int = 2, /) -> int:
        return total + step

    assert add() == 13
    assert add_only() == 16
    assert add.run().history[0].value == 11


def test_a_default_behind_the_state_stays_when_the_state_is_omitted() -> None:
    """The state's place among positional-only parameters is its own."""

    @loop(max=2, state="total")
    def add(step: int = 5, total: int = 10, /) -> int:
        return total + step

    assert add() == 20
    assert add(1) == 12


def test_the_first_of_any_positional_arguments_is_the_state() -> None:
    """A function that takes *args has a first argument, too."""

    @loop(max=3)
    def add(*numbers: int) -> int:
        return sum(numbers)

    assert add(1, 10) == 31


@both
def test_a_function_without_parameters_is_just_run_again(colour: Colour) -> None:
    """What it returns is the value, and goes nowhere; None is fine."""
    calls = []

    def tick() -> int | None:
        calls.append(1)
        return len(calls) if len(calls) < 3 else None

    result = colour.call(loop(max=3)(colour.make(tick)).run)
    assert [each.value for each in result.history] == [1, 2, None]
    assert result.completed


def test_missing_arguments_raise_the_functions_own_type_error() -> None:
    """A call that doesn't bind names the function and the argument."""

    @loop(max=3)
    def improve(draft: int, mark: int) -> int:
        return draft

    with pytest.raises(TypeError, match=r"improve\(\).*draft"):
        improve()  # type: ignore[call-arg]  # what is tested
    with pytest.raises(TypeError, match=r"improve\(\).*mark"):
        improve(1)  # type: ignore[call-arg]  # what is tested


class Agent:
    """Loops of every kind of method."""

    step = 2

    @loop(max=3)
    def method(self, n: int) -> int:
        """Of an object."""
        return n + self.step

    @loop(max=3)
    @classmethod
    def of_class(cls, n: int) -> int:
        """Of a class."""
        return n + cls.step

    @loop(max=3)
    @staticmethod
    def static(n: int) -> int:
        """Of neither."""
        return n + 2

    @classmethod
    @loop(max=3)
    def class_outside(cls, n: int) -> int:
        """Decorated in the other order."""
        return n + cls.step

    @staticmethod
    @loop(max=3)
    def static_outside(n: int) -> int:
        """Decorated in the other order."""
        return n + 2


@pytest.mark.parametrize("name", ["method", "of_class", "static", "class_outside", "static_outside"])
@pytest.mark.parametrize("owner", [Agent(), Agent], ids=["object", "class"])
def test_methods_of_every_kind_loop_by_call_and_by_run(name: str, owner: Any) -> None:
    """Self and cls are never the state."""
    step = getattr(owner, name)
    first = (Agent(),) if owner is Agent and name == "method" else ()
    assert step(*first, 1) == 7
    if name == "class_outside" and sys.version_info >= (3, 13):  # the classmethod hides its class from `run`
        with pytest.raises(ConfigurationError, match="put @loop above @classmethod"):
            step.run(1)
        return
    assert step.run(*first, 1).value == 7
    assert step.run(*first, n=1).value == 7


def test_async_methods_loop_too() -> None:
    """A method of either colour is bound the same way."""

    class Async:
        @loop(max=3)
        async def step(self, n: int) -> int:
            return n + 1

    assert asyncio.run(Async().step(1)) == 4
    assert asyncio.run(Async().step.run(1)).value == 4


def test_partials_bound_methods_and_callable_objects_are_loops() -> None:
    """Anything that can be called can be looped."""

    class Adder:
        def __call__(self, n: int) -> int:
            return n + 1

        def add(self, n: int) -> int:
            return n + 1

    def add(step: int, n: int) -> int:
        return n + step

    assert loop(max=3)(Adder())(0) == 3
    assert loop(max=3)(Adder().add)(0) == 3
    assert loop(max=3)(Adder().add).run(0).value == 3
    assert loop(max=3)(functools.partial(add, 2))(0) == 6
    assert loop(max=3, state="n")(functools.partial(add, step=2)).run(n=0).value == 6


def test_a_callable_object_can_be_async() -> None:
    """Its __call__ says what colour it is."""

    class Adder:
        async def __call__(self, n: int) -> int:
            return n + 1

    assert asyncio.run(loop(max=3)(Adder())(0)) == 3


@both
def test_a_body_that_forgets_to_return_the_state_is_an_error(colour: Colour) -> None:
    """The commonest mistake of all has a message of its own, after one iteration."""

    def improve(draft: list[int]) -> list[int]:
        draft.append(1)  # and no return
        return None  # type: ignore[return-value]  # what is tested

    with pytest.raises(ConfigurationError, match="improve returned None: return the state"):
        colour.call(loop(max=3)(colour.make(improve)), [])


def _optional(n: int) -> int | None:
    return None


def _old_optional(n: int) -> Optional[int]:  # noqa: UP045  # the old way must be read as well
    return None


def _annotated(n: int) -> Annotated[int | None, "a note"]:
    return None


def _literal(n: int) -> Literal[1, None]:
    return None


def _any(n: int) -> Any:
    return None


def _none(n: int) -> None:
    return None


def _state_admits(n: int | None):  # type: ignore[no-untyped-def]  # only the state is annotated
    return None


def _unresolvable(n: NotThere) -> NotThere | None:  # type: ignore[name-defined]  # noqa: F821  # as under TYPE_CHECKING
    return None


class _Method:
    def state_admits(self, n: int | None):  # type: ignore[no-untyped-def]  # only the state is annotated
        """A method whose state may be None."""

    def __call__(self, n: int) -> int | None:
        """An object whose result may be None."""


@pytest.mark.parametrize(
    "fn",
    [
        _optional,
        _old_optional,
        _annotated,
        _literal,
        _any,
        _none,
        _state_admits,
        _unresolvable,
        _Method().state_admits,
        _Method(),
        functools.partial(_optional),
    ],
)
def test_none_is_a_state_where_an_annotation_admits_it(fn: Callable[..., Any]) -> None:
    """Of the result, or of the state."""
    assert loop(max=2)(fn)(1) is None


def test_the_state_of_a_method_is_looked_at_not_its_self() -> None:
    """An annotation of the state admits None for methods, too."""

    class Here:
        @loop(max=2)
        def step(self, n: int | None):  # type: ignore[no-untyped-def]  # only the state is annotated
            return None

        @loop(max=2)
        def forgot(self, n: int):  # type: ignore[no-untyped-def]  # no annotation admits None
            return None

    assert Here().step(1) is None
    with pytest.raises(ConfigurationError, match="return the state"):
        Here().forgot(1)


def test_a_state_that_was_none_may_stay_none() -> None:
    """None for None is nothing forgotten."""

    @loop(max=2)
    def wait(state):  # type: ignore[no-untyped-def]  # unannotated on purpose
        return state

    assert wait(None) is None


# -- order and conditions --------------------------------------------------------------------------


@both
def test_each_iteration_is_body_then_on_iteration_then_until(colour: Colour) -> None:
    """Iterations count from 1, and the condition stops the loop."""
    order: list[tuple[Any, ...]] = []

    def body(n: int) -> int:
        run = current_run()
        assert run is not None
        order.append(("body", n, run.iteration))
        return n + 1

    def until(n: int) -> bool:
        order.append(("until", n))
        return n == 2

    step = loop(max=5, until=until, on_iteration=lambda n, i: order.append(("on_iteration", n, i)))(colour.make(body))
    result = colour.call(step.run, 0)
    assert order == [
        ("body", 0, 1), ("on_iteration", 1, 1), ("until", 1),
        ("body", 1, 2), ("on_iteration", 2, 2), ("until", 2),
    ]  # fmt: skip
    assert (result.stop_reason, result.completed, result.value, result.iterations) == ("until", True, 2, 2)


class Method:
    """Conditions that are methods and objects."""

    def second(self, n: int, i: int) -> bool:
        """Wants the iteration."""
        return i == 2

    def __call__(self, n: int) -> bool:
        """Wants only the state."""
        return n == 2


def _state(n: int) -> bool:
    return n == 2


def _second(n: int, i: int) -> bool:
    return i == 2


def _state_called_iteration(iteration: int) -> bool:
    return iteration == 2


def _defaulted_iteration(n: int, iteration: int = 0) -> bool:
    return iteration == 2


def _second_is_state(low: int, n: int) -> bool:
    return n >= low


def _keyword_iteration(n: int, *, iteration: int) -> bool:
    return iteration == 2


def _late_iteration(n: int, strict: bool = True, iteration: int = 0) -> bool:
    return strict is True and iteration == 2


def _with_threshold(n: int, threshold: int = 2) -> bool:
    return n >= threshold


def _only_positional(n: int, i: int, /) -> bool:
    return i == 2


def _many(*states: int) -> bool:
    return states == (2,)


def _options(n: int, **options: Any) -> bool:
    return n == 2 and not options


@pytest.mark.parametrize(
    "until",
    [
        _state,
        _second,
        _state_called_iteration,
        _defaulted_iteration,
        _keyword_iteration,
        _late_iteration,
        _with_threshold,
        _only_positional,
        _many,
        _options,
        Method(),
        Method().second,
        functools.partial(_with_threshold, threshold=2),
        functools.partial(_second_is_state, 2),
    ],
)
def test_until_gets_the_iteration_only_if_it_asks_for_it(until: Callable[..., bool]) -> None:
    """A second required positional parameter, or one named iteration: a threshold with a default is neither."""

    @loop(max=5, until=until)
    def step(n: int) -> int:
        return n + 1

    assert step(0) == 2


def test_a_joined_condition_gets_the_iteration_as_it_would_alone() -> None:
    """On either side of | and &, by place and by name."""

    def third(state: int, *, iteration: int) -> bool:
        return iteration == 3

    def second(state: int, at: int) -> bool:
        return at == 2

    for until, iterations in (
        (at_least(99) | second, 2),
        (third | at_least(99), 3),
        (at_least(0) & third, 3),
        (second & at_least(0) | third, 2),
    ):
        assert loop(max=9, until=until)(lambda n: n + 1).run(0).iterations == iterations


def test_a_builtin_is_a_condition() -> None:
    """Any callable is one, a signature it needs not have."""
    assert loop(max=5, until=bool)(lambda n: n + 1)(0) == 1
    assert loop(max=5, until={3: True}.get)(lambda n: n + 1)(0) == 3


def test_an_async_condition_and_callback_work_in_an_async_loop() -> None:
    """They are awaited."""
    seen = []

    async def until(n: int) -> bool:
        await asyncio.sleep(0)
        return n == 2

    async def on_iteration(n: int, i: int) -> None:
        await asyncio.sleep(0)
        seen.append((n, i))

    @loop(max=5, until=until, on_iteration=on_iteration)
    async def step(n: int) -> int:
        return n + 1

    assert asyncio.run(step(0)) == 2
    assert seen == [(1, 1), (2, 2)]


@pytest.mark.parametrize("option", ["until", "on_iteration"])
def test_an_awaitable_from_a_callback_of_a_sync_loop_is_a_configuration_error(option: str) -> None:
    """A coroutine is truthy: it must not pass for a yes, nor be dropped unawaited."""
    with pytest.raises(ConfigurationError, match="async_callback is async"):
        loop(**{"max": 5, option: async_callback})(lambda n: n + 1)(0)


@both
@pytest.mark.parametrize("option", ["until", "on_iteration"])
def test_an_exception_in_a_callback_propagates_like_one_in_the_body(colour: Colour, option: str) -> None:
    """The same object, with the note and the partial result, the finished iteration included."""
    boom = KeyError("boom")

    def callback(*args: Any) -> bool:
        raise boom

    step = loop(**{"max": 5, option: callback})(colour.make(lambda n: n + 1))
    with pytest.raises(KeyError) as caught:
        colour.call(step, 0)
    assert caught.value is boom
    assert "iteration 1 of at most 5" in caught.value.__notes__[0]
    partial = result_of(boom)
    assert partial is not None
    assert (partial.value, partial.stop_reason, partial.iterations) == (1, "error", 1)


def test_a_condition_reads_the_run_and_shares_its_budget() -> None:
    """`current_run()` in until is the loop's run."""
    seen = []

    def until(n: int) -> bool:
        run = current_run()
        assert run is not None
        seen.append((run.name, run.iteration, run.max))
        return False

    loop(max=2, until=until, name="writer")(lambda n: n)(0)
    assert seen == [("writer", 1, 2), ("writer", 2, 2)]


# -- the ceiling -----------------------------------------------------------------------------------


@both
def test_the_ceiling_returns_the_latest_state_and_everything_about_it(
    colour: Colour, caplog: pytest.LogCaptureFixture
) -> None:
    """Three drafts, none of them good: the last is returned, and a warning tells it from success."""

    def draft(text: str) -> str:
        run = current_run()
        assert run is not None
        charge(usd=0.01)
        return f"draft-{run.iteration}"

    step = loop(max=3, until=never, name="writer")(colour.make(draft))
    with caplog.at_level(logging.WARNING, "loopguard"):
        result = colour.call(step.run, "")
    assert result.value == "draft-3"
    assert [each.value for each in result.history] == ["draft-1", "draft-2", "draft-3"]
    assert [each.number for each in result.history] == [1, 2, 3]
    assert [each.cost for each in result.history] == [Decimal("0.01")] * 3
    assert (result.iterations, result.stop_reason, result.completed) == (3, StopReason.MAX_ITERATIONS, False)
    assert result.cost == Decimal("0.03")
    assert result.error is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "writer" in caplog.text
    assert colour.call(step, "") == "draft-3"


def test_reaching_a_ceiling_without_a_condition_is_success(caplog: pytest.LogCaptureFixture) -> None:
    """`@loop(max=3)` is a for loop: nothing to warn about."""
    with caplog.at_level(logging.WARNING, "loopguard"):
        result = loop(max=3, on_limit="raise")(lambda n: n + 1).run(0)
    assert (result.value, result.completed, result.stop_reason) == (3, True, "max_iterations")
    assert caplog.records == []


@both
def test_on_limit_raise_raises_the_result(colour: Colour) -> None:
    """The ceiling as an exception, and the run's end is still told as what it was."""
    ended: list[Any] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.RunEnded):
            ended.append((event.stop_reason, event.iterations))

    step = loop(max=2, until=never, on_limit="raise", guard=Guard(on_event=note))(colour.make(lambda n: n + 1))
    for call in (step, step.run):
        with pytest.raises(LoopStopped, match="max_iterations") as caught:
            colour.call(call, 0)
        assert (caught.value.result.value, caught.value.result.stop_reason) == (2, "max_iterations")
        assert result_of(caught.value) is caught.value.result
        assert not hasattr(caught.value, "__notes__")
    assert ended == [(StopReason.MAX_ITERATIONS, 2)] * 2


def test_a_condition_met_at_the_ceiling_is_success() -> None:
    """The last iteration counts like any other."""
    result = loop(max=2, until=lambda n: n == 2, on_limit="raise")(lambda n: n + 1).run(0)
    assert (result.stop_reason, result.completed) == ("until", True)


# -- refusals --------------------------------------------------------------------------------------


@both
def test_a_refusal_that_escapes_ends_the_loop_with_the_last_completed_state(
    colour: Colour, caplog: pytest.LogCaptureFixture
) -> None:
    """Two tool calls fit, the third iteration is cut short: its state isn't there."""

    def step(n: int) -> int:
        look(n)
        return n + 1

    guarded = loop(max=9, guard=Guard(MaxSteps(2)), name="searcher")(colour.make(step))
    with caplog.at_level(logging.WARNING, "loopguard"):
        result = colour.call(guarded.run, 0)
    assert (result.value, result.iterations, len(result.history)) == (2, 2, 2)
    assert (result.stop_reason, result.completed) == (StopReason.MAX_STEPS, False)
    assert isinstance(result.error, MaxStepsExceeded)
    assert "searcher" in caplog.text
    assert colour.call(guarded, 0) == 2


@both
def test_a_plain_call_that_completed_nothing_raises(colour: Colour) -> None:
    """Returning the untouched input would look like success; `.run` says it in the result."""

    def step(n: int) -> int:
        return look(n)

    guarded = loop(max=9, guard=Guard(MaxSteps(0)), name="searcher")(colour.make(step))
    with pytest.raises(LoopStopped, match="searcher was stopped before its first iteration") as caught:
        colour.call(guarded, 7)
    assert caught.value.result.value == 7
    assert isinstance(caught.value.__cause__, MaxStepsExceeded)
    result = colour.call(guarded.run, 7)
    assert (result.value, result.iterations, result.completed) == (7, 0, False)


@pytest.mark.parametrize(
    ("guard", "reason"),
    [
        (Guard(MaxSteps(2)), "max_steps"),
        (Guard(LoopLimit(2)), "loop_limit"),
        (Guard(Budget(usd=1)), "budget"),
        (Guard(Budget(tool_calls=2)), "budget"),
    ],
)
def test_the_stop_reason_names_the_kind_of_limit(guard: Guard, reason: str) -> None:
    """One reason for each code."""

    @tool(cost=0.5)
    def pay() -> None: ...

    @loop(max=9, guard=guard)
    def step(n: int) -> int:
        pay()
        return n + 1

    result = step.run(0)
    assert (result.stop_reason, result.value) == (reason, 2)


def test_refusals_of_a_task_group_count_as_their_first() -> None:
    """An ExceptionGroup that holds nothing but refusals is a refusal."""

    @tool
    async def fetch(n: int) -> int:
        return n

    @loop(max=9, guard=Guard(MaxSteps(4)))
    async def step(n: int) -> int:
        async with asyncio.TaskGroup() as group:
            for i in range(3):
                group.create_task(fetch(10 * n + i))
        return n + 1

    result = asyncio.run(step.run(0))
    assert (result.stop_reason, result.value, result.iterations) == ("max_steps", 1, 1)
    assert isinstance(result.error, MaxStepsExceeded)


def _refusal(code: str = "rate_limited") -> ToolCallRefused:
    return ToolCallRefused(code, "RateLimit", "look", "slow down")


@pytest.mark.parametrize(
    "group",
    [
        ExceptionGroup("all refused", [_refusal(), ExceptionGroup("inner", [_refusal()])]),
        BaseExceptionGroup("one halted", [_refusal(), LoopHalted(_refusal(), "run_x", "x", 5)]),
    ],
)
def test_nested_groups_of_refusals_are_refusals(group: BaseExceptionGroup[BaseException]) -> None:
    """However deep they sit; a LoopHalted among them is one of them."""

    def step(n: int) -> int:
        raise group

    result = loop(max=3)(step).run(0)
    assert (result.stop_reason, result.error) == ("rate_limited", group.exceptions[0])


@both
def test_a_mixed_group_propagates_unchanged(colour: Colour) -> None:
    """A real error must never be hidden by a refusal beside it."""
    group = ExceptionGroup("mixed", [_refusal(), ValueError("real")])

    def step(n: int) -> int:
        raise group

    with pytest.raises(ExceptionGroup) as caught:
        colour.call(loop(max=3)(colour.make(step)), 0)
    assert caught.value is group
    assert result_of(group) is not None


def test_a_refusal_by_the_outer_loops_limit_ends_the_outer_loop() -> None:
    """The inner loop passes it on, and its partial result can be reached."""
    passed = []

    @loop(max=9)
    def inner(n: int) -> int:
        look(n)
        return n + 1

    @loop(max=9, guard=Guard(MaxSteps(3)))
    def outer(n: int) -> int:
        try:
            return inner(n) if n else inner(n) * 0 + 100
        except ToolCallRefused as exc:
            passed.append(result_of(exc))
            raise

    result = outer.run(0)
    assert (result.stop_reason, result.iterations) == ("max_steps", 0)
    partial = passed[0]
    assert partial is not None
    assert (partial.name, partial.value, partial.iterations, partial.stop_reason) == ("inner", 3, 3, "max_steps")
    assert partial.transitions[-1].target is LoopState.TERMINATED


def test_a_refusal_by_the_inner_loops_own_limit_ends_only_the_inner_loop() -> None:
    """The outer loop goes on with what the inner one has."""

    @loop(max=9, guard=Guard(MaxSteps(3)))
    def inner(n: int) -> int:
        look(n)
        return n + 1

    @loop(max=2)
    def outer(n: int) -> int:
        return inner(n) * 10

    result = outer.run(0)
    assert (result.value, result.stop_reason) == (330, "max_iterations")


def test_the_outermost_loop_below_the_owner_is_the_one_that_ends() -> None:
    """A limit on a scope ends the loops in it, from the outermost one; the scope itself goes on."""
    log = []

    @loop(max=9)
    def inner(n: int) -> int:
        look(len(log))
        log.append("inner")
        return n + 1

    @loop(max=9)
    def outer(n: int) -> int:
        inner(n)
        log.append("outer")
        return n + 1

    with Guard(MaxSteps(12)).scope("session"):
        result = outer.run(0)
    assert (result.stop_reason, result.iterations, log.count("inner")) == ("max_steps", 1, 12)


def test_a_limit_of_a_scope_inside_the_body_ends_the_nearest_loop() -> None:
    """No loop stands at or below the owner, so the nearest one above it ends."""

    @loop(max=9)
    def inner(n: int) -> int:
        with Guard(MaxSteps(1)).scope("detail"):
            look(2 * n)
            if n:
                look(2 * n + 1)
        return n + 1

    @loop(max=2)
    def outer(n: int) -> int:
        return inner.run(0).value

    result = outer.run(0)
    assert (result.value, result.stop_reason) == (1, "max_iterations")


def test_a_refusal_that_ends_no_run_ends_the_nearest_loop_whoever_it_names() -> None:
    """A plugin's limit names the outer run: the inner loop ends, and the outer one goes on."""
    ends: list[str] = []

    class Open:
        def bind(self, run: Any, tool: Any) -> Open:
            return self

        def check(self, call: Any) -> ToolCallRefused:
            owner = call.run.parent
            return ToolCallRefused("circuit_open", "Open", call.name, "it is down", None, None, owner.name, owner.id)

    @loop(max=9)
    def inner(n: int) -> int:
        look(n)
        return n + 1

    @loop(max=2, guard=Guard(Open()))
    def outer(n: int) -> int:
        ends.append(inner.run(n).stop_reason)
        return n + 1

    assert outer.run(0).stop_reason == "max_iterations"
    assert ends == ["circuit_open", "circuit_open"]


def test_a_loop_limit_ends_the_nearest_loop_whoever_listed_it() -> None:
    """A model that loops is stopped where it loops."""

    @loop(max=9)
    def inner(n: int) -> int:
        look(0)
        return n + 1

    @loop(max=2, guard=Guard(LoopLimit(2)))
    def outer(n: int) -> int:
        return n + inner.run(0).value

    result = outer.run(0)
    assert (result.value, result.stop_reason) == (4, "max_iterations")


def test_a_stopped_inner_loop_raises_an_ordinary_exception_in_the_outer_body() -> None:
    """LoopStopped is not a refusal: it propagates with a note."""

    @loop(max=9, guard=Guard(MaxSteps(0)))
    def inner(n: int) -> int:
        return look(n)

    @loop(max=2, name="outer")
    def outer(n: int) -> int:
        return inner(n)

    with pytest.raises(LoopStopped) as caught:
        outer(0)
    assert caught.value.result.name == "inner"
    assert any("'outer'" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("place", ["until", "on_iteration"])
def test_a_refusal_in_a_callback_ends_the_loop_with_the_finished_iteration(place: str) -> None:
    """The body had returned, so its state counts."""

    def callback(n: int, *args: Any) -> bool:
        look(n)
        return False

    result = loop(**{"max": 9, place: callback}, guard=Guard(MaxSteps(2)))(lambda n: n + 1).run(0)
    assert (result.stop_reason, result.value, result.iterations) == ("max_steps", 3, 3)


# -- errors ----------------------------------------------------------------------------------------


@both
def test_any_other_exception_propagates_as_the_same_object_with_a_note(colour: Colour) -> None:
    """The note names loop, iteration and max; the partial result can be reached."""
    boom = ZeroDivisionError("boom")

    def step(n: int) -> int:
        if n == 2:
            raise boom
        return n + 1

    with pytest.raises(ZeroDivisionError) as caught:
        colour.call(loop(max=5, name="writer")(colour.make(step)).run, 0)
    assert caught.value is boom
    assert boom.__notes__ == ["in loop 'writer', iteration 3 of at most 5"]
    partial = result_of(boom)
    assert partial is not None
    assert (partial.value, partial.iterations, partial.stop_reason, partial.completed) == (2, 2, "error", False)
    assert partial.error is boom


def test_nested_loops_leave_a_note_each_and_the_innermost_result() -> None:
    """The way out can be read from the traceback."""

    @loop(max=2, name="inner")
    def inner(n: int) -> int:
        raise ValueError("boom")

    @loop(max=3, name="outer")
    def outer(n: int) -> int:
        return inner(n)

    with pytest.raises(ValueError, match="boom") as caught:
        outer(0)
    assert ["'inner'" in note for note in caught.value.__notes__] == [True, False]
    assert ["'outer'" in note for note in caught.value.__notes__] == [False, True]
    partial = result_of(caught.value)
    assert partial is not None
    assert partial.name == "inner"


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Nothing can be set on it."""

    code: int


class Falsy(Exception):
    """Not true, and still an exception."""

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0


class Sealed(Exception):
    """Forbids what it can."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def add_note(self, note: str) -> None:
        raise AttributeError(note)


@both
@pytest.mark.parametrize("boom", [Frozen(5), Falsy(), Sealed()], ids=lambda boom: type(boom).__name__)
def test_exceptions_of_every_build_arrive_with_note_and_result(colour: Colour, boom: Exception) -> None:
    """Frozen, falsy or sealed: the same object."""

    def step(n: int) -> int:
        raise boom

    with pytest.raises(type(boom)) as caught:
        colour.call(loop(max=2)(colour.make(step)), 0)
    assert caught.value is boom
    assert "iteration 1 of at most 2" in caught.value.__notes__[-1]
    assert result_of(boom) is not None


def test_an_exception_object_that_is_raised_again_carries_the_result_of_the_latest_run() -> None:
    """A client that keeps one exception object must not hand out the result of last time."""
    boom = ValueError("always the same")

    @loop(max=9)
    def step(n: int) -> int:
        if n == 2:
            raise boom
        return n + 1

    ids = []
    for start in (0, 1):
        with pytest.raises(ValueError, match="the same"):
            step(start)
        partial = result_of(boom)
        assert partial is not None
        ids.append((partial.run_id, partial.iterations))
    assert ids[0][0] != ids[1][0]
    assert [iterations for _, iterations in ids] == [2, 1]


@both
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_process_is_never_swallowed(colour: Colour, kind: type[BaseException]) -> None:
    """No further iteration starts, and nothing stays reserved."""
    runs, budget = [], Budget(usd=1)

    @tool(cost=0.5)
    def pay(n: int) -> None:
        raise kind

    def step(n: int) -> int:
        runs.append(current_run())
        pay(n)
        return n + 1

    with pytest.raises(kind) as caught:
        colour.call(loop(max=5, budget=budget)(colour.make(step)), 0)
    assert len(runs) == 1
    assert runs[0] is not None
    assert (runs[0].reserved(), runs[0].spent()) == (0, 0 if kind is not GeneratorExit else Decimal("0.5"))
    assert result_of(caught.value) is not None


def test_a_cancelled_loop_is_cancelled_and_its_call_pays_its_estimate() -> None:
    """CancelledError passes through tool and loop; nothing stays reserved; no iteration follows."""
    runs = []

    @tool(cost=0.25)
    async def slow() -> None:
        await asyncio.Event().wait()

    @loop(max=5, budget=Budget(usd=1))
    async def step(n: int) -> int:
        runs.append(current_run())
        await slow()
        return n + 1

    async def main() -> None:
        task = asyncio.create_task(step.run(0))
        while not runs:
            await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert len(runs) == 1
    assert runs[0] is not None
    assert (runs[0].reserved(), runs[0].spent()) == (0, Decimal("0.25"))


@pytest.mark.parametrize("swallower", ["tool", "body", "until", "on_iteration"])
def test_a_swallowed_cancellation_goes_on(swallower: str) -> None:
    """Whoever catches CancelledError and returns doesn't keep the loop alive."""
    reached, iterations = [], []

    async def swallow() -> None:
        reached.append(1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    async def callback(*args: Any) -> None:
        await swallow()

    guarded = tool(swallow)
    options: dict[str, Any] = {swallower: callback} if swallower in ("until", "on_iteration") else {}

    @loop(max=5, **options)
    async def step(n: int) -> int:
        iterations.append(n)
        if swallower == "tool":
            await guarded()
        elif swallower == "body":
            await swallow()
        return n + 1

    async def main() -> None:
        task = asyncio.create_task(step(0))
        while not reached:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert iterations == [0]


def test_a_plain_function_that_returns_a_coroutine_is_a_configuration_error() -> None:
    """Its body would run later, outside the loop."""

    async def later(n: int) -> int:
        return n

    def step(n: int) -> Any:
        return later(n)

    with pytest.raises(ConfigurationError, match="async def"):
        loop(max=2)(step)(0)


@both
def test_stop_iteration_from_a_body_stays_stop_iteration(colour: Colour) -> None:
    """`next()` on an empty iterator isn't turned into a RuntimeError by our own generators."""
    boom = StopIteration("empty")

    def step(n: int) -> int:
        raise boom

    made = colour.make(step)
    if colour.name == "async":  # a coroutine can't raise it: Python turns it into a RuntimeError itself
        with pytest.raises(RuntimeError, match="StopIteration"):
            colour.call(loop(max=2)(made), 0)
        return
    with pytest.raises(StopIteration) as caught:
        colour.call(loop(max=2)(made), 0)
    assert caught.value is boom


def test_a_halted_task_group_ends_the_loop() -> None:
    """The BaseExceptionGroup of a TaskGroup whose tasks were halted is a halt."""

    @tool
    async def fetch(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async def swallow() -> None:
        while True:
            try:
                await fetch(1)
            except ToolCallRefused:
                pass

    @loop(max=2, guard=Guard(MaxSteps(0)))
    async def step(n: int) -> int:
        async with asyncio.TaskGroup() as group:
            group.create_task(swallow())
            group.create_task(swallow())
        return n

    result = asyncio.run(step.run(0))
    assert (result.stop_reason, result.iterations) == ("halted", 0)


# -- time ------------------------------------------------------------------------------------------


def test_a_sync_body_past_the_deadline_ends_at_the_next_iteration() -> None:
    """A body can't be killed, but no further one starts."""

    @loop(max=9, timeout=0.03)
    def step(n: int) -> int:
        time.sleep(0.02)
        return n + 1

    result = step.run(0)
    assert (result.stop_reason, result.completed, result.value) == ("timeout", False, 2)
    assert isinstance(result.error, ToolCallRefused)
    assert result.error.code == "timeout"


def test_a_sync_body_past_the_deadline_is_refused_its_next_tool_call() -> None:
    """The refusal says what has happened, and ends the loop."""

    @loop(max=9, timeout=0.02, name="slow")
    def step(n: int) -> int:
        time.sleep(0.03)
        look(n)
        return n + 1

    result = step.run(0)
    assert (result.stop_reason, result.iterations) == ("timeout", 0)
    assert "0.02 s" in str(result.error)
    with pytest.raises(LoopStopped, match="timeout"):
        step(0)


def test_an_async_body_is_cancelled_at_the_deadline() -> None:
    """It may clean up, and the loop ends as timed out, not as cancelled."""
    cleaned = []

    @loop(max=9, timeout=0.02)
    async def step(n: int) -> int:
        if n == 1:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append(n)
        return n + 1

    async def main() -> Any:
        result = await step.run(0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return result

    result = asyncio.run(main())
    assert (result.stop_reason, result.value, result.completed) == ("timeout", 1, False)
    assert cleaned == [1]


def test_an_async_body_that_swallows_the_deadline_ends_at_the_next_iteration() -> None:
    """What it returns is its state; no further iteration starts."""

    @loop(max=9, timeout=0.02)
    async def step(n: int) -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return n + 1

    result = asyncio.run(step.run(0))
    assert (result.stop_reason, result.value) == ("timeout", 1)


@both
def test_the_bodys_own_timeout_error_is_its_own(colour: Colour) -> None:
    """Whatever the loop's deadline says."""

    def step(n: int) -> int:
        raise TimeoutError("of the database")

    with pytest.raises(TimeoutError, match="of the database"):
        colour.call(loop(max=2, timeout=60)(colour.make(step)), 0)


def test_a_timeout_inside_the_body_works_within_the_loops_deadline() -> None:
    """asyncio.timeout nests."""

    @loop(max=2, timeout=60)
    async def step(n: int) -> int:
        try:
            async with asyncio.timeout(0.005):
                await asyncio.Event().wait()
        except TimeoutError:
            return n + 1
        return n

    assert asyncio.run(step(0)) == 2


def test_the_outer_deadline_ends_the_outer_loop() -> None:
    """The inner loop is cancelled with it, and leaves no result of its own."""

    @loop(max=9)
    async def inner(n: int) -> int:
        await asyncio.sleep(0.005)
        return n + 1

    @loop(max=9, timeout=0.03)
    async def outer(n: int) -> int:
        await inner(n)
        return n + 1

    result = asyncio.run(outer.run(0))
    assert result.stop_reason == "timeout"


def test_the_outer_deadline_ends_a_sync_inner_loop_that_calls_no_tools() -> None:
    """No further iteration starts, and the outer loop is the one that timed out."""

    @loop(max=10_000)
    def inner(n: int) -> int:
        time.sleep(0.005)
        return n + 1

    @loop(max=9, timeout=0.03)
    def outer(n: int) -> int:
        return inner(n)

    started = time.monotonic()
    result = outer.run(0)
    assert (result.stop_reason, result.iterations, result.name) == ("timeout", 0, "outer")
    assert time.monotonic() - started < 0.5


def test_a_cancellation_from_outside_is_no_timeout() -> None:
    """A loop with a deadline is cancelled like any other."""

    @loop(max=9, timeout=60)
    async def step(n: int) -> int:
        started.set()
        await asyncio.Event().wait()
        return n

    started = asyncio.Event()

    async def main() -> None:
        task = asyncio.create_task(step.run(0))
        await started.wait()
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_a_callers_timeout_around_the_loop_is_the_callers() -> None:
    """asyncio.timeout outside works with and without a deadline of the loop's own."""

    async def body(n: int) -> int:
        await asyncio.Event().wait()
        return n

    async def main() -> None:
        for options in ({}, {"timeout": 60}):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.005):
                    await loop(max=2, **options)(body)(0)

    asyncio.run(main())


def test_an_inner_deadline_ends_only_the_inner_loop() -> None:
    """Sync as async: the outer loop goes on."""

    @loop(max=9, timeout=0.01)
    async def inner(n: int) -> int:
        if n:
            await asyncio.Event().wait()
        return n + 1

    @loop(max=2)
    async def outer(n: int) -> int:
        return n + await inner(0)

    result = asyncio.run(outer.run(0))
    assert (result.value, result.stop_reason) == (2, "max_iterations")


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_a_jump_of_the_wall_clock_moves_no_deadline(monkeypatch: pytest.MonkeyPatch, jump: int) -> None:
    """Limits run on monotonic time, and durations are never negative."""
    real = time.time
    monkeypatch.setattr(
        time, "time", lambda: real() + jump * (current_run() is not None and current_run().iteration > 1)
    )  # type: ignore[union-attr]  # it is a run there

    @loop(max=1000, timeout=0.2)
    def step(n: int) -> int:
        time.sleep(0.03)
        return n + 1

    started = time.monotonic()
    result = step.run(0)
    assert result.stop_reason == "timeout"
    assert 0.2 <= time.monotonic() - started < 0.5
    assert all(each.duration >= 0 for each in result.history)


def test_swallowing_refusals_past_the_deadline_doesnt_keep_a_sync_body_alive() -> None:
    """Past a 50 ms timeout the body is halted within 200 ms, and the reason stays timeout."""
    started = time.monotonic()

    @loop(max=9, timeout=0.05)
    def spin(n: int) -> int:
        i = 0
        while True:
            i += 1
            try:
                look(i)
            except ToolCallRefused:
                pass

    result = spin.run(0)
    assert time.monotonic() - started < 0.2
    assert (result.stop_reason, result.iterations) == ("timeout", 0)
    assert isinstance(result.error, ToolCallRefused)
    assert result.error.code == "timeout"


def test_swallowing_everything_past_the_deadline_doesnt_keep_an_async_body_alive() -> None:
    """The cancellation is swallowed with the refusals; the next refused call is the end."""

    @tool
    async def fetch(n: int) -> int:
        await asyncio.sleep(0)
        return n

    @loop(max=9, timeout=0.05)
    async def spin(n: int) -> int:
        i = 0
        while True:
            i += 1
            try:
                await fetch(i)
            except (ToolCallRefused, asyncio.CancelledError):
                await asyncio.sleep(0)

    started = time.monotonic()
    result = asyncio.run(spin.run(0))
    assert time.monotonic() - started < 0.5
    assert result.stop_reason == "timeout"


# -- transitions and feedback ----------------------------------------------------------------------


@both
def test_every_transition_is_in_the_result_and_passed_on(colour: Colour) -> None:
    """ready ▸ running ▸ … ▸ success, each with its trigger, iteration and time."""
    seen: list[Transition] = []
    step = loop(max=2, on_transition=seen.append)(colour.make(lambda n: n + 1))
    before = time.time()
    result = colour.call(step.run, 0)
    assert [(t.source, t.trigger, t.target, t.iteration) for t in seen] == [
        ("ready", "start", "running", 0),
        ("running", "next", "running", 1),
        ("running", "complete", "success", 2),
    ]
    assert result.transitions == tuple(seen)
    assert all(before <= t.at <= time.time() for t in seen)


@pytest.mark.parametrize(
    ("body", "last"),
    [
        (lambda n: n + 1, ("running", "stop", "terminated")),
        (lambda n: look(1), ("running", "stop", "terminated")),
        (lambda n: 1 // 0, ("running", "fail", "failed")),
    ],
    ids=["ceiling", "refused", "raised"],
)
def test_the_last_transition_tells_success_failure_and_termination_apart(
    body: Callable[[int], int], last: tuple[str, str, str]
) -> None:
    """A stopped run is not a failure."""
    seen: list[Transition] = []
    step = loop(max=5, until=never, on_transition=seen.append, guard=Guard(LoopLimit(2)))(body)
    try:
        step.run(0)
    except ZeroDivisionError:
        pass
    assert (seen[-1].source, seen[-1].trigger, seen[-1].target) == last


def test_an_exception_of_on_transition_propagates() -> None:
    """It is the user's code: its error isn't lost."""

    def broken(transition: Transition) -> None:
        if transition.trigger == "complete":
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        loop(max=1, on_transition=broken)(lambda n: n)(0)


def test_a_refusal_in_on_transition_after_the_end_propagates_too() -> None:
    """The loop has ended by then: there is no state left that a refusal could stop."""

    def refused(transition: Transition) -> None:
        if transition.trigger == "complete":
            raise ToolCallRefused("loop_limit", "LoopLimit", "look", "again")

    with pytest.raises(ToolCallRefused, match="again") as caught:
        loop(max=1, on_transition=refused)(lambda n: n + 1)(0)
    partial = result_of(caught.value)
    assert partial is not None
    assert partial.value == 1


def test_the_help_shows_the_default_ceiling() -> None:
    """As a number, not as a mark of ours."""
    assert "max: 'int' = 10" in str(inspect.signature(loop))


def test_an_exception_of_on_transition_never_hides_the_one_of_the_body() -> None:
    """What the body raised arrives."""

    def broken(transition: Transition) -> None:
        if transition.trigger == "fail":
            raise KeyError("broken")

    with pytest.raises(ZeroDivisionError):
        loop(max=1, on_transition=broken)(lambda n: 1 // 0)(0)


@both
def test_a_body_that_declares_feedback_is_given_it(colour: Colour) -> None:
    """None while nobody has objected, by keyword or by default."""
    seen = []

    def with_default(n: int, *, feedback: str | None = "unset") -> int:
        seen.append(feedback)
        return n + 1

    def required(n: int, *, feedback: str | None) -> int:
        seen.append(feedback)
        return n + 1

    assert colour.call(loop(max=2)(colour.make(required)), 0) == 2
    assert seen == [None, None]
    assert colour.call(loop(max=2)(colour.make(with_default)), 0, feedback="be brief") == 2
    assert seen[2:] == ["be brief", "be brief"]
    assert colour.call(loop(max=1)(colour.make(with_default)), 0) == 1
    assert seen[4:] == ["unset"]


def test_a_positional_parameter_named_feedback_is_the_callers() -> None:
    """Only a keyword-only parameter is filled in."""

    @loop(max=2)
    def step(n: int, feedback: str = "mine") -> int:
        assert feedback == "mine"
        return n + 1

    assert step(0) == 2


# -- nesting and concurrency -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["task", "thread", "direct"])
def test_inner_loops_count_from_one_however_they_are_started(how: str) -> None:
    """Outer three, inner two: six inner bodies, numbered 1, 2 each time, under the outer run."""
    seen = []

    def body(n: int) -> int:
        run = current_run()
        assert run is not None
        assert run.parent is not None
        seen.append((run.parent.iteration, run.iteration, run.max))
        return n + 1

    async def async_body(n: int) -> int:
        return body(n)

    inner, async_inner = loop(max=2)(body), loop(max=2)(async_body)

    @loop(max=3)
    async def outer(n: int) -> int:
        if how == "task":
            return await asyncio.create_task(async_inner(n))
        if how == "thread":
            return await asyncio.to_thread(inner, n)
        return inner(n)

    assert asyncio.run(outer(0)) == 6
    assert seen == [(i, j, 2) for i in (1, 2, 3) for j in (1, 2)]


def test_concurrent_runs_of_one_function_share_nothing() -> None:
    """Tasks and threads: each has its own state, iterations, steps and history."""
    guard = Guard(MaxSteps(3))

    @tool
    async def fetch(n: int) -> int:
        await asyncio.sleep(0)
        return n

    @loop(max=9, guard=guard)
    async def step(n: int) -> int:
        await fetch(n)
        await asyncio.sleep(0)
        return n + 1

    async def main() -> list[Any]:
        return await asyncio.gather(*(step.run(10 * i) for i in range(5)))

    results = asyncio.run(main())
    assert [result.value for result in results] == [3, 13, 23, 33, 43]
    assert {result.stop_reason for result in results} == {"max_steps"}
    assert len({result.run_id for result in results}) == 5
    assert [[each.value for each in result.history] for result in results][1] == [11, 12, 13]

    @loop(max=9, guard=guard)
    def sync_step(n: int) -> int:
        look(n)
        return n + 1

    with ThreadPoolExecutor(5) as pool:
        done = list(pool.map(sync_step.run, range(0, 50, 10)))
    assert [result.value for result in done] == [3, 13, 23, 33, 43]


def test_a_reentrant_call_is_a_child_run() -> None:
    """A loop that calls itself counts in a run of its own, below the first, under the first one's limits."""
    seen = []

    @loop(max=2)
    def walk(n: int) -> int:
        run = current_run()
        assert run is not None
        seen.append((n, run.iteration, run.parent.id if run.parent else None, run.id))
        if n == 0:
            walk(10)
        return n + 1

    walk(0)
    assert [(n, iteration) for n, iteration, _, _ in seen] == [(0, 1), (10, 1), (11, 2), (1, 2)]
    assert seen[1][2] == seen[0][3]
    assert seen[0][2] is None


def test_a_loop_runs_in_the_context_of_its_caller() -> None:
    """ContextVars go in, and what the body sets comes out, as in a plain call."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("outside")

    @loop(max=1)
    def step(n: int) -> int:
        assert variable.get() == "outside"
        variable.set("inside")
        return n

    step(0)
    assert variable.get() == "inside"
    assert current_run() is None


def test_until_runs_in_the_thread_of_the_loop() -> None:
    """Conditions and callbacks run inline, also in async loops."""
    threads = set()

    def note(*args: Any) -> None:
        threads.add(threading.get_ident())

    @loop(max=2, until=note, on_iteration=note)
    async def step(n: int) -> int:
        return n

    asyncio.run(step(0))
    assert threads == {threading.get_ident()}


def test_a_loops_budget_and_guard_stand_together() -> None:
    """`guard=` and `budget=` are both in force, afresh in each run."""

    @tool(cost=0.5)
    def pay(n: int) -> None: ...

    @loop(max=9, guard=Guard(MaxSteps(5)), budget=Budget(usd=1))
    def step(n: int) -> int:
        pay(n)
        return n + 1

    for _ in range(2):
        result = step.run(0)
        assert (result.stop_reason, result.value, result.cost) == ("budget", 2, Decimal(1))
    assert Verdict(True).passed
