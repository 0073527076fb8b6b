"""Run the tests, against the built wheel, on every Python from 3.11 on that this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

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


@nox.session(python=FOUND[0])
def lowest(session: nox.Session) -> None:
    """The whole suite with the oldest dependencies that pyproject.toml allows."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    bounds = project["dependencies"] + extras["prices"] + extras["otlp"] + extras["cli"]
    constraints = Path(session.create_tmp(), "lowest.txt")
    constraints.write_text("\n".join(bound.replace(">=", "==") for bound in bounds), encoding="utf-8")
    session.install(".[test]", "--constraint", str(constraints))
    session.run("pytest", *session.posargs)
