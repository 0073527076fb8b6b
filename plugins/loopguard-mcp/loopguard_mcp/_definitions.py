"""The definitions of a server's tools in one session: held against their pins, withheld where they changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from loopguard import ApproveTool, Guard, LoopGuardError
from loopguard.redaction import display, display_name
from loopguard_mcp._pins import Pins, digest_of

__all__ = ["Approve", "Definitions", "approver_of"]

Approve = Callable[[str, Mapping[str, Any]], Awaitable[None]]
"""Asks about a change, ``(name of the tool, what changed)``; raises LoopGuardError unless the answer is yes."""


def approver_of(policy: Guard) -> Approve | None:
    """Who is asked about changed definitions: the policy's first approver. It is no call of the session's run."""
    found = next((guardrail for guardrail in policy.guardrails if isinstance(guardrail, ApproveTool)), None)
    if found is None:
        return None
    gate = Guard(ApproveTool(found.approver, timeout=found.timeout))

    async def approve(name: str, change: Mapping[str, Any]) -> None:
        with gate.scope("tool definitions"):
            await gate.foreign(f"new definition of {name}", approve=True).acall(change, _nothing)

    return approve


async def _nothing(change: Mapping[str, Any]) -> None:
    """Being approved is all that there is to do."""


class Definitions:
    """Which tools may be shown and called."""

    def __init__(self, pins: Pins, approve: Approve | None, tell: Callable[[str], None]) -> None:
        self._pins = pins
        self._approve = approve
        self._tell = tell
        self._held: dict[str, bool] = {}
        self._asked: set[str] = set()
        self.changes = 0
        """How often the server said that its tools changed."""
        self.listed = -1
        """After how many changes all its tools were listed last."""

    def why_not(self, name: str) -> str | None:
        """Why a tool must not be called, once they were listed."""
        if self._held.get(name):
            return None
        if name in self._held:
            return (
                f"{display_name(name)} was not run: its definition is another than when it was first seen, and nobody "
                f"has approved the change. Do without this tool."
            )
        names = ", ".join(map(display_name, sorted(self._held)[:30]))
        return f"There is no tool {display_name(name)}, so nothing ran. There are: {names or 'none'}."

    def look(self, listed: Any) -> tuple[list[Any], list[dict[str, Any]]]:
        """(the definitions that may be shown, those to ask about) of a listing; what is new gets pinned."""
        named = [each for each in _entries(listed) if isinstance(each.get("name"), str)]
        new = {each["name"]: each for each in reversed(named) if self._pins.known(each["name"]) is None}
        if new:
            self._pins.pin(*new.values())
            self._tell(f"pinned at first sight, in {self._pins.path}: {', '.join(map(display_name, sorted(new)))}")
        changed = [each for each in named if not self._pins.holds(each)]
        withheld = {each["name"] for each in changed}
        self._held.update({each["name"]: each["name"] not in withheld for each in named})
        to_ask = {digest_of(each): each for each in changed}
        for digest in self._asked & set(to_ask):
            del to_ask[digest]
        self._asked.update(to_ask)
        for each in to_ask.values():
            self._tell(f"withheld, since its definition changed: {display_name(each['name'])}")
        return [each for each in named if each["name"] not in withheld], list(to_ask.values())

    async def ask(self, definition: dict[str, Any]) -> bool:
        """Whether a changed definition is approved; then it is pinned."""
        name = definition["name"]
        if self._approve is None:
            self._tell(
                f"nobody can be asked about {display_name(name)}: put an ApproveTool into the policy, or look at its "
                f"definition yourself and start once with --repin"
            )
            return False
        before = self._pins.known(name) or {}
        change = {
            f"{key} ({when})": side.get(key)
            for key in sorted({*before, *definition} - {"_meta"})
            for when, side in (("pinned", before), ("now", definition))
            if before.get(key) != definition.get(key)
        }
        try:
            await self._approve(name, change)
            self._pins.pin(definition)
        except LoopGuardError as exc:  # refused, or nobody could be asked, or the pin couldn't be kept
            self._tell(f"still withheld: {display(str(exc))}")
            return False
        self._held[name] = True
        self._tell(f"approved and pinned: the new definition of {display_name(name)}")
        return True


def _entries(listed: Any) -> Sequence[dict[str, Any]]:
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
