"""Keeper: one process's dealings with one ledger.

It renews the leases of what is held, and delivers what could not be delivered in place: settlements of cancelled
calls, late charges, and whatever the ledger didn't take when it was asked. A daemon thread does both; it is there
while there is something to do. What is still to be delivered when the process ends is tried once more, for two
seconds at most.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from loopguard._call import new_id
from loopguard._drivers import drive_async, drive_sync
from loopguard._pipeline import LOCK, Ask, Steps
from loopguard.budgets.ledger import Account, Balance, Entry, Lease, Ledger, Shortfall, WrongWindow
from loopguard.exceptions import ConfigurationError
from loopguard.redaction import redact_error

__all__ = ["Charge", "Hold", "Job", "Keeper", "Release", "Settlement", "deliver"]

IDLE = 5.0
"""Seconds after which the thread ends that has nothing to do."""
LONGEST = 60.0
"""Seconds between two attempts to deliver something at most."""
AT_EXIT = 2.0
VIEWS = 10_000
"""Accounts whose balance is remembered."""
_log = logging.getLogger("loopguard")


class Hold:
    """What is reserved on one ledger for one call."""

    __slots__ = ("entries", "generation", "id", "lease", "local", "open", "renewed")

    def __init__(self, keeper: Keeper, id: str, entries: Sequence[Entry], lease: Lease) -> None:
        self.id = id
        self.entries = entries
        self.lease = lease
        self.local = False
        """The ledger couldn't be asked: it was taken from the local allowance."""
        self.open = True
        self.renewed = time.monotonic()
        self.generation = keeper.generation


class Job:
    """Something to deliver: idempotent, so it may be tried again whatever became of the last time."""

    failures = 0
    due = 0.0
    """When it is tried again, by the monotonic clock."""

    def steps(self, keeper: Keeper) -> Steps:
        """Deliver it."""
        raise NotImplementedError


class Release(Job):
    """A reservation whose call didn't run."""

    def __init__(self, id: str) -> None:
        self.id = id

    def steps(self, keeper: Keeper) -> Steps:
        """See `Job`."""
        yield keeper.ask(keeper.ledger.release, self.id)


class Settlement(Job):
    """What a call with a reservation has cost. Tells ``settled(held)``: True in time, False late, None unknown."""

    def __init__(self, id: str, amounts: Mapping[str, int], settled: Callable[[bool | None], object]) -> None:
        self.id = id
        self.amounts = amounts
        self.settled = settled

    def steps(self, keeper: Keeper) -> Steps:
        """See `Job`."""
        try:
            held = yield keeper.ask(keeper.ledger.settle, self.id, self.amounts)
        except LookupError:  # it took so long that the ledger has forgotten it
            held = None
        self.settled(held)


