"""dispatch and receive_dispatch: another agent, here, behind HTTP, and in another process."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loopguard import (
    Budget,
    ConfigurationError,
    Flow,
    Guard,
    LoopGuardError,
    LoopStopped,
    MaxSteps,
    StopReason,
    charge,
    current_run,
    dispatch,
    journal,
    loop,
    receive_dispatch,
    step,
    tool,
)
from loopguard.journal import _writer


@dataclass
class Draft:
    text: str
    quality: int = 0


@tool(cost=1)
def work(n: int) -> int:
    """One dollar's worth."""
    return n + 1


# -- here ------------------------------------------------------------------------------------------


@loop(max=9, until=lambda n: n >= 3)
def grow(n: int) -> int:
    """Until it is three."""
    return work(n)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_what_is_here_is_called(colour: str) -> None:
    """A function, a loop or a flow, in the run that is under way, which pays for it."""

    async def aplus(n: int) -> int:
        return n + 10

    def plus(n: int) -> int:
        return n + 10

    other = Flow("other", [grow, aplus if colour == "async" else plus])
    flow = Flow("f", [dispatch(aplus if colour == "async" else plus), dispatch(other), dispatch(grow)])
    result = asyncio.run(flow.run(-10)) if colour == "async" else flow.run(-10)
    assert (result.value, result.cost) == (14, Decimal(4))
    assert list(flow.results(result)) == [plus.__name__ if colour == "sync" else "aplus", "other", "grow"]


def test_an_agent_that_did_not_complete_is_no_result() -> None:
    """LoopStopped with what it came to, for a loop at its ceiling; a budget of its own counts for it alone."""

    @loop(max=2, until=lambda n: n >= 3, name="short")
    def short(n: int) -> int:
        return work(n)

    with pytest.raises(LoopStopped) as caught:
        Flow("f", [dispatch(short)])(0)
    assert (caught.value.result.value, caught.value.result.stop_reason) == (2, StopReason.MAX_ITERATIONS)
    bounded = dispatch(grow, budget=Budget(usd=2), name="bounded")
    with Guard(Budget(usd=10)).scope("outer") as run:
        with pytest.raises(LoopStopped, match="budget"):
            bounded(0)
        assert (run.spent(), bounded(1), run.spent()) == (2, 3, 4)


# -- behind HTTP -----------------------------------------------------------------------------------


