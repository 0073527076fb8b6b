"""Evaluators in a loop: rejection, the reason as feedback, retries, and how it ends when nothing passes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from loopguard import (
    Budget,
    BudgetExceeded,
    ConfigurationError,
    EvaluationFailed,
    Guard,
    LoopResult,
    LoopState,
    LoopStopped,
    MaxSteps,
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
from loopguard._outcomes import TRANSITIONS
from loopguard.evaluators import Check, JSONFields, all_of, any_of
from loopguard.testing import capture
from tests.conftest import Colour

both = pytest.mark.parametrize("colour", ["sync", "async"], indirect=True)


def scripted(*verdicts: Any) -> Callable[[Any], Any]:
    """An evaluator whose verdicts are used up in order; the last one stays. Exceptions are raised."""
    left = list(verdicts)

    def evaluator(value: Any) -> Any:
        verdict = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(verdict, BaseException):
            raise verdict
        return verdict

    return evaluator


def never(value: Any) -> tuple[bool, str]:
    """Nothing is good enough."""
    return False, "not good enough"


def append(draft: str) -> str:
    """A body that makes the state longer."""
    return draft + "."


# -- reason-guided retry ---------------------------------------------------------------------------


@both
def test_the_body_gets_the_same_argument_again_plus_the_reason(colour: Colour) -> None:
    """Feedback is None, then the reason, then one that names the exception of an evaluator that raised."""
    seen: list[Any] = []

    def improve(draft: str, tone: str, *, feedback: str | None = None) -> str:
        run = current_run()
        assert run is not None
        assert run.feedback == feedback
        seen.append((draft, tone, feedback, run.rejected))
        return draft + f" {len(seen)}"

    evaluate = colour.make(scripted((False, "too short"), KeyError("summary"), True))
    step = loop(max=5, evaluate=evaluate, max_retries=2)(colour.make(improve))
    result = colour.call(step.run, "draft", "dry")
    assert seen == [
        ("draft", "dry", None, None),
        ("draft", "dry", "too short", "draft 1"),
        ("draft", "dry", "evaluator failed: KeyError: 'summary'", "draft 2"),
    ]
    assert (result.value, result.stop_reason, result.completed, result.iterations) == ("draft 3", "evaluated", True, 3)
    assert [each.value for each in result.history] == ["draft 1", "draft 2", "draft 3"]
    assert [each.feedback for each in result.history] == [None, "too short", "evaluator failed: KeyError: 'summary'"]
    assert [verdict.passed for each in result.history for verdict in each.verdicts] == [False, False, True]


@both
def test_the_original_argument_comes_again_even_if_the_body_is_given_a_copy_of_it(colour: Colour) -> None:
    """It is the very object that the caller gave, for every retry."""
    given: list[str] = []
    seen: list[Any] = []

    def improve(messages: list[str]) -> list[str]:
        seen.append(messages)
        return [*messages, "more"]

    step = loop(max=3, evaluate=never, on_failure="return")(colour.make(improve))
    assert colour.call(step, given) == ["more"]
    assert all(each is given for each in seen)
    assert len(seen) == 3


def test_a_secret_in_an_exception_is_no_feedback() -> None:
    """Feedback goes to a model."""
    feedback: list[str | None] = []

    @loop(max=2, evaluate=scripted(ValueError("password=hunter2"), True))
    def improve(n: int, *, feedback: str | None = None) -> int:
        heard.append(feedback)
        return n

    heard = feedback
    improve(1)
    assert "ValueError" in str(heard[1])
    assert "hunter2" not in str(heard[1])


def test_a_rejection_without_a_reason_says_who_rejected() -> None:
    """A body that looks at its feedback sees that there is some."""

    def long_enough(draft: str) -> bool:
        return len(draft) > 3

    result = loop(max=5, evaluate=long_enough, on_reject="continue", max_retries=9)(append).run("")
    assert result.history[1].feedback == "long_enough rejected the value"


def test_feedback_ends_when_a_value_is_accepted() -> None:
    """The next iteration starts afresh; only an unbroken row of failures ends the loop."""
    verdicts = [(False, "one"), True, (False, "two"), True, (False, "three"), True]
    step = loop(max=6, evaluate=scripted(*verdicts), max_retries=1, until=lambda n: n == 3)
    result = step(lambda n: n + 1).run(0)
    assert [each.feedback for each in result.history] == [None, "one", None, "two", None, "three"]
    assert [each.value for each in result.history] == [1, 1, 2, 2, 3, 3]
    assert (result.value, result.stop_reason) == (3, "until")


@both
def test_a_rejected_value_can_flow_on(colour: Colour) -> None:
    """With on_reject="continue" the body works on what was rejected."""
    seen: list[str] = []

    def improve(draft: str) -> str:
        seen.append(draft)
        return draft + "."

    step = loop(max=9, evaluate=lambda d: (len(d) == 3, "longer"), on_reject="continue", max_retries=5)
    assert colour.call(step(colour.make(improve)), "") == "..."
    assert seen == ["", ".", ".."]


@both
def test_evaluators_are_asked_in_order_about_what_was_parsed(colour: Colour) -> None:
    """The first no ends the round; what they parsed becomes the state, what was rejected stays raw."""
    replies = ["prose", '{"n": 1}', '```json\n{"n": 2}\n```']
    asked: list[Any] = []

    def ask(task: Any) -> Any:
        return replies.pop(0)

    def enough(report: dict[str, int]) -> tuple[bool, str]:
        asked.append(report)
        return report["n"] > 1, "n has to be more than 1"

    step = loop(max=5, evaluate=(JSONFields("n"), colour.make(enough)))(colour.make(ask))
    result = colour.call(step.run, "task")
    assert (result.value, asked) == ({"n": 2}, [{"n": 1}, {"n": 2}])
    assert [each.value for each in result.history] == ["prose", '{"n": 1}', {"n": 2}]
    assert [len(each.verdicts) for each in result.history] == [1, 2, 2]
    assert result.history[2].feedback == "n has to be more than 1"


def test_undecided_is_not_passed() -> None:
    """An evaluator that can't say has not said yes."""
    result = loop(max=3, evaluate=scripted(Verdict(None, "no idea"), True))(append).run("")
    assert (result.iterations, result.history[1].feedback) == (2, "no idea")


