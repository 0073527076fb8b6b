"""The spans of tool calls, runs and iterations: one for each, ended once, with what happened; nothing is altered."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, ParentBased, StaticSampler
from opentelemetry.trace import SpanKind, StatusCode

from loopguard import (
    ApproveTool,
    Budget,
    Guard,
    LoopHalted,
    LoopLimit,
    MaxSteps,
    MaxStepsExceeded,
    ToolCallRefused,
    WrapTool,
    charge,
    current_run,
    loop,
    tool,
)
from loopguard.telemetry import _spans
from tests.conftest import Colour

Spans = Callable[..., list[ReadableSpan]]


def passing(call: Any, proceed: Any) -> Any:
    """A hook that does nothing, but sends calls the long way."""
    return (yield from proceed(call))


@pytest.fixture(params=[(), (WrapTool(passing),)], ids=["straight", "hooked"])
def wraps(request: pytest.FixtureRequest) -> tuple[WrapTool, ...]:
    """No hook, and one: both ways of a call are traced alike."""
    return request.param


@pytest.fixture
def spans(exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture) -> Iterator[Spans]:
    """The ended spans of a name, in the order that they started in; all were ended once, and nothing was logged."""

    def named(prefix: str = "") -> list[ReadableSpan]:
        ended = exporter.get_finished_spans()
        assert len({span.context.span_id for span in ended}) == len(ended)
        return sorted((span for span in ended if span.name.startswith(prefix)), key=lambda span: span.start_time or 0)

    with caplog.at_level(logging.DEBUG, logger="opentelemetry"):
        yield named
    assert [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")] == []


def parent_id(span: ReadableSpan) -> int | None:
    """The span that it hangs below."""
    return None if span.parent is None else span.parent.span_id


def own_id(span: ReadableSpan) -> int:
    """Its id."""
    assert span.context is not None
    return span.context.span_id


# -- what a span says ------------------------------------------------------------------------------


def test_a_call_is_one_span_with_the_names_of_the_conventions(
    colour: Colour, wraps: tuple[WrapTool, ...], spans: Spans
) -> None:
    """Every attribute of TELEMETRY.md that a plain call has, and no other."""
    decorated = tool(name="search", cost=0.25)(colour.make(lambda query: query))
    with Guard(MaxSteps(4), *wraps).scope("box"):
        colour.call(decorated, "a")
    (span,) = spans("execute_tool")
    assert span.name == "execute_tool search"
    assert span.kind is SpanKind.INTERNAL
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    assert str(attributes.pop("gen_ai.tool.call.id")).startswith("call_")
    assert attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "search",
        "loopguard.step.index": 1,
        "loopguard.step.limit": 4,
        "loopguard.call.cost": 0.25,
        "loopguard.call.cost.currency": "USD",
    }


def test_the_models_own_call_id_is_on_the_span(wraps: tuple[WrapTool, ...], spans: Spans) -> None:
    """gen_ai.tool.call.id joins the span and the model's message."""
    guard = Guard(*wraps)
    guard.tool(name="search")(lambda query: query)
    with guard.scope():
        guard.call("search", {"query": "a"}, id="toolu_01")
    (span,) = spans("execute_tool")
    assert span.attributes["gen_ai.tool.call.id"] == "toolu_01"


def test_repeats_and_steps_are_counted_on_the_span(wraps: tuple[WrapTool, ...], spans: Spans) -> None:
    """The step of each call, and how often the same one was made before."""

    @tool
    def search(query: str) -> str:
        return query

    with Guard(*wraps).scope():
        for _ in range(3):
            search("same")
    found = [dict(span.attributes or {}) for span in spans("execute_tool")]
    assert [a["loopguard.step.index"] for a in found] == [1, 2, 3]
    assert [a.get("loopguard.call.repeat_count") for a in found] == [None, 1, 2]


