"""The scripted Messages API, spoken to by the real SDK."""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import beta_async_tool, beta_tool
from anthropic.types import Message, ParsedMessage

from loopguard.exceptions import ConfigurationError
from loopguard.testing.replies import Reply
from loopguard.testing.server import MessagesServer, Script

QUESTION: dict[str, Any] = {"model": "m-1", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}


def sdk(server: MessagesServer, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="test", **{"max_retries": 0, **options})


def async_sdk(server: MessagesServer) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=server.url, api_key="test", max_retries=0)


def create(server: MessagesServer) -> Message:
    with sdk(server) as client:
        message: Message = client.messages.create(**QUESTION)
        return message


def stream(server: MessagesServer) -> Message | ParsedMessage[None]:
    with sdk(server) as client, client.messages.stream(**QUESTION) as events:
        return events.get_final_message()


def create_async(server: MessagesServer) -> Message:
    async def call() -> Message:
        async with async_sdk(server) as client:
            message: Message = await client.messages.create(**QUESTION)
            return message

    return asyncio.run(call())


def stream_async(server: MessagesServer) -> Message | ParsedMessage[None]:
    async def call() -> Message | ParsedMessage[None]:
        async with async_sdk(server) as client, client.messages.stream(**QUESTION) as events:
            return await events.get_final_message()

    return asyncio.run(call())


WAYS = (create, stream, create_async, stream_async)
way = pytest.mark.parametrize("call", WAYS)
Call = Callable[[MessagesServer], Message]

EVERYTHING = (
    Reply.thinking("Let me think about it.", signature="sig")
    + Reply.redacted_thinking("xyz")
    + Reply.web_search("loops", {"https://example.com/": "Loops"})
    + Reply.text("Schöne Grüße 👋")
    + Reply.tool_use("search", {"query": "ü", "deep": {"n": [1, 2.5, None]}}, id="toolu_x")
)


@way
def test_reply_arrives_the_same_in_every_way_to_call(call: Call) -> None:
    """Sync or async, streamed or not: the SDK ends up with one and the same message."""
    with MessagesServer([EVERYTHING]) as server:
        message = call(server)
    thinking, redacted, search, found, text, tool = message.content
    assert thinking.type == "thinking"
    assert (thinking.thinking, thinking.signature) == ("Let me think about it.", "sig")
    assert redacted.type == "redacted_thinking"
    assert redacted.data == "xyz"
    assert search.type == "server_tool_use"
    assert (search.name, search.input) == ("web_search", {"query": "loops"})
    assert found.type == "web_search_tool_result"
    assert isinstance(found.content, list)
    assert (found.tool_use_id, found.content[0].url) == (search.id, "https://example.com/")
    assert text.type == "text"
    assert text.text == "Schöne Grüße 👋"
    assert tool.type == "tool_use"
    assert tool.input == {"query": "ü", "deep": {"n": [1, 2.5, None]}}
    assert (message.model, message.stop_reason, tool.id) == ("m-1", "tool_use", "toolu_x")


@way
def test_usage_arrives_the_same_in_every_way_to_call(call: Call) -> None:
    """Given usage fields reach the SDK's Usage, and the ledger says what was told."""
    usage = {
        "input_tokens": 7,
        "output_tokens": 11,
        "cache_read_input_tokens": 3,
        "cache_creation": {"ephemeral_5m_input_tokens": 2, "ephemeral_1h_input_tokens": 4},
        "output_tokens_details": {"thinking_tokens": 5},
        "server_tool_use": {"web_search_requests": 1, "web_fetch_requests": 2},
    }
    with MessagesServer([Reply.text("x", usage=usage)]) as server:
        got = call(server).usage
    expected = {**usage, "cache_creation_input_tokens": 6, "service_tier": "standard"}
    assert got.to_dict() == expected
    assert [exchange.usage for exchange in server.ledger] == [expected]
    assert server.ledger[0].complete


