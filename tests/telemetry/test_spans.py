"""Spans: their names, attributes and ends, in the face of hostile values and from any thread."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import Span, SpanKind, StatusCode

from loopguard._outcomes import StopReason
from loopguard.exceptions import ApprovalDenied, MaxStepsExceeded, ToolCallRefused
from loopguard.telemetry import _spans

SECRET = "sk-ant-api03-" + "Zx9" * 12
REFUSAL = MaxStepsExceeded("max_steps", "MaxSteps", "search", "search was refused: 20 of 20 steps are used", 20, 20)


class Hostile:
    """An object that raises whatever is done to it."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __str__(self) -> str:
        raise RuntimeError("no str")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no eq")

    __hash__ = None  # type: ignore[assignment]  # unhashable on purpose


class Pretender:
    """An object that claims to be a str."""

    __class__ = property(lambda _: str)


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    """The one span that has ended."""
    (span,) = exporter.get_finished_spans()
    return span


def nested(depth: int) -> list[Any]:
    """Lists in lists, deeper than Python's stack."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# Names and ends


def test_a_tool_span_has_the_conventions_name_and_its_attributes(exporter: InMemorySpanExporter) -> None:
    """`execute_tool {tool}`, internal, with the given start, end and attributes."""
    span = _spans.start_tool_span("search", {"gen_ai.tool.name": "search", "loopguard.step.index": 3}, 1_000)
    _spans.end_ok(span, 5_000, {"loopguard.call.cost": Decimal("0.01")})

    done = only(exporter)
    assert (done.name, done.kind, done.start_time, done.end_time) == (
        "execute_tool search",
        SpanKind.INTERNAL,
        1_000,
        5_000,
    )
    assert done.attributes == {"gen_ai.tool.name": "search", "loopguard.step.index": 3, "loopguard.call.cost": 0.01}
    assert done.status.status_code is StatusCode.UNSET


def test_a_refused_call_is_an_error_that_says_why(exporter: InMemorySpanExporter) -> None:
    """The code is the error type, the reason the description, and the guardrail is named."""
    _spans.end_refused(_spans.start_tool_span("search", {}), REFUSAL, attributes={"loopguard.step.limit": 20})

    done = only(exporter)
    assert done.status.status_code is StatusCode.ERROR
    assert done.status.description == "search was refused: 20 of 20 steps are used"
    assert done.attributes == {
        "error.type": "max_steps",
        "loopguard.guardrail.name": "MaxSteps",
        "loopguard.verdict.type": "deny",
        "loopguard.verdict.reason": "max_steps",
        "loopguard.step.limit": 20,
    }


def test_a_denial_without_a_reason_is_described_by_its_sentence(exporter: InMemorySpanExporter) -> None:
    """An approver that gives no reason still leaves a span that says what happened."""
    _spans.end_refused(_spans.start_tool_span("pay", {}), ApprovalDenied("approval_denied", "ApproveTool", "pay"))

    assert (only(exporter).status.description or "").startswith("pay was not approved")


@pytest.mark.parametrize(
    ("exc", "kind"),
    [
        (ValueError("wrong"), "ValueError"),
        (asyncio.CancelledError(), "asyncio.exceptions.CancelledError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (json.JSONDecodeError("bad", "{", 0), "json.decoder.JSONDecodeError"),
    ],
)
def test_a_failure_is_named_by_its_class(exporter: InMemorySpanExporter, exc: BaseException, kind: str) -> None:
    """The qualified class is the error type, for exceptions that aren't an Exception too."""
    _spans.end_failed(_spans.start_tool_span("search", {}), exc)

    done = only(exporter)
    assert done.status.status_code is StatusCode.ERROR
    assert done.attributes == {"error.type": kind}


def test_descriptions_hide_secrets(exporter: InMemorySpanExporter) -> None:
    """A key in an error's or a refusal's text doesn't leave the process."""
    _spans.end_failed(_spans.start_tool_span("search", {}), ValueError(f"bad key {SECRET}"))
    _spans.end_refused(_spans.start_tool_span("search", {}), ToolCallRefused("budget", "Budget", "a", f"no {SECRET}"))

    assert not [span for span in exporter.get_finished_spans() if SECRET in (span.status.description or "")]


def test_an_exception_without_words_is_still_recorded(exporter: InMemorySpanExporter) -> None:
    """A __str__ that raises costs the description, not the span."""

    class Speechless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no str")

    _spans.end_failed(_spans.start_tool_span("search", {}), Speechless())

    assert only(exporter).status.status_code is StatusCode.ERROR


def test_ending_twice_is_silent(exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture) -> None:
    """The first end holds; a finalizer that comes second changes and logs nothing."""
    span = _spans.start_tool_span("search", {})
    _spans.end_ok(span)
    _spans.end_failed(span, ValueError("late"))
    _spans.end_refused(span, REFUSAL)
    _spans.end_ok(span, attributes={"late": 1})

    assert only(exporter).status.status_code is StatusCode.UNSET
    assert caplog.records == []


