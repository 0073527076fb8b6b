"""The chat span of a metered call: there when nobody else draws one, and never in the way."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from loopguard import Budget, BudgetExceeded, Guard
from loopguard.metering import _calls, meter
from loopguard.telemetry import _spans
from loopguard.testing import MessagesServer, Reply
from tests.metering.conftest import BODY, PRICES, Way, create

USAGE = {
    "input_tokens": 20,
    "cache_read_input_tokens": 5,
    "cache_creation_input_tokens": 3,
    "output_tokens": 12,
    "output_tokens_details": {"thinking_tokens": 4},
}
SILENT = {"open_telemetry": False}
"""The SDK's own tracing is off."""


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where the spans of the test arrive when they end."""
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(_spans, "_tracer", provider.get_tracer("loopguard"))
    monkeypatch.setattr(_spans, "_recording", True)
    return exporter


def chats(exporter: InMemorySpanExporter) -> list[Any]:
    """The spans of model calls."""
    return [span for span in exporter.get_finished_spans() if span.attributes.get("gen_ai.operation.name") == "chat"]


def test_a_metered_call_has_a_chat_span(way: Way, exporter: InMemorySpanExporter) -> None:
    """One span a call, with tokens as the conventions count them, and its cost."""
    script = [Reply.text("x", usage=USAGE, fields={"model": "m-20250101"})]
    with MessagesServer(script) as server, Guard().scope() as run:
        way.call(server.url, client=SILENT)
    (span,) = chats(exporter)
    assert (span.name, span.kind, span.status.status_code) == ("chat m", SpanKind.CLIENT, StatusCode.UNSET)
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "anthropic",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m-20250101",
        "gen_ai.usage.input_tokens": 28,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.usage.cache_write.input_tokens": 3,
        "gen_ai.usage.reasoning.output_tokens": 4,
        "loopguard.call.cost": 0.00025275,
        "loopguard.call.cost.currency": "USD",
        "loopguard.run.id": run.id,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_it_stands_back_where_the_sdk_traces_itself(stream: bool, exporter: InMemorySpanExporter) -> None:
    """A second chat span would double the tokens of a trace; the SDK's own has all it needs."""
    provider, theirs = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(theirs))
    with MessagesServer([Reply.text("x", usage=USAGE)]) as server, Guard().scope() as run:
        options: dict[str, Any] = {"open_telemetry": {"tracer_provider": provider}}
        client = meter(anthropic.Anthropic(base_url=server.url, api_key="x", **options), prices=PRICES)
        with client:
            if stream:
                with client.messages.stream(**BODY) as streamed:
                    streamed.get_final_message()
            else:
                client.messages.create(**BODY)
    assert chats(exporter) == []
    (span,) = chats(theirs)
    assert (span.attributes["gen_ai.usage.input_tokens"], span.attributes["gen_ai.usage.output_tokens"]) == (28, 12)
    assert run.usage.output_tokens == 12


def test_a_refused_call_is_marked(exporter: InMemorySpanExporter) -> None:
    """Red in a trace, with the code and the reason."""
    with MessagesServer() as server, Guard(Budget(usd=0)).scope():
        client = meter(anthropic.Anthropic(base_url=server.url, api_key="x", open_telemetry=False), prices=PRICES)
        with client, pytest.raises(BudgetExceeded):
            client.messages.create(**BODY)
    (span,) = chats(exporter)
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "budget")
    assert "may cost" in span.status.description


def test_a_failure_is_marked(exporter: InMemorySpanExporter) -> None:
    """A broken connection ends the span with its error."""
    with MessagesServer([Reply.disconnect()]) as server, Guard().scope():
        client = meter(anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, open_telemetry=False))
        with client, pytest.raises(anthropic.APIConnectionError):
            client.messages.create(**BODY)
    (span,) = chats(exporter)
    assert (span.status.status_code, span.attributes["error.type"]) == (
        StatusCode.ERROR,
        "anthropic.APIConnectionError",
    )


def test_it_is_current_while_the_request_is_sent_and_not_longer(exporter: InMemorySpanExporter) -> None:
    """What the HTTP client draws belongs to it; what the reader of a stream does, doesn't."""
    current: list[Any] = []

    def look(request: Any, call_next: Any) -> Any:
        current.append(trace.get_current_span())
        return call_next(request)

    with MessagesServer([Reply.text("x", usage=USAGE)]) as server, Guard().scope():
        client = meter(anthropic.Anthropic(base_url=server.url, api_key="x", open_telemetry=False), prices=PRICES)
        with client:
            stream = client.with_middleware(look).messages.create(stream=True, **BODY)
            current.extend(trace.get_current_span() for _ in stream)
    (span,) = chats(exporter)
    assert current[0].get_span_context() == span.get_span_context()
    assert not any(other.get_span_context() == span.get_span_context() for other in current[1:])


@pytest.mark.parametrize("value", ["false", "0", " OFF "])
def test_it_can_be_switched_off(value: str, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """For applications that trace their models by other means."""
    monkeypatch.setenv("LOOPGUARD_CHAT_SPANS", value)
    _calls._wanted.cache_clear()
    try:
        with MessagesServer(["x"]) as server, Guard().scope():
            Way(create, False).call(server.url, client=SILENT)
    finally:
        _calls._wanted.cache_clear()
    assert chats(exporter) == []
