"""MaxSteps: a ceiling on tool executions."""

from __future__ import annotations

from typing import Any

from loopguard._amounts import SCALE
from loopguard._call import Tool, ToolCall
from loopguard._run import Run
from loopguard.exceptions import ConfigurationError, MaxStepsExceeded
from loopguard.guardrails._only import Only, Which

__all__ = ["MaxSteps"]


class MaxSteps:
    """At most n tool executions in a run, the calls of its children included.

    ``only="search_*"`` limits and counts some tools (a pattern, several, or a predicate of the call);
    ``per="iteration"`` counts afresh in each iteration of the loop. A refused call uses no step, a
    call that raised does. Under concurrency exactly n bodies run. Refuses with code ``max_steps``.
    """

    def __init__(self, n: int, only: Only = None, per: str = "run") -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ConfigurationError(f"MaxSteps(n={n!r}): give an int of at least 0")
        if per not in ("run", "iteration"):
            raise ConfigurationError(f"MaxSteps(per={per!r}): give 'run' or 'iteration'")
        self.n = n
        self.per = per
        self.which = Which(only, "MaxSteps")

    def cap(self, run: Run) -> _Cap:
        """Its count in this run."""
        simple = self.per == "run" and self.which.text is None and self.which.predicate is None
        return run.slot(self, lambda: (_Cap if simple else _PartialCap)(self, run))  # type: ignore[no-any-return]  # what the lambda makes

    def caps(self, run: Run) -> tuple[_Cap, ...]:
        """What `Run.brief` and `Run.remaining` look at."""
        return (self.cap(run),)

    def bind(self, run: Run, tool: Tool) -> _Cap | None:
        """See `Limit`."""
        return self.cap(run) if self.which.covers_tool(tool) else None

    def __repr__(self) -> str:
        only = f", only={self.which.text!r}" if self.which.text else ""
        return f"MaxSteps({self.n}{only}{', per=' + repr(self.per) if self.per != 'run' else ''})"


class _Cap:
    """A cap on the run's own count of steps."""

    unit = "steps"
    partial = False
    external = False

    def __init__(self, guardrail: MaxSteps, run: Run) -> None:
        self.guardrail = guardrail
        self.run = run
        self.n = guardrail.n
        self.limit = guardrail.n * SCALE

    def check(self, call: ToolCall) -> MaxStepsExceeded | None:
        if self.run.steps < self.n:
            return None
        return self.refusal(call, self.run.steps)

    def refusal(self, call: ToolCall, value: int) -> MaxStepsExceeded:
        calls = "one tool call" if self.n == 1 else f"{self.n} tool calls"
        which = f" of {self.guardrail.which.text}" if self.guardrail.which.text else ""
        reason = (
            f"{call.name} was not run: {self.run.name!r} allows {calls}{which} per {self.guardrail.per}, and none is "
            f"left. Answer now with what you have."
        )
        return MaxStepsExceeded("max_steps", "MaxSteps", call.name, reason, self.n, value, self.run.name, self.run.id)

    def used(self) -> int:
        return self.run.steps * SCALE

    def brief(self) -> str:
        return f"{self.used() // SCALE} of {self.n} tool calls"


class _PartialCap(_Cap):
    """A count of its own: of some tools, or of one iteration."""

    partial = True

    def __init__(self, guardrail: MaxSteps, run: Run) -> None:
        super().__init__(guardrail, run)
        # what earlier processes of a resumed run have used; what a predicate would have said of that nobody knows
        which, each = guardrail.which, guardrail.per == "iteration"
        known = which.predicate is None
        self.count = sum(known and which.covers_name(name) and (now or not each) for name, now in run.past)
        self.iteration = run.iteration if each else 0

    def prepare(self, call: ToolCall) -> None:
        if self.guardrail.which.predicate is not None:
            call.marks = {**call.marks, self: self.guardrail.which.covers(call)}

    def check(self, call: ToolCall) -> MaxStepsExceeded | None:
        if not call.marks.get(self, True):
            return None
        count = self.used() // SCALE
        return None if count < self.n else self.refusal(call, count)

    def take(self, call: ToolCall) -> Any:
        if not call.marks.get(self, True):
            return None
        if self.guardrail.per == "iteration" and self.run.iteration != self.iteration:
            self.iteration, self.count = self.run.iteration, 0
        self.count += 1
        return self.iteration

    def undo(self, call: ToolCall, token: Any) -> None:
        if token is not None and token == self.iteration:
            self.count -= 1

    def used(self) -> int:
        stale = self.guardrail.per == "iteration" and self.run.iteration != self.iteration
        return 0 if stale else self.count * SCALE
