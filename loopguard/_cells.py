"""Cells: what a run has spent and reserved, unit by unit. The one book of amounts."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["NO_ALERT", "Cell"]

NO_ALERT = 10**60


class Cell:
    """What one run has spent and reserved of one unit, in 1e-18 of the unit."""

    __slots__ = ("alert", "reserved", "spent", "watchers")

    def __init__(self) -> None:
        self.spent = 0
        self.reserved = 0
        self.alert = NO_ALERT
        """Once spent reaches this, a budget wants to hear of it (`warn_at`)."""
        self.watchers: list[Callable[[], int]] = []
        """Each emits its warning if it is due, and returns where it wants to be called next."""

    def rearm(self) -> None:
        """Call the watchers, outside the lock."""
        self.alert = min((watcher() for watcher in list(self.watchers)), default=NO_ALERT)
