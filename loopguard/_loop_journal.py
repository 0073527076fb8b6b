"""A loop, or a flow, and its journal: begun, taken up again where it stopped, or answered from the record."""

from __future__ import annotations

import functools
import hashlib
import logging
import operator
import os
import time
from typing import TYPE_CHECKING, Any

from loopguard import _events as events
from loopguard._amounts import SCALE, decimal
from loopguard._config import settings
from loopguard._fingerprints import strict
from loopguard._loop_options import Body, LoopOptions
from loopguard._outcomes import TRANSITIONS, Iteration, LoopResult, LoopState, StopReason, Verdict
from loopguard._usage import Usage
from loopguard.evaluators import Matches
from loopguard.exceptions import CheckpointError, ConfigurationError, RunConflict
from loopguard.questions.inbox import key_of

if TYPE_CHECKING:
    from loopguard._loop_run import LoopRun
    from loopguard.journal._codec import Codec
    from loopguard.journal._fold import Pass, RunStory
    from loopguard.journal._recorder import Recorder

__all__ = [
    "PENDING",
    "codec_of",
    "needed_store",
    "open_loop",
    "results_of",
    "returned_hint",
    "runs_that_are",
    "store_of",
    "taken_hint",
    "verdict_of",
]

_log = logging.getLogger("loopguard")


class _Pending:
    """Stands for a state that is still to be read from the journal."""

    def __repr__(self) -> str:
        return "the recorded state"


PENDING: Any = _Pending()
_UNFINISHED = frozenset({StopReason.WAITING, StopReason.CANCELLED, StopReason.ERROR, None})
"""Ends after which a run with the same id goes on instead of returning its result."""


def store_of(options: LoopOptions) -> Any:
    """Where runs of this loop are kept, or None."""
    if options.store is not None:
        return options.store
    if settings.store is None and not os.environ.get("LOOPGUARD_STORE"):
        return None  # the commonest case needs nothing of the journal
    from loopguard.journal._open import default_store

    return default_store()


def open_loop(loop: LoopRun, store: Any, *, resume: bool) -> bool:
    """Open the loop's journal, or find its place in the one around it; True if its result is there already."""
    run = loop.run
    codec = loop.codec(0)
    if run.recorder is None:
        from loopguard.journal._open import keep

        create = not resume
        if create:
            codec.encode(loop.initial)  # a state that can't be written is an error before anything is
        recorder: Recorder = keep(store, settings.durability, run, create=create)
        try:
            return _begin(loop, recorder, codec, resume)
        except BaseException:
            ended = recorder.story.root.ended if recorder.story.root is not None else None
            recorder.close(str(ended.stop_reason) if ended is not None else "error")
            raise
    recorder = run.recorder
    digest = _digest(loop.initial, codec)
    place = recorder.recall.place_of(run, digest)
    recorded = recorder.recall.recorded_run(place, run.name, digest)
    if recorded is not None:
        run._id = recorded.started.run_id
    recorder.describe(run, codec)
    run.place = {**place, **_told(loop, digest)}
    if recorded is None:
        return False
    _check_steps(loop, recorded)
    if recorded.ended is not None and not recorded.ended.raised and recorded.ended.stop_reason not in _UNFINISHED:
        recorder.recall.consume_run(run.id, None)
        loop.outcome = _result(loop, recorded)
        return True
    under_way = recorded.under_way
    recorder.recall.consume_run(run.id, under_way.number if under_way is not None else 1)
    _restore(loop, recorded)
    return False


