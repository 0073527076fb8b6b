"""Test doubles that users need too: a scripted model, scripted people, a clock, and a look at what happened."""

from __future__ import annotations

from loopguard.testing.capture import Capture, CapturedCall, capture
from loopguard.testing.doubles import Clock, Desk, ScriptedApprover
from loopguard.testing.judge import ScriptedJudge
from loopguard.testing.replies import Reply
from loopguard.testing.server import Exchange, MessagesServer, Request

__all__ = [
    "Capture",
    "CapturedCall",
    "Clock",
    "Desk",
    "Exchange",
    "MessagesServer",
    "Reply",
    "Request",
    "ScriptedApprover",
    "ScriptedJudge",
    "capture",
]
