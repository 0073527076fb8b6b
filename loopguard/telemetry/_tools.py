"""The span of a tool call: opened after the decision with its true start, its attributes set at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry.trace import Span, get_current_span

from loopguard._admission import Admission
from loopguard._amounts import decimal
from loopguard._call import ToolCall
from loopguard.exceptions import ToolCallRefused
from loopguard.telemetry import _constants as names
from loopguard.telemetry import _spans as spans

__all__ = ["TOOL_SPANS", "refused_unmade"]


class ToolSpans:
    """What an admission knows of telemetry; see `_admission.Tracer`."""

    attach = staticmethod(spans.attach)
    detach = staticmethod(spans.detach)
    current = staticmethod(get_current_span)

    def open(self, plan: Admission, call: ToolCall, start_ns: int) -> Span:
        """The span of this call."""
        if plan.spans is None:
            plan.spans = self._prepare(plan)
        name, unknown, admitted = plan.spans
        if plan.proceed is None and call.step:  # the decision has been made; else `close` tells
            attributes = admitted.copy()
            attributes[names.STEP_INDEX] = call.step
        else:
            attributes = unknown.copy()
        attributes[names.TOOL_CALL_ID] = call.id
        if plan.proceed is None and call.repeats:
            attributes[names.CALL_REPEAT_COUNT] = call.repeats
        if spans.capture_content():
            attributes[names.TOOL_CALL_ARGUMENTS] = spans.content(call.arguments_or_raw())
        if call.provider_id is not None:  # somebody else's text
            attributes = spans.sanitise(attributes)
        return spans.start_clean_span(name, attributes, start_ns)

    def _prepare(self, plan: Admission) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The name, and what is the same for every call under this plan: before and after it is admitted."""
        fixed: dict[str, Any] = {names.OPERATION_NAME: names.EXECUTE_TOOL, names.TOOL_NAME: plan.name}
        steps = [cap.n for run in plan.chain for cap in run.caps if cap.unit == "steps" and not cap.partial]
        if steps:
            fixed[names.STEP_LIMIT] = min(steps)
        fixed = spans.sanitise(fixed)
        name = spans.clean_name(f"{names.EXECUTE_TOOL} {plan.name}")
        return name, fixed, {**fixed, **self._cost(plan.tool.cost)}

    @staticmethod
    def _counted(call: ToolCall) -> dict[str, Any]:
        counted: dict[str, Any] = {}
        if call.step:
            counted[names.STEP_INDEX] = call.step
        if call.repeats:
            counted[names.CALL_REPEAT_COUNT] = call.repeats
        return counted

    @staticmethod
    def _cost(amounts: Iterable[tuple[str, int]]) -> dict[str, Any]:
        return {
            name: value
            for unit, exact in amounts
            if unit == "usd"
            for name, value in ((names.CALL_COST, float(decimal(exact))), (names.CALL_COST_CURRENCY, "USD"))
        }

    def close(
        self, span: Span, plan: Admission, call: ToolCall, error: BaseException | None, result: Any = None
    ) -> None:
        """End the span as the call ended."""
        if error is None and call.ordinary and plan.proceed is None and not spans.capture_content():
            spans.end_ok(span, call.ended_ns)
            return
        if not span.is_recording():
            return
        late: dict[str, Any] = {}
        if plan.proceed is not None:
            late.update(self._counted(call))
        if plan.proceed is not None or call.charged is not None:
            late.update(self._settled([each for each in call.line or (call,) if each.started]))
        for refusal in call.observed or ():
            late[names.GUARDRAIL_NAME] = refusal.guardrail
            late[names.VERDICT_TYPE] = names.WARN
            late[names.VERDICT_REASON] = refusal.code
        if isinstance(error, ToolCallRefused) and not call.started:
            late.update(self._budget(plan, error))
            spans.end_refused(span, error, attributes=late)
        elif error is not None and not isinstance(error, GeneratorExit):
            spans.end_failed(span, error, call.ended_ns, late)
        else:
            if call.refused is not None:  # a hook answered in its place
                late.update(self._budget(plan, call.refused))
                late.update(spans.of_refusal(call.refused))
            if result is not None and spans.capture_content():
                late[names.TOOL_CALL_RESULT] = spans.content(result)
            spans.end_ok(span, call.ended_ns, late)

    def _settled(self, attempts: Sequence[ToolCall]) -> dict[str, Any]:
        """What the attempts of a call cost in all."""
        told: dict[str, Any] = {names.CALL_ATTEMPTS: len(attempts)} if len(attempts) > 1 else {}
        costs: Counter[str] = Counter()
        for each in attempts:
            charged = dict(each.amounts) if each.charged is None else each.charged
            estimate = dict(each.estimate)
            costs.update({**dict.fromkeys(estimate, 0), **charged})
            if any(exact > estimate.get(unit, 0) for unit, exact in charged.items()):
                told[names.GUARDRAIL_NAME] = "Budget"
                told[names.VERDICT_TYPE] = names.WARN
                told[names.VERDICT_REASON] = names.OVERRUN
        return {**told, **self._cost(costs.items())}

    @staticmethod
    def _budget(plan: Admission, refusal: ToolCallRefused) -> dict[str, Any]:
        """The state of the budget that refused."""
        for run in plan.chain:
            if run.id == refusal.run_id:
                for cap in run.caps:
                    if refusal.code == "budget" and decimal(cap.limit) == refusal.limit and cap.unit != "steps":
                        return {
                            names.BUDGET_NAME: cap.budget.name or cap.unit,
                            names.BUDGET_UNIT: cap.unit,
                            names.BUDGET_LIMIT: float(decimal(cap.limit)),
                            names.BUDGET_SPENT: float(decimal(cap.spent())),
                            names.BUDGET_REMAINING: float(decimal(max(0, cap.limit - cap.used()))),
                        }
        return {}


TOOL_SPANS = ToolSpans()


def refused_unmade(refusal: ToolCallRefused, id: str | None) -> None:
    """The span of a call that couldn't even be made: of a tool that there isn't, or with arguments that don't fit."""
    name = names.UNKNOWN_TOOL if refusal.code == names.CODE_UNKNOWN_TOOL else refusal.tool
    attributes = {names.OPERATION_NAME: names.EXECUTE_TOOL, names.TOOL_NAME: name, names.TOOL_CALL_ID: id}
    spans.end_refused(spans.start_span(f"{names.EXECUTE_TOOL} {name}", attributes), refusal)
