"""Conditions for `until=`: any callable of the state is one, and these compose with | and &."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from loopguard._amounts import amounts, decimal
from loopguard._fingerprints import result_print
from loopguard._run import Run, current_run
from loopguard.exceptions import ConfigurationError

__all__ = ["Condition", "at_least", "elapsed", "spent", "unchanged"]


class Condition:
    """A condition that composes: ``unchanged(2) | elapsed(60)``, ``at_least(90) & (lambda d: d.reviewed)``."""

    def __init__(self, met: Callable[[Any], Any], text: str) -> None:
        self._met = met
        self._text = text

    def __call__(self, state: Any) -> Any:
        """True when it holds; an awaitable of that if an async condition takes part."""
        return self._met(state)

    def __or__(self, other: Callable[[Any], Any]) -> Condition:
        return _joined(self, other, "|")

    def __ror__(self, other: Callable[[Any], Any]) -> Condition:
        return _joined(other, self, "|")

    def __and__(self, other: Callable[[Any], Any]) -> Condition:
        return _joined(self, other, "&")

    def __rand__(self, other: Callable[[Any], Any]) -> Condition:
        return _joined(other, self, "&")

    def __repr__(self) -> str:
        return self._text


def _joined(left: Any, right: Any, how: str) -> Condition:
    for side in (left, right):
        if not callable(side):
            raise ConfigurationError(f"{left!r} {how} {right!r}: both sides are conditions, {side!r} can't be called")

    first, second = of_state(left), of_state(right)

    # Both sides are always asked: `unchanged` has to see every state.
    def met(state: Any) -> Any:
        a, b = first(state), second(state)
        if inspect.isawaitable(a) or inspect.isawaitable(b):
            return _both(a, b, how)
        return _combine(a, b, how)

    return Condition(met, f"({_text(left)} {how} {_text(right)})")


def of_state(condition: Callable[..., Any]) -> Callable[[Any], Any]:
    """The condition as a function of the state alone.

    The iteration goes to a parameter of that name, or to a second positional one that is required.
    """
    try:
        parameters = list(inspect.signature(condition).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return condition
    if any(p.name == "iteration" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters[1:]):
        return lambda state: condition(state, iteration=_run("until").iteration)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    second = positional[1] if len(positional) > 1 else None
    if second is not None and (second.default is second.empty or second.name == "iteration"):
        return lambda state: condition(state, _run("until").iteration)
    return condition


def _text(condition: Any) -> str:
    return repr(condition) if isinstance(condition, Condition) else getattr(condition, "__name__", repr(condition))


async def _both(a: Any, b: Any, how: str) -> bool:
    a = await a if inspect.isawaitable(a) else a
    b = await b if inspect.isawaitable(b) else b
    return _combine(a, b, how)


def _combine(a: Any, b: Any, how: str) -> bool:
    return bool(a) or bool(b) if how == "|" else bool(a) and bool(b)


def _run(what: str) -> Run:
    run = current_run()
    if run is None:
        raise ConfigurationError(f"{what} is asked inside a loop: use it as until=")
    return run


def unchanged(n: int) -> Condition:
    """The state has been the same for n iterations beyond the first: by content, not by identity."""
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ConfigurationError(f"unchanged(n={n!r}): give an int of at least 1")
    text = f"unchanged({n})"

    def met(state: Any) -> bool:
        run = _run(text)
        seen: list[Any] = run.slot(met, lambda: [result_print(earlier) for earlier in run.states[-n:]])
        seen.append(result_print(state))
        del seen[: -(n + 1)]
        return len(seen) == n + 1 and all(each == seen[0] for each in seen)

    return Condition(met, text)


def elapsed(seconds: float) -> Condition:
    """The loop has been running for this many seconds, by the monotonic clock."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e12:
        raise ConfigurationError(f"elapsed(seconds={seconds!r}): give seconds of at least 0")
    text = f"elapsed({seconds:g})"
    return Condition(lambda state: time.monotonic() - _run(text).started_at >= seconds, text)


def spent(usd: Any = None, **units: Any) -> Condition:
    """The loop has spent at least this much of any of these units: ``spent(usd=1)``, ``spent(tokens=50_000)``."""
    limits = amounts({"usd": usd, **units}, "spent")
    if not limits:
        raise ConfigurationError("spent(): name an amount, such as spent(usd=1)")
    text = f"spent({', '.join(f'{unit}={decimal(exact):f}' for unit, exact in limits)})"
    return Condition(lambda state: any(_run(text).spent(unit) >= decimal(exact) for unit, exact in limits), text)


def at_least(value: Any, key: Callable[[Any], Any] | None = None) -> Condition:
    """The state, or ``key(state)``, is at least this value."""
    if key is not None and not callable(key):
        raise ConfigurationError(f"at_least(key={key!r}): give a function of the state")
    return Condition(lambda state: (state if key is None else key(state)) >= value, f"at_least({value!r})")
