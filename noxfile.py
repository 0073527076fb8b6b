"""Run the tests, against the built wheel, on every Python from 3.11 on that this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import nox

VERSIONS = [f"3.{minor}" for minor in range(11, 16)]

nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"


def add_pyenv_to_path() -> None:
    """Put pyenv's own interpreters first: its shims refuse versions that aren't selected."""
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=True).stdout.strip()
        folders = map(str, Path(root, "versions").glob("*/bin"))
        os.environ["PATH"] = os.pathsep.join([*folders, os.environ["PATH"]])


def works(version: str) -> bool:
    """Tell whether pythonX.Y is there and starts."""
    python = shutil.which(f"python{version}")
    return python is not None and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


add_pyenv_to_path()
FOUND = [version for version in VERSIONS if works(version)]


@nox.session(python=FOUND)
def tests(session: nox.Session) -> None:
    """The whole suite."""
    session.install(".[test]")
    session.run("pytest", *session.posargs)


def oldest(session: nox.Session, *requirements: str) -> tuple[str, str]:
    """The option of pip that takes the oldest versions that these allow, ``name>=1.2,<2``."""
    constraints = Path(session.create_tmp(), "lowest.txt")
    bounds = [bound.partition(",")[0].replace(">=", "==") for bound in requirements]
    constraints.write_text("\n".join(bounds), encoding="utf-8")
    return "--constraint", str(constraints)


def project_of(folder: Path) -> dict[str, Any]:
    """What the pyproject.toml in a folder says of its project."""
    project: dict[str, Any] = tomllib.loads(Path(folder, "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


@nox.session(python=FOUND[0])
def lowest(session: nox.Session) -> None:
    """The whole suite with the oldest dependencies that pyproject.toml allows."""
    project = project_of(Path())
    extras = project["optional-dependencies"]
    bounds = project["dependencies"] + extras["prices"] + extras["otlp"] + extras["cli"]
    session.install(".[test]", *oldest(session, *bounds))
    session.run("pytest", *session.posargs)


@nox.session(python=FOUND[0])
def lowest_plugins(session: nox.Session) -> None:
    """The suites of all plugins with the oldest dependencies that theirs allow."""
    folders = sorted(path.parent for path in Path("plugins").glob("*/pyproject.toml"))
    bounds = [bound for folder in folders for bound in project_of(folder)["dependencies"]]
    bounds = [bound for bound in bounds if not bound.startswith("loopguard-agents")]
    session.install(".[test]", *(f"./{folder}" for folder in folders), *oldest(session, *bounds))
    for folder in folders:  # their conftest modules have one name
        session.run("pytest", str(folder / "tests"), *session.posargs)
