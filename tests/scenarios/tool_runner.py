"""The anthropic SDK's tool_runner, against a scripted Messages API on 127.0.0.1."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
from anthropic import beta_async_tool, beta_tool

from loopguard import meter
from loopguard.testing import MessagesServer, Reply
from tests.scenarios.driver import MODEL, OUTPUT_TOKENS, PRICES, Agent, Driver, Result

__all__ = ["ToolRunner"]


class ToolRunner(Driver):
    """The SDK's own loop; the client is metered, the tools are wrapped."""

    name = "anthropic tool_runner"

    def run(self, agent: Agent) -> None:
        with _server(agent) as server, anthropic.Anthropic(**_client(server)) as client:
            meter(client, prices=PRICES).beta.messages.tool_runner(**_options(agent, beta_tool)).until_done()

    async def arun(self, agent: Agent) -> None:
        with _server(agent) as server:
            async with anthropic.AsyncAnthropic(**_client(server)) as client:
                runner = meter(client, prices=PRICES).beta.messages.tool_runner(**_options(agent, beta_async_tool))
                await runner.until_done()

    def stream(self, agent: Agent) -> None:
        with _server(agent) as server, anthropic.Anthropic(**_client(server)) as client:
            runner = meter(client, prices=PRICES).beta.messages.tool_runner(**_options(agent, beta_tool), stream=True)
            for stream in runner:
                stream.until_done()


def _server(agent: Agent) -> MessagesServer:
    def reply(body: dict[str, Any]) -> Reply:
        turn = agent.model(_results(body["messages"]))
        usage = {"input_tokens": 0, "output_tokens": OUTPUT_TOKENS}
        if isinstance(turn, str):
            return Reply.text(turn, usage=usage)
        blocks = [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in turn
        ]
        return Reply.blocks(*blocks, usage=usage)

    return MessagesServer(reply)


def _results(messages: list[dict[str, Any]]) -> list[Result]:
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    blocks = [block for content in contents for block in content if block["type"] == "tool_result"]
    return [Result(b["tool_use_id"], json.dumps(b["content"]), bool(b.get("is_error"))) for b in blocks]


def _client(server: MessagesServer) -> dict[str, Any]:
    return {"base_url": server.url, "api_key": "test", "max_retries": 0}


def _options(agent: Agent, decorate: Callable[..., Any]) -> dict[str, Any]:
    tools = [decorate(fn, name=name) for name, fn in agent.tools.items()]
    return {
        "model": MODEL,
        "max_tokens": OUTPUT_TOKENS,
        "messages": [{"role": "user", "content": "Go."}],
        "tools": agent.guard.wrap(tools),
        "thread": False,  # the whole history with each request
    }
