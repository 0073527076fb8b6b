"""Hostile values: arguments, results and errors that raise, cycle, nest and overflow never break the guard."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loopguard import (
    ApproveTool,
    Budget,
    Guard,
    LoopLimit,
    LoopLimitExceeded,
    MaxSteps,
    MaxStepsExceeded,
    WrapTool,
    loop,
    tool,
)
from loopguard.telemetry import _spans
from tests.conftest import Colour


class Spiteful:
    """Raises whatever is done to it."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("leave me alone")

    __repr__ = __str__ = __eq__ = __ne__ = __lt__ = __hash__ = __bool__ = __len__ = __iter__ = _refuse
    __getattr__ = __getitem__ = __contains__ = __reduce_ex__ = __format__ = __copy__ = __deepcopy__ = _refuse
    __int__ = __float__ = __index__ = __enter__ = _refuse


class Interrupting:
    """Its repr raises what except Exception doesn't catch."""

    def __repr__(self) -> str:
        raise RecursionError("too deep")


class SpitefulDict(dict[str, Any]):
    """A dict whose methods raise."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("leave me alone")

    __repr__ = __iter__ = __len__ = __getitem__ = __eq__ = items = keys = values = get = _refuse


class SpitefulStr(str):
    """A text whose methods raise."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("leave me alone")

    __repr__ = __str__ = __eq__ = __len__ = __hash__ = encode = __format__ = isascii = _refuse


class SpitefulInt(int):
    """A number whose methods raise."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("leave me alone")

    __repr__ = __str__ = __eq__ = __hash__ = __bool__ = __index__ = __le__ = __lt__ = __ge__ = __gt__ = _refuse


def unhelpful() -> type:
    """A class whose metaclass answers nothing."""

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise RuntimeError("leave me alone")

    return Meta("Unhelpful", (), {})


class Liar:
    """Claims to be a text."""

    __class__ = property(lambda self: str)


def cycle() -> Any:
    """A list in a dict in that list."""
    inner: list[Any] = []
    outer = {"inner": inner}
    inner.append(outer)
    return outer


def deep(depth: int = 5_000) -> Any:
    """Lists in dicts in tuples, deeper than Python's stack."""
    value: Any = "bottom"
    for i in range(depth):
        value = [value] if i % 3 == 0 else {"k": value} if i % 3 == 1 else (value,)
    return value


def infinite() -> Iterator[int]:
    """A generator as an argument: looking at it would use it up."""
    n = 0
    while True:
        yield n
        n += 1


HOSTILE: dict[str, Callable[[], Any]] = {
    "lone surrogate": lambda: "\ud83d",
    "surrogate key": lambda: {"\ud83d": ["\udc00" * 5000]},
    "nul and control": lambda: "\x00\x1b[2J\u202e\u200b",
    "cycle": cycle,
    "deep": deep,
    "huge int": lambda: 10**5000,
    "huge negative": lambda: [-(10**5000), {10**5000: 1}],
    "infinities": lambda: [float("nan"), float("inf"), -0.0, complex("nan")],
    "spiteful": Spiteful,
    "spiteful within": lambda: [{"x": (Spiteful(), Spiteful())}],
    "recursion in repr": Interrupting,
    "spiteful dict": lambda: SpitefulDict(a=1),
    "spiteful str": lambda: SpitefulStr("text"),
    "spiteful int": lambda: SpitefulInt(5),
    "of an unhelpful class": lambda: type.__call__(unhelpful()),
    "an unhelpful class": lambda: [unhelpful()],
    "liar": Liar,
    "lambda": lambda: lambda x: x,
    "bytes": lambda: b"\xff\x00" * 10,
    "datetime": lambda: datetime(2026, 11, 30, tzinfo=UTC),
    "generator": infinite,
    "exception": lambda: ValueError("x", Spiteful()),
    "module": lambda: sys,
    "type": lambda: Spiteful,
    "mixed keys": lambda: {1: "a", "1": "b", None: "c", (1, 2): "d", b"x": "e", 1.5: "f"},
    "memoryview": lambda: memoryview(b"abc"),
    "ellipsis": lambda: [..., NotImplemented],
}


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE.keys())
def hostile(request: pytest.FixtureRequest) -> Any:
    """Every hostile value in turn."""
    return request.param()


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans carry arguments and results."""
    monkeypatch.setattr(_spans, "capture_content", lambda: True)


def watching(call: Any, proceed: Any) -> Any:
    """A hook, so that calls go the long way."""
    return (yield from proceed(call))


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("approved", [False, True], ids=["straight", "approved"])
def test_hostile_arguments_and_results_pass_everything(
    colour: Colour,
    hostile: Any,
    approved: bool,
    exporter: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Events, spans, approvals, LoopLimit and budgets are all on: the tool runs and the caller gets the original."""
    events: list[Any] = []
    bodies: list[Any] = []

    def body(value: Any, *, again: Any = None) -> Any:
        bodies.append(value)
        return hostile

    decorated = tool(cost=1)(colour.make(body))
    rails: list[Any] = [MaxSteps(1), LoopLimit(3), Budget(usd=10)]
    if approved:
        rails += [ApproveTool(lambda call: True), WrapTool(watching)]
    with (
        caplog.at_level(logging.WARNING if approved else logging.INFO),
        Guard(*rails, on_event=events.append).scope() as run,
    ):
        assert colour.call(decorated, hostile, again="x") is hostile
        with pytest.raises(MaxStepsExceeded) as caught:
            colour.call(decorated, hostile)
        str(caught.value).encode()
        assert (run.steps, run.spent(), run.reserved()) == (1, 1, 0)
    assert len(bodies) == 1
    if not approved:  # under an approval the tool gets a copy of builtin containers
        assert bodies[0] is hostile
    (started,) = [event for event in events if type(event).__name__ == "ToolStarted"]
    assert set(started.arguments) == {"value", "again"}
    finished = exporter.get_finished_spans()
    assert len([span for span in finished if span.name.startswith("execute_tool")]) == 2
    encode_spans(finished).SerializeToString()  # what an exporter does with them
    assert all(span.attributes is not None and span.attributes for span in finished)
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.usefixtures("capturing", "exporter")
def test_a_hostile_call_repeated_is_still_a_loop(colour: Colour, hostile: Any) -> None:
    """LoopLimit recognises the same objects, and never asks them."""
    decorated = tool(colour.make(lambda value: "same"))
    with Guard(LoopLimit(3)).scope():
        for _ in range(3):
            colour.call(decorated, hostile)
        with pytest.raises(LoopLimitExceeded):
            colour.call(decorated, hostile)


