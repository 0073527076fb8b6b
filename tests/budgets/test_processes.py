"""Real processes that spend from one ledger, and are really killed: nothing is overspent, and nothing is lost."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from loopguard import Budget, BudgetExceeded, Guard, tool
from loopguard.budgets import Standing, spend

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")

REDIS = os.environ.get("LOOPGUARD_TEST_REDIS")
KILLS = 80
LEASE = 0.4


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param(
            "redis",
            marks=[pytest.mark.redis, pytest.mark.skipif(not REDIS, reason="LOOPGUARD_TEST_REDIS names no server")],
        ),
    ]
)
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a ledger for many processes."""
    if request.param == "redis":
        pytest.importorskip("loopguard_redis", reason="the plugin loopguard-redis isn't installed")
        return str(REDIS)
    return f"sqlite:///{tmp_path}/spend.db"


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """workers.py, ready to be forked."""
    script = str(Path(__file__).parent / "workers.py")
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


class Worker:
    """One forked program."""

    def __init__(self, pid: int, args: dict[str, Any]) -> None:
        self.pid = pid
        self.args = args

    def ready(self) -> None:
        """Until it is where it wants to be."""
        until(lambda: Path(self.args["ready"]).exists() or Path(self.args["out"]).exists())
        assert Path(self.args["ready"]).exists(), self.result()

    def kill(self) -> None:
        """kill -9; over when it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        until(lambda: not _runs(self.pid))

    def go(self) -> None:
        """Let it end."""
        with open(self.args["go"], "w", encoding="utf-8"):
            pass

    def result(self) -> Any:
        """What it came to, once it is over."""
        until(Path(self.args["out"]).exists)
        said = json.loads(Path(self.args["out"]).read_text(encoding="utf-8"))
        assert "error" not in said, said["error"]
        return said["value"]


def until(so: Callable[[], Any]) -> None:
    """Until it is so."""
    deadline = time.monotonic() + 40
    while not so():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.001)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Team:
    """Processes that spend from one account, and what stands in it."""

    def __init__(self, ledger: str, cap: str, folder: Path, forks: subprocess.Popen[str]) -> None:
        self.name = f"test-{uuid.uuid4().hex}"
        self.ledger = ledger
        self.cap = cap
        self.folder = folder
        self._forks = forks
        self._numbers = itertools.count(1)

    def start(self, program: str, **args: Any) -> Worker:
        """A new process that runs this program of workers.py."""
        number = next(self._numbers)
        files = {what: str(self.folder / f"{what}-{number}") for what in ("ready", "go", "out")}
        os.mkfifo(files["go"])
        own = {"program": program, "name": self.name, "ledger": self.ledger, "cap": self.cap, "lease": LEASE}
        told = {**own, **files, **args}
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        self._forks.stdin.write(json.dumps(told) + "\n")
        self._forks.stdin.flush()
        return Worker(int(self._forks.stdout.readline()), told)

    @property
    def standing(self) -> Standing:
        """Where the account stands."""
        (found,) = [row for row in spend(self.ledger, key="team-a") if row.budget == self.name]
        return found

    def buy(self, cost: Decimal) -> None:
        """One call of this cost, in this process."""
        guard = Guard(
            Budget(usd=Decimal(self.cap), per="total", name=self.name, key="team-a", ledger=self.ledger, lease=LEASE)
        )
        with guard.scope("the test"):
            tool(cost=cost)(lambda: None)()

    def spend_the_rest(self) -> None:
        """What is left, to the last grain, is there, and nothing more."""
        standing = self.standing
        left = Decimal(self.cap) + standing.overdraft - standing.spent - standing.reserved
        if left > 0:
            self.buy(left)
        with pytest.raises(BudgetExceeded):
            self.buy(Decimal(1).scaleb(-18))


@pytest.fixture
def team(ledger: str, tmp_path: Path, forks: subprocess.Popen[str]) -> Team:
    """A team with two dollars."""
    return Team(ledger, "2", tmp_path, forks)


def test_eight_processes_spend_exactly_what_there_is(team: Team) -> None:
    """Random amounts, one of ten calls fails: what is booked is what the workers say, and never above the cap."""
    workers = [team.start("spending", seed=seed, lease=60) for seed in range(8)]
    paid = sum(Decimal(worker.result()) for worker in workers)
    standing = team.standing
    assert (standing.spent, standing.reserved, standing.overdraft) == (paid, 0, 0)
    assert Decimal("1.9") < paid <= 2
    team.spend_the_rest()
    assert team.standing.spent == 2


def test_what_killed_processes_had_reserved_comes_back_or_is_charged(team: Team) -> None:
    """kill -9 in the middle of 80 calls, under leases of 400 ms: half are charged, half released, none is lost.

    What a living process has reserved is renewed meanwhile, and settled in time.
    """
    team.cap = "500"
    chance = random.Random(80)
    living = team.start("holding", cost="7", on_expiry="release")
    living.ready()
    charged = Decimal(0)
    for _ in range(KILLS // 8):
        batch = []
        for on_expiry in ["charge", "release"] * 4:
            cost = Decimal(chance.randint(1, 50_000)).scaleb(-4)
            batch.append(team.start("holding", cost=str(cost), on_expiry=on_expiry))
            charged += cost if on_expiry == "charge" else 0
        for worker in batch:
            worker.ready()
            worker.kill()
    until(lambda: team.standing.reserved <= 7)
    assert (team.standing.spent, team.standing.reserved, team.standing.overdraft) == (charged, 7, 0)
    living.go()
    assert living.result() == "[]"
    assert (team.standing.spent, team.standing.reserved, team.standing.overdraft) == (charged + 7, 0, 0)
    team.spend_the_rest()
    assert team.standing.spent == 500


@pytest.mark.parametrize(("on_expiry", "overdraft"), [("release", "1.5"), ("charge", "0")])
def test_a_process_that_was_only_asleep_settles_late(on_expiry: str, overdraft: str, team: Team) -> None:
    """Stopped for longer than its lease, while others spend what it had reserved: an overdraft, and an event."""
    worker = team.start("holding", cost="1.5", on_expiry=on_expiry)
    worker.ready()
    os.kill(worker.pid, signal.SIGSTOP)
    until(lambda: team.standing.reserved == 0)
    team.spend_the_rest()
    os.kill(worker.pid, signal.SIGCONT)
    worker.go()
    assert json.loads(worker.result()) == ([["1.5", True]] if overdraft != "0" else [])
    standing = team.standing
    assert (standing.spent, standing.overdraft) == (2 + Decimal(overdraft), Decimal(overdraft))
    team.spend_the_rest()


def test_a_process_killed_between_two_ledgers_leaves_nothing(team: Team) -> None:
    """The first has reserved, the second was never reached: the lease gives it back."""
    worker = team.start("between", cost="1.5")
    worker.ready()
    worker.kill()
    until(lambda: team.standing.reserved == 0)
    assert (team.standing.spent, team.standing.overdraft) == (0, 0)
    team.spend_the_rest()


def test_a_chain_over_three_ledgers_is_all_or_nothing(ledger: str, tmp_path: Path) -> None:
    """The run's in memory, the day's in a file, the month's in the last: what that refuses nobody holds."""
    name = f"test-{uuid.uuid4().hex}"
    day = f"sqlite:///{tmp_path}/day.db"
    month = Budget(usd=1, per="month", ledger=ledger, name=name)
    buy = tool(cost=Decimal("0.4"))(lambda n: n)
    with Guard(Budget(usd=9)).scope("a") as run, Guard(Budget(usd=5, per="day", ledger=day), month).scope("b"):
        for n in range(2):
            buy(n)
        with pytest.raises(BudgetExceeded, match=name):
            buy(2)
        assert (run.spent(), run.reserved()) == (Decimal("0.8"), 0)
    for url in (day, ledger):
        (row,) = [row for row in spend(url) if row.budget in (name, "budget")]
        assert (row.spent, row.reserved, row.overdraft) == (Decimal("0.8"), 0, 0)


def test_the_file_itself_refuses_to_be_overspent(team: Team) -> None:
    """Whoever writes to it, by whatever program: its CHECK holds spent + reserved ≤ cap + overdraft, to the grain."""
    if not team.ledger.startswith("sqlite"):
        pytest.skip("that is SQLite's")
    team.buy(Decimal("0.5"))
    db = sqlite3.connect(team.ledger.removeprefix("sqlite:///"), isolation_level=None)
    db.execute("UPDATE ledger_accounts SET reserved = 1, reserved_grains = 500000000000000000")
    for change in ("reserved_grains = reserved_grains + 1", "spent = spent + 1", "overdraft_grains = -1"):
        with pytest.raises(sqlite3.IntegrityError, match="CHECK constraint failed"):
            db.execute(f"UPDATE ledger_accounts SET {change}")
    db.execute("UPDATE ledger_accounts SET spent = 2, spent_grains = 0, reserved_grains = 0, overdraft = 1")
    with pytest.raises(sqlite3.IntegrityError):
        db.execute("UPDATE ledger_accounts SET spent_grains = 500000000000000001")
    db.close()
