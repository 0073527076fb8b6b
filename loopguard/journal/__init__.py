"""The journal: everything that a run does, kept in a file, so that it can be resumed, audited and verified.

``@loop(store="sqlite:///runs.db")``, ``configure(store=…)`` or LOOPGUARD_STORE keep the runs of loops there. Each
run has one append-only list of events, chained by hashes; iterations, tool calls, model calls and verdicts are
committed before their outcome is handed on. A run that was interrupted goes on where it was: finished calls are
answered from the record, and nothing runs twice.

What can be lost: with ``durability="normal"`` nothing that was acknowledged when the process dies, by kill -9, too;
when the power fails or the machine crashes, the last moments may go, never anything in the middle. With ``"full"``
each commit waits for the disk, and a power loss loses nothing either.
"""

from __future__ import annotations

from loopguard.journal._answers import Answer, Question
from loopguard.journal._book import OpenJournal, Reading, open  # noqa: A004  # journal.open reads like gzip.open
from loopguard.journal._export import read_export
from loopguard.journal._protocol import LEASE, STOP, Journal, Lease, Row, RunInfo
from loopguard.journal._states import Delta

__all__ = [
    "Answer",
    "Delta",
    "Journal",
    "LEASE",
    "Lease",
    "OpenJournal",
    "Question",
    "Reading",
    "Row",
    "RunInfo",
    "STOP",
    "open",
    "read_export",
]
