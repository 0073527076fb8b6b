"""until_llm from the user's side: who is asked when, what counts, and what it does to the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from loopguard import (
    Budget,
    ConfigurationError,
    JudgeError,
    LoopState,
    StopReason,
    ToolCallRefused,
    Verdict,
    charge,
    current_run,
    loop,
    result_of,
    tool,
)
from loopguard import _events as events
from loopguard.testing import ScriptedJudge, capture

QUESTION = "Is it done?"


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """run(body, state, **options) is the LoopResult of a loop of this colour."""

    def run_(body: Callable[..., Any], state: Any = 0, **options: Any) -> Any:
        options = {"max": 9, "until_llm": QUESTION, **options}
        if request.param == "sync":
            return loop(**options)(body).run(state)

        async def step(n: Any) -> Any:
            return body(n)

        return asyncio.run(loop(**options)(step).run(state))

    return run_


def add(n: int) -> int:
    """A step."""
    return n + 1


# -- decoration ------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["", "  ", 5, True, ["Done?"]])
def test_a_wrong_question_is_a_configuration_error(question: Any) -> None:
    """It is a text."""
    with pytest.raises(ConfigurationError, match="until_llm"):
        loop(until_llm=question)(add)


@pytest.mark.parametrize("judge", ["claude", 5, True])
def test_a_judge_is_a_function(judge: Any) -> None:
    """Not the name of a model, for example."""
    with pytest.raises(ConfigurationError, match="judge"):
        loop(until_llm=QUESTION, judge=judge)(add)


def test_a_judge_without_a_question_is_a_configuration_error() -> None:
    """There is nothing it could answer."""
    with pytest.raises(ConfigurationError, match="until_llm"):
        loop(judge=ScriptedJudge([]))(add)


# -- verdicts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("yes", [True, (True, None), (True, "good"), Verdict(True), Verdict(True, "good")])
def test_a_yes_ends_the_loop(run: Any, yes: Any) -> None:
    """Whatever shape it has; the judge is asked about each state in turn."""
    judge = ScriptedJudge([False, yes])
    result = run(add, judge=judge)
    assert (result.value, result.stop_reason, result.completed) == (2, StopReason.UNTIL_LLM, True)
    assert judge.asked == [(QUESTION, 1), (QUESTION, 2)]
    assert result.transitions[-1].target is LoopState.SUCCESS
    assert [item.verdicts[0].passed for item in result.history] == [False, True]


@pytest.mark.parametrize(
    "answer",
    [None, "yes", 1, 0, ("yes", "reason"), (True,), (True, "a", "b"), (True, 5), [True, "x"], Verdict(1)],  # type: ignore[arg-type]  # the mistakes
)
def test_an_answer_of_another_type_is_a_configuration_error(run: Any, answer: Any) -> None:
    """None included: a judge that forgets its return says neither yes nor no."""
    with pytest.raises(ConfigurationError, match="return a Verdict, True or False, or"):
        run(add, judge=ScriptedJudge([answer]))


def test_the_reason_of_a_no_is_the_next_feedback(run: Any) -> None:
    """For that one iteration; undecided is no reason to change anything."""
    heard: list[str | None] = []

    def body(n: int) -> int:
        here = current_run()
        assert here is not None
        heard.append(here.feedback)
        return n + 1

    judge = ScriptedJudge([(False, "too short"), False, Verdict(None, "can't tell"), (False, "still"), True])
    result = run(body, judge=judge)
    assert heard == [None, "too short", None, None, "still"]
    assert [item.feedback for item in result.history] == heard


def test_feedback_reaches_a_body_that_declares_it() -> None:
    """As a keyword-only parameter."""
    heard: list[str | None] = []

    @loop(until_llm=QUESTION, judge=ScriptedJudge([(False, "too short"), True]))
    def step(n: int, *, feedback: str | None = None) -> int:
        heard.append(feedback)
        return n

    step(1)
    assert heard == [None, "too short"]


def test_three_times_undecided_in_a_row_is_an_error(run: Any) -> None:
    """Failing is undecided, too; the error carries the last reason and the result so far."""
    judge = ScriptedJudge([Verdict(None, "no idea"), ConnectionError("down"), Verdict(None, "none at all"), True])
    with pytest.raises(JudgeError, match=r"undecided three times in a row: none at all") as caught:
        run(add, judge=judge)
    result = result_of(caught.value)
    assert result is not None
    assert (result.value, result.stop_reason, result.iterations) == (3, StopReason.ERROR, 3)
    assert [item.verdicts[0].passed for item in result.history] == [None] * 3
    assert "down" in str(result.history[1].verdicts[0].reason)
    assert result.transitions[-1].target is LoopState.FAILED


def test_a_real_no_ends_the_row_of_undecided_ones(run: Any) -> None:
    """Undecided is counted apart, and is never done."""
    undecided = Verdict(None)
    judge = ScriptedJudge([undecided, undecided, False, undecided, undecided, True])
    assert run(add, judge=judge).value == 6


def test_a_ceiling_reached_while_undecided_is_not_completed(run: Any) -> None:
    """The latest state is returned, and the result says why."""
    result = run(add, max=2, judge=ScriptedJudge([Verdict(None), Verdict(None)]))
    assert (result.value, result.stop_reason, result.completed) == (2, StopReason.MAX_ITERATIONS, False)


def test_a_secret_in_a_judges_failure_is_not_passed_on(run: Any) -> None:
    """Error texts are redacted before anybody reads them."""
    judge = ScriptedJudge([ConnectionError("https://user:hunter2@example.org is down"), True])
    reason = run(add, judge=judge).history[0].verdicts[0].reason
    assert "is down" in reason
    assert "hunter2" not in reason


# -- when it is asked ------------------------------------------------------------------------------


def test_until_is_asked_first(run: Any) -> None:
    """When it says yes the judge isn't asked: either of the two ends the loop."""
    judge = ScriptedJudge([False, False])
    result = run(add, judge=judge, until=lambda n: n == 3)
    assert result.stop_reason == "until"
    assert [state for _, state in judge.asked] == [1, 2]


