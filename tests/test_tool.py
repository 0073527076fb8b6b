"""@tool, Guard.tool and Guard.wrap: whatever can be called becomes a tool, and stays what it was."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import pickle
import re
import threading
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool, beta_tool

from loopguard import (
    Approval,
    ApproveTool,
    ConfigurationError,
    Guard,
    LoopLimit,
    LoopLimitExceeded,
    MaxSteps,
    MaxStepsExceeded,
    ToolCallRefused,
    WrapTool,
    current_call,
    current_run,
    loop,
    tool,
)
from loopguard.testing.replies import Reply
from loopguard.testing.server import MessagesServer
from tests.conftest import Colour


def passing(call: Any, proceed: Any) -> Any:
    """A hook that does nothing, but sends calls the long way."""
    return (yield from proceed(call))


@tool
def module_level(query: str, top: int = 3) -> list[str]:
    """Search for it."""
    return [query] * top


class Shop:
    """Every kind of method, with the decorator inside and outside."""

    def __init__(self, name: str = "shop") -> None:
        self.name = name

    @tool
    def method(self, x: int) -> tuple[str, int]:
        """A method."""
        return self.name, x

    @tool
    @classmethod
    def class_inside(cls, x: int) -> tuple[str, int]:
        """A classmethod under the decorator."""
        return cls.__name__, x

    @classmethod
    @tool
    def class_outside(cls, x: int) -> tuple[str, int]:
        """A classmethod over the decorator."""
        return cls.__name__, x

    @tool
    @staticmethod
    def static_inside(x: int) -> tuple[str, int]:
        """A staticmethod under the decorator."""
        return "static", x

    @staticmethod
    @tool
    def static_outside(x: int) -> tuple[str, int]:
        """A staticmethod over the decorator."""
        return "static", x

    @tool
    async def async_method(self, x: int) -> tuple[str, int]:
        """An async method."""
        return self.name, x

    @tool
    def stream(self, x: int) -> Iterator[tuple[str, int]]:
        """A generator method."""
        yield self.name, x

    @tool
    async def async_stream(self, x: int) -> AsyncIterator[tuple[str, int]]:
        """An async generator method."""
        yield self.name, x


class Corner(Shop):
    """A subclass: cls must be this one."""


class Doubler:
    """A callable object."""

    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def __call__(self, x: int) -> int:
        return self.factor * x


# -- whatever can be called ------------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True], ids=["straight", "hooked"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("method", ("corner", 7)),
        ("class_inside", ("Corner", 7)),
        ("class_outside", ("Corner", 7)),
        ("static_inside", ("static", 7)),
        ("static_outside", ("static", 7)),
    ],
)
def test_every_kind_of_method_is_called_as_before_and_counted_once(
    name: str, expected: tuple[str, int], hooked: bool
) -> None:
    """The decorator may stand inside or outside of classmethod and staticmethod."""
    guard = Guard(MaxSteps(3), *([WrapTool(passing)] if hooked else []))
    shop = Corner("corner")
    with guard.scope() as run:
        assert getattr(shop, name)(7) == expected
        assert getattr(shop, name)(x=7) == expected
        assert run.steps == 2
        if name != "method":
            assert getattr(Corner, name)(7) == expected
        else:
            assert Corner.method(shop, 7) == expected
        with pytest.raises(MaxStepsExceeded):
            getattr(shop, name)(8)
        assert run.steps == 3


@pytest.mark.parametrize("hooked", [False, True], ids=["straight", "hooked"])
def test_async_and_generator_methods_keep_their_self(hooked: bool) -> None:
    """self reaches the body in the other three colours, too."""
    shop = Shop("a")

    async def main() -> list[tuple[str, int]]:
        return [await shop.async_method(1), *[item async for item in shop.async_stream(2)]]

    with Guard(*([WrapTool(passing)] if hooked else [])).scope() as run:
        assert asyncio.run(main()) == [("a", 1), ("a", 2)]
        assert list(shop.stream(3)) == [("a", 3)]
        assert run.steps == 3


@pytest.mark.parametrize(
    ("make", "args", "expected"),
    [
        (lambda: functools.partial(lambda a, b: (a, b), 1), (2,), (1, 2)),
        (lambda: functools.partial(functools.partial(lambda a, *, b: (a, b), b=5), 1), (), (1, 5)),
        (Doubler, (4,), 8),
        (lambda: Doubler(3).__call__, (4,), 12),
        (lambda: lambda x: x + 1, (1,), 2),
        (lambda: len, ([1, 2],), 2),
        (lambda: max, (3, 9), 9),
        (lambda: getattr, ("abc", "nothing", None), None),
        (lambda: {"a": 1}.get, ("a",), 1),
        (lambda: "-".join, (["a", "b"],), "a-b"),
        (lambda: int, ("12",), 12),
        (lambda: Shop("own").method.__wrapped__, (2,), ("own", 2)),
    ],
    ids=[
        "partial",
        "nested partial",
        "callable object",
        "bound method",
        "lambda",
        "builtin",
        "builtin without signature",
        "builtin with optional argument",
        "dict.get",
        "str.join",
        "class",
        "method of an object",
    ],
)
@pytest.mark.parametrize("hooked", [False, True], ids=["straight", "hooked"])
def test_partials_objects_builtins_and_lambdas_are_tools(
    make: Callable[[], Any], args: tuple[Any, ...], expected: Any, hooked: bool
) -> None:
    """Each passes its arguments and result through, is counted, and is refused past the limit."""
    decorated = tool(make())
    guard = Guard(MaxSteps(1), *([WrapTool(passing)] if hooked else []))
    assert decorated(*args) == expected
    with guard.scope() as run:
        assert decorated(*args) == expected
        with pytest.raises(MaxStepsExceeded):
            decorated(*args)
        assert run.steps == 1


def test_async_partials_and_callable_objects_keep_their_colour() -> None:
    """A partial of a coroutine function and an object with an async __call__ are awaited."""

    class Fetch:
        async def __call__(self, x: int) -> int:
            return x

    async def fetch(x: int, y: int) -> int:
        return x + y

    async def main() -> tuple[int, int]:
        return await tool(Fetch())(1), await tool(functools.partial(fetch, 1))(2)

    with Guard().scope() as run:
        assert asyncio.run(main()) == (1, 3)
        assert run.steps == 2


def test_two_partials_of_one_function_are_two_tools() -> None:
    """What a partial has bound, and which object is called, tells calls of the same name apart."""
    calls: list[tuple[Any, ...]] = []

    def ping(host: str, port: int) -> None:
        calls.append((host, port))

    pings = [tool(functools.partial(ping, host)) for host in "abcdef"]
    doublers = [tool(Doubler(n)) for n in range(6)]
    with Guard(LoopLimit(1, strict=True)).scope():
        for one in pings:
            one(1)
        assert [one(4) for one in doublers] == [0, 4, 8, 12, 16, 20]
        with pytest.raises(LoopLimitExceeded):
            pings[0](1)
        with pytest.raises(LoopLimitExceeded):
            doublers[0](4)
    assert len(calls) == 6


def test_a_partial_made_anew_is_still_the_same_tool() -> None:
    """What tells partials apart is what they have bound, not which object they are."""

    def ping(host: str, port: int) -> None:
        """Nothing."""

    with Guard(LoopLimit(1)).scope():
        tool(functools.partial(ping, "a"))(1)
        with pytest.raises(LoopLimitExceeded):
            tool(functools.partial(ping, "a"))(1)


def test_an_approval_of_one_partial_holds_for_no_other() -> None:
    """A grant for the run is bound to what the partial has bound, too."""
    asked: list[Any] = []

    def refund(account: str, amount: int) -> str:
        return account

    def once(call: Any) -> Approval:
        asked.append(call)
        return Approval.approve(grant="run")

    alice = tool(functools.partial(refund, "alice"))
    mallory = tool(functools.partial(refund, "mallory"))
    with Guard(ApproveTool(once)).scope():
        alice(50), alice(50)
        assert len(asked) == 1
        mallory(50)
        assert len(asked) == 2


def test_what_cannot_be_called_is_refused_at_decoration() -> None:
    """A ConfigurationError names what was given."""
    for wrong in (3, "search", object()):
        with pytest.raises(ConfigurationError, match="decorates functions"):
            tool(wrong)


def test_a_wrong_timeout_is_named_as_it_was_written() -> None:
    """The parameter of @tool, not of the guardrail that stands behind it."""
    with pytest.raises(ConfigurationError, match=r"tool\(timeout=0\): give seconds above 0"):
        tool(timeout=0)(lambda: None)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("approve", 1),
        ("idempotent", None),
        ("repeatable", "no"),
        ("require_run", 0),
        ("cost", -1),
        ("cost", True),
        ("name", ""),
        ("raises", [ValueError]),
        ("raises", (KeyboardInterrupt,)),
        ("self_key", "id"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(option: str, value: Any) -> None:
    """At decoration."""
    with pytest.raises(ConfigurationError, match=rf"^tool\({option}={re.escape(repr(value))}\)"):
        tool(**{option: value})(lambda: None)


def test_decorating_twice_is_refused_and_says_what_to_do() -> None:
    """Two @tool would count every call twice."""
    with pytest.raises(ConfigurationError, match="give one @tool all the options"):
        tool(module_level)


# -- it stays what it was --------------------------------------------------------------------------


def test_signature_name_and_documentation_stay() -> None:
    """What help(), type checkers and schema makers read is the function's own."""
    assert inspect.signature(module_level) == inspect.signature(module_level.__wrapped__)
    assert module_level.__name__ == "module_level"
    assert module_level.__doc__ == "Search for it."
    assert typing.get_type_hints(module_level) == {"query": str, "top": int, "return": list[str]}
    assert list(inspect.signature(Shop("x").method).parameters) == ["x"]
    assert list(inspect.signature(Corner.class_inside).parameters) == ["x"]
    assert Shop.method.__qualname__ == "Shop.method"


