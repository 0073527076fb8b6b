"""Fingerprints: which values count as the same, and that no value breaks, blocks or runs them."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from functools import cached_property
from pathlib import PurePosixPath, PureWindowsPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from loopguard._fingerprints import ItemDigest, atoms, error_print, loose, result_print, serial, strict

Print = Callable[[object], object]
PRINTS: list[Print] = [loose, strict, result_print]

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([1 << 63, 1e300, 10**17, 1e17, -0.0, 1.0])
    | st.text(st.characters(), max_size=8)
)
JSON: st.SearchStrategy[Any] = st.recursive(
    ATOMS,
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=4), below, max_size=4)
    ),
    max_leaves=12,
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    ATOMS | st.binary(max_size=8) | st.sets(st.integers()) | st.dates() | st.decimals() | st.uuids(),
    lambda below: (
        st.lists(below, max_size=4)
        | st.lists(below, max_size=4).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=4) | st.tuples(st.integers()), below, max_size=4)
        | st.builds(SimpleNamespace, a=below)
    ),
    max_leaves=12,
)


def rebuilt(value: Any, reverse: bool = False) -> Any:
    """An equal value that shares no container with the first, its keys in the reverse order if asked."""
    if type(value) in (list, tuple):
        return type(value)(rebuilt(item, reverse) for item in value)
    if type(value) is dict:
        items = [(key, rebuilt(item, reverse)) for key, item in value.items()]
        return dict(reversed(items) if reverse else items)
    return SimpleNamespace(a=rebuilt(value.a, reverse)) if type(value) is SimpleNamespace else value


def loosened(value: Any) -> Any:
    """The same for a tool: lists as tuples, whole numbers as floats where they can be."""
    if type(value) is list:
        return tuple(loosened(item) for item in value)
    if type(value) is dict:
        return {key: loosened(item) for key, item in value.items()}
    return float(value) if type(value) is int and abs(value) < 1 << 53 else value


def nested(depth: int) -> list[Any]:
    """Lists in lists, that deep."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# --- What is the same ------------------------------------------------------------------------------------------


@given(VALUES)
@settings(max_examples=150)
def test_equal_structures_have_equal_prints(value: Any) -> None:
    """A copy, and one with its keys in another order, can't be told from the original."""
    for fingerprint in PRINTS:
        assert fingerprint(value) == fingerprint(rebuilt(value)) == fingerprint(rebuilt(value, reverse=True))
    assert strict(value)[1]


def canonical(value: Any) -> str:
    """JSON text in which only the order of keys doesn't show."""
    return json.dumps(value, sort_keys=True)


@given(JSON, JSON)
@settings(max_examples=150)
def test_different_json_values_have_different_strict_digests(one: Any, other: Any) -> None:
    """Two JSON values have one strict digest exactly when their canonical texts are one."""
    assert (strict(one) == strict(other)) == (canonical(one) == canonical(other))


@given(JSON)
@settings(max_examples=150)
def test_the_loose_form_sees_neither_tuples_nor_floats(value: Any) -> None:
    """1 is 1.0 and a list is a tuple, however deep, and in results too."""
    assert loose(value) == loose(loosened(value))
    assert result_print(value) == result_print(loosened(value))
    assert loose({1: value, "set": {1}}) == loose({1.0: loosened(value), "set": {1.0}})


