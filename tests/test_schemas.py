"""Tests of the border between a model and a Python function."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter

from loopguard._schemas import Arguments, InvalidArguments, ToolUse, tool_result, tool_uses, unknown_tool
from loopguard.exceptions import ConfigurationError

if TYPE_CHECKING:
    from nowhere import Unseen  # pyright: ignore[reportMissingImports]  # a name that only a type checker would look for


class Color(Enum):
    """Colours."""

    RED = "red"


class Address(BaseModel):
    """Where somebody lives."""

    street: str
    number: int = 1


@dataclass
class Point:
    """A place on a plane."""

    x: int
    y: float = 0.0


class Row(TypedDict):
    """Typing's own TypedDict, which pydantic doesn't read before Python 3.12."""

    id: int
    note: NotRequired[str]


def search(query: str, limit: int = 10, *, since: date | None = None) -> list[str]:
    """Search the archive.

    It is large.

    Args:
        query: What to look for,
            in words.
        limit: How many hits.
        since: The oldest date.

    Returns:
        The titles.
    """
    return [query, str(limit), str(since)]


def fails(fn: Callable[..., Any], arguments: Any) -> str:
    """The text that a model is given when these arguments don't fit."""
    with pytest.raises(InvalidArguments) as caught:
        Arguments(fn).validate(arguments)
    return str(caught.value)


def called(fn: Callable[..., Any], arguments: Any) -> Any:
    """What fn returns for a model's arguments."""
    checked = Arguments(fn)
    args, keywords = checked.to_call(checked.validate(arguments))
    return fn(*args, **keywords)


# --- schemas ---


def test_the_definition_of_a_tool_comes_from_its_signature_and_docstring() -> None:
    """Types, required names and descriptions are those that the author wrote."""
    assert Arguments(search).tool_definition("search") == {
        "name": "search",
        "description": "Search the archive.\n\nIt is large.\n\nReturns: The titles.",
        "input_schema": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for,\nin words."},
                "limit": {"type": "integer", "description": "How many hits."},
                "since": {
                    "anyOf": [{"format": "date", "type": "string"}, {"type": "null"}],
                    "description": "The oldest date.",
                },
            },
            "required": ["query"],
            "additionalProperties": False,
        },
    }


SPHINX = """Look.

:param here: Where to look.
:param int many: How often.
:raises ValueError: When blind.
"""
NUMPY = """Look.

Parameters
----------
here : str
    Where to look.
many : int
    How often.

Raises
------
ValueError
    When blind.
"""


@pytest.mark.parametrize("doc", [SPHINX, NUMPY])
def test_docstrings_of_other_styles_are_read(doc: str) -> None:
    """Sphinx and numpy docstrings describe parameters as Google's do."""

    def look(here, many): ...

    look.__doc__ = doc
    definition = Arguments(look).tool_definition("look")
    assert definition["description"] == "Look.\n\nRaises ValueError: When blind."
    assert definition["input_schema"]["properties"] == {
        "here": {"description": "Where to look."},
        "many": {"description": "How often."},
    }


def test_a_field_description_goes_before_the_docstring() -> None:
    """Annotated[..., Field(description=…)] stands closest to the parameter, so it is what counts."""

    def f(a: Annotated[int, Field(description="from the field", ge=3)]) -> None:
        """F.

        Args:
            a: from the docstring
        """

    assert Arguments(f).input_schema()["properties"]["a"] == {
        "type": "integer",
        "minimum": 3,
        "description": "from the field",
    }
    assert "'a' should be greater than or equal to 3" in fails(f, {"a": 1})


def test_a_tool_without_docstring_has_an_empty_description() -> None:
    """No docstring is no error, and a description given by hand is taken as it is."""

    def f() -> None: ...

    assert Arguments(f).tool_definition("f")["description"] == ""
    assert Arguments(f).tool_definition("f", "By hand.")["description"] == "By hand."


def test_a_docstring_that_the_parser_trips_over_is_taken_whole() -> None:
    """A docstring is free text and never breaks a tool."""

    def f(a: int) -> None: ...

    f.__doc__ = ": :"
    assert Arguments(f).tool_definition("f")["description"] == ": :"


