"""Approvals from process to process: one asks and ends, a person answers at a shell, another goes on.

The first process wants to refund two orders at once. Both refunds need a yes, so the run is parked, and the process
ends. Somebody looks at the questions with the command `loopguard`, lowers one refund and denies the other. The
second process takes the answers up: exactly what was approved runs, once, and the reason of the no reaches the agent.
The command comes with the extra `cli`.

Prints:

    process 1
      looked up A-17, B-4
      ticket-8 waits for a person
    $ loopguard pending
      approval: refund order=A-17 amount=899
      approval: refund order=B-4 amount=20
    $ loopguard approve … --by ann --edit {"amount": 100}
    $ loopguard deny … --by ann --reason "it was delivered"
    process 2
      bank: refunded 100 for A-17
      A-17: refunded 100
      B-4: refund was not approved: it was delivered. ...
    process 3
      A-17: refunded 100
      B-4: refund was not approved: it was delivered. ...
    the bank was called once; ann said edit and deny
"""

import asyncio
import json
import subprocess
import sys
from contextlib import suppress

from loopguard import ApprovalDenied, ApproveTool, Guard, Inbox, RunNotFound, journal, loop, tool

STORE = "sqlite:///approvals.db"
ORDERS = {"A-17": 899, "B-4": 20}


@tool  # needs no yes, and is answered from the record when the run goes on
def look_up(orders: list[str]) -> dict[str, int]:
    say(f"  looked up {', '.join(orders)}")
    return {order: ORDERS[order] for order in orders}


@tool(approve=True)  # runs only on an explicit yes
async def refund(order: str, amount: int) -> str:
    say(f"  bank: refunded {amount} for {order}")
    return f"refunded {amount}"


@loop(max=1, store=STORE, guard=Guard(ApproveTool(Inbox(), only="refund")))
async def support(answers: list[str]) -> list[str]:
    amounts = look_up(["A-17", "B-4"])
    done = await asyncio.gather(*(refund(*each) for each in amounts.items()), return_exceptions=True)
    for answer in done:
        if isinstance(answer, BaseException) and not isinstance(answer, ApprovalDenied):
            raise answer
    return [f"{order}: {answer}" for order, answer in zip(amounts, done, strict=True)]


def say(text: str) -> None:
    print(text, flush=True)


def process(number: int) -> None:
    say(f"process {number}")
    subprocess.run([sys.executable, __file__, "work"], check=True)


def loopguard(*arguments: str) -> str:
    command = [sys.executable, "-m", "loopguard", *arguments, "--store", STORE]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        result = asyncio.run(support.run([], run_id="ticket-8"))
        if result.stop_reason == "waiting":
            say(f"  {result.run_id} waits for a person")
        else:
            say("\n".join(f"  {answer}" for answer in result.value))
    else:
        with suppress(RunNotFound):  # of the last time you ran this
            journal.open(STORE).delete("ticket-8")
        process(1)
        say("$ loopguard pending")
        first, second = json.loads(loopguard("pending", "--json"))
        for question in (first, second):
            shown = " ".join(f"{name}={value}" for name, value in question["arguments"].items())
            say(f"  {question['kind']}: {question['tool']} {shown}")
        say('$ loopguard approve … --by ann --edit {"amount": 100}')
        loopguard("approve", first["id"], "--by", "ann", "--edit", '{"amount": 100}')
        say('$ loopguard deny … --by ann --reason "it was delivered"')
        loopguard("deny", second["id"], "--by", "ann", "--reason", "it was delivered")
        process(2)
        process(3)  # over already: the recorded result, and nobody is refunded again
        book = journal.open(STORE)
        said = [question.answer.decision for question in book.questions("all") if question.answer is not None]
        calls = [event for event in book.events("ticket-8") if type(event).__name__ == "ToolStarted"]
        assert [call.tool for call in calls] == ["look_up", "refund"]
        say(f"the bank was called once; ann said {' and '.join(said)}")
