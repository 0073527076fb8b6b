"""What the tests of telemetry share: a process without a provider, and fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.trace import ProxyTracer

from loopguard import exceptions
from loopguard.telemetry import _spans

ROOT = Path(exceptions.__file__).parents[1]
Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a TracerProvider, whatever other tests have set."""
    monkeypatch.setattr(_spans, "_probe", lambda *_: ProxyTracer("loopguard"))
    monkeypatch.setattr(_spans, "_recording", False)


@pytest.fixture
def program() -> Program:
    """Runs source in a fresh interpreter, with the given OTEL_* variables and none from here."""

    def run(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", source],
            env={**clean, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **variables},
            check=False,
            capture_output=True,
            encoding="utf-8",
            timeout=30,
        )

    return run
