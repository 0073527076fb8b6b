"""Servers that go away, come back, come back without their data, or aren't fit to keep books: real ones."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from loopguard.exceptions import ConfigurationError, LedgerError, LoopGuardWarning
from loopguard.typing import Account, Balance, Entry, Lease
from loopguard_redis import RedisLedger

pytestmark = pytest.mark.redis

TEAM = Account("spend", "team-a", "total")
KEPT = ("--appendonly", "yes")


def spend(ledger: RedisLedger, *calls: str, amount: int = 1) -> None:
    for call in calls:
        ledger.reserve(call, [Entry(TEAM, "usd", amount, None)], Lease(60))
        ledger.settle(call, {"usd": amount})


@pytest.mark.parametrize(("how", "fsync"), [(signal.SIGTERM, "everysec"), (signal.SIGKILL, "always")])
def test_a_restart_in_the_middle_costs_nobody_anything(
    start: Callable[..., Any], how: signal.Signals, fsync: str
) -> None:
    """Two seconds of nothing, and all four processes go on; spent is what they say they paid."""
    server = start(*KEPT, "--appendfsync", fsync)
    workers = [
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name("worker.py"), server.url, "400"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for worker in workers:  # all of them are at work
        assert worker.stdout is not None
        worker.stdout.readline()
    server.kill(how)
    threading.Event().wait(2)
    server.start()
    said = [worker.communicate(timeout=50)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    ledger = RedisLedger(server.url)
    assert ledger.balance(TEAM, "usd") == Balance(sum(int(lines[-1]) for lines in said), 0, 4 * sum(range(400)))
    ledger.close()


def test_a_server_that_stays_away_is_an_error_without_the_password(start: Callable[..., Any]) -> None:
    """Fails closed after `patience`, and nothing in the traceback says how to log in."""
    server = start(*KEPT, "--requirepass", "hunter2-secret")
    login = server.url.replace("://", "://:hunter2-secret@")
    ledger = RedisLedger(login, patience=0.3)
    assert ledger.balance(TEAM, "usd") == Balance()
    server.kill()
    began = time.monotonic()
    with pytest.raises(LedgerError, match="can't be asked") as caught:
        ledger.reserve("a", [Entry(TEAM, "usd", 1, None)], Lease(60))
    assert 0.3 <= time.monotonic() - began < 5
    server.start()
    wrong = RedisLedger(server.url.replace("://", "://:wrong-secret@"))
    with pytest.raises(LedgerError, match="can't be asked") as locked_out:
        wrong.balance(TEAM, "usd")
    shown = "".join(traceback.format_exception(caught.value) + traceback.format_exception(locked_out.value))
    assert "secret" not in shown + repr(ledger) + repr(wrong), shown
    assert f"redis://127.0.0.1:{server.port}/0" in str(caught.value)
    ledger.close()
    wrong.close()


def test_a_server_that_lost_everything_is_noticed(start: Callable[..., Any]) -> None:
    """Whoever knew the books is refused from then on, until the data is back; a new process begins anew."""
    server = start(*KEPT)
    ledger, idle = RedisLedger(server.url), RedisLedger(server.url)
    spend(ledger, "a", amount=60)
    assert idle.balance(TEAM, "usd").spent == 60
    server.kill()
    server.folder.rename(server.folder.with_name("kept"))
    server.start()
    with pytest.raises(LedgerError, match="without the data it had"):
        ledger.reserve("b", [Entry(TEAM, "usd", 1, None)], Lease(60))
    newcomer = RedisLedger(server.url)
    spend(newcomer, "a", amount=1)
    assert newcomer.balance(TEAM, "usd") == Balance(1, 0, 0)
    for _ in range(2):
        with pytest.raises(LedgerError, match="without the data it had"):
            idle.balance(TEAM, "usd")
    server.kill()
    shutil.rmtree(server.folder)
    server.folder.with_name("kept").rename(server.folder)
    server.start()
    spend(ledger, "b", amount=1)
    assert idle.balance(TEAM, "usd") == Balance(61, 0, 0)
    for each in (ledger, idle, newcomer):
        each.close()


def test_a_server_that_went_back_in_time_is_noticed(start: Callable[..., Any]) -> None:
    """A snapshot, or a replica that lagged behind, has the old books without the latest pages."""
    server = start()
    ledger, idle = RedisLedger(server.url), RedisLedger(server.url)
    with pytest.warns(LoopGuardWarning, match="aof_enabled is 0"):
        spend(ledger, "a", amount=10)
    with pytest.warns(LoopGuardWarning, match="aof_enabled"):
        assert idle.balance(TEAM, "usd").spent == 10
    with redis.Redis.from_url(server.url) as client:
        client.save()
    spend(ledger, "b", amount=10)
    server.kill()
    server.start()
    with pytest.raises(LedgerError, match="without the data it had"):
        ledger.reserve("c", [Entry(TEAM, "usd", 1, None)], Lease(60))
    with pytest.raises(LedgerError, match="without the data it had"):
        idle.balance(TEAM, "usd")  # it knew no more than the snapshot does, but is told
    newcomer = RedisLedger(server.url)
    with pytest.warns(LoopGuardWarning, match="aof_enabled"):
        assert newcomer.balance(TEAM, "usd") == Balance(10, 0, 0)
    for each in (ledger, idle, newcomer):
        each.close()


def test_a_server_that_may_forget_is_told_of_once(start: Callable[..., Any]) -> None:
    """No append-only file, or keys that may be evicted; a server without either fault is not spoken of."""
    server = start("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru")
    ledger = RedisLedger(server.url)
    with pytest.warns(LoopGuardWarning) as told:
        spend(ledger, "a", "b")
    said = [str(warning.message) for warning in told]
    assert len(said) == 2, said
    assert "appendonly yes" in said[0]
    assert "allkeys-lru" in said[1]
    ledger.close()
    good = start(*KEPT, "--maxmemory", "50mb", "--maxmemory-policy", "noeviction")
    ledger = RedisLedger(good.url)
    spend(ledger, "a")  # any warning is an error
    ledger.close()


def test_a_server_that_does_not_say_how_it_keeps_data_is_told_of(start: Callable[..., Any]) -> None:
    """A hosted Redis may forbid INFO: the ledger works, and says that it couldn't look."""
    server = start(*KEPT)
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "agent", "on", ">pw", "~*", "+@all", "-info")
    ledger = RedisLedger(server.url.replace("://", "://agent:pw@"))
    with pytest.warns(LoopGuardWarning, match="unknown"):
        spend(ledger, "a")
    assert ledger.balance(TEAM, "usd") == Balance(1, 0, 0)
    ledger.close()


