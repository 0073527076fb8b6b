"""The console tree: what a person sees of a trace."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from loopguard.telemetry._console import ConsoleTree, render_tree

MS = 1_000_000
NAMES = {
    "agent": "invoke_agent improve",
    "iteration": "loop_iteration improve",
    "search": "execute_tool search",
    "pay": "execute_tool pay",
}


def context(span_id: int, trace_id: int = 1, remote: bool = False) -> SpanContext:
    """The identity of a span."""
    return SpanContext(trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED))


def span(
    name: str,
    span_id: int,
    parent: int | None = None,
    ms: tuple[float, float] = (0, 1),
    attributes: Mapping[str, Any] | None = None,
    error: str | None = None,
    trace_id: int = 1,
) -> ReadableSpan:
    """A finished span that started and ended at the given milliseconds."""
    return ReadableSpan(
        name=name,
        context=context(span_id, trace_id),
        parent=None if parent is None else context(parent, trace_id),
        attributes=attributes,
        status=Status() if error is None else Status(StatusCode.ERROR, error),
        start_time=int(ms[0] * MS),
        end_time=int(ms[1] * MS),
    )


RUN = [
    span(NAMES["search"], 3, 2, (1, 13), {"loopguard.call.cost": 0.01, "loopguard.call.cost.currency": "USD"}),
    span(NAMES["pay"], 4, 2, (14, 15), {"loopguard.call.cost": 7, "loopguard.call.cost.currency": "credits"}),
    span(NAMES["iteration"], 2, 1, (0, 410), {"loopguard.loop.iteration": 1}),
    span(NAMES["search"], 6, 5, (420, 420.1), {"error.type": "max_steps"}, "20 of 20 steps are used"),
    span(NAMES["iteration"], 5, 1, (410, 1240), {"loopguard.loop.iteration": 2}),
    span(
        NAMES["agent"],
        1,
        None,
        (0, 125_000),
        {"loopguard.loop.iterations": 1, "loopguard.loop.stop_reason": "max_steps"},
    ),
]


def test_a_run_is_drawn_as_a_tree() -> None:
    """Names, numbers, durations, costs, the refusal with its reason, and why the loop stopped."""
    assert render_tree(RUN).splitlines() == [
        "invoke_agent improve · 2 min 05 s · 1 iteration · stopped: max_steps",
        "├─ loop_iteration improve #1 · 410 ms",
        "│  ├─ execute_tool search · 12 ms · $0.01",
        "│  └─ execute_tool pay · 1.0 ms · 7 credits",
        "└─ loop_iteration improve #2 · 830 ms",
        "   └─ ✗ execute_tool search · 0.1 ms · max_steps: 20 of 20 steps are used",
    ]


def test_a_run_can_be_drawn_in_ascii() -> None:
    """The same tree in seven bits."""
    assert render_tree(RUN, ascii=True).splitlines() == [
        "invoke_agent improve - 2 min 05 s - 1 iteration - stopped: max_steps",
        "|- loop_iteration improve #1 - 410 ms",
        "|  |- execute_tool search - 12 ms - $0.01",
        "|  `- execute_tool pay - 1.0 ms - 7 credits",
        "`- loop_iteration improve #2 - 830 ms",
        "   `- x execute_tool search - 0.1 ms - max_steps: 20 of 20 steps are used",
    ]


@pytest.mark.parametrize(
    ("kind", "description", "shown"),
    [
        ("max_steps", "all used", "max_steps: all used"),
        ("json.decoder.JSONDecodeError", "JSONDecodeError: bad", "JSONDecodeError: bad"),
        ("max_steps", "", "max_steps"),
        (None, "bad", "bad"),
        (None, "", "error"),
    ],
)
def test_an_error_says_what_is_known_of_it(kind: str | None, description: str, shown: str) -> None:
    """Kind and description, neither of them twice; red without either is still told from green."""
    attributes = {} if kind is None else {"error.type": kind}

    assert render_tree([span("a", 1, attributes=attributes, error=description)]) == f"✗ a · 1.0 ms · {shown}"


def test_a_long_description_is_cut() -> None:
    """A tree is for a glance; the span has the whole of it."""
    line = render_tree([span("a", 1, error="why " * 1000)])

    assert line == f"✗ a · 1.0 ms · {('why ' * 1000)[:117].rstrip()}..."


@pytest.mark.parametrize(
    ("attributes", "shown"),
    [
        ({"loopguard.call.attempts": 3}, "3 attempts"),
        ({"loopguard.approval.outcome": "granted"}, "granted"),
        ({"loopguard.verdict.type": "warn", "loopguard.verdict.reason": "overrun"}, "warning: overrun"),
        ({"loopguard.verdict.type": "allow"}, None),
    ],
)
def test_what_needs_a_look_is_shown(attributes: dict[str, Any], shown: str | None) -> None:
    """Attempts, how a wait ended, and warnings."""
    assert render_tree([span("a", 1, attributes=attributes)]) == " · ".join(filter(None, ["a", "1.0 ms", shown]))


def test_text_from_a_model_cannot_drive_the_terminal() -> None:
    """Control characters in names, reasons and attributes are escaped: one span stays one line."""
    hostile = "\x1b[2J\nfake line"
    text = render_tree([span(hostile, 1, error=hostile, attributes={"loopguard.loop.stop_reason": hostile})])

    assert "\x1b" not in text
    assert len(text.splitlines()) == 1


def test_a_deep_trace_is_drawn() -> None:
    """Agents may nest deeper than Python's stack."""
    spans = [span("a", number, number - 1 or None) for number in range(1, 1501)]

    assert len(render_tree(spans).splitlines()) == 1500


