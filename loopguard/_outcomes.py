"""What a loop comes to: why it stopped, what each iteration did, and the states it went through."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from loopguard._usage import Usage
from loopguard.exceptions import ConfigurationError, LoopHalted, ToolCallRefused

__all__ = [
    "Iteration",
    "LoopResult",
    "LoopState",
    "StopReason",
    "Transition",
    "Verdict",
    "result_of",
]

T = TypeVar("T")


class StopReason(str, Enum):
    """Why a run ended."""

    UNTIL = "until"
    UNTIL_LLM = "until_llm"
    EVALUATED = "evaluated"
    MAX_ITERATIONS = "max_iterations"
    MAX_STEPS = "max_steps"
    LOOP_LIMIT = "loop_limit"
    BUDGET = "budget"
    APPROVAL = "approval"
    RATE_LIMITED = "rate_limited"
    CIRCUIT_OPEN = "circuit_open"
    TIMEOUT = "timeout"
    STOPPED = "stopped"
    EVALUATION_FAILED = "evaluation_failed"
    ERROR = "error"
    CANCELLED = "cancelled"
    HALTED = "halted"
    WAITING = "waiting"

    __str__ = str.__str__

    @classmethod
    def of_refusal(cls, refusal: ToolCallRefused) -> StopReason:
        """The stop reason of a loop that a refusal ended."""
        return _OF_CODE.get(refusal.code, cls.ERROR)


_OF_CODE = {
    "max_steps": StopReason.MAX_STEPS,
    "loop_limit": StopReason.LOOP_LIMIT,
    "budget": StopReason.BUDGET,
    "unknown_price": StopReason.BUDGET,
    "approval_denied": StopReason.APPROVAL,
    "approval_timeout": StopReason.APPROVAL,
    "approval_error": StopReason.APPROVAL,
    "approval_mismatch": StopReason.APPROVAL,
    "rate_limited": StopReason.RATE_LIMITED,
    "circuit_open": StopReason.CIRCUIT_OPEN,
    "timeout": StopReason.TIMEOUT,
    "stopped": StopReason.STOPPED,
    "waiting": StopReason.WAITING,
    "uncertain": StopReason.WAITING,
    "no_run": StopReason.ERROR,
}


def stop_reason_of(exc: BaseException | None) -> StopReason | None:
    """Why a run ended that exc left through; None where nothing was raised."""
    if exc is None or isinstance(exc, GeneratorExit):
        return None if exc is None else StopReason.CANCELLED
    cause = only_refusals(exc)
    if isinstance(cause, ToolCallRefused):
        return StopReason.of_refusal(cause)
    if cause is not None:
        return StopReason.HALTED
    return StopReason.ERROR if isinstance(exc, Exception) else StopReason.CANCELLED


class LoopState(str, Enum):
    """The states of a loop's run."""

    READY = "ready"
    RUNNING = "running"
    SUCCESS = "success"
    RETRY = "retry"
    FAILED = "failed"
    TERMINATED = "terminated"

    __str__ = str.__str__


