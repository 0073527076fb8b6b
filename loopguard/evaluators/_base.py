"""What all evaluators of this package share: one policy for sync and async, and how others are consulted."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from loopguard._call import ASYNC, colour_of
from loopguard._drivers import drive_async, drive_sync
from loopguard._outcomes import Verdict, read_verdict
from loopguard._pipeline import Ask, Effect, Steps
from loopguard.exceptions import ConfigurationError, ToolCallRefused
from loopguard.redaction import redact_error

__all__ = ["BaseEvaluator", "checked", "consult", "is_async"]


class BaseEvaluator:
    """An evaluator that waits for others: `steps` is a generator of effects that evaluates to a Verdict."""

    is_async: bool = False
    """Whether its verdicts are to be awaited."""
    auxiliary: bool = False
    """Whether it is too weak to be a loop's only evaluator."""

    def prepare(self) -> None:
        """Find what is missing, such as a key, before any work is done: a ConfigurationError says what."""

    def steps(self, value: Any) -> Steps:
        """How it comes to its verdict."""
        raise NotImplementedError

    def __call__(self, value: Any) -> Any:
        """The Verdict about a value; an awaitable of it where `is_async`."""
        steps = self.steps(value)
        return drive_async(steps) if self.is_async else drive_sync(steps)


def is_async(fn: Any) -> bool:
    """Whether what fn returns is to be awaited."""
    return colour_of(fn) == ASYNC or getattr(fn, "is_async", False) is True


def checked(fn: Any, what: str) -> Callable[..., Any]:
    """The function that was given, or a ConfigurationError."""
    if not callable(fn):
        raise ConfigurationError(f"{what}: give a function, not {fn!r}")
    return fn  # type: ignore[no-any-return]  # callable() narrows to an unknown callable


def consult(evaluator: Callable[[Any], Any], value: Any) -> Generator[Effect, Any, Verdict]:
    """What another evaluator says; its failure is a no that names the exception."""
    name = getattr(evaluator, "__name__", type(evaluator).__name__)
    try:
        said = yield Ask(evaluator, value, blocking=True)
    except (ToolCallRefused, ConfigurationError):
        raise
    except Exception as exc:  # evaluators are the user's: one that fails has not passed
        return Verdict(False, f"{name} failed: {redact_error(exc)}")
    return read_verdict(said, name)
