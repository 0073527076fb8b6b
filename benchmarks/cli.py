"""Times the `loopguard` command as people feel it: whole processes, over a store of 10,000 runs.

Prints the median of five for each command, interpreter start included, beside what it has to stay under.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from loopguard import Guard, LoopLimit, loop, tool

COMMANDS = {
    "runs": (["runs"], 1.0),
    "runs, all of them": (["runs", "--limit", "0"], None),
    "runs, as JSON": (["runs", "--limit", "0", "--json"], None),
    "show a run of 1,000 calls": (["show", "large"], 1.0),
    "what-if over it": (["what-if", "large", "--max-steps", "500"], None),
}
"""What is timed, and the seconds that it may take."""


@tool(cost=0.001)
def look_up(page: int) -> dict[str, str]:
    """Returns a page."""
    return {"page": f"page {page}", "text": "words " * 20}


def make(store: str, runs: int, calls: int) -> None:
    """Small runs, and a large one of ten iterations among them."""

    @loop(max=1, store=store)
    def small(n: int) -> int:
        look_up(n)
        return n

    @loop(max=10, guard=Guard(LoopLimit(0)), store=store)
    def large(done: int) -> int:
        for page in range(calls // 10):
            look_up(done + page)
        return done + calls // 10

    for number in range(runs - 1):
        small.run(number, run_id=f"run-{number}")
    large.run(0, run_id="large")


def seconds(command: list[str], store: str) -> float:
    """The median of five whole processes."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "loopguard", *command, "--store", store], check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Make a store, unless one is named, and time the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=1_000)
    parser.add_argument("--file", type=Path, help="where the store is, or is made and left")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path: Path = given.file or Path(folder) / "runs.db"
        store = f"sqlite:///{path}"
        if not path.exists():
            began = time.perf_counter()
            make(store, given.runs, given.calls)
            print(f"{given.runs:,} runs written in {time.perf_counter() - began:.0f} s")
        for name, (command, limit) in COMMANDS.items():
            under = f"under {limit:g} s" if limit else ""
            print(f"{name:<28} {seconds(command, store):>6.2f} s  {under}")


if __name__ == "__main__":
    main()
