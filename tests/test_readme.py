"""The README keeps its word: its code runs and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
RUNNABLE = re.findall(r"^```python runnable\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
CODE = re.findall(r"^```(?:sh|bash|console)\n.*?^```$|`[^`\n]+`", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", RUNNABLE, ids=[f"block_{number}" for number, _ in enumerate(RUNNABLE, 1)])
def test_a_runnable_block_runs(block: str, tmp_path: Path) -> None:
    """A ```python runnable block is a whole program that ends well."""
    command = [sys.executable, "-I", "-c", block]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_every_make_command_exists() -> None:
    """Whatever the README says to make, the Makefile makes."""
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(CODE)))
    assert named <= set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))


def test_help_lists_every_target() -> None:
    """Each target that is a command says in a line what it does."""
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert set(phony.split()) == set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, flags=re.MULTILINE))
