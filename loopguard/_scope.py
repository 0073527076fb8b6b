"""Scopes: a run without a loop."""

from __future__ import annotations

from contextvars import Token
from typing import TYPE_CHECKING, Any

from loopguard._outcomes import LoopResult, StopReason, only_refusals, stop_reason_of
from loopguard._run import Run, current_run
from loopguard._threads import running_task
from loopguard.exceptions import ConfigurationError, LoopHalted, LoopStopped, ToolCallRefused
from loopguard.telemetry._runs import RunSpan
from loopguard.telemetry._spans import provider_is_set

if TYPE_CHECKING:
    from loopguard._guard import Guard

__all__ = ["Scope"]


def _halted(run: Run, cause: ToolCallRefused | LoopHalted) -> LoopResult[None]:
    return LoopResult(
        None,
        StopReason.HALTED,
        False,
        0,
        usage=run.usage,
        cost=run.cost,
        warnings=tuple(run.warnings),
        error=cause.refusal if isinstance(cause, LoopHalted) else cause,
        run_id=run.id,
        trace_id=run.trace_id,
        name=run.name,
    )


class Scope:
    """A run without a loop, as a context manager: sync and async."""

    def __init__(self, name: str, guards: tuple[Guard, ...]) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"Guard.scope({name!r}): give a text")
        self._name = name
        self._guards = guards
        self._entered: dict[Run, tuple[Token[Any], Any]] = {}

    def __enter__(self) -> Run:
        run = Run(self._name, current_run(), self._guards)
        span = RunSpan(run) if provider_is_set() else None
        self._entered[run] = run.enter(), span
        return run

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        run = current_run()
        if run is None or run not in self._entered:  # left in another context than it was entered in
            run = next(reversed(self._entered))
        token, span = self._entered.pop(run)
        stopped = None
        cause = only_refusals(exc) if exc is not None and not isinstance(exc, Exception) else None
        if cause is not None and all(ancestor.kind == "scope" for ancestor in run.chain):
            stopped = LoopStopped(_halted(run, cause), str(cause) if isinstance(cause, LoopHalted) else None)
        run.leave(token, stop_reason_of(exc), error=exc)
        if span is not None:
            span.end(run, stop_reason_of(exc), None if exc is None or only_refusals(exc) is not None else exc)
        if stopped is not None:
            raise stopped from exc

    async def __aenter__(self) -> Run:
        running_task(self._name)
        return self.__enter__()

    async def __aexit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        self.__exit__(kind, exc, traceback)
