"""Metering: every model call reserved before, counted and priced after."""

from __future__ import annotations

from loopguard._usage import Usage
from loopguard.metering._meter import meter
from loopguard.metering._model_call import MeteredCall, model_call
from loopguard.metering.prices import PriceBook, PriceSource, Rates, Tariff

__all__ = ["MeteredCall", "PriceBook", "PriceSource", "Rates", "Tariff", "Usage", "meter", "model_call"]
