"""What a request is estimated at before it is sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopguard.metering._estimates import IMAGE_TOKENS, survey, tokens_of

EMPTY = survey({}).input_tokens


def said(content: Any) -> dict[str, Any]:
    """A body with one message."""
    return {"messages": [{"role": "user", "content": content}]}


@given(st.text())
def test_the_bound_is_a_token_for_every_two_bytes(text: str) -> None:
    """Of all texts that a model reads, wherever they stand."""
    size = len(text.encode("utf-8", "surrogatepass"))
    blocks = said([{"type": "tool_result", "content": [{"type": "text", "text": text}]}])
    for body in (said(text), blocks, {"system": text}, {"tools": [{"name": "t", "description": text}]}):
        assert survey(body).input_tokens >= tokens_of(size) + EMPTY


def test_an_image_has_a_price_of_its_own() -> None:
    """Not by its bytes, which the API scales down; a PDF by its bytes."""
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 1_000_000}
    assert survey(said([{"type": "image", "source": source}])).input_tokens < EMPTY + IMAGE_TOKENS + 100
    assert survey(said([{"type": "document", "source": source}])).input_tokens > 500_000


@pytest.mark.parametrize(
    ("body", "lifetime"),
    [
        (said("x"), None),
        (said([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]), "5m"),
        (said([{"type": "image", "source": {}, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]), "1h"),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, "1h"),
        ({"tools": [{"name": "t", "cache_control": {"type": "ephemeral", "ttl": "5m"}}]}, "5m"),
        ({"cache_control": None}, None),
    ],
)
def test_writes_into_the_cache_are_seen(body: dict[str, Any], lifetime: str | None) -> None:
    """They cost more than plain input, and the longer lifetime most."""
    assert survey(body).writes_cache == lifetime


def test_searches_are_seen() -> None:
    """As many as a tool may make, one where it has no bound; custom tools make none."""
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "web_search_20260209", "name": "web_search"},
        {"type": "web_fetch_20250910", "name": "web_fetch", "max_uses": 2},
        {"name": "web_search_mine"},
        {"type": "custom", "name": "other"},
    ]
    seen = survey({"tools": tools})
    assert (seen.web_searches, seen.web_fetches) == (6, 2)


def test_a_body_as_deep_as_it_likes_is_read() -> None:
    """No recursion: a tool's input may nest without end."""
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert survey(said(deep)).input_tokens > EMPTY


def test_numbers_and_gaps_are_read() -> None:
    """What isn't text counts as it is written; a lone surrogate is no error."""
    assert survey(said([1234, None, True, "\ud83d"])).input_tokens > EMPTY


@pytest.mark.parametrize("value", [None, 7, "x", {"a": 1}, [None, 3], [[]]])
def test_a_body_of_any_shape_is_looked_over(value: Any) -> None:
    """What is wrong with a request, the API says, not we."""
    body = dict.fromkeys(("tools", "messages", "system", "cache_control", "output_config"), value)
    assert survey(body).input_tokens >= EMPTY
