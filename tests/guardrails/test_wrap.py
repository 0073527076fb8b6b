"""WrapTool: a hook sees every call, refused ones too; it may change, answer, repeat or refuse it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest

from loopguard import (
    ApproveTool,
    Budget,
    ConfigurationError,
    Guard,
    LoopLimit,
    LoopLimitExceeded,
    MaxSteps,
    MaxStepsExceeded,
    ToolCallRefused,
    WrapTool,
    charge,
    current_call,
    tool,
)
from tests.conftest import Colour


def recording(log: list[Any], name: str = "") -> Callable[..., Any]:
    """A hook that writes down what it sees."""

    def hook(call: Any, proceed: Any) -> Any:
        log.append(f"{name}before")
        try:
            result = yield from proceed(call)
        except Exception as exc:
            log.append(f"{name}{type(exc).__name__}")
            raise
        log.append(f"{name}after")
        return result

    return hook


def changing(**arguments: Any) -> Callable[..., Any]:
    """A hook that puts other arguments in."""

    def hook(call: Any, proceed: Any) -> Any:
        return (yield from proceed(call.replace(arguments={**call.arguments, **arguments})))

    return hook


# -- what it sees ----------------------------------------------------------------------------------


def test_a_hook_sees_results_exceptions_and_refusals(colour: Colour) -> None:
    """It is outside of everything else."""
    log: list[Any] = []

    def body(n: int) -> int:
        if n == 2:
            raise LookupError
        return n

    decorated = tool(colour.make(body))
    with Guard(WrapTool(recording(log)), MaxSteps(2)).scope():
        assert colour.call(decorated, 1) == 1
        with pytest.raises(LookupError):
            colour.call(decorated, 2)
        with pytest.raises(MaxStepsExceeded):
            colour.call(decorated, 3)
    assert log == ["before", "after", "before", "LookupError", "before", "MaxStepsExceeded"]


def test_the_first_listed_is_the_outermost_and_a_parents_are_outside_a_childs(colour: Colour) -> None:
    """Root first, then in the order of the guard."""
    log: list[Any] = []
    outer = Guard(WrapTool(recording(log, "a ")), WrapTool(recording(log, "b ")))
    inner = Guard(WrapTool(recording(log, "c ")))
    decorated = inner.tool(colour.make(lambda: log.append("body")))
    with outer.scope(), inner.scope():
        colour.call(decorated)
    assert log == ["a before", "b before", "c before", "body", "c after", "b after", "a after"]


def test_a_hook_on_several_runs_acts_once_per_call(colour: Colour) -> None:
    """However often its guard stands on the chain."""
    log: list[Any] = []
    guard = Guard(WrapTool(recording(log)))
    decorated = guard.tool(colour.make(lambda: None))
    with guard.scope(), guard.scope():
        colour.call(decorated)
    assert log == ["before", "after"]


def test_outside_any_run_the_tools_own_hook_acts(colour: Colour) -> None:
    """A guard on the tool is enough."""
    log: list[Any] = []
    colour.call(Guard(WrapTool(recording(log))).tool(colour.make(lambda: None)))
    assert log == ["before", "after"]


def test_before_and_after_are_plain_or_async_functions(colour: Colour) -> None:
    """before may change the call; after sees what succeeded, and only that."""
    log: list[Any] = []

    def before(call: Any) -> Any:
        log.append(("before", call.arguments))
        return call.replace(arguments={"n": call.arguments["n"] + 1}) if call.arguments["n"] < 10 else None

    def after(call: Any, result: Any) -> None:
        log.append(("after", call.arguments, result))

    def body(n: int) -> int:
        if n == 10:
            raise LookupError
        return n

    decorated = tool(colour.make(body))
    with Guard(WrapTool(before=before), WrapTool(after=after)).scope():
        assert colour.call(decorated, 1) == 2
        with pytest.raises(LookupError):
            colour.call(decorated, 10)
    returned = None if "generator" in colour.name else 2  # generators return nothing, they yield
    assert log == [("before", {"n": 1}), ("after", {"n": 2}, returned), ("before", {"n": 10})]


def test_what_before_or_after_raises_is_the_calls_outcome(colour: Colour) -> None:
    """before: nothing has run; after: the body has."""
    bodies: list[int] = []

    def fail(*args: Any) -> None:
        raise LookupError

    decorated = tool(colour.make(lambda: bodies.append(1)))
    with Guard(WrapTool(before=fail)).scope() as run, pytest.raises(LookupError):
        colour.call(decorated)
    assert (bodies, run.steps) == ([], 0)
    with Guard(WrapTool(after=fail)).scope() as run, pytest.raises(LookupError):
        colour.call(decorated)
    assert (bodies, run.steps) == ([1], 1)


def test_what_before_returns_must_be_a_call_or_none(colour: Colour) -> None:
    """A dict of arguments is a likely mistake."""
    decorated = tool(colour.make(lambda n: n))
    with Guard(WrapTool(before=lambda call: {"n": 2})).scope(), pytest.raises(ConfigurationError, match="changed call"):
        colour.call(decorated, 1)


@pytest.mark.parametrize("wrong", [lambda call, proceed: proceed(call), 3, "hook", print])
def test_a_hook_that_is_no_generator_function_is_refused_at_once(wrong: Any) -> None:
    """The message says what a hook looks like."""
    with pytest.raises(ConfigurationError, match="generator function"):
        WrapTool(wrong)


@pytest.mark.parametrize("options", [{}, {"before": 3}, {"after": "x"}])
def test_options_that_make_no_hook_are_refused_at_once(options: dict[str, Any]) -> None:
    """Nothing, or what can't be called."""
    with pytest.raises(ConfigurationError, match="WrapTool"):
        WrapTool(**options)


