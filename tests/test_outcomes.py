"""What a loop comes to: results, states, reasons, and the errors that carry them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from decimal import Decimal
from typing import Any

import pytest

from loopguard import (
    ApprovalDenied,
    ApprovalTimeout,
    BudgetExceeded,
    ConfigurationError,
    EvaluationFailed,
    Iteration,
    JudgeError,
    LoopGuardError,
    LoopHalted,
    LoopLimitExceeded,
    LoopResult,
    LoopState,
    LoopStopped,
    MaxStepsExceeded,
    StopReason,
    ToolCallRefused,
    ToolTimeout,
    Transition,
    Usage,
    Verdict,
    loop,
    result_of,
)
from loopguard._outcomes import TRANSITIONS, only_refusals, stop_reason_of

CODES = {
    "max_steps": "max_steps",
    "loop_limit": "loop_limit",
    "budget": "budget",
    "unknown_price": "budget",
    "approval_denied": "approval",
    "approval_timeout": "approval",
    "approval_error": "approval",
    "approval_mismatch": "approval",
    "rate_limited": "rate_limited",
    "circuit_open": "circuit_open",
    "timeout": "timeout",
    "stopped": "stopped",
    "waiting": "waiting",
    "uncertain": "waiting",
    "no_run": "error",
}


def refusal(code: str = "max_steps") -> ToolCallRefused:
    """A refusal of this code."""
    return ToolCallRefused(code, "X", "search", "because", 3, 4, "agent", "run_1")


def test_the_stop_reasons_are_these() -> None:
    """A public set of strings: what people store and query."""
    assert [str(reason) for reason in StopReason] == [
        "until", "until_llm", "evaluated", "max_iterations", "max_steps", "loop_limit", "budget", "approval",
        "rate_limited", "circuit_open", "timeout", "stopped", "evaluation_failed", "error", "cancelled", "halted",
        "waiting",
    ]  # fmt: skip
    assert f"{StopReason.BUDGET}" == "budget" == StopReason.BUDGET
    assert isinstance(StopReason.BUDGET, str)


@pytest.mark.parametrize(("code", "reason"), CODES.items())
def test_every_code_of_a_refusal_has_its_stop_reason(code: str, reason: str) -> None:
    """As a loop reports it."""

    def step(n: int) -> int:
        raise refusal(code)

    result = loop(max=3)(step).run(0)
    assert (result.stop_reason, result.completed) == (reason, False)


def test_the_states_are_these_and_every_transition_is_in_the_table() -> None:
    """Terminal states lead nowhere."""
    assert [str(state) for state in LoopState] == ["ready", "running", "success", "retry", "failed", "terminated"]
    sources = {source for source, _ in TRANSITIONS}
    assert sources == {LoopState.READY, LoopState.RUNNING, LoopState.RETRY}
    assert set(TRANSITIONS.values()) == set(LoopState) - {LoopState.READY}
    with pytest.raises(TypeError):
        TRANSITIONS[LoopState.SUCCESS, "next"] = LoopState.RUNNING  # type: ignore[index]  # what is tested


@pytest.mark.parametrize("made", [Verdict(True), Iteration(1, "x"), LoopResult("x", StopReason.UNTIL, True, 1)])
def test_outcomes_are_frozen(made: Any) -> None:
    """Data, not a place to keep things."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.value = "y"


def test_a_result_reads_well() -> None:
    """One line: what, how far, why, at what cost."""
    made = LoopResult("x", StopReason.UNTIL, True, 1, cost=Decimal("0.10"), name="writer")
    assert str(made) == "writer completed after 1 iteration (until, $0.10)"
    free = dataclasses.replace(made, iterations=3, cost=Decimal(0), stop_reason=StopReason.MAX_STEPS, completed=False)
    assert str(free) == "writer stopped after 3 iterations (max_steps)"
    unknown = dataclasses.replace(free, cost=None, error=refusal())
    assert str(unknown) == "writer stopped after 3 iterations (max_steps, cost unknown): because"


def test_a_result_of_a_run_has_all_its_fields() -> None:
    """Those that the documentation names."""
    result = loop(max=2)(lambda n: n + 1).run(0)
    names = {field.name for field in dataclasses.fields(result)}
    assert names >= {
        "value", "stop_reason", "completed", "iterations", "history", "transitions", "usage", "cost", "warnings",
        "error", "run_id", "trace_id",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(result.history[0])} == {
        "number", "value", "feedback", "verdicts", "usage", "cost", "duration",
    }  # fmt: skip
    assert isinstance(result.history, tuple)
    assert (result.warnings, result.error, result.cost, result.usage) == ((), None, 0, Usage())
    assert all(isinstance(each, Transition) for each in result.transitions)
    assert result.run_id.startswith("run_")


@pytest.mark.parametrize("again", [lambda thing: pickle.loads(pickle.dumps(thing)), copy.deepcopy])
def test_results_travel(again: Any) -> None:
    """Between processes, with their history and the refusal that ended them."""

    def step(n: int) -> int:
        if n == 2:
            raise refusal()
        return n + 1

    result = loop(max=9)(step).run(0)
    travelled = again(result)
    assert dataclasses.replace(travelled, error=None) == dataclasses.replace(result, error=None)
    assert vars(travelled.error) == vars(result.error)


