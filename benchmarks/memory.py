"""What a run costs in memory while it waits: ``python benchmarks/memory.py [RUNS]``, by default 10,000 at once.

Each run is an async loop with a deadline, a budget and a ceiling of steps, whose tool has a timeout of its
own; all of them are held in that tool until the last has arrived. Prints bytes per run as tracemalloc sees
them, beside the same tasks with nothing but asyncio's own two timeouts, and what is left when all are over.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable

from loopguard import Budget, Guard, LoopResult, MaxSteps, loop, tool

LONG = 600
"""Seconds: none of these timeouts runs out."""


class Gate:
    """Holds bodies until all have arrived."""

    def __init__(self, expected: int) -> None:
        self.missing = expected
        self.all_here = asyncio.Event()
        self.open = asyncio.Event()

    async def wait(self) -> None:
        """Arrive, and wait for the gate to open."""
        self.missing -= 1
        if not self.missing:
            self.all_here.set()
        await self.open.wait()


gate: Gate


@tool(cost=0.01, timeout=LONG)
async def work(n: int) -> int:
    """Wait with all the others."""
    await gate.wait()
    return n


@loop(max=1, timeout=LONG, guard=Guard(MaxSteps(5), Budget(usd=1)))
async def guarded(n: int) -> int:
    """One run."""
    return await work(n)


async def bare(n: int) -> int:
    """The floor: two timeouts and the same wait."""
    async with asyncio.timeout(LONG):
        await asyncio.wait_for(gate.wait(), LONG)
    return n


async def measure(run: Callable[[int], Awaitable[object]], runs: int) -> tuple[float, float, float]:
    """(bytes per run while all are under way, bytes per run left behind, seconds)."""
    global gate
    gate = Gate(runs)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    started = time.perf_counter()
    tasks = [asyncio.ensure_future(run(n)) for n in range(runs)]
    await gate.all_here.wait()
    during, _ = tracemalloc.get_traced_memory()
    gate.open.set()
    for n, task in enumerate(tasks):
        result = await task
        assert result == n or (isinstance(result, LoopResult) and result.completed and result.value == n)
        del result
    seconds = time.perf_counter() - started
    del tasks, task
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    return (during - before) / runs, (after - before) / runs, seconds


def main(most: int) -> None:
    """The table."""
    print(f"{'runs at once':>12} {'bare B/run':>11} {'guarded B/run':>14} {'left B/run':>11} {'seconds':>8}")
    tracemalloc.start()
    for warm_up in (bare, guarded.run):
        asyncio.run(measure(warm_up, 10))
    for runs in sorted({most // 10, most // 2, most}):
        floor, _, _ = asyncio.run(measure(bare, runs))
        each, left, seconds = asyncio.run(measure(guarded.run, runs))
        print(f"{runs:>12,} {floor:>11,.0f} {each:>14,.0f} {left:>11,.0f} {seconds:>8.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
