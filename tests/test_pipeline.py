"""The admission and its limits as a plugin meets them: all are taken or none, and every token comes back once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from loopguard import (
    Approval,
    ApproveTool,
    ConfigurationError,
    Guard,
    LoopLimit,
    MaxSteps,
    ToolCallRefused,
    WrapTool,
    current_run,
    tool,
)
from loopguard._pipeline import LOCK, compose
from loopguard.typing import Ask, Sleep
from tests.conftest import Colour


class Pool:
    """A limit of one's own: so many calls at the same time, written with data only."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self.most = 0
        self.given_back: list[str] = []
        self.bound: list[tuple[Any, str]] = []

    def bind(self, run: Any, tool: Any) -> Pool | None:
        """For every tool but those called free."""
        self.bound.append((run, tool.name))
        return None if tool.name == "free" else self

    def check(self, call: Any) -> ToolCallRefused | None:
        if self.taken < self.size:
            return None
        return ToolCallRefused("rate_limited", "Pool", call.name, "the pool is empty", self.size, self.taken)

    def take(self, call: Any) -> int:
        self.taken += 1
        self.most = max(self.most, self.taken)
        return self.taken

    def undo(self, call: Any, token: int) -> None:
        self.taken -= 1
        self.given_back.append("undone")

    def done(self, call: Any, token: int, result: Any, error: BaseException | None) -> None:
        with LOCK:
            self.taken -= 1
        self.given_back.append("raised" if error is not None else "returned")


def passing(call: Any, proceed: Any) -> Any:
    """A hook that does nothing, but sends calls the long way."""
    return (yield from proceed(call))


@pytest.fixture(params=[(), (WrapTool(passing),)], ids=["straight", "hooked"])
def wraps(request: pytest.FixtureRequest) -> tuple[WrapTool, ...]:
    """Both ways of a call."""
    return request.param


def test_a_limit_of_a_plugin_is_asked_taken_and_told(colour: Colour, wraps: tuple[WrapTool, ...]) -> None:
    """Its token comes back once for each body, with how it ended."""
    pool = Pool(1)

    def body(fail: bool) -> None:
        assert pool.taken == 1
        if fail:
            raise LookupError

    decorated = tool(colour.make(body))
    with Guard(pool, *wraps).scope() as run:
        colour.call(decorated, False)
        with pytest.raises(LookupError):
            colour.call(decorated, True)
        assert pool.given_back == ["returned", "raised"]
        assert pool.taken == 0
        assert [bound[0] for bound in pool.bound] == [run]  # compiled once for run and tool


def test_a_limit_may_leave_out_a_tool(colour: Colour, wraps: tuple[WrapTool, ...]) -> None:
    """bind returns None for it."""
    pool = Pool(0)
    with Guard(pool, *wraps).scope():
        colour.call(tool(name="free")(colour.make(lambda: None)))
        with pytest.raises(ToolCallRefused, match="the pool is empty"):
            colour.call(tool(name="bound")(colour.make(lambda: None)))


def test_a_refusal_by_one_limit_takes_nothing_from_the_others(colour: Colour, wraps: tuple[WrapTool, ...]) -> None:
    """Whichever of them says no, first or last."""
    for order in (lambda p, q: (p, q), lambda p, q: (q, p)):
        full, empty = Pool(5), Pool(0)
        decorated = tool(cost=1)(colour.make(lambda: None))
        with Guard(*order(full, empty), MaxSteps(5), *wraps).scope() as run:
            with pytest.raises(ToolCallRefused):
                colour.call(decorated)
            assert (full.taken, full.most, full.given_back) == (0, 0, [])
            assert (run.steps, run.reserved(), run.refusals) == (0, 0, 1)


