"""Exact amounts: what counts as one, what it is worth, and how it is written."""

from __future__ import annotations

import decimal as decimals_module
import math
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Context, Decimal, localcontext
from enum import IntEnum
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopguard._amounts import SCALE, amount, amounts, costs, decimal, money, plain
from loopguard.exceptions import ConfigurationError

SIGNALS = (
    decimals_module.Inexact,
    decimals_module.Rounded,
    decimals_module.Subnormal,
    decimals_module.Clamped,
    decimals_module.Overflow,
    decimals_module.Underflow,
    decimals_module.InvalidOperation,
    decimals_module.DivisionByZero,
    decimals_module.FloatOperation,
)
HOSTILE = [
    Context(prec=1, Emax=1, Emin=-1, clamp=1, traps=list(SIGNALS)),
    Context(prec=1, rounding=decimals_module.ROUND_DOWN, traps=[]),
    Context(prec=3, Emax=0, Emin=0, rounding=decimals_module.ROUND_UP, traps=[]),
    Context(prec=28, traps=[decimals_module.Inexact, decimals_module.FloatOperation]),
]


class Few(IntEnum):
    """An int that isn't exactly one."""

    THREE = 3


@contextmanager
def hostile(context: Context) -> Iterator[None]:
    """A decimal context of the caller's that would spoil any arithmetic done in it."""
    with localcontext(context) as inner:
        yield
        assert not any(inner.flags.values()), "the caller's context isn't even flagged"


@pytest.mark.parametrize("context", HOSTILE)
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (0.0125, "0.0125"),
        (1e-7, "0.0000001"),
        (12345678901234567890, "12345678901234567890"),
        (Decimal("1.10"), "1.1"),
        (Decimal("1E+3"), "1000"),
        (Decimal("-0"), "0"),
        (-0.0, "0"),
        (Fraction(1, 8), "0.125"),
        (Few.THREE, "3"),
        (1e29, "100000000000000000000000000000"),
    ],
)
def test_an_amount_is_exact_in_any_decimal_context(context: Context, value: object, text: str) -> None:
    """A float counts as the number it is written as, whatever precision and traps the caller has set."""
    with hostile(context):
        exact = amount(value, "x")
        back = decimal(exact)
        written = plain(exact, "usd")
    assert Fraction(exact, SCALE) == Fraction(text)
    assert Fraction(back) == Fraction(text)
    assert written == f"${text}"


@pytest.mark.parametrize(
    "value",
    [
        -5,
        -1e-9,
        math.nan,
        math.inf,
        -math.inf,
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("-Infinity"),
        Decimal("-0.01"),
        Fraction(-1, 3),
        True,
        False,
        None,
        "1.00",
        b"1",
        1j,
        [1],
        object(),
        10**5000,
        10**31,
        1e300,
        Decimal("1e999999999"),
        Decimal("1" * 2000),
        Fraction(10**40),
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) or value < 10**100 else "huge",
)
@pytest.mark.parametrize("context", [HOSTILE[0], Context()])
def test_what_is_no_amount_is_refused(context: Context, value: object) -> None:
    """Negative, infinite, NaN, bool, absurdly large and non-numeric values are ConfigurationErrors that name it."""
    with hostile(context), pytest.raises(ConfigurationError, match=r"^Budget\(usd=.*\) is not an amount"):
        amount(value, "Budget(usd")


def test_what_is_finer_than_the_grain_is_rounded_up() -> None:
    """An endless fraction never comes out as less than it is, and nothing above 0 as 0."""
    assert amount(Fraction(1, 3), "x") == 333333333333333334
    assert amount(Decimal("1e-19"), "x") == amount(5e-324, "x") == amount(Decimal("1e-99999999"), "x") == 1
    assert amount(Decimal("1.0000000000000000001"), "x") == SCALE + 1


def test_a_cost_is_usd_or_names_its_units() -> None:
    """A bare number is USD; units left None are left out."""
    assert amounts(2, "x") == (("usd", 2 * SCALE),)
    assert amounts({"credits": 7, "usd": None}, "x") == (("credits", 7 * SCALE),)
    assert amounts({}, "x") == amounts(None, "x") == ()


@pytest.mark.parametrize("unit", [1, "", "two words", None, ("usd",), "3d"])
def test_a_unit_is_a_name(unit: object) -> None:
    """What can't be a keyword of Budget can't be a unit."""
    with pytest.raises(ConfigurationError, match="names the unit"):
        amounts({unit: 1}, "x")


@pytest.mark.parametrize("unit", ["steps", "tool_calls"])
def test_what_loopguard_counts_itself_can_not_be_charged(unit: str) -> None:
    """Steps are counted, once a call: a reported one would be a second book."""
    with pytest.raises(ConfigurationError, match="counted by loopguard"):
        costs({unit: 1}, "x")
    assert amounts({unit: 1}, "x") == ((unit, SCALE),), "as a cap, or to read it, the unit is as good as any"


@given(st.decimals(min_value=0, max_value=10**12, places=6, allow_nan=False), st.sampled_from(HOSTILE))
def test_amounts_survive_the_way_there_and_back(value: Decimal, context: Context) -> None:
    """Decimal to integer to Decimal loses nothing and writes no exponent and no trailing zero."""
    with hostile(context):
        back = decimal(amount(value, "x"))
        text = plain(amount(value, "x"), "credits")
    assert Fraction(back) == Fraction(value)
    number, _, unit = text.partition(" ")
    assert unit == "credits"
    assert Fraction(number) == Fraction(value)
    assert "E" not in number.upper()
    assert number == "0" or not ("." in number and number.endswith("0"))


@given(st.floats(min_value=0, max_value=1e29, allow_nan=False), st.lists(st.integers(0, 10**9), max_size=5))
def test_a_float_counts_as_it_is_written(value: float, others: list[int]) -> None:
    """0.1 is a tenth, not the binary fraction next to it, and sums of amounts are exact."""
    written = Fraction(repr(value))
    exact = amount(value, "x")
    assert 0 <= exact - written * SCALE < 1
    assert sum(amount(n, "x") for n in others) == sum(others) * SCALE


def test_money_has_at_least_two_decimals() -> None:
    """A sentence about USD reads like a price; other units stay plain."""
    assert [money(amount(v, "x"), "usd") for v in (0, 2, 0.5, 0.1234)] == ["$0.00", "$2.00", "$0.50", "$0.1234"]
    assert money(3 * SCALE, "input_tokens") == "3 input tokens"
