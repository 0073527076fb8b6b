"""Pins: what the tools of one server looked like when they were first seen."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopguard import ConfigurationError

__all__ = ["Pins", "digest_of", "pins_beside"]


def digest_of(definition: Mapping[str, Any]) -> str:
    """``sha256:…`` over all of a tool's definition (name, description, schemas, annotations) but ``_meta``."""
    seen = {key: value for key, value in definition.items() if key != "_meta"}
    text = json.dumps(seen, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def pins_beside(policy: Path, command: Sequence[str]) -> Path:
    """The file for the tools of the server that a command starts: ``policy.0123456789ab.pins.json``."""
    key = hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()[:12]
    return policy.with_name(f"{policy.stem}.{key}.pins.json")


class Pins:
    """A file of ``{tool: {"sha256": …, "definition": …}}``: the digest is the pin, the definition for people.

    Raises ConfigurationError for a file that isn't one: what was pinned must not be forgotten by accident.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pins: dict[str, Any] = {}
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as exc:
            raise ConfigurationError(f"the pins {path} can't be read: {exc}") from exc
        try:
            self._pins = json.loads(text)["tools"]
            for pin in self._pins.values():
                if not isinstance(pin["sha256"], str) or not isinstance(pin["definition"], dict):
                    raise TypeError
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
            raise ConfigurationError(
                f"{path} holds no pins. Put it back as it was, or remove it to pin what the server offers now"
            ) from exc

    def forget(self) -> None:
        """Take what is listed next for the first sight. The file stays as it is until then."""
        self._pins = {}

    def known(self, name: str) -> Mapping[str, Any] | None:
        """The definition that is pinned for a tool, None at first sight."""
        pin = self._pins.get(name)
        return None if pin is None else pin["definition"]

    def holds(self, definition: Mapping[str, Any]) -> bool:
        """Whether a definition is the one that is pinned."""
        pin = self._pins.get(definition["name"])
        return pin is not None and pin["sha256"] == digest_of(definition)

    def pin(self, *definitions: Mapping[str, Any]) -> None:
        """Pin definitions, in the file before anybody relies on it. Raises ConfigurationError where it can't be."""
        new = {each["name"]: {"sha256": digest_of(each), "definition": dict(each)} for each in definitions}
        pins = {**self._pins, **new}
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.path.parent, prefix=f"{self.path.name}.", delete=False
            ) as file:  # mode 0600
                json.dump({"tools": pins}, file, indent=1, sort_keys=True)
            os.replace(file.name, self.path)
        except OSError as exc:
            raise ConfigurationError(f"the pins {self.path} can't be written: {exc}") from exc
        self._pins = pins