def _begin(loop: LoopRun, recorder: Recorder, codec: Codec, resume: bool) -> bool:
    run, story = loop.run, recorder.story
    recorded = story.root
    digest = None if resume else _digest(loop.initial, codec)
    if recorded is not None:
        if recorded.started.name != run.name:
            raise RunConflict(f"the run {run.id!r} is one of {recorded.started.name!r}, not of {run.name!r}")
        if story.redacted:
            raise CheckpointError(
                f"the run {run.id!r} can't be resumed, nor its result be read again: its payloads were redacted before "
                f"they were stored (redact_payloads=True), and what was masked is gone. Look at it with "
                f"loopguard.journal, and start another run under another id"
            )
        if digest is not None and recorded.started.digest != digest:
            raise RunConflict(
                f"the run {run.id!r} was started with another state: resume it without one, {run.name}.resume(run_id), "
                f"or give this one another id"
            )
        if resume:
            value = recorded.started.value
            loop.initial = None if value is None else codec.decode(value.text())
            digest = recorded.started.digest
        _check_steps(loop, recorded)
        if _is_over(loop, recorded, resume):
            assert recorded.ended is not None
            loop.outcome = _result(loop, recorded)
            recorder.close(str(recorded.ended.stop_reason))
            return True
    elif resume:
        # its first event was never written: there is no state to begin with
        raise RunConflict(f"the run {run.id!r} was begun, but nothing of it was written: start it again with its state")
    recorder.describe(run, codec)
    recorder.questions.key = key_of(run.guards)
    run.recorder = recorder
    run.listeners = (recorder.record, *run.listeners)
    run.place = _told(loop, digest)
    code = run.place["code"]
    loop.recorder = recorder
    if recorded is not None:
        ended = recorded.ended
        if story.code != code:
            _log.warning("the code of %s has changed since the run %s was begun", run.name, run.id)
        run.emit(events.RunResumed, code=code)
        story.add(events.RunResumed(run_id=run.id, at=time.time(), code=code))
        recorder.questions.collect(run)
        run.raised = {**story.raised, **run.raised}
        _restore(loop, recorded)
        run.started_at -= story.elapsed
        if run.deadline is not None:
            run.deadline -= story.elapsed
        under_way = recorded.under_way
        recorder.recall.resume(
            under_way.number if under_way is not None and under_way.returned is None else None, ended
        )
    return False


def _is_over(loop: LoopRun, recorded: RunStory, resume: bool) -> bool:
    ended = recorded.ended
    if ended is None or ended.stop_reason in _UNFINISHED:
        return False
    if not resume:
        return True
    if ended.stop_reason is StopReason.MAX_ITERATIONS:
        return loop.options.max <= ended.iterations
    return _completed(loop, ended.stop_reason)


def _completed(loop: LoopRun, reason: StopReason | None) -> bool:
    done = (StopReason.UNTIL, StopReason.UNTIL_LLM, StopReason.EVALUATED)
    return reason in done or (reason is StopReason.MAX_ITERATIONS and not loop.options.conditional)


def _digest(value: Any, codec: Codec) -> str:
    """Equal for states that are the same to every process."""
    digest, canonical = strict(value)
    return digest.hex() if canonical else hashlib.sha256(codec.encode(value)).hexdigest()


def _told(loop: LoopRun, digest: str | None) -> dict[str, Any]:
    """What the run's first event says of what it runs, and with what."""
    options = loop.options
    told = {"digest": digest, "value": loop.initial, "code": code_of(options)}
    return told if options.kind == "loop" else {**told, "steps": tuple(body.name for body in options.bodies)}


def _check_steps(loop: LoopRun, recorded: RunStory) -> None:
    """RunConflict if the flow has other steps by now: nobody could tell where the run stands in them."""
    before = recorded.started.steps
    now = tuple(body.name for body in loop.options.bodies) if loop.options.kind == "flow" else None
    if before == now:
        return
    old, new = before or (), now or ()
    changes = [f"{name!r} is gone" for name in old if name not in new]
    changes += [f"{name!r} is new" for name in new if name not in old]
    raise RunConflict(
        f"the run {loop.run.id!r} of {loop.run.name!r} was begun with other steps "
        f"({', '.join(changes) or 'their order has changed'}): {', '.join(old) or 'none'}; now they are "
        f"{', '.join(new) or 'none'}. Resume it with the steps that it was begun with, or start another run"
    )