def test_the_kind_of_callable_stays() -> None:
    """inspect says of a decorated function what it said before."""
    assert inspect.isfunction(module_level)
    assert inspect.ismethod(Shop("x").method)
    assert inspect.iscoroutinefunction(Shop.async_method)
    assert inspect.iscoroutinefunction(Shop("x").async_method)
    assert inspect.isgeneratorfunction(Shop.stream)
    assert inspect.isasyncgenfunction(Shop.async_stream)
    assert not inspect.iscoroutinefunction(module_level)


def test_a_call_gives_the_kind_of_object_that_it_gave_before(colour: Colour) -> None:
    """A coroutine, a generator, an async generator, or the value."""
    decorated = tool(colour.make(lambda: 1))
    kinds = {
        "sync": lambda got: got == 1,
        "async": inspect.iscoroutine,
        "generator": inspect.isgenerator,
        "async generator": inspect.isasyncgen,
    }
    got = decorated()
    assert kinds[colour.name](got)
    if colour.name == "async":
        got.close()


def test_tools_pickle_by_name_and_copy_as_themselves() -> None:
    """As functions do."""
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    assert pickle.loads(pickle.dumps(Shop.method)) == Shop.method
    assert copy.copy(module_level) is module_level
    assert copy.deepcopy(module_level) is module_level