def test_exactly_so_many_run_at_once_however_many_threads_there_are(wraps: tuple[WrapTool, ...]) -> None:
    """Check and take are one decision."""
    pool = Pool(3)
    gate = threading.Event()
    outcomes: list[str] = []

    @tool
    def work(n: int) -> None:
        assert gate.wait(10)

    with Guard(pool, LoopLimit(0), *wraps, max_refusals=100).scope() as run:
        barrier = threading.Barrier(10)

        def one(n: int) -> None:
            barrier.wait()
            try:
                work(n)
                outcomes.append("ran")
            except ToolCallRefused:
                outcomes.append("refused")
                if outcomes.count("refused") == 7:
                    gate.set()

        threads = [threading.Thread(target=run.bind(one), args=(n,)) for n in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(outcomes) == ["ran"] * 3 + ["refused"] * 7
    assert (pool.most, pool.taken) == (3, 0)


def test_exactly_so_many_run_at_once_among_tasks(wraps: tuple[WrapTool, ...]) -> None:
    """The same for gathered calls."""
    pool = Pool(3)

    @tool
    async def work(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async def main() -> list[Any]:
        return await asyncio.gather(*map(work, range(10)), return_exceptions=True)

    with Guard(pool, *wraps, max_refusals=100).scope():
        results = asyncio.run(main())
    assert [type(result).__name__ for result in results] == ["int"] * 3 + ["ToolCallRefused"] * 7
    assert (pool.most, pool.taken) == (3, 0)


def test_a_limit_in_observe_mode_counts_and_refuses_nothing(colour: Colour, wraps: tuple[WrapTool, ...]) -> None:
    """What it would have refused is an event."""
    events: list[Any] = []
    pool = Pool(0)
    with Guard(pool, *wraps, mode="observe", on_event=events.append).scope() as run:
        colour.call(tool(colour.make(lambda: None)))
        assert (run.steps, run.refusals) == (1, 0)
    assert pool.given_back == ["returned"]
    refused = [event for event in events if type(event).__name__ == "ToolRefused"]
    assert [(event.code, event.observed) for event in refused] == [("rate_limited", True)]


def test_what_a_limit_in_observe_mode_took_is_given_back(colour: Colour, wraps: tuple[WrapTool, ...]) -> None:
    """By a call that somebody said no to."""
    pool = Pool(0)
    no = Guard(ApproveTool(lambda call: False))
    with Guard(pool, *wraps, mode="observe").scope(), no.scope(), pytest.raises(ToolCallRefused):
        colour.call(tool(colour.make(lambda: None)))
    assert (pool.taken, pool.given_back) == (0, ["undone"])


def test_what_prepare_raises_reaches_the_caller_and_takes_nothing(colour: Colour, wraps: tuple[WrapTool, ...]) -> None:
    """A limit's own fault: loud, with nothing taken."""

    class Broken(Pool):
        def prepare(self, call: Any) -> None:
            raise LookupError("broken limit")

    pool = Pool(5)
    with Guard(pool, Broken(5), *wraps).scope() as run:
        with pytest.raises(LookupError, match="broken limit"):
            colour.call(tool(cost=1)(colour.make(lambda: None)))
        assert (pool.taken, run.steps, run.reserved()) == (0, 0, 0)


def test_a_cost_function_that_raises_reaches_the_caller_and_takes_nothing(
    colour: Colour, wraps: tuple[WrapTool, ...]
) -> None:
    """Nobody knows what the call may cost, so it doesn't run."""
    bodies: list[int] = []
    for cost, match in ((lambda call: 1 / 0, "division"), (lambda call: -1, "not an amount")):
        with Guard(*wraps).scope() as run:
            with pytest.raises((ZeroDivisionError, ConfigurationError), match=match):
                colour.call(tool(cost=cost)(colour.make(lambda: bodies.append(1))))
            assert (run.steps, bodies) == (0, [])


def test_no_lock_is_held_over_code_of_the_user(colour: Colour, wraps: tuple[WrapTool, ...]) -> None:
    """cost=, only=, hooks, bodies and subscribers can wait for another thread's call."""
    free: list[bool] = []

    def look(*args: Any) -> Any:
        def attempt() -> None:
            got = LOCK.acquire(timeout=1)
            free.append(got)
            if got:
                LOCK.release()

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        return 1

    guard = Guard(
        MaxSteps(5, only=lambda call: bool(look())), *wraps, WrapTool(before=lambda call: bool(look()) and None),
        on_event=look,
    )  # fmt: skip
    with guard.scope():
        colour.call(tool(cost=look)(colour.make(look)))
    assert len(free) >= 5
    assert all(free)


def test_the_lock_is_held_while_limits_decide(wraps: tuple[WrapTool, ...]) -> None:
    """No other thread's call is decided between the check of a call and what it takes, or beside what it gives back."""
    free: list[tuple[str, bool]] = []

    class Watched(Pool):
        def check(self, call: Any) -> ToolCallRefused | None:
            self.look("check")
            return super().check(call)

        def take(self, call: Any) -> int:
            self.look("take")
            return super().take(call)

        def undo(self, call: Any, token: int) -> None:
            self.look("undo")
            super().undo(call, token)

        def look(self, method: str) -> None:
            def attempt() -> None:
                got = LOCK.acquire(blocking=False)
                free.append((method, got))
                if got:
                    LOCK.release()

            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join()

    edit = ApproveTool(lambda call: Approval.edit({"n": 2}), only=lambda call: call.arguments["n"] == 1)
    with Guard(*wraps, Watched(1), edit).scope():
        tool(lambda n: n, name="work")(n=1)
    assert free == [(method, False) for method in ("check", "take", "undo", "check", "take")]


# -- composition and effects -----------------------------------------------------------------------


def test_composed_hooks_run_from_the_first_to_the_last_and_back() -> None:
    """compose is a plain fold: the first hook is the outermost."""
    log: list[str] = []

    def named(name: str) -> Any:
        def hook(call: Any, proceed: Any) -> Any:
            log.append(f"{name} in")
            result = yield from proceed(call)
            log.append(f"{name} out")
            return result + name

        return hook

    def invoke(call: Any) -> Any:
        got = yield "effect"
        return got

    steps = compose([named("a"), named("b")], invoke)(None)
    assert next(steps) == "effect"
    with pytest.raises(StopIteration) as stop:
        steps.send("x")
    assert stop.value.value == "xba"
    assert log == ["a in", "b in", "b out", "a out"]


def test_a_hook_may_ask_and_sleep_in_every_colour(colour: Colour) -> None:
    """Ask gives what the callback returned or raises what it raised; Sleep waits."""
    seen: list[Any] = []

    def fail() -> None:
        raise LookupError("from the callback")

    def hook(call: Any, proceed: Any) -> Any:
        seen.append((yield Ask(lambda a, b: a + b, 1, 2)))
        seen.append((yield Sleep(0)))
        try:
            yield Ask(fail)
        except LookupError as exc:
            seen.append(str(exc))
        seen.append((yield Ask(current_run, blocking=True)))
        return (yield from proceed(call))

    with Guard(WrapTool(hook)).scope() as run:
        assert colour.call(tool(colour.make(lambda: "done"))) == "done"
    assert seen == [3, None, "from the callback", run]


def test_a_question_that_takes_too_long_is_given_up(colour: Colour) -> None:
    """Sync callbacks in a thread of their own, async ones cancelled; the hook is told by an exception of ours."""
    from loopguard._pipeline import EffectTimeout

    release = threading.Event()
    cancelled: list[bool] = []

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    is_async = colour.name in ("async", "async generator")

    def hook(call: Any, proceed: Any) -> Any:
        callbacks = [lambda: release.wait(10), *([slow] if is_async else [])]
        for callback in callbacks:
            with pytest.raises(EffectTimeout):
                yield Ask(callback, blocking=True, timeout=0.01)
        return (yield from proceed(call))

    try:
        with Guard(WrapTool(hook)).scope():
            assert colour.call(tool(colour.make(lambda: "done"))) == "done"
    finally:
        release.set()
    assert cancelled == ([True] if is_async else [])
