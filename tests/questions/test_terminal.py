"""The terminal approver at a real pseudo-terminal, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loopguard import ApprovalDenied, ApprovalTimeout, ApproveTool, Guard, ToolCallRefused, exceptions, tool
from loopguard.questions import ask_in_terminal

pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX")

ROOT = Path(exceptions.__file__).parents[1]
PROMPT = re.compile(r"Type (\w{4}(?: hidden)?) to approve, or n and a reason to deny: $")
PRELUDE = """
import fcntl, json, os, signal, sys, termios, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job passes on that it ignores it
if len(sys.argv) > 1:
    fcntl.ioctl(os.open(sys.argv[1], os.O_RDWR), termios.TIOCSCTTY, 0)
from loopguard import ApproveTool, Guard, ToolCallRefused, tool
from loopguard.questions import ask_in_terminal

guard = Guard(ApproveTool(ask_in_terminal))

def say(*values):
    print(json.dumps(values), flush=True)

def go():
    assert sys.stdin.readline() == "go\\n"

def outcome(fn, *args, **kwargs):
    try:
        return fn(*args, **kwargs)
    except ToolCallRefused as refusal:
        return [refusal.code, refusal.reason]

@tool(guard=guard)
def refund(order, amount=50):
    return f"refunded {order}"
"""


class Person:
    """Whoever sits at the terminal of a child process."""

    def __init__(self, source: str, terminal: bool = True) -> None:
        self.screen = ""
        self._master, slave = pty.openpty()
        arguments = [os.ttyname(slave)] if terminal else []
        self._child = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PRELUDE + source, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"},
            start_new_session=True,
        )
        self._slave = slave  # kept open: the master reads an error while nobody has it open

    def sees(self, pattern: str | re.Pattern[str], seconds: float = 20) -> re.Match[str]:
        """Wait until the screen shows it; what was shown before is forgotten afterwards."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.screen)) is None:
            if not select.select([self._master], [], [], max(0, deadline - time.monotonic()))[0]:
                pytest.fail(f"{pattern!r} doesn't come: {self.screen!r}")
            self.screen += os.read(self._master, 65536).decode(errors="replace")
        self.shown, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return found

    def code(self) -> str:
        """The code of the next prompt."""
        return self.sees(PROMPT)[1]

    def types(self, text: str) -> None:
        os.write(self._master, text.encode())

    def says_go(self) -> None:
        """Let the child go on from its `go()`."""
        assert self._child.stdin is not None
        self._child.stdin.write(b"go\n")
        self._child.stdin.flush()

    def hears(self) -> Any:
        """The next thing that the child `say`s."""
        assert self._child.stdout is not None
        return json.loads(self._child.stdout.readline())

    def leaves(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        self._child.communicate()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def person() -> Iterator[Callable[..., Person]]:
    """Makes the person at the terminal of a child process that runs the given source."""
    people: list[Person] = []

    def make(source: str, **options: Any) -> Person:
        people.append(Person(source, **options))
        return people[-1]

    yield make
    for one in people:
        one.leaves()


def test_the_code_approves(person: Callable[..., Person]) -> None:
    """The question shows the tool and its arguments, and typing its code runs the tool."""
    someone = person("say(outcome(refund, 'A-1'))")
    code = someone.code()
    assert someone.shown.replace("\r\n", "\n") == (
        f'\nloopguard: may refund run?\n    | order = "A-1"\n    | amount = 50\n'
        f"Type {code} to approve, or n and a reason to deny: "
    )
    someone.types(f" {code.upper()} \n")
    someone.sees("Approved")
    assert someone.hears() == ["refunded A-1"]


def test_the_question_shows_run_and_cost(person: Callable[..., Person]) -> None:
    """Inside a loop the question says which run and iteration asks, and what it may cost."""
    someone = person("""
from loopguard import loop
pay = tool(cost=0.1, name="pay")(lambda: "paid")

@loop(max=3, guard=guard)
def improve(draft):
    return pay()

say(improve.run("x").value)
""")
    someone.types(f"{someone.code()}\n")
    assert re.search(
        r"may pay run\?\r\nrun: improve \(run_\w+\), iteration 1 of 3\r\ncost: at most \$0\.10\r\n", someone.shown
    )


def test_a_budget_can_be_extended_at_the_terminal(person: Callable[..., Person]) -> None:
    """The terminal answers for a budget that asks to be extended, too."""
    someone = person("""
from loopguard import Budget
pay = tool(cost=1, name="pay")(lambda order: f"paid {order}")
with Guard(Budget(usd=1, extend=ask_in_terminal, extend_by=2)).scope():
    pay("A-1")
    say(outcome(pay, "A-2"))
""")
    code = someone.code()
    assert "may extend_budget run?" in someone.shown
    assert "extend_by = Decimal('2')" in someone.shown
    someone.types(f"{code}\n")
    assert someone.hears() == ["paid A-2"]


@pytest.mark.parametrize("typed", ["y", "yes", "", "true", "abcd efgh"])
def test_anything_but_the_code_asks_again(person: Callable[..., Person], typed: str) -> None:
    """A stray yes, an empty line or a wrong code neither approves nor denies."""
    someone = person("say(outcome(refund, 'A-1'))")
    code = someone.code()
    someone.types(f"{typed}\n")
    someone.sees("That is neither")
    assert someone.code() == code
    someone.types("n\n")
    assert someone.hears() == [["approval_denied", None]]


def test_every_question_has_a_code_of_its_own(person: Callable[..., Person]) -> None:
    """The code of the last question doesn't approve the next one."""
    someone = person("refund('A-1'); say(outcome(refund, 'A-2'))")
    first = someone.code()
    someone.types(f"{first}\n")
    second = someone.code()
    assert first != second
    someone.types(f"{first}\n")
    someone.sees("That is neither")
    someone.code()
    someone.types("n\n")
    assert someone.hears()[0][0] == "approval_denied"


@pytest.mark.parametrize(
    ("typed", "reason"),
    [("n", None), ("N", None), ("no", None), ("n use staging", "use staging"), ("no  nein, größer ", "nein, größer")],
)
def test_n_denies_with_its_reason(person: Callable[..., Person], typed: str, reason: str | None) -> None:
    """What follows the n is the reason, and reaches the refusal."""
    someone = person("say(outcome(refund, 'A-1'))")
    someone.code()
    someone.types(f"{typed}\n")
    someone.sees("Denied")
    assert someone.hears() == [["approval_denied", reason]]


def test_what_was_typed_before_the_question_is_thrown_away(person: Callable[..., Person]) -> None:
    """Type-ahead, lines and half lines, answers nothing and isn't mixed with the answer."""
    someone = person("say(); go(); say(outcome(refund, 'A-1'))")
    someone.hears()
    someone.types("n stale\nn stal")
    someone.sees("n stale\r\nn stal")  # the terminal has it
    someone.says_go()
    someone.types(f"{someone.code()}\n")
    assert someone.hears() == ["refunded A-1"]


def test_pasted_lines_after_the_answer_answer_nothing_else(person: Callable[..., Person]) -> None:
    """What is left of a paste is gone before the next question, and for the next program."""
    someone = person("say(outcome(refund, 'A-1')); say(outcome(refund, 'A-2'))")
    someone.types(f"{someone.code()}\nn pasted\nn pasted\n")
    assert someone.hears() == ["refunded A-1"]
    someone.types(f"{someone.code()}\n")
    assert someone.hears() == ["refunded A-2"]


@pytest.mark.parametrize("asking", ["refund('A-1')", "asyncio.run(arefund('A-1'))"])
def test_a_question_that_timed_out_reads_nothing_more(person: Callable[..., Person], asking: str) -> None:
    """After its timeout the code approves nothing, and what is typed goes to the next reader in full."""
    someone = person(f"""
import asyncio
guard = Guard(ApproveTool(ask_in_terminal, timeout=0.5))
refund = tool(guard=guard, name="refund")(lambda order: say("ran"))

@tool(guard=guard)
async def arefund(order):
    say("ran")

say(outcome(lambda: {asking}))
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join(5)
say(threading.active_count())
with open("/dev/tty") as tty:
    say()
    say(tty.readline())
""")
    code = someone.code()
    someone.types(code)  # half an answer
    (refused,) = someone.hears()
    assert refused[0] == "approval_timeout"
    someone.sees("Too late: this question is closed")
    assert someone.hears() == [1]
    someone.hears()
    someone.types(f"{code}\n")
    assert someone.hears() == [f"{code}\n"]


def test_a_stopped_run_closes_the_question(person: Callable[..., Person]) -> None:
    """Stopping the run from elsewhere ends the question, without any timeout."""
    someone = person("""
with guard.scope() as run:
    threading.Thread(target=lambda: (go(), run.stop("enough"))).start()
    say(outcome(refund, 'A-1'))
""")
    someone.code()
    someone.says_go()
    someone.sees("Too late")
    assert someone.hears() == [["stopped", "enough"]]


def test_two_questions_take_turns(person: Callable[..., Person]) -> None:
    """The second thread's question appears once the first one is answered, and each gets its own answer."""
    someone = person("""
def ask(order):
    say(order, outcome(refund, order))

threads = [threading.Thread(target=ask, args=(order,)) for order in ("A", "B")]
for thread in threads:
    thread.start()
""")
    first = someone.code()
    asked = someone.shown
    assert asked.count("may refund run?") == 1
    someone.types(f"{first}\n")
    second = someone.code()
    assert someone.shown.count("may refund run?") == 1
    someone.types("n enough\n")
    answers = dict([someone.hears(), someone.hears()])
    order, other = ("A", "B") if '"A"' in asked else ("B", "A")
    assert answers == {order: f"refunded {order}", other: ["approval_denied", "enough"]}
    assert first != second


def test_a_question_that_waits_its_turn_keeps_its_timeout(person: Callable[..., Person]) -> None:
    """While another question holds the terminal, a timeout runs out without ever having shown its own."""
    someone = person("""
slow = threading.Thread(target=lambda: say(outcome(refund, 'first')))
slow.start()
go()
late = tool(guard=Guard(ApproveTool(ask_in_terminal, timeout=0.2)), name="late")(lambda: None)
say(outcome(late)[0])
""")
    code = someone.code()
    someone.says_go()
    assert someone.hears() == ["approval_timeout"]
    someone.types(f"{code}\n")
    assert someone.hears() == ["refunded first"]
    someone.sees("Approved")
    assert "late" not in someone.screen + someone.shown


def test_hostile_arguments_are_shown_and_do_nothing(person: Callable[..., Person]) -> None:
    """Escape sequences, bidi and zero-width characters are spelled out, and a megabyte is cut aloud."""
    someone = person(r"""
attack = "\x1b[2J\x1b]0;owned\x07\r\n\u202e\u200b\x9b31mType abcd to approve"
say(outcome(refund, attack, ["x" * 1_000_000, {"\x1b[8m": b"\x1b"}]))
""")
    code = someone.code()
    shown = someone.shown.replace("\r\n", "\n")
    assert all(char == "\n" or char.isprintable() for char in shown)
    assert r"order = " in shown
    for spelled in (r"\x1b[2J", r"\u202e", r"\u200b", r"\x9b31m", r"\r\n"):
        assert spelled in shown
    assert re.search(r"… [\d,]{7,} more characters", shown.replace("\n    | ", ""))
    assert len(shown) < 5000
    someone.types(f"{code}\n")
    assert someone.hears()[0].startswith("refunded \x1b[2J")


def test_a_long_value_can_not_pass_for_another_line(person: Callable[..., Person]) -> None:
    """A value wraps behind a rule, narrow enough for the terminal, wide characters included."""
    someone = person("""
say(outcome(refund, ("x" * 71 + "cost: at most $0.00").ljust(400), "\u754c" * 100))
""")
    someone.code()
    rows = someone.shown.split("\r\n")[2:-1]
    assert len(rows) > 7
    assert all(row.startswith("    | ") for row in rows)
    assert all(len(row) + row.count("\u754c") < 80 for row in rows)


def test_hidden_values_need_a_word_more(person: Callable[..., Person]) -> None:
    """A secret shows as its length, and approving what one can't see takes the word `hidden`."""
    someone = person("""
login = tool(guard=guard, name="login")(lambda user, password: "logged in with " + password)
say(outcome(login, "ada", "hunter2"))
""")
    code = someone.code()
    assert code.endswith(" hidden")
    assert "[hidden, 7 characters]" in someone.shown
    assert "hunter2" not in someone.shown
    someone.types(f"{code.removesuffix(' hidden')}\n")
    someone.sees("That is neither")
    someone.types(f"{someone.code()}\n")
    assert someone.hears() == ["logged in with hunter2"]


def test_redirected_streams_are_not_the_terminal(person: Callable[..., Person]) -> None:
    """A code on stdin approves nothing: the question is asked and answered at the terminal alone."""
    someone = person("""
import io
sys.stdin, stdout = io.StringIO("n\\nn\\nn\\n"), sys.stdout
answer = outcome(refund, "A-1")
sys.stdout = stdout
say(answer, len(sys.stdin.read()))
""")
    someone.types(f"{someone.code()}\n")
    assert someone.hears() == ["refunded A-1", 6]


def test_a_terminal_in_another_mode_is_put_right_and_back(person: Callable[..., Person]) -> None:
    """A raw terminal without echo is readable while the question is open, and raw again afterwards."""
    someone = person("""
import tty
fd = os.open("/dev/tty", os.O_RDWR)
tty.setraw(fd)
before = termios.tcgetattr(fd)
answer = outcome(refund, "A-1")
say(answer, termios.tcgetattr(fd) == before)
""")
    someone.types(f"{someone.code()}\r")
    someone.sees("Approved")
    assert someone.hears() == ["refunded A-1", True]


def test_control_c_interrupts(person: Callable[..., Person]) -> None:
    """Ctrl-C at the question is a KeyboardInterrupt like anywhere else, and the tool doesn't run."""
    someone = person("""
try:
    refund("A-1")
except KeyboardInterrupt:
    say("interrupted")
""")
    someone.code()
    someone.types("\x03")
    assert someone.hears() == ["interrupted"]


def test_the_end_of_the_input_is_no_answer(person: Callable[..., Person]) -> None:
    """Ctrl-D on an empty line is nobody's yes and nobody's no."""
    someone = person("say(outcome(refund, 'A-1'))")
    someone.code()
    someone.types("\x04")
    code, reason = someone.hears()[0]
    assert code == "approval_error"
    assert "the terminal was closed before anybody answered" in reason


def test_a_terminal_that_is_stopped_holds_nobody_up(person: Callable[..., Person]) -> None:
    """While Ctrl-S holds the output back, the timeout still runs out and the process goes on."""
    someone = person("""
guard = Guard(ApproveTool(ask_in_terminal, timeout=0.3))
refund = tool(guard=guard, name="refund")(lambda parts: None)
fd = os.open("/dev/tty", os.O_RDWR)
termios.tcflow(fd, termios.TCOOFF)
say(outcome(refund, ["x" * 1900] * 50)[0])
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join(5)
say(threading.active_count())
""")
    assert someone.hears() == ["approval_timeout"]
    assert someone.hears() == [1]


def test_no_terminal_is_an_approval_error(person: Callable[..., Person]) -> None:
    """A process without a terminal refuses at once, and says what to do."""
    code, reason = person("say(outcome(refund, 'A-1'))", terminal=False).hears()[0]
    assert code == "approval_error"
    assert "there is no terminal to ask in" in reason
    assert "give ApproveTool another approver" in reason


def test_a_background_process_has_no_terminal(person: Callable[..., Person]) -> None:
    """A job in the background is refused instead of stopped by its terminal."""
    someone = person(
        """
import subprocess
child = [sys.executable, "-c", PRELUDE + "say(outcome(refund, 'A-1'))"]
say(subprocess.run(child, process_group=0, stdout=subprocess.PIPE, timeout=20).stdout.decode())
""".replace("PRELUDE", repr(PRELUDE))
    )
    code, reason = json.loads(someone.hears()[0])[0]
    assert code == "approval_error"
    assert "this process runs in the background" in reason


def test_a_forked_child_can_ask_while_its_parent_does(person: Callable[..., Person]) -> None:
    """The turn of a question that the parent has open doesn't block a child for good."""
    someone = person("""
import warnings
thread = threading.Thread(target=refund, args=("parent",))
thread.start()
go()
warnings.simplefilter("ignore")
if os.fork() == 0:
    say(outcome(refund, "child"))
    os._exit(0)
os.wait()
os._exit(0)
""")
    someone.code()
    someone.says_go()
    someone.sees(r'order = "child"')
    someone.code()


# -- Windows: its console stood in for by a file and a list of keys ----------------------------------


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Gives the keys that are pressed once the question stands (CODE is its code), after some typed too early."""
    screen = tmp_path / "CONOUT$"
    pressed = ["n", "\r"]

    def press(keys: str) -> Path:
        def kbhit() -> bool:
            prompt = PROMPT.search(screen.read_text(encoding="utf-8"))
            if prompt and not answered:
                answered.append(True)
                pressed.extend(keys.replace("CODE", prompt[1]))
            return bool(pressed)

        answered: list[bool] = []
        vars(msvcrt).update(kbhit=kbhit, getwch=lambda: pressed.pop(0))
        return screen

    msvcrt = ModuleType("msvcrt")
    monkeypatch.setitem(sys.modules, "msvcrt", msvcrt)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((80, 25)))
    monkeypatch.chdir(tmp_path)
    yield press
    sys.modules.pop("loopguard.questions._windows", None)


@tool(guard=Guard(ApproveTool(ask_in_terminal)))
def refund(order: str) -> str:
    """A tool that asks at the console."""
    return f"refunded {order}"


def test_the_code_approves_at_the_console(console: Callable[[str], Path]) -> None:
    """Keys are echoed, edited with backspace, and arrows are nothing; type-ahead is thrown away."""
    screen = console("x\b\b\x00H\xe0KCODE\r")
    assert refund("A-1") == "refunded A-1"
    assert screen.read_text(encoding="utf-8").endswith("Approved.\n")


def test_n_denies_at_the_console(console: Callable[[str], Path]) -> None:
    """The reason follows the n, as elsewhere."""
    console("n use staging\r")
    with pytest.raises(ApprovalDenied, match="use staging"):
        refund("A-1")


def test_the_end_of_the_input_at_the_console(console: Callable[[str], Path]) -> None:
    """Ctrl-Z is neither a yes nor a no."""
    console("\x1a")
    with pytest.raises(ToolCallRefused, match="the terminal was closed"):
        refund("A-1")


def test_control_c_interrupts_at_the_console(console: Callable[[str], Path]) -> None:
    """Ctrl-C, which arrives as a key there, is a KeyboardInterrupt."""
    console("\x03")
    with pytest.raises(KeyboardInterrupt):
        refund("A-1")


def test_a_question_at_the_console_closes(console: Callable[[str], Path]) -> None:
    """Without a key pressed, the timeout ends the question."""
    screen = console("")
    late = tool(guard=Guard(ApproveTool(ask_in_terminal, timeout=0.1)))(lambda: None)
    with pytest.raises(ApprovalTimeout):
        late()
    deadline = time.monotonic() + 5
    while not screen.read_text(encoding="utf-8").endswith("doesn't run.\n") and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert screen.read_text(encoding="utf-8").endswith("doesn't run.\n")
