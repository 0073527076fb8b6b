"""Objects of the user's programs by name: ``package.module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from operator import attrgetter
from typing import Any

from loopguard.exceptions import ConfigurationError

__all__ = ["load"]


def load(target: str, what: str) -> Any:
    """The object, its module imported from the current folder or wherever Python finds it."""
    module, colon, name = target.partition(":")
    if not (colon and module and name):
        raise ConfigurationError(f"{target!r} names no {what}: give MODULE:NAME, such as agents.books:close_books")
    if module.endswith(".py") or "/" in module:
        raise ConfigurationError(
            f"{target!r}: name the {what} as Python does, agents.books:close_books, not by its file"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return attrgetter(name)(importlib.import_module(module))
    except Exception as exc:  # whatever the module does while it is imported
        raise ConfigurationError(f"{target} can't be loaded: {type(exc).__name__}: {exc}") from exc
