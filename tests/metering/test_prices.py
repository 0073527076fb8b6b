"""Prices to the cent: your own table, ids, and genai-prices with its traps."""

from __future__ import annotations

import decimal
import json
import os
import time
import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any

import anthropic.types as types
import anthropic.types.beta as beta_types
import genai_prices
import pytest
from genai_prices import data

from loopguard import Usage
from loopguard.exceptions import ConfigurationError, LoopGuardWarning
from loopguard.metering import PriceBook, prices
from tests.metering.conftest import PRICES

BOOK = PriceBook({**PRICES, "m-mini": {"input": 1, "output": 2}})


@pytest.mark.parametrize(
    "model",
    [
        "m-mini",
        "m-mini-20240718",
        "m-mini@20240718",
        *(f"{region}.anthropic.m-mini-20240718-v1:0" for region in ("us", "eu", "apac", "au", "global")),
        "anthropic.m-mini-v2",
        "publishers/anthropic/models/m-mini@20240718",
        "arn:aws:bedrock:us-east-1:1234:inference-profile/us.anthropic.m-mini-20240718-v1:0",
    ],
)
def test_a_date_a_region_and_a_vendor_leave_a_model_what_it_is(model: str) -> None:
    """C25: such ids are priced like the model in the table."""
    assert BOOK.cost(model, Usage(input_tokens=1_000_000, output_tokens=0)) == 1


@pytest.mark.parametrize(
    "model",
    ["m.1", "m-nano", "m-ultra", "m-mini-ultra", "m-mini-2024", "m-mini-20241399", "mm", "M", "m-v1:0", "m ", ""],
)
def test_any_other_suffix_is_another_model(model: str) -> None:
    """C25: an unknown id is unknown, never the model whose name it begins with."""
    assert BOOK.tariff(model) is None
    assert BOOK.cost(model, Usage(input_tokens=1, output_tokens=1)) is None


@pytest.mark.parametrize(
    ("usage", "usd"),
    [
        # C28
        (
            {
                "input_tokens": 0,
                "output_tokens": 0,
                "cache_creation_input_tokens": 300_000,
                "cache_creation": {"ephemeral_5m_input_tokens": 200_000, "ephemeral_1h_input_tokens": 100_000},
            },
            "1.35",
        ),
        ({"input_tokens": 0, "output_tokens": 0, "cache_creation_input_tokens": 300_000}, "1.125"),
        (
            {
                "input_tokens": 0,
                "output_tokens": 0,
                "cache_creation": {"ephemeral_5m_input_tokens": 200_000, "ephemeral_1h_input_tokens": 100_000},
            },
            "1.35",
        ),
        # C30
        ({"input_tokens": 1000, "output_tokens": 100, "server_tool_use": {"web_search_requests": 3}}, "0.0345"),
        ({"input_tokens": 1000, "output_tokens": 100, "server_tool_use": None}, "0.0045"),
        ({"input_tokens": 1000, "output_tokens": 100}, "0.0045"),
        ({"input_tokens": 1000, "output_tokens": 100, "server_tool_use": {}}, "0.0045"),
        # C31
        ({"input_tokens": 0, "output_tokens": 136, "output_tokens_details": {"thinking_tokens": 31}}, "0.00204"),
        ({"input_tokens": 1000, "output_tokens": 1000, "service_tier": "batch"}, "0.009"),
        # C26
        ({"input_tokens": 20, "cache_read_input_tokens": 5, "output_tokens": 12}, "0.0002415"),
        # a batch pays half for tokens, all for searches
        (
            {
                "input_tokens": 1000,
                "output_tokens": 1000,
                "service_tier": "batch",
                "server_tool_use": {"web_search_requests": 1},
            },
            "0.019",
        ),
        ({"input_tokens": 1000, "output_tokens": 1000, "inference_geo": "us"}, "0.0198"),
        ({"input_tokens": 1000, "output_tokens": 1000, "inference_geo": "global", "speed": "standard"}, "0.018"),
    ],
)
def test_what_the_api_reports_has_one_price(usage: dict[str, Any], usd: str) -> None:
    """A dict and the SDK's own objects, stable and beta, cost the same."""
    assert BOOK.cost("m", usage) == Decimal(usd)
    for model in (types.Usage, beta_types.BetaUsage):
        assert BOOK.cost("m", model.construct(**usage)) == Decimal(usd)


def test_the_callers_decimal_context_changes_nothing() -> None:
    """A price has all its digits, however few the caller calculates with."""
    with decimal.localcontext(decimal.Context(prec=2)):
        assert BOOK.cost("m", {"input_tokens": 1_234_567, "output_tokens": 1}) == Decimal("3.703716")


def test_a_fraction_of_the_smallest_amount_is_rounded_up() -> None:
    """A price finer than 1e-18 USD never turns into nothing."""
    book = PriceBook({"m": {"input": Decimal("1e-18"), "output": 0}})
    assert book.cost("m", {"input_tokens": 1, "output_tokens": 0}) == Decimal("1e-18")


