"""LoopLimit: the same call again and again while nothing new happens."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loopguard import (
    ConfigurationError,
    Guard,
    LoopLimit,
    LoopLimitExceeded,
    MaxSteps,
    Run,
    ToolCallRefused,
    loop,
    tool,
)
from loopguard.guardrails import repeats
from loopguard.testing import Clock
from tests.conftest import Colour


def admitted(call: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether the call was let through, whatever its body did."""
    try:
        call(*args, **kwargs)
    except LoopLimitExceeded:
        return False
    except Exception:  # the body's own
        return True
    return True


def script(*calls: tuple[Callable[..., Any], Any]) -> list[bool]:
    """Which of these calls were let through, in order."""
    return [admitted(call, argument) for call, argument in calls]


@tool
def search(query: Any) -> str:
    """Finds the same every time."""
    return "nothing"


@tool
def other(query: Any) -> str:
    """Another of that kind."""
    return "nothing"


@tool(repeatable=True)
def think(thought: Any) -> str:
    """May be repeated for ever."""
    return ""


# -- what is counted -------------------------------------------------------------------------------


def test_the_fourth_same_call_is_refused_in_any_run(colour: Colour) -> None:
    """On by default, in every colour; the refusal is data and a sentence."""
    bodies = []

    def body(query: str) -> str:
        bodies.append(query)
        return "nothing"

    guarded = tool(name="search")(colour.make(body))
    with Guard().scope("agent") as run:
        for _ in range(3):
            assert colour.call(guarded, "x") == "nothing"
        with pytest.raises(LoopLimitExceeded) as caught:
            colour.call(guarded, "x")
        assert (run.steps, run.refusals) == (3, 1)
    assert bodies == ["x"] * 3
    refusal = caught.value
    assert (refusal.code, refusal.guardrail, refusal.tool, refusal.limit, refusal.value) == (
        "loop_limit", "LoopLimit", "search", 3, 3,
    )  # fmt: skip
    assert (refusal.source, refusal.run_id) == ("agent", run.id)


def test_the_refusal_says_all_that_a_person_needs_to_loosen_it() -> None:
    """To the model: stop looping. To people: which knob."""
    with Guard(LoopLimit(2)).scope("agent"):
        search("x")
        search("x")
        with pytest.raises(LoopLimitExceeded) as caught:
            search("x")
    text = str(caught.value)
    parts = ("you are looping", "search", "2 times", "LoopLimit(2)", "'agent'", "ignore=", "repeatable=True")
    assert all(part in text for part in parts), text


def test_outside_any_run_the_default_doesnt_act() -> None:
    """A script may call its tools as often as it likes."""
    assert all(admitted(search, "x") for _ in range(20))


def test_outside_any_run_a_listed_one_counts_process_wide() -> None:
    """On the tool's own guard."""
    guarded = tool(guard=Guard(LoopLimit(2)))(lambda query: "nothing")
    assert script(*[(guarded, "x")] * 4) == [True, True, False, False]


def test_zero_turns_it_off() -> None:
    """Also for the runs below."""
    with Guard(LoopLimit(0)).scope("outer"), Guard().scope("inner"):
        assert all(admitted(search, "x") for _ in range(20))


def test_settings_inherit_and_the_default_acts_only_where_nothing_is_listed() -> None:
    """A looser limit on an outer run isn't undercut by the default."""
    with Guard(LoopLimit(5)).scope("outer"), Guard(MaxSteps(100)).scope("inner"):
        assert script(*[(search, "x")] * 7) == [True] * 5 + [False] * 2


def test_a_childs_tighter_limit_acts_in_the_child() -> None:
    """Both are asked."""
    with Guard(LoopLimit(5)).scope("outer"), Guard(LoopLimit(2)).scope("inner"):
        assert script(*[(search, "x")] * 4) == [True, True, False, False]


def test_counts_belong_to_the_run_that_makes_the_call() -> None:
    """Five parallel children that each list the files once are not a loop."""

    @loop(max=1)
    def child(n: int) -> int:
        search("files")
        search("files")
        return n

    with Guard(LoopLimit(2)).scope("parent"):
        results = [child.run(i) for i in range(5)]
        assert [result.stop_reason for result in results] == ["max_iterations"] * 5
        assert script((search, "files"), (search, "files"), (search, "files")) == [True, True, False]


