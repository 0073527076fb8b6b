"""PriceBook: what a model's tokens cost, exact, from your own table and from genai-prices."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from loopguard._amounts import amount, decimal
from loopguard._usage import Usage
from loopguard._warn import warn
from loopguard.exceptions import ConfigurationError
from loopguard.metering._reading import parts

__all__ = ["PriceBook", "PriceSource", "Rates", "Tariff"]

_MILLION = 10**6


@dataclass(frozen=True, slots=True)
class Rates:
    """Prices in 1e-18 USD: per million tokens, `web_search` per thousand searches."""

    input: int
    output: int
    cache_read: int
    cache_write_5m: int
    cache_write_1h: int
    web_search: int


@dataclass(frozen=True, slots=True)
class Tariff:
    """The rates of one model: of several tiers, the last whose start the prompt's tokens exceed."""

    tiers: tuple[tuple[int, Rates], ...]

    def cost(self, usage: Usage) -> int | None:
        """What this usage costs, in 1e-18 USD, rounded up; None where input or output is unknown."""
        prompt, output = usage.input_tokens, usage.output_tokens
        if prompt is None or output is None:
            return None
        rates = next((rates for start, rates in reversed(self.tiers) if prompt > start), self.tiers[0][1])
        read = usage.cache_read_tokens or 0
        write_5m = usage.cache_write_5m_tokens or 0
        write_1h = usage.cache_write_1h_tokens or 0
        total = (
            max(0, prompt - read - write_5m - write_1h) * rates.input
            + read * rates.cache_read
            + write_5m * rates.cache_write_5m
            + write_1h * rates.cache_write_1h
            + output * rates.output
        )
        if usage.inference_geo == "us":  # 10 % more for tokens: platform.claude.com/docs, pricing, data residency
            total += -(-total // 10)
        return -(-total // _MILLION) + -(-(usage.web_searches or 0) * rates.web_search // 1000)


class PriceSource(Protocol):
    """Where prices come from."""

    def tariff(self, model: str, *, batch: bool = False, fast: bool = False) -> Tariff | None:
        """The tariff of a model id, or None where its price is unknown."""


class PriceBook:
    """Prices of models: yours first, then those of genai-prices (extra ``prices``), if it is installed.

    - ``prices``: ``{"m": {"input": 3, "output": 15, "cache_read": 0.30, "cache_write_5m": 3.75,
      "cache_write_1h": 6, "web_search": 10}}`` in USD per million tokens, ``web_search`` in USD per 1,000;
      or the path of a JSON file of that shape. Only input and output are required: the others default to the
      usual 0.1, 1.25 and 2 times input, and 10. ``batch`` and ``fast`` may hold the prices of these modes;
      batch defaults to half price for tokens, fast is unknown without.
    - ``provider``: whose models genai-prices is asked for, by its own id: ``anthropic``, ``openai``, ``google``, …
    - ``stale_after``: days after which prices of genai-prices warn once that they are old; None for never.

    An id matches its own name, with a date (``-20240718``, ``@20240718``), ``-latest`` or Bedrock's region
    and version around it; any other suffix is another model, whose price is unknown.
    Source of the ratios: https://platform.claude.com/docs/en/about-claude/pricing
    Raises ConfigurationError for anything else.
    """

    def __init__(
        self,
        prices: Mapping[str, Mapping[str, Any]] | str | os.PathLike[str] | None = None,
        *,
        provider: str = "anthropic",
        stale_after: float | None = 90,
    ) -> None:
        if isinstance(prices, str | os.PathLike):
            prices = _read(Path(prices))
        if not isinstance(prices, Mapping | None):
            raise ConfigurationError(f"PriceBook({prices!r}): give {{model: {{'input': …, 'output': …}}}} or a path")
        self._table = {model: _Entry.of(model, entry) for model, entry in (prices or {}).items()}
        self._provider = provider
        self._stale_after = stale_after

    def tariff(self, model: str, *, batch: bool = False, fast: bool = False) -> Tariff | None:
        """The tariff of a model id, or None where its price is unknown."""
        entry = self._table.get(model) or self._table.get(_base(model))
        if entry is not None:
            return entry.batch if batch else entry.fast if fast else entry.standard
        found = _genai(model, self._provider, batch, fast, datetime.now(UTC).toordinal())
        if found is not None and self._stale_after is not None:
            _warn_if_stale(self._stale_after)
        return found

    def cost(self, model: str, usage: Any) -> Decimal | None:
        """USD for a `Usage`, or for the SDK's usage (an object or a dict); None where the price is unknown."""
        shares = [(model, usage)] if isinstance(usage, Usage) else parts(usage, model)
        exact = cost_of(self, shares)
        return None if exact is None else decimal(exact)


def cost_of(prices: PriceSource, shares: list[tuple[str, Usage]]) -> int | None:
    """What all shares cost together, in 1e-18 USD; None as soon as one of them is unknown."""
    total = 0
    for model, usage in shares:
        tariff = prices.tariff(model, batch=usage.service_tier == "batch", fast=usage.speed == "fast")
        exact = None if tariff is None else tariff.cost(usage)
        if exact is None:
            return None
        total += exact
    return total


# -- your own table --------------------------------------------------------------------------------

_FIELDS = tuple(field.name for field in fields(Rates))


@dataclass(frozen=True, slots=True)
class _Entry:
    standard: Tariff
    batch: Tariff
    fast: Tariff | None

    @classmethod
    def of(cls, model: str, entry: Any) -> _Entry:
        standard = _rates(model, entry, extra=("batch", "fast"))
        batch = _rates(model, entry["batch"]) if "batch" in entry else _halved(standard)
        fast = _flat(_rates(model, entry["fast"])) if "fast" in entry else None
        return cls(_flat(standard), _flat(batch), fast)


def _rates(model: str, entry: Any, extra: tuple[str, ...] = ()) -> Rates:
    if not isinstance(entry, Mapping) or not {"input", "output"} <= entry.keys() <= {*_FIELDS, *extra}:
        raise ConfigurationError(
            f"PriceBook: the prices of {model!r} are {entry!r}; give input and output, "
            f"and if you like {', '.join((*_FIELDS[2:], *extra))}"
        )
    return _filled({name: amount(entry[name], f"{model} {name}") for name in _FIELDS if name in entry})


def _filled(known: dict[str, int]) -> Rates:
    base = known["input"]
    usual = {
        "cache_read": base // 10,
        "cache_write_5m": base * 5 // 4,
        "cache_write_1h": base * 2,
        "web_search": amount(10, "web_search"),
    }
    return Rates(**{**usual, **known})


def _flat(rates: Rates) -> Tariff:
    return Tariff(((0, rates),))


def _halved(rates: Rates) -> Rates:
    """Batch prices: half for tokens, all for searches."""
    return Rates(*(getattr(rates, name) // (1 if name == "web_search" else 2) for name in _FIELDS))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"PriceBook: {path} can't be read as JSON: {exc}") from exc


# -- model ids -------------------------------------------------------------------------------------

_BEDROCK = re.compile(
    r"(?:(?:us|eu|apac|au|jp|ca|in|us-gov|global|regional)\.)?anthropic\.(.+?)(?:-v\d+(?::\w+)*)?", re.ASCII
)
_DATED = re.compile(r"(.+?)(?:[-@](?:20\d\d-?(?:0[1-9]|1[0-2])-?(?:0[1-9]|[12]\d|3[01])|latest|default))?", re.ASCII)


def _base(model: str) -> str:
    """The id without region, vendor, version and date: ``us.anthropic.m-20240718-v1:0`` is m."""
    name = model.rpartition("/")[2]
    bedrock = _BEDROCK.fullmatch(name)
    name = bedrock[1] if bedrock else name
    dated = _DATED.fullmatch(name)
    return dated[1] if dated else name


def _same(a: str, b: str) -> bool:
    return _words(_base(a)) == _words(_base(b))


def _words(name: str) -> tuple[list[str], list[str]]:
    """Words and numbers apart, for the same models are called claude-4-5-opus and claude-opus-4-5, 4 and 4-0."""
    tokens = re.split(r"[-.]", name.lower())
    numbers = [token for token in tokens if token.isdigit()]
    if len(numbers) > 1 and numbers[-1] == "0":
        numbers.pop()
    return sorted(token for token in tokens if not token.isdigit()), numbers


# -- genai-prices ----------------------------------------------------------------------------------


@lru_cache(1000)
def _genai(model: str, provider: str, batch: bool, fast: bool, day: int) -> Tariff | None:
    """What genai-prices knows of a model on one day: looked up by its rules, then held to the exact name."""
    info = _genai_model(model, provider)
    if info is None:
        return None
    now = datetime.fromordinal(day).replace(tzinfo=UTC)
    standard = info.get_prices(now)
    if standard.input_mtok is None or standard.output_mtok is None:
        return None
    if not (batch or fast):
        return _tariff(standard, provider)
    special = info.get_prices(now, {"processing": "batch"} if batch else {"speed": "fast"})
    if special != standard:
        return _tariff(special, provider)
    return Tariff(tuple((start, _halved(r)) for start, r in _tariff(standard, provider).tiers)) if batch else None


def _genai_model(model: str, provider: str) -> Any:
    try:
        import genai_prices
    except ImportError:
        return None
    providers: tuple[str, ...] = (provider,)
    if provider == "anthropic":  # its models are sold by others, too, under ids that tell
        bedrock = _BEDROCK.fullmatch(model.rpartition("/")[2])
        providers = ("google", "anthropic") if "@" in model else ("aws",) if bedrock else providers
    for seller in providers:
        try:
            info = genai_prices.calc_price(genai_prices.Usage(), model, provider_id=seller).model
        except LookupError:
            continue
        if _same(info.id, model):
            return info
    return None


def _tariff(prices: Any, provider: str) -> Tariff:
    """The tariff of a genai_prices ModelPrice."""
    names = {
        "input": "input_mtok",
        "output": "output_mtok",
        "cache_read": "cache_read_mtok",
        "cache_write_5m": "cache_write_mtok",
        "cache_write_1h": "cache_write_1h_mtok",
        "web_search": "web_searches_kcount",
    }
    found = {name: getattr(prices, key) for name, key in names.items()}
    found = {name: price for name, price in found.items() if price is not None}
    if (
        provider != "anthropic"
    ):  # whose ratios are no other vendor's: what has no price of its own costs as much as input
        found = {**dict.fromkeys(_FIELDS[2:5], found["input"]), **found}
    starts = sorted({0, *(tier.start for price in found.values() for tier in getattr(price, "tiers", ()))})
    return Tariff(tuple((start, _filled({n: amount(_at(p, start), n) for n, p in found.items()})) for start in starts))


def _at(price: Any, start: int) -> Any:
    reached = [tier.price for tier in getattr(price, "tiers", ()) if tier.start <= start]
    return reached[-1] if reached else getattr(price, "base", price)


_stale = threading.Lock()


def _warn_if_stale(days: float) -> None:
    """Warn once a process: the data came with the installed package, or from its updater."""
    if not _stale.acquire(blocking=False):  # looked at already
        return
    from genai_prices import data, data_snapshot

    snapshot = data_snapshot.get_snapshot()
    since = snapshot.timestamp.timestamp() if snapshot.from_auto_update else Path(data.__file__).stat().st_mtime
    age = (time.time() - since) / 86400
    if age > days:
        warn(
            f"the model prices of genai-prices are at least {age:.0f} days old: upgrade the package, run its "
            f"UpdatePrices, or give your own, PriceBook({{…}})"
        )
