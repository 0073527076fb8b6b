"""Budgets that many processes and machines share: a loopguard ledger in Redis."""

from __future__ import annotations

from loopguard_redis._ledger import AsyncRedisLedger, RedisLedger

__all__ = ["AsyncRedisLedger", "RedisLedger"]
