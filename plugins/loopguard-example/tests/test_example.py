"""The guardrail and the approver of the example plugin, and that an installed loopguard finds them."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from loopguard import ApproveTool, ConfigurationError, Guard, ToolCallRefused, tool
from loopguard_example import AllowedHosts, up_to

EXAMPLE = Path(__file__).parents[1] / "examples" / "guarded_fetch.py"


@tool
def fetch(url: object = "https://docs.python.org/") -> str:
    return "a page"


@tool(approve=True)
def issue_refund(amount: float) -> str:
    return "refunded"


@pytest.mark.parametrize(
    "url", ["https://docs.python.org/3/", "https://DOCS.PYTHON.ORG:443/", "https://me@docs.python.org/"]
)
def test_an_allowed_host_is_reached(url: str) -> None:
    """However the URL writes it."""
    with Guard(AllowedHosts("docs.python.org")).scope():
        assert fetch(url) == "a page"
        assert fetch() == "a page"


@pytest.mark.parametrize(
    "url",
    [
        "https://example.net/",
        "https://docs.python.org.example.net/",
        "https://docs.python.org@example.net/",
        "http://[",
        7,
    ],
)
def test_any_other_host_is_refused(url: object) -> None:
    """Look-alikes and what is no URL included; the refusal says what is allowed."""
    with Guard(AllowedHosts("docs.python.org")).scope("reading") as run:
        with pytest.raises(ToolCallRefused, match=r"may reach docs\.python\.org") as caught:
            fetch(url)
        assert (caught.value.code, caught.value.source) == ("host", "reading")
        assert run.steps == 0


def test_tools_without_such_a_parameter_are_left_alone() -> None:
    """The guardrail looks at the parameter that it is told."""
    with Guard(AllowedHosts("docs.python.org", argument="link")).scope():
        assert fetch("https://example.net/") == "a page"


def test_no_host_at_all_is_a_mistake() -> None:
    """A guardrail that would refuse everything is meant otherwise."""
    for hosts in ((), ("",)):
        with pytest.raises(ConfigurationError, match="at least one host"):
            AllowedHosts(*hosts)


@pytest.mark.parametrize(
    ("amount", "approved"), [(0, True), (100, True), (100.01, False), (-1, False), (float("nan"), False)]
)
def test_only_amounts_within_the_limit_are_approved(amount: float, approved: bool) -> None:
    """What can't be compared is a no, too."""
    with Guard(ApproveTool(up_to(100))).scope():
        if approved:
            assert issue_refund(amount) == "refunded"
        else:
            with pytest.raises(ToolCallRefused, match="not within 100"):
                issue_refund(amount)


def test_both_are_found_by_entry_point() -> None:
    """Installing the distribution is all that it takes."""
    (guardrail,) = entry_points(group="loopguard.guardrails", name="AllowedHosts")
    (approver,) = entry_points(group="loopguard.approvers", name="up_to")
    assert guardrail.load() is AllowedHosts
    assert approver.load() is up_to


def test_the_example_prints_what_its_docstring_says(tmp_path: Path) -> None:
    """Offline, in an empty folder."""
    done = subprocess.run(
        [sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    docstring = ast.get_docstring(ast.parse(EXAMPLE.read_text(encoding="utf-8"))) or ""
    wanted = [line.strip() for line in docstring.partition("\nPrints:\n\n")[2].splitlines()]
    assert done.stdout.splitlines() == wanted