def test_iterations_outside_the_totals_are_paid_too() -> None:
    """Compactions at the model's price, an advisor at its own; the messages are in the totals already."""
    tokens = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    usage = {
        "input_tokens": 1000,
        "output_tokens": 100,
        "iterations": [
            {"type": "compaction", "input_tokens": 2000, "output_tokens": 10, **tokens},
            {"type": "message", "input_tokens": 1000, "output_tokens": 100, **tokens},
            {"type": "advisor_message", "model": "m-mini", "input_tokens": 500, "output_tokens": 50, **tokens},
        ],
    }
    want = Decimal("0.0045") + Decimal("0.00615") + Decimal("0.0006")
    assert BOOK.cost("m", usage) == want
    assert BOOK.cost("m", beta_types.BetaUsage.model_validate(usage)) == want
    usage["iterations"][2]["model"] = "nobody"
    assert BOOK.cost("m", usage) is None


@pytest.mark.parametrize(
    "usage",
    [
        {},
        {"input_tokens": 1},
        {"input_tokens": -1, "output_tokens": 1},
        None,
        {"input_tokens": True, "output_tokens": 1},
    ],
)
def test_unknown_usage_has_an_unknown_price(usage: Any) -> None:
    """Where the API doesn't say, or says nonsense, the cost is None, not 0."""
    assert BOOK.cost("m", usage) is None


def test_fast_mode_is_unknown_unless_it_has_a_price() -> None:
    """A mode that costs more isn't charged like the one that costs less."""
    usage = {"input_tokens": 1000, "output_tokens": 1000, "speed": "fast"}
    assert BOOK.cost("m", usage) is None
    book = PriceBook({"m": {"input": 3, "output": 15, "fast": {"input": 18, "output": 90}}})
    assert book.cost("m", usage) == Decimal("0.108")


def test_a_table_may_stand_in_a_json_file(tmp_path: Path) -> None:
    """The file has the shape of the table; its numbers stay exact."""
    file = tmp_path / "prices.json"
    file.write_text(json.dumps(PRICES), encoding="utf-8")
    assert PriceBook(file).cost("m", {"input_tokens": 1, "output_tokens": 1}) == Decimal("0.000018")
    assert PriceBook(str(file)).tariff("m") == BOOK.tariff("m")


@pytest.mark.parametrize(
    "table",
    [
        {"m": {"input": 3}},
        {"m": {"input": 3, "output": -1}},
        {"m": {"input": 3, "output": float("nan")}},
        {"m": {"input": 3, "output": 15, "cached": 1}},
        {"m": 3},
        [("m", 3)],
        {"m": {"input": 3, "output": 15, "batch": {"input": 1}}},
    ],
)
def test_a_wrong_table_is_refused(table: Any) -> None:
    """What is no price is a ConfigurationError, when the book is made."""
    with pytest.raises(ConfigurationError):
        PriceBook(table)


@pytest.mark.parametrize("text", ["{", '{"m": {"input": 3}}', "[]"])
def test_a_wrong_file_is_refused(text: str, tmp_path: Path) -> None:
    """So is a file that isn't such a table, or isn't there."""
    file = tmp_path / "prices.json"
    with pytest.raises(ConfigurationError):
        PriceBook(file)
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError):
        PriceBook(file)


# -- genai-prices and its traps --------------------------------------------------------------------

MILLION = {"input_tokens": 1_000_000, "output_tokens": 0}