def test_five_samples_of_one_prompt_in_parallel_are_not_a_loop() -> None:
    """A repeat counts when it finishes; the ones after that are refused."""

    @tool
    async def sample(prompt: str) -> str:
        await asyncio.sleep(0)
        return "same"

    async def main() -> list[Any]:
        async with Guard().scope("s"):
            first = await asyncio.gather(*[sample("p") for _ in range(5)], return_exceptions=True)
            return [*first, *await asyncio.gather(sample("p"), return_exceptions=True)]

    outcomes = asyncio.run(main())
    assert outcomes[:5] == ["same"] * 5
    assert isinstance(outcomes[5], LoopLimitExceeded)


# -- what is new -----------------------------------------------------------------------------------


@tool
def status(job: int) -> str:
    """A job that gets on."""
    return f"{next(PERCENT)} %"


PERCENT: Iterator[int] = itertools.count(10, 10)


def test_polling_that_gets_on_is_never_refused() -> None:
    """A repeat whose result differs from the time before is new."""
    with Guard().scope("s"):
        assert script(*[(status, 7)] * 20) == [True] * 20


def test_strict_counts_arguments_alone_whatever_comes_of_them() -> None:
    """Over the whole run, news or not."""
    with Guard(LoopLimit(3, strict=True)).scope("s"):
        assert script(*[(status, 7)] * 5) == [True] * 3 + [False] * 2
        assert script(*[(search, "x")] * 4) == [True] * 3 + [False]
        assert script(*[(search, i) for i in range(20)]) == [True] * 20
        assert script((search, "x"), (status, 7)) == [False, False]


def test_strict_counts_parallel_calls_as_well() -> None:
    """It counts when a call is admitted, so exactly n bodies run."""
    bodies = []

    @tool
    async def sample(prompt: str) -> None:
        bodies.append(prompt)
        await asyncio.sleep(0)

    async def main() -> None:
        async with Guard(LoopLimit(3, strict=True)).scope("s"):
            await asyncio.gather(*[sample("p") for _ in range(8)], return_exceptions=True)

    asyncio.run(main())
    assert bodies == ["p"] * 3


def test_a_repeatable_tool_is_never_refused() -> None:
    """Thinking, planning, waiting."""
    with Guard(LoopLimit(1)).scope("s"):
        assert script(*[(think, "…")] * 20) == [True] * 20


def test_a_repeatable_tool_is_never_new() -> None:
    """search(x) with ever new thoughts between: the fourth search is refused."""
    with Guard().scope("s"):
        calls = [call for i in range(5) for call in ((search, "x"), (think, i))]
        assert script(*calls)[::2] == [True] * 3 + [False] * 2


@tool
def edit(text: str) -> str:
    """Writes a text."""
    return "written"


@tool
def run_tests(suite: str) -> str:
    """Fails every time."""
    return "1 failed"


def test_running_the_tests_after_each_new_edit_is_never_refused() -> None:
    """The edit is new, so the counts start again."""
    with Guard().scope("s"):
        assert script(*[c for i in range(10) for c in ((edit, f"try {i}"), (run_tests, "all"))]) == [True] * 20


def test_the_same_edit_and_the_same_tests_in_turn_are_a_loop() -> None:
    """The fourth of each is refused."""
    with Guard().scope("s"):
        assert script(*[(edit, "same"), (run_tests, "all")] * 4) == [True] * 6 + [False] * 2


def test_a_cycle_of_two_is_caught_at_the_fourth() -> None:
    """a, b, a, b, a, b, a: the fourth a; and what never repeats is never refused."""
    a, b = (search, "a"), (search, "b")
    with Guard().scope("s"):
        assert script(a, b, a, b, a, b, a) == [True] * 6 + [False]
    with Guard().scope("s"):
        assert script(*[call for i in range(10) for call in ((search, f"a{i}"), (search, f"b{i}"))]) == [True] * 20


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_cycle_of_any_period_is_caught_in_its_fourth_round(period: int) -> None:
    """Nothing new happened in the three rounds before."""
    with Guard(max_refusals=100).scope("s"):
        calls = [(search, i) for i in range(period)] * 4
        assert script(*calls) == [True] * 3 * period + [False] * period


