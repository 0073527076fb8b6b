"""The types of loopguard's seams: what plugins implement, hooks yield, and subscribers receive."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from loopguard._approval import Approval
from loopguard._config import Codec
from loopguard._events import (
    BudgetExtended,
    BudgetOverdrawn,
    BudgetWarned,
    Charged,
    Event,
    IterationEnded,
    IterationReturned,
    IterationStarted,
    ModelCalled,
    ModelReplayed,
    ModelStarted,
    QuestionAnswered,
    QuestionAsked,
    RunEnded,
    RunResumed,
    RunStarted,
    Stopped,
    ToolFinished,
    ToolRefused,
    ToolReplayed,
    ToolStarted,
    Transitioned,
    VerdictGiven,
)
from loopguard._foreign import ForeignTool
from loopguard._outcomes import Verdict
from loopguard._pipeline import Ask, BoundLimit, Effect, Hook, Invoke, Limit, Proceed, Sleep, Steps
from loopguard._tool import GuardedTool
from loopguard.budgets.ledger import Account, Balance, Entry, Lease, Ledger, ListedLedger, Shortfall, WrongWindow
from loopguard.metering.prices import PriceSource, Rates, Tariff

if TYPE_CHECKING:
    from loopguard.journal import Journal

__all__ = [
    "Account",
    "Approver",
    "Ask",
    "Balance",
    "BoundLimit",
    "BudgetExtended",
    "BudgetOverdrawn",
    "BudgetWarned",
    "Charged",
    "Codec",
    "Effect",
    "Entry",
    "Evaluator",
    "Event",
    "ForeignTool",
    "GuardedTool",
    "Hook",
    "Invoke",
    "IterationEnded",
    "IterationReturned",
    "IterationStarted",
    "Journal",
    "Judge",
    "Lease",
    "Ledger",
    "Limit",
    "ListedLedger",
    "ModelCalled",
    "ModelReplayed",
    "ModelStarted",
    "PriceSource",
    "Proceed",
    "QuestionAnswered",
    "QuestionAsked",
    "Rates",
    "RunEnded",
    "RunResumed",
    "RunStarted",
    "Shortfall",
    "Sleep",
    "Steps",
    "Stopped",
    "Tariff",
    "ToolFinished",
    "ToolRefused",
    "ToolReplayed",
    "ToolStarted",
    "Transitioned",
    "VerdictGiven",
    "WrongWindow",
]


_Answer: TypeAlias = Approval | bool | tuple[bool, str | None]
_Opinion: TypeAlias = Verdict | bool | tuple[bool, str | None]


class Approver(Protocol):
    """Who is asked about a call, sync or async."""

    def __call__(self, call: Any, /) -> _Answer | Awaitable[_Answer]:
        """Yes, no, or other arguments. ``call`` has name, arguments, id and run."""
        ...


class Judge(Protocol):
    """Who says whether a loop is done, sync or async."""

    def __call__(self, question: str, state: Any, /) -> _Opinion | Awaitable[_Opinion]:
        """The verdict about the state; ``Verdict(None, reason)`` is undecided, and not done."""
        ...


class Evaluator(Protocol):
    """Who checks a loop's value, sync or async."""

    def __call__(self, value: Any, /) -> _Opinion | Awaitable[_Opinion]:
        """The verdict; its value, if there is one, takes the place of the one that was checked."""
        ...


def __getattr__(name: str) -> object:
    """`Journal` is loaded when it is first asked for."""
    if name == "Journal":
        from loopguard.journal import Journal

        return Journal
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
