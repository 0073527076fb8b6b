"""JSON Lines: journals as text, one record a line; a torn last line never eats the next record."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loopguard.exceptions import JournalError
from loopguard.journal._protocol import Row
from loopguard.journal._states import Delta

__all__ = ["TORN", "line", "read_export", "records"]


def line(run_id: str, row: Row) -> bytes:
    record: dict[str, Any] = {
        "run_id": run_id,
        "seq": row.seq,
        "header": row.header.decode(),
        "payload": None if row.payload is None else _text(row.payload),
        "salt": None if row.salt is None else row.salt.hex(),
        "payload_hash": row.payload_hash.hex(),
        "digest": row.digest.hex(),
    }
    if row.state is not None:
        state = row.state
        record["state"] = [state.base, state.head, state.tail, base64.b64encode(state.middle).decode()]
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _text(payload: bytes) -> str | dict[str, str]:
    """As it is, or where a codec made bytes of it that are no text, in base64."""
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(payload).decode()}


def _bytes(payload: str | dict[str, str]) -> bytes:
    return payload.encode() if isinstance(payload, str) else base64.b64decode(payload["base64"])


def read_export(path: str | os.PathLike[str]) -> tuple[dict[str, list[Row]], list[int]]:
    """The rows of an export by run, and the numbers of the lines that a crash tore while they were written.

    Any other damage is a JournalError.
    """
    damaged: list[int] = []
    runs: dict[str, list[Row]] = {}
    for record in records(Path(path), damaged):
        runs.setdefault(record["run_id"], []).append(_row(record))
    return {run_id: sorted(rows, key=lambda row: row.seq) for run_id, rows in runs.items()}, damaged


def records(path: Path, damaged: list[int]) -> Iterator[dict[str, Any]]:
    """The records in order; a line that can't be read is the last one, or the next one says that it was torn."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line or line == TORN:
            continue
        try:
            record = json.loads(line)
            yield {**record, "seq": int(record["seq"])}
        except (ValueError, KeyError, TypeError):
            if number < len(lines) and lines[number] != TORN:
                raise JournalError(
                    f"{path}, line {number}, is damaged, and not by a crash while it was written"
                ) from None
            damaged.append(number)


TORN = b'{"torn":"the line before"}'


def _row(record: dict[str, Any]) -> Row:
    state = record.get("state")
    return Row(
        seq=record["seq"],
        header=record["header"].encode(),
        payload=None if record["payload"] is None else _bytes(record["payload"]),
        salt=None if record["salt"] is None else bytes.fromhex(record["salt"]),
        payload_hash=bytes.fromhex(record["payload_hash"]),
        digest=bytes.fromhex(record["digest"]),
        state=None if state is None else Delta(state[0], state[1], state[2], base64.b64decode(state[3])),
    )
