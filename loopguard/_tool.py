"""Decorated tools: functions whose every call passes the guardrails, and are otherwise as they were."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, overload, runtime_checkable

from loopguard._amounts import costs
from loopguard._call import ASYNC, ASYNC_GENERATOR, GENERATOR, SYNC, Tool, check_callable
from loopguard._drivers import call_async, call_sync
from loopguard._generators import call_async_generator, call_generator
from loopguard._order import compile_plan
from loopguard._threads import in_thread
from loopguard._wrapped import BoundWrapper, Wrapper, in_class_body
from loopguard.exceptions import ConfigurationError
from loopguard.guardrails.resilience import number

if TYPE_CHECKING:
    from loopguard._guard import Guard

__all__ = [
    "CALLS",
    "DEFAULTS",
    "BoundTool",
    "DecoratedTool",
    "GuardedTool",
    "instance_of",
    "make_tool",
    "name_of",
    "needs_self",
    "tool_of",
]

P = ParamSpec("P")
P2 = ParamSpec("P2")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")

DEFAULTS = {
    "name": None,
    "cost": None,
    "approve": False,
    "timeout": None,
    "idempotent": False,
    "repeatable": False,
    "require_run": False,
    "raises": (),
    "self_key": None,
}


@runtime_checkable
class GuardedTool(Protocol[P, R_co]):
    """A function whose every call passes the guardrails: it is called as before."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call it."""
        ...

    @overload
    def acall(
        self: GuardedTool[P2, Coroutine[Any, Any, T]], *args: P2.args, **kwargs: P2.kwargs
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def acall(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]:
        """Call it from async code: a sync tool runs in a thread of its own, off the event loop."""
        ...

    @overload
    def __get__(self, instance: None, owner: type | None = None, /) -> Self: ...
    @overload
    def __get__(
        self: GuardedTool[Concatenate[S, P2], T], instance: S, owner: type | None = None, /
    ) -> GuardedTool[P2, T]: ...


class _Decorated:
    """What a decorated tool can do beside being called, bound to an object or not."""

    # No annotations in this class body: they would hide those of the wrapped function.

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """Call it from async code: a sync tool runs in a thread of its own, off the event loop."""
        colour = tool_of(self).colour
        call: Any = self  # a wrapt proxy of a callable
        if colour == ASYNC:
            return await call(*args, **kwargs)
        if colour == SYNC:
            return await in_thread(functools.partial(call, *args, **kwargs), tool_of(self).name)
        raise ConfigurationError(f"{tool_of(self).name} is a generator: iterate over it, acall is for plain functions")


class BoundTool(_Decorated, BoundWrapper):
    """A decorated method, bound to its object or class."""


class DecoratedTool(_Decorated, Wrapper):
    """A decorated function."""

    __bound_function_wrapper__ = BoundTool

    def __init__(self, wrapped: Any, tool: Tool) -> None:
        super().__init__(wrapped, functools.partial(CALLS[tool.colour], tool))
        self._self_tool = tool


CALLS: dict[str, Callable[..., Any]] = {
    SYNC: call_sync,
    ASYNC: call_async,
    GENERATOR: call_generator,
    ASYNC_GENERATOR: call_async_generator,
}


def tool_of(decorated: Any) -> Tool:
    if isinstance(decorated, BoundTool):
        return decorated._self_parent._self_tool  # type: ignore[no-any-return]  # wrapt keeps the unbound one there
    return decorated._self_tool  # type: ignore[no-any-return]  # set in DecoratedTool.__init__


def name_of(fn: Any, name: str | None) -> str:
    if name is None:
        inner = fn
        while isinstance(inner, functools.partial | staticmethod | classmethod):
            inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
        name = getattr(inner, "__name__", type(inner).__name__)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"tool(name={name!r}): give a text")
    return name


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what}={value!r}): give True or False")
    return value


def _callback(value: Any, what: str) -> Any:
    if value is not None and not callable(value):
        raise ConfigurationError(f"{what}={value!r}): give a function, or None")
    return value


def _exceptions(value: Any) -> tuple[type[BaseException], ...]:
    if not isinstance(value, tuple) or not all(
        isinstance(kind, type) and issubclass(kind, Exception) for kind in value
    ):
        raise ConfigurationError(f"tool(raises={value!r}): give a tuple of exception classes")
    return value


def make_tool(fn: Any, options: Mapping[str, Any], guards: tuple[Guard, ...], *, open: bool = False) -> Any:
    check_callable(fn, "@tool")
    if isinstance(fn, DecoratedTool | BoundTool):
        raise ConfigurationError(f"{tool_of(fn).name} is decorated with @tool already: give one @tool all the options")
    cost = options["cost"]
    return DecoratedTool(
        fn,
        Tool(
            fn,
            name=name_of(fn, options["name"]),
            cost=() if callable(cost) else costs(cost, "tool(cost"),
            cost_fn=cost if callable(cost) else None,
            approve=_flag(options["approve"], "tool(approve"),
            idempotent=_flag(options["idempotent"], "tool(idempotent"),
            repeatable=_flag(options["repeatable"], "tool(repeatable"),
            require_run=_flag(options["require_run"], "tool(require_run"),
            timeout=None if options["timeout"] is None else number(options["timeout"], "tool(timeout"),
            raises=_exceptions(options["raises"]),
            self_key=_callback(options["self_key"], "tool(self_key"),
            guards=guards,
            open=open,
            compile=compile_plan,
        ),
    )


def instance_of(decorated: Any) -> Any:
    if isinstance(decorated, BoundTool):
        return decorated._self_instance
    return getattr(decorated.__wrapped__, "__self__", None)


def needs_self(decorated: Any) -> bool:
    """Whether this is a function in a class body, which can't be called by name alone."""
    wrapped = decorated.__wrapped__
    return in_class_body(tool_of(decorated).fn) and not isinstance(decorated, BoundTool) and inspect.isfunction(wrapped)
