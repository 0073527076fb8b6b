"""Recorder: writes a run's events down, and answers a resumed run's calls from what is written."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from loopguard import _events as events
from loopguard._call import ASYNC, ASYNC_GENERATOR, GENERATOR, Tool, ToolCall, new_id
from loopguard._config import settings
from loopguard._halting import came_through
from loopguard._pipeline import LOCK, Ask, Effect, Invoke, Proceed, Steps
from loopguard._run import WIND_DOWN, Run
from loopguard.exceptions import CheckpointError, JournalError, LeaseLost, ToolCallRefused
from loopguard.journal._asking import INSIDE, Matter, Questions, stop_reason
from loopguard.journal._at_rest import read_letter
from loopguard.journal._codec import Codec, codec_for, hints_of, parsed, shown
from loopguard.journal._errors import data_of, error_data, involved, rebuilt, unwound
from loopguard.journal._fold import Call, RunStory, Story
from loopguard.journal._growing import Growing
from loopguard.journal._items import ITEMS, AsyncNoting, Noting, play, play_async
from loopguard.journal._protocol import STOP, Lease
from loopguard.journal._rows import PAYLOADS, Stored, first_link, plain, write_event
from loopguard.journal._states import Delta, States
from loopguard.journal._writer import Writer
from loopguard.redaction import redact, redact_text

__all__ = ["Recorder"]


class Recorder:
    """What keeps one run, and the runs inside it, in a journal.

    A listener of their events, and one hook around their tool calls.
    """

    def __init__(self, writer: Writer, lease: Lease, run: Run, story: Story, last: tuple[int, bytes] | None) -> None:
        self.writer = writer
        self.lease = lease
        self.run = run
        self.story = story
        self.states = States(lease.salt)
        self._seq, self._digest = last or (0, first_link(lease.run_id))
        lease.written = self._seq
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._queue: deque[tuple[events.Event, dict[str, bytes], tuple[str, bytes] | None, dict[str, str]]] = deque()
        self._next: tuple[events.Event, dict[str, bytes], Delta | None, dict[str, str]] | None = None
        """What is being chained. It stays where the codec fails, and is tried again before anything else."""
        self._failed: JournalError | None = None
        self._codecs: dict[str, Growing] = {}
        self._returned: dict[str, Any] = {}
        """What the body of the iteration under way returned, by run."""
        self._tools: dict[str, Tool] = {}
        self._trouble: CheckpointError | None = None
        self._seen: defaultdict[tuple[str, int], Counter[tuple[str, ...]]] = defaultdict(Counter)
        """How often what was asked for, in each iteration that is under way."""
        self._counting = threading.Lock()
        self.resuming: int | None = None
        """The iteration of the outermost loop that is run again, while it is."""
        self._left: dict[str, Call] = {}
        """Its recorded calls that nothing has asked for yet."""
        self._answers: dict[tuple[Any, ...], deque[Stored]] = {}
        """What the API answered in it, by request."""
        self._metered = False
        self._asked_live = False
        self.questions = Questions(self)
        self.codec = settings.codec
        self.redacts = settings.redact_payloads
        first = story.root
        self._master_key: str | None = first.started.master_key if first is not None else os.urandom(16).hex()

    def opaque(self, digest: str) -> str:
        """The digest for all to see: keyed, since short arguments could be guessed from the plain one."""
        if self._master_key is None:  # the first versions had none
            return digest
        return hashlib.blake2b(digest.encode(), key=self._master_key.encode()).hexdigest()

    # -- writing ---------------------------------------------------------------------------------

    def record(self, event: events.Event) -> None:
        """Take the event down; it is written with the next commit. Never raises: `commit` tells."""
        payload: dict[str, bytes] = {}
        lost: dict[str, str] = {}
        state: tuple[str, bytes] | None = None
        event = self._introduced(event)
        for name in PAYLOADS[type(event).__name__]:
            value = getattr(event, name)
            if name == "value" and isinstance(event, _STATEFUL):
                if value is None and not isinstance(event, _NEEDS_STATE):
                    continue
                if isinstance(event, events.IterationEnded) and value is self._returned.get(event.run_id):
                    continue  # it stands there already
                try:
                    state = event.run_id, self._codecs[event.run_id].encode(value)
                except KeyError:  # a scope has no state
                    continue
                except CheckpointError as exc:
                    self._trouble = self._trouble or exc
                    if isinstance(event, events.IterationStarted | events.IterationReturned):
                        return  # it never came to that, as far as the journal knows
                    state, lost["value"] = (event.run_id, shown(value)), str(exc)
            elif value is not None:
                payload[name] = self._payload(event, name, value, lost)
            elif name == "result" and isinstance(event, events.ToolFinished) and event.outcome == "returned":
                payload[name] = b"null"
        if self.redacts:
            payload, state, lost = _masked(event, payload, state, lost)
        self._queue.append((event, payload, state, lost))
        self._drain()
        if isinstance(event, events.ToolStarted):
            self.questions.took_off(event.key or event.call_id)
        elif isinstance(event, events.ToolFinished):
            self.questions.landed(event.key or event.call_id)
        elif isinstance(event, events.ModelStarted):
            self.questions.took_off(event.call_id)
        elif isinstance(event, events.ModelCalled):
            self.questions.landed(event.call_id)
        elif isinstance(event, events.IterationReturned):
            self._returned[event.run_id] = event.value
            self._passed(event)
        elif isinstance(event, events.IterationEnded):
            self._seen.pop((event.run_id, event.iteration or 0), None)
        elif isinstance(event, events.RunEnded):
            self._codecs.pop(event.run_id, None)
            self._returned.pop(event.run_id, None)

    def _introduced(self, event: events.Event) -> events.Event:
        """The event with what the journal has to know of itself, where its run begins or goes on."""
        if not isinstance(event, events.RunStarted) or event.run_id != self.run.id:
            return event
        # without it nobody could find the calls of a run again: here nobody needs to
        return replace(event, redacted=True) if self.redacts else replace(event, master_key=self._master_key)

    def _payload(self, event: Any, name: str, value: Any, lost: dict[str, str]) -> bytes:
        if name in ("result", "items") and isinstance(event, events.ToolFinished):
            return self._result(event, name, value, lost)
        if name == "error":
            data = error_data(value)
            if isinstance(value, GeneratorExit) and self.parked:  # whoever took its items was unwound
                data["unwound"] = True
            return shown({**data, "involved": involved(value)} if isinstance(event, events.RunEnded) else data)
        if name == "verdict":
            return self._verdict(event, lost)
        return shown(value)

    def _result(self, event: events.ToolFinished, name: str, value: Any, lost: dict[str, str]) -> bytes:
        tool = self._tools.get(event.key or "")
        try:
            if tool is None:
                raise CheckpointError("the call was made past the journal")
            if name == "items" and len(value) > ITEMS:
                raise CheckpointError(f"it yielded more than {ITEMS:,} items")
            result, item = codecs_of(tool)
            if name == "result":
                return result.encode(value)
            return b"[" + b",".join(item.encode(one) for one in value) + b"]"
        except CheckpointError as exc:
            lost[name] = str(exc)
            return shown(value)

    def _verdict(self, event: events.VerdictGiven, lost: dict[str, str]) -> bytes:
        verdict = event.verdict
        value = b"null"
        if verdict.value is not None:
            try:
                value = self._codecs[event.run_id].encode(verdict.value)
            except (CheckpointError, KeyError) as exc:
                value, lost["verdict"] = shown(verdict.value), str(exc)
        return b'{"passed":%s,"reason":%s,"value":%s}' % (shown(verdict.passed), shown(verdict.reason), value)

    def _drain(self) -> None:
        """Chain what has gathered. A garbage collection in here may settle a generator, which comes back here."""
        me = threading.get_ident()
        if self._owner == me:
            return
        while self._queue or self._next:
            with self._lock:
                self._owner = me
                try:
                    while self._queue or self._next:
                        self._chain()
                    self._failed = None
                except JournalError as exc:
                    self._failed = exc
                    return
                finally:
                    self._owner = None

    def _chain(self) -> None:
        seq = self._seq + 1
        if self._next is None:
            event, payload, state, lost = self._queue.popleft()
            delta = None if state is None else self.states.add(state[0], seq, state[1])
            self._next = event, payload, delta, lost
        event, payload, delta, lost = self._next
        row = write_event(event, seq, self._digest, payload, delta, lost, self.codec)
        self._next = None
        self._seq, self._digest = seq, row.digest
        self.writer.put(self.lease, row)

    # -- waiting ---------------------------------------------------------------------------------

    def commit(self, colour: str) -> Ask:
        """The effect that waits until everything recorded so far is committed."""
        return Ask(self.settled_async if colour in (ASYNC, ASYNC_GENERATOR) else self.settled)

    def settled(self) -> None:
        """Wait until everything recorded so far is committed. JournalError where it can't be."""
        self._tell()
        try:
            self.writer.wait(self.lease, self._seq)
        except LeaseLost:
            self.latch("another process has taken over")
            raise
        self._obey()

    async def settled_async(self) -> None:
        """The same, off the event loop."""
        self._tell()
        try:
            await self.writer.wait_async(self.lease, self._seq)
        except LeaseLost:
            self.latch("another process has taken over")
            raise
        self._obey()

    def _obey(self) -> None:
        """Stop the run where somebody has asked for it."""
        mail, self.lease.stop = self.lease.stop, None
        if mail is not None:
            self.run.stop(stop_reason(read_letter(self.codec, mail, STOP)))

    def _tell(self) -> None:
        if self._failed is not None:
            self._drain()
            if self._failed is not None:
                raise self._failed
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble

    def latch(self, reason: str, code: str = "stopped") -> None:
        """Refuse every later call of the run."""
        refusal = ToolCallRefused(code, "journal", "", reason, None, None, self.run.name, self.run.id)
        if self.run.latch is None:
            self.run.latch = refusal
        self.run.root.alarm = True

    @property
    def head(self) -> str:
        """The last link of the chain."""
        return self._digest.hex()

    @property
    def parked(self) -> bool:
        """Whether the run waits for a person."""
        latch = self.run.latch
        return latch is not None and latch.code in ("uncertain", "waiting")

    def close(self, status: str) -> None:
        """The run is over: write the last events, and let others take it over."""
        if self._failed is not None:
            self._drain()
        self.writer.release(self.lease, status if self._failed is None else "error")
        if self._failed is not None:
            raise self._failed

    def delete(self) -> None:
        """Forget the run, which is over, while nobody else can have taken it up."""
        self.settled()
        self.writer.use(lambda journal: journal.delete(self.lease.run_id))

    # -- runs ------------------------------------------------------------------------------------

    def describe(self, run: Run, codec: Codec) -> None:
        """States of this run are written by this codec from now on."""
        known = self._codecs.get(run.id)
        if known is None or known.codec is not codec:
            self._codecs[run.id] = Growing(codec)

    def resume(self, number: int | None, ended: events.RunEnded | None) -> None:
        """The outermost loop goes on with this iteration, run again as far as it had come.

        The failure that ended it, if one did, is not answered from the record: somebody wants it tried again.
        """
        self.resuming = number
        if number is None:
            return
        root = self.run.id
        for call in self.story.calls.values():
            if self._stands_in(call.started.owner_id, call.started.owner_iteration, root, number) and not _is_void(
                call
            ):
                self._left[call.key] = call
        for failure in _involved(ended):
            failed = [call for call in self._left.values() if _failed_with(call, failure)]
            if failed:
                del self._left[failed[-1].key]
        for model in self.story.models.values():
            started = model.started
            if self._stands_in(started.owner_id, started.owner_iteration, root, number):
                self._metered = True
                if model.called is not None and model.called.response is not None:
                    place = started.owner_id, started.owner_iteration, started.digest
                    self._answers.setdefault(place, deque()).append(model.called.response)

    def _stands_in(self, owner: str | None, iteration: int | None, run_id: str, number: int | None) -> bool:
        """Whether an iteration of a loop belongs to this iteration of that one (None: to any)."""
        while owner is not None and owner in self.story.runs:
            if owner == run_id:
                return number is None or iteration == number
            started = self.story.runs[owner].started
            owner, iteration = started.owner_id, started.owner_iteration
        return False

    def runs_again(self, event: events.Event) -> bool:
        """Whether it happened in the iteration that is run again."""
        return self.resuming is not None and self._stands_in(event.run_id, event.iteration, self.run.id, self.resuming)

    def past_calls(self, run_id: str, number: int) -> list[tuple[str, bool]]:
        """The calls that a run and those inside it have made: (tool, whether in this iteration of it)."""
        found = []
        for call in self.story.calls.values():
            owner, iteration = call.started.owner_id, call.started.owner_iteration
            if call.counts and self._stands_in(owner, iteration, run_id, None):
                found.append((call.started.tool, self._stands_in(owner, iteration, run_id, number)))
        return found

    def past_outcomes(self, run_id: str, number: int) -> list[tuple[str, Any]]:
        """What the calls of a run itself came to: (strict digest, JSON data).

        Without those that other processes wouldn't know, and the failed ones of this iteration: they may run again.
        """
        found: list[tuple[str, Any]] = []
        for call in self.story.calls.values():
            started, finished = call.started, call.finished
            if finished is None or started.run_id != run_id or not started.durable or started.digest is None:
                continue
            if finished.outcome == "returned" and finished.items is None:
                result: Any = finished.result
                # one that nobody knows is news
                came = object() if result is None or result.lost is not None else result.show()
                found.append((started.digest, came))
            elif started.owner_iteration != number:
                items: Any = finished.items
                error = None if finished.error is None else data_of(finished.error)
                found.append((started.digest, [error, None if items is None else items.show()]))
        return found

    def place_of(self, run: Run, digest: str) -> dict[str, Any]:
        """Where a loop stands that begins inside this run."""
        if run.parent is None or run is self.run:
            return {}
        owner = loop_of(run.parent)
        number = self._count(owner, "run", run.name, digest)
        return {"owner_id": owner.id, "owner_iteration": owner.iteration, "occurrence": number}

    def _count(self, owner: Run, *what: str) -> int:
        """Which one of its kind this is in its iteration."""
        with self._counting:
            seen = self._seen[owner.id, owner.iteration]
            seen[what] += 1
            return seen[what]

    def recorded_run(self, place: dict[str, Any], name: str, digest: str) -> RunStory | None:
        """The run that stood in this place before."""
        if self.resuming is None:
            return None
        for run in self.story.runs.values():
            started = run.started
            if (started.owner_id, started.owner_iteration, started.occurrence, started.name, started.digest) == (
                place.get("owner_id"),
                place.get("owner_iteration"),
                place.get("occurrence"),
                name,
                digest,
            ):
                return run
        return None

    def consume_run(self, run_id: str, number: int | None) -> None:
        """This run is taken up again: what lies before its iteration `number` (None: all of it) is accounted for."""
        for key, call in list(self._left.items()):
            owner, iteration = call.started.owner_id, call.started.owner_iteration
            if not self._stands_in(owner, iteration, run_id, None):
                continue
            if number is None or not self._stands_in(owner, iteration, run_id, number):
                self._left.pop(key, None)

    def _passed(self, event: events.IterationReturned) -> None:
        if event.run_id == self.run.id:
            if event.iteration == self.resuming:
                self.resuming, self._left = None, {}
        elif self._left:
            self.consume_iteration(event.run_id, event.iteration)

    def consume_iteration(self, run_id: str, number: int | None) -> None:
        """This iteration has come to its end: what it left unasked is history."""
        for key, call in list(self._left.items()):
            if self._stands_in(call.started.owner_id, call.started.owner_iteration, run_id, number):
                self._left.pop(key, None)

    # -- tool calls ------------------------------------------------------------------------------

    def hook(self, call: ToolCall, proceed: Proceed) -> Steps:
        """Answer the call from its record, or run it and have its outcome committed before it is handed on."""
        call.arguments  # noqa: B018  # what doesn't bind raises its TypeError before anything is looked up
        tool, plan = call.tool, call.plan
        call.place = place = self._place(call)
        key: str = place["key"]
        if self.resuming is not None or self._left:
            if plan.root.alarm and (latched := plan.latched()) is not None:
                raise plan.refuse(call, latched)
            record = yield from self._recall(call)
            if record is not None:
                return (yield from self._replay(call, record))
        self._tools[key] = tool
        inside = None
        if tool.colour in (GENERATOR, ASYNC_GENERATOR):  # between its items it is the consumer who makes calls
            call.yielded = []
            noting = Noting if tool.colour == GENERATOR else AsyncNoting
            call.fn = functools.partial(noting, call.fn, call.yielded, functools.partial(self.questions.in_flight, key))
        else:
            inside = INSIDE.set((*INSIDE.get(), key))
        try:
            result = yield from proceed(call)
        except Exception:
            yield self.commit(tool.colour)
            raise
        finally:
            self._tools.pop(key, None)
            if inside is not None:
                INSIDE.reset(inside)
        yield self.commit(tool.colour)
        return result

    def _place(self, call: ToolCall) -> dict[str, Any]:
        owner = loop_of(call.run)
        digest, durable = _digest(call)
        number = self._count(owner, "call", digest)
        unique = "" if durable else f":{new_id('live')}"
        return {
            "digest": digest,
            "durable": durable,
            "occurrence": number,
            "owner_id": owner.id,
            "owner_iteration": owner.iteration,
            "parent_call": next(reversed(INSIDE.get()), None),
            "key": f"{owner.id}:{owner.iteration}:{self.opaque(digest)[:32]}:{number}{unique}",
        }

    def _recall(self, call: ToolCall) -> Generator[Effect, Any, Call | None]:
        """The record that answers this call; None where it is to run. Parks the run where nobody knows."""
        tool = call.tool
        record = self._left.pop(call.place["key"], None)
        if record is not None:
            if _can_answer(record.finished, tool):
                self._consume_inner(record.key)
                return record
            if tool.idempotent:
                return None
            why = "it was started, and nobody knows whether it came to its end"
            return (yield from self._ask(call, record, why))
        if tool.idempotent:
            return None
        like = [other for other in self._left.values() if other.started.tool == call.name]
        if like and (self._asked_live or not self._metered or not all(other.started.durable for other in like)):
            why = f"before the interruption {call.name} was called with other arguments, and may be the same call"
            return (yield from self._ask(call, None, why))
        return None

    def _consume_inner(self, key: str) -> None:
        """What a finished call had called itself isn't called again."""
        for inner, call in list(self._left.items()):
            if call.started.parent_call == key:
                self._left.pop(inner, None)
                self._consume_inner(inner)

    def _ask(self, call: ToolCall, record: Call | None, why: str) -> Generator[Effect, Any, Call | None]:
        """What a person said of an uncertain call; the run is parked where nobody has yet."""
        key: str = call.place["key"]
        matter = Matter(
            kind="uncertain",
            place=f"{key} {record.times if record is not None else 0}",
            tool=call.name,
            call_id=key,
            # an approver may have edited them: what has run is what was started
            arguments=call.arguments if record is None else plain(record.started.arguments),
            digest=call.place["digest"],
            key=self.questions.key,
            code="uncertain",
            why=f"{call.name} was not run again: {why}",
            hint=", or mark the tool @tool(idempotent=True) if running it twice does no harm",
        )
        try:
            answer = yield from self.questions.ask(call.run, matter)
        except ToolCallRefused as refusal:
            raise call.plan.refuse(call, refusal) from None
        if answer.decision != "ran":
            return None
        return Call(key, record.started if record is not None else _as_started(call), None, False, answer)

    def _replay(self, call: ToolCall, record: Call) -> Steps:
        """The outcome of the record: nothing runs, nothing is counted or charged again."""
        tool = call.tool
        finished = record.finished
        outcome = finished.outcome if finished is not None else "returned"
        call.run.emit(events.ToolReplayed, call_id=call.id, tool=call.name, key=record.key, outcome=outcome)
        self._passes(call, finished)
        error: BaseException | None = None
        result: Any = None
        items: list[Any] = []
        result_codec, item_codec = codecs_of(tool)
        if finished is None:
            assert record.answer is not None
            result = result_codec.decode(shown(record.answer.result))
        else:
            items = self._read_items(finished, item_codec, tool)
            if finished.error is not None:
                error = rebuilt(data_of(finished.error), tool.raises)
                if finished.outcome == "closed":
                    error = CheckpointError(
                        f"{tool.name} was left after {len(items)} items before the interruption, and isn't run twice: "
                        f"there are no more"
                    )
            elif finished.result is not None:
                result = _read(finished.result, result_codec, tool, "result")
        if tool.colour in (GENERATOR, ASYNC_GENERATOR):
            again = call.replace(arguments=call.arguments)
            player = play if tool.colour == GENERATOR else play_async
            again.fn = lambda *args, **kwargs: player(items, result, error)
            return (yield Invoke(again))
        if error is not None:
            yield Ask(_raise, error)  # by the driver, which lets a StopIteration through
        return result

    @staticmethod
    def _passes(call: ToolCall, finished: events.ToolFinished | None) -> None:
        """It counts as it did when it ran: it ends a row of refusals, and the first of its kind is news."""
        if finished is not None and finished.error is not None and unwound(data_of(finished.error)):
            return
        if call.plan.root.restless:
            came_through(call.plan.chain, call.provider_id)
        if call.place["occurrence"] == 1 and not call.tool.repeatable:
            with LOCK:
                for run in call.plan.chain:
                    run.news += 1

    def _read_items(self, finished: events.ToolFinished, codec: Codec, tool: Tool) -> list[Any]:
        if finished.items is None:
            return []
        stored: Stored = finished.items
        if stored.lost is not None:
            raise _not_kept(tool, "items", stored.lost)
        return [codec.decode(Stored(item).text()) for item in stored.plain]

    # -- model calls -----------------------------------------------------------------------------

    def model_place(self, run: Run, request: bytes) -> dict[str, Any]:
        """Where a model call stands: what its ModelStarted event says of that."""
        owner = loop_of(run)
        digest = hashlib.sha256(_without_notes(request)).hexdigest()
        return {
            "digest": digest,
            "occurrence": self._count(owner, "model", digest),
            "owner_id": owner.id,
            "owner_iteration": owner.iteration,
        }

    def recorded_response(self, place: dict[str, Any]) -> dict[str, Any] | None:
        """What the API answered to this request before; None where it is to be asked."""
        if self.resuming is None:
            return None
        answers = self._answers.get((place["owner_id"], place["owner_iteration"], place["digest"]))
        if answers:
            response: dict[str, Any] = answers.popleft().show()
            return response
        self._asked_live = True
        return None


