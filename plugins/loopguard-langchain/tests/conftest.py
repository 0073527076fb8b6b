"""What the tests share: sync and async ways to run an agent."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `scripted`


class Way:
    """invoke, ainvoke or stream."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, agent: Any, given: Any, config: Any = None) -> Any:
        """The state that the agent ends in."""
        config = {"recursion_limit": 1000, **(config or {})}
        if self.name == "invoke":
            return agent.invoke(given, config)
        if self.name == "stream":
            *_, last = agent.stream(given, config, stream_mode="values")
            return last
        with asyncio.Runner() as runner:
            return runner.run(agent.ainvoke(given, config), context=contextvars.copy_context())

    def tool(self, body: Callable[..., Any]) -> Any:
        """A plain function, or a coroutine function for ainvoke."""
        if self.name != "ainvoke":
            return body
        from functools import wraps

        @wraps(body)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            return body(*args, **kwargs)

        return coroutine


@pytest.fixture(params=["invoke", "ainvoke", "stream"])
def way(request: pytest.FixtureRequest) -> Way:
    """Every test that asks for it runs in each of the ways."""
    return Way(request.param)
