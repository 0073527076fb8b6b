"""Whatever ends, and however: the other side ends too, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and process groups")


@contextmanager
def started(bench: Any, server: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The proxy before a server, after their handshake."""
    pipe = subprocess.PIPE
    environment = {**os.environ, **bench.env}
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    with subprocess.Popen(
        bench.command(server), env=environment, stdin=pipe, stdout=pipe, stderr=bench.log, text=True, **options
    ) as proxy:
        try:
            assert tell(proxy, 1, "initialize", hello)["result"]["serverInfo"]
            yield proxy
        finally:
            proxy.kill()


def write(proxy: subprocess.Popen[str], **message: Any) -> None:
    """Send a message."""
    assert proxy.stdin is not None
    proxy.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    proxy.stdin.flush()


def tell(proxy: subprocess.Popen[str], id: int | str, method: str, params: Any) -> Any:
    """Send a request, and read its answer."""
    write(proxy, id=id, method=method, params=params)
    assert proxy.stdout is not None
    return json.loads(proxy.stdout.readline())


def children(pid: int) -> list[int]:
    """The processes below one, all generations."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has gone meanwhile
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            child = int(stat.parent.name)
            found += [child, *children(child)]
    return found


def gone(pids: list[int], within: float) -> bool:
    """Whether all of them end in time."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not any(running(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@linux
@pytest.mark.parametrize("server", ["raw.py", "raw.py --stay"])
def test_a_killed_proxy_leaves_no_orphan(bench: Any, server: str) -> None:
    """After kill -9 the server ends, also one that stays when its input ends."""
    bench.tools()
    with started(bench, server) as proxy:
        family = children(proxy.pid)
        assert len(family) == 2  # the keeper and the server
        proxy.kill()
        proxy.wait()
        assert gone(family, 10)
        if server.endswith("--stay"):
            assert (bench.folder / "stays").exists()  # it had its chance


@linux
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_signalled_proxy_takes_the_server_along(bench: Any, end: signal.Signals) -> None:
    """However the host ends the proxy."""
    bench.tools()
    with started(bench, "raw.py --stay") as proxy:
        family = children(proxy.pid)
        proxy.send_signal(end)
        assert proxy.wait(20) != 0
        assert gone(family, 10)


@linux
def test_the_end_of_the_agents_input_ends_the_server(bench: Any) -> None:
    """Closing standard input ends the session with 0, and a server that stays is made to go."""
    bench.tools()
    with started(bench, "raw.py --stay") as proxy:
        family = children(proxy.pid)
        assert proxy.stdin is not None
        proxy.stdin.close()
        assert proxy.wait(20) == 0
        assert gone(family, 1)


@linux
def test_a_killed_server_ends_the_proxy_though_its_input_is_open(bench: Any) -> None:
    """The agent sees the end of standard output, and the proxy ends with 1."""
    bench.tools()
    with started(bench, "raw.py") as proxy:
        keeper, server = children(proxy.pid)
        os.kill(server, signal.SIGKILL)
        assert proxy.stdout is not None
        assert proxy.stdout.read() == ""
        assert proxy.wait(20) == 1
        assert gone([keeper], 1)
        assert "server: the server was ended by SIGKILL" in bench.said


@linux
def test_an_agent_that_is_gone_ends_the_session(bench: Any) -> None:
    """Nobody reads standard output any more: the proxy and the server end."""
    bench.tools({"name": "a", "inputSchema": {"type": "object"}})
    with started(bench, "raw.py") as proxy:
        family = children(proxy.pid)
        assert proxy.stdout is not None
        assert proxy.stdin is not None
        proxy.stdout.close()
        proxy.stdin.write('{"jsonrpc": "2.0", "id": 2, "method": "tools/list"}\n')
        proxy.stdin.flush()
        assert proxy.wait(20) == 0
        assert gone(family, 1)
        assert "the agent is gone" in bench.said


def test_a_call_that_is_cancelled_while_a_person_is_asked_never_runs(bench: Any) -> None:
    """The question is withdrawn with the call, nothing is answered, and a late yes changes nothing."""
    bench.policy('[ApproveTool]\napprover = "asker"\nonly = "pay"\n')
    with started(bench, "demo.py") as proxy:
        write(proxy, method="notifications/initialized")
        call = {"name": "pay", "arguments": {"order": "o1", "amount": 1}}
        write(proxy, id=2, method="tools/call", params=call)
        while not bench.asked:
            time.sleep(0.01)
        write(proxy, method="notifications/cancelled", params={"requestId": ["no", "id"]})
        write(proxy, method="notifications/cancelled", params={"requestId": 2})
        assert tell(proxy, 3, "ping", {})["id"] == 3
        bench.answer("yes")
        assert tell(proxy, 4, "tools/call", {"name": "search", "arguments": {"query": "q"}})["id"] == 4
        assert tell(proxy, 5, "tools/call", {"name": "search", "arguments": {"query": "r"}, "task": {}})["error"]
    assert bench.ran == ["search q"]


