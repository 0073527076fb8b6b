"""Calling tools by name: what the model is told."""

from __future__ import annotations

import asyncio

import pytest

from loopguard import Guard, current_call
from tests.conftest import Colour


@pytest.mark.parametrize("concurrently", [False, True])
def test_a_tools_error_is_told_with_its_class_once_and_without_secrets(concurrently: bool) -> None:
    """The model can act on the kind of error and its text."""
    guard = Guard()

    @guard.tool
    def fetch() -> str:
        raise ValueError("token=sk-ant-api03-abcdefghijkl")

    message = [{"type": "tool_use", "id": "1", "name": "fetch", "input": {}}]
    [result] = asyncio.run(guard.arun_tools(message)) if concurrently else guard.run_tools(message)
    assert result["content"].count("ValueError") == 1
    assert result["is_error"]
    assert "token=" in result["content"]
    assert "sk-ant" not in result["content"]


def test_the_id_that_the_model_gave_is_the_id_of_the_call(colour: Colour) -> None:
    """In the body, too, of every kind of tool."""
    guard = Guard()

    def work() -> str:
        call = current_call()
        return call.id if call is not None else ""

    guard.tool(colour.make(work))
    got = asyncio.run(guard.acall("work", {}, id="toolu_1"))
    assert got == ("toolu_1" if "generator" not in colour.name else ["toolu_1"])
