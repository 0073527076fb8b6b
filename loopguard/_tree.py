"""Trees of lines on a terminal, and how they tell durations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

__all__ = ["ASCII", "BOXES", "Marks", "draw", "marks_for", "took"]

T = TypeVar("T")


class Marks(NamedTuple):
    """What a tree is drawn with."""

    branch: str
    last: str
    through: str
    wrong: str
    between: str


BOXES = Marks("├─ ", "└─ ", "│  ", "✗ ", " · ")
ASCII = Marks("|- ", "`- ", "|  ", "x ", " - ")
_SPACE = "   "


def marks_for(encoding: str | None) -> Marks:
    """Boxes where the encoding has them, else ASCII."""
    try:
        "".join(BOXES).encode(encoding or "utf-8")
    except (UnicodeError, LookupError):
        return ASCII
    return BOXES


def draw(
    roots: Sequence[T], children: Callable[[T], Sequence[T]], line: Callable[[T], str], marks: Marks
) -> Iterator[str]:
    """The lines of the trees below these roots."""
    # A stack instead of recursion: trees may be deeper than Python's own stack.
    todo = [(root, "", "") for root in reversed(roots)]
    while todo:
        node, before, indent = todo.pop()
        yield before + line(node)
        below = children(node)
        for child in reversed(below):
            turn, rest = (marks.last, _SPACE) if child is below[-1] else (marks.branch, marks.through)
            todo.append((child, indent + turn, indent + rest))


def took(ns: int) -> str:
    """A duration as people read it: ``9.5 ms``, ``66 ms``, ``1.20 s``, ``3 min 04 s``."""
    if ns < 10_000_000:
        return f"{ns / 1e6:.1f} ms"
    if ns < 1_000_000_000:
        return f"{ns / 1e6:.0f} ms"
    if ns < 60_000_000_000:
        return f"{ns / 1e9:.2f} s"
    minutes, seconds = divmod(round(ns / 1e9), 60)
    return f"{minutes} min {seconds:02d} s"
