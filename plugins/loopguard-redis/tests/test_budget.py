"""Budgets in Redis as their users meet them: chains over several ledgers, both colours, a server that goes."""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopguard import Budget, BudgetExceeded, Guard, tool
from loopguard.typing import Account, Balance
from loopguard_redis import AsyncRedisLedger, RedisLedger

pytestmark = pytest.mark.redis

EXAMPLE = Path(__file__).parents[1] / "examples" / "team_budget.py"
KEPT = ("--appendonly", "yes")
USD = 10**18


@tool(cost=2, repeatable=True)
def search() -> str:
    return "found"


@tool(cost=2, repeatable=True)
async def asearch() -> str:
    return "found"


def call() -> str:
    return search()


def acall() -> str:
    return asyncio.run(asearch())


@pytest.mark.parametrize("call", [call, acall])
def test_three_budgets_on_three_ledgers_are_one_chain(
    start: Callable[..., Any], tmp_path: Path, call: Callable[[], str]
) -> None:
    """A call that one of them refuses, whichever it is, leaves nothing with the others; what runs is paid by all."""
    urls = [start(*KEPT).url, start(*KEPT).url, f"sqlite:///{tmp_path}/spend.db"]
    ledgers = [RedisLedger(url) for url in urls[:2]]

    def spent(key: str) -> list[Balance]:
        return [ledger.balance(Account("budget", key, "total"), "usd") for ledger in ledgers]

    for tight in (None, 0, 1, 2):
        key = uuid.uuid4().hex
        guards = [
            Guard(Budget(usd=1 if number == tight else 9, per="total", key=key, ledger=place))
            for number, place in enumerate(urls)
        ]
        with guards[0].scope("company"), guards[1].scope("team"), guards[2].scope("user") as run:
            if tight is None:
                assert [call() for _ in range(4)] == ["found"] * 4
            with pytest.raises(BudgetExceeded, match="is left of the budget") as caught:
                call()
            assert run.steps == (4 if tight is None else 0)
        assert caught.value.source == ["company", "team", "user"][tight or 0]
        assert spent(key) == [Balance(8 * USD if tight is None else 0)] * 2
    for ledger in ledgers:
        ledger.close()


@pytest.mark.parametrize("call", [call, acall])
def test_two_budgets_on_one_ledger_are_one_step(start: Callable[..., Any], call: Callable[[], str]) -> None:
    """Team and user are reserved by one script, the first that doesn't fit is named, and neither holds anything."""
    key, url = uuid.uuid4().hex, start(*KEPT).url
    team = Budget(usd=9, per="month", key=key, name="team", ledger=url)
    user = Budget(usd=3, per="day", key=key, name="user", ledger=url)
    with Guard(team).scope("team"), Guard(user).scope("user"):
        assert call() == "found"
        with pytest.raises(BudgetExceeded) as caught:
            call()
    assert caught.value.source == "user"
    ledger = RedisLedger(url)
    listed = {account.name: balance for account, unit, balance in ledger.accounts(key)}
    assert listed == {"team": Balance(2 * USD), "user": Balance(2 * USD)}
    ledger.close()


def test_an_async_ledger_pays_for_async_tools(start: Callable[..., Any]) -> None:
    """In the event loop of the tools, a hundred at once, and never more than the cap."""
    key, url = uuid.uuid4().hex, start(*KEPT).url
    guard = Guard(Budget(usd=20, per="total", key=key, ledger=AsyncRedisLedger(url)))

    async def main() -> list[Any]:
        with guard.scope():
            return await asyncio.gather(*(asearch() for _ in range(100)), return_exceptions=True)

    answers = asyncio.run(main())
    assert answers.count("found") == 10
    assert all(isinstance(answer, BudgetExceeded) for answer in answers if answer != "found")
    ledger = RedisLedger(url)
    assert ledger.balance(Account("budget", key, "total"), "usd") == Balance(20 * USD)
    ledger.close()


def test_a_budget_whose_books_are_lost_refuses(start: Callable[..., Any]) -> None:
    """It doesn't begin anew at nothing spent, and doesn't tell the model the password."""
    server = start(*KEPT, "--requirepass", "hunter2-secret")
    login = server.url.replace("://", "://:hunter2-secret@")
    with Guard(Budget(usd=9, per="total", key="a", ledger=login)).scope():
        assert search() == "found"
        server.kill()
        server.folder.rename(server.folder.with_name("lost"))
        server.start()
        with pytest.raises(BudgetExceeded, match="without the data it had") as caught:
            search()
    assert "hunter2" not in str(caught.value)


def test_the_example_prints_what_its_docstring_says(start: Callable[..., Any], tmp_path: Path) -> None:
    """Four processes, one budget."""
    environment = {**os.environ, "LOOPGUARD_LEDGER": start(*KEPT).url}
    command = [sys.executable, EXAMPLE]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", timeout=50, check=True
    )
    docstring = ast.get_docstring(ast.parse(EXAMPLE.read_text(encoding="utf-8"))) or ""
    wanted = [line.strip() for line in docstring.partition("\nPrints:\n\n")[2].splitlines()]
    assert done.stdout.splitlines() == wanted
