"""configure_telemetry in processes of its own: what arrives, what is left alone, and how long exit takes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.telemetry.conftest import Program

WORK = """
import sys, time
from loopguard.telemetry import _metrics, _spans, configure_telemetry
def work():
    span = _spans.start_tool_span("search", {"gen_ai.tool.name": "search"})
    _spans.end_ok(span)
    _metrics.decision("MaxSteps", "allow", "search")
    return span
"""


class Collector(ThreadingHTTPServer):
    """An OTLP/HTTP collector that keeps what it is sent."""

    daemon_threads = True

    def __init__(self, without_metrics: bool = False) -> None:
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.without_metrics = without_metrics
        super().__init__(("127.0.0.1", 0), CollectorHandler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def services(self) -> dict[str, list[str]]:
        """Names of the spans that arrived, by service."""
        found: dict[str, list[str]] = {}
        for resource in (resource for request in self.traces for resource in request.resource_spans):
            (service,) = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            names = [span.name for scope in resource.scope_spans for span in scope.spans]
            found.setdefault(service, []).extend(names)
        return found

    def instruments(self) -> set[str]:
        """Names of the metrics that arrived."""
        scopes = [s for request in self.metrics for r in request.resource_metrics for s in r.scope_metrics]
        return {metric.name for scope in scopes for metric in scope.metrics}


class CollectorHandler(BaseHTTPRequestHandler):
    """Decodes what is posted to the two paths of OTLP."""

    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces":
            self.server.traces.append(ExportTraceServiceRequest.FromString(body))
        elif self.path == "/v1/metrics" and not self.server.without_metrics:
            self.server.metrics.append(ExportMetricsServiceRequest.FromString(body))
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(collector: Collector) -> Iterator[Collector]:
    """The collector, running for one test."""
    with collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector for traces and metrics."""
    yield from serve(Collector())


@pytest.fixture
def jaeger() -> Iterator[Collector]:
    """A collector for traces alone, as Jaeger is one."""
    yield from serve(Collector(without_metrics=True))


@pytest.fixture
def black_hole() -> Iterator[str]:
    """The URL of a collector that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed_port() -> str:
    """The URL of a collector that isn't there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_spans_and_metrics_arrive_when_the_process_ends(program: Program, collector: Collector) -> None:
    """A short script needs no flush: its exit delivers, quickly and without a word."""
    done = program(WORK + f"configure_telemetry('shop', {collector.url!r}); work()")

    assert (done.returncode, done.stderr) == (0, "")
    assert collector.services() == {"shop": ["execute_tool search"]}
    assert collector.instruments() == {"loopguard.decisions"}


@pytest.mark.parametrize("suffix", ["/", "/v1/traces"])
def test_an_endpoint_may_be_written_in_full(program: Program, collector: Collector, suffix: str) -> None:
    """The base URL with a slash, or the URL of traces that other libraries want, mean the same collector."""
    program(WORK + f"configure_telemetry('shop', {collector.url + suffix!r}); work()")

    assert collector.services() == {"shop": ["execute_tool search"]}
    assert collector.instruments() == {"loopguard.decisions"}


def test_the_standard_variables_hold(program: Program, collector: Collector) -> None:
    """Endpoint and service name come from the environment where the call doesn't say; exporters can be none."""
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_SERVICE_NAME": "from-env",
        "OTEL_METRICS_EXPORTER": "none",
    }
    done = program(WORK + "configure_telemetry(); work()", **variables)

    assert done.stderr == ""
    assert collector.services() == {"from-env": ["execute_tool search"]}
    assert collector.instruments() == set()


def test_what_is_said_in_code_beats_the_environment(program: Program, collector: Collector) -> None:
    """An argument is nearer than a variable."""
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SERVICE_NAME": "from-env"}
    program(WORK + f"configure_telemetry('shop', {collector.url!r}); work()", **variables)

    assert collector.services() == {"shop": ["execute_tool search"]}


def test_flush_delivers_before_the_end(program: Program, collector: Collector) -> None:
    """After flush the spans are there, while the process goes on."""
    source = f"telemetry = configure_telemetry('shop', {collector.url!r}); work(); print(telemetry.flush())\n"
    kill = "import os; sys.stdout.flush(); os._exit(0)"
    done = program(WORK + source + kill)

    assert done.stdout == "True\n"
    assert collector.services() == {"shop": ["execute_tool search"]}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_delivers_too(program: Program, collector: Collector) -> None:
    """Threads don't survive a fork; the child has its own."""
    source = f"""
import os, warnings
configure_telemetry('shop', {collector.url!r})
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks in a process with threads
child = os.fork()
work()
if child:
    os.waitpid(child, 0)
"""
    done = program(WORK + source)

    assert (done.returncode, done.stderr) == (0, "")
    assert collector.services() == {"shop": ["execute_tool search"] * 2}