@both
@pytest.mark.parametrize("said", [None, "yes", 1, (True,), ("no", "x"), Verdict("yes")], ids=str)  # type: ignore[arg-type]  # on purpose
def test_an_evaluator_that_gives_no_verdict_is_a_configuration_error(colour: Colour, said: Any) -> None:
    """A forgotten return isn't a rejection; it is never feedback."""
    bodies: list[int] = []

    def body(n: int) -> int:
        bodies.append(n)
        return n

    with pytest.raises(ConfigurationError, match="returned a"):
        colour.call(loop(max=3, evaluate=colour.make(lambda value: said))(colour.make(body)), 1)
    assert bodies == [1]


# -- the end of patience ---------------------------------------------------------------------------


@both
@pytest.mark.parametrize("max_retries", [0, 1, 2])
def test_the_loop_ends_after_one_failure_more_than_max_retries(colour: Colour, max_retries: int) -> None:
    """0 ends it at the first failed evaluation; the exception carries the whole result."""
    step = loop(max=9, evaluate=never, max_retries=max_retries)(colour.make(append))
    with pytest.raises(EvaluationFailed, match="evaluation_failed") as caught:
        colour.call(step, "draft")
    result = caught.value.result
    assert (result.stop_reason, result.completed) == (StopReason.EVALUATION_FAILED, False)
    assert (result.iterations, len(result.history)) == (max_retries + 1, max_retries + 1)
    assert result.value == "draft"
    assert result_of(caught.value) is result
    assert isinstance(caught.value, LoopStopped)


@both
def test_a_failure_at_the_ceiling_ends_the_loop_too(colour: Colour) -> None:
    """Though more retries were allowed."""
    step = loop(max=2, evaluate=never, max_retries=9)(colour.make(append))
    with pytest.raises(EvaluationFailed) as caught:
        colour.call(step, "draft")
    assert caught.value.result.iterations == 2


