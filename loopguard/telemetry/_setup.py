"""Sets up OpenTelemetry for programs that haven't done so, such that a dead collector holds nothing up."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from opentelemetry import metrics, trace

from loopguard.exceptions import ConfigurationError
from loopguard.telemetry._metrics import metrics_are_set

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["Telemetry", "configure_telemetry"]

_log = logging.getLogger("loopguard.telemetry")

_EXPORT_SECONDS = 3.0
"""For one export, its retries included; OpenTelemetry's own default is 10."""
_EXIT_SECONDS = 1.5
"""For delivering what is left when the process ends: with the interpreter's own exit that stays under two."""


class _Provider(Protocol):
    def force_flush(self) -> bool: ...

    def shutdown(self) -> None: ...


class Telemetry:
    """What `configure_telemetry` set up; empty if it left everything to others."""

    def __init__(self, *providers: _Provider) -> None:
        self._providers = providers
        self._start_closers()
        if providers:
            atexit.register(self._at_exit)
            if hasattr(os, "register_at_fork"):  # threads don't survive a fork, but the child has spans of its own
                os.register_at_fork(after_in_child=self._start_closers)

    def flush(self, timeout: float = 5.0) -> bool:
        """Send what was recorded so far; False if that took longer than `timeout` seconds or failed outright."""
        failed = threading.Event()

        def flush(provider: _Provider) -> None:
            try:
                provider.force_flush()
            except Exception:  # the SDK raises for readers that failed or timed out
                failed.set()

        return _join([_thread(flush, provider) for provider in self._providers], timeout) and not failed.is_set()

    def shutdown(self, timeout: float = 5.0) -> None:
        """Send what is left, within `timeout` seconds, and record no more. A second call does nothing.

        Happens by itself when the process ends, within 1.5 seconds.
        """
        atexit.unregister(self._at_exit)
        self._closing.set()
        if not _join(self._closers, timeout):
            _log.warning("telemetry could not be delivered within %g s; what is left is dropped", timeout)

    def _at_exit(self) -> None:
        self.shutdown(_EXIT_SECONDS)
        # A daemon thread that still logs while the interpreter goes down can crash it.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def _start_closers(self) -> None:
        # Threads, since the SDK's own shutdown waits for its exporter for up to half a minute, and a thread can
        # be left behind. Started now, since from Python 3.12 on an exiting process can't start one.
        self._closing = threading.Event()
        self._closers = [_thread(_close, provider, self._closing) for provider in self._providers]


def _close(provider: _Provider, when: threading.Event) -> None:
    when.wait()
    try:
        provider.shutdown()
    except Exception:  # the SDK raises for readers that failed or timed out
        _log.debug("shutting telemetry down failed", exc_info=True)


def _thread(target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="loopguard-telemetry", daemon=True)
    thread.start()
    return thread


def _join(threads: list[threading.Thread], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


_lock = threading.Lock()
_configured: Telemetry | None = None


def configure_telemetry(
    service_name: str | None = None, endpoint: str | None = None, console: bool = False
) -> Telemetry:
    """Send traces and metrics somewhere, in a program that has no OpenTelemetry set-up of its own.

    - ``endpoint``: the base URL of an OTLP/HTTP collector or of Jaeger (``http://localhost:4318``); needs the
      extra ``otlp``. Not given, ``OTEL_EXPORTER_OTLP_ENDPOINT`` counts, else that same local address, unless
      ``console`` is all that was asked for.
    - ``console``: draw each finished trace as a tree on stderr.
    - ``service_name``: what Jaeger lists it under; not given, ``OTEL_SERVICE_NAME`` counts.

    The standard ``OTEL_*`` variables hold (``OTEL_SDK_DISABLED``, ``OTEL_TRACES_EXPORTER=none``, samplers,
    batches, headers, timeouts). A provider that is already set is left alone, with a warning in the log;
    a second call changes nothing and returns what the first one did. Neither a call nor the end of the
    process waits for a collector that doesn't answer: what can't be delivered in 1.5 seconds is dropped.

    Raises ConfigurationError if the extra is missing or endpoint isn't an http(s) URL.
    """
    global _configured
    with _lock:
        if _configured is None:
            _configured = _configure(service_name, endpoint, console)
        return _configured


def _configure(service_name: str | None, endpoint: str | None, console: bool) -> Telemetry:
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigurationError(f"endpoint={endpoint!r}: give an http or https URL, such as http://localhost:4318")
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Telemetry()
    from opentelemetry.sdk.resources import Resource

    resource = Resource.create({"service.name": service_name} if service_name else None)
    # Both are built before either is set: a missing extra must not leave half a set-up behind.
    traces = _traces(resource, endpoint, console)
    meters = _meters(resource, endpoint, console)
    if traces is not None:
        trace.set_tracer_provider(traces)
    if meters is not None:
        metrics.set_meter_provider(meters)
    return Telemetry(*(provider for provider in (traces, meters) if provider is not None))


def _traces(resource: Resource, endpoint: str | None, console: bool) -> TracerProvider | None:
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        _log.warning("a TracerProvider is already set and is left alone: spans go where it sends them")
        return None
    otlp = _wants_otlp("TRACES", endpoint, console)
    if not (otlp or console):
        return None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if console:
        from loopguard.telemetry._console import ConsoleTree

        provider.add_span_processor(SimpleSpanProcessor(ConsoleTree()))
    if otlp:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as exc:
            raise _missing_extra() from exc
        exporter = OTLPSpanExporter(endpoint=_url(endpoint, "traces"), timeout=_timeout("TRACES"))
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _meters(resource: Resource, endpoint: str | None, console: bool) -> MeterProvider | None:
    if metrics_are_set() or isinstance(metrics.get_meter_provider(), metrics.NoOpMeterProvider):
        _log.warning("a MeterProvider is already set and is left alone: metrics go where it sends them")
        return None
    if not _wants_otlp("METRICS", endpoint, console):
        return None
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    try:
        from opentelemetry.exporter.otlp.proto.http import metric_exporter
    except ImportError as exc:
        raise _missing_extra() from exc
    logging.getLogger(metric_exporter.__name__).addFilter(_says_more_than_not_found)
    exporter = metric_exporter.OTLPMetricExporter(endpoint=_url(endpoint, "metrics"), timeout=_timeout("METRICS"))
    return MeterProvider([PeriodicExportingMetricReader(exporter)], resource, shutdown_on_exit=False)


def _wants_otlp(signal: str, endpoint: str | None, console: bool) -> bool:
    if os.environ.get(f"OTEL_{signal}_EXPORTER", "").strip().lower() == "none":
        return False
    named = endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return bool(named or os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")) or not console


def _url(endpoint: str | None, signal: str) -> str | None:
    """Where one signal goes; None leaves it to the exporter and its environment variables."""
    if endpoint is None:
        return None
    return f"{endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/{signal}"


def _timeout(signal: str) -> float | None:
    named = ("OTEL_EXPORTER_OTLP_TIMEOUT", f"OTEL_EXPORTER_OTLP_{signal}_TIMEOUT")
    return None if any(map(os.environ.get, named)) else _EXPORT_SECONDS


def _says_more_than_not_found(record: logging.LogRecord) -> bool:
    """Jaeger takes traces only: that it has no place for metrics isn't worth an error a minute."""
    return not (isinstance(record.args, tuple) and 404 in record.args)


def _missing_extra() -> ConfigurationError:
    return ConfigurationError(
        'sending telemetry over OTLP needs a package that isn\'t installed: pip install "loopguard-agents[otlp]"'
    )