@pytest.mark.parametrize(
    ("reported", "fail", "expected"), [(None, False, 2.0), (0.5, False, 0.5), (None, True, 0.0), (0.5, True, 0.5)]
)
def test_the_cost_on_the_span_is_what_was_settled(
    wraps: tuple[WrapTool, ...], spans: Spans, reported: float | None, fail: bool, expected: float
) -> None:
    """What was reported, else the estimate; a call that raised pays only what it had reported."""

    @tool(cost=2)
    def work() -> None:
        if reported is not None:
            charge(usd=reported)
        if fail:
            raise ValueError

    with Guard(*wraps).scope() as run:
        try:
            work()
        except ValueError:
            pass
        assert float(run.spent()) == expected
    (span,) = spans("execute_tool")
    assert span.attributes["loopguard.call.cost"] == expected


def test_a_cost_by_function_is_on_the_span(wraps: tuple[WrapTool, ...], spans: Spans) -> None:
    """It is known only call by call."""

    @tool(cost=lambda call: call.arguments["pages"] * 0.5)
    def read(pages: int) -> int:
        return pages

    with Guard(*wraps).scope():
        read(3)
    (span,) = spans("execute_tool")
    assert span.attributes["loopguard.call.cost"] == 1.5


# -- refusals --------------------------------------------------------------------------------------


def test_a_refused_call_is_a_red_span_that_says_why(colour: Colour, wraps: tuple[WrapTool, ...], spans: Spans) -> None:
    """ERROR, the code as error.type, the reason as description; it used no step and cost nothing."""
    decorated = tool(name="search", cost=1)(colour.make(lambda: 1))
    with Guard(MaxSteps(0), *wraps).scope(), pytest.raises(MaxStepsExceeded) as caught:
        colour.call(decorated)
    (span,) = spans("execute_tool")
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == caught.value.reason
    attributes = dict(span.attributes or {})
    assert attributes.pop("gen_ai.tool.call.id")
    assert attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "search",
        "loopguard.step.limit": 0,
        "error.type": "max_steps",
        "loopguard.guardrail.name": "MaxSteps",
        "loopguard.verdict.type": "deny",
        "loopguard.verdict.reason": "max_steps",
    }


def test_a_refusal_by_a_budget_shows_its_state(wraps: tuple[WrapTool, ...], spans: Spans) -> None:
    """Name, unit, limit, spent and remaining."""

    @tool(cost=0.75)
    def work(n: int) -> int:
        return n

    with Guard(Budget(usd=1, name="team"), *wraps).scope():
        work(1)
        with pytest.raises(ToolCallRefused):
            work(2)
    attributes = spans("execute_tool")[1].attributes
    assert {k: v for k, v in attributes.items() if ".budget." in k} == {
        "loopguard.budget.name": "team",
        "loopguard.budget.unit": "usd",
        "loopguard.budget.limit": 1.0,
        "loopguard.budget.spent": 0.75,
        "loopguard.budget.remaining": 0.25,
    }


def test_a_denied_call_is_red_with_the_approvers_reason(colour: Colour, spans: Spans) -> None:
    """The code is approval_denied."""
    decorated = tool(name="refund")(colour.make(lambda: 1))
    with Guard(ApproveTool(lambda call: (False, "use staging"))).scope(), pytest.raises(ToolCallRefused):
        colour.call(decorated)
    (span,) = spans("execute_tool")
    assert span.status.status_code is StatusCode.ERROR
    assert "use staging" in (span.status.description or "")
    assert span.attributes["error.type"] == "approval_denied"


def test_under_an_approval_the_span_still_tells_step_and_cost(colour: Colour, spans: Spans) -> None:
    """Though the tool ran with a copy of the arguments, in a call of its own."""

    def body() -> None:
        charge(usd=3)

    with Guard(MaxSteps(5), ApproveTool(lambda call: True)).scope():
        colour.call(tool(name="refund", cost=4)(colour.make(body)))
    (span,) = spans("execute_tool")
    assert span.attributes["loopguard.step.index"] == 1
    assert span.attributes["loopguard.call.cost"] == 3.0
    assert span.status.status_code is StatusCode.UNSET


