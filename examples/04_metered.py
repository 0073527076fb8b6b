"""Every model call under one USD budget: the SDK's tool runner, and a stream that is left half way.

Each attempt is reserved before it is sent, at its input and max_tokens, and settled after it at what the
API reported; a stream that is left early, at what was received of it. What doesn't fit isn't sent.

It is offline: a scripted model behind a real HTTP server answers the real SDK.

Prints:

    call                  input  cached  output       cost  budget left
    tool runner, turn 1    2000       0     120  $0.007800    $0.042200
    tool runner, turn 2    2300    1900     200  $0.004770    $0.037430
    stream, left early     2500       0    1020  $0.022800    $0.014630
    essay                   not sent: lower max_tokens from 2000 to 958, or answer with what you have.
    spent $0.035370 of $0.05
"""

import threading

import anthropic
from anthropic import beta_tool

from loopguard import Budget, BudgetExceeded, Guard, PriceBook, current_run, meter
from loopguard.testing import MessagesServer, Reply

PRICES = PriceBook({"writer": {"input": 3, "output": 15, "cache_read": 0.30}})  # USD per million tokens
QUESTION = [{"role": "user", "content": "What does the archive say about lighthouses?"}]
STORY = Reply.text("Once upon a time. " * 340, usage={"input_tokens": 2500, "output_tokens": 1700})
ANSWERS = [
    Reply.tool_use("search", {"query": "lighthouse"}, usage={"input_tokens": 2000, "output_tokens": 120}),
    Reply.text("Nothing.", usage={"input_tokens": 400, "cache_read_input_tokens": 1900, "output_tokens": 200}),
    Reply.events([*STORY.as_events()[:4], threading.Event()]),  # its first third, and a pause without end
]


@beta_tool
def search(query: str) -> str:
    """Search the archive.

    Args:
        query: What for.
    """
    return f"nothing about {query}"


labels = iter(["tool runner, turn 1", "tool runner, turn 2", "stream, left early"])


def show(event: object) -> None:
    """A line of the table for every model call that is settled."""
    if type(event).__name__ == "ModelCalled":
        used, left = event.usage, current_run().remaining("usd")
        print(
            f"{next(labels):<20} {used.input_tokens:>6} {used.cache_read_tokens:>7} {used.output_tokens:>7}"
            f"  ${event.cost:.6f}    ${left:.6f}"
        )


with MessagesServer(ANSWERS) as server, Guard(Budget(usd=0.05), on_event=show).scope("research") as run:
    client = meter(anthropic.Anthropic(base_url=server.url, api_key="none"), prices=PRICES)
    print(f"{'call':<20} {'input':>6} {'cached':>7} {'output':>7} {'cost':>10}  budget left")

    client.beta.messages.tool_runner(model="writer", max_tokens=1000, messages=QUESTION, tools=[search]).until_done()

    with client.messages.stream(model="writer", max_tokens=2000, messages=QUESTION) as stream:
        text = ""
        for piece in stream.text_stream:
            text += piece
            if "time" in text:  # that's how fairy tales begin: leave
                break

    try:
        client.messages.create(model="writer", max_tokens=2000, messages=QUESTION)
    except BudgetExceeded as refusal:
        print(f"{'essay':<20}    not sent: {str(refusal).partition('It was not sent: ')[2]}")
    print(f"spent ${run.spent():.6f} of $0.05")
