"""Prompt snapshots: the full messages of each model call, behind a switch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from loopguard import Guard, PriceBook, configure, meter
from loopguard.testing import MessagesServer, Reply
from loopguard.typing import ModelCalled


@pytest.fixture
def snapshots() -> Iterator[None]:
    """The switch is on during a test."""
    configure(prompt_snapshots=True)
    yield
    configure(prompt_snapshots=False)


def ask(question: str) -> ModelCalled:
    """The event of one metered call, as a subscriber gets it."""
    seen: list[Any] = []
    with MessagesServer([Reply.text("yes")]) as server:
        client = meter(
            anthropic.Anthropic(base_url=server.url, api_key="k"), prices=PriceBook({"m": {"input": 3, "output": 15}})
        )
        messages = [{"role": "user", "content": question}]
        with Guard(on_event=seen.append).scope("asking"):
            client.messages.create(model="m", max_tokens=10, system="Be short.", messages=messages)
    (called,) = [event for event in seen if isinstance(event, ModelCalled)]
    return called


def test_a_snapshot_holds_what_the_model_was_asked(snapshots: None) -> None:
    """System prompt and messages, in full."""
    assert ask("Is it done?").messages == {
        "system": "Be short.",
        "messages": [{"role": "user", "content": "Is it done?"}],
    }


def test_a_snapshot_is_redacted(snapshots: None) -> None:
    """What looks like a key reaches no subscriber."""
    secret = "sk-ant-api03-" + "a1B2" * 12
    assert secret not in repr(ask(f"My key is {secret}").messages)


def test_without_the_switch_nothing_is_kept() -> None:
    """Prompts are private unless somebody asks."""
    assert ask("Is it done?").messages is None
