"""Estimates of tokens before anybody has counted them, as an upper bound that is stated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["BYTES_PER_TOKEN", "Survey", "listed", "survey", "tokens_of"]

BYTES_PER_TOKEN = 2
"""The bound: no more than a token for every two bytes of UTF-8. English has three to five bytes a token, code
and Chinese two to three; runs of digits, base64 and rare scripts can have less than two."""
IMAGE_TOKENS = 5_000
"""More than any image costs after the API has scaled it down."""
_OVERHEAD = 50
_TOOLS_OVERHEAD = 1_000
"""The system prompt that tools bring along; for each tool of the API's own its definition, too."""


class Survey(NamedTuple):
    """What a request's body shows before it is sent."""

    input_tokens: int
    """At most so many, by the bound."""
    writes_cache: str | None
    """The longest lifetime of what it may write into the cache: ``5m``, ``1h`` or None."""
    web_searches: int
    web_fetches: int


def tokens_of(size: int) -> int:
    """At most so many tokens in a text of this many bytes."""
    return -(-size // BYTES_PER_TOKEN)


def listed(value: Any) -> list[dict[str, Any]]:
    """The objects of a list in a body, which may be anything: what is wrong with it, the API says."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def survey(body: Mapping[str, Any]) -> Survey:
    """Look over a request's body.

    The bound doesn't cover what the body only names: documents by URL or file id, and what the API's own
    tools fetch while they run.
    """
    tools = listed(body.get("tools"))
    own = [tool for tool in tools if tool.get("type", "custom") != "custom"]
    size, images, lifetimes = _walk([body.get(name) for name in ("system", "tools", "messages", "output_config")])
    lifetimes |= _lifetime(body)
    return Survey(
        tokens_of(size) + images * IMAGE_TOKENS + _OVERHEAD + _TOOLS_OVERHEAD * (bool(tools) + len(own)),
        "1h" if "1h" in lifetimes else "5m" if lifetimes else None,
        _uses(own, "web_search"),
        _uses(own, "web_fetch"),
    )


def _walk(root: Any) -> tuple[int, int, set[str]]:
    """Bytes of text, number of images, and lifetimes of cache marks; without recursion, for bodies may be deep."""
    size = images = 0
    lifetimes: set[str] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, str):
            size += len(node) if node.isascii() else len(node.encode("utf-8", "surrogatepass"))
        elif isinstance(node, dict):
            if "cache_control" in node:
                lifetimes |= _lifetime(node)
            if node.get("type") == "image":
                images += 1
            else:
                size += sum(len(str(name)) + 4 for name in node)
                todo.extend(node.values())
        elif isinstance(node, list | tuple):
            todo.extend(node)
        elif node is not None:
            size += len(str(node))
    return size, images, lifetimes


def _lifetime(node: Mapping[str, Any]) -> set[str]:
    mark = node.get("cache_control")
    return {str(mark.get("ttl", "5m"))} if isinstance(mark, dict) else set()


def _uses(tools: list[dict[str, Any]], kind: str) -> int:
    """How often tools of this kind may be used; one without max_uses counts once, for nothing bounds it."""
    uses = (tool.get("max_uses") for tool in tools if str(tool.get("type")).startswith(kind))
    return sum(n if type(n) is int and n > 0 else 1 for n in uses)
