"""Flows that are kept: checkpointed step by step, resumed where they were, parked for input."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import pytest

from loopguard import (
    AlreadyDecided,
    Approval,
    ApproveTool,
    Budget,
    CheckpointError,
    ConfigurationError,
    EvaluationFailed,
    Flow,
    Guard,
    Inbox,
    JournalError,
    RunConflict,
    RunNotFound,
    StopReason,
    await_input,
    journal,
    loop,
    step,
    tool,
)
from loopguard.evaluators import Matches


class Killed(BaseException):
    """Stands for the death of the process, as far as one process can have it."""


@dataclass
class Draft:
    text: str
    approved: bool | None = None


class Letter(pydantic.BaseModel):
    body: str
    stamp: int | None = None


def test_a_flow_goes_on_with_the_step_it_was_at(store: str, ran: list[str]) -> None:
    """Finished steps, and finished calls of the step under way, don't run again."""
    dying = True

    @tool
    def pay(text: str) -> str:
        ran.append("pay")
        return f"paid {text}"

    def write(topic: str) -> Draft:
        ran.append("write")
        return Draft(topic)

    def send(draft: Draft) -> list[Draft]:
        ran.append("send")
        done = pay(draft.text)
        if dying:
            raise Killed
        return [Draft(done, True)]

    def count(sent: list[Draft]) -> int:
        ran.append("count")
        return len(sent)

    flow = Flow("mail", [write, send, count], store=store)
    with pytest.raises(Killed):
        flow.run("hello", "r")
    assert (flow.pending(), flow.results("r")) == (["r"], {"write": Draft("hello")})
    dying = False
    result = flow.resume("r")
    assert ran == ["write", "send", "pay", "send", "count"]
    assert [each.value for each in result.history] == [Draft("hello"), [Draft("paid hello", True)], 1]
    assert (result.value, result.stop_reason, flow.pending()) == (1, "until", [])
    again = flow.run("hello", "r")
    assert [each.value for each in again.history] == [each.value for each in result.history]
    assert (again.value, again.stop_reason, again.completed, again.iterations) == (1, "until", True, 3)
    assert flow.results("r") == flow.results(again) == flow.results(result)
    assert flow.resume("r").value == 1
    assert len(ran) == 5
    with pytest.raises(RunConflict, match="another state"):
        flow.run("goodbye", "r")
    with pytest.raises(RunNotFound):
        flow.results("nobody")


def test_an_async_flow_goes_on_too(store: str, ran: list[str]) -> None:
    """The same, awaited; resume_pending takes up all that were interrupted."""
    dying = True

    async def write(topic: str) -> Draft:
        ran.append(f"write {topic}")
        return Draft(topic)

    def send(draft: Draft) -> str:
        ran.append(f"send {draft.text}")
        if dying:
            raise OSError("down")
        return draft.text

    flow = Flow("mail", [write, send], store=store)
    for name in ("a", "b"):
        with pytest.raises(OSError, match="down"):
            asyncio.run(flow.run(name, name))
    dying = False
    assert {name: done.value for name, done in asyncio.run(flow.resume_pending()).items()} == {"a": "a", "b": "b"}
    assert ran == ["write a", "send a", "write b", "send b", "send a", "send b"]


def test_attempts_and_their_reasons_are_kept(store: str) -> None:
    """A step that is interrupted at its second attempt gets the reason again, and has the rest of its attempts."""
    told: list[str | None] = []
    dying = True

    def fetch(n: int, *, feedback: str | None) -> int:
        told.append(feedback)
        if len(told) < 2:
            raise OSError("no route")
        if dying:
            raise Killed
        if len(told) < 4:
            raise OSError("still none")
        return n

    flow = Flow("net", [step(fetch, max_retries=2)], store=store)
    with pytest.raises(Killed):
        flow.run(7, "r")
    dying = False
    result = flow.resume("r")
    assert result.value == 7
    assert told == [None, "fetch failed: OSError: no route", told[1], "fetch failed: OSError: still none"]


def test_a_step_that_failed_for_good_is_tried_again_on_resume(store: str) -> None:
    """The run is pending: each resume gives it one more attempt, whatever it had."""
    tries: list[int] = []

    def fail(n: int) -> int:
        tries.append(n)
        if len(tries) < 4:
            raise OSError("down")
        return n

    flow = Flow("net", [step(fail, max_retries=1)], store=store)
    with pytest.raises(OSError, match="down"):
        flow.run(1, "r")
    with pytest.raises(OSError, match="down"):
        flow.resume("r")
    assert flow.resume("r").value == 1


