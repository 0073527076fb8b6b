"""Fingerprints: when two values count as the same, found out without running any of their code.

A value is walked with an explicit stack, so depth is no limit. Every node is hashed from a tagged,
length-prefixed encoding, so no two structures share a text. Only types, identity and the storage of
builtin types are looked at: no ``__eq__``, ``__hash__``, ``__repr__`` or property of a user's class runs.

A value without cycles is a tree, however it is shared. In a value with cycles the nodes are numbered
as they are met, and meeting one again is a reference: same structure, same digest, in linear time.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from functools import cached_property, partial
from hashlib import blake2b
from logging import Logger
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple
from uuid import UUID

__all__ = ["ItemDigest", "atoms", "error_print", "loose", "result_print", "serial", "strict"]

_LONG = 200  # longer texts are hashed once instead of being carried around
_BIG = 1 << 63  # so are integers from here on
_LOOSE, _STRICT = 16, 32  # digest sizes in bytes


def loose(value: object, ignore: frozenset[str] = frozenset()) -> bytes:
    """Sixteen bytes that are equal for values that mean the same to a tool.

    The order of keys doesn't matter, that of lists does; a tuple is a list, 1 is 1.0 but not True.
    Keys and fields named in ``ignore`` are left out at any depth. Never raises.
    """
    text = None if ignore else _json_text(value)
    return _digest(value, _Form(size=_LOOSE, ignore=ignore))[0] if text is None else _text_print(text)


def strict(value: object) -> tuple[bytes, bool]:
    """Thirty-two bytes over everything, types included, and whether they are canonical.

    Only the order of keys and of sets doesn't matter. Not canonical (False) means that an object without
    a form of its own stands there by its serial: the digest holds in this process, for this very object.
    """
    return _digest(value, _Form(size=_STRICT, strict=True))


def result_print(value: object, ignore: frozenset[str] = frozenset()) -> object:
    """The loose fingerprint of a tool's result: its own items or canonical JSON text if short, else a digest.

    Comparable only with other result prints. Never raises.
    """
    if type(value) is dict and not ignore:
        flat = _flat(value)
        if flat is not None:
            return flat
    text = None if ignore else _json_text(value)
    return loose(value, ignore) if text is None else text if len(text) <= _LONG else _text_print(text)


def _flat(value: dict[Any, Any]) -> tuple[tuple[str, object], ...] | None:
    """The items of a small dict of short atoms, in order of their names: the commonest result by far."""
    if len(value) > 16:
        return None
    try:
        for key, item in value.items():
            kind = type(item)
            if type(key) is not str or len(key) > _LONG:
                return None
            if kind is str:
                if len(item) > _LONG:
                    return None
            elif kind is int or kind is float:
                if not -_BIG < item < _BIG:  # NaN, too
                    return None
            elif item is not None:
                return None
        return tuple(sorted(value.items()))
    except RuntimeError:  # changed by another thread meanwhile
        return None


def error_print(exc: BaseException) -> bytes:
    """The fingerprint of an exception: its type, its arguments, and its text where its class words one itself.

    Objects without a form of their own count by type: errors that differ only in the request object they
    carry are the same error. Never raises.
    """
    said: object = None
    own = next((space["__str__"] for space in map(_namespace, _mro(type(exc))) if "__str__" in space), None)
    if own is not BaseException.__str__ and own is not KeyError.__str__:
        try:
            said = str(exc)
        except Exception:  # a user's __str__ may do anything
            pass
    return _digest((type(exc), _exception_args(exc), said), _Form(size=_LOOSE, anonymous=True))[0]


class ItemDigest:
    """A running fingerprint of the items of a generator, in constant memory. Order matters."""

    __slots__ = ("_hash", "_ignore")

    def __init__(self, ignore: frozenset[str] = frozenset()) -> None:
        self._hash = blake2b(digest_size=_LOOSE, person=b"items")
        self._ignore = ignore

    def add(self, item: object) -> None:
        """Take one more item into account."""
        self._hash.update(loose(item, self._ignore))

    def value(self) -> bytes:
        """The digest of the items so far."""
        return self._hash.digest()


def atoms(values: tuple[Any, ...]) -> tuple[object, ...] | None:
    """A key for arguments that are all short builtin atoms, or None: then use `loose`.

    Two keys are equal exactly when the loose fingerprints are. It is the fast path of every guarded call.
    """
    for value in values:
        kind = type(value)
        if kind is str:
            if len(value) > _LONG:
                return None
        elif kind is int:
            if not -_BIG < value < _BIG:
                return None
        elif value is not None:
            return _tagged(values)
    return values


def _tagged(values: tuple[Any, ...]) -> tuple[object, ...] | None:
    key: list[object] = []
    for value in values:
        kind = type(value)
        if kind is bool:
            key.append(_TRUE if value else _FALSE)
        elif kind is float and value != value:
            key.append(_NAN)
        elif (
            value is None
            or (kind is str and len(value) <= _LONG)
            or ((kind is int or kind is float) and -_BIG < value < _BIG)
        ):
            key.append(value)
        else:
            return None
    return tuple(key)


_TRUE, _FALSE, _NAN = ("true",), ("false",), ("nan",)


# --- The JSON text of a result ---------------------------------------------------------------------------------

_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
_WHOLE = re.compile(r'"(?:[^"\\]|\\.)*+"|-?\d++(?:\.0(?!\d)|(?:\.\d++)?e\+\d++)', re.DOTALL)
_DEEPEST = 100  # levels, so that the answer doesn't hang on how much of the interpreter's stack is left
_MOST = 200_000  # nodes, and characters times a hundred: in a text, shared parts multiply


def _json_text(value: object) -> str | None:
    """The canonical text of a value of nothing but JSON's own types, in C; None for any other value."""
    try:
        floats = _floats(value)
        if floats is None:
            return None
        text = _encode(value)
    except (ValueError, TypeError, RuntimeError):  # an endless integer; changed by another thread meanwhile
        return None
    return _WHOLE.sub(_as_integer, text) if floats and (".0" in text or "e+" in text) else text


