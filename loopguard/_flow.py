"""Flow: ordered steps, each checkpointed: a loop whose iteration i runs step i."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from loopguard._guard import Guard
from loopguard._loop import Runnable, call_loop, call_loop_async
from loopguard._loop_journal import needed_store, results_of
from loopguard._loop_options import Body, LoopOptions, check_evaluators, check_retries
from loopguard._outcomes import LoopResult
from loopguard._pipeline import Steps
from loopguard._run import Run
from loopguard._schemas import InvalidArguments, convert, reader
from loopguard._threads import in_thread
from loopguard._tool import BoundTool, DecoratedTool, tool_of
from loopguard.budgets import Budget
from loopguard.exceptions import ConfigurationError, RunConflict
from loopguard.questions.inbox import key_of
from loopguard.redaction import check_id

__all__ = ["Flow", "Step", "await_input", "step"]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step of a flow, as `step` and `await_input` make it."""

    fn: Any
    name: str | None = None
    max_retries: int | None = None
    verify: Any = None
    key: str | None = None
    """Of a step that waits for a person: what it is given is stored under this name."""
    prompt: str | None = None


def step(
    fn: Callable[..., Any],
    *,
    name: str | None = None,
    max_retries: int | None = None,
    verify: Callable[[Any], object] | Sequence[Callable[[Any], object]] | None = None,
) -> Step:
    """A step of a Flow with a name, retries or a verification of its own.

    - ``fn(state)`` returns the next state: a function, sync or async, a decorated loop or tool, another Flow. One
      without parameters is called without.
    - ``name``: unique in its flow, by default the function's. Journals know the step by it.
    - ``verify``: an evaluator of what the step returns, or several, see `loopguard.evaluators`. One that parses the
      value replaces it.
    - ``max_retries``: how often the step is run again, with all its calls, after it raised or was rejected; by default
      the flow's. It gets the same state and the reason, as ``current_run().feedback`` or its keyword-only parameter
      ``feedback``. Refusals, and faults of configuration and journal, aren't retried. LoopLimit counts on: a call that
      only fails again and again is refused in the end.
    """
    if max_retries is not None:
        check_retries(max_retries, "step")
    return Step(fn, name, max_retries, verify)


def await_input(key: str, prompt: str | None = None) -> Step:
    """A step of a Flow that waits until a person has given a value: ``flow.resume_with(run_id, value)``.

    The run is parked meanwhile: it ends ``waiting``, and no process needs to live. ``loopguard answer`` and
    ``journal.answer`` answer it too; then ``flow.resume(run_id)`` goes on.

    - ``key``: where the value goes: a state that is a dict gets it under this key, a dataclass or a pydantic model in
      its field of this name, and None becomes ``{key: value}``. One that doesn't fit the field is asked for again. It
      is the step's name, too.
    - ``prompt``: what the person is told.
    """
    if not isinstance(key, str) or not key:
        raise ConfigurationError(f"await_input({key!r}): give a name for what is asked")
    if prompt is not None and not isinstance(prompt, str):
        raise ConfigurationError(f"await_input({key!r}, prompt={prompt!r}): give a text")
    return Step(lambda state: state, key, 0, None, key, prompt)


class _StepBody(Body):
    """A step, checked, as the body of an iteration."""

    retries_errors = True

    def __init__(self, given: Any, max_retries: int) -> None:
        made = given if isinstance(given, Step) else Step(given)
        super().__init__(made.fn, "step", made.name if made.name is not None else _own_name(made.fn))
        try:
            self.signature.bind(*([None] if self.state_parameter(False) is not None else []), **self._told())
        except TypeError as exc:
            raise ConfigurationError(f"step {self.name!r}: a step is called with the state alone: {exc}") from None
        self.max_retries = max_retries if made.max_retries is None else made.max_retries
        self.verify = made.verify
        self.call = self.fn
        if made.key is not None:
            self.steps = functools.partial(_await_input, made.key, made.prompt)

    def _told(self) -> dict[str, Any]:
        return {} if self.feedback is None else {"feedback": None}

    def settle(self, is_async: bool) -> None:
        """Make it fit into a flow that is sync or async."""
        if self.verify is not None:
            self.evaluators = check_evaluators(self.verify, is_async, "step(verify")
        if is_async and not self.is_async:
            self.call = functools.partial(_off_the_event_loop, self.fn, self.name)


def _own_name(fn: Any) -> str | None:
    """The name that a loop, a flow or a tool was given."""
    if isinstance(fn, Runnable):
        return fn._options.name
    return tool_of(fn).name if isinstance(fn, BoundTool | DecoratedTool) else None


