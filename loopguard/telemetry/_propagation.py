"""Trace context on its way to other processes, and to later ones through a journal."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from opentelemetry import baggage as bags
from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Link, Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from loopguard._run import Run, current_run
from loopguard.telemetry import _constants as names

__all__ = ["extract", "inject", "links_to", "traceparent"]

_trace_context = TraceContextTextMapPropagator()
_baggage = W3CBaggagePropagator()


def inject(carrier: MutableMapping[str, str], *, baggage: bool = False) -> None:
    """Write the current span's trace context into carrier (headers, say) as ``traceparent`` and ``tracestate``.

    Without a current span nothing is written. ``baggage=True`` also writes OpenTelemetry's baggage, and into
    it the current run's id (``loopguard.run.id``) and what is left of each limited unit
    (``loopguard.budget.remaining.usd``, in USD): whoever receives the carrier can read that. Source: W3C Trace
    Context, https://www.w3.org/TR/trace-context/, and W3C Baggage, https://www.w3.org/TR/baggage/
    """
    _trace_context.inject(carrier)
    if baggage:
        run = current_run()
        _baggage.inject(carrier, get_current() if run is None else _about(run, get_current()))


def _about(run: Run, context: Context) -> Context:
    context = bags.set_baggage(names.RUN_ID, run.id, context)
    for unit in {cap.unit for each in run.chain for cap in each.caps if not cap.partial}:
        context = bags.set_baggage(f"{names.BUDGET_REMAINING}.{unit}", format(run.remaining(unit), "f"), context)
    return context


def extract(carrier: Mapping[str, str], *, baggage: bool = False) -> Context:
    """The context that `inject` wrote into carrier, for ``opentelemetry.context.attach``: a run below goes on there.

    The case of header names doesn't matter. A missing or malformed ``traceparent`` gives a context without
    a span, never an error.
    """
    headers = {str(name).lower(): value for name, value in carrier.items() if isinstance(value, str)}
    found = _trace_context.extract(headers)
    return _baggage.extract(headers, found) if baggage else found


def traceparent(span: Span) -> str | None:
    """The span's identity as a text for the journal; None for no span."""
    carrier: dict[str, str] = {}
    _trace_context.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent")


def links_to(parent: str | None) -> tuple[Link, ...]:
    """A link to the span of such a text; none for None, and for what isn't one."""
    if parent is None:
        return ()
    earlier = trace.get_current_span(extract({"traceparent": parent})).get_span_context()
    return (Link(earlier),) if earlier.is_valid else ()
