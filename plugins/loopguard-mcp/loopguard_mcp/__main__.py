"""`python -m loopguard_mcp`: the proxy, as `loopguard mcp-proxy` is."""

from __future__ import annotations

import typer

from loopguard_mcp.proxy import mcp_proxy

if __name__ == "__main__":
    typer.run(mcp_proxy)
