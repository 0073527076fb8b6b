"""dispatch: hand the state to another agent, here or behind HTTP, with what is left of the budget; and the far end."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import context

from loopguard import telemetry
from loopguard._amounts import COUNTED, decimal, decimals
from loopguard._call import ToolCall, current_call
from loopguard._guard import Guard, tool
from loopguard._json import parse_json
from loopguard._loop import Runnable
from loopguard._loop_journal import returned_hint, taken_hint
from loopguard._loop_options import Body
from loopguard._outcomes import LoopResult, StopReason, only_refusals, stop_reason_of
from loopguard._run import Run, charge
from loopguard._usage import Usage
from loopguard.budgets import Budget
from loopguard.exceptions import CheckpointError, ConfigurationError, JournalError, LoopGuardError, LoopStopped
from loopguard.redaction import check_id, redact_error, redact_text, safe_url

__all__ = ["dispatch", "receive_dispatch"]


def dispatch(
    target: str | Callable[..., Any],
    *,
    name: str | None = None,
    budget: Budget | None = None,
    output: Any = None,
    idempotent: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """A function of the state that hands it to another agent: a step of a Flow, or the body of a loop.

    ``target`` is a function, a decorated loop or a Flow, or the URL of an HTTP endpoint that `receive_dispatch`
    answers. What it comes to is the next state; a loop or flow that didn't complete raises LoopStopped.

    A URL is called as a tool, named ``name``: it passes the guardrails of the run, stands in its traces and its
    journal, and what is left of its budgets is reserved while the far end works, is its ceiling, and settled at what
    it reports. Where several are called at once, say with ``budget`` what each may have at most.

    - ``output``: the type that a URL's answer is read as; by default it is plain JSON data.
    - ``idempotent``: the far end keeps a journal, so that it can be asked again, under the same id, after this process
      died; otherwise the run then waits until a person says what happened.
    - ``headers``: sent along with the request, which is a POST of ``{state, run_id, key, budget}`` with a
      ``traceparent``.
    """
    if budget is not None and not isinstance(budget, Budget):
        raise ConfigurationError(f"dispatch(budget={budget!r}): give a Budget(…)")
    if not isinstance(target, str):
        return _hand_over(target, name, budget)
    parts = urlsplit(target)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"dispatch({safe_url(target)!r}): give a function, a loop, a flow, or an http URL")
    name = name or parts.path.rstrip("/").rpartition("/")[2] or parts.hostname
    sent = dict(headers or {})

    @tool(name=name, cost=lambda call: _left(call, budget), idempotent=idempotent)
    def post(state: Any) -> Any:
        return _post(target, name, state, output, budget, sent)

    def handed(state: Any = None) -> Any:
        return post(state)

    handed.__name__ = handed.__qualname__ = name
    handed.__annotations__ = {} if output is None else {"return": output}
    return handed


def _hand_over(target: Any, name: str | None, budget: Budget | None) -> Callable[..., Any]:
    body = Body(target, "dispatch", name)
    run = target.run if isinstance(body.fn, Runnable) else None
    limited: Callable[[], Any] = contextlib.nullcontext
    if budget is not None:
        guard = Guard(budget)
        limited = lambda: guard.scope(body.name)  # noqa: E731  # the other way to make a context manager

    def handed(state: Any = None) -> Any:
        with limited():
            return target(state) if run is None else _value(run(state))

    async def handed_async(state: Any = None) -> Any:
        with limited():
            return await target(state) if run is None else _value(await run(state))

    fn = handed_async if body.is_async else handed
    fn.__name__ = fn.__qualname__ = body.name
    hints = {"state": taken_hint(body), "return": returned_hint(body)}
    fn.__annotations__ = {key: hint for key, hint in hints.items() if hint is not None}
    return fn


def _value(result: LoopResult[Any]) -> Any:
    if not result.completed:
        raise LoopStopped(result) from result.error
    return result.value


# -- the near end ----------------------------------------------------------------------------------


def _left(call: ToolCall, budget: Budget | None) -> dict[str, Decimal]:
    """What the far end may spend: what is left here, and no more than its own budget."""
    return {unit: left for unit, left in _ceilings(call.run, budget).items() if unit not in COUNTED}


def _ceilings(run: Run, budget: Budget | None) -> dict[str, Decimal]:
    limits = {unit: decimal(exact) for unit, exact in budget.limits.items()} if budget is not None else {}
    units = {cap.unit for one in run.chain for cap in one.caps if not cap.partial} | set(limits)
    for unit in units:
        left = run.remaining(unit)
        if left is not None:
            limits[unit] = min(left, limits.get(unit, left))
    return limits


def _post(url: str, name: str, state: Any, output: Any, budget: Budget | None, headers: Mapping[str, str]) -> Any:
    """Ask the far end, and account for what it spent."""
    import httpx2
    from pydantic_core import to_json

    from loopguard.journal._codec import codec_for

    call = current_call()
    assert call is not None  # it is the tool's body
    run, reserved = call.run, decimals(call.amounts)
    counted = {unit: left for unit, left in _ceilings(run, budget).items() if unit in COUNTED}
    ceilings = {**reserved, **({"tool_calls": min(counted.values())} if counted else {})}
    told = {
        "state": state,
        "run_id": run.id,
        "key": call.idempotency_key,
        "budget": {unit: f"{left:f}" for unit, left in ceilings.items()},
    }
    sent = {"content-type": "application/json", **headers}
    telemetry.inject(sent)
    try:
        answer = httpx2.post(
            url, content=to_json(told), headers=sent, timeout=httpx2.Timeout(_seconds(run), connect=10)
        )
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol):
        raise  # it never heard of it
    except httpx2.HTTPError:
        charge(**reserved)  # nobody knows what it has spent
        raise
    try:
        answer.raise_for_status()
        reply = _read(answer.text)
        spent: dict[str, Any] = {unit: Decimal(amount) for unit, amount in reply["spent"].items()}
        charge(**{"usd": 0, **spent})
    except (httpx2.HTTPError, ValueError, ArithmeticError, KeyError, TypeError, AttributeError):
        charge(**({"usd": 0} if answer.is_client_error else reserved))  # it was refused, or nobody knows
        text = redact_text(answer.text[:200])
        raise LoopGuardError(f"{safe_url(url)} answered {answer.status_code}, and no result: {text}") from None
    if reply.get("unknown_cost"):
        for one in run.chain:
            one.unknown_cost = True
    if reply.get("error") is not None:
        raise LoopGuardError(f"{name} failed: {reply['error']}")
    if reply.get("completed") is not True:
        raise LoopStopped(_stopped(name, reply))
    found = reply.get("state")
    return found if output is None else codec_for(output).decode(to_json(found))


def _seconds(run: Run) -> float | None:
    """How long the far end may take."""
    ends = [one.deadline for one in run.chain if one.deadline is not None]
    return max(0.001, min(ends) - time.monotonic()) if ends else None


def _stopped(name: str, reply: Mapping[str, Any]) -> LoopResult[Any]:
    reason = next((each for each in StopReason if each == reply.get("stop_reason")), StopReason.ERROR)
    told = reply.get("iterations")
    iterations = told if isinstance(told, int) else 0
    return LoopResult(reply.get("state"), reason, False, iterations, run_id=str(reply.get("run_id", "")), name=name)


# -- the far end -----------------------------------------------------------------------------------


def receive_dispatch(target: Callable[..., Any], body: bytes | str, headers: Mapping[str, str]) -> Any:
    """Answer a POST that `dispatch` sent to this process: run ``target`` with the state, as a child of the run there.

    For the handler of any HTTP server: ``body`` and ``headers`` are the request's, and what is returned (to be
    awaited, for an async target) is a dict that is sent back as JSON, with status 200, whatever came of the run.

    ``target``: a function, a decorated loop or a Flow. Its trace goes on from the caller's. It may spend what the
    caller has left, under budgets of its own, and reports what it spent. The run of a loop or flow has an id that
    begins with the caller's: with a store, the same request is answered from its journal the second time.

    Raises ConfigurationError (a ValueError) for a request that isn't one: answer it with 400.
    """
    received = _Received(target, body, headers)
    return received.answer_async() if received.body.is_async else received.answer()


class _Received:
    """One request."""

    def __init__(self, target: Any, body: bytes | str, headers: Mapping[str, str]) -> None:
        self.body = Body(target, "receive_dispatch", None)
        self.target = target
        self.headers = headers
        try:
            request = _read(body.decode() if isinstance(body, bytes) else body)
            parent, key, left = check_id(request["run_id"], "run_id"), str(request["key"]), request["budget"]
            ceilings: dict[str, Any] = {unit: Decimal(amount) for unit, amount in left.items()}
            self.guard = Guard(Budget(**ceilings))
            self.state = self._state(request["state"])
            self.run_id = f"{parent[:160]}/{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        except (KeyError, TypeError, AttributeError, ArithmeticError, ValueError, JournalError) as exc:
            raise ConfigurationError(f"receive_dispatch: that is no request of dispatch: {exc}") from exc
        self.run: Run | None = None
        self.outcome: Any = None
        self.error: Exception | None = None

    def _state(self, plain: Any) -> Any:
        from pydantic_core import to_json

        from loopguard.journal._codec import codec_for

        return codec_for(taken_hint(self.body) or Any).decode(to_json(plain))

    def answer(self) -> dict[str, Any]:
        with self._child():
            self.outcome = self._begin()
        return self._reply()

    async def answer_async(self) -> dict[str, Any]:
        with self._child():
            self.outcome = await self._begin()
        return self._reply()

    def _begin(self) -> Any:
        if isinstance(self.target, Runnable):
            return self.target.run(self.state, run_id=self.run_id)
        return self.target(self.state)

    @contextlib.contextmanager
    def _child(self) -> Iterator[None]:
        """The scope that the caller's trace and budget stand on; it keeps what was raised."""
        token = context.attach(telemetry.extract(self.headers))
        try:
            with self.guard.scope(self.body.name) as self.run:
                yield
        except Exception as exc:  # the target is the user's: the caller has to know what it spent all the same
            self.error = exc
        finally:
            context.detach(token)

    def _reply(self) -> dict[str, Any]:
        from loopguard.journal._codec import codec_for, parsed, shown

        run, outcome = self.run, self.outcome
        assert run is not None
        spent = {unit: cell.spent for unit, cell in run.cells.items()}
        refused = self.error is not None and only_refusals(self.error) is not None
        reply: dict[str, Any] = {
            "run_id": run.id,
            "completed": self.error is None,
            "unknown_cost": run.cost is None,
            "spent": {unit: f"{amount:f}" for unit, amount in decimals(spent).items()},
            "error": None if self.error is None or refused else redact_error(self.error),
            "stop_reason": stop_reason_of(self.error),
            "state": None,
        }
        if isinstance(outcome, LoopResult):
            reply |= {
                "run_id": outcome.run_id,
                "completed": outcome.completed,
                "stop_reason": str(outcome.stop_reason),
                "iterations": outcome.iterations,
                "unknown_cost": run.cost is None or outcome.cost is None,
                "spent": _more(reply["spent"], outcome),
            }
            outcome = outcome.value
        text = shown(outcome)
        if reply["completed"]:
            try:
                text = codec_for(returned_hint(self.body) or Any).encode(outcome)
            except CheckpointError as exc:  # the caller has to know what it spent, here too
                reply |= {"completed": False, "error": redact_error(exc), "stop_reason": str(StopReason.ERROR)}
        reply["state"] = parsed(text)
        return reply


def _more(spent: Mapping[str, str], outcome: LoopResult[Any]) -> dict[str, str]:
    """What all processes that worked on a run spent, not only this one."""
    known = {field.name: getattr(outcome.usage, field.name) for field in fields(Usage)}
    whole = {"usd": outcome.cost, **{unit: n for unit, n in known.items() if isinstance(n, int)}}
    least = {unit: Decimal(amount) for unit, amount in whole.items() if amount}
    return {unit: f"{max(Decimal(spent.get(unit, 0)), least.get(unit, Decimal(0))):f}" for unit in {**spent, **least}}


def _read(text: str) -> dict[str, Any]:
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found
