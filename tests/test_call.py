"""ToolCall: its arguments, its identity and its fingerprints, and the copy that an approval holds."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from loopguard import Guard, LoopLimit, LoopLimitExceeded, WrapTool, current_call, tool
from loopguard._call import structural_copy
from tests.conftest import Colour


def call_of(decorated: Any, *args: Any, **kwargs: Any) -> Any:
    """The ToolCall of one call, as a hook sees it."""
    seen: list[Any] = []

    def hook(call: Any, proceed: Any) -> Any:
        seen.append(call)
        return (yield from proceed(call))

    with Guard(WrapTool(hook)).scope():
        decorated(*args, **kwargs)
    return seen[0]


def shape(a: Any, /, b: Any, *rest: Any, c: Any, d: Any = 4, **more: Any) -> None:
    """Every kind of parameter."""


# -- arguments -------------------------------------------------------------------------------------


def test_arguments_are_named_with_defaults_applied() -> None:
    """Positional-only, *args, keyword-only and **kwargs under their own names."""
    call = call_of(tool(shape), 1, 2, 3, 4, c=5, e=6)
    assert call.arguments == {"a": 1, "b": 2, "rest": (3, 4), "c": 5, "d": 4, "more": {"e": 6}}
    assert call_of(tool(shape), 1, b=2, c=3).arguments == {"a": 1, "b": 2, "rest": (), "c": 3, "d": 4, "more": {}}


def test_arguments_of_what_tells_no_signature_have_names_all_the_same() -> None:
    """Some builtins don't say what they take."""
    assert call_of(tool(max), 1, 2).arguments == {"args": (1, 2), "kwargs": {}}


def test_arguments_of_a_partial_are_those_that_are_left() -> None:
    """What it has bound already isn't the caller's."""
    bound = tool(functools.partial(shape, 1, c=9))
    assert call_of(bound, 2).arguments == {"b": 2, "rest": (), "c": 9, "d": 4, "more": {}}


def test_changing_the_dict_of_arguments_changes_nothing(colour: Colour) -> None:
    """Hooks change a call by replace, never in place: approvers, limits and body all keep the real arguments."""
    seen: list[Any] = []

    def meddle(call: Any) -> None:
        call.arguments["amount"] = 5000
        call.arguments.clear()

    def hook(call: Any, proceed: Any) -> Any:
        seen.append(call.arguments)
        return (yield from proceed(call))

    decorated = tool(colour.make(lambda amount: amount))
    with Guard(WrapTool(before=meddle), WrapTool(hook)).scope():
        assert colour.call(decorated, 50) == 50
    assert seen == [{"amount": 50}]


@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        ((), {}, "missing a required argument: 'query'"),
        (("a", 1, True), {}, "too many positional arguments"),
        (("a",), {"query": "b"}, "multiple values"),
        (("a",), {"nope": 1}, "unexpected keyword argument 'nope'"),
    ],
)
def test_the_type_error_names_the_function_and_the_fault(
    args: tuple[Any, ...], kwargs: dict[str, Any], match: str
) -> None:
    """As Python's own does."""

    @tool
    def search(query: str, top: int = 3, *, deep: bool = False) -> None:
        """Nothing."""

    with Guard().scope(), pytest.raises(TypeError, match=rf"search\(\) .*{match}"):
        search(*args, **kwargs)


def test_a_call_looks_like_what_it_is_and_has_one_id() -> None:
    """The id is made once, and the idempotency key holds it and the run's."""
    call = call_of(tool(shape), 1, 2, c=3)
    assert call.id == call.id
    assert call.idempotency_key == f"{call.run.id}:{call.id}"
    assert repr(call) == f"<ToolCall shape {call.id}>"
    assert call_of(tool(shape), 1, 2, c=3).id != call.id


# -- when two calls are the same -------------------------------------------------------------------


def f(x: Any, y: Any = 2, *rest: Any, **more: Any) -> None:
    """For fingerprints."""


F = tool(f)


