"""Values come back from the journal as they went in, or the journal says at once that they won't."""

from __future__ import annotations

import datetime
import enum
import typing
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pydantic
import pytest
from anthropic.types import TextBlock, ToolUseBlock
from hypothesis import given
from hypothesis import strategies as st

from loopguard.exceptions import CheckpointError
from loopguard.journal._codec import Codec, codec_for, shown
from loopguard.journal._growing import Growing
from loopguard.journal._states import State, States


class Colour(enum.Enum):
    RED = 1


@dataclass
class Draft:
    text: str
    raw: bytes
    when: datetime.datetime
    price: Decimal
    colour: Colour = Colour.RED


@dataclass
class Longer(Draft):
    extra: int = 7


class Model(pydantic.BaseModel):
    n: int
    tags: set[str]


class Typed(typing.TypedDict):
    when: datetime.date
    raw: typing.NotRequired[bytes]


DRAFT = Draft("ä", b"\xff\x00", datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), Decimal("1.10"))


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Draft, DRAFT),
        (Model, Model(n=1, tags={"a", "b"})),
        (Typed, {"when": datetime.date(2026, 1, 2), "raw": b"\xff"}),
        (list[Typed] | None, [{"when": datetime.date(2026, 1, 2)}]),
        (dict[int, tuple[str, ...]], {1: ("a", "b")}),
        (list[dict[str, Any]], [{"role": "user", "content": "hi", "n": 1.5, "none": None}]),
        (float, float("inf")),
        (int | str, "1"),
        (int | str, 1),
        (Any, {"a": [1, "x", None, True]}),
        (type(None), None),
    ],
)
def test_a_value_comes_back_as_it_was(hint: Any, value: Any) -> None:
    """Dataclasses, models, typed dicts, containers, times, decimals, enums and bytes survive as what they are."""
    codec = Codec(hint)
    back = codec.decode(codec.encode(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    ("hint", "value", "names"),
    [
        (Draft, Longer("ä", b"", DRAFT.when, Decimal(1)), "Longer"),
        (list[Draft], [DRAFT, Longer("ä", b"", DRAFT.when, Decimal(1))], r"\[1\]"),
        (Any, {1: "a"}, "key 1"),
        (Any, {"a": (1, 2)}, r"\['a'\] is a tuple"),
        (dict[str, Any], {"when": DRAFT.when}, r"\['when'\] is a datetime"),
        (Any, DRAFT, "Draft"),
        (Any, [float("nan")], r"\[0\] is a float"),
        (str, "\ud83d", "can't be written"),
        (Any, lambda: None, "can't be written"),
        (int, "five", "is a str|can't be"),
    ],
)
def test_a_value_that_would_change_is_an_error_that_says_where(hint: Any, value: Any, names: str) -> None:
    """A subclass that loses fields, int keys, tuples, times without an annotation: the first difference is named."""
    with pytest.raises(CheckpointError, match=names):
        Codec(hint).encode(value)


def test_a_later_value_of_other_types_is_checked_again() -> None:
    """That the first value of an annotation was fine says nothing of a subclass that comes later."""
    codec = Codec(list[Draft])
    codec.encode([])
    codec.encode([DRAFT])
    with pytest.raises(CheckpointError, match="Longer"):
        codec.encode([DRAFT, Longer("ä", b"", DRAFT.when, Decimal(1))])


def test_objects_of_the_sdk_in_a_message_list_come_back_as_what_is_sent() -> None:
    """Content blocks become the dicts that the SDK would send, without fields that were never set."""
    codec = codec_for(list[dict[str, Any]])
    blocks = [TextBlock(type="text", text="hi"), ToolUseBlock(type="tool_use", id="t", name="n", input={"a": 1})]
    back = codec.decode(codec.encode([{"role": "assistant", "content": blocks}]))
    assert back == [
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "hi"},
                {"type": "tool_use", "id": "t", "name": "n", "input": {"a": 1}},
            ],
        }
    ]


def test_what_no_longer_fits_its_annotation_is_a_clear_error() -> None:
    """A record of another version of the program is refused, not bent into shape."""
    with pytest.raises(CheckpointError, match="can't be read as int"):
        Codec(int).decode(b'"five"')


@given(
    st.recursive(
        st.none() | st.booleans() | st.text() | st.integers() | st.floats(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_anything_can_be_shown(value: Any) -> None:
    """What is only for people and exporters is JSON in UTF-8, without a bare NaN, whatever it holds."""
    text = shown(value).decode("utf-8")
    assert "NaN" not in text.replace('"NaN"', "")


def test_what_has_no_json_is_shown_by_its_type() -> None:
    """An object whose repr raises, a lambda, a lone surrogate, a cycle."""

    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    cycle: list[Any] = []
    cycle.append(cycle)
    text = shown({"a": Hostile(), "b": lambda: None, "c": "\ud83d", "d": cycle, 5: 1}).decode()
    assert "Hostile" in text
    assert "\\\\ud83d" in text


@given(
    st.lists(st.text(min_size=0, max_size=300), max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.text(max_size=400)), max_size=8),
)
def test_states_are_put_together_again(first: list[str], edits: list[tuple[int, str]]) -> None:
    """Whatever a state shares with the ones before it, it is read as it was written, in any order of reading."""
    codec = codec_for(list[str])
    states, stored, texts = States(b"salt"), {}, []
    current = [*first]
    for seq, (place, item) in enumerate(edits, 1):
        current = [*current[:place], item, *current[place:]]
        text = codec.encode(current)
        delta = states.add("run", seq, text)
        stored[seq] = State(delta, None if delta.base is None else stored[delta.base])
        texts.append(text)
    for seq in [*range(len(texts), 0, -1), *range(1, len(texts) + 1)]:
        assert stored[seq].text() == texts[seq - 1]


def test_a_list_that_grows_costs_what_was_added() -> None:
    """A thousand states of a growing list take about as much as the list itself, and a repeated one nothing."""
    codec, states, size, messages = codec_for(list[dict[str, str]]), States(b"salt"), 0, []
    for seq in range(1, 1001):
        messages.append({"role": "user", "content": f"message {seq} " + "x" * 100})
        size += len(states.add("run", seq, codec.encode(messages)).middle)
    assert size < 1.2 * len(codec.encode(messages))
    assert states.add("run", 1001, codec.encode(messages)).middle == b""


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from(["add", "set", "change"]),
            st.one_of(st.text(), st.integers(0, 1), st.booleans(), st.sampled_from([0.0, 1.0])),
        ),
        max_size=12,
    )
)
def test_a_list_that_is_changed_in_place_is_encoded_as_it_is_now(edits: list[tuple[int, str, Any]]) -> None:
    """What is remembered of a list never stands for what was changed since, be it only 1 into True."""
    codec, growing = codec_for(list[Any]), Growing(codec_for(list[Any]))
    value: list[Any] = [{"n": 1}]
    for place, what, item in edits:
        place %= len(value)
        if what == "add":
            value = [*value[:place], {"n": item}, *value[place:]]
        elif what == "set":
            value[place] = item
        elif isinstance(value[place], dict):
            value[place]["n"] = item
        assert growing.encode(value) == codec.encode(value)
