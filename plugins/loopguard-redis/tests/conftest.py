"""Redis servers for the tests: the one that LOOPGUARD_TEST_REDIS names, and private ones that may be killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

ASKED_FOR = os.environ.get("LOOPGUARD_TEST_REDIS")


def missing(reason: str) -> None:
    """Skip; but where somebody asked for the Redis tests, fail."""
    if ASKED_FOR:
        pytest.fail(reason)
    pytest.skip(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A server to test with needn't keep its data, as those of a fresh Redis don't."""
    for item in items:
        if "url" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings("ignore:.* may forget:loopguard.LoopGuardWarning"))


@pytest.fixture
def url() -> str:
    """An empty database. The tests empty it, so they refuse one that somebody else has written to."""
    if not ASKED_FOR:
        pytest.skip("needs a Redis server: name an empty database of one in LOOPGUARD_TEST_REDIS")
    with redis.Redis.from_url(ASKED_FOR) as client:
        foreign = [key for key in client.scan_iter() if not key.startswith(b"{loopguard}:")]
        assert not foreign, f"LOOPGUARD_TEST_REDIS names a database in use: {foreign[:5]}"
        client.flushdb()
    return ASKED_FOR


class Server:
    """A Redis server of one test, with its data in a folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        self.port = 0
        while not 0 < self.port < 55_536:  # a cluster's bus has a port 10,000 above
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                self.port = found.getsockname()[1]
        self.process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start, and wait until it serves."""
        self.folder.mkdir(exist_ok=True)
        place = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "")
        self.process = subprocess.Popen(
            ["redis-server", *place, *self.options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout is not None
        log = ""
        for line in self.process.stdout:
            log += line
            if "Ready to accept connections" in line:
                return
        self.kill()
        pytest.fail(f"redis-server didn't start:\n{log}")

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """kill -9, or an orderly stop."""
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.send_signal(how)
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """``start("--appendonly", "yes")``: a server of this test's own, gone after it."""
    if shutil.which("redis-server") is None:
        missing("needs the program redis-server, to kill it and start it again")
    servers: list[Server] = []

    def start(*options: str) -> Server:
        servers.append(Server(tmp_path / f"redis-{len(servers)}", *options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
