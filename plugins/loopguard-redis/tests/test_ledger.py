"""What is particular to Redis: exact numbers in Lua, the server's own time, keys that expire, scripts that go."""

from __future__ import annotations

import asyncio
import gc
import uuid
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loopguard.typing import Account, Balance, Entry, Lease, Shortfall
from loopguard_redis import AsyncRedisLedger, RedisLedger

pytestmark = pytest.mark.redis

TEAM = Account("spend", "team-a", "total")
DAY = 86_400

# around the limbs of 15 digits, 2**53, 2**63, and anything else
BORDERS = [0, 1, 2**53, 2**63, 10**14, 10**15, 10**16, 10**30, 10**36]
AMOUNTS = st.one_of(
    st.tuples(st.sampled_from(BORDERS), st.integers(-2, 2)).map(lambda pair: min(max(sum(pair), 0), 10**36)),
    st.integers(0, 10**36),
)


@pytest.fixture
def ledger(url: str) -> Any:
    made = RedisLedger(url)
    yield made
    made.close()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(st.tuples(AMOUNTS, AMOUNTS), max_size=6), asked=AMOUNTS, left=st.integers(-2, 2))
def test_sums_in_lua_are_those_of_python(
    ledger: RedisLedger, calls: list[tuple[int, int]], asked: int, left: int
) -> None:
    """Spent, reserved, overdraft and the comparison with a cap, to the last digit."""
    team = Account("spend", uuid.uuid4().hex, "total")
    for reserved, paid in calls:
        call = uuid.uuid4().hex
        ledger.reserve(call, [Entry(team, "usd", reserved, None)], Lease(60))
        ledger.settle(call, {"usd": paid})
    ledger.reserve(uuid.uuid4().hex, [Entry(team, "usd", 7, None)], Lease(60))
    spent, above = sum(paid for _, paid in calls), sum(max(0, paid - reserved) for reserved, paid in calls)
    assert ledger.balance(team, "usd") == Balance(spent, 7, above)
    cap = max(0, spent + 7 + asked + left)
    answer = ledger.reserve(uuid.uuid4().hex, [Entry(team, "usd", asked, cap)], Lease(60))
    assert isinstance(answer, Shortfall) is (asked > 0 and spent + 7 + asked > cap)


def now(client: Any) -> float:
    seconds, microseconds = client.time()
    return float(seconds + microseconds / 1e6)


def test_a_lease_runs_out_by_the_clock_of_the_server(ledger: RedisLedger, url: str) -> None:
    """To the millisecond. Nobody renews it, nobody looks: what was held is spent."""
    with redis.Redis.from_url(url) as client:
        before = now(client)
        ledger.reserve("a", [Entry(TEAM, "usd", 60, 100)], Lease(0.2))
        assert before + 0.199 < client.zscore("{loopguard}:leases", "a") < now(client) + 0.201
        while now(client) < before + 0.5:
            assert ledger.balance(TEAM, "usd") in (Balance(0, 60, 0), Balance(60, 0, 0))
    assert ledger.balance(TEAM, "usd") == Balance(60, 0, 0)
    assert ledger.settle("a", {"usd": 61}) is False
    assert ledger.balance(TEAM, "usd") == Balance(61, 0, 1)


def test_more_leases_run_out_than_one_request_ends(ledger: RedisLedger, url: str) -> None:
    """Each request ends a thousand, and its own in any case: never is more free than there should be."""
    with redis.Redis.from_url(url) as client:
        for number in range(2100):
            ledger.reserve(str(number), [Entry(TEAM, "usd", 1, None)], Lease(3600, "release"))
        client.zunionstore("{loopguard}:leases", {"{loopguard}:leases": 0.5})  # all of them ran out decades ago
    assert ledger.renew("2099", Lease(60)) is False
    held = [ledger.balance(TEAM, "usd").reserved for _ in range(3)]
    assert held[-1] == 0
    assert held == sorted(held, reverse=True)
    assert ledger.settle("2099", {"usd": 5}) is False
    assert ledger.balance(TEAM, "usd") == Balance(5, 0, 5)