def _floats(value: object) -> bool | None:
    """Whether there are floats in a value that has a JSON text, None if it has none or a monstrous one."""
    floats, nodes, characters = False, 0, 0
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                characters += len(item)
            elif kind is int or item is None or kind is bool:
                pass
            elif kind is float:
                floats = True
            elif kind is dict:
                for key in [*item]:
                    if type(key) is not str:
                        return None
                    characters += len(key)
                below += item.values()
            elif kind is list or kind is tuple:
                below += item
            else:
                return None
            if nodes + len(below) > _MOST or characters > 100 * _MOST:
                return None
        if not below:
            return floats
        nodes += len(below)
        level = below
    return None


def _as_integer(found: re.Match[str]) -> str:
    text = found[0]
    return text if text[0] == '"' else str(int(float(text)))


def _text_print(text: str) -> bytes:
    return blake2b(_utf8(text), digest_size=_LOOSE, person=b"json").digest()


# --- The walk --------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """Which differences count."""

    size: int
    strict: bool = False
    ignore: frozenset[str] = frozenset()
    anonymous: bool = False
    """Objects without a form of their own count by type, not by serial."""


_Node = Generator[Any, "bytes | None", bytes]
_Parts = tuple[bytes, Sequence[Any], bool]


def _digest(value: object, form: _Form) -> tuple[bytes, bool]:
    walk = _Walk(form)
    code = walk.atom(value) or walk.run(value)
    if code is None:
        walk = _Walk(form, cyclic=True)
        code = walk.run(value)
    assert code is not None  # only a walk that takes cycles for an error gives up
    return blake2b(code, digest_size=form.size).digest(), walk.canonical


class _Seen:
    """A node that was met: kept alive, so that its id stays its own."""

    __slots__ = ("code", "number", "value")

    def __init__(self, value: object, number: int) -> None:
        self.value = value
        self.number = number
        self.code: bytes | None = None