def codec_of(options: LoopOptions, done: int) -> Codec:
    """How the state is written that so many accepted iterations came to.

    Of a loop: by the annotations of its parameter and of what it returns. Of a flow: by what the step before it
    returns, and the next one takes; where neither says, as the state before.
    """
    from loopguard.journal._codec import codec_for

    bodies = options.bodies
    if options.kind == "loop":
        found = [hint for hint in (taken_hint(options), returned_hint(options)) if hint is not None]
    else:
        found = [returned_hint(bodies[done - 1])] if done else []
        found += [taken_hint(bodies[done])] if done < len(bodies) else []
        if done and all(hint is None for hint in found):
            return codec_of(options, done - 1)
        # where one of them says nothing, anything may come: last, since pydantic takes the first that fits as well
        open_end = [] if found and all(hint is not None and hint is not Any for hint in found) else [Any]
        parsed = [each.type for each in bodies[done - 1].evaluators if isinstance(each, Matches)] if done else []
        known = [hint for hint in (*found, *parsed) if hint is not None and hint is not Any]
        found = [hint for hint in known if not isinstance(hint, dict)] + open_end
    hints = [hint for index, hint in enumerate(found) if hint not in found[:index]]
    try:
        return codec_for(functools.reduce(operator.or_, hints) if hints else Any)
    except TypeError:  # not everything that stands in an annotation can be joined
        return codec_for(hints[-1])


def taken_hint(body: Body) -> Any:
    """The annotation of the parameter that carries the state, or None."""
    from loopguard.journal._codec import hints_of

    inner = getattr(body.fn, "_options", None)
    if isinstance(inner, LoopOptions):  # a loop or a flow is the step
        return taken_hint(inner.bodies[0])
    parameter = body.state_parameter(body.takes_self and "self" in body.signature.parameters)
    return hints_of(body.fn).get(parameter.name) if parameter is not None else None


def returned_hint(body: Body) -> Any:
    """The annotation of what it returns, or None."""
    from loopguard.journal._codec import hints_of

    inner = getattr(body.fn, "_options", None)
    if isinstance(inner, LoopOptions):
        return returned_hint(inner.bodies[-1])
    return body.fn if isinstance(body.fn, type) else hints_of(body.fn).get("return")


def code_of(options: LoopOptions) -> str | None:
    """A short text that changes with the code of what is run."""
    codes = [_code_of(body.fn) for body in options.bodies]
    return codes[0] if len(codes) == 1 else hashlib.sha256(repr(codes).encode()).hexdigest()[:16]


@functools.lru_cache(1024)
def _code_of(fn: Any) -> str | None:
    code = getattr(fn, "__code__", None)
    if code is None:
        return None
    constants = [item for item in code.co_consts if isinstance(item, str | int | float | bytes | None)]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()[:16]


# -- reading ---------------------------------------------------------------------------------------


def _restore(loop: LoopRun, recorded: RunStory) -> None:
    """Put the loop where it stood: at the beginning of its last iteration, or behind its body."""
    run = loop.run
    run.resumes = recorded.trace
    run.steps, run.refusals, run.unknown_cost = recorded.steps, recorded.refusals, recorded.unknown_cost
    for unit, exact in recorded.spent.items():
        run.cell(unit).spent = exact
    loop._set(loop.initial)
    under_way = recorded.under_way
    if under_way is None:
        return
    run.past = run.recorder.recall.past_calls(run.id, under_way.number)
    run.outcomes = run.recorder.recall.past_outcomes(run.id, under_way.number)
    before = _read_passes(loop, recorded, under_way.number)
    loop._set(loop.codec(loop.completed).decode(under_way.value.text()))
    loop.rejections = 0
    for each in before:
        loop.rejections = 0 if each.accepted else loop.rejections + 1
    if before and not before[-1].accepted and before[-1].returned is not None:
        run.rejected = loop.history[-1].value
    run.feedback = under_way.feedback
    run.iteration = under_way.number
    accepted = {each.number for each in before if each.accepted}
    run.states = [each.value for each in loop.history if each.number in accepted]
    loop.transitions = [made for made in recorded.transitions if made.iteration < under_way.number]
    loop.state = loop.transitions[-1].target if loop.transitions else TRANSITIONS[LoopState.READY, "start"]
    loop.kept = under_way


