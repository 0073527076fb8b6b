"""`pending`, `approve`, `deny`, `answer` and `stop`: what people say reaches the run, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loopguard import ApproveTool, Flow, Guard, Inbox, await_input, current_run, journal, loop, tool
from loopguard._events import QuestionAsked
from tests.cli.agents import EVIL, refund, refunds, sends
from tests.cli.conftest import Command
from tests.cli.test_runs import AGENTS, say, start, wait_for


def asked(command: Command, *options: str) -> Any:
    """The one question that is pending."""
    (question,) = json.loads(command("pending", "--json", *options).out)
    return question


def test_pending_shows_what_is_asked(command: Command, store: str) -> None:
    """The question, its run, its tool and its arguments; nothing where nothing waits."""
    refunds.run(0, run_id="r1")
    lines = command("pending").out.splitlines()
    assert lines[0].startswith(f"{asked(command)['id']}  approval, asked ")
    assert lines[1:] == ["    run: refunds (r1)", "    tool: refund", '    | order = "A-1"', "    | amount = 50"]
    command("deny", asked(command)["id"])
    assert command("pending").out == "Nothing waits for an answer.\n"


def test_an_approved_call_runs_when_its_run_is_resumed(command: Command, store: str) -> None:
    """Who approved it is kept; a second answer is refused."""
    refunds.run(0, run_id="r1")
    question = asked(command)["id"]
    done = command("approve", question, "--by", "anna")
    assert done.out.startswith(f"{question} answered by anna: approve\n")
    again = command("approve", question)
    assert (again.code, again.out) == (1, "")
    assert "answered already: approve by anna" in again.err
    assert command("resume", "tests.cli.agents:refunds", "r1").code == 0


def test_the_user_of_this_process_answers_by_default(
    command: Command, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system calls them."""
    monkeypatch.setenv("LOGNAME", "bert")
    refunds.run(0, run_id="r1")
    assert json.loads(command("approve", asked(command)["id"], "--json").out)["answer"]["by"] == "bert"


def test_a_denial_gives_its_reason(command: Command, store: str) -> None:
    """The model is told, and so is who looks."""
    refunds.run(0, run_id="r1")
    command("deny", asked(command)["id"], "--reason", "not today", "--grant", "run", "--by", "anna")
    assert command("resume", "tests.cli.agents:refunds", "r1").code == 3
    assert "deny by anna: not today" in command("show", "r1").out


def test_an_approval_may_change_the_arguments(command: Command, store: str) -> None:
    """What runs is what was approved."""
    refunds.run(0, run_id="r1")
    edited = command("approve", asked(command)["id"], "--edit", '{"order": "A-1", "amount": 20}')
    assert edited.code == 0
    command("resume", "tests.cli.agents:refunds", "r1")
    assert 'refund(order="A-1", amount=20) → "$20 for A-1"' in command("show", "r1").out


def test_what_is_hidden_needs_a_word_more(command: Command, store: str) -> None:
    """Nobody approves by accident what they can't see."""

    @tool(approve=True)
    def pay(card: str, password: str) -> None:
        """Never shown whole."""

    @loop(max=1, guard=Guard(ApproveTool(Inbox())), name="payer")
    def agent(n: int) -> int:
        pay("4711", "hunter2-hunter2")
        return n

    agent.run(0, run_id="r1")
    out = command("pending").out
    assert "hunter2" not in out
    assert "add --allow-hidden" in out
    question = asked(command)["id"]
    assert command("approve", question).code == 1
    assert command("approve", question, "--allow-hidden").code == 0


def test_a_question_cannot_steer_the_terminal(command: Command, store: str) -> None:
    """Each value stands behind a rule, escaped: it can't pass for the lines around it."""

    @loop(max=1, guard=Guard(ApproveTool(Inbox())), name=f"agent{EVIL}")
    def agent(n: int) -> int:
        refund(f"A-1{EVIL}\n    | amount = 1", 50)
        return n

    agent.run(0, run_id="r1")
    lines = command("pending").out.splitlines()
    assert not set("".join(lines)) & set("\x1b\x07\u202e")
    assert len([line for line in lines if line.startswith("    | amount")]) == 1


