"""Traces and metrics in OpenTelemetry's GenAI conventions: set up, and carried from process to process.

loopguard emits through the OpenTelemetry API, so an application that has a TracerProvider needs nothing
from here. One without calls `configure_telemetry` once.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from loopguard._config import settings
from loopguard.telemetry._log import log_event, log_is_wanted
from loopguard.telemetry._measure import measure
from loopguard.telemetry._metrics import metrics_are_set
from loopguard.telemetry._setup import Telemetry, configure_telemetry

__all__ = ["Telemetry", "configure_telemetry", "extract", "inject"]

settings.watchers = ((log_is_wanted, log_event), (metrics_are_set, measure))
_trace_context = TraceContextTextMapPropagator()
_baggage = W3CBaggagePropagator()


def inject(carrier: MutableMapping[str, str], *, baggage: bool = False) -> None:
    """Write the current span's trace context into carrier (headers, say) as ``traceparent`` and ``tracestate``.

    Without a current span nothing is written. ``baggage=True`` also writes OpenTelemetry's baggage, which
    whoever receives the carrier can read. Source: W3C Trace Context, https://www.w3.org/TR/trace-context/
    """
    _trace_context.inject(carrier)
    if baggage:
        _baggage.inject(carrier)


def extract(carrier: Mapping[str, str], *, baggage: bool = False) -> Context:
    """The context that `inject` wrote into carrier, for ``opentelemetry.context.attach``.

    The case of header names doesn't matter. A missing or malformed ``traceparent`` gives a context without
    a span, never an error.
    """
    headers = {str(name).lower(): value for name, value in carrier.items() if isinstance(value, str)}
    found = _trace_context.extract(headers)
    return _baggage.extract(headers, found) if baggage else found
