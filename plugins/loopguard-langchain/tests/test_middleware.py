"""GuardMiddleware against the real create_agent, with a chat model that is scripted."""

from __future__ import annotations

import asyncio
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRetryMiddleware
from langchain.chat_models import init_chat_model
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_core.tools import tool as langchain_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt
from scripted import INPUT, PRICES, USAGE, Scripted, agent_of, answers, calls, check_pairs

from loopguard import (
    Approval,
    ApproveTool,
    Budget,
    BudgetExceeded,
    CircuitBreaker,
    ConfigurationError,
    Guard,
    LoopLimit,
    LoopStopped,
    MaxSteps,
    Retry,
    Timeout,
    ToolCallRefused,
    charge,
    current_call,
    current_run,
    loop,
    tool,
)
from loopguard.testing import capture
from loopguard.typing import ModelCalled, ModelReplayed, ToolReplayed
from loopguard_langchain import GuardMiddleware
from loopguard_langchain._messages import model_of


def look(place: str) -> str:
    """Look at a place."""
    return f"nothing at {place}"


# --- tools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("guardrail", [MaxSteps(77), Budget(credits=77)], ids=str)
def test_parallel_calls_stop_exactly_at_the_cap(way: Any, guardrail: Any) -> None:
    """LangChain runs a turn's calls in threads or tasks: 77 of 200 bodies run, and what they cost is spent."""
    ran: list[int] = []
    lock = threading.Lock()

    def work(i: int) -> str:
        """Work."""
        with lock:
            ran.append(i)
        return "done"

    guard = Guard(guardrail, tools={"work": {"cost": {"credits": 1}}})
    agent, _ = agent_of([calls(*[("work", {"i": i}) for i in range(200)]), "done"], [way.tool(work)], guard)
    with guard.scope() as run:
        state = way.run(agent, INPUT)
        assert len(ran) == len(set(ran)) == 77
        assert (run.steps, run.spent("credits"), run.reserved("credits")) == (77, 77, 0)
    assert sum(message.status == "error" for message in answers(state)) == 123
    check_pairs(state["messages"])
    assert state["messages"][-1].text == "done"


def test_a_refusal_answers_its_own_call(way: Any) -> None:
    """A ToolMessage of status error, bound to the call, in words for the model."""
    guard = Guard(MaxSteps(1))
    agent, _ = agent_of([calls(("look", {"place": "a"}), ("look", {"place": "b"})), "done"], [way.tool(look)], guard)
    with guard.scope():
        state = way.run(agent, INPUT)
    by_status = {message.status: message for message in answers(state)}
    assert by_status["success"].text.startswith("nothing at")
    refused = by_status["error"]
    assert refused.name == "look"
    assert "look was not run" in refused.text
    assert state["messages"][-1].text == "done"


def test_an_approver_sees_and_edits_the_models_arguments(way: Any) -> None:
    """They are flat, the model's own id is on the call, and what runs is what was edited."""
    seen: list[Any] = []

    def clerk(call: Any) -> Any:
        seen.append((call.name, call.arguments, call.id))
        return Approval.edit({"place": "home"})

    guard = Guard(ApproveTool(clerk), tools={"look": {"approve": True}})
    agent, _ = agent_of([calls(("look", {"place": "work"})), "done"], [way.tool(look)], guard)
    with guard.scope():
        state = way.run(agent, INPUT)
    assert seen == [("look", {"place": "work"}, "call_1_0")]
    assert answers(state)[0].text == "nothing at home"


def test_an_async_approver_is_awaited() -> None:
    """In async agents; in sync ones it is a ConfigurationError, which reaches the program."""

    async def clerk(call: Any) -> bool:
        return True

    guard = Guard(ApproveTool(clerk))
    script = [calls(("look", {"place": "a"})), "done"]
    with guard.scope():
        agent, _ = agent_of(script, [look], guard)
        assert answers(asyncio.run(agent.ainvoke(INPUT)))[0].status == "success"
    with guard.scope():
        agent, _ = agent_of(script, [look], guard)
        with pytest.raises(ConfigurationError, match="nothing could await"):
            agent.invoke(INPUT)