def test_what_a_verification_parsed_and_rejected_is_kept(store: str, ran: list[str]) -> None:
    """Verdicts aren't asked for again; the parsed value is the next step's, by its annotation."""
    dying = True

    def ask(topic: str) -> Any:
        ran.append("ask")
        return '{"text": 5}' if len(ran) == 1 else '{"text": "yes"}'

    def use(draft: Draft) -> str:
        ran.append("use")
        if dying:
            raise Killed
        return draft.text

    flow = Flow("ask", [step(ask, verify=Matches(Draft), max_retries=1), use], store=store)
    with pytest.raises(Killed):
        flow.run("?", "r")
    dying = False
    result = flow.resume("r")
    assert ran == ["ask", "ask", "use", "use"]
    assert flow.results(result) == {"ask": Draft("yes"), "use": "yes"}
    assert [len(each.verdicts) for each in result.history] == [1, 1, 0]


def test_a_flow_that_was_never_accepted_says_so_again(store: str) -> None:
    """The recorded EvaluationFailed, with zero bodies."""
    tries: list[int] = []

    def grow(n: int) -> int:
        tries.append(n)
        return n + 1

    flow = Flow("strict", [grow, step(grow, name="more", verify=lambda n: (False, "no"), max_retries=1)], store=store)
    for _ in range(2):
        with pytest.raises(EvaluationFailed) as caught:
            flow.run(1, "r")
        assert (caught.value.result.value, caught.value.result.iterations) == (2, 3)
    assert tries == [1, 2, 2]


def test_other_steps_are_a_conflict_that_says_what_changed(store: str) -> None:
    """Removed, new and moved steps; a loop of the same name is no flow; more retries are no change."""

    def a(n: int) -> int:
        return n + 1

    def b(n: int) -> int:
        if dying:
            raise Killed
        return n + 1

    dying = True
    with pytest.raises(Killed):
        Flow("f", [a, b], store=store).run(1, "r")
    dying = False
    c = step(a, name="c")
    with pytest.raises(RunConflict, match=r"'b' is gone, 'c' is new\): a, b; now they are a, c"):
        Flow("f", [a, c], store=store).resume("r")
    with pytest.raises(RunConflict, match="order has changed"):
        Flow("f", [b, a], store=store).run(1, "r")
    with pytest.raises(RunConflict, match="'a' is gone, 'b' is gone"):
        loop(max=1, store=store, name="f")(a).resume("r")
    assert Flow("f", [a, b], store=store, max_retries=3).resume("r").value == 3


def test_a_flow_inside_another_run_is_held_to_its_steps_too(store: str) -> None:
    """The inner flow's list has changed since: the outer run can't go on."""

    def a(n: int) -> int:
        if dying:
            raise Killed
        return n + 1

    def outer(*steps: Any) -> Flow:
        return Flow("outer", [Flow("inner", list(steps))], store=store)

    dying = True
    with pytest.raises(Killed):
        outer(a).run(1, "r")
    dying = False
    with pytest.raises(RunConflict, match="'b' is new"):
        outer(a, step(a, name="b")).resume("r")