def test_kind_and_links_reach_the_span(exporter: InMemorySpanExporter) -> None:
    """`start_span` serves the spans that aren't a tool's."""
    first = _spans.start_span("chat m", {}, SpanKind.CLIENT)
    _spans.end_ok(_spans.start_span("invoke_agent a", {}, links=[trace.Link(first.get_span_context())]))

    done = only(exporter)
    assert [link.context for link in done.links] == [first.get_span_context()]


def test_a_verdict_becomes_an_event_of_its_iteration(exporter: InMemorySpanExporter) -> None:
    """`gen_ai.evaluation.result` with what is known, without what isn't, and without secrets."""
    span = _spans.start_span("loop_iteration improve", {})
    _spans.add_evaluation(span, "quality", "pass", Decimal("0.9"), f"good, {SECRET}")
    _spans.add_evaluation(span, "until_llm", "undecided")
    _spans.end_ok(span)

    scored, bare = only(exporter).events
    assert scored.name == bare.name == "gen_ai.evaluation.result"
    assert scored.attributes is not None
    assert scored.attributes["gen_ai.evaluation.score.value"] == 0.9
    assert SECRET not in str(scored.attributes["gen_ai.evaluation.explanation"])
    assert bare.attributes == {
        "gen_ai.evaluation.name": "until_llm",
        "gen_ai.evaluation.score.label": "undecided",
    }


def test_a_chat_span_of_the_application_is_seen(exporter: InMemorySpanExporter) -> None:
    """A second chat span would double its tokens, so the first is noticed while it is current."""
    assert not _spans.chat_is_traced()
    span = _spans.start_span("chat m", {"gen_ai.operation.name": "chat"})
    token = _spans.attach(span)
    assert _spans.chat_is_traced()
    _spans.detach(token)
    assert not _spans.chat_is_traced()


# Nothing is set


def test_without_a_provider_nothing_is_attached(untraced: None) -> None:
    """No provider: an invalid span, no context change, and ends that do nothing."""
    span = _spans.start_tool_span("search", {"a": Hostile()})

    assert not _spans.provider_is_set()
    assert _spans.attach(span) is None
    _spans.detach(None)
    _spans.end_ok(span)
    _spans.end_failed(span, ValueError())
    _spans.end_refused(span, REFUSAL)
    _spans.add_evaluation(span, "a", "pass")
    assert not span.is_recording()


def test_a_provider_set_later_is_found(program: Any) -> None:
    """Whoever sets a provider after loopguard was imported gets spans from then on, in loopguard's scope."""
    source = """
from opentelemetry import trace
from loopguard.telemetry import _spans
assert not _spans.provider_is_set()
assert not _spans.start_tool_span("early", {}).is_recording()
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
span = _spans.start_tool_span("late", {})
assert span.is_recording() and _spans.provider_is_set()
print(span.instrumentation_scope.name, span.instrumentation_scope.schema_url)
"""
    done = program(source)
    assert (done.stdout.strip(), done.stderr) == ("loopguard https://opentelemetry.io/schemas/gen-ai/1.42.0", "")


def test_a_disabled_sdk_counts_as_no_provider(program: Any) -> None:
    """OTEL_SDK_DISABLED costs no more than having no provider."""
    source = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
from loopguard.telemetry import _spans
print(_spans.provider_is_set())
"""
    assert program(source, OTEL_SDK_DISABLED="true").stdout.strip() == "False"
    assert program(source).stdout.strip() == "True"


def test_importing_the_spans_loads_no_sdk(program: Any) -> None:
    """The SDK is for those who configure it."""
    source = "import sys, loopguard.telemetry._metrics; print('opentelemetry.sdk' in sys.modules)"
    assert program(source).stdout.strip() == "False"


# Contexts


def test_children_nest_below_an_attached_span(exporter: InMemorySpanExporter) -> None:
    """Attached, a span is the parent of what starts; detached, it no longer is."""
    outer = _spans.start_tool_span("outer", {})
    token = _spans.attach(outer)
    _spans.end_ok(_spans.start_tool_span("inner", {}))
    _spans.detach(token)
    _spans.end_ok(_spans.start_tool_span("after", {}))

    inner, after = exporter.get_finished_spans()
    assert inner.parent == outer.get_span_context()
    assert after.parent is None


def test_a_span_that_was_sampled_out_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children stay in its trace, and so stay out of the sample with it."""
    tracer = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("loopguard")
    monkeypatch.setattr(_spans, "_tracer", tracer)
    monkeypatch.setattr(_spans, "_recording", True)

    outer = _spans.start_tool_span("outer", {})
    token = _spans.attach(outer)
    inner = _spans.start_tool_span("inner", {})
    _spans.detach(token)

    assert not outer.is_recording()
    assert token is not None
    assert inner.get_span_context().trace_id == outer.get_span_context().trace_id


