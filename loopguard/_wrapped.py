"""What decorated functions are beside being called: one object, pickled by its name, as functions are."""

from __future__ import annotations

import copy
from typing import Any

import wrapt

__all__ = ["BoundWrapper", "Wrapper"]


class Wrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]  # generic in wrapt's stubs only
    """A decorated function."""

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
