"""What passes between LangChain and loopguard as data: requests, answers, usage, results of tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain.agents.middleware import ModelRequest, ModelResponse
from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ToolMessage,
    message_to_dict,
    messages_from_dict,
)
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.types import Command

from loopguard import Usage

__all__ = [
    "ToolFailed",
    "data_of_request",
    "data_of_response",
    "max_tokens_of",
    "model_of",
    "pack",
    "response_of",
    "unpack",
    "usage_of",
]

# -- tools -----------------------------------------------------------------------------------------


class ToolFailed(Exception):
    """A tool failed, and LangChain made a message of that. To loopguard the call has raised."""

    def __init__(self, text: str, message: ToolMessage | None = None) -> None:
        super().__init__(text)
        self.message = message


def pack(output: Any) -> Any:
    """What a tool gave, as loopguard compares and records it: without the ids, which differ each time."""
    if not isinstance(output, ToolMessage):
        return output
    if output.status == "error":
        raise ToolFailed(output.text, output)
    return output.model_dump(exclude={"id", "tool_call_id"})


def unpack(result: Any, request: ToolCallRequest) -> ToolMessage | Command[Any]:
    """What `pack` was given, bound to this call."""
    if isinstance(result, dict):
        return ToolMessage(**result, tool_call_id=request.tool_call["id"])
    command: Command[Any] = result
    return command


# -- the model -------------------------------------------------------------------------------------

_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_VENDORS = {
    "amazon_bedrock": "aws",
    "azure": "azure",
    "google_genai": "google",
    "google_vertexai": "google",
    "mistralai": "mistral",
}
"""LangChain's names of vendors, as genai-prices calls them where that differs."""


def model_of(model: Any) -> tuple[str, str]:
    """(name, vendor) of a chat model, as LangChain's own tracing calls them."""
    # a model that is configured at run time doesn't have it
    params: dict[str, Any] = getattr(model, "_get_ls_params", dict)()
    provider = params.get("ls_provider") or ""
    return params.get("ls_model_name") or provider or type(model).__name__, _VENDORS.get(provider, provider)


def max_tokens_of(request: ModelRequest[Any], otherwise: int | None) -> int | None:
    """The most output tokens that this call may have; None where nobody says."""
    model = request.model
    profile = getattr(model, "profile", None) or {}
    said = [request.model_settings.get(name) for name in _OUTPUT_LIMITS]
    said += [getattr(model, name, None) for name in _OUTPUT_LIMITS]
    said += [otherwise, profile.get("max_output_tokens")]
    return next((limit for limit in said if isinstance(limit, int) and limit > 0), None)


def data_of_request(request: ModelRequest[Any]) -> dict[str, Any]:
    """The request as JSON data, without ids that differ each time."""
    return {
        "system": request.system_message.content if request.system_message is not None else "",
        "messages": [_data_of_message(message) for message in request.messages],
        "tools": [tool if isinstance(tool, dict) else convert_to_openai_tool(tool) for tool in request.tools],
        "tool_choice": request.tool_choice,
        "model_settings": request.model_settings,
    }


def _data_of_message(message: BaseMessage) -> dict[str, Any]:
    data: dict[str, Any] = {"role": message.type, "content": message.content}
    for name in ("name", "tool_calls", "tool_call_id"):
        if value := getattr(message, name, None):
            data[name] = value
    return data


def _answers(response: ModelResponse[Any]) -> Iterator[AIMessage]:
    return (message for message in response.result if isinstance(message, AIMessage))


def usage_of(response: ModelResponse[Any]) -> tuple[Usage | None, str | None]:
    """(what a response used, None where it doesn't say; the model that answered, if it says)."""
    total: Usage | None = None
    model = None
    for message in _answers(response):
        model = message.response_metadata.get("model_name") or model
        said = _counts(message.usage_metadata)
        if "input_tokens" not in said or "output_tokens" not in said:
            return None, model
        read = _counts(message.usage_metadata, "input_token_details")
        written = _counts(message.usage_metadata, "output_token_details")
        cached = [read[name] for name in ("cache_creation", "ephemeral_5m_input_tokens") if name in read]
        usage = Usage(
            input_tokens=said["input_tokens"],
            output_tokens=said["output_tokens"],
            cache_read_tokens=read.get("cache_read"),
            cache_write_5m_tokens=sum(cached) if cached else None,
            cache_write_1h_tokens=read.get("ephemeral_1h_input_tokens"),
            thinking_tokens=written.get("reasoning"),
        )
        total = usage if total is None else total + usage
    return total, model


def _counts(said: Any, name: str | None = None) -> dict[str, int]:
    """The numbers of tokens in a usage, or in one of its details: of what an integration says only counts count."""
    given = said if isinstance(said, dict) else {}
    if name is not None:
        return _counts(given.get(name))
    return {key: value for key, value in given.items() if type(value) is int and value >= 0}


def data_of_response(response: ModelResponse[Any]) -> dict[str, Any] | None:
    """The response as JSON data; None where it holds an object of the program's own, which isn't data."""
    if response.structured_response is not None:
        return None
    return {"messages": [message_to_dict(message) for message in response.result]}


def response_of(data: dict[str, Any]) -> ModelResponse[Any]:
    """What `data_of_response` was given."""
    return ModelResponse(result=messages_from_dict(data["messages"]))
