"""Flows: ordered steps, with retries, verification and results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from loopguard import (
    Budget,
    BudgetExceeded,
    ConfigurationError,
    EvaluationFailed,
    Flow,
    Guard,
    LoopStopped,
    MaxSteps,
    StopReason,
    Verdict,
    await_input,
    charge,
    current_run,
    loop,
    result_of,
    step,
    tool,
)
from loopguard.evaluators import Matches
from loopguard.testing import capture


def double(n: int) -> int:
    return n * 2


def increase(n: int) -> int:
    return n + 1


async def triple(n: int) -> int:
    await asyncio.sleep(0)
    return n * 3


def test_each_step_gets_what_the_one_before_returned() -> None:
    """A plain call gives the last state; run says how it went; iteration i has run step i."""
    flow = Flow("sums", [double, increase, step(double, name="again")])
    result = flow.run(5)
    assert flow(5) == result.value == 22
    assert (result.name, result.stop_reason, result.completed, result.iterations) == ("sums", "until", True, 3)
    assert [(each.number, each.value) for each in result.history] == [(1, 10), (2, 11), (3, 22)]
    assert flow.results(result) == {"double": 10, "increase": 11, "again": 22}


def test_a_step_without_parameters_is_called_without() -> None:
    """A flow may begin from nothing."""
    assert Flow("begin", [lambda: 3, double])() == 6


def test_builtins_are_steps() -> None:
    """Even those that don't tell their signature."""
    assert Flow("parse", [str.strip, int, double, str])(" 21 ") == "42"


def test_one_async_step_makes_a_flow_async() -> None:
    """Its runs are awaited; its sync steps don't hold up the event loop, and stand in the same run."""
    threads: list[threading.Thread] = []
    runs: list[Any] = []

    def look(n: int) -> int:
        threads.append(threading.current_thread())
        runs.append(current_run())
        return n

    flow = Flow("mixed", [triple, look, double], timeout=30)
    result = asyncio.run(flow.run(1))
    assert (result.value, asyncio.run(flow(2))) == (6, 12)
    assert threads[0] is not threading.main_thread()
    assert runs[0].id == result.run_id


def test_a_sync_step_that_returns_an_awaitable_is_refused() -> None:
    """In a sync flow it would run later, unguarded."""

    def late(n: int) -> Any:
        return triple(n)

    with pytest.raises(ConfigurationError, match="async def"):
        Flow("late", [late])(1)


@pytest.mark.parametrize("is_async", [False, True])
def test_loops_tools_and_flows_are_steps(is_async: bool) -> None:
    """Each is called like a function: a loop until it is done, a flow to its end, a tool through the guardrails."""

    @loop(max=9, until=lambda n: n >= 10)
    def grow(n: int) -> int:
        return n + 1

    @loop(max=9, until=lambda n: n >= 10, name="grow")
    async def agrow(n: int) -> int:
        return n + 1

    @tool(cost=1)
    def pay(n: int) -> int:
        return n * 100

    inner = Flow("inner", [double, increase])
    flow = Flow("outer", [agrow if is_async else grow, inner, pay], guard=Guard(Budget(usd=5)))
    result = asyncio.run(flow.run(1)) if is_async else flow.run(1)
    assert (result.value, str(result.cost)) == (2100, "1")
    assert list(flow.results(result)) == ["grow", "inner", "pay"]


def test_a_flow_is_a_tool_s_content_and_a_loop_s_body() -> None:
    """It can stand wherever a function can, sync or async; the runs inside are children."""
    flow, aflow = Flow("two", [double, increase]), Flow("atwo", [triple, increase])

    @tool
    def compute(n: int) -> int:
        value: int = flow(n)
        return value

    with capture() as seen, Guard().scope("agent"):
        assert compute(1) == 3
    started = [event for event in seen.events if type(event).__name__ == "RunStarted"]
    assert [(event.name, event.kind, event.parent_id is None) for event in started] == [
        ("agent", "scope", True),
        ("two", "flow", False),
    ]
    grow: Any = loop(max=5, until=lambda n: n > 20)(flow)
    assert grow(1) == 31
    agrow: Any = loop(max=3, name="agrow")(aflow)
    assert asyncio.run(agrow(1)) == 40


def test_a_failed_step_is_run_again_with_the_reason() -> None:
    """The same state, and the reason as feedback: the parameter, and current_run().feedback; then it is gone."""
    told: list[tuple[int, str | None, Any]] = []

    def fetch(n: int, *, feedback: str | None) -> int:
        run = current_run()
        assert run is not None
        told.append((n, feedback, run.feedback))
        if len(told) < 3:
            raise ConnectionError(f"no route {len(told)}")
        return n + 1

    def after(n: int, *, feedback: str | None = "nothing") -> int:
        told.append((n, feedback, None))
        return n

    flow = Flow("net", [double, step(fetch, max_retries=2), after])
    result = flow.run(2)
    assert told == [
        (4, None, None),
        (4, "fetch failed: ConnectionError: no route 1", "fetch failed: ConnectionError: no route 1"),
        (4, "fetch failed: ConnectionError: no route 2", "fetch failed: ConnectionError: no route 2"),
        (5, "nothing", None),
    ]
    assert (result.value, result.iterations) == (5, 3)
    assert [str(made.trigger) for made in result.transitions] == [
        "start", "next", "reject", "next", "reject", "next", "next", "complete",
    ]  # fmt: skip


