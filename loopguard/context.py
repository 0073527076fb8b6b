"""The message list that a loop carries: kept short without tearing a result from its call.

Messages are Anthropic's: dicts or SDK objects with a role and a content, system prompts first where there are any
among them. The caller's are never changed; every function returns a new list.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from loopguard._outcomes import Iteration, LoopResult
from loopguard._schemas import tool_result, tool_uses
from loopguard.exceptions import ConfigurationError

__all__ = ["answer_pending", "clear_tool_results", "compact", "feedback_messages", "trim"]

Message = Any
_CLEARED = "[an old tool result, cleared to save space]"


def trim(
    messages: Iterable[Message],
    *,
    keep_last: int | None = None,
    max_tokens: int | None = None,
    estimator: Callable[[Message], float] | None = None,
) -> list[Message]:
    """The newest messages, at most ``keep_last`` and at most ``max_tokens`` in all.

    Beyond ``keep_last``, but counted into ``max_tokens``, these always stay: the system prompt, the task (the last
    message of the user that isn't made of tool results), and calls at the end that wait for their results. A tool
    result and its call stay together or go together, and what is kept begins with the user.

    ``estimator(message)`` gives tokens; the default is the upper bound that budgets reserve by, a token for every
    two bytes, which for English is about twice the real number.
    """
    given = list(messages)
    if keep_last is None and max_tokens is None:
        raise ConfigurationError("trim(): say keep_last= or max_tokens=")
    _check_count(keep_last, "trim(keep_last")
    _check_count(max_tokens, "trim(max_tokens")
    fixed, starts = _cuts(given)
    first = 0 if keep_last is None else len(given) - keep_last
    starts = [start for start in starts if start >= first]
    if max_tokens is not None:
        sizes = [_size(message, estimator) for message in given]
        total = sum(sizes)
        dropped = list(accumulate((0 if i in fixed else size for i, size in enumerate(sizes)), initial=0))
        starts = [start for start in starts if total - dropped[start] <= max_tokens] or starts[-1:]
    return [given[i] for i in _kept(given, fixed, starts[0])]


def compact(messages: Iterable[Message], *, summarize: Callable[[list[Message]], Any], keep_last: int = 10) -> Any:
    """What `trim` would drop as one summary: ``summarize(dropped messages) -> text``; an awaitable if that is async.

    The summary becomes a user message after the system prompt, so that the task stays the last thing the user
    said. With nothing to drop, nobody is asked; an empty summary changes nothing. A model call that `summarize`
    makes through a metered client is charged like any other.
    """
    given = list(messages)
    if not callable(summarize):
        raise ConfigurationError(f"compact(summarize={summarize!r}): give a function from messages to a text")
    _check_count(keep_last, "compact(keep_last")
    fixed, starts = _cuts(given)
    start = next(start for start in starts if start >= len(given) - keep_last)
    kept = _kept(given, fixed, start)
    dropped = [message for i, message in enumerate(given[:start]) if i not in fixed]
    if not dropped:
        return _later(given) if inspect.iscoroutinefunction(summarize) else given
    said = summarize(dropped)
    if inspect.isawaitable(said):
        return _compacted_later(given, kept, said)
    return _compacted(given, kept, said)


def clear_tool_results(messages: Iterable[Message], *, keep: int = 3) -> list[Message]:
    """The messages with the content of all but the last ``keep`` tool results replaced by a note."""
    _check_count(keep, "clear_tool_results(keep")
    made = list(messages)
    too_many = sum(len(_results(message)) for message in made) - keep
    for place, message in enumerate(made):
        content = _blocks(message)
        for i, block in enumerate(content):
            if too_many > 0 and _field(block, "type") == "tool_result":
                content[i] = {**_as_dict(block), "content": _CLEARED}
                made[place] = _with_content(message, content)
                too_many -= 1
    return made


def answer_pending(messages: Iterable[Message], *, reason: str = "the loop was stopped") -> list[Message]:
    """The messages with a "Not run" result for every tool call that has none, as the API demands before it goes on.

    The results go to the front of the user message that follows the call, or into a new one.
    """
    given = list(messages)
    answered = {(call, use) for call, _, use in _links(given)}
    made: list[Message] = []
    owed: list[dict[str, Any]] = []
    for place, message in enumerate([*given, None]):
        if owed and _field(message, "role") == "user":
            message = _with_content(message, [*owed, *_blocks(message)])
        elif owed:
            made.append({"role": "user", "content": owed})
        made.append(message)
        pending = [use for use in _calls(message) if (place, use) not in answered]
        owed = [tool_result(use, f"Not run: {reason}.", is_error=True) for use in pending]
    return made[:-1]


def feedback_messages(history: LoopResult[Any] | Iterable[Iteration[Any]]) -> list[Message]:
    """Each value that was not accepted, as the assistant's message, and why, as the user's, in order.

    They follow the task: ``messages=[task, *feedback_messages(history)]`` keeps it next to the system prompt, with
    the attempts after it and the latest reason last. Values that aren't texts are shown as JSON.
    """
    made: list[Message] = []
    for iteration in history.history if isinstance(history, LoopResult) else history:
        refused = [verdict for verdict in iteration.verdicts if verdict.passed is not True]
        if refused:
            shown = tool_result("", iteration.value)["content"]
            reasons = [verdict.reason for verdict in refused if verdict.reason]
            made.append({"role": "assistant", "content": "(nothing)" if shown == "" or str(shown).isspace() else shown})
            made.append({"role": "user", "content": "\n".join(reasons) or "That was not accepted. Try again."})
    return made


# --- where a list of messages may be cut ---


def _cuts(messages: Sequence[Message]) -> tuple[set[int], list[int]]:
    """The messages that stay wherever the list is cut, and the places where what is kept may begin.

    No cut goes between a call and its result, and none leaves the assistant to speak first. The last place is the
    end of the list.
    """
    links = [(call, result) for call, result, _ in _links(messages)]
    head = next((i for i, message in enumerate(messages) if _field(message, "role") != "system"), len(messages))
    users = [i for i, message in enumerate(messages) if _says_something(message)]
    tasks = [i for i in users if not _results(messages[i])][-1:] + users[-1:]  # the last may come along with results
    fixed = {*range(head), *tasks}
    if messages and _calls(messages[-1]):
        fixed.add(len(messages) - 1)
    while more := {i for link in links if not fixed.isdisjoint(link) for i in link} - fixed:
        fixed |= more
    torn = [0] * (len(messages) + 2)  # how many links begin or end to be torn here
    for call, result in links:
        if call not in fixed:
            torn[call + 1] += 1
            torn[result + 1] -= 1
    first_task = min(tasks, default=-1)
    starts = []
    depth = 0
    for start in range(len(messages) + 1):
        depth += torn[start]
        if not depth and (start <= head or start > first_task or _opens(messages[start])):
            starts.append(start)
    return fixed, starts


def _kept(messages: Sequence[Message], fixed: set[int], start: int) -> list[int]:
    return [i for i in range(len(messages)) if i >= start or i in fixed]


def _links(messages: Sequence[Message]) -> list[tuple[int, int, str]]:
    """(place of the call, place of the result, id) for every result. An id may come again later."""
    made: dict[str, int] = {}
    links = []
    for i, message in enumerate(messages):
        links += [(made[use], i, use) for use in _results(message) if use in made]
        made.update(dict.fromkeys(_calls(message), i))
    return links


def _opens(message: Message) -> bool:
    """Whether a conversation can begin with it."""
    return _field(message, "role") == "user" and not _results(message)


def _says_something(message: Message) -> bool:
    """Whether the user says something here, rather than only handing over results of tools."""
    return _field(message, "role") == "user" and any(_field(b, "type") != "tool_result" for b in _blocks(message))


# --- what a message holds ---


def _field(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _blocks(message: Message) -> list[Any]:
    content = _field(message, "content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content or ())


def _calls(message: Message) -> list[str]:
    return [use.id for use in tool_uses(_blocks(message))] if _field(message, "role") == "assistant" else []


def _results(message: Message) -> list[str]:
    return [_field(block, "tool_use_id") for block in _blocks(message) if _field(block, "type") == "tool_result"]


def _as_dict(thing: Any) -> dict[str, Any]:
    if isinstance(thing, Mapping):
        return dict(thing)
    return dict(thing.model_dump(mode="json", exclude_unset=True))  # an SDK object


def _with_content(message: Message, content: list[Any]) -> dict[str, Any]:
    return {**_as_dict(message), "content": content}


def _size(message: Message, estimator: Callable[[Message], float] | None) -> float:
    if estimator is None:
        from loopguard.metering._estimates import survey

        return survey({"messages": [_as_dict(message)]}).input_tokens
    size = estimator(message)
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < math.inf:
        raise ConfigurationError(f"trim(estimator=…) returned {size!r}: return the tokens of one message, at least 0")
    return size


def _check_count(value: Any, what: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigurationError(f"{what}={value!r}): give an int of at least 0")


# --- the summary ---


def _compacted(messages: list[Message], kept: list[int], said: Any) -> list[Message]:
    if not isinstance(said, str):
        raise ConfigurationError(f"compact(summarize=…) returned a {type(said).__name__}: return a text")
    if not said.strip():
        return messages
    stay = [messages[i] for i in kept]
    head = next((i for i, message in enumerate(stay) if _field(message, "role") != "system"), len(stay))
    text = f"What came before, {len(messages) - len(stay)} messages in short:\n<summary>\n{said.strip()}\n</summary>"
    return [*stay[:head], {"role": "user", "content": text}, *stay[head:]]


async def _compacted_later(messages: list[Message], kept: list[int], said: Any) -> list[Message]:
    return _compacted(messages, kept, await said)


async def _later(messages: list[Message]) -> list[Message]:
    return messages