TRANSITIONS: Mapping[tuple[LoopState, str], LoopState] = MappingProxyType(
    {
        (LoopState.READY, "start"): LoopState.RUNNING,
        (LoopState.RUNNING, "next"): LoopState.RUNNING,
        (LoopState.RUNNING, "reject"): LoopState.RETRY,
        (LoopState.RETRY, "next"): LoopState.RUNNING,
        (LoopState.RUNNING, "complete"): LoopState.SUCCESS,
        (LoopState.RUNNING, "stop"): LoopState.TERMINATED,
        (LoopState.RETRY, "stop"): LoopState.TERMINATED,
        (LoopState.RUNNING, "fail"): LoopState.FAILED,
        (LoopState.RETRY, "fail"): LoopState.FAILED,
    }
)
"""Every legal transition: (state, trigger) to the next state. There are no others."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of a loop from state to state."""

    source: LoopState
    target: LoopState
    trigger: str
    iteration: int
    at: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge or an evaluator says of a value: yes, no, or (None) undecided."""

    passed: bool | None
    reason: str | None = None
    value: Any = None
    """The parsed value, where an evaluator made one."""
    score: float | None = field(default=None, compare=False)
    """What it measured, on a scale of its own, where it graded."""


@dataclass(frozen=True, slots=True)
class Iteration(Generic[T]):
    """One pass of a loop."""

    number: int
    """Counted from 1."""
    value: T
    """What the body returned, rejected values included."""
    feedback: str | None = None
    """The reason that the body was given with this iteration."""
    verdicts: tuple[Verdict, ...] = ()
    usage: Usage = Usage()
    cost: Decimal | None = Decimal(0)
    """USD; None when a price was unknown."""
    duration: float = 0.0
    """Seconds."""


@dataclass(frozen=True, slots=True)
class LoopResult(Generic[T]):
    """How a loop ended. ``str(result)`` says it in one line."""

    value: T
    """The last accepted state; the argument itself if no iteration was completed."""
    stop_reason: StopReason
    completed: bool
    """True when the loop reached its goal, False when something stopped it first."""
    iterations: int
    """Iterations that were completed."""
    history: tuple[Iteration[T], ...] = ()
    transitions: tuple[Transition, ...] = ()
    usage: Usage = Usage()
    cost: Decimal | None = Decimal(0)
    """USD; None when a price was unknown."""
    warnings: tuple[str, ...] = ()
    error: BaseException | None = None
    """The refusal or exception that ended the loop, if one did."""
    run_id: str = ""
    trace_id: str | None = None
    name: str = field(default="loop", kw_only=True)

    def __str__(self) -> str:
        passes = "1 iteration" if self.iterations == 1 else f"{self.iterations} iterations"
        how = "completed" if self.completed else "stopped"
        cost = "" if self.cost == 0 else ", cost unknown" if self.cost is None else f", ${self.cost:f}"
        why = f": {self.error}" if self.error is not None else ""
        return f"{self.name} {how} after {passes} ({self.stop_reason}{cost}){why}"


def read_verdict(said: Any, who: str) -> Verdict:
    """A judge's or evaluator's answer as a Verdict; ConfigurationError for any other type, None included."""
    if isinstance(said, Verdict):
        if said.passed is None or isinstance(said.passed, bool):
            return said
    elif isinstance(said, bool):
        return Verdict(said)
    elif isinstance(said, tuple) and len(said) == 2 and isinstance(said[0], bool):
        if said[1] is None or isinstance(said[1], str):
            return Verdict(said[0], said[1])
    raise ConfigurationError(
        f"{who} returned a {type(said).__name__}: return a Verdict, True or False, or (bool, reason)"
    )


class _Partial:
    """Holds the result on an exception, and is left behind when the exception is pickled."""

    __slots__ = ("chain", "result")

    def __init__(self, result: LoopResult[Any] | None = None, chain: Collection[str] = ()) -> None:
        self.result = result
        self.chain = chain
        """The ids of the runs that the exception passes on its way up."""

    def __reduce__(self) -> tuple[type[_Partial], tuple[()]]:
        return _Partial, ()


def attach_result(exc: BaseException, result: LoopResult[Any], chain: Collection[str]) -> None:
    """Let `result_of(exc)` find the result of the innermost loop that exc escaped from.

    ``chain``: the ids of that loop's run and those above it. One and the same exception may be raised again in
    another run, whose result takes the place of the older one.
    """
    known = getattr(exc, "_loopguard_partial", None)
    if known is None or result.run_id not in known.chain:
        BaseException.__setattr__(exc, "_loopguard_partial", _Partial(result, chain))  # even on a frozen one


def annotate(exc: BaseException, note: str) -> None:
    """Add a note, even to an exception that is frozen, as a dataclass may be."""
    notes = getattr(exc, "__notes__", None)
    if isinstance(notes, list):
        notes.append(note)
    else:
        BaseException.__setattr__(exc, "__notes__", [note])


def result_of(exc: BaseException) -> LoopResult[Any] | None:
    """The partial LoopResult of the innermost loop that this exception escaped from, or None."""
    result = getattr(exc, "result", None)  # of a LoopStopped
    if isinstance(result, LoopResult):
        return result
    partial = getattr(exc, "_loopguard_partial", None)
    return partial.result if isinstance(partial, _Partial) else None


def only_refusals(exc: BaseException) -> ToolCallRefused | LoopHalted | None:
    """The refusal that exc stands for: itself, or the first leaf of a group that holds nothing else."""
    if isinstance(exc, ToolCallRefused | LoopHalted):
        return exc
    if not isinstance(exc, BaseExceptionGroup):
        return None
    leaves = [only_refusals(leaf) for leaf in exc.exceptions]
    return None if any(leaf is None for leaf in leaves) else leaves[0]
