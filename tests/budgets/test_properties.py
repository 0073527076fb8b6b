"""The guarantee of budgets, over any interleaving of calls in a tree of runs: spent ≤ cap + overruns."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from loopguard import (
    ApproveTool,
    Budget,
    BudgetExceeded,
    Guard,
    LoopLimit,
    Run,
    ToolCall,
    ToolCallRefused,
    charge,
    tool,
)

UNITS = ("usd", "credits")
NOTHING = Fraction(0)
GRAIN = Fraction(1, 10**18)

amount = st.one_of(
    st.integers(0, 12),
    st.decimals(0, 12, places=3),
    st.decimals(0, 1, places=18),
    st.sampled_from([0.1, 0.2, 1e-9, 3.3]),
)
costs = st.fixed_dictionaries({"usd": amount}, optional={"credits": amount})
caps = st.fixed_dictionaries({}, optional={"usd": st.decimals(0, 40, places=2), "credits": st.integers(0, 40)})


class Boom(Exception):
    """What a tool raises in these tests."""


def exactly(values: dict[str, Any]) -> dict[str, Fraction]:
    """The amounts as a person reads them: a float is the number that it is written as."""
    return {unit: Fraction(str(value)) for unit, value in values.items()}


def shielded(**values: Any) -> Callable[[], None]:
    return lambda: charge(**values)


@dataclass(eq=False)
class Node:
    """A run, its caps, and what the test thinks of it."""

    run: Run
    chain: tuple[Node, ...]
    caps: dict[str, Fraction]
    spent: dict[str, Fraction] = field(default_factory=lambda: dict.fromkeys(UNITS, NOTHING))
    above: dict[str, Fraction] = field(default_factory=lambda: dict.fromkeys(UNITS, NOTHING))
    """What was reported above its own reservation, below this run."""


@dataclass(eq=False)
class Call:
    """A call that was admitted."""

    node: Node
    declared: bool
    estimate: dict[str, Fraction]
    inbox: asyncio.Queue[Callable[[], Any]]
    task: asyncio.Task[None]
    reported: dict[str, Fraction] = field(default_factory=dict)
    context: contextvars.Context | None = None
    open: bool = True

    def held(self, unit: str) -> Fraction:
        return max(self.estimate.get(unit, NOTHING), self.reported.get(unit, NOTHING)) if self.open else NOTHING


class BudgetMachine(RuleBasedStateMachine):
    """Calls that start, report, end in every way there is, and report again when they are over."""

    runs = Bundle("runs")
    running = Bundle("running")
    asked = Bundle("asked")
    over = Bundle("over")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.nodes: list[Node] = []
        self.live: list[Call] = []
        self.inboxes: list[asyncio.Queue[Callable[[], Any]]] = []
        self.contexts: dict[int, contextvars.Context] = {}
        self.answers: dict[int, asyncio.Future[bool]] = {}
        self.largest: dict[str, Fraction] = {}

        async def body(number: int, cost: Any) -> None:
            self.contexts[number] = contextvars.copy_context()
            while True:
                step = await self.inboxes[number].get()
                if step() == "return":
                    return

        async def approver(call: ToolCall) -> bool:
            return await self.answers[call.arguments["number"]]

        self.priced = tool(cost=lambda call: call.arguments["cost"], name="priced")(body)
        self.gated = tool(cost=lambda call: call.arguments["cost"], name="gated")(body)
        self.fixed = tool(cost={"usd": 0.5, "credits": 3}, name="fixed")(body)
        self.undeclared = tool(name="undeclared")(body)
        self.gate = ApproveTool(approver, only="gated")

    def spin(self) -> None:
        """Let every task run until it waits."""

        async def turns() -> None:
            for _ in range(8):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    # -- the tree --------------------------------------------------------------------------------

    @initialize(target=runs, limits=caps, below=st.lists(st.tuples(st.integers(0, 9), caps), min_size=1, max_size=5))
    def grow(self, limits: dict[str, Any], below: list[tuple[int, dict[str, Any]]]) -> Any:
        guard = Guard(self.gate, LoopLimit(0), Budget(**limits), max_refusals=10**6)
        nodes = [self.add(Node(contextvars.Context().run(guard.scope("run 0").__enter__), (), exactly(limits)))]
        for place, more in below:
            parent = nodes[place % len(nodes)]
            scope = Guard(Budget(**more)).scope(f"run {len(nodes)}")
            nodes.append(self.add(Node(parent.run.bind(scope.__enter__)(), parent.chain, exactly(more))))
        return multiple(*nodes)

    def add(self, node: Node) -> Node:
        node.chain = (*node.chain, node)
        self.nodes.append(node)
        return node

    # -- calls -----------------------------------------------------------------------------------

    def begin(
        self, node: Node, fn: Any, cost: dict[str, Any], estimate: dict[str, Fraction], declared: bool
    ) -> Call | None:
        number = len(self.inboxes)
        self.inboxes.append(asyncio.Queue())
        self.answers[number] = self.loop.create_future()
        task = node.run.bind(lambda: self.loop.create_task(fn(number, cost)))()
        before = {id(other): {unit: self.reserved(other, unit) for unit in UNITS} for other in self.nodes}
        self.spin()
        tight = [
            other.run.id
            for other in node.chain
            for unit, cap in other.caps.items()
            if estimate.get(unit) and other.spent[unit] + before[id(other)][unit] + estimate[unit] > cap
        ]
        if tight:
            error = task.exception()
            assert isinstance(error, BudgetExceeded)
            assert error.run_id == tight[0], "the outermost budget is named"
            return None
        assert not task.done(), "it fits, so it runs"
        call = Call(node, declared, estimate, self.inboxes[number], task)
        call.context = self.contexts.get(number)
        self.live.append(call)
        return call

    @rule(target=running, node=runs, kind=st.sampled_from(["priced", "fixed", "undeclared"]), cost=costs)
    def start(self, node: Node, kind: str, cost: dict[str, Any]) -> Any:
        if kind == "priced":
            call = self.begin(node, self.priced, cost, exactly(cost), True)
        elif kind == "fixed":
            call = self.begin(node, self.fixed, {}, {"usd": Fraction(1, 2), "credits": Fraction(3)}, True)
        else:
            call = self.begin(node, self.undeclared, {}, dict(self.largest), False)
        return multiple() if call is None else call

    @rule(target=asked, node=runs, cost=costs)
    def ask_about(self, node: Node, cost: dict[str, Any]) -> Any:
        call = self.begin(node, self.gated, cost, exactly(cost), True)
        return multiple() if call is None else (len(self.inboxes) - 1, call)

    @rule(target=running, question=consumes(asked))
    def approve(self, question: tuple[int, Call]) -> Call:
        number, call = question
        self.answers[number].set_result(True)
        self.spin()
        call.context = self.contexts[number]
        return call

    @rule(question=consumes(asked), how=st.sampled_from(["deny", "cancel"]))
    def give_back(self, question: tuple[int, Call], how: str) -> None:
        number, call = question
        if how == "deny":
            self.answers[number].set_result(False)
        else:
            call.task.cancel()
        self.spin()
        assert call.task.cancelled() or isinstance(call.task.exception(), ToolCallRefused)
        call.open = False

    @rule(call=running, amounts=costs)
    def report(self, call: Call, amounts: dict[str, Any]) -> None:
        self.speak(call, amounts)
        for unit, value in exactly(amounts).items():
            call.reported[unit] = call.reported.get(unit, NOTHING) + value

    @rule(call=over, amounts=costs)
    def report_late(self, call: Call, amounts: dict[str, Any]) -> None:
        self.speak(call, amounts)
        for unit, value in exactly(amounts).items():
            self.pay(call.node, unit, value, value)

    def speak(self, call: Call, amounts: dict[str, Any]) -> None:
        """Charge from inside the call, wherever it has got to."""
        assert call.context is not None
        call.context.run(shielded(**amounts))

    @rule(target=over, call=consumes(running), how=st.sampled_from(["return", "raise", "cancel"]))
    def end(self, call: Call, how: str) -> Call:
        if how == "cancel":
            call.task.cancel()
        else:
            call.inbox.put_nowait(_boom if how == "raise" else lambda: "return")
        self.spin()
        assert call.task.done()
        assert call.task.cancelled() == (how == "cancel")
        assert call.task.cancelled() or isinstance(call.task.exception(), Boom) == (how == "raise")
        for unit in UNITS:
            estimate, reported = call.estimate.get(unit, NOTHING), call.reported.get(unit)
            if how == "return":
                paid = estimate if reported is None else reported
            else:
                paid = max(reported or NOTHING, estimate if how == "cancel" else NOTHING)
            self.pay(call.node, unit, paid, max(NOTHING, (reported or NOTHING) - estimate))
            if not call.declared and reported is not None:
                self.largest[unit] = max(self.largest.get(unit, NOTHING), reported)
        call.open = False
        return call

    @rule(node=runs, amounts=costs)
    def charge_the_run(self, node: Node, amounts: dict[str, Any]) -> None:
        node.run.bind(shielded(**amounts))()
        for unit, value in exactly(amounts).items():
            self.pay(node, unit, value, value)

    def pay(self, node: Node, unit: str, paid: Fraction, above: Fraction) -> None:
        for other in node.chain:
            other.spent[unit] += paid
            other.above[unit] += above

    def reserved(self, node: Node, unit: str) -> Fraction:
        return sum((call.held(unit) for call in self.live if node in call.node.chain), NOTHING)

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def the_books_are_exact(self) -> None:
        for node in self.nodes:
            for unit in UNITS:
                spent, reserved = Fraction(node.run.spent(unit)), Fraction(node.run.reserved(unit))
                assert (spent, reserved) == (node.spent[unit], self.reserved(node, unit))
                assert spent >= 0
                assert reserved >= 0

    @invariant()
    def the_guarantee_holds(self) -> None:
        for node in self.nodes:
            for unit, cap in node.caps.items():
                assert Fraction(node.run.spent(unit)) <= cap + node.above[unit]
            for unit in UNITS:
                lefts = [
                    other.caps[unit] - other.spent[unit] - self.reserved(other, unit)
                    for other in node.chain
                    if unit in other.caps
                ]
                left = node.run.remaining(unit)
                assert (left is None) == (not lefts)
                assert left is None or Fraction(left) == max(NOTHING, min(lefts))

    def teardown(self) -> None:
        for call in self.live:
            call.task.cancel()
        self.spin()
        self.loop.close()
        for node in self.nodes:
            assert [node.run.reserved(unit) for unit in UNITS] == [0, 0]


def _boom() -> None:
    raise Boom


TestBudgets = BudgetMachine.TestCase
TestBudgets.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@dataclass(frozen=True)
class Step:
    """One call in a thread's script."""

    declared: int | None
    reports: tuple[int, ...]
    fails: bool
    late: int | None
    below: bool


