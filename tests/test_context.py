"""The message list of a loop: cut anywhere, it stays one that the API accepts."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopguard import ConfigurationError, EvaluationFailed, Guard, Iteration, Verdict, current_run, loop
from loopguard.context import answer_pending, clear_tool_results, compact, feedback_messages, trim
from loopguard.evaluators import JSONFields

SYSTEM = {"role": "system", "content": "You are brief."}
TASK = {"role": "user", "content": "Find the parcel."}


def says(text: str) -> dict[str, Any]:
    """The assistant speaks."""
    return {"role": "assistant", "content": text}


def calls(*ids: str) -> dict[str, Any]:
    """The assistant calls tools, in parallel if they are several."""
    uses = [{"type": "tool_use", "id": each, "name": "look", "input": {"n": each}} for each in ids]
    return {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, *uses]}


def results(*ids: str, text: str | None = None) -> dict[str, Any]:
    """The user hands over results, and may say something with them."""
    blocks: list[Any] = [{"type": "tool_result", "tool_use_id": each, "content": f"result {each}"} for each in ids]
    return {"role": "user", "content": [*blocks, *([{"type": "text", "text": text}] if text else [])]}


def ids(messages: list[Any], kind: str, name: str) -> list[str]:
    """The ids of all calls, or of all results, in order."""
    blocks = [block for message in messages for block in message["content"] if isinstance(block, dict)]
    return [block[name] for block in blocks if block["type"] == kind]


def numbers(messages: list[Any], whole: list[Any]) -> list[int]:
    """Which messages of the whole list these are."""
    return [next(i for i, other in enumerate(whole) if other is message) for message in messages]


ONE_BY_ONE = [SYSTEM, TASK, calls("1"), results("1"), calls("2"), results("2")]


@pytest.mark.parametrize(
    ("keep_last", "kept"),
    [(0, [0, 1]), (1, [0, 1]), (2, [0, 1, 4, 5]), (3, [0, 1, 4, 5]), *((n, [0, 1, 2, 3, 4, 5]) for n in (4, 5, 6, 99))],
)
def test_a_result_stays_with_its_call_or_both_go(keep_last: int, kept: list[int]) -> None:
    """At every size; the system prompt and the task stay at all of them."""
    assert numbers(trim(ONE_BY_ONE, keep_last=keep_last), ONE_BY_ONE) == kept


@pytest.mark.parametrize(
    ("max_tokens", "kept"),
    [(0, [0, 1]), (2, [0, 1]), (3, [0, 1]), (4, [0, 1, 4, 5]), (5, [0, 1, 4, 5]), (6, [0, 1, 2, 3, 4, 5])],
)
def test_tokens_are_counted_over_all_that_is_kept(max_tokens: int, kept: list[int]) -> None:
    """With what has to stay, even where that alone is too much."""
    assert numbers(trim(ONE_BY_ONE, max_tokens=max_tokens, estimator=lambda message: 1), ONE_BY_ONE) == kept
    by_both = trim(ONE_BY_ONE, keep_last=2, max_tokens=max_tokens, estimator=lambda message: 1)
    assert numbers(by_both, ONE_BY_ONE) == [i for i in kept if i not in (2, 3)]


def test_the_default_estimate_is_an_upper_bound() -> None:
    """The one that budgets reserve by: a token for every two bytes."""
    long = [TASK, *(says("word " * 100) for _ in range(10))]
    kept = trim(long, max_tokens=1000)
    assert 2 <= len(kept) <= 4
    assert trim(long, max_tokens=100_000) == long


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Conversations that the API accepts: parallel calls, results in one or several messages, words between."""
    messages: list[dict[str, Any]] = [SYSTEM] * draw(st.integers(0, 2)) + [dict(TASK)]
    for turn in range(draw(st.integers(0, 6))):
        made = [f"{draw(st.sampled_from(['same', turn]))}-{n}" for n in range(draw(st.integers(0, 3)))]
        messages.append(calls(*made) if made else says("Hm."))
        if made:
            split = draw(st.integers(0, len(made) - 1))
            text = draw(st.sampled_from([None, "And hurry."]))
            messages += [results(*made[:split])] if split else []
            messages.append(results(*made[split:], text=text))
        elif draw(st.booleans()):
            messages.append(
                {"role": "user", "content": draw(st.sampled_from(["Go on.", [{"type": "text", "text": "Now."}]]))}
            )
    if draw(st.booleans()):
        messages.append(calls("last-1", "last-2"))
    return messages


