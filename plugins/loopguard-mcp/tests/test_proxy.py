"""The proxy: a policy before a real server, seen by a real client."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import mcp_types as types
import pytest
from mcp import MCPError


def text(result: Any) -> str:
    """The text of a result."""
    return "".join(block.text for block in result.content)


ERAS = pytest.mark.parametrize("mode", ["legacy", "auto"])


@ERAS
def test_calls_pass_up_to_the_limit_and_the_refusal_reaches_the_client(bench: Any, mode: str) -> None:
    """What fits the policy works as without a proxy, what doesn't is an error whose text a model can act on."""
    bench.policy("[MaxSteps]\nn = 2\n")

    async def main() -> None:
        async with bench.client(mode=mode) as client:
            assert {"search", "pay"} <= {tool.name for tool in (await client.list_tools()).tools}
            assert text(await client.call_tool("search", {"query": "a"})) == "found a 3"
            assert text(await client.call_tool("search", {"query": "b", "top": 1})) == "found b 1"
            refused = await client.call_tool("search", {"query": "c"})
            assert refused.is_error
            assert text(refused) == (
                "search was not run: 'mcp-proxy' allows 2 tool calls per run, and none is left. "
                "Answer now with what you have."
            )

    asyncio.run(main())
    assert bench.ran == ["search a", "search b"]
    assert "refused search" in bench.said
    assert "2 tool calls, 1 refused" in bench.said


def test_two_hundred_parallel_calls_stop_exactly_at_the_cap(bench: Any) -> None:
    """However many calls are in flight, the bodies that run are as many as the policy allows."""
    bench.policy('[MaxSteps]\nn = 150\n[Budget]\nusd = 0.37\n[tools."sea*"]\ncost = 0.01\n')

    async def main() -> list[Any]:
        async with bench.client() as client:
            return await asyncio.gather(*(client.call_tool("search", {"query": str(i)}) for i in range(200)))

    results = asyncio.run(main())
    assert sum(not result.is_error for result in results) == 37
    assert len(bench.ran) == len(set(bench.ran)) == 37
    assert {text(result)[:25] for result in results if result.is_error} == {"search may cost $0.01, bu"}
    assert "$0.37 spent" in bench.said


def test_a_loop_is_noticed(bench: Any) -> None:
    """The default LoopLimit stands before the server, too."""

    async def main() -> list[bool]:
        async with bench.client() as client:
            return [(await client.call_tool("search", {"query": "same"})).is_error for _ in range(4)]

    assert asyncio.run(main()) == [False, False, False, True]


@pytest.mark.parametrize(
    ("answer", "ran", "error"),
    [("yes", ["pay o1 900"], False), ("no", [], True), ('{"order": "o1", "amount": 5}', ["pay o1 5"], False)],
)
def test_a_person_decides_about_exactly_the_arguments(bench: Any, answer: str, ran: list[str], error: bool) -> None:
    """The approver of the policy is asked in place; its yes, no or edit holds."""
    bench.policy('[ApproveTool]\napprover = "asker"\nonly = "pay"\n')
    bench.answer(answer)

    async def main() -> bool:
        async with bench.client() as client:
            await client.call_tool("search", {"query": "free"})
            return (await client.call_tool("pay", {"order": "o1", "amount": 900})).is_error

    assert asyncio.run(main()) is error
    assert bench.asked == [{"name": "pay", "arguments": {"order": "o1", "amount": 900}}]
    assert bench.ran == ["search free", *ran]


def test_silence_is_no_yes_and_holds_up_nobody_else(bench: Any) -> None:
    """While a person is asked other calls run; after the timeout the call is refused."""
    bench.policy('[ApproveTool]\napprover = "asker"\nonly = "pay"\ntimeout = 1.5\n')

    async def main() -> tuple[str, str]:
        async with bench.client() as client:
            asking = asyncio.create_task(client.call_tool("pay", {"order": "o1", "amount": 1}))
            other = text(await client.call_tool("search", {"query": "meanwhile"}))
            assert not asking.done()
            return other, text(await asking)

    other, refused = asyncio.run(main())
    bench.answer("no")  # lets the thread of the approver end
    assert other == "found meanwhile 3"
    assert "nobody approved pay within 1.5 s" in refused
    assert bench.ran == ["search meanwhile"]


