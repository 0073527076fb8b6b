"""Budgets under concurrency: gather, TaskGroup and threads never spend what isn't there."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest

from loopguard import Budget, BudgetExceeded, Guard, LoopGuardWarning, LoopLimit, Run, charge, current_run, loop, tool
from loopguard._events import BudgetWarned, Event, ToolFinished

ONE = Decimal(1)


@pytest.fixture(autouse=True)
def _frequent_switches() -> Iterator[None]:
    """Threads take turns as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def policy(*guardrails: Any, **options: Any) -> Guard:
    """Guardrails beside which repeats don't matter."""
    return Guard(*guardrails, LoopLimit(0), **options)


def in_threads(run: Run, fn: Callable[[int], Any], count: int) -> list[Any]:
    """fn(0), fn(1), … at the same moment in as many threads, each inside the run; results or refusals."""
    barrier = threading.Barrier(count)

    def one(number: int) -> Any:
        barrier.wait(30)
        try:
            return fn(number)
        except BudgetExceeded as refusal:
            return refusal

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run.bind(one), range(count)))


def outcomes(results: list[Any]) -> tuple[int, int]:
    """(calls that ran, calls that were refused)."""
    refusals = sum(isinstance(result, BudgetExceeded) for result in results)
    return len(results) - refusals, refusals


def assert_spent(run: Run, spent: Decimal | int) -> None:
    """This is spent, and nothing reserved."""
    assert (run.spent("usd"), run.reserved("usd")) == (spent, 0)


@pytest.mark.parametrize("where", ["tasks", "threads"])
def test_sixteen_at_once_get_exactly_what_fits(where: str) -> None:
    """C16: 0.10 USD, 16 calls of 0.0125: 8 bodies, 8 refusals before their body, 0.10 spent."""
    ran: list[int] = []

    @tool(cost=0.0125)
    def work(number: int) -> None:
        ran.append(number)

    @tool(cost=0.0125)
    async def awork(number: int) -> None:
        ran.append(number)
        await asyncio.sleep(0)

    async def main() -> list[Any]:
        return await asyncio.gather(*map(awork, range(16)), return_exceptions=True)

    with policy(Budget(usd=0.10)).scope() as run:
        results = in_threads(run, work, 16) if where == "threads" else asyncio.run(main())
        assert outcomes(results) == (8, 8)
        assert len(ran) == 8
        assert_spent(run, Decimal("0.10"))
        assert (run.steps, run.refusals) == (8, 8)


def test_threads_and_tasks_together_share_one_budget() -> None:
    """64 threads and 200 tasks call a 0.01 tool on 1.00 USD: exactly 100 bodies run."""
    lock, ran = threading.Lock(), [0]

    def body() -> None:
        with lock:
            ran[0] += 1

    @tool(cost=0.01, name="work")
    def work(number: int) -> None:
        body()

    @tool(cost=0.01, name="awork")
    async def awork(number: int) -> None:
        await asyncio.sleep(0)
        body()

    async def main() -> list[Any]:
        return await asyncio.gather(*map(awork, range(200)), return_exceptions=True)

    with policy(Budget(usd=1.00)).scope() as run:
        from_tasks: list[Any] = []
        loop_thread = threading.Thread(target=run.bind(lambda: from_tasks.extend(asyncio.run(main()))))
        loop_thread.start()
        results = in_threads(run, work, 64)
        loop_thread.join()
        assert outcomes(results + from_tasks) == (100, 164)
        assert ran == [100]
        assert_spent(run, ONE)


