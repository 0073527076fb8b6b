"""A journal that version 0.1 wrote is read, verified and resumed by every later one.

The file was written by `python tests/journal/test_fixture.py`, killed in the third iteration; it is never
written anew, but joined by those of later schemas.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from loopguard import Budget, Guard, MaxSteps, journal, loop, tool

FIXTURE = Path(__file__).parent / "fixtures" / "schema-1.db"


@dataclass
class State:
    n: int
    when: datetime
    notes: list[str]


START = State(0, datetime(2026, 11, 30, tzinfo=UTC), ["x" * 300])
ran: list[str] = []


@tool(cost=0.25, name="charge_card")
def charge_card(n: int) -> dict[str, Decimal]:
    """Recorded with its result."""
    ran.append(f"charge_card {n}")
    return {"paid": Decimal("0.25")}


@tool(name="notify")
def notify(n: int) -> None:
    """Fails in the first iteration."""
    ran.append(f"notify {n}")
    if n == 0:
        raise ConnectionError("no route")


@tool(idempotent=True, name="stumble")
def stumble(n: int) -> None:
    """Where the process was killed."""
    ran.append(f"stumble {n}")
    if n == 2 and __name__ == "__main__":
        os.kill(os.getpid(), signal.SIGKILL)


def body(state: State) -> State:
    charge_card(state.n)
    try:
        notify(state.n)
    except ConnectionError as exc:
        state.notes.append(str(exc))
    stumble(state.n)
    return State(state.n + 1, state.when, [*state.notes, f"note {state.n}"])


def looped(store: str) -> loop:  # type: ignore[valid-type]
    """The loop that wrote it."""
    return loop(max=4, guard=Guard(MaxSteps(20), Budget(usd=2)), store=store, name="fixture")(body)


# digests name the module of a tool: it is the same, run as a script or imported
for _tool in (charge_card, notify, stumble):
    _tool._self_tool.ident = f"{_tool._self_tool.name}:fixture"  # type: ignore[attr-defined]


@pytest.fixture
def written(tmp_path: Path) -> str:
    """A copy of the file."""
    return f"sqlite:///{shutil.copy(FIXTURE, tmp_path / 'runs.db')}"


def test_a_journal_of_schema_1_is_read_and_verified(written: str) -> None:
    """Its events, its counters and its chain."""
    book = journal.open(written)
    assert [(run.run_id, run.name, run.status) for run in book.runs()] == [("run-1", "fixture", "running")]
    assert book.verify("run-1") is None
    root = book.story("run-1").root
    assert root is not None
    assert (root.steps, root.spent, len(root.passes)) == (9, {"usd": 75 * 10**16}, 3)
    assert [type(event).__name__ for event in book.events("run-1")][:4] == [
        "RunStarted",
        "Transitioned",
        "IterationStarted",
        "ToolStarted",
    ]


def test_a_journal_of_schema_1_is_resumed(written: str) -> None:
    """It goes on in its third iteration: what had finished there is answered from the record."""
    ran.clear()
    result = looped(written).resume("run-1")  # type: ignore[attr-defined]
    assert ran == ["stumble 2", "charge_card 3", "notify 3", "stumble 3"]
    assert (result.iterations, result.cost) == (4, Decimal(1))
    assert result.value == State(4, START.when, ["x" * 300, "no route", "note 0", "note 1", "note 2", "note 3"])


if __name__ == "__main__":
    FIXTURE.parent.mkdir(exist_ok=True)
    sys.exit(str(looped(f"sqlite:///{FIXTURE}").run(START, run_id="run-1")))  # type: ignore[attr-defined]
