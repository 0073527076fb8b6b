"""Traces and metrics in OpenTelemetry's GenAI conventions: set up, and carried from process to process.

loopguard emits through the OpenTelemetry API, so an application that has a TracerProvider needs nothing
from here. One without calls `configure_telemetry` once.
"""

from __future__ import annotations

from loopguard._config import settings
from loopguard.telemetry._log import log_event, log_is_wanted
from loopguard.telemetry._measure import measure
from loopguard.telemetry._metrics import metrics_are_set
from loopguard.telemetry._propagation import extract, inject
from loopguard.telemetry._setup import Telemetry, configure_telemetry

__all__ = ["Telemetry", "configure_telemetry", "extract", "inject"]

settings.watchers = ((log_is_wanted, log_event), (metrics_are_set, measure))
