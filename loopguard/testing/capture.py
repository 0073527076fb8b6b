"""Capture of what happens in a stretch of a test: events, tool calls and spans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from loopguard._call import structural_copy
from loopguard._config import settings
from loopguard._events import Event, ToolFinished, ToolRefused, ToolStarted
from loopguard._pipeline import LOCK

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["Capture", "CapturedCall", "capture"]

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """One tool call, as far as it came."""

    id: str
    name: str
    run_id: str
    arguments: Mapping[str, Any]
    """Those that ran, or that were refused."""
    outcome: str
    """returned, raised, timed_out, cancelled, closed (a generator left early), refused, or running."""
    result: Any = None
    error: BaseException | None = None
    code: str | None = None
    """Of a refusal: ``max_steps``, ``approval_denied``, …"""
    reason: str | None = None
    attempts: int = 1


class Capture:
    """What was recorded so far. Payloads are copied when they are recorded, and not redacted."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        """In the order they happened."""
        self.spans: list[ReadableSpan] = []
        """In the order they ended; those of other libraries, too."""
        self._recording = True

    @property
    def calls(self) -> list[CapturedCall]:
        """The tool calls, in the order they were started or refused."""
        calls: list[CapturedCall] = []
        places: dict[tuple[str, str], int] = {}
        for event in self.events.copy():
            if isinstance(event, ToolStarted):
                key = event.run_id, event.call_id
                if event.attempt == 1:
                    places[key] = len(calls)
                    calls.append(CapturedCall(event.call_id, event.tool, event.run_id, event.arguments, "running"))
                calls[places[key]] = replace(calls[places[key]], outcome="running", attempts=event.attempt)
            elif isinstance(event, ToolFinished):
                place = places[event.run_id, event.call_id]
                end = {"outcome": event.outcome, "result": event.result, "error": event.error}
                calls[place] = replace(calls[place], **end)
            elif isinstance(event, ToolRefused) and not event.observed:
                call = CapturedCall(event.call_id, event.tool, event.run_id, event.arguments, "refused")
                calls.append(replace(call, code=event.code, reason=event.reason))
        return calls

    def events_of(self, kind: type[E]) -> list[E]:
        """The events of one class."""
        return [event for event in self.events if isinstance(event, kind)]

    def calls_of(self, name: str) -> list[CapturedCall]:
        """The calls of one tool."""
        return [call for call in self.calls if call.name == name]

    def spans_of(self, name: str) -> list[ReadableSpan]:
        """The spans of one name: ``execute_tool search``, ``invoke_agent improve``."""
        return [span for span in self.spans if span.name == name]

    def _on_event(self, event: Event) -> None:
        if self._recording:
            self.events.append(_snapshot(event))

    def _on_span(self, span: ReadableSpan) -> None:
        if self._recording:
            self.spans.append(span)


@contextlib.contextmanager
def capture() -> Iterator[Capture]:
    """Record what the runs that start inside do, in every thread and task of the process.

    with capture() as seen:
        improve(Draft())
    assert [call.outcome for call in seen.calls_of("search")] == ["returned", "refused"]

    Calls outside any run are recorded too. Spans need an SDK TracerProvider: where none is set, one is, for the
    rest of the process; another kind of provider gives none.
    """
    from loopguard.testing._spans import watching  # brings opentelemetry.sdk, which takes its time

    captured = Capture()
    with _listening(captured._on_event), watching(captured._on_span):
        try:
            yield captured
        finally:
            captured._recording = False  # runs that go on keep their listeners


@contextlib.contextmanager
def _listening(listener: Callable[[Event], object]) -> Iterator[None]:
    with LOCK:
        settings.listeners = (*settings.listeners, listener)
        settings.version += 1
    try:
        yield
    finally:
        with LOCK:
            settings.listeners = tuple(other for other in settings.listeners if other != listener)
            settings.version += 1


def _snapshot(event: Event) -> Event:
    """The event with its payloads as they are now: a body may go on to change what it was given."""
    payloads = {name: getattr(event, name, None) for name in ("arguments", "result", "value")}
    try:
        return replace(event, **{name: structural_copy(p) for name, p in payloads.items() if p is not None})
    except RecursionError:  # tuples nested thousands deep
        return event
