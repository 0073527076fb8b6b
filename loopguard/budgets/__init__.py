"""Budgets: reserve, settle, release."""

from __future__ import annotations

from loopguard.budgets.budget import Budget

__all__ = ["Budget"]
