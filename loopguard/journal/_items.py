"""Generator tools and their items: noted while they are yielded, and yielded again from the record."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

__all__ = ["ITEMS", "AsyncNoting", "Noting", "play", "play_async"]

ITEMS = 10_000
"""Items of a generator tool that are recorded; with more, the call can't be replayed."""


InFlight: TypeAlias = Callable[[], AbstractContextManager[None]]


class Noting:
    """A generator that notes what it yields, and when it is at work."""

    def __init__(
        self, fn: Callable[..., Any], items: list[Any], in_flight: InFlight, *args: Any, **kwargs: Any
    ) -> None:
        items.clear()
        self._generator = fn(*args, **kwargs)
        self._items = items
        self._in_flight = in_flight

    def _note(self, item: Any) -> Any:
        if len(self._items) <= ITEMS:
            self._items.append(item)
        return item

    def __iter__(self) -> Noting:
        return self

    def __next__(self) -> Any:
        with self._in_flight():
            return self._note(next(self._generator))

    def send(self, value: Any) -> Any:
        with self._in_flight():
            return self._note(self._generator.send(value))

    def throw(self, exc: BaseException) -> Any:
        with self._in_flight():
            return self._note(self._generator.throw(exc))

    def close(self) -> None:
        with self._in_flight():
            self._generator.close()


class AsyncNoting(Noting):
    """The same, async."""

    async def __anext__(self) -> Any:
        with self._in_flight():
            return self._note(await self._generator.__anext__())

    async def asend(self, value: Any) -> Any:
        with self._in_flight():
            return self._note(await self._generator.asend(value))

    async def athrow(self, exc: BaseException) -> Any:
        with self._in_flight():
            return self._note(await self._generator.athrow(exc))

    async def aclose(self) -> None:
        with self._in_flight():
            await self._generator.aclose()


def play(items: list[Any], result: Any, error: BaseException | None) -> Generator[Any, Any, Any]:
    yield from items
    if error is not None:
        raise error
    return result


async def play_async(items: list[Any], result: Any, error: BaseException | None) -> AsyncIterator[Any]:
    for item in items:
        yield item
    if error is not None:
        raise error
