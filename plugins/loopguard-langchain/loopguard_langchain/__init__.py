"""loopguard for LangChain: one middleware, under which an agent of `create_agent` answers to a guard."""

from __future__ import annotations

from loopguard_langchain._middleware import GuardMiddleware

__all__ = ["GuardMiddleware"]
