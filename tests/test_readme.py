"""The README and the pages in docs keep their word: their code runs, prints what they say, and their commands exist."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
TEXT = "\n".join(PAGES.values())
LINKED = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("plugins/**/README.md")]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
RUNNABLE = {
    f"{name}_{number}": block
    for name, text in PAGES.items()
    for number, block in enumerate(
        re.findall(r"^```python runnable\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL), start=1
    )
}
CODE = re.findall(r"^```(?:sh|bash|console)\n.*?^```$|`[^`\n]+`", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_runnable_block_runs_and_prints_what_its_arrows_say(name: str, tmp_path: Path) -> None:
    """A ```python runnable block is a whole program that ends well; `# → text` is a line of its output."""
    command = [sys.executable, "-I", "-X", "utf8", "-c", RUNNABLE[name]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    told = "".join(f"{line}\n" for line in re.findall(r"# → (.*)$", RUNNABLE[name], flags=re.MULTILINE))
    if told:
        assert doctest.OutputChecker().check_output(told, done.stdout, doctest.ELLIPSIS), done.stdout


def test_the_tree_on_the_page_is_the_one_that_the_demo_draws(tmp_path: Path) -> None:
    """Line for line, but for the times."""
    (drawn,) = re.findall(r"^```text\n(customer_request .*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "ANTHROPIC_"))}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "02_agent.py"],
        cwd=tmp_path,
        env={**kept, "PYTHONUTF8": "1", "NO_PROXY": "*"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=50,
        check=True,
    )
    times = re.compile(r"· [\d.]+ m?s")
    assert times.sub("·", done.stderr) == times.sub("·", drawn)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file of the repository and, behind a #, to a heading in it."""
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        file, _, heading = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, link


def test_every_page_is_linked_from_the_readme() -> None:
    """What stands in docs can be found from the first page."""
    assert [page for page in PAGES if page != "README" and f"docs/{page}.md" not in PAGES["README"]] == []


def test_every_make_command_exists() -> None:
    """Whatever the pages say to make, the Makefile makes."""
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(CODE)))
    assert named <= set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))


def test_help_lists_every_target() -> None:
    """Each target that is a command says in a line what it does."""
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert set(phony.split()) == set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, flags=re.MULTILINE))