def test_hook_and_before_together_are_refused_at_once() -> None:
    """It would be unclear which goes first."""
    with pytest.raises(ConfigurationError, match="either"):
        WrapTool(recording([]), before=print)


def test_a_hook_may_be_a_method_a_partial_or_a_callable_object(colour: Colour) -> None:
    """Whatever is a generator function when called."""
    log: list[Any] = []

    class Hook:
        def __call__(self, call: Any, proceed: Any) -> Any:
            log.append("object")
            return (yield from proceed(call))

        def method(self, call: Any, proceed: Any) -> Any:
            log.append("method")
            return (yield from proceed(call))

    def named(name: str, call: Any, proceed: Any) -> Any:
        log.append(name)
        return (yield from proceed(call))

    hooks = (Hook(), Hook().method, functools.partial(named, "partial"))
    with Guard(*map(WrapTool, hooks)).scope():
        colour.call(tool(colour.make(lambda: None)))
    assert log == ["object", "method", "partial"]


# -- changing the call -----------------------------------------------------------------------------


def test_replaced_arguments_are_what_limits_approvers_and_body_see(colour: Colour) -> None:
    """A hook rewrites 10 to 20: the approver sees 20, and 20 runs (C38)."""
    seen: list[Any] = []

    def approver(call: Any) -> bool:
        seen.append(call.arguments)
        return True

    priced = tool(cost=lambda call: call.arguments["amount"])(colour.make(lambda amount: amount))
    with Guard(WrapTool(changing(amount=20)), ApproveTool(approver), Budget(usd=100)).scope() as run:
        assert colour.call(priced, 10) == 20
        assert run.spent() == 20
    assert seen == [{"amount": 20}]


def test_a_call_changed_to_the_same_arguments_again_and_again_is_a_loop(colour: Colour) -> None:
    """LoopLimit counts what runs, not what was asked for."""
    decorated = tool(colour.make(lambda n: "same"))
    with Guard(WrapTool(changing(n=0)), LoopLimit(3)).scope():
        for n in range(3):
            colour.call(decorated, n)
        with pytest.raises(LoopLimitExceeded):
            colour.call(decorated, 3)


