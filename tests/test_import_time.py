"""What isn't used isn't loaded: an import of loopguard stays light."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = ("anthropic", "opentelemetry.sdk", "pydantic", "sqlite3")
REPORT = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"
ONE_CALL = """
import loopguard
@loopguard.tool(cost=0.01)
def double(n: int) -> int:
    return 2 * n
guard = loopguard.Guard(loopguard.MaxSteps(5), loopguard.LoopLimit(3), loopguard.Budget(usd=1))
with guard.scope("once"):
    assert double(21) == 42
"""


def heavy_after(program: str) -> str:
    """The heavy modules that a fresh interpreter has loaded after a program."""
    command = [sys.executable, "-I", "-c", f"{program}\n{REPORT}"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}  # it loads sqlite3
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30, env=alone)
    return done.stdout.strip()


@pytest.mark.parametrize("program", ["import loopguard", ONE_CALL], ids=["import", "one_call"])
def test_heavy_modules_load_on_first_use(program: str) -> None:
    """Neither the import nor one guarded, untraced call loads a heavy dependency."""
    assert heavy_after(program) == "[]"


def test_the_report_sees_a_heavy_module() -> None:
    """The measurement itself tells when a heavy module was loaded."""
    assert heavy_after("import sqlite3") == "['sqlite3']"
