"""One model call of a run: admitted and reserved before it is sent, settled once after."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from loopguard import _events as events
from loopguard._admission import book, latched, ring
from loopguard._amounts import SCALE, decimal, decimals, plain
from loopguard._call import new_id, structural_copy
from loopguard._config import settings
from loopguard._halting import check_halted, end_row, note_refusal
from loopguard._pipeline import LOCK, Effect, Steps
from loopguard._run import Run
from loopguard._usage import Usage
from loopguard.budgets._books import Books, Reservation
from loopguard.budgets._period import PeriodCap
from loopguard.budgets.budget import Budget
from loopguard.exceptions import BudgetExceeded, ToolCallRefused
from loopguard.metering._estimates import Survey, listed
from loopguard.metering._reading import Bill, parts
from loopguard.metering.prices import PriceSource, Tariff, cost_of
from loopguard.telemetry import _constants as names
from loopguard.telemetry import _spans as spans
from loopguard.telemetry._runs import of_usage

__all__ = ["ModelCall"]

_BOOKED = (
    "tokens",
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_5m_tokens",
    "cache_write_1h_tokens",
    "thinking_tokens",
    "web_searches",
    "web_fetches",
    "model_calls",
)
"""The units that a call is booked in, beside usd: the numbers of a Usage."""


class ModelCall:
    """An attempt to send a request: `reserve`, `admit`, then `received`, `released` or `lost`: the first one counts.

    Where budgets are in ledgers: `hold` after `admit`, and `close` or `drop` at the end.
    """

    def __init__(self, run: Run, model: str, prices: PriceSource) -> None:
        self.run = run
        self.name = model
        self.prices = prices
        self.reserved: dict[str, int] = {}
        self.unpriced = False
        self.started = time.perf_counter()
        self._max_tokens = 0
        self._tariffs: list[Tariff | None] = []
        self._worst = Usage()
        self._open = True
        self._books: Books | None = None
        self._held: Reservation | None = None
        self._charged: Mapping[str, int] = {}
        self._id: str | None = None
        self.provider = names.ANTHROPIC
        self.place: dict[str, Any] = {}
        """Where it stands in a journal: what its ModelStarted event says of that."""
        self.messages: Any = None
        """What the model is asked, where `configure(prompt_snapshots=True)` wants it kept."""
        self.response: dict[str, Any] | None = None
        """What the API answered, where a journal wants to know."""
        self.span: Span = INVALID_SPAN

    @property
    def id(self) -> str:
        """The call's id."""
        if self._id is None:
            self._id = new_id("model")
        return self._id

    # -- before ----------------------------------------------------------------------------------

    def reserve(self, body: Mapping[str, Any], survey: Survey) -> None:
        """Work out the most that the call may cost: its input and max_tokens of output."""
        if settings.prompt_snapshots:
            self.messages = structural_copy({name: body[name] for name in ("system", "messages") if name in body})
        limit = body.get("max_tokens")
        self._max_tokens = limit if type(limit) is int and limit > 0 else 0
        models = [entry.get("model") for entry in listed(body.get("fallbacks"))]
        fast = body.get("speed") == "fast"
        self._tariffs = [self.prices.tariff(str(model), fast=fast) for model in (self.name, *models)]
        tokens = survey.input_tokens
        self._worst = Usage(
            tokens=tokens + self._max_tokens,
            input_tokens=tokens,
            output_tokens=self._max_tokens,
            cache_write_5m_tokens=tokens if survey.writes_cache == "5m" else None,
            cache_write_1h_tokens=tokens if survey.writes_cache == "1h" else None,
            web_searches=survey.web_searches or None,
            web_fetches=survey.web_fetches or None,
            model_calls=1,
            inference_geo=body.get("inference_geo"),
        )
        self.reserved = _amounts_of(self._worst)
        # the split of the input only makes it dearer: nothing is reserved in the units of the cache
        self.reserved.pop("cache_write_5m_tokens", None)
        self.reserved.pop("cache_write_1h_tokens", None)
        usd = self._usd(self._max_tokens)
        if usd is None:
            self.unpriced = True
        else:
            self.reserved["usd"] = usd

    def _usd(self, output: int) -> int | None:
        """What it costs with so much output, whichever model answers; None where one's price is unknown."""
        worst = self._worst if output == self._max_tokens else replace(self._worst, output_tokens=output)
        costs = [None if tariff is None else tariff.cost(worst) for tariff in self._tariffs]
        return None if None in costs else max(filter(None, costs), default=0)

    def recorded(self, request: Any) -> dict[str, Any] | None:
        """What the API answered to this request in an earlier process; None where it is to be asked."""
        recorder = self.run.recorder
        if recorder is None:
            return None
        self.place = recorder.recall.model_place(self.run, json.dumps(request, sort_keys=True, default=repr).encode())
        answer: dict[str, Any] | None = recorder.recall.recorded_response(self.place)
        if answer is not None:
            self.run.emit(events.ModelReplayed, call_id=self.id, model=self.name)
        return answer

    def admitted(self) -> Generator[Effect, Any, None]:
        """Wait until it is admitted, by ledgers, too, and begin it; raise the refusal if it isn't."""
        while (refusal := self.admit()) is not None:
            if refusal.cure is None:
                raise self.refuse(refusal)
            yield from refusal.cure(self)
        refusal = yield from self._hold()
        if refusal is not None:
            raise self.refuse(refusal)
        root = self.run.chain[0]
        if root.restless and root.last_refusal is root.last_model_refusal:
            end_row(self.run.chain)
        self.span = self._start_span()

    def announced(self, colour: str) -> Generator[Effect, Any, None]:
        """Have it stand in the journal that the request is about to be sent."""
        recorder = self.run.recorder
        if recorder is not None:
            self.run.emit(
                events.ModelStarted,
                call_id=self.id,
                model=self.name,
                reserved=decimals(self.reserved),
                **self.place,
            )
            yield recorder.commit(colour)

    def admit(self) -> ToolCallRefused | None:
        """Reserve on every run of the chain at once; or give the refusal of the first that says no, nothing taken."""
        chain = self.run.chain
        check_halted(chain)
        observed: list[ToolCallRefused] = []
        with LOCK:
            refusal = latched(chain, self.name) or self._over(observed)
            if refusal is None:
                for run in chain:
                    run.turn += 1
                    for unit, exact in self.reserved.items():
                        run.cell(unit).reserved += exact
        for one in observed:
            self._tell_refused(one, observed=True)
        if refusal is not None:
            return refusal
        return None

    def _hold(self) -> Generator[Effect, Any, ToolCallRefused | None]:
        """Reserve an admitted call in the ledgers of its budgets; what one refuses is undone here, too."""
        external = [(cap, enforced) for enforced, _, cap in self._caps() if isinstance(cap, PeriodCap)]
        if not external:
            return None
        observed: list[BudgetExceeded] = []
        self._books = Books(external)
        made: Reservation | BudgetExceeded | None = None
        try:
            made = yield from self._books.reserve(self, self.reserved, "charge", observed, self._advice)
        finally:
            if not isinstance(made, Reservation):
                self._undo()
        for one in observed:
            self._tell_refused(one, observed=True)
        if isinstance(made, BudgetExceeded):
            return made
        self._held = made
        return None

    def _undo(self) -> None:
        """It is not sent: what `admit` took goes back."""
        with LOCK:
            self._open = False
            for run in self.run.chain:
                run.turn -= 1
                for unit, exact in self.reserved.items():
                    run.cell(unit).reserved -= exact

    def _caps(self) -> Iterator[tuple[bool, Budget, Any]]:
        """(whether it is enforced, budget, cap), outermost run first."""
        for run in self.run.chain:
            for guard in (*run.guards, *run.adopted):
                for guardrail in guard.guardrails:
                    if isinstance(guardrail, Budget):
                        for cap in guardrail.caps(run):
                            yield guard.mode != "observe", guardrail, cap

    def _over(self, observed: list[ToolCallRefused]) -> ToolCallRefused | None:
        for enforced, budget, cap in self._caps():
            refusal: ToolCallRefused | None = None
            exact = self.reserved.get(cap.unit, 0)
            if cap.unit == "usd" and self.unpriced:
                if budget.on_unknown_price == "refuse":
                    refusal = self._unknown_price(cap)
            elif cap.external:
                continue  # its ledger is asked after all of these, see `hold`
            elif exact and cap.used() + exact > cap.limit:
                refusal = cap.refusal(self, exact, self._advice(cap))
            elif not exact and cap.unit in _BOOKED and cap.used() >= cap.limit:
                refusal = cap.refusal(self, SCALE, self._advice(cap))
            if refusal is not None and enforced:
                return refusal
            if refusal is not None:
                observed.append(refusal)
        return None

    def bounds_output(self) -> bool:
        """Whether a budget asks how much the model may write."""
        return any(enforced and cap.unit in ("usd", "tokens", "output_tokens") for enforced, _, cap in self._caps())

    def _unknown_price(self, cap: Any) -> BudgetExceeded:
        reason = (
            f"the price of the model {self.name} is unknown, and run {cap.run.name!r} has a budget of "
            f"{plain(cap.limit, 'usd')}. It was not called: use another model, or give its price, PriceBook({{…}})"
        )
        return BudgetExceeded(
            "unknown_price", "Budget", self.name, reason, decimal(cap.limit), None, cap.run.name, cap.run.id
        )

    def _advice(self, cap: Any) -> str:
        if cap.unit not in ("usd", "tokens", "input_tokens", "output_tokens"):
            return "It was not sent: answer with what you have."
        fits = min((self._fits(cap) for enforced, _, cap in self._caps() if enforced), default=0)
        if 0 < fits < self._max_tokens:
            return f"It was not sent: lower max_tokens from {self._max_tokens} to {fits}, or answer with what you have."
        return "It was not sent: not even its input fits. Shorten it, or answer with what you have."

    def _fits(self, cap: Any) -> int:
        """The max_tokens that would fit under this cap, 0 where none would."""
        most, worst = self._max_tokens, 10**6
        if cap.unit == "usd":
            base, high = self._usd(0) or 0, self._usd(worst) or 0
        else:
            base = self.reserved.get(cap.unit, 0)
            high = base
            if cap.unit in ("tokens", "output_tokens"):
                base -= most * SCALE
                high = base + worst * SCALE
        left = cap.limit - cap.used() - base
        if left < 0:
            return 0
        return most if high == base else min(most, left * worst // (high - base))

    def refuse(self, refusal: ToolCallRefused) -> ToolCallRefused:
        """Book the refusal; the caller raises it."""
        chain = self.run.chain
        for run in chain:
            run.refusals += 1
        note_refusal(chain, refusal)
        chain[0].last_model_refusal = refusal
        self._tell_refused(refusal, observed=False)
        spans.end_refused(self._start_span(), refusal)
        return refusal

    def _tell_refused(self, refusal: ToolCallRefused, observed: bool) -> None:
        self.run.emit(
            events.ToolRefused,
            call_id=self.id,
            tool=self.name,
            arguments={"max_tokens": self._max_tokens},
            code=refusal.code,
            guardrail=refusal.guardrail,
            reason=refusal.reason,
            limit=refusal.limit,
            value=refusal.value,
            owner_id=refusal.run_id,
            observed=observed,
        )

    # -- after -----------------------------------------------------------------------------------

    def received(self, bill: Bill, error: BaseException | None = None) -> None:
        """Settle at what the response told; where it was cut, at no less than the content received is worth."""
        if bill.failed:
            return self.released(error)
        model = bill.model if self.unpriced and bill.model else self.name
        shares = [] if bill.usage is None else parts(bill.usage, model)
        if not shares or shares[0][1].tokens is None:
            return self.lost(error)
        if bill.partial:
            received = min(bill.content_tokens, self._max_tokens)
            shares[0] = model, _at_least(shares[0][1], received)
        return self._charge(shares, bill.partial, error, bill.model)

    def reported(self, usage: Usage, model: str | None) -> None:
        """Settle at what a framework says that it used, and which model."""
        name = model if self.unpriced and model else self.name
        self._charge([(name, usage)], False, None, model)

    def _charge(
        self, shares: list[tuple[str, Usage]], partial: bool, error: BaseException | None, model: str | None
    ) -> None:
        usage = shares[0][1]
        for _, share in shares[1:]:
            usage += share
        usd = cost_of(self.prices, shares)
        charged = _amounts_of(usage)
        if usd is not None:
            charged["usd"] = usd
        elif "usd" in self.reserved:  # it ran in a mode, or asked a model, whose price is unknown
            charged["usd"] = self.reserved["usd"]
        self._settle(charged, usage, usd, partial, error, model)

    def lost(self, error: BaseException | None = None) -> None:
        """It was sent, and nobody knows what became of it: settle at the reservation."""
        usd = self.reserved.get("usd")
        self._settle(self.reserved, Usage(model_calls=1), usd, True, error)

    def released(self, error: BaseException | None = None) -> None:
        """It never arrived, or the API refused it: it costs nothing."""
        self._settle({}, Usage(), 0, False, error)

    def _settle(
        self,
        charged: dict[str, int],
        usage: Usage,
        usd: int | None,
        partial: bool,
        error: BaseException | None,
        model: str | None = None,
    ) -> None:
        chain = self.run.chain
        with LOCK:
            if not self._open:
                return
            self._open = False
            self._charged = charged
            book(chain, self.reserved, charged)
            if usd is None:
                for run in chain:
                    run.unknown_cost = True
        if self._books is None:  # results of a batch: nothing was reserved for them
            self.run.charge_ledgers(charged)
        if chain[0].alerts:
            ring(chain[0])
        cost = None if usd is None else decimal(usd)
        if self.run.listeners:
            self.run.emit(
                events.ModelCalled,
                call_id=self.id,
                model=self.name,
                usage=usage,
                charged=decimals(charged),
                cost=cost,
                messages=self.messages,
                partial=partial,
                error=error,
                duration=max(0.0, time.perf_counter() - self.started),
                response=self.response,
            )
        if self.span.is_recording():
            attributes = {names.RESPONSE_MODEL: model, **of_usage(usage)}
            if cost is not None:
                attributes |= {names.CALL_COST: cost, names.CALL_COST_CURRENCY: "USD"}
            if error is None:
                spans.end_ok(self.span, attributes=attributes)
            else:
                spans.end_failed(self.span, error, attributes=attributes)

    @property
    def open(self) -> bool:
        """Whether it is not settled yet."""
        return self._open

    @property
    def held(self) -> bool:
        """Whether ledgers have to hear of its end."""
        return self._held is not None

    def close(self) -> Steps:
        """Settle the ledgers, too, once the call is settled."""
        if self._books is not None and self._held is not None:
            yield from self._books.settle(self._held, self._charged)

    def drop(self) -> None:
        """The same where nothing can be waited for: it is done soon."""
        if self._books is not None and self._held is not None and not self._open:
            self._books.post(self._held, self._charged)

    def _start_span(self) -> Span:
        """A chat span, unless somebody else draws one: two would double the tokens of a trace."""
        if not (spans.provider_is_set() and _wanted()) or spans.chat_is_traced():
            return INVALID_SPAN
        attributes = {
            names.OPERATION_NAME: names.CHAT,
            names.PROVIDER_NAME: self.provider,
            names.REQUEST_MODEL: self.name,
            names.RUN_ID: self.run.id,
        }
        return spans.start_span(f"{names.CHAT} {self.name}", attributes, SpanKind.CLIENT)


@cache
def _wanted() -> bool:
    """Whether chat spans are switched on, as they are by default. The environment is read once."""
    return os.environ.get("LOOPGUARD_CHAT_SPANS", "").strip().lower() not in ("0", "false", "off")


def _amounts_of(usage: Usage) -> dict[str, int]:
    """{unit: exact} of what is known; what is unknown is not 0."""
    return {unit: count * SCALE for unit in _BOOKED if (count := getattr(usage, unit)) is not None}


def _at_least(usage: Usage, output: int) -> Usage:
    """The usage with no less output than this."""
    more = max(0, output - (usage.output_tokens or 0))
    return replace(usage, output_tokens=(usage.output_tokens or 0) + more, tokens=(usage.tokens or 0) + more)
