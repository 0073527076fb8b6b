"""Plant faults in copies of loopguard, one at a time, and count those that the tests miss: `make mutate`.

Two sources: `own.toml`, faults that would hurt most, each with its reason; and mutants that the operators of
mutmut make, drawn by a seed. A survivor is a missing test, or equivalent to the original: then
`equivalent.toml` says in a line why. The working tree is never touched.

    python tests/mutation/run.py                    # everything
    python tests/mutation/run.py --own              # own.toml alone
    python tests/mutation/run.py --random 50 --seed other
    python tests/mutation/run.py --only _halting    # those whose name or id this pattern is found in
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PACKAGE = "loopguard"

TARGETS = [
    *("_pipeline.py", "_admission.py", "_halting.py", "_order.py", "_call.py", "_cells.py", "_amounts.py"),
    *("_drivers.py", "_generators.py", "_threads.py", "_run.py", "_loop_run.py", "_scope.py"),
    *("_guard.py", "_tool.py", "_dispatch.py", "_approval.py", "guardrails/*.py", "budgets/*.py"),
]
"""The modules that random mutants are drawn from."""

LIKELY = {
    "_admission": [
        "test_order",
        "test_tool",
        "test_pipeline",
        "test_events",
        "budgets/test_budget",
        "guardrails/test_resilience",
    ],
    "_amounts": ["test_amounts"],
    "_approval": ["guardrails/test_approve", "budgets/test_extend", "test_events"],
    "_call": ["test_call", "test_tool", "guardrails/test_approve", "test_hostile"],
    "_cells": ["budgets/test_budget"],
    "_dispatch": ["test_tool", "test_halting", "test_dispatch"],
    "_drivers": ["test_drivers", "test_tool", "telemetry/test_tool_spans", "guardrails/test_"],
    "_fingerprints": ["test_fingerprints"],
    "_generators": ["test_drivers", "guardrails/test_resilience", "telemetry/test_tool_spans", "test_dispatch"],
    "_guard": ["test_tool", "test_halting", "test_events"],
    "_halting": ["test_halting"],
    "_loop_journal": ["telemetry/test_run_spans", "journal/"],
    "_loop_run": [
        "test_loop",
        "test_until",
        "test_evaluat",
        "test_latching",
        "test_events",
        "telemetry/test_tool_spans",
    ],
    "_order": ["test_order", "guardrails/", "test_tool", "test_events"],
    "_pipeline": ["test_order", "test_pipeline", "test_drivers"],
    "_run": ["test_run", "test_latching", "test_loop", "test_wind", "test_events", "test_charge"],
    "_scope": ["test_run", "test_halting", "test_latching"],
    "_threads": ["test_drivers", "guardrails/test_resilience", "test_until"],
    "_tool": ["test_tool", "test_run", "budgets/test_budget"],
    "journal/_answers": ["questions/test_inbox"],
    "journal/_asking": ["questions/test_inbox"],
    "journal/_book": ["questions/test_inbox"],
    "questions/inbox": ["questions/test_inbox"],
    "budgets/_books": ["budgets/test_period", "metering/test_ledgers"],
    "budgets/_keeper": ["budgets/test_period", "metering/test_ledgers"],
    "budgets/_memory": ["budgets/test_ledger"],
    "budgets/_open": ["budgets/test_periods"],
    "budgets/_period": ["budgets/test_period", "metering/test_ledgers"],
    "budgets/_sqlite": ["budgets/test_ledger", "budgets/test_processes"],
    "budgets/_windows": ["budgets/test_windows"],
    "budgets/budget": ["budgets/test_budget", "budgets/test_extend", "budgets/test_races", "test_charge", "test_wind"],
    "budgets/ledger": ["budgets/test_ledger"],
    "guardrails/approve": ["guardrails/test_approve", "test_order"],
    "guardrails/repeats": ["guardrails/test_repeats"],
    "guardrails/resilience": ["guardrails/test_resilience"],
    "guardrails/steps": ["guardrails/test_steps"],
    "guardrails/wrap": ["guardrails/test_wrap"],
    "telemetry/_tools": ["telemetry/test_tool_spans", "telemetry/test_run_spans"],
}
"""Module: the tests to ask first, by how their path begins. To collect all takes longer than most mutants live."""

SLOW = re.compile("journal/|metering/|scenarios/|testing/|test_(console|fingerprints|hostile|metrics|schemas)")
"""Tests that are asked last."""
IRRELEVANT = re.compile(
    "cli/|integration/|test_(architecture|examples|exports|import_time|prices|readme|redaction|server|setup|terminal|typing)"
)
"""Tests of other things than what the package does."""

PATIENCE = 10.0
"""Seconds for one test: a mutant may hang."""
LIMIT = 600.0
"""Seconds for all tests of one mutant."""


@dataclass(frozen=True)
class Mutant:
    """One fault: the text of a module with the fault in it."""

    id: str
    file: str
    """Its path in the package."""
    code: str
    why: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of it."""

    mutant: Mutant
    by: str | None
    """The test that failed; None if it survived."""
    seconds: float