class _Walk:
    __slots__ = ("canonical", "cyclic", "form", "seen")

    def __init__(self, form: _Form, cyclic: bool = False) -> None:
        self.form = form
        self.cyclic = cyclic
        self.canonical = True
        self.seen: dict[int, _Seen] = {}

    def run(self, value: Any) -> bytes | None:
        """The code of a node; None if it has cycles and this walk takes it for a tree."""
        stack: list[tuple[_Seen, _Node]] = []
        code: bytes | None = None
        while True:
            if code is None:
                seen = self.seen.get(id(value))
                if seen is None:
                    seen = self.seen[id(value)] = _Seen(value, len(self.seen))
                    stack.append((seen, self.node(value)))
                elif self.cyclic:
                    code = b"@%d" % seen.number
                elif seen.code is None:
                    return None
                else:
                    code = seen.code
            seen, node = stack[-1]
            try:
                value, code = node.send(code), None
            except StopIteration as done:
                stack.pop()
                code = seen.code = done.value
                if not stack:
                    return code

    def node(self, value: Any) -> _Node:
        """The code of one node, asking for the codes of the nodes in it."""
        try:
            tag, children, ordered = self.parts(value)
        except Exception:  # a subclass with broken insides, or a container that changes under our hands
            tag, children, ordered = self.opaque(value)
        codes: list[bytes] = []
        leaves = True
        for child in children:
            code = self.atom(child)
            if code is None:
                leaves = False
                code = yield child
                assert code is not None  # the driver answers every request
            codes.append(code)
        if ordered or (self.cyclic and not leaves):
            # On a cycle, members of a set have no codes to sort by: they keep the order of this very set.
            self.canonical = self.canonical and ordered
        else:
            codes.sort()
        return b"#" + blake2b(_framed([tag, *codes]), digest_size=self.form.size).digest()

    def atom(self, value: Any) -> bytes | None:
        """The code of a leaf, or None for what has to be walked."""
        kind = type(value)
        if kind is str:
            return b"s" + _utf8(value) if len(value) <= _LONG else None
        if kind is int:
            return b"i%x" % value if -_BIG < value < _BIG else None
        if value is None:
            return b"n"
        if kind is dict or kind is list or kind is tuple:
            return None
        if kind is bool:
            return b"t" if value else b"f"
        if kind is float:
            if self.form.strict or not value.is_integer():
                return b"d" + repr(value).encode()
            return self.atom(int(value))
        if kind is bytes:
            return b"b" + value if len(value) <= _LONG else None
        return None

    def parts(self, value: Any) -> _Parts:
        """A node's tag, its children, and whether their order counts."""
        kind = type(value)
        if kind is _Given:
            return value.parts  # type: ignore[no-any-return]  # value is Any
        base = kind if id(kind) in _READERS else _base(kind)
        if base is None:
            return self.fields(value)
        group, read = _READERS[id(base)]
        if group == b"":
            return b"value" + _name_of(kind), read(value), True
        tag, children, ordered = self.pairs(read(value)) if group == b"map" else (group, read(value), group != b"set")
        if self.form.strict:
            tag = _name_of(base) + tag
        if kind is base:
            return tag, children, ordered
        beside = self.pairs(_plan(kind).read(value))
        return b"sub" + _name_of(kind), [_Given((tag, children, ordered)), _Given(beside)], True

    def fields(self, value: Any) -> _Parts:
        """A plain object: the name of its type, and its attributes."""
        plan = _plan(type(value))
        if not plan.complete:
            return self.opaque(value)
        tag, children, ordered = self.pairs(plan.read(value))
        return _framed([b"object", _name_of(type(value)), tag]), children, ordered

    def pairs(self, items: Iterable[tuple[Any, Any]]) -> _Parts:
        """Names or keys and their values: ordered by the codes of the keys, where they all have one."""
        ignore = self.form.ignore
        items = [item for item in items if not (ignore and type(item[0]) is str and item[0] in ignore)]
        keys = [self.atom(key) for key, _ in items]
        known = [key for key in keys if key is not None]
        if len(known) < len(keys):
            return b"pairs", [_Given((b"pair", item, True)) for item in items], False
        order = sorted(range(len(known)), key=known.__getitem__)
        return b"map" + _framed([known[i] for i in order]), [items[i][1] for i in order], True

    def opaque(self, value: Any) -> _Parts:
        """An object without a form of its own."""
        self.canonical = False
        name = _name_of(type(value))
        return (b"opaque" + name if self.form.anonymous else b"serial%d:%b" % (serial(value), name)), (), True


class _Given:
    """A node that is no object of the user's: its parts are known already."""

    __slots__ = ("parts",)

    def __init__(self, parts: _Parts) -> None:
        self.parts = parts


def _framed(codes: Iterable[bytes]) -> bytes:
    return b"".join([b"%d:%b" % (len(code), code) for code in codes])


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# --- What is known of types ------------------------------------------------------------------------------------

