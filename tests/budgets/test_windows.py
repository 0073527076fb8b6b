"""Calendar windows: every moment is in exactly one hour, day and month of its zone."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopguard.budgets._windows import TOTAL, window_at, zone
from loopguard.exceptions import ConfigurationError

BERLIN = "Europe/Berlin"
ZONES = ("UTC", "Europe/Berlin", "America/Sao_Paulo", "Asia/Kolkata", "Africa/Cairo", "Pacific/Apia")


def at(text: str, tz: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(tz)).timestamp()


@pytest.mark.parametrize(
    ("per", "tz", "moment", "text", "begins", "ends"),
    [
        ("hour", "UTC", "2026-11-30T14:59:59", "2026-11-30T14", "2026-11-30T14:00", "2026-11-30T15:00"),
        ("day", "UTC", "2026-11-30T00:00:00", "2026-11-30", "2026-11-30T00:00", "2026-12-01T00:00"),
        ("month", "UTC", "2026-12-31T23:59:59", "2026-12", "2026-12-01T00:00", "2027-01-01T00:00"),
        (
            "day",
            "Europe/Berlin",
            "2026-11-30T00:30",
            "2026-11-30 Europe/Berlin",
            "2026-11-30T00:00",
            "2026-12-01T00:00",
        ),
        ("hour", "Asia/Kolkata", "2026-11-30T14:59", "2026-11-30T14+0530", "2026-11-30T14:00", "2026-11-30T15:00"),
        # a day of 25 hours, and one of 23
        (
            "day",
            "Europe/Berlin",
            "2026-10-25T12:00",
            "2026-10-25 Europe/Berlin",
            "2026-10-25T00:00",
            "2026-10-26T00:00",
        ),
        (
            "day",
            "Europe/Berlin",
            "2026-03-29T12:00",
            "2026-03-29 Europe/Berlin",
            "2026-03-29T00:00",
            "2026-03-30T00:00",
        ),
    ],
)
def test_a_moment_is_in_its_window(per: str, tz: str, moment: str, text: str, begins: str, ends: str) -> None:
    """The window has the calendar's name, and begins and ends where its zone says."""
    assert window_at(per, zone(tz), at(moment, tz)) == (text, at(begins, tz), at(ends, tz))


def test_the_hour_that_the_clocks_repeat_is_two() -> None:
    """Half past two comes twice in that night, and each has an hour of its own."""
    berlin = zone("Europe/Berlin")
    first = datetime(2026, 10, 25, 0, 30, tzinfo=UTC).timestamp()
    windows = [window_at("hour", berlin, first + 3600 * hour) for hour in range(3)]
    assert [window.text for window in windows] == ["2026-10-25T02+0200", "2026-10-25T02+0100", "2026-10-25T03+0100"]


@given(per=st.sampled_from(["hour", "day", "month"]), tz=st.sampled_from(ZONES), now=st.floats(1e8, 4e9))
def test_every_moment_is_in_exactly_one_window(per: str, tz: str, now: float) -> None:
    """Windows lie side by side: the last moment of one has its name, its end is in the next."""
    window = window_at(per, zone(tz), now)
    assert window.holds(now)
    assert window.begins is not None
    assert window.ends is not None
    assert window_at(per, zone(tz), window.begins) == window
    assert window_at(per, zone(tz), window.ends - 0.001).text == window.text
    after = window_at(per, zone(tz), window.ends)
    assert after.text != window.text
    assert after.begins == window.ends


def test_the_total_is_always_open() -> None:
    """It has no beginning and no end."""
    assert window_at("total", zone("UTC"), 0) == TOTAL
    assert TOTAL.holds(1e12)


@pytest.mark.parametrize("name", ["Mars/Olympus", "", 5, None, "../etc/passwd"])
def test_what_is_no_zone_is_an_error(name: object) -> None:
    """The message names the parameter and what to give."""
    with pytest.raises(ConfigurationError, match=r"Budget\(tz=.*give the name of a time zone"):
        zone(name)