ERRORS: list[BaseException] = [
    LoopGuardError("x"),
    ConfigurationError("x"),
    *(
        kind("code", "Guardrail", "search", "because", Decimal(3), 4, "agent", "run_1")
        for kind in (
            ToolCallRefused, MaxStepsExceeded, LoopLimitExceeded, BudgetExceeded, ApprovalDenied, ApprovalTimeout,
        )
    ),
    ToolTimeout("search", 0.5),
    ToolTimeout("search", 0.5, "Timeout(0.5)"),
    JudgeError("x"),
    LoopStopped(LoopResult("x", StopReason.TIMEOUT, False, 0), "a message"),
    LoopStopped(LoopResult("x", StopReason.TIMEOUT, False, 0)),
    EvaluationFailed(LoopResult("x", StopReason.EVALUATION_FAILED, False, 2)),
    LoopHalted(refusal(), "run_1", "agent", 5),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=[f"{type(error).__name__}-{i}" for i, error in enumerate(ERRORS)])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_pickles_with_all_its_fields(error: BaseException, protocol: int) -> None:
    """In every protocol."""
    travelled = pickle.loads(pickle.dumps(error, protocol))
    assert type(travelled) is type(error)
    assert str(travelled) == str(error)
    assert repr(vars(travelled)) == repr(vars(error))


def test_the_errors_are_one_tree() -> None:
    """With the builtin classes that people expect to catch."""
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(ToolTimeout, TimeoutError)
    assert issubclass(EvaluationFailed, LoopStopped)
    assert not issubclass(LoopHalted, Exception)
    assert not issubclass(LoopStopped, ToolCallRefused)
    for error in ERRORS:
        assert isinstance(error, LoopGuardError) or type(error) is LoopHalted


def test_result_of_finds_nothing_on_foreign_exceptions() -> None:
    """Not even where they have a `result` of their own."""

    class Foreign(Exception):
        result = "theirs"

    assert result_of(ValueError("x")) is None
    assert result_of(Foreign()) is None


def test_result_of_a_loop_stopped_is_its_own_result() -> None:
    """However many loops it passed on its way."""

    @loop(max=1, until=lambda n: False, on_limit="raise", name="inner")
    def inner(n: int) -> int:
        return n + 1

    @loop(max=1, name="outer")
    def outer(n: int) -> int:
        return inner(n)

    with pytest.raises(LoopStopped) as caught:
        outer(0)
    found = result_of(caught.value)
    assert found is caught.value.result
    assert found.name == "inner"


def test_result_of_works_for_groups_and_survives_no_pickling() -> None:
    """A group carries the result of the loop it left; a pickled exception leaves it behind, and still pickles."""
    group = ExceptionGroup("g", [ValueError("real"), refusal()])

    def step(n: int) -> int:
        raise group

    with pytest.raises(ExceptionGroup):
        loop(max=3, name="x")(step)(0)
    found = result_of(group)
    assert found is not None
    assert found.name == "x"
    assert result_of(pickle.loads(pickle.dumps(group))) is None


@pytest.mark.parametrize(
    ("exc", "found"),
    [
        (ValueError("x"), None),
        (KeyboardInterrupt(), None),
        (ExceptionGroup("g", [ValueError("x")]), None),
        (ExceptionGroup("g", [ValueError("x"), refusal()]), None),
        (ExceptionGroup("g", [refusal(), ExceptionGroup("h", [ValueError("x")])]), None),
        (refusal("budget"), "budget"),
        (ExceptionGroup("g", [ExceptionGroup("h", [refusal("budget")]), refusal("timeout")]), "budget"),
        (BaseExceptionGroup("g", [refusal("budget"), LoopHalted(refusal(), "r", "n", 5)]), "budget"),
    ],
    ids=range(8),
)
def test_a_group_of_nothing_but_refusals_counts_as_its_first_leaf(exc: BaseException, found: str | None) -> None:
    """Depth first; anything else in it, and it is an error."""
    cause = only_refusals(exc)
    assert (cause.code if isinstance(cause, ToolCallRefused) else cause) == found


@pytest.mark.parametrize(
    ("exc", "reason"),
    [
        (None, None),
        (GeneratorExit(), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
        (ValueError("x"), "error"),
        (refusal("budget"), "budget"),
        (LoopHalted(refusal(), "r", "n", 5), "halted"),
    ],
    ids=range(6),
)
def test_the_reason_a_run_was_left_for(exc: BaseException | None, reason: str | None) -> None:
    """As scopes and spans report it."""
    assert stop_reason_of(exc) == reason


def test_completed_is_true_for_the_first_three_and_for_a_ceiling_without_a_condition() -> None:
    """Nothing else is success."""
    assert loop(max=2)(lambda n: n).run(0).completed
    assert loop(max=2, until=lambda n: True)(lambda n: n).run(0).completed
    assert loop(max=2, evaluate=lambda n: True)(lambda n: n).run(0).completed
    assert not loop(max=2, until=lambda n: False)(lambda n: n).run(0).completed
