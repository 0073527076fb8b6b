"""Streams cut at any byte, and many of them at once: the settled usage is what was received, once, under the cap."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from decimal import Decimal
from typing import Any

import anthropic
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopguard import Budget, BudgetExceeded, Guard
from loopguard import _events as events
from loopguard.metering import PriceBook, meter
from loopguard.metering._calls import ModelCall
from loopguard.metering._estimates import BYTES_PER_TOKEN, survey
from loopguard.metering._reading import BedrockReader, Bill, EventReader, MessageReader, reader_for
from loopguard.testing import MessagesServer, Reply, capture
from tests.metering.conftest import BODY, PRICES, Way, async_lines, lines

ENOUGH = {**BODY, "max_tokens": 1000}
tokens = st.integers(0, 5000)
texts = st.text(max_size=40)


@st.composite
def streams(draw: Any) -> list[str]:
    """The events of a message in order, as text; now and then something that is none."""
    newline = draw(st.sampled_from(["\n", "\r\n", "\r"]))

    def event(data: Any) -> str:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=draw(st.booleans()))
        name = "x" if isinstance(data, str) else data["type"]
        return f"event: {name}{newline}data: {text}{newline}{newline}"

    start = {
        "input_tokens": draw(tokens),
        "output_tokens": draw(st.integers(0, 3)),
        "cache_read_input_tokens": draw(tokens),
    }
    made: list[Any] = [{"type": "message_start", "message": {"model": "m", "usage": start}}]
    made += [{"type": "ping"}] * draw(st.integers(0, 1))
    for index, kind in enumerate(draw(st.lists(st.sampled_from(["text", "thinking", "partial_json"]), max_size=3))):
        made.append({"type": "content_block_start", "index": index, "content_block": {"type": "text", "text": ""}})
        for text in draw(st.lists(texts, max_size=3)):
            made.append({"type": "content_block_delta", "index": index, "delta": {"type": f"{kind}_delta", kind: text}})
        made.append({"type": "content_block_stop", "index": index})
        made += ["{broken"] * draw(st.integers(0, 1))
    reported = 0
    for _ in range(draw(st.integers(0, 2))):
        reported += draw(tokens)
        made.append({"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"output_tokens": reported}})
    ending = {"output_tokens": reported + draw(tokens), "cache_read_input_tokens": None}
    made.append({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": ending})
    made.append({"type": "message_stop"})
    return [event(data) for data in made]


def fold(text: str, limit: int) -> tuple[int, int, int] | None:
    """An independent reading of the complete events: (fresh input, cache reads, output), or None."""
    usage: dict[str, int] = {}
    content, final = 0, False
    *complete, _ = text.replace("\r\n", "\n").replace("\r", "\n").split("\n\n")
    for block in complete:
        try:
            event = json.loads(block.split("data: ", 1)[1])
        except ValueError:
            continue
        told = event.get("usage") or event.get("message", {}).get("usage") or {}
        usage |= {name: count for name, count in told.items() if count is not None}
        content += sum(
            len(event.get("delta", {}).get(key, "").encode()) for key in ("text", "thinking", "partial_json")
        )
        final = final or event["type"] == "message_stop" or bool(event.get("delta", {}).get("stop_reason"))
    if not usage:
        return None
    received = 0 if final else min(limit, -(-content // BYTES_PER_TOKEN))
    return usage["input_tokens"], usage["cache_read_input_tokens"], max(usage["output_tokens"], received)


def decoded(data: bytes) -> str:
    """The text up to a cut, which may fall into the middle of a character."""
    return data.decode(errors="ignore")


@settings(max_examples=60, deadline=None)
@given(made=streams(), share=st.floats(0, 1), is_async=st.booleans())
def test_a_stream_cut_at_any_byte_settles_at_what_was_received(made: list[str], share: float, is_async: bool) -> None:
    """Equal to an independent fold over the complete events, recorded once, and nothing stays reserved."""
    whole = "".join(made).encode()
    cut = round(len(whole) * share)
    way = Way(async_lines if is_async else lines, is_async)
    held: list[Decimal] = []

    def script(body: dict[str, Any]) -> Reply:
        held.append(run.reserved())
        return Reply.events([whole], disconnect_after_bytes=cut) if cut < len(whole) else Reply.events([whole])

    with MessagesServer(script) as server, capture() as seen, Guard(Budget(usd=10)).scope() as run:
        try:
            way.call(server.url, max_tokens=1000)
        except (httpx2.RemoteProtocolError, httpx2.ReadError):
            assert cut < len(whole)
    want = fold(decoded(whole[:cut]), 1000)
    if want is None:
        assert run.spent() == held[0]
    else:
        fresh, read, output = want
        assert run.usage.input_tokens == fresh + read
        assert (run.usage.cache_read_tokens, run.usage.output_tokens) == (read, output)
        assert run.spent() == (fresh * 3 + read * Decimal("0.3") + output * 15) / 1_000_000
    assert run.reserved() == run.reserved("tokens") == 0
    assert len(seen.events_of(events.ModelCalled)) == 1


@settings(max_examples=200, deadline=None)
@given(made=streams(), share=st.floats(0, 1), pieces=st.lists(st.integers(1, 50), min_size=1, max_size=50))
def test_the_pieces_a_stream_comes_in_change_nothing(made: list[str], share: float, pieces: list[int]) -> None:
    """Fed byte by byte or at once, cut in lines, in CRLF or in characters."""
    whole = "".join(made).encode()
    data = whole[: round(len(whole) * share)]
    at_once, in_pieces = EventReader(), EventReader()
    at_once.feed(data)
    start = 0
    while start < len(data):
        size = pieces[start % len(pieces)]
        in_pieces.feed(data[start : start + size])
        start += size
    assert in_pieces.bill() == at_once.bill()
    want = fold(decoded(data), 10**9)
    got = at_once.bill().usage
    assert (got is None) == (want is None)


def test_bedrock_frames_are_read() -> None:
    """The events of Bedrock's streams stand in frames, as base64 in JSON; cut anywhere, complete ones count."""
    usage = {"input_tokens": 20, "output_tokens": 12}
    made = Reply.text("hello", usage=usage).as_events({"model": "m"})
    data = b""
    for event in made:
        payload = json.dumps({"bytes": base64.b64encode(json.dumps(event).encode()).decode(), "p": "abc"}).encode()
        headers = b"\x0b:event-type\x07\x00\x05chunk"
        size = 16 + len(headers) + len(payload)
        data += size.to_bytes(4) + len(headers).to_bytes(4) + b"\0\0\0\0" + headers + payload + b"\0\0\0\0"
    reader = reader_for("application/vnd.amazon.eventstream")
    assert isinstance(reader, BedrockReader)
    for byte in data:
        reader.feed(bytes([byte]))
    bill = reader.bill()
    assert (bill.usage["input_tokens"], bill.usage["output_tokens"], bill.partial, reader.done) == (20, 12, False, True)
    half = BedrockReader()
    half.feed(data[: len(data) // 2])
    assert half.bill().partial


def test_a_reader_is_chosen_by_what_came() -> None:
    """A stream may be asked for and JSON come, and the other way round."""
    assert isinstance(reader_for("text/event-stream; charset=utf-8"), EventReader)
    assert isinstance(reader_for("application/json"), MessageReader)
    assert isinstance(reader_for(""), MessageReader)


def test_fifty_streams_at_once_hold_the_cap_on_the_servers_ledger() -> None:
    """The server draws as many tokens as the stated bound allows and keeps its own books; a third leave half way."""
    gate = threading.Event()
    text = "ab" * 600  # at two bytes a token 600 of the 1,000 asked for, 300 of them before the gate
    ledger: list[Decimal] = []
    book, lock = PriceBook(PRICES), threading.Lock()

    def charge(prompt: int, output: int) -> None:
        cost = book.cost("m", {"input_tokens": prompt, "output_tokens": output})
        assert cost is not None
        with lock:
            ledger.append(cost)

    def script(body: dict[str, Any]) -> Reply:
        prompt = survey(body).input_tokens  # the most that the bound allows
        leaves = body["metadata"]["user_id"] == "leaves"
        written = 1200 // BYTES_PER_TOKEN
        charge(prompt, written // 2 if leaves else 1000)  # the others use up max_tokens, thinking unseen
        usage = {"input_tokens": prompt, "output_tokens": 1000}
        start, ping, block, delta, *_, end, stop = Reply.text("x", usage=usage).as_events(body)
        halves = [{**delta, "delta": {"type": "text_delta", "text": half}} for half in (text[:600], text[600:])]
        pause = [gate] if leaves else []
        return Reply.events([start, ping, block, halves[0], *pause, halves[1], end, stop])

    async def one(client: Any, number: int) -> str:
        leaves = number % 3 == 0
        body = {**ENOUGH, "metadata": {"user_id": "leaves" if leaves else "stays"}}
        try:
            async with await client.messages.create(stream=True, **body) as stream:
                async for event in stream:
                    if leaves and event.type == "content_block_delta":
                        return "left"
            return "read"
        except BudgetExceeded:
            return "refused"

    async def main() -> tuple[list[str], Any]:
        http = anthropic.DefaultAsyncHttpxClient(limits=httpx2.Limits(max_connections=50))
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0, http_client=http)
        async with meter(client, prices=PRICES) as metered, Guard(Budget(usd=cap)).scope() as run:
            outcomes = [await asyncio.gather(*(one(metered, number) for number in range(50))) for _ in range(3)]
            return [outcome for burst in outcomes for outcome in burst], run

    most = (survey(ENOUGH).input_tokens * 3 + 1000 * 15) * Decimal("0.000001")
    cap = 40 * most
    with MessagesServer(script) as server:
        outcomes, run = asyncio.run(main())
        gate.set()
    assert {"left", "read", "refused"} == set(outcomes)
    assert len(ledger) == len(server.ledger) == outcomes.count("left") + outcomes.count("read")
    assert sum(ledger) <= run.spent() <= cap
    assert sum(ledger) > cap * Decimal("0.8")
    assert run.reserved() == run.reserved("tokens") == run.reserved("model_calls") == 0
    assert run.usage.model_calls == len(ledger)


@pytest.mark.parametrize("rounds", [4])
def test_threads_share_one_budget(rounds: int) -> None:
    """Sixteen threads of one run spend to the cap, and not beyond."""
    most = (survey(BODY).input_tokens * 3 + 100 * 15) * Decimal("0.000001")
    usage = {"input_tokens": survey(BODY).input_tokens, "output_tokens": 100}
    with MessagesServer(lambda body: Reply.text("x", usage=usage)) as server:
        client = meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES)
        with client, Guard(Budget(usd=20 * most)).scope() as run:

            def work() -> None:
                for _ in range(rounds):
                    try:
                        client.messages.create(**BODY)
                    except BudgetExceeded:
                        return

            threads = [threading.Thread(target=run.bind(work)) for _ in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert len(server.ledger) == 20
    assert (run.spent(), run.reserved()) == (20 * most, 0)


def test_the_books_are_closed_when_the_last_event_is_seen() -> None:
    """Whoever looks at what is left, at the end of a stream, sees it settled."""
    usage = {"input_tokens": 20, "output_tokens": 12}
    with (
        MessagesServer([Reply.text("x", usage=usage)]) as server,
        Guard(Budget(usd=1)).scope() as run,
        meter(anthropic.Anthropic(base_url=server.url, api_key="x"), prices=PRICES) as client,
        client.messages.create(stream=True, **BODY) as stream,
    ):
        left = [run.reserved() for event in stream if event.type == "message_stop"]
    assert left == [0]


def test_only_the_first_end_of_a_call_counts() -> None:
    """A stream that is closed by two threads, or fails while it is closed, is settled once."""
    with capture() as seen, Guard().scope() as run:
        call = ModelCall(run, "m", PriceBook(PRICES))
        call.reserve(BODY, survey(BODY))
        assert call.admit() is None
        call.received(Bill({"input_tokens": 20, "output_tokens": 12}, partial=False))
        call.lost()
        call.released()
    assert (run.usage.tokens, run.reserved("tokens")) == (32, 0)
    assert len(seen.events_of(events.ModelCalled)) == 1
