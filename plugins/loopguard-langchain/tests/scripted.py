"""A chat model that says what a test has scripted, and agents around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from loopguard import Guard
from loopguard_langchain import GuardMiddleware

PRICES = {"m": {"input": 1, "output": 1000}}
"""An output token costs $0.001, and each turn writes ten."""
USAGE: Any = {"input_tokens": 0, "output_tokens": 10, "total_tokens": 10}
INPUT: Any = {"messages": [("user", "Go.")]}


class Scripted(BaseChatModel):
    """Gives its messages in order, or what a function of the conversation gives; counts how often it is asked."""

    model: str = "m"
    max_tokens: int | None = 10
    script: Any
    asked: list[Any] = []  # noqa: RUF012  # pydantic copies it

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _next(self, messages: list[BaseMessage]) -> AIMessage:
        self.asked.append(list(messages))
        check_pairs(messages)
        said = self.script(messages) if callable(self.script) else self.script[len(self.asked) - 1]
        if isinstance(said, Exception):
            raise said
        return said if isinstance(said, AIMessage) else AIMessage(said, usage_metadata=USAGE)

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._next(messages))])

    def _stream(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        message = self._next(messages)
        for call in message.tool_calls:
            yield ChatGenerationChunk(message=AIMessageChunk("", tool_calls=[call]))
        for word in message.text.split():
            yield ChatGenerationChunk(message=AIMessageChunk(word + " "))
        yield ChatGenerationChunk(message=AIMessageChunk("", usage_metadata=message.usage_metadata))


def check_pairs(messages: Sequence[BaseMessage]) -> None:
    """Every tool call has exactly one answer, and every answer a call."""
    calls = [call["id"] for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
    answers = [message.tool_call_id for message in messages if isinstance(message, ToolMessage)]
    assert sorted(map(str, calls)) == sorted(answers)


def calls(*made: tuple[str, dict[str, Any]], usage: Any = USAGE, turn: str = "1") -> AIMessage:
    """A turn that calls tools: (name, arguments) each."""
    ids = range(len(made))
    tool_calls = [{"name": made[i][0], "args": made[i][1], "id": f"call_{turn}_{i}"} for i in ids]
    return AIMessage("", tool_calls=tool_calls, usage_metadata=usage)


def agent_of(
    script: Any, tools: Sequence[Callable[..., Any] | Any], guard: Guard | None = None, **options: Any
) -> tuple[Any, Scripted]:
    """(an agent under GuardMiddleware, its model)."""
    model = options.pop("model", None) or Scripted(script=script)
    middleware = [*options.pop("before", ()), GuardMiddleware(guard, prices=PRICES, **options.pop("guarded", {}))]
    return create_agent(model, list(tools), middleware=middleware, **options), model


def answers(state: Any) -> list[ToolMessage]:
    """The tool messages of a state."""
    return [message for message in state["messages"] if isinstance(message, ToolMessage)]
