"""Failures as they are recorded, and raised again: never a class that the journal names, only ones that are known."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any

from loopguard import exceptions
from loopguard._outcomes import only_refusals
from loopguard.exceptions import ConfigurationError, JournalError, RecordedError, ToolCallRefused, ToolTimeout

__all__ = ["data_of", "error_data", "involved", "rebuilt", "unwound"]

_ATOMS = (str, int, float, bool, type(None))


def error_data(exc: BaseException) -> dict[str, Any]:
    """The failure as JSON data."""
    cause = only_refusals(exc)
    kind = type(cause or exc)
    made: dict[str, Any] = {
        "type": kind.__qualname__,
        "module": kind.__module__,
        "text": _text(cause or exc),
        "args": list(exc.args) if cause is None and all(type(arg) in _ATOMS for arg in exc.args) else None,
        "unwound": cause is not None or isinstance(exc, JournalError | ConfigurationError),
    }
    if isinstance(cause, ToolCallRefused):
        made["args"] = [arg if type(arg) in _ATOMS else str(arg) for arg in cause.args]
    return made


def involved(exc: BaseException) -> list[list[str]]:
    """(type, text) of a failure, of what it was raised from, and of the leaves of a group."""
    found: list[list[str]] = []
    todo: list[BaseException | None] = [exc]
    while todo and len(found) < 100:
        one = todo.pop()
        if one is None or [type(one).__qualname__, _text(one)] in found:
            continue
        found.append([type(one).__qualname__, _text(one)])
        todo += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            todo += one.exceptions
    return found


def _text(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # a user's __str__ may do anything
        return f"<{type(exc).__name__} without a text>"


def data_of(error: Any) -> dict[str, Any]:
    """What `error_data` gave: an event that was read from a journal holds that in the place of the exception."""
    data: dict[str, Any] = error.show()
    return data


def unwound(error: Mapping[str, Any]) -> bool:
    """Whether the body was only left because a guardrail said no, or the journal failed: it didn't fail itself."""
    return bool(error.get("unwound"))


def rebuilt(error: Mapping[str, Any], raises: tuple[type[BaseException], ...] = ()) -> BaseException:
    """The failure again: a builtin class, one of those declared, one of ours; else a RecordedError."""
    made = _made(error, _class(error, raises))
    if made is not None and _text(made) == error.get("text"):
        return made
    return RecordedError(f"{error.get('type')}: {error.get('text')}")


def _class(error: Mapping[str, Any], raises: tuple[type[BaseException], ...]) -> type[BaseException] | None:
    name, module = error.get("type"), error.get("module")
    for kind in raises:
        if (kind.__qualname__, kind.__module__) == (name, module):
            return kind
    source = {"builtins": builtins, "loopguard.exceptions": exceptions}.get(str(module))
    found: Any = getattr(source, str(name), None)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None
    return found if source is builtins or issubclass(found, ToolCallRefused | ToolTimeout) else None


def _made(error: Mapping[str, Any], kind: type[BaseException] | None) -> BaseException | None:
    args = error.get("args")
    if kind is None or not isinstance(args, list):
        return None
    try:
        return kind(*args)
    except Exception:  # a class that is declared may want other arguments than it was raised with
        return None
