"""A journal in memory, as small as the protocol allows: what a store has to do, without any database."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from loopguard import RunConflict, RunNotFound
from loopguard.journal import LEASE, STOP, Lease, Row, RunInfo


@dataclass
class Kept:
    """One run."""

    name: str
    started_at: float
    updated_at: float
    salt: bytes = field(default_factory=lambda: os.urandom(16))
    status: str = "running"
    holder: str | None = None
    fence: int = 0
    ends: float = 0.0
    rows: list[Row] = field(default_factory=list)
    mail: dict[str, bytes] = field(default_factory=dict)


class MemoryJournal:
    """See `loopguard.journal.Journal`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.kept: dict[str, Kept] = {}

    def acquire(self, run_id: str, name: str, holder: str, *, create: bool) -> Lease:
        now = self.clock()
        created = run_id not in self.kept
        if created and not create:
            raise RunNotFound(f"there is no run {run_id!r}")
        run = self.kept.setdefault(run_id, Kept(name, now, now))
        other = self.holder(run)
        if other is not None:
            raise RunConflict(f"the run {run_id!r} is being driven by process {json.loads(other)['pid']}")
        run.holder, run.ends, run.updated_at, run.status = holder, now + LEASE, now, "running"
        run.fence += 1
        return Lease(run_id, run.fence, run.salt, created)

    def holder(self, run: Kept) -> str | None:
        return run.holder if run.ends > self.clock() else None

    def owned(self, lease: Lease) -> Kept | None:
        """Its run, if nobody has taken over."""
        run = self.kept.get(lease.run_id)
        return run if run is not None and (run.fence, run.salt) == (lease.fence, lease.salt) else None

    def append(self, batch: Sequence[tuple[Lease, Row]]) -> None:
        for lease, row in batch:
            run = self.owned(lease)
            if run is None or row.seq <= len(run.rows):
                lease.lost = lease.lost or run is None or run.rows[row.seq - 1].digest != row.digest
                continue
            run.rows.append(row)
            lease.stop = run.mail.get(STOP, lease.stop)

    def renew(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            run = self.owned(lease)
            lease.lost = lease.lost or run is None
            if run is not None:
                run.updated_at = self.clock()
                run.ends = run.updated_at + LEASE

    def release(self, lease: Lease, status: str) -> None:
        run = self.owned(lease)
        if run is not None:
            run.holder, run.ends, run.status, run.updated_at = None, 0, status, self.clock()
            run.mail.pop(STOP, None)

    def runs(self, run_id: str | None = None) -> list[RunInfo]:
        found = [
            RunInfo(name, run.name, run.status, run.started_at, run.updated_at, self.holder(run))
            for name, run in self.kept.items()
            if run_id in (None, name)
        ]
        return sorted(found, key=lambda run: -run.started_at)

    def salt(self, run_id: str) -> bytes:
        return self.found(run_id).salt

    def found(self, run_id: str) -> Kept:
        if run_id not in self.kept:
            raise RunNotFound(f"there is no run {run_id!r}")
        return self.kept[run_id]

    def rows(self, run_id: str, after: int = 0) -> list[Row]:
        return self.kept[run_id].rows[after:] if run_id in self.kept else []

    def post(self, run_id: str, name: str, body: bytes, instead_of: bytes | None = None) -> bytes:
        mail = self.found(run_id).mail
        if mail.get(name) in (None, instead_of):
            mail[name] = body
        return mail[name]

    def mail(self, run_id: str) -> dict[str, bytes]:
        return dict(self.kept[run_id].mail) if run_id in self.kept else {}

    def delete(self, run_id: str) -> None:
        self.kept.pop(run_id, None)

    def close(self) -> None:
        pass