def pairs(messages: list[Any]) -> tuple[int, int]:
    """How many results follow their call, and how many stand alone; the calls at the end wait for theirs."""
    waiting: set[str] = set()
    good = alone = 0
    for message in messages:
        for each in ids([message], "tool_result", "tool_use_id"):
            good, alone = (good + 1, alone) if each in waiting else (good, alone + 1)
            waiting.discard(each)
        if message["role"] == "assistant":
            alone += len(waiting)
            waiting = set(ids([message], "tool_use", "id"))
    return good, alone


@given(messages=conversations(), size=st.integers(0, 30), tokens=st.none() | st.integers(0, 30))
@settings(deadline=None)
def test_whatever_the_size_what_is_kept_is_a_whole_conversation(
    messages: list[dict[str, Any]], size: int, tokens: int | None
) -> None:
    """Calls and results in pairs, the user first, the system prompt and the user's last words there, order kept."""
    before = copy.deepcopy(messages)
    kept = trim(messages, keep_last=size, max_tokens=tokens, estimator=lambda message: 1)
    assert messages == before
    assert kept is not messages
    places = numbers(kept, messages)
    assert places == sorted(set(places)) or messages.count(SYSTEM) > 1
    assert pairs(kept)[1] == 0
    rest = [message for message in kept if message["role"] != "system"]
    assert len(kept) - len(rest) == messages.count(SYSTEM)
    assert rest[0]["role"] == "user"
    assert not ids(rest[:1], "tool_result", "tool_use_id")
    spoken = [m for m in messages if m["role"] == "user" and not ids([m], "tool_result", "tool_use_id")]
    assert spoken[-1] in kept
    if messages[-1]["role"] == "assistant" and ids(messages[-1:], "tool_use", "id"):
        assert kept[-1] is messages[-1]
    if size >= len(messages) and (tokens is None or tokens >= len(messages)):
        assert kept == messages
    assert trim(kept, keep_last=size, max_tokens=tokens, estimator=lambda message: 1) == kept


def test_words_that_came_with_results_stay_with_them_and_their_call() -> None:
    """The user's last words count, wherever they stand; so does the last message that is all theirs."""
    messages = [
        TASK,
        says("ok"),
        calls("1"),
        results("1", text="Only in Leipzig!"),
        says("ok"),
        calls("2"),
        results("2"),
    ]
    assert numbers(trim(messages, keep_last=0), messages) == [0, 2, 3]


def test_what_is_kept_does_not_begin_with_the_assistant() -> None:
    """An answer to something that was dropped is dropped, too."""
    messages = [{"role": "user", "content": "Hello"}, says("Hi"), TASK, calls("1"), results("1")]
    assert numbers(trim(messages, keep_last=4), messages) == [2, 3, 4]


def test_an_id_that_comes_again_belongs_to_its_latest_call() -> None:
    """Some models count their calls from 1 in every turn."""
    messages = [TASK, calls("1"), results("1"), calls("1"), results("1")]
    assert numbers(trim(messages, keep_last=2), messages) == [0, 3, 4]


def test_messages_may_be_objects_of_the_sdk() -> None:
    """What `create` returned goes into the list as it is, or its content does."""
    data = {"id": "m", "type": "message", "model": "m", "stop_reason": "tool_use", "stop_sequence": None, **calls("1")}
    reply = anthropic.types.Message.model_validate({**data, "usage": {"input_tokens": 1, "output_tokens": 1}})
    for message in (reply, {"role": "assistant", "content": reply.content}):
        messages = [dict(TASK), says("a"), TASK, message, results("1")]
        for size, kept in ((1, [2]), (2, [2, 3, 4])):
            assert numbers(trim(messages, keep_last=size), messages) == kept
            assert numbers(trim(messages, max_tokens=10_000), messages) == [0, 1, 2, 3, 4]
        assert answer_pending(messages[:4])[-1]["content"][0]["tool_use_id"] == "1"


NO_SIZES = [-1, None, True, float("nan"), float("inf")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "keep_last= or max_tokens="),
        *(({name: value}, name) for name in ("keep_last", "max_tokens") for value in (-1, True, 1.5, "3")),
        *(({"max_tokens": 9, "estimator": lambda message, size=size: size}, "estimator") for size in NO_SIZES),
    ],
)
def test_a_wrong_option_of_trim_is_a_configuration_error(options: dict[str, Any], said: str) -> None:
    """With its name."""
    with pytest.raises(ConfigurationError, match=said):
        trim(ONE_BY_ONE, **options)


def test_nothing_is_trimmed_to_nothing() -> None:
    """Also by generators."""
    assert trim([], keep_last=3) == []
    assert trim(iter(ONE_BY_ONE), keep_last=99) == ONE_BY_ONE
    assert trim([says("a")], keep_last=0) == []


