"""A tool, and one call of it: what the guardrails look at."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from loopguard._amounts import costs
from loopguard._fingerprints import ItemDigest, atoms, loose, serial, strict
from loopguard._schemas import Arguments
from loopguard.exceptions import ConfigurationError, ToolCallRefused

if TYPE_CHECKING:
    from loopguard._admission import Admission
    from loopguard._run import Run

__all__ = ["CURRENT", "Tool", "ToolCall", "colour_of", "current_call", "new_id"]

SYNC, ASYNC, GENERATOR, ASYNC_GENERATOR = "sync", "async", "generator", "async generator"

_prefix = secrets.token_hex(5)
_counter = itertools.count(1)


def new_id(kind: str) -> str:
    """An id no other process will make: ``run_…``, ``call_…``."""
    return f"{kind}_{_prefix}{next(_counter):06x}"


def forget_identity() -> None:
    """After a fork the child must not go on with its parent's ids."""
    global _prefix
    _prefix = secrets.token_hex(5)


def plain_function(obj: Any) -> Any:
    """The function beneath staticmethod and classmethod."""
    return obj.__func__ if isinstance(obj, staticmethod | classmethod) else obj


def colour_of(obj: Any) -> str:
    """sync, async, generator or async generator: how a callable is to be driven."""
    fn = plain_function(obj)
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not inspect.isroutine(fn) and not inspect.isclass(fn):
        fn = type(fn).__call__
    if inspect.isasyncgenfunction(fn):
        return ASYNC_GENERATOR
    if inspect.iscoroutinefunction(fn):
        return ASYNC
    if inspect.isgeneratorfunction(fn):
        return GENERATOR
    return SYNC


_ANY = inspect.signature(lambda *args, **kwargs: None)


