"""Approvals from process to process: asked in one, answered in another, run in a third, and once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopguard import Approval, journal

SCRIPT = Path(__file__).parent / "refunds.py"


class Stage:
    """Starts refunds.py on one store."""

    def __init__(self, store: str, folder: Path) -> None:
        self.store = store
        self.file = folder / "effects"

    def start(self, command: str, run: str = "r", amount: int = 49) -> subprocess.Popen[str]:
        """A new process."""
        arguments = [str(SCRIPT), self.store, str(self.file), command, run, str(amount)]
        return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)

    def run(self, command: str, run: str = "r", amount: int = 49) -> dict[str, Any]:
        """What a process came to."""
        return _came_to(self.start(command, run, amount))

    @property
    def effects(self) -> list[str]:
        """What was done in the world."""
        return self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []


def _came_to(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=50)
    said: dict[str, Any] = json.loads(out) if out else {"killed": process.returncode}
    return said


@pytest.fixture
def stage(store: str, tmp_path: Path) -> Stage:
    """Processes on one store."""
    return Stage(store, tmp_path)


def test_a_question_outlives_the_process_that_asked_it(stage: Stage) -> None:
    """C40: asked, everything dropped; listed with its arguments by another process, approved, resumed: one body."""
    assert stage.run("start") == {"stop": "waiting", "value": "A-1", "code": "waiting"}
    book = journal.open(stage.store)
    (question,) = book.questions()
    assert (question.tool, question.arguments) == ("refund", {"order": {"order": "A-1"}, "amount": 49})
    book.answer(question.id, Approval.approve(), by="ann")
    assert stage.run("resume") == {"stop": "max_iterations", "value": "refunded 49", "code": None}
    assert stage.run("start")["value"] == "refunded 49"
    assert stage.effects == ["look A-1", "refund A-1 49"]


def test_other_arguments_in_the_next_process_are_a_mismatch(stage: Stage) -> None:
    """C38: approved for 49, resumed by a program that now says 490."""
    stage.run("start")
    book = journal.open(stage.store)
    book.answer(book.questions()[0].id, True)
    assert stage.run("resume", amount=490)["code"] == "approval_mismatch"
    assert stage.effects == ["look A-1"]


def test_two_resumes_at_once_run_one_body(stage: Stage) -> None:
    """The other one hears that the run is being driven, or gets the recorded result."""
    stage.run("start")
    book = journal.open(stage.store)
    book.answer(book.questions()[0].id, True)
    together = [stage.start("resume") for _ in range(4)]
    said = [_came_to(process) for process in together]
    assert [one["value"] for one in said if "value" in one]
    assert {one.get("error") or one["value"] for one in said} <= {"refunded 49", "RunConflict"}
    assert stage.effects == ["look A-1", "refund A-1 49"]


def test_an_approval_holds_for_one_execution(stage: Stage) -> None:
    """Killed in the middle of the approved body: the yes isn't good for a second one, a person says what happened."""
    stage.run("start")
    book = journal.open(stage.store)
    book.answer(book.questions()[0].id, True)
    assert stage.run("die") == {"killed": -9}
    assert stage.run("resume")["code"] == "uncertain"
    (question,) = book.questions()
    assert (question.kind, question.tool) == ("uncertain", "refund")
    book.answer(question.id, "ran", result="refunded 49, as the bank says", by="ann")
    assert stage.run("resume")["value"] == "refunded 49, as the bank says"
    assert stage.effects == ["look A-1", "refund A-1 49"]


def test_a_call_that_had_not_run_runs_with_the_yes_that_it_had(stage: Stage) -> None:
    """The person who says so is not asked a third time."""
    stage.run("start")
    book = journal.open(stage.store)
    book.answer(book.questions()[0].id, True)
    stage.run("die")
    stage.run("resume")
    book.answer(book.questions()[0].id, "not_run", by="ann")
    assert stage.run("resume")["value"] == "refunded 49"
    assert stage.effects == ["look A-1", "refund A-1 49", "refund A-1 49"]


@pytest.mark.parametrize("reason", ["use staging", None])
def test_three_calls_at_once_are_answered_in_any_order(reason: str | None, stage: Stage) -> None:
    """C42, C43: yes, no, yes in reverse order, in another process: bodies 1 and 3 run once each, in call order."""
    assert stage.run("pay")["stop"] == "waiting"
    book = journal.open(stage.store)
    first, second, third = book.questions()
    assert [each.arguments["who"] for each in (first, second, third)] == ["ann", "bob", "ann"]
    assert len({first.id, second.id, third.id}) == 3
    book.answer(third.id, Approval.approve())
    book.answer(second.id, Approval.deny(reason))
    book.answer(first.id, Approval.approve())
    assert json.loads(stage.run("pay")["value"]) == ["paid ann", reason, "paid ann"]
    assert json.loads(stage.run("pay")["value"]) == ["paid ann", reason, "paid ann"]
    assert stage.effects == ["pay ann", "pay ann"]
    refused = [event for event in book.events("r") if type(event).__name__ == "QuestionAnswered"]
    assert sorted((event.decision, event.reason) for event in refused if event.decision == "deny") == [("deny", reason)]
