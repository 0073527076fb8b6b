"""Calling tools by name: what a model asks for, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loopguard._call import new_id
from loopguard._events import ToolRefused
from loopguard._halting import BATCH, Batch, check_halted, end_row, note_refusal, refused
from loopguard._pipeline import LOCK
from loopguard._run import WIND_DOWN, current_run
from loopguard._schemas import InvalidArguments, ToolUse, UnknownTool, tool_result
from loopguard._tool import CALLS, instance_of, tool_of
from loopguard.exceptions import ConfigurationError, ToolCallRefused
from loopguard.redaction import redact_error
from loopguard.telemetry import _constants as names
from loopguard.telemetry._tools import refused_unmade

__all__ = ["Named", "Target", "Turn", "check_chars", "count_invalid", "error_result", "wind_down"]


class Target:
    """A tool that can be called by name."""

    __slots__ = ("arguments", "decorated", "tool")

    def __init__(self, decorated: Any) -> None:
        self.decorated = decorated
        self.tool = tool_of(decorated)
        skip_first = instance_of(decorated) is not None and self.tool.takes_self
        self.arguments = self.tool.schema(skip_first)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], id: str | None) -> Any:
        drive = CALLS[self.tool.colour]
        return drive(self.tool, self.decorated.__wrapped__, instance_of(self.decorated), args, kwargs, id)


class Named:
    """The tools of one dispatch."""

    __slots__ = ("targets",)

    def __init__(self, targets: dict[str, Target]) -> None:
        self.targets = targets


def check_chars(max_chars: Any) -> None:
    if max_chars is not None and (not isinstance(max_chars, int) or isinstance(max_chars, bool) or max_chars < 0):
        raise ConfigurationError(f"run_tools(max_chars={max_chars!r}): give an int of at least 0, or None")


def error_result(use: ToolUse, exc: Exception, max_chars: int | None) -> dict[str, Any]:
    if isinstance(exc, ConfigurationError):
        raise exc  # the program is set up wrongly: that isn't the model's to mend
    if isinstance(exc, ToolCallRefused | InvalidArguments):
        return tool_result(use.id, str(exc), is_error=True, limit=max_chars)
    return tool_result(use.id, redact_error(exc), is_error=True, limit=max_chars)


def wind_down(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    run = current_run()
    if run is not None and results and run.nearly_done():
        note = f"{run.brief()} {WIND_DOWN}".lstrip()
        content = results[-1]["content"]
        if isinstance(content, str):
            results[-1]["content"] = f"{content}\n\n{note}" if content else note
        else:
            results[-1]["content"] = [*content, {"type": "text", "text": note}]
    return results


def count_invalid(name: str, arguments: Any, id: str | None, exc: InvalidArguments) -> None:
    """A call that can't be made counts as a refusal, so that a model that keeps making it is halted."""
    run = current_run()
    if run is not None:
        check_halted(run.chain)
    code = names.CODE_UNKNOWN_TOOL if isinstance(exc, UnknownTool) else "invalid_arguments"
    owner = (run.name, run.id) if run is not None else ()
    refusal = ToolCallRefused(code, "Guard", name, str(exc), None, None, *owner)
    refused_unmade(refusal, id)
    if run is None:
        return
    with LOCK:
        for ancestor in run.chain:
            ancestor.refusals += 1
    refused(run.chain, refusal, id)
    run.emit(
        ToolRefused,
        call_id=id or new_id("call"),
        tool=name,
        arguments=arguments if isinstance(arguments, Mapping) else {"arguments": arguments},
        code=refusal.code,
        guardrail=refusal.guardrail,
        reason=refusal.reason,
        owner_id=run.id,
    )


class Turn:
    """A batch of calls: if all of them were refused, that is one refusal in the row."""

    def __init__(self, uses: Sequence[ToolUse]) -> None:
        self.batch = Batch({use.id for use in uses})

    def __enter__(self) -> None:
        self.run = current_run()
        if self.run is not None:
            check_halted(self.run.chain)
        self.token = BATCH.set(self.batch)

    def __exit__(self, *exc_info: object) -> None:
        BATCH.reset(self.token)
        if self.run is None:
            return
        if self.batch.admitted:
            end_row(self.run.chain)
        elif self.batch.refusal is not None:
            note_refusal(self.run.chain, self.batch.refusal)
