"""What leaves the process can be encoded by every exporter, is short, and holds no secret."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loopguard import (
    Approval,
    ApproveTool,
    Budget,
    Guard,
    MaxSteps,
    Retry,
    ToolCallRefused,
    Verdict,
    charge,
    loop,
    tool,
)
from loopguard.telemetry import _questions, _spans
from tests.conftest import Colour

SECRET = "sk-ant-api03-" + "s3cr3t" * 8
LONG = "ä" * 20_000
LONE = "half \ud83d"
HUGE = 10**5000


class Strict:
    """Complains of everything that an exporter could stumble over or should never see."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.problems: list[str] = []

    def check(self) -> list[ReadableSpan]:
        """The spans, all of them in order."""
        found = list(self.spans.get_finished_spans())
        for span in found:
            self.text(span.name, "the name")
            self.text(span.status.description or "", f"{span.name}: description")
            for attributes in (span.attributes, *(event.attributes for event in span.events)):
                self.attributes(span.name, attributes or {})
        assert self.problems == []
        encoded = encode_spans(found).SerializeToString()
        assert SECRET.encode() not in encoded
        return found

    def attributes(self, where: str, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            for item in value if type(value) is tuple else (value,):
                if type(item) is str:
                    self.text(item, f"{where}: {name}")
                elif type(item) is int:
                    if not -(2**63) <= item < 2**63:
                        self.problems.append(f"{where}: {name} has more than 63 bits")
                elif type(item) is not bool and type(item) is not float:
                    self.problems.append(f"{where}: {name} is a {type(item).__name__}")

    def text(self, text: str, where: str) -> None:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            self.problems.append(f"{where} has a lone surrogate")
            return
        if size > 4096:
            self.problems.append(f"{where} has {size} bytes")
        if SECRET in text:
            self.problems.append(f"{where} holds a secret")


@pytest.fixture
def strict(provider: TracerProvider, monkeypatch: pytest.MonkeyPatch) -> Strict:
    """Everything is captured that can be switched on."""
    monkeypatch.setattr(_spans, "capture_content", lambda: True)
    monkeypatch.setattr(_questions, "_AT_ONCE", 0.0)
    monkeypatch.setattr(_questions, "_capture_actor", lambda: True)
    exporter = Strict()
    provider.add_span_processor(SimpleSpanProcessor(exporter.spans))
    return exporter


@pytest.mark.filterwarnings("ignore::loopguard.LoopGuardWarning")
@pytest.mark.parametrize(
    "value",
    [SECRET, LONG, LONE, HUGE, Decimal("0.1"), b"\xff", {"password": SECRET, LONE: LONG}],
    ids=["secret", "long", "surrogate", "huge", "decimal", "bytes", "mixed"],
)
def test_every_span_is_fit_for_every_exporter(
    colour: Colour, strict: Strict, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever stands in arguments, results, names, reasons, errors, verdicts, amounts and answers."""
    told = f"Bearer {SECRET} {LONE} {LONG}"

    def approver(call: Any) -> Approval:
        if call.arguments["what"] == "deny":
            return Approval.deny(told, by=f"{LONE} {LONG}")
        return Approval.approve(by=f"{LONE} {LONG}")

    def body(what: str, value: Any) -> Any:
        charge(usd=Decimal("0.1"))
        if what == "raise":
            raise ValueError(told)
        return value

    work = tool(name=f"work {LONE} {LONG}", cost={"usd": Decimal("0.3")}, repeatable=True)(colour.make(body))
    guard = Guard(MaxSteps(9), Budget(usd=Decimal("0.4"), name=f"team {LONE} {LONG}"), ApproveTool(approver), Retry(1))

    def judge(state: Any) -> Verdict:
        return Verdict(False, told, score=Decimal("0.1"))  # type: ignore[arg-type]  # a user's mistake

    @loop(name=f"agent {LONE} {LONG}", max=5, evaluate=[judge], on_reject="continue", max_retries=9, guard=guard)
    def agent(left: list[str]) -> list[str]:
        if not left:
            raise ValueError(told)
        try:
            colour.call(work, left[0], value)
        except (ToolCallRefused, ValueError):
            pass
        with pytest.raises(ValueError, match="no tool"):
            guard.call(f"{SECRET} {LONG}", {"value": value}, id=f"{LONE} {LONG}")
        return left[1:]

    with caplog.at_level(logging.WARNING, logger="opentelemetry"), pytest.raises(ValueError, match="Bearer"):
        agent(["return", "deny", "raise", "return"])
    found = strict.check()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")] == []
    assert {span.name.split(" ", 1)[0] for span in found} == {
        "approve_tool",
        "execute_tool",
        "invoke_agent",
        "loop_iteration",
    }
    assert {(span.attributes or {}).get("loopguard.verdict.reason") for span in found} >= {
        "budget",
        "approval_denied",
        "unknown_tool",
    }


def test_a_strict_exporter_would_find_each_of_them() -> None:
    """The check itself bites."""
    strict = Strict()
    strict.attributes("x", {"a": Decimal(1), "b": 2**63, "c": LONE, "d": LONG, "e": (SECRET,), "f": [1], "g": "fine"})
    assert strict.problems == [
        "x: a is a Decimal",
        "x: b has more than 63 bits",
        "x: c has a lone surrogate",
        "x: d has 40000 bytes",
        "x: e holds a secret",
        "x: f is a list",
    ]
