"""Two processes share a team's dollar for the day: it is spent to the cent, whoever is faster.

The books are in a SQLite file. For several hosts they would be on a server: redis://…, with the package
loopguard-redis. A worker that is killed in the middle of a call takes nothing with it: what it had reserved
comes back when its lease is over.

Prints:

    two workers read 100 pages; $1.00 of $1.00 is spent, $0.00 reserved
    a third one is told: read_page may cost $0.01, but only $0 is left of the budget 'research' of $1 per day ...
"""

import multiprocessing
from pathlib import Path

from loopguard import Budget, BudgetExceeded, Guard, LoopLimit, tool
from loopguard.budgets import spend

LEDGER = "sqlite:///team_budget.db"
policy = Guard(LoopLimit(0), Budget(usd=1.00, per="day", key="team-a", name="research", ledger=LEDGER))


@tool(cost=0.01)
def read_page(number: int) -> str:
    return f"page {number}"


def work(results: multiprocessing.Queue) -> None:
    pages = 0
    with policy.scope("worker"):
        try:
            while True:
                read_page(pages)
                pages += 1
        except BudgetExceeded:
            results.put(pages)


if __name__ == "__main__":
    for file in Path().glob("team_budget.db*"):  # of the last time you ran this
        file.unlink()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=work, args=(results,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    pages = sum(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    (team,) = spend(LEDGER, key="team-a")
    print(f"two workers read {pages} pages; ${team.spent:.2f} of $1.00 is spent, ${team.reserved:.2f} reserved")
    with policy.scope("third"):
        try:
            read_page(0)
        except BudgetExceeded as refusal:
            print(f"a third one is told: {refusal}")
