"""Growing: the states of one loop as JSON, where of a list only what is new or was changed is encoded again."""

from __future__ import annotations

import marshal
import typing
from typing import Any

from loopguard._call import structural_copy
from loopguard.journal._codec import Codec, codec_for, kinds_of

__all__ = ["Growing"]

_EXACT = frozenset({dict, list, str, type(None)})
"""Types for which == says that nothing has changed: there 1, 1.0 and True are none of them."""
_PLAIN = _EXACT | {int, float, bool}


class Growing:
    """Encodes like its codec, and remembers what a list held: a message list that grows costs what was added.

    What it remembers are copies and texts, never the caller's own objects, which may be changed in place.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        arguments = typing.get_args(codec.hint)
        self._item = codec_for(arguments[0]) if typing.get_origin(codec.hint) is list and len(arguments) == 1 else None
        self._text = b"["
        self._ends: list[int] = []
        """Where the text of each item ends."""
        self._copies: list[Any] = []
        self._numbers: dict[int, bytes] = {}
        """Items that hold numbers, to the letter: == would not tell 1 from True."""

    def encode(self, value: Any) -> bytes:
        """The JSON text; CheckpointError where it would not come back as it is."""
        if self._item is None or type(value) is not list:
            return self.codec.encode(value)
        kept = self._unchanged(value)
        text = self._text[: self._ends[kept - 1] if kept else 1]
        pieces = [text]
        end = len(text)
        del self._ends[kept:], self._copies[kept:]
        self._numbers = {i: exact for i, exact in self._numbers.items() if i < kept} if self._numbers else {}
        remember = True
        for i in range(kept, len(value)):
            item = value[i]
            encoded = self._item.encode(item)
            pieces.append(encoded if i == 0 else b"," + encoded)
            end += len(pieces[-1])
            remember = remember and self._remember(i, item, end)
        text = b"".join(pieces)
        self._text = text
        return text + b"]"

    def _remember(self, i: int, item: Any, end: int) -> bool:
        """Take a copy; False for what can't be compared: from there on all is encoded each time."""
        kinds = kinds_of(item)
        if not kinds <= _PLAIN:
            return False
        if not kinds <= _EXACT:
            self._numbers[i] = marshal.dumps(item, 2)
        self._copies.append(structural_copy(item))
        self._ends.append(end)
        return True

    def _unchanged(self, value: list[Any]) -> int:
        """How many items at the head are what they were."""
        n = min(len(value), len(self._copies))
        if value[:n] != self._copies[:n]:
            n = next(i for i in range(n) if value[i] != self._copies[i])
        for i, exact in self._numbers.items():
            if i < n and _exactly(value[i]) != exact:
                n = i
        return n


def _exactly(item: Any) -> bytes | None:
    try:
        return marshal.dumps(item, 2)
    except ValueError:  # it holds something else by now
        return None
