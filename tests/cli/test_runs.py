"""`runs`, `show` and `tail`: what is kept, drawn and followed, while other processes write."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from loopguard import Guard, LoopLimit, Verdict, charge, current_run, loop, tool
from tests.cli.agents import EVIL, fails, fetch, fetches, refunds, spends
from tests.cli.conftest import Command, process, start

AGENTS = str(Path(__file__).parent / "agents.py")


def drawn(text: str) -> str:
    """A picture without what differs from run to run."""
    return re.sub(r"[\d.]+ ms", "… ms", text)


# -- runs ------------------------------------------------------------------------------------------


def test_runs_are_listed_the_latest_first(command: Command, store: str) -> None:
    """With their loop, how they stand, and when."""
    fetches.run(0, run_id="first")
    spends.run(0, run_id="second")
    lines = command("runs").out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["RUN", "LOOP", "STATUS"],
        ["second", "spends", "max_steps"],
        ["first", "fetches", "until"],
    ]


def test_runs_can_be_chosen(command: Command, store: str) -> None:
    """By status, by loop, and how many."""
    for number in range(3):
        fetches.run(0, run_id=f"f{number}")
    spends.run(0, run_id="s")
    assert [run["run_id"] for run in json.loads(command("runs", "--status", "max_steps", "--json").out)] == ["s"]
    assert len(json.loads(command("runs", "--name", "fetches", "--json").out)) == 3
    assert command("runs", "--limit", "1").out.splitlines()[-1] == "1 of 4 runs; --limit 0 lists all"
    assert len(json.loads(command("runs", "--limit", "0", "--json").out)) == 4


def test_an_interrupted_run_is_told_from_one_under_way(command: Command, store: str) -> None:
    """Both are recorded as running; one has nobody who drives it."""
    writer = start(AGENTS, "listens")
    wait_for(writer, command)
    assert "running" in command("runs").out
    writer.kill()
    writer.communicate()
    assert "interrupted" in command("runs").out
    assert len(json.loads(command("runs", "--status", "interrupted", "--json").out)) == 1


# -- show ------------------------------------------------------------------------------------------


def test_a_run_is_drawn_with_its_costs(command: Command, store: str) -> None:
    """Iterations, calls and a refusal, each under what it belongs to."""
    spends.run(0, run_id="r1")
    done = command("show", "r1")
    assert done.code == 0
    reason = re.search(r"refused \(max_steps\): (.*)", done.out)[1]  # type: ignore[index]  # else the test fails
    assert drawn(done.out).replace(reason, "…") == (
        f"✗ spends · r1 · 2 iterations · $0.5 · … ms · stopped: max_steps: MaxStepsExceeded: {reason}\n".replace(
            reason, "…"
        )
        + "├─ #1 · $0.25 · … ms\n"
        '│  └─ fetch(page=0) → "page 0" · $0.25 · … ms\n'
        "├─ #2 · $0.25 · … ms\n"
        '│  └─ fetch(page=1) → "page 1" · $0.25 · … ms\n'
        "└─ #3 · not completed\n"
        "   └─ ✗ fetch(page=2) refused (max_steps): …\n"
    )


def test_nested_runs_failures_verdicts_and_charges_have_their_place(command: Command, store: str) -> None:
    """A child run stands in its parent's iteration, a call within a call under that."""

    @tool
    def outer(n: int) -> str:
        return fetch(n)

    @tool
    def broken(n: int) -> None:
        raise ValueError("no such page")

    @loop(max=1)
    def inner(n: int) -> int:
        outer(n)
        return n

    @loop(max=2, evaluate=lambda n: Verdict(n > 0, "too small"), on_reject="continue")
    def agent(n: int) -> int:
        inner(n)
        try:
            broken(n)
        except ValueError:
            pass
        charge(usd=0.5)
        return n + 1

    agent.run(-1, run_id="r1")
    lines = drawn(command("show", "r1").out).splitlines()
    assert lines[0] == "agent · r1 · 2 iterations · $1.5 · … ms · completed: evaluated"
    assert lines[1:9] == [
        "├─ #1 · $0.75 · … ms · rejected",
        "│  ├─ inner · 1 iteration · $0.25 · … ms · completed: max_iterations",
        "│  │  └─ #1 · $0.25 · … ms",
        '│  │     └─ outer(n=-1) → "page -1" · … ms',
        '│  │        └─ fetch(page=-1) → "page -1" · $0.25 · … ms',
        "│  ├─ ✗ broken(n=-1) raised ValueError: no such page · … ms",
        "│  ├─ charged $0.5",
        "│  └─ <lambda> says no: too small",
    ]


