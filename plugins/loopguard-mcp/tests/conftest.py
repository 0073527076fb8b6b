"""What the tests share: real servers behind a real proxy, driven by the SDK's own client."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TextIO

import pytest
from mcp import Client, StdioServerParameters, stdio_client
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SERVERS = Path(__file__).parent / "servers"


class Bench:
    """A folder with a policy, a server command, and what the proxy wrote to standard error."""

    def __init__(self, folder: Path, log: TextIO) -> None:
        self.folder = folder
        self.log = log
        self.policy("")
        self.env: dict[str, str] = {
            "DEMO_RAN": str(folder / "ran"),
            "RAW_TOOLS": str(folder / "tools.json"),
            "ASKER": str(folder),
            "PYTHONPATH": str(folder / "plugin"),
        }

    def policy(self, text: str) -> None:
        """Write the policy."""
        (self.folder / "policy.toml").write_text(text, encoding="utf-8")

    def tools(self, *tools: Any) -> None:
        """What servers/raw.py lists."""
        (self.folder / "tools.json").write_text(json.dumps(tools), encoding="utf-8")

    def answer(self, text: str) -> None:
        """What the approver `asker` says, from now on."""
        (self.folder / "answer").write_text(text, encoding="utf-8")

    def command(self, server: str, *options: str) -> list[str]:
        """The proxy before a server: ``demo.py`` or ``raw.py --stay``."""
        name, *arguments = server.split()
        proxy = [sys.executable, "-m", "loopguard_mcp", "--policy", str(self.folder / "policy.toml"), *options]
        return [*proxy, "--", sys.executable, str(SERVERS / name), *arguments]

    @asynccontextmanager
    async def client(
        self, server: str = "demo.py", *options: str, mode: Any = "legacy", **more: Any
    ) -> AsyncIterator[Client]:
        """A client at the proxy before a server."""
        command, *arguments = self.command(server, *options)
        parameters = StdioServerParameters(command=command, args=arguments, env=self.env)
        async with Client(stdio_client(parameters, errlog=self.log), mode=mode, **more) as client:
            yield client

    @property
    def ran(self) -> list[str]:
        """What the tools of servers/demo.py did."""
        path = self.folder / "ran"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    @property
    def asked(self) -> list[Any]:
        """What the approver was asked."""
        path = self.folder / "asked"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def said(self) -> str:
        """What the proxy wrote to standard error."""
        return Path(self.log.name).read_text(encoding="utf-8")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A bench with the approver `asker` installed as a plugin."""
    info = tmp_path / "plugin" / "asker-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: asker\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[loopguard.approvers]\nasker = asker:ask\n")
    (tmp_path / "plugin" / "asker.py").write_text((SERVERS / "asker.py").read_text())
    with (tmp_path / "log").open("w") as log:
        yield Bench(tmp_path, log)


class Collector(ThreadingHTTPServer):
    """An OTLP collector on 127.0.0.1 that keeps what it gets."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path.endswith("/traces"):
                    collector.bodies.append(gzip.decompress(body) if self.headers["Content-Encoding"] else body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Standard error is no place for this."""

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list[Any]:
        """All spans that arrived."""
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for request in requests
            for part in request.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector that is listening."""
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
