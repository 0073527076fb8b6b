"""Values as JSON and back, by their annotations; what would come back changed is found when it is written."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import sys
import types
import typing
from typing import Any

from loopguard.exceptions import CheckpointError

__all__ = ["Codec", "codec_for", "hints_of", "kinds_of", "parsed", "shown"]

_ATOMS = frozenset({str, int, bool, type(None), bytes})
_TEXT = frozenset({str})
_DEEP = 200
"""How deep what is only shown is walked."""


class Codec:
    """Values of one annotation as JSON texts.

    What is written is read back and compared at once, for each new mix of types: a subclass that loses
    fields, int keys that turn into strings, a set that turns into a list are a CheckpointError.
    """

    def __init__(self, hint: Any) -> None:
        self.hint = hint
        self._checked: set[frozenset[Any]] = set()

    @functools.cached_property
    def _adapter(self) -> Any:
        from pydantic import ConfigDict, TypeAdapter

        if isinstance(self.hint, Unresolved):
            raise CheckpointError(
                f"the annotation {str(self.hint)!r} can't be resolved: define what it names in the module"
            )
        # in a list, so that the configuration reaches dataclasses and typed dicts, too
        config = ConfigDict(
            ser_json_bytes="base64",
            val_json_bytes="base64",
            ser_json_inf_nan="strings",
            arbitrary_types_allowed=True,
        )
        hint = _modern(self.hint) if sys.version_info < (3, 12) else self.hint
        return TypeAdapter(list[hint], config=config)  # type: ignore[valid-type]  # known only at run time

    def encode(self, value: Any) -> bytes:
        """The JSON text; CheckpointError where it would not come back as it is."""
        kinds: set[Any] = set()
        try:
            text: bytes = self._adapter.dump_json([_plain(value, kinds)], warnings=False)[1:-1]
            mix = frozenset(kinds)
            if mix not in self._checked:
                difference = _difference(value, self.decode(text), "the value")
                if difference is not None:
                    raise CheckpointError(f"{difference} (annotated as {_name(self.hint)}); annotate what it really is")
                self._checked.add(mix)
        except CheckpointError:
            raise
        except Exception as exc:  # serializers and validators are the user's, too
            raise CheckpointError(
                f"a {type(value).__name__} can't be written as {_name(self.hint)}: {_first_line(exc)}"
            ) from exc
        return text

    def decode(self, text: bytes) -> Any:
        """The value; CheckpointError where the text no longer fits the annotation."""
        adapter = self._adapter
        try:
            return adapter.validate_json(b"[" + text + b"]")[0]
        except Exception as exc:  # validators are the user's, too
            raise CheckpointError(f"what was recorded can't be read as {_name(self.hint)}: {_first_line(exc)}") from exc


@functools.lru_cache(1024)
def _cached(hint: Any) -> Codec:
    return Codec(hint)


def codec_for(hint: Any) -> Codec:
    """The codec of an annotation, made once."""
    try:
        return _cached(hint)
    except TypeError:  # not hashable
        return Codec(hint)


def hints_of(fn: Any) -> dict[str, Any]:
    """The annotations of a function, None as type(None); what can't be resolved as Unresolved."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not inspect.isroutine(fn) and not inspect.isclass(fn):
        fn = type(fn).__call__
    space = {**getattr(fn, "__globals__", {}), **_closure(fn)}
    return {name: _resolved(hint, space) for name, hint in getattr(fn, "__annotations__", {}).items()}


def _closure(fn: Any) -> dict[str, Any]:
    cells = zip(
        getattr(getattr(fn, "__code__", None), "co_freevars", ()), getattr(fn, "__closure__", None) or (), strict=False
    )
    return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty one raises
    except ValueError:
        return False
    return True


def _resolved(hint: Any, space: dict[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"it": hint})
    try:
        found = typing.get_type_hints(holder, space, include_extras=True)["it"]
    except Exception:  # annotations are the user's, and may name what can't be found from here
        return Unresolved(str(hint))
    return Any if isinstance(found, typing.TypeVar) else found


class Unresolved(str):
    """An annotation that names what can't be found."""

    __slots__ = ()

    def __or__(self, other: Any) -> Unresolved:
        return self

    __ror__ = __or__


def shown(value: Any) -> bytes:
    """A JSON text for people and exporters: never fails, never runs long, placeholders where there is no JSON."""
    from pydantic_core import to_json

    try:
        return to_json(value, fallback=_placeholder, inf_nan_mode="strings", bytes_mode="base64")
    except Exception:  # surrogates, cycles, serializers that fail: whatever it is, it is only shown
        return json.dumps(_presentable(value, 0), ensure_ascii=False).encode()


def parsed(text: bytes) -> Any:
    """The data of a JSON text that was written here. ValueError where it is none."""
    from pydantic_core import from_json

    try:
        return from_json(text)
    except ValueError:
        return json.loads(text)  # what is nested deeper than pydantic reads, too


