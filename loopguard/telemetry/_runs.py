"""The spans of loops, scopes and iterations."""

from __future__ import annotations

from typing import Any

from loopguard._outcomes import StopReason, Verdict
from loopguard._run import Run
from loopguard.telemetry import _constants as names
from loopguard.telemetry import _spans as spans

__all__ = ["IterationSpan", "RunSpan"]


class RunSpan:
    """The span of one run: opened and made current with it, ended with its stop reason."""

    __slots__ = ("_token", "span")

    def __init__(self, run: Run) -> None:
        attributes: dict[str, Any] = {
            names.OPERATION_NAME: names.INVOKE_AGENT,
            names.AGENT_NAME: run.name,
            names.RUN_ID: run.id,
        }
        if run.max is not None:
            attributes[names.LOOP_MAX_ITERATIONS] = run.max
        policies = [guard.policy_hash for guard in run.guards if guard.policy_hash is not None]
        if policies:
            attributes[names.POLICY_HASH] = ", ".join(policies)
        self.span = spans.start_span(f"{names.INVOKE_AGENT} {run.name}", attributes)
        context = self.span.get_span_context()
        run.trace_id = format(context.trace_id, "032x") if context.is_valid else None
        self._token = spans.attach(self.span)

    def end(self, run: Run, stop_reason: StopReason | None, error: BaseException | None) -> None:
        """End it; an error only if the run raised."""
        spans.detach(self._token)
        if not self.span.is_recording():
            return
        attributes: dict[str, Any] = {}
        if run.kind == "loop":
            attributes[names.LOOP_ITERATIONS] = run.iteration
        if stop_reason is not None:
            attributes[names.LOOP_STOP_REASON] = str(stop_reason)
        if run.recorder is not None and run.recorder.run is run:
            attributes[names.JOURNAL_HEAD] = run.recorder.head
        usage = run.usage
        if usage.input_tokens is not None:
            attributes[names.USAGE_INPUT_TOKENS] = usage.input_tokens
        if usage.output_tokens is not None:
            attributes[names.USAGE_OUTPUT_TOKENS] = usage.output_tokens
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
        spans.add_evaluation(self.span, by, label, explanation=verdict.reason)

    def end(self, satisfied: bool | None, error: BaseException | None) -> None:
        """End it; an error only if the iteration raised."""
        spans.detach(self._token)
        attributes = {} if satisfied is None else {names.UNTIL_SATISFIED: satisfied}
        if error is not None:
            spans.end_failed(self.span, error, attributes=attributes)
        else:
            spans.end_ok(self.span, attributes=attributes)
