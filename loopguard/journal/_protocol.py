"""What a place that keeps journals has to do: the Journal protocol, and the rows it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from loopguard.journal._states import Delta

__all__ = ["LEASE", "STOP", "Journal", "Lease", "Row", "RunInfo"]

STOP = "stop"
"""The name of the mail that asks a run to stop."""
LEASE = 30.0
"""Seconds for which a run is held without a sign of life; a holder renews it three times as often."""


@dataclass(frozen=True, slots=True)
class Row:
    """One event as it is stored. ``digest`` chains it to the one before."""

    seq: int
    header: bytes
    """JSON: what happened, when, in which run; names, ids and amounts."""
    payload: bytes | None
    """JSON: arguments, results, reasons. None once it was erased."""
    salt: bytes | None
    payload_hash: bytes
    """Of salt, payload and state: what is chained, so that a payload can be erased, and nobody can guess it."""
    digest: bytes
    state: Delta | None = None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as the journal lists it."""

    run_id: str
    name: str
    status: str
    """running, or how it ended: a stop reason."""
    started_at: float
    """Seconds since the epoch."""
    updated_at: float
    holder: str | None = None
    """Who drives it now, if anybody does."""


@dataclass(slots=True)
class Lease:
    """The right to write one run's journal, fenced: a later holder's token is higher."""

    run_id: str
    fence: int
    salt: bytes
    created: bool
    """Whether the run is new."""
    written: int = 0
    """The number of the last event that is committed."""
    lost: bool = False
    """Whether another holder has taken over."""
    stop: bytes | None = None
    """The mail that asks the run to stop, once a commit has found it."""


class Journal(Protocol):
    """A place that keeps journals: one append-only list of rows for each run.

    Called from one thread at a time. Every failure is a JournalError that says what to do.
    """

    def acquire(self, run_id: str, name: str, holder: str, *, create: bool) -> Lease:
        """Take over the run, or make it. RunNotFound, or RunConflict naming who holds it."""
        ...

    def append(self, batch: Sequence[tuple[Lease, Row]]) -> None:
        """Commit the rows, all at once. Marks leases that others have taken over as lost, and writes none of theirs.

        Where the run has mail named STOP, its lease gets it.
        """
        ...

    def renew(self, leases: Iterable[Lease]) -> None:
        """The holders are alive."""
        ...

    def release(self, lease: Lease, status: str) -> None:
        """The run is over, or stopped, and may be taken over at once."""
        ...

    def runs(self) -> list[RunInfo]:
        """All runs, the latest first."""
        ...

    def salt(self, run_id: str) -> bytes:
        """What the run's content addresses are salted with. RunNotFound."""
        ...

    def rows(self, run_id: str) -> Iterable[Row]:
        """The events of a run, in order."""
        ...

    def post(self, run_id: str, name: str, body: bytes, instead_of: bytes | None = None) -> bytes:
        """Leave mail for a run, whoever drives it, unless there is some of this name; what is there then.

        ``instead_of``: put it in the place of exactly that. RunNotFound.
        """
        ...

    def mail(self, run_id: str) -> dict[str, bytes]:
        """The mail of a run, by name: answers to its questions, and STOP."""
        ...

    def delete(self, run_id: str) -> None:
        """Forget a run that nobody holds, and its mail."""
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...