def _masked(
    event: events.Event, payload: dict[str, bytes], state: tuple[str, bytes] | None, lost: dict[str, str]
) -> tuple[dict[str, bytes], tuple[str, bytes] | None, dict[str, str]]:
    """What is stored where nothing that is secret may be."""
    # a digest could tell what was masked; that of a question stays, so that its answer is bound to what was asked
    kept = {name: text for name, text in payload.items() if name != "digest" or isinstance(event, events.QuestionAsked)}
    return (
        {name: _masked_json(text) for name, text in kept.items()},
        None if state is None else (state[0], _masked_json(state[1])),
        {name: redact_text(why) for name, why in lost.items()},
    )


def _masked_json(text: bytes) -> bytes:
    return shown(redact(parsed(text)))


_STATEFUL = (
    events.RunStarted,
    events.RunEnded,
    events.IterationStarted,
    events.IterationReturned,
    events.IterationEnded,
)
_NEEDS_STATE = (events.IterationStarted, events.IterationReturned)


def loop_of(run: Run) -> Run:
    """The loop that a run belongs to: itself, or the nearest around a scope; where none is, the outermost run."""
    while run.kind == "scope" and run.parent is not None:
        run = run.parent
    return run


@functools.lru_cache(4096)
def codecs_of(tool: Tool) -> tuple[Codec, Codec]:
    """How what a tool returns is written, and what it yields."""
    import typing

    hint = hints_of(tool.fn).get("return", Any)
    if tool.colour not in (GENERATOR, ASYNC_GENERATOR):
        return codec_for(hint), codec_for(Any)
    parts = typing.get_args(hint)
    return codec_for(parts[2] if len(parts) == 3 else Any), codec_for(parts[0] if parts else Any)


