"""A team's budget for a day, which all of its processes share, on whatever machine they run.

It needs a Redis server and nothing else: LOOPGUARD_LEDGER names it, or it is the one of this machine.

Prints:

    four processes paid for 10 answers of $0.25, and were refused 10
    ask may cost $0.25, but only $0 is left of the budget of $2.5 per day for 'team-…' …
"""

import os
import subprocess
import sys
import uuid

os.environ.setdefault("LOOPGUARD_LEDGER", "redis://127.0.0.1:6379/0")

from loopguard import Budget, Guard, ToolCallRefused, tool


@tool(cost=0.25)
def ask(question: str) -> str:
    return f"an answer to {question}"  # imagine a model here


def work(team: str) -> None:
    """What each process does: five questions, as far as the money goes."""
    with Guard(Budget(usd=2.50, per="day", key=team)).scope("answers"):
        for number in range(5):
            try:
                print(ask(f"question {number}"))
            except ToolCallRefused as refusal:
                print(refusal)


if len(sys.argv) > 1:
    work(sys.argv[1])
else:
    team = f"team-{uuid.uuid4()}"  # nobody has spent anything of it today
    workers = [subprocess.Popen([sys.executable, __file__, team], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    lines = [line for worker in workers for line in worker.communicate()[0].splitlines()]
    paid = [line for line in lines if line.startswith("an answer")]
    refused = [line for line in lines if not line.startswith("an answer")]
    print(f"four processes paid for {len(paid)} answers of $0.25, and were refused {len(refused)}")
    print(refused[-1].replace(team, "team-…").partition(" (")[0], "…")
