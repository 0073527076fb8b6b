"""The guardrails: what may refuse, wrap or ask about a tool call."""

from __future__ import annotations

from loopguard.guardrails.approve import Approval, ApproveTool
from loopguard.guardrails.repeats import LoopLimit
from loopguard.guardrails.steps import MaxSteps
from loopguard.guardrails.wrap import WrapTool

__all__ = ["Approval", "ApproveTool", "LoopLimit", "MaxSteps", "WrapTool"]
