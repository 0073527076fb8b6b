"""Timeout, Retry, RateLimit and CircuitBreaker: the small guardrails around the far end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from loopguard._call import Tool, ToolCall
from loopguard._pipeline import LOCK, Effect, Proceed, Sleep, Steps
from loopguard._run import Run
from loopguard.exceptions import ConfigurationError, ToolCallRefused

__all__ = ["CircuitBreaker", "RateLimit", "Retry", "Timeout"]

MAX_WAIT = 60.0
"""Seconds that the waits of Retry grow to at most."""


def number(value: Any, what: str, *, zero: bool = False) -> float:
    """The seconds that an option says; ``what`` is how it is written, up to the value."""
    good = not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < 1e9
    if not good or (value == 0 and not zero):
        raise ConfigurationError(f"{what}={value!r}): give seconds {'of at least' if zero else 'above'} 0")
    return float(value)


def _count(value: Any, what: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{what}={value!r}): give an int of at least {least}")
    return value


class Timeout:
    """Every tool call ends within this many seconds, or raises ToolTimeout; waits for people don't count.

    An async tool is cancelled. A sync tool runs in a daemon thread with the context copied; when its time
    is up it may still be running, and its late result is dropped: libraries bound to a thread, database
    connections and transactions suffer from that. Of several timeouts the shortest acts.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = number(seconds, "Timeout(seconds")

    def __repr__(self) -> str:
        return f"Timeout({self.seconds:g})"


class Retry:
    """Run a failed call of an ``idempotent=True`` tool again, at most max_retries times.

    Each attempt reserves and settles its own cost; none is a new step or asks for a new approval, and all
    carry the same `current_call().idempotency_key`. Refusals are never retried. Of several Retries on the
    chain only the innermost acts.

    ``wait``: seconds before the first retry, doubled each time up to a minute, or a function of the number
    of failures so far that returns seconds.
    """

    def __init__(self, max_retries: int, wait: float | Callable[[int], float] = 0.1) -> None:
        self.max_retries = _count(max_retries, "Retry(max_retries", 0)
        self.wait = wait if callable(wait) else number(wait, "Retry(wait", zero=True)

    def seconds(self, failures: int) -> float:
        """How long to wait after this many failures."""
        if callable(self.wait):
            return number(self.wait(failures), "Retry(wait", zero=True)
        return min(MAX_WAIT, self.wait * 2.0 ** min(failures - 1, 60))

    def hook(self, call: ToolCall, proceed: Proceed) -> Steps:
        """The attempts of one call."""
        plan = call.plan
        result = error = None
        failures = 0
        try:
            while True:
                try:
                    result = yield from proceed(call)
                except BaseException as exc:
                    error = exc
                    failures += 1
                    if failures > self.max_retries or call.items is not None or not _is_failure(exc):
                        raise
                else:
                    error = None
                    return result
                if plan.books is not None:  # what it didn't spend is nobody's while we wait
                    yield from plan.books.close(call)
                yield Sleep(self.seconds(failures))
                again, refusal = yield from _admit_again(call)
                if refusal is not None:
                    raise plan.refuse(again, refusal) from error
                call = again
        finally:
            plan.finish(call, result, error)

    def __repr__(self) -> str:
        return f"Retry({self.max_retries})"


def _is_failure(error: BaseException | None) -> bool:
    """Whether the far end failed: not a guardrail's no, a wrong set-up, an interrupt or a cancellation."""
    return isinstance(error, Exception) and not isinstance(error, ToolCallRefused | ConfigurationError)


def _admit_again(call: ToolCall) -> Generator[Effect, Any, tuple[ToolCall, ToolCallRefused | None]]:
    plan, books = call.plan, call.plan.books
    while True:
        again, refusal = plan.again(call)
        if refusal is None or refusal.cure is None:
            if call.line is not None:
                call.line.append(again)
            if refusal is None and books is not None:
                refusal = yield from books.admit(again)
                if refusal is not None:
                    plan.undo(again)
            return again, refusal
        yield from refusal.cure(call)


class _PerTool:
    """State of the far end: kept by the guardrail itself, for each tool, whatever run calls it."""

    def __init__(self, make: Callable[[Tool], Any]) -> None:
        self._make = make
        self._by_tool: dict[str, Any] = {}

    def of(self, tool: Tool) -> Any:
        with LOCK:
            if tool.ident not in self._by_tool:
                self._by_tool[tool.ident] = self._make(tool)
            return self._by_tool[tool.ident]