def test_equal_methods_of_one_object_stay_equal() -> None:
    """Bound methods compare as before."""
    shop = Shop()
    assert shop.method == shop.method
    assert shop.method != Shop().method


def test_a_tool_in_a_class_is_inherited_and_overridden() -> None:
    """super().method(…) is a call of its own."""

    class Child(Shop):
        @tool
        def method(self, x: int) -> tuple[str, int]:
            return super().method(x + 1)

    with Guard().scope() as run:
        assert Child("child").method(1) == ("child", 2)
        assert run.steps == 2


def test_a_sync_tool_in_async_code_runs_off_the_loop_by_acall() -> None:
    """acall gives an awaitable for sync and async tools, methods included."""

    @tool
    def where() -> int:
        assert current_call() is not None
        return threading.get_ident()

    async def main() -> None:
        assert await where.acall() != threading.get_ident()
        assert await Shop("s").method.acall(1) == ("s", 1)
        assert await Shop("s").async_method.acall(1) == ("s", 1)
        with pytest.raises(ConfigurationError, match="generator"):
            await Shop("s").stream.acall(1)

    with Guard().scope() as run:
        asyncio.run(main())
        assert run.steps == 3


# -- plain functions that return something to await ------------------------------------------------


class Later:
    """An awaitable of one's own."""

    def __await__(self) -> Iterator[None]:
        yield