def test_changed_code_is_a_warning(store: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of any of the steps, as for loops."""

    def a(n: int) -> int:
        return n + 1

    def b(n: int) -> int:
        raise Killed

    with pytest.raises(Killed):
        Flow("f", [a, b], store=store).run(1, "r")

    def new(n: int) -> int:
        return n + 100

    with caplog.at_level(logging.WARNING, "loopguard"):
        assert Flow("f", [a, step(new, name="b")], store=store).resume("r").value == 102
    assert "the code of f has changed" in caplog.text


def test_states_are_written_by_the_annotations_around_them(store: str) -> None:
    """What one step returns and the next takes; steps that say nothing pass on what was said before."""

    def letter(n: int) -> Letter:
        return Letter(body=str(n))

    def stamp(letter: Letter) -> Letter:
        return Letter(body=letter.body, stamp=1)

    def open_it(letter: Letter) -> tuple[str, ...]:
        return (letter.body, str(letter.stamp))

    def same(letter: Letter) -> Any:
        return letter

    inner = Flow("inner", [same, stamp])
    flow = Flow("post", [letter, lambda x: x, step(lambda x: x, name="third"), inner, open_it], store=store)
    assert flow.run(5, "r").value == ("5", "1")
    assert flow.results("r") == {
        "letter": Letter(body="5"),
        "<lambda>": Letter(body="5"),
        "third": Letter(body="5"),
        "inner": Letter(body="5", stamp=1),
        "open_it": ("5", "1"),
    }


def test_a_flow_of_one_step_may_return_another_type(store: str) -> None:
    """What it is given and what it returns are written each by its own annotation."""

    def only(draft: Draft) -> Letter:
        return Letter(body=draft.text)

    flow = Flow("one", [only], store=store)
    assert flow.run(Draft("a"), "r").value == Letter(body="a")
    assert flow.run(Draft("a"), "r").value == Letter(body="a")


def test_fewer_retries_are_no_end(store: str) -> None:
    """A run that had more attempts than its flow allows by now goes on to its last step."""
    tries: list[int] = []

    def fetch(n: int) -> int:
        tries.append(n)
        if len(tries) < 4:
            raise OSError("down")
        return n

    def last(n: int) -> int:
        if dying:
            raise Killed
        return n + 1

    dying = True
    with pytest.raises(Killed):
        Flow("f", [step(fetch, max_retries=5), last], store=store).run(1, "r")
    dying = False
    assert Flow("f", [fetch, last], store=store).resume("r").value == 2


def test_a_state_that_would_not_come_back_is_found_when_it_is_written(store: str) -> None:
    """CheckpointError, which no retry mends."""
    tries: list[int] = []

    def wrong(n: int) -> dict[str, int]:
        tries.append(n)
        return {1: n}  # type: ignore[dict-item]  # the slip

    with pytest.raises(CheckpointError, match="key 1"):
        Flow("f", [wrong, lambda d: d], store=store, max_retries=3).run(1, "r")
    assert tries == [1]


def test_a_run_that_completed_is_forgotten_where_that_is_wanted(store: str) -> None:
    """delete_on_success: its journal goes; one that fails or stops stays."""
    failing = True

    def work(n: int) -> int:
        if failing:
            raise OSError("down")
        return n

    flow = Flow("f", [work], store=store, delete_on_success=True)
    with pytest.raises(OSError, match="down"):
        flow.run(1, "r")
    assert flow.pending() == ["r"]
    failing = False
    assert flow.resume("r").value == 1
    assert journal.open(store).runs() == []

    async def awork(n: int) -> int:
        return n

    aflow = Flow("af", [awork], store=store, delete_on_success=True)
    assert asyncio.run(aflow.run(1, "r")).value == 1
    outer = Flow("outer", [Flow("inner", [work], delete_on_success=True)], store=store)
    assert outer.run(1, "o").value == 1
    assert [run.run_id for run in journal.open(store).runs()] == ["o"]


def test_a_flow_goes_on_under_a_larger_budget(store: str, ran: list[str]) -> None:
    """It had stopped in the middle; nothing that was bought is bought again."""

    @tool(cost=1)
    def buy(n: int) -> int:
        ran.append(f"buy {n}")
        return n + 1

    flow = Flow("shop", [step(buy, name="one"), step(buy, name="two")], budget=Budget(usd=1), store=store)
    first = flow.run(0, "r")
    assert (first.stop_reason, first.value, flow.run(0, "r").value) == (StopReason.BUDGET, 1, 1)
    result = flow.resume("r", budget=Budget(usd=5))
    assert (result.value, str(result.cost), ran) == (2, "2", ["buy 0", "buy 1"])


# -- loops, flows and tools in one another ---------------------------------------------------------


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_nested_runs_are_resumed_at_their_place(colour: str, store: str, ran: list[str]) -> None:
    """A flow, with a loop, whose body calls a tool, that runs a flow: each goes on where it was."""
    dying = True

    def note(what: str) -> None:
        ran.append(what)
        if dying and what == "finish 11":
            raise Killed

    def prepare(n: int) -> int:
        note(f"prepare {n}")
        return n + 10

    def finish(n: int) -> int:
        note(f"finish {n}")
        return n - 10

    innermost = Flow("innermost", [prepare, finish])

    def visit(n: int) -> int:
        return innermost(n) + 1  # type: ignore[no-any-return]

    async def avisit(n: int) -> int:
        return innermost(n) + 1  # type: ignore[no-any-return]

    visiting: Any = tool(idempotent=True, name="visit")(visit if colour == "sync" else avisit)

    @loop(max=3)
    def tour(n: int) -> int:
        note(f"tour {n}")
        return visiting(n)  # type: ignore[no-any-return]

    @loop(max=3, name="tour")
    async def atour(n: int) -> int:
        note(f"tour {n}")
        return await visiting(n)  # type: ignore[no-any-return]

    def first(n: int) -> int:
        note("first")
        return n

    flow = Flow("outer", [first, tour if colour == "sync" else atour], store=store)

    def run(made: Any) -> Any:
        return asyncio.run(made) if colour == "async" else made

    with pytest.raises(Killed):
        run(flow.run(0, "r"))
    dying = False
    assert run(flow.resume("r")).value == 3
    begun = ["first", "tour 0", "prepare 0", "finish 10", "tour 1", "prepare 1", "finish 11"]
    assert ran == [*begun, "tour 1", "finish 11", "tour 2", "prepare 2", "finish 12"]


def test_a_flow_is_the_body_of_a_loop_that_is_kept(store: str, ran: list[str]) -> None:
    """Its second run, at its second step."""
    dying = True

    def a(n: int) -> int:
        ran.append(f"a {n}")
        return n + 1

    def b(n: int) -> int:
        ran.append(f"b {n}")
        if dying and n == 3:
            raise Killed
        return n + 1

    body: Any = loop(max=3, store=store, name="around")(Flow("two", [a, b]))
    with pytest.raises(Killed):
        body.run(0, run_id="r")
    dying = False
    assert body.resume("r").value == 6
    assert ran == ["a 0", "b 1", "a 2", "b 3", "b 3", "a 4", "b 5"]


# -- input -----------------------------------------------------------------------------------------


def test_a_flow_waits_for_input_and_goes_on_with_it(store: str, ran: list[str]) -> None:
    """It ends waiting; the value stands in the state under its key, for a dict, a dataclass and a model."""

    def write(topic: str) -> dict[str, Any]:
        ran.append("write")
        return {"topic": topic}

    def publish(state: dict[str, Any]) -> str:
        return f"{state['topic']}: {state['ok']}"

    flow = Flow("book", [write, await_input("ok", "Publish it?"), publish], store=store)
    parked = flow.run("cats", "r")
    assert (parked.stop_reason, parked.value, flow.waiting()) == (StopReason.WAITING, {"topic": "cats"}, ["r"])
    assert flow.run("cats", "r").stop_reason is StopReason.WAITING
    (question,) = journal.open(store).questions()
    assert (question.kind, question.prompt, question.run_id) == ("input", "Publish it?", "r")
    result = flow.resume_with("r", ["yes", 1], by="ann")
    assert (result.value, ran, flow.waiting()) == ("cats: ['yes', 1]", ["write"], [])
    assert flow.results("r")["ok"] == {"topic": "cats", "ok": ["yes", 1]}
    (answered,) = journal.open(store).questions("all")
    assert answered.answer is not None
    assert (answered.answer.by, answered.answer.result) == ("ann", ["yes", 1])
    with pytest.raises(AlreadyDecided):
        flow.resume_with("r", "no")


def test_input_is_put_into_typed_states(store: str) -> None:
    """A dataclass and a model get it in the field, None becomes a dict."""

    def write(topic: str) -> Draft:
        return Draft(topic)

    drafts = Flow("drafts", [write, await_input("approved")], store=store)
    drafts.run("a", "drafts")
    assert drafts.resume_with("drafts", True).value == Draft("a", True)

    def letter(topic: str) -> Letter:
        return Letter(body=topic)

    letters = Flow("letters", [letter, await_input("stamp")], store=store)
    letters.run("a", "letters")
    assert letters.resume_with("letters", 7).value == Letter(body="a", stamp=7)
    nothing = Flow("nothing", [await_input("what")], store=store)
    nothing.run(run_id="nothing")
    assert nothing.resume_with("nothing", 7).value == {"what": 7}


def a_text() -> str:
    return "text"


def a_draft() -> Draft:
    return Draft("a")


def test_input_that_does_not_fit_is_asked_for_again(store: str) -> None:
    """The run waits on, with a question that says why; the right answer goes on."""

    def write(topic: str) -> Draft:
        return Draft(topic)

    def letter(draft: Draft) -> Letter:
        return Letter(body=f"{draft.text} {draft.approved}")

    flow = Flow("f", [write, await_input("approved", "Well?"), letter, await_input("stamp")], store=store)
    flow.run("a", "r")
    assert flow.resume_with("r", "perhaps").stop_reason is StopReason.WAITING
    (question,) = journal.open(store).questions()
    assert question.prompt is not None
    assert question.prompt.startswith("Well?\n")
    assert "approved" in question.prompt
    assert flow.resume_with("r", True).stop_reason is StopReason.WAITING
    assert flow.resume_with("r", "much").stop_reason is StopReason.WAITING
    assert flow.resume_with("r", 7).value == Letter(body="a True", stamp=7)


@pytest.mark.parametrize("begin", [a_text, a_draft, lambda: 7])
def test_a_state_without_a_place_for_input_is_refused_before_anybody_is_asked(store: str, begin: Any) -> None:
    """Nothing is thrown away silently."""
    flow = Flow("f", [begin, await_input("ok")], store=store)
    with pytest.raises(ConfigurationError, match="has no place for it"):
        flow.run(run_id="r")
    assert journal.open(store).questions("all") == []


@pytest.mark.parametrize("answer", [object(), "\ud800", Approval.approve()])
def test_what_is_no_json_is_no_input(store: str, answer: Any) -> None:
    """It would arrive as a text about it: nothing is decided, and the right answer still counts."""
    flow = Flow("f", [await_input("a")], store=store)
    flow.run(run_id="r")
    with pytest.raises(JournalError):
        flow.resume_with("r", answer)
    assert flow.resume_with("r", 1).value == {"a": 1}


def test_input_may_be_answered_elsewhere(store: str) -> None:
    """By journal.answer, while nobody drives the run; then a plain resume goes on."""
    flow = Flow("f", [await_input("a"), await_input("b")], store=store)
    flow.run(run_id="r")
    book = journal.open(store)
    book.answer(book.questions()[0].id, 1)
    with pytest.raises(AlreadyDecided):
        flow.resume_with("r", 2)
    assert flow.resume("r").stop_reason is StopReason.WAITING
    assert flow.resume_with("r", 2).value == {"a": 1, "b": 2}
    done = Flow("g", [lambda: 1], store=store)
    done.run(run_id="g")
    with pytest.raises(RunConflict, match="waits for no input"):
        done.resume_with("g", 1)


def test_an_async_flow_is_resumed_with_input(store: str) -> None:
    """Awaited."""

    async def begin() -> dict[str, int]:
        return {"a": 1}

    flow = Flow("f", [begin, await_input("b")], store=store)
    assert asyncio.run(flow.run(run_id="r")).stop_reason is StopReason.WAITING
    assert asyncio.run(flow.resume_with("r", 2)).value == {"a": 1, "b": 2}


def test_input_of_a_flow_inside_parks_the_whole_run(store: str, ran: list[str]) -> None:
    """Each run of the inner flow asks its own question."""

    def begin(n: int) -> dict[str, int]:
        ran.append(f"begin {n}")
        return {"n": n}

    def end(state: dict[str, int]) -> int:
        return state["n"] + state["more"]

    inner = Flow("inner", [begin, await_input("more"), end])
    outer = Flow("outer", [inner, step(inner, name="again")], store=store)
    assert outer.run(1, "r").stop_reason is StopReason.WAITING
    assert outer.resume_with("r", 10).stop_reason is StopReason.WAITING
    assert outer.resume_with("r", 100).value == 111
    assert ran == ["begin 1", "begin 11"]


def test_an_approval_parks_a_flow(store: str, ran: list[str]) -> None:
    """Inside a step; approved, the call runs once."""

    @tool(approve=True)
    def pay(n: int) -> int:
        ran.append(f"pay {n}")
        return n

    flow = Flow("f", [lambda n: n + 1, pay], guard=Guard(ApproveTool(Inbox())), store=store)
    parked = flow.run(1, "r")
    assert (parked.stop_reason, parked.value, flow.waiting()) == (StopReason.WAITING, 2, ["r"])
    book = journal.open(store)
    with pytest.raises(RunConflict, match="waits for no input"):
        flow.resume_with("r", True)
    book.answer(book.questions()[0].id, True)
    assert (flow.resume("r").value, ran) == (2, ["pay 2"])


def test_answers_are_signed_where_the_flow_s_inbox_has_a_key(store: str) -> None:
    """resume_with signs; an unsigned answer is refused."""
    key = b"0123456789abcdef"
    flow = Flow("f", [await_input("x")], guard=Guard(ApproveTool(Inbox(key=key))), store=store)
    flow.run(run_id="r")
    book = journal.open(store)
    with pytest.raises(JournalError, match="signed"):
        book.answer(book.questions()[0].id, "forged")
    assert flow.resume("r").stop_reason is StopReason.WAITING
    assert flow.resume_with("r", "real").value == {"x": "real"}


def test_a_flow_with_a_file_of_its_own(tmp_path: Path) -> None:
    """The path is the user's; the name of a flow never becomes one."""
    store = f"sqlite:///{tmp_path / 'flows.db'}"
    assert Flow("a/b:c", [lambda: 1], store=store).run(run_id="x/y").value == 1
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".db"] == ["flows.db"]