def test_the_run_reaches_the_tools_body(way: Any) -> None:
    """current_run, current_call and charge work in it, in whatever thread LangChain runs it."""

    def work() -> str:
        """Work."""
        run, call = current_run(), current_call()
        assert run is not None
        assert call is not None
        charge(usd=0.25)
        return f"{run.name} {call.name} {call.id}"

    guard = Guard(Budget(usd=1), tools={"work": {"cost": 0.5}})
    agent, _ = agent_of([calls(("work", {})), "done"], [way.tool(work)], guard)
    with guard.scope("box") as run:
        state = way.run(agent, INPUT)
        assert run.spent("usd") == Decimal("0.27")
    assert answers(state)[0].text == "box work call_1_0"


def test_the_same_result_of_repeated_calls_is_nothing_new(way: Any) -> None:
    """Message ids differ each time; LoopLimit compares without them."""
    guard = Guard(LoopLimit(2))
    script = [*[calls(("look", {"place": "a"}), turn=str(n)) for n in range(4)], "done"]
    agent, _ = agent_of(script, [way.tool(look)], guard)
    with guard.scope():
        state = way.run(agent, INPUT)
    assert [message.status for message in answers(state)] == ["success", "success", "error", "error"]


def test_a_tool_of_loopguards_own_is_counted_once(way: Any) -> None:
    """It passes the guardrails by itself, with its own options; its refusal becomes a message all the same."""
    ran: list[str] = []

    def body(place: str) -> str:
        """Look at a place."""
        ran.append(place)
        return place

    own = tool(cost=0.1)(way.tool(body))
    which = {"coroutine": own} if way.name == "ainvoke" else {"func": own}
    guard = Guard(MaxSteps(2))
    script = [*[calls(("body", {"place": place}), turn=place) for place in "abc"], "done"]
    agent, _ = agent_of(script, [StructuredTool.from_function(**which, name="body")], guard)
    with guard.scope() as run:
        state = way.run(agent, INPUT)
        assert (run.steps, ran) == (2, ["a", "b"])
        assert run.spent("usd") == Decimal("0.24")
    assert [message.status for message in answers(state)] == ["success", "success", "error"]


def test_an_exception_of_a_tool_leaves_the_agent_as_it_is(way: Any) -> None:
    """The same object, as without the middleware; the call used a step and cost nothing."""
    error = LookupError("mine")

    def work() -> str:
        """Work."""
        raise error

    guard = Guard(Budget(usd=1), tools={"work": {"cost": 0.5}})
    agent, _ = agent_of([calls(("work", {}))], [way.tool(work)], guard)
    with guard.scope() as run:
        with pytest.raises(LookupError) as caught:
            way.run(agent, INPUT)
        assert caught.value is error
        assert (run.steps, run.spent("usd")) == (1, Decimal("0.01"))


def test_a_failure_that_langchain_made_a_message_of_is_a_failure(way: Any) -> None:
    """Arguments that don't fit cost nothing and count for the CircuitBreaker; the model gets LangChain's own words."""
    guard = Guard(CircuitBreaker(2, reset=60), Budget(usd=1), tools={"look": {"cost": 0.5}})
    script = [*[calls(("look", {"plaice": n}), turn=str(n)) for n in range(3)], "done"]
    agent, _ = agent_of(script, [way.tool(look)], guard)
    with guard.scope() as run:
        state = way.run(agent, INPUT)
        assert run.spent("usd") == Decimal("0.04")
    texts = [message.text for message in answers(state)]
    assert "place" in texts[0]
    assert "failed 2 times in a row" in texts[2]