@pytest.mark.parametrize(
    ("model", "usage", "usd"),
    [
        ("claude-opus-4-5", MILLION, "5"),
        ("claude-opus-4-5-20251101", MILLION, "5"),
        ("claude-opus-4-5", {"input_tokens": 0, "output_tokens": 1_000_000}, "25"),
        ("claude-3-5-haiku-latest", MILLION, "0.8"),
        ("claude-3-5-haiku-20241022", MILLION, "0.8"),
        ("claude-sonnet-4-20250514", MILLION, "3"),
        ("claude-opus-4-20250514", MILLION, "15"),
        ("claude-opus-4-1-20250805", MILLION, "15"),
        # its input has to include the cache: 1,000 fresh, 2,000 read, 3,000 and 4,000 written
        (
            "claude-opus-4-5",
            {
                "input_tokens": 1000,
                "output_tokens": 0,
                "cache_read_input_tokens": 2000,
                "cache_creation_input_tokens": 7000,
                "cache_creation": {"ephemeral_5m_input_tokens": 3000, "ephemeral_1h_input_tokens": 4000},
            },
            "0.06475",
        ),
        # batch prices need a context, and older models have none: half
        ("claude-opus-4-5", {**MILLION, "service_tier": "batch"}, "2.5"),
        ("claude-3-5-haiku-latest", {**MILLION, "service_tier": "batch"}, "0.4"),
        ("claude-opus-5", {**MILLION, "speed": "fast"}, "10"),
        # fees for searches are in the total alone
        (
            "claude-opus-4-5",
            {"input_tokens": 0, "output_tokens": 0, "server_tool_use": {"web_search_requests": 3}},
            "0.03",
        ),
        # all tokens of a long prompt cost more, and only above the line
        ("claude-haiku-5-5", {"input_tokens": 100_000, "output_tokens": 0}, "0.01"),
        ("claude-haiku-5-5", {"input_tokens": 100_001, "output_tokens": 0}, "0.0500005"),
        ("claude-haiku-5-5", {"input_tokens": 0, "cache_read_input_tokens": 200_000, "output_tokens": 10}, "0.010025"),
        # Bedrock has its own prices: dearer in a region
        ("global.anthropic.claude-sonnet-4-5-20250929-v1:0", MILLION, "3"),
        ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", MILLION, "3.3"),
        ("anthropic.claude-sonnet-4-5-20250929-v1:0", MILLION, "3.3"),
        ("eu.anthropic.claude-opus-4-5-20251101-v1:0", MILLION, "5.5"),
        # Vertex
        ("claude-sonnet-4@20250514", MILLION, "3"),
        ("claude-opus-4-1@20250805", MILLION, "15"),
        ("claude-haiku-4-5@20251001", MILLION, "1"),
    ],
)
def test_genai_prices_are_read_exactly(model: str, usage: dict[str, Any], usd: str) -> None:
    """Prices of models that no table of yours names."""
    assert PriceBook(stale_after=None).cost(model, usage) == Decimal(usd)


@pytest.mark.parametrize(
    "model",
    [
        "claude-opus-4-5-ultra",
        "claude-sonnet-4-5-20250929-ultra",
        "us.anthropic.claude-sonnet-4-5-20250929-ultra-v1:0",
        "claude-haiku-4-5x",
        "claude-opus-4-9",
        "claude-2.7",
        "gpt-4o",
        "xx.anthropic.claude-sonnet-4-5-20250929-v1:0",
    ],
)
def test_genai_prices_match_whole_names(model: str) -> None:
    """Its rules match beginnings; an unknown suffix is an unknown price all the same."""
    assert PriceBook(stale_after=None).cost(model, MILLION) is None


@pytest.mark.parametrize("model", ["claude-opus-4-5", "claude-haiku-5-5", "claude-sonnet-4-5", "claude-opus-5-5"])
def test_our_sums_are_those_of_genai_prices(model: str) -> None:
    """Where genai-prices is asked rightly, it comes to the same."""
    theirs = genai_prices.Usage(
        input_tokens=260_000,
        cache_read_tokens=50_000,
        cache_write_tokens=10_000,
        cache_write_1h_tokens=4_000,
        output_tokens=1_234,
        web_searches=2,
    )
    usage = Usage(
        input_tokens=260_000,
        cache_read_tokens=50_000,
        cache_write_5m_tokens=6_000,
        cache_write_1h_tokens=4_000,
        output_tokens=1_234,
        web_searches=2,
    )
    want = genai_prices.calc_price(theirs, model, provider_id="anthropic").total_price
    assert PriceBook(stale_after=None).cost(model, usage) == want


def test_your_table_goes_before() -> None:
    """A model in both has your price."""
    assert PriceBook({"claude-opus-4-5": {"input": 1, "output": 1}}).cost("claude-opus-4-5-20251101", MILLION) == 1


@pytest.mark.parametrize(("days", "warns"), [(100, True), (80, False)])
def test_old_data_warns_once(days: int, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that is at least 90 days old is worth a word, once in a process."""
    monkeypatch.setattr(prices, "_stale", prices.threading.Lock())
    age = Path(data.__file__).stat().st_mtime + days * 86400
    monkeypatch.setattr(time, "time", lambda: age)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PriceBook().cost("claude-opus-4-5", MILLION)
        PriceBook().cost("claude-opus-4-1", MILLION)
    assert [w.category for w in caught] == [LoopGuardWarning] * warns
    assert all(f"{days} days old" in str(w.message) for w in caught)


def test_an_empty_book_without_genai_prices_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is optional: without it only your table counts."""
    monkeypatch.setitem(__import__("sys").modules, "genai_prices", None)
    prices._genai.cache_clear()
    try:
        assert PriceBook().tariff("claude-opus-4-5") is None
        assert PriceBook(PRICES).tariff("m") is not None
    finally:
        prices._genai.cache_clear()


def test_a_path_like_object_is_a_path(tmp_path: Path) -> None:
    """Anything with `__fspath__` names a file."""

    class Named(os.PathLike[str]):
        def __fspath__(self) -> str:
            return str(tmp_path / "p.json")

    (tmp_path / "p.json").write_text(json.dumps(PRICES), encoding="utf-8")
    assert PriceBook(Named()).tariff("m") is not None