def test_verdicts_are_events(run: Any) -> None:
    """With who said it, in the iteration it is about."""
    with capture() as seen:
        run(add, judge=ScriptedJudge([(False, "too short"), True]))
    given = seen.events_of(events.VerdictGiven)
    assert [(event.by, event.iteration, event.verdict) for event in given] == [
        ("ScriptedJudge", 1, Verdict(False, "too short")),
        ("ScriptedJudge", 2, Verdict(True)),
    ]


def test_a_stopped_run_asks_no_judge(run: Any) -> None:
    """The stop is latched: no further model call, however the body went on."""

    def body(n: int) -> int:
        here = current_run()
        assert here is not None
        here.stop("enough")
        return n + 1

    judge = ScriptedJudge([True])
    result = run(body, judge=judge)
    assert (result.stop_reason, result.completed, result.value) == ("stopped", False, 1)
    assert judge.asked == []


def test_a_judge_that_hangs_past_the_loops_timeout_ends_the_loop(run: Any) -> None:
    """The value of the iteration is kept."""
    release = threading.Event()

    def judge(question: str, state: Any) -> bool:
        release.wait(30)
        return True

    started = time.monotonic()
    result = run(add, judge=judge, timeout=0.1)
    release.set()
    assert time.monotonic() - started < 5
    assert (result.stop_reason, result.completed, result.value) == ("timeout", False, 1)


# -- what it costs ---------------------------------------------------------------------------------


def test_what_a_judge_charges_is_in_the_budget_the_iteration_and_the_result(run: Any) -> None:
    """A judge of one's own may charge(); it counts like the rest of its iteration."""

    def judge(question: str, state: Any) -> bool:
        charge(usd=2)
        return bool(state == 3)

    def body(n: int) -> int:
        charge(usd=1)
        return n + 1

    result = run(body, judge=judge, budget=Budget(usd=100))
    assert result.cost == 9
    assert [item.cost for item in result.history] == [3, 3, 3]


def test_a_judge_that_the_budget_refuses_is_not_run_and_the_loop_stops(run: Any) -> None:
    """A refusal inside the judge is no verdict: it ends the loop with its own reason."""
    bodies: list[int] = []

    @tool(cost=2)
    def ask_model(state: int) -> bool:
        bodies.append(state)
        return False

    result = run(add, judge=lambda question, state: ask_model(state), budget=Budget(usd=5))
    assert (result.stop_reason, result.completed, result.value) == ("budget", False, 3)
    assert isinstance(result.error, ToolCallRefused)
    assert result.cost == 4
    assert bodies == [1, 2]


def test_an_async_judge_of_an_async_loop_is_awaited() -> None:
    """In the loop's own task and run."""
    runs: list[Any] = []

    async def judge(question: str, state: int) -> tuple[bool, str]:
        await asyncio.sleep(0)
        runs.append(current_run())
        return state > 1, "more"

    @loop(until_llm=QUESTION, judge=judge)
    async def step(n: int) -> int:
        runs.append(current_run())
        return n + 1

    result = asyncio.run(step.run(0))
    assert result.value == 2
    assert len(set(runs)) == 1


# -- ScriptedJudge ---------------------------------------------------------------------------------


def test_a_scripted_judge_that_runs_out_ends_the_loop_with_an_error(run: Any) -> None:
    """A test whose loop goes on too long fails, instead of hitting the ceiling quietly."""
    with pytest.raises(ConfigurationError, match="asked once more after 2 verdicts"):
        run(add, judge=ScriptedJudge([False, False]))


def test_a_scripted_judge_keeps_the_states_as_they_were() -> None:
    """A body that goes on changing the same object doesn't change what was asked."""
    judge = ScriptedJudge([False, True])

    @loop(until_llm=QUESTION, judge=judge)
    def step(texts: list[str]) -> list[str]:
        texts.append("x")
        return texts

    step([])
    assert judge.asked == [(QUESTION, ["x"]), (QUESTION, ["x", "x"])]
