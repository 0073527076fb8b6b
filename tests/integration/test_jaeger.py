"""A real Jaeger: what is sent over OTLP comes back through its query API, and its death holds nothing up."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

pytestmark = [
    pytest.mark.jaeger,
    pytest.mark.skipif(
        "LOOPGUARD_TEST_JAEGER" not in os.environ,
        reason="LOOPGUARD_TEST_JAEGER isn't set, run .ci/jaeger .venv/bin/python -m pytest -m jaeger",
    ),
]

ROOT = Path(__file__).parents[2]
Json: TypeAlias = dict[str, Any]


class Jaeger:
    """A Jaeger of our own, in memory, on ports that were free."""

    def __init__(self, folder: Path) -> None:
        otlp, query, grpc = free_ports(3)
        self.endpoint, self.query = f"http://127.0.0.1:{otlp}", f"http://127.0.0.1:{query}"
        config = {
            "extensions": {
                "jaeger_storage": {"backends": {"memory": {"memory": {"max_traces": 1000}}}},
                "jaeger_query": {
                    "storage": {"traces": "memory"},
                    "http": {"endpoint": f"127.0.0.1:{query}"},
                    "grpc": {"endpoint": f"127.0.0.1:{grpc}"},
                },
            },
            "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"127.0.0.1:{otlp}"}}}},
            "exporters": {"jaeger_storage_exporter": {"trace_storage": "memory"}},
            "service": {
                "extensions": ["jaeger_storage", "jaeger_query"],
                "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}},
                "telemetry": {"metrics": {"level": "none"}},
            },
        }
        (folder / "jaeger.json").write_text(json.dumps(config), encoding="utf-8")
        with (folder / "jaeger.log").open("wb") as log:
            program = os.environ["LOOPGUARD_TEST_JAEGER"]
            self.process = subprocess.Popen(
                [program, "--config", str(folder / "jaeger.json")], stdout=log, stderr=subprocess.STDOUT
            )
        try:
            until(lambda: self.process.poll() is not None or self.answers(otlp))
            assert self.process.poll() is None, (folder / "jaeger.log").read_text(encoding="utf-8")[-2000:]
        except BaseException:
            self.kill()
            raise

    def answers(self, otlp: int) -> bool:
        try:
            socket.create_connection(("127.0.0.1", otlp), 1).close()
            return self.get("/api/services") is not None
        except OSError:
            return False

    def get(self, path: str, **query: str) -> Any:
        """What the query API answers."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.query}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"] or []

    def traces(self, service: str, **tags: str) -> list[Json]:
        """The traces of a service that hold a span with these tags."""
        now = time.time_ns() // 1000
        window = {"start": str(now - 3_600_000_000), "end": str(now + 60_000_000), "limit": "20"}
        return list(self.get("/api/traces", service=service, tags=json.dumps(tags), **window))

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()


class Span:
    """A span as Jaeger tells it."""

    def __init__(self, data: Json) -> None:
        self.data = data
        self.id: str = data["spanID"]
        self.name: str = data["operationName"]
        self.tags: Json = {tag["key"]: tag["value"] for tag in data["tags"]}
        above = {reference["refType"]: reference for reference in data["references"]}
        self.parent: str | None = above["CHILD_OF"]["spanID"] if "CHILD_OF" in above else None
        self.link: Json | None = above.get("FOLLOWS_FROM")
        self.events: list[Json] = [{field["key"]: field["value"] for field in log["fields"]} for log in data["logs"]]


def spans_of(trace: Json) -> list[Span]:
    """Its spans in the order that they started in."""
    return [Span(data) for data in sorted(trace["spans"], key=lambda data: data["startTime"])]


def tree(trace: Json) -> list[str]:
    """The names, each indented below its parent."""
    spans = spans_of(trace)
    lines: list[str] = []

    def draw(parent: str | None, depth: int) -> None:
        for span in spans:
            if span.parent == parent:
                lines.append("  " * depth + span.name)
                draw(span.id, depth + 1)

    draw(None, 0)
    assert len(lines) == len(spans), "a span hangs below one that isn't there"
    return lines


def free_ports(n: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def until(reached: Any, seconds: float = 30) -> Any:
    """What `reached` says, once that is true: another process can only be asked again."""
    deadline = time.monotonic() + seconds
    while not (value := reached()):
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.05)
    return value