class Charge(Job):
    """An amount that nothing was reserved for: within the cap where it fits, else as an overdraft.

    ``dated()`` gives the entries anew, once it turns out that by the ledger's clock it isn't the window of ``entries``:
    they were dated before it was known, or are delivered after its end. Tells ``booked(entries, fits)``.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        dated: Callable[[], Sequence[Entry]],
        booked: Callable[[Sequence[Entry], bool], object],
    ) -> None:
        self.id = new_id("charge")
        self.entries = entries
        self.dated = dated
        self.booked = booked

    def steps(self, keeper: Keeper) -> Steps:
        """See `Job`."""
        lease, fits = Lease(LONGEST), True
        try:
            answer = yield keeper.ask(keeper.ledger.reserve, self.id, self.entries, lease)
            if isinstance(answer, WrongWindow):
                keeper.heard(answer.now)
                self.entries = self.dated()
                answer = yield keeper.ask(keeper.ledger.reserve, self.id, self.entries, lease)
            if isinstance(answer, Shortfall):
                fits = False
                empty = [replace(entry, amount=0) for entry in self.entries]
                yield keeper.ask(keeper.ledger.reserve, self.id, empty, lease)
        except ConfigurationError:  # it was made in an attempt before
            pass
        yield keeper.ask(keeper.ledger.settle, self.id, {entry.unit: entry.amount for entry in self.entries})
        self.booked(self.entries, fits)


class Keeper:
    """See the module."""

    def __init__(self, ledger: Ledger, name: str) -> None:
        self.ledger: Any = ledger
        self.name = name
        """How messages call the ledger: never with a password."""
        self.is_async = inspect.iscoroutinefunction(ledger.reserve)
        self.blocking: bool = getattr(ledger, "blocking", True)
        self.offset = 0.0
        """How far the ledger's clock is ahead of this host's, in seconds."""
        self.generation = 0
        """Counts the forks: what was held before one is the parent's."""
        self.local: dict[tuple[Account, str], int] = {}
        """What was allowed locally and the ledger doesn't know of yet. Under LOCK."""
        self.away = False
        """The ledger couldn't be asked the last time."""
        self._views: OrderedDict[tuple[Account, str], Balance] = OrderedDict()
        self._reset()
        _keepers.add(self)

    def _reset(self) -> None:
        self._holds: dict[str, Hold] = {}
        self._outbox: deque[Job] = deque()
        # its put is safe in the middle of anything, a garbage collection included
        self._bell: SimpleQueue[threading.Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._wakes = 0.0

    def now(self) -> float:
        """Seconds since the epoch, by the ledger's clock as far as it is known."""
        return time.time() + self.offset

    def heard(self, now: float) -> None:
        """What the ledger's clock said."""
        self.offset = now - time.time()

    def ask(self, fn: Callable[..., Any], *args: Any) -> Ask:
        """The effect of asking the ledger."""
        return Ask(fn, *args, blocking=self.blocking)

    # -- what is known of the books ----------------------------------------------------------------

    def view(self, account: Account, unit: str) -> Balance:
        """Where the account stood when it was last heard of."""
        return self._views.get((account, unit)) or Balance()

    def saw(self, account: Account, unit: str, balance: Balance) -> None:
        """The ledger has told where it stands."""
        with LOCK:
            self._views[account, unit] = balance
            self._views.move_to_end((account, unit))
            if len(self._views) > VIEWS:
                self._views.popitem(last=False)

    def moved(self, account: Account, unit: str, spent: int, reserved: int) -> None:
        """Our own settlements move it, too, until we hear of it again."""
        with LOCK:
            known = self.view(account, unit)
            self.saw(account, unit, Balance(known.spent + spent, max(0, known.reserved + reserved), known.overdraft))

    def allow(self, more: Iterable[tuple[tuple[Account, str], int]]) -> None:
        """What is allowed locally grows, or is known to the ledger or given back, by so much."""
        with LOCK:
            for place, exact in more:
                self.local[place] = self.local.get(place, 0) + exact
                if not self.local[place]:
                    del self.local[place]

    # -- holding and delivering --------------------------------------------------------------------

    def hold(self, hold: Hold) -> None:
        """Renew its lease until it is let go."""
        with LOCK:
            self._holds[hold.id] = hold
        self._wake(time.monotonic() + hold.lease.seconds / 3)

    def let_go(self, hold: Hold) -> bool:
        """It is about to be settled or released; False if that was done, or is the parent's of a fork."""
        with LOCK:
            self._holds.pop(hold.id, None)
            mine = hold.open and hold.generation == self.generation
            hold.open = False
            return mine

    def deliver(self, job: Job) -> Steps:
        """Deliver it now; what the ledger doesn't take is tried again later. Raises nothing of the ledger's."""
        try:
            yield from job.steps(self)
        except ConfigurationError as exc:  # an amount that is none: it can't be booked later, either
            _log.error("the ledger %s can't book what was spent: %s", self.name, redact_error(exc))
        except Exception as exc:  # the ledger's failures, and a plugin's: the call that it belongs to is over
            job.failures += 1
            wait = min(LONGEST, 0.05 * 2.0 ** min(job.failures, 20))
            job.due = time.monotonic() + wait
            if job.failures == 1:
                _log.warning("the ledger %s didn't take it, and is asked again: %s", self.name, redact_error(exc))
            self.post(job)
        except BaseException:  # interrupted: whether it came through nobody knows
            self.post(job)
            raise

    def post(self, job: Job) -> None:
        """Have it delivered by the thread. Safe in the middle of anything."""
        self._outbox.append(job)
        self._wake(job.due)

    def drain(self) -> Steps:
        """Deliver what is due, so that it is counted before we ask for more."""
        if self._outbox:
            yield from deliver([(self, job) for job in self._due()])

    def _due(self) -> list[Job]:
        now, due = time.monotonic(), []
        for _ in range(len(self._outbox)):
            try:
                job = self._outbox.popleft()
            except IndexError:  # somebody else delivers it
                break
            if job.due <= now:
                due.append(job)
            else:
                self._outbox.append(job)
        return due

    # -- the thread --------------------------------------------------------------------------------

    def _wake(self, due: float) -> None:
        """Have the thread look at things at this time at the latest."""
        thread: threading.Thread | None = None
        with LOCK:
            if self._thread is None:
                self._thread = thread = threading.Thread(
                    target=self._work, name=f"loopguard ledger {self.name}", daemon=True
                )
                self._wakes = 0.0
            elif due < self._wakes:
                self._bell.put(None)
        if thread is not None:
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending: `flush_all` delivers what it can
                self._thread = None

    def _work(self) -> None:
        try:
            with asyncio.Runner() if self.is_async else contextlib.nullcontext() as runner:
                self._attend(runner)
                if runner is not None and hasattr(self.ledger, "close"):
                    runner.run(_closed(self.ledger))
        except BaseException:
            self._thread = None
            raise

    def _attend(self, runner: asyncio.Runner | None) -> None:
        """Renew and deliver until there has been nothing to do for a while."""

        def run(steps: Steps) -> None:
            if runner is None:
                drive_sync(steps)
            else:
                runner.run(drive_async(steps))

        used = time.monotonic()
        while True:
            rung: threading.Event | None = None
            try:
                rung = self._bell.get(timeout=max(0.0, self._next(used) - time.monotonic()))
            except Empty:
                pass
            run(self.drain())
            run(self._renew())
            if rung is not None:
                rung.set()
            now = time.monotonic()
            with LOCK:
                if self._holds or self._outbox:
                    used = now
                elif now - used >= IDLE and self._bell.empty():
                    self._thread = None
                    return

    def _next(self, used: float) -> float:
        """When there is something to do."""
        with LOCK:
            holds, jobs = list(self._holds.values()), list(self._outbox)
            times = [*(hold.renewed + hold.lease.seconds / 3 for hold in holds), *(job.due for job in jobs)]
            self._wakes = min(times, default=used + IDLE)
        return self._wakes

    def _renew(self) -> Steps:
        now = time.monotonic()
        with LOCK:
            holds = list(self._holds.values())
        for hold in holds:
            if hold.renewed + hold.lease.seconds / 3 > now:
                continue
            hold.renewed = now
            try:
                if not (yield self.ask(self.ledger.renew, hold.id, hold.lease)):
                    with LOCK:
                        self._holds.pop(hold.id, None)  # it has run out, or is over
            except Exception as exc:  # the ledger's failures, and a plugin's: the lease lasts for two more tries
                _log.warning("the ledger %s didn't renew a lease: %s", self.name, redact_error(exc))

    def flush(self, seconds: float) -> None:
        """Deliver what is left, trying once, in so many seconds at most."""
        for job in list(self._outbox):
            job.due = 0.0
        thread = self._thread
        if thread is not None and thread.is_alive():  # it may be delivering something right now
            done = threading.Event()
            self._bell.put(done)
            done.wait(seconds)
        elif self.is_async:
            asyncio.run(drive_async(self.drain()))
        else:
            drive_sync(self.drain())


def deliver(jobs: Sequence[tuple[Keeper, Job]]) -> Steps:
    """Deliver them in this order; where that is interrupted, the rest is delivered by their threads."""
    for number, (keeper, job) in enumerate(jobs):
        try:
            yield from keeper.deliver(job)
        except BaseException:
            for other, left in jobs[number + 1 :]:
                other.post(left)
            raise


async def _closed(ledger: Any) -> None:
    """Let go of the connections of this thread's event loop."""
    try:
        answer = ledger.close()
        if inspect.isawaitable(answer):
            await answer
    except Exception as exc:  # a plugin's: nobody waits for it any more
        _log.warning("%r didn't close: %s", ledger, redact_error(exc))


_keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()


@atexit.register
def flush_all() -> None:
    """What is still to be delivered is tried once more when the process ends."""
    deadline = time.monotonic() + AT_EXIT
    for keeper in list(_keepers):
        keeper.flush(max(0.0, deadline - time.monotonic()))


def _after_fork_in_child() -> None:
    for keeper in list(_keepers):
        keeper.generation += 1
        keeper.local = {}
        keeper._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
