"""What is confidential lies encrypted in the store, or redacted; the rest can be read without a key."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from loopguard import (
    Approval,
    ApproveTool,
    CheckpointError,
    ConfigurationError,
    Guard,
    Inbox,
    JournalError,
    StopReason,
    configure,
    journal,
    loop,
    tool,
)
from loopguard import _events as events
from loopguard._config import settings
from loopguard.journal._rows import first_broken, first_link, next_link, read_events, write_event
from loopguard.journal._writer import close_writers
from tests.journal.toy import ToyCodec

CODEC = ToyCodec()


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "codec", None)
    monkeypatch.setattr(settings, "redact_payloads", False)


@dataclasses.dataclass
class State:
    n: int
    notes: list[str]


def working(store: str, ran: list[Any], failing: list[int] | None = None, **options: Any) -> Any:
    """A loop of three iterations that calls a tool in each; it fails where `failing` says so."""

    @tool
    def look_up(word: str) -> str:
        ran.append(word)
        return f"about {word}"

    @loop(max=3, store=store, name="work", **options)
    def work(state: State) -> State:
        found = look_up(f"heron{state.n}")
        if failing and state.n in failing:
            raise RuntimeError("a stork flew by")
        return State(state.n + 1, [*state.notes, found])

    return work


def everything(store: str) -> bytes:
    """All the bytes that lie on the disk."""
    close_writers()
    path = store.removeprefix("sqlite:///")
    return b"".join(Path(name).read_bytes() for name in (path, f"{path}-wal") if os.path.exists(name))


# -- encrypted -------------------------------------------------------------------------------------


@pytest.mark.parametrize("long", [False, True])
def test_nothing_confidential_lies_in_the_file(store: str, ran: list[str], long: bool) -> None:
    """Arguments, results, states, reasons, failures, why something is lost, and answers are encrypted; names aren't."""
    configure(codec=CODEC)
    start = State(0, ["egret" * (200 if long else 1)])
    with pytest.raises(RuntimeError):
        working(store, ran, [2]).run(start, run_id="r")
    keep_odd(store)
    paying = asking(store, ran)
    paying.run("ibis", run_id="p")
    book = journal.open(store)
    (question,) = book.questions()
    book.answer(question.id, Approval.edit({"who": "crane"}, reason="spoonbill"), by="ann")
    book.stop("r", "pelican")
    paying.resume("p")
    stored = everything(store)
    for word in (b"heron", b"bittern", b"stork", b"egret", b"ibis", b"crane", b"spoonbill", b"pelican", b"flamingo"):
        assert word not in stored, word
    for name in (b"look_up", b"work", b"ToolStarted", b"ann"):
        assert name in stored
    told = str(journal.open(store).events("r")) + str(journal.open(store).events("p"))
    for word in ("heron", "stork", "egret", "ibis", "crane", "spoonbill", "flamingo"):
        assert word in told


def keep_odd(store: str) -> None:
    """A run with a result that won't come back as it is: the journal says why, and that names a part of it."""

    @tool
    def odd() -> object:
        return {"bittern": {1: "one"}}

    @loop(max=1, store=store)
    def step() -> None:
        odd()

    step.run(run_id="odd")
    finished = next(e for e in journal.open(store).events("odd") if isinstance(e, events.ToolFinished))
    assert finished.result == {"bittern": {"1": "one"}}


def asking(store: str, ran: list[str], **options: Any) -> Any:
    """A loop of one iteration whose one tool call has to be approved."""

    @tool
    def pay(who: str) -> str:
        ran.append(who)
        return f"paid {who}"

    @loop(max=1, store=store, guard=Guard(ApproveTool(Inbox(**options))), name="asking")
    def step(state: str) -> str:
        return state + pay("flamingo")

    return step


