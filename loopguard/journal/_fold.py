"""What a journal comes to: counters, iterations and calls, folded from its events and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from loopguard import _events as events
from loopguard._amounts import amount
from loopguard._outcomes import LoopState, Transition

__all__ = ["Call", "ModelCall", "Pass", "RunStory", "Story", "fold"]


@dataclass(slots=True)
class Pass:
    """One iteration."""

    number: int
    value: Any
    """The state that the body was given."""
    feedback: str | None
    before: dict[str, int]
    """What the run had spent when it began."""
    after: dict[str, int]
    returned: Any = None
    """What the body returned; None while it hasn't (a returned None is a Stored)."""
    final: Any = None
    """What it was made into, where an evaluator parsed it."""
    accepted: bool = False
    verdicts: dict[int, events.VerdictGiven] = field(default_factory=dict)
    duration: float = 0.0


@dataclass(slots=True)
class RunStory:
    """One run: what it has used and how far it came."""

    started: events.RunStarted
    ended: events.RunEnded | None = None
    passes: dict[int, Pass] = field(default_factory=dict)
    transitions: list[Transition] = field(default_factory=list)
    steps: int = 0
    refusals: int = 0
    spent: dict[str, int] = field(default_factory=dict)
    """In 1e-18 of each unit."""
    unknown_cost: bool = False
    trace: str | None = None
    """The traceparent of its last span."""

    @property
    def completed(self) -> bool:
        """Whether it has come to its goal."""
        return bool(self.transitions) and self.transitions[-1].target is LoopState.SUCCESS

    @property
    def under_way(self) -> Pass | None:
        """The last iteration that began, over or not."""
        return self.passes[max(self.passes)] if self.passes else None


@dataclass(slots=True)
class Call:
    """One tool call."""

    key: str
    started: events.ToolStarted
    finished: events.ToolFinished | None = None
    open: bool = True
    answer: Any = None
    """What a person said of it, where it was uncertain: it has a `decision`."""
    times: int = 1
    """How often its body was begun; each time may end in a question of its own."""

    @property
    def counts(self) -> bool:
        """Whether it is a step of its run: an interrupted one isn't, until a person says that it has run."""
        ran = self.answer is not None and self.answer.decision == "ran"
        return self.open or self.finished is not None or ran


@dataclass(slots=True)
class ModelCall:
    """One metered model call."""

    started: events.ModelStarted
    called: events.ModelCalled | None = None
    open: bool = True