@pytest.mark.parametrize("hooked", [False, True], ids=["straight", "hooked"])
def test_a_plain_def_that_returns_an_awaitable_is_refused_clearly(hooked: bool) -> None:
    """Its body would run unguarded, later: the message says how to declare it; no coroutine is left behind."""

    async def coroutine() -> int:
        return 1

    for result in (coroutine, Later):

        @tool
        def fetch(make: Any = result) -> Any:
            return make()

        with (
            Guard(*([WrapTool(passing)] if hooked else [])).scope(),
            pytest.raises(ConfigurationError, match=r"fetch is a plain function that returned.*async def"),
        ):
            fetch()


def test_a_marked_wrapper_of_a_coroutine_function_is_async() -> None:
    """What the message recommends works."""

    async def body(x: int) -> int:
        return x

    if not hasattr(inspect, "markcoroutinefunction"):
        pytest.skip("Python 3.12 has it")

    @tool
    @inspect.markcoroutinefunction
    @functools.wraps(body)
    def wrapper(x: int) -> Any:
        return body(x)

    assert asyncio.run(wrapper(3)) == 3


# -- arguments that don't bind ---------------------------------------------------------------------


@pytest.mark.parametrize("hooked", [False, True], ids=["straight", "hooked"])
@pytest.mark.parametrize("listed", [True, False], ids=["with LoopLimit", "without"])
def test_arguments_that_do_not_bind_use_no_step_and_ask_nobody(colour: Colour, hooked: bool, listed: bool) -> None:
    """They raise the function's own TypeError before anyone is asked."""
    asked: list[Any] = []

    def search(query: str, *, top: int = 3) -> str:
        raise AssertionError("the body must not run")

    decorated = tool(colour.make(search))
    guard = Guard(
        MaxSteps(1),
        LoopLimit(3 if listed else 0),
        *([ApproveTool(lambda c: asked.append(c) or True)] if hooked else []),
    )
    with guard.scope() as run:
        for args, kwargs in (((), {}), (("a", "b"), {}), (("a",), {"nope": 1}), (("a",), {"query": "b"})):
            with pytest.raises(TypeError, match="search"):
                colour.call(decorated, *args, **kwargs)
        assert (run.steps, run.refusals, asked) == (0, 0, [])


def test_arguments_that_do_not_bind_use_no_step_outside_any_run(colour: Colour) -> None:
    """The tool's own guard counts executions only."""
    decorated = Guard(MaxSteps(1)).tool(colour.make(lambda query: query))
    for _ in range(3):
        with pytest.raises(TypeError):
            colour.call(decorated)
    assert colour.call(decorated, "a") == "a"
    with pytest.raises(MaxStepsExceeded):
        colour.call(decorated, "b")


def test_a_type_error_of_the_body_is_its_own_and_uses_a_step() -> None:
    """Only arguments that don't bind are free."""

    @tool
    def broken(x: int) -> int:
        raise TypeError("from the body")

    with Guard().scope() as run:
        with pytest.raises(TypeError, match="from the body"):
            broken(1)
        assert run.steps == 1


# -- Guard.tool and Guard.wrap ---------------------------------------------------------------------