@pytest.mark.parametrize("name", ["", "a b", "a.b", "ä", "a\n", "x" * 129])
def test_a_name_that_the_api_refuses_is_a_configuration_error(name: str) -> None:
    """The error comes when the tool is described, and says which names are allowed."""
    with pytest.raises(ConfigurationError, match=r"a-zA-Z0-9_-.*1,128"):
        Arguments(search).tool_definition(name)


def test_two_types_of_one_name_stay_apart() -> None:
    """Shared definitions are disambiguated, and every reference in the schema leads somewhere."""
    other = type("Address", (BaseModel,), {"__annotations__": {"zip": "int"}})

    def f(a, b): ...  # annotated below, with classes made at run time

    f.__annotations__ = {"a": Address | None, "b": list[other]}
    schema = Arguments(f).input_schema()
    assert len(schema["$defs"]) == 2
    for reference in {part.split('"')[0] for part in json.dumps(schema).split('"$ref": "#/$defs/')[1:]}:
        assert reference in schema["$defs"]
    assert called(lambda **k: k, {"a": 1}) == {"a": 1}


def test_a_schema_belongs_to_the_caller() -> None:
    """Changing a schema that was handed out doesn't change the next one."""
    arguments = Arguments(search)
    arguments.input_schema()["properties"].clear()
    assert arguments.input_schema()["properties"]


def test_every_kind_of_parameter_is_described_and_called() -> None:
    """Positional-only, variable and keyword-only parameters all come from one JSON object."""

    def f(a: int, /, b: int = 2, *rest: int, c: int = 3, **more: float) -> Any:
        """F.

        Args:
            *rest: The rest.
        """
        return a, b, rest, c, more

    schema = Arguments(f).input_schema()
    assert schema["properties"]["rest"] == {
        "type": "array",
        "items": {"type": "integer"},
        "description": "The rest.",
    }
    assert (schema["required"], schema["additionalProperties"]) == (["a"], {"type": "number"})
    assert called(f, {"a": 1}) == (1, 2, (), 3, {})
    assert called(f, {"rest": [7, 8], "a": 1}) == (1, 2, (7, 8), 3, {})
    assert called(f, {"a": 1, "b": 5, "c": 6, "x": 1, "more": 2}) == (1, 5, (), 6, {"x": 1.0, "more": 2.0})
    assert "'x' should be a valid number, not a string" in fails(f, {"a": 1, "x": "1"})
    assert "'rest[1]'" in fails(f, {"a": 1, "rest": [1, "2"]})


def test_a_default_is_filled_in_only_where_position_needs_it() -> None:
    """A later positional-only argument can't be given without the ones before it."""

    def f(a: int = 1, b: int = 2, c: int = 3, /) -> Any:
        return a, b, c

    assert Arguments(f).to_call({"b": 5}) == ((1, 5), {})
    assert Arguments(search).to_call({"limit": 5}) == ((), {"limit": 5})
    with pytest.raises(TypeError, match="'a'"):
        Arguments(lambda a, /, b=1, *c: 0).to_call({"c": [1]})


def test_self_is_left_out_of_a_method() -> None:
    """skip_first drops self or cls, and leaves *args alone, which has no first parameter to drop."""

    class Desk:
        def ask(self, what: str) -> str:
            return what

        def anything(*args: int) -> Any:
            return args

    assert list(Arguments(Desk.ask, skip_first=True).input_schema()["properties"]) == ["what"]
    assert list(Arguments(Desk().ask).input_schema()["properties"]) == ["what"]
    assert list(Arguments(Desk.anything, skip_first=True).input_schema()["properties"]) == ["args"]


def test_an_annotation_that_cannot_be_read_accepts_anything() -> None:
    """Names only for type checkers, local classes and classes without a JSON form never break the others."""

    class Local:
        pass

    def f(a: Unseen, b: Local, c: list[Unseen], d: int, e: Callable[[], int], g: Iterable[int]) -> None: ...

    schema = Arguments(f).input_schema()
    assert [schema["properties"][name] for name in "abce"] == [{}, {}, {}, {}]
    assert schema["properties"]["d"] == {"type": "integer"}
    values = {"a": 1, "b": None, "c": {}, "d": 4, "e": [], "g": [1, 2]}
    assert Arguments(f).validate(values) == values
    assert "'g[0]'" in fails(f, {**values, "g": ["x"]})


