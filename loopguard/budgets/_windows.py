"""Calendar windows: which hour, day or month it is in a time zone, and from when to when it lasts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, NamedTuple

from loopguard.exceptions import ConfigurationError

__all__ = ["PERIODS", "TOTAL", "Window", "window_at", "zone"]

PERIODS = ("hour", "day", "month", "total")


class Window(NamedTuple):
    """One hour, day or month."""

    text: str
    """How accounts and messages call it."""
    begins: float | None
    """Seconds since the epoch; None: it is open at any time."""
    ends: float | None

    def holds(self, now: float) -> bool:
        """Whether this moment is in it."""
        return self.begins is None or self.ends is None or self.begins <= now < self.ends


TOTAL = Window("total", None, None)


def zone(name: Any) -> tzinfo:
    """The time zone of this name; ConfigurationError if there is none."""
    if name == "UTC":
        return UTC  # known on systems without a database of zones, too
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (ValueError, LookupError, TypeError, OSError):
        raise ConfigurationError(
            f"Budget(tz={name!r}): give the name of a time zone, such as UTC or Europe/Berlin "
            f"(where the system has no database of them: pip install tzdata)"
        ) from None


def window_at(per: str, tz: tzinfo, now: float) -> Window:
    """The window that this moment (seconds since the epoch) is in."""
    if per == "total":
        return TOTAL
    here = datetime.fromtimestamp(now, tz)
    if per == "hour":  # with its offset: the hour that a change of the clocks repeats is two
        offset = "" if tz is UTC else f"{here:%z}"
        begins = now - here.minute * 60 - here.second - here.microsecond / 1e6
        return Window(f"{here:%Y-%m-%dT%H}{offset}", float(round(begins)), float(round(begins)) + 3600)
    place = "" if tz is UTC else f" {tz}"
    if per == "day":
        first = datetime(here.year, here.month, here.day, tzinfo=tz)
        after = datetime.combine(first.date() + timedelta(days=1), first.timetz())
        return Window(f"{here:%Y-%m-%d}{place}", first.timestamp(), after.timestamp())
    first = datetime(here.year, here.month, 1, tzinfo=tz)
    after = datetime(here.year + here.month // 12, here.month % 12 + 1, 1, tzinfo=tz)
    return Window(f"{here:%Y-%m}{place}", first.timestamp(), after.timestamp())
