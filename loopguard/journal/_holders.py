"""Who holds a lease: this process as others see it, and whether another one is still alive."""

from __future__ import annotations

import functools
import json
import os
import secrets
import socket
import sys

__all__ = ["is_gone", "me", "said"]


def me() -> str:
    """This process, and one holder in it, as JSON."""
    return json.dumps({"host": _host(), "pid": os.getpid(), "born": _born(os.getpid()), "id": secrets.token_hex(4)})


def said(holder: str) -> str:
    """A holder as people read it."""
    try:
        who = json.loads(holder)
        return f"process {int(who['pid'])} on {str(who['host']).partition(' ')[0]}"
    except (ValueError, KeyError, TypeError):
        return "an unknown process"


def is_gone(holder: str) -> bool:
    """Whether the holder is surely dead: a process of this machine that is not there any more.

    Of others, and of processes on other machines, nothing is known until their lease ends.
    """
    try:
        who = json.loads(holder)
        host, pid, born = who["host"], int(who["pid"]), who["born"]
    except (ValueError, KeyError, TypeError):
        return False
    if host != _host() or os.name != "posix":
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    now = _born(pid)
    return now is not None and now != born  # another process got its number, or it is a zombie


@functools.cache
def _host() -> str:
    """This machine since its start, and the name space of its process ids."""
    return " ".join(
        [socket.gethostname(), _read("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid")]
    ).strip()


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _born(pid: int) -> str | None:
    """When a process started, in a form of its own; "dead" for a zombie; None where that can't be told."""
    if sys.platform != "linux":
        return None
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        return "dead"
    return "dead" if fields[0] in "ZX" else fields[19]
