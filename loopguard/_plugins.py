"""Plugins: what other distributions add, found by entry point and loaded on first use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from loopguard.exceptions import ConfigurationError

__all__ = ["APPROVERS", "COMMANDS", "GUARDRAILS", "LEDGERS", "STORES", "available", "check_plugin", "load_plugin"]

LEDGERS = "loopguard.ledgers"
"""By URL scheme: ``fn(url)`` makes a `Ledger`."""
STORES = "loopguard.stores"
"""By URL scheme: ``fn(url)`` makes a `Journal`."""
APPROVERS = "loopguard.approvers"
"""By name: an approver, or what makes one."""
GUARDRAILS = "loopguard.guardrails"
"""By name: a `Limit` class."""
COMMANDS = "loopguard.commands"
"""By name: a command of the command line."""

_PACKAGES: Mapping[str, Mapping[str, str]] = {
    LEDGERS: {
        "redis": "loopguard-redis",
        "rediss": "loopguard-redis",
        "postgres": "loopguard-postgres",
        "postgresql": "loopguard-postgres",
    },
    STORES: {"postgres": "loopguard-postgres", "postgresql": "loopguard-postgres"},
}
"""Who is known to have what, for whoever hasn't installed it yet."""


def available(group: str) -> list[str]:
    """The names that installed distributions have in this group, sorted."""
    return sorted(_found(group))


def check_plugin(group: str, name: str, what: str) -> None:
    """ConfigurationError, naming the package to install, unless there is such a plugin. It isn't loaded.

    ``what`` says who asks, without anything secret: a plugin's URL may hold a password, its scheme doesn't.
    """
    if name in _found(group):
        return
    package = _PACKAGES.get(group, {}).get(name)
    if package is not None:
        raise ConfigurationError(f"{what}: {name!r} needs the package {package}: pip install {package}")
    known = ", ".join(sorted({*_found(group), *_PACKAGES.get(group, {})})) or "none"
    raise ConfigurationError(f"{what}: no installed package has {name!r} in {group}; known: {known}")


def load_plugin(group: str, name: str, what: str) -> Any:
    """The plugin's object. ConfigurationError if there is none, or if it can't be imported."""
    check_plugin(group, name, what)
    point = _found(group)[name]
    try:
        return point.load()
    except Exception as exc:  # a plugin's own module: whatever it raises while it is imported
        whose = point.dist.name if point.dist is not None else point.value
        raise ConfigurationError(
            f"{what}: the plugin {name!r} of {whose} can't be loaded: {type(exc).__name__}: {exc}"
        ) from exc


@cache
def _found(group: str) -> Mapping[str, EntryPoint]:
    """{name: entry point}; one name that two distributions give to different things is an error."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        known = found.setdefault(point.name, point)
        if known.value != point.value:
            both = " and ".join(sorted(p.dist.name if p.dist is not None else p.value for p in (known, point)))
            raise ConfigurationError(f"{both} both have {point.name!r} in {group}: uninstall one of them")
    return found
