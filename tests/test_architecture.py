"""The house rules that a parser can check: who may import whom, and what every module carries."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "loopguard"

# Top first: rank, and its rows. A module imports from lower ranks, and from rows further down in its own.
# A package stands here under its folder's name; "" is loopguard/__init__.py.
RANKS = {
    9: ["__main__", ""],
    8: ["cli", "testing", "typing"],
    7: ["_what_if", "_flow _handoff _llm", "_loop", "_loop_run", "_loop_journal", "_loop_options"],
    6: ["evaluators", "judges conditions context", "_guard", "_dispatch _foreign _scope", "_tool", "_order"],
    5: ["_policy", "questions", "guardrails"],
    4: ["metering", "budgets"],
    3: ["journal", "_approval", "telemetry"],
    2: ["_generators", "_drivers", "_run _threads"],
    1: ["_admission", "_halting _warn", "_pipeline"],
    0: [
        "_call _events",
        "_outcomes",
        "_amounts _cells _fingerprints _schemas _usage",
        "redaction",
        "_config _json _plugins _sqlite _tree _wrapped",
        "exceptions",
    ],
}
PLACES = {
    name: (-rank, row) for rank, rows in RANKS.items() for row, names in enumerate(rows) for name in names.split(" ")
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    paths = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


MODULES = modules()


def is_type_checking(test: ast.expr) -> bool:
    """Tell ``TYPE_CHECKING`` and ``typing.TYPE_CHECKING`` from other conditions."""
    return getattr(test, "id", getattr(test, "attr", None)) == "TYPE_CHECKING"


def import_nodes(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports below a node that happen at run time, those inside functions included."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    below = node.orelse if isinstance(node, ast.If) and is_type_checking(node.test) else ast.iter_child_nodes(node)
    for child in below:
        yield from import_nodes(child)


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, module of loopguard) for every import of a module, a package's submodules told apart."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in import_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            targets = [name if (name := f"{base}.{alias.name}") in MODULES else base for alias in node.names]
        yield from ((node.lineno, target) for target in targets if target.partition(".")[0] == "loopguard")


def unit(module: str) -> str:
    """The row of a module in RANKS: ``loopguard.budgets._sqlite`` belongs to ``budgets``."""
    return ".".join(module.split(".")[1:2])


def imported(module: str) -> list[tuple[int, str]]:
    """What a module of the package imports from it."""
    return list(imports(MODULES[module].read_text(encoding="utf-8"), module))


def comments(source: str) -> dict[int, str]:
    """The comment of every line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def broad_handlers(source: str) -> Iterator[int]:
    """Lines that catch everything without re-raising it and without a comment that says why."""
    said = comments(source)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else {""}
        raises = any(isinstance(child, ast.Raise) for child in ast.walk(node))
        if caught & {"", "Exception", "BaseException"} and node.lineno not in said and not raises:
            yield node.lineno


def unexplained_ignores(source: str) -> Iterator[int]:
    """Lines that silence a type checker without a code or without a reason."""
    for line, comment in comments(source).items():
        if re.search(r"(type|pyright): *ignore", comment) and not re.search(r"ignore\[[\w, -]+\] +# *\S", comment):
            yield line


def test_every_module_has_a_rank() -> None:
    """A new module takes its place in RANKS before it is merged."""
    assert {unit(module) for module in MODULES} <= set(PLACES)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_below(module: str) -> None:
    """Imports go to lower ranks, or to rows further down in the module's own rank."""
    here = unit(module)
    wrong = [
        f"{MODULES[module]}:{line} imports {target}"
        for line, target in imported(module)
        if unit(target) != here and PLACES[unit(target)] <= PLACES[here]
    ]
    assert wrong == []


def test_no_import_goes_in_a_circle() -> None:
    """No module imports itself through others, not even from inside a function or within one package."""
    graph = {module: {target for _, target in imported(module)} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_owns(module: str) -> None:
    """Every module has a docstring, and its first line isn't empty."""
    docstring = ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8")))
    assert docstring is not None
    assert docstring.splitlines()[0].strip()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_explains_what_it_silences(module: str) -> None:
    """A type checker is silenced with a code and a reason; a broad except says why or re-raises."""
    source = MODULES[module].read_text(encoding="utf-8")
    assert [*unexplained_ignores(source), *broad_handlers(source)] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os", []),
        ("import loopguard._run", [(1, "loopguard._run")]),
        ("def f():\n    from loopguard.exceptions import LoopStopped", [(2, "loopguard.exceptions")]),
        ("from loopguard import exceptions, loop", [(1, "loopguard.exceptions"), (1, "loopguard")]),
        ("from . import exceptions", [(1, "loopguard.exceptions")]),
        ("if TYPE_CHECKING:\n    import loopguard\nelse:\n    import loopguard.cli", [(4, "loopguard.cli")]),
    ],
)
def test_the_parser_sees_every_kind_of_import(source: str, found: list[tuple[int, str]]) -> None:
    """Plain, relative and function-level imports are seen; those for type checkers alone are not."""
    assert list(imports(source, "loopguard")) == found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = 1  # type: ignore", [1]),
        ("x = 1  # type: ignore[misc]", [1]),
        ("x = 1  # type: ignore[misc]  # the stubs are wrong", []),
        ("x = '# type: ignore'", []),
        ("try:\n    f()\nexcept Exception:\n    pass", [3]),
        ("try:\n    f()\nexcept (OSError, BaseException):\n    pass", [3]),
        ("try:\n    f()\nexcept:\n    pass", [3]),
        ("try:\n    f()\nexcept Exception:  # user code\n    pass", []),
        ("try:\n    f()\nexcept BaseException:\n    undo()\n    raise", []),
        ("try:\n    f()\nexcept OSError:\n    pass", []),
    ],
)
def test_the_rules_bite(source: str, lines: list[int]) -> None:
    """The house rules find what they are for, and nothing else."""
    assert [*unexplained_ignores(source), *broad_handlers(source)] == lines
