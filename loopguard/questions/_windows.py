"""The console on Windows: its own handle, whatever stdin and stdout are redirected to."""

from __future__ import annotations

import os
import sys
import time

from loopguard.questions._device import POLL, Check

assert sys.platform == "win32"
import msvcrt  # noqa: E402  # after the assert, which tells type checkers where this module counts

__all__ = ["WindowsConsole"]


class WindowsConsole:
    """The console of the process; keys are read one by one, since a console can't be waited for by the line."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._out = open("CONOUT$", "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115  # closed by close

    @property
    def columns(self) -> int:
        return os.get_terminal_size(self._out.fileno()).columns or 80

    def write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def line(self) -> str:
        typed = ""
        while True:
            self._check()
            if not msvcrt.kbhit():
                time.sleep(POLL)
                continue
            key = msvcrt.getwch()
            if key == "\x03":
                raise KeyboardInterrupt
            if key == "\x1a":
                raise EOFError
            if key == "\r":
                self.write("\n")
                return typed
            if key in "\x00\xe0":  # an arrow or a function key, in two parts
                msvcrt.getwch()
            elif key == "\b":
                self.write("\b \b" if typed else "")
                typed = typed[:-1]
            elif key.isprintable():
                typed += key
                self.write(key)

    def drop_input(self) -> None:
        while msvcrt.kbhit():
            msvcrt.getwch()

    def close(self) -> None:
        self.drop_input()
        self._out.close()
