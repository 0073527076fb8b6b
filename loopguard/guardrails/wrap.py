"""WrapTool: a hook of the user's around every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from loopguard._call import ToolCall
from loopguard._pipeline import Ask, Hook, Proceed, Steps
from loopguard.exceptions import ConfigurationError

__all__ = ["WrapTool"]


class WrapTool:
    """Put code around tool calls, outside of everything else: it sees refusals, too.

    Either a generator function ``hook(call, proceed)`` with ``result = yield from proceed(call)`` in
    it, or ``before(call)`` and ``after(call, result)``, sync or async. `before` may return a changed
    call (``call.replace(arguments=…)``) or None; `after` sees the result of calls that succeeded.
    """

    def __init__(
        self,
        hook: Hook | None = None,
        *,
        before: Callable[[ToolCall], Any] | None = None,
        after: Callable[[ToolCall, Any], Any] | None = None,
    ) -> None:
        if (hook is None) == (before is None and after is None):
            raise ConfigurationError("WrapTool: give either a hook, or before= and after=")
        if hook is not None and not _is_generator_function(hook):
            raise ConfigurationError(
                f"WrapTool({hook!r}): a hook is a generator function (call, proceed) that says "
                f"`result = yield from proceed(call)`; for plain functions use before= and after="
            )
        for name, fn in (("before", before), ("after", after)):
            if fn is not None and not callable(fn):
                raise ConfigurationError(f"WrapTool({name}={fn!r}): give a function")
        self.before = before
        self.after = after
        self.hook: Hook = hook if hook is not None else self._around

    def __repr__(self) -> str:
        names = [(name, getattr(self, name)) for name in ("before", "after")]
        given = [f"{name}={_name_of(fn)}" for name, fn in names if fn is not None]
        return f"WrapTool({', '.join(given) or _name_of(self.hook)})"

    def _around(self, call: ToolCall, proceed: Proceed) -> Steps:
        if self.before is not None:
            changed = yield Ask(self.before, call)
            if isinstance(changed, ToolCall):
                call = changed
            elif changed is not None:
                raise ConfigurationError(f"before= returned a {type(changed).__name__}: return a changed call, or None")
        result = yield from proceed(call)
        if self.after is not None:
            yield Ask(self.after, call, result)
        return result


def _name_of(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _is_generator_function(hook: Any) -> bool:
    return inspect.isgeneratorfunction(hook) or inspect.isgeneratorfunction(getattr(hook, "__call__", None))  # noqa: B004
