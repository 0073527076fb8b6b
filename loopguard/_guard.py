"""Guard and @tool: a policy, and the choke point that every call of a tool passes."""

from __future__ import annotations

import asyncio
import copy
import fnmatch
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, overload

from loopguard._call import ASYNC, ASYNC_GENERATOR, GENERATOR, SYNC, ToolCall
from loopguard._dispatch import Named, Target, Turn, check_chars, count_invalid, error_result, wind_down
from loopguard._events import Event
from loopguard._foreign import ForeignTool
from loopguard._policy import read_policy
from loopguard._run import Run, publish
from loopguard._schemas import InvalidArguments, ToolUse, UnknownTool, tool_result, tool_uses, unknown_tool
from loopguard._scope import Scope
from loopguard._threads import in_thread
from loopguard._tool import (
    DEFAULTS,
    BoundTool,
    DecoratedTool,
    GuardedTool,
    instance_of,
    make_tool,
    name_of,
    needs_self,
    tool_of,
)
from loopguard.exceptions import ConfigurationError
from loopguard.guardrails import ApproveTool, Retry, Timeout, WrapTool

__all__ = ["Guard", "tool"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
Cost: TypeAlias = float | Decimal | Mapping[str, float | Decimal]


@overload
def tool(fn: Callable[P, R], /) -> GuardedTool[P, R]: ...
@overload
def tool(
    fn: None = None,
    /,
    *,
    name: str | None = None,
    cost: Cost | Callable[[ToolCall], Cost] | None = None,
    approve: bool = False,
    timeout: float | None = None,
    idempotent: bool = False,
    repeatable: bool = False,
    require_run: bool = False,
    raises: tuple[type[BaseException], ...] = (),
    self_key: Callable[[Any], str] | None = None,
    guard: Guard | None = None,
) -> Callable[[Callable[P, R]], GuardedTool[P, R]]: ...
def tool(
    fn: Any = None,
    /,
    *,
    name: str | None = None,
    cost: Cost | Callable[[ToolCall], Cost] | None = None,
    approve: bool = False,
    timeout: float | None = None,
    idempotent: bool = False,
    repeatable: bool = False,
    require_run: bool = False,
    raises: tuple[type[BaseException], ...] = (),
    self_key: Callable[[Any], str] | None = None,
    guard: Guard | None = None,
) -> Any:
    """Make a function a tool: every call of it passes the guardrails of the runs it is called in.

    Works on functions, methods, class and static methods, partials and callable objects; sync, async,
    generators and async generators. Signature, name and kind stay as they are.

    - ``name``: the tool's name, by default the function's.
    - ``cost``: the most that a call may cost: a number of USD, ``{unit: amount}``, or ``fn(call)`` that
      returns either. Report inside with `charge` what it did cost.
    - ``approve``: run only on an explicit yes of an ApproveTool that covers it.
    - ``idempotent``: running it twice does no harm. ``repeatable``: LoopLimit never counts it.
    - ``require_run``: refuse calls outside any run (``no_run``). ``guard``: a Guard of its own.
    - ``timeout``: seconds for each attempt, see `Timeout`. ``raises``: exception classes that a resumed
      run may raise again. ``self_key``: ``fn(self)`` names a method's object for durable approvals.

    Raises ConfigurationError at decoration for a wrong option.
    """
    options = {
        "name": name,
        "cost": cost,
        "approve": approve,
        "timeout": timeout,
        "idempotent": idempotent,
        "repeatable": repeatable,
        "require_run": require_run,
        "raises": raises,
        "self_key": self_key,
    }
    if guard is not None:
        if not isinstance(guard, Guard):
            raise ConfigurationError(f"tool(guard={guard!r}): give a Guard")
        return guard.tool(fn, **options)
    if fn is None:
        return lambda function: make_tool(function, options, ())
    return make_tool(fn, options, ())


def _check_tools(tools: Mapping[str, Mapping[str, Any]]) -> None:
    if not isinstance(tools, Mapping):
        raise ConfigurationError(f"Guard(tools={tools!r}): give {{name or pattern: options}}")
    for pattern, options in tools.items():
        allowed = [option for option in DEFAULTS if option != "name"]
        if not isinstance(pattern, str) or not pattern or not isinstance(options, Mapping):
            raise ConfigurationError(f"Guard(tools={{{pattern!r}: {options!r}}}): give {{name or pattern: options}}")
        unknown = [option for option in options if option not in allowed]
        if unknown:
            raise ConfigurationError(
                f"Guard(tools={{{pattern!r}: …}}) has unknown options {', '.join(map(repr, unknown))}; "
                f"allowed are: {', '.join(allowed)}"
            )
        make_tool(_check_tools, {**DEFAULTS, **options, "name": pattern}, ())  # which checks their values


class _Inherited(int):
    """The default of max_refusals, which leaves the decision to an outer guard."""


_INHERITED = _Inherited(5)


class Guard:
    """A policy: guardrails in one place, for the loops, scopes and tools that are given it.

    - ``mode="observe"`` refuses no limit and records what it would have refused; approvals are always
      enforced.
    - ``max_refusals``: after so many refusals in a row the run is halted.
    - ``on_event``: called with every event of the runs it stands on, redacted.
    - ``tools``: ``{name or pattern: options}``, the options of `tool` for functions that exist and bring none
      along: those of `wrap` and `foreign`. Of several patterns the later ones win.
    """

    def __init__(
        self,
        *guardrails: Any,
        mode: Literal["enforce", "observe"] = "enforce",
        max_refusals: int = _INHERITED,
        on_event: Callable[[Event], object] | None = None,
        tools: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        for guardrail in guardrails:
            known = isinstance(guardrail, WrapTool | ApproveTool | Retry | Timeout) or callable(
                getattr(guardrail, "bind", None)
            )
            if isinstance(guardrail, type) or not known:
                example = f"{guardrail.__name__}(…)" if isinstance(guardrail, type) else "Guard(MaxSteps(20), …)"
                raise ConfigurationError(f"Guard({guardrail!r}) is not a guardrail: write {example}")
        if mode not in ("enforce", "observe"):
            raise ConfigurationError(f"Guard(mode={mode!r}): give 'enforce' or 'observe'")
        if not isinstance(max_refusals, int) or isinstance(max_refusals, bool) or max_refusals < 1:
            raise ConfigurationError(f"Guard(max_refusals={max_refusals!r}): give an int of at least 1")
        if on_event is not None and not callable(on_event):
            raise ConfigurationError(f"Guard(on_event={on_event!r}): give a callable")
        _check_tools(tools)
        self.guardrails = guardrails
        self.tools = tools
        self.policy_hash: str | None = None
        """``sha256:…`` of the policy file that it was read from."""
        self.mode = mode
        self.max_refusals = max_refusals
        self.listener = publish(on_event) if on_event is not None else None
        self._tools: dict[tuple[str, Any], Any] = {}

    def __repr__(self) -> str:
        return f"Guard({', '.join(map(repr, self.guardrails))})"

    @functools.cached_property
    def outside(self) -> Run:
        """Where the calls of its tools count outside of any run: process-wide."""
        run = Run("no run", None, (self,))
        run.outside = True
        return run

    def join(self, run: Run) -> None:
        """Stand on a run."""
        self.listen(run)
        if run.max_refusals is None and not isinstance(self.max_refusals, _Inherited):
            run.max_refusals = self.max_refusals

    def listen(self, run: Run) -> None:
        """Hear what happens in a run."""
        if self.listener is not None and self.listener not in run.listeners:
            run.listeners = (*run.listeners, self.listener)

    # -- making tools ----------------------------------------------------------------------------

    @overload
    def tool(self, fn: Callable[P, R], /) -> GuardedTool[P, R]: ...
    @overload
    def tool(
        self,
        fn: None = None,
        /,
        *,
        name: str | None = None,
        cost: Cost | Callable[[ToolCall], Cost] | None = None,
        approve: bool = False,
        timeout: float | None = None,
        idempotent: bool = False,
        repeatable: bool = False,
        require_run: bool = False,
        raises: tuple[type[BaseException], ...] = (),
        self_key: Callable[[Any], str] | None = None,
    ) -> Callable[[Callable[P, R]], GuardedTool[P, R]]: ...
    def tool(
        self,
        fn: Any = None,
        /,
        *,
        name: str | None = None,
        cost: Cost | Callable[[ToolCall], Cost] | None = None,
        approve: bool = False,
        timeout: float | None = None,
        idempotent: bool = False,
        repeatable: bool = False,
        require_run: bool = False,
        raises: tuple[type[BaseException], ...] = (),
        self_key: Callable[[Any], str] | None = None,
    ) -> Any:
        """Like `loopguard.tool`, under this guard, and known to `call`, `run_tools` and `schemas`."""
        options = {
            "name": name,
            "cost": cost,
            "approve": approve,
            "timeout": timeout,
            "idempotent": idempotent,
            "repeatable": repeatable,
            "require_run": require_run,
            "raises": raises,
            "self_key": self_key,
        }
        if fn is None:
            return lambda function: self.tool(function, **options)
        if isinstance(fn, DecoratedTool | BoundTool):
            return self._know(self._under(fn))
        return self._know(make_tool(fn, options, (self,)))

    @overload
    def wrap(self, tools: list[Any], /) -> list[Any]: ...
    @overload
    def wrap(self, tools: dict[str, Any], /) -> dict[str, Any]: ...
    @overload
    def wrap(self, tools: F, /) -> F: ...
    def wrap(self, tools: Any, /) -> Any:
        """Guard functions that exist: one, a list of them, or {name: function}.

        Tools of the anthropic SDK's tool runner (`beta_tool`) are copied, with their `call` guarded.
        Guarding twice by the same guard is guarding once.
        """
        if isinstance(tools, Mapping):
            return {name: self._wrap_one(fn, name) for name, fn in tools.items()}
        if isinstance(tools, list | tuple):
            return type(tools)(self._wrap_one(fn, None) for fn in tools)
        return self._wrap_one(tools, None)

    def foreign(
        self,
        name: str,
        *,
        cost: Cost | Callable[[ToolCall], Cost] | None = None,
        approve: bool = False,
        timeout: float | None = None,
        idempotent: bool = False,
        repeatable: bool = False,
        require_run: bool = False,
        raises: tuple[type[BaseException], ...] = (),
    ) -> ForeignTool:
        """A tool whose body lives elsewhere, in a framework or on a server: the seam for adapters.

        ``await guard.foreign("search").acall(arguments, body)`` runs ``body(arguments)`` past the guardrails.
        The options are those of `loopguard.tool`; what ``Guard(tools=…)`` says goes before. `call`, `run_tools` and
        `schemas` don't know it.
        """
        options = {
            "cost": cost,
            "approve": approve,
            "timeout": timeout,
            "idempotent": idempotent,
            "repeatable": repeatable,
            "require_run": require_run,
            "raises": raises,
        }
        return ForeignTool(name, self._options(name, options), (self,))

    def _wrap_one(self, fn: Any, name: str | None) -> Any:
        guarded = self._guarded(fn, name)
        return self._know(guarded) if isinstance(guarded, DecoratedTool | BoundTool) else guarded

    def _guarded(self, fn: Any, name: str | None = None) -> Any:
        if isinstance(fn, DecoratedTool | BoundTool):
            return self._under(fn)
        if not inspect.isroutine(fn) and callable(getattr(fn, "to_dict", None)) and callable(getattr(fn, "call", None)):
            runnable = copy.copy(fn)
            runnable.call = (
                self._under(fn.call)
                if isinstance(fn.call, DecoratedTool | BoundTool)
                else make_tool(fn.call, self._options(name or fn.name), (self,), open=True)
            )
            return runnable
        return make_tool(fn, self._options(name_of(fn, name)), (self,))

    def _options(self, name: str, given: Mapping[str, Any] = DEFAULTS) -> dict[str, Any]:
        """The options of a tool that stands under this guard by name alone."""
        chosen = {**given, "name": name}
        for pattern, options in self.tools.items():
            if fnmatch.fnmatchcase(name, pattern):
                chosen.update(options)
        return chosen

    def _under(self, decorated: Any) -> Any:
        known = tool_of(decorated)
        if self in known.guards:
            return decorated
        return DecoratedTool(decorated.__wrapped__, known.with_guards((*known.guards, self)))

    def _know(self, decorated: Any) -> Any:
        known = tool_of(decorated)
        owner = instance_of(decorated) if known.own is None else known.own
        self._tools[known.name, (known.ident, id(owner))] = decorated
        return decorated

    # -- calling tools by name -------------------------------------------------------------------

    def call(self, name: str, arguments: Mapping[str, Any] | str, id: str | None = None) -> Any:
        """Call a tool by name with a model's arguments, an object or JSON text, and return its result.

        Raises what the tool raises, ToolCallRefused, and InvalidArguments (a ValueError that a model can
        act on) for an unknown name or arguments that don't fit; such a call uses no step.
        """
        return self._call(Named(self._by_name(None)), name, arguments, id)

    async def acall(self, name: str, arguments: Mapping[str, Any] | str, id: str | None = None) -> Any:
        """`call` for async code: sync tools run off the event loop."""
        return await self._acall(Named(self._by_name(None)), name, arguments, id)

    def run_tools(
        self, message: Any, tools: Iterable[Any] | None = None, *, max_chars: int | None = None
    ) -> list[dict[str, Any]]:
        """Run the tool_use blocks of an Anthropic message and return their tool_result blocks, in order.

        ``tools``: those that this guard made, or the ones given (functions are guarded by it). Refusals,
        unknown names, arguments that don't fit and errors become ``is_error`` results, so that every
        pending id gets one. Past 80 % of a limit the last result says what is left. ``max_chars`` caps the
        text of each result: more is cut, and the model is told how much.
        """
        named = Named(self._by_name(tools))
        check_chars(max_chars)
        results = []
        uses = tool_uses(message)
        with Turn(uses):
            for use in uses:
                try:
                    value = self._call(named, use.name, use.input, use.id)
                    results.append(tool_result(use.id, value, limit=max_chars))
                except Exception as exc:  # whatever a tool raises is the model's to know
                    results.append(error_result(use, exc, max_chars))
        return wind_down(results)

    async def arun_tools(
        self, message: Any, tools: Iterable[Any] | None = None, *, max_chars: int | None = None
    ) -> list[dict[str, Any]]:
        """`run_tools` for async code: all at once, results in the order of the blocks."""
        named = Named(self._by_name(tools))
        check_chars(max_chars)

        async def one(use: ToolUse) -> dict[str, Any]:
            try:
                return tool_result(use.id, await self._acall(named, use.name, use.input, use.id), limit=max_chars)
            except Exception as exc:  # whatever a tool raises is the model's to know
                return error_result(use, exc, max_chars)

        uses = tool_uses(message)
        with Turn(uses):
            done = await asyncio.gather(*map(one, uses), return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        return wind_down([outcome for outcome in done if not isinstance(outcome, BaseException)])

    def schemas(self) -> list[dict[str, Any]]:
        """The ``tools=`` list of the Messages API for the tools that this guard made."""
        return [target.arguments.tool_definition(name) for name, target in sorted(self._by_name(None).items())]

    def _by_name(self, tools: Iterable[Any] | None) -> dict[str, Target]:
        if tools is None:
            chosen = [decorated for decorated in self._tools.values() if not needs_self(decorated)]
        else:
            chosen = [self._guarded(fn) for fn in tools]
        named: dict[str, Target] = {}
        for decorated in chosen:
            target = Target(decorated)
            name = target.tool.name
            if name in named and named[name].decorated is not decorated:
                raise ConfigurationError(f"two tools are called {name!r}: give one of them another name=")
            named[name] = target
        return named

    def _prepare(
        self, named: Named, name: str, arguments: Mapping[str, Any] | str, id: str | None
    ) -> tuple[Target, Callable[..., Any]]:
        target = named.targets.get(name)
        try:
            if target is None:
                raise UnknownTool(unknown_tool(name, list(named.targets)))
            args, kwargs = target.arguments.to_call(target.arguments.validate(arguments))
        except InvalidArguments as exc:
            count_invalid(name, arguments, id, exc)
            raise
        return target, functools.partial(target.call, args, kwargs, id)

    def _call(self, named: Named, name: str, arguments: Mapping[str, Any] | str, id: str | None) -> Any:
        target, call = self._prepare(named, name, arguments, id)
        if target.tool.colour == GENERATOR:
            return list(call())
        if target.tool.colour != SYNC:
            raise ConfigurationError(f"{name} is async: use `await guard.acall(…)` or `await guard.arun_tools(…)`")
        return call()

    async def _acall(self, named: Named, name: str, arguments: Mapping[str, Any] | str, id: str | None) -> Any:
        target, call = self._prepare(named, name, arguments, id)
        if target.tool.colour == ASYNC:
            return await call()
        if target.tool.colour == ASYNC_GENERATOR:
            return [item async for item in call()]
        if target.tool.colour == GENERATOR:
            return await in_thread(lambda: list(call()), name)
        return await in_thread(call, name)

    # -- scopes and files ------------------------------------------------------------------------

    def scope(self, name: str = "scope") -> Scope:
        """``with guard.scope("name") as run:`` (or ``async with``): a run without a loop."""
        return Scope(name, (self,))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Guard:
        """The guard that a policy file describes; its form is in ``loopguard/policy.schema.json``.

        Raises ConfigurationError, with key and line, for whatever is not allowed there: unknown keys, and names
        of approvers and plugins that aren't known. `policy_hash` names the text that was read.
        """
        guard, digest = read_policy(path, cls)
        guard.policy_hash = digest
        return guard
