"""What a @loop decorator, or a Flow, says about its runs, checked at decoration."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from loopguard._call import ASYNC, ASYNC_GENERATOR, GENERATOR, check_callable, colour_of, plain_function
from loopguard._guard import Guard
from loopguard.budgets import Budget
from loopguard.conditions import of_state
from loopguard.exceptions import ConfigurationError
from loopguard.judges import AnthropicJudge

__all__ = ["Body", "LoopOptions", "check_evaluators", "check_retries", "name_of"]


_ONE = inspect.signature(lambda state, /: None)


class Body:
    """What an iteration runs, and how its value is judged: a loop's function, or a step of a flow."""

    evaluators: tuple[Any, ...] = ()
    max_retries: int = 0
    retries_errors = False
    """Whether an exception counts as a rejected value, which is the next attempt's feedback."""
    call: Any = None
    """How a step is called with the state; a loop's function is called as whoever began the run would."""
    steps: Any = None
    """Of a body that isn't a function but effects: (run, state) to a generator of them."""

    def __init__(self, fn: Any, what: str, name: Any, state: Any = None) -> None:
        check_callable(fn, what)
        self.fn = plain_function(fn)
        colour = colour_of(fn)
        if colour in (GENERATOR, ASYNC_GENERATOR):
            raise ConfigurationError(
                f"{what}: {name_of(self.fn)} is a generator function; a step returns the next state, it doesn't yield"
            )
        self.is_async = colour == ASYNC
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigurationError(f"{what.removeprefix('@')}(name={name!r}): give a text")
        self.name: str = name or name_of(self.fn)
        try:
            self.signature = inspect.signature(self.fn)
        except ValueError:  # int, and some others, don't tell theirs
            self.signature = _ONE
        self.takes_self = not hasattr(self.fn, "__self__") and not isinstance(self.fn, functools.partial)
        feedback = self.signature.parameters.get("feedback")
        self.feedback = feedback if feedback is not None and feedback.kind is feedback.KEYWORD_ONLY else None
        self.state = state

    @property
    def no_feedback(self) -> Any:
        """What the body is told as feedback while there is none."""
        default = self.feedback.default if self.feedback is not None else None
        return None if default is inspect.Parameter.empty else default

    def state_parameter(self, bound: bool) -> inspect.Parameter | None:
        """The parameter that each iteration's result replaces; None where there is no parameter."""
        parameters = list(self.signature.parameters.values())
        if bound and self.takes_self:
            parameters = parameters[1:]
        if self.state is not None:
            return self.signature.parameters[self.state]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL):
                return parameter
        return None

    def may_return_none(self, state: inspect.Parameter) -> bool:
        """Whether an annotation of the state or the result admits None."""
        try:
            signature = inspect.signature(self.fn, eval_str=True)
        except Exception:  # annotations are the user's, and may name what can't be found from here
            signature = self.signature
        known = signature.parameters.get(state.name)
        hints = signature.return_annotation, known.annotation if known is not None else signature.empty
        return any(_admits_none(hint) for hint in hints if hint is not signature.empty)


