"""The spans of loops, flows, scopes and iterations."""

from __future__ import annotations

from typing import Any

from loopguard._outcomes import StopReason, Verdict
from loopguard._run import Run
from loopguard._usage import Usage
from loopguard.telemetry import _constants as names
from loopguard.telemetry import _spans as spans
from loopguard.telemetry._propagation import links_to, traceparent

__all__ = ["IterationSpan", "RunSpan", "of_usage"]


class RunSpan:
    """The span of one run: opened and made current with it, ended with its stop reason."""

    __slots__ = ("_token", "span")

    def __init__(self, run: Run) -> None:
        is_flow = run.kind == "flow"
        operation = names.INVOKE_WORKFLOW if is_flow else names.INVOKE_AGENT
        attributes: dict[str, Any] = {
            names.OPERATION_NAME: operation,
            names.WORKFLOW_NAME if is_flow else names.AGENT_NAME: run.name,
            names.RUN_ID: run.id,
        }
        if run.max is not None and not is_flow:  # a flow has as many iterations as steps
            attributes[names.LOOP_MAX_ITERATIONS] = run.max
        self.span = spans.start_span(f"{operation} {run.name}", attributes, links=links_to(run.resumes))
        if run.recorder is not None:
            run.place = {**run.place, "trace": traceparent(self.span)}
        context = self.span.get_span_context()
        run.trace_id = format(context.trace_id, "032x") if context.is_valid else None
        self._token = spans.attach(self.span)

    def end(self, run: Run, stop_reason: StopReason | None, error: BaseException | None) -> None:
        """End it; an error only if the run raised."""
        spans.detach(self._token)
        if not self.span.is_recording():
            return
        attributes: dict[str, Any] = {}
        if run.kind != "scope":
            attributes[names.LOOP_ITERATIONS] = run.iteration
        if stop_reason is not None:
            attributes[names.LOOP_STOP_REASON] = str(stop_reason)
        if run.recorder is not None and run.recorder.run is run:
            attributes[names.JOURNAL_HEAD] = run.recorder.head
        attributes.update(of_usage(run.usage))
        if run.cost:
            attributes[names.CALL_COST] = float(run.cost)
            attributes[names.CALL_COST_CURRENCY] = "USD"
        if error is not None:
            spans.end_failed(self.span, error, attributes=attributes)
        else:
            spans.end_ok(self.span, attributes=attributes)


class IterationSpan:
    """The span of one iteration."""

    __slots__ = ("_token", "span")

    def __init__(self, run: Run) -> None:
        self.span = spans.start_span(
            f"{names.LOOP_ITERATION} {run.name}", {names.LOOP_ITERATION_NUMBER: run.iteration, names.RUN_ID: run.id}
        )
        self._token = spans.attach(self.span)

    def evaluated(self, by: str, verdict: Verdict) -> None:
        """A judge or an evaluator spoke."""
        label = {True: "pass", False: "fail", None: "undecided"}[verdict.passed]
        spans.add_evaluation(self.span, by, label, verdict.score, verdict.reason)

    def end(self, satisfied: bool | None, error: BaseException | None) -> None:
        """End it; an error only if the iteration raised."""
        spans.detach(self._token)
        attributes = {} if satisfied is None else {names.UNTIL_SATISFIED: satisfied}
        if error is not None:
            spans.end_failed(self.span, error, attributes=attributes)
        else:
            spans.end_ok(self.span, attributes=attributes)


def of_usage(usage: Usage) -> dict[str, Any]:
    """The tokens of a model call or of a whole run; None for what is unknown."""
    written = [n for n in (usage.cache_write_5m_tokens, usage.cache_write_1h_tokens) if n is not None]
    return {
        names.USAGE_INPUT_TOKENS: usage.input_tokens,
        names.USAGE_OUTPUT_TOKENS: usage.output_tokens,
        names.USAGE_CACHE_READ_INPUT_TOKENS: usage.cache_read_tokens,
        names.USAGE_CACHE_WRITE_INPUT_TOKENS: sum(written) if written else None,
        names.USAGE_REASONING_OUTPUT_TOKENS: usage.thinking_tokens,
    }