# -- mutants ---------------------------------------------------------------------------------------


def own(tree: Path) -> Iterator[Mutant]:
    """Those of own.toml. One that doesn't apply any more is an error: it would be counted as killed for nothing."""
    lost = []
    for name, entry in tomllib.loads((HERE / "own.toml").read_text("utf-8")).items():
        original = (tree / PACKAGE / entry["file"]).read_text("utf-8")
        found = original.count(entry["old"])
        if found != 1:
            lost.append(f"own.toml: the old text of {name} is found {found} times in {entry['file']}, not once")
            continue
        code = original.replace(entry["old"], entry["new"])
        compile(code, entry["file"], "exec")
        yield Mutant(name, entry["file"], code, entry["why"])
    if lost:
        raise SystemExit("\n".join(lost))


@dataclass(frozen=True)
class _Candidate:
    id: str
    file: str
    module: cst.Module
    old: cst.CSTNode
    new: cst.CSTNode

    def mutant(self) -> Mutant | None:
        code = self.module.deep_replace(self.old, self.new).code  # type: ignore[arg-type, union-attr]  # a module stays one
        try:
            compile(code, self.file, "exec")
        except SyntaxError:
            return None
        return Mutant(self.id, self.file, code)


def candidates(tree: Path) -> Iterator[_Candidate]:
    """Every mutant that mutmut's operators make of the target modules, within functions."""
    root = tree / PACKAGE
    for path in sorted({path for target in TARGETS for path in root.glob(target)}):
        visitor = MutationVisitor(mutation_operators, IgnoredCode(set(), set(), set()))
        module = MetadataWrapper(cst.parse_module(path.read_text("utf-8"))).visit(visitor)
        names = dict(_functions(module))
        file = path.relative_to(root).as_posix()
        seen: Counter[tuple[str, ...]] = Counter()
        for mutation in visitor.mutations:
            name = names.get(mutation.contained_by_top_level_function)
            if name is None:
                continue
            texts = (name, *(module.code_for_node(n) for n in (mutation.original_node, mutation.mutated_node)))
            seen[texts] += 1
            digest = hashlib.sha256(repr((*texts, seen[texts])).encode()).hexdigest()[:8]
            yield _Candidate(
                f"{file.removesuffix('.py')}:{name}:{digest}",
                file,
                module,
                mutation.original_node,
                mutation.mutated_node,
            )


def _functions(module: cst.Module) -> Iterator[tuple[cst.CSTNode, str]]:
    for statement in module.body:
        if isinstance(statement, cst.FunctionDef):
            yield statement, statement.name.value
        elif isinstance(statement, cst.ClassDef):
            for inner in statement.body.body:
                if isinstance(inner, cst.FunctionDef):
                    yield inner, f"{statement.name.value}.{inner.name.value}"


def drawn(tree: Path, n: int, seed: str, only: str) -> Iterator[Mutant]:
    """n of them. The draw ranks hashes, so that an edit of the package changes only what it touches."""
    ranked = sorted(
        (candidate for candidate in candidates(tree) if re.search(only, candidate.id)),
        key=lambda candidate: hashlib.sha256(f"{seed} {candidate.id}".encode()).digest(),
    )
    made = (candidate.mutant() for candidate in ranked)
    for _, mutant in zip(range(n), (mutant for mutant in made if mutant is not None), strict=False):
        yield mutant


# -- running them ----------------------------------------------------------------------------------


