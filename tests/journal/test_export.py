"""Exports are append-safe: a torn last line never eats the next record. Purging leaves alone what isn't over."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopguard import JournalError, RunNotFound, journal, loop
from loopguard.journal._rows import first_broken


@loop(max=2)
def step(n: int) -> int:
    return n + 1


@pytest.fixture
def book(store: str, monkeypatch: pytest.MonkeyPatch) -> journal.OpenJournal:
    """A journal of one finished run, to which `step` writes."""
    monkeypatch.setenv("LOOPGUARD_STORE", store)
    step.run(0, run_id="one")
    return journal.open(store)


def test_an_export_takes_each_event_once(book: journal.OpenJournal, tmp_path: Path) -> None:
    """Exported again, only what is new is added; what was exported can be verified without the store."""
    file = tmp_path / "export.jsonl"
    added = book.export(file)
    assert added == len(book.events("one"))
    assert book.export(file) == 0
    step.run(0, run_id="two")
    assert book.export(file, "two") == added
    runs, damaged = journal.read_export(file)
    assert (set(runs), damaged) == ({"one", "two"}, [])
    assert [first_broken(run_id, rows) for run_id, rows in runs.items()] == [None, None]


@pytest.mark.parametrize("tail", [b'{"run_id":"one","seq":5,"hea', '{"run_id":"ü'.encode()[:-1]])
def test_a_torn_line_eats_no_other_record(tail: bytes, book: journal.OpenJournal, tmp_path: Path) -> None:
    """C54: after half a record or character, new records stand on lines of their own, and the damage is told."""
    file = tmp_path / "export.jsonl"
    first = book.export(file)
    before = file.read_bytes()
    file.write_bytes(before + tail)
    assert journal.read_export(file)[1] == [first + 1]
    step.run(0, run_id="two")
    assert book.export(file) == first
    assert file.read_bytes().startswith(before + tail + b"\n")
    runs, damaged = journal.read_export(file)
    assert (len(runs["one"]), len(runs["two"]), damaged) == (first, first, [first + 1])
    assert book.export(file) == 0


def test_a_record_that_only_lacks_its_newline_is_kept(book: journal.OpenJournal, tmp_path: Path) -> None:
    """The last record was written whole, but for the end of its line."""
    file = tmp_path / "export.jsonl"
    first = book.export(file)
    file.write_bytes(file.read_bytes()[:-1])
    step.run(0, run_id="two")
    book.export(file)
    runs, damaged = journal.read_export(file)
    assert (len(runs["one"]), damaged) == (first, [])


def test_damage_in_the_middle_is_an_error(book: journal.OpenJournal, tmp_path: Path) -> None:
    """What no crash can have done isn't passed over."""
    file = tmp_path / "export.jsonl"
    book.export(file)
    lines = file.read_bytes().split(b"\n")
    lines[2] = lines[2][:40]
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(JournalError, match="line 3"):
        journal.read_export(file)
    with pytest.raises(JournalError, match="line 3"):
        book.export(file)


def test_purging_deletes_old_runs_that_are_over(book: journal.OpenJournal, store: str) -> None:
    """Runs that are pending or wait for a person stay, however old they are."""

    @loop(max=1, store=store)
    def failing(n: int) -> int:
        raise ValueError(n)

    with pytest.raises(ValueError, match="1"):
        failing.run(1, run_id="failed")
    assert book.purge(older_than=3600) == []
    assert book.purge(older_than=-1) == ["one"]
    assert [run.run_id for run in book.runs()] == ["failed"]
    with pytest.raises(RunNotFound):
        book.events("one")
    book.delete("failed")
    assert book.runs() == []