def environment(jaeger: Jaeger, **more: str) -> dict[str, str]:
    """A program's, that sends its spans there."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "ANTHROPIC_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {"OTEL_EXPORTER_OTLP_ENDPOINT": jaeger.endpoint, "PYTHONPATH": path, "PYTHONUTF8": "1", "NO_PROXY": "*"}
    return {**mine, **ours, **more}


def run(source: str, jaeger: Jaeger, folder: Path, **variables: str) -> str:
    """The output of a program that sends its spans there."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        env=environment(jaeger, **variables),
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def jaeger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jaeger]:
    """One for all tests that only read."""
    made = Jaeger(tmp_path_factory.mktemp("jaeger"))
    yield made
    made.kill()


@pytest.fixture(scope="module")
def demo(jaeger: Jaeger) -> Json:
    """The trace of examples/02_agent.py."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "02_agent.py"],
        env=environment(jaeger),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (trace,) = until(lambda: jaeger.traces("support-agent"))
    return trace


def test_the_demo_is_one_tree(jaeger: Jaeger, demo: Json) -> None:
    """Every name of it, below the span of the application that called the loop."""
    assert "support-agent" in jaeger.get("/api/services")
    work = ["look_up_order", "track_parcel", "track_parcel", "track_parcel", "issue_refund", "issue_refund"]
    iterations = [[f"execute_tool {name}"] for name in [*work, "search_depots"]] + [[]]
    drawn = [line for line in tree(demo) if "anthropic" not in line]
    assert drawn == [
        "customer_request",
        "  invoke_agent support",
        *(
            line
            for below in iterations
            for line in ("    loop_iteration support", *(f"      {name}" for name in below))
        ),
    ]


def test_kinds_and_attributes_come_back(demo: Json) -> None:
    """Run, iteration and tool say what they are about; nothing is a client but calls of models."""
    spans = spans_of(demo)
    ours = [span for span in spans if span.tags.get("otel.scope.name") == "loopguard"]
    assert {span.tags["span.kind"] for span in ours} == {"internal"}
    (agent,) = [span for span in ours if span.name == "invoke_agent support"]
    assert agent.tags["gen_ai.operation.name"] == "invoke_agent"
    assert agent.tags["gen_ai.agent.name"] == "support"
    assert agent.tags["loopguard.run.id"].startswith("run_")
    assert agent.tags["loopguard.loop.iterations"] == 8
    assert agent.tags["loopguard.loop.max_iterations"] == 10
    assert agent.tags["loopguard.loop.stop_reason"] == "until"
    assert agent.tags["loopguard.call.cost"] == pytest.approx(0.06)
    iterations = [span.tags["loopguard.loop.iteration"] for span in ours if span.name == "loop_iteration support"]
    assert iterations == list(range(1, 9))
    (first, *_) = [span for span in ours if span.name == "execute_tool track_parcel"]
    assert first.tags["gen_ai.tool.name"] == "track_parcel"
    assert first.tags["loopguard.step.limit"] == 20
    assert first.tags["loopguard.step.index"] == 2
    assert first.tags["loopguard.call.cost"] == 0.02


def test_refusals_are_red_and_say_why(demo: Json) -> None:
    """Three of them, each described by its reason; nothing else is marked as an error."""
    red = [span for span in spans_of(demo) if span.tags.get("error")]
    assert [(span.name, span.tags["error.type"]) for span in red] == [
        ("execute_tool track_parcel", "loop_limit"),
        ("execute_tool issue_refund", "approval_denied"),
        ("execute_tool search_depots", "budget"),
    ]
    looping, denied, dear = (span.tags["otel.status_description"] for span in red)
    assert looping.startswith("you are looping: track_parcel was already called 2 times")
    assert denied == "more than $100 is a manager's decision"
    assert "only $0.24 is left of the budget of $0.3" in dear
    assert {span.tags["otel.status_code"] for span in red} == {"ERROR"}
    assert [span.tags["loopguard.verdict.type"] for span in red] == ["deny"] * 3
    assert [span.tags["loopguard.guardrail.name"] for span in red] == ["LoopLimit", "ApproveTool", "Budget"]
    budget = {key: value for key, value in red[2].tags.items() if key.startswith("loopguard.budget.")}
    assert budget == {
        "loopguard.budget.name": "usd",
        "loopguard.budget.unit": "usd",
        "loopguard.budget.limit": 0.3,
        "loopguard.budget.spent": pytest.approx(0.06),
        "loopguard.budget.remaining": pytest.approx(0.24),
    }


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ({"loopguard.verdict.type": "deny"}, 1),
        ({"loopguard.verdict.reason": "budget"}, 1),
        ({"loopguard.budget.name": "usd", "loopguard.verdict.type": "deny"}, 1),
        ({"loopguard.loop.stop_reason": "until"}, 1),
        ({"loopguard.verdict.reason": "max_steps"}, 0),
    ],
)
def test_runs_are_found_by_what_happened(jaeger: Jaeger, demo: Json, tags: dict[str, str], found: int) -> None:
    """The searches of the docs page."""
    assert [trace["traceID"] for trace in jaeger.traces("support-agent", **tags)] == [demo["traceID"]] * found


RESUMED = """
import time
from loopguard import ApproveTool, Guard, Verdict, charge, configure_telemetry, loop, tool

