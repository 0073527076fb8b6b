"""llm: one augmented model turn as a step of a flow, or as the body of a loop."""

from __future__ import annotations

import functools
import inspect
import json
import string
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

from loopguard._drivers import drive_async, drive_sync
from loopguard._guard import Guard
from loopguard._pipeline import Ask, Steps
from loopguard._run import current_run
from loopguard._schemas import reader, schema_generator
from loopguard.evaluators import Matches
from loopguard.exceptions import ConfigurationError, LoopGuardError
from loopguard.judges import DEFAULT_MODEL
from loopguard.metering import meter

__all__ = ["llm"]


def llm(
    prompt: str | Callable[[Any], Any],
    *,
    client: Any,
    tools: Iterable[Any] | None = None,
    model: str | None = None,
    output: Any = None,
    max_tokens: int = 4096,
    max_turns: int = 20,
    name: str = "llm",
    **options: Any,
) -> Callable[..., Any]:
    """A function of the state that has a model answer: a step of a Flow, or the body of a loop.

    The model is asked, and the tools that it wants are run, until it ends its turn; the text of its last message is
    the next state. Feedback (of an evaluator, a judge, a failed attempt) is added to the prompt.

    - ``prompt``: a text with ``{fields}`` of the state: keys of a dict, or attributes; ``{state}`` is all of it.
      Text and numbers stand there as they are, anything else as JSON. Or a function of the state that gives a text,
      or a list of messages.
    - ``client``: a client of the anthropic SDK, sync or async (then so is the function). It is metered, see `meter`.
    - ``tools``: functions or tools, and dicts for those that the API runs itself; by default those of the innermost
      guard of the run that has any. They pass the guardrails of the run.
    - ``model``: by default ``judges.DEFAULT_MODEL``, a small one. ``options`` go to ``messages.create``.
    - ``output``: a type that the answer is read as, from JSON, which the model is told to give.
    - ``max_turns``: how often the model is asked at most; the last time it may not use tools.

    The function raises LoopGuardError, which a step retries, where there is no whole answer: it was cut off, refused,
    or doesn't fit the output.
    """
    turn = _Turn(prompt, client, tools, model or DEFAULT_MODEL, output, max_tokens, max_turns, options)
    if turn.is_async:

        async def ask_async(state: Any = None, *, feedback: str | None = None) -> Any:
            return await drive_async(turn.steps(state, feedback))

        fn: Callable[..., Any] = ask_async
    else:

        def ask(state: Any = None, *, feedback: str | None = None) -> Any:
            return drive_sync(turn.steps(state, feedback))

        fn = ask
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"llm(name={name!r}): give a text")
    fn.__name__ = fn.__qualname__ = name
    fn.__annotations__ = {"return": str if output is None else output}  # the state is whatever comes
    return fn


