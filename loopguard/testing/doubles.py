"""Stand-ins for what a test can't wait for: people who answer questions, and time that passes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from loopguard._call import ToolCall, structural_copy
from loopguard.exceptions import ConfigurationError, LoopGuardError

__all__ = ["Clock", "Desk", "ScriptedApprover"]

_POLL = 0.02
"""Seconds between two looks at whether a question was closed."""


class ScriptedApprover:
    """An approver that answers as scripted, in sync and async code and from any thread.

    ``answers`` is a list, used up in the order of the questions; ``{tool name: answers}``; or one answer for
    every question. An answer is whatever an approver may return (True, False, ``(bool, reason)``, an `Approval`),
    an exception to raise, or a function of the call that gives one. A question without an answer left raises, so
    that the call is refused with ``approval_error``.
    """

    calls: list[ToolCall]
    """What was asked about, in order, with the arguments as they were then."""

    def __init__(self, answers: Any) -> None:
        self.calls = []
        self._pick = _script(answers)
        self._lock = threading.Lock()

    def __call__(self, call: ToolCall) -> Any:
        """Answer."""
        with self._lock:
            self.calls.append(_snapshot(call))
            answer = self._pick(call)
        return _give(answer, call)


class Desk:
    """An approver whose questions lie on a desk until the test answers them, in any order.

    desk = Desk()
    … start the calls in tasks or threads, with ApproveTool(desk) in their guard …
    first, second = desk.wait(2)
    desk.answer(second.id, False)
    desk.answer(first.id, True)

    A question that closes first (its timeout, a cancelled call, a stopped run) leaves the desk by itself.
    """

    calls: list[ToolCall]
    """What was asked about, in order, with the arguments as they were then."""

    def __init__(self) -> None:
        self.calls = []
        self._open: list[int] = []
        self._answers: dict[int, Any] = {}
        self._changed = threading.Condition()

    def __call__(self, call: ToolCall) -> Any:
        """Wait for the answer."""
        with self._changed:
            number = len(self.calls)
            self.calls.append(_snapshot(call))
            self._open.append(number)
            self._changed.notify_all()
            while number not in self._answers:
                self._changed.wait(_POLL)
                if call.question is not None and call.question.closed and number in self._open:
                    self._open.remove(number)
                    raise LoopGuardError(f"the question about {call.name} was closed before the desk was answered")
            answer = self._answers.pop(number)
        return _give(answer, call)

    @property
    def pending(self) -> list[ToolCall]:
        """What waits for an answer, in the order it was asked."""
        with self._changed:
            return [self.calls[number] for number in self._open]

    def wait(self, n: int = 1, timeout: float = 5.0) -> list[ToolCall]:
        """`pending`, once at least n questions are on the desk; TimeoutError after so many seconds.

        Blocks: in async code, ``await asyncio.to_thread(desk.wait, n)``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._open) >= n, timeout):
                raise TimeoutError(f"{len(self._open)} of {n} questions were on the desk after {timeout:g} s")
            return [self.calls[number] for number in self._open]

    def answer(self, which: str | int, answer: Any) -> None:
        """Answer a pending question, named by its call's id or by its place in `calls`, as a script would.

        Raises LookupError if no such question waits.
        """
        with self._changed:
            number = next((n for n in self._open if which in (n, self.calls[n].id)), None)
            if number is None:
                waiting = ", ".join(self.calls[n].id for n in self._open) or "none"
                raise LookupError(f"no question {which!r} waits for an answer; waiting: {waiting}")
            self._open.remove(number)
            self._answers[number] = answer
            self._changed.notify_all()


class Clock:
    """A clock that stands still until it is told to go on: ``LoopLimit(ttl=60, timer=clock)``."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        """Seconds."""

    def __call__(self) -> float:
        """The time, as `time.monotonic` gives it."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass; ConfigurationError for less than none."""
        if not seconds >= 0:
            raise ConfigurationError(f"advance({seconds!r}): a monotonic clock never goes back")
        self.now += seconds


def _snapshot(call: ToolCall) -> ToolCall:
    """The call as it is now, whatever becomes of its arguments."""
    if not isinstance(call, ToolCall):  # a budget that asks to be extended, in the shape of a call
        return call
    return call.replace(arguments=structural_copy(call.arguments))


def _script(answers: Any) -> Callable[[ToolCall], Any]:
    """What picks the answer to a question."""
    if isinstance(answers, Mapping):
        scripts = {name: _script(of_tool) for name, of_tool in answers.items()}

        def by_name(call: ToolCall) -> Any:
            if call.name not in scripts:
                known = ", ".join(scripts) or "none"
                raise LoopGuardError(f"ScriptedApprover has no answer for {call.name}; it has some for: {known}")
            return scripts[call.name](call)

        return by_name
    if isinstance(answers, list):
        left = deque(answers)

        def in_order(call: ToolCall) -> Any:
            if not left:
                raise LoopGuardError(
                    f"ScriptedApprover has run out: {call.name} is asked about after {len(answers)} answers"
                )
            return left.popleft()

        return in_order
    return lambda call: answers


def _give(answer: Any, call: ToolCall) -> Any:
    if isinstance(answer, BaseException) or (isinstance(answer, type) and issubclass(answer, BaseException)):
        raise answer
    return answer(call) if callable(answer) else answer
