"""llm: one augmented model turn, against the scripted Messages API over real HTTP."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import pytest

from loopguard import (
    Budget,
    ConfigurationError,
    Flow,
    Guard,
    LoopGuardError,
    MaxSteps,
    StopReason,
    journal,
    llm,
    loop,
    meter,
    step,
    tool,
)
from loopguard.evaluators import Check
from loopguard.journal import _writer
from loopguard.testing import MessagesServer, Reply

PRICES = {"m": {"input": 3, "output": 15}}


@dataclass
class Draft:
    text: str
    quality: int = 0


class Stage:
    """Servers with a script, clients of both colours for them, and one event loop for all; closed after the test."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.opened: list[Any] = []

    def serve(self, *script: Any) -> MessagesServer:
        self.opened.append(MessagesServer(list(script)))
        return self.opened[-1]  # type: ignore[no-any-return]  # what was just put there

    def client(self, server: MessagesServer, colour: str = "sync") -> Any:
        options: dict[str, Any] = {"base_url": server.url, "api_key": "none"}
        if colour == "sync":
            direct = anthropic.DefaultHttpxClient(trust_env=False)
            self.opened.append(anthropic.Anthropic(http_client=direct, **options))
        else:
            adirect = anthropic.DefaultAsyncHttpxClient(trust_env=False)
            self.opened.append(anthropic.AsyncAnthropic(http_client=adirect, **options))
        return self.opened[-1]

    def run(self, made: Callable[[], Any]) -> Any:
        """What comes of it, awaited where it has to be."""

        async def awaited() -> Any:
            found = made()
            return await found if inspect.isawaitable(found) else found

        return self.runner.run(awaited())

    def close(self) -> None:
        for each in reversed(self.opened):
            self.run(each.close)
        self.runner.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Where models are played."""
    stage = Stage()
    yield stage
    stage.close()


def asked(server: MessagesServer, number: int = 0) -> Any:
    """The messages of a request."""
    return server.requests[number]["body"]["messages"]


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_the_model_s_text_is_the_next_state(colour: str, stage: Stage) -> None:
    """The prompt is rendered from the state; both colours of client."""
    server = stage.serve("A story about cats.")
    client = stage.client(server, colour)
    flow = Flow("story", [lambda: {"topic": "cats", "n": 3}, llm("Write {n} words about {topic}.", client=client)])
    result = stage.run(flow.run)
    assert result.value == "A story about cats."
    assert asked(server) == [{"role": "user", "content": "Write 3 words about cats."}]
    assert (result.usage.model_calls, result.usage.tokens) == (1, result.history[1].usage.tokens)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_tools_run_until_the_model_ends_its_turn(colour: str, stage: Stage) -> None:
    """Those of the run's guard; their calls pass its guardrails."""
    policy = Guard(MaxSteps(1))

    @policy.tool
    def look(what: str) -> str:
        return f"a page about {what}"

    server = stage.serve(
        Reply.text("Let me look.") + Reply.tool_use("look", {"what": "cats"}, id="t1"),
        Reply.tool_use("look", {"what": "dogs"}, id="t2"),
        "Cats.",
    )
    client = stage.client(server, colour)
    flow = Flow("ask", [llm("{state}?", client=client, model="m", system="Be brief.")], guard=policy)
    result = stage.run(lambda: flow.run("Which?"))
    assert result.value == "Cats."
    bodies = [request["body"] for request in server.requests]
    assert [body["tools"][0]["name"] for body in bodies] == ["look"] * 3
    assert {body["system"] for body in bodies} == {"Be brief."}
    last = bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert "a page about cats" in last[2]["content"][0]["content"]
    assert last[4]["content"][0]["is_error"] is True


def test_tools_may_be_given(stage: Stage) -> None:
    """Functions, tools, and those that the API runs itself; the guard's aren't offered then."""
    policy = Guard(MaxSteps(5))

    @policy.tool
    def hidden() -> str:
        return "no"

    @tool
    def look(what: str) -> str:
        return f"seen {what}"

    def count(what: str) -> int:
        return len(what)

    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    server = stage.serve(
        Reply.tool_use("look", {"what": "x"}) + Reply.tool_use("count", {"what": "abc"}),
        Reply.text("On it", stop_reason="pause_turn"),
        "done",
    )
    ask = llm("{state}", client=stage.client(server), tools=[look, count, search])
    result = Flow("ask", [ask], guard=policy).run("go")
    assert result.value == "done"
    assert [each["name"] for each in server.requests[0]["body"]["tools"]] == ["count", "look", "web_search"]
    results = asked(server, 1)[2]["content"]
    assert [each["content"] for each in results] == ["seen x", "3"]
    assert asked(server, 2)[3] == {"role": "assistant", "content": [{"type": "text", "text": "On it"}]}