def test_a_list_a_dict_and_a_tuple_of_tools_are_wrapped_in_kind() -> None:
    """Each comes back as what it was, with every function guarded; the originals stay."""

    def one() -> int:
        return 1

    def two() -> int:
        return 2

    guard = Guard(MaxSteps(6))
    listed, paired, named = guard.wrap([one, two]), guard.wrap((one, two)), guard.wrap({"a": one, "b": two})
    assert [type(listed), type(paired), list(named)] == [list, tuple, ["a", "b"]]
    assert [fn() for fn in (*listed, *paired, *named.values())] == [1, 2, 1, 2, 1, 2]
    with pytest.raises(MaxStepsExceeded, match=r"^a was not run"):
        named["a"]()
    assert one() == 1
    assert guard.wrap([]) == []


@pytest.mark.parametrize("how", ["wrap", "tool", "both"])
def test_wrapping_twice_by_the_same_guard_is_wrapping_once(how: str) -> None:
    """One body, one count and one hook a call; the third is refused (C04)."""
    seen: list[str] = []
    bodies: list[int] = []

    def watch(call: Any, proceed: Any) -> Any:
        seen.append(call.name)
        return (yield from proceed(call))

    def work(x: int) -> int:
        bodies.append(x)
        return x

    guard = Guard(MaxSteps(2), WrapTool(watch))
    once = guard.tool(work) if how == "tool" else guard.wrap(work)
    twice = guard.wrap(once) if how != "tool" else guard.tool(once)

    async def main() -> None:
        assert twice(1) == 1
        assert twice(2) == 2
        with pytest.raises(MaxStepsExceeded) as caught:
            twice(3)
        assert (caught.value.limit, caught.value.value) == (2, 2)

    asyncio.run(main())
    assert bodies == [1, 2]
    assert seen == ["work"] * 3


def test_wrapping_by_two_guards_counts_in_each_and_leaves_the_first_alone() -> None:
    """The tool of the first guard isn't changed when a second guard wraps it."""
    first, second = Guard(MaxSteps(5)), Guard(MaxSteps(1))
    bodies: list[int] = []
    a = first.wrap(bodies.append)
    b = second.wrap(a)
    b(1)
    with pytest.raises(MaxStepsExceeded) as caught:
        b(2)
    assert caught.value.limit == 1
    for x in range(4):
        a(x)  # 1 of first's 5 was used through b
    with pytest.raises(MaxStepsExceeded) as caught:
        a(9)
    assert caught.value.limit == 5
    assert len(bodies) == 5


def test_one_guard_on_loop_and_tool_counts_once_per_run() -> None:
    """And afresh in the next run."""
    guard = Guard(MaxSteps(2))
    bodies: list[int] = []

    @guard.tool
    def work(x: int) -> None:
        bodies.append(x)

    @loop(max=5, guard=guard)
    def step(n: int) -> int:
        work(n)
        return n + 1

    for _ in range(2):
        bodies.clear()
        result = step.run(0)
        assert result.stop_reason == "max_steps"
        assert bodies == [0, 1]


def test_a_tools_own_guard_stands_on_the_outermost_run() -> None:
    """Its limits bound the whole tree, and are named by the outermost run."""
    own = Guard(MaxSteps(2))

    @own.tool
    def work(x: int) -> int:
        return x

    with Guard().scope("outer") as outer:
        for x in range(2):
            with Guard(MaxSteps(9)).scope("inner"):
                work(x)
        with Guard().scope("inner"), pytest.raises(MaxStepsExceeded) as caught:
            work(3)
        assert (caught.value.source, caught.value.run_id) == ("outer", outer.id)
    with Guard().scope("another"):
        work(4)  # a fresh count in another run


def test_methods_wrapped_on_an_object_are_guarded() -> None:
    """A bound method is a function like any other."""
    guard = Guard(MaxSteps(1))
    plain = type("Plain", (), {"greet": lambda self, name: (self.mark, name), "mark": 7})()
    greet = guard.wrap(plain.greet)
    assert greet("a") == (7, "a")
    with pytest.raises(MaxStepsExceeded):
        greet("b")


# -- tools of the anthropic SDK --------------------------------------------------------------------


def script(*names: str) -> list[Reply | str]:
    """Replies that call each tool once, with distinct arguments, and then end."""
    return [*(Reply.tool_use(name, {"city": f"{name}{i}"}) for i, name in enumerate(names)), "done"]


