"""What the command prints: lines, columns and JSON, which no terminal trips over."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from loopguard._tree import Marks, marks_for
from loopguard.redaction import display
from loopguard.telemetry._log import plain_data

__all__ = ["columns", "complain", "emit", "marks", "moment", "say"]


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line. Whatever others have written in it has passed `display` before."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def emit(data: Any) -> None:
    """Print a JSON document on one line; ASCII, so that it can be shown, too. What is secret was redacted before."""
    say(json.dumps(plain_data(data), allow_nan=False))


def complain(text: str) -> None:
    """Say on stderr what is wrong."""
    say(f"loopguard: {display(text, None, multiline=True)}", sys.stderr)


def columns(rows: Iterable[Sequence[str]]) -> None:
    """Print rows in columns, the first one being the headings. Made for ten thousand of them."""
    rows = list(rows)
    widths = [max(map(_cells, column)) for column in zip(*rows, strict=True)]
    padded = ([text + " " * (width - _cells(text)) for text, width in zip(row, widths, strict=True)] for row in rows)
    say("\n".join("  ".join(row).rstrip() for row in padded))


def _cells(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def moment(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A time of this place, for people."""
    return time.strftime(form, time.localtime(at))


def marks() -> Marks:
    """What trees are drawn with on this terminal."""
    return marks_for(getattr(sys.stdout, "encoding", None))