class FarEnd:
    """An HTTP server in this process, whose handler is given each request's body and headers."""

    def __init__(self, answer: Callable[[bytes, Mapping[str, str]], tuple[int, bytes]]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        far = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                far.requests.append(json.loads(body))
                far.headers.append(dict(self.headers))
                status, said = answer(body, dict(self.headers))
                if not status:
                    return  # hang up
                self.send_response(status)
                self.send_header("content-length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/agents/writer"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def answering(target: Callable[..., Any]) -> Callable[[bytes, Mapping[str, str]], tuple[int, bytes]]:
    """A handler as anybody would write it."""

    def answer(body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        try:
            reply = receive_dispatch(target, body, headers)
            if asyncio.iscoroutine(reply):
                reply = asyncio.run(reply)
        except ConfigurationError as exc:
            return 400, str(exc).encode()
        return 200, json.dumps(reply).encode()

    return answer


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FarEnd]]:
    """Far ends, closed after the test; no proxy stands between."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made: list[FarEnd] = []

    def start(answer: Any) -> FarEnd:
        made.append(FarEnd(answer))
        return made[-1]

    yield start
    for each in made:
        each.close()


Serve = Callable[..., FarEnd]


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_url_is_handed_the_state_and_what_is_left(colour: str, serve: Serve) -> None:
    """The far end spends under the caller's ceiling; what it spent is charged back, exactly."""

    def write(n: int) -> Draft:
        run = current_run()
        assert run is not None
        limits.append(run.remaining())
        charge(usd=0.25, tokens=7)
        return Draft("far", n)

    async def awrite(n: int) -> Draft:
        return write(n)

    limits: list[Any] = []
    far = serve(answering(write if colour == "sync" else awrite))
    flow = Flow("near", [work, dispatch(far.url, output=Draft), lambda d: d.quality], budget=Budget(usd=3, tokens=100))
    result = flow.run(4)
    assert (result.value, result.cost, result.usage.tokens) == (5, Decimal("1.25"), 7)
    assert result.history[1].value == Draft("far", 5)
    assert limits == [2]
    (request,) = far.requests
    assert (request["state"], request["run_id"], request["budget"]) == (5, result.run_id, {"usd": "2", "tokens": "100"})
    assert flow.results(result)["writer"] == Draft("far", 5)


def test_the_far_end_can_not_spend_more_than_is_left(serve: Serve) -> None:
    """It stops at the caller's ceiling, of tool calls, too; the caller is told, and pays what was spent."""
    far = serve(answering(loop(max=9, until=lambda n: n >= 9, name="greedy")(work)))
    flow = Flow("near", [dispatch(far.url)], budget=Budget(usd=2))
    with pytest.raises(LoopStopped) as caught:
        flow(0)
    stopped = caught.value.result
    assert (stopped.value, stopped.stop_reason, stopped.name) == (2, StopReason.BUDGET, "writer")
    assert stopped.run_id.startswith(far.requests[0]["run_id"] + "/")
    run = Flow("near", [dispatch(far.url)], guard=Guard(MaxSteps(4)))
    with pytest.raises(LoopStopped) as caught:
        run(0)
    assert caught.value.result.value == 3
    with Guard(Budget(usd=2)).scope("near") as scope:
        with pytest.raises(LoopStopped):
            dispatch(far.url)(0)
        assert (scope.spent(), scope.reserved()) == (2, 0)


def test_several_at_once_each_have_their_part(serve: Serve) -> None:
    """All that is left is reserved for the first, so a second has nothing to spend; with budget= both have."""
    both = threading.Barrier(2, timeout=20)

    def meet(n: int) -> int:
        both.wait()
        return n

    far = serve(answering(meet))

    def two(one: Any, other: Any) -> list[Any]:
        async def main() -> list[Any]:
            with Guard(Budget(usd=2)).scope("near"):
                calls = [asyncio.to_thread(one, 1), asyncio.to_thread(other, 2)]
                return await asyncio.gather(*calls, return_exceptions=True)

        return asyncio.run(main())

    half = Budget(usd=1)
    assert two(dispatch(far.url, budget=half), dispatch(far.url, budget=half)) == [1, 2]

    def nested(n: int) -> int:
        with pytest.raises(LoopStopped, match="budget"):
            dispatch(costly.url, name="second")(n)
        return n

    costly = serve(answering(work))
    with Guard(Budget(usd=2)).scope("near") as run:
        assert tool(cost=2)(nested)(1) == 1
        assert run.spent() == 2
    assert costly.requests[0]["budget"] == {"usd": "0"}


def test_the_trace_goes_on_at_the_far_end(serve: Serve, exporter: InMemorySpanExporter) -> None:
    """One trace: the far scope's span is a child of the near tool's."""
    far = serve(answering(lambda n: n))
    result = Flow("near", [dispatch(far.url)]).run(1)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    called, scope = spans["execute_tool writer"], spans["invoke_agent <lambda>"]
    assert scope.parent is not None
    assert scope.parent.span_id == called.context.span_id
    assert format(scope.context.trace_id, "032x") == result.trace_id


def test_a_far_end_that_fails_is_a_failed_step(serve: Serve) -> None:
    """With its reason, and what it had spent; a retry asks again under an id of its own."""
    tries: list[int] = []

    def flaky(n: int) -> int:
        tries.append(n)
        charge(usd=0.5)
        if len(tries) == 1:
            raise OSError("no disk")
        return n

    far = serve(answering(flaky))
    told: list[str | None] = []
    ask = dispatch(far.url, headers={"authorization": "Bearer x"})

    def handed(n: int, *, feedback: str | None = None) -> Any:
        told.append(feedback)
        return ask(n)

    result = Flow("near", [step(handed, max_retries=1)], budget=Budget(usd=3)).run(1)
    assert (result.value, result.cost) == (1, Decimal(1))
    assert "writer failed: OSError: no disk" in str(told[1])
    assert far.requests[0]["key"] != far.requests[1]["key"]
    assert far.headers[0]["authorization"] == "Bearer x"


def test_an_unknown_cost_far_away_is_an_unknown_cost_here(serve: Serve) -> None:
    """None, never 0."""

    def unknown(n: int) -> int:
        run = current_run()
        assert run is not None
        run.unknown_cost = True
        return n

    assert Flow("near", [dispatch(serve(answering(unknown)).url)]).run(1).cost is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((500, b"<h1>oops</h1>"), "answered 500, and no result: <h1>oops"),
        ((200, b"{}"), "answered 200, and no result"),
        ((200, b"[1]"), "answered 200, and no result"),
        ((0, b""), "disconnected"),
        ((200, b'{"completed": true, "state": 1, "spent": {"usd": "-1"}}'), "answered 200, and no result"),
        ((200, b'{"completed": true, "state": 1, "spent": {"usd": "NaN"}}'), "answered 200, and no result"),
        ((200, b'{"completed": true, "state": 1, "spent": {"tool_calls": "1"}}'), "answered 200, and no result"),
    ],
    ids=["500", "empty", "list", "hung up", "negative", "NaN", "counted"],
)
def test_where_nobody_knows_what_was_spent_all_is_charged(answer: tuple[int, bytes], said: str, serve: Serve) -> None:
    """What had been reserved for the far end: it may have spent it."""
    far = serve(lambda body, headers: answer)
    with Guard(Budget(usd=2)).scope("near") as run:
        with pytest.raises(Exception, match=said):
            dispatch(far.url)(1)
        assert (run.spent(), run.reserved()) == (2, 0)