@both
def test_the_best_value_so_far_can_be_returned(colour: Colour, caplog: pytest.LogCaptureFixture) -> None:
    """By the key given, else the latest; with a warning in the result and the log, not silently."""
    texts = ["ab", "abcd", "abc"]
    turns = iter(texts * 2)

    def write(task: str) -> str:
        return next(turns)

    for options, value, named in (({"best": len}, "abcd", "the best"), ({}, "abc", "the latest")):
        caplog.clear()
        step = loop(max=9, evaluate=never, on_failure="return", **options)(colour.make(write))
        with caplog.at_level(logging.WARNING, logger="loopguard"):
            result = colour.call(step.run, "task")
        assert (result.value, result.stop_reason, result.completed) == (value, "evaluation_failed", False)
        assert [named in warning for warning in result.warnings] == [True]
        assert result.warnings[0] in caplog.text
    turns = iter(texts)
    assert colour.call(loop(max=9, evaluate=never, on_failure="return", best=len)(colour.make(write)), "x") == "abcd"


@both
def test_a_fallback_supplies_the_value(colour: Colour) -> None:
    """It is given the result so far; what it raises goes on upwards."""
    given: list[LoopResult[str]] = []

    def fallback(result: LoopResult[str]) -> str:
        given.append(result)
        return f"after {result.iterations}"

    result = colour.call(loop(max=9, evaluate=never, fallback=fallback)(colour.make(append)).run, "draft")
    assert (result.value, result.completed, len(result.warnings)) == ("after 3", False, 1)
    assert given[0].history == result.history
    with pytest.raises(ZeroDivisionError):
        colour.call(loop(max=9, evaluate=never, fallback=lambda result: 1 / 0)(colour.make(append)), "draft")


def test_an_async_fallback_is_awaited_or_refused() -> None:
    """A sync loop can't await it, and never returns the coroutine as the value."""

    async def fallback(result: LoopResult[str]) -> str:
        await asyncio.sleep(0)
        return "later"

    async def write(task: str) -> str:
        return task

    assert asyncio.run(loop(max=3, evaluate=never, fallback=fallback)(write)("draft")) == "later"
    with pytest.raises(ConfigurationError, match="can't be awaited"):
        loop(max=3, evaluate=never, fallback=fallback)(append)("draft")


@both
def test_a_refusal_in_the_fallback_stops_the_loop(colour: Colour) -> None:
    """As one in the body would: with the stop reason that the refusal has."""

    def fallback(result: LoopResult[str]) -> str:
        raise ToolCallRefused("budget", "Budget", "write", "no money")

    result = colour.call(loop(max=3, evaluate=never, fallback=fallback)(colour.make(append)).run, "draft")
    assert (result.stop_reason, result.transitions[-1].target) == ("budget", LoopState.TERMINATED)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"evaluate": value}, "evaluate") for value in (5, "json", [len, 5], {"a": len})),
        *(({"max_retries": value}, "max_retries") for value in (-1, True, None, 1.5, "2")),
        *(({"on_reject": value}, "'retry' or 'continue'") for value in ("again", None)),
        *(({"on_failure": value}, "'raise' or 'return'") for value in ("ignore", None)),
        *(({name: "x"}, name) for name in ("best", "fallback")),
        ({"best": asyncio.sleep}, "best.*plain function"),
    ],
    ids=str,
)
def test_a_wrong_option_is_a_configuration_error_at_decoration(options: dict[str, Any], said: str) -> None:
    """With its name and what is allowed."""
    with pytest.raises(ConfigurationError, match=said):
        loop(**{"max": 3, "evaluate": never, **options})(append)


async def agrees(value: Any) -> bool:
    """An async evaluator."""
    return True


def test_an_async_evaluator_of_a_sync_loop_is_a_configuration_error() -> None:
    """At decoration where it can be seen, else when it shows; never a rejection."""
    for evaluator in (agrees, Check(agrees, "no"), all_of(JSONFields(), agrees), any_of(Check(agrees, "no"))):
        with pytest.raises(ConfigurationError, match="async"):
            loop(max=3, evaluate=evaluator)(append)

    def hidden(value: Any) -> Any:
        return agrees(value)

    with pytest.raises(ConfigurationError):
        loop(max=3, evaluate=hidden)(append)("x")


# -- beside until and judges -----------------------------------------------------------------------


