"""The examples run, offline, and print what they say they print."""

from __future__ import annotations

import ast
import doctest
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
REFINED = """\
refining until quality >= 90
  pass 1 → quality 30
  pass 2 → quality 60
  pass 3 → quality 90
done: {"text": "draft refined (quality 90)", "quality": 90}
"""


def run(example: Path, folder: Path) -> str:
    """Run an example in an empty folder with nothing of ours in its environment, and give its output."""
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT") if name in os.environ}
    done = subprocess.run(
        [sys.executable, example],
        cwd=folder,
        env={**kept, "HOME": str(folder), "PYTHONUTF8": "1", "NO_PROXY": "*"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def promised(example: Path) -> str:
    """The end of an example's docstring: what it prints, `...` standing for anything."""
    docstring = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    _, _, output = docstring.partition("\nPrints:\n\n")
    assert output, f"the docstring of {example.name} has to end with 'Prints:', an empty line and the output, indented"
    lines = [line.removeprefix("    ") for line in output.splitlines()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_its_docstring_says(example: Path, tmp_path: Path) -> None:
    """Exit code 0, and the output shown at the end of the docstring."""
    want, got = promised(example), run(example, tmp_path)
    assert doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS), f"wanted:\n{want}\ngot:\n{got}"


@pytest.mark.parametrize(
    "example",
    [path for path in EXAMPLES if "sqlite:///" in path.read_text(encoding="utf-8")],
    ids=lambda path: path.stem,
)
def test_an_example_that_keeps_something_begins_anew(example: Path, tmp_path: Path) -> None:
    """Whoever runs it twice in one folder sees it twice."""
    run(example, tmp_path)
    assert doctest.OutputChecker().check_output(promised(example), run(example, tmp_path), doctest.ELLIPSIS)


def test_the_first_example_refines_in_three_passes(tmp_path: Path) -> None:
    """The shortest loop prints exactly these five lines."""
    assert run(FOLDER / "01_refine.py", tmp_path) == REFINED


def test_the_agent_without_its_marked_lines_is_an_ordinary_one(tmp_path: Path) -> None:
    """The lines marked `# +` are all that loopguard adds: without them the same agent runs, and nothing stops it."""
    source, _, _ = (FOLDER / "02_agent.py").read_text(encoding="utf-8").partition("if __name__")
    ordinary = "".join(line for line in source.splitlines(keepends=True) if "  # +" not in line)
    assert "loopguard" not in ordinary.rpartition('"""\n\nimport')[2]
    driven = """
messages = [{"role": "user", "content": "Order A-1042 never came."}]
while not answered(messages):
    messages = support(messages)
results = [message["content"][0] for message in messages[1:] if message["role"] == "user"]
print(*(f"{result['is_error']}: {result['content']}" for result in results), sep="\\n")
"""
    shutil.copy(FOLDER / "backstage.py", tmp_path)
    agent = tmp_path / "agent.py"
    agent.write_text(ordinary + driven, encoding="utf-8")
    assert run(agent, tmp_path).splitlines() == [
        "False: A-1042: a coffee machine, $899, parcel P-77",
        "False: P-77: last scan in Leipzig, nine days ago",
        "False: P-77: last scan in Leipzig, nine days ago",
        "False: P-77: last scan in Leipzig, nine days ago",
        "False: 899 dollars are on their way for A-1042",
        "False: 50 dollars are on their way for A-1042",
        "False: P-77 was found in Halle",
    ]
