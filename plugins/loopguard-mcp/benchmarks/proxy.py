"""What the proxy costs: the same calls of a server, straight and through it.

Run: ``python plugins/loopguard-mcp/benchmarks/proxy.py``.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from mcp import Client, StdioServerParameters, stdio_client

SERVER = [sys.executable, str(Path(__file__).parents[1] / "tests" / "servers" / "demo.py")]
CALLS = 1_000
POLICY = '[MaxSteps]\nn = 100000\n[Budget]\nusd = 1000\n[tools."*"]\ncost = 0.01\n'


async def measure(command: list[str]) -> tuple[float, float, float]:
    """Seconds to start, and for each call: one after the other, and 200 at a time."""
    began = time.perf_counter()
    transport = stdio_client(StdioServerParameters(command=command[0], args=command[1:]))
    async with Client(transport, mode="legacy") as client:
        await client.call_tool("search", {"query": "first"})
        started = time.perf_counter() - began
        began = time.perf_counter()
        for n in range(CALLS):
            await client.call_tool("search", {"query": f"one {n}"})
        alone = (time.perf_counter() - began) / CALLS
        began = time.perf_counter()
        for batch in range(CALLS // 200):
            await asyncio.gather(*(client.call_tool("search", {"query": f"{batch} {n}"}) for n in range(200)))
        return started, alone, (time.perf_counter() - began) / CALLS


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder, "policy.toml")
        policy.write_text(POLICY, encoding="utf-8")
        proxy = [sys.executable, "-m", "loopguard_mcp", "--policy", str(policy), "--", *SERVER]
        for name, command in (("straight", SERVER), ("through the proxy", proxy)):
            started, alone, together = await measure(command)
            sys.stdout.write(
                f"{name}: start {started:.2f} s, call {alone * 1e3:.2f} ms, of 200 {together * 1e3:.2f} ms\n"
            )


asyncio.run(main())
