"""The pipeline of a tool call: limits that decide with data, hooks that wait, and their composition.

A *limit* never waits and never calls user code while it decides. An *admission*, compiled once per
run and tool, asks all limits under one lock: every one takes, or none does. A *hook* is a generator
around the call that yields effects; a driver performs them in the colour of the tool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from loopguard._call import CURRENT, ToolCall
from loopguard.exceptions import ToolCallRefused

if TYPE_CHECKING:
    from loopguard._call import Tool
    from loopguard._run import Run

__all__ = ["LOCK", "Ask", "BoundLimit", "Effect", "Hook", "Invoke", "Limit", "Proceed", "Sleep", "compose"]

LOCK = threading.RLock()
"""The one lock of all admissions. Held for microseconds, never over user code or I/O; reentrant
because a garbage collection inside it may close an abandoned generator tool, which settles."""


# -- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Invoke:
    """Run the body of this call; evaluates to what it returns."""

    call: Any
    timeout: float | None = None
    """Seconds, None for no limit."""


class Ask:
    """Run a user's callback, sync or async; evaluates to what it returns.

    ``blocking=True``: it may block, so async code runs it in a thread of its own.
    ``timeout``: seconds, after which the effect raises EffectTimeout.
    """

    __slots__ = ("args", "blocking", "fn", "timeout")

    def __init__(
        self, fn: Callable[..., Any], *args: Any, blocking: bool = False, timeout: float | None = None
    ) -> None:
        self.fn = fn
        self.args = args
        self.blocking = blocking
        self.timeout = timeout


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait this many seconds."""

    seconds: float


class EffectTimeout(Exception):
    """An effect's own timeout ran out: never a TimeoutError, which a callback may raise itself."""


Effect: TypeAlias = Invoke | Ask | Sleep
Steps: TypeAlias = Generator[Effect, Any, Any]
Proceed: TypeAlias = Callable[[ToolCall], Steps]


# -- limits and hooks ------------------------------------------------------------------------------


class BoundLimit(Protocol):
    """A limit as it stands for one run and tool. All methods are optional but `check` or `take`.

    - ``prepare(call)``: whatever needs user code or time; no lock is held.
    - ``check(call)``: a refusal, or None. Changes nothing, calls no user code. Under the lock.
    - ``take(call)``: take what the call needs, return a token for the two below. Under the lock.
    - ``undo(call, token)``: the body never started: give it back. Under the lock.
    - ``done(call, token, result, error)``: the body ended. Without the lock: take it to change state.
    """

    def check(self, call: ToolCall) -> ToolCallRefused | None:
        """A refusal or None."""


class Limit(Protocol):
    """A guardrail that decides with data."""

    def bind(self, run: Run, tool: Tool) -> Any:
        """The BoundLimit for this run and tool, or None where it doesn't apply. Called once for both."""


Hook: TypeAlias = Callable[[ToolCall, Proceed], Steps]
"""A guardrail that waits: a generator function ``hook(call, proceed)`` that yields effects;
``result = yield from proceed(call)`` goes on inwards."""


def compose(hooks: Sequence[Hook], invoke: Proceed) -> Proceed:
    """One generator function of many: the first hook is the outermost."""
    proceed = invoke
    for hook in reversed(hooks):
        proceed = _around(hook, proceed)
    return proceed


def _around(hook: Hook, inner: Proceed) -> Proceed:
    def proceed(call: ToolCall) -> Steps:
        CURRENT.set(call)  # as the hooks further out have made it; the driver restores what was current before
        return hook(call, inner)

    return proceed
