"""Two hundred calls at once race for one dollar: it is spent to the cent, and nobody overshoots.

What a call may cost is reserved before its body runs and settled after it, so that a call in flight
counts, too.

Prints:

    100 bodies ran, 100 calls were refused, $1.00 of $1.00 spent
    the first refusal: embed may cost $0.01, but only ... reserved by calls in flight). ...
"""

import asyncio

from loopguard import Budget, BudgetExceeded, Guard, tool

policy = Guard(Budget(usd=1.00))
bodies = 0


@tool(cost=0.01)
async def embed(page: int) -> str:
    global bodies
    bodies += 1
    await asyncio.sleep(0.01)  # as if it took the network
    return f"the vector of page {page}"


async def main() -> None:
    async with policy.scope("fan out") as run:
        outcomes = await asyncio.gather(*(embed(page) for page in range(200)), return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, BudgetExceeded)]
        print(f"{bodies} bodies ran, {len(refused)} calls were refused, ${run.spent():.2f} of $1.00 spent")
        print(f"the first refusal: {refused[0]}")


asyncio.run(main())
