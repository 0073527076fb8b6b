"""Starts, attaches and ends spans for the rest of the package: observes everything, alters and raises nothing."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextvars import Token
from decimal import Decimal
from functools import cache
from typing import Any

from opentelemetry import context, trace
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer

from loopguard.exceptions import ToolCallRefused
from loopguard.redaction import redact, redact_error, redact_text
from loopguard.telemetry import _constants as names

__all__ = [
    "add_evaluation",
    "attach",
    "capture_content",
    "chat_is_traced",
    "clean_name",
    "content",
    "detach",
    "end_failed",
    "end_ok",
    "end_refused",
    "end_unanswered",
    "of_refusal",
    "provider_is_set",
    "sanitise",
    "start_clean_span",
    "start_span",
    "start_tool_span",
]

_log = logging.getLogger("loopguard.telemetry")

_probe = trace.ProxyTracerProvider().get_tracer
"""Looks at the global provider without reading the environment, unlike `trace.get_tracer` (a third of the time)."""

_tracer: Tracer = trace.get_tracer(names.SCOPE, names.VERSION, schema_url=names.SCHEMA_URL)
_recording = False
"""True from the moment that a provider was seen: OpenTelemetry lets it be set only once."""


def provider_is_set() -> bool:
    """Whether spans go anywhere: a TracerProvider was set, and the SDK isn't switched off."""
    return _recording or (type(_probe(names.SCOPE)) is not trace.ProxyTracer and _meet_provider())


def _meet_provider() -> bool:
    global _tracer, _recording
    tracer = _probe(names.SCOPE, names.VERSION, names.SCHEMA_URL)
    if isinstance(tracer, trace.NoOpTracer):
        return False
    _tracer, _recording = tracer, True
    return True


def start_tool_span(name: str, attributes: Mapping[str, Any], start_time_ns: int | None = None) -> Span:
    """The span of a call of the tool `name`, with all its attributes at once (setting them later costs more)."""
    return start_span(f"{names.EXECUTE_TOOL} {name}", attributes, start_time_ns=start_time_ns)


def start_clean_span(name: str, attributes: Mapping[str, Any], start_time_ns: int) -> Span:
    """`start_span` for a name and attributes that are known to be harmless, in less time."""
    try:
        # The context is looked up here, once: given None, the SDK looks it up three times.
        return _tracer.start_span(name, context.get_current(), SpanKind.INTERNAL, attributes, (), start_time_ns)
    except Exception:  # a sampler or span processor of the user's
        _log.debug("starting a span failed", exc_info=True)
        return trace.INVALID_SPAN


def start_span(
    name: str,
    attributes: Mapping[str, Any],
    kind: SpanKind = SpanKind.INTERNAL,
    start_time_ns: int | None = None,
    links: Sequence[Link] = (),
) -> Span:
    """A span below the current one, not made current. Hostile attribute values are sanitised, not raised about."""
    if not provider_is_set():
        return trace.INVALID_SPAN
    try:
        if not all(map(_is_clean, attributes.values())):
            attributes = sanitise(attributes)
        return _tracer.start_span(clean_name(name), None, kind, attributes, links, start_time_ns)
    except Exception:  # a sampler or span processor of the user's
        _log.debug("starting a span failed", exc_info=True)
        return trace.INVALID_SPAN


def attach(span: Span) -> Token[Any] | None:
    """Make span the current one in this thread or task, and get what `detach` wants.

    A span that was sampled out is attached too (its children must be left out with it); only one without
    a valid context isn't: that is what every span is when no provider is set.
    """
    if not span.get_span_context().is_valid:
        return None
    return context.attach(trace.set_span_in_context(span))


def detach(token: Token[Any] | None) -> None:
    """Undo `attach`. In another context than it was made in, where there is nothing to undo, do nothing.

    `opentelemetry.context.detach` would log an error there; generators are closed from anywhere.
    """
    if token is not None:
        try:
            token.var.reset(token)
        except (ValueError, RuntimeError):
            pass
        except AttributeError:  # a runtime context of the user's (OTEL_PYTHON_CONTEXT) with tokens of its own
            context.detach(token)


