"""loopguard for the Model Context Protocol: a server's tools, an agent's session, or a proxy before any server."""

from __future__ import annotations

from loopguard_mcp._client import guard_session
from loopguard_mcp._server import GuardMiddleware

__all__ = ["GuardMiddleware", "guard_session"]
