"""A run that is killed in the middle, and goes on where it was: nothing is paid twice.

The loop pays three invoices, one in each iteration. The first process is killed with kill -9 while it is at the
second: the transfer has been made, the report after it hasn't. The second process is given the same run id.

Prints:

    process 1
      pay INV-1 … paid
      report INV-1 … sent
      pay INV-2 … paid
      report INV-2 … killed
    process 2
      report INV-2 … sent
      pay INV-3 … paid
      report INV-3 … sent
      books closed: ['INV-1 paid', 'INV-2 paid', 'INV-3 paid']
    process 3
      books closed: ['INV-1 paid', 'INV-2 paid', 'INV-3 paid']
    every invoice was paid once; the journal is whole
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress

from loopguard import RunNotFound, journal, loop, tool

STORE = "sqlite:///runs.db"
INVOICES = ["INV-1", "INV-2", "INV-3"]


@tool  # must not happen twice
def pay(invoice: str) -> str:
    say(f"  pay {invoice} … paid")
    return f"{invoice} paid"


@tool(idempotent=True)  # may happen twice: the receiver drops what it knows by current_call().idempotency_key
def report(invoice: str) -> None:
    if os.environ.get("KILLED_AT") == invoice:
        say(f"  report {invoice} … killed")
        os.kill(os.getpid(), signal.SIGKILL)
    say(f"  report {invoice} … sent")


@loop(max=10, until=lambda paid: len(paid) == len(INVOICES), store=STORE)
def close_books(paid: list[str]) -> list[str]:
    invoice = INVOICES[len(paid)]
    done = pay(invoice)
    report(invoice)
    return [*paid, done]


def say(text: str) -> None:
    print(text, flush=True)


def process(number: int, **environment: str) -> None:
    say(f"process {number}")
    subprocess.run([sys.executable, __file__, "work"], env={**os.environ, **environment}, check=False)


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        result = close_books.run([], run_id="2026-11")
        say(f"  books closed: {result.value}")
    else:
        with suppress(RunNotFound):  # of the last time you ran this
            journal.open(STORE).delete("2026-11")
        process(1, KILLED_AT="INV-2")
        process(2)
        process(3)  # over already: the recorded result, and nothing runs
        book = journal.open(STORE)
        finished = [event.key for event in book.events("2026-11") if type(event).__name__ == "ToolFinished"]
        assert len(finished) == len(set(finished)) == 6
        assert book.verify("2026-11") is None
        say("every invoice was paid once; the journal is whole")