@pytest.mark.parametrize("reason", ["tired", 5, ["a"]])
def test_a_reason_that_nobody_knows_is_an_error(reason: Any, serve: Serve) -> None:
    """Another version may stop for others: what it says it spent is charged."""
    said = {"completed": False, "spent": {"usd": "0.5"}, "stop_reason": reason, "iterations": "x"}
    far = serve(lambda body, headers: (200, json.dumps(said).encode()))
    with Guard(Budget(usd=2)).scope("near") as run:
        with pytest.raises(LoopStopped) as caught:
            dispatch(far.url)(1)
        assert (caught.value.result.stop_reason, run.spent()) == (StopReason.ERROR, Decimal("0.5"))


def test_a_result_that_can_not_be_sent_is_a_failure_with_its_cost(serve: Serve) -> None:
    """The caller is told why, and charged what was spent, not all that it had."""

    def makes_no_json(n: int) -> object:
        charge(usd=0.5)
        return object()

    with Guard(Budget(usd=2)).scope("near") as run:
        with pytest.raises(LoopGuardError, match="writer failed: CheckpointError"):
            dispatch(serve(answering(makes_no_json)).url)(1)
        assert run.spent() == Decimal("0.5")


def test_a_far_end_that_was_never_reached_has_spent_nothing(serve: Serve) -> None:
    """A connection that was refused, and a request that was: by the wrong address, say."""
    far = serve(answering(work))
    far.close()
    other = serve(lambda body, headers: (404, b"no such agent"))
    with Guard(Budget(usd=2)).scope("near") as run:
        with pytest.raises(Exception, match="refused"):
            dispatch(far.url)(1)
        with pytest.raises(LoopGuardError, match="404, and no result: no such agent"):
            dispatch(other.url)(1)
        with pytest.raises(LoopGuardError, match="answered 400, and no result: receive_dispatch"):
            dispatch(serve(answering(work)).url)("no number")
        assert (run.spent(), run.reserved()) == (0, 0)


def test_a_far_end_is_waited_for_no_longer_than_the_run_lasts(serve: Serve) -> None:
    """The flow's timeout ends the wait."""
    release = threading.Event()
    far = serve(lambda body, headers: ((release.wait(20) and 500) or 500, b""))
    try:
        with pytest.raises(Exception, match="timed out"):
            Flow("near", [dispatch(far.url)], timeout=0.2)(1)
    finally:
        release.set()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"state": 1, "run_id": "a b", "key": "k", "budget": {}}',
        b'{"state": 1, "run_id": "a", "key": "k", "budget": {"usd": "NaN"}}',
        b'{"state": 1, "run_id": "a", "key": "k", "budget": {"usd": "-1"}}',
        b'{"state": 1, "run_id": "a", "key": "k", "budget": {"usd": "x"}}',
        b'{"state": 1, "run_id": "a", "key": "k", "budget": {"name": "1"}}',
        b'{"state": 1, "run_id": "a", "key": "k", "budget": {"extend": "1"}}',
        b'{"state": 1, "run_id": "a", "key": "k", "budget": 5}',
        b'{"state": "one", "run_id": "a", "key": "k", "budget": {}}',
        b'{"state": 1, "run_id": "a", "key": "\\ud800", "budget": {}}',
        b"\xff",
    ],
    ids=range(13),
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    """ConfigurationError, which is a ValueError, before anything runs."""
    with pytest.raises(ConfigurationError, match="no request of dispatch"):
        receive_dispatch(work, body, {})


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: dispatch("ftp://x"), "http URL"),
        (lambda: dispatch("http://u:secret@"), "http URL"),
        (lambda: dispatch(5), "5"),  # type: ignore[arg-type]
        (lambda: dispatch(work, budget=5), "budget=5"),  # type: ignore[arg-type]
        (lambda: dispatch(work, name=""), "name=''"),
    ],
    ids=range(5),
)
def test_a_wrong_target_is_refused_when_it_is_made(build: Callable[[], Any], said: str) -> None:
    """The error shows no password."""
    with pytest.raises(ConfigurationError) as caught:
        build()
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


