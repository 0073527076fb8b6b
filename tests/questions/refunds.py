"""A program that refunds orders, one process at a time: ``refunds.py STORE EFFECTS COMMAND RUN [AMOUNT]``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from loopguard import ApprovalDenied, ApproveTool, Guard, Inbox, loop, result_of, tool

_, STORE, EFFECTS, COMMAND, RUN, *REST = sys.argv
AMOUNT = int(REST[0]) if REST else 49


def effect(what: str) -> None:
    """What can't be undone: a line in a file."""
    file = os.open(EFFECTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{what}\n".encode())
    os.close(file)


@tool
def look(order: str) -> dict[str, Any]:
    """Not gated."""
    effect(f"look {order}")
    return {"order": order}


@tool(approve=True)
def refund(order: dict[str, Any], amount: int) -> str:
    """Gated; dies in the middle where it is told to."""
    effect(f"refund {order['order']} {amount}")
    if COMMAND == "die":
        os.kill(os.getpid(), 9)
    return f"refunded {amount}"


@loop(max=1, store=STORE, guard=Guard(ApproveTool(Inbox(), only="refund")))
def refunding(state: str) -> str:
    """One refund."""
    return refund(look(state), AMOUNT)


@tool(approve=True)
async def pay(who: str) -> str:
    """One of several at once."""
    effect(f"pay {who}")
    return f"paid {who}"


@loop(max=1, store=STORE, guard=Guard(ApproveTool(Inbox())))
async def paying(state: str) -> str:
    """Three payments at once, two of them the same."""
    done = await asyncio.gather(pay("ann"), pay("bob"), pay("ann"), return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException) and not isinstance(one, ApprovalDenied):
            raise one
    return json.dumps([getattr(one, "reason", one) for one in done])


try:
    if COMMAND == "pay":
        result = asyncio.run(paying.run("", run_id=RUN))
    else:
        result = refunding.run("A-1", run_id=RUN) if COMMAND == "start" else refunding.resume(RUN)
    code = None if result.error is None else getattr(result.error, "code", None)
    print(json.dumps({"stop": result.stop_reason, "value": result.value, "code": code}))
except Exception as exc:  # what the test wants to hear of
    partial = result_of(exc)
    print(json.dumps({"error": type(exc).__name__, "stop": None if partial is None else partial.stop_reason}))