@pytest.mark.parametrize(
    ("arguments", "value"),
    [(["ran", "--result", '"told"'], "told"), (["not_run"], "sent")],
    ids=["ran", "not_run"],
)
def test_an_uncertain_call_is_answered(command: Command, store: str, arguments: list[str], value: str) -> None:
    """Whether it ran, and what it returned then."""
    dies = start("-m", "tests.cli.agents", "sends", cwd=Path(__file__).parents[2])
    assert dies.wait(30) == 9, dies.communicate()[1]
    dies.communicate()
    sends.resume("live")
    assert command("answer", asked(command)["id"], "yes").code == 1
    assert command("answer", asked(command)["id"], *arguments).code == 0
    assert sends.resume("live").value == [value]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["42"], 42),
        (["two words"], "two words"),
        (['{"a": [1]}'], {"a": [1]}),
        (["--json-file", "FILE"], ["from a file"]),
    ],
    ids=["number", "text", "object", "file"],
)
def test_an_input_is_given(command: Command, store: str, tmp_path: Path, arguments: list[str], value: Any) -> None:
    """JSON, or else a text; while the run is under way, too."""
    file = tmp_path / "value.json"
    file.write_text('["from a file"]', encoding="utf-8")

    @loop(max=1, name="asks")
    def agent(n: int) -> int:
        run = current_run()
        assert run is not None
        run.emit(
            QuestionAsked,
            question_id="question_1",
            kind="input",
            call_id=None,
            tool=None,
            arguments={},
            prompt=f"How many?{EVIL}",
        )
        run.recorder.settled()
        assert "| How many?" in command("pending").out
        done = command("answer", "question_1", *(str(file) if given == "FILE" else given for given in arguments))
        assert done.code == 0, done.err
        return n

    agent.run(0, run_id="r1")
    answer = journal.open(store).question("question_1").answer
    assert answer is not None
    assert answer.result == value


def test_a_yes_is_no_value(command: Command, store: str) -> None:
    """`approve` and `deny` of what waits for a value are refused, and name the command that gives one."""
    flow = Flow("release", [await_input("version", "Which version?")], store=store)
    flow.run({}, run_id="r1")
    question = asked(command)["id"]
    for word in ("approve", "deny"):
        done = command(word, question)
        assert (done.code, f"loopguard answer {question} VALUE" in done.err) == (1, True)
    assert command("answer", question, "1.2").code == 0
    assert flow.resume("r1").value == {"version": 1.2}


def test_a_value_is_no_yes(command: Command, store: str) -> None:
    """`answer` of an approval is refused, and names the commands that decide."""
    refunds.run(0, run_id="r1")
    done = command("answer", asked(command)["id"], "yes")
    assert (done.code, "loopguard approve or deny" in done.err) == (1, True)


def test_a_signed_answer_needs_the_key(command: Command, store: str, tmp_path: Path) -> None:
    """--key-file names what the Inbox has; an answer without it is refused."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32 + b"\n")

    @loop(max=1, guard=Guard(ApproveTool(Inbox(key=b"k" * 32))), name="signed")
    def agent(n: int) -> int:
        refund("A-1", 50)
        return n + 1

    agent.run(0, run_id="r1")
    question = asked(command, "--key-file", str(key))["id"]
    assert "--key-file" in (unsigned := command("approve", question)).err
    assert unsigned.code == 1
    assert agent.resume("r1").stop_reason == "waiting"
    assert command("approve", question, "--key-file", str(key)).code == 0
    assert agent.resume("r1").completed


def test_a_run_that_another_process_drives_is_stopped(command: Command, store: str) -> None:
    """It takes notice at its next step, and ends with the reason."""
    writer = start(AGENTS, "listens")
    wait_for(writer, command)
    assert command("stop", "live", "--reason", "for lunch").out == "live is asked to stop\n"
    say(writer, "on", "on", "on")
    _, err = writer.communicate(timeout=30)
    assert writer.returncode == 0, err
    assert journal.open(store).run("live").status == "stopped"
    assert "for lunch" in command("show", "live").out
    assert command("stop", "live").code == 1


def test_all_runs_are_stopped(command: Command, store: str) -> None:
    """Those that are over are left alone."""
    refunds.run(0, run_id="r1")
    assert json.loads(command("stop", "--all", "--json").out) == ["r1"]
