"""The border between a model and a Python function: a schema out, checked arguments in, a result out."""

from __future__ import annotations

import contextlib
import copy
import difflib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Literal

from loopguard._json import parse_json
from loopguard.exceptions import ConfigurationError

if TYPE_CHECKING:
    from docstring_parser import Docstring
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema
    from pydantic_core import ErrorDetails

__all__ = [
    "Arguments",
    "InvalidArguments",
    "ToolUse",
    "convert",
    "reader",
    "schema_generator",
    "tool_result",
    "tool_uses",
    "unknown_tool",
]

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_BLOCKS = {
    "text": "text",
    "image": "source",
    "document": "source",
    "search_result": "content",
    "tool_reference": "tool_name",
    "browser_state": "tabs",
}
"""What a tool_result may contain, each with a key it can't be without: a row of a table may have a `type` too."""
_MOST = 10
"""Problems named in one error: a list of a thousand wrong items is one mistake, not a thousand."""


class InvalidArguments(ValueError):
    """A model's arguments don't fit the function, which did not run.

    `str(error)` is for the model to act on. It names parameters and types, and never quotes a value.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems
        """One sentence for each mistake."""

    def __str__(self) -> str:
        named = [f"- {problem}" for problem in self.problems[:_MOST]]
        if len(self.problems) > _MOST:
            named.append(f"- and {len(self.problems) - _MOST} more")
        return "\n".join(["The arguments don't fit, so the tool did not run. Correct them and call it again:", *named])


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A model's wish to call a tool."""

    id: str
    name: str
    input: Any
    """The arguments as the model gave them: a mapping, or JSON text."""