# -- compact ---------------------------------------------------------------------------------------


def test_compacting_summarizes_what_trimming_drops() -> None:
    """The summary stands after the system prompt, so that the task stays the user's last words."""
    asked: list[Any] = []

    def summarize(messages: list[Any]) -> str:
        asked.append(messages)
        return " One result so far. "

    made = compact(ONE_BY_ONE, summarize=summarize, keep_last=2)
    assert asked == [ONE_BY_ONE[2:4]]
    assert [made[0], *made[2:]] == trim(ONE_BY_ONE, keep_last=2)
    assert made[1]["role"] == "user"
    assert "2 messages" in made[1]["content"]
    assert "<summary>\nOne result so far.\n</summary>" in made[1]["content"]


def test_compacting_again_takes_the_older_summary_in() -> None:
    """One summary at any time, and the task never lost."""

    def summarize(messages: list[Any]) -> str:
        return f"{sum('<summary>' in str(message) for message in messages)} older summaries"

    once = compact(ONE_BY_ONE, summarize=summarize, keep_last=2)
    twice = compact([*once, calls("3"), results("3")], summarize=summarize, keep_last=2)
    assert [message["content"] for message in twice if "<summary>" in str(message)] == [
        "What came before, 3 messages in short:\n<summary>\n1 older summaries\n</summary>"
    ]
    assert twice[2:] == [TASK, calls("3"), results("3")]


def test_nothing_to_drop_asks_nobody_and_an_empty_summary_changes_nothing() -> None:
    """What would be lost stays."""
    assert compact(ONE_BY_ONE, summarize=lambda messages: 1 / 0, keep_last=6) == ONE_BY_ONE
    assert compact(ONE_BY_ONE, summarize=lambda messages: " \n", keep_last=2) == ONE_BY_ONE


def test_an_async_summary_is_awaited() -> None:
    """With nothing to drop, too."""

    async def summarize(messages: list[Any]) -> str:
        return f"{len(messages)} gone"

    async def main() -> None:
        assert "2 gone" in (await compact(ONE_BY_ONE, summarize=summarize, keep_last=2))[1]["content"]
        assert await compact(ONE_BY_ONE, summarize=summarize, keep_last=6) == ONE_BY_ONE

    asyncio.run(main())


@pytest.mark.parametrize(
    "options", [{"summarize": "short"}, {"summarize": lambda messages: None}, {"summarize": len, "keep_last": -1}]
)
def test_a_wrong_option_of_compact_is_a_configuration_error(options: dict[str, Any]) -> None:
    """A summary is a text."""
    with pytest.raises(ConfigurationError, match="compact"):
        compact(ONE_BY_ONE, **{"keep_last": 2, **options})


# -- results ---------------------------------------------------------------------------------------


@given(messages=conversations(), keep=st.integers(0, 20))
@settings(deadline=None)
def test_old_results_are_cleared_and_the_latest_stay(messages: list[dict[str, Any]], keep: int) -> None:
    """Nothing else changes, nor do the caller's messages; clearing twice is clearing once."""
    before = copy.deepcopy(messages)
    cleared = clear_tool_results(messages, keep=keep)
    assert messages == before
    old = ids(messages, "tool_result", "content")
    new = ids(cleared, "tool_result", "content")
    gone = max(0, len(old) - keep)
    assert new == ["[an old tool result, cleared to save space]"] * gone + old[gone:]
    assert ids(cleared, "tool_result", "tool_use_id") == ids(messages, "tool_result", "tool_use_id")
    assert [m for m in cleared if not ids([m], "tool_result", "content")] == [
        m for m in messages if not ids([m], "tool_result", "content")
    ]
    assert clear_tool_results(cleared, keep=keep) == cleared


@pytest.mark.parametrize("keep", [-1, True, 1.5])
def test_keep_is_a_count(keep: Any) -> None:
    """A mistake shows at once."""
    with pytest.raises(ConfigurationError, match="keep"):
        clear_tool_results(ONE_BY_ONE, keep=keep)


def test_a_guard_caps_the_results_of_its_tools() -> None:
    """The model is told how much was cut; errors are capped like results."""
    guard = Guard()

    @guard.tool
    def look(n: str) -> str:
        """Look."""
        if n == "2":
            raise KeyError("x" * 5000)
        return "0123456789" * 100

    with guard.scope("sync"):
        sync = guard.run_tools(calls("1", "2"), max_chars=10)
        whole = guard.run_tools(calls("1"))
    with guard.scope("async"):
        assert asyncio.run(guard.arun_tools(calls("1", "2"), max_chars=10)) == sync
    assert sync[0]["content"] == "0123456789\n[cut: 990 of 1,000 characters left out]"
    assert sync[1]["content"].startswith("KeyError: ")
    assert len(sync[1]["content"]) < 100
    assert len(whole[0]["content"]) == 1000
    for wrong in (-1, True, "10"):
        with pytest.raises(ConfigurationError, match="max_chars"):
            guard.run_tools(calls("1"), max_chars=wrong)  # type: ignore[arg-type]  # on purpose


