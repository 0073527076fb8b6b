"""The one writer of a process and store: commits what has gathered, for everybody who waits.

Whoever waits in a thread writes for all; for those that wait in an event loop a thread of our own does.
The same thread renews the leases. After a fork the child has neither.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from loopguard.exceptions import JournalError, LeaseLost
from loopguard.journal._protocol import LEASE, Journal, Lease, Row

__all__ = ["Writer", "writer_for"]

R = TypeVar("R")
IDLE = 5.0
"""Seconds after which a writer that nobody needs lets go of its file."""
_BATCH = 512
_log = logging.getLogger("loopguard")


class Writer:
    """What this process writes to one store."""

    def __init__(self, key: tuple[str, str], open_journal: Callable[[], Journal]) -> None:
        self._key = key
        self._open = open_journal
        self._journal: Journal | None = None
        self._lock = threading.Lock()
        """Held while the store is used, by whichever thread uses it."""
        self._pending: deque[tuple[Lease, Row]] = deque()
        self._over: deque[tuple[Lease, str]] = deque()
        """Leases to be given back, and how their runs ended, once all is written."""
        self._held: dict[int, Lease] = {}
        self._waiting: deque[tuple[Lease, int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stays = key[0] in (":memory:", "object")
        """What only this process has, or somebody else has opened, isn't closed when it is idle."""
        self.dead = False
        """True in a child that was forked while this writer was open."""

    # -- for recorders ---------------------------------------------------------------------------

    def use(self, work: Callable[[Journal], R]) -> R:
        """Do something with the store, after all that is pending was written."""
        with self._lock:
            self._check_alive()
            journal = self._opened()
            self._write()
            done = work(journal)
            self._start()
            return done

    def hold(self, lease: Lease) -> None:
        """Renew this lease from now on."""
        with self._lock:
            self._held[id(lease)] = lease

    def put(self, lease: Lease, row: Row) -> None:
        """Have it written with the next commit."""
        self._pending.append((lease, row))

    def wait(self, lease: Lease, seq: int) -> None:
        """Until it is committed. Raises JournalError; what isn't written stays, and is tried again with the next."""
        while lease.written < seq:
            with self._lock:
                self._check_alive()
                if lease.lost:
                    raise _lost(lease)
                if lease.written < seq:
                    self._write()
        if lease.lost:
            raise _lost(lease)

    async def wait_async(self, lease: Lease, seq: int) -> None:
        """The same without holding up the event loop."""
        self._check_alive()
        if lease.written < seq and not lease.lost:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append((lease, seq, loop, future))
            if self._thread is None or not self._thread.is_alive():
                with self._lock:
                    self._start()
            self._wake.set()
            await future
        if lease.lost:
            raise _lost(lease)

    def release(self, lease: Lease, status: str) -> None:
        """The run is over: the last events are written, and others may take it over."""
        with self._lock:
            self._held.pop(id(lease), None)
            if self.dead:
                return
            self._over.append((lease, status))
            self._write()

    # -- under the lock --------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self.dead:
            raise JournalError(
                "this process was forked from one that writes this run's journal: it can't write it, too"
            )

    def _opened(self) -> Journal:
        if self._journal is None:
            self._journal = self._open()
        return self._journal

    def _write(self) -> None:
        """Commit all that is pending; nothing of it is forgotten before it is there."""
        pending = self._pending
        while pending:
            batch = [pending[i] for i in range(min(len(pending), _BATCH))]
            live = [entry for entry in batch if not entry[0].lost]
            if live:
                self._opened().append(live)
            for lease, row in batch:
                if not lease.lost:
                    lease.written = row.seq
                pending.popleft()
        while self._over:
            lease, status = self._over[0]
            if not lease.lost:
                self._opened().release(lease, status)
            self._over.popleft()

    # -- the thread ------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="loopguard journal", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        renewed = used = time.monotonic()
        while True:
            self._wake.wait(IDLE)
            self._wake.clear()
            now = time.monotonic()
            error: BaseException | None = None
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            with self._lock:
                if self.dead:
                    return
                try:
                    self._write()
                    if self._held and now - renewed > LEASE / 3:
                        renewed = now
                        self._opened().renew(self._held.values())
                except Exception as exc:  # whoever waits is told; nobody else may be here to hear it
                    error = exc
                    if not waiting:
                        _log.warning("the journal can't be written: %s", exc)
                if self._held or self._pending or self._over or self._waiting or waiting:
                    used = now
                elif now - used >= IDLE and not self._stays:
                    self._close()
                    return
            for lease, seq, loop, future in waiting:
                failed = error if lease.written < seq and not lease.lost else None
                try:
                    loop.call_soon_threadsafe(_settle, future, failed)
                except RuntimeError:  # the loop is closed: nobody waits any more
                    pass

    def _close(self) -> None:
        self._thread = None
        if self._journal is not None:
            journal, self._journal = self._journal, None
            journal.close()

    def close(self) -> None:
        """Write what is pending, and let go of the file; it is opened again when it is needed."""
        with self._lock:
            if self.dead:
                return
            try:
                self._write()
            finally:
                if self._journal is not None and not self._stays:
                    journal, self._journal = self._journal, None
                    journal.close()


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"another process has taken over the run {lease.run_id!r}: this one can't write its journal any more"
    )


_writers: dict[tuple[str, str], Writer] = {}
_registry = threading.Lock()
_left_behind: list[Any] = []


def writer_for(key: tuple[str, str], open_journal: Callable[[], Journal]) -> Writer:
    """The writer of a store in this process."""
    with _registry:
        if key not in _writers:
            _writers[key] = Writer(key, open_journal)
        return _writers[key]


def close_writers() -> None:
    """Let go of all files; for tests and for the end of the process."""
    for writer in list(_writers.values()):
        writer.close()


def _before_fork() -> None:
    _registry.acquire()
    for writer in _writers.values():
        writer._lock.acquire()


def _after_fork_in_parent() -> None:
    for writer in _writers.values():
        writer._lock.release()
    _registry.release()


def _after_fork_in_child() -> None:
    global _registry, _writers
    for writer in _writers.values():
        writer.dead = True
        writer._lock = threading.Lock()
        _left_behind.append(writer)  # closing the connection in the child would harm that of the parent
    _writers = {}
    _registry = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