def _presentable(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < _DEEP and type(value) is dict:
        return {str(_presentable(_text(key), 0)): _presentable(item, depth + 1) for key, item in list(value.items())}
    if depth < _DEEP and type(value) in (list, tuple, set, frozenset):
        return [_presentable(item, depth + 1) for item in list(value)]
    return _placeholder(value)


def _text(key: Any) -> str:
    return (
        key
        if isinstance(key, str)
        else repr(key)
        if type(key) in (int, float, bool, type(None))
        else type(key).__name__
    )


def _placeholder(value: Any) -> str:
    kind = type(value)
    return f"<{kind.__module__}.{kind.__qualname__}>"


def _first_line(exc: Exception) -> str:
    lines = str(exc).splitlines() or [type(exc).__name__]
    return " ".join(line.strip() for line in lines[:3])


def _name(hint: Any) -> str:
    return (
        getattr(hint, "__name__", None) or repr(hint) if isinstance(hint, type) else repr(hint).replace("typing.", "")
    )


def _is_wire(kind: type) -> bool:
    """Whether it is a model of the anthropic SDK, which goes over the wire, and comes back, as a dict."""
    return kind.__module__.startswith("anthropic.") and hasattr(kind, "to_dict")


def _plain(value: Any, kinds: set[Any]) -> Any:
    """The value with the SDK's objects in the dicts and lists of a message list as the dicts that are sent.

    Collects the types that it meets.
    """
    kind = type(value)
    kinds.add(kind)
    if kind in _ATOMS:
        return value
    if kind is list:
        found = set(map(type, value))
        kinds |= found
        return value if found <= _ATOMS else [_plain(item, kinds) for item in value]
    if kind is dict:
        kinds.update(("key", key) for key in set(map(type, value)) - _TEXT)
        found = set(map(type, value.values()))
        kinds |= found
        return value if found <= _ATOMS else {key: _plain(item, kinds) for key, item in value.items()}
    if kind is tuple:
        return tuple([_plain(item, kinds) for item in value])
    if kind is float:
        if not math.isfinite(value):
            kinds.add("not finite")
    elif _is_wire(kind):
        return value.to_dict(mode="json")
    elif dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            _plain(getattr(value, field.name, None), kinds)
    elif hasattr(kind, "model_fields"):
        for item in vars(value).values():
            _plain(item, kinds)
    return value


def kinds_of(value: Any) -> set[Any]:
    """The types that a value is made of, those of keys that are no texts as ("key", type)."""
    kinds: set[Any] = set()
    _plain(value, kinds)
    return kinds


def _difference(a: Any, b: Any, path: str) -> str | None:
    """What was a and came back as b differs in: None where it is the same."""
    kind = type(a)
    if _is_wire(kind) and type(b) is dict:
        a = a.to_dict(mode="json")
        kind = dict
    if kind is not type(b):
        return f"{path} is a {_kind(a)}, but would come back as a {_kind(b)}"
    if kind is dict:
        kinds = {key: type(key) for key in b}
        for key in a:
            if kinds.get(key) is not type(key):
                return f"the key {key!r} of {path} ({type(key).__name__}) would not come back as it is"
        return next((d for key in a if (d := _difference(a[key], b[key], f"{path}[{key!r}]"))), None) or _more(
            a, b, path
        )
    if kind in (list, tuple):
        pairs = enumerate(zip(a, b, strict=False))
        return next((d for i, (x, y) in pairs if (d := _difference(x, y, f"{path}[{i}]"))), None) or _more(a, b, path)
    if kind is float and a != a:
        return None if b != b else f"{path} would come back as {b!r}"
    fields = _fields(a)
    if fields is not None:
        return next((d for name in fields if (d := _field(a, b, name, path))), None)
    return None if a == b else f"{path} would come back as another {kind.__name__}"


def _more(a: Any, b: Any, path: str) -> str | None:
    return None if len(a) == len(b) else f"{path} has {len(a)} items, and would come back with {len(b)}"


def _kind(value: Any) -> str:
    return type(value).__qualname__


def _fields(value: Any) -> list[str] | None:
    """The names of what a dataclass or a pydantic model holds."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    if hasattr(type(value), "model_fields"):
        return [*vars(value), *(getattr(value, "__pydantic_extra__", None) or ())]
    return None


_MISSING = object()


def _field(a: Any, b: Any, name: str, path: str) -> str | None:
    x, y = getattr(a, name, _MISSING), getattr(b, name, _MISSING)
    if (x is _MISSING) != (y is _MISSING):
        return f"{path}.{name} would be lost"
    return None if x is y else _difference(x, y, f"{path}.{name}")


def _modern(hint: Any) -> Any:
    """The annotation with each `typing.TypedDict`, which pydantic doesn't take before 3.12, as the backport's."""
    if typing.is_typeddict(hint) and type(hint).__module__ == "typing":
        from typing_extensions import TypedDict

        made = {}
        for name, item in typing.get_type_hints(hint, include_extras=True).items():
            marked = typing.get_origin(item) in (typing.NotRequired, typing.Required)
            optional = name in hint.__optional_keys__ and not marked
            made[name] = typing.NotRequired[_modern(item)] if optional else _modern(item)
        return TypedDict(hint.__name__, made)  # type: ignore[operator]  # the functional form, with names known only now
    arguments = typing.get_args(hint)
    if not arguments or typing.get_origin(hint) is typing.Literal:
        return hint
    modern = tuple(_modern(argument) for argument in arguments)
    if all(new is old for new, old in zip(modern, arguments, strict=True)):
        return hint
    if isinstance(hint, types.UnionType):
        return functools.reduce(lambda left, right: left | right, modern)
    return hint.copy_with(modern) if hasattr(hint, "copy_with") else typing.get_origin(hint)[modern]