def test_a_resumed_run_shows_where_it_was_taken_up(command: Command, store: str) -> None:
    """What was interrupted, what came from the record, and the question in between."""
    refunds.run(0, run_id="r1")
    assert "└─ #1 · waiting" in command("show", "r1").out
    question = json.loads(command("pending", "--json").out)[0]["id"]
    assert f"waits for an answer to {question}" in command("show", "r1").out
    command("approve", question, "--by", "anna")
    refunds.resume("r1")
    text = command("show", "r1").out
    assert text.splitlines()[0].endswith("completed: max_iterations")
    assert '? approval of refund(order="A-1", amount=50) · approve by anna' in text
    assert "├─ taken up again" in text
    assert "├─ #1 · interrupted" in text


def test_show_as_json_has_all_events(command: Command, store: str) -> None:
    """The run as `runs` lists it, and its events in order."""
    fetches.run(0, run_id="r1")
    shown = json.loads(command("show", "r1", "--json").out)
    assert shown["run"]["status"] == "until"
    assert [event["event"] for event in shown["events"]][:4] == [
        "RunStarted",
        "Transitioned",
        "IterationStarted",
        "ToolStarted",
    ]


def test_what_others_wrote_cannot_steer_the_terminal(command: Command, store: str) -> None:
    """Escape sequences and bidi text are escaped, wherever they stand; an argument of 1 MB is cut, and says so."""

    @tool(name=f"tool{EVIL}")
    def tricky(**given: str) -> str:
        return EVIL

    @loop(max=1, name=f"agent{EVIL}")
    def agent(n: int) -> int:
        tricky(**{EVIL: EVIL, "large": "x" * 1_000_000})
        current_run().stop(EVIL)  # type: ignore[union-attr]  # inside a loop
        tricky()
        return n

    agent.run(0, run_id="r1")
    with pytest.raises(RuntimeError):
        fails.run(0, run_id="r2")
    printed = [
        command(*arguments).out
        for arguments in (
            ["runs"],
            ["runs", "--json"],
            ["show", "r1"],
            ["show", "r1", "--json"],
            ["show", "r2", "--full"],
            ["tail", "r1"],
            ["tail", "r2", "--json"],
            ["spend"],
            ["what-if", "r1", "--max-steps", "0"],
        )
    ]
    assert not [text for text in printed if set(text) & set("\x1b\x07\u202e")]
    assert "more characters" in printed[2]
    assert len(printed[2]) < 5_000
    assert all(r"\x1b" in text or r"\u001b" in text for text in printed if text is not printed[7])


def test_what_was_erased_is_told_as_such(command: Command, store: str) -> None:
    """A run whose payloads are gone is still drawn, followed, counted and verified."""

    @tool(cost=0.25)
    def broken(n: int) -> None:
        raise ValueError

    @loop(max=1, evaluate=lambda n: Verdict(True, "good"))
    def agent(n: int) -> int:
        try:
            broken(n)
        except ValueError:
            fetch(n)
        return n

    agent.run(0, run_id="r1")
    with contextlib.closing(sqlite3.connect(store.removeprefix("sqlite:///"), isolation_level=None)) as db:
        db.execute("UPDATE events SET payload = NULL, salt = NULL")
    lines = drawn(command("show", "r1").out).splitlines()
    assert lines[2:] == [
        "   ├─ ✗ broken() raised what was erased · … ms",
        "   ├─ fetch() · $0.25 · … ms",
        "   └─ <lambda> says what was erased",
    ]
    for arguments in (["tail", "r1"], ["show", "r1", "--json"], ["spend"], ["verify"], ["what-if", "r1", "--usd", "1"]):
        assert command(*arguments).code == 0, arguments


def test_secrets_are_masked(command: Command, store: str) -> None:
    """In every form."""

    @tool
    def login(password: str) -> dict[str, str]:
        return {"api_key": "hunter2-hunter2"}

    @loop(max=1)
    def agent(n: int) -> int:
        login("hunter2-hunter2")
        return n

    agent.run(0, run_id="r1")
    printed = [command(*arguments).out for arguments in (["show", "r1"], ["show", "r1", "--json"], ["tail", "r1"])]
    assert not [text for text in printed if "hunter2" in text]


