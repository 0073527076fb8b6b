"""Both colours of the ledger against the contract that every ledger keeps, on a server whose clock can be moved."""

from __future__ import annotations

import pytest
import redis

from loopguard.testing import LedgerContract
from loopguard_redis import AsyncRedisLedger, RedisLedger
from loopguard_redis._requests import SCRIPT, Requests

pytestmark = pytest.mark.redis

TIME = "redis.call('TIME')"
MOVED = "(function(t) return {t[1] + (redis.call('GET', '{loopguard}:moved') or 0), t[2]} end)(redis.call('TIME'))"


class OnRedis(LedgerContract):
    """The real script but for its clock, which stands as many seconds ahead as `advance` has moved it."""

    kind: type[RedisLedger | AsyncRedisLedger]
    examples = 15

    @pytest.fixture(autouse=True)
    def _server(self, url: str) -> None:
        self.url = url

    def make_ledger(self) -> RedisLedger | AsyncRedisLedger:
        self._admin("FLUSHDB")
        return self.another(None)

    def another(self, ledger: object) -> RedisLedger | AsyncRedisLedger:
        assert SCRIPT.count(TIME) == 1
        made = self.kind(self.url)
        made._requests = Requests(self.url, 6.0, SCRIPT.replace(TIME, MOVED))
        return made

    def advance(self, seconds: float) -> None:
        self._admin("INCRBYFLOAT", "{loopguard}:moved", seconds)

    def _admin(self, *command: str | float) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.execute_command(*command)


class TestRedisLedger(OnRedis):
    kind = RedisLedger


class TestAsyncRedisLedger(OnRedis):
    kind = AsyncRedisLedger
