"""`spend`, `verify`, `export` and `purge`: the journal as a book of account."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path

import pytest

from loopguard import Budget, Guard, charge, journal, loop, tool
from tests.cli.agents import fetch, fetches, refunds, spends
from tests.cli.conftest import Command


@pytest.fixture
def three(store: str) -> str:
    """A store of three runs, which have spent $1.50 and 4 pages."""
    fetches.run(0, run_id="r1")
    spends.run(0, run_id="r2")

    @loop(max=1, name="pays")
    def pays(n: int) -> int:
        fetch(n)
        charge(usd=0.25, pages=4)
        return n

    pays.run(0, run_id="r3")
    return store


def test_what_a_budget_of_many_runs_has_spent_is_told_by_its_ledger(command: Command, tmp_path: Path) -> None:
    """A row for each budget, key and window; --key picks one, and a ledger that isn't there is an error."""
    ledger = f"sqlite:///{tmp_path / 'spend.db'}"

    @tool(cost=0.25, guard=Guard(Budget(usd=1, per="total", key="team-a", ledger=ledger, name="tries")))
    def ask(n: int) -> int:
        return n

    @tool(cost={"pages": 4}, guard=Guard(Budget(pages=9, per="total", key="team-b", ledger=ledger)))
    def print_out(n: int) -> int:
        return n

    with Guard().scope("s"):
        ask(1)
        ask(2)
        print_out(1)
    assert command("spend", "--ledger", ledger).out.splitlines() == [
        "BUDGET  KEY     WINDOW  SPENT    RESERVED  OVERDRAFT",
        "budget  team-b  total   4 pages  0 pages   0 pages",
        "tries   team-a  total   $0.5     $0        $0",
    ]
    [standing] = json.loads(command("spend", "--key", "team-a", "--ledger", ledger, "--json").out)
    assert (standing["budget"], standing["unit"], standing["spent"]) == ("tries", "usd", "0.5")
    done = command("spend", "--ledger", f"sqlite:///{tmp_path / 'other.db'}")
    assert (done.code, "there is no such file" in done.err) == (2, True)


def test_spending_is_added_up_by_tool(command: Command, three: str) -> None:
    """What a body was charged outside of tools stands under its loop."""
    assert command("spend").out.splitlines() == [
        "TOOL   SPENT",
        "fetch  $1.25",
        "pays   $0.25, 4 pages",
        "total  $1.5, 4 pages",
    ]


@pytest.mark.parametrize(
    ("by", "spent"),
    [
        ("loop", {"fetches": "0.5", "spends": "0.5", "pays": "0.5"}),
        ("run", {"r1": "0.5", "r2": "0.5", "r3": "0.5"}),
        ("day", {time.strftime("%Y-%m-%d"): "1.5"}),
    ],
)
def test_spending_is_added_up_by_what_is_asked(command: Command, three: str, by: str, spent: dict[str, str]) -> None:
    """The sum is the same, whatever it is split by."""
    told = json.loads(command("spend", "--by", by, "--json").out)
    assert {name: amounts["usd"] for name, amounts in told["spent"].items()} == spent
    assert told["total"] == {"usd": "1.5", "pages": "4"}


def test_spending_of_one_run_or_of_a_time(command: Command, three: str) -> None:
    """A run by its id, or those that began lately."""
    assert json.loads(command("spend", "r1", "--json").out)["total"] == {"usd": "0.5"}
    assert json.loads(command("spend", "--since", "1h", "--json").out)["total"]["usd"] == "1.5"
    assert json.loads(command("spend", "--since", "0s", "--json").out)["total"] == {}


def test_a_changed_event_is_named(command: Command, three: str) -> None:
    """Exit code 1, and the first link that doesn't hold; the other runs are whole."""
    assert command("verify").out == "3 of 3 runs are whole\n"
    with sqlite3.connect(three.removeprefix("sqlite:///")) as db:
        db.execute("UPDATE events SET header = replace(header, 'fetch', 'fetsh') WHERE run_id = 'r2' AND seq = 5")
    db.close()
    done = command("verify")
    assert done.code == 1
    (broken,) = [line for line in done.out.splitlines() if "not as it was written" in line]
    assert broken.startswith("r2: event ")
    assert command("verify", "r1").code == 0
    assert json.loads(command("verify", "r2", "--json").out)["verified"] == 0


def test_events_are_exported_once(command: Command, three: str, tmp_path: Path) -> None:
    """A second export of the same run adds nothing."""
    file = str(tmp_path / "runs.jsonl")
    first = json.loads(command("export", file, "--json").out)["added"]
    assert first == sum(len(journal.open(three).events(run)) for run in ("r1", "r2", "r3"))
    assert command("export", file, "r1").out == f"0 events added to {file}\n"
    assert len(journal.read_export(file)[0]) == 3


def test_an_export_that_cannot_be_written_exits_with_2(command: Command, three: str, tmp_path: Path) -> None:
    """A folder that isn't there is no traceback."""
    done = command("export", str(tmp_path / "nowhere" / "runs.jsonl"))
    assert done.code == 2
    assert "can't be written" in done.err


def test_old_runs_are_purged(command: Command, three: str) -> None:
    """Those that are over for so long; what waits stays."""
    refunds.run(0, run_id="r4")
    assert command("purge", "--older-than", "30d").out == "0 runs deleted\n"
    assert json.loads(command("purge", "--older-than", "0s", "--json").out) == ["r3", "r2", "r1"]
    assert [run["run_id"] for run in json.loads(command("runs", "--json").out)] == ["r4"]
