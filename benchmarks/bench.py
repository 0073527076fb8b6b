"""What a guarded call costs, as ratios to floors measured in the same run: ``make bench``.

Prints medians in µs. Nothing here is a test of speed; what it asserts is that every call was counted.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import wrapt

from loopguard import Budget, Guard, LoopGuardWarning, LoopLimit, MaxSteps, Run, configure, journal, loop, tool

COST = Decimal("0.0001")
ROUNDS = 9


def median_us(run: Callable[[int], object], calls: int = 10_000, rounds: int = ROUNDS) -> float:
    """Median over rounds of the µs per call of run(calls)."""
    times = []
    for _ in range(rounds):
        started = time.process_time()  # of the processor: other programs don't count
        run(calls)
        times.append((time.process_time() - started) / calls * 1e6)
    return sorted(times)[len(times) // 2]


def bare(x: object) -> object:
    """The body of every tool here."""
    return x


async def bare_async(x: object) -> object:
    """The same, async."""
    return x


@wrapt.decorator  # type: ignore[untyped-decorator]  # wrapt's own typing
def passed_through(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """The floor: a decorator that does nothing."""
    return wrapped(*args, **kwargs)


wrapped = passed_through(bare)
guarded = tool(cost=COST)(bare)
free = tool(name="free")(bare)
guarded_async = tool(cost=COST)(bare_async)


@tool(cost=COST)
def changing(x: object) -> dict[str, object]:
    """Identical arguments, another result each time."""
    return {"x": x, "n": time.perf_counter_ns()}


def policy() -> Guard:
    """MaxSteps, LoopLimit and Budget, none of which is reached."""
    return Guard(MaxSteps(10**9), LoopLimit(3), Budget(usd=10**9))


def check(run: Run, calls: int) -> None:
    """Every call was counted and charged."""
    assert run.steps == calls, (run.steps, calls)
    assert run.spent() == COST * calls, (run.spent(), calls)
    assert run.reserved() == 0


def calling(fn: Callable[[Any], object], *, same: bool = False) -> Callable[[int], None]:
    """Call a plain function n times, with distinct arguments or always the same."""

    def run(calls: int) -> None:
        for i in range(calls):
            fn(0 if same else i)

    return run


def in_runs(
    fn: Callable[[Any], object], guards: Callable[[], list[Guard]], *, same: bool = False
) -> Callable[[int], None]:
    """The same inside nested runs, one for each guard."""

    def run(calls: int) -> None:
        with ExitStack() as stack:
            runs = [stack.enter_context(guard.scope(f"level {level}")) for level, guard in enumerate(guards())]
            for i in range(calls):
                fn(0 if same else i)
            for each in runs:
                check(each, calls)

    return run


def in_async_run(calls: int) -> None:
    """The async tool inside one run."""

    async def main() -> None:
        async with policy().scope("async") as run:
            for i in range(calls):
                await guarded_async(i)
            check(run, calls)

    asyncio.run(main())


def scopes(calls: int) -> None:
    """Empty scopes."""
    guard = Guard()
    for _ in range(calls):
        with guard.scope("empty"):
            pass


@loop(max=1000, until=lambda n: n >= 1000)
def counting(n: int) -> int:
    """A loop that does nothing but count."""
    return n + 1


def report(what: str, us: float, floor: float | None = None, of: str = "") -> None:
    """One line of the table."""
    ratio = f"{us / floor:7.2f} x {of}" if floor else ""
    print(f"  {what:<58}{us:9.2f} µs {ratio}")


def without_sdk() -> float:
    """(a): no TracerProvider is set."""
    print("without an OpenTelemetry SDK")
    report("bare call", median_us(calling(bare)))
    floor = median_us(calling(wrapped))
    report("wrapt pass-through: the floor", floor)
    sync = median_us(in_runs(guarded, lambda: [policy()]))
    report("guarded, arguments all distinct", sync, floor, "floor (aim 9)")
    report("guarded async, arguments all distinct", median_us(in_async_run), sync, "sync (aim 1.3)")
    report(
        "guarded, identical arguments, dict results that change",
        median_us(in_runs(changing, lambda: [policy()], same=True)),
        floor,
        "floor (aim 13)",
    )
    nested = median_us(in_runs(guarded, lambda: [policy(), *(Guard() for _ in range(9))]))
    report("ten nested runs, the policy on the outermost", nested, floor, "floor (aim 16)")
    every = median_us(in_runs(guarded, lambda: [policy() for _ in range(10)]))
    report("ten nested runs, the policy on each", every, floor, "floor")
    for calls in (100, 1_000, 10_000, 100_000):
        us = median_us(in_runs(guarded, lambda: [policy()]), calls, 3 if calls > 10_000 else ROUNDS)
        report(f"guarded, {calls:,} calls in one run", us, floor, "floor")
    report("an empty scope", median_us(scopes, 3_000))
    report("a loop iteration", median_us(lambda n: [counting(0) for _ in range(n // 1000)], 5_000))
    return floor


def with_sdk(sampler: str) -> None:
    """(b): an SDK that records every span, or leaves every one out. In a process of its own: it is set only once."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider, sampling

    class Counting(SpanProcessor):
        """Counts what ends, and keeps nothing."""

        tools = 0

        def on_end(self, span: ReadableSpan) -> None:
            self.tools += span.name.startswith("execute_tool")

    counter = Counting()
    recording = sampler == "records"
    always = sampling.ALWAYS_ON if recording else sampling.ALWAYS_OFF
    provider = TracerProvider(sampling.ParentBased(always))
    provider.add_span_processor(counter)
    tracer = provider.get_tracer("bench")

    def spans(fn: Callable[[Any], object]) -> Callable[[int], None]:
        """A span by hand around each call, with the attributes of a tool's, below another span."""

        def run(calls: int) -> None:
            with tracer.start_as_current_span("parent"), policy().scope("run"):
                for i in range(calls):
                    attributes = {
                        "gen_ai.operation.name": "execute_tool",
                        "gen_ai.tool.name": "bare",
                        "gen_ai.tool.call.id": "call_0123456789abcdef",
                        "loopguard.step.limit": 10**9,
                        "loopguard.step.index": i,
                        "loopguard.call.cost": 0.0001,
                        "loopguard.call.cost.currency": "USD",
                    }
                    with tracer.start_as_current_span("bare", attributes=attributes, record_exception=False):
                        fn(i)

        return run

    print(f"with an SDK that {sampler}")
    calls = 3_000
    median_us(spans(bare), calls)  # warms up
    floor = median_us(spans(bare), calls)
    report("a span with the seven attributes, a bare call inside: the floor", floor)
    by_hand = median_us(spans(guarded), calls)
    report("the same, an untraced guarded call inside", by_hand, floor, "floor")
    trace.set_tracer_provider(provider)
    counter.tools = 0
    traced = median_us(in_runs(guarded, lambda: [policy()]), calls)
    report("guarded, traced", traced, floor, "floor (aim 1.3)")
    report("… which is what tracing it by hand would cost", traced, by_hand, "by hand (aim 1)")
    report("guarded async, traced", median_us(in_async_run, calls), floor, "floor")
    assert counter.tools == (2 * calls * ROUNDS if recording else 0), counter.tools


