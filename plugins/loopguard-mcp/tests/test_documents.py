"""The README and the examples do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from loopguard import Guard

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_policies_are_valid(tmp_path: Path) -> None:
    """The README's and the example's are read as they stand."""
    (policy,) = [text for language, text in BLOCKS if language == "toml"]
    (tmp_path / "policy.toml").write_text(policy)
    for path in (tmp_path / "policy.toml", ROOT / "examples" / "policy.toml"):
        guard = Guard.from_toml(path)
        assert guard.tools["delete_order"] == {"approve": True}


@pytest.mark.parametrize("snippet", [text for language, text in BLOCKS if language == "python"])
def test_the_two_lines_run(snippet: str) -> None:
    """Each snippet works where the names it speaks of exist."""
    before = (
        "from mcp import Client\nfrom mcp.server import MCPServer\nfrom loopguard import Guard, MaxSteps\n"
        "policy = Guard(MaxSteps(1))\nsession = Client(MCPServer('any'))\n"
    )
    subprocess.run([sys.executable, "-c", before + snippet], check=True)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_prints_what_it_says(path: Path) -> None:
    """Offline, and to the letter."""
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    said = path.read_text(encoding="utf-8").split("Prints:\n\n", 1)[1].split('"""', 1)[0]
    assert done.stdout == re.sub(r"^    ", "", said, flags=re.MULTILINE)


def test_no_underscore_module_of_loopguard_is_imported() -> None:
    """A plugin stands on what is public."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("loopguard_mcp/*.py"))
    assert re.findall(r"(?:from|import) loopguard\._\w+|from loopguard import _\w+", source) == []


def test_the_command_is_registered_with_loopguards_own() -> None:
    """`loopguard mcp-proxy` and `python -m loopguard_mcp` are one function."""
    from importlib.metadata import entry_points

    from loopguard_mcp.proxy import mcp_proxy

    (found,) = entry_points(group="loopguard.commands", name="mcp-proxy")
    assert found.load() is mcp_proxy
