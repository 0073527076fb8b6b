"""Model calls under budgets of a period: reserved in the ledger before they are sent, settled when they are over."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest

from loopguard import Budget, BudgetExceeded, Guard, LedgerError, loop
from loopguard.budgets import MemoryLedger, SqliteLedger
from loopguard.budgets import _keeper as keepers
from loopguard.metering import meter
from loopguard.metering._estimates import survey
from loopguard.testing import Clock, MessagesServer, Reply, capture
from loopguard.typing import Balance, BudgetOverdrawn, Lease, ToolRefused
from tests.metering.conftest import BODY, PRICES, Way
from tests.metering.test_meter import COST, GONE, c26

USD = 10**18
RESERVED = (survey(BODY).input_tokens * 3 + 100 * 15) * Decimal("0.000001")


class Spy(MemoryLedger):
    """A ledger whose leases and failures a test can see."""

    def __init__(self) -> None:
        super().__init__(Clock(time.time()))
        self.error: LedgerError | None = None
        self.leases: list[Lease] = []

    def reserve(self, id: str, entries: Any, lease: Lease) -> Any:
        if self.error is not None:
            raise self.error
        self.leases.append(lease)
        return super().reserve(id, entries, lease)

    def there(self, unit: str = "usd") -> tuple[Decimal, ...]:
        """(spent, reserved, overdraft)."""
        ((_, _, balance),) = [row for row in self.accounts() if row[1] == unit]
        return tuple(Decimal(each) / USD for each in (balance.spent, balance.reserved, balance.overdraft))


@pytest.fixture
def ledger() -> Iterator[Spy]:
    """A ledger of its own; nothing of one test is delivered in another."""
    yield Spy()
    keepers.flush_all()


def daily(ledger: Any, usd: Any = 1, **caps: Any) -> Guard:
    return Guard(Budget(usd=usd, per="day", key="team-a", ledger=ledger, name="team", **caps))


def test_a_model_call_is_settled_at_what_it_cost(way: Way, ledger: Spy) -> None:
    """In every way to make it, as soon as its end was seen; charged where the process dies before."""
    with MessagesServer(c26) as server, daily(ledger, tokens=10_000, model_calls=5).scope() as run:
        way.call(server.url)
        if way.fn.__name__ == "body" or way.fn.__name__ == "async_body":
            keepers.flush_all()  # read by hand: nobody waits for its end
        assert ledger.there() == (COST, 0, 0)
        assert ledger.there("tokens") == (37, 0, 0)
        assert ledger.there("model_calls") == (1, 0, 0)
        assert run.spent() == COST
    assert {lease.on_expiry for lease in ledger.leases} == {"charge"}


def test_what_does_not_fit_is_not_sent(basic: Way, ledger: Spy) -> None:
    """The refusal says which max_tokens would fit; the run's own cells hold nothing."""
    with MessagesServer(c26) as server:
        with capture() as seen, daily(ledger, RESERVED - Decimal("0.00015")).scope() as run:
            with pytest.raises(BudgetExceeded) as refused:
                basic.call(server.url)
            assert (run.reserved(), run.reserved("tokens"), run.turn, run.refusals) == (0, 0, 0, 1)
            assert "of the budget 'team'" in str(refused.value)
            assert "per day for 'team-a'" in str(refused.value)
            assert "lower max_tokens from 100 to 90" in str(refused.value)
            basic.call(server.url, max_tokens=90)
        assert len(server.requests) == 1
    assert [event.code for event in seen.events_of(ToolRefused)] == ["budget"]
    assert ledger.there() == (COST, 0, 0)


def test_the_budgets_of_the_run_decide_first(basic: Way, ledger: Spy) -> None:
    """What they refuse no ledger hears of."""
    with daily(ledger).scope(), Guard(Budget(model_calls=0)).scope(), pytest.raises(BudgetExceeded):
        basic.call(GONE)
    assert ledger.leases == []


def test_an_unknown_price_is_refused_without_asking(basic: Way, ledger: Spy) -> None:
    """Under a cap of USD in a ledger, too."""
    with daily(ledger).scope(), pytest.raises(BudgetExceeded) as refused:
        basic.call(GONE, prices={})
    assert refused.value.code == "unknown_price"
    assert ledger.leases == []


def test_a_call_that_failed_to_connect_gives_everything_back(basic: Way, ledger: Spy) -> None:
    """And so does one that the API refused."""
    with MessagesServer([Reply.error(500), "never"]) as server, daily(ledger).scope():
        with pytest.raises(anthropic.APIConnectionError):
            basic.call(GONE)
        assert ledger.there() == (0, 0, 0)
        with pytest.raises(anthropic.InternalServerError):
            basic.call(server.url)
        assert ledger.there() == (0, 0, 0)