def test_an_unknown_tool_is_answered(way: Any) -> None:
    """LangChain tells the model which tools there are; names that it makes up are counted together."""
    made_up = calls(("lok", {"place": "a"}), ("luk", {"place": "a"}), ("lick", {"place": "a"}))
    agent, _ = agent_of([made_up, "done"], [way.tool(look)], Guard(MaxSteps(2, only="unknown_tool")))
    with Guard().scope():
        state = way.run(agent, INPUT)
    texts = [message.text for message in answers(state)]
    assert [message.status for message in answers(state)] == ["error"] * 3
    assert sum("not a valid tool" in text for text in texts) == 2
    assert sum("unknown_tool was not run" in text for text in texts) == 1


def test_a_timeout_is_told_to_the_model() -> None:
    """The tool may still be running; the agent goes on."""
    release = threading.Event()

    def work() -> str:
        """Work."""
        release.wait(30)
        return "late"

    guard = Guard(Timeout(0.05))
    agent, _ = agent_of([calls(("work", {})), "done"], [work], guard)
    with guard.scope():
        state = agent.invoke(INPUT)
    release.set()
    assert "did not finish within 0.05 s" in answers(state)[0].text


def test_commands_of_tools_pass(way: Any) -> None:
    """A tool that changes the agent's state does so."""

    @langchain_tool
    def finish(text: str) -> Any:
        """Finish."""
        call = current_call()
        assert call is not None
        return Command(update={"messages": [ToolMessage(f"finished: {text}", tool_call_id=call.id)]})

    guard = Guard(MaxSteps(1))
    agent, _ = agent_of([calls(("finish", {"text": "x"})), "done"], [finish], guard)
    with guard.scope():
        state = way.run(agent, INPUT)
    assert answers(state)[0].text == "finished: x"


# --- interrupts ------------------------------------------------------------------------------------