SAME: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "call style": (lambda: F(1, 2), lambda: F(x=1, y=2)),
    "default": (lambda: F(1), lambda: F(1, 2)),
    "order of names": (lambda: F(1, y=2), lambda: F(y=2, x=1)),
    "order of keys": (lambda: F({"a": 1, "b": 2}), lambda: F({"b": 2, "a": 1})),
    "order of further names": (lambda: F(1, a=1, b=2), lambda: F(1, b=2, a=1)),
    "int and float": (lambda: F(1), lambda: F(1.0)),
    "list and tuple": (lambda: F([1, 2]), lambda: F((1, 2))),
    "deep": (lambda: F({"d": [{"x": 1, "y": [2.0]}]}), lambda: F({"d": [{"y": [2], "x": 1.0}]})),
}
DIFFERENT: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "order of a list": (lambda: F([1, 2]), lambda: F([2, 1])),
    "one and true": (lambda: F(1), lambda: F(True)),
    "zero and false": (lambda: F(0), lambda: F(False)),
    "number and text": (lambda: F(1), lambda: F("1")),
    "none and text": (lambda: F(None), lambda: F("None")),
    "rest and tuple": (lambda: F(1, 2, 3), lambda: F(1, 2, (3,))),
    "name and dict": (lambda: F(1, 2, a=1), lambda: F(1, 2, {"a": 1})),
    "long texts": (lambda: F("a" * 300), lambda: F("a" * 301)),
    "large numbers": (lambda: F(2**70), lambda: F(2**70 + 1)),
    "none and absent": (lambda: F({"a": None}), lambda: F({})),
    "one text and two": (lambda: F(["ab"]), lambda: F(["a", "b"])),
    "close floats": (lambda: F(0.1 + 0.2), lambda: F(0.3)),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME.keys())
def test_calls_that_mean_the_same_have_one_fingerprint(one: Callable[[], Any], other: Callable[[], Any]) -> None:
    """Key order, call style, defaults and 1 or 1.0 don't matter (C12)."""
    assert fingerprint(one) == fingerprint(other)
    assert repeats(one, other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_calls_that_differ_have_two_fingerprints(one: Callable[[], Any], other: Callable[[], Any]) -> None:
    """The order of lists, True and 1, texts and numbers do (C12)."""
    assert fingerprint(one) != fingerprint(other)
    assert not repeats(one, other)


def fingerprint(make: Callable[[], Any]) -> str:
    """What current_call().fingerprint says, by a hook."""
    seen: list[str] = []
    with Guard(WrapTool(before=lambda call: seen.append(call.fingerprint))).scope():
        make()
    return seen[0]


def repeats(one: Callable[[], Any], other: Callable[[], Any]) -> bool:
    """Whether LoopLimit takes the two for the same call."""
    with Guard(LoopLimit(1)).scope():
        one()
        try:
            other()
        except LoopLimitExceeded:
            return True
    return False


def test_json_text_of_a_model_counts_like_the_values_themselves() -> None:
    """With and without spaces, in any order of keys, and like a direct call (C12)."""
    guard = Guard(LoopLimit(3))
    seen: list[str] = []

    def search(query: str, options: dict[str, int]) -> str:
        call = current_call()
        assert call is not None
        seen.append(call.fingerprint)
        return query

    search = guard.tool(search)
    with guard.scope():
        guard.call("search", '{"query":"a","options":{"x":1,"y":2}}')
        guard.call("search", '{ "options": {"y": 2, "x": 1},\n "query": "a" }')
        search("a", {"x": 1, "y": 2})
        with pytest.raises(LoopLimitExceeded):
            guard.call("search", {"options": {"y": 2, "x": 1}, "query": "a"})
    assert len(set(seen)) == 1


def test_two_objects_are_two_even_if_they_are_equal() -> None:
    """self counts by identity; one object through two attributes is one."""

    class Box:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None

        @tool
        def look(self, x: int) -> int:
            return x

    box, other = Box(), Box()
    assert repeats(lambda: box.look(1), lambda: Box.look(box, x=1))
    assert not repeats(lambda: box.look(1), lambda: other.look(1))


def test_the_strict_digest_tells_apart_what_the_loose_one_merges() -> None:
    """For approvals, 1 is not 1.0, a tuple is no list, and the tool is part of it."""
    g = tool(name="g")(f)
    pairs = [
        (lambda: call_of(F, 1), lambda: call_of(F, 1.0)),
        (lambda: call_of(F, [1]), lambda: call_of(F, (1,))),
        (lambda: call_of(F, 1), lambda: call_of(g, 1)),
    ]
    for one, other in pairs:
        assert one().digest() != other().digest()
    assert call_of(F, {"a": 1, "b": 2}).digest() == call_of(F, x={"b": 2, "a": 1}).digest()
    assert call_of(F, {"a": 1}).digest()[1] is True
    bound = [tool(functools.partial(f, account), name="pay") for account in ("a", "a", "b")]
    digests = [call_of(one, 5).digest() for one in bound]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0][1] is True
    assert call_of(F, threading.Lock()).digest()[1] is False  # no other process could get the same


