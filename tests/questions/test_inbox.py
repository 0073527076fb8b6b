"""Approvals that outlive the process: asked in the journal, answered by mail, bound to the exact call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest

from loopguard import (
    AlreadyDecided,
    Approval,
    ApprovalDenied,
    ApprovalTimeout,
    ApproveTool,
    Budget,
    ConfigurationError,
    Guard,
    Inbox,
    JournalError,
    LoopStopped,
    RunConflict,
    RunNotFound,
    StopReason,
    Timeout,
    ToolCallRefused,
    WrapTool,
    current_run,
    journal,
    loop,
    tool,
)
from loopguard._events import QuestionAsked
from loopguard.journal import Question
from loopguard.journal._answers import Answer, opened, sealed
from loopguard.journal._asking import Questions
from loopguard.journal._recorder import Recorder
from loopguard.journal._sqlite import SQLiteJournal
from loopguard.testing import capture

KEY = b"sixteen bytes at least"
OTHER_KEY = b"another sixteen bytes!"


@dataclass
class Order:
    amount: int


def pay_loop(store: Any, ran: list[str], guard: Guard, amount: Callable[[], int] = lambda: 10) -> Any:
    """A loop of one iteration that pays once."""

    @tool
    def pay(amount: int) -> str:
        ran.append(f"pay {amount}")
        return f"paid {amount}"

    @loop(max=1, store=store, guard=guard)
    def paying(state: str) -> str:
        return state + pay(amount())

    return paying


def gated(**options: Any) -> Guard:
    """A guard that asks an Inbox about everything."""
    return Guard(ApproveTool(Inbox(**options)))


def only(book: journal.OpenJournal, status: str = "pending") -> Question:
    """The one question there is."""
    (question,) = book.questions(status)
    return question


# -- parked ----------------------------------------------------------------------------------------


def test_a_gated_call_parks_the_run_until_somebody_says_yes(store: str, ran: list[str]) -> None:
    """The run ends waiting; the question is listed with its arguments; after a yes the body runs once."""
    paying = pay_loop(store, ran, gated())
    result = paying.run("", run_id="r")
    assert (result.stop_reason, result.completed, ran) == (StopReason.WAITING, False, [])
    assert result.error is not None
    assert result.error.code == "waiting"
    assert paying.waiting() == ["r"]
    book = journal.open(store)
    question = only(book)
    assert (question.kind, question.tool, question.arguments, question.run_id) == (
        "approval",
        "pay",
        {"amount": 10},
        "r",
    )
    assert (question.run_name, question.hidden, question.status, question.expires_at) == (
        "paying",
        False,
        "pending",
        None,
    )
    said = book.answer(question.id, Approval.approve(), by="ann")
    assert said.answer is not None
    assert (said.status, said.answer.decision, said.answer.by) == ("answered", "approve", "ann")
    result = paying.resume("r")
    assert (result.value, result.stop_reason, ran) == ("paid 10", StopReason.MAX_ITERATIONS, ["pay 10"])
    assert (book.questions(), paying.waiting()) == ([], [])
    assert paying.run("", run_id="r").value == "paid 10"
    assert ran == ["pay 10"]


def test_a_plain_call_raises_that_the_run_waits(store: str, ran: list[str]) -> None:
    """There is no value yet, not even where an iteration was completed before."""
    with pytest.raises(LoopStopped, match=r"waits for a person.*resume\('run_"):
        pay_loop(store, ran, gated())("")


def test_a_run_that_is_resumed_before_the_answer_waits_again(store: str, ran: list[str]) -> None:
    """The same question stays: nobody is asked twice."""
    paying = pay_loop(store, ran, gated())
    paying.run("", run_id="r")
    first = only(journal.open(store))
    assert paying.resume("r").stop_reason is StopReason.WAITING
    assert only(journal.open(store)).id == first.id
    journal.open(store).answer(first.id, True)
    assert paying.resume("r").value == "paid 10"


def test_an_async_run_is_parked_and_resumed(store: str, ran: list[str]) -> None:
    """The same in an event loop."""

    @tool
    async def pay(amount: int) -> str:
        ran.append(f"pay {amount}")
        return f"paid {amount}"

    @loop(max=1, store=store, guard=gated())
    async def paying(state: str) -> str:
        return state + await pay(10)

    async def main() -> str:
        assert (await paying.run("", run_id="r")).stop_reason is StopReason.WAITING
        await asyncio.to_thread(lambda: journal.open(store).answer(only(journal.open(store)).id, True))
        return (await paying.resume("r")).value

    assert asyncio.run(main()) == "paid 10"
    assert ran == ["pay 10"]


def test_every_colour_waits_for_its_answer(colour: Any, store: str, ran: list[str]) -> None:
    """Sync, async and both kinds of generators: parked, answered, run once."""

    @tool(name="pay")
    @colour.make
    def pay(amount: int) -> str:
        ran.append(f"pay {amount}")
        return f"paid {amount}"

    asynchronous = "async" in colour.name

    if asynchronous:

        @loop(max=1, store=store, guard=gated(), name="paying")
        async def paying(state: str) -> str:
            made = pay(10)
            return str([item async for item in made] if hasattr(made, "__aiter__") else [await made])

    else:

        @loop(max=1, store=store, guard=gated(), name="paying")
        def paying(state: str) -> str:
            made = pay(10)
            return str([made] if isinstance(made, str) else list(made))

    def go(started: Any) -> Any:
        return asyncio.run(started) if asynchronous else started

    assert go(paying.run("", run_id="r")).stop_reason is StopReason.WAITING
    assert ran == []
    journal.open(store).answer(only(journal.open(store)).id, True)
    assert go(paying.resume("r")).value == "['paid 10']"
    assert ran == ["pay 10"]


def test_the_reservation_of_a_parked_call_is_released_and_made_again(store: str, ran: list[str]) -> None:
    """Nothing stays reserved while the run waits; the yes is no way round the budget."""

    @tool(cost=0.75)
    def pay(amount: int) -> str:
        ran.append("pay")
        return "paid"

    seen: list[Any] = []

    @loop(
        max=1, store=store, budget=Budget(usd=1), guard=gated(), on_transition=lambda made: seen.append(current_run())
    )
    def paying(state: str) -> str:
        return pay(1)

    assert paying.run("", run_id="r").stop_reason is StopReason.WAITING
    assert (seen[-1].reserved(), seen[-1].spent(), seen[-1].steps) == (0, 0, 0)
    journal.open(store).answer(only(journal.open(store)).id, True)
    assert paying.resume("r").cost == pytest.approx(0.75)


def test_a_body_that_swallows_the_refusal_is_parked_all_the_same(store: str, ran: list[str]) -> None:
    """Whatever a framework makes of the exception, its value isn't the iteration's."""

    @tool
    def pay(amount: int) -> str:
        ran.append("pay")
        return "paid"

    @loop(max=3, store=store, guard=gated())
    def paying(state: str) -> str:
        with contextlib.suppress(ToolCallRefused):
            return pay(1)
        return "swallowed"

    result = paying.run("", run_id="r")
    assert (result.stop_reason, result.value, result.iterations) == (StopReason.WAITING, "", 0)
    journal.open(store).answer(only(journal.open(store)).id, True)
    assert paying.resume("r").history[0].value == "paid"


def test_an_inner_loop_passes_the_parking_on(store: str, ran: list[str]) -> None:
    """It unwinds up to the outermost kept loop, and comes back to the same place."""

    @tool
    def pay(amount: int) -> str:
        ran.append(f"pay {amount}")
        return f"paid {amount} "

    @loop(max=2, name="inner")
    def inner(state: str) -> str:
        return state + pay(len(state))

    @loop(max=2, store=store, guard=gated(), name="outer")
    def outer(state: str) -> str:
        return inner(state)

    result = outer.run("", run_id="r")
    book = journal.open(store)
    while result.stop_reason is StopReason.WAITING:
        book.answer(only(book).id, True)
        result = outer.resume("r")
    assert ran == ["pay 0", "pay 7", "pay 14", "pay 22"]
    assert result.value == "paid 0 paid 7 paid 14 paid 22 "


def test_without_a_store_or_a_timeout_an_inbox_is_refused() -> None:
    """Nobody could ever go on with the call: it says so, and what to give."""

    @tool
    def pay(amount: int) -> str:
        return "paid"

    @loop(max=1, guard=gated())
    def paying(state: str) -> str:
        return pay(1)

    with pytest.raises(ConfigurationError, match=r"store='sqlite:///runs\.db'"):
        paying("")
    with pytest.raises(ConfigurationError, match="nothing here can wait for it"), gated().scope("s"):
        pay(1)


# -- what an answer binds --------------------------------------------------------------------------


def test_other_arguments_than_those_approved_are_a_mismatch(store: str, ran: list[str]) -> None:
    """C38: the same id resumed with other arguments is refused, and the yes is used up."""
    amounts = iter([10, 20, 20])
    refusals: list[ToolCallRefused] = []

    @tool
    def pay(amount: int) -> str:
        ran.append(f"pay {amount}")
        return "paid"

    @loop(max=1, store=store, guard=gated())
    def paying(state: str) -> str:
        try:
            return pay(next(amounts))
        except ToolCallRefused as refusal:
            refusals.append(refusal)
            if refusal.code == "approval_mismatch":
                return pay(next(amounts))
            raise

    paying.run("", run_id="r")
    book = journal.open(store)
    book.answer(only(book).id, Approval.approve())
    assert paying.resume("r").stop_reason is StopReason.WAITING
    assert [refusal.code for refusal in refusals] == ["waiting", "approval_mismatch", "waiting"][:2]
    assert ran == []
    assert only(book).arguments == {"amount": 20}


def test_a_hook_that_rewrites_the_arguments_comes_before_the_question(store: str, ran: list[str]) -> None:
    """C38: the person sees 20, and 20 runs."""

    def rewrite(call: Any, proceed: Any) -> Any:
        return (yield from proceed(call.replace(arguments={"amount": 20})))

    paying = pay_loop(store, ran, Guard(WrapTool(rewrite), ApproveTool(Inbox())))
    paying.run("", run_id="r")
    book = journal.open(store)
    assert only(book).arguments == {"amount": 20}
    book.answer(only(book).id, True)
    assert paying.resume("r").value == "paid 20"
    assert ran == ["pay 20"]


def test_an_edit_is_what_runs(store: str, ran: list[str]) -> None:
    """The person's own arguments, once."""
    paying = pay_loop(store, ran, gated())
    paying.run("", run_id="r")
    book = journal.open(store)
    book.answer(only(book).id, Approval.edit({"amount": 5}, "less"))
    assert paying.resume("r").value == "paid 5"
    assert ran == ["pay 5"]


