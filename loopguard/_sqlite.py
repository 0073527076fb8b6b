"""SQLite files that many processes share: private, in WAL mode, with errors that say what to do."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["BUSY", "explain", "open_database", "transaction"]

BUSY = 10.0
"""Seconds to wait for other processes that write."""


def open_database(path: str, durability: str) -> sqlite3.Connection:
    """A connection for one thread at a time, but not always the same one.

    ``durability`` is about power loss only: ``normal`` may lose the last commits, ``full`` waits for the disk.
    """
    if path != ":memory:" and not os.path.exists(path):
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # WAL and shared memory get the same mode
    db = sqlite3.connect(path, timeout=BUSY, isolation_level=None, check_same_thread=False)
    try:
        _switch_to_wal(db)
        db.execute(f"PRAGMA synchronous = {'FULL' if durability == 'full' else 'NORMAL'}")
    except BaseException:
        db.close()
        raise
    return db


def _switch_to_wal(db: sqlite3.Connection) -> None:
    """SQLite doesn't wait here by itself where other processes are making the same file right now."""
    deadline = time.monotonic() + BUSY
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as exc:
            if "locked" not in str(exc) or time.monotonic() > deadline:
                raise
            time.sleep(0.005)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing, and nobody else writes meanwhile."""
    deadline = time.monotonic() + BUSY
    while True:
        try:
            db.execute("BEGIN IMMEDIATE")
            break
        except sqlite3.OperationalError as exc:
            # SQLite itself waits longer and longer, and whoever has waited longest is served last
            if exc.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0.0002, 0.002))
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def explain(exc: Exception) -> str:
    """What an error of SQLite or of the file system means, and what to do."""
    text = str(exc).lower()
    if "disk is full" in text or getattr(exc, "errno", None) == 28:
        return "the disk is full. Make room and go on: what wasn't written is kept in memory, and written first"
    if "readonly" in text or "read-only" in text or isinstance(exc, PermissionError):
        return "the file or its folder is read-only. Make both writable for this user, or name another store"
    if "not a database" in text or "malformed" in text:
        return (
            "the file is damaged, or no SQLite file. Move it away, restore a backup, or save what is left with .recover"
        )
    if "locked" in text or "busy" in text:
        return f"other processes have kept it locked for {BUSY:g} s. Look for one that hangs in a transaction"
    if "unable to open" in text or isinstance(exc, FileNotFoundError):
        return f"it can't be opened. Does the folder {Path(_folder(exc)).name or 'of the file'} exist?"
    return "SQLite failed"


def _folder(exc: Any) -> str:
    return os.path.dirname(getattr(exc, "filename", None) or "")