def test_what_is_over_is_forgotten_in_time(ledger: RedisLedger, url: str) -> None:
    """Only totals and what is held stay: the rest has a date at which Redis drops it."""
    hour = Account("spend", "team-a", "2026-11-30T14")
    with redis.Redis.from_url(url, decode_responses=True) as client:

        def reserve(call: str) -> None:
            closes = now(client) + 600
            ledger.reserve(
                call, [Entry(TEAM, "usd", 1, 100), Entry(hour, "usd", 1, 100, closes - 660, closes)], Lease(60)
            )

        def left() -> dict[str, int]:
            return {key.removeprefix("{loopguard}:"): client.ttl(key) for key in client.scan_iter()}

        book, total = "book:spend/team-a/2026-11-30T14/usd", "book:spend/team-a/total/usd"
        reserve("a")
        assert left() == dict.fromkeys(("meta", "leases", "call:a", book, total), -1)
        ledger.settle("a", {"usd": 1})
        ledger.release("never reserved")
        over = left()
        assert {key for key, ttl in over.items() if ttl == -1} == {"meta", total}
        assert 62 * DAY + 500 < over[book] <= 62 * DAY + 601
        assert 0 < over["call:a"] <= 3600
        assert 0 < over["call:never%20reserved"] <= 3600
        assert client.hkeys("{loopguard}:call:a") == ["state"]
        reserve("b")
        assert left()[book] == -1, "what is held keeps its book"
        client.zadd("{loopguard}:leases", {"b": 1})
        assert ledger.balance(hour, "usd") == Balance(2, 0, 0)
        over = left()
        assert {key for key, ttl in over.items() if ttl == -1} == {"meta", total}
        assert 6 * DAY < over["call:b"] <= 7 * DAY


def test_a_flushed_script_is_sent_again(ledger: RedisLedger, url: str) -> None:
    """SCRIPT FLUSH, as after a restart, costs one more round trip."""
    ledger.reserve("a", [Entry(TEAM, "usd", 60, 100)], Lease(60))
    with redis.Redis.from_url(url) as client:
        client.script_flush()
        assert ledger.settle("a", {"usd": 50}) is True
        assert client.script_exists(ledger._requests.sha) == [True]
    assert ledger.balance(TEAM, "usd") == Balance(50, 0, 0)


def test_connections_that_were_cut_are_made_anew(ledger: RedisLedger, url: str) -> None:
    """A firewall, a proxy or an operator may close them at any time."""
    ledger.reserve("a", [Entry(TEAM, "usd", 60, 100)], Lease(60))
    with redis.Redis.from_url(url) as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert ledger.settle("a", {"usd": 50}) is True
    assert ledger.balance(TEAM, "usd") == Balance(50, 0, 0)


def test_an_async_ledger_serves_one_event_loop_after_the_other(url: str) -> None:
    """A ledger that a module made is used by every asyncio.run of the process."""
    ledger = AsyncRedisLedger(url)

    async def spend(call: str) -> Balance:
        await ledger.reserve(call, [Entry(TEAM, "usd", 1, 100)], Lease(60))
        await ledger.settle(call, {"usd": 1})
        return await ledger.balance(TEAM, "usd")

    assert [asyncio.run(spend(call)).spent for call in "abc"] == [1, 2, 3]
    gc.collect()  # a connection that nobody closed would warn, and a warning is an error


def test_databases_of_one_server_are_different_books(ledger: RedisLedger, url: str) -> None:
    """`redis://…/0` and `redis://…/1` share nothing."""
    ledger.reserve("a", [Entry(TEAM, "usd", 60, 100)], Lease(60))
    base, _, database = url.rpartition("/")
    other = RedisLedger(f"{base}/{(int(database) + 1) % 16}")
    assert other.balance(Account("spend", uuid.uuid4().hex, "total"), "usd") == Balance()
    assert other.balance(TEAM, "usd") == Balance()
    other.close()