class Arguments:
    """What a function takes, for a model: its JSON schema, and a check of the JSON that comes back.

    A value is accepted if it is what the schema asks for: pydantic's strict JSON mode ("2026-01-01" is a date, an
    object a dataclass), in which "5" is no number, 1 no boolean and true no integer, but 5.0 is an integer, as JSON
    Schema has it. A parameter without an annotation, or with one that has no JSON form, takes anything.

    `skip_first` leaves out the self or cls of a method that will be bound. Built at first use and kept.
    """

    def __init__(self, fn: Callable[..., Any], *, skip_first: bool = False) -> None:
        self._fn = fn
        self._skip_first = skip_first

    def input_schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments, an object, as Anthropic's `input_schema` has it; the caller's to change."""
        return copy.deepcopy(self._schema)

    def tool_definition(self, name: str, description: str | None = None) -> dict[str, Any]:
        """An entry of Anthropic's `tools=`; the description is by default the docstring without its parameters.

        Raises ConfigurationError for a name that the API would refuse.
        """
        if not _TOOL_NAME.fullmatch(name):
            raise ConfigurationError(
                f"the tool name {name!r} must be 1 to 128 letters, digits, _ or - (^[a-zA-Z0-9_-]{{1,128}}$)"
            )
        text = self._description if description is None else description
        return {"name": name, "description": text, "input_schema": self.input_schema()}

    def validate(self, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """The arguments that the model gave, by name, converted to the annotated types; defaults aren't filled in.

        `arguments` is a mapping or JSON text. Raises InvalidArguments, and nothing else, if they don't fit.
        """
        given = _parse(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(given, Mapping):
            raise InvalidArguments(f"the arguments must be a JSON object, not {_kind(given)}")
        missing = [name for name in self._required if name not in given]
        problems = [f"{_shown(name)} is missing{_expected(self._adapters[name])}" for name in missing]
        values: dict[str, Any] = {}
        for name, value in given.items():
            parameter = self._named.get(name, self._var_keyword) if isinstance(name, str) else None
            if parameter is None:
                problems.append(f"{_shown(name)} is not a parameter; {_closest(name, self._named)}")
                continue
            try:
                values[name] = convert(name, self._adapters[parameter.name], value)
            except InvalidArguments as error:
                problems += error.problems
        if problems:
            raise InvalidArguments(*problems)
        return values

    def to_call(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """How to call the function with what `validate` gave: positional and keyword arguments.

        Where a later argument can only be given by position, the defaults before it are filled in.
        """
        keywords = dict(values)
        more = keywords.pop(self._var_positional.name, ()) if self._var_positional else ()
        # Nothing can follow by position before all of these are there; without *args only the positional-only need it.
        kinds = [Parameter.POSITIONAL_ONLY, *([Parameter.POSITIONAL_OR_KEYWORD] if more else [])]
        positional = [p for p in self._parameters if p.kind in kinds]
        if not more:
            while positional and positional[-1].name not in keywords:
                positional.pop()
        args = [keywords.pop(p.name, p.default) for p in positional]
        for parameter, arg in zip(positional, args, strict=True):
            if arg is Parameter.empty:
                raise TypeError(f"missing a required argument: {parameter.name!r}")
        return (*args, *more), keywords

    @cached_property
    def _parameters(self) -> list[Parameter]:
        try:
            parameters = list(_signature(self._fn).parameters.values())
        except (TypeError, ValueError):  # a builtin without a signature takes what it takes
            return [Parameter("kwargs", Parameter.VAR_KEYWORD)]
        skip = self._skip_first and parameters and parameters[0].kind is not Parameter.VAR_POSITIONAL
        return parameters[1:] if skip else parameters

    @cached_property
    def _named(self) -> dict[str, Parameter]:
        return {p.name: p for p in self._parameters if p.kind is not Parameter.VAR_KEYWORD}

    @cached_property
    def _required(self) -> list[str]:
        return [p.name for p in self._named.values() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]

    @cached_property
    def _var_positional(self) -> Parameter | None:
        return next((p for p in self._parameters if p.kind is Parameter.VAR_POSITIONAL), None)

    @cached_property
    def _var_keyword(self) -> Parameter | None:
        return next((p for p in self._parameters if p.kind is Parameter.VAR_KEYWORD), None)

    @cached_property
    def _adapters(self) -> dict[str, TypeAdapter[Any] | None]:
        names = _names_in_reach(self._fn)
        hints = {p.name: _hint(p.annotation, names) for p in self._parameters}
        if star := self._var_positional:
            hints[star.name] = types.GenericAlias(list, (hints[star.name],))
        return {name: reader(hint) for name, hint in hints.items()}

    @cached_property
    def _schema(self) -> dict[str, Any]:
        from pydantic import TypeAdapter

        typed: list[tuple[str, Literal["validation"], TypeAdapter[Any]]]
        typed = [(name, "validation", adapter) for name, adapter in self._adapters.items() if adapter is not None]
        found, shared = TypeAdapter.json_schemas(typed, schema_generator=schema_generator())
        properties = {name: dict(found.get((name, "validation"), {})) for name in self._adapters}
        for parameter in self._doc.params:
            name = parameter.arg_name.lstrip("*")
            if name in properties and parameter.description:
                properties[name].setdefault("description", parameter.description)
        extra = (properties.pop(self._var_keyword.name) or True) if self._var_keyword else False
        schema = {"type": "object", "properties": properties, "required": self._required, "additionalProperties": extra}
        return {**schema, "$defs": shared["$defs"]} if "$defs" in shared else schema

    @cached_property
    def _doc(self) -> Docstring:
        import docstring_parser

        text = inspect.getdoc(_unbound(self._fn)) or ""
        try:
            return docstring_parser.parse(text)
        except Exception:  # a docstring is free text, and the parser trips over some: ": :" is an IndexError
            whole = docstring_parser.Docstring()
            whole.short_description = text
            return whole

    @property
    def _description(self) -> str:
        from docstring_parser.common import DocstringParam

        sections = [m for m in self._doc.meta if m.description and not isinstance(m, DocstringParam)]
        parts = [self._doc.short_description, self._doc.long_description]
        parts += [f"{' '.join([m.args[0].title(), *m.args[1:]])}: {m.description}" for m in sections]
        return "\n\n".join(part for part in parts if part)


class UnknownTool(InvalidArguments):
    """A model called a tool that there isn't."""

    def __str__(self) -> str:
        return str(self.problems[0])


def tool_uses(message: Any) -> list[ToolUse]:
    """The tool_use blocks of an SDK message, a dict of that shape, or a list of content blocks, in order.

    Raises TypeError for anything else, ValueError for a tool_use without an id or a name.
    """
    content = message if isinstance(message, list | tuple) else _field(message, "content")
    if not isinstance(content, list | tuple | str):
        raise TypeError(f"expected a message or its list of content blocks, got {type(message).__name__}")
    uses = []
    for block in content:
        if _field(block, "type") == "tool_use":
            use = ToolUse(_field(block, "id"), _field(block, "name"), _field(block, "input"))
            if not (isinstance(use.id, str) and isinstance(use.name, str)):
                raise ValueError("a tool_use block needs an id and a name, both text")
            uses.append(replace(use, input={}) if use.input is None or use.input == "" else use)
    return uses