def test_a_class_that_the_function_closes_over_is_found() -> None:
    """Under postponed annotations a local class is known if the body uses it."""

    class Local(BaseModel):
        n: int

    def f(a: Local) -> Any:
        return isinstance(a, Local)

    assert called(f, {"a": {"n": 1}}) is True


def test_a_partial_and_a_builtin_without_signature_are_tools_too() -> None:
    """A partial keeps its types and docstring; what has no signature takes what it takes."""
    definition = Arguments(partial(search, limit=3)).tool_definition("search")
    assert definition["input_schema"]["properties"]["since"]["anyOf"]
    assert definition["description"].startswith("Search the archive.")
    assert Arguments(dict).input_schema()["additionalProperties"] is True
    assert called(dict, {"a": 1}) == {"a": 1}


def test_a_default_without_json_form_makes_no_noise() -> None:
    """Pydantic would warn of it, and warnings are errors here."""

    class Options(BaseModel):
        when: Any = object()

    def f(options) -> None: ...  # annotated below, with a local class

    f.__annotations__["options"] = Options
    assert Arguments(f).input_schema()["$defs"]["Options"]["properties"] == {"when": {"title": "When"}}


# --- validation ---


def test_values_become_the_annotated_types() -> None:
    """JSON text becomes dates, decimals, enums, dataclasses, models and typed dicts."""

    def f(
        day: date,
        amount: Decimal,
        color: Color,
        at: Point,
        home: Address,
        rows: list[Row],
        kind: Literal["a"],
        few: set[int],
    ):
        return day, amount, color, at, home, rows, kind, few

    given = {
        "day": "2026-01-01",
        "amount": "1.50",
        "color": "red",
        "at": {"x": 1},
        "home": {"street": "Main"},
        "rows": [{"id": 1}, {"id": 2, "note": "n"}],
        "kind": "a",
        "few": [1, 1],
    }
    expected = (
        date(2026, 1, 1),
        Decimal("1.50"),
        Color.RED,
        Point(1),
        Address(street="Main"),
        [{"id": 1}, {"id": 2, "note": "n"}],
        "a",
        {1},
    )
    assert called(f, given) == called(f, json.dumps(given)) == expected
    assert "'rows[0].id' is missing" in fails(f, {**given, "rows": [{}]})
    assert Arguments(f).input_schema()["$defs"]["Row"]["required"] == ["id"]


@pytest.mark.parametrize(
    ("hint", "value", "what"),
    [
        (int, "5", "should be a valid integer, not a string"),
        (int, True, "should be a valid integer, not a boolean"),
        (int, 5.5, "should be a valid integer, not a decimal number"),
        (float, "5", "should be a valid number, not a string"),
        (bool, 1, "should be a valid boolean, not an integer"),
        (str, 5, "should be a valid string, not an integer"),
        (str, None, "should be a valid string, not null"),
        (list[int], {}, "should be a valid array, not an object"),
        (Point, [], "should be an object, not an array"),
        (str, "\ud83d", "half a surrogate pair"),
    ],
)
def test_a_value_of_another_type_is_an_error(hint: Any, value: Any, what: str) -> None:
    """A scalar of the wrong type is a model's mistake, and is not guessed at."""

    def f(a) -> None: ...  # annotated below

    f.__annotations__["a"] = hint
    assert what in fails(f, {"a": value})


def test_a_whole_decimal_is_an_integer() -> None:
    """JSON Schema takes 5.0 for an integer, so the function gets 5; nested too."""

    def f(n: int, many: list[int], x: float) -> Any:
        return n, many, x

    n, many, x = called(f, '{"n": 5.0, "many": [1e2, 2], "x": 3}')
    assert ((n, type(n)), many, (x, type(x))) == ((5, int), [100, 2], (3.0, float))


def test_only_what_the_model_gave_is_returned() -> None:
    """Defaults are the function's own business."""
    assert Arguments(search).validate({"query": "x"}) == {"query": "x"}