def test_a_refusal_that_a_hook_answers_is_no_error_but_still_told(spans: Spans) -> None:
    """The caller got a result: no red mark; the decision of the guardrail stays findable."""

    def hook(call: Any, proceed: Any) -> Any:
        try:
            return (yield from proceed(call))
        except MaxStepsExceeded:
            return "from the record"

    @tool
    def search() -> str:
        return "live"

    with Guard(WrapTool(hook), MaxSteps(0)).scope() as run:
        assert search() == "from the record"
        assert (run.steps, run.refusals) == (0, 1)
    (span,) = spans("execute_tool")
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes["loopguard.verdict.type"] == "deny"
    assert span.attributes["loopguard.verdict.reason"] == "max_steps"
    assert "error.type" not in span.attributes


def test_a_call_that_a_hook_got_through_at_last_shows_no_refusal(spans: Spans) -> None:
    """Only how it ended is on its span."""

    class Once:
        left = 1

        def bind(self, run: Any, tool: Any) -> Any:
            return self

        def check(self, call: Any) -> ToolCallRefused | None:
            return ToolCallRefused("rate_limited", "Once", call.name, "not yet") if self.left else None

    once = Once()

    def hook(call: Any, proceed: Any) -> Any:
        try:
            return (yield from proceed(call))
        except ToolCallRefused:
            once.left = 0
            return (yield from proceed(call))

    with Guard(WrapTool(hook), once).scope() as run:
        assert tool(lambda: "live")() == "live"
        assert (run.steps, run.refusals) == (1, 1)
    (span,) = spans("execute_tool")
    assert "loopguard.verdict.type" not in span.attributes
    assert span.attributes["loopguard.step.index"] == 1


def test_observe_mode_marks_what_it_would_have_refused(wraps: tuple[WrapTool, ...], spans: Spans) -> None:
    """A warning, not an error: the call went on."""

    @tool
    def search() -> str:
        return "live"

    with Guard(MaxSteps(0), *wraps, mode="observe").scope():
        assert search() == "live"
    (span,) = spans("execute_tool")
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes["loopguard.verdict.type"] == "warn"
    assert span.attributes["loopguard.verdict.reason"] == "max_steps"


def test_a_refusal_of_a_nested_tool_is_a_failure_of_the_outer_one(wraps: tuple[WrapTool, ...], spans: Spans) -> None:
    """The outer body ran: its span is an error, not a verdict about itself."""

    @tool
    def inner() -> None:
        """Never runs."""

    @tool
    def outer() -> None:
        inner()

    with Guard(MaxSteps(1), *wraps).scope(), pytest.raises(MaxStepsExceeded):
        outer()
    first, second = spans("execute_tool")
    assert (first.name, second.name) == ("execute_tool outer", "execute_tool inner")
    assert first.attributes["error.type"] == "loopguard.exceptions.MaxStepsExceeded"
    assert "loopguard.verdict.type" not in first.attributes
    assert second.attributes["error.type"] == "max_steps"
    assert parent_id(second) == own_id(first)


# -- status ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("no such order"), KeyboardInterrupt(), SystemExit(1)])
def test_an_exception_makes_the_span_red(wraps: tuple[WrapTool, ...], spans: Spans, error: BaseException) -> None:
    """error.type is the class, the description its text; also for what OpenTelemetry's own context manager ignores."""

    @tool
    def work() -> None:
        raise error

    with pytest.raises(type(error)), Guard(*wraps).scope():
        work()
    (span,) = spans("execute_tool")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == type(error).__name__
    assert "loopguard.verdict.type" not in span.attributes


def test_a_cancelled_call_ends_its_span(wraps: tuple[WrapTool, ...], spans: Spans) -> None:
    """Once, as an error of type CancelledError."""
    started = asyncio.Event()

    @tool
    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.ensure_future(work())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Guard(*wraps).scope():
        asyncio.run(main())
    (span,) = spans("execute_tool")
    assert span.attributes["error.type"] == "asyncio.exceptions.CancelledError"


