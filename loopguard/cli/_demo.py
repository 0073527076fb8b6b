"""``demo``: an agent on the real anthropic SDK, with a scripted model, runs into its limits; offline."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from loopguard._guard import Guard
from loopguard._loop import loop
from loopguard._what_if import what_if
from loopguard.budgets import Budget
from loopguard.cli._options import Json, Store
from loopguard.cli._output import emit, say
from loopguard.cli._runs import draw, shown
from loopguard.guardrails import ApproveTool, LoopLimit, MaxSteps
from loopguard.metering import PriceBook, meter
from loopguard.testing import MessagesServer, Reply

__all__ = ["demo"]

_TRACK = Reply.tool_use("track_parcel", {"parcel": "P-77"})
_SCRIPT = (
    Reply.tool_use("look_up_order", {"order": "A-1042"}),
    _TRACK,
    _TRACK,
    _TRACK,
    Reply.tool_use("issue_refund", {"order": "A-1042", "amount": 899}),
    Reply.tool_use("issue_refund", {"order": "A-1042", "amount": 50}),
    Reply.tool_use("search_depots", {"parcel": "P-77"}),
    "I have refunded what I was allowed to; a colleague decides about the rest.",
)


def _clerk(call: Any) -> bool | tuple[bool, str]:
    return True if call.arguments["amount"] <= 100 else (False, "more than $100 is a manager's decision")


def _play(store: str) -> str:
    """Run the agent; its run's id."""
    import anthropic

    policy = Guard(MaxSteps(20), LoopLimit(2), Budget(usd=0.30), ApproveTool(_clerk, only="issue_*"))

    @policy.tool(cost=0.01)
    def look_up_order(order: str) -> str:
        return f"{order}: a coffee machine, $899, parcel P-77"

    @policy.tool(cost=0.02)
    def track_parcel(parcel: str) -> str:
        return f"{parcel}: last scan in Leipzig, nine days ago"

    @policy.tool(cost=0.01, approve=True)
    def issue_refund(order: str, amount: int) -> str:
        return f"{amount} dollars are on their way for {order}"

    @policy.tool(cost=0.50)
    def search_depots(parcel: str) -> str:
        return f"{parcel} was found in Halle"

    tools: Any = policy.schemas()
    with MessagesServer(_SCRIPT) as server:
        direct = anthropic.DefaultHttpxClient(trust_env=False)
        client = anthropic.Anthropic(base_url=server.url, api_key="none needed", http_client=direct)
        model = meter(client, prices=PriceBook({"scripted": {"input": 1, "output": 5}}))

        @loop(max=10, until=lambda messages: messages[-1]["role"] == "assistant", guard=policy, store=store)
        def support(messages: list[Any]) -> list[Any]:
            reply = model.messages.create(model="scripted", max_tokens=200, tools=tools, messages=messages).to_dict()
            results = policy.run_tools(reply)
            said = {"role": "assistant", "content": reply["content"]}
            return [*messages, said, {"role": "user", "content": results}] if results else [*messages, said]

        return support.run([{"role": "user", "content": "Order A-1042 never came. I want my money back."}]).run_id


def demo(store: Store = None, json: Json = False) -> None:
    """Watch an agent run into its limits; offline, no key needed."""
    from loopguard import journal

    with tempfile.TemporaryDirectory() as folder:
        place = store or f"sqlite:///{Path(folder) / 'demo.db'}"
        run_id = _play(place)
        book = journal.open(place)
        stream = book.events(run_id)
        if json:
            emit({"run_id": run_id, "events": [shown(event) for event in stream]})
        else:
            draw(book, book.run(run_id), 60)
            say(f"\nWhat if it had been allowed three tool calls? {what_if(stream, Guard(MaxSteps(3)))}.")
            say("Each of the lines marked ✗ was refused before it ran, and the model was told why.")
            if store is not None:
                say(f"\nThe run is kept: loopguard show {run_id} --store {place}")
        book.close()