def test_usage_has_defaults_that_follow_the_request_and_the_content() -> None:
    """Without given numbers, longer prompts and answers cost more, and searches are counted."""
    with (
        MessagesServer([Reply.text("x"), Reply.text("x" * 400) + Reply.web_search("q")]) as server,
        sdk(server) as client,
    ):
        short = client.messages.create(**QUESTION).usage
        long = client.messages.create(**{**QUESTION, "system": "y" * 404}).usage
    assert long.input_tokens >= short.input_tokens + 100
    assert long.output_tokens >= short.output_tokens + 100
    assert short.server_tool_use is None
    assert long.server_tool_use is not None
    assert long.server_tool_use.web_search_requests == 1


@way
def test_stop_reason_and_other_fields_can_be_set(call: Call) -> None:
    """A refusal without content, with its details and another model, is one call of Reply.blocks."""
    details = {"type": "refusal", "category": "cyber", "explanation": None}
    refusal = Reply.blocks(stop_reason="refusal", fields={"stop_details": details, "model": "m-2", "id": "msg_x"})
    with MessagesServer([refusal]) as server:
        message = call(server)
    assert (message.id, message.model, message.stop_reason, message.content) == ("msg_x", "m-2", "refusal", [])
    assert message.stop_details is not None
    assert message.stop_details.category == "cyber"


def test_stream_comes_in_several_deltas_with_usage_at_both_ends() -> None:
    """`create(stream=True)` sees the API's event order, text in pieces and the totals in message_delta."""
    with MessagesServer([Reply.text("one two three", usage={"output_tokens": 9})]) as server, sdk(server) as client:
        events = list(client.messages.create(**QUESTION, stream=True))
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, end = events[0], events[-2]
    assert start.type == "message_start"
    assert start.message.usage.output_tokens == 1
    assert end.type == "message_delta"
    assert (end.usage.output_tokens, end.delta.stop_reason) == (9, "end_turn")