def test_a_key_of_ones_own_makes_the_digest_of_a_method_durable() -> None:
    """self_key names the object."""

    class Account:
        def __init__(self, number: str) -> None:
            self.number = number

        @tool(self_key=lambda self: self.number)
        def pay(self, amount: int) -> None:
            """Nothing."""

        @tool
        def ask(self, amount: int) -> None:
            """Nothing."""

    one, same, other = Account("1"), Account("1"), Account("2")
    assert call_of(one.pay, 5).digest() == call_of(same.pay, 5).digest()
    assert call_of(one.pay, 5).digest() != call_of(other.pay, 5).digest()
    assert call_of(one.pay, 5).digest()[1] is True
    assert call_of(one.ask, 5).digest() != call_of(same.ask, 5).digest()
    assert call_of(one.ask, 5).digest()[1] is False


# -- the structural copy ---------------------------------------------------------------------------


def test_containers_are_copied_and_leaves_are_not() -> None:
    """Lists, dicts, tuples and sets at any depth; everything else stays the very object."""
    leaf = object()
    given = {"list": [1, [leaf]], "tuple": ([leaf], {"x": leaf}), "set": {1, 2}, "frozen": frozenset({3})}
    copied = structural_copy(given)
    assert copied == given
    assert copied is not given
    assert copied["list"][1] is not given["list"][1]
    assert copied["list"][1][0] is leaf
    assert copied["tuple"][0] is not given["tuple"][0]
    assert copied["tuple"][1]["x"] is leaf
    assert copied["set"] is not given["set"]
    given["list"].append(5)
    given["tuple"][1]["x"] = 5
    assert copied["list"] == [1, [leaf]]
    assert copied["tuple"][1]["x"] is leaf


def test_sharing_and_cycles_stay_what_they_were() -> None:
    """Two names of one list are two names of one copy; a cycle is a cycle of copies."""
    shared = [1]
    first, second = structural_copy([shared, shared])
    assert first is second
    assert first is not shared
    ring: list[Any] = [1]
    ring.append({"back": (ring,)})
    copied = structural_copy(ring)
    assert copied is not ring
    assert copied[1]["back"][0] is copied


def test_any_depth_of_any_container_can_be_copied() -> None:
    """Deeper than Python's stack, tuples included."""
    for wrap in (lambda v: [v], lambda v: {"k": v}, lambda v: (v,)):
        value: Any = ["bottom"]
        bottom = value
        for _ in range(20_000):
            value = wrap(value)
        copied = structural_copy(value)
        for _ in range(20_000):
            copied = copied["k"] if isinstance(copied, dict) else copied[0]
        assert copied == ["bottom"]
        assert copied is not bottom


def test_no_method_of_a_users_class_is_called_by_a_copy() -> None:
    """Subclasses of containers and objects of the user's are leaves."""

    class Spite(dict[str, Any]):
        def _refuse(self, *args: Any) -> Any:
            raise RuntimeError("leave me alone")

        __iter__ = __len__ = __eq__ = __hash__ = copy = items = __deepcopy__ = _refuse

    spite = Spite()
    copied = structural_copy([spite, {"x": spite}])
    assert copied[0] is spite
    assert copied[1]["x"] is spite