@pytest.mark.usefixtures("capturing", "exporter")
def test_hostile_errors_reach_the_caller_as_they_are(colour: Colour) -> None:
    """An exception whose str, repr, eq and bool raise, with hostile arguments."""

    class Spite(Exception):
        def _refuse(self, *args: Any) -> Any:
            raise RuntimeError("leave me alone")

        __repr__ = __str__ = __eq__ = __hash__ = __bool__ = __len__ = _refuse

    events: list[Any] = []
    for make in (lambda: Spite(Spiteful()), lambda: ValueError("\ud83d", cycle()), lambda: LookupError(deep(500))):
        error = make()

        def body(error: BaseException = error) -> None:
            raise error

        decorated = tool(colour.make(body))
        for rails in ((), (WrapTool(watching),)):
            with Guard(*rails, on_event=events.append).scope() as run:
                for _ in range(3):
                    try:
                        colour.call(decorated)
                    except Exception as exc:
                        assert exc is error  # noqa: PT017  # pytest.raises would compare and print it
                    else:
                        pytest.fail("nothing was raised")
                with pytest.raises(LoopLimitExceeded):
                    colour.call(decorated)
                assert run.steps == 3
    assert len([event for event in events if type(event).__name__ == "ToolFinished"]) == 18


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("colour", ["generator", "async generator"], indirect=True)
def test_hostile_items_of_generators_pass(colour: Colour, hostile: Any, exporter: InMemorySpanExporter) -> None:
    """They are digested for LoopLimit and handed on."""
    decorated = tool(colour.make(lambda: hostile))
    with Guard(LoopLimit(3)).scope():
        for _ in range(3):
            assert colour.call(decorated) is hostile
    encode_spans(exporter.get_finished_spans()).SerializeToString()


@pytest.mark.usefixtures("capturing", "exporter")
def test_a_hostile_object_may_have_tools(colour: Colour) -> None:
    """self that can't be compared, hashed, printed or asked whether it is true."""
    colours = {
        "sync": lambda self, x: x,
        "async": colour.make(lambda self, x: x),
        "generator": colour.make(lambda self, x: x),
        "async generator": colour.make(lambda self, x: x),
    }
    kind = type("SpitefulShop", (Spiteful,), {"work": tool(name="work")(colours[colour.name])})
    shop = kind()
    events: list[Any] = []
    for rails in ((), (ApproveTool(lambda call: True),)):
        with Guard(*rails, on_event=events.append).scope() as run:
            assert colour.call(shop.work, 1) == 1
            assert colour.call(shop.work, x=1) == 1
            colour.call(shop.work, 1)
            with pytest.raises(LoopLimitExceeded):
                colour.call(shop.work, 1)
            assert run.steps == 3
            assert colour.call(kind().work, 1) == 1  # another object


def test_a_hostile_object_may_be_a_tool() -> None:
    """A callable object that can't be printed, hashed, measured or asked whether it is true."""

    class SpitefulTool(Spiteful):
        __eq__ = object.__eq__  # inspect.signature compares
        __hash__ = Spiteful.__hash__

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

        def __call__(self, x: int) -> int:
            return x

    guard = Guard(MaxSteps(5))
    decorated = guard.wrap(SpitefulTool())
    with guard.scope() as run:
        assert decorated(1) == 1
        assert guard.call("SpitefulTool", {"x": 2}) == 2
        assert run.steps == 2


@pytest.mark.usefixtures("exporter", "capturing")
def test_hostile_states_pass_a_loop() -> None:
    """As the state of every iteration, with events and spans."""
    for make in HOSTILE.values():
        value = make()
        events: list[Any] = []

        @loop(max=2, guard=Guard(on_event=events.append))
        def step(state: Any, value: Any = value) -> Any:
            return value

        assert step.run(value).value is value
        assert type(events[-1]).__name__ == "RunEnded"


def test_a_subscriber_that_raises_or_meddles_changes_nothing(colour: Colour) -> None:
    """It gets redacted copies; its exceptions are said once as a warning, and the call goes on."""

    def meddle(event: Any) -> None:
        arguments = getattr(event, "arguments", None)
        if arguments:
            arguments["value"].clear()
        raise RuntimeError("subscriber")

    given = [1]
    decorated = tool(colour.make(lambda value: value))
    guard = Guard(on_event=meddle)

    def run() -> None:
        with guard.scope() as run:
            assert colour.call(decorated, given) is given
            assert run.steps == 1

    with pytest.warns(match="on_event raised RuntimeError"):
        run()
    assert given == [1]
