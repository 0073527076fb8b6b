"""Metrics of real runs, read back from an SDK in a process of its own (a MeterProvider is set once)."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from loopguard import _events as events
from loopguard.telemetry._measure import measure

PROGRAM = textwrap.dedent(
    """
    import json
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))

    from loopguard import ApproveTool, Budget, Guard, MaxSteps, ToolCallRefused, charge, loop, tool

    @tool(cost=0.25)
    def work(n):
        if n == 1:
            raise KeyError(n)
        return n

    guard = Guard(MaxSteps(2), ApproveTool(lambda call: True), Budget(usd=1, name="team"), Budget(usd=2))
    work = guard.wrap(work)

    @loop(max=3, guard=guard)
    def agent(n):
        charge(tokens=10)
        try:
            guard.call(f"made up by a model {n}", {})
        except ValueError:
            pass
        try:
            work(n)
        except (ToolCallRefused, KeyError):
            pass
        return n + 1

    agent(0)
    found = {}
    for resource in reader.get_metrics_data().resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    value = getattr(point, "value", None)
                    labels = sorted(map(str, point.attributes.values()))
                    found.setdefault(metric.name, []).append([labels, point.count if value is None else value])
    print(json.dumps(found))
    """
)


def test_runs_are_measured_once_a_meter_provider_is_set() -> None:
    """Durations, iterations, decisions, waits for people and what was spent arrive with labels of few values."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    found = {name: sorted(points) for name, points in json.loads(done.stdout).items()}
    assert found == {
        "gen_ai.execute_tool.duration": [[["KeyError", "execute_tool", "work"], 1], [["execute_tool", "work"], 1]],
        "gen_ai.invoke_agent.duration": [[["agent", "invoke_agent", "max_iterations"], 1]],
        "loopguard.loop.iterations": [[["agent", "max_iterations"], 1]],
        "loopguard.decisions": [
            [["ApproveTool", "allow", "work"], 2],
            [["ApproveTool", "escalate", "work"], 2],
            [["Guard", "_unknown", "deny"], 3],
            [["MaxSteps", "deny", "work"], 1],
        ],
        "loopguard.approval.duration": [[["approval", "granted", "work"], 2]],
        "loopguard.budget.consumed": [[["team", "usd"], 0.25], [["tokens", "tokens"], 30.0], [["usd", "usd"], 0.25]],
    }


@pytest.mark.parametrize("kind", ["approval", "extension", "input", "uncertain"])
@pytest.mark.parametrize("decision", ["approve", "edit", "deny", "timeout", "error", "answer", "ran"])
def test_every_question_can_be_measured(kind: str, decision: str) -> None:
    """A subscriber never raises, whatever is asked and however it ends."""
    measure(events.QuestionAsked(run_id="a", at=0, question_id="q", kind=kind, call_id=None, tool=None, arguments={}))
    measure(events.QuestionAnswered(run_id="a", at=0, question_id="q", kind=kind, tool=None, decision=decision))
