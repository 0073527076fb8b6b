"""Calling tools by name: what the model is told."""

from __future__ import annotations

from loopguard import Guard


def test_a_tools_error_is_told_with_its_class_once_and_without_secrets() -> None:
    """The model can act on the kind of error and its text."""
    guard = Guard()

    @guard.tool
    def fetch() -> str:
        raise ValueError("token=sk-ant-api03-abcdefghijkl")

    [result] = guard.run_tools([{"type": "tool_use", "id": "1", "name": "fetch", "input": {}}])
    assert result["content"].count("ValueError") == 1
    assert result["is_error"]
    assert "token=" in result["content"]
    assert "sk-ant" not in result["content"]