@pytest.mark.parametrize("redacts", [False, True])
def test_arguments_can_not_be_guessed_from_ids(store: str, ran: list[str], redacts: bool) -> None:
    """Calls and questions are named after keyed digests: who guesses the arguments can't check it on the headers."""
    configure(codec=None if redacts else CODEC, redact_payloads=redacts)
    digests = set()

    class Desk:
        def __call__(self, call: Any) -> bool:
            digests.add(call.digest()[0])
            return True

    @tool
    def pay(pin: int) -> None: ...

    @loop(max=1, store=store, guard=Guard(ApproveTool(Desk())))
    def step(state: str) -> str:
        pay(1234)
        return state

    step.run("flamingo", run_id="r")
    plain = {hashlib.sha256(repr((pay._self_tool.ident, [("pin", 1234)])).encode()).hexdigest(), *digests}  # type: ignore[attr-defined]
    with sqlite3.connect(store.removeprefix("sqlite:///")) as db:
        headers = b"".join(header for (header,) in db.execute("SELECT header FROM events"))
    db.close()
    assert plain
    assert b'"key":"r:1:' in headers
    for digest in plain:
        assert digest[:16].encode() not in headers


def test_a_questions_id_can_not_be_guessed_from_what_it_asks(store: str, ran: list[str]) -> None:
    """Neither from the digest of the call with its place, which stands beside it."""
    configure(codec=CODEC)
    asking(store, ran).run("", run_id="p")
    (asked,) = [event for event in journal.open(store).events("p") if isinstance(event, events.QuestionAsked)]
    guess = hashlib.sha256(f"{asked.call_id} {asked.digest} 0".encode()).hexdigest()
    assert asked.question_id.startswith("question_")
    assert asked.question_id != f"question_{guess[:16]}"


def test_an_encrypted_run_goes_on_where_it_was(store: str, ran: list[str]) -> None:
    """Finished calls are answered from the record; a run that is over returns its result."""
    configure(codec=CODEC)
    failing = [1]
    work = working(store, ran, failing)
    with pytest.raises(RuntimeError):
        work.run(State(0, ["x" * 300]), run_id="r")
    close_writers()
    failing.clear()
    result = work.run(State(0, ["x" * 300]), run_id="r")
    assert ran == ["heron0", "heron1", "heron2"]
    assert result.value.notes[1:] == ["about heron0", "about heron1", "about heron2"]
    again = work.run(State(0, ["x" * 300]), run_id="r")
    assert (again.value, len(ran)) == (result.value, 3)
    assert journal.open(store).verify("r") is None


def test_an_approval_passes_through_an_encrypted_store(store: str, ran: list[str]) -> None:
    """Question, edited answer and its signature survive; a second answer is still the second."""
    configure(codec=CODEC)
    key = b"sixteen bytes at least"
    step = asking(store, ran, key=key)
    assert step.run("", run_id="r").stop_reason is StopReason.WAITING
    book = journal.open(store, key=key, codec=ToyCodec())
    (question,) = book.questions()
    assert question.arguments == {"who": "flamingo"}
    book.answer(question.id, Approval.edit({"who": "crane"}))
    with pytest.raises(JournalError, match="answered already: edit"):
        book.answer(question.id, True)
    assert step.resume("r").value == "paid crane"
    assert ran == ["crane"]


def test_what_needs_no_key_works_without_the_codec(store: str, ran: list[str], tmp_path: Path) -> None:
    """Runs are listed, verified, exported, stopped and deleted by whoever has only the file."""
    configure(codec=CODEC)
    with pytest.raises(RuntimeError):
        working(store, ran, [1]).run(State(0, []), run_id="r")
    settings.codec = None
    book = journal.open(store)
    assert [(run.run_id, run.name, run.status) for run in book.runs()] == [("r", "work", "error")]
    assert book.verify("r") is None
    added = book.export(tmp_path / "runs.jsonl")
    rows = journal.read_export(tmp_path / "runs.jsonl")[0]["r"]
    assert (len(rows), first_broken("r", rows)) == (added, None)
    assert next(type(event).__name__ for event in read_events(rows, CODEC)) == "RunStarted"
    assert book.stop("r", "enough") == ["r"]
    settings.codec = CODEC
    stopped = working(store, ran).resume("r")
    assert (stopped.stop_reason, "enough" in str(stopped.error)) == (StopReason.STOPPED, True)
    settings.codec = None
    book.delete("r")
    assert book.runs() == []


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (None, r"event 1 of r was written with the codec 'toy', and there is none: .*configure\(codec=…\)"),
        (ToyCodec(name="other"), "with the codec 'toy', and this one is 'other'"),
        (ToyCodec(b"another key"), r"could not decode event 1 of r \(ValueError\): it has another key"),
    ],
)
def test_a_wrong_codec_is_told(codec: Any, said: str, store: str, ran: list[str]) -> None:
    """Reading and resuming raise a JournalError that says whose codec is missing; nothing runs, nothing is written."""
    configure(codec=CODEC)
    with pytest.raises(RuntimeError):
        working(store, ran, [0]).run(State(0, []), run_id="r")
    before = len(journal.open(store).events("r"))
    settings.codec = codec
    for read in (journal.open(store).events, journal.open(store).story, working(store, ran).resume):
        with pytest.raises(JournalError, match=said):
            read("r")
    with pytest.raises(JournalError, match=said):
        working(store, ran).run(State(0, []), run_id="r")
    assert ran == ["heron0"]
    assert [run.holder for run in journal.open(store).runs()] == [None]
    assert len(journal.open(store, codec=CODEC).events("r")) == before


