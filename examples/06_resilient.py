"""A flaky tool, a hanging tool and a broken far end: what is tried again, given up and left alone.

Retry runs a failed call again, if its tool is marked idempotent. Timeout gives up on a call that takes too
long. CircuitBreaker leaves a far end alone that keeps failing, and after `reset` seconds lets one call try.

Prints:

    exchange_rate: attempt 1 raised the line is bad
    exchange_rate: attempt 2 raised the line is bad
    exchange_rate: attempt 3 returned 1.08
    year_report: year_report did not finish within 0.2 s (...); it may still be running
    transfer: attempt 1 raised the bank is down
    transfer: attempt 1 raised the bank is down
    transfer: attempt 1 raised the bank is down
    transfer failed 3 times in a row, so it was not run. It may be tried again in ... s; ...
    5 calls, 7 attempts, $0.06 spent
"""

import threading

from loopguard import CircuitBreaker, Guard, Retry, Timeout, ToolCallRefused, ToolTimeout, tool

attempts = 0


def show(event: object) -> None:
    """A line for every attempt that is over."""
    global attempts
    if type(event).__name__ == "ToolFinished":
        attempts += 1
        if event.outcome != "timed_out":
            print(f"{event.tool}: attempt {event.attempt} {event.outcome} {event.error or event.result}")


policy = Guard(CircuitBreaker(3, reset=30), Retry(2, wait=0.01), Timeout(0.2), on_event=show)
lines = iter([ConnectionError("the line is bad"), ConnectionError("the line is bad"), 1.08])


@tool(idempotent=True, cost=0.01)
def exchange_rate(currency: str) -> float:
    answer = next(lines)
    if isinstance(answer, Exception):
        raise answer
    return answer


@tool(cost=0.05)
def year_report(year: int) -> str:
    threading.Event().wait()  # as if nobody answered
    return "never"


@tool(cost=0.01)
def transfer(amount: int) -> str:
    raise ConnectionError("the bank is down")


with policy.scope("bookkeeping") as run:
    exchange_rate("EUR")
    try:
        year_report(2025)
    except ToolTimeout as error:
        print(f"year_report: {error}")
    for amount in (10, 20, 30, 40):
        try:
            transfer(amount)
        except ToolCallRefused as refusal:
            print(refusal)
        except ConnectionError:
            pass  # the line was printed already
    print(f"{run.steps} calls, {attempts} attempts, ${run.spent():.2f} spent")