class Binder:
    """How arguments bind to the parameters of one function, without `inspect` where it can."""

    __slots__ = ("_fn", "_rest", "_simple", "count", "names", "signature")

    def __init__(self, fn: Any, bound: bool) -> None:
        try:
            signature = inspect.signature(fn)
        except ValueError:  # some builtins don't tell theirs
            signature = _ANY
        if bound:
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        self._fn = fn
        self.signature = signature
        parameters = list(signature.parameters.values())
        self.names = tuple(p.name for p in parameters)
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._simple = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        self._rest = tuple((p.name, p.default) for p in positional)
        # `count` positional arguments and nothing else are already in canonical form
        self.count = len(positional) if len(positional) == len(parameters) else -1

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The bound values in the order of the parameters, defaults applied; TypeError if they don't bind."""
        if not kwargs and len(args) == self.count:
            return args
        if self._simple and len(args) <= len(self._rest):
            out = list(args)
            used = 0
            for name, default in self._rest[len(args) :]:
                if name in kwargs:
                    out.append(kwargs[name])
                    used += 1
                elif default is not inspect.Parameter.empty:
                    out.append(default)
                else:
                    break
            else:
                if used == len(kwargs):
                    return tuple(out)
        return tuple(self.arguments(args, kwargs).values())

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """{parameter: value} with defaults applied; the function's own TypeError if they don't bind."""
        if not kwargs and len(args) == self.count:
            return dict(zip(self.names, args, strict=True))
        if self._simple and not args and len(kwargs) == len(self.names) and all(map(kwargs.__contains__, self.names)):
            return {name: kwargs[name] for name in self.names}
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as exc:
            name = getattr(self._fn, "__qualname__", type(self._fn).__name__)
            raise TypeError(f"{name}() {exc}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def unbind(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) from what `arguments` gave, edited or not; TypeError names what is wrong."""
        unknown = [name for name in arguments if name not in self.names]
        if unknown:
            raise TypeError(
                f"no parameter {', '.join(map(str, unknown))}; there are: {', '.join(self.names) or 'none'}"
            )
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, p in self.signature.parameters.items():
            if name not in arguments:
                if p.kind is p.VAR_POSITIONAL or p.kind is p.VAR_KEYWORD:
                    continue
                if p.default is p.empty:
                    raise TypeError(f"no value for the parameter {name}")
                if p.kind is not p.KEYWORD_ONLY:
                    args.append(p.default)
            elif p.kind is p.VAR_POSITIONAL:
                args.extend(arguments[name])
            elif p.kind is p.VAR_KEYWORD:
                kwargs = dict(**kwargs, **arguments[name])
            elif p.kind is p.KEYWORD_ONLY:
                kwargs[name] = arguments[name]
            else:
                args.append(arguments[name])
        return tuple(args), kwargs


class OpenBinder:
    """The binder of a tool that takes any arguments in one object, as a model gives them: its members."""

    __slots__ = ()

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Names and values in turn, in the order of the names."""
        given = self.arguments(args, kwargs)
        return tuple(part for name in sorted(given) for part in (name, given[name]))

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The members of the object; TypeError for what is none."""
        given = (*args, *kwargs.values())
        if len(given) != 1 or not isinstance(given[0], Mapping):
            raise TypeError("the arguments of a tool are one object of names and values")
        return dict(given[0])

    def unbind(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The object."""
        return (dict(arguments),), {}


def _module_of(fn: Any) -> str:
    """The module of a function by the name that others import it by, also where it is the script that runs."""
    module: str = getattr(fn, "__module__", None) or ""
    if module != "__main__":
        return module
    main = sys.modules[module]
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    return spec.name if spec is not None else os.path.splitext(os.path.basename(file))[0] if file else module


class Tool:
    """What a decorator says about one function. Immutable; holds no state of any run."""

    __slots__ = (
        "_binders",
        "_schema",
        "approve",
        "colour",
        "compile",
        "cost",
        "cost_fn",
        "fn",
        "guards",
        "idempotent",
        "ident",
        "name",
        "open",
        "outside",
        "own",
        "raises",
        "repeatable",
        "require_run",
        "self_key",
        "takes_self",
        "timeout",
    )

    def __init__(
        self,
        fn: Any,
        *,
        name: str,
        cost: tuple[tuple[str, int], ...] = (),
        cost_fn: Callable[[ToolCall], Any] | None = None,
        approve: bool = False,
        timeout: float | None = None,
        idempotent: bool = False,
        repeatable: bool = False,
        require_run: bool = False,
        raises: tuple[type[BaseException], ...] = (),
        self_key: Callable[[Any], str] | None = None,
        guards: tuple[Any, ...] = (),
        open: bool = False,
        compile: Callable[[Tool, Run | None], Admission],
    ) -> None:
        self.compile = compile
        self.fn = plain_function(fn)
        self.name = name
        self.colour = colour_of(fn)
        # bound methods, builtins and partials have no self left to bind
        self.takes_self = not hasattr(self.fn, "__self__") and not isinstance(self.fn, functools.partial)
        self.own = None if inspect.isroutine(self.fn) or inspect.isclass(self.fn) else self.fn
        """A partial or a callable object, which tells tools of one name apart as a method's self does."""
        self.ident = f"{name}:{_module_of(self.fn)}.{getattr(self.fn, '__qualname__', '')}"
        self.cost = cost
        self.cost_fn = cost_fn
        self.approve = approve
        self.timeout = timeout
        self.idempotent = idempotent
        self.repeatable = repeatable
        self.require_run = require_run
        self.raises = raises
        self.self_key = self_key
        self.guards = guards
        self.open = open
        """Whether it takes its arguments in one object, as a `ForeignTool` does."""
        self._binders: dict[bool, Binder | OpenBinder] = {}
        self._schema: Arguments | None = None
        self.outside: tuple[int, Admission] | None = None
        """Its plan outside of any run, and under which settings it was compiled."""

    def schema(self, skip_first: bool) -> Arguments:
        """How a model's arguments are described and validated; built once, on first use."""
        if self._schema is None:
            self._schema = Arguments(self.fn, skip_first=skip_first)
        return self._schema

    def binder(self, bound: bool) -> Binder | OpenBinder:
        """The binder for calls with (a method) or without self."""
        binder = self._binders.get(bound)
        if binder is None:
            binder = self._binders[bound] = OpenBinder() if self.open else Binder(self.fn, bound)
        return binder

    def estimate(self, call: ToolCall) -> tuple[tuple[str, int], ...]:
        """What this call may cost at most, by the tool's own function."""
        assert self.cost_fn is not None
        cost = self.cost_fn(call)
        if cost is None:  # a forgotten return must not make the call free
            raise ConfigurationError(
                f"the cost of {self.name} is None: return USD or {{unit: amount}}, 0 where it is free"
            )
        if inspect.iscoroutine(cost):
            cost.close()
        return costs(cost, f"the cost of {self.name}")

    def with_guards(self, guards: tuple[Any, ...]) -> Tool:
        """The same tool under these guards."""
        options = {slot: getattr(self, slot) for slot in self.__slots__ if slot not in _DERIVED}
        return Tool(self.fn, **{**options, "guards": guards})


_DERIVED = {"_binders", "_schema", "colour", "fn", "ident", "outside", "own", "takes_self"}


class ToolCall:
    """One call of a tool: what hooks, approvers and `only=` predicates are given.

    Hooks change it with `replace`, never in place.
    """

    # Defaults live on the class: what a call doesn't need costs it nothing.
    attempt: int = 1
    """Counted from 1; Retry makes more."""
    provider_id: str | None = None
    loose: Any = None
    """The key that LoopLimit counts it under."""
    marks: Mapping[Any, Any] = MappingProxyType({})
    """What other limits noted for this call while they prepared."""
    step: int = 0
    """Which tool call of its run this is."""
    repeats: int = 0
    """How often the same call was made before, while nothing new happened."""
    amounts: tuple[tuple[str, int], ...] = ()
    """What is reserved for it now: its estimate, or more once it has charged more."""
    estimated: tuple[tuple[str, int], ...] | None = None
    reported: dict[str, int] | None = None
    tokens: Sequence[Any] = ()
    observed: list[ToolCallRefused] | None = None
    started: bool = False
    started_at: float = 0.0
    settled: bool = False
    timed_out: BaseException | None = None
    charged: Mapping[str, int] | None = None
    """What it was settled at; None while it is not, and where that is its estimate."""
    refused: ToolCallRefused | None = None
    span: Any = None
    ended_ns: int | None = None
    items: ItemDigest | None = None
    """What a generator tool has yielded so far, in digest."""
    approved: str | None = None
    """The strict digest that was approved, where an approval was needed."""
    question: Any = None
    """The open question about it, while somebody is asked."""
    place: Mapping[str, Any] = MappingProxyType({})
    """Where it stands in a journal: what its ToolStarted event says of that."""
    yielded: Any = None
    """What a generator tool has yielded, where a journal wants to know."""
    held: Any = None
    """What is reserved for it in ledgers outside this process."""
    line: list[ToolCall] | None = None
    """The call that was admitted and those that replaced it since, the last one in force."""
    _id: str | None = None
    _arguments: dict[str, Any] | None = None

    def __init__(
        self,
        plan: Admission,
        fn: Callable[..., Any],
        instance: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        provider_id: str | None = None,
    ) -> None:
        self.plan = plan
        self.tool = tool = plan.tool
        self.run: Run = plan.run
        self.fn = fn
        self.instance = instance
        self.args = args
        self.kwargs = kwargs
        self.amounts = tool.cost
        if provider_id is not None:
            self.provider_id = provider_id

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.tool.name

    @property
    def id(self) -> str:
        """The call's id: the model's own (``toolu_…``) where it came with one."""
        if self._id is None:
            self._id = self.provider_id or new_id("call")
        return self._id

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this call: hand it to the far end, so that it acts once."""
        return self.place.get("key") or f"{self.run.id}:{self.id}"

    @property
    def bound(self) -> bool:
        """Whether this is a call of a method, whose self or cls isn't among the arguments."""
        return self.instance is not None and self.tool.takes_self

    @property
    def arguments(self) -> dict[str, Any]:
        """{parameter: value}, defaults applied, without self, in a dict of its own; TypeError if they don't bind."""
        if self._arguments is None:
            self._arguments = self.tool.binder(self.bound).arguments(self.args, self.kwargs)
        return self._arguments.copy()

    def bind(self) -> None:
        """Raise the function's own TypeError if the arguments don't bind."""
        self.tool.binder(self.bound).values(self.args, self.kwargs)

    @property
    def fingerprint(self) -> str:
        """A short text equal for equal calls in the loose sense of LoopLimit."""
        key = self.key(frozenset())
        return loose(key).hex()

    def key(self, ignore: frozenset[str]) -> Any:
        """A hashable key, equal for calls that LoopLimit takes for the same."""
        tool = self.tool
        instance = self.instance
        values = tool.binder(self.bound).values(self.args, self.kwargs)
        quick: Any = None if ignore else atoms(values)
        if quick is None:
            quick = loose(dict(self.arguments) if ignore else values, ignore)
        if instance is None:
            if tool.own is None:
                return tool.ident, quick
            if isinstance(tool.own, functools.partial):
                return tool.ident, loose(tool.own), quick
            instance = tool.own
        return tool.ident, serial(instance), quick

    @property
    def ignored(self) -> frozenset[str]:
        """The names that its LoopLimits leave out of arguments and results."""
        return frozenset[str]().union(*(getattr(mark, "ignore", ()) for mark in self.marks))

    def digest(self) -> tuple[str, bool]:
        """(strict digest of tool, self and arguments, whether another process would get the same)."""
        body, durable = strict(self.arguments)
        owner = self.tool.own if self.instance is None else self.instance
        who: Any = ""
        if isinstance(owner, functools.partial):  # what it has bound are arguments
            who, canonical = strict(owner)
            durable = durable and canonical
        elif owner is not None:
            if self.tool.self_key is not None:
                who = f"key {self.tool.self_key(owner)}"
            else:
                who, durable = f"object {serial(owner)}", durable and isinstance(owner, type)
        return strict((self.tool.ident, who, body))[0].hex(), durable

    def replace(self, *, arguments: Mapping[str, Any]) -> ToolCall:
        """The same call with other arguments, in the shape of `arguments` (varargs included).

        Raises TypeError when they don't fit the function.
        """
        if not isinstance(arguments, Mapping):
            raise TypeError(f"arguments is a {type(arguments).__name__}, not a mapping of parameter to value")
        binder = self.tool.binder(self.bound)
        args, kwargs = binder.unbind(arguments)
        call = ToolCall(self.plan, self.fn, self.instance, args, kwargs)
        call._arguments = binder.arguments(args, kwargs)
        call._id = self.id
        call.provider_id = self.provider_id
        call.attempt = self.attempt
        call.observed = self.observed
        call.span = self.span
        call.line = self.line
        call.place, call.yielded = self.place, self.yielded
        return call

    @property
    def estimate(self) -> tuple[tuple[str, int], ...]:
        """What was reserved before the body reported anything."""
        return self.amounts if self.estimated is None else self.estimated

    @property
    def ordinary(self) -> bool:
        """Whether it was settled at its estimate, observed by nobody and refused by nothing."""
        return self.charged is None and self.observed is None and self.refused is None

    def arguments_or_raw(self) -> dict[str, Any]:
        """The arguments by name, or as they came where they don't bind."""
        try:
            return self.arguments
        except TypeError:
            return {"args": self.args, "kwargs": self.kwargs}

    def __repr__(self) -> str:
        return f"<ToolCall {self.tool.name} {self._id or ''}>"


CURRENT: ContextVar[Run | ToolCall | None] = ContextVar("loopguard_current", default=None)
"""Where we are: in a tool call, in a run, or nowhere. One variable, so that one can't lag the other."""


def current_call() -> ToolCall | None:
    """The tool call whose body, hook or approver is running here, or None."""
    here = CURRENT.get()
    return here if isinstance(here, ToolCall) else None


def structural_copy(value: Any) -> Any:
    """A copy of builtin containers, cycles kept; the leaves stay the same objects."""
    made: dict[int, Any] = {}
    shells: list[Any] = []
    met: set[int] = set()
    stack = [(value, False)]
    while stack:
        obj, members_made = stack.pop()
        kind = type(obj)
        if members_made:  # a tuple is made of its members; on a cycle of tuples one keeps the original
            made[id(obj)] = tuple([made.get(id(item), item) for item in obj])
        elif kind in (dict, list, tuple) and id(obj) not in met:
            met.add(id(obj))
            if kind is tuple:
                stack.append((obj, True))
            else:
                made[id(obj)] = obj = obj.copy()
                shells.append(obj)
            stack.extend((item, False) for item in (obj.values() if kind is dict else obj))
        elif kind is set and id(obj) not in met:  # what it holds can be hashed: it needs no copy
            met.add(id(obj))
            made[id(obj)] = obj.copy()
    for shell in shells:
        for key, item in [*(shell.items() if type(shell) is dict else enumerate(shell))]:
            if id(item) in made:
                shell[key] = made[id(item)]
    return made.get(id(value), value)


def check_callable(obj: Any, what: str) -> None:
    """ConfigurationError unless obj can be decorated."""
    if not callable(obj) and not isinstance(obj, staticmethod | classmethod):
        hint = "; options have names, as in @loop(max=10)" if what == "@loop" else ""
        raise ConfigurationError(f"{what} decorates functions and methods, not {obj!r}{hint}")