@both
def test_a_failing_evaluation_skips_until_and_the_judge(colour: Colour) -> None:
    """Nobody is asked whether something is done that isn't even good; both see what was parsed."""
    asked: list[Any] = []
    replies = iter(["prose", '{"n": 1}', "more prose", '{"n": 2}'])

    def done(report: Any) -> bool:
        asked.append(("until", report))
        return False

    def judge(question: str, report: Any) -> bool:
        asked.append(("judge", report))
        return bool(report["n"] == 2)

    step = loop(max=9, evaluate=JSONFields("n"), until=done, until_llm="Enough?", judge=colour.make(judge))
    result = colour.call(step(colour.make(lambda state: next(replies))).run, "task")
    assert (result.stop_reason, result.value, result.iterations) == ("until_llm", {"n": 2}, 4)
    assert asked == [(who, {"n": n}) for n in (1, 2) for who in ("until", "judge")]


@both
def test_with_until_passing_does_not_end_the_loop(colour: Colour) -> None:
    """Every iteration's value is evaluated, and until decides; the ceiling is a stop."""
    step = loop(max=3, evaluate=lambda d: True, until=lambda d: False)(colour.make(append))
    result = colour.call(step.run, "")
    assert (result.value, result.stop_reason, result.completed) == ("...", "max_iterations", False)


@both
def test_on_iteration_sees_every_value_before_it_is_evaluated(colour: Colour) -> None:
    """Rejected ones too, raw."""
    order: list[Any] = []

    def evaluate(value: str) -> bool:
        order.append(("evaluate", value))
        return len(order) > 2

    def on_iteration(value: str, number: int) -> None:
        order.append((number, value))

    colour.call(loop(max=5, evaluate=evaluate, on_iteration=on_iteration)(colour.make(append)), "")
    assert order == [(1, "."), ("evaluate", "."), (2, "."), ("evaluate", ".")]


@both
def test_refusals_in_an_evaluator_stop_the_loop_and_are_no_feedback(colour: Colour) -> None:
    """An evaluator that may not call its tool has said nothing of the value."""

    @tool(cost=1)
    def ask_a_model(n: int) -> bool:
        return n > 9

    bodies: list[int] = []

    def body(n: int) -> int:
        bodies.append(n)
        return n + 1

    step = loop(max=9, evaluate=ask_a_model, max_retries=9, budget=Budget(usd=2), on_reject="continue")
    result = colour.call(step(colour.make(body)).run, 0)
    assert (result.stop_reason, len(bodies), result.completed) == ("budget", 3, False)
    assert isinstance(result.error, BudgetExceeded)
    assert [each.cost for each in result.history] == [1, 1, 0]


def test_a_halt_is_never_taken_for_a_rejection() -> None:
    """Evaluators that swallow refusals are stopped like bodies that do."""

    @tool
    def look(n: int) -> int:
        return n

    def stubborn(value: int) -> bool:
        for n in range(100):
            try:
                look(n)
            except ToolCallRefused:
                pass
        return True

    result = loop(max=3, evaluate=stubborn, guard=Guard(MaxSteps(1), max_refusals=3))(lambda n: n).run(1)
    assert (result.stop_reason, result.completed, len(result.history)) == ("halted", False, 1)


def test_what_an_evaluator_costs_belongs_to_its_iteration() -> None:
    """A model that grades is paid for like any other call."""

    def grade(value: str) -> bool:
        charge(usd=0.5)
        return len(value) == 2

    result = loop(max=5, evaluate=grade, on_reject="continue")(append).run("")
    assert [each.cost for each in result.history] == [0.5, 0.5]
    assert result.cost == 1


def test_verdicts_are_events() -> None:
    """With the name of the evaluator, before the iteration ends, accepted or not."""
    with capture() as seen:
        loop(max=5, evaluate=(JSONFields("n"), never), on_failure="return", max_retries=0)(lambda s: '{"n": 1}')("s")
    assert [(event.by, event.verdict.passed) for event in seen.events_of(events.VerdictGiven)] == [
        ("JSONFields", True),
        ("never", False),
    ]
    assert [event.accepted for event in seen.events_of(events.IterationEnded)] == [False]


# -- slow evaluators in async loops ----------------------------------------------------------------


def held(value: Any) -> bool:
    """A sync evaluator that returns only when the ticker beside it has gone on."""
    assert isinstance(value, threading.Event)
    return value.wait(5)


async def yields(value: Any) -> bool:
    """An async evaluator that lets others run."""
    await asyncio.sleep(0)
    return True


