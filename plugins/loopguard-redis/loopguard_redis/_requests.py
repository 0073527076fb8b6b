"""What a ledger says to the server, and what the answers mean: policy once, without any I/O.

A request is a generator that yields commands, and seconds to wait, for a driver to carry out.
"""

from __future__ import annotations

import hashlib
import time
import uuid
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib.resources import files
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

from redis import exceptions
from redis.exceptions import NoScriptError, RedisError

from loopguard.budgets.ledger import check_amounts, check_entries, used_before
from loopguard.exceptions import ConfigurationError, LedgerError, LoopGuardWarning
from loopguard.redaction import safe_url
from loopguard.typing import Account, Balance, Entry, Lease, Shortfall, WrongWindow

__all__ = ["Command", "Requests", "Steps"]

Command: TypeAlias = tuple[Any, ...]
Steps: TypeAlias = Generator[Command | float, Any, Any]
"""Yields a command, and is sent its reply or thrown its RedisError; or seconds to wait."""

SCRIPT = files("loopguard_redis").joinpath("ledger.lua").read_text(encoding="utf-8")
META, BOOK = "{loopguard}:meta", "{loopguard}:book:"

AWAY = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError)
"""The server is down, starting, or a replica that is about to be promoted."""
LOCKED_OUT = (exceptions.AuthenticationError, exceptions.AuthorizationError)
"""redis-py counts them as ConnectionErrors, but waiting cures none."""

LONGEST = 100 * 365 * 86_400
"""Leases end after a century at the latest: `inf` is no number to Redis."""


