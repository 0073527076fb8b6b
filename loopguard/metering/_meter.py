"""meter(client): a client whose model calls are metered."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from loopguard._config import settings
from loopguard.exceptions import ConfigurationError
from loopguard.metering.prices import PriceBook, PriceSource

__all__ = ["meter"]

C = TypeVar("C")


def meter(
    client: C,
    *,
    prices: PriceSource | Mapping[str, Mapping[str, Any]] | str | os.PathLike[str] | None = None,
    estimate: Callable[[Mapping[str, Any]], int] | Literal["count_tokens"] | None = None,
) -> C:
    """A client of the same class, each of whose model calls is reserved before it is sent, and settled after.

    Works for every client of the anthropic SDK, sync or async, also Bedrock's, Vertex's, AWS's and Foundry's;
    its ``with_options()`` and ``copy()`` stay metered. Calls outside any run pass through uncounted.

    - ``prices``: a PriceBook, or what makes one; default: that of ``configure(prices=…)``, else ``PriceBook()``.
    - ``estimate``: how the input tokens of a request are estimated. Default: one for every two bytes of text.
      ``"count_tokens"`` asks the API before each call (free, one more round trip; the default stands in where
      that fails). A function of the request's body gives its own count.

    Other middleware that sends requests of its own (fallbacks, say) has to stand on the client before.
    A call that doesn't fit raises BudgetExceeded; it is not retried. Raises ConfigurationError for what is
    no anthropic client.
    """
    from loopguard.metering._middleware import Meter

    existing = getattr(client, "middleware", None)
    if not hasattr(client, "with_middleware") or not isinstance(existing, tuple):
        raise ConfigurationError(f"meter({client!r}): give a client of the anthropic SDK (2.14 or newer)")
    if estimate is not None and estimate != "count_tokens" and not callable(estimate):
        raise ConfigurationError(f"meter(estimate={estimate!r}): give 'count_tokens' or a function of the body")
    if prices is None and estimate is None and any(isinstance(entry, Meter) for entry in existing):
        return client  # metered already, at its own prices
    given: Any = settings.prices if prices is None else prices
    source: PriceSource = given if hasattr(given, "tariff") else PriceBook(given)
    others = [entry for entry in existing if not isinstance(entry, Meter)]  # a call is never counted twice
    return client.with_options(middleware=[*others, Meter(source, estimate, client)])  # type: ignore[attr-defined,no-any-return]  # every SDK client has it
