"""Metrics: the instruments, their labels and buckets, and their silence without a provider."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from loopguard.telemetry import _constants, _metrics
from tests.telemetry.conftest import Program

RECORD = """
from decimal import Decimal
from loopguard._outcomes import StopReason
from loopguard.telemetry import _metrics
def record():
    _metrics.tool_duration(0.03, "search")
    _metrics.tool_duration(0.03, "search", "max_steps")
    _metrics.loop_done(12.5, "improve", 5, StopReason.UNTIL)
    _metrics.decision("MaxSteps", "deny", "search")
    _metrics.decision("MaxSteps", "deny", "\\ud800")
    _metrics.approval_duration(90, "granted", "terminal", "pay")
    _metrics.budget_consumed("team", "usd", Decimal("0.25"))
    _metrics.budget_consumed("team", "usd", Decimal("-1"))
"""
COLLECT = """
import json
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
reader = InMemoryMetricReader()
assert not _metrics.metrics_are_set()
record()
metrics.set_meter_provider(MeterProvider([reader]))
assert _metrics.metrics_are_set()
record()
data = reader.get_metrics_data()
encode_metrics(data).SerializeToString()
(scope,) = data.resource_metrics[0].scope_metrics
found = {}
for metric in scope.metrics:
    for point in metric.data.data_points:
        value = point.value if hasattr(point, "value") else [point.count, point.sum, list(point.explicit_bounds)]
        found.setdefault(metric.name, [metric.unit]).append([dict(point.attributes), value])
print(json.dumps(found))
"""


def collected(program: Program) -> dict[str, Any]:
    """What a process that records everything once, with a provider, has collected: name to unit and points."""
    done = program(RECORD + COLLECT)
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_instrument_has_its_name_labels_and_buckets(program: Program) -> None:
    """What is recorded after a provider was set arrives as TELEMETRY promises it, and nothing from before."""
    agent = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "improve",
        "loopguard.loop.stop_reason": "until",
    }
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"}
    denied = {"loopguard.guardrail.name": "MaxSteps", "loopguard.verdict.type": "deny"}
    tool_buckets = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
    agent_buckets = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6]
    approval = {
        "loopguard.approval.outcome": "granted",
        "loopguard.approval.mode": "terminal",
        "gen_ai.tool.name": "pay",
    }

    assert collected(program) == {
        "gen_ai.execute_tool.duration": [
            "s",
            [tool, [1, 0.03, tool_buckets]],
            [{**tool, "error.type": "max_steps"}, [1, 0.03, tool_buckets]],
        ],
        "gen_ai.invoke_agent.duration": ["s", [agent, [1, 12.5, agent_buckets]]],
        "loopguard.loop.iterations": [
            "{iteration}",
            [
                {"loopguard.loop.name": "improve", "loopguard.loop.stop_reason": "until"},
                [1, 5, [1, 2, 4, 8, 16, 32, 64, 128]],
            ],
        ],
        "loopguard.decisions": [
            "{decision}",
            [{**denied, "gen_ai.tool.name": "search"}, 1],
            [{**denied, "gen_ai.tool.name": "�"}, 1],
        ],
        "loopguard.approval.duration": [
            "s",
            [approval, [1, 90, [1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200]]],
        ],
        "loopguard.budget.consumed": ["", [{"loopguard.budget.name": "team", "loopguard.budget.unit": "usd"}, 0.25]],
    }


def test_a_broken_value_reaches_nobody() -> None:
    """Whatever is handed over, recording a metric never raises."""
    broken: Any = object()
    _metrics.tool_duration(broken, broken)
    _metrics.loop_done(broken, broken, broken, broken)
    _metrics.decision(broken, broken, broken)
    _metrics.approval_duration(broken, broken, broken, broken)
    _metrics.budget_consumed(broken, broken, broken)
    _metrics.budget_consumed("team", "usd", Decimal("NaN"))


def test_a_name_is_written_once() -> None:
    """No two constants have the same value, except the one name that is an attribute and a metric."""
    values = [value for key, value in vars(_constants).items() if key.isupper() and isinstance(value, str)]
    assert sorted({value for value in values if values.count(value) > 1}) == ["loopguard.loop.iterations"]
