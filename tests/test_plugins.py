"""Plugins: found by entry point, loaded on first use, and made of public parts only."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from loopguard import ConfigurationError, _plugins, journal, loop
from loopguard._plugins import APPROVERS, LEDGERS, STORES, available, check_plugin, load_plugin
from loopguard.journal import _writer
from tests.conftest import Install

PLUGINS = Path(__file__).parents[1] / "plugins"


def test_a_plugin_is_loaded_on_first_use(install: Install) -> None:
    """That it is there is known without importing it."""
    install(
        "shells",
        f"[{LEDGERS}]\nshell = shell_ledger:open_ledger",
        "def open_ledger(url):\n    return f'opened {url}'\n",
    )
    check_plugin(LEDGERS, "shell", "Budget(ledger='shell')")
    assert "shell" in available(LEDGERS)
    assert "shell_ledger" not in sys.modules
    assert load_plugin(LEDGERS, "shell", "Budget")("shell:beach") == "opened shell:beach"


def test_a_store_may_be_a_plugins(install: Install, tmp_path: Path) -> None:
    """A URL of its scheme keeps runs there, and they are read from there."""
    source = """
from loopguard.journal._sqlite import SQLiteJournal


def open_store(url):
    return SQLiteJournal(url.partition("://")[2])
"""
    install("shelves", f"[{STORES}]\nshelf = shelf_store:open_store", source)
    store = f"shelf://{tmp_path}/runs.db"

    @loop(max=1, store=store)
    def step(state: int) -> int:
        return state + 1

    assert step.run(1, run_id="r").value == 2
    assert [run.run_id for run in journal.open(store).runs()] == ["r"]
    with pytest.raises(ConfigurationError, match=r"loop\(store=oracle://…\): no installed package has 'oracle'"):
        loop(max=1, store="oracle://scott:tiger@host")(lambda state: state)
    _writer.close_writers()


@pytest.mark.parametrize(
    ("group", "name", "package"),
    [
        (LEDGERS, "rediss", "loopguard-redis"),
        (LEDGERS, "postgresql", "loopguard-postgres"),
        (STORES, "postgres", "loopguard-postgres"),
    ],
)
def test_what_is_not_installed_is_named(group: str, name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which package to install."""
    monkeypatch.setattr(_plugins, "_found", lambda group: {})
    with pytest.raises(ConfigurationError, match=f"LEDGER: '{name}' needs the package {package}: pip install"):
        load_plugin(group, name, "LEDGER")


def test_what_nobody_knows_is_an_error() -> None:
    """It lists what there is."""
    with pytest.raises(ConfigurationError, match=r"policy: no installed package has 'oracle' in loopguard\.approvers"):
        check_plugin(APPROVERS, "oracle", "policy")


def test_a_plugin_that_can_not_be_imported_names_its_distribution(install: Install) -> None:
    """Whose fault it is, and what it was."""
    install("brokens", f"[{APPROVERS}]\nbroken = broken_approver:ask", "import a_module_that_nobody_has\n")
    with pytest.raises(ConfigurationError, match=r"'broken' of brokens can't be loaded: ModuleNotFoundError: No mod"):
        load_plugin(APPROVERS, "broken", "policy")


def test_two_plugins_of_one_name_are_an_error(install: Install) -> None:
    """Which of them is meant nobody can tell; one that is on the path twice is one."""
    install("first", f"[{APPROVERS}]\nwho = first_approver:ask", "")
    install("second", f"[{APPROVERS}]\nwho = second_approver:ask", "")
    with pytest.raises(ConfigurationError, match="first and second both have 'who'"):
        check_plugin(APPROVERS, "who", "policy")


def underscored(source: str) -> list[str]:
    """The modules and names of loopguard that a source imports although they begin with an underscore."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("loopguard._"):
            names = [node.value]  # for import_module or monkeypatch
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "loopguard" and any(part.startswith("_") for part in parts):
                found.append(name)
    return found


@pytest.mark.parametrize("path", sorted(PLUGINS.rglob("*.py")), ids=lambda path: str(path.relative_to(PLUGINS)))
def test_a_plugin_is_made_of_public_parts(path: Path) -> None:
    """No plugin, and no test of one, reaches into a module of loopguard whose name starts with an underscore."""
    assert underscored(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import loopguard.typing\nfrom loopguard.typing import Ledger\nfrom loopguard_redis._lua import x", []),
        ("import loopguard._run", ["loopguard._run"]),
        ("from loopguard import _run", ["loopguard._run"]),
        ("from loopguard.budgets._memory import MemoryLedger", ["loopguard.budgets._memory.MemoryLedger"]),
        ("import_module('loopguard._run')", ["loopguard._run"]),
    ],
)
def test_the_search_bites(source: str, found: list[str]) -> None:
    """What starts with an underscore is found however it is imported."""
    assert underscored(source) == found
