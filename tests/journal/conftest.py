"""What the journal's tests share: a store of their own, and a tally of what really ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loopguard.journal import _writer


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store; its file is let go of after the test."""
    yield f"sqlite:///{tmp_path / 'runs.db'}"
    _writer.close_writers()


@pytest.fixture
def ran() -> list[str]:
    """What really ran, in order."""
    return []
