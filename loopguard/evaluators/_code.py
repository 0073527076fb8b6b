"""Evaluators that are code, not models: JSONFields, Matches and Check."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from loopguard._outcomes import Verdict, read_verdict
from loopguard._pipeline import Ask, Steps
from loopguard._schemas import InvalidArguments, convert, reader, schema_generator
from loopguard.evaluators._base import BaseEvaluator, checked, is_async
from loopguard.evaluators._json_schema import check_schema, problems
from loopguard.evaluators._objects import json_value, object_in
from loopguard.exceptions import ConfigurationError

__all__ = ["Check", "JSONFields", "Matches"]

_MOST = 10
"""Problems named in one reason."""


class JSONFields(BaseEvaluator):
    """The value holds one JSON object with these fields; the object, as a dict, is the verdict's value.

    It finds the object in a text, in a fence or in prose. Two that differ, one that isn't JSON, equal names in it,
    and NaN fail. A field has to be there, whatever it holds: ``null`` and ``""`` are for `Matches` and `Check` to
    refuse. A dict passes as it is.
    """

    def __init__(self, *names: str) -> None:
        if not all(isinstance(name, str) for name in names):
            raise ConfigurationError(f"JSONFields{names!r}: give the names of the fields")
        self.names = names

    def __call__(self, value: Any) -> Verdict:
        """Whether the object is there with its fields."""
        if isinstance(value, str):
            try:
                value = object_in(value)
            except ValueError as error:
                wanted = f" It needs: {', '.join(self.names)}." if self.names else ""
                return Verdict(False, f"{error}{wanted}")
        elif not isinstance(value, Mapping):
            return Verdict(False, f"The answer should be a text with a JSON object, not {_a(value)}.")
        missing = [name for name in self.names if name not in value]
        if missing:
            fields = "the field" if len(missing) == 1 else "the fields"
            return Verdict(False, f"The JSON object lacks {fields} {', '.join(missing)}. Answer with the whole object.")
        return Verdict(True, None, value)


class Matches(BaseEvaluator):
    """The value fits a type: a pydantic model, a dataclass, a TypedDict, any type pydantic reads, or a JSON schema.

    From a text it takes the JSON in it, as `JSONFields` does, and reads it strictly ("5" is no number); the parsed
    value becomes the verdict's, and so the loop's state. An object of the type passes as it is. The keywords of a
    JSON schema (a dict) that it doesn't know are a ConfigurationError.
    """

    def __init__(self, type: Any) -> None:
        self.type = type
        self._adapter: Any = None
        if isinstance(type, dict):
            check_schema(type)
            schema: Mapping[str, Any] = type
        else:
            self._adapter = None if inspect.isroutine(type) else reader(type)  # pydantic would call it
            if self._adapter is None:
                raise ConfigurationError(
                    f"Matches({type!r}): give a pydantic model, a dataclass, another type with a JSON form, or a schema"
                )
            schema = self._adapter.json_schema(schema_generator=schema_generator())
        self._find = object_in if "object" in schema.get("type", "object") else json_value

    def __call__(self, value: Any) -> Verdict:
        """Whether it fits, and what was parsed."""
        try:
            found = self._find(value) if isinstance(value, str) else value
            parsed, wrong = self._read(found)
        except ValueError as error:
            return Verdict(False, str(error))
        except RecursionError:
            return Verdict(False, "The answer is nested too deeply.")
        if wrong:
            more = [f"- and {len(wrong) - _MOST} more"] if len(wrong) > _MOST else []
            listed = "\n".join([*(f"- {problem}" for problem in wrong[:_MOST]), *more])
            return Verdict(False, f"The answer doesn't fit. Correct this and answer with all of it again:\n{listed}")
        return Verdict(True, None, parsed)

    def _read(self, found: Any) -> tuple[Any, list[str]]:
        if self._adapter is None:
            return found, list(problems(self.type, found))
        try:
            return convert("answer", self._adapter, found), []
        except InvalidArguments as error:
            return None, list(error.problems)


class Check(BaseEvaluator):
    """``fn(value)``, sync or async, says whether a value is good; if not, ``reason`` tells the model what to change.

    Any true value passes. `fn` may also return a Verdict or ``(bool, reason)``, whose reason comes first.
    """

    def __init__(self, fn: Callable[[Any], Any], reason: str) -> None:
        self.fn = checked(fn, "Check(fn=…)")
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigurationError(f"Check(reason={reason!r}): say what a value has to be like")
        self.reason = reason
        self.is_async = is_async(fn)

    def steps(self, value: Any) -> Steps:
        said = yield Ask(self.fn, value, blocking=True)
        if not isinstance(said, Verdict | tuple):
            said = bool(said)
        verdict = read_verdict(said, "Check")
        if verdict.passed is not True and verdict.reason is None:
            return Verdict(verdict.passed, self.reason)
        return verdict


def _a(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