def test_the_last_turn_is_without_tools(stage: Stage) -> None:
    """A model that never stops asking is bounded, and has to answer; one that doesn't even then is an error."""

    @tool(repeatable=True)
    def look() -> str:
        return "more"

    again = Reply.tool_use("look")
    server = stage.serve(again, again, "Enough.", again, again, again)
    ask = llm("{state}", client=stage.client(server), tools=[look], max_turns=3)
    assert Flow("ask", [ask])("go") == "Enough."
    assert [request["body"].get("tool_choice") for request in server.requests] == [None, None, {"type": "none"}]
    with pytest.raises(LoopGuardError, match="after it was asked 3 times"):
        Flow("ask", [ask])("go")


def test_a_budget_bounds_the_turn(stage: Stage) -> None:
    """The client is metered: what doesn't fit isn't sent, and the flow ends gracefully."""
    server = stage.serve(Reply.text("short", usage={"output_tokens": 500}), "never")
    client = meter(stage.client(server), prices=PRICES)
    ask = llm("{state}", client=client, model="m", max_tokens=1000)
    flow = Flow("ask", [ask, step(ask, name="again")], budget=Budget(usd=0.016))
    result = flow.run("go")
    assert (result.stop_reason, result.value, len(server.requests)) == (StopReason.BUDGET, "short", 1)


@pytest.mark.parametrize(
    ("state", "prompt", "want"),
    [
        ("text", "<{state}>", "<text>"),
        ("text", "{}", "text"),
        ({"a": [1, {"b": None}]}, "{a}", '[\n  1,\n  {\n    "b": null\n  }\n]'),
        ({"a": "{b}", "b": 1.5}, "{a} {b:.3f} {{c}}", "{b} 1.500 {c}"),
        (Draft("x", 3), "{text} {quality}", "x 3"),
        (Draft("x"), "{state}", '{\n  "text": "x",\n  "quality": 0\n}'),
        (None, "nothing", "nothing"),
        (7, lambda state: f"number {state}", "number 7"),
    ],
    ids=range(8),
)
def test_a_prompt_is_rendered_from_the_state(state: Any, prompt: Any, want: str, stage: Stage) -> None:
    """Text and numbers as they are, anything else as JSON; what stands in a value is never a field."""
    server = stage.serve("ok")
    assert llm(prompt, client=stage.client(server))(state) == "ok"
    assert asked(server) == [{"role": "user", "content": want}]


def test_a_prompt_may_be_messages(stage: Stage) -> None:
    """A function of the state that gives them."""
    server = stage.serve("ok")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert llm(lambda state: [*messages, {"role": "user", "content": state}], client=stage.client(server))("c") == "ok"
    assert [each["content"] for each in asked(server)] == ["a", "b", "c"]


@pytest.mark.parametrize("prompt", ["{nothing}", lambda state: [1] * 0], ids=range(2))
def test_a_prompt_that_can_not_be_rendered_is_no_model_s_fault(prompt: Any, stage: Stage) -> None:
    """A ConfigurationError: it isn't retried, and nothing is sent."""
    server = stage.serve("never")
    with pytest.raises(ConfigurationError, match="llm"):
        Flow("ask", [llm(prompt, client=stage.client(server))], max_retries=3)({"a": 1})
    assert server.requests == []


def test_feedback_is_added_to_the_prompt(stage: Stage) -> None:
    """Of a verification, in a flow and in a loop."""
    server = stage.serve("short", "long enough", "short", "long enough")
    ask = llm("Write.", client=stage.client(server))
    check = Check(lambda text: len(text) > 8, "It is too short.")
    assert Flow("ask", [step(ask, verify=check, max_retries=1)])() == "long enough"
    polish: Any = loop(max=3, evaluate=check)(ask)
    assert polish("x") == "long enough"
    for number in (1, 3):
        assert asked(server, number)[1]["content"] == (
            "Your last answer was rejected: It is too short.\nAnswer again, and correct that."
        )