@pytest.mark.parametrize("streamed", [False, True])
def test_citations_of_a_text_reach_the_client(streamed: bool) -> None:
    """A text block's citations arrive, streamed as citations_delta."""
    citation = {
        "type": "web_search_result_location",
        "cited_text": "c",
        "encrypted_index": "e",
        "title": "t",
        "url": "https://example.com/",
    }
    with MessagesServer([Reply.blocks({"type": "text", "text": "cited", "citations": [citation]})]) as server:
        block = (stream if streamed else create)(server).content[0]
    assert block.type == "text"
    assert block.citations is not None
    assert [found.cited_text for found in block.citations] == ["c"]


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_runner_runs_its_tools_against_the_script(streamed: bool) -> None:
    """The SDK's tool runner calls the tool, sends its result and ends with the script's last reply."""
    seen: list[str] = []

    @beta_tool
    def search(query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        seen.append(query)
        return f"found {query}"

    with MessagesServer([Reply.tool_use("search", {"query": "x"}), "Done."]) as server, sdk(server) as client:
        runner = client.beta.messages.tool_runner(**QUESTION, tools=[search], stream=streamed)
        final = runner.until_done()
    assert seen == ["x"]
    assert final.content[0].type == "text"
    assert final.content[0].text == "Done."
    (result,) = server.requests[1]["body"]["messages"][-1]["content"]
    assert (result["tool_use_id"], result["content"]) == ("toolu_1_0", "found x")


def test_async_tool_runner_runs_its_tools_against_the_script() -> None:
    """The asynchronous tool runner ends with the script's last reply, too."""

    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add.

        Args:
            a: One number.
            b: The other.
        """
        return str(a + b)

    async def run(server: MessagesServer) -> Any:
        async with async_sdk(server) as client:
            return await client.beta.messages.tool_runner(**QUESTION, tools=[add]).until_done()

    with MessagesServer([Reply.tool_use("add", {"a": 2, "b": 3}), "Five."]) as server:
        final = asyncio.run(run(server))
    assert final.content[0].text == "Five."
    assert server.requests[1]["body"]["messages"][-1]["content"][0]["content"] == "5"


def test_tool_ids_differ_when_one_reply_is_sent_twice() -> None:
    """A reply without an id of its own may be scripted repeatedly."""
    with MessagesServer([Reply.tool_use("search")] * 2) as server:
        first, second = create(server).content[0], create(server).content[0]
    assert first.type == "tool_use"
    assert second.type == "tool_use"
    assert first.id != second.id


def test_function_decides_from_the_request_body() -> None:
    """A script may be a function of the request's body."""
    script: Script = lambda body: f"{body['model']} heard {body['messages'][-1]['content']}"  # noqa: E731  # as users write it
    with MessagesServer(script) as server:
        block = create(server).content[0]
    assert block.type == "text"
    assert block.text == "m-1 heard Hi"


def test_requests_are_recorded_with_path_headers_and_body() -> None:
    """What the client sent can be looked at, headers by lower-case names."""
    with MessagesServer(["a", "b"]) as server, sdk(server) as client:
        client.messages.create(**QUESTION, extra_headers={"X-Trace": "1"})
        client.beta.messages.create(**QUESTION, extra_query={"beta": "true"})
    first, second = server.requests
    assert (first["path"], first["query"], first["headers"]["x-trace"]) == ("/v1/messages", "", "1")
    assert (second["path"], second["query"]) == ("/v1/messages", "beta=true")
    assert first["body"] == QUESTION
    assert "anthropic-version" in first["headers"]


@pytest.mark.parametrize(
    ("scripted", "expected"),
    [
        (42, 42),
        (lambda body: len(body["messages"]), 1),
        (None, len(json.dumps([None, None, QUESTION["messages"]])) // 4),
    ],
)
def test_count_tokens_answers_without_using_up_the_script(scripted: Any, expected: int) -> None:
    """count_tokens gives the scripted number, or an estimate, sync and async."""

    async def count(server: MessagesServer) -> int:
        async with async_sdk(server) as client:
            counted = await client.beta.messages.count_tokens(model="m-1", messages=QUESTION["messages"])
            return counted.input_tokens

    with MessagesServer(["hello"], count_tokens=scripted) as server:
        with sdk(server) as client:
            assert client.messages.count_tokens(model="m-1", messages=QUESTION["messages"]).input_tokens == expected
        assert asyncio.run(count(server)) == expected
        assert create(server).content[0].type == "text"
    assert [exchange.usage is None for exchange in server.ledger] == [True, True, False]


@way
def test_script_that_ran_out_says_so_and_is_not_retried(call: Call) -> None:
    """One request past the script is an invalid_request_error that names the cause."""
    with MessagesServer() as server, pytest.raises(anthropic.BadRequestError, match="has run out") as caught:
        call(server)
    assert caught.value.type == "invalid_request_error"
    assert len(server.requests) == 1


def test_script_that_fails_says_so_and_is_not_retried() -> None:
    """An exception in the script function reaches the client's error message, once."""

    def broken(body: dict[str, Any]) -> Reply:
        raise LookupError(f"nothing for {body['model']}")

    with (
        MessagesServer(broken) as server,
        sdk(server, max_retries=2) as client,
        pytest.raises(anthropic.InternalServerError, match="LookupError: nothing for m-1"),
    ):
        client.messages.create(**QUESTION)
    assert len(server.requests) == 1


def test_script_that_forgets_to_return_says_so() -> None:
    """A function that gives None instead of a reply is told what it should give."""
    nothing: Any = lambda body: None  # noqa: E731  # as users write it
    with MessagesServer(nothing) as server, pytest.raises(anthropic.InternalServerError, match="not None"):
        create(server)


def test_unknown_path_is_a_404_in_the_apis_shape() -> None:
    """What the server doesn't have is a NotFoundError, not a retried 501."""
    with (
        MessagesServer() as server,
        sdk(server, max_retries=2) as client,
        pytest.raises(anthropic.NotFoundError, match="/v1/models/m-1"),
    ):
        client.models.retrieve("m-1")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, anthropic.BadRequestError, "invalid_request_error"),
        (401, anthropic.AuthenticationError, "authentication_error"),
        (403, anthropic.PermissionDeniedError, "permission_error"),
        (429, anthropic.RateLimitError, "rate_limit_error"),
        (500, anthropic.InternalServerError, "api_error"),
        (529, anthropic.APIStatusError, "overloaded_error"),
    ],
)
def test_error_is_the_sdks_own_exception(status: int, error: type[anthropic.APIStatusError], kind: str) -> None:
    """Each status arrives as the SDK's class for it, with the API's type, and the ledger has no usage."""
    with MessagesServer([Reply.error(status, "no")]) as server, pytest.raises(error, match="no") as caught:
        stream(server)
    assert (caught.value.status_code, caught.value.type, caught.value.request_id) == (status, kind, "req_1")
    assert [(exchange.status, exchange.usage) for exchange in server.ledger] == [(status, None)]


