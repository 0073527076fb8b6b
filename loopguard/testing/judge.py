"""ScriptedJudge: a judge that answers as a test has written it down."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from loopguard._call import structural_copy
from loopguard.exceptions import ConfigurationError

__all__ = ["ScriptedJudge"]


class ScriptedJudge:
    """A judge for `until_llm` whose verdicts are used up in order, in sync and async code and from any thread.

    judge = ScriptedJudge([(False, "too short"), True])

    A verdict is whatever a judge may return (a Verdict, True, False, ``(bool, reason)``), or an exception to raise.
    Being asked when none is left is a ConfigurationError, which ends the loop.
    """

    asked: list[tuple[str, Any]]
    """What it was asked, in order: (question, state as it was then)."""

    def __init__(self, verdicts: Iterable[Any]) -> None:
        self.asked = []
        self._verdicts = deque(verdicts)
        self._lock = threading.Lock()

    def __call__(self, question: str, state: Any) -> Any:
        """The next verdict."""
        with self._lock:
            self.asked.append((question, structural_copy(state)))
            if not self._verdicts:
                given = len(self.asked) - 1
                raise ConfigurationError(f"ScriptedJudge has run out: it is asked once more after {given} verdicts")
            verdict = self._verdicts.popleft()
        if isinstance(verdict, BaseException) or (isinstance(verdict, type) and issubclass(verdict, BaseException)):
            raise verdict
        return verdict