def test_an_edit_comes_in_the_types_that_the_tool_declares(store: str, ran: list[str]) -> None:
    """What was edited is JSON; what wasn't stays the object that it was, hidden ones, too."""

    @tool
    def pay(order: Order, note: str, *tags: int, api_key: str, **more: Decimal) -> str:
        ran.append(f"{order} {note} {tags} {api_key} {more}")
        return "paid"

    @loop(max=1, store=store, guard=gated())
    def paying(state: str) -> str:
        return pay(Order(10), "ten", 1, 2, api_key="s3cret", fee=Decimal("1.5"))

    paying.run("", run_id="r")
    book = journal.open(store)
    edit = {"order": {"amount": 5}, "note": "ten", "tags": [3], "more": {"fee": "0.5"}}
    book.answer(only(book).id, Approval.edit(edit), allow_hidden=True)
    assert paying.resume("r").value == "paid"
    assert ran == ["Order(amount=5) ten (3,) s3cret {'fee': Decimal('0.5')}"]


@pytest.mark.parametrize("edit", [{"amount": "a lot"}, {"amounts": 5}])
def test_an_edit_that_does_not_fit_is_asked_about_again(edit: dict[str, Any], store: str, ran: list[str]) -> None:
    """Of the wrong type, or for a parameter that isn't there: nothing runs, the next question says why, and the run
    isn't lost to a slip of the pen."""
    paying = pay_loop(store, ran, gated())
    paying.run("", run_id="r")
    book = journal.open(store)
    first = only(book)
    book.answer(first.id, Approval.edit(edit))
    assert (paying.resume("r").stop_reason, ran) == (StopReason.WAITING, [])
    second = only(book)
    assert second.id != first.id
    assert next(iter(edit)) in str(second.prompt)
    book.answer(second.id, Approval.edit({"amount": 5}))
    assert (paying.resume("r").completed, ran) == (True, ["pay 5"])


