"""The guardrails: what may refuse, wrap or ask about a tool call."""

from __future__ import annotations

from loopguard._approval import Approval
from loopguard.guardrails.approve import ApproveTool
from loopguard.guardrails.repeats import LoopLimit
from loopguard.guardrails.resilience import CircuitBreaker, RateLimit, Retry, Timeout
from loopguard.guardrails.steps import MaxSteps
from loopguard.guardrails.wrap import WrapTool

__all__ = [
    "Approval",
    "ApproveTool",
    "CircuitBreaker",
    "LoopLimit",
    "MaxSteps",
    "RateLimit",
    "Retry",
    "Timeout",
    "WrapTool",
]
