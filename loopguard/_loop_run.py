"""One run of a loop or a flow: its iterations, its states, and what it comes to."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any, TypeGuard

from loopguard import _events as events
from loopguard._amounts import SCALE, decimal
from loopguard._call import ASYNC, SYNC
from loopguard._guard import Guard
from loopguard._loop_journal import codec_of, open_loop, store_of, verdict_of
from loopguard._loop_options import Body, LoopOptions, name_of
from loopguard._outcomes import (
    TRANSITIONS,
    Iteration,
    LoopResult,
    LoopState,
    StopReason,
    Transition,
    Verdict,
    annotate,
    attach_result,
    only_refusals,
    read_verdict,
    stop_reason_of,
)
from loopguard._pipeline import Ask, Effect, EffectTimeout, Invoke, Steps
from loopguard._run import Run, current_run
from loopguard._threads import cancelled_after
from loopguard._usage import Usage
from loopguard.budgets import Budget
from loopguard.evaluators import BaseEvaluator
from loopguard.exceptions import (
    ConfigurationError,
    EvaluationFailed,
    JournalError,
    JudgeError,
    LoopHalted,
    LoopStopped,
    ToolCallRefused,
)
from loopguard.judges import AnthropicJudge
from loopguard.redaction import redact_error
from loopguard.telemetry._runs import IterationSpan, RunSpan
from loopguard.telemetry._spans import provider_is_set

__all__ = ["LoopRun"]

_log = logging.getLogger("loopguard")


class _Body:
    """The body of one iteration, as the drivers invoke it."""

    __slots__ = ("args", "fn", "kwargs", "name")

    def __init__(self, name: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        self.fn = fn
        self.args = args
        self.kwargs = kwargs


class LoopRun:
    """One run of a loop, from its first iteration to its result.

    As a context manager it is the run's time under way: what escapes from it is turned into the result
    where it ends just this loop.
    """

    def __init__(
        self,
        options: LoopOptions,
        fn: Any,
        instance: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_id: str | None = None,
        resume: bool = False,
        budget: Budget | None = None,
    ) -> None:
        self.options = options
        self.resume = resume
        self.fn = fn
        self.args = list(args)
        self.kwargs = dict(kwargs)
        if options.feedback is not None:
            self.kwargs.setdefault("feedback", options.no_feedback)
        parameter = options.state_parameter(instance is not None)
        if parameter is not None and parameter.kind is parameter.VAR_POSITIONAL and not args:
            parameter = None  # nothing was given that could be the state
        self.parameter = parameter
        self.place: int | str = 0
        if parameter is not None:
            self.place = self._find(parameter, instance is not None)
        self.value: Any = self._get() if parameter is not None else None
        self.initial = self.value
        self.run = Run(
            options.name,
            current_run(),
            options.guards if budget is None else (*options.guards, Guard(budget)),
            kind=options.kind,
            max=options.max if options.kind == "loop" else None,
            timeout=options.timeout,
            id=run_id,
        )
        if budget is not None and budget.per == "run":
            self.run.raised = budget.limits
        self.history: list[Iteration[Any]] = []
        self.run.history = self.history
        self.transitions: list[Transition] = []
        self.state = LoopState.READY
        self.completed = 0
        self.satisfied: bool | None = None
        self.undecided = 0
        self.rejections = 0
        self.outcome: LoopResult[Any] | None = None
        self.token: Any = None
        self.reason: StopReason | None = None
        self.recorder: Any = None
        """What keeps this run in a journal, where it is the outermost that is kept there."""
        self.kept: Any = None
        """What the journal knows of the iteration that is run again."""
        self.verdicts: Mapping[int, Any] = {}
        """Those of them that were given already."""
        self.codecs: dict[int, Any] = {}

    def _find(self, parameter: inspect.Parameter, bound: bool) -> int | str:
        """Where the state stands among the arguments; an omitted one is put there with its default."""
        parameters = list(self.options.signature.parameters.values())[bound and self.options.takes_self :]
        positional = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        position = positional.index(parameter) if parameter in positional else -1
        if 0 <= position < len(self.args):
            return position
        if parameter.name not in self.kwargs:
            if parameter.default is parameter.empty:
                self.fn_binding_error()
            if parameter.kind is parameter.POSITIONAL_ONLY:
                self.args += [p.default for p in positional[len(self.args) : position + 1]]
                return position
            self.kwargs[parameter.name] = parameter.default
        return parameter.name

    def fn_binding_error(self) -> None:
        """The function's own TypeError, as a plain call of it would raise."""
        try:
            inspect.signature(self.fn).bind(*self.args, **self.kwargs)
        except TypeError as exc:
            raise TypeError(f"{self.options.name}() {exc}") from None

    def _get(self) -> Any:
        return self.args[self.place] if isinstance(self.place, int) else self.kwargs[self.place]

    def _set(self, value: Any) -> None:
        self.value = value
        if isinstance(self.place, int):
            if self.parameter is not None:
                self.args[self.place] = value
        else:
            self.kwargs[self.place] = value

    # -- its journal -----------------------------------------------------------------------------

    @property
    def store(self) -> Any:
        """Where a journal is to be opened before the run begins; None where it has none, or stands in one."""
        return None if self.run.recorder is not None else store_of(self.options)

    def open(self, store: Any) -> bool:
        """Open the journal; True if the result is there already."""
        if self.resume and store is None:
            raise ConfigurationError(
                f"{self.run.name}: there is no store to resume from: give store=, or LOOPGUARD_STORE"
            )
        if store is None and self.run.recorder is None:
            return False
        return open_loop(self, store, resume=self.resume)

    def codec(self, done: int) -> Any:
        """How the state is written that so many accepted iterations came to."""
        done = done if self.options.kind == "flow" else 0
        if done not in self.codecs:
            self.codecs[done] = codec_of(self.options, done)
        return self.codecs[done]

    def writes(self, done: int) -> None:
        """What is recorded of the state from now on is what so many accepted iterations come to."""
        if self.run.recorder is not None:
            self.run.recorder.describe(self.run, self.codec(done))

    def committed(self) -> Steps:
        """Wait until what happened is in the journal, if there is one."""
        recorder = self.run.recorder
        if recorder is not None:
            yield recorder.commit(ASYNC if self.options.is_async else SYNC)

    def ended(self) -> None:
        """After the end: the last event is committed before the outcome is handed on, the journal is let go of."""
        if self.recorder is not None:
            try:
                if self.options.delete_on_success and self.outcome is not None and self.outcome.completed:
                    self.recorder.delete()
            finally:
                self.recorder.close(str(self.reason or StopReason.ERROR))
        elif self.run.recorder is not None:
            self.run.recorder.settled()

    def never_begun(self) -> None:
        """It was cancelled while its journal was opened: that is let go of, so that somebody else can take it up."""
        if self.recorder is not None:
            with contextlib.suppress(JournalError):  # it is being cancelled; the lease runs out
                self.recorder.close(str(StopReason.CANCELLED))

    def keep(self, exc: JournalError) -> None:
        """The result couldn't be written down, but `result_of(exc)` has it."""
        if self.outcome is not None:
            attach_result(exc, self.outcome, [run.id for run in self.run.chain])

    def recorded_outcome(self) -> LoopResult[Any]:
        """The result that the journal holds, handed over as this loop does."""
        result = self.outcome
        assert result is not None
        if result.stop_reason is StopReason.EVALUATION_FAILED:
            if self.options.fallback is None and self.options.on_failure == "raise":
                raise EvaluationFailed(result)
        elif not result.completed and result.stop_reason is StopReason.MAX_ITERATIONS:
            if self.options.on_limit == "raise":
                raise LoopStopped(result)
        return result

    # -- its time under way ----------------------------------------------------------------------

    def __enter__(self) -> None:
        if provider_is_set():
            self.run.span = RunSpan(self.run)
        self.token = self.run.enter()

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> bool:
        raised = exc
        try:
            if exc is not None and not self.is_own(exc):
                self.outcome = self.stopped(exc)
                if self.outcome is not None:
                    raised = None
                    return True
                self.failed(exc)
            return False
        except BaseException as later:  # on_transition is the user's
            raised = later
            raise
        finally:
            self.close(raised)

    def close(self, raised: BaseException | None) -> None:
        """Leave the run and end its span."""
        run = self.run
        self.writes(self.completed)
        outcome = raised.result if self.is_own(raised) else self.outcome if raised is None else None
        if outcome is not None:
            reason: StopReason | None = outcome.stop_reason
            run.leave(self.token, reason, outcome.value, outcome.error, outcome.iterations)
        else:
            reason = stop_reason_of(raised)
            run.leave(self.token, reason, self.value, raised, len(self.history), raised=True)
        self.reason = reason
        if run.span is not None:
            run.span.end(run, reason, None if raised is None or only_refusals(raised) is not None else raised)

    def is_own(self, raised: BaseException | None) -> TypeGuard[LoopStopped]:
        """Whether this loop itself raises it, to say how it ended."""
        return isinstance(raised, LoopStopped) and raised.result.run_id == self.run.id

    def plain_value(self) -> Any:
        """What a plain call returns: never the untouched argument in the guise of a result."""
        result = self.outcome
        assert result is not None
        if result.stop_reason is StopReason.WAITING:
            text = f"{result.name} waits for a person, and goes on with {result.name}.resume({result.run_id!r})"
            raise LoopStopped(result, text) from result.error
        if self.options.kind == "flow" and not result.completed:
            raise LoopStopped(result) from result.error
        if not self.completed and result.stop_reason is not StopReason.EVALUATION_FAILED:
            text = f"{result.name} was stopped before its first iteration was completed: {result}"
            raise LoopStopped(result, text) from result.error
        return result.value

    # -- its iterations --------------------------------------------------------------------------

    def move(self, trigger: str) -> None:
        """Go from state to state, by the table of legal transitions."""
        source = self.state
        self.state = TRANSITIONS[source, trigger]
        made = Transition(source, self.state, trigger, self.run.iteration, time.time())
        self.transitions.append(made)
        self.run.emit(events.Transitioned, transition=made)
        if self.options.on_transition is not None:
            self.options.on_transition(made)

    def steps(self) -> Steps:
        """The iterations, as effects; evaluates to what the loop came to by its own rules."""
        options, run = self.options, self.run
        for each in (options.judge, *(one for body in options.bodies for one in body.evaluators)):
            if isinstance(each, AnthropicJudge | BaseEvaluator):
                yield Ask(each.prepare, blocking=True)
        if self.kept is None:
            self.move("start")
        while True:
            self.check_stopped()
            if self.kept is None:
                if run.iteration:
                    self.move("next")
                run.iteration += 1
            stop = yield from self.iterate()
            if stop is None and run.iteration >= options.max:
                self.check_stopped()  # whatever swallowed it: a loop that was stopped has not come to its end
                stop = StopReason.MAX_ITERATIONS
            if stop is StopReason.EVALUATION_FAILED:
                return (yield from self.degrade())
            if stop is not None:
                return self.finish(stop)

    def iterate(self) -> Steps:
        """One iteration: the body, on_iteration, evaluators, until, the judge."""
        options, run = self.options, self.run
        body = options.body(self.completed)
        self.writes(self.completed)
        run.emit(events.IterationStarted, value=self.value, feedback=run.feedback)
        span = IterationSpan(run) if run.span is not None else None
        before = {unit: cell.spent for unit, cell in run.cells.copy().items()}  # other threads may add units
        started = time.perf_counter()
        kept, self.kept, self.verdicts = self.kept, None, {}
        if kept is not None:
            before = kept.before
            self.verdicts = kept.verdicts if kept.returned is not None else {}
        self.satisfied = None
        self.feedback = run.feedback
        completed = self.completed
        error: BaseException | None = None
        try:
            self.writes(self.completed + 1)
            if kept is not None and kept.returned is not None:
                value = self.codec(self.completed + 1).decode(kept.returned.text())
            else:
                try:
                    if body.steps is None:
                        value = yield self.invoke(body)
                    else:
                        value = yield from body.steps(run, self.value)
                except Exception as exc:
                    if not self.retries(body, exc):
                        raise
                    error = exc
                    self.retry(body, exc)
                    return None
            state = self.parameter
            if value is None and state is not None and self.value is not None and not body.may_return_none(state):
                raise ConfigurationError(
                    f"{body.name} returned None: return the state, it is the next "
                    f"{'step' if options.kind == 'flow' else 'iteration'}'s argument (or annotate that None is meant)"
                )
            if run.recorder is not None and (kept is None or kept.returned is None):
                self.check_parked()
                duration = max(0.0, time.perf_counter() - started)
                run.emit(events.IterationReturned, value=value, duration=duration)
                yield from self.committed()
            self.record(value, before, started)
            if not body.evaluators:
                self.accept(value)
            if options.on_iteration is not None:
                yield Ask(options.on_iteration, value, run.iteration)
            run.feedback = None
            if body.evaluators:
                passed, value = yield from self.evaluate(body, value, span, before, started)
                if not passed:
                    return self.reject(body, value)
                self.accept(value)
            if options.over(self.completed):
                self.satisfied = True
                return StopReason.UNTIL
            if options.evaluates_alone:
                self.satisfied = True
                return StopReason.EVALUATED
            if options.until is not None:
                self.satisfied = bool((yield Ask(options.until, value)))
                if self.satisfied:
                    return StopReason.UNTIL
            if options.question is not None:
                verdict = yield from self.ask_judge(value)
                yield from self.note(verdict, span, options.judge, before, started)
                if self.undecided == 3:
                    raise JudgeError(f"the judge of {run.name!r} was undecided three times in a row: {verdict.reason}")
                self.satisfied = verdict.passed is True
                if self.satisfied:
                    return StopReason.UNTIL_LLM
            return None
        except BaseException as exc:
            error = exc
            raise
        finally:
            if self.history and self.history[-1].number == run.iteration:
                last = self.history[-1]
                run.emit(
                    events.IterationEnded,
                    value=last.value,
                    accepted=self.completed > completed,
                    duration=max(0.0, time.perf_counter() - started),
                )
            if span is not None:
                span.end(self.satisfied, None if error is None or only_refusals(error) is not None else error)

    def invoke(self, body: Body) -> Invoke:
        """The effect that runs the body: with the arguments of the loop, or as a step of a flow with its state."""
        run, args, kwargs = self.run, tuple(self.args), self.kwargs
        fn = self.fn
        if body.call is not None:
            fn, args = body.call, args if body.state_parameter(False) is not None else ()
        if body.feedback is not None and (run.feedback is not None or body.call is not None):
            kwargs = {**kwargs, "feedback": body.no_feedback if run.feedback is None else run.feedback}
        if self.options.is_async and run.deadline is not None:
            fn = functools.partial(_within_deadline, run, fn)
        return Invoke(_Body(body.name, fn, args, kwargs))

    def retries(self, body: Body, exc: Exception) -> bool:
        """Whether an exception of the body counts as a rejected value, and there is an attempt left."""
        if not body.retries_errors or isinstance(exc, ConfigurationError | JournalError):
            return False
        return only_refusals(exc) is None and self.rejections < body.max_retries

    def retry(self, body: Body, exc: Exception) -> None:
        """The body failed: once more with the same argument and the reason."""
        self.move("reject")
        self.rejections += 1
        self.run.rejected = None
        self.run.feedback = f"{body.name} failed: {redact_error(exc)}"

    def accept(self, value: Any) -> None:
        """The iteration counts: its value is the state."""
        self._set(value)
        self.completed += 1
        self.rejections = 0
        self.run.rejected = None
        if self.history[-1].value is not value:  # an evaluator parsed it
            self.history[-1] = replace(self.history[-1], value=value)

    def reject(self, body: Body, value: Any) -> StopReason | None:
        """The evaluators said no: once more with the same argument and the reason, or it is over."""
        options = self.options
        self.move("reject")
        self.run.rejected = value
        self.rejections += 1
        if options.on_reject == "continue":
            self._set(value)
        if self.rejections > body.max_retries or self.run.iteration >= options.max:
            return StopReason.EVALUATION_FAILED
        return None

    def evaluate(
        self, body: Body, value: Any, span: IterationSpan | None, before: Mapping[str, int], started: float
    ) -> Generator[Effect, Any, tuple[bool, Any]]:
        """Ask the evaluators in order, each about what the one before it parsed: (passed, the value)."""
        raw = value
        for evaluator in body.evaluators:
            name = name_of(evaluator)
            try:
                verdict = self.given() or (yield from self.consult(evaluator, value))
            except Exception as exc:
                if isinstance(exc, ToolCallRefused | ConfigurationError):
                    raise
                verdict = Verdict(False, f"{name} failed: {redact_error(exc)}")
            yield from self.note(verdict, span, evaluator, before, started)
            if verdict.passed is not True:
                self.run.feedback = verdict.reason or f"{name} rejected the value"
                return False, raw
            if verdict.value is not None:
                value = verdict.value
        return True, value

    def ask_judge(self, value: Any) -> Generator[Effect, Any, Verdict]:
        """Ask whether the loop is done. Only a clean yes is one."""
        run = self.run
        try:
            verdict = self.given() or (yield from self.consult(self.options.judge, self.options.question, value))
        except Exception as exc:  # the judge is the user's, or a network: a failure is no verdict
            if isinstance(exc, ToolCallRefused | ConfigurationError):
                raise
            verdict = Verdict(None, f"the judge failed: {redact_error(exc)}")
        run.feedback = verdict.reason if verdict.passed is False else None
        self.undecided = self.undecided + 1 if verdict.passed is None else 0
        return verdict

    def consult(self, fn: Any, *args: Any) -> Generator[Effect, Any, Verdict]:
        """What a judge or an evaluator says, within what is left of the loop's time."""
        run = self.run
        self.check_stopped()
        left = None if run.deadline is None else max(0.0, run.deadline - time.monotonic())
        try:
            said = yield Ask(fn, *args, blocking=True, timeout=left)
        except EffectTimeout:
            raise run.timed_out() from None
        return read_verdict(said, name_of(fn))

    def record(self, value: Any, before: Mapping[str, int], started: float) -> None:
        """Note what the iteration did and cost."""
        self.history.append(self.iteration(value, (), before, started))

    def note(
        self, verdict: Verdict, span: IterationSpan | None, by: Any, before: Mapping[str, int], started: float
    ) -> Steps:
        """Add a verdict to the iteration, with what it cost."""
        last = self.history[-1]
        self.run.emit(events.VerdictGiven, by=name_of(by), verdict=verdict, index=len(last.verdicts))
        if span is not None:
            span.evaluated(name_of(by), verdict)
        yield from self.committed()
        self.history[-1] = self.iteration(last.value, (*last.verdicts, verdict), before, started)

    def iteration(
        self, value: Any, verdicts: tuple[Verdict, ...], before: Mapping[str, int], started: float
    ) -> Iteration[Any]:
        """The iteration so far."""
        run = self.run
        spent = {
            unit: cell.spent - before.get(unit, 0)
            for unit, cell in run.cells.copy().items()
            if cell.spent != before.get(unit, 0)
        }
        counted: dict[str, Any] = {u: n // SCALE for u, n in spent.items() if u in _USAGE}
        usage = Usage(**counted) if counted else _NO_USAGE
        cost = None if run.unknown_cost else decimal(spent["usd"]) if "usd" in spent else _NOTHING
        duration = max(0.0, time.perf_counter() - started)
        return Iteration(run.iteration, value, self.feedback, verdicts, usage, cost, duration)

    def given(self) -> Verdict | None:
        """The next verdict, where the journal has it."""
        verdict = self.verdicts.get(len(self.history[-1].verdicts))
        if verdict is None or verdict.verdict.value.lost is not None:  # what it had parsed could not be written down
            return None
        return verdict_of(verdict, self.codec(self.completed + 1))

    def check_parked(self) -> None:
        """Raise what parks this run, though the body has swallowed it: its value isn't the iteration's."""
        if self.run.recorder.parked:
            self.check_stopped()

    def check_stopped(self) -> None:
        """Raise the refusal that ends this loop or one around it, if there is one."""
        run = self.run
        for ancestor in reversed(run.chain):
            if ancestor.halted is not None:
                raise LoopHalted(*ancestor.halted.args)
        if run.root.alarm:
            for ancestor in run.chain:
                latch = ancestor.latch
                if latch is None and ancestor.overdue():
                    latch = ancestor.timed_out()
                if latch is not None:
                    raise ToolCallRefused(
                        latch.code, latch.guardrail, run.name, latch.reason, None, None, ancestor.name, ancestor.id
                    )

    def result(self, reason: StopReason, error: BaseException | None) -> LoopResult[Any]:
        """What the loop has come to."""
        completed = reason in _DONE or (reason is StopReason.MAX_ITERATIONS and not self.options.conditional)
        run = self.run
        return LoopResult(
            value=self.value,
            stop_reason=reason,
            completed=completed,
            iterations=len(self.history),
            history=tuple(self.history),
            transitions=tuple(self.transitions),
            usage=run.usage,
            cost=run.cost,
            warnings=tuple(run.warnings),
            error=error,
            run_id=run.id,
            trace_id=run.trace_id,
            name=run.name,
        )

    def finish(self, reason: StopReason) -> LoopResult[Any]:
        """The result of a loop that ended by its own rules."""
        if reason is StopReason.MAX_ITERATIONS and self.options.conditional:
            self.move("stop")
        else:
            self.move("complete")
        result = self.result(reason, None)
        if not result.completed:
            _log.warning(
                "loop %s reached its ceiling of %d iterations without being done", self.run.name, self.options.max
            )
            if self.options.on_limit == "raise":
                raise LoopStopped(result)
        return result

    def degrade(self) -> Generator[Effect, Any, LoopResult[Any]]:
        """The evaluators never agreed: raise, or return the best there is, or the fallback's value."""
        options = self.options
        reason = StopReason.EVALUATION_FAILED
        if options.fallback is not None:
            value, what = (yield Ask(options.fallback, self.result(reason, None))), "the fallback's value"
        elif options.on_failure == "raise":
            self.move("fail")
            result = self.result(reason, None)
            step = options.body(self.completed).name
            raise EvaluationFailed(result, f"{result}: {step}: {self.run.feedback}" if options.kind == "flow" else None)
        else:
            values = [iteration.value for iteration in self.history]
            value, what = (max(values, key=options.best), "the best") if options.best else (values[-1], "the latest")
        self.move("fail")
        result = self.result(reason, None)
        warning = f"loop {self.run.name}: the evaluators rejected the last {self.rejections} values; this is {what}"
        _log.warning(warning)
        return replace(result, value=value, warnings=(*result.warnings, warning))

    def stopped(self, exc: BaseException) -> LoopResult[Any] | None:
        """The result if exc is a refusal or halt that ends just this loop; None if it must go on upwards."""
        cause = only_refusals(exc)
        if cause is None or self.state not in _UNDER_WAY or not _ends_here(self.run, cause):
            return None
        if isinstance(cause, LoopHalted):
            overdue = any(run.overdue() or _timed_out(run) for run in self.run.chain)
            reason = StopReason.TIMEOUT if overdue else StopReason.HALTED
            parked = self.run.recorder is not None and self.run.recorder.parked
            cause = cause.refusal
            if parked:  # the body swallowed what parks the run, again and again
                reason = StopReason.WAITING
        else:
            reason = StopReason.of_refusal(cause)
        self.move("stop")
        _log.warning(
            "%s %s was stopped after %d iteration%s (%s): %s",
            self.run.kind,
            self.run.name,
            self.completed,
            "" if self.completed == 1 else "s",
            reason,
            cause,
        )
        return self.result(reason, cause)

    def failed(self, exc: BaseException) -> None:
        """Leave the partial result, and where it happened, on an exception that goes on upwards."""
        if self.state in _UNDER_WAY:
            try:
                self.move("fail" if only_refusals(exc) is None else "stop")
            except Exception:  # on_transition is the user's; exc is what has to arrive
                _log.debug("on_transition failed", exc_info=True)
        result = self.result(stop_reason_of(exc) or StopReason.ERROR, exc)
        attach_result(exc, result, [run.id for run in self.run.chain])
        if isinstance(exc, Exception) and only_refusals(exc) is None:
            annotate(exc, self.options.whereabouts(self.run.iteration, self.completed, self.rejections))


_UNDER_WAY = (LoopState.RUNNING, LoopState.RETRY)
_DONE = (StopReason.UNTIL, StopReason.UNTIL_LLM, StopReason.EVALUATED)
_USAGE = frozenset(Usage.__slots__)
_NO_USAGE = Usage()
_NOTHING = Decimal(0)

_OWNED = frozenset({"max_steps", "budget", "unknown_price", "timeout", "stopped", "waiting", "uncertain"})
"""Refusals that end the outermost loop at or below the run that owns the limit; others end the nearest."""


def _ends_here(run: Run, cause: ToolCallRefused | LoopHalted) -> bool:
    if isinstance(cause, ToolCallRefused) and cause.code not in _OWNED:
        return True
    for index, ancestor in enumerate(run.chain):
        if ancestor.id == cause.run_id:
            return next(below for below in run.chain[index:] if below.kind in ("loop", "flow")) is run
    return True


def _timed_out(run: Run) -> bool:
    return run.latch is not None and run.latch.code == "timeout"


async def _within_deadline(run: Run, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Await the body, cancelled when the run's deadline passes; waits for people stop the clock."""
    loop = asyncio.get_running_loop()
    scope = asyncio.timeout(None)

    async def body() -> Any:
        aim()
        run.on_deadline_moved = lambda: loop.call_soon_threadsafe(aim)
        try:
            return await fn(*args, **kwargs)
        finally:
            run.on_deadline_moved = None

    def aim() -> None:
        if not scope.expired():
            assert run.deadline is not None
            scope.reschedule(None if run.paused else loop.time() + max(0.0, run.deadline - time.monotonic()))

    try:
        return await cancelled_after(scope, body())
    except EffectTimeout:
        raise run.timed_out() from None