def shape(a: Any, /, b: Any, *rest: Any, c: Any, d: Any = 4, **more: Any) -> Any:
    """Every kind of parameter."""
    return a, b, rest, c, d, more


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, 2, (3,), 5, 4, {"e": 6})),
        ({"a": 10}, (10, 2, (3,), 5, 4, {"e": 6})),
        ({"b": 20, "c": 50}, (1, 20, (3,), 50, 4, {"e": 6})),
        ({"rest": (), "more": {}}, (1, 2, (), 5, 4, {})),
        ({"rest": [7, 8, 9], "d": 40}, (1, 2, (7, 8, 9), 5, 40, {"e": 6})),
        ({"more": {"e": 60, "f": 70}}, (1, 2, (3,), 5, 4, {"e": 60, "f": 70})),
        ({"more": {"a": 1, "b": 2}}, None),
    ],
)
def test_arguments_of_every_kind_can_be_replaced(
    colour: Colour, changes: dict[str, Any], expected: tuple[Any, ...] | None
) -> None:
    """Positional-only, *args, keyword-only, defaults and **kwargs, in the shape of call.arguments."""
    decorated = tool(colour.make(shape))
    with Guard(WrapTool(changing(**changes))).scope() as run:
        if expected is None:  # b twice
            with pytest.raises(TypeError):
                colour.call(decorated, 1, 2, 3, c=5, e=6)
            assert run.steps == 0
        else:
            assert colour.call(decorated, 1, 2, 3, c=5, e=6) == expected


def test_a_replacement_may_leave_out_what_has_a_default(colour: Colour) -> None:
    """And must not leave out what has none, or name what isn't there."""

    def search(query: str, top: int = 3, *, deep: bool = False) -> Any:
        return query, top, deep

    decorated = tool(colour.make(search))

    def replacing(arguments: Any) -> Guard:
        def hook(call: Any, proceed: Any) -> Any:
            return (yield from proceed(call.replace(arguments=arguments)))

        return Guard(WrapTool(hook))

    with replacing({"query": "b", "deep": True}).scope():
        assert colour.call(decorated, "a", 9) == ("b", 3, True)
    for wrong, match in (({"top": 1}, "no value for the parameter query"), ({"query": "b", "x": 1}, "no parameter x")):
        with replacing(wrong).scope() as run, pytest.raises(TypeError, match=match):
            colour.call(decorated, "a")
        assert run.steps == 0
    with replacing(["b"]).scope(), pytest.raises(TypeError, match="a list, not a mapping"):
        colour.call(decorated, "a")


def test_the_object_of_a_method_stays_when_its_arguments_are_replaced() -> None:
    """self and cls aren't among the arguments."""
    seen: list[Any] = []

    class Shop:
        @tool
        def sell(self, item: str, *, amount: int = 1) -> Any:
            return self, item, amount

        @tool
        @classmethod
        def open(cls, city: str) -> Any:
            return cls, city

        @tool
        @staticmethod
        def price(item: str) -> str:
            return item

    def hook(call: Any, proceed: Any) -> Any:
        seen.append(call.arguments)
        changed = {name: "b" for name, value in call.arguments.items() if value == "a"}
        return (yield from proceed(call.replace(arguments={**call.arguments, **changed})))

    shop = Shop()
    with Guard(WrapTool(hook)).scope():
        assert shop.sell("a") == (shop, "b", 1)
        assert Shop.sell(shop, "a", amount=2) == (shop, "b", 2)
        assert shop.open("a") == (Shop, "b")
        assert Shop.open("a") == (Shop, "b")
        assert Shop.price("a") == "b"
    assert seen == [{"item": "a", "amount": 1}, {"item": "a", "amount": 2}, {"city": "a"}, {"city": "a"}, {"item": "a"}]


def test_replacing_changes_neither_the_original_call_nor_the_callers_objects(colour: Colour) -> None:
    """A new call of the same id."""
    given = [1]
    calls: list[Any] = []

    def hook(call: Any, proceed: Any) -> Any:
        new = call.replace(arguments={"items": [*call.arguments["items"], 2]})
        calls.extend((call, new))
        return (yield from proceed(new))

    with Guard(WrapTool(hook)).scope():
        assert colour.call(tool(colour.make(lambda items: items)), given) == [1, 2]
    assert given == [1]
    assert calls[0].arguments == {"items": [1]}
    assert calls[0].id == calls[1].id
    assert calls[0].idempotency_key == calls[1].idempotency_key


