"""Agents for the command's tests: run as a script, one in a process of its own that goes on line by line."""

from __future__ import annotations

import os
import sys

from loopguard import ApproveTool, Budget, Flow, Guard, Inbox, LoopLimit, MaxSteps, current_run, loop, tool

EVIL = "\x1b]0;owned\x07\u202egpj.exe"
"""A title for the terminal, and text that reads backwards."""


@tool(cost=0.25)
def fetch(page: int) -> str:
    """Costs a quarter."""
    return f"page {page}"


@tool(approve=True)
def refund(order: str, amount: int) -> str:
    """Somebody has to say yes."""
    return f"${amount} for {order}"


@loop(max=3, until=lambda n: n >= 2, guard=Guard(Budget(usd=10)))
def fetches(n: int) -> int:
    """Completes after two iterations."""
    fetch(n)
    return n + 1


@loop(max=9, until=lambda n: n >= 9, guard=Guard(MaxSteps(2)))
def spends(n: int) -> int:
    """Is stopped by its guard in the third iteration."""
    fetch(n)
    return n + 1


@loop(max=1, guard=Guard(ApproveTool(Inbox())))
def refunds(n: int) -> int:
    """Waits for a person."""
    refund("A-1", 50)
    return n + 1


@loop(max=1)
async def fetches_async(n: int) -> int:
    """An async one."""
    fetch(n)
    return n + 1


@loop(max=1)
def fails(n: int) -> int:
    """Raises what no terminal should see raw."""
    raise RuntimeError(EVIL)


@tool(idempotent=True)
def hear(n: int) -> str:
    """A line from stdin; "kill" and "stop" do what they say."""
    line = sys.stdin.readline().strip()
    if line == "stop":
        current_run().stop("enough")  # type: ignore[union-attr]  # inside a loop
    return line


@loop(max=100, until=lambda said: "end" in said, guard=Guard(LoopLimit(0)))
def listens(said: list[str]) -> list[str]:
    """An iteration for each line."""
    return [*said, hear(len(said))]


@loop(max=1_000_000, until=lambda said: "end" in said, guard=Guard(LoopLimit(0)))
def hurries(said: list[str]) -> list[str]:
    """Writes as fast as it can, a hundred calls for each line."""
    for page in range(100):
        fetch(page)
    return [*said, hear(len(said))]


@tool
def send(to: str) -> str:
    """Nobody sees the end of it where it runs as a script."""
    if __name__ == "__main__":
        os._exit(9)
    return "sent"


@loop(max=1)
def sends(said: list[str]) -> list[str]:
    """Dies in the middle of a call."""
    return [*said, send("anna")]


if __name__ == "__main__":
    {"listens": listens, "hurries": hurries, "sends": sends}[sys.argv[1]].run([], run_id="live")


steps = Flow("steps", [lambda: 1])
