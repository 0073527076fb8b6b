"""Guard.foreign: tools whose bodies live elsewhere, called with what a model gave."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from loopguard import (
    Approval,
    ApprovalDenied,
    ApproveTool,
    Budget,
    BudgetExceeded,
    ConfigurationError,
    Guard,
    LoopLimitExceeded,
    MaxSteps,
    MaxStepsExceeded,
    WrapTool,
    current_call,
)
from loopguard.testing import capture


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Any:
    """Call a foreign tool in either colour."""

    def sync_call(tool: Any, arguments: Mapping[str, Any], body: Any = dict, id: str | None = None) -> Any:
        return tool.call(arguments, body, id)

    def async_call(tool: Any, arguments: Mapping[str, Any], body: Any = dict, id: str | None = None) -> Any:
        async def awaited(given: dict[str, Any]) -> Any:
            await asyncio.sleep(0)
            return body(given)

        return asyncio.run(tool.acall(arguments, awaited, id))

    return sync_call if request.param == "sync" else async_call


def test_the_body_gets_what_the_model_gave(call: Any) -> None:
    """Whatever the arguments are called, they reach the body in a dict of its own."""
    given = {"self": 1, "name": 2, "not an identifier": [3], "": None, "\x1b[2J": "x"}
    got = call(Guard().foreign("search"), given, lambda arguments: arguments)
    assert got == given
    assert got is not given


def test_an_approver_sees_the_arguments_themselves_and_may_edit_them(call: Any) -> None:
    """call.arguments is the mapping, not wrapped in a parameter, and an edit has the same shape."""
    seen: list[Any] = []

    def approver(asked: Any) -> Approval:
        seen.append((asked.name, asked.arguments, asked.id))
        return Approval.edit({"amount": 1})

    refund = Guard(ApproveTool(approver, only=lambda asked: asked.arguments["amount"] > 1)).foreign("refund")
    assert call(refund, {"amount": 5}, dict, "toolu_1") == {"amount": 1}
    assert call(refund, {"amount": 1}) == {"amount": 1}
    assert seen == [("refund", {"amount": 5}, "toolu_1")]


def test_approve_needs_an_explicit_yes(call: Any) -> None:
    """approve=True without an approver refuses, and the body never runs."""
    ran: list[Any] = []
    with pytest.raises(ApprovalDenied, match="too much"):
        call(Guard(ApproveTool(lambda _: (False, "too much"))).foreign("refund", approve=True), {}, ran.append)
    assert ran == []


def test_repeats_are_told_by_the_arguments_in_any_order(call: Any) -> None:
    """LoopLimit counts the same names and values as the same call, and others as new."""
    guard = Guard()
    search = guard.foreign("search")
    with guard.scope():
        for _ in range(3):
            call(search, {"a": "b", "c": 1}, lambda _: "same")
        with pytest.raises(LoopLimitExceeded):
            call(search, {"c": 1, "a": "b"}, lambda _: "same")
        call(search, {"a": "b", "c": 2}, lambda _: "same")
        call(search, {"b": "a", "c": 1}, lambda _: "same")


def test_limits_count_foreign_tools_of_either_colour_together() -> None:
    """One tool, called from sync and async code, is one tool to MaxSteps and Budget."""
    guard = Guard(MaxSteps(2), Budget(usd=0.05))
    tool = guard.foreign("search", cost=0.02)

    async def body(arguments: dict[str, Any]) -> str:
        return "async"

    with guard.scope() as run:
        assert tool.call({"q": 1}, lambda _: "sync") == "sync"
        assert asyncio.run(run.bind(tool.acall)({"q": 2}, body)) == "async"
        with pytest.raises(MaxStepsExceeded):
            tool.call({"q": 3}, lambda _: "sync")
        assert str(run.spent()) == "0.04"


def test_the_cost_may_depend_on_the_arguments(call: Any) -> None:
    """cost=fn(call) reads call.arguments."""
    tool = Guard(Budget(usd=1)).foreign("buy", cost=lambda asked: asked.arguments["price"])
    assert call(tool, {"price": 1}) == {"price": 1}
    with pytest.raises(BudgetExceeded):
        call(tool, {"price": 2})


def test_hooks_and_events_see_the_call(call: Any) -> None:
    """A hook may change the arguments, and events carry them flat."""

    def upper(asked: Any, proceed: Any) -> Any:
        return (yield from proceed(asked.replace(arguments={**asked.arguments, "q": asked.arguments["q"].upper()})))

    with capture() as seen:
        guard = Guard(WrapTool(upper))
        with guard.scope() as run:
            tool = guard.foreign("search")
            got = call_in(run, call, tool)
    assert got == ({"q": "X"}, "search", {"q": "X"})
    assert [dict(event.arguments) for event in seen.events if hasattr(event, "arguments")][-1] == {"q": "X"}


def call_in(run: Any, call: Any, tool: Any) -> Any:
    """Call it in the run, and tell what the body saw."""

    def body(arguments: dict[str, Any]) -> Any:
        here = current_call()
        assert here is not None
        assert here.run is run
        return arguments, here.name, here.arguments

    return call(tool, {"q": "x"}, body)


def test_the_bodys_exception_reaches_the_caller(call: Any) -> None:
    """The same object, StopIteration included."""
    error = StopIteration("mine")

    def body(_: dict[str, Any]) -> None:
        raise error

    tool = Guard().foreign("search")
    if call.__name__ == "sync_call":
        with pytest.raises(StopIteration) as caught:
            call(tool, {}, body)
        assert caught.value is error
    else:
        with pytest.raises(RuntimeError) as raised:  # a coroutine can't raise StopIteration
            call(tool, {}, body)
        assert raised.value.__cause__ is error


@pytest.mark.parametrize("options", [{"cost": -1}, {"approve": 1}, {"timeout": 0}])
def test_wrong_options_are_found_when_it_is_made(options: Any) -> None:
    """The options are checked as those of @tool are."""
    with pytest.raises(ConfigurationError):
        Guard().foreign("search", **options)


def test_a_name_is_needed() -> None:
    """An empty name, or none, is a ConfigurationError."""
    with pytest.raises(ConfigurationError):
        Guard().foreign("")
    with pytest.raises(ConfigurationError):
        Guard().foreign(None)  # type: ignore[arg-type]  # what is wrong about it
