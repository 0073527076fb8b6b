"""A flow of steps: gather, have a model write, wait for a person, publish. No process lives while it waits.

The first process gathers, has the model write (which looks something up with a tool of the guard), parks the run and
ends. Days later a second one is given the answer: it goes on with what the model wrote then, and asks it nothing.

It is offline: a scripted model behind a real HTTP server answers the real SDK.

Prints:

    process 1
      gathered 3 commits
      looked up issue 7
      the model was asked 2 times
      waiting for: Publish this? “Retries no longer lose their feedback (#7).”
    process 2
      published: Retries no longer lose their feedback (#7).
      the model was asked 0 times
      steps: gather, write, Note, publish_it, publish
"""

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

import anthropic

from loopguard import Flow, Guard, MaxSteps, RunNotFound, await_input, journal, llm
from loopguard.testing import MessagesServer, Reply

STORE = "sqlite:///flow.db"
ANSWER = "Retries no longer lose their feedback (#7)."
policy = Guard(MaxSteps(10))
server = MessagesServer([Reply.tool_use("look_up", {"issue": 7}), ANSWER])
direct = anthropic.DefaultHttpxClient(trust_env=False)  # past any proxy
client = anthropic.Anthropic(base_url=server.url, api_key="none needed", http_client=direct)


@dataclass
class Note:
    text: str
    publish_it: bool | None = None  # where await_input puts the answer


@policy.tool
def look_up(issue: int) -> str:
    """Look up an issue."""
    print(f"  looked up issue {issue}")
    return "A retried step didn't get the reason."


def gather(repository: str) -> dict[str, object]:
    print("  gathered 3 commits")
    return {"repository": repository, "commits": ["fix retries (#7)", "typo", "typo"]}


def publish(note: Note) -> str:
    print(f"  published: {note.text}" if note.publish_it else "  thrown away")
    return note.text


release = Flow(
    "release_note",
    [
        gather,
        llm("Write one line for the changelog of {repository}: {commits}", client=client, name="write"),
        Note,
        await_input("publish_it", "Publish this?"),
        publish,
    ],
    guard=policy,
    store=STORE,
)


if __name__ == "__main__":
    if sys.argv[1:] == ["begin"]:
        result = release.run("loopguard", run_id="v1.2")
        (question,) = journal.open(STORE).questions()  # or: loopguard pending
        print(f"  the model was asked {len(server.requests)} times")
        print(f"  waiting for: {question.prompt} “{result.value.text}”")
    elif sys.argv[1:] == ["answer"]:
        result = release.resume_with("v1.2", True, by="ann")  # or: loopguard answer, and release.resume("v1.2")
        print(f"  the model was asked {len(server.requests)} times")
        print(f"  steps: {', '.join(release.results(result))}")
    else:
        with suppress(RunNotFound):  # of the last time you ran this
            journal.open(STORE).delete("v1.2")
        for number, phase in enumerate(["begin", "answer"], 1):
            print(f"process {number}", flush=True)
            subprocess.run([sys.executable, __file__, phase], check=True)
