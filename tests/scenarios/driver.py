"""What a framework has to do to be put through the scenarios, and the scripted model that all of them ask."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from loopguard import Guard

__all__ = ["MODEL", "PRICES", "Agent", "Call", "Driver", "Result", "ScriptedModel", "asynchronous"]

MODEL = "m"
PRICES = {MODEL: {"input": 1, "output": 1000}}
"""USD per million tokens: an output token costs $0.001."""
OUTPUT_TOKENS = 10
"""What each turn of the scripted model writes, where a framework asks a model at all: $0.01."""


@dataclass(frozen=True)
class Call:
    """A tool call that the model makes."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Result:
    """What the model is told about one of its calls."""

    id: str
    text: str
    is_error: bool


Turn: TypeAlias = "str | list[Call]"
Script: TypeAlias = "Iterable[Turn] | Callable[[int], Turn]"


class ScriptedModel:
    """Says its turns in order; a function of the turn's number (from 1) may go on for ever.

    Each time it is asked it checks that every call it has made was answered once, and nothing else was.
    """

    def __init__(self, script: Script) -> None:
        turns = script if callable(script) else None
        left = None if turns is not None else iter(script)  # type: ignore[arg-type]  # it is iterable, then
        self._say: Callable[[int], Turn] = turns or (lambda _: next(left, "done"))  # type: ignore[arg-type]  # as above
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self.calls: list[Call] = []
        self.results: dict[str, Result] = {}
        self.turns = 0

    def __call__(self, results: Iterable[Result]) -> Turn:
        """The next turn, given all results so far."""
        with self._lock:
            told = list(results)
            assert sorted(result.id for result in told) == sorted(call.id for call in self.calls), "orphans"
            self.results = {result.id: result for result in told}
            self.turns += 1
            turn = self._say(self.turns)
            if isinstance(turn, str):
                return turn
            made = [Call(call.name, call.arguments, f"call_{next(self._ids)}") for call in turn]
            self.calls += made
            return made

    def told(self, name: str) -> list[Result]:
        """What it was told about the calls of one tool, in their order."""
        return [self.results[call.id] for call in self.calls if call.name == name and call.id in self.results]


@dataclass
class Agent:
    """A model, its tools, and the guard that they answer to."""

    model: ScriptedModel
    tools: dict[str, Callable[..., Any]]
    guard: Guard
    options: dict[str, Any] = field(default_factory=dict)


class Driver:
    """One framework: it runs an agent until its model has said a text, in the run that is current.

    `unsupported` says of each scenario, or ``scenario/mode``, that the framework can't do, why.
    """

    name: ClassVar[str]
    asks_a_model: ClassVar[bool] = True
    """Whether the framework itself calls the model, and the adapter meters that."""
    unsupported: ClassVar[Mapping[str, str]] = {}

    def run(self, agent: Agent) -> None:
        """With plain functions as tools, from sync code."""
        raise NotImplementedError

    async def arun(self, agent: Agent) -> None:
        """With coroutine functions as tools, from async code."""
        raise NotImplementedError

    def stream(self, agent: Agent) -> None:
        """As `run`, with the model's answers streamed."""
        raise NotImplementedError


def asynchronous(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function as a coroutine function of the same signature."""

    @functools.wraps(fn)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return coroutine