def test_a_terminal_without_boxes_gets_ascii(store: str) -> None:
    """What its encoding doesn't have is drawn, or escaped, otherwise."""
    fetches.run(0, run_id="r1")
    import os

    done = process("show", "r1", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, err = done.communicate(timeout=30)
    assert (done.returncode, err) == (0, "")
    assert out.isascii()
    assert "|- #1" in out


# -- while others write ----------------------------------------------------------------------------


def wait_for(writer: Popen[str], command: Command) -> None:
    """Until the writer's run is in the store."""
    while command("show", "live").code:
        assert writer.poll() is None, writer.communicate()[1]


def say(writer: Popen[str], *lines: str) -> None:
    """Let it go on."""
    assert writer.stdin is not None
    writer.stdin.write("".join(f"{line}\n" for line in lines))
    writer.stdin.flush()


@pytest.fixture
def writer(store: str, request: pytest.FixtureRequest) -> Iterator[Popen[str]]:
    """Another process that drives the run "live"."""
    made = start(AGENTS, getattr(request, "param", "listens"))
    yield made
    made.kill()
    made.communicate()


@pytest.mark.parametrize("writer", ["hurries"], indirect=True)
def test_everything_works_while_another_process_writes(command: Command, writer: Popen[str]) -> None:
    """A store in use is read again and again, and each picture is whole."""
    wait_for(writer, command)
    say(writer, *["on"] * 30, "end")
    seen = []
    while writer.poll() is None:
        shown = command("show", "live")
        listed = command("runs", "--json")
        assert (shown.code, listed.code) == (0, 0), shown.err + listed.err
        assert json.loads(listed.out)[0]["run_id"] == "live"
        seen.append(shown.out.count("fetch("))
    assert seen == sorted(seen)
    assert command("verify").code == 0
    assert command("show", "live").out.count("fetch(") == 3100


def until(tail: Popen[str], text: str) -> str:
    """The line of a tail that has this text, once it comes."""
    assert tail.stdout is not None
    for line in tail.stdout:
        if text in line:
            return line
    raise AssertionError(f"{text!r} never came")


def test_tail_follows_a_run_to_its_end(command: Command, writer: Popen[str]) -> None:
    """Line by line, while it happens; exit code 0 for a run that completes."""
    wait_for(writer, command)
    tail = process("tail", "live")
    until(tail, "listens #1 · hear(n=0) began")
    say(writer, "hello")
    until(tail, 'listens #1 · hear → "hello"')
    until(tail, "listens #2 · hear(n=1) began")
    say(writer, "end")
    until(tail, "completed: until")
    assert tail.wait(30) == 0
    tail.communicate()


def test_tail_as_json_is_an_event_a_line(command: Command, writer: Popen[str]) -> None:
    """Each line can be parsed on its own; exit code 3 for a run that was stopped."""
    wait_for(writer, command)
    tail = process("tail", "live", "--json")
    say(writer, "stop")
    say(writer, "more")
    out, _ = tail.communicate(timeout=30)
    events = [json.loads(line)["event"] for line in out.splitlines()]
    assert (events[0], events[-1]) == ("RunStarted", "RunEnded")
    assert tail.returncode == 3


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_tail_notices_that_a_run_was_killed(command: Command, writer: Popen[str]) -> None:
    """It doesn't wait for somebody who is dead."""
    wait_for(writer, command)
    tail = process("tail", "live")
    until(tail, "hear(n=0) began")
    writer.send_signal(signal.SIGKILL)
    writer.wait(30)
    out, _ = tail.communicate(timeout=30)
    assert out == "live was interrupted: nobody drives it any more\n"
    assert tail.returncode == 3


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_tail_can_be_left(command: Command, writer: Popen[str]) -> None:
    """Ctrl-C ends the tail, not the run."""
    wait_for(writer, command)
    tail = process("tail", "live")
    until(tail, "hear(n=0) began")
    tail.send_signal(signal.SIGINT)
    _, err = tail.communicate(timeout=30)
    assert (tail.returncode, err) == (130, "")
    assert writer.poll() is None


def test_show_is_quick_for_a_thousand_calls(command: Command, store: str) -> None:
    """Reading is linear in the events: nothing is folded again for each of them."""

    @loop(max=1, guard=Guard(LoopLimit(0)))
    def agent(n: int) -> int:
        for page in range(1000):
            fetch(page)
        return n

    agent.run(0, run_id="r1")
    done: Any = command("show", "r1")
    assert done.out.count("fetch(") == 1000