# Through the descriptors of `type` itself: a metaclass may answer attributes as it likes.
_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_namespace: Callable[[type], MappingProxyType[str, Any]] = type.__dict__["__dict__"].__get__
_module: Callable[[type], Any] = type.__dict__["__module__"].__get__
_qualname: Callable[[type], str] = type.__dict__["__qualname__"].__get__
_basic_size: Callable[[type], int] = type.__dict__["__basicsize__"].__get__
_item_size: Callable[[type], int] = type.__dict__["__itemsize__"].__get__
_dict_offset: Callable[[type], int] = type.__dict__["__dictoffset__"].__get__
_ref_offset: Callable[[type], int] = type.__dict__["__weakrefoffset__"].__get__
_module_space: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__
_exception_args = BaseException.__dict__["args"].__get__


def _name_of(kind: type) -> bytes:
    module = _module(kind)
    return _utf8(f"{module if type(module) is str else ''}:{_qualname(kind)}")


class _Plan(NamedTuple):
    """Where the instances of a type keep their attributes."""

    attributes: GetSetDescriptorType | MemberDescriptorType | None
    slots: list[tuple[str, MemberDescriptorType]]
    derived: frozenset[str]
    """Cached properties: what was computed from the rest, and only once somebody looked."""
    complete: bool
    """False where instances hold more than attributes, in C."""

    def read(self, value: Any) -> list[tuple[Any, Any]]:
        """(name, value) of every attribute that is set."""
        found: list[tuple[Any, Any]] = []
        for name, slot in self.slots:
            try:
                found.append((name, slot.__get__(value)))
            except AttributeError:  # not set
                pass
        stored = [*dict.items(self.attributes.__get__(value))] if self.attributes is not None else []
        return found + [item for item in stored if type(item[0]) is not str or item[0] not in self.derived]


_NOT_STATE = frozenset({"__pydantic_fields_set__", "__suppress_context__"})
_WORD = _basic_size(type("Slot", (), {"__slots__": ("a",)})) - _basic_size(object)
_plans: dict[int, tuple[weakref.ref[type], _Plan]] = {}  # by id: hashing a class may run code of its metaclass


def _plan(kind: type) -> _Plan:
    known = _plans.get(id(kind))
    if known is not None and known[0]() is kind:
        return known[1]
    attributes = None
    slots: list[tuple[str, MemberDescriptorType]] = []
    derived: set[str] = set()
    words = 0
    for base in _mro(kind):
        for name, member in [*_namespace(base).items()]:
            if name == "__dict__":
                if attributes is None and type(member) in (GetSetDescriptorType, MemberDescriptorType):
                    attributes = member
            elif type(member) is MemberDescriptorType:
                words += 1
                if name not in _NOT_STATE:
                    slots.append((name, member))
            elif type(member) is cached_property:
                derived.add(name)
    # The same sum that object.__reduce_ex__ does to tell whether it may copy an instance by its attributes.
    words += (_dict_offset(kind) > 0) + (_ref_offset(kind) > 0)
    known_size = _basic_size(object) + _WORD * words
    complete = kind is not object and _item_size(kind) == 0 and _basic_size(kind) <= known_size
    plan = _Plan(attributes, slots, frozenset(derived), complete)
    if len(_plans) >= 1000:
        _plans.clear()
    _plans[id(kind)] = weakref.ref(kind), plan
    return plan


def _base(kind: type) -> type | None:
    """The builtin type whose storage the instances of a class use."""
    if issubclass(kind, Enum):  # a member of a mixed one is a str or an int too
        return Enum
    return next((base for base in _mro(kind) if id(base) in _READERS), None)


def _importable(value: Any) -> list[str]:
    """The full name of a class or function, if it is found under that name; else a LookupError."""
    if issubclass(type(value), type):
        module, path = _module(value), _qualname(value)
    else:
        module, path = value.__module__, value.__qualname__
    if type(module) is not str:
        raise LookupError(path)
    found: Any = sys.modules[module]
    space = _module_space(found)
    for name in path.split("."):
        found = space[name]
        space = {**_namespace(found)} if issubclass(type(found), type) else {}
    if found is not value:
        raise LookupError(path)
    return [module, path]


def _enum_name(value: Any) -> list[Any]:
    stored = dict(_plan(type(value)).read(value))
    name = stored.get("_name_")
    return [stored["_value_"] if name is None else name]


def _zoned(text: str, moment: Any) -> list[Any]:
    zone = moment.tzinfo
    return [text, moment.fold, _name_of(type(zone)), getattr(zone, "key", None)]


