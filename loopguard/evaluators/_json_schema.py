"""A JSON schema as a check: the keywords that answers are described with; any other is refused, never ignored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loopguard._fingerprints import loose
from loopguard.exceptions import ConfigurationError

__all__ = ["check_schema", "problems"]

_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "object": ("an object", lambda value: isinstance(value, dict)),
    "array": ("an array", lambda value: isinstance(value, list)),
    "string": ("a string", lambda value: isinstance(value, str)),
    "boolean": ("a boolean", lambda value: isinstance(value, bool)),
    "null": ("null", lambda value: value is None),
    "number": ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    "integer": ("an integer", lambda value: type(value) is int or (type(value) is float and value.is_integer())),
}
_BOUNDS: dict[str, tuple[type | tuple[type, ...], Callable[[Any, Any], bool], str]] = {
    "minimum": ((int, float), lambda value, bound: value >= bound, "should be at least {}"),
    "maximum": ((int, float), lambda value, bound: value <= bound, "should be at most {}"),
    "exclusiveMinimum": ((int, float), lambda value, bound: value > bound, "should be more than {}"),
    "exclusiveMaximum": ((int, float), lambda value, bound: value < bound, "should be less than {}"),
    "minLength": (str, lambda value, bound: len(value) >= bound, "should have at least {} characters"),
    "maxLength": (str, lambda value, bound: len(value) <= bound, "should have at most {} characters"),
    "pattern": (str, lambda value, bound: re.search(bound, value) is not None, "should match {}"),
    "minItems": (list, lambda value, bound: len(value) >= bound, "should have at least {} items"),
    "maxItems": (list, lambda value, bound: len(value) <= bound, "should have at most {} items"),
    "minProperties": (dict, lambda value, bound: len(value) >= bound, "should have at least {} names"),
    "maxProperties": (dict, lambda value, bound: len(value) <= bound, "should have at most {} names"),
}
_MANY = ("allOf", "anyOf", "oneOf")
_ONE = ("items", "additionalProperties", "not")
_NAMED = ("properties", "$defs", "definitions")
_NOTES = {
    *("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "format"),
    *("readOnly", "writeOnly"),
}
"""What describes and doesn't check: `format` is such a note in JSON Schema, too."""
_KNOWN = {*_BOUNDS, *_MANY, *_ONE, *_NAMED, *_NOTES, "$ref", "const", "enum", "required", "type", "uniqueItems"}


def check_schema(schema: Any, root: Any = None, where: str = "Matches") -> None:
    """ConfigurationError for what isn't a schema, or has a keyword that `problems` doesn't know."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ConfigurationError(f"{where}: a JSON schema is a dict, not {schema!r}")
    unknown = sorted(set(schema) - _KNOWN)
    if unknown:
        raise ConfigurationError(
            f"{where}: the keyword {unknown[0]!r} isn't supported; known: {', '.join(sorted(_KNOWN))}"
        )
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in _TYPES:
            raise ConfigurationError(f"{where}: there is no type {kind!r}; known: {', '.join(_TYPES)}")
    if "$ref" in schema:
        _target(root, schema["$ref"], where)
    if "pattern" in schema:
        try:
            re.compile(schema["pattern"])
        except re.error as error:
            raise ConfigurationError(f"{where}: the pattern {schema['pattern']!r} can't be read: {error}") from None
    for name in _MANY:
        for number, part in enumerate(schema.get(name, ())):
            check_schema(part, root, f"{where}.{name}[{number}]")
    for name in _ONE:
        if name in schema:
            check_schema(schema[name], root, f"{where}.{name}")
    for name in _NAMED:
        for key, part in schema.get(name, {}).items():
            check_schema(part, root, f"{where}.{name}.{key}")


def problems(schema: Any, value: Any, path: str = "answer", root: Any = None) -> Iterator[str]:
    """What doesn't fit, a sentence each, for a model to act on; values aren't quoted. RecursionError if too deep."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        if not schema:
            yield f"'{path}' should not be there"
        return
    if "$ref" in schema:
        yield from problems(_target(root, schema["$ref"]), value, path, root)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_TYPES[kind][1](value) for kind in kinds):
        yield f"'{path}' should be {' or '.join(_TYPES[kind][0] for kind in kinds)}, not {_kind(value)}"
        return
    if "enum" in schema and loose(value) not in map(loose, schema["enum"]):
        yield f"'{path}' should be one of {', '.join(map(repr, schema['enum']))}"
    if "const" in schema and loose(value) != loose(schema["const"]):
        yield f"'{path}' should be {schema['const']!r}"
    for name, (kind, holds, text) in _BOUNDS.items():
        if (
            name in schema
            and isinstance(value, kind)
            and not isinstance(value, bool)
            and not holds(value, schema[name])
        ):
            yield f"'{path}' {text.format(schema[name])}"
    if isinstance(value, dict):
        yield from _in_object(schema, value, path, root)
    if isinstance(value, list):
        if schema.get("uniqueItems") and len(set(map(loose, value))) < len(value):
            yield f"'{path}' should not have an item twice"
        if "items" in schema:
            for number, item in enumerate(value):
                yield from problems(schema["items"], item, f"{path}[{number}]", root)
    for part in schema.get("allOf", ()):
        yield from problems(part, value, path, root)
    for name, allowed in (("anyOf", "one"), ("oneOf", "exactly one")):
        if name in schema:
            fits = sum(not any(problems(part, value, path, root)) for part in schema[name])
            if not fits or (fits > 1 and name == "oneOf"):
                yield f"'{path}' should fit {allowed} of the {len(schema[name])} forms that are allowed"
    if "not" in schema and not any(problems(schema["not"], value, path, root)):
        yield f"'{path}' has a form that is not allowed"


def _in_object(schema: Mapping[str, Any], value: dict[str, Any], path: str, root: Any) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"'{path}.{name}' is missing"
    for name, item in value.items():
        if name in known:
            yield from problems(known[name], item, f"{path}.{name}", root)
        elif schema.get("additionalProperties", True) is False:
            yield f"'{path}' has a name that is not known; known: {', '.join(known) or 'none'}"
        elif "additionalProperties" in schema:
            yield from problems(schema["additionalProperties"], item, f"{path}.…", root)


def _target(root: Any, reference: Any, where: str = "Matches") -> Any:
    target = root
    for step in str(reference).removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    if target is None or not str(reference).startswith("#"):
        raise ConfigurationError(
            f"{where}: $ref {reference!r} leads nowhere; only parts of the same schema can be named"
        )
    return target


def _kind(value: Any) -> str:
    return next((text for text, fits in reversed(_TYPES.values()) if fits(value)), f"a {type(value).__name__}")
