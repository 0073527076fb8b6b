"""Real processes, really killed: what was acknowledged stays, and what had finished doesn't run again."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import os
import random
import signal
import socket
import socketserver
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loopguard import journal
from loopguard._events import ToolFinished, ToolStarted
from loopguard.journal._protocol import LEASE
from loopguard.testing import MessagesServer, Reply

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")

KILLS = 30


class _Heard:
    """A connection, and what was said on it."""

    def __init__(self, connection: socket.socket, what: str) -> None:
        self.socket = connection
        self.what = what

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)


class Counter:
    """Counts effects, outside of the processes that have them. `answer(what)` gives a reply, or None for never."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.answer: Callable[[str], str | None] = lambda what: f"did {what}"
        counter = self

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

            def process_request(self, request: Any, address: Any) -> None:
                """Take note in the order of arrival; only the answers may take their time."""
                try:
                    what, _, key = request.makefile().readline().strip().partition("\t")
                except OSError:
                    what = ""
                if not what:  # killed before it did anything
                    self.shutdown_request(request)
                    return
                if what != "sync":
                    counter.seen.append((what, key))
                super().process_request(_Heard(request, what), address)

            def handle_error(self, *args: object) -> None:
                """The other side was killed: that is what it is for."""

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                reply = "" if self.request.what == "sync" else counter.answer(self.request.what)
                if reply is None:
                    self.request.socket.recv(1)  # until the other side is dead
                else:
                    self.request.socket.sendall(f"{reply}\n".encode())

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def sync(self) -> None:
        """Until all that was sent before is counted."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(b"sync\n")
            connection.makefile().readline()

    @property
    def effects(self) -> list[str]:
        """What was done, in order."""
        return [what for what, _ in self.seen]


class Victim:
    """One forked program."""

    def __init__(self, pid: int, out: Path) -> None:
        self.pid = pid
        self.out = out

    def kill(self) -> None:
        """kill -9; over when it is gone, or was gone already."""
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.wait_for(lambda: not _runs(self.pid))

    def wait_for(self, there: Callable[[], Any]) -> None:
        """Until it is so."""
        deadline = time.monotonic() + 30
        while not there():
            assert time.monotonic() < deadline, "it never came to that"
            os.sched_yield()

    def result(self) -> Any:
        """What it came to, once it is over."""
        self.wait_for(lambda: self.out.exists() or not _runs(self.pid))
        said = json.loads(self.out.read_text(encoding="utf-8"))
        assert "error" not in said, said["where"]
        return said["value"]

    def error(self) -> str:
        """The exception it came to, once it is over."""
        self.wait_for(self.out.exists)
        return str(json.loads(self.out.read_text(encoding="utf-8"))["error"])


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Stage:
    """Starts victims on one store."""

    def __init__(self, store: str, folder: Path, forks: subprocess.Popen[str]) -> None:
        self.store = store
        self.folder = folder
        self.counter = Counter()
        self._numbers = itertools.count(1)
        self._forks = forks

    def start(self, program: str, **args: Any) -> Victim:
        """A new process that runs this program of victims.py."""
        out = self.folder / f"out-{next(self._numbers)}.json"
        told = {"program": program, "store": self.store, "port": self.counter.port, "out": str(out), **args}
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        self._forks.stdin.write(json.dumps(told) + "\n")
        self._forks.stdin.flush()
        return Victim(int(self._forks.stdout.readline()), out)

    def book(self) -> journal.OpenJournal:
        """The journal, read from here."""
        return journal.open(self.store)

    def kill_at(self, what: str, program: str, **args: Any) -> None:
        """Start the program, and kill it in the middle of this effect, which is done, and never answered."""
        reached = threading.Event()
        before = self.counter.answer

        def answer(said: str) -> str | None:
            if said == what:
                reached.set()
                return None
            return before(said)

        self.counter.answer = answer
        victim = self.start(program, **args)
        assert reached.wait(30), victim.out.read_text(encoding="utf-8") if victim.out.exists() else "nothing"
        victim.kill()
        self.counter.answer = before

    def settle(self, run_id: str, effects: Callable[[], list[str]]) -> int:
        """Be the person who looks what happened, and answers the run's questions; how many there were."""
        self.counter.sync()
        book = self.book()
        questions = [question for question in book.questions() if question.run_id == run_id]
        for question in questions:
            what = f"{question.tool} {question.arguments['n']}"
            if what in effects():
                book.answer(question.id, "ran", result=f"did {what}", by="the test")
            else:
                book.answer(question.id, "not_run", by="the test")
        return len(questions)

    def close(self) -> None:
        """Nothing is left behind."""
        self.counter.server.shutdown()
        self.counter.server.server_close()


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """victims.py, ready to be forked."""
    script = str(Path(__file__).parent / "victims.py")
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.fixture
def stage(store: str, tmp_path: Path, forks: subprocess.Popen[str]) -> Iterator[Stage]:
    """Processes that can be killed."""
    made = Stage(store, tmp_path, forks)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["pay", "put"])