def test_a_codec_without_authentication_finds_a_wrong_key_too() -> None:
    """What it makes of a row doesn't begin as it has to: it isn't taken for a payload."""

    class Xor:
        name = "xor"

        def __init__(self, key: int) -> None:
            self.key = key

        def encode(self, data: bytes, /) -> bytes:
            return bytes(byte ^ self.key for byte in data)

        decode = encode

    row = write_event(stopped(), 1, first_link("r"), {"reason": b'"because"'}, None, {}, Xor(7))
    (event,) = read_events([row], Xor(7))
    assert isinstance(event, events.Stopped)
    assert event.reason == "because"
    with pytest.raises(JournalError, match="was not written there: it has another key"):
        list(read_events([row], Xor(8)))


def stopped() -> events.Stopped:
    return events.Stopped(run_id="r", at=1.0, code="stopped", reason="because")


def test_what_was_moved_or_relabelled_is_noticed_even_in_a_new_chain() -> None:
    """Who can write the store, but hasn't the key, can't give one call the result of another, or another name."""
    first = write_event(stopped(), 1, first_link("r"), {"reason": b'"one"'}, None, {}, CODEC)
    second = write_event(stopped(), 2, first.digest, {"reason": b'"two"'}, None, {}, CODEC)
    assert [each.reason for each in read_events([first, second], CODEC)] == ["one", "two"]  # type: ignore[attr-defined]
    moved = dataclasses.replace(second, payload=first.payload)
    renamed = dataclasses.replace(first, header=first.header.replace(b'"code":"stopped"', b'"code":"timeout"'))
    for forged in (moved, renamed):
        hashed = hashlib.sha256((forged.salt or b"") + (forged.payload or b"")).digest()
        before = first_link("r") if forged is renamed else first.digest
        forged = dataclasses.replace(
            forged, payload_hash=hashed, digest=next_link(before, forged.header, hashed), seq=forged.seq
        )
        rows = [forged] if forged.seq == 1 else [first, forged]
        assert first_broken("r", rows) is None
        with pytest.raises(JournalError, match="was not written there"):
            list(read_events(rows, CODEC))


def test_a_run_from_before_the_codec_goes_on_with_it(store: str, ran: list[str]) -> None:
    """What was plain stays readable; what is added is encrypted; both verify as one chain."""
    with pytest.raises(RuntimeError):
        working(store, ran, [1]).run(State(0, ["y" * 400]), run_id="r")
    configure(codec=CODEC)
    result = working(store, ran).run(State(0, ["y" * 400]), run_id="r")
    assert ran == ["heron0", "heron1", "heron2"]
    assert result.value.notes[1:] == ["about heron0", "about heron1", "about heron2"]
    assert journal.open(store).verify("r") is None
    stored = everything(store)
    assert (b"heron0" in stored, b"heron2" in stored) == (True, False)


def test_a_growing_state_still_costs_what_was_added(store: str) -> None:
    """The difference to the state before is encrypted, not the whole: 100 messages aren't stored 100 times."""
    configure(codec=CODEC)

    @loop(max=100, store=store)
    def grow(messages: list[str]) -> list[str]:
        return [*messages, "z" * 1000]

    result = grow.run([], run_id="r")
    assert len(result.value) == 100
    db = sqlite3.connect(store.removeprefix("sqlite:///"))
    ((states,),) = db.execute("SELECT sum(length(middle)) FROM events").fetchall()
    db.close()
    assert states < 3 * 100 * 1000
    story = journal.open(store).story("r")
    assert story.root is not None
    assert story.root.ended is not None
    assert story.root.ended.value.show() == result.value


