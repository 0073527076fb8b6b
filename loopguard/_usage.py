"""Usage: tokens and requests, with unknown kept apart from zero."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What model calls used. ``a + b`` adds up; None means *unknown* and is never counted as 0.

    Field names follow the Anthropic Messages API and the OpenTelemetry GenAI conventions.
    """

    tokens: int | None = None
    """Input and output together."""
    input_tokens: int | None = None
    """All input tokens, those read from or written to the cache included (the API's own field leaves them out)."""
    output_tokens: int | None = None
    """All output tokens, thinking included."""
    cache_read_tokens: int | None = None
    cache_write_5m_tokens: int | None = None
    cache_write_1h_tokens: int | None = None
    thinking_tokens: int | None = None
    web_searches: int | None = None
    web_fetches: int | None = None
    model_calls: int | None = None
    service_tier: str | None = None
    """standard, priority or batch; None in a sum over several."""
    speed: str | None = None
    """standard or fast; None in a sum over both."""
    inference_geo: str | None = None
    """Where the model ran, as the API says it; None in a sum over several."""

    def __add__(self, other: Usage) -> Usage:
        if not isinstance(other, Usage):
            return NotImplemented
        return Usage(*(_sum(getattr(self, field), getattr(other, field)) for field in _FIELDS))


def _sum(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, str):
        return a if a == b else None
    return a + b


_FIELDS = tuple(field.name for field in fields(Usage))
