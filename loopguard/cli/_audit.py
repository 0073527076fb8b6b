"""``spend``, ``verify``, ``export`` and ``purge``: the journal as a book of account."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from loopguard import budgets
from loopguard._amounts import amount, decimals, plain
from loopguard.cli import _words as words
from loopguard.cli._options import Json, Store, opened, seconds
from loopguard.cli._output import columns, emit, moment, say
from loopguard.exceptions import ConfigurationError
from loopguard.journal import OpenJournal, RunInfo
from loopguard.redaction import display

__all__ = ["export", "purge", "spend", "verify"]

Some = Annotated[str | None, typer.Argument(metavar="[RUN]", help="The id of a run; all of them by default.")]


def spend(
    run: Some = None,
    by: Annotated[Literal["tool", "loop", "run", "day"], typer.Option(help="tool: by tool and model.")] = "tool",
    since: Annotated[str | None, typer.Option(help="Only runs that began within this time, such as 7d.")] = None,
    key: Annotated[str | None, typer.Option(help="What budgets of this key have spent, as their ledger says.")] = None,
    ledger: Annotated[
        str | None, typer.Option(help="The ledger of budgets with per=: a URL; by default LOOPGUARD_LEDGER.")
    ] = None,
    store: Store = None,
    json: Json = False,
) -> None:
    """Add up what runs have spent; with --key or --ledger, what budgets of many runs have."""
    if key is not None or ledger is not None:
        _standings(budgets.spend(ledger, key=key), json)
        return
    book = opened(store)
    began = 0.0 if since is None else time.time() - seconds(since, "--since")
    total: dict[str, int] = {}
    groups: dict[str, dict[str, int]] = {}
    for info in [book.run(run)] if run is not None else book.runs():
        if info.started_at < began:
            continue
        for name, spent in _groups(book, info, by):
            group = groups.setdefault(name, {})
            for unit, exact in spent.items():
                group[unit] = group.get(unit, 0) + exact
                total[unit] = total.get(unit, 0) + exact
    if json:
        emit({"by": by, "spent": {name: decimals(spent) for name, spent in groups.items()}, "total": decimals(total)})
        return
    dearest = sorted(groups.items(), key=lambda group: (-group[1].get("usd", 0), group[0]))
    rows = [(words.text(name, 200), words.amounts(decimals(spent))) for name, spent in dearest]
    rows.append(("total", words.amounts(decimals(total))))
    columns([(by.upper(), "SPENT"), *((name, ", ".join(spent) or "nothing") for name, spent in rows)])


def _standings(found: list[budgets.Standing], json: bool) -> None:
    """What stands in a ledger: a row for each budget, key, window and unit."""
    if json:
        emit([asdict(standing) for standing in found])
        return
    rows = [
        (
            words.text(standing.budget, 200),
            words.text(standing.key, 200),
            words.text(standing.window, 200),
            *(
                display(plain(amount(each, standing.unit), standing.unit))
                for each in (standing.spent, standing.reserved, standing.overdraft)
            ),
        )
        for standing in found
    ]
    columns([("BUDGET", "KEY", "WINDOW", "SPENT", "RESERVED", "OVERDRAFT"), *rows])


def _groups(book: OpenJournal, info: RunInfo, by: str) -> Iterator[tuple[str, dict[str, int]]]:
    story = book.story(info.run_id)
    if by == "tool":
        yield from story.charges.items()
    elif story.root is not None:
        name = {"loop": info.name, "run": info.run_id, "day": moment(info.started_at, "%Y-%m-%d")}[by]
        yield name, story.root.spent


def verify(run: Some = None, store: Store = None, json: Json = False) -> None:
    """Check the chain of hashes of one run, or of all; exit with 1 where something is not as it was written."""
    book = opened(store)
    names = [run] if run is not None else [info.run_id for info in book.runs()]
    broken = {name: event for name in names if (event := book.verify(name)) is not None}
    if json:
        emit({"verified": len(names) - len(broken), "broken": broken})
    for name, event in broken.items() if not json else ():
        say(f"{words.text(name, 200)}: event {event} is not as it was written")
    if not json:
        say(f"{len(names) - len(broken):,} of {len(names):,} runs are whole")
    raise typer.Exit(1 if broken else 0)


def export(
    file: Annotated[Path, typer.Argument(help="The JSON Lines file, to which what it doesn't hold yet is added.")],
    run: Some = None,
    store: Store = None,
    json: Json = False,
) -> None:
    """Copy the events of one run, or of all, to a file."""
    try:
        added = opened(store).export(file, run)
    except OSError as exc:
        raise ConfigurationError(f"{file} can't be written: {exc.strerror}") from None
    if json:
        emit({"file": str(file), "added": added})
    else:
        say(f"{added:,} events added to {words.text(file, None)}")


def purge(
    older_than: Annotated[str, typer.Option("--older-than", help="How long nothing has happened, such as 30d.")],
    store: Store = None,
    json: Json = False,
) -> None:
    """Delete the runs that have been over for a time; those that wait, or may go on, stay."""
    gone = opened(store).purge(seconds(older_than, "--older-than"))
    if json:
        emit(gone)
    else:
        say(f"{len(gone):,} run{'' if len(gone) == 1 else 's'} deleted")
