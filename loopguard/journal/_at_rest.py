"""At rest: payloads, states and mail as they lie in a store, through the user's codec where there is one."""

from __future__ import annotations

import hashlib

from loopguard._config import Codec
from loopguard.exceptions import JournalError
from loopguard.redaction import redact_error

__all__ = ["decode", "encode", "letter", "read_letter"]

_TAG = 16
_MARK = b"\0"
"""What mail that went through a codec begins with, and plain mail, which is JSON, never does."""


def encode(codec: Codec, data: bytes, place: bytes) -> bytes:
    """What is stored of data: to be read in this place alone, so that it can't be moved to another.

    JournalError where the codec fails.
    """
    try:
        stored = codec.encode(_tag(place) + data)
    except Exception as exc:  # the codec is the user's
        raise JournalError(f"the codec {codec.name!r} could not encode: {redact_error(exc)}") from exc
    if not isinstance(stored, bytes):
        raise JournalError(f"the codec {codec.name!r} encoded to a {type(stored).__name__}: it has to be bytes")
    return stored


def decode(codec: Codec | None, name: str, stored: bytes, place: bytes, what: str) -> bytes:
    """What was encoded by the codec of this name. JournalError where it is another, or another's key."""
    if codec is None or codec.name != name:
        there = "there is none" if codec is None else f"this one is {codec.name!r}"
        raise JournalError(
            f"{what} was written with the codec {name!r}, and {there}: give that one to configure(codec=…), or to "
            f"journal.open(url, codec=…)"
        )
    try:
        data = codec.decode(stored)
    except Exception as exc:  # the codec is the user's
        raise JournalError(
            f"the codec {name!r} could not decode {what} ({type(exc).__name__}): it has another key than the one that "
            f"wrote it, or the store was changed"
        ) from exc
    if not isinstance(data, bytes) or data[:_TAG] != _tag(place):
        raise JournalError(
            f"what the codec {name!r} made of {what} was not written there: it has another key than the one that wrote "
            f"it, or the store was changed"
        )
    return data[_TAG:]


def letter(codec: Codec | None, body: bytes, name: str) -> bytes:
    """Mail of this name as it is stored."""
    if codec is None:
        return body
    return _MARK + codec.name.encode() + _MARK + encode(codec, body, name.encode())


def read_letter(codec: Codec | None, stored: bytes, name: str) -> bytes:
    """Stored mail in plain; empty where it can't be read: whoever has left that has said nothing."""
    if not stored.startswith(_MARK):
        return stored
    named, _, data = stored[1:].partition(_MARK)
    try:
        return decode(codec, named.decode("utf-8", "replace"), data, name.encode(), f"the mail {name}")
    except JournalError:
        return b""


def _tag(place: bytes) -> bytes:
    return hashlib.sha256(place).digest()[:_TAG]
