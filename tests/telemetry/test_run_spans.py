"""The spans of flows, resumed runs, verdicts and made-up tools, and what a run adds up to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from loopguard import Budget, Guard, Retry, StopReason, Verdict, charge, loop, tool
from loopguard._run import Run
from loopguard._usage import Usage
from loopguard.telemetry._runs import IterationSpan, RunSpan, of_usage


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Callable[..., list[ReadableSpan]]:
    """The ended spans of a name, in the order that they started in."""

    def named(prefix: str = "") -> list[ReadableSpan]:
        ended = [span for span in exporter.get_finished_spans() if span.name.startswith(prefix)]
        return sorted(ended, key=lambda span: span.start_time or 0)

    return named


Spans = Callable[..., list[ReadableSpan]]


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    """What it says."""
    return dict(span.attributes or {})


def test_a_flow_is_a_workflow(spans: Spans) -> None:
    """Name, operation and workflow name; its steps are its iterations, below it."""
    flow = Run("refund", kind="flow", max=3, id="order-42")
    span = RunSpan(flow)
    flow.iteration = 1
    IterationSpan(flow).end(None, None)
    span.end(flow, StopReason.WAITING, None)
    (workflow,), (step,) = spans("invoke_workflow"), spans("loop_iteration")
    assert (workflow.name, workflow.status.status_code) == ("invoke_workflow refund", StatusCode.UNSET)
    assert attributes_of(workflow) == {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": "refund",
        "loopguard.run.id": "order-42",
        "loopguard.loop.iterations": 1,
        "loopguard.loop.stop_reason": "waiting",
    }
    assert step.name == "loop_iteration refund"
    assert step.parent is not None
    assert step.parent == workflow.context


def test_a_run_adds_up_the_tokens_of_its_model_calls() -> None:
    """All of them, by the conventions; what is unknown is left out, not 0."""
    usage = Usage(
        input_tokens=100,
        output_tokens=20,
        cache_read_tokens=30,
        cache_write_5m_tokens=4,
        cache_write_1h_tokens=5,
        thinking_tokens=6,
    )
    assert of_usage(usage) == {
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 30,
        "gen_ai.usage.cache_write.input_tokens": 9,
        "gen_ai.usage.reasoning.output_tokens": 6,
    }
    assert set(of_usage(Usage()).values()) == {None}


def test_a_resumed_run_links_to_the_trace_before(spans: Spans, tmp_path: Path) -> None:
    """So does a loop inside it that is taken up again; runs that begin have no link."""
    failures = ["first", "second"]

    @loop(max=2)
    def inner(n: int) -> int:
        if n == 1 and failures:
            raise OSError(failures.pop())
        return n + 1

    @loop(max=1, store=f"sqlite:///{tmp_path}/runs.db")
    def outer(n: int) -> int:
        return inner(n)

    with pytest.raises(OSError, match="second"):
        outer.run(0, run_id="order-42")
    with pytest.raises(OSError, match="first"):
        outer.resume("order-42")
    assert outer.resume("order-42").value == 2
    for name in ("outer", "inner"):
        runs = spans(f"invoke_agent {name}")
        assert len({run.context.trace_id for run in runs}) == 3
        assert [[link.context.span_id for link in run.links] for run in runs] == [
            [],
            [runs[0].context.span_id],
            [runs[1].context.span_id],
        ]


@pytest.mark.usefixtures("untraced")
def test_a_run_that_was_never_traced_is_resumed_without_a_link(tmp_path: Path) -> None:
    """Nothing is written down of a trace that there isn't."""
    failures = ["once"]

    @loop(max=1, store=f"sqlite:///{tmp_path}/runs.db")
    def step(n: int) -> int:
        if failures:
            raise OSError(failures.pop())
        return n + 1

    with pytest.raises(OSError, match="once"):
        step.run(0, run_id="a")
    assert step.resume("a").value == 1


