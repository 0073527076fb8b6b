"""The server's keeper: should the proxy die without a word, the server dies too, with all that it started.

Run as a script, apart from the package: ``python -I -S _keeper.py PROXY_PID COMMAND…``, at the head of a process
group of its own. The server reads and writes the proxy's pipes itself. POSIX only: on Windows a job object does it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

POLL = 0.2
"""Seconds between two looks at whether the proxy is alive."""
GRACE = 1.0
"""Seconds in which the server, whose input has ended, may end by itself."""


def watch(proxy: int) -> None:
    """Wait for the proxy's death, then end this process group."""
    while os.getppid() == proxy:
        time.sleep(POLL)
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)


def main(proxy: int, command: list[str]) -> int:
    """Start the server, and end as it does."""
    server = subprocess.Popen(command)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # the pipes are the server's alone: their end is its end
        os.dup2(null, descriptor)
    threading.Thread(target=watch, args=(proxy,), daemon=True).start()
    code = server.wait()
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    sys.stderr.write(f"the server {how}\n")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