def test_iteration_and_run_stay_unset_when_the_loop_stops_gracefully(spans: Spans) -> None:
    """A refusal that ends the loop is its stop reason, not its error."""

    @tool
    def work(n: int) -> int:
        return n + 1

    @loop(max=5, guard=Guard(MaxSteps(1)))
    def step(n: int) -> int:
        return work(n)

    assert step.run(0).stop_reason == "max_steps"
    (agent,) = spans("invoke_agent")
    iterations = spans("loop_iteration")
    assert agent.name == "invoke_agent step"
    assert [span.name for span in iterations] == ["loop_iteration step"] * 2
    assert [span.attributes["loopguard.loop.iteration"] for span in iterations] == [1, 2]
    assert {span.status.status_code for span in (agent, *iterations)} == {StatusCode.UNSET}
    assert agent.attributes["loopguard.loop.stop_reason"] == "max_steps"
    assert agent.attributes["loopguard.loop.max_iterations"] == 5
    assert agent.attributes["gen_ai.agent.name"] == "step"
    assert agent.attributes["gen_ai.operation.name"] == "invoke_agent"


def test_a_refusal_that_passes_a_loop_on_its_way_up_makes_it_no_error(spans: Spans) -> None:
    """The outer loop's steps are used up: the inner loop was stopped, too."""

    @tool
    def work(n: int) -> int:
        return n + 1

    @loop(max=5)
    def inner(n: int) -> int:
        return work(n)

    @loop(max=5, guard=Guard(MaxSteps(3)))
    def outer(n: int) -> int:
        return inner(n)

    assert outer.run(0).stop_reason == "max_steps"
    for span in spans("invoke_agent"):
        assert span.status.status_code is StatusCode.UNSET
        assert span.attributes["loopguard.loop.stop_reason"] == "max_steps"


def test_iteration_and_run_are_errors_when_the_loop_raises(spans: Spans) -> None:
    """With the class that it raised."""

    @loop(max=5)
    def step(n: int) -> int:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        step(0)
    for span in (*spans("invoke_agent"), *spans("loop_iteration")):
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes["error.type"] == "ValueError"


def test_an_interrupt_is_recorded_in_the_stop_reason(spans: Spans) -> None:
    """KeyboardInterrupt ends every span on its way."""

    @tool
    def work() -> None:
        raise KeyboardInterrupt

    @loop(max=5)
    def step(n: int) -> int:
        work()
        return n

    with pytest.raises(KeyboardInterrupt):
        step(0)
    assert [span.name for span in spans()] == ["invoke_agent step", "loop_iteration step", "execute_tool work"]
    assert spans("invoke_agent")[0].attributes["loopguard.loop.stop_reason"] == "cancelled"


def test_the_spans_of_a_loop_form_one_tree(spans: Spans) -> None:
    """run ▸ iteration ▸ tool ▸ nested run, and one trace, which the result names."""

    @tool
    def work(n: int) -> int:
        return n + 1

    @loop(max=1)
    def inner(n: int) -> int:
        return work(n)

    @tool
    def delegate(n: int) -> int:
        return inner(n)

    @loop(max=1)
    def outer(n: int) -> int:
        return delegate(n)

    result = outer.run(0)
    names = [span.name for span in spans()]
    assert names == [
        "invoke_agent outer",
        "loop_iteration outer",
        "execute_tool delegate",
        "invoke_agent inner",
        "loop_iteration inner",
        "execute_tool work",
    ]
    chain = spans()
    assert [parent_id(span) for span in chain] == [None, *map(own_id, chain[:-1])]
    assert {format(span.context.trace_id, "032x") for span in chain} == {result.trace_id}


# -- who is whose child ----------------------------------------------------------------------------


def test_spans_of_the_body_are_children_of_the_tool(
    colour: Colour, wraps: tuple[WrapTool, ...], spans: Spans, provider: TracerProvider
) -> None:
    """The tool's span is current in the body, and no longer after the call."""
    tracer = provider.get_tracer("app")

    def body() -> None:
        tracer.start_span("in the body").end()

    with Guard(*wraps).scope():
        colour.call(tool(colour.make(body)))
        tracer.start_span("after the call").end()
    (span,), (inside,), (after,) = spans("execute_tool"), spans("in the body"), spans("after")
    assert parent_id(inside) == own_id(span)
    assert parent_id(after) == parent_id(span)