def test_without_a_replacement_the_tool_gets_the_very_objects(colour: Colour) -> None:
    """Nothing is copied on the way."""
    given = {"deep": [1]}
    with Guard(WrapTool(recording([]))).scope():
        assert colour.call(tool(colour.make(lambda value: value)), given) is given


# -- answering, repeating, refusing ----------------------------------------------------------------


def test_a_hook_that_answers_from_a_record_uses_nothing(colour: Colour) -> None:
    """It never proceeds: no step, no cost, nobody asked, no body."""
    asked: list[Any] = []
    bodies: list[int] = []

    def hook(call: Any, proceed: Any) -> Any:
        return "from the record"
        yield

    decorated = tool(cost=1)(colour.make(lambda: bodies.append(1)))
    guard = Guard(WrapTool(hook), MaxSteps(0), Budget(usd=0), ApproveTool(lambda call: asked.append(call) or True))
    with guard.scope() as run:
        if colour.name in ("sync", "async"):
            assert colour.call(decorated) == "from the record"
        else:
            with pytest.raises(IndexError):  # it yields no item; the record is what it returns
                colour.call(decorated)
        assert (run.steps, run.refusals, run.spent(), asked, bodies) == (0, 0, 0, [], [])


def test_a_hook_that_proceeds_twice_is_admitted_twice(colour: Colour) -> None:
    """Each time takes a step and its cost, and releases what it had reserved."""
    bodies: list[Any] = []

    def twice(call: Any, proceed: Any) -> Any:
        yield from proceed(call)
        return (yield from proceed(call))

    def body(n: int) -> int:
        bodies.append(current_call())
        return len(bodies)

    decorated = tool(cost=1)(colour.make(body))
    with Guard(WrapTool(twice), MaxSteps(3), Budget(usd=10)).scope() as run:
        colour.call(decorated, 1)
        assert (run.steps, run.spent(), run.reserved(), len(bodies)) == (2, 2, 0, 2)
        with pytest.raises(MaxStepsExceeded):
            colour.call(decorated, 2)
        assert (run.steps, run.spent(), run.reserved(), len(bodies)) == (3, 3, 0, 3)
    assert len({call.id for call in bodies[:2]}) == 1


@pytest.mark.parametrize("cost", [1, None, lambda call: 1], ids=["fixed", "undeclared", "by function"])
def test_a_repeated_call_settles_each_time_what_that_time_reported(colour: Colour, cost: Any) -> None:
    """Reports of the first time don't stick to the second, whether it returns or raises."""
    reports = [2, 3]

    def stubborn(call: Any, proceed: Any) -> Any:
        try:
            yield from proceed(call)
        except LookupError:
            pass
        return (yield from proceed(call))

    def body() -> None:
        charge(usd=reports.pop(0))
        if reports:
            raise LookupError

    decorated = tool(cost=cost, repeatable=True)(colour.make(body))
    surprise = pytest.warns(match="declare the most it may cost") if cost is None else contextlib.nullcontext()
    with Guard(WrapTool(stubborn)).scope() as run, surprise:
        colour.call(decorated)
        assert (run.spent(), run.reserved(), run.steps) == (5, 0, 2)


def test_a_hook_that_repeats_the_same_call_is_itself_a_loop(colour: Colour) -> None:
    """LoopLimit stops it at the fourth time."""
    bodies: list[int] = []

    def for_ever(call: Any, proceed: Any) -> Any:
        while True:
            yield from proceed(call)

    decorated = tool(colour.make(lambda: bodies.append(1)))
    with Guard(WrapTool(for_ever)).scope() as run:
        with pytest.raises(LoopLimitExceeded):
            colour.call(decorated)
        assert (run.steps, len(bodies)) == (3, 3)


def test_what_observe_mode_noted_of_one_round_is_not_told_again_in_the_next(colour: Colour) -> None:
    """Two rounds over a limit are two observed refusals."""
    events: list[Any] = []

    def twice(call: Any, proceed: Any) -> Any:
        yield from proceed(call)
        return (yield from proceed(call))

    with Guard(WrapTool(twice), MaxSteps(0), mode="observe", on_event=events.append).scope():
        colour.call(tool(colour.make(lambda: None)))
    assert [event.observed for event in events if type(event).__name__ == "ToolRefused"] == [True, True]