def test_the_flow_s_retries_hold_for_steps_that_name_none() -> None:
    """step(max_retries=0) is a word of its own."""
    tries: list[str] = []

    def fail(n: int) -> int:
        tries.append("fail")
        raise OSError("down")

    with pytest.raises(OSError, match="down"):
        Flow("a", [fail], max_retries=2)(1)
    with pytest.raises(OSError, match="down"):
        Flow("b", [step(fail, max_retries=0)], max_retries=2)(1)
    assert len(tries) == 4


def test_the_exception_of_a_step_propagates_with_a_note() -> None:
    """The same object; it names flow, step and attempt, and has the result so far."""
    problem = LookupError("gone")

    def fail(n: int) -> int:
        raise problem

    with pytest.raises(LookupError) as caught:
        Flow("notes", [double, step(fail, max_retries=1)]).run(1)
    assert caught.value is problem
    assert caught.value.__notes__ == ["in flow 'notes', step 'fail', attempt 2 of 2"]
    partial = result_of(caught.value)
    assert partial is not None
    assert (partial.value, partial.stop_reason, partial.iterations) == (2, StopReason.ERROR, 1)


@pytest.mark.parametrize("problem", [ConfigurationError("no"), KeyboardInterrupt()])
def test_what_no_retry_can_mend_is_raised_at_once(problem: BaseException) -> None:
    """A fault of the set-up, and an interruption."""
    tries: list[int] = []

    def fail(n: int) -> int:
        tries.append(n)
        raise problem

    with pytest.raises(type(problem)):
        Flow("once", [fail], max_retries=5)(1)
    assert tries == [1]


def test_a_refusal_ends_the_flow_as_it_ends_a_loop() -> None:
    """It is never feedback: the result has the last completed state; a plain call raises, since it isn't the result."""

    @tool(cost=1)
    def buy(n: int) -> int:
        return n + 1

    flow = Flow("shop", [step(buy, name="one"), step(buy, name="two", max_retries=3)], budget=Budget(usd=1))
    result = flow.run(0)
    assert (result.value, result.stop_reason, result.completed) == (1, StopReason.BUDGET, False)
    assert isinstance(result.error, BudgetExceeded)
    assert flow.results(result) == {"one": 1}
    with pytest.raises(LoopStopped) as caught:
        flow(0)
    assert caught.value.result.value == 1


def test_a_limit_around_a_flow_ends_what_it_stands_on() -> None:
    """The flow inside passes it on to the flow outside that owns it."""

    @tool
    def work(n: int) -> int:
        return n + 1

    inner = Flow("inner", [work, step(work, name="more")])
    outer = Flow("outer", [increase, inner], guard=Guard(MaxSteps(1)))
    result = outer.run(0)
    assert (result.value, result.stop_reason) == (1, StopReason.MAX_STEPS)


def test_a_rejected_value_is_tried_again_with_the_reason() -> None:
    """verify is an evaluator: the same state and its reason; what it parsed is the value that goes on."""
    answers = iter(['{"n": "five"}', '{"n": 5}'])
    told: list[str | None] = []

    def ask(question: str, *, feedback: str | None = None) -> Any:
        told.append(feedback)
        return next(answers)

    flow = Flow("ask", [step(ask, verify=Matches(dict[str, int]), max_retries=1), lambda found: found["n"]])
    result = flow.run("how many?")
    assert result.value == 5
    assert told[0] is None
    assert "n" in str(told[1])
    assert flow.results(result) == {"ask": {"n": 5}, "<lambda>": 5}
    assert [each.value for each in result.history] == ['{"n": "five"}', {"n": 5}, 5]


def test_a_step_that_is_never_accepted_ends_the_flow() -> None:
    """EvaluationFailed with the result, as of a loop; the value is that of the last step that was accepted."""

    def wrong(n: int) -> Verdict:
        return Verdict(False, "too small")

    flow = Flow("strict", [double, step(increase, verify=[wrong], max_retries=2), step(double, name="never")])
    with pytest.raises(EvaluationFailed) as caught:
        flow.run(1)
    result = caught.value.result
    assert (result.value, result.stop_reason, result.iterations) == (2, StopReason.EVALUATION_FAILED, 4)
    assert str(caught.value).endswith(": increase: too small")
    assert flow.results(result) == {"double": 2}


def test_attempts_count_afresh_for_each_step() -> None:
    """One step's failures aren't the next one's."""
    failed: set[str] = set()

    def once(name: str) -> Callable[[int], int]:
        def body(n: int) -> int:
            if name not in failed:
                failed.add(name)
                raise OSError(name)
            return n + 1

        return body

    flow = Flow("each", [step(once(name), name=name, max_retries=1) for name in ("a", "b", "c")])
    assert flow(0) == 3


