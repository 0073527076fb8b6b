"""Which tools a guardrail is about: `only=` as a name pattern, several, or a predicate."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import TypeAlias

from loopguard._call import Tool, ToolCall
from loopguard.exceptions import ConfigurationError

__all__ = ["Only", "Which"]

Only: TypeAlias = "str | Iterable[str] | Callable[[ToolCall], bool] | None"


class Which:
    """The reading of one `only=`: None is every tool, a pattern is shell-style (``issue_*``)."""

    __slots__ = ("patterns", "predicate", "text")

    def __init__(self, only: Only, what: str) -> None:
        self.predicate: Callable[[ToolCall], bool] | None = None
        self.patterns: tuple[str, ...] | None = None
        if only is None:
            pass
        elif isinstance(only, str):
            self.patterns = (only,)
        elif callable(only):
            self.predicate = only
        else:
            self.patterns = tuple(only) if isinstance(only, Iterable) else (only,)
        if self.patterns is not None and not (
            self.patterns and all(isinstance(pattern, str) and pattern for pattern in self.patterns)
        ):
            raise ConfigurationError(f"{what}(only={only!r}): give a name pattern, several, or a function of a call")
        self.text = ", ".join(self.patterns) if self.patterns is not None else None

    def covers_tool(self, tool: Tool) -> bool:
        """Whether calls of this tool may be meant (a predicate decides call by call)."""
        return self.covers_name(tool.name)

    def covers_name(self, name: str) -> bool:
        """The same of a tool's name."""
        if self.patterns is None:
            return True
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)

    def covers(self, call: ToolCall) -> bool:
        """Whether this call is meant."""
        return self.covers_tool(call.tool) and (self.predicate is None or bool(self.predicate(call)))
