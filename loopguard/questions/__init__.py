"""Questions: asked once, answered once, by the person or program that may say yes."""

from __future__ import annotations

from loopguard.questions.inbox import Inbox
from loopguard.questions.terminal import ask_in_terminal

__all__ = ["Inbox", "ask_in_terminal"]