def test_an_interrupt_passes_and_resumes(way: Any) -> None:
    """It is no failure: Retry doesn't repeat it, CircuitBreaker doesn't count it, and it costs nothing."""
    asked: list[str] = []

    def pay(amount: int) -> str:
        """Pay."""
        asked.append("asked")
        said = interrupt(f"pay {amount}?")
        return f"paid: {said}"

    guard = Guard(
        Retry(2, wait=0), CircuitBreaker(1, reset=60), Budget(usd=1), tools={"pay": {"idempotent": True, "cost": 0.5}}
    )
    agent, _ = agent_of([calls(("pay", {"amount": 5})), "done"], [way.tool(pay)], guard, checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    with guard.scope() as run:
        state = way.run(agent, INPUT, config)
        assert state["__interrupt__"][0].value == "pay 5?"
        assert run.spent("usd") == Decimal("0.01")
        state = way.run(agent, Command(resume="yes"), config)
        assert run.spent("usd") == Decimal("0.52")
    assert answers(state)[0].text == "paid: yes"
    assert len(asked) == 2


# --- stops -----------------------------------------------------------------------------------------


def stopping(n: int) -> str:
    """Stop the run."""
    run = current_run()
    assert run is not None
    run.stop("enough")
    return "stopped it"


def test_a_stopped_run_asks_the_model_no_more_and_leaves_no_orphan(way: Any) -> None:
    """The refusal leaves the agent at the next model call; in the checkpoint every call has its answer."""
    saver = InMemorySaver()
    guard = Guard()
    script = [calls(("stopping", {"n": 1}), ("look", {"place": "a"}), ("look", {"place": "b"}))]
    agent, model = agent_of(script, [way.tool(stopping), way.tool(look)], guard, checkpointer=saver)
    config = {"configurable": {"thread_id": "1"}}
    with guard.scope(), pytest.raises(ToolCallRefused, match="enough") as caught:
        way.run(agent, INPUT, config)
    assert caught.value.code == "stopped"
    assert len(model.asked) == 1
    check_pairs(agent.get_state(config).values["messages"])


def test_a_stop_is_raised_though_the_agent_would_end_without_asking_again(way: Any) -> None:
    """A tool whose result ends the agent, refused in a stopped run, doesn't look like an answer."""

    @langchain_tool(return_direct=True)
    def answer(text: str) -> str:
        """Answer."""
        return text

    def leave(state: Any) -> Any:
        run = current_run()
        assert run is not None
        run.stop("enough")

    class Stopper(AgentMiddleware[Any, Any, Any]):
        def after_model(self, state: Any, runtime: Any) -> None:
            leave(state)

        async def aafter_model(self, state: Any, runtime: Any) -> None:
            leave(state)

    agent, _ = agent_of([calls(("answer", {"text": "x"}))], [answer], Guard(), before=[Stopper()])
    with Guard().scope(), pytest.raises(ToolCallRefused, match="enough"):
        way.run(agent, INPUT)


def test_a_model_that_never_listens_is_halted(way: Any) -> None:
    """LoopHalted comes out of LangChain unchanged, with no orphan left behind, and ends the scope as LoopStopped."""
    saver = InMemorySaver()
    guard = Guard(MaxSteps(0), max_refusals=3)
    counter = iter(range(100))

    def insist(messages: Any) -> AIMessage:
        n = str(next(counter))
        return calls(("look", {"place": n}), turn=n)

    agent, model = agent_of(insist, [way.tool(look)], guard, checkpointer=saver)
    config = {"configurable": {"thread_id": "1"}}
    with pytest.raises(LoopStopped, match="halted after"), guard.scope():
        way.run(agent, INPUT, config)
    assert 3 <= len(model.asked) <= 4
    check_pairs(agent.get_state(config).values["messages"])


@pytest.mark.parametrize("code", ["waiting", "uncertain"])
def test_parking_stops_the_agent_and_the_loop_waits(way: Any, code: str) -> None:
    """Latched on the run, the refusal asks no model any more, and ends the loop as waiting."""

    def parks(call: Any) -> bool:
        root = call.run.root
        root.latch = ToolCallRefused(code, "ApproveTool", "look", "ask me later", None, None, root.name, root.id)
        root.alarm = True
        raise TimeoutError

    guard = Guard(ApproveTool(parks))
    agent, model = agent_of([calls(("look", {"place": "a"})), "never"], [way.tool(look)], guard)

    @loop(max=3, guard=guard)
    def body(n: int) -> int:
        way.run(agent, INPUT)
        return n + 1

    result = body.run(0)
    assert result.stop_reason == "waiting"
    assert (len(model.asked), result.iterations) == (1, 0)


def test_outside_any_run_it_is_a_mistake(way: Any) -> None:
    """Nobody could say what the limits count."""
    agent, model = agent_of(["done"], [way.tool(look)], Guard())
    with pytest.raises(ConfigurationError, match="outside any run"):
        way.run(agent, INPUT)
    assert model.asked == []


def test_a_guard_is_a_guard() -> None:
    """A wrong argument is told when the middleware is made."""
    with pytest.raises(ConfigurationError, match="give a Guard"):
        GuardMiddleware(MaxSteps(1))  # type: ignore[arg-type]  # what is wrong about it


def test_the_guard_of_the_run_is_enough(way: Any) -> None:
    """Without a guard of its own, the middleware leaves it to the runs."""
    agent, _ = agent_of([calls(("look", {"place": "a"})), "done"], [way.tool(look)])
    with Guard(MaxSteps(0)).scope():
        assert answers(way.run(agent, INPUT))[0].status == "error"


def test_the_guard_of_the_middleware_holds_in_any_run(way: Any) -> None:
    """Its budget stands on the outermost run, also for the model's first call."""
    agent, model = agent_of(["done"], [way.tool(look)], Guard(Budget(model_calls=0)))
    with Guard().scope(), pytest.raises(BudgetExceeded):
        way.run(agent, INPUT)
    assert model.asked == []


# --- the model -------------------------------------------------------------------------------------


def test_usage_and_cost_are_those_of_usage_metadata(way: Any) -> None:
    """Input with what the cache gave and took, output with the reasoning, at the model's price."""
    usage: Any = {
        "input_tokens": 1_000,
        "output_tokens": 100,
        "total_tokens": 1_100,
        "input_token_details": {"cache_read": 400, "cache_creation": 200},
        "output_token_details": {"reasoning": 30},
    }
    agent, _ = agent_of([AIMessage("done", usage_metadata=usage)], [way.tool(look)])
    with capture() as seen, Guard(Budget(usd=1)).scope() as run:
        way.run(agent, INPUT)
        used = run.usage
        assert (used.input_tokens, used.output_tokens, used.tokens, used.model_calls) == (1_000, 100, 1_100, 1)
        assert (used.cache_read_tokens, used.cache_write_5m_tokens, used.thinking_tokens) == (400, 200, 30)
        # 400 fresh at 1, 400 read at 0.1, 200 written at 1.25, 100 out at 1000 USD per million
        assert run.spent("usd") == Decimal("0.10069")
    assert seen.events_of(ModelCalled)[0].model == "m"


def test_a_model_call_that_does_not_fit_is_not_made(way: Any) -> None:
    """BudgetExceeded leaves the agent as it is."""
    agent, model = agent_of(["done"], [way.tool(look)])
    with Guard(Budget(usd=0.009)).scope() as run, pytest.raises(BudgetExceeded, match="lower max_tokens from 10"):
        way.run(agent, INPUT)
    assert (model.asked, run.spent("usd")) == ([], 0)


def test_what_the_model_does_not_report_costs_the_reservation(way: Any) -> None:
    """Unknown is not zero."""
    agent, _ = agent_of([AIMessage("done")], [way.tool(look)])
    with Guard(Budget(usd=1)).scope() as run:
        way.run(agent, INPUT)
        assert run.spent("usd") > Decimal("0.01")


@pytest.mark.parametrize("said", [{}, {"output_tokens": 10}, {"input_tokens": -9, "output_tokens": 10}], ids=str)
def test_a_usage_that_can_not_be_read_costs_the_reservation(way: Any, said: Any) -> None:
    """The answer was paid for: it reaches the program whatever its integration says."""
    message = AIMessage("done")
    message.usage_metadata = said  # pydantic doesn't look
    agent, _ = agent_of([message], [way.tool(look)])
    with Guard(Budget(usd=1)).scope() as run:
        way.run(agent, INPUT)
        assert run.spent("usd") > Decimal("0.01")


def test_a_model_that_is_chosen_at_run_time_is_known_by_its_class() -> None:
    """It has no name before; its price is unknown, and its tokens are counted."""
    configurable = init_chat_model(configurable_fields="any")
    assert model_of(configurable) == (type(configurable).__name__, "")


class Refused(Exception):
    """As the SDKs of the vendors raise it."""

    status_code = 429


@pytest.mark.parametrize(("error", "free"), [(Refused("slow down"), True), (ConnectionError("gone"), False)])
def test_an_http_error_is_free_and_a_broken_connection_is_not(way: Any, error: Exception, free: bool) -> None:
    """Of the latter nobody knows how far it came."""
    agent, _ = agent_of([error], [way.tool(look)])
    with Guard(Budget(usd=1)).scope() as run, pytest.raises(type(error)) as caught:
        way.run(agent, INPUT)
    assert caught.value is error
    assert (run.spent("usd") == 0) is free


def test_attempts_of_other_middleware_are_metered_one_by_one() -> None:
    """The guard stands last, next to the model."""
    retry = ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False)
    agent, model = agent_of([ConnectionError("gone"), "done"], [look], before=[retry])
    with Guard(Budget(usd=1, model_calls=5)).scope() as run:
        agent.invoke(INPUT)
        assert run.usage.model_calls == 2
    assert len(model.asked) == 2


