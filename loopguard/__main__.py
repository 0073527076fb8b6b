"""``python -m loopguard``: the same as the command."""

from __future__ import annotations

from loopguard.cli import main

main()