def test_a_process_killed_in_a_call_leaves_it_uncertain_unless_idempotent(kind: str, stage: Stage) -> None:
    """C51: charge() is never run twice; an idempotent call is, under the same key."""
    stage.kill_at(f"{kind} 2", "one_call", tool=kind)
    value, reason = stage.start("one_call", tool=kind).result()
    counted = collections.Counter(stage.counter.effects)
    if kind == "pay":
        assert (value, reason) == ("", "waiting")
        assert counted == {"pay 1": 1, "pay 2": 1}
        assert stage.settle("r", lambda: stage.counter.effects) == 1
        assert stage.start("one_call", tool=kind).result() == ["did pay 1 did pay 2", "max_iterations"]
        assert counted == collections.Counter(stage.counter.effects)
    else:
        assert (value, reason) == ("did pay 1 did put 2", "max_iterations")
        assert counted == {"pay 1": 1, "put 2": 2}
        assert len({key for what, key in stage.counter.seen if what == "put 2"}) == 1
    assert stage.book().verify("r") is None


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("killed_at", ["put 100", "put 1", "pay 2", "put 11", "pay 12", "put 200"])
def test_flows_in_loops_in_flows_go_on_at_their_place(killed_at: str, colour: str, stage: Stage) -> None:
    """Killed at each of its effects in turn, a nested run makes none of the others twice, and no payment."""
    stage.kill_at(killed_at, "nested", colour=colour)
    value, reason = stage.start("nested", colour=colour).result()
    counted = collections.Counter(["put 100", "put 1", "pay 2", "put 11", "pay 12", "put 200"])
    if killed_at.startswith("pay"):
        assert reason == "waiting"
        assert stage.settle("r", lambda: stage.counter.effects) == 1
        value, reason = stage.start("nested", colour=colour).result()
    else:
        counted[killed_at] += 1
    assert (value, reason) == ("2 did put 200", "until")
    assert collections.Counter(stage.counter.effects) == counted
    assert stage.book().verify("r") is None
    assert stage.start("nested", colour=colour).result() == [value, reason]


def test_an_answer_holds_for_one_execution(stage: Stage) -> None:
    """Told that it had not run, it was run, and killed again: what was said then says nothing of this time."""
    stage.kill_at("pay 2", "one_call", tool="pay")
    assert stage.start("one_call", tool="pay").result() == ["", "waiting"]
    stage.settle("r", list)
    stage.kill_at("pay 2", "one_call", tool="pay")
    assert stage.start("one_call", tool="pay").result() == ["", "waiting"]
    assert len(stage.book().questions("all")) == 2


def test_parallel_calls_get_their_own_results_in_any_order(stage: Stage) -> None:
    """Three calls finished c, b, a; asked for again as c, a, b each is answered with its own result."""
    turns = {name: threading.Event() for name in "abc"}
    following = {"c": "b", "b": "a"}
    turns["c"].set()

    def in_turn(what: str) -> str:
        name = what[-1]
        if name in turns:
            turns[name].wait(30)
            if name in following:
                threading.Thread(target=_after_commit, args=(stage, name, turns[following[name]])).start()
        return f"did {what}"

    stage.counter.answer = in_turn
    stage.kill_at("last", "parallel", order=["a", "b", "c"], dies=True)
    finished = [e.result for e in stage.book().events("r") if isinstance(e, ToolFinished)]
    assert finished == ["did fetch c", "did fetch b", "did fetch a"]
    value = stage.start("parallel", order=["c", "a", "b"], dies=False).result()
    assert value == {name: f"did fetch {name}" for name in "abc"}
    assert sorted(stage.counter.effects) == ["fetch a", "fetch b", "fetch c", "last"]


