"""``runs``, ``show`` and ``tail``: which runs there are, what one of them did, and what it is doing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from loopguard import _events as events
from loopguard._tree import Marks
from loopguard.cli import _words as words
from loopguard.cli._options import Json, RunId, Store, opened
from loopguard.cli._output import columns, emit, marks, moment, say
from loopguard.cli._picture import picture
from loopguard.journal import OpenJournal, RunInfo
from loopguard.journal._fold import Story
from loopguard.redaction import display_name
from loopguard.telemetry._log import event_data

__all__ = ["runs", "show", "tail"]

STOPPED = 3
"""The exit code for a run that stopped without completing."""
_POLL = 0.1
"""Seconds between two looks at a run that another process drives."""


def runs(
    store: Store = None,
    status: Annotated[str | None, typer.Option(help="Only those of this status: running, waiting, until, …")] = None,
    name: Annotated[str | None, typer.Option(help="Only those of this loop.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many, the latest first; 0 for all.")] = 50,
    json: Json = False,
) -> None:
    """List the runs of a store, the latest first."""
    wanted = [
        run for run in opened(store).runs() if status in (None, run.status, _status(run)) and name in (None, run.name)
    ]
    listed = wanted[:limit] if limit else wanted
    if json:
        emit([asdict(run) for run in listed])
        return
    rows = [(run.run_id, run.name, _status(run), moment(run.started_at), moment(run.updated_at)) for run in listed]
    columns(
        [
            ("RUN", "LOOP", "STATUS", "STARTED", "UPDATED"),
            *(tuple(words.text(cell, 200) for cell in row) for row in rows),
        ]
    )
    if len(listed) < len(wanted):
        say(f"{len(listed):,} of {len(wanted):,} runs; --limit 0 lists all")


def _status(run: RunInfo) -> str:
    return "interrupted" if run.status == "running" and run.holder is None else run.status


def show(
    run: RunId,
    store: Store = None,
    full: Annotated[bool, typer.Option("--full", help="Show values and texts whole.")] = False,
    json: Json = False,
) -> None:
    """Draw a run as a tree: iterations, calls, refusals, questions and verdicts, with what they cost."""
    book = opened(store)
    found = book.run(run)
    if json:
        emit({"run": asdict(found), "events": [shown(event) for event in book.events(run)]})
        return
    draw(book, found, None if full else 100)


def draw(book: OpenJournal, run: RunInfo, limit: int | None) -> None:
    """Print the tree of a run."""
    stream = book.reading(run.run_id).read()
    say("\n".join(picture(stream, open=_open(run), limit=limit, marks=marks())))


def _open(run: RunInfo) -> str:
    """What is said of what hasn't ended in it."""
    if run.holder is not None:
        return "under way"
    return {"running": "interrupted", "waiting": "waiting"}.get(run.status, "not completed")


def shown(event: events.Event) -> dict[str, Any]:
    """An event as JSON data that people may see."""
    return event_data(events.redacted(event))


def tail(run: RunId, store: Store = None, json: Json = False) -> None:
    """Follow a run that another process drives, until it ends; exit with 3 if it ends without completing."""
    book = opened(store)
    reading = book.reading(run)
    story = Story()
    try:
        while True:
            found = book.run(run)  # before its events: whoever let go of it has written all of them
            _tell(reading.read(), story, json)
            if found.holder is None:
                break
            time.sleep(_POLL)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    root = story.root
    if (root is None or root.ended is None) and not json:
        say(f"{run} was interrupted: nobody drives it any more")
    raise typer.Exit(0 if root is not None and root.completed else STOPPED)


def _tell(stream: Iterable[events.Event], story: Story, json: bool) -> None:
    for event in stream:
        story.add(event)
        if json:
            emit(shown(event))
        elif (line := told(event, story, marks())) is not None:
            say(line)


def told(event: events.Event, story: Story, marks: Marks) -> str | None:
    """An event as a line of its own, beginning with its time, run and iteration."""
    line = _line(event, story)
    if line is None:
        return None
    name = words.text(story.runs[event.run_id].started.name, 200)
    where = f"{name} #{event.iteration}" if event.iteration else name
    return marks.between.join([f"{moment(event.at, '%H:%M:%S')} {where}", (marks.wrong * line.wrong) + line.text])


def _line(event: events.Event, story: Story) -> words.Line | None:
    match event:
        case events.RunStarted():
            return words.Line(f"began ({words.text(event.run_id, 200)})")
        case events.RunEnded():
            return words.ended(event, story.runs[event.run_id].completed, 200)
        case events.IterationStarted():
            return words.Line("began")
        case events.ToolStarted():
            return words.Line(f"{words.called(event.tool, event.arguments, 100)} began")
        case events.ToolFinished():
            text = display_name(event.tool) + words.outcome(event, 100)
            return words.Line(", ".join([text, *words.finished(event)]), event.outcome in words.FAILED)
        case events.ModelStarted():
            return words.Line(f"model {words.text(event.model, 200)} began")
        case events.ModelCalled():
            text = f"model {words.text(event.model, 200)}"
            return words.Line(", ".join([text, *words.modelled(event, 100)]), event.error is not None)
    return words.said(event, 200)