class Commits:
    """The floor of a recorded call: two commits of as many bytes to a SQLite file, its start and its finish."""

    def __init__(self, path: Path, durability: str) -> None:
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute(f"PRAGMA synchronous = {durability}")
        self.db.execute(
            "CREATE TABLE e (run TEXT, seq INTEGER, header BLOB, payload BLOB, PRIMARY KEY (run, seq)) WITHOUT ROWID"
        )
        self.seq = 0

    def __call__(self, calls: int) -> float:
        """Seconds for so many calls."""
        started = time.perf_counter()
        for _ in range(2 * calls):
            self.seq += 1
            self.db.execute("INSERT INTO e VALUES ('run', ?, ?, ?)", (self.seq, b"h" * 400, b"p" * 120))
        return time.perf_counter() - started


def kept(folder: Path) -> None:
    """(c): with a journal. Wall time, since the disk is what it waits for; floor and call take turns."""
    print("with a journal (wall time)")
    for durability, calls in (("normal", 500), ("full", 25)):
        configure(durability=durability)
        floor, times = Commits(folder / f"floor-{durability}.db", durability), []

        @loop(max=1, store=f"sqlite:///{folder}/calls-{durability}.db", guard=Guard(LoopLimit(0)))
        def calling(state: int) -> int:
            for turn in range(ROUNDS):
                bottom = floor(calls)  # noqa: B023  # called in this round only
                started = time.perf_counter()
                for i in range(calls):  # noqa: B023  # as above
                    free(turn * 10**6 + i)
                times.append((time.perf_counter() - started, bottom))  # noqa: B023  # as above
            return state

        calling(0)
        per_call, bottom = (sorted(side)[ROUNDS // 2] / calls * 1e6 for side in zip(*times, strict=True))
        report(f"two SQLite commits, {durability}: the floor", bottom)
        report(f"a recorded call, {durability}", per_call, bottom, "floor (aim 1.5)")
        floor.db.close()
    configure(durability="normal")
    for iterations in (250, 500, 1_000):
        path = folder / f"grown-{iterations}.db"

        @loop(max=iterations, store=f"sqlite:///{path}")
        def growing(messages: list[dict[str, str]]) -> list[dict[str, str]]:
            return [*messages, {"role": "user", "content": f"message {len(messages)} {'x' * 100}"}]

        started = time.perf_counter()
        growing([])
        took = (time.perf_counter() - started) / iterations * 1e6
        journal.open(f"sqlite:///{path}").close()
        size = path.stat().st_size / iterations
        report(f"an iteration of {iterations:,} whose list grows ({size:,.0f} bytes in the file)", took)


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore", LoopGuardWarning)
    without_sdk()
    for sampler in ("leaves everything out", "records"):
        child = multiprocessing.get_context("spawn").Process(target=with_sdk, args=(sampler,))
        child.start()
        child.join()
        assert child.exitcode == 0
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # where /tmp may be in memory
        kept(Path(folder))


if __name__ == "__main__":
    main()
