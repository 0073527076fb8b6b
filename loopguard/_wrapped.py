"""What decorated functions are beside being called: one object, pickled by its name, as functions are."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import wrapt

__all__ = ["BoundWrapper", "Wrapper", "in_class_body", "takes_class"]


def in_class_body(fn: Any) -> bool:
    """Whether a function was written in the body of a class."""
    where = getattr(fn, "__qualname__", "").rpartition(".")[0]
    return bool(where) and not where.endswith("<locals>")


def takes_class(fn: Any) -> bool:
    """Whether it is the function beneath a @classmethod that stands outside of our decorator.

    From Python 3.13 on such a classmethod hands the class on as an ordinary first argument.
    """
    if not inspect.isfunction(fn) or not in_class_body(fn):
        return False
    code = fn.__code__
    return code.co_argcount > 0 and code.co_varnames[0] == "cls"


def _class_first(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(fn: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *more: Any) -> Any:
        if instance is None and args and isinstance(args[0], type):
            fn, instance, args = functools.partial(fn, args[0]), args[0], args[1:]
        return call(fn, instance, args, kwargs, *more)

    return called


class Wrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]  # generic in wrapt's stubs only
    """A decorated function."""

    def __init__(self, wrapped: Any, call: Callable[..., Any]) -> None:
        super().__init__(wrapped, _class_first(call) if takes_class(wrapped) else call)

    def __reduce_ex__(self, protocol: Any) -> str:
        return self.__qualname__  # the function's own

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class BoundWrapper(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]  # generic in the stubs only
    """A decorated method, bound to its object or class: it goes where the object goes."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner = self._self_owner if self._self_instance is None else self._self_instance
        return getattr, (owner, self.__wrapped__.__name__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return getattr(copy.deepcopy(self._self_instance, memo), self.__wrapped__.__name__, self)
