"""The public surface: small, sorted, complete, real and documented."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from types import ModuleType

import pytest

import loopguard
from loopguard import _outcomes, exceptions

# What users were promised, by kind.
DECORATORS = {"Flow", "Guard", "await_input", "dispatch", "llm", "loop", "receive_dispatch", "step", "tool"}
GUARDRAILS = {
    "ApproveTool",
    "Budget",
    "CircuitBreaker",
    "LoopLimit",
    "MaxSteps",
    "RateLimit",
    "Retry",
    "Timeout",
    "WrapTool",
}
HELPERS = {"Approval", "Inbox", "PriceBook", "Usage", "ask_in_terminal", "charge", "meter", "what_if"}
PLACES = {"configure", "configure_telemetry", "current_call", "current_run"}
SUBMODULES = {
    "budgets",
    "conditions",
    "context",
    "evaluators",
    "journal",
    "judges",
    "metering",
    "telemetry",
    "testing",
    "typing",
}
PROMISED = DECORATORS | GUARDRAILS | HELPERS | PLACES | SUBMODULES | {*_outcomes.__all__, *exceptions.__all__}
# Promised, but not built yet: a name leaves this set when it arrives.
LATER: set[str] = set()
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(loopguard.__path__, "loopguard.")
    if not any(part.startswith("_") for part in name.split("."))
]


def test_the_names_are_sorted() -> None:
    """`__all__` is in plain order and names nothing twice."""
    assert loopguard.__all__ == sorted(set(loopguard.__all__))


def test_the_promised_names_are_there() -> None:
    """Every promised name is exported, and what is still to come is marked as such."""
    assert set(loopguard.__all__) & PROMISED == PROMISED - LATER


def test_the_list_of_names_is_complete() -> None:
    """Whatever is public in the package is in `__all__`, and nothing else completes on a tab."""
    public = {
        name
        for name in dir(loopguard)
        if not name.startswith("_") and (name in loopguard.__all__ or not is_incidental(getattr(loopguard, name)))
    }
    assert public == set(loopguard.__all__)


def test_the_version_is_that_of_the_distribution() -> None:
    """As everywhere: `loopguard.__version__`, though the distribution has another name."""
    assert loopguard.__version__ == importlib.metadata.version("loopguard-agents")


def is_incidental(value: object) -> bool:
    """Tell what an import leaves behind: submodules, and the `annotations` of `__future__`."""
    return isinstance(value, ModuleType) or type(value).__module__ == "__future__"


@pytest.mark.parametrize("name", loopguard.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    """Every exported name has a docstring that somebody wrote."""
    docstring = getattr(loopguard, name).__doc__
    assert docstring
    assert not docstring.startswith(f"{name}("), "that is the signature that dataclass makes up"


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_lists_its_names(name: str) -> None:
    """A public module has an `__all__` that is sorted and real."""
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(set(module.__all__))
    assert [missing for missing in module.__all__ if not hasattr(module, missing)] == []