def test_each_round_asks_the_approver_again(colour: Colour) -> None:
    """A yes holds for one execution."""
    asked: list[Any] = []
    bodies: list[int] = []

    def twice(call: Any, proceed: Any) -> Any:
        yield from proceed(call)
        return (yield from proceed(call))

    decorated = tool(colour.make(lambda: bodies.append(1)))
    with Guard(WrapTool(twice), ApproveTool(lambda call: asked.append(call) or len(asked) < 2)).scope() as run:
        with pytest.raises(ToolCallRefused):
            colour.call(decorated)
        assert (run.steps, len(asked), len(bodies)) == (1, 2, 1)


@pytest.mark.parametrize("colour", ["sync", "async"], indirect=True)
def test_a_hook_may_swallow_a_refusal_and_answer_itself(colour: Colour) -> None:
    """The refusal is counted; the caller gets the answer; nothing ran."""
    bodies: list[int] = []

    def hook(call: Any, proceed: Any) -> Any:
        try:
            return (yield from proceed(call))
        except ToolCallRefused as refusal:
            return f"no: {refusal.code}"

    decorated = tool(colour.make(lambda: bodies.append(1)))
    with Guard(WrapTool(hook), MaxSteps(0), max_refusals=100).scope() as run:
        assert colour.call(decorated) == "no: max_steps"
        assert (run.steps, run.refusals, bodies) == (0, 1, [])


def test_a_hook_may_refuse_with_a_refusal_of_its_own(colour: Colour) -> None:
    """What it raises reaches the caller as it is, and uses no step."""
    bodies: list[int] = []
    refusal = ToolCallRefused("stopped", "OfficeHours", "work", "closed on Sundays")

    def hook(call: Any, proceed: Any) -> Any:
        raise refusal
        yield

    decorated = tool(colour.make(lambda: bodies.append(1)))
    with Guard(WrapTool(hook)).scope() as run, pytest.raises(ToolCallRefused) as caught:
        colour.call(decorated)
    assert caught.value is refusal
    assert (run.steps, bodies) == (0, [])


def test_a_hook_may_change_the_result_of_functions(colour: Colour) -> None:
    """Of generators it sees what they returned; their items go straight to the consumer."""

    def hook(call: Any, proceed: Any) -> Any:
        result = yield from proceed(call)
        return None if result is None else result * 2

    decorated = tool(colour.make(lambda: 21))
    with Guard(WrapTool(hook)).scope():
        assert colour.call(decorated) == (21 if "generator" in colour.name else 42)


def test_a_hook_may_turn_an_exception_into_a_result_or_another_exception(colour: Colour) -> None:
    """As a wrapper function could."""

    def hook(call: Any, proceed: Any) -> Any:
        try:
            return (yield from proceed(call))
        except LookupError as exc:
            raise OSError("translated") from exc

    def body() -> None:
        raise LookupError("raw")

    with Guard(WrapTool(hook)).scope(), pytest.raises(OSError, match="translated") as caught:
        colour.call(tool(colour.make(body)))
    assert isinstance(caught.value.__cause__, LookupError)


def test_one_hook_serves_every_colour() -> None:
    """It is written once."""
    log: list[Any] = []
    guard = Guard(WrapTool(recording(log)))
    with asyncio.Runner() as runner, guard.scope():
        for name in ("sync", "async", "generator", "async generator"):
            one = Colour(name, runner)
            assert one.call(tool(one.make(lambda x: x)), name) == name
    assert log == ["before", "after"] * 4


def test_a_hook_is_shown_by_the_names_of_its_functions() -> None:
    """In the repr of a guard one sees what stands around the calls."""

    def log(call: Any, proceed: Any) -> Any:
        return (yield from proceed(call))

    assert repr(Guard(WrapTool(log), WrapTool(before=print, after=len))) == (
        "Guard(WrapTool(log), WrapTool(before=print, after=len))"
    )
