"""loopguard: a ceiling on agent loops, their budgets and their tool calls.

Decorate the agent functions you already have; nothing runs past its ceiling, its budget or its
approval; every loop can be seen in Jaeger.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from loopguard import budgets, conditions, context, evaluators, judges, metering, telemetry, typing
from loopguard._call import ToolCall, current_call
from loopguard._config import configure
from loopguard._flow import Flow, await_input, step
from loopguard._guard import Guard, tool
from loopguard._handoff import dispatch, receive_dispatch
from loopguard._llm import llm
from loopguard._loop import loop
from loopguard._outcomes import (
    Iteration,
    LoopResult,
    LoopState,
    StopReason,
    Transition,
    Verdict,
    result_of,
)
from loopguard._run import Run, charge, current_run
from loopguard._usage import Usage
from loopguard.budgets import Budget
from loopguard.exceptions import (
    AlreadyDecided,
    ApprovalDenied,
    ApprovalTimeout,
    BudgetExceeded,
    CheckpointError,
    ConfigurationError,
    EvaluationFailed,
    JournalError,
    JudgeError,
    LeaseLost,
    LedgerError,
    LoopGuardError,
    LoopGuardWarning,
    LoopHalted,
    LoopLimitExceeded,
    LoopStopped,
    MaxStepsExceeded,
    RecordedError,
    RunConflict,
    RunNotFound,
    ToolCallRefused,
    ToolTimeout,
)
from loopguard.guardrails import (
    Approval,
    ApproveTool,
    CircuitBreaker,
    LoopLimit,
    MaxSteps,
    RateLimit,
    Retry,
    Timeout,
    WrapTool,
)
from loopguard.metering import PriceBook, meter
from loopguard.questions import Inbox, ask_in_terminal
from loopguard.telemetry import configure_telemetry
from loopguard.telemetry._constants import VERSION as _VERSION

if _TYPE_CHECKING:
    from loopguard import journal, testing
    from loopguard._what_if import what_if

__version__ = _VERSION

__all__ = [
    "AlreadyDecided",
    "Approval",
    "ApprovalDenied",
    "ApprovalTimeout",
    "ApproveTool",
    "Budget",
    "BudgetExceeded",
    "CheckpointError",
    "CircuitBreaker",
    "ConfigurationError",
    "EvaluationFailed",
    "Flow",
    "Guard",
    "Inbox",
    "Iteration",
    "JournalError",
    "JudgeError",
    "LeaseLost",
    "LedgerError",
    "LoopGuardError",
    "LoopGuardWarning",
    "LoopHalted",
    "LoopLimit",
    "LoopLimitExceeded",
    "LoopResult",
    "LoopState",
    "LoopStopped",
    "MaxSteps",
    "MaxStepsExceeded",
    "PriceBook",
    "RateLimit",
    "RecordedError",
    "Retry",
    "Run",
    "RunConflict",
    "RunNotFound",
    "StopReason",
    "Timeout",
    "ToolCall",
    "ToolCallRefused",
    "ToolTimeout",
    "Transition",
    "Usage",
    "Verdict",
    "WrapTool",
    "ask_in_terminal",
    "await_input",
    "budgets",
    "charge",
    "conditions",
    "configure",
    "configure_telemetry",
    "context",
    "current_call",
    "current_run",
    "dispatch",
    "evaluators",
    "journal",
    "judges",
    "llm",
    "loop",
    "meter",
    "metering",
    "receive_dispatch",
    "result_of",
    "step",
    "telemetry",
    "testing",
    "tool",
    "typing",
    "what_if",
]


def __getattr__(name: str) -> object:
    """What not every program uses is loaded when it is first asked for."""
    if name in ("journal", "testing"):
        return _import_module(f"loopguard.{name}")
    if name == "what_if":
        return _import_module("loopguard._what_if").what_if
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is there, and what can be asked for."""
    return sorted({*globals(), *__all__})
