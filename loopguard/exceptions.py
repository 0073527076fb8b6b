"""Every error loopguard raises, as one tree.

::

    LoopGuardError
    ├── ConfigurationError            also a ValueError: the program is set up wrongly
    ├── ToolCallRefused               a guardrail said no before the body ran; `code` says which
    │   ├── MaxStepsExceeded
    │   ├── LoopLimitExceeded
    │   ├── BudgetExceeded
    │   ├── ApprovalDenied
    │   └── ApprovalTimeout
    ├── ToolTimeout                   also a TimeoutError: the tool ran past its own timeout
    ├── JudgeError                    a judge gave no verdict three times in a row
    ├── LedgerError                   a budget's ledger can't be asked, or has lost what it knew
    ├── LoopStopped                   a loop ended without completing; `result` says how far it came
    │   └── EvaluationFailed
    └── JournalError
        ├── CheckpointError
        ├── LeaseLost
        ├── RunNotFound
        ├── RunConflict
        ├── AlreadyDecided
        └── RecordedError
    LoopHalted                        a BaseException: a body keeps swallowing refusals

Every class pickles: all fields go through ``super().__init__``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopguard._outcomes import LoopResult

__all__ = [
    "AlreadyDecided",
    "ApprovalDenied",
    "ApprovalTimeout",
    "BudgetExceeded",
    "CheckpointError",
    "ConfigurationError",
    "EvaluationFailed",
    "JournalError",
    "JudgeError",
    "LeaseLost",
    "LedgerError",
    "LoopGuardError",
    "LoopGuardWarning",
    "LoopHalted",
    "LoopLimitExceeded",
    "LoopStopped",
    "MaxStepsExceeded",
    "RecordedError",
    "RunConflict",
    "RunNotFound",
    "ToolCallRefused",
    "ToolTimeout",
]


class LoopGuardWarning(UserWarning):
    """Something works, but probably not as it was meant to."""


class LoopGuardError(Exception):
    """The root of all errors of loopguard (LoopHalted alone is a BaseException)."""


class ConfigurationError(LoopGuardError, ValueError):
    """The program is set up wrongly: the message names what, the value, and what is allowed."""


class ToolCallRefused(LoopGuardError):
    """A guardrail refused a tool call: its body never ran.

    Both data and an exception. ``str(refusal)`` is a sentence that a model can act on.
    """

    code: str
    """Stable: max_steps, loop_limit, budget, unknown_price, approval_denied, approval_timeout,
    approval_error, approval_mismatch, rate_limited, circuit_open, timeout, stopped, waiting,
    uncertain or no_run."""
    guardrail: str
    """The guardrail that refused, as its class is called: ``MaxSteps``, ``Budget``, …"""
    tool: str
    """The name of the tool that was called."""
    reason: str | None
    """Why. For an approval this is the approver's own text, None where it gave none."""
    limit: Any
    """The limit that was reached, in the guardrail's own unit, or None."""
    value: Any
    """What stood against the limit (for a budget: spent and reserved), or None."""
    source: str | None
    """The name of the run that owns the limit."""
    run_id: str | None
    """The id of that run: names aren't unique."""

    def __init__(
        self,
        code: str,
        guardrail: str,
        tool: str,
        reason: str | None = None,
        limit: Any = None,
        value: Any = None,
        source: str | None = None,
        run_id: str | None = None,
    ) -> None:
        super().__init__(code, guardrail, tool, reason, limit, value, source, run_id)
        self.code = code
        self.guardrail = guardrail
        self.tool = tool
        self.reason = reason
        self.limit = limit
        self.value = value
        self.source = source
        self.run_id = run_id

    retry_after: float | None = None
    """Seconds after which the same call may be admitted, where that is known."""
    cure: Any = None
    """What the pipeline can wait for before it asks again; not part of the refusal's data."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {name: value for name, value in self.__dict__.items() if name != "cure"}

    def __str__(self) -> str:
        if self.code == "approval_denied":
            why = f": {self.reason}" if self.reason else ""
            return f"{self.tool} was not approved{why}. It did not run; do something else instead of repeating it."
        return self.reason or f"{self.tool} was refused ({self.code}). It did not run."


class MaxStepsExceeded(ToolCallRefused):
    """The run has made all the tool calls that its MaxSteps allows (`max_steps`)."""


class LoopLimitExceeded(ToolCallRefused):
    """The same call was repeated while nothing new happened (`loop_limit`)."""


class BudgetExceeded(ToolCallRefused):
    """What the call may cost does not fit into what is left of a budget (`budget`)."""


class ApprovalDenied(ToolCallRefused):
    """An approver said no (`approval_denied`)."""


class ApprovalTimeout(ToolCallRefused):
    """No approver answered in time (`approval_timeout`)."""


class ToolTimeout(LoopGuardError, TimeoutError):
    """A tool ran past its timeout. It started, so its effects may have happened or still happen."""

    def __init__(self, tool: str, seconds: float, source: str | None = None) -> None:
        super().__init__(tool, seconds, source)
        self.tool = tool
        self.seconds = seconds
        self.source = source

    def __str__(self) -> str:
        of = f" (set by {self.source})" if self.source else ""
        return f"{self.tool} did not finish within {self.seconds:g} s{of}; it may still be running"


class JudgeError(LoopGuardError):
    """A judge could not give a verdict three times in a row."""


class LedgerError(LoopGuardError):
    """A budget's ledger can't be asked, or has lost what it knew: nobody can say what is left.

    What a ledger raises, and no other exception, is what ``Budget(on_ledger_error=…)`` decides about.
    """


class LoopStopped(LoopGuardError):
    """A loop ended without completing.

    ``result`` is its LoopResult: the value so far, the stop reason, and every iteration.
    """

    result: LoopResult[Any]

    def __init__(self, result: LoopResult[Any], message: str | None = None) -> None:
        super().__init__(result, message)
        self.result = result
        self.message = message

    def __str__(self) -> str:
        return self.message or str(self.result)


class EvaluationFailed(LoopStopped):
    """The evaluators rejected more values in a row than ``max_retries`` allows."""


class JournalError(LoopGuardError):
    """The journal can't do what was asked."""


class CheckpointError(JournalError):
    """A state can't be written to a checkpoint and read back unchanged."""


class LeaseLost(JournalError):
    """Another process has taken over this run; this one may not write any more."""


class RunNotFound(JournalError):
    """The journal has no run of this id."""


class RunConflict(JournalError):
    """The run of this id isn't what was taken for it: of another state or loop, driven by another process, or over."""


class AlreadyDecided(JournalError):
    """The question was answered before; the first answer holds."""


class RecordedError(JournalError):
    """A tool's failure, replayed from the journal, whose class can't be rebuilt safely."""


class LoopHalted(BaseException):
    """A body swallowed refusal after refusal, so its run is being stopped from below.

    A BaseException, so that ``except Exception`` can't swallow it too. ``@loop`` turns it into a
    stopped result; at the edge of a scope without a loop it becomes LoopStopped.
    """

    def __init__(self, refusal: ToolCallRefused, run_id: str, run_name: str, count: int) -> None:
        super().__init__(refusal, run_id, run_name, count)
        self.refusal = refusal
        """The last refusal of the row."""
        self.run_id = run_id
        self.run_name = run_name
        self.count = count

    def __str__(self) -> str:
        return (
            f"{self.run_name!r} was halted after {self.count} refused calls in a row. The body swallows refusals: let "
            f"ToolCallRefused through, or end the turn when it is raised. The last one: {self.refusal}"
        )