def test_an_edit_that_the_budget_refuses_does_not_run(store: str, ran: list[str]) -> None:
    """An edited call is admitted again with its new arguments, days later, too."""

    @tool(cost=lambda call: {"credits": call.arguments["amount"]})
    def pay(amount: int) -> str:
        ran.append(f"pay {amount}")
        return "paid"

    @loop(max=1, store=store, budget=Budget(credits=100), guard=gated())
    def paying(state: str) -> str:
        return pay(50)

    paying.run("", run_id="r")
    book = journal.open(store)
    book.answer(only(book).id, Approval.edit({"amount": 5000}))
    assert paying.resume("r").stop_reason is StopReason.BUDGET
    assert ran == []


def test_three_gated_calls_at_once_are_three_questions(store: str, ran: list[str]) -> None:
    """C42: yes, no, yes answered in reverse order; bodies 1 and 3 run, results in call order, none twice."""

    @tool
    async def pay(who: str) -> str:
        ran.append(who)
        return f"paid {who}"

    outcomes: list[list[str]] = []

    @loop(max=1, store=store, guard=gated())
    async def paying(state: str) -> str:
        done = await asyncio.gather(pay("ann"), pay("bob"), pay("ann"), return_exceptions=True)
        outcomes.append([str(each) for each in done])
        return " ".join(outcomes[-1])

    assert asyncio.run(paying.run("", run_id="r")).stop_reason is StopReason.WAITING
    book = journal.open(store)
    first, second, third = book.questions()
    assert [first.arguments, second.arguments, third.arguments] == [{"who": "ann"}, {"who": "bob"}, {"who": "ann"}]
    assert len({first.id, second.id, third.id}) == 3
    book.answer(third.id, True)
    book.answer(second.id, Approval.deny("use staging"))
    book.answer(first.id, True)
    result = asyncio.run(paying.resume("r"))
    assert ran == ["ann", "ann"]
    assert result.value.startswith("paid ann ")
    assert result.value.endswith(" paid ann")
    assert "use staging" in outcomes[-1][1]


def test_questions_that_are_answered_one_by_one(store: str, ran: list[str]) -> None:
    """The run is resumed after each: what has run doesn't run again, and who was asked isn't asked again."""

    @tool
    async def pay(who: str) -> str:
        ran.append(who)
        return f"paid {who}"

    @loop(max=1, store=store, guard=gated())
    async def paying(state: str) -> str:
        return " ".join(await asyncio.gather(pay("ann"), pay("bob"), pay("cid")))

    result = asyncio.run(paying.run("", run_id="r"))
    book = journal.open(store)
    questions = book.questions()
    for question in reversed(questions):
        assert result.stop_reason is StopReason.WAITING
        book.answer(question.id, True)
        result = asyncio.run(paying.resume("r"))
    assert result.value == "paid ann paid bob paid cid"
    assert sorted(ran) == ["ann", "bob", "cid"]
    assert len(book.questions("all")) == 3


def test_an_approval_for_one_object_does_not_cover_another(store: str, ran: list[str]) -> None:
    """With self_key two accounts are two calls; without it nothing could tell them apart, and it is refused."""

    class Account:
        def __init__(self, name: str) -> None:
            self.name = name

        @tool(self_key=lambda self: self.name)
        def close(self) -> str:
            ran.append(self.name)
            return "closed"

        @tool
        def drop(self) -> str:
            ran.append(self.name)
            return "dropped"

    which = iter(["ann", "bob"])

    @loop(max=1, store=store, guard=gated())
    def closing(state: str) -> str:
        return Account(next(which)).close()

    closing.run("", run_id="r")
    book = journal.open(store)
    book.answer(only(book).id, True)
    result = closing.resume("r")
    assert result.error is not None
    assert (result.error.code, ran) == ("approval_mismatch", [])

    @loop(max=1, store=store, guard=gated())
    def dropping(state: str) -> str:
        return Account("ann").drop()

    error = dropping.run("").error
    assert error is not None
    assert error.code == "approval_error"
    assert "self_key" in str(error)
    assert ran == []


def test_a_leaf_that_was_changed_while_waiting_in_place_is_a_mismatch(store: str, ran: list[str]) -> None:
    """The digest is taken again right before the call runs."""

    @tool
    def pay(order: Order) -> str:
        ran.append(f"pay {order.amount}")
        return "paid"

    order = Order(10)

    def answer(question: Question) -> None:
        order.amount = 5000
        journal.open(store).answer(question.id, True)

    @loop(max=1, store=store, guard=Guard(ApproveTool(Inbox(notify=answer), timeout=20)))
    def paying(state: str) -> str:
        return pay(order)

    result = paying.run("")
    assert result.error is not None
    assert (result.error.code, ran) == ("approval_mismatch", [])