steps = st.builds(
    Step,
    declared=st.one_of(st.none(), st.integers(0, 9)),
    reports=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    fails=st.booleans(),
    late=st.one_of(st.none(), st.integers(0, 9)),
    below=st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(
    scripts=st.lists(st.lists(steps, max_size=6), min_size=2, max_size=6),
    cap=st.integers(0, 60),
    inner=st.integers(0, 60),
)
def test_threads_that_yield_at_any_point_keep_the_guarantee(scripts: list[list[Step]], cap: int, inner: int) -> None:
    """Threads run their scripts against one tree, and the books add up to what each of them knows of itself."""
    lock = threading.Lock()
    paid, above = [0], [0]

    def book(spent: int, over: int) -> None:
        with lock:
            paid[0] += spent
            above[0] += over

    @tool(cost=lambda call: {} if call.arguments["step"].declared is None else call.arguments["step"].declared)
    def work(step: Step, ends: list[contextvars.Context]) -> None:
        ends.append(contextvars.copy_context())
        for report in step.reports:
            time.sleep(0)
            charge(usd=report)
        time.sleep(0)
        if step.fails:
            raise Boom

    def play(script: list[Step], below: Run, top: Run) -> None:
        barrier.wait(30)
        for step in script:
            ends: list[contextvars.Context] = []
            try:
                (below if step.below else top).bind(work)(step, ends)
            except BudgetExceeded:
                continue
            except Boom:
                pass
            reported, estimate = sum(step.reports), step.declared or 0
            book(reported if step.reports or step.fails else estimate, max(0, reported - estimate))
            if step.late is not None:
                time.sleep(0)
                ends[0].run(charge, step.late)
                book(step.late, step.late)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    barrier = threading.Barrier(len(scripts))
    try:
        with Guard(Budget(usd=cap), LoopLimit(0), max_refusals=10**6).scope() as top:
            with Guard(Budget(usd=inner)).scope() as below, ThreadPoolExecutor(len(scripts)) as pool:
                for future in [pool.submit(play, script, below, top) for script in scripts]:
                    future.result(30)
            assert (top.spent("usd"), top.reserved("usd"), below.reserved("usd")) == (paid[0], 0, 0)
            assert top.spent("usd") <= cap + above[0]
            assert below.spent("usd") <= inner + above[0]
    finally:
        sys.setswitchinterval(interval)