def _float_code(value: float) -> bytes:
    value = float.__float__(value)
    return b"%x" % int(value) if abs(value) >= _BIG and value.is_integer() else repr(value).encode()


def _hashed(data: bytes) -> list[bytes]:
    return [blake2b(data).digest()]


# How to read what a builtin type holds, whatever a subclass makes of it. In the loose form the builtin types of one
# group are one type; without a group the name of the type tells the rest.
_READERS: dict[int, tuple[bytes, Callable[[Any], Any]]] = {
    id(kind): (group, read)
    for kind, group, read in (
        (dict, b"map", lambda v: [*dict.items(v)]),
        (MappingProxyType, b"proxy", gc.get_referents),
        (list, b"list", lambda v: [*list.__iter__(v)]),
        (tuple, b"list", lambda v: [*tuple.__iter__(v)]),
        (deque, b"deque", lambda v: [*deque.__iter__(v)]),
        (set, b"set", lambda v: [*set.__iter__(v)]),
        (frozenset, b"set", lambda v: [*frozenset.__iter__(v)]),
        (str, b"text", lambda v: _hashed(_utf8(str.__str__(v)))),
        (int, b"number", lambda v: _hashed(b"%x" % int.__int__(v))),
        (float, b"number", lambda v: _hashed(_float_code(v))),
        (bytes, b"bytes", lambda v: _hashed(bytes.__bytes__(v))),
        (bytearray, b"bytearray", lambda v: _hashed(bytes(bytearray.copy(v)))),
        (BaseException, b"error", lambda v: [_name_of(type(v)), _exception_args(v)]),
        (complex, b"", lambda v: [complex.__dict__["real"].__get__(v), complex.__dict__["imag"].__get__(v)]),
        (memoryview, b"", lambda v: [v.format, [*v.shape], v.tobytes()]),
        (range, b"", lambda v: [v.start, v.stop, v.step]),
        (slice, b"", lambda v: [v.start, v.stop, v.step]),
        (Decimal, b"", lambda v: [Decimal.__str__(v).upper()]),
        (datetime, b"", lambda v: _zoned(datetime.isoformat(v), v)),
        (time, b"", lambda v: _zoned(time.isoformat(v), v)),
        (date, b"", lambda v: [date.isoformat(v)]),
        (timedelta, b"", lambda v: [v.days, v.seconds, v.microseconds]),
        (timezone, b"", lambda v: [timezone.__str__(v)]),
        (UUID, b"", lambda v: [UUID.__str__(v)]),
        (PurePath, b"", lambda v: [PurePath.__str__(v)]),
        (Logger, b"", lambda v: [v.name]),
        (Enum, b"", _enum_name),
        (MethodType, b"", lambda v: [v.__func__, v.__self__]),
        (partial, b"", lambda v: [v.func, v.args, v.keywords]),
        (type, b"", _importable),
        (FunctionType, b"", _importable),
        (BuiltinFunctionType, b"", _importable),
    )
}


# --- Serials ---------------------------------------------------------------------------------------------------

_MOST_KEPT = 1000  # objects without weak references are kept alive, but not more than these
_live: dict[int, tuple[Callable[[], Any], int]] = {}
_kept: deque[int] = deque()
_numbers = itertools.count(1)
_lock = threading.RLock()  # re-entrant: an object that is freed here may run code that comes back here


def _after_fork() -> None:
    """In the child: whoever held the lock is gone."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def serial(value: object) -> int:
    """The number of a live object: always the same for it, and never given to another one.

    Objects that allow no weak references keep theirs until a thousand more of that sort were numbered.
    """
    key = id(value)
    with _lock:
        entry = _live.get(key)
        if entry is not None and entry[0]() is value:
            return entry[1]
        number = next(_numbers)
        alive: Callable[[], Any]
        try:
            alive = weakref.ref(value, lambda _: _forget(key, number))
        except TypeError:
            alive = partial(_itself, value)  # kept alive, so that its id isn't given away
            _kept.append(key)
            if len(_kept) > _MOST_KEPT:
                _live.pop(_kept.popleft(), None)
        _live[key] = alive, number
        return number


def _itself(value: object) -> object:
    return value


def _forget(key: int, number: int) -> None:
    entry = _live.get(key)
    if entry is not None and entry[1] == number:
        _live.pop(key, None)