@given(st.tuples(ATOMS, ATOMS), st.tuples(ATOMS, ATOMS))
@settings(max_examples=300)
def test_atoms_agree_with_the_loose_form(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Where atoms gives keys, they are equal exactly when the loose fingerprints are, and hash alike."""
    keys = atoms(one), atoms(other)
    if None in keys:
        assert all(key is not None or any(type(v) in (int, float) for v in one + other) for key in keys)
    else:
        assert (keys[0] == keys[1]) == (loose(one) == loose(other))
        assert keys[0] != keys[1] or hash(keys[0]) == hash(keys[1])


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Text(str):
    __slots__ = ()


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Order:
    number: int
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Slotted:
    number: int
    other: int = 0


class Model(BaseModel):
    number: int
    other: int | None = None


class Plain:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def method(self) -> None:
        """Something to refer to."""

    @cached_property
    def costly(self) -> int:
        """Computed on first use."""
        return 42


SAME_LOOSELY = [
    (1, 1.0),
    (0.0, -0.0),
    (float("nan"), -float("nan")),
    ([1, [2]], (1.0, (2,))),
    ({"a": 1, "b": 2}, {"b": 2.0, "a": 1}),
    ({1: "a"}, {1.0: "a"}),
    ({3, 1, 2}, frozenset({1.0, 2, 3})),
    (1e300, int(1e300)),
    ([1e300, b""], [int(1e300), b""]),
    (json.loads('{"a":[1,2]}'), json.loads('{ "a" : [1, 2.0] }')),
]
DIFFERENT = [
    (True, 1),
    (False, 0),
    (None, 0),
    ("", None),
    (1, "1"),
    ("a", b"a"),
    (b"a", bytearray(b"a")),
    ([1, 2], [2, 1]),
    (["ab", "c"], ["a", "bc"]),
    ([[], []], [[[]]]),
    ([], {}),
    (set(), []),
    ({1: "a"}, {"1": "a"}),
    ({True: "a"}, {"true": "a"}),
    ({1: "a"}, {True: "a"}),
    ("😀", "\ud83d\ude00"),
    ({"1.0": 1}, {"1": 1}),
    ("1.0", "1"),
    (["1.0", 1.0], ["1", 1.0]),
    (1.05, 1.5),
    (float("inf"), float("nan")),
    ("x" * 10_000, "x" * 9_999 + "y"),
    (Colour.RED, Colour.BLUE),
    (Colour.RED, "red"),
    (Decimal(1), 1),
    (Decimal("1.0"), Decimal("1.00")),
    (datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1)))),
    (date(2024, 1, 1), "2024-01-01"),
    (timedelta(1), timedelta(2)),
    (UUID(int=1), UUID(int=2)),
    (PurePosixPath("a"), PureWindowsPath("a")),
    (PurePosixPath("a"), "a"),
    (range(3), range(4)),
    (1j, 2j),
    (Point(1, 2), Point(2, 1)),
    (Order(1), Order(2)),
    (Slotted(1), Slotted(2)),
    (Model(number=1), Model(number=2)),
    (Plain(a=1), Plain(a=2)),
    (Plain(a=1), Order(1)),
    (Plain, Order),
    (len, repr),
    (ValueError("a"), ValueError("b")),
    (MappingProxyType({"a": 1}), MappingProxyType({"a": 2})),
    (deque([1]), deque([2])),
    (OrderedDict(a=1), OrderedDict(a=2)),
    (object(), object()),
]


@pytest.mark.parametrize(("one", "other"), SAME_LOOSELY, ids=itertools.count())
def test_the_loose_form_takes_them_for_the_same(one: object, other: object) -> None:
    """What means the same to a tool is the same, on its own and beside something that JSON doesn't know."""
    assert loose(one) == loose(other)
    assert loose([one, {1}]) == loose([other, {1}])
    assert result_print({"r": one}) == result_print({"r": other})


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=itertools.count())
def test_every_print_tells_them_apart(one: object, other: object) -> None:
    """What differs for a tool differs in every print, and nothing is cut."""
    for fingerprint in PRINTS:
        assert fingerprint(one) == fingerprint(one)
        assert fingerprint(one) != fingerprint(other)
        assert fingerprint([one, {1}]) != fingerprint([other, {1}])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        ({1: 0}, {1.0: 0}),
        ({1}, frozenset({1})),
        (Text("a"), "a"),
        (Point(1, 2), (1, 2)),
        (OrderedDict(a=1), {"a": 1}),
    ],
    ids=itertools.count(),
)
def test_the_strict_form_keeps_types_apart(one: object, other: object) -> None:
    """Types that JSON would merge have different strict digests."""
    assert strict(one)[0] != strict(other)[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Colour.RED,
        lambda: Order(1),
        lambda: Slotted(1),
        lambda: Model(number=1),
        lambda: Plain(a=[1]),
        lambda: Point(1, 2),
        lambda: Decimal("1.50"),
        lambda: datetime(2024, 1, 1, tzinfo=UTC),
        lambda: PurePosixPath("a/b"),
        lambda: UUID(int=1),
        lambda: MappingProxyType({"a": 1}),
        lambda: Plain(a=1).method,
        lambda: [Order, len, ValueError("x")],
        lambda: {(1, 2): "a", Order: "b"},
    ],
    ids=itertools.count(),
)
def test_values_count_by_type_and_content(make: Callable[[], object]) -> None:
    """Two objects made alike have the same prints, and the strict one holds in another process."""
    assert make() is make() or make() is not make()
    for fingerprint in PRINTS:
        assert fingerprint(make()) == fingerprint(make())
    assert strict(make())[1]