def test_every_problem_is_named_with_what_is_expected() -> None:
    """A model can correct all mistakes at once, and sees the name it probably meant."""
    text = fails(search, {"qery": "x", "limit": "many"})
    assert text.splitlines() == [
        "The arguments don't fit, so the tool did not run. Correct them and call it again:",
        "- 'query' is missing (expected: string)",
        "- 'qery' is not a parameter; known, closest first: 'query', 'since', 'limit'",
        "- 'limit' should be a valid integer, not a string",
    ]


def test_a_long_list_of_problems_is_counted() -> None:
    """A thousand wrong items don't fill the model's context."""

    def f(a: list[int]) -> None: ...

    text = fails(f, {"a": ["x"] * 1000})
    assert text.endswith("- and 990 more")
    assert len(text.splitlines()) == 12


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"x"',
        '{"query": "a", "query": "b"}',
        '{"query": {"a": 1, "a": 2}}',
        '{"query": NaN}',
        '{"query": -Infinity}',
        '{"query": 1e999}',
        '{"query": ' + "9" * 5000 + "}",
        '{"query": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "\ufeff{}",
        '{"query": "x"} trailing',
    ],
)
def test_text_that_is_no_strict_json_object_is_an_error(text: str) -> None:
    """Duplicate names, NaN, infinity, overlong numbers, deep nesting and non-objects are refused alike."""

    def anything(**values: Any) -> None: ...

    assert fails(anything, text)


@pytest.mark.parametrize("arguments", [None, [], 5, {5: 1}])
def test_arguments_that_are_no_object_with_names_are_an_error(arguments: Any) -> None:
    """Whatever a framework hands over, the model gets a text that it can act on."""

    def anything(**values: Any) -> None: ...

    assert fails(anything, arguments)


def test_objects_of_the_right_type_pass() -> None:
    """A Python caller may hand over what JSON can't hold, and it isn't copied."""

    def f(at: Point, day: date) -> None: ...

    at = Point(1)
    assert Arguments(f).validate({"at": at, "day": date(2026, 1, 1)}) == {"at": at, "day": date(2026, 1, 1)}
    assert "'day' should be a valid date" in fails(f, {"at": at, "day": at})


def test_a_value_is_never_quoted() -> None:
    """Neither pydantic's texts nor those of a user's validators repeat what a model gave."""
    secret = "hunter2-xyz"

    def refuse(value: str) -> str:
        raise ValueError(f"{value!r} must not be {value}, be even\nsecond line")

    def crash(value: str) -> str:
        raise KeyError(value)

    def nested(value: str) -> str:
        return str(TypeAdapter(int).validate_python(value))

    class Cat(BaseModel):
        kind: Literal["cat"]

    class Dog(BaseModel):
        kind: Literal["dog"]

    def f(
        a: Annotated[str, AfterValidator(refuse)] = "",
        b: Annotated[str, AfterValidator(crash)] = "",
        c: Annotated[str, AfterValidator(nested)] = "",
        d: Annotated[Cat | Dog, Field(discriminator="kind")] = None,
        e: int = 0,
        g: Annotated[list[str], AfterValidator(refuse)] = [],  # noqa: B006 - never used
    ):
        return refuse, crash, nested, Cat, Dog

    text = fails(f, {"a": secret, "b": secret, "c": secret, "d": {"kind": secret}, "e": secret, "g": [secret]})
    assert secret not in text
    assert "'a' '…' must not be …, be even\n" in text
    assert "'b' can't be read (KeyError)" in text
    assert "'d' should have one of these as its 'kind': 'cat', 'dog'" in text
    assert all(f"- '{name}' " in text for name in "abcdeg")


def test_a_value_is_taken_out_before_a_text_is_cut() -> None:
    """Neither the first line of a value nor its beginning is left over."""

    def refuse(value: list[str]) -> list[str]:
        raise ValueError(f"no {value[0]} {'.' * 280} {value[1]}")

    def f(a: Annotated[list[str], AfterValidator(refuse)]) -> Any:
        return refuse

    text = fails(f, {"a": ["first line\nsecond", "long-secret" * 9, "line"]})
    assert "first" not in text
    assert "second" not in text
    assert "secret" not in text


def test_the_error_pickles() -> None:
    """It may cross to another process and says the same there."""
    error = InvalidArguments("'a' is missing", "'b' is missing")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems) == (str(error), error.problems)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
