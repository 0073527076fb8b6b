"""Lines and where they go: standard input that nobody has to wait for, and standard error that is safe to read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Self, TextIO

from loopguard.redaction import display, redact_text

__all__ = ["Input", "ServerLog", "say"]


def say(text: str) -> None:
    """A line of diagnostics, on standard error: standard output carries the protocol alone."""
    sys.stderr.write(f"loopguard mcp-proxy: {text}\n")
    sys.stderr.flush()


class Input:
    """The lines of standard input, for the SDK's ``stdio_server(stdin=…)``.

    The SDK's own reader can't be stopped while it waits, so that a proxy whose server has died would hang until
    the agent writes again. This one is left alone in its daemon thread.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._lines: asyncio.Queue[str | None] = asyncio.Queue(16)
        self._loop = asyncio.get_running_loop()
        # A stream of its own: Python can't shut down while a thread waits inside of sys.stdin.
        self._file = os.fdopen(os.dup(descriptor), "rb")
        threading.Thread(target=self._read, name="loopguard mcp-proxy input", daemon=True).start()

    def _read(self) -> None:
        try:
            with contextlib.suppress(OSError):  # what can't be read any more has ended
                for line in self._file:
                    self._put(line.decode(errors="replace"))
            self._put(None)
        except (RuntimeError, CancelledError):  # the loop is closed, or about to be
            pass

    def _put(self, line: str | None) -> None:
        """Wait until there is room: an agent mustn't fill the memory."""
        asyncio.run_coroutine_threadsafe(self._lines.put(line), self._loop).result()

    def close(self) -> None:
        """Let it end, though nothing more comes."""
        while not self._lines.empty():
            self._lines.get_nowait()
        self._lines.put_nowait(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        line = await self._lines.get()
        if line is None:
            raise StopAsyncIteration
        return line


class ServerLog:
    """A pipe for the server's standard error, whose lines are told apart from ours and can't steer a terminal."""

    def __init__(self, tell: Callable[[str], None] = say) -> None:
        reading, writing = os.pipe()
        self.file: TextIO = os.fdopen(writing, "w")
        """What the server is given."""
        self._tell = tell
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as lines:
            for line in lines:
                self._tell(f"server: {display(redact_text(line.decode(errors='replace').rstrip()))}")

    def started(self) -> None:
        """The server has its end: give up ours."""
        self.file.close()

    def flush(self) -> None:
        """Wait, but not long, for the last lines of a server that has ended."""
        self.file.close()
        self._reader.join(1)