def test_a_refused_model_that_tries_something_new_may_come_back() -> None:
    """A new call sets every count back to one: two more of the old call, then it is a loop again."""
    with Guard().scope("s"):
        assert script(*[(search, "x")] * 5) == [True] * 3 + [False] * 2
        assert script((search, "y"), *[(search, "x")] * 3) == [True, True, True, False]


def test_for_n_of_one_a_new_call_sets_the_counts_back_to_none() -> None:
    """Otherwise nothing could ever be done twice."""
    with Guard(LoopLimit(1)).scope("s"):
        calls = [(search, "x"), (search, "x"), (search, "y"), (search, "x"), (search, "x")]
        assert script(*calls) == [True, False, True, True, False]


def test_for_n_of_two_the_first_repeat_is_compared_already() -> None:
    """The first comparison is between the first and the second."""
    with Guard(LoopLimit(2)).scope("s"):
        assert script(*[(status, 7)] * 10) == [True] * 10
        assert script(*[(search, "x")] * 3) == [True, True, False]


def test_a_refused_call_is_never_new() -> None:
    """Being refused by another limit is no way out."""

    @tool
    def closed(n: int) -> int:
        return n

    with Guard(MaxSteps(0, only="closed"), LoopLimit(3), max_refusals=100).scope("s"):
        seen = []
        for i in range(5):
            seen.append(admitted(search, "x"))
            with pytest.raises(ToolCallRefused):
                closed(i)
        assert seen == [True] * 3 + [False] * 2


def test_a_changing_exception_is_new_and_the_same_one_is_not() -> None:
    """Exceptions are compared like results."""

    @tool
    def fail(text: str) -> None:
        raise ValueError(next(texts))

    texts = iter(["a", "b", "c", "d", "e", "f", "same", "same", "same", "same", "same"])
    with Guard().scope("s"):
        assert script(*[(fail, "x")] * 6) == [True] * 6
        # "f" ▸ "same" is a change still
        assert script(*[(fail, "x")] * 4) == [True, True, True, False]


def test_the_first_comparison_is_between_the_second_result_and_the_third() -> None:
    """Calls that never repeat pay for no fingerprint, so what the first one returned isn't known later."""

    @tool
    def poll(job: str) -> str:
        return next(states)

    states = iter(["started", "busy", "busy"])
    with Guard().scope("s"):
        assert script(*[(poll, "x")] * 4) == [True, True, True, False]


def test_what_a_generator_yields_is_its_result(colour: Colour) -> None:
    """Different items are news, the same items are not."""
    texts = itertools.count()
    changing = tool(name="changing")(colour.make(lambda query: next(texts)))
    same = tool(name="same")(colour.make(lambda query: "nothing"))
    with Guard().scope("s"):
        assert [admitted(colour.call, changing, "x") for _ in range(6)] == [True] * 6
        assert [admitted(colour.call, same, "x") for _ in range(4)] == [True] * 3 + [False]


def test_ignored_names_are_left_out_of_results_of_every_colour(colour: Colour) -> None:
    """A result that differs only in them is no news, nor is an item of a generator."""
    took = itertools.count()
    timed = tool(colour.make(lambda query: {"found": "nothing", "took_ms": next(took)}))
    for mode, calls in (("enforce", [True] * 3 + [False]), ("observe", [True] * 4)):
        with Guard(LoopLimit(3, ignore={"took_ms"}), mode=mode).scope("s"):
            assert [admitted(colour.call, timed, "x") for _ in range(4)] == calls
    with Guard(LoopLimit(3, ignore={"other"})).scope("s"):
        assert [admitted(colour.call, timed, "x") for _ in range(4)] == [True] * 4


# -- what is the same ------------------------------------------------------------------------------


@tool
def locate(first: Any, second: Any = 2, *rest: Any, **named: Any) -> None:
    """Takes anything."""


