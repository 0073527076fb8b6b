"""What a place that keeps journals has to do: the Journal protocol, and the rows it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from loopguard.journal._states import Delta

__all__ = ["LEASE", "Journal", "Lease", "Row", "RunInfo"]

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


class Journal(Protocol):
    """A place that keeps journals: one append-only list of rows for each run.

    Called from one thread at a time. Every failure is a JournalError that says what to do.
    """

    def acquire(self, run_id: str, name: str, holder: str, *, create: bool) -> Lease:
        """Take over the run, or make it. RunNotFound, or RunConflict naming who holds it."""
        ...

    def append(self, batch: Sequence[tuple[Lease, Row]]) -> None:
        """Commit the rows, all at once. Marks leases that others have taken over as lost, and writes none of theirs."""
        ...

    def renew(self, leases: Iterable[Lease]) -> None:
        """The holders are alive."""
        ...

    def release(self, lease: Lease, status: str) -> None:
        """The run is over, or stopped, and may be taken over at once."""
        ...

    def runs(self, run_id: str | None = None) -> list[RunInfo]:
        """All runs, the latest first; or the one of this id, if there is one."""
        ...

    def salt(self, run_id: str) -> bytes:
        """What the run's content addresses are salted with. RunNotFound."""
        ...

    def rows(self, run_id: str, after: int = 0) -> Iterable[Row]:
        """The events of a run that come after this number, in order."""
        ...

    def delete(self, run_id: str) -> None:
        """Forget a run that nobody holds."""
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...
