"""The terminal approver: asks whoever sits at this terminal, one question at a time."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Iterator

from loopguard._amounts import money
from loopguard._call import ToolCall
from loopguard.exceptions import LoopGuardError
from loopguard.guardrails import Approval
from loopguard.questions._device import POLL, Check, Device
from loopguard.redaction import display, display_name, display_value, redact

__all__ = ["ask_in_terminal", "behind_rule"]

_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # without those that look alike

_turn = threading.Lock()
"""Held while a question is on the terminal: the next one waits."""


class _Closed(LoopGuardError):
    """Nobody waits for the answer any more."""


def ask_in_terminal(call: ToolCall) -> Approval:
    """An approver: ask at the terminal of this process whether a call may run, ``ApproveTool(ask_in_terminal)``.

    It shows the tool, its arguments (redacted, nothing that could steer the terminal, cut after 2,000 characters
    each), the run and the cost, and a new random code for each question. Only typing that code approves, so neither
    a stray key nor pasted text can; ``n`` denies, and what follows it is the reason. Where a value is hidden, the
    word ``hidden`` goes after the code. What was typed before the question appeared is thrown away.

    Raises LoopGuardError (the call is refused with ``approval_error``) where there is no terminal, or it is closed,
    and once the question is: its timeout has run out, or its run was stopped.
    """

    def check() -> None:
        if call.question is not None and call.question.closed:
            raise _Closed(f"the question about {call.name} was closed before anybody answered")

    with _taking_turns(check):
        try:
            device = _open(check)
        except OSError as exc:
            raise LoopGuardError(
                f"there is no terminal to ask in ({exc.strerror or exc}): start the program in the foreground of a "
                f"terminal, or give ApproveTool another approver, a function of the call"
            ) from exc
        with contextlib.closing(device):
            try:
                return _ask(device, call)
            except (EOFError, OSError) as exc:
                raise LoopGuardError("the terminal was closed before anybody answered") from exc
            except _Closed:
                with contextlib.suppress(_Closed, OSError):
                    device.write("\nToo late: this question is closed, and the tool doesn't run.\n")
                raise


@contextlib.contextmanager
def _taking_turns(check: Check) -> Iterator[None]:
    turn = _turn
    while not turn.acquire(timeout=POLL):
        check()
    try:
        check()
        yield
    finally:
        turn.release()


def _open(check: Check) -> Device:
    if sys.platform == "win32":
        from loopguard.questions._windows import WindowsConsole

        return WindowsConsole(check)
    from loopguard.questions._posix import PosixTerminal

    return PosixTerminal(check)


def _ask(device: Device, call: ToolCall) -> Approval:
    code = "".join(secrets.choice(_LETTERS) for _ in range(4))
    text = _question(call, device.columns)
    if "[hidden" in text:
        code += " hidden"
        text += "Some of it is hidden: you would approve what you can't see.\n"
    device.write(text)
    while True:
        device.drop_input()
        device.write(f"Type {code} to approve, or n and a reason to deny: ")
        typed = " ".join(device.line().split())
        if typed.lower() == code:
            device.write("Approved.\n")
            return Approval.approve(by="terminal")
        word, _, reason = typed.partition(" ")
        if word.lower() in ("n", "no"):
            device.write("Denied.\n")
            return Approval.deny(reason or None, by="terminal")
        device.write("That is neither.\n")


def _question(call: ToolCall, columns: int) -> str:
    lines = ["", f"loopguard: may {display_name(call.name)} run?"]
    for name, value in redact(call.arguments).items():
        lines += behind_rule(f"{display(name)} = {display_value(value)}", columns - 7)
    if not call.run.outside:
        lines.append(f"run: {display(call.run.name, 200)} ({display(call.run.id)}){_iteration(call)}")
    if isinstance(call, ToolCall) and call.estimate:  # or a budget asks to be extended, in the shape of a call
        lines.append(f"cost: at most {', '.join(money(amount, unit) for unit, amount in call.estimate)}")
    return "\n".join([*lines, ""])


def behind_rule(text: str, width: int) -> list[str]:
    """An argument behind a rule: a value that wraps by itself could pass for the lines around it."""
    width = max(width if text.isascii() else width // 2, 10)  # a wide character takes two columns
    return [f"    | {text[start : start + width]}" for start in range(0, len(text), width)]


def _iteration(call: ToolCall) -> str:
    run = call.run
    if not run.iteration:
        return ""
    return f", iteration {run.iteration}" + (f" of {run.max}" if run.max is not None else "")


def _after_fork() -> None:
    global _turn
    _turn = threading.Lock()  # the thread that held it isn't in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