@pytest.mark.parametrize(
    "calls",
    [
        [((1, 2), {}), ((), {"first": 1, "second": 2}), ((1,), {}), ((1,), {"second": 2})],
        [((), {"first": 1, "b": 1, "a": 2}), ((1,), {"a": 2, "b": 1})],
        [(({"a": 1, "b": 2},), {}), (({"b": 2, "a": 1},), {})],
        [((1, 2), {}), ((1.0, 2.0), {})],
        [((1, 2, 3), {}), ((1.0, 2, 3), {})],
    ],
    ids=["call style and defaults", "keywords", "key order", "floats", "varargs"],
)
def test_equal_calls_are_counted_together(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """Call style, key order, omitted defaults and 1 for 1.0 make no difference."""
    with Guard(LoopLimit(len(calls))).scope("s"):
        assert all(admitted(locate, *args, **kwargs) for args, kwargs in calls)
        args, kwargs = calls[0]
        assert not admitted(locate, *args, **kwargs)


@pytest.mark.parametrize(
    "pair", [([1, 2], [2, 1]), (True, 1), ("1", 1), (None, ""), ([], {}), ((1, 2), (1, 3))], ids=str
)
def test_different_calls_are_counted_apart(pair: tuple[Any, Any]) -> None:
    """List order and type matter: True isn't 1."""
    with Guard(LoopLimit(1)).scope("s"):
        assert script((locate, pair[0]), (locate, pair[1])) == [True, True]


def test_json_text_is_the_same_call_as_its_object() -> None:
    """A model's arguments, with and without spaces, through guard.call."""
    guard = Guard(LoopLimit(3))

    @guard.tool
    def find(a: int, b: list[int]) -> str:
        return "nothing"

    with guard.scope("s"):
        for given in ('{"a":1,"b":[1]}', '{ "b": [ 1 ], "a": 1.0 }', {"b": [1], "a": 1}):
            guard.call("find", given)
        with pytest.raises(LoopLimitExceeded):
            find(1, b=[1])


def test_methods_of_different_objects_are_different_calls() -> None:
    """Self counts by identity, and isn't among the arguments."""

    class Shelf:
        @tool
        def count(self, what: str) -> int:
            return 0

    one, two = Shelf(), Shelf()
    with Guard(LoopLimit(2)).scope("s"):
        assert [admitted(one.count, "x"), admitted(two.count, "x")] * 2 == [True] * 4
        assert admitted(one.count, "x")
        assert admitted(two.count, "x")
        assert not admitted(one.count, "x")


def test_ignored_names_are_left_out_of_arguments_and_results() -> None:
    """A request id or a duration makes no call new."""
    numbers = itertools.count()

    @tool
    def ask(query: str, request_id: int) -> dict[str, Any]:
        return {"answer": 42, "took_ms": next(numbers)}

    with Guard(LoopLimit(3, ignore={"took_ms", "request_id"})).scope("s"):
        assert [admitted(ask, "x", i) for i in range(5)] == [True] * 3 + [False] * 2
    with Guard(LoopLimit(3, ignore={"took_ms"})).scope("s"):
        assert [admitted(ask, "x", 7) for i in range(5)] == [True] * 3 + [False] * 2
    with Guard(LoopLimit(3)).scope("s"):
        assert [admitted(ask, "x", 7) for i in range(5)] == [True] * 5


def test_arguments_that_dont_bind_raise_the_functions_own_type_error() -> None:
    """Before anything is counted."""
    with Guard().scope("s") as run:
        for _ in range(6):
            with pytest.raises(TypeError, match=r"search\(\)"):
                search()  # type: ignore[call-arg]  # what is tested
        assert (run.steps, run.refusals) == (0, 0)


def test_arguments_without_any_canonical_form_are_no_trouble() -> None:
    """Cycles, surrogates, locks, lambdas: the tool runs, and an identical object is the same call."""
    cycle: list[Any] = []
    cycle.append(cycle)
    with Guard().scope("s"):
        for thing in (cycle, "\ud83d", threading.Lock(), lambda: 1, float("nan"), object()):
            assert script(*[(search, thing)] * 4) == [True] * 3 + [False]


# -- time and memory -------------------------------------------------------------------------------


def test_a_call_is_forgotten_after_its_ttl() -> None:
    """At 0, 100, 200 and 300 s with a ttl of 60: never refused."""
    clock = Clock()
    with Guard(LoopLimit(3, ttl=60, timer=clock)).scope("s"):
        seen = []
        for _ in range(6):
            seen.append(admitted(search, "x"))
            clock.advance(100)
        assert seen == [True] * 6


def test_the_ttl_runs_from_when_the_call_was_last_made() -> None:
    """Every 40 s with a ttl of 60 is a loop; a refusal doesn't prolong it."""
    clock = Clock()
    with Guard(LoopLimit(3, ttl=60, timer=clock)).scope("s"):
        seen = []
        for _ in range(4):
            seen.append(admitted(search, "x"))
            clock.advance(40)
        assert seen == [True] * 3 + [False]
        assert admitted(search, "x")  # 80 s after the third


@pytest.mark.parametrize("strict", [False, True])
def test_a_refused_call_stays_refused_until_something_new_happens(strict: bool) -> None:
    """However often it is tried; with strict only time helps."""
    clock = Clock()
    with Guard(LoopLimit(3, ttl=60, timer=clock, strict=strict), max_refusals=100).scope("s"):
        assert script(*[(search, "x")] * 8) == [True] * 3 + [False] * 5
        assert admitted(search, "something new")
        assert admitted(search, "x") is not strict
        clock.advance(61)
        assert admitted(search, "x")


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run remembers its latest distinct calls; what it forgot is new again."""
    monkeypatch.setattr(repeats, "REMEMBERED", 50)
    for strict in (False, True):
        with Guard(LoopLimit(3, strict=strict)).scope("s") as run:
            for i in range(1000):
                assert admitted(search, i)
            (memory,) = (slot.seen for slot in run.slots.values() if hasattr(slot, "seen"))
            assert 50 <= len(memory) <= 200
            assert script(*[(search, 999)] * 3) == [True, True, False]


def test_calls_that_never_repeat_pay_for_no_fingerprint_of_their_result() -> None:
    """A result is looked at from the second identical call on only."""
    looked = []

    class Result:
        def __getstate__(self) -> object:
            looked.append(1)
            return {}

        def __repr__(self) -> str:
            looked.append(1)
            return "x"

        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # the spy itself
            looked.append(1)
            return {}

    @tool
    def make(n: int) -> Result:
        return Result()

    with Guard().scope("s"):
        for i in range(20):
            make(i)
    assert looked == []


def test_threads_count_together() -> None:
    """One run, many threads: after they are done the call is a loop."""
    with Guard().scope("s") as run:

        def work(_: int) -> None:
            admitted(search, "x")

        threads = [threading.Thread(target=run.bind(work), args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not admitted(search, "x")


def test_a_loop_limit_ends_its_loop_with_the_last_state() -> None:
    """The stop reason says that it was looping."""

    @loop(max=9)
    def step(n: int) -> int:
        search("x")
        return n + 1

    result = step.run(0)
    assert (result.stop_reason, result.value, result.completed) == ("loop_limit", 3, False)


def test_observe_mode_lets_loops_pass() -> None:
    """And the default doesn't act beside it."""
    with Guard(LoopLimit(1), mode="observe").scope("s") as run:
        assert script(*[(search, "x")] * 10) == [True] * 10
        assert run.refusals == 0


# -- configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"n": n}, ["LoopLimit(n=", repr(n), "at least 0"]) for n in (-1, True, None, 2.0, "3")),
        *(
            ({"ttl": ttl}, ["LoopLimit(ttl=", repr(ttl), "seconds"])
            for ttl in (0, -1, True, "60", float("nan"), float("inf"))
        ),
        *(({"ignore": names}, ["LoopLimit(ignore=", repr(names), "names"]) for names in ("took_ms", 5, [5])),
        *(({"strict": strict}, ["LoopLimit(strict=", repr(strict), "True or False"]) for strict in (1, None, "yes")),
        *(({"timer": timer}, ["LoopLimit(timer=", repr(timer), "function"]) for timer in (5, None)),
    ],
)
def test_a_wrong_option_says_what_is_allowed(options: dict[str, Any], said: list[str]) -> None:
    """Name, value, and what is allowed."""
    with pytest.raises(ConfigurationError) as caught:
        LoopLimit(**options)
    assert all(part in str(caught.value) for part in said), str(caught.value)


def test_a_run_knows_the_repeats_of_each_call() -> None:
    """`repeats` is what spans report: how often the call was made before while nothing new happened."""
    seen = []

    def only(call: Any) -> bool:
        seen.append(call)
        return True

    with Guard(MaxSteps(100, only=only)).scope("s") as run:
        assert isinstance(run, Run)
        for query in ("x", "x", "y", "x"):
            search(query)
    assert [call.repeats for call in seen] == [0, 1, 0, 1]
