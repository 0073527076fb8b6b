"""LLMScore: a model's grade, which helps other evaluators and doesn't decide alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from loopguard._json import parse_json
from loopguard._outcomes import Verdict
from loopguard._pipeline import Ask, Steps
from loopguard.evaluators._base import BaseEvaluator, checked, is_async
from loopguard.evaluators._objects import object_in
from loopguard.exceptions import ConfigurationError, ToolCallRefused
from loopguard.judges import AnthropicJudge, text_prompt
from loopguard.redaction import redact_error

__all__ = ["LLMScore"]

_SCALES = (1, 10, 100)
_NUMBER = re.compile(r"\s*-?\d+(?:\.\d+)?\s*", re.ASCII)


class LLMScore(BaseEvaluator):
    """A model grades the value by a rubric; at least ``at_least`` passes.

    The scale is the shortest of 0–1, 0–10 and 0–100 that ``at_least`` lies on: 0.8 is of 1, 7 is of 10, 80 is of 100.

    - ``client``, ``model``: the Anthropic client and model that grade, by default those of `AnthropicJudge`; the
      call is metered and charged to the run.
    - ``complete``: instead, any model as ``complete(prompt) -> text``, sync or async.
    - ``alone=True``: it may be a loop's only evaluator. A model that grades itself agrees too easily, so by default
      it can't; put a check of code before it.

    Anything but one number on the scale is undecided (``passed=None``), which doesn't pass: prose, two scores, NaN,
    a number beyond the scale, a model that fails.
    """

    def __init__(
        self,
        rubric: str,
        at_least: float,
        *,
        complete: Callable[[str], Any] | None = None,
        client: Any = None,
        model: str | None = None,
        alone: bool = False,
    ) -> None:
        if not isinstance(rubric, str) or not rubric.strip():
            raise ConfigurationError(f"LLMScore(rubric={rubric!r}): give a text")
        if isinstance(at_least, bool) or not isinstance(at_least, int | float) or not 0 < at_least <= _SCALES[-1]:
            raise ConfigurationError(f"LLMScore(at_least={at_least!r}): give a number above 0, of 1, 10 or 100")
        if complete is not None and (client is not None or model is not None):
            raise ConfigurationError("LLMScore(complete=…) grades on its own: leave out client= and model=")
        self.rubric = rubric
        self.at_least = at_least
        self.scale = next(scale for scale in _SCALES if at_least <= scale)
        self.auxiliary = not alone
        self._complete = None if complete is None else checked(complete, "LLMScore(complete=…)")
        self._judge = AnthropicJudge(model, client)
        self.is_async = self._judge.is_async if complete is None else is_async(complete)

    def prepare(self) -> None:
        """Find a missing key before any work is done."""
        if self._complete is None:
            self._judge.prepare()

    def steps(self, value: Any) -> Steps:
        question = f"How good is the state, from 0 to {self.scale}, by this rubric? {self.rubric}"
        try:
            if self._complete is None:
                return (
                    yield Ask(self._judge.ask, question, value, self._form(), self._read, blocking=not self.is_async)
                )
            answer = 'Answer with JSON and nothing else: {"score": <number>, "reason": "<what to improve>"}'
            said = yield Ask(self._complete, text_prompt(question, value, answer), blocking=True)
        except (ToolCallRefused, ConfigurationError):
            raise
        except Exception as exc:  # the model is the user's, or a network: a failure is no score
            return Verdict(None, f"the scorer failed: {redact_error(exc)}")
        return self._read_text(said)

    def _form(self) -> dict[str, Any]:
        return {
            "name": "score",
            "description": "Give the score of the state.",
            "input_schema": {
                "type": "object",
                "properties": {
                    "score": {"type": "number", "description": f"from 0, useless, to {self.scale}, perfect"},
                    "reason": {"type": "string", "description": "one or two sentences: what to improve"},
                },
                "required": ["score", "reason"],
                "additionalProperties": False,
            },
        }

    def _read_text(self, said: Any) -> Verdict:
        if not isinstance(said, str):
            return Verdict(None, f"the scorer answered with a {type(said).__name__}, not a text")
        try:
            given = {"score": parse_json(said)} if _NUMBER.fullmatch(said) else object_in(said)
        except ValueError:
            return Verdict(None, "the scorer's answer is neither one number nor one JSON object")
        return self._read(given)

    def _read(self, given: Any) -> Verdict:
        """The verdict of a filled-in form, read strictly."""
        if not isinstance(given, dict) or set(given) - {"score", "reason"}:
            return Verdict(None, "the scorer's answer is not of the form {score: number, reason: text}")
        score, reason = given.get("score"), given.get("reason")
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= self.scale:
            return Verdict(None, f"the scorer gave no number from 0 to {self.scale}")
        if reason is not None and not isinstance(reason, str):
            return Verdict(None, "the scorer's reason is not a text")
        passed = score >= self.at_least
        wanted = "" if passed else f", at least {self.at_least:g} is needed"
        text = f"It scored {score:g} of {self.scale}{wanted}{f': {reason}' if reason else '.'}"
        return Verdict(passed, text, score=score)
