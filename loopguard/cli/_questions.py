"""``pending``, ``approve``, ``deny``, ``answer`` and ``stop``: what runs wait for, and what people say."""

from __future__ import annotations

import getpass
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from loopguard._approval import Approval
from loopguard._json import parse_json
from loopguard.cli import _words as words
from loopguard.cli._options import By, Json, KeyFile, Store, opened
from loopguard.cli._output import emit, moment, say
from loopguard.exceptions import ConfigurationError
from loopguard.journal import Question
from loopguard.questions.terminal import behind_rule
from loopguard.redaction import display, display_name, display_value

__all__ = ["answer", "approve", "deny", "pending", "stop"]

QuestionId = Annotated[str, typer.Argument(metavar="ID", help="The id of a question, as `loopguard pending` lists it.")]
Grant = Annotated[
    Literal["once", "run"],
    typer.Option(help="Whether it holds once, or for this tool and these arguments as long as the run lasts."),
]


def pending(store: Store = None, key_file: KeyFile = None, json: Json = False) -> None:
    """List the questions that runs wait for, the oldest first."""
    questions = opened(store, key_file).questions("pending")
    if json:
        emit(questions)
    elif not questions:
        say("Nothing waits for an answer.")
    else:
        say("\n\n".join("\n".join(_asked(question)) for question in questions))


def _asked(question: Question) -> Iterator[str]:
    width = shutil.get_terminal_size().columns - 7
    until = "" if question.expires_at is None else f", expires {moment(question.expires_at)}"
    yield f"{words.text(question.id, 200)}  {words.text(question.kind, 200)}, asked {moment(question.asked_at)}{until}"
    yield f"    run: {words.text(question.run_name, 200)} ({words.text(question.run_id, 200)})"
    if question.tool is not None:
        yield f"    tool: {display_name(question.tool)}"
    if question.prompt is not None:
        yield from behind_rule(display(question.prompt), width)
    for name, value in question.arguments.items():
        yield from behind_rule(f"{display(name)} = {display_value(value)}", width)
    if question.hidden:
        yield "    Some of it is hidden: to approve what you can't see, add --allow-hidden."


def approve(
    question: QuestionId,
    edit: Annotated[str | None, typer.Option("--edit", metavar="JSON", help="Other arguments, as an object.")] = None,
    grant: Grant = "once",
    allow_hidden: Annotated[bool, typer.Option("--allow-hidden", help="Approve what is hidden, too.")] = False,
    by: By = None,
    store: Store = None,
    key_file: KeyFile = None,
    json: Json = False,
) -> None:
    """Say yes to an approval, or to raising a budget."""
    if edit is None:
        said = Approval.approve(grant)
    elif grant == "once":
        said = Approval.edit(_object(edit))
    else:
        raise ConfigurationError("--edit and --grant run don't go together: an edited call is approved once")
    book = opened(store, key_file)
    _done(book.answer(question, said, by=by or _me(), allow_hidden=allow_hidden), json)


def deny(
    question: QuestionId,
    reason: Annotated[str | None, typer.Option(help="Why; the model is told.")] = None,
    grant: Grant = "once",
    by: By = None,
    store: Store = None,
    key_file: KeyFile = None,
    json: Json = False,
) -> None:
    """Say no to an approval, or to raising a budget."""
    book = opened(store, key_file)
    _done(book.answer(question, Approval.deny(reason, grant), by=by or _me()), json)


def answer(
    question: QuestionId,
    value: Annotated[
        str | None,
        typer.Argument(help="The value of an input: JSON, or else a text; of an uncertain call, ran or not_run."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json-file", help="A file that holds the value as JSON.")] = None,
    result: Annotated[str | None, typer.Option(metavar="JSON", help="What a call returned that has run.")] = None,
    by: By = None,
    store: Store = None,
    key_file: KeyFile = None,
    json: Json = False,
) -> None:
    """Give the value that a run waits for, or say what became of an uncertain call."""
    if (value is None) == (json_file is None):
        raise ConfigurationError("give the answer as VALUE, or in a --json-file")
    book = opened(store, key_file)
    given: Any = value
    if json_file is not None:
        given = _parsed(_content(json_file), f"--json-file {json_file}")
    elif value is not None and book.question(question).kind == "input":
        given = _value(value)
    returned = None if result is None else _parsed(result, "--result")
    _done(book.answer(question, given, result=returned, by=by or _me()), json)


def stop(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="The id of a run.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all runs that are under way.")] = False,
    reason: Annotated[str, typer.Option(help="Why; the run ends with it.")] = "stopped by a person",
    by: By = None,
    store: Store = None,
    json: Json = False,
) -> None:
    """Ask a run to stop: it takes notice at its next step, or when it is resumed."""
    if (run is None) != every:
        raise ConfigurationError("name a RUN, or say --all")
    stopped = opened(store).stop(run, reason, by=by or _me())
    if json:
        emit(stopped)
    else:
        say("\n".join(f"{words.text(run_id, 200)} is asked to stop" for run_id in stopped) or "No run is under way.")


def _done(question: Question, json: bool) -> None:
    if json:
        emit(question)
        return
    assert question.answer is not None
    by = f" by {words.text(question.answer.by, 200)}" if question.answer.by else ""
    say(f"{words.text(question.id, 200)} answered{by}: {words.text(question.answer.decision, 200)}")
    say(f"run {words.text(question.run_id, 200)} takes it up where it waits, or when it is resumed")


def _me() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # nobody has a name here
        return None


def _object(text: str) -> dict[str, Any]:
    made = _parsed(text, "--edit")
    if not isinstance(made, dict):
        raise ConfigurationError(f"--edit {text!r}: give an object of parameter to value")
    return made


def _parsed(text: str, what: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as exc:
        raise ConfigurationError(f"{what}: {exc}") from None


def _value(text: str) -> Any:
    """What somebody typed: JSON where it is, else a text."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as exc:
        raise ConfigurationError(f"--json-file {path}: {exc}") from None
