"""Cells: what a run has spent and reserved, unit by unit. The one book of amounts."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NO_ALERT", "Cell", "Watcher"]

NO_ALERT = 10**60


class Cell:
    """What one run has spent and reserved of one unit, in 1e-18 of the unit."""

    __slots__ = ("alert", "reserved", "spent", "watchers")

    def __init__(self) -> None:
        self.spent = 0
        self.reserved = 0
        self.alert = NO_ALERT
        """Once spent reaches this, a budget wants to hear of it (`warn_at`)."""
        self.watchers: list[Watcher] = []

    def watch(self, watcher: Watcher) -> None:
        """Tell it once when spent has reached its line. Under the lock."""
        self.watchers.append(watcher)
        self.alert = min(self.alert, watcher.line)

    def reached(self) -> list[Watcher]:
        """Those whose line was reached, each only once. Under the lock."""
        due = [watcher for watcher in self.watchers if watcher.line <= self.spent]
        self.watchers = [watcher for watcher in self.watchers if watcher.line > self.spent]
        self.alert = min((watcher.line for watcher in self.watchers), default=NO_ALERT)
        return due


class Watcher(Protocol):
    """A budget that wants to hear when a cell has reached a line."""

    line: int

    def warn(self) -> None:
        """It has."""
