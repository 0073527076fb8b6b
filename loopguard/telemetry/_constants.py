"""Every name that telemetry emits: the GenAI conventions are still moving, so they move here only.

Source: the OpenTelemetry GenAI conventions (schema 1.42.0, status Development); what those don't name
begins with ``loopguard.``.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SCOPE = "loopguard"
SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai/1.42.0"

try:
    VERSION = version("loopguard-agents")
except PackageNotFoundError:  # run from a source tree that isn't installed
    VERSION = "0"

# Operations: what gen_ai.operation.name says, and the word before the name of the span.
INVOKE_AGENT = "invoke_agent"
INVOKE_WORKFLOW = "invoke_workflow"
LOOP_ITERATION = "loop_iteration"
EXECUTE_TOOL = "execute_tool"
APPROVE_TOOL = "approve_tool"
CHAT = "chat"

# Attributes of the GenAI and general conventions.
OPERATION_NAME = "gen_ai.operation.name"
AGENT_NAME = "gen_ai.agent.name"
WORKFLOW_NAME = "gen_ai.workflow.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
TOOL_NAME = "gen_ai.tool.name"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_CALL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_CALL_RESULT = "gen_ai.tool.call.result"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
"""Includes cached ones."""
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
"""Includes reasoning."""
USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
USAGE_CACHE_WRITE_INPUT_TOKENS = "gen_ai.usage.cache_write.input_tokens"
USAGE_REASONING_OUTPUT_TOKENS = "gen_ai.usage.reasoning.output_tokens"
EVALUATION_NAME = "gen_ai.evaluation.name"
EVALUATION_SCORE_LABEL = "gen_ai.evaluation.score.label"
EVALUATION_SCORE_VALUE = "gen_ai.evaluation.score.value"
EVALUATION_EXPLANATION = "gen_ai.evaluation.explanation"
ERROR_TYPE = "error.type"

# Attributes of our own.
RUN_ID = "loopguard.run.id"
LOOP_ITERATION_NUMBER = "loopguard.loop.iteration"
"""Counted from 1."""
LOOP_ITERATIONS = "loopguard.loop.iterations"
LOOP_MAX_ITERATIONS = "loopguard.loop.max_iterations"
LOOP_NAME = "loopguard.loop.name"
"""A label of metrics; spans have gen_ai.agent.name."""
LOOP_STOP_REASON = "loopguard.loop.stop_reason"
JOURNAL_HEAD = "loopguard.journal.head"
"""The hash of the last event in the run's journal, hexadecimal: kept elsewhere, it gives away a chain made anew."""
UNTIL_SATISFIED = "loopguard.until.satisfied"
STEP_INDEX = "loopguard.step.index"
STEP_LIMIT = "loopguard.step.limit"
CALL_REPEAT_COUNT = "loopguard.call.repeat_count"
CALL_COST = "loopguard.call.cost"
CALL_COST_CURRENCY = "loopguard.call.cost.currency"
GUARDRAIL_NAME = "loopguard.guardrail.name"
VERDICT_TYPE = "loopguard.verdict.type"
VERDICT_REASON = "loopguard.verdict.reason"
"""A code of few values, as refusals have it."""
OVERRUN = "overrun"
"""The verdict.reason of a call that cost more than it had declared."""
CALL_ATTEMPTS = "loopguard.call.attempts"
"""How often the body was tried, where that was more than once."""
APPROVAL_OUTCOME = "loopguard.approval.outcome"
APPROVAL_MODE = "loopguard.approval.mode"
"""What was asked for: approval, input, extension or uncertain."""
APPROVAL_ACTOR = "loopguard.approval.actor"
"""Personal data: set only where the user asked for it."""
BUDGET_NAME = "loopguard.budget.name"
BUDGET_UNIT = "loopguard.budget.unit"
BUDGET_LIMIT = "loopguard.budget.limit"
BUDGET_SPENT = "loopguard.budget.spent"
BUDGET_REMAINING = "loopguard.budget.remaining"
"""In baggage followed by a dot and the unit."""

# Values.
ANTHROPIC = "anthropic"
UNKNOWN_TOOL = "_unknown"
"""Stands in span names and labels for a tool that a model made up."""
CODE_UNKNOWN_TOOL = "unknown_tool"
ALLOW, DENY, MODIFY, WARN, ESCALATE = "allow", "deny", "modify", "warn", "escalate"
GRANTED, DENIED, TIMED_OUT, FAILED = "granted", "denied", "timeout", "error"

# Events.
EVALUATION_RESULT = "gen_ai.evaluation.result"

# Metrics and their buckets.
TOOL_DURATION = "gen_ai.execute_tool.duration"
TOOL_DURATION_BUCKETS = tuple(0.01 * 2**i for i in range(14))
"""Seconds, 0.01 … 81.92."""
AGENT_DURATION = "gen_ai.invoke_agent.duration"
AGENT_DURATION_BUCKETS = tuple(0.1 * 2**i for i in range(13))
"""Seconds, 0.1 … 409.6."""
ITERATIONS = "loopguard.loop.iterations"
ITERATIONS_BUCKETS = tuple(float(2**i) for i in range(8))
"""1 … 128."""
DECISIONS = "loopguard.decisions"
APPROVAL_DURATION = "loopguard.approval.duration"
APPROVAL_DURATION_BUCKETS = (1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
"""Seconds."""
BUDGET_CONSUMED = "loopguard.budget.consumed"

# The standard switch for arguments, results and prompts in spans.
CAPTURE_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
# The switch for who answered a question.
CAPTURE_ACTOR = "LOOPGUARD_CAPTURE_ACTOR"
