"""LoopLimit: the same call again and again while nothing new happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, MutableMapping
from itertools import islice
from typing import Any

from loopguard._call import Tool, ToolCall
from loopguard._fingerprints import error_print, result_print
from loopguard._pipeline import LOCK
from loopguard._run import Run
from loopguard.exceptions import ConfigurationError, LoopLimitExceeded

__all__ = ["LoopLimit"]

REMEMBERED = 10_000
"""Distinct calls that a run remembers at least: the latest."""


class LoopLimit:
    """The same tool with the same arguments at most n times in a run *while nothing new happens*.

    New are: a call never seen in this run, and a repeat whose result (or exception) differs from the
    time before. On by default inside runs with n = 3; ``LoopLimit(0)`` turns it off. Calls of tools
    marked ``@tool(repeatable=True)`` are never new and never counted.

    - ``ignore``: names left out of arguments and results, such as ``{"request_id"}``.
    - ``ttl``: seconds after which a call that wasn't made again is forgotten; ``timer`` is its clock.
    - ``strict``: count arguments alone over the whole run, whatever the results.

    A resumed run counts the calls of earlier processes, too; not where ``ignore`` or ``ttl`` is given.
    Refuses with code ``loop_limit``.
    """

    def __init__(
        self,
        n: int = 3,
        ignore: Iterable[str] = (),
        ttl: float | None = None,
        strict: bool = False,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ConfigurationError(f"LoopLimit(n={n!r}): give an int of at least 0; 0 turns it off")
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < 1e12):
            raise ConfigurationError(f"LoopLimit(ttl={ttl!r}): give seconds above 0, or None")
        several = isinstance(ignore, Iterable) and not isinstance(ignore, str)
        names: frozenset[str] = frozenset(ignore) if several else frozenset()
        if not several or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(f"LoopLimit(ignore={ignore!r}): give names, such as {{'request_id'}}")
        if not isinstance(strict, bool):
            raise ConfigurationError(f"LoopLimit(strict={strict!r}): give True or False")
        if not callable(timer):
            raise ConfigurationError(f"LoopLimit(timer={timer!r}): give a function that returns seconds")
        self.n = n
        self.ignore = names
        self.ttl = ttl
        self.strict = strict
        self.timer = timer

    @property
    def settings(self) -> tuple[object, ...]:
        """What makes two of them the same: a chain needs only one."""
        return self.n, self.ignore, self.ttl, self.strict, self.timer

    def on_clock(self, timer: Callable[[], float]) -> LoopLimit:
        """The same limit by another clock, with nothing counted yet."""
        return LoopLimit(self.n, self.ignore, self.ttl, self.strict, timer)

    def bind(self, run: Run, tool: Tool) -> _Counts | None:
        """See `Limit`."""
        if self.n == 0 or tool.repeatable:
            return None
        return run.slot(self, lambda: (_StrictCounts if self.strict else _Counts)(self, run))  # type: ignore[no-any-return]  # what the lambda makes

    def __repr__(self) -> str:
        return f"LoopLimit({self.n})"


def _memory(limit: LoopLimit) -> MutableMapping[Any, _Seen]:
    if limit.ttl is None:
        return {}
    from cachetools import TTLCache

    return TTLCache(REMEMBERED, limit.ttl, limit.timer)


class _Seen:
    """One distinct call: how often it came in a row, when that row began, and what it returned last."""

    __slots__ = ("count", "news", "print")

    def __init__(self, count: int, news: int, result: Any) -> None:
        self.count = count
        self.news = news
        self.print = result


class _Counts:
    """What one run remembers for one LoopLimit."""

    binds = True
    """Its key binds the arguments: those that don't bind raise there."""

    def __init__(self, guardrail: LoopLimit, run: Run) -> None:
        self.guardrail = guardrail
        self.run = run
        self.n = guardrail.n
        self.ignore = guardrail.ignore
        self.seen = _memory(guardrail)
        self.news = 0
        """Counts the calls never seen before: each sets every older count back."""
        self.floor = 1 if guardrail.n > 1 else 0
        # of calls in earlier processes only digests are known: not what to leave out, and not when to forget them
        self.resumed = bool(run.outcomes) and not self.ignore and guardrail.ttl is None
        if self.resumed:
            for digest, result in run.outcomes:
                self._recall(digest, result)

    def _recall(self, digest: str, result: Any) -> None:
        """Count a call of an earlier process."""
        seen = self.seen.get(digest)
        if seen is None:
            self.news += 1
            self._remember(digest, _Seen(1, self.news, result_print(result) if self.n == 2 else None))
        else:
            self._again(digest, seen, result_print(result))

    def prepare(self, call: ToolCall) -> None:
        key = call.key(self.ignore)
        if self.ignore:
            call.marks = {**call.marks, self: key}
        else:
            call.loose = key
            if self.resumed:
                with LOCK:
                    seen = self.seen.pop(call.place.get("digest"), None)
                    if seen is not None:
                        self.seen.setdefault(key, seen)

    def _key(self, call: ToolCall) -> Any:
        return call.marks[self] if self.ignore else call.loose

    def _remember(self, key: Any, seen: _Seen) -> None:
        """Make it the latest; forget the oldest once there are too many, many at once."""
        memory = self.seen
        if isinstance(memory, dict):
            memory.pop(key, None)
            if len(memory) >= 2 * REMEMBERED:
                for old in list(islice(memory, REMEMBERED)):
                    del memory[old]
        memory[key] = seen

    def _count(self, seen: _Seen) -> int:
        return seen.count if seen.news == self.news else min(seen.count, self.floor)

    def check(self, call: ToolCall) -> LoopLimitExceeded | None:
        seen = self.seen.get(self._key(call))
        if seen is None:
            return None
        call.repeats = count = self._count(seen)
        return None if count < self.n else self.refusal(call, count)

    def refusal(self, call: ToolCall, count: int) -> LoopLimitExceeded:
        times = "once" if count == 1 else f"{count} times"
        rule = "over the whole run" if self.guardrail.strict else "and nothing new came of it"
        reason = (
            f"you are looping: {call.name} was already called {times} with these same arguments {rule}, so it was not "
            f"run again. Use the result you have, change the arguments, or do something else. "
            f"(LoopLimit({self.n}) of run {self.run.name!r}; for people: raise n, ignore= changing names, or mark the "
            f"tool @tool(repeatable=True).)"
        )
        return LoopLimitExceeded(
            "loop_limit", "LoopLimit", call.name, reason, self.n, count, self.run.name, self.run.id
        )

    def done(self, call: ToolCall, token: Any, result: Any, error: BaseException | None) -> None:
        key = call.marks[self] if self.ignore else call.loose
        # calls that never repeat pay for no fingerprint of a result
        result = self._print(call, result, error) if self.n == 2 or call.repeats else None
        with LOCK:
            seen = self.seen.get(key)
            if seen is None:
                self.news += 1
                for run in self.run.chain:
                    run.news += 1
                if len(self.seen) < REMEMBERED:
                    self.seen[key] = _Seen(1, self.news, result)
                else:
                    self._remember(key, _Seen(1, self.news, result))
                return
            self._again(key, seen, result)

    def _again(self, key: Any, seen: _Seen, result: Any) -> None:
        differs = seen.print is not None and result is not None and seen.print != result
        seen.count = 1 if differs else self._count(seen) + 1
        seen.news = self.news
        if result is not None:
            seen.print = result
        self._remember(key, seen)  # made again: the latest, and its time to live starts anew

    def _print(self, call: ToolCall, result: Any, error: BaseException | None) -> Any:
        if error is not None:
            return error_print(error)
        if call.items is not None:
            return call.items.value(), result_print(result, self.ignore)
        return result_print(result, self.ignore)


class _StrictCounts(_Counts):
    """Arguments alone, over the whole run, counted when a call is admitted."""

    def _recall(self, digest: str, result: Any) -> None:
        seen = self.seen.get(digest) or _Seen(0, 0, True)
        seen.count += 1
        self._remember(digest, seen)

    def take(self, call: ToolCall) -> Any:
        key = self._key(call)
        seen = self.seen.get(key)
        if seen is None:
            seen = _Seen(0, 0, None)
        seen.count += 1
        self._remember(key, seen)
        return seen

    def undo(self, call: ToolCall, token: _Seen) -> None:
        token.count -= 1

    def done(self, call: ToolCall, token: _Seen, result: Any, error: BaseException | None) -> None:
        with LOCK:
            if token.print is None:  # the first of them that came to its end
                token.print = True
                for run in self.run.chain:
                    run.news += 1
