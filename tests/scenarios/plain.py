"""Plain Python: a hand-written agent that leaves the dispatch of its tools to the guard."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from loopguard import Usage
from loopguard.metering import model_call
from tests.scenarios.driver import MODEL, OUTPUT_TOKENS, PRICES, Agent, Driver, Result

__all__ = ["Plain"]


class Plain(Driver):
    """The loop is a `while`; the model is a function."""

    name = "plain Python"
    unsupported: ClassVar = {"*/stream": "a loop of your own streams as you write it"}

    def run(self, agent: Agent) -> None:
        tools = list(agent.guard.wrap(agent.tools).values())
        results: list[dict[str, Any]] = []
        while True:
            with model_call(MODEL, {"messages": results}, max_tokens=OUTPUT_TOKENS, prices=PRICES) as call:
                turn = agent.model(map(_result, results))
                call.settle(Usage(input_tokens=0, output_tokens=OUTPUT_TOKENS))
            if isinstance(turn, str):
                return
            results += agent.guard.run_tools(_message(turn), tools)

    async def arun(self, agent: Agent) -> None:
        tools = list(agent.guard.wrap(agent.tools).values())
        results: list[dict[str, Any]] = []
        while True:
            async with model_call(MODEL, {"messages": results}, max_tokens=OUTPUT_TOKENS, prices=PRICES) as call:
                turn = agent.model(map(_result, results))
                call.settle(Usage(input_tokens=0, output_tokens=OUTPUT_TOKENS))
            if isinstance(turn, str):
                return
            results += await agent.guard.arun_tools(_message(turn), tools)


def _message(turn: list[Any]) -> dict[str, Any]:
    blocks = [{"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in turn]
    return {"role": "assistant", "content": blocks}


def _result(block: dict[str, Any]) -> Result:
    content = block["content"]
    text = content if isinstance(content, str) else json.dumps(content)
    return Result(block["tool_use_id"], text, bool(block.get("is_error")))
