"""Test doubles that users need too: a scripted model, scripted people, a clock, and a look at what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopguard.testing.capture import Capture, CapturedCall, capture
from loopguard.testing.doubles import Clock, Desk, ScriptedApprover
from loopguard.testing.judge import ScriptedJudge
from loopguard.testing.replies import Reply
from loopguard.testing.server import Exchange, MessagesServer, Request

if TYPE_CHECKING:
    from loopguard.testing.journals import JournalContract
    from loopguard.testing.ledgers import LedgerContract

__all__ = [
    "Capture",
    "CapturedCall",
    "Clock",
    "Desk",
    "Exchange",
    "JournalContract",
    "LedgerContract",
    "MessagesServer",
    "Reply",
    "Request",
    "ScriptedApprover",
    "ScriptedJudge",
    "capture",
]


def __getattr__(name: str) -> object:
    """The contracts need pytest and hypothesis: they are loaded when they are first asked for."""
    if name == "JournalContract":
        from loopguard.testing.journals import JournalContract

        return JournalContract
    if name == "LedgerContract":
        from loopguard.testing.ledgers import LedgerContract

        return LedgerContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