def test_a_bound_on_the_output_is_needed_under_a_budget(way: Any) -> None:
    """From the model, from the middleware, else it is a ConfigurationError."""
    for guarded, good in (({"max_tokens": 10}, True), ({}, False)):
        model = Scripted(script=["done"], max_tokens=None)
        agent, _ = agent_of(None, [way.tool(look)], model=model, guarded=guarded)
        with Guard(Budget(usd=1)).scope():
            if good:
                way.run(agent, INPUT)
            else:
                with pytest.raises(ConfigurationError, match="how much m may write"):
                    way.run(agent, INPUT)


def test_a_stream_that_is_left_reserves_nothing_any_more() -> None:
    """Its model call is settled, however far the stream was read."""
    agent, _ = agent_of([calls(("look", {"place": "a"})), "a long answer"], [look])
    with Guard(Budget(usd=1)).scope() as run:
        stream = agent.stream(INPUT, stream_mode="messages")
        next(stream)
        stream.close()
        assert run.reserved("usd") == 0
        assert run.spent("usd") >= Decimal("0.01")


# --- resuming --------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_without_asking_or_doing_anything_twice(tmp_path: Path) -> None:
    """Model calls and tool calls of the interrupted iteration are answered from loopguard's journal."""
    ran: list[str] = []

    def visit(place: str) -> str:
        """Visit a place."""
        ran.append(place)
        if place == "b" and ran.count("b") == 1:
            raise KeyboardInterrupt
        return f"was at {place}"

    def script(messages: Any) -> AIMessage:
        places = "abc"
        done = len([message for message in messages if isinstance(message, ToolMessage)])
        return calls(("visit", {"place": places[done]}), turn=str(done)) if done < 3 else AIMessage("done")

    guard = Guard(Budget(usd=9), tools={"visit": {"cost": 0.1, "idempotent": True}})
    asked: list[Any] = []

    @loop(max=1, guard=guard, store=f"sqlite:///{tmp_path}/runs.db")
    def body(n: int) -> int:
        model = Scripted(script=script)
        agent, _ = agent_of(None, [visit], guard, model=model)
        try:
            state = agent.invoke(INPUT)
        finally:
            asked.append(len(model.asked))
        assert [message.text for message in answers(state)] == ["was at a", "was at b", "was at c"]
        check_pairs(state["messages"])
        return n + 1

    with pytest.raises(KeyboardInterrupt):
        body.run(0, run_id="trip")
    with capture() as seen:
        result = body.run(0, run_id="trip")
    assert result.iterations == 1
    assert ran == ["a", "b", "b", "c"]
    assert asked == [2, 2]
    assert len(seen.events_of(ModelReplayed)) == 2
    assert len(seen.events_of(ToolReplayed)) == 1