def test_sdk_retries_an_error_after_the_time_the_reply_names() -> None:
    """retry_after becomes the header that the SDK obeys: two attempts, the second answered."""
    with MessagesServer([Reply.error(429, retry_after=0.05), "ok"]) as server, sdk(server, max_retries=1) as client:
        started = time.monotonic()
        client.messages.create(**QUESTION)
        waited = time.monotonic() - started
    assert 0.05 <= waited < 0.4  # without the header, the SDK waits at least 0.375 s
    assert [exchange.status for exchange in server.ledger] == [429, 200]
    assert server.requests[1]["headers"]["x-stainless-retry-count"] == "1"


def test_raw_response_shows_status_headers_and_body() -> None:
    """Headers of a reply are those of the HTTP response."""
    with MessagesServer([Reply.text("x", headers={"X-Limit": "9"})]) as server, sdk(server) as client:
        response = client.messages.with_raw_response.create(**QUESTION)
    assert (response.http_response.status_code, response.headers["x-limit"]) == (200, "9")
    assert response.request_id == "req_1"
    assert response.parse().content[0].type == "text"


@pytest.mark.parametrize("sent", [0, 1, 4, 8, 9])
def test_stream_cut_after_events_is_a_connection_error(sent: int) -> None:
    """The client gets exactly the events sent (the second is a ping), then an error; the ledger knows how far."""
    usage = {"input_tokens": 7, "output_tokens": 20}
    with MessagesServer([Reply.text("abc", usage=usage, disconnect_after=sent)]) as server, sdk(server) as client:
        events: list[Any] = []
        with pytest.raises(httpx2.RemoteProtocolError):
            events.extend(client.messages.create(**QUESTION, stream=True))
    assert len(events) == sent - (sent > 1)
    (exchange,) = server.ledger
    told = exchange.usage or {}
    assert (exchange.events, exchange.complete) == (sent, False)
    assert told.get("output_tokens") == (None if sent == 0 else 1 if sent < 8 else 20)


def test_stream_shorter_than_its_cut_is_complete() -> None:
    """A limit that isn't met cuts nothing."""
    with MessagesServer([Reply.text("abc", disconnect_after=10)]) as server:
        stream(server)
    assert server.ledger[0].complete


def test_stream_cut_at_any_byte_tells_only_whole_events() -> None:
    """Wherever a stream is cut around its message_delta, only a whole message_delta counts as told."""
    reply = Reply.text("abc", usage={"output_tokens": 20}, fields={"id": "msg"})
    with MessagesServer([reply]) as server:
        stream(server)
    end = server.ledger[0].sent_bytes
    cuts = range(end - 250, end + 1, 5)
    script = [reply + Reply.blocks(disconnect_after_bytes=cut) for cut in cuts]
    with MessagesServer(script) as server, sdk(server) as client:
        for cut in cuts:
            with pytest.raises((httpx2.RemoteProtocolError, json.JSONDecodeError)):
                list(client.messages.create(**QUESTION, stream=True))
            exchange = server.ledger[-1]
            assert (exchange.sent_bytes, exchange.complete) == (cut, False)
            assert exchange.usage is not None
            assert exchange.usage["output_tokens"] == (20 if exchange.events >= 8 else 1)
    assert {exchange.events for exchange in server.ledger} == {7, 8, 9}


@pytest.mark.parametrize("reply", [Reply.text("x", disconnect_after_bytes=10), Reply.disconnect()])
def test_json_cut_off_is_retried_by_the_sdk(reply: Reply) -> None:
    """A cut JSON body, or no answer at all, is an APIConnectionError, which the SDK retries."""
    with MessagesServer([reply, "ok"]) as server, sdk(server, max_retries=1) as client:
        client.messages.create(**QUESTION)
    assert [(exchange.complete, exchange.usage is None) for exchange in server.ledger] == [(False, True), (True, False)]