def test_verdicts_are_events_of_their_iteration(spans: Spans) -> None:
    """Name, label, explanation, and the score where one was measured."""
    said = iter([Verdict(False, "too short", score=0.25), Verdict(None, "no idea"), Verdict(True)])

    def length(value: int) -> Verdict:
        return next(said)

    @loop(max=3, evaluate=[length])
    def step(n: int) -> int:
        return n + 1

    assert step.run(0).completed
    found = [[dict(event.attributes or {}) for event in span.events] for span in spans("loop_iteration")]
    name = {"gen_ai.evaluation.name": "length"}
    assert found == [
        [
            {
                **name,
                "gen_ai.evaluation.score.label": "fail",
                "gen_ai.evaluation.score.value": 0.25,
                "gen_ai.evaluation.explanation": "too short",
            }
        ],
        [{**name, "gen_ai.evaluation.score.label": "undecided", "gen_ai.evaluation.explanation": "no idea"}],
        [{**name, "gen_ai.evaluation.score.label": "pass"}],
    ]
    assert {event.name for span in spans("loop_iteration") for event in span.events} == {"gen_ai.evaluation.result"}


@pytest.mark.parametrize("inside", [True, False])
def test_a_tool_that_a_model_made_up_is_never_named(spans: Spans, inside: bool) -> None:
    """The refused call has its red span, whose name and attributes hold nothing of the model's."""
    guard = Guard()
    guard.tool(name="search")(lambda query: query)
    if inside:
        with guard.scope(), pytest.raises(ValueError, match="no tool"):
            guard.call("rm -rf /", {}, id="toolu_01")
    else:
        with pytest.raises(ValueError, match="no tool"):
            guard.call("rm -rf /", {}, id="toolu_01")
    (span,) = spans("execute_tool")
    assert span.name == "execute_tool _unknown"
    assert span.status.status_code is StatusCode.ERROR
    assert attributes_of(span) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "_unknown",
        "gen_ai.tool.call.id": "toolu_01",
        "error.type": "unknown_tool",
        "loopguard.guardrail.name": "Guard",
        "loopguard.verdict.type": "deny",
        "loopguard.verdict.reason": "unknown_tool",
    }


def test_arguments_that_do_not_fit_are_a_red_span_of_their_tool(spans: Spans) -> None:
    """The description is what the model was told."""
    guard = Guard()
    guard.tool(name="search")(lambda query: query)
    with guard.scope(), pytest.raises(ValueError, match="query") as caught:
        guard.call("search", {"words": 1})
    (span,) = spans("execute_tool search")
    assert span.status.description == str(caught.value)
    assert attributes_of(span)["error.type"] == "invalid_arguments"


def test_a_retried_call_is_one_span_with_its_attempts_and_their_cost(spans: Spans) -> None:
    """Each attempt that failed had charged something."""
    failures = [OSError(), OSError()]

    @tool(cost=2, idempotent=True)
    def fetch() -> str:
        if failures:
            charge(usd=0.5)
            raise failures.pop()
        return "page"

    with Guard(Retry(3, wait=0)).scope() as run:
        assert fetch() == "page"
        assert run.spent() == 3
    (span,) = spans("execute_tool")
    assert span.status.status_code is StatusCode.UNSET
    assert attributes_of(span)["loopguard.call.attempts"] == 3
    assert attributes_of(span)["loopguard.call.cost"] == 3.0


@pytest.mark.parametrize(("charged", "told"), [(0.5, False), (1, False), (1.5, True)])
def test_a_call_that_cost_more_than_declared_is_a_warning(spans: Spans, charged: float, told: bool) -> None:
    """Findable as an overrun; the call itself went well."""

    @tool(cost=1)
    def work() -> None:
        charge(usd=charged)

    with Guard(Budget(usd=10)).scope():
        work()
    (span,) = spans("execute_tool")
    assert span.status.status_code is StatusCode.UNSET
    found = {name: value for name, value in attributes_of(span).items() if "verdict" in name or "guardrail" in name}
    expected = {
        "loopguard.guardrail.name": "Budget",
        "loopguard.verdict.type": "warn",
        "loopguard.verdict.reason": "overrun",
    }
    assert found == (expected if told else {})
