"""The README and the example do what they say, and the plugin stands on what is public."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTING = """
from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
class Model(GenericFakeChatModel):
    max_tokens: int = 10
model = Model(messages=iter([AIMessage("At the depot.", usage_metadata=usage)]))
tools = []
"""


def test_the_readmes_lines_run() -> None:
    """With a model that has its answer ready; its price is unknown, so the budget is told to let it pass."""
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    script = SETTING + snippet.replace("Budget(usd=2.00)", "Budget(usd=2.00, on_unknown_price='allow')")
    assert "on_unknown_price" in script
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    """Offline, and to the letter."""
    done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = path.read_text(encoding="utf-8").split("Prints:\n\n", 1)[1].split('"""', 1)[0]
    assert done.stdout == re.sub(r"^    ", "", said, flags=re.MULTILINE)


def test_no_underscore_module_of_loopguard_is_imported() -> None:
    """A plugin stands on what is public."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("loopguard_langchain/*.py"))
    assert re.findall(r"(?:from|import) loopguard\._\w+|from loopguard import _\w+", source) == []