# -- in another process ----------------------------------------------------------------------------

FAR = """
import http.server, json, os, signal, sys, time
from loopguard import Flow, receive_dispatch, tool

store, log, port = sys.argv[1:]

def note(what):
    with open(log, "a") as file:
        file.write(what + "\\n")

@tool(cost=1)
def buy(n: int) -> int:
    note(f"buy {n}")
    return n + 1

def polish(n: int) -> int:
    note(f"polish {n}")
    if os.environ.get("DIES"):
        os.kill(os.getpid(), signal.SIGKILL)
    while os.environ.get("WAITS") and not os.path.exists(log + ".go"):
        time.sleep(0.01)
    return n * 10

agent = Flow("agent", [buy, polish], store=store)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        reply = receive_dispatch(agent, self.rfile.read(int(self.headers["content-length"])), self.headers)
        note("done")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *args):
        pass

class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *args):
        "The other side was killed."

server = Server(("127.0.0.1", int(port)), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""

NEAR = """
import json, sys
from loopguard import Budget, Flow, dispatch

store, log, url, usd = sys.argv[1:]

def first(n: int) -> int:
    with open(log, "a") as file:
        file.write("first\\n")
    return n + 1

def last(n: int) -> int:
    return n + 1000

ask = dispatch(url, name="agent", idempotent=True)
result = Flow("near", [first, ask, last], store=store, budget=Budget(usd=int(usd))).run(1, "order-7")
print(json.dumps([result.value, str(result.cost), str(result.stop_reason)]))
"""


class Process:
    """A program in a process of its own."""

    def __init__(self, code: str, *args: str, **environment: str) -> None:
        told = {**os.environ, "NO_PROXY": "127.0.0.1", **environment}
        command = [sys.executable, "-c", code, *args]
        self.process = subprocess.Popen(command, env=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> int:
        """Its exit code."""
        self.process.communicate(timeout=60)
        return self.process.returncode

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.end()


@dataclass
class Pair:
    """A near end and a far end, their stores, and the log of what both did."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def far(self, port: str = "0", **environment: str) -> tuple[Process, str]:
        process = Process(FAR, f"sqlite:///{self.folder / 'far.db'}", str(self.log), port, **environment)
        return process, process.line()

    def near(self, port: str, usd: int = 5) -> Process:
        url = f"http://127.0.0.1:{port}/agent"
        return Process(NEAR, f"sqlite:///{self.folder / 'near.db'}", str(self.log), url, str(usd))

    def did(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").split("\n")[:-1] if self.log.exists() else []

    def wait_for(self, what: str) -> None:
        deadline = time.monotonic() + 60
        while what not in self.did():
            assert time.monotonic() < deadline, self.did()
            os.sched_yield()

    def runs_far(self) -> list[str]:
        found = [run.run_id for run in journal.open(f"sqlite:///{self.folder / 'far.db'}").runs()]
        _writer.close_writers()
        return found


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Two processes to be."""
    if not hasattr(signal, "SIGKILL"):
        pytest.skip("processes are killed here")
    return Pair(tmp_path)


def test_a_far_process_that_dies_goes_on_where_it_was(pair: Pair) -> None:
    """Nobody knew what it had spent: all that it might have is charged. Asked again, it doesn't buy twice."""
    far, port = pair.far(DIES="yes")
    near = pair.near(port)
    assert far.end() == -signal.SIGKILL
    assert near.end() == 1
    assert pair.did() == ["first", "buy 2", "polish 3"]
    far, _ = pair.far(port)
    try:
        again = pair.near(port, usd=12)
        assert json.loads(again.line()) == [1030, "6", "until"]  # 5 that might have been spent, and 1 that was
        assert again.end() == 0
    finally:
        far.kill()
    assert pair.did() == ["first", "buy 2", "polish 3", "polish 3", "done"]
    (run_id,) = pair.runs_far()
    assert run_id.startswith("order-7/")


def test_a_near_process_that_dies_is_given_what_was_done_meanwhile(pair: Pair) -> None:
    """It asks under the same id: the far end answers from its journal, and the cost is charged once."""
    far, port = pair.far(WAITS="yes")
    try:
        near = pair.near(port)
        pair.wait_for("polish 3")
        near.kill()
        pair.log.with_name("log.go").touch()
        pair.wait_for("done")
        again = pair.near(port)
        assert json.loads(again.line()) == [1030, "1", "until"]
        assert again.end() == 0
    finally:
        far.kill()
    assert pair.did() == ["first", "buy 2", "polish 3", "done", "done"]
    assert len(pair.runs_far()) == 1
