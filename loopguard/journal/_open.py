"""Where journals are: a store's URL, and the run of this process that is kept there."""

from __future__ import annotations

import os
from typing import Any

from loopguard._config import settings
from loopguard._plugins import STORES, check_plugin, load_plugin
from loopguard._run import Run
from loopguard.exceptions import ConfigurationError
from loopguard.journal._fold import Story
from loopguard.journal._holders import me
from loopguard.journal._protocol import Journal
from loopguard.journal._recorder import Recorder
from loopguard.journal._rows import read_events
from loopguard.journal._writer import Writer, writer_for
from loopguard.redaction import safe_url

__all__ = ["check_store", "default_store", "keep", "writer_of"]


def check_store(store: Any, what: str) -> Any:
    """The store if it is one: a URL, or an object that keeps journals. ConfigurationError otherwise."""
    closing = ")" if "(" in what else ""
    if isinstance(store, str):
        if store == "sqlite://" or (store.startswith("sqlite:///") and len(store) > len("sqlite:///")):
            return store
        scheme, mark, _ = store.partition("://")
        if mark and scheme != "sqlite":
            check_plugin(STORES, scheme, f"{what}={scheme}://…{closing}")
            return store
        shown = repr(safe_url(store))
    else:
        if callable(getattr(store, "append", None)) and callable(getattr(store, "acquire", None)):
            return store
        shown = repr(store)
    raise ConfigurationError(f"{what}={shown}{closing}: give sqlite:///runs.db, or an object that keeps journals")


def default_store() -> Any:
    """Where journals are kept that name no store themselves, or None."""
    if settings.store is not None:
        return check_store(settings.store, "configure(store")
    store = os.environ.get("LOOPGUARD_STORE")
    return check_store(store, "LOOPGUARD_STORE") if store else None


def writer_of(store: Any, durability: str = "normal") -> Writer:
    """This process's writer of a store."""
    if not isinstance(store, str):
        return writer_for(("object", str(id(store))), lambda: store)
    scheme = store.partition("://")[0]
    if scheme != "sqlite":
        return writer_for((store, durability), lambda: load_plugin(STORES, scheme, f"the store {scheme}://…")(store))
    path = store.removeprefix("sqlite:///")
    path = ":memory:" if store == "sqlite://" or path == ":memory:" else os.path.abspath(path)

    def connect() -> Journal:
        from loopguard.journal._sqlite import SQLiteJournal

        return SQLiteJournal(path, durability)

    return writer_for((path, durability), connect)


def keep(store: Any, durability: str, run: Run, *, create: bool) -> Recorder:
    """Take over the run's journal, or begin one. Raises RunNotFound, RunConflict naming the holder, JournalError."""
    writer = writer_of(store, durability)
    lease = writer.use(lambda journal: journal.acquire(run.id, run.name, me(), create=create))
    try:
        rows = [] if lease.created else list(writer.use(lambda journal: journal.rows(run.id)))
        story = Story()
        for event in read_events(rows, settings.codec):
            story.add(event)
    except BaseException:
        writer.release(lease, "error")
        raise
    writer.hold(lease)
    return Recorder(writer, lease, run, story, (rows[-1].seq, rows[-1].digest) if rows else None)
