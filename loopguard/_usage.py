"""Usage: tokens and requests, with unknown kept apart from zero."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What model calls used. ``a + b`` adds up; None means *unknown* and is never counted as 0.

    Field names follow the Anthropic Messages API and the OpenTelemetry GenAI conventions.
    """

    tokens: int | None = None
    """Input and output together."""
    input_tokens: int | None = None
    """All input tokens, those read from or written to the cache included."""
    output_tokens: int | None = None
    """All output tokens, thinking included."""
    cache_read_tokens: int | None = None
    cache_write_5m_tokens: int | None = None
    cache_write_1h_tokens: int | None = None
    thinking_tokens: int | None = None
    web_searches: int | None = None
    web_fetches: int | None = None
    model_calls: int | None = None

    def __add__(self, other: Usage) -> Usage:
        if not isinstance(other, Usage):
            return NotImplemented
        return Usage(
            *(
                b if a is None else a if b is None else a + b
                for a, b in ((getattr(self, f), getattr(other, f)) for f in _FIELDS)
            )
        )


_FIELDS = tuple(field.name for field in fields(Usage))