def test_what_was_only_computed_does_not_count() -> None:
    """A cached property, and which fields of a model were set, change nothing."""
    plain = Plain(a=1)
    before = strict(plain)
    assert plain.costly == 42
    assert strict(plain) == before
    assert strict(Model(number=1)) == strict(Model(number=1, other=None))


def test_ignored_names_are_left_out_at_any_depth() -> None:
    """Ignored names count neither in mappings nor in fields; the same text as a value does."""
    ignore = frozenset({"request_id"})
    one, other = ({"a": [{"request_id": n, "b": Order(1, request_id=str(n))}]} for n in (1, 2))
    assert loose(one, ignore) == loose(other, ignore)
    assert result_print(one, ignore) == result_print(other, ignore)
    assert loose(one) != loose(other)
    assert loose(["request_id"], ignore) != loose([], ignore)


def test_short_results_are_their_own_print() -> None:
    """A flat result is compared by its items, a small one as text, a long one by a digest of fixed size."""
    assert result_print({"b": 1.0, "a": "1.0"}) == (("a", "1.0"), ("b", 1))
    assert result_print([{"b": 1.0, "a": "1.0"}]) == '[{"a":"1.0","b":1}]'
    assert len(result_print(["x"] * 1000)) == 16


# --- Cycles, depth and sharing ---------------------------------------------------------------------------------


def ring(size: int) -> dict[str, Any]:
    """A ring of nodes that know each other in both directions."""
    nodes: list[dict[str, Any]] = [{"number": i} for i in range(size)]
    for i, node in enumerate(nodes):
        node["next"], node["last"] = nodes[(i + 1) % size], nodes[i - 1]
    return nodes[0]


@pytest.mark.parametrize("fingerprint", PRINTS)
def test_cycles_of_one_structure_have_one_print(fingerprint: Print) -> None:
    """A cyclic value equals its copy, and differs from another cycle."""
    own: list[Any] = []
    own.append(own)
    assert fingerprint(own) == fingerprint(copy.deepcopy(own))
    assert fingerprint(ring(3)) == fingerprint(ring(3)) != fingerprint(ring(4))
    parent = Plain()
    parent.children = [Plain(parent=parent)]  # type: ignore[attr-defined]  # Plain takes any attribute
    assert fingerprint(parent) == fingerprint(copy.deepcopy(parent))


def test_a_set_on_a_cycle_is_not_canonical() -> None:
    """Its members can't be ordered by what they are: the digest holds for this very set only."""
    parent = Plain()
    parent.children = {Plain(parent=parent), Plain(parent=parent)}  # type: ignore[attr-defined]  # as above
    assert strict(parent) == strict(parent)
    assert not strict(parent)[1]
    cycle: list[Any] = [{1, 2}]
    cycle.append(cycle)
    assert strict(cycle)[1]