@pytest.mark.parametrize(
    "evaluate",
    [held, Check(held, "late"), all_of(held), any_of(held), all_of(yields, held), (yields, Check(held, "late"))],
    ids=["function", "check", "all_of", "any_of", "after an async one", "in a row"],
)
def test_a_slow_sync_evaluator_does_not_hold_up_the_event_loop(evaluate: Any) -> None:
    """A ticker beside it ticks five times before the evaluator is done."""

    async def main() -> tuple[LoopResult[Any], int]:
        ticks = 0
        ticked = threading.Event()

        async def tick() -> None:
            nonlocal ticks
            for ticks in range(1, 6):  # noqa: B007  # counted for the assertion
                await asyncio.sleep(0.001)
            ticked.set()

        @loop(max=1, evaluate=evaluate)
        async def step(event: threading.Event) -> threading.Event:
            return event

        ticker = asyncio.create_task(tick())
        result = await step.run(ticked)
        await ticker
        return result, ticks

    result, ticks = asyncio.run(main())
    assert (result.stop_reason, ticks) == ("evaluated", 5)


# -- states ----------------------------------------------------------------------------------------


def told(result: LoopResult[Any]) -> list[str]:
    """The transitions, each as ``trigger → state #iteration``."""
    return [f"{each.trigger} → {each.target} #{each.iteration}" for each in result.transitions]


CONVERGED = ["start → running #0", "reject → retry #1", "next → running #1", "complete → success #2"]
FAILED = ["start → running #0", "reject → retry #1", "next → running #1", "reject → retry #2", "fail → failed #2"]


@both
def test_every_transition_is_in_the_result_and_told_as_it_happens(colour: Colour) -> None:
    """From state to state by the table, with time, trigger and iteration."""
    heard: list[Transition] = []
    with capture() as seen:
        step = loop(max=5, evaluate=scripted(False, True), on_transition=heard.append)(colour.make(append))
        result = colour.call(step.run, "")
    assert told(result) == CONVERGED
    assert tuple(heard) == result.transitions
    assert tuple(event.transition for event in seen.events_of(events.Transitioned)) == result.transitions
    assert [each.source for each in heard] == [LoopState.READY, *(each.target for each in heard[:-1])]
    assert all(TRANSITIONS[each.source, each.trigger] is each.target for each in heard)
    assert [each.at for each in heard] == sorted(each.at for each in heard)


@both
def test_a_loop_that_never_passes_has_failed_in_all_three_modes(colour: Colour) -> None:
    """Degrading gives a value, not another state."""
    for options in ({"on_failure": "return"}, {"fallback": lambda result: "x"}):
        result = colour.call(loop(max=9, max_retries=1, evaluate=never, **options)(colour.make(append)).run, "")
        assert told(result) == FAILED
    with pytest.raises(EvaluationFailed) as caught:
        colour.call(loop(max=9, max_retries=1, evaluate=never)(colour.make(append)), "")
    assert told(caught.value.result) == FAILED


def test_a_loop_may_be_stopped_or_fail_while_it_retries() -> None:
    """Refusals and stops terminate it, exceptions of the body fail it."""

    def body(n: int) -> int:
        run = current_run()
        assert run is not None
        if run.iteration == 2:
            raise KeyError("n")
        return n

    def stops(value: int) -> bool:
        run = current_run()
        assert run is not None
        run.stop("enough")
        return False

    result = loop(max=9, evaluate=stops)(lambda n: n).run(1)
    assert told(result)[-2:] == ["reject → retry #1", "stop → terminated #1"]
    with pytest.raises(KeyError) as caught:
        loop(max=9, evaluate=never)(body)(0)
    partial = result_of(caught.value)
    assert partial is not None
    assert told(partial)[-1] == "fail → failed #2"


def test_the_table_of_transitions_leads_from_ready_to_the_three_ends() -> None:
    """Every state can be reached, and the ends have no way out."""
    reached = {LoopState.READY, *TRANSITIONS.values()}
    assert reached == set(LoopState)
    sources = {source for source, _ in TRANSITIONS}
    assert set(LoopState) - sources == {LoopState.SUCCESS, LoopState.FAILED, LoopState.TERMINATED}
    with pytest.raises(TypeError):
        TRANSITIONS[LoopState.SUCCESS, "next"] = LoopState.RUNNING  # type: ignore[index]  # on purpose
