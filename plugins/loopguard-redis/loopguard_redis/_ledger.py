"""The two colours of the ledger: plain methods that block, and `async def`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, TypeAlias

import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from loopguard.exceptions import ConfigurationError
from loopguard.typing import Account, Balance, Entry, Lease, Shortfall, WrongWindow
from loopguard_redis._requests import Command, Requests, Steps

Reserved: TypeAlias = tuple[Balance, ...] | Shortfall | WrongWindow

__all__ = ["AsyncRedisLedger", "RedisLedger"]


class _Ledger:
    def __init__(self, url: str, *, patience: float = 6.0) -> None:
        if not patience >= 0:
            raise ConfigurationError(f"patience={patience!r}: give seconds of at least 0")
        self._requests = Requests(url, patience)
        self._url = url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._requests.server!r})"


class RedisLedger(_Ledger):
    """A `loopguard.typing.Ledger` in Redis, safe to use from many threads, processes and machines.

    ``url``: ``redis://[user:password@]host:port/database``, ``rediss://`` for TLS, ``unix://path?db=0``; with
    redis-py's options as its query. ``patience``: seconds for which a request is repeated while the server is
    away. Its methods block; async code runs them off the event loop.

    Raises LedgerError where the server can't be asked, or has lost what it knew; ConfigurationError for a URL
    that is none, or a server that is part of a cluster.
    """

    def __init__(self, url: str, *, patience: float = 6.0) -> None:
        super().__init__(url, patience=patience)
        self._client = _client(redis.Redis, url, Retry(NoBackoff(), 0))

    def reserve(self, id: str, entries: Sequence[Entry], lease: Lease) -> Reserved:
        """See `loopguard.typing.Ledger`."""
        answer: Reserved = self._drive(self._requests.reserve(id, entries, lease))
        return answer

    def settle(self, id: str, amounts: Mapping[str, int]) -> bool:
        """See `loopguard.typing.Ledger`."""
        held: bool = self._drive(self._requests.settle(id, amounts))
        return held

    def release(self, id: str) -> None:
        """See `loopguard.typing.Ledger`."""
        self._drive(self._requests.release(id))

    def renew(self, id: str, lease: Lease) -> bool:
        """See `loopguard.typing.Ledger`."""
        held: bool = self._drive(self._requests.renew(id, lease))
        return held

    def balance(self, account: Account, unit: str) -> Balance:
        """See `loopguard.typing.Ledger`."""
        balance: Balance = self._drive(self._requests.balance(account, unit))
        return balance

    def accounts(self, key: str | None = None) -> list[tuple[Account, str, Balance]]:
        """See `loopguard.typing.ListedLedger`."""
        listed: list[tuple[Account, str, Balance]] = self._drive(self._requests.accounts(key))
        return listed

    def close(self) -> None:
        """Close the connections; the ledger opens new ones when it is used again."""
        self._client.close()

    def _drive(self, steps: Steps) -> Any:
        try:
            step = next(steps)
            while True:
                try:
                    reply = self._perform(step)
                except RedisError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration as done:
            return done.value

    def _perform(self, step: Command | float) -> Any:
        if isinstance(step, tuple):
            return self._client.execute_command(*step)
        time.sleep(step)
        return None


class AsyncRedisLedger(_Ledger):
    """`RedisLedger` with ``async def`` methods: no thread for each request, but for async tools only."""

    def __init__(self, url: str, *, patience: float = 6.0) -> None:
        super().__init__(url, patience=patience)
        self._connect()  # a wrong URL is told now
        self._clients: dict[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[Any, None]]] = {}

    async def reserve(self, id: str, entries: Sequence[Entry], lease: Lease) -> Reserved:
        """See `loopguard.typing.Ledger`."""
        answer: Reserved = await self._drive(self._requests.reserve(id, entries, lease))
        return answer

    async def settle(self, id: str, amounts: Mapping[str, int]) -> bool:
        """See `loopguard.typing.Ledger`."""
        held: bool = await self._drive(self._requests.settle(id, amounts))
        return held

    async def release(self, id: str) -> None:
        """See `loopguard.typing.Ledger`."""
        await self._drive(self._requests.release(id))

    async def renew(self, id: str, lease: Lease) -> bool:
        """See `loopguard.typing.Ledger`."""
        held: bool = await self._drive(self._requests.renew(id, lease))
        return held

    async def balance(self, account: Account, unit: str) -> Balance:
        """See `loopguard.typing.Ledger`."""
        balance: Balance = await self._drive(self._requests.balance(account, unit))
        return balance

    async def accounts(self, key: str | None = None) -> list[tuple[Account, str, Balance]]:
        """See `loopguard.typing.ListedLedger`."""
        listed: list[tuple[Account, str, Balance]] = await self._drive(self._requests.accounts(key))
        return listed

    async def close(self) -> None:
        """Close the connections of the running event loop. They are closed with the loop, too."""
        _, lifetime = self._clients.get(asyncio.get_running_loop(), (None, None))
        if lifetime is not None:
            await lifetime.aclose()

    def _connect(self) -> Any:
        return _client(redis.asyncio.Redis, self._url, AsyncRetry(NoBackoff(), 0))

    async def _lifetime(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[Any, None]:
        """Yields a client. Connections belong to an event loop, which at its end closes all async generators."""
        client = self._connect()
        try:
            yield client
        finally:
            del self._clients[loop]
            await client.aclose()

    async def _drive(self, steps: Steps) -> Any:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            lifetime = self._lifetime(loop)
            self._clients[loop] = (await anext(lifetime), lifetime)
        client, _ = self._clients[loop]
        try:
            step = next(steps)
            while True:
                try:
                    reply = await self._perform(client, step)
                except RedisError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration as done:
            return done.value

    async def _perform(self, client: Any, step: Command | float) -> Any:
        if isinstance(step, tuple):
            return await client.execute_command(*step)
        await asyncio.sleep(step)
        return None


def _client(kind: Any, url: str, retry: Any) -> Any:
    """A client that leaves it to us to try again; its errors never repeat the URL, which may hold a password."""
    try:
        return kind.from_url(url, decode_responses=True, retry=retry)
    except (ValueError, TypeError):
        raise ConfigurationError(
            "the ledger's URL isn't one that redis-py understands: give redis://[user:password@]host:port/database, "
            "rediss://… or unix://path, with reserved characters in the password percent-encoded"
        ) from None