async def _off_the_event_loop(fn: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return await in_thread(functools.partial(fn, *args, **kwargs), name)


def _await_input(key: str, prompt: str | None, run: Run, state: Any) -> Steps:
    """What a person gives, put into the state; where nobody has yet, the run is parked."""
    if run.recorder is None:
        raise ConfigurationError(
            f"await_input({key!r}): there is no journal in which the flow could wait: give store=, or LOOPGUARD_STORE"
        )
    put = _setter(key, state)
    asked = prompt
    while True:
        value = yield from run.recorder.questions.input(run, key, asked)
        try:
            return put(value)
        except InvalidArguments as exc:  # a person's slip: they are asked again
            asked = f"{prompt or key}\n{exc}"


def _setter(key: str, state: Any) -> Callable[[Any], Any]:
    """How a value is put into this state, found out before anybody is asked."""
    from loopguard.journal._codec import hints_of

    if state is None or isinstance(state, Mapping):
        return lambda value: {**(state or {}), key: value}
    kind = type(state)
    if key in getattr(kind, "model_fields", ()):
        fits = _fits(key, kind.model_fields[key].annotation)
        return lambda value: state.model_copy(update={key: fits(value)})
    if key in getattr(kind, "__dataclass_fields__", ()):
        fits = _fits(key, hints_of(kind)[key])
        return lambda value: dataclasses.replace(state, **{key: fits(value)})
    raise ConfigurationError(
        f"await_input({key!r}): a {type(state).__name__} has no place for it: let the state be a dict, or a dataclass "
        f"or pydantic model with a field {key!r}"
    )


def _fits(key: str, hint: Any) -> Callable[[Any], Any]:
    """What reads a value as the field's type: InvalidArguments where it doesn't fit."""
    return functools.partial(convert, key, None if isinstance(hint, str) else reader(hint))


class _FlowOptions(LoopOptions):
    """What a Flow says about its runs."""

    kind = "flow"
    maker = "Flow"

    def __init__(self, name: str, bodies: Sequence[_StepBody], delete_on_success: bool, given: dict[str, Any]) -> None:
        super().__init__(_state, {**_DEFAULTS, **given, "name": name})
        self.is_async = any(body.is_async for body in bodies)
        for body in bodies:
            body.settle(self.is_async)
        self.bodies = tuple(bodies)
        self.delete_on_success = delete_on_success

    @property
    def conditional(self) -> bool:
        """Its last step is what says that it is done."""
        return True

    def over(self, done: int) -> bool:
        """See `LoopOptions`."""
        return done == len(self.bodies)

    def whereabouts(self, iteration: int, done: int, rejections: int) -> str:
        """See `LoopOptions`."""
        body = self.body(done)
        attempt = f", attempt {rejections + 1} of {body.max_retries + 1}" if body.max_retries else ""
        return f"in flow {self.name!r}, step {body.name!r}{attempt}"


def _state(state: Any = None) -> Any:
    """Stands for the steps, which share one parameter."""


_DEFAULTS: dict[str, Any] = {
    "max": sys.maxsize,
    "until": None,
    "until_llm": None,
    "judge": None,
    "evaluate": (),
    "max_retries": 0,
    "on_reject": "retry",
    "on_failure": "raise",
    "best": None,
    "fallback": None,
    "state": None,
    "on_iteration": None,
    "on_transition": None,
    "on_limit": "return",
}


class Flow(Runnable):
    """Ordered steps, each checkpointed: a run that is interrupted goes on with the step it was at.

    ``Flow("refund", [look_up, step(decide, verify=is_fair, max_retries=2), await_input("yes"), pay], store=…)``

    A step is a function, sync or async, that takes the state and returns the next one; a decorated loop or tool;
    another flow; or what `step`, `await_input`, `llm` and `dispatch` make. With an async step the flow is async: its
    runs are awaited, and its sync steps run in a thread beside the event loop.

    - ``name``, and the names of the steps, are what the journal knows a run by. Equal names are a ConfigurationError.
    - ``store``: where its runs are kept, as for `loop`. ``delete_on_success``: forget a run once it has completed;
      a flow inside another run is kept with that.
    - ``max_retries``: how often a step that raised or was rejected is run again, see `step`. Then the exception
      propagates, with a note, or EvaluationFailed is raised.
    - ``guard``, ``budget``, ``timeout``: limits of each run, as for `loop`.

    A plain call returns the last state, and raises LoopStopped where the flow didn't complete. It can stand wherever
    a function can: as a step, in a tool, as the body of a loop.
    """

    def __init__(
        self,
        name: str,
        steps: Sequence[Callable[..., Any] | Step],
        *,
        store: Any = None,
        max_retries: int = 0,
        delete_on_success: bool = False,
        guard: Guard | None = None,
        budget: Budget | None = None,
        timeout: float | None = None,
    ) -> None:
        check_id(name, "Flow(name")
        check_retries(max_retries, "Flow")
        if not isinstance(steps, list | tuple) or not steps:
            raise ConfigurationError(f"Flow({name!r}, {steps!r}): give its steps in a list")
        bodies = [_StepBody(each, max_retries) for each in steps]
        names = [body.name for body in bodies]
        for one in names:
            if names.count(one) > 1:
                raise ConfigurationError(f"Flow({name!r}): two steps are called {one!r}: give one step(fn, name=…)")
        given = {"store": store, "guard": guard, "budget": budget, "timeout": timeout}
        self._own = _FlowOptions(name, bodies, delete_on_success, given)
        self.__name__ = self.__qualname__ = name
        if self._own.is_async:
            self.__class__ = cast(Any, _AsyncFlow)  # whoever looks sees an async function

    @property
    def name(self) -> str:
        """What the journal knows it by."""
        return self._own.name

    @property
    def _options(self) -> LoopOptions:
        return self._own

    def _whose(self, args: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
        return None, None, args

    def __call__(self, state: Any = None) -> Any:
        """Run the steps and return the last state. Raises LoopStopped where they weren't completed."""
        return call_loop(self._own, None, None, (state,), {})

    def run(self, state: Any = None, run_id: str | None = None) -> Any:  # type: ignore[override]  # its one argument is the state
        """Run the steps and return how it went, as a LoopResult; of an async flow, await it.

        With a store, a run of this id that is over returns its recorded result and runs nothing; one that was
        interrupted goes on with the step it was at. Raises RunConflict for another state, or other steps, than it was
        begun with, and while another process drives it.
        """
        return super().run(state, run_id=run_id)

    def resume(self, run_id: str, *, budget: Budget | None = None) -> Any:  # type: ignore[override]  # as above
        """Go on with a run that was interrupted, stopped, or waits, with the step it was at: its LoopResult.

        ``budget`` lets a run go on that had spent its own. Raises RunNotFound, and RunConflict as `run` does.
        """
        return super().resume(run_id, budget=budget)

    def resume_with(self, run_id: str, value: Any, *, by: str | None = None) -> Any:
        """Give the run the input that it waits for, and go on: its LoopResult.

        ``value``: any JSON value. ``by``: who gives it. Raises RunConflict if it doesn't wait for an input, and
        AlreadyDecided if somebody else was faster.
        """
        self._give(run_id, value, by)
        return self.resume(run_id)

    def _give(self, run_id: str, value: Any, by: str | None) -> None:
        from loopguard.journal import open as open_book

        book = open_book(needed_store(self._own), key=key_of(self._own.guards))
        asked = [one for one in book.questions("all") if one.run_id == run_id and one.kind == "input"]
        asked = [one for one in asked if one.status == "pending"] or asked[-1:]
        if len(asked) != 1:
            several = f"for several: {', '.join(one.id for one in asked)}; answer each by journal.answer"
            raise RunConflict(f"the run {run_id!r} of {self.name!r} waits {several if asked else 'for no input'}")
        book.answer(asked[0].id, value, by=by)

    def results(self, run: str | LoopResult[Any]) -> dict[str, Any]:
        """{name of a step: what it returned} of the steps that were completed, in order.

        ``run``: a LoopResult of this flow, or the id of a run in its store. Raises RunNotFound.
        """
        if isinstance(run, LoopResult):
            values = [each.value for each in run.history if all(verdict.passed for verdict in each.verdicts)]
        else:
            values = results_of(self._own, run)
        return {body.name: value for body, value in zip(self._own.bodies, values, strict=False)}

    def __repr__(self) -> str:
        return f"Flow({self.name!r}, {[body.name for body in self._own.bodies]})"


class _AsyncFlow(Flow):
    """A flow with an async step."""

    async def __call__(self, state: Any = None) -> Any:
        """See `Flow`."""
        return await call_loop_async(self._own, None, None, (state,), {})

    async def resume_with(self, run_id: str, value: Any, *, by: str | None = None) -> Any:
        """See `Flow`."""
        await in_thread(functools.partial(self._give, run_id, value, by), "journal")
        return await self.resume(run_id)