def test_an_answer_is_read_as_a_type(stage: Stage) -> None:
    """The model is told the schema; what doesn't fit is a failure, whose reason is the next attempt's feedback."""
    server = stage.serve('{"text": "a", "quality": "high"}', '```json\n{"text": "a", "quality": 9}\n```')
    ask = llm("Write.", client=stage.client(server), output=Draft)
    result = Flow("ask", [step(ask, max_retries=1), lambda draft: draft.quality]).run()
    assert result.value == 9
    assert '"quality"' in asked(server)[1]["content"]
    assert "quality" in asked(server, 1)[1]["content"].partition("rejected:")[2]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply.text("half of", stop_reason="max_tokens"), "longer than max_tokens=4096"),
        (Reply.text("I can't", stop_reason="refusal"), "refusal"),
        (Reply.blocks(), "without a text"),
        (Reply.text("  \n"), "without a text"),
    ],
    ids=["cut off", "refused", "empty", "blank"],
)
def test_only_a_whole_answer_is_one(reply: Reply, said: str, stage: Stage) -> None:
    """Half a text must not go on as a state."""
    with pytest.raises(LoopGuardError, match=said):
        llm("Write.", client=stage.client(stage.serve(reply)))()


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_an_interrupted_turn_is_replayed(colour: str, stage: Stage, tmp_path: Path) -> None:
    """Its metered model calls and its tools aren't made again."""
    ran: list[str] = []
    policy = Guard()
    dying = True

    class Killed(BaseException):
        pass

    @policy.tool
    def pay(n: int) -> str:
        ran.append(f"pay {n}")
        return "paid"

    @policy.tool(idempotent=True)
    def report(n: int) -> str:
        ran.append(f"report {n}")
        if dying:
            raise Killed
        return "sent"

    server = stage.serve(
        Reply.tool_use("pay", {"n": 1}, id="a"), Reply.tool_use("report", {"n": 1}, id="b"), "All done."
    )
    client = stage.client(server, colour)
    store = f"sqlite:///{tmp_path / 'runs.db'}"
    flow = Flow("pay", [llm("{state}", client=client)], guard=policy, store=store)

    with pytest.raises(Killed):
        stage.run(lambda: flow.run("go", "r"))
    dying = False
    result = stage.run(lambda: flow.resume("r"))
    assert (result.value, result.usage.model_calls) == ("All done.", 3)
    assert (ran, len(server.requests)) == (["pay 1", "report 1", "report 1"], 3)
    assert journal.open(store).verify("r") is None
    _writer.close_writers()


@pytest.mark.parametrize("result", ["text", [{"type": "text", "text": "block"}]], ids=["text", "blocks"])
def test_what_the_model_was_told_is_left_does_not_keep_it_from_being_replayed(
    result: Any, stage: Stage, tmp_path: Path
) -> None:
    """A resumed run has used more than it had then, so that the notes are others: the model isn't asked again."""
    policy = Guard(MaxSteps(2))
    dying = True

    class Killed(BaseException):
        pass

    @policy.tool
    def look(n: int) -> Any:
        return result

    server = stage.serve(*(Reply.tool_use("look", {"n": n}, id=f"t{n}") for n in (1, 2)), "Done.")
    ask = llm("{state}", client=stage.client(server))

    def answer(question: str) -> str:
        text: str = ask(question)
        if dying:
            raise Killed
        return text

    store = f"sqlite:///{tmp_path / 'runs.db'}"
    flow = Flow("ask", [answer], guard=policy, store=store)
    with pytest.raises(Killed):
        flow.run("go", "r")
    dying = False
    assert (flow.resume("r").value, len(server.requests)) == ("Done.", 3)
    told = [request["body"]["messages"][-1]["content"] for request in server.requests]
    assert ["Little is left" in str(each) for each in told] == [False, False, True]
    _writer.close_writers()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt": 5}, "llm(5)"),
        ({"prompt": "{"}, "written twice"),
        ({"client": object()}, "anthropic"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_turns": True}, "max_turns=True"),
        ({"output": lambda: 1}, "Matches"),
        ({"output": Any}, "Matches"),
        ({"name": ""}, "name=''"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_when_it_is_made(options: dict[str, Any], said: str, stage: Stage) -> None:
    """Before anything is sent."""
    given = {"prompt": "{state}", "client": stage.client(stage.serve()), **options}
    with pytest.raises(ConfigurationError) as caught:
        llm(given.pop("prompt"), **given)
    assert said in str(caught.value)