def test_jaeger_refusing_metrics_is_not_an_error(program: Program, jaeger: Collector) -> None:
    """A collector of traces alone gets its traces, and nothing is complained about."""
    done = program(WORK + f"configure_telemetry('shop', {jaeger.url!r}); work()")

    assert done.stderr == ""
    assert jaeger.services() == {"shop": ["execute_tool search"]}


@pytest.mark.parametrize("kind", ["closed_port", "black_hole"])
def test_a_dead_collector_holds_nothing_up(program: Program, request: pytest.FixtureRequest, kind: str) -> None:
    """Neither a call nor the exit waits for it: the exit takes less than two seconds."""
    source = f"""
configure_telemetry('shop', {request.getfixturevalue(kind)!r})
start = time.perf_counter()
for _ in range(2000):
    work()
print(time.perf_counter() - start, time.time())
"""
    done = program(WORK + source)
    ended = time.time()
    calls, finished = map(float, done.stdout.split())

    assert done.returncode == 0
    assert calls < 2
    assert ended - finished < 2


def test_flush_and_shutdown_keep_their_time(program: Program, black_hole: str) -> None:
    """A collector that doesn't answer costs the time that was granted, no more."""
    source = f"""
telemetry = configure_telemetry('shop', {black_hole!r})
work()
start = time.perf_counter()
flushed = telemetry.flush(0.2)
telemetry.shutdown(0.2)
telemetry.shutdown(0.2)
print(flushed, time.perf_counter() - start < 1.5)
"""
    assert program(WORK + source).stdout == "False True\n"


def test_a_provider_that_is_set_is_left_alone(program: Program, collector: Collector) -> None:
    """The application's own set-up stays as it is; the log says so."""
    source = f"""
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
mine = TracerProvider(), MeterProvider()
trace.set_tracer_provider(mine[0])
metrics.set_meter_provider(mine[1])
telemetry = configure_telemetry("shop", {collector.url!r}, console=True)
work()
telemetry.flush()
telemetry.shutdown()
print((trace.get_tracer_provider(), metrics.get_meter_provider()) == mine, work().is_recording())
"""
    done = program(WORK + source)

    assert done.stdout == "True False\n"
    assert done.stderr.splitlines() == [
        "a TracerProvider is already set and is left alone: spans go where it sends them",
        "a MeterProvider is already set and is left alone: metrics go where it sends them",
    ]
    assert collector.services() == {}


def test_a_disabled_sdk_stays_disabled(program: Program, collector: Collector) -> None:
    """OTEL_SDK_DISABLED wins over everything that the call says."""
    source = f"""
from opentelemetry import trace
configure_telemetry("shop", {collector.url!r}, console=True).shutdown()
print(work().is_recording(), type(trace.get_tracer_provider()).__name__, "opentelemetry.sdk" in sys.modules)
"""
    done = program(WORK + source, OTEL_SDK_DISABLED="true")

    assert (done.stdout, done.stderr) == ("False ProxyTracerProvider False\n", "")
    assert collector.services() == {}


def test_calling_twice_is_safe(program: Program, collector: Collector) -> None:
    """The second call returns what the first one set up, and nothing is sent twice."""
    source = f"""
first = configure_telemetry("shop", {collector.url!r})
print(configure_telemetry(console=True) is first)
work()
"""
    done = program(WORK + source)

    assert (done.stdout, done.stderr) == ("True\n", "")
    assert collector.services() == {"shop": ["execute_tool search"]}


def test_the_console_alone_needs_no_collector(program: Program) -> None:
    """console=True draws trees on stderr, sends nothing and loads no exporter."""
    source = "configure_telemetry(console=True); work(); print('opentelemetry.exporter' in sys.modules)"
    done = program(WORK + source)

    assert done.stdout == "False\n"
    assert done.stderr.startswith("execute_tool search · ")
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_extra_is_named(program: Program) -> None:
    """Without the exporter the error says what to install, and nothing is half set up."""
    source = """
sys.modules["opentelemetry.exporter.otlp.proto.http.trace_exporter"] = None
from opentelemetry import trace
try:
    configure_telemetry(endpoint="http://127.0.0.1:4318")
except ValueError as error:
    print(type(error).__name__, error)
print(type(trace.get_tracer_provider()).__name__)
"""
    lines = program(WORK + source).stdout.splitlines()

    assert lines[0].startswith("ConfigurationError")
    assert 'pip install "loopguard-agents[otlp]"' in lines[0]
    assert lines[1] == "ProxyTracerProvider"


def test_an_endpoint_without_a_scheme_is_refused(program: Program) -> None:
    """localhost:4318 would fail silently later, so it fails now."""
    source = "configure_telemetry(endpoint='localhost:4318')"

    assert "give an http or https URL" in program(WORK + source).stderr