def test_the_tools_span_is_current_in_hooks_and_what_they_make_current_stays_so(
    colour: Colour, spans: Spans, provider: TracerProvider
) -> None:
    """A hook's own span lies between the tool's and those of the body."""
    tracer = provider.get_tracer("app")

    def hook(call: Any, proceed: Any) -> Any:
        with tracer.start_as_current_span("in the hook"):
            return (yield from proceed(call))

    def approver(call: Any) -> bool:
        tracer.start_span("in the approver").end()
        return True

    def body() -> None:
        tracer.start_span("in the body").end()

    with Guard(WrapTool(hook), ApproveTool(approver)).scope():
        colour.call(tool(colour.make(body)))
    (span,), (hooked,) = spans("execute_tool"), spans("in the hook")
    assert parent_id(hooked) == own_id(span)
    assert {parent_id(inner) for inner in (*spans("in the approver"), *spans("in the body"))} == {own_id(hooked)}


def test_a_consumers_spans_are_not_the_generators_children(
    wraps: tuple[WrapTool, ...], spans: Spans, provider: TracerProvider
) -> None:
    """The tool's span is current while its body runs, never across a yield; spans held open over one nest (C44)."""
    tracer = provider.get_tracer("app")

    @tool
    def items() -> Iterator[int]:
        with tracer.start_as_current_span("held"):
            tracer.start_span("body").end()
            yield 1
            tracer.start_span("body").end()
            yield 2
        tracer.start_span("outer body").end()

    @tool
    async def async_items() -> AsyncIterator[int]:
        for item in items.__wrapped__():
            yield item

    async def consume() -> None:
        async for _ in async_items():
            tracer.start_span("consumer").end()

    with Guard(*wraps).scope():
        for _ in items():
            tracer.start_span("consumer").end()
        asyncio.run(consume())
    (box,) = spans("invoke_agent")
    first, second = spans("execute_tool")
    held = spans("held")
    assert {parent_id(span) for span in spans("consumer")} == {own_id(box)}
    assert [parent_id(span) for span in held] == [own_id(first), own_id(second)]
    assert [parent_id(span) for span in spans("body")] == [own_id(held[0])] * 2 + [own_id(held[1])] * 2
    assert [parent_id(span) for span in spans("outer body")] == [own_id(first), own_id(second)]


def test_a_tool_in_a_thread_hangs_below_the_span_it_was_bound_under(spans: Spans) -> None:
    """run.bind carries the current span along."""

    @tool
    def work() -> None:
        """Nothing."""

    with Guard().scope() as run:
        thread = threading.Thread(target=run.bind(work))
        thread.start()
        thread.join()
    assert parent_id(spans("execute_tool")[0]) == own_id(spans("invoke_agent")[0])


def test_a_sync_tool_with_a_timeout_keeps_context_and_span(spans: Spans, provider: TracerProvider) -> None:
    """In its thread it sees the run, and its spans are the tool's children (C44)."""
    tracer = provider.get_tracer("app")
    seen: list[Any] = []

    @tool(timeout=30)
    def work() -> None:
        seen.append(current_run())
        tracer.start_span("in the body").end()

    with Guard().scope() as run:
        work()
    assert seen == [run]
    assert parent_id(spans("in the body")[0]) == own_id(spans("execute_tool")[0])


# -- generators end their span once ----------------------------------------------------------------


def _exhausted(generator: Any) -> None:
    list(generator)


def _broken_out_of(generator: Any) -> None:
    for _ in generator:
        break
    generator.close()


def _closed_twice(generator: Any) -> None:
    next(generator)
    generator.close()
    generator.close()


def _abandoned(generator: Any) -> None:
    next(generator)


def _closed_by_another_thread(generator: Any) -> None:
    next(generator)
    _in_a_thread(generator.close)


def _in_a_thread(fn: Callable[[], object]) -> None:
    """In a context of its own, too."""
    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()


def _each_item_in_another_thread(generator: Any) -> None:
    next(generator)
    for _ in range(3):
        _in_a_thread(lambda: next(generator, None))


def _dropped_by_another_thread(generator: Any) -> None:
    next(generator)
    held = [generator]
    del generator
    _in_a_thread(held.clear)


def _raised_into(generator: Any) -> None:
    next(generator)
    with pytest.raises(KeyError):
        generator.throw(KeyError("thrown"))