@pytest.mark.parametrize("fingerprint", [loose, strict])
def test_sharing_does_not_show_and_does_not_multiply(fingerprint: Print) -> None:
    """A part that stands in many places counts as often, but is walked once."""
    shared, copied = [1], [[1], [1]]
    assert fingerprint([shared, shared]) == fingerprint(copied)
    value: list[Any] = ["x"]
    for _ in range(200):
        value = [value, value]
    assert fingerprint(value) == fingerprint(copy.deepcopy(value))
    assert result_print(value) == result_print(copy.deepcopy(value))


@pytest.mark.parametrize("depth", [99, 100, 101, 5_000])
@pytest.mark.parametrize("fingerprint", PRINTS)
def test_depth_is_no_limit(fingerprint: Print, depth: int) -> None:
    """However deep a value is nested, the last level still counts."""
    assert fingerprint(nested(depth)) == fingerprint(nested(depth)) != fingerprint(nested(depth + 1))


def test_a_hundred_thousand_levels_are_walked() -> None:
    """Depth costs time, but neither the interpreter's stack nor the answer."""
    assert strict(nested(100_000)) != strict(nested(100_001))


def test_a_long_ring_is_walked_in_linear_time() -> None:
    """Ten thousand nodes in a ring, each met again from many others, are no trouble."""
    nodes = [ring(10_000)]
    while len(nodes) < 10_000:
        nodes.append(nodes[-1]["next"])
    assert strict(nodes) == strict(nodes)


def test_one_long_text_in_many_places_is_hashed_once() -> None:
    """Memory and time follow what is there, not how often it is referred to."""
    text = "x" * 1_000_000
    assert strict([text] * 10_000)[0] != strict([text] * 9_999)[0]
    assert loose([text] * 10_000) != loose([text] * 9_999)


# --- Hostile values --------------------------------------------------------------------------------------------


class HostileMeta(type):
    def __hash__(cls) -> int:
        raise RuntimeError("hash of a class")

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("eq of a class")

    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError("attribute of a class")

    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("instance check")


def refuse(*args: object, **kwargs: object) -> Any:
    """Any method that must not run."""
    raise RuntimeError("user code ran")


METHODS = [
    *("__eq__", "__hash__", "__repr__", "__str__", "__getattr__", "__getattribute__", "__iter__", "__len__"),
    *("__bool__", "__index__", "__float__", "__int__", "__bytes__", "__reduce_ex__", "__lt__", "__getitem__"),
    *("__contains__", "__format__", "__getstate__", "keys", "items", "values", "encode", "is_integer", "isoformat"),
]


def hostile(base: type, *args: object, **attributes: object) -> Any:
    """An instance of a subclass whose every method and property raises."""
    space: dict[str, Any] = dict.fromkeys(METHODS, refuse)
    space["__class__"] = space["__doc__"] = property(refuse)
    if issubclass(base, BaseException):
        space["__init__"] = lambda self, *args: None
    create: Any = base.__new__
    made = create(HostileMeta("Hostile", (base,), space), *args)
    if issubclass(base, dict | list | set | bytearray):
        fill: Any = base.__init__
        fill(made, *args)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


HOSTILE = [
    (object, ()),
    (dict, ({"a": 1},)),
    (OrderedDict, ()),
    (list, ([1],)),
    (tuple, ([1],)),
    (set, ([1],)),
    (frozenset, ([1],)),
    (deque, ()),
    (str, ("a",)),
    (int, (7,)),
    (float, (1.5,)),
    (float, (1e300,)),
    (complex, (1j,)),
    (bytes, (b"a",)),
    (bytearray, (b"a",)),
    (Decimal, ("1.5",)),
    (date, (2024, 1, 1)),
    (datetime, (2024, 1, 1)),
    (timedelta, (1,)),
    (UUID, ()),
    (ValueError, ("a",)),
    (Exception, ("a",)),
]


@pytest.mark.parametrize(("base", "args"), HOSTILE, ids=itertools.count())
def test_no_code_of_a_value_can_break_a_print(base: type, args: tuple[object, ...]) -> None:
    """Objects whose every method raises have steady prints, alone and inside containers."""
    value = hostile(base, *args)
    for fingerprint in PRINTS:
        assert fingerprint(value) == fingerprint(value)
        assert fingerprint([value, {"a": value}]) == fingerprint([value, {"a": value}])
    items = ItemDigest()
    items.add(value)
    assert atoms((value, 1)) is None
    assert serial(value) == serial(value)


