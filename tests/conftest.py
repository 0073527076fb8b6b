"""What all tests share: callables of every colour, and spans in memory."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loopguard import _plugins
from loopguard.telemetry import _spans

# A busy machine is no failure; where a change is judged, the same examples are tried each time.
hypothesis.settings.register_profile("loopguard", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("loopguard")

COLOURS = ("sync", "async", "generator", "async generator")


class Colour:
    """One of the four kinds of callable: `make` turns a plain body into one, `call` runs it to its end."""

    def __init__(self, name: str, runner: asyncio.Runner) -> None:
        self.name = name
        self._runner = runner

    def make(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """A callable of this colour with the signature of body; generators yield its result as their one item."""
        if self.name == "sync":
            return body
        if self.name == "async":

            @functools.wraps(body)
            async def coroutine(*args: Any, **kwargs: Any) -> Any:
                await asyncio.sleep(0)
                return body(*args, **kwargs)

            return coroutine
        if self.name == "generator":

            @functools.wraps(body)
            def generator(*args: Any, **kwargs: Any) -> Any:
                yield body(*args, **kwargs)

            return generator

        @functools.wraps(body)
        async def async_generator(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            yield body(*args, **kwargs)

        return async_generator

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the body returned, or raises what the call raised; the current run and span are carried along."""
        if self.name == "sync":
            return fn(*args, **kwargs)
        if self.name == "generator":
            return list(fn(*args, **kwargs))[-1]

        async def main() -> None:
            try:
                if self.name == "async":
                    results.append(await fn(*args, **kwargs))
                else:
                    results.extend([item async for item in fn(*args, **kwargs)])
            except Exception as exc:  # raised below
                errors.append(exc)

        results: list[Any] = []  # not through the task: asyncio prints what comes of it, whatever that is
        errors: list[Exception] = []
        self._runner.run(main(), context=contextvars.copy_context())
        for error in errors:
            raise error
        return results[-1]


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> Iterator[Colour]:
    """Every test that asks for it runs once for each of the four kinds of callable."""
    with asyncio.Runner() as runner:
        yield Colour(request.param, runner)


@pytest.fixture(autouse=True)
def detached() -> Iterator[None]:
    """No test leaves a context where it wasn't entered: OpenTelemetry logs that, and does nothing more."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # shorter than a class
    logger = logging.getLogger("opentelemetry.context")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert said == []


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    """A TracerProvider for one test: the global one can be set only once in a process."""
    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(_spans, "_tracer", provider.get_tracer("loopguard"))
    monkeypatch.setattr(_spans, "_recording", True)
    return provider


@pytest.fixture
def exporter(provider: TracerProvider) -> InMemorySpanExporter:
    """Where the spans of the test arrive when they end."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store; its file is let go of after the test."""
    from loopguard.journal import _writer

    yield f"sqlite:///{tmp_path / 'runs.db'}"
    _writer.close_writers()


@pytest.fixture
def ran() -> list[str]:
    """What really ran, in order."""
    return []


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs distributions: ``install("name", "[group]\\nentry = module:attribute", source)``."""

    def make(name: str, entries: str, source: str) -> None:
        info = tmp_path / name / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"{entries}\n", encoding="utf-8")
        module = entries.partition("=")[2].strip().partition(":")[0]
        (tmp_path / name / f"{module}.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path / name)
        monkeypatch.delitem(sys.modules, module, raising=False)
        _plugins._found.cache_clear()

    yield make
    _plugins._found.cache_clear()