class _Turn:
    """What an llm step says about its turns. Holds no state of any run."""

    def __init__(
        self,
        prompt: Any,
        client: Any,
        tools: Iterable[Any] | None,
        model: str,
        output: Any,
        max_tokens: int,
        max_turns: int,
        options: dict[str, Any],
    ) -> None:
        if isinstance(prompt, str):
            try:
                list(string.Formatter().parse(prompt))
            except ValueError as exc:
                raise ConfigurationError(
                    f"llm({prompt[:80]!r}): {exc}; a brace that is text is written twice"
                ) from None
        elif not callable(prompt):
            raise ConfigurationError(f"llm({prompt!r}): give a text with {{fields}}, or a function of the state")
        for what, number in (("max_tokens", max_tokens), ("max_turns", max_turns)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ConfigurationError(f"llm({what}={number!r}): give an int of at least 1")
        self.prompt = prompt
        self.client = meter(client)
        self.is_async = inspect.iscoroutinefunction(getattr(client, "close", None))
        self.max_turns = max_turns
        self.options = {"model": model, "max_tokens": max_tokens, **options}
        self.output = Matches(output) if output is not None else None
        self.form = _form(output) if output is not None else ""
        self.server_tools: list[Any] = []
        self.own: Guard | None = None
        """Knows the tools that were given."""
        if tools is not None:
            self.own = Guard()
            for each in tools:
                if isinstance(each, Mapping):
                    self.server_tools.append(each)
                else:
                    self.own.wrap(each)

    def steps(self, state: Any, feedback: str | None) -> Steps:
        """The turn, as effects; evaluates to the next state."""
        guard = self.own if self.own is not None else _guard_with_tools()
        schemas = [*(guard.schemas() if guard is not None else ()), *self.server_tools]
        request = {**self.options, **({"tools": schemas} if schemas else {})}
        messages = self.messages(state, feedback)
        for number in range(1, self.max_turns + 1):
            if schemas and number == self.max_turns:
                request["tool_choice"] = {"type": "none"}
            reply = yield Ask(functools.partial(self.client.messages.create, messages=messages, **request))
            if reply.stop_reason not in ("tool_use", "pause_turn"):
                return self.read(reply)
            messages = [*messages, {"role": "assistant", "content": reply.content}]
            if reply.stop_reason == "tool_use":
                dispatcher = guard if guard is not None else Guard()
                run_tools = dispatcher.arun_tools if self.is_async else dispatcher.run_tools
                messages.append({"role": "user", "content": (yield Ask(run_tools, reply))})
        raise LoopGuardError(f"the model has not ended its turn after it was asked {self.max_turns} times")

    def messages(self, state: Any, feedback: str | None) -> list[Any]:
        """What the model is asked."""
        said = _render(self.prompt, state) if isinstance(self.prompt, str) else self.prompt(state)
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        if not isinstance(messages, list) or not messages:
            raise ConfigurationError(f"llm: the prompt's function gave {said!r}: it has to give a text, or messages")
        more = [self.form] if self.form else []
        if feedback is not None:
            more.append(f"Your last answer was rejected: {feedback}\nAnswer again, and correct that.")
        return [*messages, {"role": "user", "content": "\n\n".join(more)}] if more else messages

    def read(self, reply: Any) -> Any:
        """The next state in the model's last message."""
        if reply.stop_reason not in ("end_turn", "stop_sequence"):
            why = {"max_tokens": f"was cut off: it is longer than max_tokens={self.options['max_tokens']}"}
            raise LoopGuardError(f"the model's answer {why.get(reply.stop_reason, f'ended in {reply.stop_reason!r}')}")
        text = "".join(block.text for block in reply.content if block.type == "text")
        if not text.strip():
            raise LoopGuardError("the model ended its turn without a text")
        if self.output is None:
            return text
        verdict = self.output(text)
        if not verdict.passed:
            raise LoopGuardError(verdict.reason or "the answer doesn't fit")
        return verdict.value


def _guard_with_tools() -> Guard | None:
    run = current_run()
    guards = [guard for one in reversed(run.chain) for guard in one.guards] if run is not None else []
    return next((guard for guard in guards if guard.schemas()), None)


def _form(output: Any) -> str:
    adapter = reader(output)
    if adapter is None:
        raise ConfigurationError(f"llm(output={output!r}): give a type with a JSON form")
    schema = json.dumps(adapter.json_schema(schema_generator=schema_generator()))
    return f"Answer with JSON alone that fits this schema: {schema}"


# -- prompts ---------------------------------------------------------------------------------------


class _Fields(string.Formatter):
    """Fills in the fields of one state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        """See `string.Formatter`."""
        if key in ("state", 0):
            return self.state
        try:
            return self.state[key] if isinstance(self.state, Mapping) else getattr(self.state, str(key))
        except (KeyError, AttributeError):
            raise ConfigurationError(
                f"llm: the prompt names {{{key}}}, which a state of type {type(self.state).__name__} doesn't have; "
                f"{{state}} is all of it"
            ) from None

    def format_field(self, value: Any, format_spec: str) -> Any:
        """See `string.Formatter`."""
        if format_spec or isinstance(value, str | int | float | Decimal):
            return format(value, format_spec)
        from pydantic_core import to_json

        return to_json(value, indent=2, fallback=str).decode()


def _render(prompt: str, state: Any) -> str:
    return _Fields(state).format(prompt)