def _read_passes(loop: LoopRun, recorded: RunStory, end: int | None = None) -> list[Pass]:
    """Read what the iterations (those before number `end`) came to, into the loop's history; in order."""
    passes = [each for number, each in sorted(recorded.passes.items()) if end is None or number < end]
    loop.history.clear()
    loop.completed = 0
    for each in passes:
        if each.returned is not None:
            loop.history.append(_iteration(each, recorded, loop.codec(loop.completed + 1)))
        loop.completed += each.accepted
    return passes


def _iteration(each: Pass, recorded: RunStory, codec: Codec) -> Iteration[Any]:
    spent = {unit: exact - each.before.get(unit, 0) for unit, exact in each.after.items()}
    counted: dict[str, Any] = {unit: n // SCALE for unit, n in spent.items() if n and unit in Usage.__slots__}
    return Iteration(
        each.number,
        codec.decode((each.final or each.returned).text()),
        each.feedback,
        tuple(verdict_of(given, codec) for _, given in sorted(each.verdicts.items())),
        Usage(**counted),
        None if recorded.unknown_cost else decimal(spent.get("usd", 0)),
        each.duration,
    )


def verdict_of(given: events.VerdictGiven, codec: Codec) -> Verdict:
    """A recorded verdict; without its value where that could not be recorded."""
    verdict = given.verdict
    stored = verdict.value
    value = None if stored.lost is not None or stored.plain is None else codec.decode(stored.text())
    return Verdict(verdict.passed, verdict.reason, value)


def _result(loop: LoopRun, recorded: RunStory) -> LoopResult[Any]:
    from loopguard.journal._errors import data_of, rebuilt

    ended = recorded.ended
    assert ended is not None
    assert ended.stop_reason is not None
    _read_passes(loop, recorded)
    counted: dict[str, Any] = {unit: n // SCALE for unit, n in recorded.spent.items() if unit in Usage.__slots__}
    return LoopResult(
        value=None if ended.value is None else loop.codec(loop.completed).decode(ended.value.text()),
        stop_reason=ended.stop_reason,
        completed=_completed(loop, ended.stop_reason),
        iterations=len(loop.history),
        history=tuple(loop.history),
        transitions=tuple(recorded.transitions),
        usage=Usage(**counted),
        cost=None if recorded.unknown_cost else decimal(recorded.spent.get("usd", 0)),
        warnings=tuple(ended.warnings),
        error=None if ended.error is None else rebuilt(data_of(ended.error)),
        run_id=loop.run.id,
        name=loop.run.name,
    )


def runs_that_are(options: LoopOptions, status: str) -> list[str]:
    """The ids of this loop's runs that are pending or waiting, the oldest first."""
    from loopguard.journal._open import writer_of

    wanted = ("waiting",) if status == "waiting" else ("running", "cancelled", "error")
    runs = writer_of(needed_store(options), settings.durability).use(lambda journal: journal.runs())
    found = [run for run in runs if run.name == options.name and run.status in wanted and run.holder is None]
    return [run.run_id for run in reversed(found)]


def needed_store(options: LoopOptions) -> Any:
    """Where its runs are kept; ConfigurationError if nowhere."""
    store = store_of(options)
    if store is None:
        raise ConfigurationError(f"{options.name} has no store: give store=, or LOOPGUARD_STORE")
    return store


def results_of(options: LoopOptions, run_id: str) -> list[Any]:
    """What the accepted iterations of a run came to, in order, as far as its journal tells."""
    from loopguard.journal._book import open as open_book

    recorded = open_book(needed_store(options)).story(run_id).root
    passes = sorted(recorded.passes.items()) if recorded is not None else []
    accepted = [each for _, each in passes if each.accepted]
    return [
        codec_of(options, done).decode((each.final or each.returned).text()) for done, each in enumerate(accepted, 1)
    ]
