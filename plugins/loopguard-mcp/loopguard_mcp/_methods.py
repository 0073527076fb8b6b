"""What the proxy passes on: the methods that it knows, and what sides may tell each other that they can do.

Source: the Model Context Protocol's schemas, 2024-11-05 to 2026-07-28. What a later revision adds isn't passed
on before somebody has thought about it here. Tasks aren't: their calls end where no guard looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp import MCPError
from mcp_types import CLIENT_CAPABILITIES_META_KEY, INVALID_REQUEST

from loopguard import telemetry

__all__ = [
    "AGENT_NOTIFICATIONS",
    "AGENT_REQUESTS",
    "SAMPLING",
    "SERVER_NOTIFICATIONS",
    "SERVER_REQUESTS",
    "check_input_requests",
    "client_params",
    "server_result",
    "traced",
]

SAMPLING = "sampling/createMessage"

AGENT_REQUESTS = frozenset(
    {
        "completion/complete",
        "initialize",
        "logging/setLevel",
        "ping",
        "prompts/get",
        "prompts/list",
        "resources/list",
        "resources/read",
        "resources/subscribe",
        "resources/templates/list",
        "resources/unsubscribe",
        "server/discover",
        "subscriptions/listen",
        "tools/call",
        "tools/list",
    }
)
AGENT_NOTIFICATIONS = frozenset(
    {
        "notifications/cancelled",
        "notifications/initialized",
        "notifications/progress",
        "notifications/roots/list_changed",
    }
)
SERVER_REQUESTS = frozenset({"elicitation/create", "ping", "roots/list", SAMPLING})
SERVER_NOTIFICATIONS = frozenset(
    {
        "notifications/cancelled",
        "notifications/elicitation/complete",
        "notifications/message",
        "notifications/progress",
        "notifications/prompts/list_changed",
        "notifications/resources/list_changed",
        "notifications/resources/updated",
        "notifications/subscriptions/acknowledged",
        "notifications/tools/list_changed",
    }
)
CLIENT_CAPABILITIES = frozenset({"elicitation", "roots", "sampling"})
SERVER_CAPABILITIES = frozenset({"completions", "logging", "prompts", "resources", "tools"})


def client_params(method: str, params: dict[str, Any] | None, sampling: bool) -> dict[str, Any] | None:
    """The parameters of a request as the server gets them: without capabilities that aren't passed on."""
    if params is None:
        return None
    known = CLIENT_CAPABILITIES if sampling else CLIENT_CAPABILITIES - {"sampling"}
    if method == "initialize":
        params = {**params, "capabilities": _only(params.get("capabilities"), known)}
    meta = params.get("_meta")
    if isinstance(meta, Mapping) and CLIENT_CAPABILITIES_META_KEY in meta:
        kept = _only(meta[CLIENT_CAPABILITIES_META_KEY], known)
        params = {**params, "_meta": {**meta, CLIENT_CAPABILITIES_META_KEY: kept}}
    return params


def server_result(method: str, result: dict[str, Any]) -> dict[str, Any]:
    """A result as the agent gets it: without capabilities that aren't passed on."""
    if method in ("initialize", "server/discover"):
        return {**result, "capabilities": _only(result.get("capabilities"), SERVER_CAPABILITIES)}
    return result


def traced(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters with the current span in their ``_meta``, where the SDK's servers look for it."""
    carrier: dict[str, str] = {}
    telemetry.inject(carrier)
    return {**params, "_meta": {**(params.get("_meta") or {}), **carrier}} if carrier else params


def check_input_requests(result: Mapping[str, Any]) -> None:
    """Raise MCPError for a result that asks for sampling: since 2026-07-28 servers ask in results."""
    asked = result.get("inputRequests")
    wanted = asked.values() if isinstance(asked, Mapping) else ()
    if any(isinstance(request, Mapping) and request.get("method") == SAMPLING for request in wanted):
        raise MCPError(INVALID_REQUEST, "the server asked for sampling, which loopguard mcp-proxy denies")


def _only(capabilities: Any, known: frozenset[str]) -> dict[str, Any]:
    given = capabilities if isinstance(capabilities, Mapping) else {}
    return {name: value for name, value in given.items() if name in known}
