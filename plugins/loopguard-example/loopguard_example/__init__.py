"""The smallest plugin: one guardrail, AllowedHosts, and one approver, up_to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from loopguard import ConfigurationError, Run, ToolCall, ToolCallRefused
from loopguard.typing import BoundLimit

__all__ = ["AllowedHosts", "up_to"]


class AllowedHosts:
    """Tools that take a URL reach only these hosts: a call with any other ``url`` is refused.

    ``argument``: the name of the parameter, where it isn't ``url``. Refuses with code ``host``.
    """

    def __init__(self, *hosts: str, argument: str = "url") -> None:
        if not hosts or not all(hosts):
            raise ConfigurationError(f"AllowedHosts{hosts!r}: name at least one host, such as 'docs.python.org'")
        self.hosts = frozenset(host.lower() for host in hosts)
        self.argument = argument

    def bind(self, run: Run, tool: Any) -> BoundLimit:
        """Called once for each run and tool; None would leave this tool out. It keeps nothing of a run: itself."""
        return self

    def check(self, call: ToolCall) -> ToolCallRefused | None:
        """Called for each call, under the lock that all limits share: quick, and without side effects."""
        if self.argument not in call.arguments:
            return None
        url = call.arguments[self.argument]
        host = _host(url) if isinstance(url, str) else None
        if host in self.hosts:
            return None
        allowed, run = ", ".join(sorted(self.hosts)), call.run
        reason = f"{call.name} was not run: it may reach {allowed}, not {host or 'what is no URL'}. Use one of these."
        return ToolCallRefused("host", "AllowedHosts", call.name, reason, allowed, host, run.name, run.id)


def up_to(amount: float, argument: str = "amount") -> Callable[[ToolCall], tuple[bool, str | None]]:
    """An approver that says yes to whatever is at most ``amount``, and no to the rest."""

    def approver(call: ToolCall) -> tuple[bool, str | None]:
        asked = call.arguments[argument]
        return (True, None) if 0 <= asked <= amount else (False, f"{asked} is not within {amount}")

    return approver


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