def test_events_are_sent_exactly_as_scripted() -> None:
    """Several cumulative message_delta events reach the client in order, and the ledger keeps the last."""
    events = Reply.text("abc", usage={"input_tokens": 3}).as_events()
    deltas = [{"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"output_tokens": n}} for n in (5, 9)]
    with MessagesServer([Reply.events([*events[:-2], *deltas, events[-1]])]) as server, sdk(server) as client:
        seen = list(client.messages.create(**QUESTION, stream=True))
    assert [event.usage.output_tokens for event in seen if event.type == "message_delta"] == [5, 9]
    assert server.ledger[0].usage is not None
    assert (server.ledger[0].usage["input_tokens"], server.ledger[0].usage["output_tokens"]) == (3, 9)
    assert server.ledger[0].complete


def test_error_event_in_a_stream_is_the_sdks_own_exception() -> None:
    """An overloaded API that says so in mid-stream raises after the events before it."""
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    events = [*Reply.text("abc").as_events()[:4], error]
    with MessagesServer([Reply.events(events)]) as server, pytest.raises(anthropic.APIStatusError, match="busy"):
        stream(server)


@pytest.mark.parametrize("bad", ["event: content_block_delta\ndata: {no json\n\n", b"event: x\ndata: \xff\n\n"])
def test_malformed_event_reaches_the_client_as_it_is(bad: str | bytes) -> None:
    """Raw text and raw bytes are sent untouched: the SDK fails to read them."""
    reply = Reply.events([*Reply.text("abc").as_events()[:3], bad])
    failure = pytest.raises(ValueError, match=r"Expecting property name|can't decode byte")
    with MessagesServer([reply]) as server, failure:
        stream(server)


def test_raw_body_is_sent_as_it_is() -> None:
    """Any bytes with any status and content type can be the answer."""
    page = Reply.raw(b"<h1>Bad gateway</h1>", 502, headers={"Content-Type": "text/html"})
    with MessagesServer([page, Reply.raw(b"")]) as server, sdk(server) as client:
        with pytest.raises(anthropic.InternalServerError) as caught:
            client.messages.create(**QUESTION)
        empty = client.messages.with_raw_response.create(**QUESTION)
    assert caught.value.response.text == "<h1>Bad gateway</h1>"
    assert caught.value.response.headers["content-type"] == "text/html"
    assert empty.http_response.content == b""
    assert server.ledger[1].complete


def test_delay_in_seconds_makes_the_client_time_out() -> None:
    """A reply that takes longer than the client waits is an APITimeoutError."""
    with (
        MessagesServer([Reply.text("late", delay=5)]) as server,
        sdk(server, timeout=0.1) as client,
        pytest.raises(anthropic.APITimeoutError),
    ):
        client.messages.create(**QUESTION)
    assert server.ledger[0].status == 0


def test_gated_reply_waits_for_its_event() -> None:
    """With an Event as its delay, a reply is sent when the test says so."""
    asked, gate = threading.Event(), threading.Event()

    def script(_body: dict[str, Any]) -> Reply:
        asked.set()
        return Reply.text("now", delay=gate)

    with MessagesServer(script) as server, ThreadPoolExecutor(1) as pool:
        call = pool.submit(create, server)
        assert asked.wait(10)
        assert (server.ledger[0].status, call.done()) == (0, False)
        gate.set()
        assert call.result(timeout=10).content[0].type == "text"


def test_client_that_leaves_a_stream_leaves_the_server_intact(capfd: pytest.CaptureFixture[str]) -> None:
    """After a client closed its stream half-way, the server goes on quietly, and says what it had sent by then."""
    left = threading.Event()
    events = Reply.text("abc").as_events()
    with MessagesServer([Reply.events([*events[:3], left, *events[3:]]), "next"]) as server, sdk(server) as client:
        with client.messages.create(**QUESTION, stream=True) as seen:
            next(seen)
        assert (server.ledger[0].events, server.ledger[0].complete) == (3, False)
        left.set()
        client.messages.create(**QUESTION)
    assert server.ledger[1].complete
    assert capfd.readouterr() == ("", "")


def test_stream_can_wait_between_its_events() -> None:
    """An Event among the events holds the stream there: the client has what came before it, and no more."""
    gate = threading.Event()
    events = Reply.text("abc").as_events()
    with MessagesServer([Reply.events([*events[:4], gate, *events[4:]])]) as server, sdk(server) as client:
        seen = iter(client.messages.create(**QUESTION, stream=True))
        assert [next(seen).type for _ in range(3)][-1] == "content_block_delta"
        assert (server.ledger[0].events, server.ledger[0].complete) == (4, False)
        gate.set()
        assert [event.type for event in seen][-1] == "message_stop"
    assert server.ledger[0].complete


@pytest.mark.parametrize("delay", [60, threading.Event()])
def test_close_cuts_off_replies_that_are_still_waiting(delay: float | threading.Event) -> None:
    """Closing takes no longer for a gated or a slow reply, and its client gets a connection error."""
    with ThreadPoolExecutor(1) as pool:
        asked = threading.Event()

        def script(_body: dict[str, Any]) -> Reply:
            asked.set()
            return Reply.text("never", delay=delay)

        with MessagesServer(script) as server:
            call = pool.submit(create, server)
            assert asked.wait(10)
            started = time.monotonic()
        assert time.monotonic() - started < 2
        with pytest.raises(anthropic.APIConnectionError):
            call.result(timeout=10)
    server.close()  # a second time does nothing


def test_closed_server_lets_go_of_idle_connections() -> None:
    """A client whose connection was kept alive gets an error, not a hang, after the server was closed."""
    with MessagesServer(["one", "two"]) as server:
        client = sdk(server)
        client.messages.create(**QUESTION)
    with client, pytest.raises(anthropic.APIConnectionError):
        client.messages.create(**QUESTION)


def test_twenty_threads_use_up_the_script_exactly() -> None:
    """Each of 200 replies goes to exactly one of 200 concurrent calls, and the ledger adds up."""
    script = [Reply.text(str(n), usage={"input_tokens": n, "output_tokens": 1}) for n in range(200)]

    with MessagesServer(script) as server, sdk(server) as client:

        def ask(n: int) -> tuple[str, int]:
            if n % 2:
                message = client.messages.create(**QUESTION)
            else:
                with client.messages.stream(**QUESTION) as events:
                    message = events.get_final_message()
            block = message.content[0]
            assert block.type == "text"
            return block.text, message.usage.input_tokens

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(ask, range(200)))
    assert sorted(answers, key=lambda answer: answer[1]) == [(str(n), n) for n in range(200)]
    told = [exchange.usage["input_tokens"] for exchange in server.ledger if exchange.usage is not None]
    assert sorted(told) == list(range(200))
    assert all(exchange.complete for exchange in server.ledger)


def test_call_takes_well_under_forty_milliseconds() -> None:
    """The median call doesn't wait for a delayed acknowledgement, which costs 40 ms."""
    with MessagesServer(lambda body: "quick") as server, sdk(server) as client:
        client.messages.create(**QUESTION)
        times = []
        for _ in range(15):
            started = time.perf_counter()
            client.messages.create(**QUESTION)
            times.append(time.perf_counter() - started)
    assert statistics.median(times) < 0.025


@pytest.mark.parametrize("other", [Reply.error(500), Reply.events([]), Reply.raw(b""), Reply.disconnect()])
def test_only_replies_of_blocks_can_be_added(other: Reply) -> None:
    """An error, a raw body or an event list has no blocks to add."""
    with pytest.raises(ConfigurationError, match="only replies of content blocks"):
        _ = Reply.text("x") + other


@pytest.mark.parametrize("script", ["hello", Reply.text("hello")])
def test_script_that_is_no_list_is_refused(script: Any) -> None:
    """A bare string would be a script of letters."""
    with pytest.raises(ConfigurationError, match="list of replies"):
        MessagesServer(script)
