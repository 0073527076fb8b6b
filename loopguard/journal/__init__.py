"""The journal: everything that a run does, kept in a file, so that it can be resumed, audited and verified."""

from __future__ import annotations