def test_a_grant_for_the_run_outlives_the_process_too(store: str, ran: list[str]) -> None:
    """The same call in a later iteration isn't asked about again; a denial for the run is final."""
    paying = loop(max=3, store=store, guard=gated(), name="p")(pay_loop(store, ran, gated()).__wrapped__)
    paying.run("", run_id="r")
    book = journal.open(store)
    book.answer(only(book).id, Approval.approve("run"))
    assert paying.resume("r").value == "paid 10" * 3
    assert ran == ["pay 10"] * 3


def test_a_denial_reaches_the_model_with_its_reason_and_holds(store: str, ran: list[str]) -> None:
    """C43: the text is in the refusal; it isn't asked about again until something new was done, nor a fourth time."""
    seen: list[str | None] = []

    @tool
    def pay(amount: int) -> str:
        ran.append("pay")
        return "paid"

    @tool
    def look(n: int) -> str:
        return f"seen {n}"

    asked: list[Question] = []

    @loop(max=1, store=store, guard=Guard(ApproveTool(Inbox(notify=asked.append), only="pay")))
    def paying(state: str) -> str:
        for n in range(6):
            for _ in range(2):
                try:
                    pay(10)
                except ApprovalDenied as refusal:
                    seen.append(refusal.reason)
            look(n)
        return "done"

    book = journal.open(store)
    result = paying.run("", run_id="r")
    while result.stop_reason is StopReason.WAITING:
        book.answer(only(book).id, Approval.deny("use staging"))
        result = paying.resume("r")
    assert result.value == "done"
    assert len(asked) == 3
    assert ran == []
    assert {reason for reason in seen if reason and "staging" in reason} == {"use staging"}


# -- answering -------------------------------------------------------------------------------------


def test_a_question_is_answered_once(store: str, ran: list[str]) -> None:
    """The second answer says who was first; of many at once, one counts."""
    paying = pay_loop(store, ran, gated())
    paying.run("", run_id="r")
    book = journal.open(store)
    question = only(book)
    barrier = threading.Barrier(8)

    def answer(n: int) -> str:
        barrier.wait()
        try:
            book.answer(question.id, Approval.deny(f"no {n}"), by=f"person {n}")
        except AlreadyDecided as exc:
            return str(exc)
        return "counted"

    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(answer, range(8)))
    assert said.count("counted") == 1
    assert all("answered already: deny by person" in text for text in said if text != "counted")
    error = paying.resume("r").error
    assert error is not None
    assert error.reason == f"no {said.index('counted')}"
    with pytest.raises(AlreadyDecided):
        book.answer(question.id, True)


class Overtaken(SQLiteJournal):
    """A store in which somebody else is always a moment faster."""

    first: Callable[[], object] | None = None

    def post(self, run_id: str, name: str, body: bytes, instead_of: bytes | None = None) -> bytes:
        first, self.first = self.first, None
        if first is not None:
            first()
        return super().post(run_id, name, body, instead_of)


def test_whoever_is_a_moment_later_is_told_who_was_first(store: str, ran: list[str]) -> None:
    """Both had found the question open; the second hears of the first, and changes nothing."""
    paying = pay_loop(store, ran, gated())
    paying.run("", run_id="r")
    book = journal.open(store)
    question = only(book)
    slower = Overtaken(store.removeprefix("sqlite:///"))
    slower.first = lambda: book.answer(question.id, Approval.deny("no"), by="ann")
    with pytest.raises(AlreadyDecided, match="deny by ann"):
        journal.open(slower).answer(question.id, True, by="bob")
    slower.close()
    assert paying.resume("r").stop_reason is StopReason.APPROVAL
    assert ran == []


def test_an_answer_that_came_a_moment_before_the_timeout_counts(store: str, ran: list[str]) -> None:
    """It had found the question open, and was written before the waiter gave up: it is taken up."""
    expiring, answering = threading.Event(), []
    waiters, persons = (Overtaken(store.removeprefix("sqlite:///")) for _ in range(2))
    persons.first = lambda: expiring.wait(10)
    waiters.first = lambda: (expiring.set(), answering[0].result(10))

    def notify(asked: Question) -> None:
        answering.append(pool.submit(journal.open(persons).answer, asked.id, True))

    paying = pay_loop(waiters, ran, Guard(ApproveTool(Inbox(notify=notify), timeout=0.5)))
    with ThreadPoolExecutor(1) as pool:
        assert paying.run("").value == "paid 10"
    assert ran == ["pay 10"]
    waiters.close()
    persons.close()


@pytest.mark.parametrize("answer", ["yes", 1, None, "ran", {"decision": "approve"}])
def test_only_an_approval_answers_a_request_for_one(answer: Any, store: str, ran: list[str]) -> None:
    """Anything else is an error that says what to give, and nothing is decided."""
    pay_loop(store, ran, gated()).run("", run_id="r")
    book = journal.open(store)
    with pytest.raises(JournalError, match=r"Approval\.approve\(\)"):
        book.answer(only(book).id, answer)
    assert only(book).status == "pending"


