"""What a guard promises, put to every framework: the scenarios are written once, and hold in each cell or say why not.

`docs/frameworks.md` has the table of what a framework can't do; the last test compares the two.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from loopguard import ApproveTool, Budget, Guard, LoopLimit, LoopResult, MaxSteps, Run, current_run, loop
from tests.scenarios.driver import OUTPUT_TOKENS, PRICES, Agent, Call, Driver, ScriptedModel, asynchronous
from tests.scenarios.plain import Plain
from tests.scenarios.tool_runner import ToolRunner

DRIVERS: list[Driver] = [Plain(), ToolRunner()]
"""Those whose plugin is installed; `make plugins` installs all."""
if importlib.util.find_spec("loopguard_langchain"):
    from tests.scenarios.langchain_agent import LangChain

    DRIVERS.append(LangChain())
if importlib.util.find_spec("loopguard_mcp"):
    from tests.scenarios.mcp_session import McpSession

    DRIVERS.append(McpSession())

MODES = ("sync", "async", "stream")
TURN = Decimal(OUTPUT_TOKENS * PRICES["m"]["output"]) / 10**6
"""What a turn of the model costs, in USD."""


class Stage:
    """One driver in one mode."""

    def __init__(self, driver: Driver, mode: str) -> None:
        self.driver = driver
        self.mode = mode

    def agent(self, model: ScriptedModel, guard: Guard, **tools: Callable[..., Any]) -> Agent:
        """An agent whose tools are of the mode's colour."""
        coloured = {name: asynchronous(fn) if self.mode == "async" else fn for name, fn in tools.items()}
        return Agent(model, coloured, guard)

    def play(self, agent: Agent) -> Run:
        """Run it in a scope of its own."""
        with agent.guard.scope("agent") as run:
            if self.mode == "async":
                asyncio.run(self.driver.arun(agent))
            else:
                self.inner(agent)
        return run

    def inner(self, agent: Agent) -> None:
        """Run it in the run that is current, from sync code."""
        (self.driver.stream if self.mode == "stream" else self.driver.run)(agent)

    def loop(self, agent: Agent, swallow: bool) -> LoopResult[int]:
        """Run it in a loop of two iterations, whose body swallows whatever it raises."""
        if self.mode == "async":

            @loop(max=2, guard=agent.guard)
            async def abody(n: int) -> int:
                try:
                    await self.driver.arun(agent)
                except Exception:
                    if not swallow:
                        raise
                return n + 1

            return asyncio.run(abody.run(0))

        @loop(max=2, guard=agent.guard)
        def body(n: int) -> int:
            try:
                self.inner(agent)
            except Exception:
                if not swallow:
                    raise
            return n + 1

        return body.run(0)


# --- the scenarios ---------------------------------------------------------------------------------


def repeat(stage: Stage) -> None:
    """The same call again and again is refused, in words that the model can act on, and the agent goes on."""
    seen: list[str] = []

    def look(place: str) -> str:
        """Look at a place."""
        seen.append(place)
        return f"nothing at {place}"

    model = ScriptedModel([*[[Call("look", {"place": "home"})]] * 5, [Call("look", {"place": "work"})], "done"])
    run = stage.play(stage.agent(model, Guard(LoopLimit(3)), look=look))
    assert seen == ["home", "home", "home", "work"]
    told = model.told("look")
    assert [result.is_error for result in told] == [False, False, False, True, True, False]
    assert "you are looping" in told[3].text
    assert "nothing at home" in told[0].text
    assert (run.steps, run.refusals) == (4, 2)


def approval(stage: Stage) -> None:
    """A risky tool runs only on a yes, about the arguments that the approver has seen."""
    asked: list[Any] = []
    refunded: list[tuple[str, int]] = []

    def clerk(call: Any) -> Any:
        asked.append((call.name, dict(call.arguments)))
        return (True, None) if call.arguments["amount"] <= 100 else (False, "that is for a manager")

    def refund(order: str, amount: int) -> str:
        """Refund an order."""
        refunded.append((order, amount))
        return f"{amount} refunded"

    model = ScriptedModel(
        [[Call("refund", {"order": "A", "amount": 5000})], [Call("refund", {"order": "A", "amount": 50})], "done"]
    )
    guard = Guard(ApproveTool(clerk, only="refund"), tools={"refund": {"approve": True}})
    run = stage.play(stage.agent(model, guard, refund=refund))
    assert asked == [("refund", {"order": "A", "amount": 5000}), ("refund", {"order": "A", "amount": 50})]
    assert refunded == [("A", 50)]
    denied, granted = model.told("refund")
    assert denied.is_error
    assert "that is for a manager" in denied.text
    assert not granted.is_error
    assert (run.steps, run.refusals) == (1, 1)


def overspend(stage: Stage) -> None:
    """What doesn't fit into the budget doesn't run; what is spent is exact."""
    bought: list[int] = []

    def buy(n: int) -> str:
        """Buy something."""
        bought.append(n)
        return "bought"

    model = ScriptedModel([*[[Call("buy", {"n": n})] for n in range(5)], "done"])
    guard = Guard(Budget(usd=1), tools={"buy": {"cost": 0.3}})
    run = stage.play(stage.agent(model, guard, buy=buy))
    assert bought == [0, 1, 2]
    told = model.told("buy")
    assert [result.is_error for result in told] == [False, False, False, True, True]
    assert "buy may cost $0.3, but only" in told[3].text
    turns = model.turns if stage.driver.asks_a_model else 0
    assert run.spent("usd") == Decimal("0.9") + turns * TURN


