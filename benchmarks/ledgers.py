"""What reserving and settling costs in each ledger, with 8 processes on one account at once: ``make bench``.

Prints pairs of reserve and settle in a second, and what one pair takes. Wall time: what is measured is mostly waiting.
Redis is measured where LOOPGUARD_TEST_REDIS names a server. What it asserts is that every pair was booked.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from loopguard import Budget, Guard, LoopLimit, tool
from loopguard.budgets._open import check_ledger, keeper_of
from loopguard.typing import Account, Entry, Lease

PROCESSES = 8
SECONDS = 3.0
LEASE = Lease(60, "charge")


def pairs(url: str, name: str, barrier: Barrier, results: Queue[list[float]]) -> None:
    """One process: reserve and settle as fast as it goes; what each pair took."""
    ledger: Any = keeper_of(check_ledger(url, "url")).ledger
    entry = Entry(Account(name, "team-a", "total"), "usd", 10**14, 10**30)
    took: list[float] = []
    barrier.wait()
    end = time.perf_counter() + SECONDS
    while (started := time.perf_counter()) < end:
        number = f"{os.getpid()}-{len(took)}-{name}"
        ledger.reserve(number, [entry], LEASE)
        ledger.settle(number, {"usd": 10**14})
        took.append(time.perf_counter() - started)
    if url == "memory:":
        assert ledger.balance(entry.account, "usd").spent == len(took) * 10**14
    results.put(took)


def together(url: str, processes: int) -> list[float]:
    """What each pair took in all processes, sorted."""
    context = multiprocessing.get_context("spawn")
    name, barrier, results = f"bench-{uuid.uuid4().hex}", context.Barrier(processes), context.Queue()
    workers = [context.Process(target=pairs, args=(url, name, barrier, results)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    took = [each for _ in workers for each in results.get()]
    for worker in workers:
        worker.join()
    if url != "memory:":
        ledger: Any = keeper_of(check_ledger(url, "url")).ledger
        assert ledger.balance(Account(name, "team-a", "total"), "usd").spent == len(took) * 10**14
    return sorted(took)


def per_call(budget: Callable[[], Budget]) -> float:
    """Median µs of a guarded call in one process."""
    guarded = tool(cost=0.0001)(lambda n: n)
    times = []
    with Guard(LoopLimit(0), budget()).scope("bench"):
        for _ in range(9):
            started = time.perf_counter()
            for n in range(300):
                guarded(n)
            times.append((time.perf_counter() - started) / 300 * 1e6)
    return sorted(times)[4]


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # where /tmp may be in memory
        ledgers = {"memory": "memory:", "SQLite": f"sqlite:///{folder}/spend.db"}
        if os.environ.get("LOOPGUARD_TEST_REDIS"):
            ledgers["Redis"] = os.environ["LOOPGUARD_TEST_REDIS"]
        print(f"reserve and settle, {PROCESSES} processes on one account (memory: on one each)")
        for processes in (1, PROCESSES):
            for name, url in ledgers.items():
                took = together(url, processes)
                middle, high, last = took[len(took) // 2], took[int(len(took) * 0.99)], took[-1]
                print(
                    f"  {name:<8}{processes} processes{len(took) / SECONDS:10,.0f} pairs/s"
                    f"{middle * 1e6:10,.0f} µs median{high * 1e6:10,.0f} µs p99{last * 1e6:12,.0f} µs at most"
                )
        print("a guarded call under one budget, in one process")
        print(f"  {'per run, no ledger':<20}{per_call(lambda: Budget(usd=10**9)):9.1f} µs")
        for name, url in ledgers.items():
            us = per_call(lambda: Budget(usd=10**9, per="day", ledger=url, name=f"bench-{uuid.uuid4().hex}"))  # noqa: B023  # called here
            print(f"  {'per day, ' + name:<20}{us:9.1f} µs")


if __name__ == "__main__":
    main()