HINTS: list[Any] = [
    int, float, bool, str, bytes, Decimal, date, datetime, Color, Point, Address, Row, Any,
    list[int], dict[str, int], set[str], tuple[int, str], int | None, int | str, list[Row], Iterable[int],
    dict[str, Address], typing.Literal["a", 1], Annotated[int, Field(gt=0)], list[dict[str, Any]],
]  # fmt: skip


def taking(hint: Any) -> Arguments:
    """A function of one parameter of this type."""

    def f(a, **more) -> None: ...  # annotated below

    f.__annotations__["a"] = hint
    return Arguments(f)


TAKING = [(hint, taking(hint)) for hint in HINTS]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(TAKING), JSON, st.booleans())
def test_no_json_raises_anything_but_invalid_arguments(case: tuple[Any, Arguments], value: Any, as_text: bool) -> None:
    """Whatever a model invents ends in values or in InvalidArguments."""
    arguments: Any = {"a": value}
    if as_text:
        arguments = json.dumps(arguments)
    try:
        values = case[1].validate(arguments)
    except InvalidArguments as error:
        str(error).encode()
    else:
        assert set(values) == {"a"}


GOOD: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, st.integers()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (str, st.text()),
    (date, st.dates()),
    (datetime, st.datetimes()),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (list[int], st.lists(st.integers())),
    (dict[str, bool], st.dictionaries(st.text(), st.booleans())),
    (Point, st.builds(Point, st.integers(), st.floats(allow_nan=False, allow_infinity=False))),
    (Address, st.builds(Address, street=st.text(), number=st.integers())),
]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_good_input_is_read_as_pydantic_reads_it(data: st.DataObject) -> None:
    """What pydantic writes as JSON comes back as the same value."""
    hint, values = data.draw(st.sampled_from(GOOD))
    value = data.draw(values)
    adapter = TypeAdapter(hint)
    text = adapter.dump_json(value).decode()
    got = taking(hint).validate('{"a": ' + text + "}")["a"]
    assert got == adapter.validate_json(text, strict=True)
    assert type(got) is type(value)


@pytest.mark.parametrize("hint", HINTS, ids=repr)
def test_schemas_are_valid_json_schema(hint: Any) -> None:
    """A schema is one by the standard itself, where its checker is installed."""
    checker = pytest.importorskip("jsonschema").Draft202012Validator
    checker.check_schema(taking(hint).input_schema())
    checker.check_schema(Arguments(search).input_schema())


# --- messages and results ---

BLOCKS: list[Any] = [
    {"type": "thinking", "thinking": "…", "signature": "s"},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "id": "t1", "name": "search", "input": {"query": "x"}},
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
    {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
]
USES = [ToolUse("t1", "search", {"query": "x"}), ToolUse("t2", "now", {})]


def test_tool_uses_are_found_in_every_shape_of_a_message() -> None:
    """SDK messages, their dicts, and lists of either kind of block give the same calls in the same order."""
    from anthropic.types import Message
    from anthropic.types.beta import BetaMessage

    raw = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": BLOCKS,
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    message = Message.model_validate(raw)
    shapes = [raw, message, BetaMessage.model_validate(raw), BLOCKS, message.content, tuple(BLOCKS)]
    assert [tool_uses(shape) for shape in shapes] == [USES] * len(shapes)


def test_a_message_of_text_has_no_tool_uses() -> None:
    """A content that is plain text is a message without calls; a streamed call without input has none."""
    assert tool_uses({"role": "assistant", "content": "hi"}) == []
    assert tool_uses([{"type": "tool_use", "id": "t", "name": "n", "input": ""}]) == [ToolUse("t", "n", {})]


@pytest.mark.parametrize("wrong", [None, 5, "text", {"role": "user"}])
def test_what_is_no_message_is_a_type_error(wrong: Any) -> None:
    """A programming mistake isn't taken for a message without calls."""
    with pytest.raises(TypeError, match="message"):
        tool_uses(wrong)


def test_a_tool_use_without_an_id_is_an_error() -> None:
    """It could never be answered."""
    with pytest.raises(ValueError, match="id"):
        tool_uses([{"type": "tool_use", "name": "n", "input": {}}])