@pytest.mark.parametrize(("base", "args"), HOSTILE, ids=itertools.count())
def test_a_hostile_value_still_counts_by_content(base: type, args: tuple[object, ...]) -> None:
    """What an instance holds is read past its own methods: another attribute is another value."""
    if hasattr(base, "__dict__") and base not in (Decimal, date, datetime, timedelta, UUID, complex):
        prints = {loose(hostile(base, *args, mark=mark)) for mark in (1, 2)}
        assert len(prints) == 2


def test_hostile_keys_and_members_are_walked() -> None:
    """Keys and members are told apart by what they hold, without their __hash__ and __eq__."""

    class Key:
        armed = False

        def __init__(self, name: str) -> None:
            self.name = name

        def __hash__(self) -> int:
            assert not Key.armed
            return 1

        def __eq__(self, other: object) -> bool:
            assert not Key.armed
            return self is other

    one, other = {Key("a"): 1, Key("b"): 2}, {Key("b"): 2, Key("a"): 1}
    third, members, reverse = {Key("a"): 2, Key("b"): 1}, {Key("a"), Key("b")}, {Key("b"), Key("a")}
    Key.armed = True
    assert strict(one) == strict(other) != strict(third)
    assert loose(one) == loose(other) != loose(third)
    assert strict(members) == strict(reverse)


@pytest.mark.parametrize("value", ["\ud83d", {"\udfff": "\ud800"}, ["\ud83d"] * 2, "\ud83d" * 1000], ids="abcd")
def test_lone_surrogates_count(value: object) -> None:
    """A text that can't be encoded is a value like any other."""
    for fingerprint in PRINTS:
        assert fingerprint(value) == fingerprint(rebuilt(value)) != fingerprint("?")


def test_endless_integers_are_compared_in_full() -> None:
    """Integers beyond what Python turns into digits are exact, as values and as keys."""
    big = 10**100_000
    for fingerprint in PRINTS:
        assert fingerprint({"n": big}) == fingerprint({"n": int(str(10)) ** 100_000}) != fingerprint({"n": big + 1})
        assert fingerprint({big: 1}) != fingerprint({big + 1: 1})


def test_containers_may_change_during_the_walk() -> None:
    """A container that another thread keeps changing gives some print, never an error."""
    value: dict[Any, Any] = {"a": [1], "b": {2}}
    stop = threading.Event()

    def change() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            value[count] = [count]
            value["b"].add(count)
            if count % 50 == 0:
                value.clear()
                value.update(a=[1], b={2})

    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert all(len(loose(value)) == 16 and len(strict(value)[0]) == 32 for _ in range(300))
    finally:
        stop.set()
        thread.join()


