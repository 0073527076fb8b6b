"""Metering: every model call reserved before, counted and priced after."""

from __future__ import annotations

from loopguard._usage import Usage
from loopguard.metering._meter import meter
from loopguard.metering.prices import PriceBook, PriceSource, Rates, Tariff

__all__ = ["PriceBook", "PriceSource", "Rates", "Tariff", "Usage", "meter"]