class Hostile:
    """An object that can't be shown."""

    def __repr__(self) -> str:
        raise RuntimeError


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("text", "text"),
        (None, ""),
        ("", ""),
        ([], "[]"),
        (5, "5"),
        (True, "true"),
        ({"a": [1, "ä"]}, '{"a":[1,"ä"]}'),
        (b"raw \xff", "raw �"),
        ({"b": b"\xff"}, '{"b":"�"}'),
        (datetime(2026, 1, 1), '"2026-01-01T00:00:00"'),  # noqa: DTZ001 - the plain form is what is tested
        (Decimal("1.50"), '"1.50"'),
        (float("nan"), '"NaN"'),
        ("half \ud83d pair", "half � pair"),
        ("\ud83d\ude00", "😀"),
        ({"k": ("\ud83d",)}, '{"k":["�"]}'),
        (Point(1), '{"x":1,"y":0.0}'),
        (Address(street="s"), '{"street":"s","number":1}'),
        ([Hostile()], '["<Hostile>"]'),
        (CYCLE, "[[...]]"),
        ({"type": "text", "text": "a dict is data"}, '{"type":"text","text":"a dict is data"}'),
        ([{"type": "document", "id": 5}], '[{"type":"document","id":5}]'),
        ([{"type": ["text"]}], '[{"type":["text"]}]'),
    ],
)
def test_any_value_becomes_content_that_can_be_sent(value: Any, content: str) -> None:
    """Text stays, None is empty, anything else is JSON or at least text, and UTF-8 can hold it."""
    result = tool_result("t1", value)
    assert result == {"type": "tool_result", "tool_use_id": "t1", "content": content}
    json.dumps(result, ensure_ascii=False).encode()


def test_content_blocks_stay_what_they_are() -> None:
    """A tool may answer with images and documents; the caller's list isn't touched."""
    blocks = [
        {"type": "text", "text": "see \ud83d"},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
    ]
    content = tool_result("t", blocks, limit=2)["content"]
    assert content == [{"type": "text", "text": "se\n[cut: 3 of 5 characters left out]"}, blocks[1]]
    assert blocks[0]["text"] == "see \ud83d"


def test_a_long_result_is_cut_and_says_so() -> None:
    """The limit holds for all text of a result together, and nothing is cut silently."""
    assert tool_result("t", "abc", limit=3)["content"] == "abc"
    assert (
        tool_result("t", "x" * 1500, limit=500)["content"] == "x" * 500 + "\n[cut: 1,000 of 1,500 characters left out]"
    )
    texts = [{"type": "text", "text": "abc"}, {"type": "text", "text": "def"}]
    assert [block["text"] for block in tool_result("t", texts, limit=4)["content"]] == [
        "abc",
        "d\n[cut: 2 of 3 characters left out]",
    ]


def test_an_error_result_is_marked() -> None:
    """Only an error carries is_error, as in the API's own examples."""
    assert tool_result("t", "no", is_error=True)["is_error"] is True
    assert "is_error" not in tool_result("t", "yes")


@settings(deadline=None, max_examples=200)
@given(JSON, st.none() | st.integers(0, 20))
def test_a_result_can_always_be_sent(value: Any, limit: int | None) -> None:
    """Random values never raise, and the block encodes as UTF-8."""
    json.dumps(tool_result("t", value, limit=limit), ensure_ascii=False, allow_nan=False).encode()


def test_an_unknown_tool_is_told_the_known_ones() -> None:
    """The closest name comes first, so that the model's next guess is right."""
    assert unknown_tool("serch", ["fetch", "Search", "now"]) == (
        "There is no tool 'serch', so nothing ran; known, closest first: 'Search', 'fetch', 'now'."
    )
    assert unknown_tool("x\n" * 500, []).endswith("so nothing ran; there are none.")
    assert len(unknown_tool("x\n" * 500, map(str, range(1000)))) < 500


def test_importing_the_module_is_light() -> None:
    """Neither pydantic, anthropic nor a docstring parser is loaded before a schema is asked for."""
    code = (
        "import sys, loopguard._schemas; "
        "print([m for m in ('pydantic', 'pydantic_core', 'anthropic', 'docstring_parser') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_pydantics_error_is_not_kept_as_the_cause() -> None:
    """Its text quotes values, and tracebacks print causes."""
    with pytest.raises(InvalidArguments) as caught:
        Arguments(search).validate({"query": 5})
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
