"""`what-if` and `demo`: policies over recorded runs, and an agent that shows them."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import pytest

from loopguard import Guard, MaxSteps
from tests.cli.agents import fetches, spends
from tests.cli.conftest import Command

PAGE = (Path(__file__).parents[2] / "docs" / "command.md").read_text(encoding="utf-8")
strict = Guard(MaxSteps(1))
"""What --guard loads."""


def test_what_if_says_where_and_what_it_saves(command: Command, store: str) -> None:
    """The call that would have been refused first, why, and the amounts."""
    spends.run(0, run_id="r1")
    done = command("what-if", "r1", "--max-steps", "1", "--usd", "1")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "spends r1 under Guard(MaxSteps(1), Budget(usd=1)):"
    assert lines[1:3] == ["  refused first: call 2 of 2, in iteration 2", "    fetch(page=1)"]
    assert lines[3].startswith("    max_steps: fetch was not run:")
    assert lines[4:] == [
        "  spent by then: $0.25",
        "  saved, had it ended there: $0.25",
        "  refusals, had it gone on: 1 max_steps",
    ]


def test_what_if_as_json(command: Command, store: str) -> None:
    """The same as data."""
    fetches.run(0, run_id="r1")
    told = json.loads(command("what-if", "r1", "--usd", "0.30", "--json").out)
    assert (told["calls"], told["all_calls"], told["spent"], told["saved"]) == (1, 2, {"usd": "0.25"}, {"usd": "0.25"})
    assert [refusal["code"] for refusal in told["refusals"]] == ["budget"]


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--max-steps", "0"], "max_steps"),
        (["--tokens", "0", "--usd", "0.1"], "budget"),
        (["--rate", "1/3600", "--model-calls", "9"], None),
        (["--loop-limit", "0", "--usd", "10"], None),
        (["--guard", "tests.cli.test_policy:strict"], "max_steps"),
    ],
)
def test_what_if_makes_a_policy_of_its_flags(command: Command, store: str, flags: list[str], code: str | None) -> None:
    """Each flag is the guardrail of its name."""
    fetches.run(0, run_id="r1")
    told = json.loads(command("what-if", "r1", *flags, "--json").out)
    expected = code if code is not None else "rate_limited" if "--rate" in flags else None
    assert (told["refusals"][0]["code"] if told["refusals"] else None) == expected


def test_a_run_that_goes_through_is_told_so(command: Command, store: str) -> None:
    """With what it spent."""
    fetches.run(0, run_id="r1")
    out = command("what-if", "r1", "--max-steps", "2").out
    assert out.splitlines()[1] == "  goes through: 2 calls, $0.5"


def test_the_demo_runs_into_its_limits(command: Command, store: str) -> None:
    """Offline: a real SDK, three refusals, an approval, and a what-if; kept in the store that is named."""
    done = command("demo")
    assert done.code == 0
    assert [code for code in ("loop_limit", "approval_denied", "budget") if f"refused ({code})" in done.out] == [
        "loop_limit",
        "approval_denied",
        "budget",
    ]
    assert "What if it had been allowed three tool calls?" in done.out
    (run,) = json.loads(command("runs", "--json").out)
    assert command("show", run["run_id"]).out.splitlines()[1:5] == done.out.splitlines()[1:5]


def test_the_demo_needs_no_store(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes one, and leaves nothing behind."""
    monkeypatch.delenv("LOOPGUARD_STORE", raising=False)
    told = json.loads(command("demo", "--json").out)
    assert told["events"][-1]["stop_reason"] == "until"


def test_the_page_shows_what_the_demo_draws(command: Command, store: str) -> None:
    """Line by line, but for ids and times, and what is left out."""
    picture = next(text for text in re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL) if "model scripted" in text)
    told = re.sub(r"[\d.]+ ms|run_\w+|…", "...", picture)
    assert doctest.OutputChecker().check_output(told, command("demo").out, doctest.ELLIPSIS)
