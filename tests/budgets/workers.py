"""Programs for test_processes.py. Run as a script it forks one for each line of JSON on stdin.

A program says where it is by creating the file ``ready``, and goes on when the other end of the pipe ``go`` is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import traceback
from decimal import Decimal
from typing import Any

from loopguard import Budget, BudgetExceeded, Guard, LoopLimit, charge, tool
from loopguard.testing import capture
from loopguard.typing import BudgetOverdrawn, Entry, Lease

with contextlib.suppress(ImportError):
    import loopguard_redis  # noqa: F401  # loaded once, before the forks

GRAIN = Decimal("0.0001")


def reached(args: dict[str, Any]) -> None:
    """Tell the test that this is where we are."""
    with open(args["ready"], "x", encoding="utf-8"):
        pass


def budget(args: dict[str, Any], **options: Any) -> Budget:
    """The budget that all of these spend from."""
    given = {"per": "total", "name": args["name"], "key": "team-a", "ledger": args["ledger"], "lease": args["lease"]}
    return Budget(usd=Decimal(args["cap"]), **{**given, **options})


def spending(args: dict[str, Any]) -> str:
    """Calls of random cost, one of ten of which fails, until nothing fits any more; what they cost."""
    chance = random.Random(args["seed"])
    paid = Decimal(0)

    @tool(cost=lambda call: call.arguments["most"])
    def buy(most: Decimal, cost: Decimal, fails: bool) -> None:
        charge(cost)
        if fails:
            raise ValueError("no")

    with Guard(budget(args), LoopLimit(0), max_refusals=10**6).scope("spending"):
        most = GRAIN
        while True:
            cost, fails = GRAIN * chance.randint(0, int(most / GRAIN)), chance.random() < 0.1
            try:
                buy(most, cost, fails)
            except BudgetExceeded:
                if most == GRAIN:
                    return str(paid)
                most = GRAIN
                continue
            except ValueError:
                pass
            paid += cost
            most = GRAIN * chance.randint(1, 200)


def holding(args: dict[str, Any]) -> str:
    """One call that lasts until it is told to end, or is killed; the overdrafts that it came to."""

    @tool(cost=Decimal(args["cost"]))
    def hold() -> None:
        reached(args)
        with open(args["go"], encoding="utf-8") as pipe:
            pipe.read()

    with capture() as seen, Guard(budget(args, on_expiry=args["on_expiry"])).scope("holding"):
        hold()
    return json.dumps([[str(event.amount), event.late] for event in seen.events_of(BudgetOverdrawn)])


class Stuck:
    """A ledger that is asked, and never answers."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args

    def reserve(self, id: str, entries: list[Entry], lease: Lease) -> None:
        """Until we are killed."""
        reached(self.args)
        signal.pause()

    settle = release = renew = balance = reserve


def between(args: dict[str, Any]) -> None:
    """A call that is killed when one ledger of its chain has reserved, and the next has not."""
    stuck: Any = Stuck(args)
    last = Budget(usd=1, per="month", ledger=stuck)
    with Guard(Budget(usd=9)).scope("outer"), Guard(budget(args), last).scope("inner"):
        tool(cost=Decimal(args["cost"]))(lambda: None)()


PROGRAMS = {each.__name__: each for each in (spending, holding, between)}


def main() -> None:
    """Fork for each line, and say the child's id; the child writes what came of it to a file of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    for line in sys.stdin:
        args = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                said: Any = {"value": PROGRAMS[args["program"]](args)}
            except BaseException:
                said = {"error": traceback.format_exc()}
            with open(args["out"] + ".tmp", "w", encoding="utf-8") as file:
                json.dump(said, file)
            os.rename(args["out"] + ".tmp", args["out"])
            os._exit(0)
        print(child, flush=True)


if __name__ == "__main__":
    main()
