"""Budgets: reserve, settle, release."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopguard.budgets._memory import MemoryLedger
from loopguard.budgets._open import Standing, spend
from loopguard.budgets.budget import Budget

if TYPE_CHECKING:
    from loopguard.budgets._sqlite import SqliteLedger

__all__ = ["Budget", "MemoryLedger", "SqliteLedger", "Standing", "spend"]


def __getattr__(name: str) -> object:
    """`SqliteLedger` is loaded when it is first asked for."""
    if name == "SqliteLedger":
        from loopguard.budgets._sqlite import SqliteLedger

        return SqliteLedger
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