def test_an_uncertain_call_is_asked_about_with_the_arguments_that_ran(
    store: str, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An approver had edited them: who looks at the bank looks for that amount."""

    @tool
    def pay(amount: int) -> str:
        ran.append(f"pay {amount}")
        raise SystemExit  # the process ends, and its journal with it

    @loop(max=1, store=store, guard=gated())
    def paying(state: str) -> str:
        return pay(49)

    paying.run("", run_id="r")
    book = journal.open(store)
    book.answer(only(book).id, Approval.edit({"amount": 20}))
    with monkeypatch.context() as dead:
        dead.setattr(Recorder, "record", _nothing_after(Recorder.record, "ToolStarted"))
        with pytest.raises(SystemExit):
            paying.resume("r")
    assert paying.resume("r").stop_reason is StopReason.WAITING
    assert (ran, only(book).kind, only(book).arguments) == (["pay 20"], "uncertain", {"amount": 20})


def _nothing_after(record: Callable[..., None], last: str) -> Callable[..., None]:
    over: list[bool] = []

    def until(self: Recorder, event: Any) -> None:
        if not over:
            record(self, event)
        if type(event).__name__ == last:
            over.append(True)

    return until


def test_a_question_that_is_not_there_is_an_error(store: str, ran: list[str]) -> None:
    """C40: one whose run is gone, and one that never was."""
    pay_loop(store, ran, gated()).run("", run_id="r")
    book = journal.open(store)
    question = only(book)
    book.delete("r")
    with pytest.raises(JournalError, match="there is no question"):
        book.answer(question.id, True)
    with pytest.raises(JournalError, match="there is no question"):
        book.question("question_0")
    with pytest.raises(RunNotFound):
        pay_loop(store, ran, gated()).resume("r")


def test_a_question_of_a_run_that_is_over_is_not_answered(store: str, ran: list[str]) -> None:
    """Nothing waits for it any more."""
    paying = pay_loop(store, ran, gated())
    paying.run("", run_id="r")
    book = journal.open(store)
    question = only(book)
    book.stop("r", "not today", by="ann")
    result = paying.resume("r")
    assert (result.stop_reason, ran) == (StopReason.STOPPED, [])
    assert "not today" in str(result.error)
    assert book.questions() == []
    with pytest.raises(RunConflict, match="is over"):
        book.answer(question.id, True)


def test_an_answer_that_is_not_signed_with_the_key_does_not_count(
    store: str, ran: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Unsigned and wrongly signed: it is ignored and logged, the run waits on, and the right one still counts."""
    paying = pay_loop(store, ran, gated(key=KEY))
    paying.run("", run_id="r")
    ((_, asked),) = journal.open(store)._asked(journal.open(store).run("r"))
    before = None
    for wrong in (None, OTHER_KEY):
        with pytest.raises(JournalError, match="signed with the Inbox's key"):
            journal.open(store, key=wrong).answer(asked.question_id, True)
        before = forge(store, asked, wrong, before)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "loopguard"):
            assert paying.resume("r").stop_reason is StopReason.WAITING
        assert "isn't signed with the Inbox's key" in caplog.text
    assert ran == []
    right = journal.open(store, key=KEY)
    right.answer(only(right).id, Approval.approve(), by="ann")
    assert paying.resume("r").value == "paid 10"


def forge(store: str, asked: QuestionAsked, key: bytes | None, before: bytes | None = None) -> bytes:
    """A yes written by whoever can write the store."""
    body = sealed(Answer("approve", grant="run"), asked, key)
    journal.open(store)._writer.use(lambda kept: kept.post("r", asked.question_id, body, before))
    return body


def two_inboxes(store: str, ran: list[str], *keys: bytes | None, max: int = 1) -> Any:
    """A loop that pays, once somebody for each key has said yes."""

    @tool
    def pay(amount: int) -> str:
        ran.append("pay")
        return "paid"

    guards = [ApproveTool(Inbox(key=key), only="pay") for key in keys]

    @loop(max=max, store=store, guard=Guard(*guards), name="paying")
    def paying(state: str) -> str:
        return pay(10)

    return paying


@pytest.mark.parametrize("left", [OTHER_KEY, None], ids=["another key", "no key"])
def test_the_yes_of_one_inbox_is_none_to_another(left: bytes | None, store: str, ran: list[str]) -> None:
    """The first has said yes when the program loses it: the second is asked all the same."""
    paying = two_inboxes(store, ran, KEY, left)
    paying.run("", run_id="r")
    book = journal.open(store, key=KEY)
    book.answer(only(book).id, True)
    assert paying.resume("r").stop_reason is StopReason.WAITING
    assert two_inboxes(store, ran, left).resume("r").stop_reason is StopReason.WAITING
    assert ran == []
    other = journal.open(store, key=left)
    other.answer(only(other).id, True)
    assert two_inboxes(store, ran, left).resume("r").value == "paid"


def test_a_grant_of_one_inbox_is_none_of_another(store: str, ran: list[str]) -> None:
    """For the run from the second, once from the first: in the next iteration the first is asked again."""
    paying = two_inboxes(store, ran, KEY, OTHER_KEY, max=2)
    paying.run("", run_id="r")
    for key, said in ((KEY, Approval.approve()), (OTHER_KEY, Approval.approve(grant="run"))):
        book = journal.open(store, key=key)
        book.answer(only(book).id, said)
        result = two_inboxes(store, ran, KEY, OTHER_KEY, max=2).resume("r")
    assert (result.stop_reason, result.iterations, ran) == (StopReason.WAITING, 1, ["pay"])
    assert two_inboxes(store, ran, KEY, OTHER_KEY, max=2).resume("r").stop_reason is StopReason.WAITING
    book = journal.open(store, key=KEY)
    book.answer(only(book).id, True)
    assert two_inboxes(store, ran, KEY, OTHER_KEY, max=2).resume("r").value == "paid"
    assert ran == ["pay", "pay"]