@given(messages=conversations(), cut=st.integers(0, 30))
@settings(deadline=None)
def test_every_pending_call_gets_a_result_that_says_not_run(messages: list[dict[str, Any]], cut: int) -> None:
    """Right behind the call, and none that has a result gets another."""
    messages = messages[:cut] or [TASK]
    before = copy.deepcopy(messages)
    made = answer_pending(messages, reason="the budget is spent")
    assert messages == before
    assert pairs([*made, says("Go on.")])[1] == 0
    added = [text for text in ids(made, "tool_result", "content") if text.startswith("Not run")]
    assert len(ids(made, "tool_result", "content")) == len(ids(messages, "tool_result", "content")) + len(added)
    assert set(added) <= {"Not run: the budget is spent."}
    assert answer_pending(made) == made


def test_a_missing_result_goes_to_the_front_of_the_next_message_of_the_user() -> None:
    """Where the API wants it; words that follow stay behind it."""
    made = answer_pending(
        [TASK, calls("1", "2"), results("2"), says("a"), calls("3"), {"role": "user", "content": "Stop."}]
    )
    assert ids(made[2:3], "tool_result", "tool_use_id") == ["1", "2"]
    assert [block["type"] for block in made[5]["content"]] == ["tool_result", "text"]
    assert made[5]["content"][0]["is_error"] is True


def test_a_loop_stopped_with_two_pending_calls_can_go_on() -> None:
    """Each gets a "not run" result: from the guard as a refusal, or afterwards."""
    guard = Guard()

    @guard.tool
    def look(n: str) -> str:
        """Look."""
        return n

    @loop(max=5, guard=guard)
    def agent(messages: list[Any]) -> list[Any]:
        run = current_run()
        assert run is not None
        run.stop("enough")
        refused.extend(guard.run_tools(calls("1", "2")))
        return [*messages, calls("1", "2")]

    refused: list[dict[str, Any]] = []
    result = agent.run([TASK])
    assert (result.stop_reason, len(result.value)) == ("stopped", 2)
    assert [(answer["tool_use_id"], answer["is_error"]) for answer in refused] == [("1", True), ("2", True)]
    assert all("enough" in answer["content"] for answer in refused)
    assert ids(answer_pending(result.value), "tool_result", "tool_use_id") == ["1", "2"]


# -- feedback --------------------------------------------------------------------------------------


def test_rejected_values_and_reasons_become_messages() -> None:
    """The attempt as the assistant's, the reason as the user's; what was accepted is left out."""
    history = [
        Iteration(1, "prose", verdicts=(Verdict(False, "no JSON"),)),
        Iteration(2, {"a": 1}, verdicts=(Verdict(True), Verdict(None, "unclear"), Verdict(False, "not done"))),
        Iteration(3, "fine", verdicts=(Verdict(True),)),
        Iteration(4, " ", verdicts=(Verdict(False),)),
        Iteration(5, "open"),
    ]
    assert feedback_messages(history) == [
        {"role": "assistant", "content": "prose"},
        {"role": "user", "content": "no JSON"},
        {"role": "assistant", "content": '{"a":1}'},
        {"role": "user", "content": "unclear\nnot done"},
        {"role": "assistant", "content": "(nothing)"},
        {"role": "user", "content": "That was not accepted. Try again."},
    ]
    assert feedback_messages([]) == []


def test_feedback_comes_from_the_run_inside_a_body_and_from_the_result_outside() -> None:
    """The body sees what was rejected before; a failed loop carries all of it."""
    seen: list[Any] = []

    @loop(max=5, evaluate=JSONFields("summary"), max_retries=2)
    def write(task: str) -> str:
        run = current_run()
        assert run is not None
        seen.append([{"role": "user", "content": task}, *feedback_messages(run.history)])
        return f"draft {run.iteration}"

    with pytest.raises(EvaluationFailed) as caught:
        write("Summarize.")
    roles = [[message["role"] for message in messages] for messages in seen]
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user", "assistant", "user"]]
    assert [message["content"] for message in seen[-1] if message["role"] == "assistant"] == ["draft 1", "draft 2"]
    assert feedback_messages(caught.value.result)[:4] == seen[-1][1:]
    assert len(feedback_messages(caught.value.result)) == 6
