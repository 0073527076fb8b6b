"""Traces across processes: inject on one side, extract on the other."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loopguard import Budget, Guard, MaxSteps, charge, loop, telemetry, tool
from loopguard.telemetry import _spans

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_trace_goes_on_in_another_process(exporter: InMemorySpanExporter) -> None:
    """A span below an extracted context is a child of the span that was injected."""
    carrier: dict[str, str] = {}
    sender = _spans.start_tool_span("send", {})
    token = _spans.attach(sender)
    telemetry.inject(carrier)
    _spans.detach(token)

    received = context.attach(telemetry.extract(carrier))
    _spans.end_ok(_spans.start_tool_span("receive", {}))
    context.detach(received)

    (span,) = exporter.get_finished_spans()
    assert set(carrier) == {"traceparent"}
    assert span.parent is not None
    assert span.parent.is_remote
    assert span.parent.span_id == sender.get_span_context().span_id


def test_a_run_goes_on_as_a_child_of_the_tool_that_sent_it(exporter: InMemorySpanExporter) -> None:
    """A loop under an extracted context, as a worker runs it, hangs below the sender's tool, in the same trace."""
    carrier: dict[str, str] = {}

    @tool
    def delegate() -> None:
        telemetry.inject(carrier)

    @loop(max=1)
    def worker(n: int) -> int:
        return n + 1

    with Guard().scope() as run:
        delegate()
    received = context.attach(telemetry.extract(carrier))
    result = worker.run(0)
    context.detach(received)

    ended = {span.name: span for span in exporter.get_finished_spans()}
    there, here = ended["execute_tool delegate"], ended["invoke_agent worker"]
    assert result.trace_id == run.trace_id
    assert there.context is not None
    assert here.parent is not None
    assert (here.parent.span_id, here.parent.is_remote) == (there.context.span_id, True)


def test_run_and_what_is_left_travel_as_baggage_on_request() -> None:
    """Its id, and each limited unit: what a worker must not spend more of."""
    quiet: dict[str, str] = {}
    told: dict[str, str] = {}
    with Guard(Budget(usd=2, tokens=1000), MaxSteps(5)).scope("outer"), Guard(Budget(usd=0.5)).scope("inner") as run:
        charge(usd=0.1, tokens=400)
        telemetry.inject(quiet)
        telemetry.inject(told, baggage=True)

    assert "baggage" not in quiet
    assert baggage.get_all(telemetry.extract(told, baggage=True)) == {
        "loopguard.run.id": run.id,
        "loopguard.budget.remaining.usd": "0.4",
        "loopguard.budget.remaining.tokens": "600",
        "loopguard.budget.remaining.steps": "5",
    }


def test_without_a_span_nothing_is_injected(untraced: None) -> None:
    """No span, no header."""
    carrier: dict[str, str] = {}
    telemetry.inject(carrier)

    assert carrier == {}


def test_baggage_travels_only_when_asked() -> None:
    """Baggage reaches third parties, so it stays at home by default, in both directions."""
    token = context.attach(baggage.set_baggage("user", "42"))
    quiet: dict[str, str] = {}
    open_: dict[str, str] = {}
    telemetry.inject(quiet)
    telemetry.inject(open_, baggage=True)
    context.detach(token)

    assert (quiet, open_) == ({}, {"baggage": "user=42"})
    assert baggage.get_all(telemetry.extract(open_)) == {}
    assert baggage.get_all(telemetry.extract(open_, baggage=True)) == {"user": "42"}


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT"])
def test_header_names_may_be_in_any_case(name: str) -> None:
    """HTTP libraries spell headers as they like."""
    span = trace.get_current_span(telemetry.extract({name: HEADER, "tracestate": "a=b"})).get_span_context()

    assert trace.format_trace_id(span.trace_id) == "0af7651916cd43dd8448eb211c80319c"
    assert span.trace_state.to_header() == "a=b"


@pytest.mark.parametrize(
    "value", ["", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", 7, None, "\ud800", "0" * 10**6]
)
def test_a_malformed_header_is_no_trace(value: Any) -> None:
    """What a stranger sends can't break the receiver."""
    assert trace.get_current_span(telemetry.extract({"traceparent": value})) is trace.INVALID_SPAN
