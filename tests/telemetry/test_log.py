"""The structured log: the event stream as JSON lines."""

from __future__ import annotations

import json
import logging
from decimal import Decimal

import pytest

from loopguard import Guard, MaxSteps, ToolCallRefused, loop, tool
from loopguard.telemetry._log import log_event


@tool(cost=0.5)
def look(api_key: str, what: object = None) -> object:
    """A tool with a secret among its arguments."""
    return what


@loop(max=2, guard=Guard(MaxSteps(1)))
def looking(n: int) -> int:
    """Calls a tool that is refused the second time."""
    try:
        look("hunter2-hunter2")
    except ToolCallRefused:
        pass
    return n + 1


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """What was logged, parsed."""
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "loopguard.events"]


def test_every_event_is_a_line_with_the_ids_of_run_and_iteration(caplog: pytest.LogCaptureFixture) -> None:
    """Each line is one JSON object that says what happened, in which run and iteration."""
    with caplog.at_level(logging.INFO, logger="loopguard.events"):
        result = looking.run(0, run_id="run-7")
    seen = lines(caplog)
    assert [line["event"] for line in seen if line["event"] not in ("Transitioned", "RunStarted", "RunEnded")] == [
        "IterationStarted",
        "ToolStarted",
        "ToolFinished",
        "IterationEnded",
        "IterationStarted",
        "ToolRefused",
        "IterationEnded",
    ]
    assert {line["run_id"] for line in seen} == {result.run_id} == {"run-7"}
    assert [line["iteration"] for line in seen if line["event"].startswith("Tool")] == [1, 1, 2]  # type: ignore[attr-defined]
    finished = next(line for line in seen if line["event"] == "ToolFinished")
    assert finished["charged"] == {"usd": "0.5"}
    assert "trace_id" in finished


def test_secrets_do_not_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """What redaction hides from people is hidden from the log."""
    with caplog.at_level(logging.INFO, logger="loopguard.events"):
        looking.run(0)
    assert "hunter2" not in caplog.text


def test_nothing_is_logged_or_built_while_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    """A run looks once whether the logger is enabled; by default it isn't."""
    with Guard().scope("quiet") as run:
        assert run.listeners == ()
        look("x")
    assert lines(caplog) == []


class Hostile:
    """Its repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "payload", [float("nan"), float("inf"), "\ud83d", Hostile(), {1: {2, 3}}, Decimal("NaN"), b"\xff", [[[]]], object]
)
def test_any_payload_becomes_strict_json(payload: object, caplog: pytest.LogCaptureFixture) -> None:
    """No bare NaN or Infinity, no lone surrogate, and a text for what has no form of its own."""

    def refuse(constant: str) -> object:
        raise AssertionError(constant)

    with caplog.at_level(logging.INFO, logger="loopguard.events"), Guard().scope("odd"):
        look("key", payload)
    texts = [record.getMessage() for record in caplog.records]
    assert any('"ToolFinished"' in text for text in texts)
    for text in texts:
        json.loads(text, parse_constant=refuse)
        text.encode()
    assert log_event.__doc__
