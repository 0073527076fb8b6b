"""Programs for test_processes.py to kill. Run as a script it forks one for each line of JSON on stdin.

Nothing here tells where it stands: effects go to a counter in the test's process, which answers when it likes.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from typing import Any

import anthropic
import pydantic  # noqa: F401  # loaded once, before the forks

from loopguard import Flow, Guard, current_call, journal, loop, meter, tool
from loopguard.journal._rows import first_broken
from loopguard.journal._sqlite import SQLiteJournal

STORE = ""
COUNTER: tuple[str, int] = ("", 0)
PREFIX = ""


def effect(what: str) -> str:
    """Do something in the world: it is done once the counter has heard of it; what the counter answers."""
    call = current_call()
    key = call.idempotency_key if call is not None else ""
    with socket.create_connection(COUNTER) as connection:
        connection.sendall(f"{PREFIX}{what}\t{key}\n".encode())
        return connection.makefile().readline().strip().replace(PREFIX, "")


@tool
def pay(n: int) -> str:
    """Must not happen twice."""
    return effect(f"pay {n}")


@tool(idempotent=True)
def put(n: int) -> str:
    """May happen twice."""
    return effect(f"put {n}")


@tool
async def fetch(name: str) -> str:
    """One of several in parallel."""
    return await asyncio.get_running_loop().run_in_executor(None, effect, f"fetch {name}")


@tool(idempotent=True)
async def aput(n: int) -> str:
    """The same without holding up an event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, effect, f"put {n}")


@tool
def odd(argument: Any) -> Any:
    """Returns what no file can hold."""
    effect(f"odd {type(argument).__name__}")
    return "\ud83d"


@tool
def last() -> str:
    """Where the counter kills."""
    return effect("last")


def working(args: dict[str, Any]) -> Any:
    """A run of many steps, two in each iteration."""

    @loop(max=args["iterations"], store=STORE, name="working")
    def step(state: list[str]) -> list[str]:
        n = len(state)
        return [*state, f"{pay(n)} {put(n)}"]

    return step.run([], run_id=args["run_id"]).value


def eight(args: dict[str, Any]) -> Any:
    """The same, its effects told apart by run."""
    global PREFIX
    PREFIX = args["run_id"] + " "
    return working(args)


def one_call(args: dict[str, Any]) -> Any:
    """A run with a single call of pay or put, after one that finishes."""

    @loop(max=1, store=STORE, name="one_call")
    def step(state: str) -> str:
        return pay(1) + " " + (pay(2) if args["tool"] == "pay" else put(2))

    result = step.run("", run_id="r")
    return [result.value, str(result.stop_reason)]


def parallel(args: dict[str, Any]) -> Any:
    """Three calls at once, asked for in this order."""

    @loop(max=1, store=STORE, name="parallel")
    async def step(state: dict[str, str]) -> dict[str, str]:
        order = args["order"]
        found = await asyncio.gather(*(fetch(name) for name in order))
        if args["dies"]:
            last()
        return dict(zip(order, found, strict=True))

    return asyncio.run(step.run({}, run_id="r")).value


def waiting(args: dict[str, Any]) -> Any:
    """A run whose one call lasts until the counter answers."""

    @loop(max=1, store=STORE, name="waiting")
    def step(state: str) -> str:
        return put(0)

    return step.run("", run_id="r").value