def _after_commit(stage: Stage, name: str, turn: threading.Event) -> None:
    """Let the next one finish once this one's result is committed."""
    while not any(isinstance(e, ToolFinished) and e.result == f"did fetch {name}" for e in stage.book().events("r")):
        time.sleep(0)
    turn.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_resumed_agent_is_answered_from_the_record(stream: bool, stage: Stage) -> None:
    """The scripted server sees no request twice, and the refund is paid once."""
    script = [
        Reply.tool_use("refund", {"order": "A", "amount": 50}),
        Reply.tool_use("look", {"order": "A"}),
        "Done.",
    ]
    with MessagesServer(script) as server:
        args = {"url": server.url, "metered": True, "stream": stream}
        stage.kill_at("look A", "agent", **args)
        assert len(server.requests) == 2
        reason, cost, calls = stage.start("agent", **args).result()
        assert (reason, calls, len(server.requests)) == ("until", 3, 3)
        story = stage.book().story("r").root
        assert story is not None
        assert float(cost) == story.spent["usd"] / 10**18
    assert stage.counter.effects == ["refund A 50", "look A", "look A"]


@pytest.mark.parametrize("metered", [True, False])
def test_a_refund_worded_differently_parks_instead_of_paying_twice(metered: bool, stage: Stage) -> None:
    """The record of the model's answer is missing, or never was: the model is asked again, and words it anew."""
    amounts = iter([50, 49])

    def reply(body: dict[str, Any]) -> Reply:
        results = [
            block
            for m in body["messages"]
            if m["role"] == "user" and isinstance(m["content"], list)
            for block in m["content"]
        ]
        if not results:
            return Reply.tool_use("refund", {"order": "A", "amount": next(amounts)})
        return Reply.tool_use("look", {"order": "A"})

    with MessagesServer(reply) as server:
        args = {"url": server.url, "metered": metered, "stream": False}
        stage.kill_at("look A", "agent", **args)
        if metered:
            db = sqlite3.connect(stage.store.removeprefix("sqlite:///"), isolation_level=None)
            db.execute('DELETE FROM events WHERE CAST(header AS TEXT) LIKE \'%"event":"ModelCalled"%\'')
            db.close()
        reason, *_ = stage.start("agent", **args).result()
    assert reason == "waiting"
    assert stage.counter.effects == ["refund A 50", "look A"]
    (question,) = stage.book().questions()
    assert question.arguments == {"order": "A", "amount": 49}


def test_of_two_processes_that_resume_one_run_one_wins(stage: Stage) -> None:
    """The other is told who drives it, while it is driven."""
    told = threading.Event()
    running = threading.Event()

    def answer(what: str) -> str:
        running.set()
        told.wait(30)
        return "won"

    stage.counter.answer = answer
    victims = [stage.start("waiting"), stage.start("waiting")]
    assert running.wait(30)
    victims[0].wait_for(lambda: any(victim.out.exists() for victim in victims))
    loser = next(victim for victim in victims if victim.out.exists())
    (winner,) = [victim for victim in victims if victim is not loser]
    assert f"RunConflict: the run 'r' is being driven by process {winner.pid} on" in loser.error()
    told.set()
    assert winner.result() == "won"
    assert stage.counter.effects == ["put 0"]


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_process_that_lost_its_lease_can_not_commit(colour: str, stage: Stage) -> None:
    """Stopped past the end of its lease, and then let go on: another one drives the run, and nothing of it is written.

    Until the lease ends, whoever wants the run is told who holds it.
    """
    stopped, taken, late, over = (threading.Event() for _ in range(4))

    def answer(what: str) -> str:
        if what == "put 1" and not stopped.is_set():
            stopped.set()
            late.wait(30)
            return "too late"
        if what == "put 2":
            taken.set()
            over.wait(30)
        return f"did {what}"

    stage.counter.answer = answer
    first = stage.start("driven", colour=colour, ahead=0)
    try:
        assert stopped.wait(30)
        os.kill(first.pid, signal.SIGSTOP)
        refused = stage.start("driven", colour=colour, ahead=LEASE / 2).error()
        assert f"RunConflict: the run 'r' is being driven by process {first.pid} on" in refused
        second = stage.start("driven", colour=colour, ahead=LEASE + 1)
        assert taken.wait(30)
        written = stage.book().events("r")
        late.set()
        os.kill(first.pid, signal.SIGCONT)
        assert "LeaseLost: another process has taken over the run 'r'" in first.error()
        assert stage.book().events("r") == written
    finally:
        over.set()
        first.kill()
    assert second.result() == ["did put 0", "did put 1", "did put 2"]
    assert stage.counter.effects == ["put 0", "put 1", "put 1", "put 2"]
    results = [e.result for e in stage.book().events("r") if isinstance(e, ToolFinished)]
    assert results == ["did put 0", "did put 1", "did put 2"]
    assert stage.book().verify("r") is None


