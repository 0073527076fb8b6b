"""The `loopguard` command: what runs did and cost, what they wait for, and what a policy would have said of them.

Needs the extra ``cli``. Exit codes: 0 done, 1 the thing asked for isn't so, 2 usage, 3 the run stopped without
completing.
"""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command with the arguments of this process, and exit."""
    if importlib.util.find_spec("typer") is None:
        sys.exit(_missing())
    from loopguard.cli._app import run

    sys.exit(run())


def _missing() -> int:
    print("The loopguard command needs typer: pip install 'loopguard-agents[cli]'", file=sys.stderr)
    return 2