def test_spans_without_their_parent_are_roots() -> None:
    """What is left of a trace is drawn, whatever is missing, and no spans are no text."""
    assert render_tree([span("b", 2, 1), span("c", 3, 1)]).splitlines() == ["b · 1.0 ms", "c · 1.0 ms"]
    assert render_tree([]) == ""


def test_a_trace_is_written_once_its_root_has_ended() -> None:
    """Nothing before, everything at once then, in its own tree even if traces overlap."""
    stream = io.StringIO()
    console = ConsoleTree(stream)
    console.export([span("child", 2, 1), span("other child", 2, 1, trace_id=2)])
    assert stream.getvalue() == ""

    console.export([span("root", 1)])
    assert stream.getvalue() == "root · 1.0 ms\n└─ child · 1.0 ms\n"


def test_a_remote_parent_ends_a_trace_here() -> None:
    """A run that another process started is drawn when its part in this process is over."""
    stream = io.StringIO()
    here = ReadableSpan(name="here", context=context(2), parent=context(1, remote=True), start_time=0, end_time=MS)
    ConsoleTree(stream).export([here])

    assert stream.getvalue() == "here · 1.0 ms\n"


def test_a_trace_that_never_ends_is_written_in_parts() -> None:
    """Memory stays bounded: the oldest trace is written as far as it is known."""
    stream = io.StringIO()
    console = ConsoleTree(stream, max_spans=2)
    console.export([span("a", 2, 1), span("b", 3, 1), span("c", 4, 1), span("d", 5, 1)])
    assert stream.getvalue() == "(unfinished)\na · 1.0 ms\nb · 1.0 ms\nc · 1.0 ms\n"

    console.shutdown()
    assert stream.getvalue().endswith("(unfinished)\nd · 1.0 ms\n")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_a_stream_without_box_characters_gets_ascii(encoding: str) -> None:
    """An old terminal still gets a tree, and a name that it can't show is escaped."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    ConsoleTree(stream).export([span("雪", 2, 1), span("root", 1)])

    assert raw.getvalue().split() == [b"root", b"-", b"1.0", b"ms", b"`-", b"\\u96ea", b"-", b"1.0", b"ms"]


def test_a_closed_stream_reaches_nobody() -> None:
    """A console that is gone is a failed export, not an exception."""
    stream = io.StringIO()
    stream.close()

    assert ConsoleTree(stream).export([span("root", 1)]) is SpanExportResult.FAILURE


def test_it_works_in_a_provider(capsys: pytest.CaptureFixture[str]) -> None:
    """With a SimpleSpanProcessor, real spans appear on stderr as they end."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(ConsoleTree()))
    tracer = provider.get_tracer("test")
    now = time.time_ns()
    root = tracer.start_span("root", start_time=now)
    tracer.start_span("child", trace.set_span_in_context(root), start_time=now).end(now + MS)
    root.end(now + 2 * MS)

    assert capsys.readouterr().err == "root · 2.0 ms\n└─ child · 1.0 ms\n"
