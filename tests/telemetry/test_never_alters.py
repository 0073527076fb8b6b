"""Telemetry observes and never alters: whatever of it fails, a program comes to the same results and exceptions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import ProxyTracer

from loopguard import ApproveTool, Budget, Guard, MaxSteps, Retry, Verdict, WrapTool, charge, current_run, loop, tool
from loopguard._config import settings
from loopguard.telemetry import _questions, _spans


class Hostile:
    """An argument that answers nothing."""

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    __str__ = __repr__

    @property
    def __class__(self) -> type:  # type: ignore[override]  # it lies to isinstance
        raise RuntimeError("class")


class Raises(SpanProcessor, SpanExporter, Sampler):
    """Part of a telemetry set-up that raises in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where

    def _at(self, where: str) -> None:
        if where == self.where:
            raise RuntimeError(where)

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        self._at("on_start")

    def on_end(self, span: ReadableSpan) -> None:
        self._at("on_end")

    def export(self, spans: Any) -> SpanExportResult:
        self._at("export")
        return SpanExportResult.SUCCESS

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        self._at("sample")
        return SamplingResult(Decision.RECORD_AND_SAMPLE, kwargs.get("attributes") or args[4])

    def get_description(self) -> str:
        return "raises"


def provider_of(where: str) -> TracerProvider:
    """A set-up that fails there; one that leaves everything out for "off"."""
    part = Raises(where)
    sampler: Sampler = ParentBased(ALWAYS_OFF) if where == "off" else part
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(part)
    provider.add_span_processor(SimpleSpanProcessor(part))
    return provider


def refuse_to_redact(name: str, value: Any) -> Any:
    """A redactor of the user's that fails."""
    raise RuntimeError("redact")


@contextlib.contextmanager
def traced(where: str | None, redactor: Any) -> Iterator[None]:
    """Spans go to a set-up that fails; nowhere for None."""
    tracer = provider_of(where).get_tracer("loopguard") if where is not None else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(_spans, "_recording", tracer is not None))
        if tracer is not None:
            stack.enter_context(mock.patch.object(_spans, "_tracer", tracer))
        else:
            stack.enter_context(mock.patch.object(_spans, "_probe", return_value=ProxyTracer("loopguard")))
        stack.enter_context(mock.patch.object(_spans, "capture_content", return_value=True))
        stack.enter_context(mock.patch.object(_questions, "_AT_ONCE", 0.0))
        stack.enter_context(mock.patch.object(settings, "redact", redactor))
        yield


ERRORS = (ValueError("mine"), KeyError("\ud800"), StopIteration("done"), LookupError())
VALUES: dict[str, Any] = {  # under names that hypothesis can print
    "number": 1,
    "surrogate": "\ud800",
    "huge": 10**400,
    "nan": float("nan"),
    "bytes": b"\xff",
    "hostile": Hostile(),
    "secret": {"password": "x" * 9000},
    "nested": [Hostile()],
}
Step = tuple[str, str, str]
"""Colour, what the body does, and the name of the argument."""


def play(script: list[Step], hooked: bool) -> list[Any]:
    """Everything that a caller can see of calls of every colour, in a loop with every kind of guardrail."""
    seen: list[Any] = []

    def body(what: str, value: Any) -> Any:
        if what == "raise":
            raise ERRORS[len(seen) % len(ERRORS)]
        if what == "charge":
            charge(usd=1.5, tokens=3)
        return value

    @tool(cost=0.5, idempotent=True, repeatable=True)
    def sync(what: str, value: Any) -> Any:
        return body(what, value)

    @tool(cost=0.5, repeatable=True)
    async def asynchronous(what: str, value: Any) -> Any:
        await asyncio.sleep(0)
        return body(what, value)

    @tool(cost=0.5, repeatable=True)
    def generator(what: str, value: Any) -> Iterator[Any]:
        yield value
        yield body(what, value)

    async def into(ended: list[Any], what: str, value: Any) -> None:
        try:
            ended.append((await asynchronous(what, value), None))
        except Exception as exc:
            ended.append((None, exc))

    def one(colour: str, what: str, value: Any) -> Any:
        if colour == "async":
            ended: list[Any] = []  # not through the task: asyncio looks into what comes of it, whatever that is
            asyncio.run(into(ended, what, value))
            result, error = ended[0]
            if error is not None:
                raise error
            return result
        return list(generator(what, value)) if colour == "generator" else sync(what, value)

    def passing(call: Any, proceed: Any) -> Any:
        return (yield from proceed(call))

    def approver(call: Any) -> Any:
        return call.arguments["what"] != "deny"

    hooks = [WrapTool(passing), ApproveTool(approver), Retry(1, wait=0)] if hooked else []

    def verdict(value: Any) -> Verdict:
        return Verdict(len(value) % 2 == 0, "odd", score=0.5)

    @loop(
        max=len(script) + 1,
        until=lambda state: not state,
        evaluate=[verdict],
        on_reject="continue",
        max_retries=len(script),
        guard=Guard(MaxSteps(6), Budget(usd=4), *hooks),
    )
    def agent(state: list[Step]) -> list[Step]:
        try:
            colour, what, name = state[0]
            result = one(colour, what, VALUES[name])
            given = result == [VALUES[name]] * 2 if colour == "generator" else result is VALUES[name]
            seen.append(("returned", given))
        except Exception as exc:
            seen.append((type(exc), getattr(exc, "code", None), exc in ERRORS or str(exc)))
        return state[1:]

    result = agent.run(script)
    run = current_run()
    seen.append((result.stop_reason, result.iterations, result.cost, result.completed, run))
    seen.append([verdict.passed for iteration in result.history for verdict in iteration.verdicts])
    seen.append(trace.get_current_span())
    return seen


SCRIPTS = st.lists(
    st.tuples(
        st.sampled_from(["sync", "async", "generator"]),
        st.sampled_from(["return", "raise", "charge", "deny"]),
        st.sampled_from(sorted(VALUES)),
    ),
    min_size=1,
    max_size=5,
)


@given(
    script=SCRIPTS,
    hooked=st.booleans(),
    where=st.sampled_from(["nowhere", "on_start", "on_end", "export", "sample", "off"]),
    redactor=st.sampled_from([None, refuse_to_redact]),
)
@pytest.mark.filterwarnings("ignore::loopguard.LoopGuardWarning")
def test_what_fails_in_telemetry_changes_nothing(script: list[Step], hooked: bool, where: str, redactor: Any) -> None:
    """Processors, exporters, samplers, attribute values and redactors that raise, over calls of every kind."""
    with traced(None, None):
        plain = play(script, hooked)
    with traced(where, redactor):
        assert play(script, hooked) == plain