@pytest.mark.parametrize("how", ["gather", "TaskGroup"])
@pytest.mark.parametrize("kind", ["async", "async generator"])
def test_two_hundred_tasks_on_a_cap_of_a_hundred(how: str, kind: str) -> None:
    """100 bodies, 100 refusals, and nobody is halted: each task was refused only once."""
    ran: list[int] = []

    @tool(cost={"units": 1})
    async def work(number: int) -> None:
        await asyncio.sleep(0)
        ran.append(number)

    @tool(cost={"units": 1})
    async def items(number: int) -> Any:
        await asyncio.sleep(0)
        ran.append(number)
        yield number

    async def one(number: int) -> Any:
        try:
            return await work(number) if kind == "async" else [item async for item in items(number)]
        except BudgetExceeded as refusal:
            return refusal

    async def main() -> list[Any]:
        if how == "gather":
            return await asyncio.gather(*map(one, range(200)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(200)]
        return [task.result() for task in tasks]

    with policy(Budget(units=100), max_refusals=5).scope() as run:
        assert outcomes(asyncio.run(main())) == (100, 100)
        assert len(ran) == 100
        assert (run.spent("units"), run.reserved("units")) == (100, 0)


def test_what_costs_more_than_there_is_never_runs() -> None:
    """200 calls of 5 USD on 2 USD: none runs."""

    @tool(cost=5)
    async def work(number: int) -> None:
        raise AssertionError("it must not run")

    async def main() -> list[Any]:
        return await asyncio.gather(*map(work, range(200)), return_exceptions=True)

    with policy(Budget(usd=2)).scope() as run:
        assert outcomes(asyncio.run(main())) == (0, 200)
        assert_spent(run, 0)


@pytest.mark.parametrize("where", ["tasks", "threads"])
def test_parallel_children_share_what_their_parent_has_left(where: str) -> None:
    """C21: 9 left, three children that each want 9 in steps of 1: 9 spent, 0 left, never negative."""
    lefts: list[Decimal | None] = []

    @tool(cost={"usd": 1})
    async def work(child: int, step: int) -> None:
        lefts.append(current_run().remaining("usd"))  # type: ignore[union-attr]  # inside a run
        await asyncio.sleep(0)

    @loop(max=9, budget=Budget(usd=9))
    async def child(state: tuple[int, int]) -> tuple[int, int]:
        await work(*state)
        return state[0], state[1] + 1

    async def main() -> list[Any]:
        return await asyncio.gather(*(child.run((n, 0)) for n in range(3)))

    def alone(number: int) -> Any:
        return asyncio.run(child.run((number, 0)))

    with policy(Budget(usd=10)).scope() as run:
        charge(usd=1)
        results = in_threads(run, alone, 3) if where == "threads" else asyncio.run(main())
        assert sum(result.iterations for result in results) == 9
        assert sum(result.cost for result in results) == 9
        assert_spent(run, 10)
        assert run.remaining("usd") == 0
        assert {str(result.stop_reason) for result in results} <= {"budget", "max_iterations"}
    assert all(left is not None and left >= 0 for left in lefts)


def test_a_refund_lets_the_next_one_in() -> None:
    """A call that turns out cheaper, raises, or is refused elsewhere gives back what it held, at once."""

    @tool(cost=1)
    def work(number: int) -> None:
        if number % 3 == 0:
            charge(usd=0)
        elif number % 3 == 1:
            raise ZeroDivisionError

    def one(number: int) -> Any:
        try:
            return work(number)
        except ZeroDivisionError:
            return None

    with policy(Budget(usd=40), max_refusals=1000).scope() as run:
        results = in_threads(run, one, 40) + in_threads(run, one, 26)
        assert outcomes(results) == (66, 0)
        assert_spent(run, 13 + 8)


def test_many_threads_settle_without_losing_a_cent() -> None:
    """Reports, estimates and failures of 16 threads over three nested runs add up exactly, everywhere."""

    @tool(cost=0.003)
    def work(number: int) -> None:
        if number % 4 == 1:
            charge(usd=0.001)
        elif number % 4 == 2:
            charge(usd=0.0045)
        elif number % 4 == 3:
            raise ZeroDivisionError

    def many(thread: int) -> None:
        with policy().scope("own"):
            for number in range(80):
                try:
                    work(number)
                except ZeroDivisionError:
                    pass

    with policy(Budget(usd=100)).scope() as outer, policy(Budget(usd=50)).scope() as inner:
        in_threads(inner, many, 16)
        spent = 16 * 20 * (Decimal("0.003") + Decimal("0.001") + Decimal("0.0045"))
        assert_spent(outer, spent)
        assert_spent(inner, spent)
        assert outer.steps == inner.steps == 16 * 80


def test_a_report_that_crosses_the_end_of_its_call_is_not_lost() -> None:
    """Whether it came just before or just after the settlement, it is paid once and nothing stays reserved."""
    threads: list[threading.Thread] = []

    @tool(cost=0.5)
    def work(number: int) -> None:
        run = current_run()
        assert run is not None
        context = contextvars.copy_context()
        threads.append(threading.Thread(target=lambda: context.run(charge, usd=2)))
        threads[-1].start()

    with policy(Budget(usd=10_000)).scope() as run:
        for number in range(300):
            work(number)
        for thread in threads:
            thread.join()
        assert run.reserved("usd") == 0
        spent = run.spent("usd")
        late = (spent - 600) / Decimal("0.5")
        assert late == int(late), "each call cost 2 (reported in time) or 2.5 (estimate and late report)"
        assert 0 <= late <= 300


def test_one_surprise_is_one_warning() -> None:
    """Threads whose undeclared costs come in at the same moment warn once."""
    together = threading.Barrier(16)

    @tool
    def work(number: int) -> None:
        charge(usd=1)
        together.wait(30)

    with policy(Budget(usd=1000)).scope() as run:
        with pytest.warns(LoopGuardWarning, match="declare") as warned:
            in_threads(run, work, 16)
        assert len(warned) == len(run.warnings) == 1
        assert_spent(run, 16)


def test_crossing_the_line_together_warns_once() -> None:
    """However many calls settle above 80 % at the same moment, BudgetWarned comes once for each budget."""
    for _ in range(20):
        events: list[Event] = []
        together = threading.Barrier(12)

        @tool(cost=1)
        def work(number: int, together: threading.Barrier = together) -> None:
            together.wait(30)

        with policy(Budget(usd=12), Budget(usd=13, warn_at=0.5), on_event=events.append).scope() as run:
            assert outcomes(in_threads(run, work, 12)) == (12, 0)
            assert sum(isinstance(event, BudgetWarned) for event in events) == 2
            finished = [event.charged["usd"] for event in events if isinstance(event, ToolFinished)]
            assert finished == [1] * 12


def test_units_that_appear_meanwhile_disturb_no_iteration() -> None:
    """A loop notes what each iteration cost while another thread charges it in units it has never seen."""
    threads: list[threading.Thread] = []

    def appear() -> None:
        for number in range(1500):
            charge(**{f"unit{number}": 1})

    @loop(max=600)
    def agent(n: int) -> int:
        run = current_run()
        if n == 0 and run is not None:
            threads.append(threading.Thread(target=run.bind(appear)))
            threads[0].start()
        return n + 1

    assert agent(0) == 600
    threads[0].join()