def _without_notes(request: bytes) -> bytes:
    """A request (JSON) without what `run_tools` says of what is left: when it is resumed, a run has used more."""
    return _NOTE.sub(b"", request) if _MARK in request else request


_MARK = WIND_DOWN.encode()
_TEXT = rb"(?:Used so far: [^\"\\]* )?" + re.escape(_MARK)
_NOTE = re.compile(rb', \{"text": "' + _TEXT + rb'", "type": "text"\}|(?:\\n\\n)?' + _TEXT)


def _digest(call: ToolCall) -> tuple[str, bool]:
    """The strict digest of a call, and whether another process would get the same; short for plain arguments."""
    arguments = call.arguments
    if call.instance is None and call.tool.own is None and set(map(type, arguments.values())) <= _ATOMS:
        with contextlib.suppress(ValueError):  # an int of more digits than Python writes
            text = repr((call.tool.ident, sorted(arguments.items())))
            return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), True
    return call.digest()


_ATOMS = frozenset({str, int, bool, type(None)})


def _can_answer(finished: events.ToolFinished | None, tool: Tool) -> bool:
    """Whether the record stands for the call: for one that may run again, only if nothing of it is lost."""
    if finished is None or finished.outcome == "cancelled":
        return False
    return not tool.idempotent or all(getattr(kept, "lost", None) is None for kept in (finished.result, finished.items))


