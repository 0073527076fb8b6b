"""Latches hold, however many frameworks swallow the exception: the SDK's own tool_runner is the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool, beta_tool

from loopguard import Budget, Guard, LoopHalted, MaxSteps, ToolCallRefused, current_run, loop
from loopguard.metering import meter
from loopguard.testing import MessagesServer, Reply

PRICES = {"m": {"input": 3, "output": 15}}


def insist(body: dict[str, Any]) -> Reply:
    """A model that never stops calling its tool, each time with something new."""
    return Reply.tool_use("look", {"place": f"shelf {len(body['messages'])}"})


class Agent:
    """A tool_runner agent with one tool, sync or async, against a model that never stops."""

    def __init__(self, colour: str, server: MessagesServer) -> None:
        self.colour = colour
        self.server = server
        self.bodies: list[str] = []
        self.each: Callable[[], object] = lambda: None
        """What happens in the tool's body."""

    def _look(self, place: str) -> str:
        self.bodies.append(place)
        self.each()
        return f"nothing on {place}"

    def _tools(self, guard: Guard) -> Any:
        if self.colour == "sync":

            @beta_tool
            def look(place: str) -> str:
                """Look at a place."""
                return self._look(place)

            return guard.wrap([look])

        @beta_async_tool
        async def alook(place: str) -> str:
            """Look at a place."""
            return self._look(place)

        alook.name = "look"
        return guard.wrap([alook])

    def talk(self, guard: Guard) -> Any:
        """One conversation of the SDK's tool runner, twenty model calls at most."""
        options: dict[str, Any] = {
            "model": "m",
            "max_tokens": 100,
            "messages": [{"role": "user", "content": "Find it."}],
            "tools": self._tools(guard),
            "max_iterations": 20,
        }
        if self.colour == "sync":
            with anthropic.Anthropic(base_url=self.server.url, api_key="test", max_retries=0) as client:
                return meter(client, prices=PRICES).beta.messages.tool_runner(**options).until_done()
        return self._atalk(options)

    async def _atalk(self, options: dict[str, Any]) -> Any:
        async with anthropic.AsyncAnthropic(base_url=self.server.url, api_key="test", max_retries=0) as client:
            return await meter(client, prices=PRICES).beta.messages.tool_runner(**options).until_done()

    def run(self, guard: Guard, **options: Any) -> Any:
        """The result of a loop whose body swallows whatever the conversation raises."""
        if self.colour == "sync":

            @loop(guard=guard, **options)
            def step(n: int) -> int:
                try:
                    self.talk(guard)
                except Exception:
                    pass
                return n + 1

            return step.run(0)

        @loop(guard=guard, **options)
        async def astep(n: int) -> int:
            try:
                await self.talk(guard)
            except Exception:
                pass
            return n + 1

        return asyncio.run(astep.run(0))


@pytest.fixture(params=["sync", "async"])
def agent(request: pytest.FixtureRequest) -> Iterator[Agent]:
    """The agent and its server."""
    with MessagesServer(insist) as server:
        yield Agent(request.param, server)


def test_a_stopped_run_makes_no_further_tool_call_and_no_further_model_call(agent: Agent) -> None:
    """Stopped in the third tool call: it finishes, and nothing after it is started."""

    def each() -> None:
        if len(agent.bodies) == 3:
            run = current_run()
            assert run is not None
            run.stop("enough")

    agent.each = each
    result = agent.run(Guard(Budget(usd=9)), max=3)
    assert len(agent.bodies) == 3
    assert len(agent.server.requests) == 3
    assert (result.stop_reason, result.completed, result.iterations) == ("stopped", False, 1)
    assert (result.error.code, result.error.guardrail, result.error.reason) == ("stopped", "stop", "enough")


def test_a_run_past_its_deadline_makes_no_further_call(agent: Agent) -> None:
    """The tool in which it passed finishes (sync) or is cancelled (async); nothing after it is started."""

    def each() -> None:
        if len(agent.bodies) == 3:
            time.sleep(0.6)

    agent.each = each
    result = agent.run(Guard(), max=3, timeout=0.5)
    assert result.stop_reason == "timeout"
    assert len(agent.bodies) == 3
    assert len(agent.server.requests) == 3


def test_too_many_refusals_in_a_row_halt_the_agent(agent: Agent) -> None:
    """The runner turns refusals into results for the model; LoopHalted goes through it, and is latched."""
    result = agent.run(Guard(MaxSteps(2), max_refusals=3), max=5)
    assert result.stop_reason == "halted"
    assert len(agent.bodies) == 2
    assert len(agent.server.requests) <= 6


def test_a_halted_run_stays_halted_though_the_body_swallows_everything() -> None:
    """Even BaseException: each later call, of tools and of models, raises it again."""
    with MessagesServer(insist) as server:
        agent = Agent("sync", server)
        guard = Guard(MaxSteps(0), max_refusals=3)
        sent: list[int] = []
        halts: list[LoopHalted] = []

        @loop(guard=guard, max=2)
        def step(n: int) -> int:
            for _ in range(4):
                try:
                    agent.talk(guard)
                except LoopHalted as halted:
                    halts.append(halted)
                sent.append(len(server.requests))
            return n

        result = step.run(0)
        assert result.stop_reason == "halted"
        assert agent.bodies == []
        assert len(halts) == 4
        assert sent[1:] == sent[:1] * 3


def test_a_budget_refusal_is_not_latched(agent: Agent) -> None:
    """The model is told, and may still answer, or make a cheaper call."""
    guard = Guard(Budget(credits=0))
    tools = guard.tool(cost={"credits": 1})(lambda place: place)
    free = guard.tool(name="free")(lambda place: place)
    with guard.scope() as run:
        with pytest.raises(ToolCallRefused, match="credits"):
            tools("x")
        assert free("y") == "y"
        assert run.latch is None


def test_the_first_refused_model_call_of_a_stopped_run_says_why(agent: Agent) -> None:
    """The refusal propagates through the SDK unchanged and unretried."""
    with Guard().scope("work") as run:
        run.stop("the user left")
        with pytest.raises(ToolCallRefused, match="the user left") as caught:
            agent.talk(Guard()) if agent.colour == "sync" else asyncio.run(agent.talk(Guard()))
    assert (caught.value.code, caught.value.source) == ("stopped", "work")
    assert agent.server.requests == []


def test_a_loop_that_was_stopped_in_its_last_iteration_has_not_come_to_its_end(agent: Agent) -> None:
    """Reaching the ceiling is no success where something had stopped the run."""

    def each() -> None:
        run = current_run()
        assert run is not None
        run.stop("enough")

    agent.each = each
    result = agent.run(Guard(), max=1)
    assert (result.stop_reason, result.completed, result.value) == ("stopped", False, 1)
