"""Evaluators: who says whether one value is good enough, with a reason that a model can act on.

An evaluator is any callable ``(value) -> Verdict | bool | (bool, reason)``, sync or async. These work in
`@loop(evaluate=…)` and on their own: ``JSONFields("summary")(text)`` is a Verdict, and an awaitable of one where
``is_async`` says so. Reasons name fields and types; they never quote what was found there.
"""

from __future__ import annotations

from loopguard.evaluators._base import BaseEvaluator
from loopguard.evaluators._code import Check, JSONFields, Matches
from loopguard.evaluators._combine import all_of, any_of
from loopguard.evaluators._score import LLMScore

__all__ = ["BaseEvaluator", "Check", "JSONFields", "LLMScore", "Matches", "all_of", "any_of"]