class LoopOptions(Body):
    """What a decorator says about one loop, which is its own body. Immutable; holds no state of any run."""

    kind = "loop"
    maker = "loop"
    """What error messages call it."""
    delete_on_success = False
    bodies: tuple[Body, ...]
    """What the iterations run: of a flow one for each step, in order."""

    def __init__(self, fn: Any, options: Mapping[str, Any]) -> None:
        super().__init__(fn, "@loop", options["name"], options["state"])
        who = self.maker
        self.bodies = (self,)
        self.max = _positive(options["max"], "loop(max")
        self.until = _condition(options["until"])
        self.question, self.judge = _judge(options["until_llm"], options["judge"], self.is_async)
        self.evaluators = check_evaluators(options["evaluate"], self.is_async, "loop(evaluate")
        self.max_retries = check_retries(options["max_retries"], who)
        self.on_reject: str = _one_of(options, "on_reject", "retry", "continue")
        self.on_failure: str = _one_of(options, "on_failure", "raise", "return")
        self.best = _plain(options["best"], "best")
        self.fallback = _callable(options["fallback"], "fallback")
        self.guards = _guards(options["guard"], options["budget"], who)
        self.timeout = _seconds(options["timeout"], who)
        self.on_iteration = _callable(options["on_iteration"], "on_iteration")
        self.on_transition = _plain(options["on_transition"], "on_transition")
        self.on_limit: str = _one_of(options, "on_limit", "return", "raise")
        self.store = _store(options.get("store"), who)
        named = [p.name for p in self.signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if self.state is not None and self.state not in named:
            known = ", ".join(named) or "none"
            raise ConfigurationError(f"loop(state={self.state!r}): {self.name} has no such parameter; it has: {known}")

    def body(self, done: int) -> Body:
        """What runs after so many accepted iterations."""
        return self.bodies[min(done, len(self.bodies) - 1)]

    def whereabouts(self, iteration: int, done: int, rejections: int) -> str:
        """Where a run of it is, for people."""
        return f"in loop {self.name!r}, iteration {iteration} of at most {self.max}"

    def larger(self, max: int | None) -> LoopOptions:
        """The same options with another ceiling."""
        if max is None:
            return self
        made = copy.copy(self)
        made.max = _positive(max, "resume(max")
        return made

    @property
    def conditional(self) -> bool:
        """Whether anything but the ceiling can say that the loop is done."""
        return self.until is not None or self.question is not None or bool(self.evaluators)

    @property
    def evaluates_alone(self) -> bool:
        """Whether the evaluators' yes is what ends the loop."""
        return bool(self.evaluators) and self.until is None and self.question is None

    def over(self, done: int) -> bool:
        """Whether so many accepted iterations are all there is to do."""
        return False


def _admits_none(hint: Any) -> bool:
    if isinstance(hint, str):
        return any(word in hint for word in ("None", "Optional", "Any", "object"))
    hint = getattr(hint, "__value__", hint)  # a `type` alias
    if hint in (None, type(None), Any, object) or isinstance(hint, TypeVar):
        return True
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _admits_none(hint.__origin__)
    return origin in (typing.Union, types.UnionType, typing.Literal) and any(map(_admits_none, typing.get_args(hint)))


def name_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _positive(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{what}={value!r}): give an int of at least 1")
    return value


def check_retries(value: Any, who: str) -> int:
    """The number of retries, an int of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigurationError(f"{who}(max_retries={value!r}): give an int of at least 0")
    return value


def _seconds(value: Any, who: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigurationError(f"{who}(timeout={value!r}): give seconds above 0, or None")
    return float(value)


def _callable(value: Any, what: str) -> Any:
    if value is not None and not callable(value):
        raise ConfigurationError(f"loop({what}={value!r}): give a function")
    return value


def _plain(value: Any, what: str) -> Any:
    """A function that is called where nothing could await it."""
    if _callable(value, what) is not None and colour_of(value) == ASYNC:
        raise ConfigurationError(f"loop({what}={value!r}): give a plain function, not an async one")
    return value


def _condition(until: Any) -> Any:
    if until is not None and not callable(until):
        raise ConfigurationError(
            f"loop(until={until!r}): give a function of the state, or conditions joined by | and &"
        )
    return of_state(until) if until is not None else None


def _store(store: Any, who: str) -> Any:
    if store is None:
        return None
    from loopguard.journal._open import check_store

    return check_store(store, f"{who}(store")


def _one_of(options: Mapping[str, Any], name: str, *allowed: str) -> str:
    if options[name] not in allowed:
        raise ConfigurationError(f"loop({name}={options[name]!r}): give {' or '.join(map(repr, allowed))}")
    return str(options[name])


def check_evaluators(evaluate: Any, is_async: bool, what: str) -> tuple[Any, ...]:
    """The evaluators, one or several; one that is only auxiliary can't decide alone."""
    found = (evaluate,) if callable(evaluate) else evaluate
    owner = "loop" if what.startswith("loop") else "flow"
    if not isinstance(found, tuple | list) or not all(callable(evaluator) for evaluator in found):
        raise ConfigurationError(f"{what}={evaluate!r}): give a function of the value, or several in a tuple")
    for evaluator in found:
        if not is_async and (colour_of(evaluator) == ASYNC or getattr(evaluator, "is_async", False) is True):
            raise ConfigurationError(
                f"{what}={name_of(evaluator)}): it is async, but the {owner} is sync; make one like the other"
            )
    if found and all(getattr(evaluator, "auxiliary", False) for evaluator in found):
        raise ConfigurationError(
            f"{what}={evaluate!r}): a model's score is too weak to decide alone; put a check of code beside it, "
            f"or say alone=True"
        )
    return tuple(found)


def _judge(question: Any, judge: Any, is_async: bool) -> tuple[str | None, Any]:
    if question is None:
        if judge is not None:
            raise ConfigurationError("loop(judge=…) answers a question: give it as until_llm=")
        return None, None
    if not isinstance(question, str) or not question.strip():
        raise ConfigurationError(f"loop(until_llm={question!r}): give the question as a text")
    if judge is None:
        judge = AnthropicJudge()
    if not callable(judge):
        raise ConfigurationError(f"loop(judge={judge!r}): give a function (question, state)")
    if not is_async and (colour_of(judge) == ASYNC or getattr(judge, "is_async", False) is True):
        raise ConfigurationError(f"loop(judge={judge!r}): it is async, but the loop is sync; make one like the other")
    return question, judge


def _guards(guard: Any, budget: Any, who: str) -> tuple[Guard, ...]:
    if guard is not None and not isinstance(guard, Guard):
        raise ConfigurationError(f"{who}(guard={guard!r}): give a Guard(…)")
    if budget is not None and not isinstance(budget, Budget):
        raise ConfigurationError(f"{who}(budget={budget!r}): give a Budget(…)")
    return (*((guard,) if guard is not None else ()), *((Guard(budget),) if budget is not None else ()))