def test_detaching_restores_even_what_a_body_left_attached(exporter: InMemorySpanExporter) -> None:
    """A body that attaches and forgets to detach doesn't leave the tool's span current."""
    token = _spans.attach(_spans.start_tool_span("search", {}))
    context.attach(context.set_value("leaked", True))
    _spans.detach(token)

    assert trace.get_current_span() is trace.INVALID_SPAN
    assert context.get_value("leaked") is None


@pytest.mark.parametrize("where", ["thread", "context", "twice"])
def test_detaching_elsewhere_is_silent(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """In another thread or context, or a second time, detaching does nothing and logs nothing."""
    token = _spans.attach(_spans.start_tool_span("search", {}))
    if where == "thread":
        thread = threading.Thread(target=_spans.detach, args=(token,))
        thread.start()
        thread.join()
    elif where == "context":
        contextvars.Context().run(_spans.detach, token)
    _spans.detach(token)
    _spans.detach(token)

    assert trace.get_current_span() is trace.INVALID_SPAN
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_a_generator_may_be_closed_by_another_task(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    """A span attached across a yield and detached by whoever closes it leaves no error behind."""

    async def items() -> AsyncIterator[int]:
        span = _spans.start_tool_span("items", {})
        token = _spans.attach(span)
        try:
            yield 1
        finally:
            _spans.detach(token)
            _spans.end_ok(span)

    async def main() -> None:
        generator = items()
        await asyncio.create_task(anext(generator))  # type: ignore[arg-type]  # anext gives an awaitable that is a coroutine
        await asyncio.create_task(generator.aclose())  # type: ignore[attr-defined]  # an AsyncIterator by its annotation only

    asyncio.run(main())

    assert only(exporter).name == "execute_tool items"
    assert caplog.records == []


def test_a_runtime_context_of_the_users_own_is_served(program: Any) -> None:
    """With OTEL_PYTHON_CONTEXT, tokens are what that context says they are."""
    source = """
from opentelemetry import context, trace
from opentelemetry.context import context as base
class Stack(base._RuntimeContext):
    def __init__(self): self.stack = [base.Context()]
    def attach(self, value): self.stack.append(value); return len(self.stack)
    def get_current(self): return self.stack[-1]
    def detach(self, token): del self.stack[token - 1:]
context._RUNTIME_CONTEXT = Stack()
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
from loopguard.telemetry import _spans
token = _spans.attach(_spans.start_tool_span("a", {}))
assert trace.get_current_span().is_recording()
_spans.detach(token)
print(trace.get_current_span().is_recording())
"""
    done = program(source)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


# Hostile values and processors


HOSTILE = {
    "over_63_bits": 2**63,
    "under_63_bits": -(2**200),
    "over_4300_digits": 10**5000,
    "lone_surrogate": "\ud800 alone",
    "nul": "\x00",
    "ten_megabytes": "x" * 10_000_000,
    "over_4_kib_of_umlauts": "ä" * 4097,
    "bytes_that_are_no_text": b"\xff" * 5000,
    "bytearray": bytearray(b"abc"),
    "decimal_too_large": Decimal("1E+400"),
    "decimal_snan": Decimal("sNaN"),
    "decimal_infinity": Decimal("Infinity"),
    "nan": float("nan"),
    "object": object(),
    "raises": Hostile(),
    "pretends_to_be_str": Pretender(),
    "list_with_one_that_raises": [Hostile(), 1],
    "mixed_list": ["a", "\ud800", 2**70, None],
    "long_list": list(range(1000)),
    "dict_with_one_that_raises": {"a": Hostile()},
    "dict_of_tuples": {("a", "tuple"): 1},
    "set": {1, 2},
    "deep": nested(5000),
    "function": nested,
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_value_is_too_hostile_for_an_attribute(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    """Whatever stands in an attribute, the span ends, can be encoded, stays small and nothing is logged."""
    with caplog.at_level(logging.INFO):
        span = _spans.start_tool_span("search", {"at.start": value, "sane": 1})
        _spans.end_ok(span, attributes={"at.end": value})
        encoded = encode_spans(exporter.get_finished_spans()).SerializeToString()

    assert (only(exporter).attributes or {})["sane"] == 1
    assert set(only(exporter).attributes or {}) == {"sane", "at.start", "at.end"}
    assert len(encoded) < 10_000
    assert caplog.records == []


def test_a_hostile_name_is_made_harmless(exporter: InMemorySpanExporter) -> None:
    """A tool name that a model made up may hold anything, at any length."""
    _spans.end_ok(_spans.start_tool_span("\ud800" + "x" * 100_000, {}))

    name = only(exporter).name
    assert name.startswith("execute_tool �xxx")
    assert len(name.encode()) <= 4096
    assert encode_spans(exporter.get_finished_spans()).SerializeToString()


def test_values_keep_what_can_be_kept() -> None:
    """Exact numbers stay numbers, enums become their text, nothing becomes a missing attribute."""
    made = _spans.sanitise(
        {
            "none": None,
            "cost": Decimal("0.01"),
            "exact": Decimal("0.1000000000000000000001"),
            "big": 2**63,
            "edge": 2**63 - 1,
            "stop": StopReason.MAX_STEPS,
            "flag": True,
            "bytes": b"abc",
            "list": ["a", 2**63],
            "dict": {"api_key": SECRET, "n": 1},
        }
    )

    assert SECRET not in made.pop("dict")
    assert made == {
        "cost": 0.01,
        "exact": "0.1000000000000000000001",
        "big": "9223372036854775808",
        "edge": 2**63 - 1,
        "stop": "max_steps",
        "flag": True,
        "bytes": "abc",
        "list": ["a", "9223372036854775808"],
    }
    assert type(made["stop"]) is str


def test_a_long_text_is_cut_on_a_character_and_says_so() -> None:
    """At most 4 KiB of UTF-8, no half characters, and the original size at the end."""
    cut = _spans.sanitise({"a": "€" * 5000})["a"]

    assert cut.endswith("… [cut from 5,000]")
    assert 4090 <= len(cut.encode()) <= 4096
    assert set(cut.removesuffix("… [cut from 5,000]")) == {"€"}
    assert _spans.sanitise({"a": "x" * 4096})["a"] == "x" * 4096


class Broken(SpanProcessor):
    """A span processor that raises wherever it is called."""

    def on_start(self, span: Span, parent_context: context.Context | None = None) -> None:
        raise RuntimeError("on_start")

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("on_end")


def test_a_broken_processor_reaches_nobody(provider: TracerProvider, caplog: pytest.LogCaptureFixture) -> None:
    """Exceptions of the user's own telemetry end here, at the start and at the end of a span."""
    span = _spans.start_tool_span("search", {})
    provider.add_span_processor(Broken())
    _spans.end_ok(span)

    assert _spans.start_tool_span("search", {}) is trace.INVALID_SPAN
    assert not span.is_recording()
    assert caplog.records == []


# Content


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test set the switch, which is read once a process."""
    _spans.capture_content.cache_clear()
    yield monkeypatch
    _spans.capture_content.cache_clear()


@pytest.mark.parametrize(
    ("value", "captured", "warnings"),
    [
        (None, False, 0),
        ("", False, 0),
        ("NO_CONTENT", False, 0),
        ("EVENT_ONLY", False, 0),
        ("span_only", True, 0),
        ("SPAN_AND_EVENT", True, 0),
        ("true", False, 1),
    ],
)
def test_content_is_captured_only_on_the_standard_switch(
    mode: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str | None, captured: bool, warnings: int
) -> None:
    """Off unless the variable says spans; a word that it doesn't know is off, with one warning."""
    name = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
    mode.delenv(name, raising=False)
    if value is not None:
        mode.setenv(name, value)

    assert [_spans.capture_content(), _spans.capture_content()] == [captured, captured]
    assert len(caplog.records) == warnings


def test_content_is_json_with_secrets_hidden() -> None:
    """Arguments become a JSON object, a text stays itself, and keys are masked in both."""
    arguments = json.loads(_spans.content({"query": "hüte", "api_key": "hunter2", "n": 1}))
    assert (arguments["query"], arguments["n"]) == ("hüte", 1)
    assert "hunter2" not in arguments["api_key"]
    assert _spans.content("plain") == "plain"
    assert SECRET not in _spans.content(f"key {SECRET}")


def test_content_hides_before_it_cuts() -> None:
    """A key that straddles the cut is hidden, not halved."""
    made = _spans.content("x " * 2030 + SECRET + " y" * 3000)

    assert SECRET[:12] not in made
    assert "[cut from " in made


def test_content_hides_what_objects_hold() -> None:
    """The text of an object that JSON doesn't know is searched for keys too."""

    class Client:
        def __repr__(self) -> str:
            return f"Client({SECRET})"

    assert SECRET not in _spans.content(Client())
    assert SECRET not in _spans.content({"client": Client()})
    assert SECRET not in _spans.content({("a", "b"): Client()})


def test_content_never_raises() -> None:
    """Cycles, depth and objects that raise come out as some text."""
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (cycle, nested(sys.getrecursionlimit() * 5), Hostile(), {"a": Hostile()}, "\ud800", b"\xff", None):
        assert isinstance(_spans.content(value), str)
        _spans.content(value).encode()
