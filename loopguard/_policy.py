"""Policy files: a Guard as data, read strictly. Nothing that they name is imported, but plugins by their name."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from loopguard import _plugins
from loopguard.budgets import Budget
from loopguard.exceptions import ConfigurationError
from loopguard.guardrails import ApproveTool, CircuitBreaker, LoopLimit, MaxSteps, RateLimit, Retry, Timeout
from loopguard.questions import Inbox, ask_in_terminal
from loopguard.redaction import display

__all__ = ["read_policy"]

G = TypeVar("G")

KINDS: Mapping[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (MaxSteps, LoopLimit, Budget, RateLimit, CircuitBreaker, ApproveTool, Retry, Timeout)
}
"""The guardrails that data can express. Which keys each takes, policy.schema.json says."""
APPROVERS: Mapping[str, Callable[[], Any]] = {"inbox": Inbox, "terminal": lambda: ask_in_terminal}
"""Who can be asked, by the name that a policy file gives them. A plugin can't take one of these names."""

_DEEPEST = 50
"""How deep tables and arrays may stand within one another."""


def read_policy(path: str | os.PathLike[str], make: Callable[..., G]) -> tuple[G, str]:
    """(the Guard that make makes of a policy file, ``sha256:…`` of its text).

    Raises ConfigurationError, with the place, for whatever the schema doesn't allow.
    """
    try:
        source = Path(path).read_bytes()
        text = source.decode()
        document = tomllib.loads(text)
    except OSError as exc:
        raise ConfigurationError(f"the policy file {path!s} can't be read: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigurationError(f"the policy file {path!s} is not valid TOML: {exc}") from exc
    file = _File(str(path), text)
    guardrails: list[Any] = []
    for name, value in document.items():
        with file.part(name):
            _check_size(value)
    with file.part():
        _check(document, schema())
    for name, value in document.items():
        if name in KINDS:
            for index, table in enumerate(value if isinstance(value, list) else [value]):
                with file.part(name, index=index):
                    guardrails.append(KINDS[name](**_arguments(name, table)))
    for name, table in file.tables(document, "plugins"):
        with file.part("plugins", name):
            guardrails.append(_plugins.load_plugin(_plugins.GUARDRAILS, name, f"guardrail {name!r}")(**table))
    for name, table in file.tables(document, "tools"):
        with file.part("tools", name):
            _check(table, schema()["$defs"]["tool"])
            make(tools={name: table})  # which checks the values
    options = {name: document[name] for name in ("mode", "max_refusals", "tools") if name in document}
    with file.part():
        return make(*guardrails, **options), f"sha256:{hashlib.sha256(source).hexdigest()}"


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of policy files."""
    text = importlib.resources.files("loopguard").joinpath("policy.schema.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]  # the file holds an object


def _arguments(name: str, table: Any) -> dict[str, Any]:
    """A guardrail's table as its constructor takes it."""
    _check(table, schema()["$defs"][name])
    arguments = dict(table)
    for key in ("approver", "extend"):
        if key in arguments:
            arguments[key] = _approver(arguments[key], key)
    units = arguments.pop("units", {})
    _check(units, schema()["$defs"]["Budget"]["properties"]["units"])
    for unit in units:
        if unit in schema()["$defs"]["Budget"]["properties"] or not unit.isidentifier():
            raise _Wrong(f"{unit!r} is no unit of your own: give a name that isn't a key of [Budget]", unit)
    return {**arguments, **units}


def _check_size(value: Any, key: str | None = None, depth: int = 1) -> None:
    """Refuse what could not even be shown in a message: tomllib bounds neither integers nor dotted keys."""
    if isinstance(value, int) and value.bit_length() > 63:
        raise _Wrong(f"{key or 'it'} is an integer of {value.bit_length()} bits: give one of 64 at most", key)
    if isinstance(value, dict | list):
        if depth > _DEEPEST:
            raise _Wrong(f"tables and arrays stand more than {_DEEPEST} deep within one another", key)
        for name, inner in value.items() if isinstance(value, dict) else ((key, each) for each in value):
            _check_size(inner, name, depth + 1)


def _check(table: Any, rule: Mapping[str, Any]) -> None:
    """Refuse keys that aren't known, and a table without those that it needs. Values are the constructors' to check."""
    if not isinstance(table, dict):
        raise _Wrong(f"{table!r} is no table: give keys and values")
    known = rule.get("properties")
    for key in table:
        if known is not None and key not in known:
            raise _Wrong(
                f"unknown key {key!r}; allowed are: {', '.join(known)}. (A policy file holds data. What needs "
                f"code, such as WrapTool or a function, is written in Python.)",
                key,
            )
    for key in rule.get("required", ()):
        if key not in table:
            raise _Wrong(f"the key {key!r} is missing; allowed are: {', '.join(known or ())}")


def _approver(name: Any, key: str) -> Any:
    if isinstance(name, str) and name in APPROVERS:
        return APPROVERS[name]()
    own = ", ".join(map(repr, APPROVERS))
    if not isinstance(name, str) or not re.fullmatch(schema()["$defs"]["name"]["pattern"], name):
        raise _Wrong(
            f"approver {name!r}: give {own} or the name of an installed plugin's; import paths aren't followed",
            key,
        )
    try:
        found = _plugins.load_plugin(
            _plugins.APPROVERS, name, f"approver {name!r}: give {own} or an installed plugin's name"
        )
    except ConfigurationError as exc:
        raise _Wrong(str(exc), key) from None
    return found() if isinstance(found, type) else found


class _Wrong(ConfigurationError):
    """A mistake in a table, and the key that it is about."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class _File:
    """A policy file, for messages that say where."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text

    def tables(self, document: Mapping[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The tables within a table."""
        with self.part(name):
            _check(document.get(name, {}), {})
        for inner, table in document.get(name, {}).items():
            with self.part(name, inner):
                _check(table, {})
            yield inner, table

    @contextmanager
    def part(self, *table: str, index: int = 0) -> Iterator[None]:
        """What is raised inside is about this table, the index-th of its name."""
        try:
            yield
        except (ConfigurationError, TypeError) as exc:
            named = re.search(r"\((\w+)", str(exc))  # constructors say MaxSteps(n=…)
            key = exc.key if isinstance(exc, _Wrong) else named[1] if named else None
            line = self._line(table, index, key)
            place = f", [{display('.'.join(table))}]" if table else ""
            where = "".join((self.path, f", line {line}" if line else "", place))
            raise ConfigurationError(f"{where}: {exc}") from exc

    def _line(self, table: tuple[str, ...], index: int, key: str | None) -> int | None:
        """The line of the key, else of its table, as far as a look at the lines can tell: tomllib doesn't say."""
        here: tuple[str, ...] = ()
        count = 0
        found = None
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := re.match(r"\s*\[\[?([^\[\]]+)\]", line):
                here = _parts(header[1])
                count += here == table
                place = here
            elif name := re.match(r"\s*([^=#]+)=", line):
                place = (*here, *_parts(name[1]))
            else:
                continue
            if count in (0, index + 1):
                if key is not None and place == (*table, key):
                    return number
                if place == table:
                    found = number
        return found


def _parts(name: str) -> tuple[str, ...]:
    """The parts of a dotted name of TOML."""
    return tuple(part.strip("\"'") for part in re.findall(r'"[^"]*"|\'[^\']*\'|[^\s."\']+', name))