class Story:
    """Everything that a journal says."""

    def __init__(self) -> None:
        self.runs: dict[str, RunStory] = {}
        self.calls: dict[str, Call] = {}
        self.models: dict[str, ModelCall] = {}
        self.questions: dict[str, events.QuestionAsked] = {}
        self.answers: dict[str, events.QuestionAnswered] = {}
        self.charges: dict[str, dict[str, int]] = {}
        """Who has spent what, in 1e-18 of each unit: by tool, by model, or by run where its body was charged."""
        self.raised: dict[str, int] = {}
        """Caps that people raised, by unit."""
        self.elapsed = 0.0
        """Seconds that earlier processes have spent on it, waits for people excluded."""
        self.code: str | None = None
        self.redacted = False
        """Whether something of it was masked before it was stored: it can't be resumed."""
        self._by_call: dict[tuple[str, str], Call] = {}
        self._since: float | None = None
        self._last = 0.0
        self._waiting: set[str] = set()
        """The questions that are being waited for: the clock stands still."""
        self._paused = 0.0

    @property
    def root(self) -> RunStory | None:
        """The run that the journal is about: the first one."""
        return next(iter(self.runs.values()), None)

    def chain(self, run_id: str | None) -> Iterator[RunStory]:
        """The run and those above it."""
        while run_id is not None and run_id in self.runs:
            run = self.runs[run_id]
            yield run
            run_id = run.started.parent_id

    def charge(self, run_id: str, amounts: Mapping[str, Decimal], who: str) -> None:
        """Book what was spent, and by whom."""
        for unit, spent in amounts.items():
            exact = amount(spent, unit)
            own = self.charges.setdefault(who, {})
            own[unit] = own.get(unit, 0) + exact
            for run in self.chain(run_id):
                run.spent[unit] = run.spent.get(unit, 0) + exact

    def step(self, run_id: str, n: int = 1) -> None:
        """Count tool calls."""
        for run in self.chain(run_id):
            run.steps += n

    def add(self, event: events.Event) -> None:
        """Take one more event into account."""
        if self._since is None:
            self._since = event.at
        reader = getattr(self, f"_{type(event).__name__}", None)
        if reader is not None:
            reader(event)
        self._last = event.at

    # -- runs ------------------------------------------------------------------------------------

    def _RunStarted(self, event: events.RunStarted) -> None:  # noqa: N802  # named after its event
        if event.run_id in self.runs:
            self.runs[event.run_id].ended = None  # it goes on
        else:
            self.runs[event.run_id] = RunStory(event)
        self.runs[event.run_id].trace = event.trace or self.runs[event.run_id].trace
        if self.code is None:
            self.code = event.code
        self.redacted = self.redacted or bool(event.redacted)

    def _RunResumed(self, event: events.RunResumed) -> None:  # noqa: N802  # named after its event
        """What was under way then is over: tools give back their step, models may have been billed."""
        self.elapsed += max(0.0, self._last - (self._since or 0.0)) if self._last else 0.0
        self._since = event.at
        if self._waiting:
            self.elapsed -= max(0.0, self._last - self._paused)
            self._waiting.clear()
        self.code = event.code
        for call in self.calls.values():
            if call.open:
                call.open = False
                self.step(call.started.run_id, -1)
        for model in self.models.values():
            if model.open:
                model.open = False
                self.charge(model.started.run_id, model.started.reserved, model.started.model)

    def _RunEnded(self, event: events.RunEnded) -> None:  # noqa: N802  # named after its event
        if event.run_id in self.runs:
            self.runs[event.run_id].ended = event

    def _IterationStarted(self, event: events.IterationStarted) -> None:  # noqa: N802  # named after its event
        run = self.runs[event.run_id]
        assert event.iteration is not None
        if event.iteration not in run.passes:
            spent = dict(run.spent)
            run.passes[event.iteration] = Pass(event.iteration, event.value, event.feedback, spent, spent)

    def _IterationReturned(self, event: events.IterationReturned) -> None:  # noqa: N802  # named after its event
        made = self._pass(event)
        made.returned, made.duration = event.value, event.duration

    def _IterationEnded(self, event: events.IterationEnded) -> None:  # noqa: N802  # named after its event
        made = self._pass(event)
        made.accepted, made.duration, made.after = event.accepted, event.duration, dict(self.runs[event.run_id].spent)
        if event.value is not None:  # an evaluator parsed it
            made.final = event.value

    def _VerdictGiven(self, event: events.VerdictGiven) -> None:  # noqa: N802  # named after its event
        self._pass(event).verdicts[event.index] = event

    def _Transitioned(self, event: events.Transitioned) -> None:  # noqa: N802  # named after its event
        self.runs[event.run_id].transitions.append(event.transition)

    def _pass(self, event: events.Event) -> Pass:
        assert event.iteration is not None
        return self.runs[event.run_id].passes[event.iteration]

    # -- calls -----------------------------------------------------------------------------------

    def _ToolStarted(self, event: events.ToolStarted) -> None:  # noqa: N802  # named after its event
        if event.attempt == 1:
            self.step(event.run_id)
        key = event.key or f"{event.run_id}:{event.call_id}"
        times = self.calls[key].times + (event.attempt == 1) if key in self.calls else 1
        self.calls[key] = self._by_call[event.run_id, event.call_id] = Call(key, event, times=times)

    def _ToolFinished(self, event: events.ToolFinished) -> None:  # noqa: N802  # named after its event
        self.charge(event.run_id, event.charged, event.tool)
        call = self.calls.get(event.key or "") or self._by_call.get((event.run_id, event.call_id))
        if call is not None:
            call.finished, call.open = event, False

    def _ToolRefused(self, event: events.ToolRefused) -> None:  # noqa: N802  # named after its event
        if not event.observed:
            for run in self.chain(event.run_id):
                run.refusals += 1

    def _Charged(self, event: events.Charged) -> None:  # noqa: N802  # named after its event
        self.charge(event.run_id, event.amounts, self.runs[event.run_id].started.name)

    def _ModelStarted(self, event: events.ModelStarted) -> None:  # noqa: N802  # named after its event
        self.models[event.call_id] = ModelCall(event)

    def _ModelCalled(self, event: events.ModelCalled) -> None:  # noqa: N802  # named after its event
        self.charge(event.run_id, event.charged, event.model)
        if event.cost is None:
            for run in self.chain(event.run_id):
                run.unknown_cost = True
        model = self.models.get(event.call_id)
        if model is not None:
            model.called, model.open = event, False

    # -- people ----------------------------------------------------------------------------------

    def _QuestionAsked(self, event: events.QuestionAsked) -> None:  # noqa: N802  # named after its event
        self.questions[event.question_id] = event
        if not self._waiting:
            self._paused = event.at
        self._waiting.add(event.question_id)

    def _QuestionAnswered(self, event: events.QuestionAnswered) -> None:  # noqa: N802  # named after its event
        self.answers[event.question_id] = event
        question = self.questions.get(event.question_id)
        if question is None:
            return
        if event.question_id in self._waiting:
            self._waiting.discard(event.question_id)
            if not self._waiting:
                self.elapsed -= max(0.0, event.at - self._paused)
        if (
            event.kind == "uncertain" and event.decision == "ran"
        ):  # the step and the cost that the interruption gave back
            self.step(question.run_id)
            call = self.calls.get(question.call_id or "")
            if call is not None:
                call.answer = event
                self.charge(question.run_id, call.started.reserved, call.started.tool)

    def _BudgetExtended(self, event: events.BudgetExtended) -> None:  # noqa: N802  # named after its event
        self.raised[event.unit] = max(self.raised.get(event.unit, 0), amount(Decimal(event.limit), event.unit))


def fold(stream: Iterable[events.Event]) -> Story:
    """The story that a stream of events tells."""
    story = Story()
    for event in stream:
        story.add(event)
    return story
