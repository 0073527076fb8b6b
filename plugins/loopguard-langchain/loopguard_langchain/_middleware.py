"""GuardMiddleware: the two seams of an agent, its tools and its model."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import ToolMessage
from langgraph.errors import GraphBubbleUp
from langgraph.types import Command

from loopguard import ConfigurationError, Guard, LoopHalted, Run, ToolCallRefused, ToolTimeout, current_run
from loopguard.metering import MeteredCall, model_call
from loopguard.typing import ForeignTool, GuardedTool, PriceSource
from loopguard_langchain._messages import (
    ToolFailed,
    data_of_request,
    data_of_response,
    max_tokens_of,
    model_of,
    pack,
    response_of,
    unpack,
    usage_of,
)

__all__ = ["GuardMiddleware"]

Result = ToolMessage | Command[Any]
Prices = PriceSource | Mapping[str, Mapping[str, Any]] | str | os.PathLike[str]


class GuardMiddleware(AgentMiddleware[Any, Any, Any]):
    """Have an agent's tool calls and model calls answer to a guard, and to the run that it is invoked in.

        agent = create_agent(model, tools, middleware=[GuardMiddleware(policy)])
        with policy.scope("support"):
            agent.invoke({"messages": [("user", "Where is my parcel?")]})

    Put it last, next to the model and the tools, so that it sees every attempt that other middleware makes.
    A refused tool call is answered by a ToolMessage of status ``error`` that the model can act on, bound to its
    call. A model call that doesn't fit raises its refusal out of the agent, as does the first model call after
    something stopped the run (its deadline, `run.stop`, parking) or halted it. Interrupts of LangGraph pass through.

    - ``guard``: None leaves it to the guards of the run. Options of tools come from its ``Guard(tools=…)``; tools
      that are decorated with ``@loopguard.tool`` have their own.
    - ``prices``: as for `loopguard.meter`. ``max_tokens``: the most output tokens of one model call, where the
      model itself doesn't say.

    Outside any run a call is a ConfigurationError: nobody could say what the limits count.
    """

    def __init__(
        self, guard: Guard | None = None, *, prices: Prices | None = None, max_tokens: int | None = None
    ) -> None:
        super().__init__()
        if guard is not None and not isinstance(guard, Guard):
            raise ConfigurationError(f"GuardMiddleware({guard!r}): give a Guard, or None")
        self._guard = Guard() if guard is None else guard
        self._prices = prices
        self._max_tokens = max_tokens
        self._tools: dict[str, ForeignTool] = {}
        self._stopped: WeakKeyDictionary[Run, BaseException] = WeakKeyDictionary()
        """What has stopped a run in one of its tool calls: raised as soon as LangChain lets it pass."""

    # -- tools -----------------------------------------------------------------------------------

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Result]) -> Result:
        """Run a tool call past the guardrails."""
        run = _here()
        try:
            if _guards_itself(request):
                return handler(request)
            call = request.tool_call

            def body(arguments: dict[str, Any]) -> Any:
                with _passing():
                    return pack(handler(request.override(tool_call={**call, "args": arguments})))

            return unpack(self._tool(request).call(call["args"], body, call["id"]), request)
        except (_Passed, ToolCallRefused, ToolTimeout, ToolFailed, LoopHalted) as exc:
            return self._answer(run, request, exc)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Result]]
    ) -> Result:
        """The same for async code."""
        run = _here()
        try:
            if _guards_itself(request):
                return await handler(request)
            call = request.tool_call

            async def body(arguments: dict[str, Any]) -> Any:
                with _passing():
                    return pack(await handler(request.override(tool_call={**call, "args": arguments})))

            return unpack(await self._tool(request).acall(call["args"], body, call["id"]), request)
        except (_Passed, ToolCallRefused, ToolTimeout, ToolFailed, LoopHalted) as exc:
            return self._answer(run, request, exc)

    def _tool(self, request: ToolCallRequest) -> ForeignTool:
        # names that a model makes up share one tool, or they would be remembered without end
        name = request.tool_call["name"] if request.tool is not None else "unknown_tool"
        known = self._tools.get(name)
        if known is None:
            known = self._tools.setdefault(name, self._guard.foreign(name, raises=(ToolFailed,)))
        return known

    def _answer(self, run: Run, request: ToolCallRequest, exc: BaseException) -> ToolMessage:
        """What the model is told; what stops the run is kept for the next chance to raise it."""
        if isinstance(exc, _Passed):
            raise exc.original
        if isinstance(exc, ToolFailed) and exc.message is not None:
            return exc.message
        if isinstance(exc, LoopHalted):
            self._stopped[run] = exc
        elif isinstance(exc, ToolCallRefused):
            try:
                run.check()
            except (ToolCallRefused, LoopHalted) as stop:
                self._stopped[run] = stop if isinstance(stop, LoopHalted) else exc
        call = request.tool_call
        return ToolMessage(str(exc), name=call["name"], tool_call_id=call["id"], status="error")

    # -- the model -------------------------------------------------------------------------------

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Reserve a model call, make it, and settle it at what it used."""
        with self._metered(request) as call:
            if call.recorded is not None:
                return response_of(call.recorded)
            try:
                response = handler(request)
            except Exception as exc:
                _release_refused(call, exc)
                raise
            _settle(call, response)
            return response

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """The same for async code."""
        async with self._metered(request) as call:
            if call.recorded is not None:
                return response_of(call.recorded)
            try:
                response = await handler(request)
            except Exception as exc:
                _release_refused(call, exc)
                raise
            _settle(call, response)
            return response

    def _metered(self, request: ModelRequest[Any]) -> MeteredCall:
        self._raise_stop()
        name, provider = model_of(request.model)
        return model_call(
            name,
            data_of_request(request),
            max_tokens=max_tokens_of(request, self._max_tokens),
            prices=self._prices,
            provider=provider,
            guard=self._guard,
        )

    def after_agent(self, state: Any, runtime: Any) -> None:
        """An agent that was stopped in its last tool call doesn't end as if it had answered."""
        self._raise_stop()

    def _raise_stop(self) -> None:
        stop = self._stopped.get(_here())
        if stop is not None:
            raise stop


class _Passed(BaseException):
    """Carries an interrupt of LangGraph past Retry and CircuitBreaker, to whom it is no failure of the tool's."""

    def __init__(self, original: GraphBubbleUp) -> None:
        super().__init__(original)
        self.original = original


class _passing:  # noqa: N801  # reads as a statement
    """Turns interrupts that are raised inside into _Passed."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        if isinstance(exc, GraphBubbleUp):
            raise _Passed(exc)


def _here() -> Run:
    run = current_run()
    if run is None:
        raise ConfigurationError(
            "a guarded agent was invoked outside any run, so nobody can say what its limits count: "
            'invoke it in `with guard.scope("agent"):`, or in a @loop'
        )
    return run


def _guards_itself(request: ToolCallRequest) -> bool:
    """Whether the function beneath the tool is one of loopguard's: it passes the guardrails by itself."""
    functions = (getattr(request.tool, name, None) for name in ("func", "coroutine"))
    return any(isinstance(fn, GuardedTool) for fn in functions)


def _settle(call: MeteredCall, response: Any) -> None:
    usage, model = usage_of(response)
    call.settle(usage, data_of_response(response), model)


def _release_refused(call: MeteredCall, error: Exception) -> None:
    """An HTTP error is the API's no, which costs nothing; of anything else nobody knows how far it came."""
    response = getattr(error, "response", None)
    status = getattr(error, "status_code", getattr(response, "status_code", None))
    if isinstance(status, int):
        call.release(error)