def test_a_listing_without_end_is_given_up(bench: Any) -> None:
    """A server can't keep the proxy busy for ever."""
    bench.tools({"name": "endless", "inputSchema": {"type": "object"}})
    with started(bench, "raw.py --endless") as proxy:
        answer = tell(proxy, 2, "tools/call", {"name": "endless"})
    assert answer["error"]["message"] == "the server's list of tools doesn't end after 1000 pages"


@pytest.mark.parametrize("answer", ["half", "list"])
def test_an_answer_that_cannot_be_read_ends_its_call(bench: Any, answer: str) -> None:
    """Half an emoji, and a result that is none: the agent gets an error, and the session goes on."""
    bench.tools({"name": answer, "inputSchema": {"type": "object"}})
    with started(bench, "raw.py") as proxy:
        assert "can't be passed on" in tell(proxy, 2, "tools/call", {"name": answer})["error"]["message"]
        assert tell(proxy, 3, "ping", {})["id"] == 3


def test_a_request_that_cannot_be_read_is_answered(bench: Any) -> None:
    """With half an emoji, with arguments that are none, and each one of a batch."""
    with started(bench, "demo.py") as proxy:
        for number, params in enumerate(({"name": "search", "arguments": {"query": "\ud83d"}}, [1]), 2):
            answer = tell(proxy, number, "tools/call", params)
            assert (answer["id"], answer["error"]["code"]) == (number, -32600)
        assert proxy.stdin is not None
        assert proxy.stdout is not None
        proxy.stdin.write(
            '[{"jsonrpc": "2.0", "id": 4, "method": "ping"}, {"jsonrpc": "2.0", "id": "5", "method": "ping"}]\n'
        )
        proxy.stdin.flush()
        assert [json.loads(proxy.stdout.readline())["id"] for _ in range(2)] == [4, "5"]
    assert bench.ran == []


def test_an_id_in_use_is_not_taken_twice(bench: Any) -> None:
    """The second request of an id is refused, the first is answered."""
    bench.policy('[ApproveTool]\napprover = "asker"\nonly = "pay"\n')
    with started(bench, "demo.py") as proxy:
        call = {"name": "pay", "arguments": {"order": "o1", "amount": 1}}
        write(proxy, id="one", method="tools/call", params=call)
        assert tell(proxy, "one", "ping", {})["error"]["message"] == "this id is in use already"
        bench.answer("no")
        assert proxy.stdout is not None
        assert json.loads(proxy.stdout.readline())["result"]["isError"] is True


def test_a_person_at_the_terminal_sees_what_is_asked_and_nothing_else(bench: Any) -> None:
    """The question goes to the terminal of the proxy, escaped, though its input and output are the protocol's."""
    fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))
    name = "pay\x1b[2J\u202e\nApproved."
    bench.policy('[ApproveTool]\napprover = "terminal"\n')
    bench.tools({"name": name, "inputSchema": {"type": "object"}})
    screen, terminal = pty.openpty()

    def take() -> None:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    def read(until: str) -> str:
        shown = ""
        while until not in shown:
            shown += os.read(screen, 1000).decode()
        return shown

    with started(bench, "raw.py", preexec_fn=take, pass_fds=[terminal]) as proxy:
        write(proxy, id=2, method="tools/call", params={"name": name, "arguments": {"to": "\x07me\r", "api_key": "s"}})
        question = read("to deny: ")
        code = re.findall("Type (.*) to approve", question)[0]
        os.write(screen, f"{code}\n".encode())
        read("Approved.")
        assert proxy.stdout is not None
        assert json.loads(json.loads(proxy.stdout.readline())["result"]["content"][0]["text"])["api_key"] == "s"
    os.close(screen)
    os.close(terminal)
    assert r"may pay\x1b[2J\u202e\nApproved. ⚠ not ASCII" in question
    assert r'to = "\x07me\r"' in question
    assert "api_key = [hidden" in question.replace('"', "")
    assert not {"\x1b", "\u202e", "\x07"} & set(question)
