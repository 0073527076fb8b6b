"""A run as a tree: its iterations, calls, refusals, questions and verdicts, and the runs inside it, with costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loopguard import _events as events
from loopguard._amounts import decimals
from loopguard._tree import Marks, draw
from loopguard.cli import _words as words
from loopguard.journal._fold import fold

__all__ = ["picture"]


class _Node:
    """A line, and what stands below it."""

    __slots__ = ("below", "open", "parts", "wrong")

    def __init__(self, *parts: str, open: str | None = None) -> None:
        self.parts = list(parts)
        self.open = open
        """What is said of it until it has ended."""
        self.wrong = False
        self.below: list[_Node] = []

    def end(self, *parts: str, wrong: bool = False) -> None:
        """It is over."""
        self.parts += parts
        self.open = None
        self.wrong = wrong

    def line(self, marks: Marks) -> str:
        mark = marks.wrong if self.wrong else ""
        return mark + marks.between.join([*self.parts, *([self.open] if self.open else [])])


def picture(stream: Sequence[events.Event], *, open: str, limit: int | None, marks: Marks) -> Iterator[str]:
    """The lines of the tree. ``open``: what is said of what hasn't ended. ``limit``: the characters of a value."""
    drawing = _Drawing(stream, open, limit)
    for event in stream:
        drawing.add(event)
    return draw(drawing.roots, lambda node: node.below, lambda node: node.line(marks), marks)


class _Drawing:
    """The tree while it grows, event by event."""

    def __init__(self, stream: Sequence[events.Event], open: str, limit: int | None) -> None:
        self.story = fold(stream)
        self.roots: list[_Node] = []
        self._open = open
        self._limit = limit
        self._runs: dict[str, _Node] = {}
        self._here: dict[str, _Node] = {}
        """Where each run is: its iteration under way, or the run itself."""
        self._calls: dict[object, _Node] = {}

    def add(self, event: events.Event) -> None:
        """One more event."""
        match event:
            case events.RunStarted():
                self._started(event)
            case events.RunEnded():
                self._ended(event)
            case events.IterationStarted():
                node = self._here[event.run_id] = _Node(f"#{event.iteration}", open=self._open)
                self._runs[event.run_id].below.append(node)
            case events.IterationEnded():
                self._passed(event)
            case events.ToolStarted():
                node = _Node(words.called(event.tool, event.arguments, self._limit), open=self._open)
                if event.attempt > 1:
                    node.parts.append(f"attempt {event.attempt}")
                self._put(event, node, self._calls.get(event.parent_call or ""))
                self._calls[event.key] = self._calls[event.run_id, event.call_id] = node
            case events.ToolFinished():
                node = self._over(event, event.call_id, words.finished(event), event.outcome in words.FAILED)
                node.parts[0] += words.outcome(event, self._limit)
            case events.QuestionAsked():
                waits = f"waits for an answer to {words.text(event.question_id, 200)}"
                node = self._calls[event.question_id] = _Node(words.asked(event, self._limit), open=waits)
                self._put(event, node)
            case events.QuestionAnswered() if event.question_id in self._calls:
                self._calls[event.question_id].end(words.answered(event, self._limit))
            case events.ModelStarted():
                node = self._calls[event.run_id, event.call_id] = _Node(_model(event.model), open=self._open)
                self._put(event, node)
            case events.ModelCalled():
                if (event.run_id, event.call_id) not in self._calls:  # a result of a batch
                    self._calls[event.run_id, event.call_id] = node = _Node(_model(event.model))
                    self._put(event, node)
                self._over(event, event.call_id, words.modelled(event, self._limit), event.error is not None)
            case _:
                self._say(event)

    def _started(self, event: events.RunStarted) -> None:
        node = self._runs.get(event.run_id)
        if node is None:
            node = self._runs[event.run_id] = _Node(words.text(event.name, 200), open=self._open)
            if event.parent_id in self._here:
                self._here[event.parent_id].below.append(node)
            else:
                node.parts.append(words.text(event.run_id, 200))
                self.roots.append(node)
        self._here[event.run_id] = node

    def _ended(self, event: events.RunEnded) -> None:
        node, run = self._runs[event.run_id], self.story.runs[event.run_id]
        if run.ended is not event:  # it went on later
            return
        passes = [f"{event.iterations} iteration{'' if event.iterations == 1 else 's'}"] if event.kind == "loop" else []
        cost = words.amounts(decimals(run.spent)) + (["cost unknown"] if run.unknown_cost else [])
        last = words.ended(event, run.completed, self._limit)
        node.end(*passes, *cost, words.lasted(event.duration), last.text, wrong=last.wrong)

    def _passed(self, event: events.IterationEnded) -> None:
        made = self.story.runs[event.run_id].passes[event.iteration or 0]
        spent = {unit: exact - made.before.get(unit, 0) for unit, exact in made.after.items()}
        rejected = [] if event.accepted else ["rejected"]
        self._here[event.run_id].end(*words.amounts(decimals(spent)), words.lasted(event.duration), *rejected)

    def _over(self, event: events.Event, call_id: str, parts: list[str], wrong: bool) -> _Node:
        node = self._calls[event.run_id, call_id]
        node.end(*parts, wrong=wrong)
        return node

    def _say(self, event: events.Event) -> None:
        line = words.said(event, self._limit)
        if line is None:
            return
        node = _Node(line.text)
        node.wrong = line.wrong
        if isinstance(event, events.RunResumed):
            self._interrupt()
        self._put(event, node)

    def _interrupt(self) -> None:
        """What was under way in an earlier process is over."""
        for node in [*self._here.values(), *self._calls.values()]:
            if node.open is self._open and node not in self._runs.values():
                node.open = "interrupted"
        self._here.update(self._runs)

    def _put(self, event: events.Event, node: _Node, above: _Node | None = None) -> None:
        (above or self._here[event.run_id]).below.append(node)


def _model(name: str) -> str:
    return f"model {words.text(name, 200)}"
