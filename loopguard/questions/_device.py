"""What a terminal is to a question: something to write to, and to read a line from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

__all__ = ["POLL", "Check", "Device"]

POLL = 0.05
"""Seconds between two looks at whether the question is still open."""

Check = Callable[[], None]
"""Called while waiting; raises once there is nothing to wait for."""


class Device(Protocol):
    """A terminal, opened for one question. Its methods raise what `Check` raises, and OSError."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """How many characters a row has."""

    def write(self, text: str) -> None:
        """Show it."""

    @abstractmethod
    def line(self) -> str:
        """Wait for a line; EOFError when the input ends."""

    def drop_input(self) -> None:
        """Throw away what was typed and not read."""

    def close(self) -> None:
        """Leave the terminal as it was, without the input that was meant for us."""