def tool_result(id: str, value: Any, *, is_error: bool = False, limit: int | None = None) -> dict[str, Any]:
    """A tool_result block that an HTTP client can send, whatever the value is: it never raises.

    Text and lists of content blocks stay what they are, None is empty, anything else becomes JSON. Text beyond
    `limit` characters (of all text blocks together) is cut, and a note after it says how much.
    """
    content = _content(value)
    if isinstance(content, str):
        content, _ = _cut(content, limit)
    else:
        for block in content:
            if block["type"] == "text":
                block["text"], limit = _cut(block["text"], limit)
    result = {"type": "tool_result", "tool_use_id": id, "content": content}
    return {**result, "is_error": True} if is_error else result


def unknown_tool(name: str, known: Iterable[str]) -> str:
    """What to tell a model that called a tool which isn't there."""
    return f"There is no tool {_shown(name)}, so nothing ran; {_closest(name, known)}."


# --- from a function to its types ---


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):  # there an annotation is evaluated when it is looked at, and may fail
        import annotationlib

        return inspect.signature(fn, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(fn)


def _unbound(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What a partial is of: its docstring and its names are that function's."""
    while isinstance(fn, partial):
        fn = fn.func
    return fn


def _names_in_reach(fn: Callable[..., Any]) -> dict[str, Any]:
    """What an annotation of fn may name: its module's globals, and what its body closes over."""
    fn = inspect.unwrap(_unbound(fn))
    names = dict(getattr(fn, "__globals__", {}))
    code = getattr(fn, "__code__", None)
    for name, cell in zip(code.co_freevars if code else (), getattr(fn, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell: the name isn't bound yet
            names[name] = cell.cell_contents
    return names


def _hint(annotation: Any, names: dict[str, Any]) -> Any:
    if annotation is Parameter.empty:
        return Any

    def probe() -> None: ...

    probe.__annotations__ = {"it": annotation}
    try:
        return typing.get_type_hints(probe, names, include_extras=True)["it"]
    except Exception:  # the annotation is the user's text: evaluating it can raise anything
        return Any


def reader(hint: Any) -> TypeAdapter[Any] | None:
    """Pydantic's reader of a type, or None where anything goes."""
    if hint is Any or hint is object:
        return None
    from pydantic import TypeAdapter

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(_readable(hint) if sys.version_info < (3, 12) else hint)
        adapter.json_schema(schema_generator=schema_generator())
    except Exception:  # building runs the user's own schema hooks; a class that has no JSON form ends here too
        return None
    return adapter


def _readable(hint: Any) -> Any:
    """hint with each typing.TypedDict as typing_extensions' twin: before Python 3.12 pydantic reads only the latter."""
    if typing.is_typeddict(hint):
        import typing_extensions

        fields: dict[str, Any] = {}
        for name, field in typing.get_type_hints(hint, include_extras=True).items():
            marker: Any = typing.get_origin(field)
            if marker in (typing.Required, typing.NotRequired):
                (field,) = typing.get_args(field)
            else:
                marker = typing.Required if name in hint.__required_keys__ else typing.NotRequired
            fields[name] = marker[_readable(field)]
        make: Any = typing_extensions.TypedDict
        return make(hint.__name__, fields)
    origin: Any = typing.get_origin(hint)
    args = typing.get_args(hint)
    inner = tuple(_readable(arg) for arg in args)
    if inner == args:
        return hint
    return (typing.Union if origin is types.UnionType else origin)[inner]


@cache
def schema_generator() -> type[GenerateJsonSchema]:
    """What makes pydantic's JSON schemas without a warning."""
    from pydantic import json_schema

    class Generator(json_schema.GenerateJsonSchema):
        def emit_warning(self, kind: Any, detail: str) -> None:
            """What has no JSON form, such as some defaults, is left out silently."""

    return Generator


# --- from a model's JSON to values ---


def _parse(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise InvalidArguments(f"the arguments can't be read: {error}") from None


def convert(name: str, adapter: TypeAdapter[Any] | None, value: Any) -> Any:
    """The value, read strictly as the reader's type. Raises InvalidArguments, which call it by this name."""
    if adapter is None:
        return value
    from pydantic import ValidationError

    # The errors of pydantic quote values, so they don't stay as the cause.
    try:
        result = _read(adapter, value)
        return list(result) if isinstance(result, Iterator) else result  # pydantic checks an Iterable's items late
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise InvalidArguments(*(f"{_shown(_path(name, d['loc']))} {_problem(d)}" for d in details)) from None
    except Exception as error:  # a validator is the user's code: it can raise anything
        raise InvalidArguments(f"{_shown(name)} can't be read ({type(error).__name__})") from None


def _read(adapter: TypeAdapter[Any], value: Any) -> Any:
    from pydantic import ValidationError

    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # not JSON: a caller in Python passes objects of the right types
        return adapter.validate_python(value, strict=True)
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError:
        whole = json.dumps(json.loads(text, parse_float=_whole))
        if whole != text:
            with contextlib.suppress(ValidationError):
                return adapter.validate_json(whole, strict=True)
        raise


def _whole(number: str) -> float:
    value = float(number)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


# --- what to tell a model ---


def _problem(error: ErrorDetails) -> str:
    """What is wrong and what is expected, without the value."""
    from pydantic_core import core_schema

    kind, text = error["type"], error["msg"]
    if kind in _PROBLEMS:
        return _PROBLEMS[kind].format_map(error.get("ctx", {}))
    if kind in ("value_error", "assertion_error") or kind not in typing.get_args(core_schema.ErrorType):
        text = _unquoted(text, error["input"])  # the text is a validator's own, which may quote the value
    ending = f", not {_kind(error['input'])}" if kind.endswith("_type") else ""
    return re.sub(r"^(Input |Value error, |Assertion failed, )", "", text) + ending


_PROBLEMS = {
    "missing": "is missing",
    "extra_forbidden": "is not a known name",
    "unexpected_keyword_argument": "is not a known name",
    "union_tag_invalid": "should have one of these as its {discriminator}: {expected_tags}",
    "json_invalid": "can't be read: it is nested too deeply, or has a number too long or half a surrogate pair",
}


def _unquoted(text: str, value: Any) -> str:
    """The first line of text, with every part of value taken out before anything is cut."""
    quoted: set[str] = set()
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            rest += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            rest += part
        elif isinstance(part, str | int | float):
            quoted |= {str(part), repr(part).strip("'\"")}
    for part in sorted(quoted - {""}, key=len, reverse=True):  # the longest first: a shorter one may be part of it
        if part in text:
            text = re.sub(rf"(?<!\w){re.escape(part)}(?!\w)", "…", text)
    return text.partition("\n")[0][:300]


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", int: "an integer", float: "a decimal number", str: "a string", list: "an array"}
    return "null" if value is None else kinds.get(type(value), "an object")


def _expected(adapter: TypeAdapter[Any] | None) -> str:
    schema = adapter.json_schema(schema_generator=schema_generator()) if adapter else {}
    kinds = [choice["type"] for choice in schema.get("anyOf", [schema]) if "type" in choice]
    return f" (expected: {' or '.join(kinds)})" if kinds else ""


def _path(name: str, loc: Iterable[str | int]) -> str:
    return name + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc)


def _shown(name: object) -> str:
    """A name that a model made up, on one line and not too long."""
    text = repr(str(name))
    return text if len(text) <= 100 else text[:100] + "…'"


def _closest(name: object, known: Iterable[str]) -> str:
    wanted = str(name)[:100].casefold()
    likeness = {other: difflib.SequenceMatcher(None, wanted, other.casefold()).ratio() for other in known}
    names = sorted(likeness, key=likeness.__getitem__, reverse=True)
    more = f" and {len(names) - 30} more" if len(names) > 30 else ""
    return f"known, closest first: {', '.join(map(_shown, names[:30]))}{more}" if names else "there are none"


# --- from a value to a result ---


def _field(block: Any, name: str) -> Any:
    return block.get(name) if isinstance(block, Mapping) else getattr(block, name, None)


def _content(value: Any) -> Any:
    """A str, or a new list of content blocks."""
    if value is None:
        return ""
    if isinstance(value, str | bytes):
        return _clean(value)
    try:
        if isinstance(value, list | tuple) and value and all(map(_is_block, value)):
            return _clean(value)
        try:
            return _json(value)
        except ValueError:  # a lone surrogate, or bytes that are no text
            return _json(_clean(value))
    except Exception:  # a cycle, or anything that an object's own serializer raises
        return _clean(_repr(value))


def _is_block(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return False
    part = value.get(_BLOCKS.get(value["type"], ""))
    return isinstance(part, str) if value["type"] == "text" else part is not None


def _json(value: Any) -> str:
    import pydantic_core

    return pydantic_core.to_json(value, inf_nan_mode="strings", fallback=_repr).decode()


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # the user's __repr__
        return f"<{type(value).__name__}>"


def _clean(value: Any) -> Any:
    """value without what UTF-8 can't hold: halves of surrogate pairs are joined, or replaced if they are alone."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def _cut(text: str, limit: int | None) -> tuple[str, int | None]:
    """The text within the limit, and what is left of the limit."""
    if limit is None or len(text) <= limit:
        return text, limit if limit is None else limit - len(text)
    return f"{text[:limit]}\n[cut: {len(text) - limit:,} of {len(text):,} characters left out]", 0