def test_an_async_step_is_retried_and_verified() -> None:
    """The same in the other colour, with an async evaluator."""
    tries: list[int] = []

    async def flaky(n: int) -> int:
        tries.append(n)
        if len(tries) == 1:
            raise OSError
        return n + len(tries)

    async def is_large(n: int) -> tuple[bool, str]:
        return n >= 4, "too small"

    flow = Flow("aflaky", [step(flaky, verify=is_large, max_retries=2)])
    assert asyncio.run(flow(1)) == 4
    assert tries == [1, 1, 1]


def test_a_step_that_returns_nothing_says_so() -> None:
    """None in the place of a state is a slip, unless an annotation means it."""

    def forget(n: int) -> int:
        double(n)
        return None  # type: ignore[return-value]  # the slip

    def last(n: int) -> None:
        pass

    with pytest.raises(ConfigurationError, match="forget returned None: return the state, it is the next step's"):
        Flow("none", [forget, double])(1)
    assert Flow("none", [double, last])(1) is None


def test_a_timeout_bounds_the_whole_flow() -> None:
    """An async step is cancelled; the result is that of the steps before."""
    never = asyncio.Event()

    async def hang(n: int) -> int:
        await never.wait()
        return n

    result = asyncio.run(Flow("slow", [triple, hang], timeout=0.05).run(1))
    assert (result.value, result.stop_reason) == (3, StopReason.TIMEOUT)


def test_a_charge_in_a_step_is_the_flow_s() -> None:
    """Cost and usage are told step by step."""

    def costly(n: int) -> int:
        charge(usd=0.5, tokens=n)
        return n

    result = Flow("costly", [costly, step(costly, name="twice")]).run(7)
    assert (str(result.cost), result.usage.tokens, str(result.history[1].cost)) == ("1", 14, "0.5")


def test_the_last_step_is_no_reason_to_wind_down() -> None:
    """A model isn't told that little is left just because there are no more steps."""
    policy = Guard()

    @policy.tool
    def look() -> str:
        return "found"

    def ask(n: int) -> Any:
        run = current_run()
        assert run is not None
        assert run.brief() == ""
        block = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        return policy.run_tools([block])[0]["content"]

    assert Flow("ends", [double, increase, ask], guard=policy)(1) == "found"


def two(a: int, b: int) -> int:
    return a + b


def items(n: int) -> Any:
    yield n


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Flow("", [double]), "Flow(name"),
        (lambda: Flow("a b", [double]), "a b"),
        (lambda: Flow("f", []), "give its steps"),
        (lambda: Flow("f", double), "in a list"),  # type: ignore[arg-type]
        (lambda: Flow("f", [double, double]), "two steps are called 'double'"),
        (lambda: Flow("f", [5]), "5"),  # type: ignore[list-item]
        (lambda: Flow("f", [two]), "'two': a step is called with the state alone"),
        (lambda: Flow("f", [items]), "generator"),
        (lambda: Flow("f", [double], max_retries=-1), "Flow(max_retries=-1)"),
        (lambda: Flow("f", [double], guard=5), "Flow(guard=5)"),  # type: ignore[arg-type]
        (lambda: Flow("f", [double], budget=5), "Flow(budget=5)"),  # type: ignore[arg-type]
        (lambda: Flow("f", [double], timeout=0), "Flow(timeout=0)"),
        (lambda: Flow("f", [double], store="redis://x"), "Flow(store"),
        (lambda: step(double, max_retries=True), "step(max_retries=True)"),
        (lambda: Flow("f", [step(double, name="")]), "step(name='')"),
        (lambda: Flow("f", [step(double, verify=5)]), "step(verify=5)"),  # type: ignore[arg-type]
        (lambda: Flow("f", [step(double, verify=triple)]), "step(verify=triple): it is async, but the flow is sync"),
        (lambda: await_input(""), "await_input('')"),
        (lambda: await_input("a", 5), "prompt=5"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_flow_is_refused_when_it_is_made(build: Callable[[], Any], said: str) -> None:
    """The error names the parameter and the value."""
    with pytest.raises(ConfigurationError) as caught:
        build()
    assert said in str(caught.value)


def test_input_needs_a_journal_to_wait_in() -> None:
    """Without a store nothing would be left to be resumed."""
    with pytest.raises(ConfigurationError, match="give store="):
        Flow("f", [await_input("ok")]).run({})


def test_a_flow_without_a_store_can_not_be_resumed() -> None:
    """Each of the ways says what is missing."""
    flow = Flow("f", [double])
    for way in (flow.pending, flow.waiting, lambda: flow.resume("r"), lambda: flow.results("r")):
        with pytest.raises(ConfigurationError, match="store"):
            way()  # type: ignore[operator]  # each is one


def test_a_flow_shows_its_steps() -> None:
    """repr names them, and __name__ is the flow's, for whoever decorates it."""
    flow = Flow("f", [double, step(increase, name="more")])
    assert repr(flow) == "Flow('f', ['double', 'more'])"
    assert (flow.__name__, flow.name) == ("f", "f")