configure_telemetry("resumed-agent")

def slow_yes(call):
    time.sleep(0.05)
    return True

@tool(cost=0.01, approve=True)
def pay(n):
    charge(usd=0.02)
    return n

first = []

def check(value):
    return Verdict(True, "good enough", score=0.75)

@loop(max=2, evaluate=[check], until=lambda n: n >= 2, store="sqlite:///runs.db", guard=Guard(ApproveTool(slow_yes)))
def agent(n):
    pay(n)
    if n == 1 and not first:
        first.append(n)
        raise OSError("the network is gone")
    return n + 1

try:
    agent.run(0, run_id="order-42")
except OSError:
    print(agent.resume("order-42").value)
"""


def test_waits_verdicts_overruns_and_links_come_back(jaeger: Jaeger, tmp_path: Path) -> None:
    """An approval that waited is a child with its outcome, a verdict a log, a resumed run links to the first one."""
    assert run(RESUMED, jaeger, tmp_path) == "2\n"
    traces = until(lambda: found if len(found := jaeger.traces("resumed-agent")) == 2 else None)
    first, second = sorted(traces, key=lambda trace: min(span["startTime"] for span in trace["spans"]))
    assert tree(first)[:4] == [
        "invoke_agent agent",
        "  loop_iteration agent",
        "    execute_tool pay",
        "      approve_tool pay",
    ]
    agents = [span for trace in (first, second) for span in spans_of(trace) if span.name == "invoke_agent agent"]
    assert [agent.tags.get("error.type") for agent in agents] == ["OSError", None]
    assert agents[0].tags["otel.status_description"] == "OSError: the network is gone"
    assert agents[1].link is not None
    assert (agents[1].link["traceID"], agents[1].link["spanID"]) == (first["traceID"], agents[0].id)
    (wait, *_) = [span for span in spans_of(first) if span.name == "approve_tool pay"]
    assert wait.tags["loopguard.approval.outcome"] == "granted"
    assert wait.data["duration"] >= 50_000
    (iteration, *_) = [span for span in spans_of(first) if span.name == "loop_iteration agent"]
    assert iteration.events == [
        {
            "event": "gen_ai.evaluation.result",
            "gen_ai.evaluation.name": "check",
            "gen_ai.evaluation.score.label": "pass",
            "gen_ai.evaluation.score.value": 0.75,
            "gen_ai.evaluation.explanation": "good enough",
        }
    ]
    slow = jaeger.get(
        "/api/traces",
        service="resumed-agent",
        operation="approve_tool pay",
        minDuration="40ms",
        start=str(time.time_ns() // 1000 - 3_600_000_000),
        end=str(time.time_ns() // 1000),
    )
    assert first["traceID"] in [trace["traceID"] for trace in slow]
    overrun = jaeger.traces("resumed-agent", **{"loopguard.verdict.reason": "overrun"})
    assert {trace["traceID"] for trace in overrun} == {first["traceID"]}


BEREFT = """
import sys, time
from loopguard import configure_telemetry, loop, tool

configure_telemetry("bereft-agent")
slowest = 0.0

@tool
def work(n):
    return n + 1

@loop(max=2000)
def agent(n):
    global slowest
    if n == 1000:
        print("half", flush=True)
        sys.stdin.readline()
    began = time.perf_counter()
    n = work(n)
    slowest = max(slowest, time.perf_counter() - began)
    return n

print(agent(0), slowest, flush=True)
"""


def test_a_collector_killed_in_the_middle_holds_nothing_up(tmp_path: Path) -> None:
    """The loop goes on to its result, no call waits, and the process ends within two seconds."""
    mortal = Jaeger(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", BEREFT],
        env=environment(mortal, OTEL_BSP_SCHEDULE_DELAY="50", OTEL_METRIC_EXPORT_INTERVAL="50"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "half\n"
        until(lambda: "bereft-agent" in mortal.get("/api/services"))
        mortal.kill()
        process.stdin.write("\n")
        process.stdin.flush()
        value, slowest = process.stdout.readline().split()
        ended = time.monotonic()
        assert process.wait(timeout=30) == 0
        assert time.monotonic() - ended < 2
        assert value == "2000"
        assert float(slowest) < 0.5
    finally:
        mortal.kill()
        process.kill()
        process.communicate()
