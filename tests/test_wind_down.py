"""The wind-down: past 80 % of a limit a model is told what is left, while it can still finish."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loopguard import Budget, Guard, MaxSteps, current_run, loop, tool


def turn(*calls: Any) -> dict[str, Any]:
    """A message of a model that calls search so many times, with these queries."""
    uses = [
        {"type": "tool_use", "id": f"t{i}", "name": "search", "input": {"query": query}}
        for i, query in enumerate(calls)
    ]
    return {"role": "assistant", "content": uses}


@pytest.fixture(params=["run_tools", "arun_tools"])
def run_tools(request: pytest.FixtureRequest) -> Any:
    """run_tools(guard, message): the results of either."""

    def run(guard: Guard, message: Any) -> list[dict[str, Any]]:
        if request.param == "run_tools":
            return guard.run_tools(message)
        return asyncio.run(guard.arun_tools(message))

    return run


def policy(*guardrails: Any, result: Any = "found", **options: Any) -> Guard:
    """A guard with one tool."""
    guard = Guard(*guardrails)

    @guard.tool(**options)
    def search(query: str) -> Any:
        """Look it up."""
        return result

    return guard


@pytest.mark.parametrize(
    ("guard", "text"),
    [
        (policy(MaxSteps(5)), "Used so far: 4 of 5 tool calls."),
        (policy(Budget(usd=2), cost=0.4), "Used so far: $1.60 of $2.00."),
        (policy(Budget(credits=10), cost={"credits": 2}), "Used so far: 8 of 10 credits."),
        (policy(Budget(tool_calls=5)), "Used so far: 4 of 5 tool calls."),
        (policy(MaxSteps(5), Budget(usd=2), cost=0.1), "Used so far: 4 of 5 tool calls, $0.40 of $2.00."),
    ],
)
def test_past_four_fifths_of_a_limit_the_last_result_says_what_is_left(run_tools: Any, guard: Guard, text: str) -> None:
    """Before that nothing is added; the note stands behind the result it came with."""
    with guard.scope():
        for n in range(3):
            assert [result["content"] for result in run_tools(guard, turn(str(n)))] == ["found"]
        (result,) = run_tools(guard, turn("last"))
    assert result["content"] == f"found\n\n{text} Little is left: finish now with what you have."


def test_only_the_last_of_several_results_says_it(run_tools: Any) -> None:
    """Once a turn."""
    guard = policy(MaxSteps(3))
    with guard.scope():
        results = run_tools(guard, turn("a", "b", "c"))
    assert [result["content"] == "found" for result in results] == [True, True, False]


def test_a_refusal_says_it_too(run_tools: Any) -> None:
    """The model reads why, and what is left of the rest."""
    guard = policy(MaxSteps(1), Budget(usd=10), cost=1)
    with guard.scope():
        run_tools(guard, turn("a"))
        (result,) = run_tools(guard, turn("b"))
    assert result["is_error"] is True
    assert result["content"].startswith("search was not run: ")
    assert result["content"].endswith(
        "\n\nUsed so far: 1 of 1 tool calls, $1.00 of $10.00. Little is left: finish now with what you have."
    )


@pytest.mark.parametrize(
    ("result", "content"),
    [
        (None, "Used so far: 1 of 1 tool calls. Little is left: finish now with what you have."),
        (
            [{"type": "text", "text": "found"}],
            [
                {"type": "text", "text": "found"},
                {
                    "type": "text",
                    "text": "Used so far: 1 of 1 tool calls. Little is left: finish now with what you have.",
                },
            ],
        ),
    ],
)
def test_the_note_fits_the_kind_of_result(run_tools: Any, result: Any, content: Any) -> None:
    """Empty results and lists of blocks; the tool's own list isn't changed."""
    guard = policy(MaxSteps(1), result=result)
    with guard.scope():
        assert run_tools(guard, turn("a"))[0]["content"] == content
    assert result is None or len(result) == 1


def test_a_limit_of_some_tools_alone_makes_a_note_of_its_own(run_tools: Any) -> None:
    """Nothing else is limited, so there is nothing more to say."""
    guard = policy(MaxSteps(1, only="search"))
    with guard.scope():
        (result,) = run_tools(guard, turn("a"))
    assert result["content"] == "found\n\nLittle is left: finish now with what you have."


def test_without_a_limit_or_a_run_nothing_is_said(run_tools: Any) -> None:
    """There is nothing to run out of."""
    guard = policy()
    assert run_tools(guard, turn("a"))[0]["content"] == "found"
    with guard.scope():
        assert run_tools(guard, turn("a"))[0]["content"] == "found"
        assert run_tools(guard, turn()) == []


def test_a_parents_limits_are_told_to_its_children() -> None:
    """What is tight is tight for whoever works under it; the ceiling of iterations is part of it."""
    guard = policy(MaxSteps(9))
    said: list[str] = []

    @loop(max=5)
    def child(n: int) -> int:
        said.append(guard.run_tools(turn(str(n)))[0]["content"])
        return n + 1

    with Guard(Budget(usd=2)).scope():
        child(0)
    assert said[:3] == ["found"] * 3
    assert said[3] == (
        "found\n\nUsed so far: $0.00 of $2.00, 4 of 9 tool calls, iteration 4 of 5. "
        "Little is left: finish now with what you have."
    )


def test_brief_says_what_is_used_and_is_empty_without_limits() -> None:
    """For prompts of one's own."""
    with Guard().scope() as run:
        assert run.brief() == ""
        assert run.nearly_done() is False
    work = tool(cost=0.25)(lambda n: n)
    with Guard(MaxSteps(20), Budget(usd=2, tokens=1000)).scope() as run:
        work(1)
        assert run.brief() == "Used so far: 1 of 20 tool calls, $0.25 of $2.00, 0 of 1000 tokens."
        assert run.nearly_done() is False
        assert run.nearly_done(0.05) is True
        assert current_run() is run
