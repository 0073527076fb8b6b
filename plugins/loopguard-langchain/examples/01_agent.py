"""A LangChain agent under a guard: it repeats itself, wants too much, and is told; then it answers.

Prints:

    searched for tea
    searched for tea
    searched for tea
    you are looping: search was already called 3 times with these same arguments and nothing new came of it
    refund was not approved: more than $100 is a manager's decision
    $50 refunded
    Done: $50 are on their way.
    4 of 20 tool calls, $0.04
"""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage

from loopguard import ApproveTool, Guard, MaxSteps
from loopguard_langchain import GuardMiddleware


def search(query: str) -> str:
    """Search the shop."""
    return f"searched for {query}"


def refund(amount: int) -> str:
    """Refund an amount in USD."""
    return f"${amount} refunded"


def clerk(call: Any) -> Any:  # a person, a policy engine, or a rule
    return call.arguments["amount"] <= 100 or (False, "more than $100 is a manager's decision")


class Model(GenericFakeChatModel):  # a model that has its answers ready, so that the example is offline
    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def turn(name: str, arguments: dict[str, Any], id: str) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": id}])


model = Model(
    messages=iter(
        [
            *[turn("search", {"query": "tea"}, f"search_{n}") for n in range(4)],
            turn("refund", {"amount": 5000}, "refund_1"),
            turn("refund", {"amount": 50}, "refund_2"),
            AIMessage("Done: $50 are on their way."),
        ]
    )
)
policy = Guard(
    MaxSteps(20),
    ApproveTool(clerk, only="refund"),
    tools={"search": {"cost": 0.01}, "refund": {"cost": 0.01, "approve": True}},
)
agent = create_agent(model, [search, refund], middleware=[GuardMiddleware(policy)])

with policy.scope("support") as run:
    state = agent.invoke({"messages": [("user", "I want my money back.")]})
    for message in state["messages"]:
        if isinstance(message, ToolMessage) or not getattr(message, "tool_calls", True):
            print(message.text.partition(", so it was not")[0].partition(". It did not run")[0])
    print(f"{run.steps} of 20 tool calls, ${run.spent()}")
