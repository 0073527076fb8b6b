"""The options that many subcommands have, and the journal that they name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from loopguard import journal
from loopguard.exceptions import ConfigurationError
from loopguard.redaction import display, safe_url

__all__ = ["By", "Json", "KeyFile", "RunId", "Store", "opened", "seconds"]

RunId: TypeAlias = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run.")]
Store: TypeAlias = Annotated[
    str | None,
    typer.Option("--store", envvar="LOOPGUARD_STORE", help="Where runs are kept, such as sqlite:///runs.db."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
KeyFile: TypeAlias = Annotated[
    Path | None, typer.Option("--key-file", help="The file that holds the key which signs answers.")
]
By: TypeAlias = Annotated[str | None, typer.Option("--by", help="Who answers; by default, you.")]


def opened(store: str | None, key_file: Path | None = None) -> journal.OpenJournal:
    """The journal that the options name; nothing is made where there is none."""
    if not store:
        raise ConfigurationError("no store is named: give --store sqlite:///runs.db, or set LOOPGUARD_STORE")
    if "://" not in store:
        raise ConfigurationError(f"--store {display(safe_url(store))}: give a URL, such as sqlite:///runs.db")
    path = store.removeprefix("sqlite:///")
    if path != store and not Path(path).exists():
        raise ConfigurationError(f"there is no store {display(safe_url(store))}: no run has been kept there")
    return journal.open(store, key=None if key_file is None else _key(key_file))


def _key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as exc:
        raise ConfigurationError(f"--key-file {path}: {exc.strerror}") from None
    if not key:
        raise ConfigurationError(f"--key-file {path} is empty")
    return key


_UNITS: Mapping[str, float] = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def seconds(text: str, option: str) -> float:
    """The seconds that a duration says: ``90s``, ``15m``, ``12h``, ``30d`` or ``4w``."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", text)
    if found is None:
        raise ConfigurationError(f"{option} {text!r}: give a number and s, m, h, d or w, such as 30d")
    return float(found[1]) * _UNITS[found[2]]
