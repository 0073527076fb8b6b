"""The command as a whole: exit codes, plugins, and what it says where typer is missing."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import loopguard
from loopguard.cli._app import OURS
from tests.cli.agents import fetches
from tests.cli.conftest import Command, process
from tests.conftest import Install

ROOT = Path(__file__).parents[2]


def test_it_is_installed_as_a_script() -> None:
    """`loopguard` is what pyproject.toml names, and what `python -m loopguard` runs."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"loopguard": "loopguard.cli:main"}


def test_a_real_process_prints_json_and_exits_with_0(store: str) -> None:
    """From the interpreter's start to its exit code."""
    fetches.run(0, run_id="r1")
    done = process("runs", "--json", "--store", store)
    out, err = done.communicate(timeout=30)
    assert (done.returncode, err) == (0, "")
    assert [run["run_id"] for run in json.loads(out)] == ["r1"]


def test_without_typer_it_says_what_to_install() -> None:
    """The core is installed without the extra: exit code 2, and no traceback."""
    program = "import sys; sys.modules['typer'] = None; from loopguard.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "The loopguard command needs typer: pip install 'loopguard-agents[cli]'\n"


def test_it_says_its_version(command: Command) -> None:
    """With no store, and nothing else asked."""
    done = command("--version")
    assert (done.code, done.out) == (0, f"loopguard {loopguard.__version__}\n")


def test_the_library_does_not_load_the_command() -> None:
    """Neither typer nor rich is there after an import of loopguard."""
    program = "import loopguard, sys; print([name for name in ('typer', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", OURS)
def test_every_subcommand_has_help_and_json(command: Command, name: str) -> None:
    """Each says what it does, and can print JSON."""
    done = command(name, "--help")
    assert done.code == 0
    assert "--json" in done.out


def test_the_help_lists_every_subcommand(command: Command) -> None:
    """In the order of the table."""
    out = command("--help").out
    places = [out.index(f"│ {name} ") for name in OURS]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["runs", "--nope"],
        ["show"],
        ["runs", "--limit", "-1"],
        ["runs", "--store", "redis://localhost"],
        ["runs", "--store", "sqlite:////nowhere/runs.db"],
        ["purge", "--older-than", "soon"],
        ["what-if", "r1"],
        ["what-if", "r1", "--usd", "much"],
        ["what-if", "r1", "--rate", "10/x"],
        ["stop"],
        ["answer", "q"],
        ["approve", "q", "--edit", "[1]"],
        ["approve", "q", "--edit", "{}", "--grant", "run"],
        ["pending", "--key-file", "/nowhere/key"],
        ["resume", "agents", "r1"],
        ["resume", "no_such_module:loop", "r1"],
        ["resume", "tests.cli.agents:EVIL", "r1"],
    ],
)
def test_wrong_usage_exits_with_2(command: Command, store: str, arguments: list[str]) -> None:
    """And says on stderr what is wrong."""
    fetches.run(0, run_id="r1")
    done = command(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err


def test_without_a_store_it_says_how_to_name_one(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """No default file in whatever folder one happens to stand."""
    monkeypatch.delenv("LOOPGUARD_STORE", raising=False)
    done = command("runs")
    assert done.code == 2
    assert done.err == "loopguard: no store is named: give --store sqlite:///runs.db, or set LOOPGUARD_STORE\n"


def test_a_store_that_is_not_there_is_not_made(command: Command, store: str, tmp_path: Path) -> None:
    """A slip in its name leaves no empty file behind."""
    assert command("runs").code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["show", "nope"], ["tail", "nope"], ["approve", "nope"], ["stop", "nope"]])
def test_what_is_not_there_exits_with_1(command: Command, store: str, arguments: list[str]) -> None:
    """The command was right, but there is no such thing."""
    fetches.run(0, run_id="r1")
    done = command(*arguments)
    assert (done.code, done.out) == (1, "")
    assert "nope" in done.err


TEA = "[loopguard.commands]\ntea = teapot:tea"
FUNCTION = """
def tea(sugar: int = 0):
    '''Brew.'''
    print(f"tea with {sugar}")
"""
APP = """
import typer
tea = typer.Typer()
@tea.command()
def brew(sugar: int = 0): print(f"tea with {sugar}")
@tea.command()
def drink(): print("ah")
"""


@pytest.mark.parametrize(
    ("source", "arguments"), [(FUNCTION, ["tea"]), (APP, ["tea", "brew"])], ids=["function", "app"]
)
def test_a_plugin_adds_a_subcommand(command: Command, install: Install, source: str, arguments: list[str]) -> None:
    """A function, or a typer.Typer, at the entry point."""
    install("teapot", TEA, source)
    assert "tea" in command("--help").out
    assert command(*arguments, "--sugar", "2")[:2] == (0, "tea with 2\n")


def test_a_broken_plugin_breaks_nothing_else(command: Command, install: Install, store: str) -> None:
    """It is listed with what is wrong with it; the others work."""
    install("teapot", TEA, "raise ImportError('no kettle')")
    fetches.run(0, run_id="r1")
    assert "no kettle" in command("--help").out
    assert command("runs").code == 0
    done = command("tea")
    assert done.code == 2
    assert "the plugin 'tea' of teapot can't be loaded: ImportError: no kettle" in done.err
