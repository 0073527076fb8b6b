"""Events as rows and back: a header, a payload that can be erased, and a chain of hashes over both."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from loopguard import _events as events
from loopguard._config import Codec
from loopguard._outcomes import LoopState, StopReason, Transition, Verdict
from loopguard._usage import Usage
from loopguard.exceptions import JournalError
from loopguard.journal._at_rest import decode, encode
from loopguard.journal._codec import parsed
from loopguard.journal._protocol import Row
from loopguard.journal._states import Delta, State

__all__ = ["Stored", "first_broken", "first_link", "next_link", "plain", "read_events", "write_event"]

PAYLOAD = frozenset(
    {
        "arguments",
        "digest",
        "error",
        "feedback",
        "items",
        "master_key",
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


def plain(value: Any) -> Any:
    """A payload as plain JSON data, or whatever it is."""
    return value.show() if isinstance(value, Stored) else value


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
        try:
            whole = row.seq == seq and row.digest == next_link(before, row.header, row.payload_hash)
            if whole and row.payload is not None and row.salt is not None:  # not erased
                whole = row.payload_hash == _payload_hash(row.salt, row.payload, row.state)
        except TypeError:  # a text, say, where bytes were
            whole = False
        if not whole:
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
    codec: Codec | None = None,
) -> Row:
    """The row of an event: payload holds the JSON texts of its payload fields, lost says why some can't come back.

    A codec's work is bound to the row's number and header, and lies under the chain, which covers what is stored.
    """
    from pydantic_core import to_json

    fields: dict[str, Any] = {"event": type(event).__name__}
    for name in _HEADERS[type(event).__name__]:
        value = getattr(event, name)
        if value is not None:
            fields[name] = value
    if codec is not None:
        fields["codec"] = codec.name
    header = to_json(fields, fallback=str, inf_nan_mode="strings")
    texts = {**payload, "lost": to_json(lost)} if lost else payload
    body = b"{" + b",".join(b'"%s":%s' % (name.encode(), text) for name, text in texts.items()) + b"}"
    if codec is not None:
        place = _place(seq, header)
        body = encode(codec, body, place)
        if state is not None:
            state = dataclasses.replace(state, middle=encode(codec, state.middle, place + _shared(state)))
    salt = os.urandom(16)
    hashed = _payload_hash(salt, body, state)
    return Row(seq, header, body, salt, hashed, next_link(before, header, hashed), state)


def _place(seq: int, header: bytes) -> bytes:
    return b"%d " % seq + header


def _shared(state: Delta) -> bytes:
    return f" {state.base} {state.head} {state.tail}".encode()


def _in_plain(row: Row, name: str, codec: Codec | None, run_id: Any) -> Row:
    """The row as it was before the codec of this name."""
    place, what = _place(row.seq, row.header), f"event {row.seq} of {run_id}"
    payload, state = row.payload, row.state
    if payload is not None:
        payload = decode(codec, name, payload, place, what)
    if state is not None:
        state = dataclasses.replace(state, middle=decode(codec, name, state.middle, place + _shared(state), what))
    return dataclasses.replace(row, payload=payload, state=state)


def read_events(
    rows: Iterable[Row], codec: Codec | None = None, states: dict[int, State] | None = None
) -> Iterator[events.Event]:
    """The events of a journal, in order. Those of kinds that this version doesn't know are left out.

    JournalError for a journal that is damaged, and one that was written with another codec. ``states``: those of the
    rows before, for who reads on where he was.
    """
    states = {} if states is None else states
    for row in rows:
        fields = _read_json(row, row.header)
        if "codec" in fields:
            row = _in_plain(row, fields["codec"], codec, fields.get("run_id"))
        if row.state is not None:
            base = None
            if row.state.base is not None:
                base = states.get(row.state.base)
                if base is None:
                    raise JournalError(f"event {row.seq} builds on a state that is not there: the journal is damaged")
            states[row.seq] = State(row.state, base)
        event = read_event(row, fields, states.get(row.seq))
        if event is not None:
            yield event


def _read_json(row: Row, text: bytes) -> dict[str, Any]:
    try:
        data: dict[str, Any] = parsed(text)
        return data
    except ValueError as exc:
        raise JournalError(f"event {row.seq} can't be read, the journal is damaged: {exc}") from None


def read_event(row: Row, fields: dict[str, Any], state: State | None) -> events.Event | None:
    """The event of a row in plain, its header read, payloads as Stored; None for a kind that isn't known here."""
    payload = _read_json(row, row.payload) if row.payload is not None else {}
    kind = _KINDS.get(fields.pop("event", ""))
    if kind is None:
        return None
    lost: dict[str, str] = payload.pop("lost", None) or fields.pop("lost", {})  # once, it stood in the header
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


_TEXTS = ("feedback", "prompt", "reason", "digest", "master_key")
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