def test_an_export_that_was_killed_is_gone_on_with_by_another_process(stage: Stage, tmp_path: Path) -> None:
    """C54: killed in the middle of a record, then of a character; another process appends, a third reads it all."""
    whole, file = tmp_path / "whole.jsonl", str(tmp_path / "export.jsonl")

    def read() -> Any:
        return stage.start("reading", file=file).result()

    stage.start("working", run_id="r", iterations=2).result()
    count = stage.start("exporting", file=str(whole), cut=None).result()
    lines = whole.read_bytes().splitlines(keepends=True)
    before = b"".join(lines[:2]) + lines[2][: len(lines[2]) // 2]
    victim = stage.start("exporting", file=file, cut=len(before))
    victim.wait_for(lambda: not _runs(victim.pid))
    assert (Path(file).read_bytes(), victim.out.exists()) == (before, False)
    assert read() == [{"r": 2}, [3], [None]]
    assert stage.start("exporting", file=file, cut=None).result() == count - 2
    assert Path(file).read_bytes().startswith(before + b"\n")
    assert read() == [{"r": count}, [3], [None]]

    victim = stage.start("tearing", file=file)
    victim.wait_for(lambda: not _runs(victim.pid))
    before = Path(file).read_bytes()
    torn = before.count(b"\n") + 1
    assert before.endswith("ü".encode()[:1])
    assert read() == [{"r": count}, [3, torn], [None]]
    stage.start("working", run_id="s", iterations=2).result()
    assert stage.start("exporting", file=file, cut=None).result() == count
    assert Path(file).read_bytes().startswith(before + b"\n")
    assert read() == [{"r": count, "s": count}, [3, torn], [None, None]]

    lines = Path(file).read_bytes().split(b"\n")
    lines[torn + 1] = lines[torn + 1][:40]
    Path(file).write_bytes(b"\n".join(lines))
    for program in ("reading", "exporting"):
        error = stage.start(program, file=file, cut=None).error()
        assert f"JournalError: {file}, line {torn + 2}, is damaged" in error


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("bytes", "_w=="),
        ("datetime", "2026-01-02T00:00:00Z"),
        ("function", "<builtins.function>"),
        ("Hostile", "<__main__.Hostile>"),
    ],
)
def test_a_placeholder_is_no_result_for_another_process(kind: str, shown: str, stage: Stage) -> None:
    """C55: the caller got the original; a resume elsewhere says that it wasn't kept, and never runs the tool again.

    Where the argument has no form that another process would know, nobody knows whether it is the same call.
    """
    stage.kill_at("last", "hostile", run_id="r", kinds=[kind])
    events = stage.book().events("r")
    (started,) = [e for e in events if isinstance(e, ToolStarted) and e.tool == "odd"]
    (finished,) = [e for e in events if isinstance(e, ToolFinished)]
    assert (started.arguments, finished.result) == ({"argument": shown}, "\\ud83d")
    resumed = stage.start("hostile", run_id="r", kinds=[kind])
    if kind != "function":
        assert "CheckpointError: odd has run, but its result could not be recorded" in resumed.error()
        assert stage.book().questions() == []
    else:
        assert resumed.result() == ["", "waiting"]
        assert [question.tool for question in stage.book().questions()] == ["odd"]
    assert stage.counter.effects == [f"odd {kind}", "last"]
    assert stage.book().verify("r") is None


def _committed(db: sqlite3.Connection, run_id: str) -> int:
    return int(db.execute("SELECT coalesce(max(seq), 0) FROM events WHERE run_id = ?", (run_id,)).fetchone()[0])


def _gap(stage: Stage, run_id: str, before: int) -> str:
    """Where the run stands, found from its journal and the effects alone."""
    stage.counter.sync()
    events = stage.book().events(run_id)
    begun = [event for event in events if isinstance(event, ToolStarted)]
    over = {event.key for event in events if isinstance(event, ToolFinished)}
    if begun and begun[-1].key not in over:
        effect = f"{begun[-1].tool} {begun[-1].arguments['n']}"
        return "after the effect" if effect in stage.counter.effects[before:] else "after start"
    return "after the commit" if events and isinstance(events[-1], ToolFinished) else "before start"