def parallel(stage: Stage) -> None:
    """200 calls of one turn race for 50 steps: 50 bodies run, and every call gets an answer."""
    ran: list[int] = []
    lock = threading.Lock()

    def look(n: int) -> str:
        """Look."""
        with lock:
            ran.append(n)
        return "seen"

    model = ScriptedModel([[Call("look", {"n": n}) for n in range(200)], "done"])
    # tool_runner runs the calls of a turn one by one in one thread: to max_refusals that looks like a row of refusals
    guard = Guard(MaxSteps(50), Budget(usd=1), tools={"*": {"cost": 0.001}}, max_refusals=200)
    run = stage.play(stage.agent(model, guard, look=look))
    assert len(ran) == len(set(ran)) == 50
    told = model.told("look")
    assert len(told) == 200
    assert sum(result.is_error for result in told) == 150
    assert run.steps == 50
    turns = 2 if stage.driver.asks_a_model else 0
    assert run.spent("usd") == Decimal("0.05") + turns * TURN


def swallowed(stage: Stage) -> None:
    """A stop holds, though the framework makes text of its exceptions and the body swallows the rest."""
    looked: list[int] = []

    def look(n: int) -> str:
        """Look."""
        looked.append(n)
        if len(looked) == 3:
            run = current_run()
            assert run is not None
            run.stop("enough")
        return "nothing"

    model = ScriptedModel(lambda turn: [Call("look", {"n": turn})])
    result = stage.loop(stage.agent(model, Guard(), look=look), swallow=True)
    assert looked == [1, 2, 3]
    assert model.turns <= (3 if stage.driver.asks_a_model else 4)
    assert result.stop_reason == "stopped"
    assert "enough" in str(result.error)


def halted(stage: Stage) -> None:
    """A model that never takes no for an answer is halted, though the body swallows exceptions."""
    model = ScriptedModel(lambda turn: [Call("look", {"n": turn})])

    def look(n: int) -> str:
        """Look."""
        raise AssertionError("it must not run")

    agent = stage.agent(model, Guard(MaxSteps(0), max_refusals=3), look=look)
    result = stage.loop(agent, swallow=True)
    assert result.stop_reason == "halted"
    assert model.turns <= 5


def nested(stage: Stage) -> None:
    """An agent that is a tool of another one answers to the same ceiling."""
    looked: list[int] = []

    def look(n: int) -> str:
        """Look."""
        looked.append(n)
        return f"saw {n}"

    inner = ScriptedModel([*[[Call("look", {"n": n})] for n in (1, 2, 3)], "done"])
    outer = ScriptedModel([[Call("delegate", {"task": "look"})], [Call("look", {"n": 4})], "done"])
    guard = Guard(MaxSteps(3))
    agent = stage.agent(inner, guard, look=look)

    def delegate(task: str) -> str:
        """Let another agent do it."""
        stage.inner(agent)
        return "delegated"

    async def adelegate(task: str) -> str:
        """Let another agent do it."""
        await stage.driver.arun(agent)
        return "delegated"

    main = stage.agent(outer, guard, look=look)
    main.tools["delegate"] = adelegate if stage.mode == "async" else delegate
    run = stage.play(main)
    assert looked == [1, 2]
    assert [result.is_error for result in inner.told("look")] == [False, False, True]
    assert [result.is_error for result in outer.told("delegate")] == [False]
    assert [result.is_error for result in outer.told("look")] == [True]
    assert (run.steps, run.refusals) == (3, 2)


def model_budget(stage: Stage) -> None:
    """A model call that doesn't fit isn't made, and ends the loop in good order."""
    model = ScriptedModel(lambda turn: [Call("look", {"n": turn})])

    def look(n: int) -> str:
        """Look."""
        return f"saw {n}"

    result = stage.loop(stage.agent(model, Guard(Budget(usd=0.037)), look=look), swallow=False)
    assert model.turns == 3
    assert result.stop_reason == "budget"
    assert result.cost == 3 * TURN


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (repeat, approval, overspend, parallel, swallowed, halted, nested, model_budget)
}
EVERYWHERE = ("repeat", "approval", "overspend", "parallel", "swallowed")
"""What every framework has to hold, sync or not."""


def reason(driver: Driver, scenario: str, mode: str) -> str | None:
    """Why a framework can't do this, or None where it can."""
    for key in (f"{scenario}/{mode}", f"*/{mode}", scenario):
        if key in driver.unsupported:
            return driver.unsupported[key]
    return None


CELLS = [
    pytest.param(driver, scenario, mode, id=f"{driver.name}-{scenario}-{mode}")
    for driver in DRIVERS
    for scenario in SCENARIOS
    for mode in MODES
    if reason(driver, scenario, mode) is None
]


@pytest.mark.parametrize(("driver", "scenario", "mode"), CELLS)
def test_a_scenario_holds(driver: Driver, scenario: str, mode: str) -> None:
    """See the scenario's own docstring."""
    SCENARIOS[scenario](Stage(driver, mode))


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.name)
def test_nobody_is_excused_from_the_essential_scenarios(driver: Driver) -> None:
    """Repeats, approvals, budgets, parallel calls and swallowed refusals, in sync and in async code."""
    excused = [(name, mode) for name in EVERYWHERE for mode in ("sync", "async") if reason(driver, name, mode)]
    assert excused == []


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.name)
def test_the_documentation_says_what_a_framework_cannot_do(driver: Driver) -> None:
    """Each reason stands in the table of docs/frameworks.md, and no other does."""
    page = Path(__file__).parents[2].joinpath("docs", "frameworks.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| {re.escape(driver.name)} \| `([^`]+)` \| ([^|]+) \|$", page, re.MULTILINE)
    assert {key: said.strip() for key, said in rows} == dict(driver.unsupported)
