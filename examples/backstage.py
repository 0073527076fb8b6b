"""What 02_agent.py needs in order to be watched, and no part of the agent: a script, an approver, live progress."""

import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator

import anthropic
from opentelemetry import trace

from loopguard import ToolCall, current_run
from loopguard.questions import ask_in_terminal
from loopguard.testing import MessagesServer, Reply

ONLINE = bool(os.environ.get("ANTHROPIC_API_KEY"))
IN_TERMINAL = sys.stdin.isatty() and sys.stdout.isatty()
COLOURS = sys.stdout.isatty() and "NO_COLOR" not in os.environ
RED, GREEN, YELLOW, BOLD, DIM = "31", "32", "33", "1", "2"

TRACK = Reply.tool_use("track_parcel", {"parcel": "P-77"})
ANSWER = (
    "Your parcel was last scanned in Leipzig nine days ago. I have refunded what I was allowed to; a colleague "
    "will decide about the rest, and about having the depots searched."
)
SCRIPT = [
    Reply.text("Let me look that up.") + Reply.tool_use("look_up_order", {"order": "A-1042"}),
    TRACK,
    Reply.text("No news for nine days? Let me look again.") + TRACK,
    Reply.text("And again.") + TRACK,
    Reply.text("It is lost, then.") + Reply.tool_use("issue_refund", {"order": "A-1042", "amount": 899}),
    Reply.text("And something for the trouble.") + Reply.tool_use("issue_refund", {"order": "A-1042", "amount": 50}),
    Reply.text("People could look for it.") + Reply.tool_use("search_depots", {"parcel": "P-77"}),
    ANSWER,
]


def client() -> anthropic.Anthropic:
    """The real SDK, talking to the real API, or to the script on 127.0.0.1 (past any proxy)."""
    if ONLINE:
        return anthropic.Anthropic()
    direct = anthropic.DefaultHttpxClient(trust_env=False)
    return anthropic.Anthropic(base_url=MessagesServer(SCRIPT).url, api_key="none needed", http_client=direct)


def approver() -> Callable[[ToolCall], object]:
    """Whoever sits at the terminal; where there is none, a clerk with a rule."""
    return ask_in_terminal if IN_TERMINAL else clerk


def clerk(call: ToolCall) -> bool | tuple[bool, str]:
    return True if call.arguments["amount"] <= 100 else (False, "more than $100 is a manager's decision")


@contextlib.contextmanager
def performance() -> Iterator[None]:
    """Say who plays, open the span that all others stand in, and say where else to see them."""
    say("the model:    ", "the real one" if ONLINE else "scripted, on 127.0.0.1 (set ANTHROPIC_API_KEY for a real one)")
    say("the approver: ", "you" if IN_TERMINAL else "scripted, since this is no terminal: no refund above $100")
    with trace.get_tracer("backstage").start_as_current_span("customer_request"):
        yield
    if endpoint := os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        print(f"\nThe same tree was sent to {endpoint}, service support-agent.")
    else:
        print(
            "\nThe same tree in Jaeger, at http://localhost:16686:\n"
            "  docker run --rm --detach -p 16686:16686 -p 4318:4318 jaegertracing/jaeger:2.13.0\n"
            "  OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 make demo"
        )


def show(event: object) -> None:
    """Live progress, out of loopguard's events."""
    run = current_run()
    match type(event).__name__:
        case "IterationStarted":
            say(f"iteration {event.iteration} of {run.max}", colour=BOLD)
        case "ToolFinished":
            spent, cap = run.spent(), run.spent() + run.remaining()
            outcome = event.result if event.error is None else repr(event.error)
            say(f"  ✓ {event.tool} → {outcome}", f"  [${spent:.2f} of ${cap:.2f}]", colour=GREEN)
        case "QuestionAsked":
            say(f"  ? {signature(event)} needs a yes", colour=YELLOW)
        case "ToolRefused":
            say(f"  ✗ {signature(event)} was refused: {event.code}", colour=RED)
            print(textwrap.fill(event.reason or "", 80, initial_indent=" " * 6, subsequent_indent=" " * 6), flush=True)


def signature(event) -> str:
    return f"{event.tool}({', '.join(f'{name}={value!r}' for name, value in event.arguments.items())})"


def say(text: str, rest: str = "", colour: str = DIM) -> None:
    """A line, in colour on a terminal; flushed, to stay in order with what others write to stderr."""
    print(f"\x1b[{colour}m{text}\x1b[0m{rest}" if COLOURS else text + rest, flush=True)
