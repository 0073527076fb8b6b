"""Recorder: writes down what happens in a run, and has it committed before it is handed on."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections import deque
from dataclasses import replace
from typing import Any

from loopguard import _events as events
from loopguard._call import ASYNC, ASYNC_GENERATOR, GENERATOR, Tool, ToolCall
from loopguard._config import settings
from loopguard._pipeline import Ask, Proceed, Steps
from loopguard._run import Run
from loopguard.exceptions import CheckpointError, JournalError, LeaseLost, ToolCallRefused
from loopguard.journal._asking import INSIDE, Questions, stop_reason
from loopguard.journal._at_rest import read_letter
from loopguard.journal._codec import Codec, parsed, shown
from loopguard.journal._errors import error_data, involved
from loopguard.journal._fold import Story
from loopguard.journal._growing import Growing
from loopguard.journal._items import ITEMS, AsyncNoting, Noting
from loopguard.journal._protocol import STOP, Lease
from loopguard.journal._recall import Recall, codecs_of
from loopguard.journal._rows import PAYLOADS, first_link, write_event
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
        self.questions = Questions(self)
        self.recall = Recall(self)
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
            self.recall.passed(event)
        elif isinstance(event, events.IterationEnded):
            self.recall.over(event)
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

    # -- tool calls ------------------------------------------------------------------------------

    def hook(self, call: ToolCall, proceed: Proceed) -> Steps:
        """Answer the call from its record, or run it and have its outcome committed before it is handed on."""
        call.arguments  # noqa: B018  # what doesn't bind raises its TypeError before anything is looked up
        tool, plan = call.tool, call.plan
        call.place = place = self.recall.place_of_call(call)
        key: str = place["key"]
        if self.recall.open:
            if plan.root.alarm and (latched := plan.latched()) is not None:
                raise plan.refuse(call, latched)
            record = yield from self.recall.answer_of(call)
            if record is not None:
                return (yield from self.recall.replay(call, record))
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

    # -- model calls -----------------------------------------------------------------------------


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
