"""Events as rows and back: a header, a payload that can be erased, and a chain of hashes over both."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from loopguard import _events as events
from loopguard._outcomes import LoopState, StopReason, Transition, Verdict
from loopguard._usage import Usage
from loopguard.exceptions import JournalError
from loopguard.journal._protocol import Row
from loopguard.journal._states import Delta, State

__all__ = ["Stored", "first_broken", "first_link", "next_link", "read_events", "write_event"]

PAYLOAD = frozenset(
    {
        "arguments",
        "digest",
        "error",
        "feedback",
        "items",
        "messages",
        "prompt",
        "reason",
        "response",
        "result",
        "value",
        "verdict",
    }
)
"""Fields of events that are payload: what people said and tools were given. The rest is the header."""

_KINDS: dict[str, type[events.Event]] = {
    kind.__name__: kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)
}
_FIELDS = {name: tuple(field.name for field in dataclasses.fields(kind)) for name, kind in _KINDS.items()}
_HEADERS = {name: tuple(field for field in fields if field not in PAYLOAD) for name, fields in _FIELDS.items()}
PAYLOADS = {name: tuple(field for field in fields if field in PAYLOAD) for name, fields in _FIELDS.items()}
"""The payload fields of each kind of event."""
_MISSING: dict[str, dict[str, Any]] = {
    name: {
        f.name: {} if f.name == "arguments" else None
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING
    }
    for name, kind in _KINDS.items()
}
"""What stands for a field without a default that isn't there: None isn't written down, and payloads may be erased."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A payload as it was read: plain JSON, or a state; `lost` says why it can't be what it was."""

    plain: Any = None
    state: State | None = None
    lost: str | None = None

    def text(self) -> bytes:
        """The JSON text."""
        from pydantic_core import to_json

        return self.state.text() if self.state is not None else to_json(self.plain)

    def show(self) -> Any:
        """As plain JSON data."""
        from pydantic_core import from_json

        return from_json(self.state.text()) if self.state is not None else self.plain


def first_link(run_id: str) -> bytes:
    """What the first event of a run is chained to."""
    return hashlib.sha256(b"loopguard journal\0" + run_id.encode()).digest()


def next_link(before: bytes, header: bytes, payload_hash: bytes) -> bytes:
    """The link of one event."""
    return hashlib.sha256(before + header + payload_hash).digest()


def _payload_hash(salt: bytes, payload: bytes, state: Delta | None) -> bytes:
    if state is None:
        return hashlib.sha256(salt + payload).digest()
    place = f"{state.base} {state.head} {state.tail} {len(payload)} ".encode()
    return hashlib.sha256(salt + place + payload + state.middle).digest()


def first_broken(run_id: str, rows: Iterable[Row]) -> int | None:
    """The number of the first event that is not what was written, or None."""
    before = first_link(run_id)
    for seq, row in enumerate(rows, 1):
        erased = row.payload is None or row.salt is None
        if row.seq != seq or row.digest != next_link(before, row.header, row.payload_hash):
            return seq
        if not erased and row.payload_hash != _payload_hash(row.salt or b"", row.payload or b"", row.state):
            return seq
        before = row.digest
    return None


def write_event(
    event: events.Event,
    seq: int,
    before: bytes,
    payload: Mapping[str, bytes],
    state: Delta | None,
    lost: Mapping[str, str],
) -> Row:
    """The row of an event; payload holds the JSON texts of its payload fields."""
    from pydantic_core import to_json

    fields: dict[str, Any] = {"event": type(event).__name__}
    for name in _HEADERS[type(event).__name__]:
        value = getattr(event, name)
        if value is not None:
            fields[name] = value
    if lost:
        fields["lost"] = lost
    header = to_json(fields, fallback=str, inf_nan_mode="strings")
    body = b"{" + b",".join(b'"%s":%s' % (name.encode(), text) for name, text in payload.items()) + b"}"
    salt = os.urandom(16)
    hashed = _payload_hash(salt, body, state)
    return Row(seq, header, body, salt, hashed, next_link(before, header, hashed), state)


def read_events(rows: Iterable[Row]) -> Iterator[events.Event]:
    """The events of a journal, in order. Those of kinds that this version doesn't know are left out."""
    states: dict[int, State] = {}
    for row in rows:
        if row.state is not None:
            base = None
            if row.state.base is not None:
                base = states.get(row.state.base)
                if base is None:
                    raise JournalError(f"event {row.seq} builds on a state that is not there: the journal is damaged")
            states[row.seq] = State(row.state, base)
        event = read_event(row, states.get(row.seq))
        if event is not None:
            yield event


def read_event(row: Row, state: State | None) -> events.Event | None:
    """The event of a row, payloads as Stored; None for a kind that this version doesn't know."""
    from pydantic_core import from_json

    try:
        fields: dict[str, Any] = from_json(row.header)
        payload: dict[str, Any] = from_json(row.payload) if row.payload is not None else {}
    except ValueError as exc:
        raise JournalError(f"event {row.seq} can't be read, the journal is damaged: {exc}") from None
    kind = _KINDS.get(fields.pop("event", ""))
    if kind is None:
        return None
    lost: dict[str, str] = fields.pop("lost", {})
    known = _HEADERS[kind.__name__]
    made = {name: _READ.get(name, _same)(value) for name, value in fields.items() if name in known}
    for name, value in payload.items():
        made[name] = value if name in _TEXTS else Stored(value, None, lost.get(name))
    if "verdict" in payload:
        said = payload["verdict"]
        made["verdict"] = Verdict(said["passed"], said["reason"], Stored(said["value"], None, lost.get("verdict")))
    if state is not None:
        made["value"] = Stored(None, state, lost.get("value"))
    fields_of = _FIELDS[kind.__name__]
    return kind(**{**_MISSING[kind.__name__], **{name: made[name] for name in made if name in fields_of}})


def _same(value: Any) -> Any:
    return value


def _amounts(value: Mapping[str, str]) -> dict[str, Decimal]:
    return {unit: Decimal(text) for unit, text in value.items()}


def _transition(value: Mapping[str, Any]) -> Transition:
    return Transition(
        LoopState(value["source"]), LoopState(value["target"]), value["trigger"], value["iteration"], value["at"]
    )


_TEXTS = ("feedback", "prompt", "reason", "digest")
_READ: dict[str, Any] = {
    "charged": _amounts,
    "reserved": _amounts,
    "amounts": _amounts,
    "cost": Decimal,
    "spent": Decimal,
    "usage": lambda value: Usage(**value),
    "steps": tuple,
    "stop_reason": StopReason,
    "transition": _transition,
}
