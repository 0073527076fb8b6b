"""Draws finished traces as a tree on the console: durations, costs, refusals and why loops stopped."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from loopguard._tree import ASCII, BOXES, Marks, draw, marks_for, took
from loopguard.redaction import display
from loopguard.telemetry import _constants as names

__all__ = ["ConsoleTree", "render_tree"]


_WIDTH = 120
"""Characters of an error's description; the span has all of it."""


class ConsoleTree(SpanExporter):
    """Writes each trace as a tree once its root has ended. Meant for a `SimpleSpanProcessor`.

    ``stream`` is stderr as it is at the moment of writing, unless given. At most ``max_spans`` spans wait
    for their roots: beyond that the oldest trace is written as far as it is known, marked unfinished, and
    goes on as a new tree. So a loop that never ends is shown in parts, in bounded memory.
    """

    def __init__(self, stream: TextIO | None = None, *, max_spans: int = 2000) -> None:
        self._stream = stream
        self._max_spans = max_spans
        self._waiting: dict[int, list[ReadableSpan]] = {}
        self._count = 0
        # Reentrant: a garbage collection inside the lock may end the span of an abandoned generator.
        self._lock = threading.RLock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        written = [self._write(*tree) for span in spans for tree in self._finished_by(span)]
        return SpanExportResult.SUCCESS if all(written) else SpanExportResult.FAILURE

    def _finished_by(self, span: ReadableSpan) -> Iterable[tuple[list[ReadableSpan], bool]]:
        """The traces to write now that span has ended, each with whether it is complete."""
        trace_id = span.context.trace_id if span.context else 0
        with self._lock:
            self._waiting.setdefault(trace_id, []).append(span)
            self._count += 1
            if span.parent is None or span.parent.is_remote:
                return [(self._take(trace_id), True)]
            if self._count > self._max_spans:
                return [(self._take(next(iter(self._waiting))), False)]
        return []

    def _take(self, trace_id: int) -> list[ReadableSpan]:
        spans = self._waiting.pop(trace_id)
        self._count -= len(spans)
        return spans

    def _write(self, spans: list[ReadableSpan], complete: bool) -> bool:
        stream = self._stream or sys.stderr
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = render_tree(spans, ascii=marks_for(encoding) is ASCII)
        if not complete:
            text = f"(unfinished)\n{text}"
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            stream.flush()
        except (AttributeError, OSError, ValueError):  # no stderr at all, or a closed one
            return False
        return True

    def shutdown(self) -> None:
        with self._lock:
            rest, self._waiting, self._count = list(self._waiting.values()), {}, 0
        for spans in rest:
            self._write(spans, False)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def render_tree(spans: Iterable[ReadableSpan], *, ascii: bool = False) -> str:
    """The spans as a tree, a line each, children in the order in which they started; no newline at the end.

    A span whose parent isn't among them is drawn as a root. ``ascii`` avoids box characters.
    """
    marks = ASCII if ascii else BOXES
    ordered = sorted(spans, key=lambda span: span.start_time or 0)
    known = {span.context.span_id for span in ordered if span.context}
    children: dict[int | None, list[ReadableSpan]] = {}
    for span in ordered:
        above = span.parent.span_id if span.parent and span.parent.span_id in known else None
        children.setdefault(above, []).append(span)

    def below(span: ReadableSpan) -> list[ReadableSpan]:
        return children.get(span.context.span_id, []) if span.context else []

    return "\n".join(draw(children.get(None, []), below, lambda span: _line(span, marks), marks))


def _line(span: ReadableSpan, marks: Marks) -> str:
    seen = span.attributes or {}
    failed = span.status.status_code is StatusCode.ERROR
    parts = [display(span.name)]
    if (number := seen.get(names.LOOP_ITERATION_NUMBER)) is not None:
        parts[0] += f" #{display(str(number))}"
    if span.start_time is not None and span.end_time is not None:
        parts.append(took(span.end_time - span.start_time))
    if (cost := seen.get(names.CALL_COST)) is not None:
        parts.append(_cost(cost, seen.get(names.CALL_COST_CURRENCY, "USD")))
    if (iterations := seen.get(names.LOOP_ITERATIONS)) is not None:
        parts.append(f"{display(str(iterations))} iteration{'' if iterations == 1 else 's'}")
    if (reason := seen.get(names.LOOP_STOP_REASON)) is not None:
        parts.append(f"stopped: {display(str(reason))}")
    if (attempts := seen.get(names.CALL_ATTEMPTS)) is not None:
        parts.append(f"{display(str(attempts))} attempts")
    if (outcome := seen.get(names.APPROVAL_OUTCOME)) is not None:
        parts.append(display(str(outcome)))
    if seen.get(names.VERDICT_TYPE) == names.WARN:
        parts.append(f"warning: {display(str(seen.get(names.VERDICT_REASON)))}")
    if failed:
        parts.append(display(_why(str(seen.get(names.ERROR_TYPE) or ""), span.status.description or "")))
    return (marks.wrong if failed else "") + marks.between.join(parts)


def _why(kind: str, description: str) -> str:
    """``max_steps: the reason``; an exception's description begins with its class already."""
    if len(description) > _WIDTH:
        description = f"{description[: _WIDTH - 3].rstrip()}..."
    if not kind or (description and description.startswith(kind.rpartition(".")[2])):
        return description or "error"
    return f"{kind}: {description}" if description else kind


def _cost(cost: Any, currency: Any) -> str:
    amount = f"{cost:.10f}".rstrip("0").rstrip(".") if isinstance(cost, float) else display(str(cost))
    return f"${amount}" if currency == "USD" else f"{amount} {display(str(currency))}"
