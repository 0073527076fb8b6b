"""A server by hand, for what the SDK's would never say. The tools it lists stand in the file RAW_TOOLS."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def send(**message: Any) -> None:
    """Write one message."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def tools() -> list[Any]:
    """What to list now."""
    return json.loads(Path(os.environ["RAW_TOOLS"]).read_text(encoding="utf-8"))  # type: ignore[no-any-return]  # a list


CAPABILITIES = {
    "tools": {"listChanged": True},
    "tasks": {"list": {}},
    "experimental": {"x": {}},
    "extensions": {"y": {}},
}


def result_of(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    method, params = request["method"], request.get("params") or {}
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": CAPABILITIES,
            "serverInfo": {"name": "raw", "version": "1"},
            "_meta": {"got": params["capabilities"]},
        }
    if method == "tools/list":
        listed, start = tools(), int(params.get("cursor", 0))
        more = {"nextCursor": str(start + 2)} if start + 2 < len(listed) or "--endless" in sys.argv else {}
        return {"tools": listed[start : start + 2], **more}
    if method == "tools/call" and params["name"] == "noise":
        sys.stdout.write("this is no message\n")
        send(method="notifications/of/its/own", params={})
        send(id="server-1", method="strange/request", params={})
        send(id="server-2", method="sampling/createMessage", params={"messages": [], "maxTokens": 1})
        send(id="nobody asked", result={})
    if method == "tools/call" and params["name"] == "half":
        return {"content": [{"type": "text", "text": "half an emoji: \ud83d"}]}
    if method == "tools/call" and params["name"] == "list":
        return []  # type: ignore[return-value]  # no result
    if method == "tools/call" and params["name"] == "echo":
        sys.stderr.write(f"traced {params['_meta']['traceparent']}\n")
        sys.stderr.flush()
    if method == "tools/call" and params["name"] == "announce":
        send(method="notifications/tools/list_changed")
    if method == "tools/call" and params["name"] == "input":
        sampling = {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}}
        return {"resultType": "input_required", "inputRequests": {"one": sampling}}
    return {"content": [{"type": "text", "text": json.dumps(params.get("arguments"))}], "isError": False}


def main() -> None:
    """Answer until the input ends, and then, with --stay, stay."""
    for line in sys.stdin:
        message = json.loads(line)
        if "method" in message and "id" in message:
            send(id=message["id"], result=result_of(message))
        elif "error" in message:
            sys.stderr.write(f"answered {message['id']}: {message['error']['message']}\n")
            sys.stderr.flush()
    while "--stay" in sys.argv:
        try:
            sys.stdin.close()
            Path(os.environ["RAW_TOOLS"]).with_name("stays").touch()
            __import__("time").sleep(600)
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
