"""What a plugin implements, and the effects that its hooks yield."""

from __future__ import annotations

from loopguard._pipeline import Ask, BoundLimit, Effect, Hook, Invoke, Limit, Proceed, Sleep, Steps

__all__ = ["Ask", "BoundLimit", "Effect", "Hook", "Invoke", "Limit", "Proceed", "Sleep", "Steps"]
