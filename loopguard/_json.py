"""JSON by the letter: where `json.loads` would guess, this refuses."""

from __future__ import annotations

import json
from typing import Any, NoReturn

__all__ = ["parse_json"]


def parse_json(text: str) -> Any:
    """The value of a JSON text; ValueError for what isn't JSON, equal names in one object, NaN and infinity.

    `json.loads` alone takes the last of two equal names, NaN, and 1e999 for infinity.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name occurs twice in one JSON object")
        return found

    def finite(number: str) -> float:
        value = float(number)
        return value if abs(value) != float("inf") else constant(number)

    def constant(_: str) -> NoReturn:
        raise ValueError("a number is NaN, infinite or too large, which JSON doesn't have")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_float=finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