def test_an_erased_payload_is_no_damage(store: str, ran: list[str]) -> None:
    """Erasing needs no key either, and the rest is read as before."""
    configure(codec=CODEC)
    working(store, ran).run(State(0, []), run_id="r")
    db = sqlite3.connect(store.removeprefix("sqlite:///"), isolation_level=None)
    db.execute("UPDATE events SET payload = NULL, salt = NULL WHERE instr(header, CAST('ToolStarted' AS BLOB))")
    db.close()
    book = journal.open(store)
    assert book.verify("r") is None
    assert {event.arguments == {} for event in book.events("r") if isinstance(event, events.ToolStarted)} == {True}


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_codec_that_fails_stops_the_run_and_loses_nothing(colour: str, store: str, ran: list[str]) -> None:
    """The step isn't acknowledged; nothing is written in plain; once the codec works, what was pending comes first."""

    class Moody(ToyCodec):
        down = False

        def encode(self, data: bytes, /) -> bytes:
            if self.down:
                raise ConnectionError("the key server is gone")
            return super().encode(data)

    codec = Moody()
    configure(codec=codec)

    def look(word: str) -> str:
        ran.append(word)
        codec.down = word == "heron"
        return word

    async def alook(word: str) -> str:
        return look(word)

    tool_of: Any = tool(name="look")(alook if colour == "async" else look)

    def body(state: str) -> str:
        try:
            return str(tool_of("heron"))
        except JournalError as exc:
            ran.append(str(exc))
            codec.down = False
            return str(tool_of("egret"))

    async def abody(state: str) -> str:
        try:
            return str(await tool_of("heron"))
        except JournalError as exc:
            ran.append(str(exc))
            codec.down = False
            return str(await tool_of("egret"))

    step: Any = loop(max=1, store=store, name="step")(abody if colour == "async" else body)
    made = step.run("", run_id="r")
    result = asyncio.run(awaited(made)) if colour == "async" else made
    assert result.value == "egret"
    assert ran == ["heron", "the codec 'toy' could not encode: ConnectionError: the key server is gone", "egret"]
    assert journal.open(store).verify("r") is None
    story = journal.open(store).story("r")
    assert [call.finished.result.show() for call in story.calls.values() if call.finished] == ["heron", "egret"]
    assert b"heron" not in everything(store)


async def awaited(made: Any) -> Any:
    return await made


def test_a_codec_that_fails_at_the_end_leaves_the_run_pending(store: str, ran: list[str]) -> None:
    """The result isn't handed over as if it were kept; the run can be taken up again."""

    class Fails(ToyCodec):
        down = False

        def encode(self, data: bytes, /) -> Any:
            return "no bytes" if self.down else super().encode(data)

    codec = Fails()
    configure(codec=codec)
    fails_in = [3]

    def break_it(state: State, iteration: int) -> None:
        codec.down = iteration in fails_in

    work = working(store, ran, on_iteration=break_it)
    with pytest.raises(JournalError, match="encoded to a str: it has to be bytes"):
        work.run(State(0, []), run_id="r")
    assert work.pending() == ["r"]
    codec.down = False
    fails_in.clear()
    result = work.resume("r")
    assert (result.value.n, ran) == (3, ["heron0", "heron1", "heron2"])


