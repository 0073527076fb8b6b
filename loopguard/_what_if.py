"""what_if: a policy over a recorded run, offline: where it would have refused, and what that would have saved.

The recorded calls pass the admission of the real guardrails, in observe mode, in runs that stand for the recorded
ones. Nothing is run, asked, traced or written.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span

from loopguard import _events as events
from loopguard._amounts import amount, decimal, plain
from loopguard._call import Tool, ToolCall
from loopguard._guard import Guard
from loopguard._order import compile_plan
from loopguard._run import Run
from loopguard.exceptions import ConfigurationError, JournalError
from loopguard.guardrails import LoopLimit
from loopguard.journal._errors import rebuilt
from loopguard.journal._rows import plain as shown
from loopguard.metering import PriceBook
from loopguard.metering._calls import ModelCall

__all__ = ["WhatIf", "what_if"]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a policy would have said of a recorded run. ``str(…)`` says it in a sentence.

    Up to its first refusal this is exact; from there on the run would have gone another way.
    """

    run_id: str
    name: str
    refusals: tuple[events.ToolRefused, ...]
    """What it would have refused, with the time and the iteration of the recorded call; the first one counts."""
    calls: int
    """Tool calls and model calls that came before the first refusal; all where there is none."""
    all_calls: int
    spent: Mapping[str, Decimal]
    """{unit: amount} that had been spent at the first refusal; all where there is none."""
    all_spent: Mapping[str, Decimal]

    @property
    def first(self) -> events.ToolRefused | None:
        """The first refusal: where the run would have been told no."""
        return self.refusals[0] if self.refusals else None

    @property
    def saved(self) -> dict[str, Decimal]:
        """{unit: amount} that was spent from the first refusal on: saved, had the run ended there."""
        left = {unit: spent - self.spent.get(unit, Decimal(0)) for unit, spent in self.all_spent.items()}
        return {unit: amount for unit, amount in left.items() if amount}

    def __str__(self) -> str:
        if self.first is None:
            return f"{self.name} would have gone through: {_several(self.all_calls, 'call')}, {_paid(self.all_spent)}"
        iteration = f" in iteration {self.first.iteration}" if self.first.iteration else ""
        return (
            f"{self.name} would have been refused {self.first.tool}{iteration} ({self.first.code}), after {self.calls} "
            f"of {_several(self.all_calls, 'call')} and {_paid(self.spent)}; ending there would have saved "
            f"{_paid(self.saved)}"
        )


def what_if(recorded: Iterable[events.Event], guard: Guard) -> WhatIf:
    """What this guard would have refused, had it stood on a run that is kept in a journal.

    ``recorded``: what happened in it, ``journal.open(url).events(run_id)``. Only the guard's limits count: what an
    approver would have said, or a Retry changed, nobody knows. Where the guard lists no LoopLimit the default one
    counts, as it does in any run. A call that would have had to wait, or to ask for more, counts as refused.

    Raises ConfigurationError for what is no Guard, and for a budget of a period, which depends on other runs; and
    JournalError for events that begin with no run.
    """
    if not isinstance(guard, Guard):
        raise ConfigurationError(f"what_if(guard={guard!r}): give a Guard")
    stream = list(recorded)
    replay = _Replay(guard, stream)
    for event in stream:
        replay.add(event)
    return replay.result()


def _several(number: int, unit: str) -> str:
    return f"{number:,} {unit}" if number == 1 else f"{number:,} {unit}s"


def _paid(spent: Mapping[str, Decimal]) -> str:
    return plain(amount(spent.get("usd", Decimal(0)), "usd"), "usd")


