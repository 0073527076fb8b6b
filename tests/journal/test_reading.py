"""Reading on: one run of many, a part at a time, and who has spent what."""

from __future__ import annotations

import pytest

from loopguard import RunNotFound, charge, journal, loop, tool
from loopguard.journal._fold import fold
from loopguard.journal._rows import plain


@tool(cost=0.25)
def fetch(page: int) -> int:
    return page


def test_a_reading_gives_each_event_once(store: str) -> None:
    """All that was committed since the last look, whatever states build on; together they are the whole."""
    parts: list[list[str]] = []

    @loop(max=3, store=store, on_iteration=lambda state, number: parts.append(read()))
    def agent(said: list[str]) -> list[str]:
        fetch(len(said))
        return [*said, "x" * 300]

    def read() -> list[str]:
        nonlocal reading
        if reading is None:
            reading = journal.open(store).reading("r")
        return [f"{type(event).__name__} {plain(getattr(event, 'value', None))}" for event in reading.read()]

    reading: journal.Reading | None = None
    agent.run([], run_id="r")
    parts.append(read())
    whole = [f"{type(event).__name__} {getattr(event, 'value', None)}" for event in journal.open(store).events("r")]
    assert [event for part in parts for event in part] == whole
    assert all(parts)
    assert read() == []


def test_one_run_is_looked_up_by_its_id(store: str) -> None:
    """As `runs` lists it; another one isn't there."""
    for run_id in ("a", "b"):
        loop(max=1, store=store, name="agent")(fetch.__wrapped__).run(1, run_id=run_id)  # type: ignore[attr-defined]  # the plain function
    book = journal.open(store)
    assert book.run("a") == next(run for run in book.runs() if run.run_id == "a")
    for ask in (book.run, book.reading):
        with pytest.raises(RunNotFound, match="'c'"):
            ask("c")


def test_the_story_says_who_spent_what(store: str) -> None:
    """By tool, and by run where its body was charged; together they are what the run has spent."""

    @loop(max=1, store=store)
    def agent(n: int) -> int:
        fetch(n)
        fetch(n + 1)
        charge(usd=0.1, pages=2)
        return n

    agent.run(0, run_id="r")
    story = fold(journal.open(store).reading("r").read())
    quarter, tenth, one = 25 * 10**16, 10**17, 10**18
    assert story.charges == {"fetch": {"usd": 2 * quarter}, "agent": {"usd": tenth, "pages": 2 * one}}
    assert story.root is not None
    assert story.root.spent == {"usd": 2 * quarter + tenth, "pages": 2 * one}
    assert story.root.completed