def agent(args: dict[str, Any]) -> Any:
    """An agent that refunds and then looks; the counter kills it at the look."""
    policy = Guard()

    @policy.tool
    def refund(order: str, amount: int) -> str:
        return effect(f"refund {order} {amount}")

    @policy.tool(idempotent=True)
    def look(order: str) -> str:
        return effect(f"look {order}")

    direct = anthropic.DefaultHttpxClient(trust_env=False)
    client: Any = anthropic.Anthropic(base_url=args["url"], api_key="x", http_client=direct)
    if args["metered"]:
        client = meter(client, prices={"m": {"input": 3, "output": 15}})

    @loop(max=3, until=lambda m: m[-1]["role"] == "assistant", guard=policy, store=STORE, name="agent")
    def support(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        while True:
            options = {"model": "m", "max_tokens": 100, "messages": messages, "tools": policy.schemas()}
            if args["stream"]:
                with client.messages.stream(**options) as stream:
                    reply = stream.get_final_message()
            else:
                reply = client.messages.create(**options)
            messages = [*messages, {"role": "assistant", "content": reply.content}]
            if not any(block.type == "tool_use" for block in reply.content):
                return messages
            messages = [*messages, {"role": "user", "content": policy.run_tools(reply)}]

    result = support.run([{"role": "user", "content": "my money, please"}], run_id="r")
    return [str(result.stop_reason), str(result.cost), result.usage.model_calls]


def driven(args: dict[str, Any]) -> Any:
    """A run of three calls, in a process whose clock may be ahead of the others', so that their leases are over."""
    path = STORE.removeprefix("sqlite:///")
    store: Any = SQLiteJournal(path, clock=lambda: time.time() + args["ahead"]) if args["ahead"] else STORE
    if args["colour"] == "sync":

        @loop(max=3, store=store, name="driven")
        def step(state: list[str]) -> list[str]:
            return [*state, put(len(state))]

        return step.run([], run_id="r").value

    @loop(max=3, store=store, name="driven")
    async def astep(state: list[str]) -> list[str]:
        return [*state, await aput(len(state))]

    return asyncio.run(astep.run([], run_id="r")).value


def nested(args: dict[str, Any]) -> Any:
    """A flow with a loop, whose body calls a tool, that runs a flow; in one of the colours."""

    def begin(n: int) -> int:
        put(100)
        return n

    def a(n: int) -> int:
        put(10 * n + 1)
        return n

    def b(n: int) -> int:
        pay(10 * n + 2)
        return n + 1

    def end(n: int) -> str:
        return f"{n} {put(200)}"

    inner = Flow("inner", [a, b])
    if args["colour"] == "sync":

        @tool(idempotent=True)
        def visit(n: int) -> int:
            return inner(n)  # type: ignore[no-any-return]

        @loop(max=2)
        def tour(n: int) -> int:
            return visit(n)

        result = Flow("outer", [begin, tour, end], store=STORE).run(0, "r")
    else:

        @tool(idempotent=True, name="visit")
        async def avisit(n: int) -> int:
            return await asyncio.to_thread(inner, n)  # type: ignore[no-any-return]

        @loop(max=2, name="tour")
        async def atour(n: int) -> int:
            return await avisit(n)

        result = asyncio.run(Flow("outer", [begin, atour, end], store=STORE).run(0, "r"))
    return [result.value, str(result.stop_reason)]


class Hostile:
    """Can't be written in any way, nor shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def hostile(args: dict[str, Any]) -> Any:
    """Calls with arguments of these kinds, whose results can't be kept; then the one at which the counter may kill."""
    kinds: dict[str, Any] = {
        "function": lambda: 1,
        "bytes": b"\xff",
        "datetime": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "Hostile": Hostile(),
    }

    @loop(max=1, store=STORE, name="hostile")
    def step(state: str) -> str:
        assert [odd(kinds[kind]) for kind in args["kinds"]] == ["\ud83d"] * len(args["kinds"])
        return last()

    result = step.run("", run_id=args["run_id"])
    return [result.value, str(result.stop_reason)]


def exporting(args: dict[str, Any]) -> Any:
    """Export everything; the kernel kills it in the middle of a write, once the file has `cut` bytes."""
    book = journal.open(STORE)
    book.runs()  # SQLite's own files are there before the limit is
    if args["cut"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (args["cut"], args["cut"]))
    return book.export(args["file"])


def tearing(args: dict[str, Any]) -> Any:
    """Append half a record that ends in half a character, and die of kill -9."""
    with open(args["file"], "ab", buffering=0) as file:
        file.write('{"run_id":"ü'.encode()[:-1])
        os.kill(os.getpid(), signal.SIGKILL)


def reading(args: dict[str, Any]) -> Any:
    """How many records of which run an export has, which lines are torn, and whether the chains are whole."""
    runs, damaged = journal.read_export(args["file"])
    broken = [first_broken(run_id, rows) for run_id, rows in runs.items()]
    return [{run_id: len(rows) for run_id, rows in runs.items()}, damaged, broken]


PROGRAMS = {
    each.__name__: each
    for each in (
        working,
        eight,
        one_call,
        parallel,
        waiting,
        agent,
        driven,
        nested,
        hostile,
        exporting,
        tearing,
        reading,
    )
}


def main() -> None:
    """Fork for each line, and say the child's id; the child writes what came of it to a file of its own."""
    global STORE, COUNTER
    for line in sys.stdin:
        args = json.loads(line)
        child = os.fork()
        if child == 0:
            STORE, COUNTER = args["store"], ("127.0.0.1", args["port"])
            try:
                said: Any = {"value": PROGRAMS[args["program"]](args)}
            except BaseException as exc:
                said = {"error": f"{type(exc).__name__}: {exc}", "where": traceback.format_exc()}
            with open(args["out"] + ".tmp", "w", encoding="utf-8") as file:
                json.dump(said, file)
            os.rename(args["out"] + ".tmp", args["out"])
            os._exit(0)
        print(child, flush=True)
        os.waitpid(child, os.WNOHANG)


if __name__ == "__main__":
    main()