def _never_iterated(generator: Any) -> None:
    generator.close()


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (_exhausted, None),
        (_broken_out_of, None),
        (_closed_twice, None),
        (_abandoned, None),
        (_closed_by_another_thread, None),
        (_each_item_in_another_thread, None),
        (_dropped_by_another_thread, None),
        (_raised_into, "KeyError"),
        (_never_iterated, None),
    ],
)
def test_a_generator_has_at_most_one_span_ended_once(
    wraps: tuple[WrapTool, ...], spans: Spans, use: Callable[[Any], None], error: str | None
) -> None:
    """However it is used and left; leaving early is no error (C44)."""

    @tool
    def items() -> Iterator[int]:
        yield from range(3)

    with Guard(*wraps).scope() as run:
        use(items())
        gc.collect()
        assert run.steps == (0 if use is _never_iterated else 1)
    found = spans("execute_tool")
    assert len(found) == run.steps
    for span in found:
        assert span.attributes.get("error.type") == error
        assert span.status.status_code is (StatusCode.UNSET if error is None else StatusCode.ERROR)


@pytest.mark.parametrize(
    "use",
    [
        "exhausted",
        "broken out of",
        "another task",
        "a task an item",
        "dropped",
        "loop closed",
        "cancelled",
        "thrown into",
        "never iterated",
    ],
)
def test_an_async_generator_has_at_most_one_span_ended_once(
    wraps: tuple[WrapTool, ...], spans: Spans, use: str
) -> None:
    """The same, from any task, and on a loop that is gone (C44)."""

    @tool
    async def items() -> AsyncIterator[int]:
        for n in range(3):
            await asyncio.sleep(0)
            yield n

    async def main() -> Any:
        generator = items()
        if use == "exhausted":
            assert [n async for n in generator] == [0, 1, 2]
            return None
        if use == "never iterated":
            await generator.aclose()
            return None
        if use == "a task an item":
            assert [await asyncio.create_task(anext(generator, None)) for _ in range(4)] == [0, 1, 2, None]
            return None
        assert await generator.__anext__() == 0
        if use == "thrown into":
            with pytest.raises(KeyError):
                await generator.athrow(KeyError("thrown"))
        elif use == "broken out of":
            await generator.aclose()
        elif use == "another task":
            await asyncio.create_task(generator.aclose())
        elif use == "cancelled":
            task = asyncio.ensure_future(generator.__anext__())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif use == "loop closed":
            return generator
        return None

    with Guard(*wraps).scope() as run:
        loop_ = asyncio.new_event_loop()
        left = loop_.run_until_complete(main())
        if use == "dropped":
            loop_.run_until_complete(asyncio.sleep(0))  # the loop closes what was dropped
        loop_.close()
        del left
        gc.collect()
        assert run.steps == (0 if use == "never iterated" else 1)
    expected = {"cancelled": "asyncio.exceptions.CancelledError", "thrown into": "KeyError"}.get(use)
    assert [span.attributes.get("error.type") for span in spans("execute_tool")] == [expected] * run.steps


def test_a_generator_that_raises_has_a_red_span(wraps: tuple[WrapTool, ...], spans: Spans) -> None:
    """After its items."""

    @tool
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("second")

    with Guard(*wraps).scope(), pytest.raises(ValueError, match="second"):
        list(items())
    (span,) = spans("execute_tool")
    assert span.attributes["error.type"] == "ValueError"


# -- how many --------------------------------------------------------------------------------------


