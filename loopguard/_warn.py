"""Warnings at run time: said once, kept in the results, and never turned into an error by a filter."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loopguard.exceptions import LoopGuardWarning

if TYPE_CHECKING:
    from loopguard._run import Run

__all__ = ["warn"]


def warn(message: str, runs: Sequence[Run] = ()) -> None:
    """Say it as a warning and in the results; never let a warning filter turn it into an error here."""
    for run in runs:
        if len(run.warnings) < 100:
            run.warnings.append(message)
    try:
        warnings.warn(message, LoopGuardWarning, stacklevel=4)
    except LoopGuardWarning:
        pass
