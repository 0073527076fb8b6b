"""The one JSON object in what a model wrote: in a fence, in prose, among brackets; never a guess."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from loopguard._fingerprints import loose
from loopguard._json import parse_json

__all__ = ["json_value", "object_in"]

# In JSON no text goes over the end of a line: quotes and fences at the start of one are never part of it.
_QUOTED = re.compile(r"^[ \t]*(?:>[ \t]?)+", re.MULTILINE)
_FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})", re.MULTILINE)
_TEXT = r'"(?:[^"\\\n]|\\.)*+"'
_MARKS = re.compile(rf"{_TEXT}|[{{}}]")
_EMPTY = re.compile(r"\{\s*+\}")
_OPENING = re.compile(rf"\{{\s*+(?:(?P<json>{_TEXT})|'(?:[^'\\\n]|\\.)*+'|[\w$.-]++)\s*+:")
"""The start of an object: of JSON, of Python or JavaScript, or of prose like ``{see: there}``."""
_VALUE = re.compile(r'\s*+["\d\[{tfnNI-]')
"""What a value can start with. After a name, anything else is a placeholder: ``{"summary": ...}``."""
_MOST_OPEN = 50
"""Braces of prose that are never closed: each costs a look at the whole text, and a model may write thousands."""


def object_in(text: str) -> dict[str, Any]:
    """The JSON object in a text, whatever stands around it.

    Raises ValueError, with a text for the model, if there is none, if one can't be read (equal names and NaN
    included), or if there are two that differ. The same object twice is one, ``{}`` counts only if there is no other
    brace, and what is part of something that merely looks like an object isn't one.
    """
    alone = text.count("{") == 1
    found: dict[bytes, dict[str, Any]] = {}
    for source in _sources(text):
        try:
            value = parse_json(source)
        except ValueError as error:
            raise ValueError(f"The JSON object can't be read: {error}. Answer with one valid object.") from None
        if value or alone:
            found[loose(value)] = value
    if not found:
        raise ValueError("There is no JSON object in the answer. Answer with one.")
    if len(found) > 1:
        raise ValueError(
            f"The answer is ambiguous: it holds {len(found)} different JSON objects. Answer with the final one alone."
        )
    return next(iter(found.values()))


def json_value(text: str) -> Any:
    """The JSON value that a text, or one fenced block in it, consists of. Raises ValueError as `object_in` does."""
    found: dict[bytes, Any] = {}
    for part in _parts(text):
        first, _, rest = part.partition("\n")
        for candidate in (part, rest if re.fullmatch(r"\s*\w+\s*", first) else ""):  # the language of a fence
            try:
                value = parse_json(candidate)
            except ValueError:
                continue
            found[loose(value)] = value
            break
    if len(found) != 1:
        raise ValueError("There is not exactly one JSON value in the answer. Answer with the JSON alone.")
    return next(iter(found.values()))


def _parts(text: str) -> list[str]:
    """The text cut at its fences, which no object goes across."""
    return _FENCE.split(_QUOTED.sub("", text))


def _sources(text: str) -> Iterator[str]:
    """From brace to brace, whatever is meant as a JSON object."""
    unclosed = 0
    for part in _parts(text):
        place = part.find("{")
        while place >= 0:
            end, is_json = _extent(part, place)
            if end is None:
                unclosed += 1
                if is_json or unclosed > _MOST_OPEN:
                    raise ValueError("The JSON object is cut off: it is never closed. Answer with a whole object.")
            elif is_json:
                yield part[place:end]
            place = part.find("{", end or place + 1)


def _extent(text: str, start: int) -> tuple[int | None, bool]:
    """From a brace: where what it opens ends, None if it never does; and whether that is meant as a JSON object."""
    empty = _EMPTY.match(text, start)
    if empty is not None:
        return empty.end(), True
    opening = _OPENING.match(text, start)
    if opening is None:
        return start + 1, False
    is_json = opening["json"] is not None and _VALUE.match(text, opening.end()) is not None
    depth = 0
    for mark in _MARKS.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if not depth:
            return mark.end(), is_json
    return None, is_json
