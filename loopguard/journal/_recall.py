"""Recall: answers the calls of an iteration that is run again from what is written of it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from loopguard import _events as events
from loopguard._call import ASYNC_GENERATOR, GENERATOR, Tool, ToolCall, new_id
from loopguard._halting import came_through
from loopguard._pipeline import LOCK, Ask, Effect, Invoke, Steps
from loopguard._run import WIND_DOWN, Run
from loopguard.exceptions import CheckpointError, ToolCallRefused
from loopguard.journal._asking import INSIDE, Matter
from loopguard.journal._codec import Codec, codec_for, hints_of, shown
from loopguard.journal._errors import data_of, rebuilt, unwound
from loopguard.journal._fold import Call, RunStory
from loopguard.journal._items import play, play_async
from loopguard.journal._rows import Stored, plain

if TYPE_CHECKING:
    from loopguard.journal._recorder import Recorder

__all__ = ["Recall", "codecs_of"]


class Recall:
    """What one recorder's run had done before it was interrupted, used up while its last iteration is run again."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._story = recorder.story
        self.resuming: int | None = None
        """The iteration of the outermost loop that is run again, while it is."""
        self._left: dict[str, Call] = {}
        """Its recorded calls that nothing has asked for yet."""
        self._answers: dict[tuple[Any, ...], deque[Stored]] = {}
        """What the API answered in it, by request."""
        self._metered = False
        self._asked_live = False
        self._seen: defaultdict[tuple[str, int], Counter[tuple[str, ...]]] = defaultdict(Counter)
        """How often what was asked for, in each iteration that is under way."""
        self._counting = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether a call may have been made before."""
        return self.resuming is not None or bool(self._left)

    def resume(self, number: int | None, ended: events.RunEnded | None) -> None:
        """The outermost loop goes on with this iteration, run again as far as it had come.

        The failure that ended it, if one did, is not answered from the record: somebody wants it tried again.
        """
        self.resuming = number
        if number is None:
            return
        root = self._recorder.run.id
        for call in self._story.calls.values():
            if self._stands_in(call.started.owner_id, call.started.owner_iteration, root, number) and not _is_void(
                call
            ):
                self._left[call.key] = call
        for failure in _involved(ended):
            failed = [call for call in self._left.values() if _failed_with(call, failure)]
            if failed:
                del self._left[failed[-1].key]
        for model in self._story.models.values():
            started = model.started
            if self._stands_in(started.owner_id, started.owner_iteration, root, number):
                self._metered = True
                if model.called is not None and model.called.response is not None:
                    place = started.owner_id, started.owner_iteration, started.digest
                    self._answers.setdefault(place, deque()).append(model.called.response)

    def _stands_in(self, owner: str | None, iteration: int | None, run_id: str, number: int | None) -> bool:
        """Whether an iteration of a loop belongs to this iteration of that one (None: to any)."""
        while owner is not None and owner in self._story.runs:
            if owner == run_id:
                return number is None or iteration == number
            started = self._story.runs[owner].started
            owner, iteration = started.owner_id, started.owner_iteration
        return False

    def runs_again(self, event: events.Event) -> bool:
        """Whether it happened in the iteration that is run again."""
        return self.resuming is not None and self._stands_in(
            event.run_id, event.iteration, self._recorder.run.id, self.resuming
        )

    def past_calls(self, run_id: str, number: int) -> list[tuple[str, bool]]:
        """The calls that a run and those inside it have made: (tool, whether in this iteration of it)."""
        found = []
        for call in self._story.calls.values():
            owner, iteration = call.started.owner_id, call.started.owner_iteration
            if call.counts and self._stands_in(owner, iteration, run_id, None):
                found.append((call.started.tool, self._stands_in(owner, iteration, run_id, number)))
        return found

    def past_outcomes(self, run_id: str, number: int) -> list[tuple[str, Any]]:
        """What the calls of a run itself came to: (strict digest, JSON data).

        Without those that other processes wouldn't know, and the failed ones of this iteration: they may run again.
        """
        found: list[tuple[str, Any]] = []
        for call in self._story.calls.values():
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

    # -- where things stand -----------------------------------------------------------------------

    def place_of(self, run: Run, digest: str) -> dict[str, Any]:
        """Where a loop stands that begins inside this run."""
        if run.parent is None or run is self._recorder.run:
            return {}
        owner = loop_of(run.parent)
        number = self._count(owner, "run", run.name, digest)
        return {"owner_id": owner.id, "owner_iteration": owner.iteration, "occurrence": number}

    def place_of_call(self, call: ToolCall) -> dict[str, Any]:
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
            "key": f"{owner.id}:{owner.iteration}:{self._recorder.opaque(digest)[:32]}:{number}{unique}",
        }

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

    def _count(self, owner: Run, *what: str) -> int:
        """Which one of its kind this is in its iteration."""
        with self._counting:
            seen = self._seen[owner.id, owner.iteration]
            seen[what] += 1
            return seen[what]

    def over(self, event: events.IterationEnded) -> None:
        """An iteration has ended: what it had counted is of no use any more."""
        self._seen.pop((event.run_id, event.iteration or 0), None)

    # -- loops inside it --------------------------------------------------------------------------

    def recorded_run(self, place: dict[str, Any], name: str, digest: str) -> RunStory | None:
        """The run that stood in this place before."""
        if self.resuming is None:
            return None
        for run in self._story.runs.values():
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

    def passed(self, event: events.IterationReturned) -> None:
        if event.run_id == self._recorder.run.id:
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

    def answer_of(self, call: ToolCall) -> Generator[Effect, Any, Call | None]:
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
            key=self._recorder.questions.key,
            code="uncertain",
            why=f"{call.name} was not run again: {why}",
            hint=", or mark the tool @tool(idempotent=True) if running it twice does no harm",
        )
        try:
            answer = yield from self._recorder.questions.ask(call.run, matter)
        except ToolCallRefused as refusal:
            raise call.plan.refuse(call, refusal) from None
        if answer.decision != "ran":
            return None
        return Call(key, record.started if record is not None else _as_started(call), None, False, answer)

    def replay(self, call: ToolCall, record: Call) -> Steps:
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
