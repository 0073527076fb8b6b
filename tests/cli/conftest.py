"""What the command's tests share: a store, the command in this process, and real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loopguard.cli._app import run
from loopguard.journal import _writer


class Done(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty store, which LOOPGUARD_STORE names."""
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    monkeypatch.setenv("LOOPGUARD_STORE", url)
    yield url
    _writer.close_writers()


Command = Callable[..., Done]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process: it is given its arguments, and gives its exit code and what it printed."""

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["loopguard", *arguments])
        capsys.readouterr()
        code = run()
        return Done(code, *capsys.readouterr())

    return call


def process(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A real `python -m loopguard`."""
    return start("-m", "loopguard", *arguments, **options)


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A real Python process, its three streams in our hands."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments], **{**pipes, "encoding": "utf-8", "env": environment, **options}
    )