def test_a_stream_that_is_left_is_settled_soon(ledger: Spy) -> None:
    """At what was received; before anything more is reserved."""
    with MessagesServer(c26) as server, daily(ledger).scope():
        client: Any = meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES)
        with client.messages.create(stream=True, **BODY) as stream:
            next(iter(stream))
        keepers.flush_all()
        spent, reserved, overdraft = ledger.there()
        client.close()
    assert 0 < spent < RESERVED
    assert (reserved, overdraft) == (0, 0)


def test_a_cancelled_call_is_charged_at_its_reservation(ledger: Spy) -> None:
    """It was sent, and nobody knows what became of it."""

    async def main(url: str) -> None:
        async with meter(anthropic.AsyncAnthropic(base_url=url, api_key="x"), prices=PRICES) as client:
            task = asyncio.create_task(client.messages.create(**BODY))
            while not ledger.leases:
                await asyncio.sleep(0)
            while not server.requests:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with MessagesServer([Reply.text("x", delay=30)]) as server, daily(ledger).scope():
        asyncio.run(main(server.url))
    keepers.flush_all()
    assert ledger.there() == (RESERVED, 0, 0)


def test_a_ledger_in_a_file_is_asked_off_the_event_loop(tmp_path: Path) -> None:
    """Many calls at once spend to the cap and not above it, by what the server has billed."""
    ledger = SqliteLedger(str(tmp_path / "spend.db"))

    async def main(url: str) -> int:
        async with meter(anthropic.AsyncAnthropic(base_url=url, api_key="x"), prices=PRICES) as client:
            calls = [client.messages.create(**BODY) for _ in range(40)]
            done = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, anthropic.types.Message | BudgetExceeded) for each in done)
        return sum(isinstance(each, anthropic.types.Message) for each in done)

    with MessagesServer(c26) as server, daily(ledger, RESERVED * 5).scope():
        through = asyncio.run(main(server.url))
        assert len(server.requests) == through >= 5
    ((_, _, balance),) = ledger.accounts()
    assert balance == Balance(int(COST * through * USD), 0, 0)


def test_a_ledger_that_can_not_be_asked_refuses_model_calls(basic: Way, ledger: Spy) -> None:
    """Nothing is sent, nothing stays reserved."""
    ledger.error = LedgerError("away")
    with daily(ledger).scope() as run, pytest.raises(BudgetExceeded, match="can't be asked"):
        basic.call(GONE)
    assert (run.reserved(), run.turn) == (0, 0)


def test_a_call_that_outlived_its_lease_was_charged_already(ledger: Spy) -> None:
    """Its true cost takes the place of what the expiry charged: no overdraft."""
    clock: Any = ledger._clock

    def slow(body: dict[str, Any]) -> Reply:
        clock.advance(61)
        assert ledger.there() == (RESERVED, 0, 0)
        return c26(body)

    with MessagesServer(slow) as server, capture() as seen, daily(ledger).scope():
        client: Any = meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES)
        client.messages.create(**BODY)
        client.close()
    assert ledger.there() == (COST, 0, 0)
    assert seen.events_of(BudgetOverdrawn) == []


def test_results_of_a_batch_go_to_the_ledger(ledger: Spy) -> None:
    """Nothing was reserved for them: they are booked when they are read."""
    message = {"id": "msg_1", "type": "message", "model": "m", "usage": {"input_tokens": 20, "output_tokens": 12}}
    line = json.dumps({"custom_id": "a", "result": {"type": "succeeded", "message": message}})

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/results"):
            return httpx2.Response(200, headers={"content-type": "application/x-jsonl"}, text=line + "\n")
        batch = {"id": "b", "results_url": f"{request.url.copy_with(path='/v1/messages/batches/b/results')}"}
        return httpx2.Response(200, json=batch)

    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    with daily(ledger, tokens=1000).scope() as run:
        client: Any = meter(anthropic.Anthropic(api_key="x", http_client=http), prices=PRICES)
        list(client.messages.batches.results("b"))
        client.close()
        keepers.flush_all()
        assert run.spent("tokens") == 32
    assert ledger.there("tokens") == (32, 0, 0)
    assert ledger.there()[0] == run.spent() > 0


def test_a_replayed_model_call_asks_no_ledger(tmp_path: Path, ledger: Spy) -> None:
    """What a resumed run is answered from its journal was paid for before."""
    cut: list[bool] = []

    with MessagesServer(c26) as server:
        client: Any = meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES)

        @loop(max=1, store=f"sqlite:///{tmp_path}/runs.db", guard=daily(ledger), name="asking")
        def asking(state: int) -> int:
            client.messages.create(**BODY)
            if not cut:
                cut.append(True)
                raise KeyboardInterrupt
            client.messages.create(**{**BODY, "max_tokens": 50})
            return state + 1

        with pytest.raises(KeyboardInterrupt):
            asking.run(0, run_id="r")
        assert ledger.there() == (COST, 0, 0)
        assert asking.resume("r").cost == 2 * COST
        client.close()
        assert len(server.requests) == 2
    assert ledger.there() == (2 * COST, 0, 0)