class Requests:
    """The conversation with one server, and what it has told so far.

    Shared by all threads without a lock: what a race may lose is a newer `seq`, never the epoch.
    """

    def __init__(self, url: str, patience: float, script: str = SCRIPT) -> None:
        self.server = safe_url(url).partition("?")[0]
        """The URL without user, password and options, for people."""
        self.patience = patience
        self.script, self.sha = script, hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self.epoch = ""
        self.seq = 0
        self.met = False

    # -- the methods of a Ledger -----------------------------------------------------------------------

    def reserve(self, id: str, entries: Sequence[Entry], lease: Lease) -> Steps:
        """See `Ledger`; so for the rest."""
        entries = tuple(entries)
        check_entries(id, entries)
        asked = " ".join(map(_entry, entries))
        outcome, *rest = yield from self._ask("reserve", _quote(id), asked, *_lease(lease))
        if outcome == "used":
            raise used_before(id)
        if outcome == "window":
            return WrongWindow(float(rest[0]))
        if outcome == "short":
            return Shortfall(entries[int(rest[0])], _balance(rest[1:]))
        return tuple(_balance(rest[place : place + 3]) for place in range(0, len(rest), 3))

    def settle(self, id: str, amounts: Mapping[str, int]) -> Steps:
        check_amounts(id, amounts)
        words = [word for unit, amount in amounts.items() for word in (_quote(unit), amount)]
        outcome, *_ = yield from self._ask("settle", _quote(id), *words)
        if outcome == "unknown":
            raise LookupError(f"there is no reservation {id!r}")
        return outcome == "ok"

    def release(self, id: str) -> Steps:
        yield from self._ask("release", _quote(id))

    def renew(self, id: str, lease: Lease) -> Steps:
        outcome, *_ = yield from self._ask("renew", _quote(id), *_lease(lease))
        return outcome == "ok"

    def balance(self, account: Account, unit: str) -> Steps:
        _, *rest = yield from self._ask("balance", _book(account, unit))
        return _balance(rest)

    def accounts(self, key: str | None) -> Steps:
        pattern = f"{BOOK}*" if key is None else f"{BOOK}*/{_quote(key)}/*/*"
        rows = []
        for name in (yield from self._patiently(lambda: _scan(pattern))):
            *account, unit = map(unquote, name.removeprefix(BOOK).split("/"))
            rows.append((Account(*account), unit, (yield from self.balance(Account(*account), unit))))
        return sorted(rows, key=lambda row: (row[0].name, row[0].key, row[0].window, row[1]))

    # -- one request, until it is answered -------------------------------------------------------------

    def _ask(self, operation: str, *words: Any) -> Steps:
        return self._patiently(lambda: self._once(operation, *words))

    def _patiently(self, attempt: Callable[[], Steps]) -> Steps:
        """Repeat it while the server is away: every operation may be delivered twice."""
        deadline, pause = time.monotonic() + self.patience, 0.02
        while True:
            try:
                if not self.met:
                    yield from self._meet()
                return (yield from attempt())
            except RedisError as error:
                left = deadline - time.monotonic()
                if not isinstance(error, AWAY) or isinstance(error, LOCKED_OUT) or left <= 0:
                    raise LedgerError(f"the ledger {self.server} can't be asked: {error}") from error
            yield min(pause, left)
            pause = min(2 * pause, 0.5)

    def _once(self, operation: str, *words: Any) -> Steps:
        request = (1, META, operation, self.epoch, self.seq, uuid.uuid4().hex, *words)
        try:
            reply = yield ("EVALSHA", self.sha, *request)
        except NoScriptError:  # the first time, or after a restart or SCRIPT FLUSH
            reply = yield ("EVAL", self.script, *request)
        if reply[0] == "lost" or self.epoch not in ("", reply[1]):
            raise LedgerError(
                f"the ledger {self.server} came back without the data it had: what was spent and reserved is not "
                "known any more, so nothing more is spent from this process. Restore the data, or restart the "
                "process to go on with what the server has now"
            )
        outcome, self.epoch, seq, *rest = reply
        self.seq = max(self.seq, int(seq))
        return [outcome, *rest]

    def _meet(self) -> Steps:
        """Look once whether this server can keep books, and warn where it may lose them."""
        try:
            info = yield ("INFO",)
        except AWAY:
            raise
        except RedisError as error:
            info = {"aof_enabled": f"unknown ({error})"}
        if info.get("redis_mode") == "cluster":
            raise ConfigurationError(
                f"{self.server} is a node of a Redis cluster, which moves keys between servers: a ledger needs one "
                "server (and may have replicas)"
            )
        self.met = True
        for trouble in _troubles(info):
            warnings.warn(f"the ledger {self.server} may forget: {trouble}", LoopGuardWarning, stacklevel=2)


def _scan(pattern: str) -> Steps:
    """The keys that match; one that is written meanwhile may be missed."""
    keys: set[str] = set()
    cursor: Any = "0"
    while True:
        cursor, found = yield ("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        keys.update(found)
        if int(cursor) == 0:
            return keys


def _troubles(info: Mapping[str, Any]) -> list[str]:
    troubles, policy = [], info.get("maxmemory_policy")
    if info.get("aof_enabled") != 1:
        troubles.append(f"aof_enabled is {info.get('aof_enabled')}; switch the append-only file on (appendonly yes)")
    if info.get("maxmemory") and policy != "noeviction":
        troubles.append(f"under memory pressure it evicts keys ({policy}); set maxmemory-policy noeviction")
    return troubles


# -- words ---------------------------------------------------------------------------------------------


def _quote(text: str) -> str:
    return quote(text, safe=":@")


def _book(account: Account, unit: str) -> str:
    return "/".join(map(_quote, (account.name, account.key, account.window, unit)))


def _entry(entry: Entry) -> str:
    words = _book(entry.account, entry.unit), entry.begins, entry.ends, entry.amount, entry.cap
    return " ".join("-" if word is None else str(word) for word in words)


def _lease(lease: Lease) -> tuple[float, str]:
    return min(lease.seconds, LONGEST), lease.on_expiry


def _balance(words: Sequence[str]) -> Balance:
    return Balance(*map(int, words))
