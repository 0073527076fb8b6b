"""The span processor behind `capture`: one for each provider, however often it is watched."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

__all__ = ["watching"]

Sink = Callable[[ReadableSpan], object]


class _Fan(SpanProcessor):
    """Hands every span that ends to whoever watches just then. A provider never lets go of a processor."""

    def __init__(self) -> None:
        self.sinks: tuple[Sink, ...] = ()

    def on_end(self, span: ReadableSpan) -> None:
        for sink in self.sinks:
            sink(span)


_fans: weakref.WeakKeyDictionary[TracerProvider, _Fan] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextlib.contextmanager
def watching(sink: Sink) -> Iterator[None]:
    """Call sink with every span of the global provider that ends; set a provider where there is none."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        yield
        return
    with _lock:
        if provider not in _fans:
            _fans[provider] = _Fan()
            provider.add_span_processor(_fans[provider])
        fan = _fans[provider]
        fan.sinks = (*fan.sinks, sink)
    try:
        yield
    finally:
        with _lock:
            fan.sinks = tuple(other for other in fan.sinks if other != sink)
