"""all_of and any_of: many evaluators as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loopguard._outcomes import Verdict
from loopguard._pipeline import Steps
from loopguard.evaluators._base import BaseEvaluator, checked, consult, is_async
from loopguard.exceptions import ConfigurationError

__all__ = ["all_of", "any_of"]


def all_of(*evaluators: Callable[[Any], Any]) -> BaseEvaluator:
    """Passes if all of them do, asked in order up to the first that doesn't: put the cheap ones first.

    Each is asked about what the one before it parsed, and what the last one parsed is the verdict's value.
    """
    return _AllOf(evaluators)


def any_of(*evaluators: Callable[[Any], Any]) -> BaseEvaluator:
    """Passes with the first of them that does. If none does, the reason has all of theirs.

    Undecided if none passes and one is undecided.
    """
    return _AnyOf(evaluators)


class _Several(BaseEvaluator):
    """Sync and async evaluators together; auxiliary only if all of them are."""

    def __init__(self, evaluators: tuple[Any, ...]) -> None:
        if not evaluators:
            raise ConfigurationError(f"{self}(): give at least one evaluator")
        self.evaluators = tuple(checked(each, f"{self}(…)") for each in evaluators)
        self.is_async = any(map(is_async, evaluators))
        self.auxiliary = all(getattr(each, "auxiliary", False) for each in evaluators)

    def prepare(self) -> None:
        for each in self.evaluators:
            if isinstance(each, BaseEvaluator):
                each.prepare()


class _AllOf(_Several):
    __name__ = "all_of"

    def __str__(self) -> str:
        return "all_of"

    def steps(self, value: Any) -> Steps:
        parsed = None
        for evaluator in self.evaluators:
            verdict = yield from consult(evaluator, value)
            if verdict.passed is not True:
                return verdict
            if verdict.value is not None:
                value = parsed = verdict.value
        return Verdict(True, None, parsed)


class _AnyOf(_Several):
    __name__ = "any_of"

    def __str__(self) -> str:
        return "any_of"

    def steps(self, value: Any) -> Steps:
        verdicts: list[Verdict] = []
        for evaluator in self.evaluators:
            verdict = yield from consult(evaluator, value)
            if verdict.passed is True:
                return verdict
            verdicts.append(verdict)
        undecided = any(verdict.passed is None for verdict in verdicts)
        reasons = dict.fromkeys(verdict.reason for verdict in verdicts if verdict.reason)
        return Verdict(None if undecided else False, "\nor: ".join(reasons) or None)
