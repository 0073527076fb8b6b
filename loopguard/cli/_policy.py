"""``what-if``: a policy over a recorded run."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from loopguard._guard import Guard
from loopguard._what_if import WhatIf
from loopguard._what_if import what_if as ask
from loopguard.budgets import Budget
from loopguard.cli import _words as words
from loopguard.cli._load import load
from loopguard.cli._options import Json, RunId, Store, opened
from loopguard.cli._output import emit, say
from loopguard.cli._resume import dollars
from loopguard.cli._runs import shown
from loopguard.exceptions import ConfigurationError
from loopguard.guardrails import LoopLimit, MaxSteps, RateLimit

__all__ = ["what_if"]


def what_if(
    run: RunId,
    max_steps: Annotated[int | None, typer.Option(min=0, help="MaxSteps: tool calls in the run.")] = None,
    usd: Annotated[str | None, typer.Option(help="Budget: USD.")] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help="Budget: tokens.")] = None,
    model_calls: Annotated[int | None, typer.Option(min=0, help="Budget: model calls.")] = None,
    loop_limit: Annotated[
        int | None, typer.Option(min=0, help="LoopLimit: repeats while nothing new happens; 3 by default, 0 for none.")
    ] = None,
    rate: Annotated[str | None, typer.Option(metavar="N/SECONDS", help="RateLimit of each tool: 10/60.")] = None,
    guard: Annotated[str | None, typer.Option(metavar="MODULE:GUARD", help="A Guard of your program instead.")] = None,
    store: Store = None,
    json: Json = False,
) -> None:
    """Say where a policy would have stopped a recorded run, and what that would have saved. Nothing is run."""
    limits = _limits(max_steps, usd, tokens, model_calls, loop_limit, rate)
    if bool(limits) == (guard is not None):
        raise ConfigurationError("name a policy: limits such as --max-steps 20 and --usd 0.50, or a --guard")
    policy = Guard(*limits) if guard is None else load(guard, "Guard")
    said = ask(opened(store).events(run), policy)
    if json:
        emit(
            {
                "run_id": said.run_id,
                "policy": repr(policy),
                "calls": said.calls,
                "all_calls": said.all_calls,
                "spent": said.spent,
                "saved": said.saved,
                "refusals": [shown(refusal) for refusal in said.refusals],
            }
        )
    else:
        _tell(said, policy)


def _limits(
    max_steps: int | None,
    usd: str | None,
    tokens: int | None,
    model_calls: int | None,
    loop_limit: int | None,
    rate: str | None,
) -> list[Any]:
    limits: list[Any] = []
    if rate is not None:
        limits.append(_rate(rate))
    if max_steps is not None:
        limits.append(MaxSteps(max_steps))
    if loop_limit is not None:
        limits.append(LoopLimit(loop_limit))
    if any(cap is not None for cap in (usd, tokens, model_calls)):
        spent = None if usd is None else dollars(usd, "--usd")
        limits.append(Budget(usd=spent, tokens=tokens, model_calls=model_calls))
    return limits


def _rate(text: str) -> RateLimit:
    number, slash, seconds = text.partition("/")
    try:
        return RateLimit(int(number), float(seconds) if slash else 1.0)
    except ValueError:
        raise ConfigurationError(f"--rate {text!r}: give calls and seconds, such as 10/60") from None


def _tell(said: WhatIf, policy: Guard) -> None:
    say(f"{words.text(said.name, 200)} {words.text(said.run_id, 200)} under {words.text(policy, None)}:")
    first = said.first
    if first is None:
        say(f"  goes through: {said.all_calls:,} call{'' if said.all_calls == 1 else 's'}, {_paid(said.spent)}")
        return
    iteration = f", in iteration {first.iteration}" if first.iteration else ""
    say(f"  refused first: call {said.calls + 1:,} of {said.all_calls:,}{iteration}")
    say(f"    {words.called(first.tool, first.arguments, 200)}")
    say(f"    {words.text(first.code, 200)}: {words.text(first.reason, None)}")
    say(f"  spent by then: {_paid(said.spent)}")
    say(f"  saved, had it ended there: {_paid(said.saved)}")
    codes = Counter(refusal.code for refusal in said.refusals)
    say(f"  refusals, had it gone on: {', '.join(f'{number:,} {code}' for code, number in codes.items())}")


def _paid(spent: Any) -> str:
    return ", ".join(words.amounts(spent)) or "nothing"