# --- agents in agents ------------------------------------------------------------------------------


def test_a_refusal_inside_an_inner_agent_is_told_to_the_outer_one(way: Any) -> None:
    """The inner agent's model call doesn't fit; the outer model hears of it and answers."""
    guard = Guard(Budget(model_calls=3))

    class Inner:
        def ask(self) -> str:
            """Ask the other agent."""
            inner, _ = agent_of([calls(("look", {"place": "a"})), "never"], [look], guard)
            return str(inner.invoke(INPUT)["messages"][-1].text)

    def ask() -> str:
        """Ask the other agent."""
        return Inner().ask()

    outer, _ = agent_of([calls(("ask", {})), calls(("ask", {}), turn="2"), "done"], [ask], guard)
    with guard.scope() as run, pytest.raises(BudgetExceeded):
        way.run(outer, INPUT)
    assert run.usage.model_calls == 3
    assert run.steps >= 2


def test_usage_of_turns_adds_up(way: Any) -> None:
    """Two turns, twenty tokens."""
    agent, _ = agent_of([calls(("look", {"place": "a"})), "done"], [way.tool(look)])
    with Guard().scope() as run:
        way.run(agent, INPUT)
        assert run.usage.output_tokens == 2 * USAGE["output_tokens"]


def test_two_agents_may_share_one_middleware(way: Any) -> None:
    """It holds nothing of a run but what has stopped it."""
    shared = GuardMiddleware(Guard(MaxSteps(1)), prices=PRICES)
    agents = [
        create_agent(Scripted(script=[calls(("look", {"place": "a"})), "done"]), [way.tool(look)], middleware=[shared])
        for _ in range(2)
    ]
    for agent in agents:
        with Guard().scope():
            assert answers(way.run(agent, INPUT))[0].status == "success"
