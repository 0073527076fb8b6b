"""States, stored by what they share with the one before: a list that grows costs what was added to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

__all__ = ["Delta", "State", "States"]

_CHUNK = 4096
_SMALL = 256
"""Bytes below which nothing is shared."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A state as it is stored: some bytes from head and tail of an earlier one, and what is new between them."""

    base: int | None
    """The number of the event that holds the earlier state."""
    head: int
    tail: int
    middle: bytes


class State:
    """A stored state, put together when it is asked for."""

    __slots__ = ("_base", "_delta", "_text")

    def __init__(self, delta: Delta, base: State | None) -> None:
        self._delta = delta
        self._base = base
        self._text: bytes | None = delta.middle if base is None else None

    def text(self) -> bytes:
        """The JSON text of the whole."""
        line: list[State] = []
        state: State = self
        while state._text is None:
            line.append(state)
            assert state._base is not None
            state = state._base
        text = state._text
        for derived in reversed(line):
            delta = derived._delta
            text = text[: delta.head] + delta.middle + (text[-delta.tail :] if delta.tail else b"")
        if line and state._base is not None:
            state._text = None  # only the newest is kept whole
        self._text = text
        return text


class States:
    """What the states of one run share; for the side that writes."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._last: dict[str, tuple[int, bytes]] = {}
        self._known: dict[bytes, tuple[int, int]] = {}

    def address(self, text: bytes) -> bytes:
        """The content address: salted, so that nobody can guess a state from it."""
        return hashlib.blake2b(text, key=self._salt, digest_size=16).digest()

    def add(self, owner: str, seq: int, text: bytes) -> Delta:
        """How to store this state of one loop in event number seq."""
        if len(text) < _SMALL:
            return Delta(None, 0, 0, text)
        base, before = self._last.get(owner, (0, b""))
        if text == before:
            return Delta(base, len(text), 0, b"")
        head, tail = _shared(before, text)
        if head + tail > len(text) // 2:
            self._last[owner] = seq, text
            return Delta(base, head, tail, text[head : len(text) - tail])
        address = self.address(text)
        known = self._known.get(address)
        self._last[owner] = known[0] if known is not None else seq, text
        if known is not None:
            return Delta(known[0], known[1], 0, b"")
        self._known[address] = seq, len(text)
        if len(self._known) > 256:
            del self._known[next(iter(self._known))]
        return Delta(None, 0, 0, text)


def _shared(a: bytes, b: bytes) -> tuple[int, int]:
    """How many bytes at the head and at the tail are the same; never a part of a character."""
    limit = min(len(a), len(b))
    head = _common(a, b, limit)
    while head and b[head : head + 1] and b[head] & 0xC0 == 0x80:
        head -= 1
    ends = min(limit - head, _CHUNK)
    tail = 0
    while tail < ends and a[-tail - 1] == b[-tail - 1]:
        tail += 1
    while tail and b[-tail] & 0xC0 == 0x80:
        tail -= 1
    return head, tail


def _common(a: bytes, b: bytes, limit: int) -> int:
    """The length of the common prefix."""
    done = 0
    while done < limit:
        step = min(_CHUNK, limit - done)
        if a[done : done + step] != b[done : done + step]:
            low, high = done, done + step
            while high - low > 1:
                middle = (low + high) // 2
                if a[done:middle] == b[done:middle]:
                    low = middle
                else:
                    high = middle
            return low
        done += step
    return limit