class Copy:
    """A copy of the repository in which one mutant after the other is tried."""

    def __init__(self, source: Path, root: Path, quick: bool) -> None:
        self.root = root
        self.quick = quick
        for name in (PACKAGE, "tests", "docs", "examples"):  # tests read the latter two
            shutil.copytree(source / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(source / "pyproject.toml", root)
        self.environment = {**os.environ, "PYTHONPATH": str(root)}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the tests are compiled once, not for every mutant
        shown = self._python("-c", f"import {PACKAGE}; print({PACKAGE}.__file__)")[1].strip()
        if Path(shown).parent != root / PACKAGE:
            raise SystemExit(f"the tests would not import the mutated package, but {shown}")

    def _python(self, *arguments: str) -> tuple[int, str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return -1, output
        return process.returncode, output

    def tests(self, file: str) -> list[list[str]]:
        """The relevant tests: those first that are likely to notice a fault in this module."""
        paths = sorted(path.relative_to(self.root).as_posix() for path in self.root.glob("tests/**/test_*.py"))
        paths = [path for path in paths if not IRRELEVANT.search(path)]
        likely = [f"tests/{start}" for start in LIKELY.get(file.removesuffix(".py"), ())]
        first = list(dict.fromkeys(path for start in likely for path in paths if path.startswith(start)))
        rest = [path for path in paths if path not in first]
        groups = first, [path for path in rest if not SLOW.search(path)], [path for path in rest if SLOW.search(path)]
        return [group for group in groups if group]

    def failing(self, file: str) -> str | None:
        """The test that fails, twice in a row: one that fails by chance, on a busy machine, proves nothing."""
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)
        groups = self.tests(file)
        return next(filter(None, map(self._failing, groups[:1] if self.quick else groups)), None)

    def _failing(self, tests: list[str]) -> str | None:
        chance: list[str] = []
        while True:
            code, output = self._pytest(*tests, *(f"--deselect={test}" for test in chance))
            if code == 0:
                return None
            found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
            if not found:
                return "time" if code < 0 else f"pytest: {output.strip()[-300:]}"
            if "::" not in found[-1] or self._pytest(found[-1])[0]:
                return str(found[-1])
            chance.append(found[-1])
            print(f"      by chance: {found[-1]}", flush=True)

    def _pytest(self, *arguments: str) -> tuple[int, str]:
        options = f"-x -q --tb=no -p no:cacheprovider --hypothesis-seed=0 --timeout={PATIENCE:g}".split()
        return self._python("-m", "pytest", *options, *arguments)

    def attempt(self, mutant: Mutant) -> Outcome:
        """Whether a test fails with the mutant in place."""
        path = self.root / PACKAGE / mutant.file
        original = path.read_text("utf-8")
        begun = time.monotonic()
        try:
            self._write(path, mutant.code)
            by = self.failing(mutant.file)
        finally:
            self._write(path, original)
        return Outcome(mutant, by, time.monotonic() - begun)

    @staticmethod
    def _write(path: Path, code: str) -> None:
        path.write_text(code, "utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):  # two mutants of a second may be equally long
            compiled.unlink()


def difference(tree: Path, mutant: Mutant) -> str:
    """What the mutant changes."""
    original = (tree / PACKAGE / mutant.file).read_text("utf-8").splitlines()
    lines = difflib.unified_diff(original, mutant.code.splitlines(), mutant.file, mutant.id, n=1, lineterm="")
    return "\n".join(f"    {line}" for line in list(lines)[2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--own", action="store_true", help="own.toml alone")
    parser.add_argument("--random", type=int, metavar="N", help="N random mutants alone")
    parser.add_argument("--seed", default="loopguard", help="of the draw")
    parser.add_argument("--only", default="", metavar="PATTERN", help="those whose name or id it is found in")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    parser.add_argument("--quick", action="store_true", help="ask only the tests that are likely to notice")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    options = parser.parse_args()
    equivalent: dict[str, str] = tomllib.loads((HERE / "equivalent.toml").read_text("utf-8"))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="loopguard-mutate-") as folder:
        first = Copy(REPOSITORY, Path(folder, "0"), options.quick)
        mutants = [] if options.random else [mutant for mutant in own(first.root) if re.search(options.only, mutant.id)]
        if not options.own:
            mutants += drawn(first.root, options.random or 200, options.seed, options.only)
        original = Path(folder, "original")
        shutil.copytree(first.root / PACKAGE, original / PACKAGE)
        if options.list:
            for mutant in mutants:
                print(f"{mutant.id}  {mutant.why}\n{difference(original, mutant)}")
            return 0
        argued = [mutant for mutant in mutants if mutant.id in equivalent]
        mutants = [mutant for mutant in mutants if mutant.id not in equivalent]
        print(f"{len(mutants)} mutants; {len(argued)} more are equivalent, as equivalent.toml argues", flush=True)
        started = time.monotonic()
        broken = first.failing("")
        if broken is not None:
            print(f"without any mutant this test fails: {broken}", file=sys.stderr)
            return 2
        print(f"without a mutant the tests pass, in {time.monotonic() - started:.0f} s", flush=True)
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        copies.put(first)
        for number in range(1, options.jobs):
            copies.put(Copy(first.root, Path(folder, str(number)), options.quick))

        def attempt(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return copy.attempt(mutant)
            finally:
                copies.put(copy)

        survivors = []
        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                for n, future in enumerate(as_completed(pool.submit(attempt, mutant) for mutant in mutants), 1):
                    outcome = future.result()
                    mark = f"killed by {outcome.by}" if outcome.by is not None else "SURVIVED"
                    print(f"{n:4}/{len(mutants)} {outcome.seconds:5.1f} s  {outcome.mutant.id}  {mark}", flush=True)
                    if outcome.by is None:
                        survivors.append(outcome.mutant)
                        print(difference(original, outcome.mutant), flush=True)
            finally:
                pool.shutdown(cancel_futures=True)
        for mutant in survivors:
            print(f"\n{mutant.id}: {mutant.why or 'random'}\n{difference(original, mutant)}")
        minutes = (time.monotonic() - begun) / 60
        print(
            f"\n{len(mutants) + len(argued)} mutants: {len(mutants) - len(survivors)} killed, "
            f"{len(argued)} equivalent, {len(survivors)} survived; {minutes:.1f} minutes"
        )
        return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