def test_mail_that_can_not_be_read_is_no_answer(store: str, ran: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Somebody with another key has said nothing: the run waits on, and a readable answer takes the place."""
    configure(codec=CODEC)
    step = asking(store, ran)
    step.run("", run_id="r")
    book = journal.open(store)
    (question,) = book.questions()
    other = ToyCodec(b"another key").encode(b"x")
    book._writer.use(lambda store: store.post("r", question.id, b"\0toy\0" + other))
    assert step.resume("r").stop_reason is StopReason.WAITING
    assert "unreadable" in caplog.text
    (question,) = book.questions()
    book.answer(question.id, True)
    assert step.resume("r").value == "paid flamingo"


class Nameless:
    def encode(self, data: bytes) -> bytes:
        return data

    decode = encode


class OneWay(Nameless):
    name = "one way"

    def decode(self, data: bytes) -> bytes:
        return data[1:]


class Failing(Nameless):
    name = "failing"

    def encode(self, data: bytes) -> bytes:
        raise ValueError("no key")


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        ("a secret key", r"configure\(codec=…\): got a str; give an object with a name, encode"),
        (Nameless(), "give an object with a name"),
        (type("Odd", (Nameless,), {"name": "a\0b"})(), "give an object with a name"),
        (OneWay(), "what the codec 'one way' encodes doesn't come back"),
        (Failing(), "the codec 'failing' failed on a trial: ValueError$"),
    ],
)
def test_what_is_no_codec_is_refused_at_once(codec: Any, said: str, store: str) -> None:
    """It is tried once before anything depends on it."""
    with pytest.raises(ConfigurationError, match=said):
        configure(codec=codec)
    with pytest.raises(ConfigurationError, match=said.replace("configure", "journal.open")):
        journal.open(store, codec=codec)
    assert settings.codec is None


# -- redacted --------------------------------------------------------------------------------------

TOKEN = "sk-live-0123456789abcdefghij"


@pytest.fixture
def leaky(store: str, ran: list[str]) -> Any:
    """A loop whose state, tool and failures are full of a secret."""
    configure(redact_payloads=True)

    @tool
    def call_api(token: str, user: dict[str, str]) -> dict[str, str]:
        ran.append(token)
        if user["password"] == "odd":
            return TOKEN  # type: ignore[return-value]  # it can't be read as what it is annotated as
        if user["password"] == "wrong":
            raise PermissionError(f"{token} may not")
        return {"access_token": TOKEN, "name": "ann"}

    @loop(max=2, store=store, name="leaky")
    def step(state: dict[str, Any]) -> dict[str, Any]:
        try:
            call_api(TOKEN, {"password": "wrong"})
        except PermissionError:
            pass
        call_api(TOKEN, {"password": "odd"})
        got = call_api(TOKEN, {"password": "hunter2"})
        if state.get("fail"):
            raise RuntimeError(f"with {TOKEN}")
        return {"calls": state.get("calls", 0) + 1, "pad": "p" * 300, **got}

    return step


def test_secrets_are_masked_before_they_are_stored(leaky: Any, store: str, ran: list[str], tmp_path: Path) -> None:
    """The run itself has the real values; the file doesn't; looking, verifying and exporting work."""
    result = leaky.run({}, run_id="r")
    assert (result.value["access_token"], ran[0]) == (TOKEN, TOKEN)
    book = journal.open(store)
    assert book.verify("r") is None
    (odd, finished, *_) = [e for e in book.events("r") if isinstance(e, events.ToolFinished) and not e.error]
    assert odd.result == "[hidden, 28 characters]"
    assert finished.result == {"access_token": "[hidden, 28 characters]", "name": "ann"}
    started = next(e for e in book.events("r") if isinstance(e, events.ToolStarted))
    assert started.arguments == {"token": "[hidden, 28 characters]", "user": {"password": "[hidden, 5 characters]"}}
    assert (started.digest, book.story("r").redacted) == (None, True)
    book.export(tmp_path / "runs.jsonl")
    stored = everything(store) + (tmp_path / "runs.jsonl").read_bytes()
    for secret in (TOKEN.encode(), b"hunter2", b"wrong"):
        assert secret not in stored
    assert b"call_api" in stored


def test_a_redacted_run_can_not_be_resumed(leaky: Any, store: str, ran: list[str]) -> None:
    """Unfinished or over, by its state or without: a CheckpointError that says why, and nothing runs."""
    with pytest.raises(RuntimeError):
        leaky.run({"fail": True}, run_id="failed")
    leaky.run({}, run_id="over")
    before, statuses = len(ran), {run.run_id: run.status for run in journal.open(store).runs()}
    settings.redact_payloads = False
    for attempt in (
        lambda: leaky.resume("failed"),
        lambda: leaky.run({"fail": True}, run_id="failed"),
        lambda: leaky.resume("over"),
        lambda: leaky.run({}, run_id="over"),
    ):
        with pytest.raises(CheckpointError, match=r"can't be resumed.*redact_payloads=True.*another id"):
            attempt()
    assert len(ran) == before
    assert {run.run_id: run.status for run in journal.open(store).runs()} == statuses
    assert isinstance(leaky.resume_pending()["failed"], CheckpointError)


def test_a_run_that_went_on_redacted_can_not_be_resumed_again(store: str, ran: list[str]) -> None:
    """What was whole may still be resumed once; from then on something is missing."""
    with pytest.raises(RuntimeError):
        working(store, ran, [1]).run(State(0, []), run_id="r")
    configure(redact_payloads=True)
    with pytest.raises(RuntimeError):
        working(store, ran, [2]).resume("r")
    assert ran == ["heron0", "heron1", "heron2"]
    settings.redact_payloads = False
    with pytest.raises(CheckpointError, match="redact_payloads"):
        working(store, ran).resume("r")


def test_a_redacted_run_can_not_be_parked(store: str, ran: list[str]) -> None:
    """Nobody could take it up again: to ask so is a ConfigurationError before anybody is asked."""
    configure(redact_payloads=True)
    with pytest.raises(ConfigurationError, match=r"pay would park the run.*wait in place with a timeout"):
        asking(store, ran).run("", run_id="r")
    assert (ran, journal.open(store).questions("all")) == ([], [])


def test_a_redacted_question_can_be_answered_in_place(store: str, ran: list[str]) -> None:
    """The answer is bound to what was really asked about, though only masks are stored."""
    configure(redact_payloads=True)
    books: list[str] = []

    def notify(question: journal.Question) -> None:
        books.append(str(question.arguments))
        journal.open(store).answer(question.id, True, allow_hidden=True)

    @tool
    def pay(token: str) -> str:
        ran.append(token)
        return "paid"

    @loop(max=1, store=store, guard=Guard(ApproveTool(Inbox(notify=notify), timeout=20)))
    def step(state: str) -> str:
        return pay(TOKEN)

    assert step.run("", run_id="r").value == "paid"
    assert ran == [TOKEN]
    assert "hidden" in books[0]
    assert TOKEN.encode() not in everything(store)


@pytest.mark.parametrize("redacts", [False, True])
@pytest.mark.parametrize("depth", [195, 250, 5000])
def test_what_is_nested_deep_is_kept_and_read(depth: int, redacts: bool, store: str) -> None:
    """However deep arguments are, the journal they stand in stays readable."""
    configure(redact_payloads=redacts)
    deep: list[Any] = []
    for _ in range(depth):
        deep = [deep]

    @tool
    def take(given: list[Any]) -> int:
        return 1

    @loop(max=1, store=store)
    def step(n: int) -> int:
        return n + take(deep)

    assert step.run(0, run_id="r").value == 1
    book = journal.open(store)
    assert (len(book.events("r")), book.verify("r")) == (9, None)


def test_redacted_payloads_can_be_encrypted_too(leaky: Any, store: str) -> None:
    """What a mask leaves is still somebody's business."""
    configure(codec=CODEC)
    leaky.run({}, run_id="r")
    assert "[hidden, 28 characters]" in str(journal.open(store).events("r"))
    stored = everything(store)
    assert (TOKEN.encode() in stored, b"[hidden" in stored) == (False, False)


def test_redact_payloads_is_a_bool() -> None:
    """Anything else is refused, and changes nothing."""
    with pytest.raises(ConfigurationError, match="redact_payloads='yes'"):
        configure(redact_payloads="yes")  # type: ignore[arg-type]
    assert settings.redact_payloads is False


# -- the file --------------------------------------------------------------------------------------


def test_exports_keep_what_a_codec_wrote_to_the_byte(store: str, ran: list[str], tmp_path: Path) -> None:
    """Bytes that are no text come back from an export as they are; the file is for its owner alone."""
    configure(codec=CODEC)
    working(store, ran).run(State(0, []), run_id="r")
    path = tmp_path / "runs.jsonl"
    book = journal.open(store)
    book.export(path)
    assert journal.read_export(path)[0]["r"] == book._rows("r")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_why_a_payload_is_lost_is_read_from_older_journals_too() -> None:
    """It stood in the header once; there it would be in plain."""
    row = write_event(stopped(), 1, first_link("r"), {}, None, {})
    call = b'"event":"ToolFinished","run_id":"r","at":1.0,"call_id":"c","tool":"t","outcome":"returned"'
    header = b'{%s,"lost":{"result":"a set"}}' % call
    (event,) = read_events([dataclasses.replace(row, header=header, payload=b'{"result":[1]}')])
    assert isinstance(event, events.ToolFinished)
    assert event.result.lost == "a set"