class _Replay:
    """Recorded runs made again, event by event."""

    def __init__(self, guard: Guard, stream: Iterable[events.Event]) -> None:
        self.at = 0.0
        """The recorded time: what the limits take for now."""
        limits = [_afresh(limit, lambda: self.at) for limit in guard.guardrails if hasattr(limit, "bind")]
        if not any(isinstance(limit, LoopLimit) for limit in limits):
            limits.append(LoopLimit())
        self._guard = Guard(*limits, mode="observe")
        self._followed = _followed(stream)
        self._runs: dict[str, Run] = {}
        self._tools: dict[Any, Tool] = {}
        self._calls: dict[tuple[str, str], tuple[ToolCall, events.ToolStarted]] = {}
        self._open: dict[str | None, events.ToolStarted] = {}
        """The calls that interruptions gave back, by key."""
        self._asked: dict[str, str | None] = {}
        """The keys of the calls that questions are about."""
        self._models: dict[str, _Recorded] = {}
        self._reserved: Mapping[str, Decimal] = {}
        """What the call that is being admitted reserved."""
        self._seen = 0
        self._refusals: dict[tuple[str, str, str], events.ToolRefused] = {}
        self._first: tuple[int, Mapping[str, Decimal]] | None = None

    def add(self, event: events.Event) -> None:
        """One more event of the record."""
        self.at = event.at
        reader = getattr(self, f"_{type(event).__name__}", None)
        if reader is None:
            return
        if event.run_id not in self._runs and not isinstance(event, events.RunStarted):
            raise JournalError(f"the run {event.run_id!r} does things before it starts: these are no events of one run")
        reader(event)

    def result(self) -> WhatIf:
        """What it has come to."""
        if not self._runs:
            raise JournalError("there are no events of a run to look at")
        root = next(iter(self._runs.values()))
        everything = self._seen, self._spent()
        calls, spent = self._first or everything
        return WhatIf(root.id, root.name, tuple(self._refusals.values()), calls, everything[0], spent, everything[1])

    def _spent(self) -> dict[str, Decimal]:
        root = next(iter(self._runs.values()))
        return {unit: decimal(cell.spent) for unit, cell in root.cells.items() if cell.spent}

    def _hear(self, event: events.Event) -> None:
        """What the pipeline says meanwhile: a call in observe mode tells what it would have been refused for."""
        if not isinstance(event, events.ToolRefused):
            return
        self._refusals.setdefault((event.run_id, event.call_id, event.code), replace(event, at=self.at))
        if self._first is None:
            self._first = self._seen - 1, self._spent()

    # -- runs ------------------------------------------------------------------------------------

    def _RunStarted(self, event: events.RunStarted) -> None:  # noqa: N802  # named after its event
        if event.run_id in self._runs:  # resumed
            return
        parent = self._runs.get(event.parent_id or "")
        guards = () if self._runs else (self._guard,)
        run = Run(event.name, parent, guards, kind=event.kind, max=event.max, id=event.run_id)
        run.listeners = (self._hear,)  # and nobody else
        self._runs[event.run_id] = run

    def _RunResumed(self, event: events.RunResumed) -> None:  # noqa: N802  # named after its event
        """What was under way then is over: tools give back their step, models may have been billed."""
        for call, started in self._calls.values():
            call.plan.undo(call)
            self._open[started.key] = started
        for model in self._models.values():
            model.lost()
        self._calls, self._models = {}, {}

    def _IterationStarted(self, event: events.IterationStarted) -> None:  # noqa: N802  # named after its event
        self._runs[event.run_id].iteration = event.iteration or 0

    def _Charged(self, event: events.Charged) -> None:  # noqa: N802  # named after its event
        self._runs[event.run_id].charge(tuple(_exact(event.amounts).items()))

    # -- calls -----------------------------------------------------------------------------------

    def _ToolStarted(self, event: events.ToolStarted) -> None:  # noqa: N802  # named after its event
        self._reserved = event.reserved
        place = event.run_id, event.call_id
        before = self._calls.get(place)
        if event.attempt > 1 and before is not None:
            call, _ = before[0].plan.again(before[0])
        else:
            self._seen += 1
            call = self._call(event)
            call.plan.admit(call)
        self._calls[place] = call, event
        call.plan.start(call)

    def _call(self, event: events.ToolStarted) -> ToolCall:
        run = self._runs[event.run_id]
        arguments = dict(shown(event.arguments))
        if not all(name.isidentifier() and not keyword.iskeyword(name) for name in arguments):
            arguments = {"arguments": arguments}
        # arguments that were erased, or that only one process can tell apart, are known by the call or its digest
        erased = event.key is not None and event.digest is None
        who = event.call_id if erased else None if event.durable else event.digest
        tool = self._tool(event.tool, tuple(arguments), who, bool(event.repeatable))
        plan = run.plans.get(tool)
        if plan is None:
            plan = tool.compile(tool, run)
            plan.retried()  # limits that count calls, not attempts, hear of the last one only
        return ToolCall(plan, tool.fn, None, (), arguments, event.call_id)

    def _tool(self, name: str, parameters: tuple[str, ...], who: str | None, repeatable: bool) -> Tool:
        place = name, parameters, who, repeatable
        if place not in self._tools:
            self._tools[place] = Tool(
                _StandIn(parameters),
                name=name,
                cost_fn=lambda call: self._reserved,
                repeatable=repeatable,
                compile=compile_plan,
            )
        return self._tools[place]

    def _ToolFinished(self, event: events.ToolFinished) -> None:  # noqa: N802  # named after its event
        place = event.run_id, event.call_id
        if place not in self._calls:
            return
        call, started = self._calls[place]
        result, error = shown(event.result), shown(event.error)
        if event.items is not None:
            result = [shown(event.items), result]
        if isinstance(error, dict):
            error = rebuilt(error)
        call.reported = _exact(event.charged)
        call.plan.settle(call, event.outcome, result, error)
        if id(started) not in self._followed:
            call.plan.finish(call, result, error)
            del self._calls[place]

    def _QuestionAsked(self, event: events.QuestionAsked) -> None:  # noqa: N802  # named after its event
        self._asked[event.question_id] = event.call_id

    def _QuestionAnswered(self, event: events.QuestionAnswered) -> None:  # noqa: N802  # named after its event
        """A call that an interruption gave back has run after all."""
        started = self._open.get(self._asked.get(event.question_id))
        if event.decision == "ran" and started is not None:
            run = self._runs[started.run_id]
            for each in run.chain:
                each.steps += 1
            run.charge(tuple(_exact(started.reserved).items()))

    def _ModelStarted(self, event: events.ModelStarted) -> None:  # noqa: N802  # named after its event
        self._seen += 1
        model = self._models[event.call_id] = _Recorded(self._runs[event.run_id], event)
        model.admit()

    def _ModelCalled(self, event: events.ModelCalled) -> None:  # noqa: N802  # named after its event
        model = self._models.pop(event.call_id, None)
        if model is not None:
            model.settle(event)
        else:  # a result of a batch, which nobody admits
            self._runs[event.run_id].charge(tuple(_exact(event.charged).items()))


