"""LangChain's create_agent under loopguard-langchain, with a chat model that is scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import StructuredTool

from loopguard_langchain import GuardMiddleware
from tests.scenarios.driver import MODEL, OUTPUT_TOKENS, PRICES, Agent, Driver, Result

__all__ = ["LangChain"]

INPUT = {"messages": [("user", "Go.")]}
CONFIG: Any = {"recursion_limit": 1_000}


class LangChain(Driver):
    """The agent's loop is LangGraph's; tools run in its threads or tasks."""

    name = "LangChain"

    def run(self, agent: Agent) -> None:
        _graph(agent).invoke(INPUT, CONFIG)

    async def arun(self, agent: Agent) -> None:
        await _graph(agent).ainvoke(INPUT, CONFIG)

    def stream(self, agent: Agent) -> None:
        for _ in _graph(agent).stream(INPUT, CONFIG, stream_mode="messages"):
            pass


class ScriptedChatModel(BaseChatModel):
    """Asks a function of the messages for its next one."""

    model: str = MODEL
    max_tokens: int = OUTPUT_TOKENS
    say: Callable[[list[BaseMessage]], AIMessage]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        """Tools are the script's own business."""
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.say(messages))])

    def _stream(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        message = self.say(messages)
        for call in message.tool_calls or [None]:
            chunk = AIMessageChunk(content="" if call else message.content, tool_calls=[call] if call else [])
            yield ChatGenerationChunk(message=chunk)
        yield ChatGenerationChunk(message=AIMessageChunk(content="", usage_metadata=message.usage_metadata))


def _graph(agent: Agent) -> Any:
    def say(messages: list[BaseMessage]) -> AIMessage:
        turn = agent.model(
            Result(message.tool_call_id, message.text, message.status == "error")
            for message in messages
            if isinstance(message, ToolMessage)
        )
        usage: Any = {"input_tokens": 0, "output_tokens": OUTPUT_TOKENS, "total_tokens": OUTPUT_TOKENS}
        if isinstance(turn, str):
            return AIMessage(turn, usage_metadata=usage)
        calls = [{"name": call.name, "args": dict(call.arguments), "id": call.id} for call in turn]
        return AIMessage("", tool_calls=calls, usage_metadata=usage)

    tools = [_tool(fn, name) for name, fn in agent.tools.items()]
    return create_agent(ScriptedChatModel(say=say), tools, middleware=[GuardMiddleware(agent.guard, prices=PRICES)])


def _tool(fn: Callable[..., Any], name: str) -> StructuredTool:
    from inspect import iscoroutinefunction

    which = {"coroutine": fn} if iscoroutinefunction(fn) else {"func": fn}
    return StructuredTool.from_function(**which, name=name)