class RateLimit:
    """At most n calls of a tool in any `seconds`, process-wide, whatever runs they belong to.

    ``wait``: seconds that a call may wait for its turn before it is refused with ``rate_limited``.
    """

    def __init__(self, n: int, seconds: float, wait: float = 0, timer: Callable[[], float] = time.monotonic) -> None:
        self.n = _count(n, "RateLimit(n", 1)
        self.seconds = number(seconds, "RateLimit(seconds")
        self.wait = number(wait, "RateLimit(wait", zero=True)
        self.timer = timer
        self._state = _PerTool(lambda tool: _Window(self))

    def on_clock(self, timer: Callable[[], float]) -> RateLimit:
        """The same limit by another clock, with nothing counted yet."""
        return RateLimit(self.n, self.seconds, self.wait, timer)

    def bind(self, run: Run, tool: Tool) -> _Window:
        """See `Limit`."""
        return self._state.of(tool)  # type: ignore[no-any-return]  # what the lambda makes

    def __repr__(self) -> str:
        return f"RateLimit({self.n}, {self.seconds:g})"


class _Window:
    """The starts of one tool within the last `seconds`."""

    per_attempt = True

    def __init__(self, limit: RateLimit) -> None:
        self.limit = limit
        self.curable = limit.wait > 0
        self.starts: deque[float] = deque()

    def check(self, call: ToolCall) -> ToolCallRefused | None:
        limit = self.limit
        now = limit.timer()
        starts = self.starts
        while starts and now - starts[0] >= limit.seconds:
            starts.popleft()
        if len(starts) < limit.n:
            return None
        after = max(0.001, starts[0] + limit.seconds - now)  # a rounding error is no wait
        reason = (
            f"{call.name} may be called {limit.n} times in {limit.seconds:g} s, and was. "
            f"It was not run; it may be in {after:.1f} s."
        )
        refusal = ToolCallRefused("rate_limited", "RateLimit", call.name, reason, limit.n, len(starts))
        refusal.retry_after = after
        waited = call.marks.get(self, 0.0)
        if waited + after <= limit.wait:
            refusal.cure = lambda call: self._wait(call, waited, after)
        return refusal

    def _wait(self, call: ToolCall, waited: float, after: float) -> Generator[Effect, Any, None]:
        call.marks = {**call.marks, self: waited + after}
        yield Sleep(after)

    def take(self, call: ToolCall) -> float:
        now = self.limit.timer()
        self.starts.append(now)
        return now

    def undo(self, call: ToolCall, token: float) -> None:
        if token in self.starts:
            self.starts.remove(token)


class CircuitBreaker:
    """After this many failures in a row of a tool, refuse it (``circuit_open``) for `reset` seconds.

    Then one call is let through: if it succeeds the circuit closes, if it fails it stays open for another
    `reset`. Process-wide, for each tool. A ToolTimeout is a failure, a refusal or a cancellation is none.
    """

    def __init__(self, failures: int, reset: float, timer: Callable[[], float] = time.monotonic) -> None:
        self.failures = _count(failures, "CircuitBreaker(failures", 1)
        self.reset = number(reset, "CircuitBreaker(reset")
        self.timer = timer
        self._state = _PerTool(lambda tool: _Circuit(self))

    def on_clock(self, timer: Callable[[], float]) -> CircuitBreaker:
        """The same breaker by another clock, with nothing counted yet."""
        return CircuitBreaker(self.failures, self.reset, timer)

    def bind(self, run: Run, tool: Tool) -> _Circuit:
        """See `Limit`."""
        return self._state.of(tool)  # type: ignore[no-any-return]  # what the lambda makes

    def __repr__(self) -> str:
        return f"CircuitBreaker({self.failures}, {self.reset:g})"


class _Circuit:
    """One tool's circuit: closed, open since `opened`, or half open while the probe runs."""

    per_attempt = True

    def __init__(self, breaker: CircuitBreaker) -> None:
        self.breaker = breaker
        self.failures = 0
        self.opened: float | None = None
        self.probing = False

    def check(self, call: ToolCall) -> ToolCallRefused | None:
        if self.opened is None:
            return None
        after = self.opened + self.breaker.reset - self.breaker.timer()
        if after <= 0 and not self.probing:
            return None
        when = f"in {after:.1f} s" if after > 0 else "when the call that is trying it now has succeeded"
        reason = (
            f"{call.name} failed {self.failures} times in a row, so it was not run. It may be tried again {when}; "
            f"do something else until then."
        )
        refusal = ToolCallRefused(
            "circuit_open", "CircuitBreaker", call.name, reason, self.breaker.failures, self.failures
        )
        refusal.retry_after = max(0.0, after)
        return refusal

    def take(self, call: ToolCall) -> bool:
        self.probing = probe = self.opened is not None
        return probe

    def undo(self, call: ToolCall, token: bool) -> None:
        if token:
            self.probing = False

    def done(self, call: ToolCall, token: bool, result: Any, error: BaseException | None) -> None:
        with LOCK:
            if token:
                self.probing = False
            elif self.opened is not None:
                return  # it was under way when the circuit opened: only the probe says how things are now
            if _is_failure(error):
                self.failures += 1
                if token or self.failures >= self.breaker.failures:
                    self.opened = self.breaker.timer()
            elif error is None or isinstance(error, GeneratorExit):
                self.failures = 0
                self.opened = None
