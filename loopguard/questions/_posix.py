"""The terminal on POSIX: its own handle, whatever stdin and stdout are redirected to."""

from __future__ import annotations

import locale
import os
import select
import sys

from loopguard.questions._device import POLL, Check

assert sys.platform != "win32"
import termios  # noqa: E402  # after the assert, which tells type checkers where this module counts

__all__ = ["PosixTerminal"]


class PosixTerminal:
    """``/dev/tty``, never blocked on: a thread that still reads would eat what is typed for others."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._typed = b""
        self._encoding = locale.getpreferredencoding(False)
        self._fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            if os.tcgetpgrp(self._fd) != os.getpgrp():  # touching it would stop the process
                raise OSError("this process runs in the background")
            self._before = termios.tcgetattr(self._fd)
            lines = [*self._before]  # echoed and edited, even if the program has put the terminal into another mode
            lines[0] |= termios.ICRNL
            lines[1] |= termios.OPOST | termios.ONLCR
            lines[3] |= termios.ICANON | termios.ECHO | termios.ECHOE | termios.ISIG
            termios.tcsetattr(self._fd, termios.TCSANOW, lines)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def columns(self) -> int:
        return os.get_terminal_size(self._fd).columns or 80

    def write(self, text: str) -> None:
        left = memoryview(text.encode(self._encoding, "backslashreplace"))
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # slow, or stopped by Ctrl-S
                select.select([], [self._fd], [], POLL)
                self._check()

    def line(self) -> str:
        while b"\n" not in self._typed:
            self._check()
            if select.select([self._fd], [], [], POLL)[0]:
                try:
                    data = os.read(self._fd, 4096)
                except BlockingIOError:  # another program was faster
                    continue
                if not data:
                    raise EOFError
                self._typed += data
        line, _, self._typed = self._typed.partition(b"\n")
        return line.decode(self._encoding, "replace")

    def drop_input(self) -> None:
        self._typed = b""
        termios.tcflush(self._fd, termios.TCIFLUSH)

    def close(self) -> None:
        try:
            self.drop_input()
            termios.tcsetattr(self._fd, termios.TCSANOW, self._before)
        except termios.error:  # hung up
            pass
        finally:
            os.close(self._fd)