def test_a_full_server_refuses_and_keeps_its_books(start: Callable[..., Any]) -> None:
    """Under noeviction a write is an error, as a whole: nothing is half reserved."""
    server = start(*KEPT, "--maxmemory", "50mb", "--maxmemory-policy", "noeviction")
    ledger = RedisLedger(server.url)
    spend(ledger, "a", amount=10)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "1mb")
        with pytest.raises(LedgerError, match="memory"):
            ledger.reserve("b", [Entry(TEAM, "usd", 5, None), Entry(TEAM, "tokens", 5, None)], Lease(60))
        assert ledger.balance(TEAM, "usd") == Balance(10, 0, 0)
        client.config_set("maxmemory", "50mb")
    spend(ledger, "b", amount=5)
    assert ledger.balance(TEAM, "usd") == Balance(15, 0, 0)
    ledger.close()


def test_a_cluster_is_refused(start: Callable[..., Any]) -> None:
    """Said at the first request, rather than MOVED at some later one."""
    server = start(*KEPT, "--cluster-enabled", "yes")
    ledger = RedisLedger(server.url)
    with pytest.raises(ConfigurationError, match="cluster"):
        ledger.balance(TEAM, "usd")
    ledger.close()


def test_a_unix_socket_serves_as_well(start: Callable[..., Any], tmp_path: Path) -> None:
    """`unix://path`, with the database as an option."""
    start(*KEPT, "--unixsocket", str(tmp_path / "redis.sock"))
    ledger = RedisLedger(f"unix://{tmp_path}/redis.sock?db=3")
    spend(ledger, "a")
    assert ledger.balance(TEAM, "usd") == Balance(1, 0, 0)
    ledger.close()


@pytest.mark.parametrize(
    "url", ["redis://:s3cret/word@host:6379/0", "http://u:s3cret@host", "redis://:s3cret@h:port/0"]
)
def test_a_url_that_is_none_is_refused_without_repeating_it(url: str) -> None:
    """A password that wasn't encoded makes such URLs."""
    with pytest.raises(ConfigurationError, match="percent-encoded") as caught:
        RedisLedger(url)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))
