"""model_call: metering for whoever calls models without the anthropic SDK, adapters of frameworks above all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from loopguard._call import ASYNC, SYNC
from loopguard._config import settings
from loopguard._drivers import drive_async, drive_sync
from loopguard._pipeline import Steps
from loopguard._run import current_run
from loopguard._usage import Usage
from loopguard.exceptions import ConfigurationError
from loopguard.metering._calls import ModelCall
from loopguard.metering._estimates import survey
from loopguard.metering.prices import PriceBook, PriceSource
from loopguard.telemetry._spans import attach, detach

if TYPE_CHECKING:
    from loopguard._guard import Guard

__all__ = ["MeteredCall", "model_call"]


def model_call(
    model: str,
    request: Mapping[str, Any],
    *,
    max_tokens: int | None,
    prices: PriceSource | Mapping[str, Mapping[str, Any]] | str | os.PathLike[str] | None = None,
    provider: str = "anthropic",
    guard: Guard | None = None,
) -> MeteredCall:
    """One model call of the current run, reserved before it is sent and settled after it. `meter` for other clients.

        with model_call("m", {"messages": messages}, max_tokens=500) as call:
            if call.recorded is None:
                reply = send(messages)
                call.settle(Usage(input_tokens=reply.input, output_tokens=reply.output), reply.as_json())

    ``async with`` does the same. Entering raises the refusal of a call that doesn't fit or whose run was stopped, and
    LoopHalted; outside any run nothing is counted.

    - ``request``: JSON data of what the model is sent, under ``system``, ``messages`` and ``tools``: its input tokens
      are estimated from these, one for every two bytes. A resumed run knows the call again by all of it: leave out
      ids that differ each time.
    - ``max_tokens``: the most output tokens that it may give. None is a ConfigurationError under a budget that asks.
    - ``prices``: as for `meter`. ``provider``: whose model it is, for spans and for genai-prices: ``openai``.
    - ``guard``: stands on the run from now on, if it doesn't already, as the guard of a tool does.
    """
    given: Any = settings.prices if prices is None else prices
    source: PriceSource = given if hasattr(given, "tariff") else PriceBook(given, provider=provider)
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 0):
        raise ConfigurationError(f"model_call(max_tokens={max_tokens!r}): give an int of at least 0, or None")
    return MeteredCall(model, request, max_tokens, source, provider, guard)


class MeteredCall:
    """A model call under way; see `model_call`."""

    recorded: dict[str, Any] | None = None
    """What `settle` was given as the response in an earlier process of this run: don't send it again."""

    def __init__(
        self,
        model: str,
        request: Mapping[str, Any],
        max_tokens: int | None,
        prices: PriceSource,
        provider: str,
        guard: Guard | None,
    ) -> None:
        self._model = model
        self._request = request
        self._max_tokens = max_tokens
        self._prices = prices
        self._provider = provider
        self._guard = guard
        self._call: ModelCall | None = None
        self._span: Any = None

    def settle(self, usage: Usage | None, response: dict[str, Any] | None = None, model: str | None = None) -> None:
        """It has answered: ``usage``, None where it isn't known (the reservation is paid then).

        ``response``: JSON data, kept where the run has a store. ``model``: the one that answered, if it says so.
        """
        call = self._call
        if call is None:
            return None
        if call.run.recorder is not None:
            call.response = response
        if usage is None or usage.input_tokens is None or usage.output_tokens is None:
            return call.lost()
        total = usage.input_tokens + usage.output_tokens
        return call.reported(replace(usage, tokens=total, model_calls=1), model)

    def release(self, error: BaseException | None = None) -> None:
        """It was never sent, or the API refused it: it costs nothing."""
        if self._call is not None:
            self._call.released(error)

    def _enter(self, colour: str) -> Steps:
        run = current_run()
        if run is None:
            return
        if self._guard is not None:
            run.adopt((self._guard,))
        call = ModelCall(run, self._model, self._prices)
        call.provider = self._provider
        self.recorded = call.recorded([self._model, dict(self._request)])
        if self.recorded is not None:
            return
        if self._max_tokens is None and call.bounds_output():
            raise ConfigurationError(
                f"nobody says how much {self._model} may write at most, and a budget has to know: give max_tokens"
            )
        body = {**self._request, "max_tokens": self._max_tokens}
        call.reserve(body, survey(body))
        yield from call.admitted()
        self._call, self._span = call, attach(call.span)
        try:
            yield from call.announced(colour)
        except BaseException as exc:
            detach(self._span)
            call.released(exc)
            if isinstance(exc, Exception):
                yield from call.close()
            else:
                call.drop()
            raise

    def _exit(self, error: BaseException | None, colour: str) -> Steps:
        call = self._call
        if call is None:
            return
        detach(self._span)
        call.lost(error)  # unless it has been settled
        if error is None or isinstance(error, Exception):
            yield from call.close()
        else:  # nothing may be waited for
            call.drop()
        if error is None and call.run.recorder is not None:
            yield call.run.recorder.commit(colour)

    def __enter__(self) -> Self:
        drive_sync(self._enter(SYNC))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        drive_sync(self._exit(error, SYNC))

    async def __aenter__(self) -> Self:
        await drive_async(self._enter(ASYNC))
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        await drive_async(self._exit(error, ASYNC))