def test_a_tool_marked_approve_needs_an_approver(bench: Any) -> None:
    """approve = true in the policy fails closed where nobody can be asked."""
    bench.policy("[tools.pay]\napprove = true\n")

    async def main() -> str:
        async with bench.client() as client:
            return text(await client.call_tool("pay", {"order": "o1", "amount": 1}))

    assert "runs only on an explicit yes" in asyncio.run(main())
    assert bench.ran == []


@ERAS
def test_resources_are_passed_on_and_counted(bench: Any, mode: str) -> None:
    """Reading a resource is no tool call, but it stands in the book."""
    bench.policy("[MaxSteps]\nn = 0\n")

    async def main() -> None:
        async with bench.client(mode=mode) as client:
            for _ in range(2):
                read = await client.read_resource("note://one")
                assert read.contents[0].text == "the note"  # type: ignore[union-attr]  # it is a text
            assert [str(each.uri) for each in (await client.list_resources()).resources] == ["note://one"]

    asyncio.run(main())
    assert "0 tool calls, 0 refused, $0 spent, 2 resources read" in bench.said


async def sampled(context: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
    """The model of a client that can be asked."""
    return types.CreateMessageResult(role="assistant", content=types.TextContent(type="text", text="me"), model="m")


@pytest.mark.parametrize("allowed", [False, True])
def test_sampling_is_denied_unless_it_is_allowed(bench: Any, allowed: bool) -> None:
    """The server neither hears that the client can sample, nor gets it to."""

    async def main() -> str:
        options = ["--allow-sampling"] if allowed else []
        async with bench.client("demo.py", *options, sampling_callback=sampled) as client:
            try:
                return text(await client.call_tool("ask_model", {}))
            except MCPError as exc:
                return exc.message

    said = asyncio.run(main())
    assert bench.ran == [f"may ask: {allowed}"]
    assert ("the model said" in said) is allowed
    assert ("sampling is denied" in said) is not allowed
    assert ("not passed on, from the server: sampling/createMessage" in bench.said) is not allowed


def test_the_server_gets_the_environment_without_loopguards_own(bench: Any) -> None:
    """Keys and stores of loopguard are none of the server's business; what it needs for itself is."""
    bench.env |= {"LOOPGUARD_STORE": "sqlite:///secret.db", "loopguard_key": "x", "DEMO_TOKEN": "its own"}

    async def main() -> Any:
        async with bench.client() as client:
            return (await client.call_tool("environment", {})).structured_content

    names = asyncio.run(main())["result"]
    assert "DEMO_TOKEN" in names
    assert [name for name in names if name.upper().startswith("LOOPGUARD")] == []


def test_progress_reaches_the_client(bench: Any) -> None:
    """Progress notifications are passed on with their token."""
    heard: list[Any] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        heard.append((done, total, message))

    async def main() -> str:
        async with bench.client() as client:
            return text(await client.call_tool("slow", {"seconds": 0}, progress_callback=progress))

    assert asyncio.run(main()) == "done"
    assert heard == [(1, 2, "half of it")]


def test_a_cancelled_call_is_cancelled_at_the_server(bench: Any) -> None:
    """A client that gives up reaches the tool, and the session goes on."""

    async def main() -> str:
        began = asyncio.Event()

        async def progress(*_: Any) -> None:
            began.set()

        async with bench.client() as client:
            call = asyncio.create_task(client.call_tool("slow", {"seconds": 50}, progress_callback=progress))
            await began.wait()
            call.cancel()
            await asyncio.wait({call})
            while "slow was cancelled" not in bench.ran:
                await asyncio.sleep(0.01)
            return text(await client.call_tool("search", {"query": "after"}))

    assert asyncio.run(main()) == "found after 3"


def test_a_timeout_of_the_policy_cancels_at_the_server(bench: Any) -> None:
    """The client is told that the tool ran out of time, the server that nobody waits."""
    bench.policy("[Timeout]\nseconds = 0.5\n")

    async def main() -> str:
        async with bench.client() as client:
            told = text(await client.call_tool("slow", {"seconds": 50}))
            while "slow was cancelled" not in bench.ran:
                await asyncio.sleep(0.01)
            return told

    assert "slow did not finish within 0.5 s" in asyncio.run(main())


def test_an_unknown_method_is_not_passed_on(bench: Any) -> None:
    """Only methods that the proxy knows reach the server."""

    async def main() -> MCPError:
        async with bench.client() as client:
            strange = types.Request[Any, Any](method="tools/delete\x1b[2J", params=None)
            with pytest.raises(MCPError) as refused:
                await client.session.send_request(strange, types.EmptyResult)  # type: ignore[arg-type]  # on purpose
            return refused.value

    error = asyncio.run(main())
    assert error.code == types.METHOD_NOT_FOUND
    assert error.message == r"loopguard mcp-proxy doesn't pass on tools/delete\x1b[2J"
    assert "\x1b" not in bench.said


def test_an_unknown_tool_is_told_with_those_there_are(bench: Any) -> None:
    """A name that the server doesn't list never reaches it."""

    async def main() -> Any:
        async with bench.client() as client:
            return await client.call_tool("serach", {})

    result = asyncio.run(main())
    assert result.is_error
    assert "There is no tool serach, so nothing ran. There are: ask_model, crash" in text(result)


def test_a_server_that_dies_is_told_clearly(bench: Any) -> None:
    """Calls in flight get an error that says so, the proxy ends with 1, and the log says how it went."""
    bench.policy('[ApproveTool]\napprover = "asker"\nonly = "pay"\n')

    async def main() -> list[Any]:
        async with bench.client() as client:
            calls = [
                client.call_tool("pay", {"order": "o1", "amount": 1}),  # a person is being asked
                client.call_tool("slow", {"seconds": 50}),
            ]
            tasks = [asyncio.create_task(call) for call in calls]
            while not (bench.asked and "slow began" in bench.ran):
                await asyncio.sleep(0.01)
            tasks.append(asyncio.create_task(client.call_tool("crash", {})))
            return await asyncio.gather(*tasks, return_exceptions=True)

    for error in asyncio.run(main()):
        assert isinstance(error, MCPError)
        assert "the MCP server has ended" in error.message
    assert "the server ended with code 7" in bench.said
    assert r"server: \\x1b[31mgoing down" in bench.said.replace("\\x1b", "\\\\x1b")
    assert "sk-live-abc" not in bench.said


@pytest.mark.parametrize(
    ("server", "policy", "why"),
    [
        ("no-such-command", "", "there is no command 'no-such-command'"),
        (sys.executable, "[MaxStep]\nn = 1\n", "MaxStep"),
    ],
)
def test_what_cannot_work_says_so_at_once(bench: Any, server: str, policy: str, why: str) -> None:
    """A wrong command or policy ends the proxy with 2, and standard output stays clean."""
    bench.policy(policy)
    command = [*bench.command("demo.py")[:-2], server]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert why in done.stderr
    assert done.stdout == ""


def test_standard_output_carries_the_protocol_alone(bench: Any) -> None:
    """A session that ends at once writes nothing there, and ends with 0."""
    done = subprocess.run(
        bench.command("demo.py"), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "sha256:" in done.stderr


def test_the_agents_trace_goes_through_and_the_policy_is_on_the_span(bench: Any, collector: Any) -> None:
    """The call's span is a child of the agent's, the server gets the call's, and the run names its policy."""
    bench.policy("[MaxSteps]\nn = 5\n")
    bench.tools({"name": "echo", "inputSchema": {"type": "object"}})
    bench.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
    agent = f"00-{'a' * 32}-{'b' * 16}-01"

    async def main() -> str:
        async with bench.client("raw.py") as client:
            return text(await client.call_tool("echo", {}, meta={"traceparent": agent, "progressToken": 1}))

    assert asyncio.run(main()) == "{}"
    spans = {span.name: span for span in collector.spans()}
    tool, run = spans["execute_tool echo"], spans["invoke_agent mcp-proxy"]
    assert (tool.trace_id.hex(), tool.parent_span_id.hex()) == ("a" * 32, "b" * 16)
    attributes = {each.key: each.value.string_value for each in run.attributes}
    assert attributes["loopguard.policy.hash"].startswith("sha256:")
    assert f"server: traced 00-{'a' * 32}-{tool.span_id.hex()}-01" in bench.said
