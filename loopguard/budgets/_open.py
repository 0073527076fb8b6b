"""Where ledgers are: what a URL names, one keeper for each in this process, and what stands in their books."""

from __future__ import annotations

import asyncio
import inspect
import os
import weakref
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from loopguard._amounts import decimal
from loopguard._config import settings
from loopguard._pipeline import LOCK
from loopguard._plugins import LEDGERS, check_plugin, load_plugin
from loopguard.budgets._keeper import Keeper
from loopguard.budgets._memory import MemoryLedger
from loopguard.budgets.ledger import Ledger
from loopguard.exceptions import ConfigurationError
from loopguard.redaction import redact_text, safe_url

__all__ = ["Standing", "check_ledger", "keeper_of", "spend"]

_SQLITE = "sqlite:///"
_known: weakref.WeakValueDictionary[str, Keeper] = weakref.WeakValueDictionary()


def check_ledger(ledger: str | Ledger | None, what: str) -> str | Ledger:
    """The ledger that is named, or that LOOPGUARD_LEDGER names. ConfigurationError if there is none, or no such."""
    if ledger is None:
        ledger, what = os.environ.get("LOOPGUARD_LEDGER") or None, "LOOPGUARD_LEDGER"
        if ledger is None:
            raise ConfigurationError(
                "a budget of a period needs a ledger: give ledger=, or set LOOPGUARD_LEDGER, to sqlite:///spend.db "
                "(one host), redis://… (many), or memory: (this process alone)"
            )
    closing = ")" if "(" in what else ""
    if not isinstance(ledger, str):
        if callable(getattr(ledger, "reserve", None)) and callable(getattr(ledger, "settle", None)):
            return ledger
        raise ConfigurationError(
            f"{what}={redact_text(repr(ledger)[:80])}{closing}: give a URL, or an object that is a Ledger"
        )
    if ledger == "memory:" or (ledger.startswith(_SQLITE) and len(ledger) > len(_SQLITE)):
        return ledger
    scheme, colon, _ = ledger.partition(":")
    if not colon or scheme in ("memory", "sqlite"):
        raise ConfigurationError(
            f"{what}={safe_url(ledger)!r}{closing}: give memory:, sqlite:///spend.db, or the URL of a plugin's ledger"
        )
    check_plugin(LEDGERS, scheme, f"{what}={scheme}:…{closing}")
    return ledger


def keeper_of(ledger: str | Ledger) -> Keeper:
    """This process's keeper of a ledger, opened when it is first asked for."""
    if not isinstance(ledger, str):
        place, name = f"object {id(ledger)}", redact_text(repr(ledger)[:80])
    elif ledger.startswith(_SQLITE):
        path = os.path.abspath(ledger.removeprefix(_SQLITE))
        place = name = f"{_SQLITE}{path}"
    else:
        place, name = ledger, safe_url(ledger)
    known = _known.get(place)
    if known is not None:
        return known
    made = Keeper(_opened(ledger), name)
    with LOCK:
        return _known.setdefault(place, made)


def _opened(ledger: str | Ledger) -> Any:
    if not isinstance(ledger, str):
        return ledger
    if ledger == "memory:":
        return _MEMORY
    if ledger.startswith(_SQLITE):
        from loopguard.budgets._sqlite import SqliteLedger

        return SqliteLedger(ledger.removeprefix(_SQLITE), settings.durability)
    scheme = ledger.partition(":")[0]
    return load_plugin(LEDGERS, scheme, f"the ledger {scheme}:…")(ledger)


_MEMORY = MemoryLedger()


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one unit of one account stands, in the unit itself: usd in USD, tokens in tokens."""

    budget: str
    """The budget's name, ``budget`` where it has none."""
    key: str
    """Empty where it has no key."""
    window: str
    """Such as ``2026-11-30T14``, ``2026-11-30``, ``2026-11`` or ``total``; not in UTC: with the offset or the zone."""
    unit: str
    spent: Decimal
    reserved: Decimal
    overdraft: Decimal
    """What was spent above what was held for it, part of spent."""


def spend(ledger: str | Ledger | None = None, *, key: str | None = None) -> list[Standing]:
    """What stands in a ledger (a URL, an object, or LOOPGUARD_LEDGER), of all keys or of one; sorted.

    Raises ConfigurationError where there is no such ledger, or it can't list its accounts; LedgerError where it
    can't be asked. Not for use inside an event loop where the ledger is async.
    """
    ledger = check_ledger(ledger, "ledger")
    if isinstance(ledger, str) and ledger.startswith(_SQLITE) and not os.path.exists(ledger.removeprefix(_SQLITE)):
        raise ConfigurationError(f"ledger={ledger!r}: there is no such file; nothing was spent there")
    opened = keeper_of(ledger).ledger
    if not hasattr(opened, "accounts"):
        raise ConfigurationError(f"{opened!r} doesn't list its accounts")
    listed = opened.accounts(key)
    if inspect.isawaitable(listed):
        listed = asyncio.run(_listed(opened, listed))
    return [
        Standing(
            account.name,
            account.key,
            account.window,
            unit,
            decimal(balance.spent),
            decimal(balance.reserved),
            decimal(balance.overdraft),
        )
        for account, unit, balance in listed
    ]


async def _listed(ledger: Any, listed: Any) -> Any:
    try:
        return await listed
    finally:
        if hasattr(ledger, "close"):
            await ledger.close()  # the connections of this event loop
