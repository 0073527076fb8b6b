"""Rows of refusals: a body that keeps swallowing them is halted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Container, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from loopguard._pipeline import LOCK
from loopguard.exceptions import LoopHalted, ToolCallRefused

if TYPE_CHECKING:
    from loopguard._run import Run

__all__ = ["BATCH", "Batch", "caller", "came_through", "check_halted", "end_row", "note_refusal", "refused"]


class Batch:
    """One turn's worth of calls: its refusals count as one."""

    __slots__ = ("admitted", "ids", "refusal")

    def __init__(self, ids: Container[str | None]) -> None:
        self.ids = ids
        """Which calls are the turn's own: what these call in their turn is not."""
        self.admitted = False
        self.refusal: ToolCallRefused | None = None


BATCH: ContextVar[Batch | None] = ContextVar("loopguard_batch", default=None)


def caller() -> Any:
    """The task or thread that is running: a row of refusals belongs to it.

    Threads of our own stand in for the one that waits for them, which is their `row_of`.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is not None:
        return task
    thread = threading.current_thread()
    return getattr(thread, "row_of", thread)


def refused(chain: Sequence[Run], refusal: ToolCallRefused, provider_id: str | None) -> None:
    """A call was refused: one more in the row, unless it is part of a turn, which counts as one."""
    batch = BATCH.get()
    if batch is not None and provider_id in batch.ids:
        batch.refusal = refusal
    else:
        note_refusal(chain, refusal)


def came_through(chain: Sequence[Run], provider_id: str | None) -> None:
    """A call was run: the row is over."""
    batch = BATCH.get()
    if batch is not None and provider_id in batch.ids:
        batch.admitted = True
    else:
        end_row(chain)


def note_refusal(chain: Sequence[Run], refusal: ToolCallRefused) -> None:
    """Remember the refusal for this task or thread, and for every run on the chain."""
    root = chain[0]
    with LOCK:
        root.refusal_count += 1
        row = root.rows.setdefault(caller(), [])
        row.append(root.refusal_count)
        del row[:-10_000]
        root.last_refusal = refusal
        for run in chain:
            run.barren += 1
            if run.turn != run.barren_turn:
                run.barren_turn = run.turn
                run.barren_turns += 1
        root.restless = True


def end_row(chain: Sequence[Run]) -> None:
    """A call came through: the row of this task or thread, and of the runs, is over."""
    root = chain[0]
    with LOCK:
        root.rows.pop(caller(), None)
        for run in chain:
            run.barren = run.barren_turns = 0
            run.barren_turn = -1
        if not root.rows and not root.stuck:
            root.restless = False


def check_halted(chain: Sequence[Run]) -> None:
    """Raise LoopHalted if this task, or a run of the chain, has been refused too often in a row."""
    halted = halting(chain)
    if halted is not None:
        raise LoopHalted(*halted.args)  # a fresh one: tracebacks must not pile up on a kept one


def halting(chain: Sequence[Run]) -> LoopHalted | None:
    """LoopHalted for the innermost run in which the row of refusals has become too long."""
    root = chain[0]
    if not root.restless or root.outside:
        return None
    limit = next((run.max_refusals for run in reversed(chain) if run.max_refusals is not None), 5)
    with LOCK:
        for run in reversed(chain):
            if run.halted is not None:
                return run.halted
        row = root.rows.get(caller(), ())
        for run in reversed(chain):
            count = sum(1 for number in row if number > run.born)
            turns = max(run.barren_turns if run.turn else 0, run.barren // 100)  # model calls may be refused, too
            if max(count, turns) >= limit and root.last_refusal is not None:
                count = max(count, run.barren if turns >= limit else 0)
                run.halted = LoopHalted(root.last_refusal, run.id, run.name, count)
                root.stuck = True
                return run.halted
    return None