def end_ok(span: Span, end_time_ns: int | None = None, attributes: Mapping[str, Any] | None = None) -> None:
    """End a span whose work was done; its status stays unset."""
    _end(span, None, end_time_ns, attributes)


def end_refused(
    span: Span,
    refusal: ToolCallRefused,
    end_time_ns: int | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """End the span of a refused call: an error of the refusal's code, described by its reason."""
    if span.is_recording():
        told = {names.ERROR_TYPE: refusal.code, **of_refusal(refusal)}
        _end(span, _reason(refusal), end_time_ns, {**told, **(attributes or {})})


def end_failed(
    span: Span,
    exc: BaseException,
    end_time_ns: int | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """End the span of work that raised: CancelledError, KeyboardInterrupt and GeneratorExit count too."""
    if span.is_recording():
        kind = type(exc)
        where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        error = {names.ERROR_TYPE: f"{where}{kind.__qualname__}"}
        try:
            description = redact_error(exc)
        except Exception:  # a __str__ of the user's
            description = kind.__qualname__
        _end(span, description, end_time_ns, {**error, **(attributes or {})})


def end_unanswered(span: Span, code: str, end_time_ns: int | None = None) -> None:
    """End the span of a question that came to no answer."""
    _end(span, code, end_time_ns, {names.ERROR_TYPE: code})


def add_evaluation(
    span: Span, name: str, label: str, score: float | Decimal | None = None, explanation: str | None = None
) -> None:
    """Put the verdict of a judge or an evaluator on the span of its iteration, as an event."""
    if not span.is_recording():
        return
    try:
        event = {
            names.EVALUATION_NAME: name,
            names.EVALUATION_SCORE_LABEL: label,
            names.EVALUATION_SCORE_VALUE: score,
            names.EVALUATION_EXPLANATION: None if explanation is None else redact_text(explanation),
        }
        span.add_event(names.EVALUATION_RESULT, sanitise(event))
    except Exception:  # a span of another SDK, or a redact function of the user's
        _log.debug("adding an evaluation failed", exc_info=True)


def chat_is_traced() -> bool:
    """Whether the application's own instrumentation has a `chat` span open here: a second one would double its tokens.

    The API can't read a span back; SDK spans can, and others count as not being one.
    """
    span = trace.get_current_span()
    attributes = getattr(span, "attributes", None) if span.is_recording() else None
    return isinstance(attributes, Mapping) and attributes.get(names.OPERATION_NAME) == names.CHAT


def _end(span: Span, error: str | None, end_time_ns: int | None, attributes: Mapping[str, Any] | None) -> None:
    try:
        if not span.is_recording():  # ended already, perhaps by a finalizer; ending it twice would be logged
            return
        try:
            if attributes:
                span.set_attributes(sanitise(attributes))
            if error is not None:
                span.set_status(StatusCode.ERROR, _cut(error))
        finally:
            span.end(end_time_ns)
    except Exception:  # a span processor or exporter of the user's
        _log.debug("ending a span failed", exc_info=True)


def of_refusal(refusal: ToolCallRefused) -> dict[str, Any]:
    """The decision of the guardrail that refused."""
    return {
        names.GUARDRAIL_NAME: refusal.guardrail,
        names.VERDICT_TYPE: names.DENY,
        names.VERDICT_REASON: refusal.code,
    }


def _reason(refusal: ToolCallRefused) -> str:
    try:
        return redact_text(refusal.reason or str(refusal))
    except Exception:  # a subclass or a reason of the user's
        return refusal.code


# Values: what OpenTelemetry would log a traceback about, or drop a whole batch for, is made harmless first.

_LIMIT = 4096
"""Bytes of UTF-8 that one text may have."""
_MAX_INT = 2**63 - 1
_MAX_ITEMS = 128


def _is_clean(value: object) -> bool:
    if type(value) is str:
        return value.isascii() and len(value) <= _LIMIT
    if type(value) is int:
        return -_MAX_INT <= value <= _MAX_INT
    return type(value) is bool or type(value) is float


def clean_name(name: str) -> str:
    """A span's name that every exporter can encode."""
    return name if _is_clean(name) else _cut(name)


def sanitise(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The same attributes in values that every exporter can encode; those that are None are left out.

    Decimals become floats where that is exact, else text; integers beyond 63 bits become text, lone
    surrogates U+FFFD; texts are cut at 4 KiB, lists after 128 items; anything that isn't a plain value
    or a list of such becomes redacted, JSON-like text.
    """
    clean: dict[str, Any] = {}
    for name, value in attributes.items():
        if value is not None:
            clean[name] = value if _is_clean(value) else _harmless(value)
    return clean


def _harmless(value: Any) -> Any:
    try:
        if isinstance(value, bool):
            return bool(value)
        if isinstance(value, str):
            return _cut(str.__str__(value))
        if isinstance(value, bytes):
            return _cut(value[: _LIMIT + 1].decode(errors="replace"), len(value))
        if isinstance(value, int):
            return int.__index__(value) if -_MAX_INT <= value <= _MAX_INT else _cut(_digits(value))
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, Decimal):
            return _number(value)
        if isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value):
            return [item if _is_clean(item) else _harmless(item) for item in value[:_MAX_ITEMS]]
    except Exception:  # a class that only pretends to be one of these
        _log.debug("an attribute value of type %s is none", type(value).__name__, exc_info=True)
    return content(value)


def _digits(value: int) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses to write out more than 4,300 digits
        return hex(value)


def _number(value: Decimal) -> float | str:
    number = float(value) if value.is_finite() else math.inf
    return number if math.isfinite(number) and Decimal(repr(number)) == value else _cut(str(value))


def _cut(text: str, size: int | None = None) -> str:
    """Text as valid UTF-8 of at most 4 KiB; what was longer ends in a mark that says how long (size) it was."""
    head = text[: _LIMIT + 1].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    encoded = head.encode()
    size = len(text) if size is None else size
    if size <= _LIMIT and len(encoded) <= _LIMIT:
        return head
    mark = f"… [cut from {size:,}]"
    return encoded[: _LIMIT - len(mark.encode())].decode(errors="ignore") + mark


@cache
def capture_content() -> bool:
    """Whether arguments and results may stand in spans (off by default). The environment is read once."""
    mode = os.environ.get(names.CAPTURE_CONTENT, "").strip().upper()
    if mode not in ("", "NO_CONTENT", "SPAN_ONLY", "EVENT_ONLY", "SPAN_AND_EVENT"):
        _log.warning(
            "%s=%r is none of NO_CONTENT, SPAN_ONLY, EVENT_ONLY and SPAN_AND_EVENT: no content is captured",
            names.CAPTURE_CONTENT,
            mode,
        )
    return mode in ("SPAN_ONLY", "SPAN_AND_EVENT")


def content(value: Any) -> str:
    """Value as JSON-like text for a span: redacted first, then cut at 4 KiB. A text stays as it is."""
    try:
        shown = redact(value)
        if issubclass(type(shown), str):  # past a __class__ that only pretends
            shown = str.__str__(shown)
        else:
            shown = json.dumps(shown, ensure_ascii=False, default=_shown)
    except Exception:  # cycles, depth, keys that JSON doesn't know, and methods of the user's
        try:
            shown = redact_text(repr(value))
        except Exception:  # a __repr__ of the user's
            shown = f"<{type(value).__name__}>"
    return _cut(shown)


def _shown(value: Any) -> str:
    return redact_text(repr(value))