def _no_finished_body_ran_again(stage: Stage, run_id: str, in_flight: set[str]) -> None:
    counted = collections.Counter(stage.counter.effects)
    assert all(count == 1 for what, count in counted.items() if what.startswith("pay")), counted
    assert {what for what, count in counted.items() if count > 1} <= in_flight
    assert stage.book().verify(run_id) is None


def test_killed_at_random_commits_nothing_acknowledged_is_lost(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 at random commits, until every kind of gap was hit: each body that had finished ran exactly once.

    The victim says nothing of where it stands: commits are counted in the file, effects in this process.
    """
    dice = random.Random()
    gaps: collections.Counter[str] = collections.Counter()
    kinds = {"before start", "after start", "after the effect", "after the commit"}
    in_flight: set[str] = set()
    iterations, runs, kills = 12, 0, 0
    while kills < KILLS or set(gaps) != kinds:
        assert kills < 300, gaps
        runs += 1
        run_id = f"run-{runs}"
        stage.counter.seen.clear()
        in_flight.clear()
        while True:
            victim = stage.start("working", run_id=run_id, iterations=iterations)
            db = sqlite3.connect(stage.store.removeprefix("sqlite:///"), isolation_level=None)
            point = _seen(db, run_id) + dice.randint(1, 50)
            try:
                while not victim.out.exists() and _seen(db, run_id) < point:
                    pass
                acknowledged = _seen(db, run_id)
                if victim.out.exists():
                    value = victim.result()
                    if stage.settle(run_id, lambda: stage.counter.effects) == 0:
                        break
                    continue
                victim.kill()
                kills += 1
                assert _committed(db, run_id) >= acknowledged
                gap = _gap(stage, run_id, 0)
                gaps[gap] += 1
                if gap in ("after start", "after the effect"):
                    last = [e for e in stage.book().events(run_id) if isinstance(e, ToolStarted)][-1]
                    in_flight.add(f"{last.tool} {last.arguments['n']}")
            finally:
                db.close()
        assert value == [f"did pay {n} did put {n}" for n in range(iterations)]
        _no_finished_body_ran_again(stage, run_id, in_flight)
    with capsys.disabled():
        print(f"\n{kills} kills in {runs} runs:", ", ".join(f"{kind} {gaps[kind]}" for kind in sorted(kinds)))


def _seen(db: sqlite3.Connection, run_id: str) -> int:
    try:
        return _committed(db, run_id)
    except sqlite3.OperationalError:  # the tables aren't there yet
        return 0


def test_eight_processes_share_a_store_through_sixteen_kills(stage: Stage) -> None:
    """800 steps in eight runs: all finish, only idempotent calls in flight are repeated, the others park."""
    dice = random.Random()
    iterations, kills = 50, 0
    in_flight: set[str] = set()
    ids = [f"run-{i}" for i in range(8)]
    stage.counter.answer = lambda what: f"did {what}"
    alive = {run_id: stage.start("eight", run_id=run_id, iterations=iterations) for run_id in ids}
    values: dict[str, Any] = {}
    effects_by_run: Callable[[str], list[str]] = lambda run_id: [  # noqa: E731
        what.partition(" ")[2] for what in stage.counter.effects if what.startswith(f"{run_id} ")
    ]
    threshold = 40
    while alive:
        if kills < 16 and len(stage.counter.seen) > threshold:
            threshold += dice.randint(5, 40)
            run_id = dice.choice(sorted(alive))
            if not alive[run_id].out.exists():
                alive[run_id].kill()
                if not alive[run_id].out.exists():
                    kills += 1
                    started = [e for e in stage.book().events(run_id) if isinstance(e, ToolStarted)]
                    if started:
                        in_flight.add(f"{run_id} {started[-1].tool} {started[-1].arguments['n']}")
                    alive[run_id] = stage.start("eight", run_id=run_id, iterations=iterations)
        for run_id, victim in list(alive.items()):
            if victim.out.exists():
                values[run_id] = victim.result()
                if stage.settle(run_id, functools.partial(effects_by_run, run_id)):
                    alive[run_id] = stage.start("eight", run_id=run_id, iterations=iterations)
                else:
                    del alive[run_id]
    assert kills == 16
    counted = collections.Counter(stage.counter.effects)
    assert {what for what, count in counted.items() if count > 1} <= {what for what in in_flight if " put " in what}
    for run_id in ids:
        assert values[run_id] == [f"did pay {n} did put {n}" for n in range(iterations)]
        assert stage.book().verify(run_id) is None
    assert len(counted) == 800