def _is_void(call: Call) -> bool:
    """Whether its body was only left on the way out of a refusal: it is run again."""
    finished = call.finished
    return finished is not None and finished.error is not None and unwound(data_of(finished.error))


def _involved(ended: events.RunEnded | None) -> list[list[str]]:
    if ended is None or ended.error is None:
        return []
    found: list[list[str]] = data_of(ended.error).get("involved", [])
    return found


def _failed_with(call: Call, failure: list[str]) -> bool:
    if call.finished is None or call.finished.error is None or call.finished.outcome != "raised":
        return False
    error = data_of(call.finished.error)
    return [error["type"], error["text"]] == failure


def _raise(error: BaseException) -> None:
    raise error


def _read(stored: Stored, codec: Codec, tool: Tool, what: str) -> Any:
    if stored.lost is not None:
        raise _not_kept(tool, what, stored.lost)
    return codec.decode(stored.text())


def _not_kept(tool: Tool, what: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{tool.name} has run, but its {what} could not be recorded ({why}), and it is not run twice: "
        f"annotate what it returns, or mark it @tool(idempotent=True)"
    )


def _as_started(call: ToolCall) -> events.ToolStarted:
    return events.ToolStarted(
        run_id=call.run.id, at=0.0, call_id=call.id, tool=call.name, arguments={}, reserved={}, **call.place
    )