def run_sdk(server: MessagesServer, tools: list[Any]) -> Any:
    """The final message of the SDK's own tool runner."""
    with anthropic.Anthropic(base_url=server.url, api_key="test", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="m-1", max_tokens=100, messages=[{"role": "user", "content": "Hi"}], tools=tools
        )
        return runner.until_done()


def results_in(server: MessagesServer) -> list[dict[str, Any]]:
    """The tool_result blocks that reached the server, in order."""
    last = [request["body"]["messages"][-1]["content"] for request in server.requests[1:]]
    return [block for content in last for block in content if block["type"] == "tool_result"]


@pytest.mark.parametrize("times", [1, 2])
def test_the_sdks_tool_runner_runs_wrapped_tools(times: int) -> None:
    """Every call is counted once however often it is wrapped; a refusal reaches the model as is_error."""
    cities: list[str] = []

    @beta_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        cities.append(city)
        return f"sunny in {city}"

    guard = Guard(MaxSteps(2))
    tools = [weather]
    for _ in range(times):
        tools = guard.wrap(tools)
    assert tools[0].to_dict() == weather.to_dict()
    with MessagesServer(script("weather", "weather", "weather")) as server, guard.scope() as run:
        message = run_sdk(server, tools)
        assert message.content[-1].text == "done"
        assert run.steps == 2
        assert run.refusals == 1
        results = results_in(server)
    assert [bool(result.get("is_error")) for result in results] == [False, False, True]
    assert "weather was not run" in str(results[2]["content"])
    assert cities == ["weather0", "weather1"]
    assert weather.call({"city": "x"}) == "sunny in x"  # the original is not guarded


def test_the_sdks_async_tool_runner_runs_wrapped_tools() -> None:
    """The same for beta_async_tool."""

    @beta_async_tool
    async def weather(city: str) -> str:
        """The weather in a city."""
        run = current_run()
        assert run is not None
        return f"{run.name} {city}"

    guard = Guard(MaxSteps(1))

    async def main(server: MessagesServer) -> Any:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="test", max_retries=0) as client:
            runner = client.beta.messages.tool_runner(
                model="m-1", max_tokens=100, messages=[{"role": "user", "content": "Hi"}], tools=guard.wrap([weather])
            )
            return await runner.until_done()

    with MessagesServer(script("weather", "weather")) as server, guard.scope("trip") as run:
        asyncio.run(main(server))
        results = results_in(server)
        assert run.steps == 1
    assert [bool(result.get("is_error")) for result in results] == [False, True]
    assert "trip weather0" in str(results[0]["content"])


def test_a_guard_on_the_runner_tools_and_on_a_loop_halts_a_model_that_never_listens() -> None:
    """LoopHalted is a BaseException: the SDK's runner can't swallow it."""

    @beta_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return city

    guard = Guard(MaxSteps(0), max_refusals=3)

    def insist(body: dict[str, Any]) -> Reply:
        return Reply.tool_use("weather", {"city": str(len(body["messages"]))})

    @loop(max=2, guard=guard)
    def step(text: str) -> str:
        return str(run_sdk(server, guard.wrap([weather])))

    with MessagesServer(insist) as server:
        result = step.run("go")
        assert len(server.requests) <= 5
    assert result.stop_reason == "halted"


def test_a_refusal_that_leaves_a_tool_is_the_refusal_itself(colour: Colour) -> None:
    """Straight and hooked, in every colour, the caller catches ToolCallRefused with all its fields."""
    decorated = tool(colour.make(lambda: 1), name="work")
    for guardrails in ((MaxSteps(0),), (MaxSteps(0), WrapTool(passing))):
        with Guard(*guardrails).scope("box") as run, pytest.raises(ToolCallRefused) as caught:
            colour.call(decorated)
        assert (caught.value.code, caught.value.tool, caught.value.source) == ("max_steps", "work", "box")
        assert caught.value.run_id == run.id
        assert (run.steps, run.refusals) == (0, 1)