def test_an_interrupt_passes_through() -> None:
    """Ctrl-C in the one place where an exception's own code runs is not swallowed."""

    class Impatient(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        error_print(Impatient())


# --- Serials ---------------------------------------------------------------------------------------------------


def test_objects_without_a_form_count_by_identity() -> None:
    """A lock, a lambda and a generator are themselves and nothing else, and not durable."""
    for make in (threading.Lock, lambda: lambda: 1, lambda: (n for n in [1]), object, lambda: Plain(a=object())):
        one, other = make(), make()
        assert strict([one]) == strict([one]) != strict([other])
        assert strict([one])[1] is False
        assert loose(one) != loose(other)


def test_a_new_object_at_the_same_address_gets_another_serial() -> None:
    """Serials are never given twice, unlike addresses."""
    seen = set()
    for _ in range(200):
        seen.add(serial(Plain()))
        gc.collect(0)
    assert len(seen) == 200
    assert len({serial(object()) for _ in range(200)}) == 200


def test_a_serial_does_not_keep_an_object_alive() -> None:
    """An object that allows weak references can go."""
    plain = Plain()
    gone = weakref.ref(plain)
    serial(plain)
    del plain
    gc.collect()
    assert gone() is None


def test_few_objects_are_kept_alive_for_their_serials() -> None:
    """Objects without weak references are kept, but at most a thousand of them."""

    class Counted(tuple[int, ...]):
        alive = 0
        __slots__ = ()

        def __del__(self) -> None:
            Counted.alive -= 1

    for _ in range(3_000):
        Counted.alive += 1
        serial(Counted())
    gc.collect()
    assert 1 <= Counted.alive <= 1_000


# --- Errors, items, atoms --------------------------------------------------------------------------------------


class Worded(Exception):
    def __init__(self, request: object, status: int) -> None:
        super().__init__(request)
        self.status = status

    def __str__(self) -> str:
        return f"status {self.status}"


def test_errors_count_by_type_arguments_and_text() -> None:
    """The same failure twice is one print; another type, argument or text is another."""
    assert error_print(ValueError("a", 1)) == error_print(ValueError("a", 1.0))
    different = [ValueError("a"), ValueError("b"), KeyError("a"), FileNotFoundError(2, "no", "x"), Worded(1, 2)]
    different += [Worded(1, 3), FileNotFoundError(2, "no", "y"), ValueError(), ExceptionGroup("g", [ValueError("a")])]
    assert len({error_print(error) for error in different}) == len(different)


def test_an_error_is_the_same_with_another_request_object() -> None:
    """What has no form of its own counts by type: a client's request objects don't make failures new."""
    assert error_print(Worded(threading.Lock(), 404)) == error_print(Worded(threading.Lock(), 404))


@pytest.mark.parametrize("base", [Exception, OSError, BaseException])
def test_an_error_that_breaks_when_printed_has_a_print(base: type[BaseException]) -> None:
    """An exception whose methods all raise is fingerprinted without them."""
    error = hostile(base, "a")
    assert error_print(error) == error_print(error)


@given(st.lists(JSON, max_size=5), st.lists(JSON, max_size=5))
@settings(max_examples=50)
def test_item_digests_are_equal_for_equal_items_in_order(one: list[Any], other: list[Any]) -> None:
    """Streams are the same exactly when their items are, in this order."""

    def digest(items: list[Any]) -> bytes:
        running = ItemDigest()
        for item in items:
            running.add(item)
        return running.value()

    assert (digest(one) == digest(other)) == (loose(one) == loose(other))


def test_ignored_names_do_not_count_in_items() -> None:
    """An item digest leaves out what its limit ignores."""
    prints = []
    for took in (1, 2):
        items = ItemDigest(frozenset({"took_ms"}))
        items.add({"row": 1, "took_ms": took})
        prints.append(items.value())
    assert prints[0] == prints[1]


@pytest.mark.parametrize(
    "values",
    [([1],), ("x" * 201,), (1 << 63,), (1e300,), (float("inf"),), (b"a",), (Text("a"),), (Colour.RED,)],
    ids=itertools.count(),
)
def test_atoms_are_short_and_builtin(values: tuple[object, ...]) -> None:
    """Anything else than a short builtin atom is left to the loose form, beside a bool too."""
    assert atoms(values) is None
    assert atoms((True, *values)) is None


def test_atoms_make_keys() -> None:
    """Keys are hashable, tell True from 1 and the text true, and take every NaN for one."""
    assert atoms(()) == ()
    assert atoms((1, "a", None)) == atoms((1.0, "a", None))
    assert len({atoms((1,)), atoms((True,)), atoms(("true",)), atoms((False,)), atoms((0,)), atoms((None,))}) == 6
    assert atoms((float("nan"), 2)) == atoms((-float("nan"), 2.0))
    assert atoms((0.0,)) == atoms((-0.0,))


def test_iterators_are_not_consumed() -> None:
    """A print never takes anything out of an iterator."""
    rows: Iterator[int] = iter([1, 2, 3])
    for fingerprint in PRINTS:
        fingerprint(rows)
    assert list(rows) == [1, 2, 3]
