"""``resume``: going on with a run in this process."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import traceback
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

import typer

from loopguard._flow import Flow
from loopguard._outcomes import LoopResult
from loopguard.budgets import Budget
from loopguard.cli._load import load
from loopguard.cli._options import Json, RunId, Store
from loopguard.cli._output import emit, say
from loopguard.cli._runs import STOPPED
from loopguard.exceptions import ConfigurationError, JournalError, LoopGuardError
from loopguard.redaction import display, redact, redact_text

__all__ = ["dollars", "resume"]


def resume(
    target: Annotated[str, typer.Argument(metavar="MODULE:LOOP", help="The loop or flow, where Python imports it.")],
    run: RunId,
    max: Annotated[int | None, typer.Option(min=1, help="A larger ceiling of iterations.")] = None,
    usd: Annotated[str | None, typer.Option(help="A larger budget, in USD.")] = None,
    store: Store = None,
    json: Json = False,
) -> None:
    """Go on with a run that was interrupted, has waited or was stopped; exit with 3 if it doesn't complete."""
    if store is not None:
        os.environ["LOOPGUARD_STORE"] = store  # for a loop that names none itself
    looped = load(target, "loop")
    if not callable(getattr(looped, "resume", None)):
        raise ConfigurationError(f"{target} is no loop or flow: it has no resume")
    if max is not None and isinstance(looped, Flow):
        raise ConfigurationError("--max: a flow has its steps, and no ceiling of iterations")
    larger: dict[str, Any] = {} if max is None else {"max": max}
    if usd is not None:
        larger["budget"] = Budget(usd=dollars(usd, "--usd"))
    result = _resumed(looped, run, larger)
    if json:
        emit(redact({name: getattr(result, name) for name in _TOLD}))
    else:
        say(display(redact_text(str(result))))
    raise typer.Exit(0 if result.completed else STOPPED)


_TOLD = ("run_id", "name", "stop_reason", "completed", "iterations", "value", "cost", "usage", "warnings", "error")


def _resumed(looped: Any, run: str, larger: dict[str, Any]) -> LoopResult[Any]:
    try:
        result = looped.resume(run, **larger)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    except (JournalError, ConfigurationError):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except LoopGuardError as exc:
        say(f"loopguard: {display(redact_text(str(exc)), None)}", sys.stderr)
    except Exception as exc:  # what the body raises: told whole, as Python would
        say(display("".join(traceback.format_exception(exc)).rstrip(), None, multiline=True), sys.stderr)
    raise typer.Exit(STOPPED)


async def _awaited(result: Any) -> Any:
    return await result


def dollars(text: str, option: str) -> Decimal:
    """An amount as it is typed."""
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ConfigurationError(f"{option} {text!r}: give a number, such as 0.50") from None
