"""A process of test_outages.py: spends one unit at a time, and says how far it came."""

from __future__ import annotations

import os
import sys

from loopguard.typing import Account, Entry, Lease
from loopguard_redis import RedisLedger

url, calls = sys.argv[1], int(sys.argv[2])
ledger = RedisLedger(url)
paid = 0
for number in range(calls):
    call = f"{os.getpid()}-{number}"
    ledger.reserve(call, [Entry(Account("spend", "team-a", "total"), "usd", 10**18, 10**24)], Lease(60))
    ledger.settle(call, {"usd": 10**18 + number})
    paid += 10**18 + number
    print(paid, flush=True)