class _StandIn:
    """Stands for a recorded tool: it has its parameters, and is never run."""

    def __init__(self, names: Iterable[str]) -> None:
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )

    def __call__(self, **arguments: Any) -> None:
        raise AssertionError("what is recorded isn't run again")


class _Recorded(ModelCall):
    """A model call at the amounts of its record, and without a span."""

    def __init__(self, run: Run, event: events.ModelStarted) -> None:
        super().__init__(run, event.model, PriceBook({}))
        self._id = event.call_id
        self.reserved = _exact(event.reserved)
        self.unpriced = "usd" not in self.reserved

    def settle(self, event: events.ModelCalled) -> None:
        """At what was charged then."""
        usd = None if event.cost is None else amount(event.cost, "usd")
        self._settle(_exact(event.charged), event.usage, usd, event.partial, None)

    def _advice(self, cap: Any) -> str:
        return "It would not have been sent."

    def _start_span(self) -> Span:
        return INVALID_SPAN


def _followed(stream: Iterable[events.Event]) -> set[int]:
    """The ids of the started attempts that another attempt of the same call follows."""
    found: set[int] = set()
    latest: dict[tuple[str, str], events.ToolStarted] = {}
    for event in stream:
        if isinstance(event, events.ToolStarted):
            place = event.run_id, event.call_id
            if event.attempt > 1 and place in latest:
                found.add(id(latest[place]))
            latest[place] = event
    return found


def _afresh(limit: Any, timer: Callable[[], float]) -> Any:
    """The limit with nothing counted yet, by the clock of the record."""
    if getattr(limit, "per", "run") not in ("run", "iteration"):
        raise ConfigurationError(
            f"what_if({limit!r}): what it allows depends on other runs, too, and a question about the past must not "
            f"touch its ledger: give limits per run"
        )
    return limit.on_clock(timer) if hasattr(limit, "on_clock") else limit


def _exact(amounts: Mapping[str, Decimal]) -> dict[str, int]:
    return {unit: amount(value, unit) for unit, value in amounts.items()}