def test_a_thousand_calls_from_threads_and_tasks_are_a_thousand_spans(spans: Spans) -> None:
    """20 threads × 50 calls, then 3 parallel async calls: 1003 counted, 1003 spans (C02)."""

    @tool(repeatable=True)
    def work(n: int) -> int:
        return n

    @tool
    async def async_work(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async def main() -> None:
        await asyncio.gather(*map(async_work, range(3)))

    with Guard().scope() as run:
        threads = [
            threading.Thread(target=run.bind(lambda n=n: [work(50 * n + i) for i in range(50)])) for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asyncio.run(main())
        assert run.steps == 1003
    found = spans("execute_tool")
    assert len(found) == 1003
    assert sorted(span.attributes["loopguard.step.index"] for span in found) == list(range(1, 1004))
    assert len({span.attributes["gen_ai.tool.call.id"] for span in found}) == 1003


def test_a_tool_wrapped_twice_has_one_span_a_call(wraps: tuple[WrapTool, ...], spans: Spans) -> None:
    """A sync tool in an async loop, wrapped twice by the same guard: three calls, three spans, the third red (C04)."""
    guard = Guard(MaxSteps(2), *wraps)
    bodies: list[int] = []

    def work(n: int) -> int:
        bodies.append(n)
        return n

    twice = guard.wrap(guard.wrap(work))

    @loop(max=3, guard=guard)
    async def step(n: int) -> int:
        return twice(n) + 1

    result = asyncio.run(step.run(0))
    assert (result.stop_reason, bodies) == ("max_steps", [0, 1])
    found = spans("execute_tool")
    assert [span.status.status_code for span in found] == [StatusCode.UNSET, StatusCode.UNSET, StatusCode.ERROR]


def test_arguments_that_do_not_bind_leave_no_span_unended(wraps: tuple[WrapTool, ...], spans: Spans) -> None:
    """Whether there is one or none, nothing stays open or current."""

    @tool
    def search(query: str) -> str:
        return query

    with Guard(*wraps).scope(), pytest.raises(TypeError):
        search()
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert all(span.status.status_code is StatusCode.ERROR for span in spans("execute_tool"))


def test_a_halt_leaves_no_span_unended(spans: Spans) -> None:
    """LoopHalted goes through everything; run, iteration and tool spans are ended."""

    @tool
    def search(n: int) -> None:
        """Never runs."""

    @loop(max=2, guard=Guard(MaxSteps(0), max_refusals=3))
    def step(n: int) -> int:
        while True:
            try:
                search(n)
            except Exception:
                n += 1

    assert step.run(0).stop_reason == "halted"
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert len(spans("execute_tool")) == 3
    assert issubclass(LoopHalted, BaseException)
    assert spans("invoke_agent")[0].attributes["loopguard.loop.stop_reason"] == "halted"


# -- content ---------------------------------------------------------------------------------------


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard switch for content is on."""
    monkeypatch.setattr(_spans, "capture_content", lambda: True)


def test_arguments_and_results_are_in_no_span_by_default(
    colour: Colour, wraps: tuple[WrapTool, ...], spans: Spans
) -> None:
    """They may be private."""
    with Guard(*wraps).scope():
        colour.call(tool(colour.make(lambda query: f"found {query}")), "secret words")
    for span in spans():
        assert "secret words" not in str(dict(span.attributes or {}))


@pytest.mark.usefixtures("capturing")
def test_content_is_captured_where_the_standard_switch_is_on(
    colour: Colour, wraps: tuple[WrapTool, ...], spans: Spans
) -> None:
    """Arguments by name and the result as JSON, secrets redacted; a generator's items are no result."""
    with Guard(*wraps).scope():
        got = colour.call(tool(colour.make(lambda query, api_key: {"found": query})), "words", api_key="k" * 30)
    assert got == {"found": "words"}
    (span,) = spans("execute_tool")
    assert '"query": "words"' in span.attributes["gen_ai.tool.call.arguments"]
    assert "k" * 30 not in span.attributes["gen_ai.tool.call.arguments"]
    if "generator" in colour.name:
        assert "gen_ai.tool.call.result" not in span.attributes
    else:
        assert span.attributes["gen_ai.tool.call.result"] == '{"found": "words"}'


@pytest.mark.usefixtures("capturing")
def test_what_a_generator_returns_at_its_end_is_its_result_on_the_span(
    wraps: tuple[WrapTool, ...], spans: Spans
) -> None:
    """Its items are not."""

    @tool
    def search() -> Iterator[str]:
        yield "item"
        return "summary"

    with Guard(*wraps).scope():
        assert list(search()) == ["item"]
    (span,) = spans("execute_tool")
    assert span.attributes["gen_ai.tool.call.result"] == "summary"


@pytest.mark.usefixtures("capturing")
def test_the_result_on_the_span_is_the_one_that_the_caller_got(spans: Spans) -> None:
    """After the hooks."""

    def hook(call: Any, proceed: Any) -> Any:
        result = yield from proceed(call)
        return f"{result}, changed"

    with Guard(WrapTool(hook)).scope():
        assert tool(lambda: "raw")() == "raw, changed"
    (span,) = spans("execute_tool")
    assert span.attributes["gen_ai.tool.call.result"] == "raw, changed"


# -- with and without a provider -------------------------------------------------------------------


@pytest.mark.usefixtures("untraced")
def test_without_a_provider_nothing_is_traced_and_all_works(colour: Colour, wraps: tuple[WrapTool, ...]) -> None:
    """No span, no trace id, the same results and refusals."""
    decorated = tool(colour.make(lambda n: n))
    with Guard(MaxSteps(1), *wraps).scope() as run:
        assert colour.call(decorated, 1) == 1
        with pytest.raises(MaxStepsExceeded):
            colour.call(decorated, 2)
        assert trace.get_current_span() is trace.INVALID_SPAN
    assert run.trace_id is None


def test_what_is_sampled_out_stays_out_with_all_its_children(
    colour: Colour, wraps: tuple[WrapTool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A span that isn't recorded is current all the same: the spans of the body start no trace of their own."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(_spans, "_tracer", provider.get_tracer("loopguard"))
    monkeypatch.setattr(_spans, "_recording", True)
    tracer = provider.get_tracer("app")
    seen: list[Any] = []

    def body() -> None:
        seen.append(trace.get_current_span().get_span_context())
        with tracer.start_as_current_span("in the body") as span:
            seen.append(span.get_span_context())

    with Guard(*wraps).scope() as run:
        colour.call(tool(colour.make(body)))
    assert exporter.get_finished_spans() == ()
    assert {format(context.trace_id, "032x") for context in seen} == {run.trace_id}
    assert seen[0].is_valid


# -- telemetry never alters ------------------------------------------------------------------------


class Broken(SpanProcessor):
    """A span processor that raises whatever it is told."""

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        raise RuntimeError("on_start")

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("on_end")


class BrokenOnEnd(Broken):
    """A span processor that raises at the end only."""

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        """Nothing."""


class BrokenExporter(SpanExporter):
    """An exporter that raises."""

    def export(self, spans: Any) -> SpanExportResult:
        raise RuntimeError("export")


class BrokenSampler(StaticSampler):
    """A sampler that raises."""

    def __init__(self) -> None:
        super().__init__(Decision.RECORD_AND_SAMPLE)

    def should_sample(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("sample")


@pytest.mark.parametrize(
    "make",
    [
        lambda: _with_processor(Broken()),
        lambda: _with_processor(BrokenOnEnd()),
        lambda: _with_processor(SimpleSpanProcessor(BrokenExporter())),
        lambda: TracerProvider(sampler=BrokenSampler(), shutdown_on_exit=False),
    ],
    ids=["on_start", "on_end", "export", "sample"],
)
def test_telemetry_that_raises_changes_no_result_and_no_exception(
    colour: Colour, wraps: tuple[WrapTool, ...], monkeypatch: pytest.MonkeyPatch, make: Callable[[], TracerProvider]
) -> None:
    """Results, exceptions, refusals, counts and the loop's outcome are what they are untraced."""
    provider = make()
    monkeypatch.setattr(_spans, "_tracer", provider.get_tracer("loopguard"))
    monkeypatch.setattr(_spans, "_recording", True)
    error = ValueError("mine")

    def body(n: int) -> int:
        if n == 2:
            raise error
        return n

    decorated = tool(cost=1)(colour.make(body))
    with Guard(MaxSteps(2), LoopLimit(3), *wraps).scope() as run:
        assert colour.call(decorated, 1) == 1
        with pytest.raises(ValueError, match="mine") as caught:
            colour.call(decorated, 2)
        assert caught.value is error
        with pytest.raises(MaxStepsExceeded):
            colour.call(decorated, 3)
        assert (run.steps, run.refusals, run.spent(), run.reserved()) == (2, 1, 1, 0)
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert current_run() is None

    @loop(max=2)
    def step(n: int) -> int:
        return colour.call(decorated, n + 10)

    assert step.run(0).value == 20


def _with_processor(processor: SpanProcessor) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider
