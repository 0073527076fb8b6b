"""Exact amounts: integers of 1e-18 of a unit, whatever the caller's decimal context says."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from numbers import Rational
from typing import Any

from loopguard.exceptions import ConfigurationError

__all__ = ["COUNTED", "SCALE", "amount", "amounts", "costs", "decimal", "decimals", "money", "plain"]

SCALE = 10**18
COUNTED = ("steps", "tool_calls")
"""Units that nobody reports: every admitted call is one."""
_MAX_EXPONENT = 30  # no sane amount is larger, and a Decimal("1e999999999") must not fill the memory


def amount(value: Any, what: str) -> int:
    """The exact integer of 1e-18 for a number ≥ 0; anything finer is rounded up, never down.

    Raises ConfigurationError (a ValueError) for negative, infinite, NaN, bool and non-numbers.
    """
    exact: Decimal | None = None
    if type(value) is int:
        if 0 <= value < 10**_MAX_EXPONENT:
            return value * SCALE
    elif isinstance(value, Decimal):
        exact = value
    elif isinstance(value, float):
        exact = Decimal(float.__repr__(value))
    elif isinstance(value, Rational) and not isinstance(value, bool):
        numerator, denominator = int(value.numerator), int(value.denominator)
        if 0 <= numerator < denominator * 10**_MAX_EXPONENT:
            return -(-numerator * SCALE // denominator)
    if exact is not None and exact.is_finite() and not (exact.is_signed() and exact):
        _, digits, exponent = exact.as_tuple()
        assert isinstance(exponent, int)  # it is finite
        shift = exponent + 18
        if len(digits) + exponent <= _MAX_EXPONENT and len(digits) < 1000:
            number = int("".join(map(str, digits)))
            # 10**1000 is above every such number: what is finer still comes out as 1 just so
            scaled: int = number * 10**shift if shift >= 0 else -(-number // 10 ** min(-shift, 1000))
            return scaled
    closing = ")" if "(" in what else ""
    raise ConfigurationError(f"{what}={_shown(value)}{closing} is not an amount: give a finite number of at least 0")


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an int of {value.bit_length()} bits"  # Python refuses to write out the largest
    if isinstance(value, int | float | str | None | Decimal):
        return repr(value)[:60]
    return f"a {type(value).__name__}"


def amounts(values: Any, what: str) -> tuple[tuple[str, int], ...]:
    """A cost, either a number of USD or {unit: amount}, as ((unit, exact amount), …)."""
    if values is None:
        return ()
    if isinstance(values, Mapping):
        for unit in values:
            if not isinstance(unit, str) or not unit.isidentifier():
                raise ConfigurationError(f"{what} names the unit {unit!r}: a unit is a name such as usd or tokens")
        return tuple((unit, amount(value, f"{what} {unit}")) for unit, value in values.items() if value is not None)
    return (("usd", amount(values, what)),)


def costs(values: Any, what: str) -> tuple[tuple[str, int], ...]:
    """Like amounts, for what a call reserves or reports: never a unit that is counted anyway."""
    exact = amounts(values, what)
    for unit, _ in exact:
        if unit in COUNTED:
            raise ConfigurationError(
                f"{what} names the unit {unit}, which is counted by loopguard itself, call by call"
            )
    return exact


def decimal(exact: int) -> Decimal:
    """The Decimal of an exact amount, without trailing zeros."""
    whole, part = divmod(exact, SCALE)
    if not part:
        return Decimal(whole)
    return Decimal(f"{whole}.{part:018d}".rstrip("0"))  # construction from text ignores the context


def decimals(values: Mapping[str, int] | tuple[tuple[str, int], ...]) -> dict[str, Decimal]:
    """{unit: Decimal} of exact amounts."""
    return {unit: decimal(exact) for unit, exact in (values.items() if isinstance(values, Mapping) else values)}


def plain(exact: int, unit: str) -> str:
    """An amount as people write it: $0.25, 12 tokens; no exponent, no trailing zeros."""
    text = format(decimal(exact), "f")
    return f"${text}" if unit == "usd" else f"{text} {unit.replace('_', ' ')}"


def money(exact: int, unit: str) -> str:
    """Like plain, but USD with at least two decimals: $2.00."""
    text = plain(exact, unit)
    if unit != "usd":
        return text
    whole, _, part = text.partition(".")
    return f"{whole}.{part:0<2}"
