"""A "Ralph" loop: the same task again and again, until a judge says that it is done, or five times.

The worker starts afresh each time: all it is given is what stands there so far, and what the judge missed
in it. The judge is another model, which has to answer through a tool call; a friendly sentence is no yes.
Both are in one budget, and what the judge costs is in the result.

It is offline: a scripted model behind a real HTTP server answers the real SDK.

Prints:

    pass 1 → stop the writers; copy the table
      the judge: no, nobody can undo it
    pass 2 → stop the writers; copy the table; to undo, rename it back
      the judge: undecided, the judge's reply is not one verdict but: text
    pass 3 → stop the writers; copy the table; to undo, rename it back; start the writers
      the judge: yes, it starts, stops and can be undone
    write completed after 3 iterations (until_llm, $0.0192)
"""

import anthropic

from loopguard import Budget, loop, meter
from loopguard.judges import AnthropicJudge
from loopguard.testing import MessagesServer, Reply

PRICES = {"worker": {"input": 3, "output": 15}, "judge": {"input": 1, "output": 5}}  # USD per million tokens
USAGE = {"input_tokens": 600, "output_tokens": 200}
STEPS = ["stop the writers; copy the table", "; to undo, rename it back", "; start the writers"]


def verdict(passed: bool, reason: str) -> Reply:
    return Reply.tool_use("verdict", {"passed": passed, "reason": reason}, usage=USAGE)


server = MessagesServer(
    [
        Reply.text(STEPS[0], usage=USAGE),
        verdict(False, "nobody can undo it"),
        Reply.text(STEPS[0] + STEPS[1], usage=USAGE),
        Reply.text("Great work, this is done!", usage=USAGE),
        Reply.text("".join(STEPS), usage=USAGE),
        verdict(True, "it starts, stops and can be undone"),
    ]
)
client = meter(anthropic.Anthropic(base_url=server.url, api_key="none"), prices=PRICES)
SAID = {True: "yes", False: "no", None: "undecided"}


@loop(
    max=5,
    until_llm="Could somebody tired follow this runbook at night, and undo it?",
    judge=AnthropicJudge("judge", client),
    budget=Budget(usd=0.50),
)
def write(runbook: str, *, feedback: str | None = None) -> str:
    task = f"Write a runbook for the migration. So far:\n{runbook}\nWhat is missing: {feedback or 'you tell me'}"
    reply = client.messages.create(model="worker", max_tokens=500, messages=[{"role": "user", "content": task}])
    return reply.content[0].text


with server:
    result = write.run("")
for item in result.history:
    (said,) = item.verdicts
    print(f"pass {item.number} → {item.value}\n  the judge: {SAID[said.passed]}, {said.reason}")
print(result)