def test_an_answer_written_into_the_journal_itself_is_no_yes(
    store: str, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write mail can write events, too: where there is a key, what is recorded counts by its signature."""
    paying = pay_loop(store, ran, gated(key=KEY))
    paying.run("", run_id="r")
    ((_, asked),) = journal.open(store)._asked(journal.open(store).run("r"))
    forge(store, asked, None)
    with monkeypatch.context() as other:  # a program without the key writes the event, with a chain that is whole
        other.setattr(Questions, "_read", lambda self, mail, asked, key: mail and opened(mail, asked, None))
        other.setattr(Questions, "_emit", _then_die)
        with pytest.raises(SystemExit):
            paying.resume("r")
    assert journal.open(store).story("r").answers
    assert journal.open(store).verify("r") is None
    result = paying.resume("r")
    assert (result.stop_reason, ran) == (StopReason.APPROVAL, [])
    assert "it was changed" in str(result.error)


def _then_die(self: Questions, run: Any, event: Any) -> None:
    self._recorder.record(event)
    raise SystemExit


def test_a_signed_answer_holds_only_for_its_own_question(store: str, ran: list[str]) -> None:
    """One that is moved to another question by whoever can write the store is ignored."""
    paying = pay_loop(store, ran, gated(key=KEY))
    book = journal.open(store, key=KEY)
    for run_id in ("a", "b"):
        paying.run("", run_id=run_id)
    one, other = book.questions()
    book.answer(one.id, True)
    work = book._writer
    body = work.use(lambda kept: kept.mail(one.run_id))[one.id]
    work.use(lambda kept: kept.post(other.run_id, other.id, body))
    assert paying.resume(other.run_id).stop_reason is StopReason.WAITING
    assert ran == []


@pytest.mark.parametrize("key", ["text", b"short", 5])
def test_a_key_is_at_least_sixteen_bytes(key: Any, store: str) -> None:
    """And the error doesn't show it."""
    for make in (lambda: Inbox(key=key), lambda: journal.open(store, key=key)):
        with pytest.raises(ConfigurationError, match="at least 16 secret bytes") as caught:
            make()
        assert str(key) not in str(caught.value) or key == 5


def test_a_hidden_value_needs_its_own_word(store: str, ran: list[str]) -> None:
    """The question shows its length; a yes about what can't be seen is refused without allow_hidden."""

    @tool
    def send(api_key: str) -> str:
        ran.append(api_key)
        return "sent"

    @loop(max=1, store=store, guard=gated())
    def sending(state: str) -> str:
        return send("s3cret-value")

    sending.run("", run_id="r")
    book = journal.open(store)
    question = only(book)
    assert question.arguments == {"api_key": "[hidden, 12 characters]"}
    assert question.hidden
    with pytest.raises(JournalError, match="allow_hidden=True"):
        book.answer(question.id, True)
    book.answer(question.id, True, allow_hidden=True)
    assert sending.resume("r").value == "sent"
    assert ran == ["s3cret-value"]


# -- waited for in place ---------------------------------------------------------------------------


def test_in_place_the_call_goes_on_as_soon_as_it_is_answered(store: str, ran: list[str]) -> None:
    """No parking: the run is answered while it is being driven."""
    seen: list[Question] = []

    def notify(question: Question) -> None:
        seen.append(question)
        journal.open(store).answer(question.id, Approval.approve(), by="ann")

    guard = Guard(ApproveTool(Inbox(notify=notify), timeout=30))
    result = pay_loop(store, ran, guard).run("")
    assert (result.value, ran) == ("paid 10", ["pay 10"])
    assert seen[0].expires_at is not None


def test_without_a_store_of_the_run_the_inbox_keeps_the_question(store: str, ran: list[str]) -> None:
    """In a scope, and outside any run: it is listed, answered, and over with the answer."""

    @tool(guard=Guard(ApproveTool(Inbox(store, notify=lambda asked: threads.submit(answer, asked)), timeout=30)))
    def pay(amount: int) -> str:
        ran.append(f"pay {amount}")
        return "paid"

    listed: list[Question] = []

    def answer(asked: Question) -> None:
        listed.append(only(journal.open(store)))
        journal.open(store).answer(asked.id, True)

    with ThreadPoolExecutor(1) as threads:
        assert pay(1) == "paid"
        with Guard().scope("session"):
            assert pay(2) == "paid"
    assert [question.arguments for question in listed] == [{"amount": 1}, {"amount": 2}]
    assert journal.open(store).questions() == []


def test_nobody_answers_in_time(store: str, ran: list[str]) -> None:
    """approval_timeout; the question is closed for good: a yes that comes later is told so, and nothing runs."""
    asked: list[Question] = []
    guard = Guard(ApproveTool(Inbox(notify=asked.append), timeout=0.05))
    result = pay_loop(store, ran, guard).run("", run_id="r")
    assert isinstance(result.error, ApprovalTimeout)
    with pytest.raises(AlreadyDecided):
        journal.open(store).answer(asked[0].id, True)
    assert ran == []


def test_an_answer_in_the_last_moment_counts_or_is_told_that_it_does_not(store: str, ran: list[str]) -> None:
    """Whoever writes first into the store decides: never both a yes that was accepted and a timeout."""
    for n in range(10):
        asked: list[Question] = []
        ready = threading.Event()

        def notify(question: Question, asked: list[Question] = asked, ready: threading.Event = ready) -> None:
            asked.append(question)
            ready.set()

        ran.clear()
        guard = Guard(ApproveTool(Inbox(notify=notify), timeout=0.05))
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(pay_loop(store, ran, guard).run, "", run_id=f"r{n}")
            assert ready.wait(10)
            left = (asked[0].expires_at or 0) - time.time()
            time.sleep(max(0.0, left - 0.004 + n * 0.001))
            try:
                journal.open(store).answer(asked[0].id, True)
                accepted = True
            except (AlreadyDecided, RunConflict):
                accepted = False
            running.result()
        assert ran == (["pay 10"] if accepted else [])


@pytest.mark.parametrize("answered", [True, False])
def test_a_process_that_dies_while_it_waits_in_place(answered: bool, store: str, ran: list[str]) -> None:
    """The resumed run waits for the rest of the time; an answer from in between counts, and then silence is silence."""

    class Killed(BaseException):
        """Stands for the death of the process, as far as one process can have it."""

    def die(question: Question) -> None:
        raise Killed

    def paying(inbox: Inbox) -> Any:
        return pay_loop(store, ran, Guard(ApproveTool(inbox, timeout=0.3)))

    with pytest.raises(Killed):
        paying(Inbox(notify=die)).run("", run_id="r")
    book = journal.open(store)
    if answered:
        book.answer(only(book).id, True)
    else:
        time.sleep(0.35)
        assert only(book, "expired").kind == "approval"
        with pytest.raises(AlreadyDecided, match="expired"):
            book.answer(only(book, "expired").id, True)
    error = paying(Inbox()).resume("r").error
    assert (error, ran) == (None, ["pay 10"]) if answered else isinstance(error, ApprovalTimeout)


def test_the_wait_uses_neither_the_loops_time_nor_the_tools(store: str, ran: list[str]) -> None:
    """A person may take longer than both."""

    def notify(question: Question) -> None:
        threads.submit(lambda: (time.sleep(0.4), journal.open(store).answer(question.id, True)))

    @tool
    def pay(amount: int) -> str:
        ran.append("pay")
        return "paid"

    @loop(max=1, store=store, timeout=0.3, guard=Guard(Timeout(0.3), ApproveTool(Inbox(notify=notify), timeout=30)))
    def paying(state: str) -> str:
        return pay(1)

    with ThreadPoolExecutor(1) as threads:
        assert paying.run("").value == "paid"


def test_a_waiting_call_gives_up_when_its_run_is_stopped(store: str, ran: list[str]) -> None:
    """From another thread, while nobody answers."""
    runs: list[Any] = []
    guard = Guard(ApproveTool(Inbox(notify=lambda question: runs[0].stop("enough")), timeout=30))

    @tool
    def pay(amount: int) -> str:
        ran.append("pay")
        return "paid"

    @loop(max=1, store=store, guard=guard)
    def paying(state: str) -> str:
        runs.append(current_run())
        return pay(1)

    started = time.monotonic()
    assert paying.run("").stop_reason is StopReason.STOPPED
    assert time.monotonic() - started < 10
    assert ran == []


def test_who_is_notified_may_fail(store: str, ran: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """The question is listed all the same, and the failure is logged."""

    def notify(question: Question) -> None:
        raise RuntimeError("no network")

    paying = pay_loop(store, ran, gated(notify=notify))
    assert paying.run("", run_id="r").stop_reason is StopReason.WAITING
    assert "no network" in caplog.text
    assert only(journal.open(store)).tool == "pay"


# -- the other calls of a run that is parked -------------------------------------------------------


def test_a_running_sibling_is_finished_before_the_run_unwinds(store: str, ran: list[str]) -> None:
    """In a TaskGroup, which cancels its tasks: it is recorded as finished, and isn't run again."""
    started = asyncio.Event()

    @tool
    async def slow(n: int) -> str:
        started.set()
        await asyncio.sleep(0.2)
        ran.append("slow")
        return "slow"

    @tool
    async def pay(amount: int) -> str:
        ran.append("pay")
        return "paid"

    @loop(max=1, store=store, guard=Guard(ApproveTool(Inbox(), only="pay")))
    async def working(state: str) -> str:
        async with asyncio.TaskGroup() as group:
            one = group.create_task(slow(1))
            await started.wait()
            two = group.create_task(pay(1))
        return f"{one.result()} {two.result()}"

    async def main() -> Any:
        return await working.run("", run_id="r")

    assert asyncio.run(main()).stop_reason is StopReason.WAITING
    assert ran == ["slow"]
    book = journal.open(store)
    assert [question.kind for question in book.questions()] == ["approval"]
    book.answer(only(book).id, True)
    started.clear()
    started.set()
    assert asyncio.run(working.resume("r")).value == "slow paid"
    assert ran == ["slow", "pay"]


def test_threads_that_work_for_the_run_are_waited_for_too(store: str, ran: list[str]) -> None:
    """A sibling in a pool comes to its end; what it calls afterwards is parked, and run later."""
    begun, go_on = threading.Event(), threading.Event()

    @tool
    def slow(n: int) -> str:
        begun.set()
        go_on.wait(10)
        ran.append("slow")
        return "slow"

    @tool
    def pay(amount: int) -> str:
        ran.append("pay")
        return "paid"

    @loop(max=1, store=store, guard=Guard(ApproveTool(Inbox(notify=lambda asked: go_on.set()), only="pay")))
    def working(state: str) -> str:
        run = current_run()
        assert run is not None
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(run.bind(slow), 1)
            begun.wait(10)
            two = pool.submit(run.bind(pay), 1)
            return f"{one.result()} {two.result()}"

    assert working.run("", run_id="r").stop_reason is StopReason.WAITING
    book = journal.open(store)
    book.answer(only(book).id, True)
    assert working.resume("r").value == "slow paid"
    assert ran == ["slow", "pay"]


def test_a_caller_that_is_unwound_is_recorded_as_parked(store: str, ran: list[str]) -> None:
    """A tool that calls the gated one is no sibling: it isn't waited for, and runs again when the run goes on."""

    @tool
    def pay(amount: int) -> str:
        ran.append("pay")
        return "paid"

    @tool
    def helper(n: int) -> str:
        ran.append("helper")
        return pay(n)

    @loop(max=1, store=store, guard=Guard(ApproveTool(Inbox(), only="pay")))
    def working(state: str) -> str:
        return helper(1)

    with capture() as captured:
        started = time.monotonic()
        assert working.run("", run_id="r").stop_reason is StopReason.WAITING
        assert time.monotonic() - started < 10
    finished = [event for event in captured.events if type(event).__name__ == "ToolFinished"]
    assert [(event.tool, event.outcome) for event in finished] == [("helper", "parked")]
    book = journal.open(store)
    book.answer(only(book).id, True)
    assert working.resume("r").value == "paid"
    assert ran == ["helper", "helper", "pay"]


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_generator_that_waits_for_its_parked_consumer_is_not_waited_for(
    colour: str, store: str, ran: list[str]
) -> None:
    """It isn't at work; when the run goes on, it begins again, as a caller does."""

    @tool
    def orders(n: int) -> Any:
        yield from range(n)

    @tool
    async def orders_async(n: int) -> Any:
        for i in range(n):
            yield i

    @tool
    def pay(amount: int) -> int:
        ran.append(f"pay {amount}")
        return amount

    guard = Guard(ApproveTool(Inbox(), only="pay"))

    @loop(max=1, store=store, guard=guard)
    def working(state: int) -> int:
        total = 0
        for each in orders(2):
            total += pay(each)
        return total

    @loop(max=1, store=store, guard=guard)
    async def working_async(state: int) -> int:
        total = 0
        async for each in orders_async(2):
            total += pay(each)
        return total

    def go(run: Callable[..., Any], *args: Any) -> Any:
        return asyncio.run(run(*args, run_id="r")) if colour == "async" else run(*args, run_id="r")

    looped: Any = working if colour == "sync" else working_async
    started = time.monotonic()
    result = go(looped.run, 0)
    for _ in range(2):
        assert result.stop_reason is StopReason.WAITING
        book = journal.open(store)
        book.answer(only(book).id, True)
        result = go(looped.resume)
    assert (result.value, ran) == (1, ["pay 0", "pay 1"])
    assert time.monotonic() - started < 10


def test_a_sibling_that_never_ends_is_not_waited_for_for_ever(
    store: str, ran: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The drain limit passes, and says so; what was cut off then is uncertain."""

    @tool
    async def forever(n: int) -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    @tool
    async def pay(amount: int) -> str:
        return "paid"

    @loop(max=1, store=store, guard=Guard(ApproveTool(Inbox(drain=0.05), only="pay")))
    async def working(state: str) -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(forever(1))
            await started.wait()
            group.create_task(pay(1))
        return "done"

    started = asyncio.Event()
    assert asyncio.run(working.run("", run_id="r")).stop_reason is StopReason.WAITING
    assert "1 calls were still running" in caplog.text


# -- budgets, and stopping -------------------------------------------------------------------------


def test_a_budget_asks_the_inbox_for_more(store: str, ran: list[str]) -> None:
    """The extension is a question like any other: parked, granted, and the call goes on."""

    @tool(cost=1)
    def work(n: int) -> str:
        ran.append(f"work {n}")
        return "done"

    @loop(max=1, store=store, budget=Budget(usd=1, extend=Inbox(), extend_by=1))
    def working(state: str) -> str:
        return work(1) + work(2)

    assert working.run("", run_id="r").stop_reason is StopReason.WAITING
    book = journal.open(store)
    question = only(book)
    assert (question.kind, question.tool, question.arguments["for_tool"]) == ("extension", "extend_budget", "work")
    book.answer(question.id, Approval.approve(), by="ann")
    assert working.resume("r").value == "donedone"
    assert ran == ["work 1", "work 2"]


def test_a_budget_that_is_not_extended_refuses(store: str, ran: list[str]) -> None:
    """A no is what the refusal says."""

    @tool(cost=1)
    def work(n: int) -> str:
        ran.append(f"work {n}")
        return "done"

    @loop(max=1, store=store, budget=Budget(usd=1, extend=Inbox(), extend_by=1))
    def working(state: str) -> str:
        return work(1) + work(2)

    working.run("", run_id="r")
    book = journal.open(store)
    book.answer(only(book).id, Approval.deny("no money"))
    result = working.resume("r")
    assert (result.stop_reason, ran) == (StopReason.BUDGET, ["work 1"])
    assert "no money" in str(result.error)


def test_a_run_is_stopped_from_outside_at_its_next_step(store: str, ran: list[str]) -> None:
    """What is under way comes to its end, the next call is refused, and the run goes on when it is resumed."""

    @tool
    def step(n: int) -> int:
        ran.append(f"step {n}")
        if n == 3 and len(ran) == 3:
            assert journal.open(store).stop(None, "maintenance", by="ann") == ["r"]
        return n

    @loop(max=6, store=store)
    def stepping(state: int) -> int:
        return step(state + 1)

    result = stepping.run(0, run_id="r")
    assert (result.stop_reason, result.value, len(ran)) == (StopReason.STOPPED, 3, 3)
    assert "maintenance" in str(result.error)
    assert stepping.resume("r").value == 6
    with pytest.raises(RunConflict, match="nothing to stop"):
        journal.open(store).stop("r")
    with pytest.raises(RunNotFound):
        journal.open(store).stop("s")


@pytest.mark.parametrize(
    "options", [{"store": "nowhere"}, {"notify": 3}, {"drain": -1}, {"drain": True}, {"drain": float("nan")}]
)
def test_wrong_options_are_errors_that_name_them(options: dict[str, Any]) -> None:
    """At once, not when somebody is to be asked."""
    with pytest.raises(ConfigurationError, match=f"Inbox\\({next(iter(options))}"):
        Inbox(**options)
    with pytest.raises(ConfigurationError, match="give the Inbox itself"):
        Inbox()(None)  # type: ignore[arg-type]  # as a program might
