"""What type checkers make of the public API: tests/typing/api.py, read by mypy and by pyright."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "mypy": ["mypy", "--follow-imports=silent", "tests/typing"],
    "pyright": ["pyright", "--pythonpath", sys.executable, "tests/typing"],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", COMMANDS)
def test_a_type_checker_agrees(checker: str) -> None:
    """Signatures survive the decorators, and misuse is an error."""
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed; the extra `dev` brings it")
    command = [sys.executable, "-m", *COMMANDS[checker]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
