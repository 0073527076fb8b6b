"""Process-wide settings: what `configure(...)` sets and the environment may preset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from loopguard.exceptions import ConfigurationError

__all__ = ["Codec", "Settings", "check_codec", "configure", "settings"]


class Codec(Protocol):
    """How what is confidential lies in a store: an encryption, such as Fernet. Called from any thread."""

    @property
    def name(self) -> str:
        """What the store says it was written with: a short text of yours, kept as long as there are such runs."""
        ...

    def encode(self, data: bytes, /) -> bytes:
        """What is stored. Authenticated encryption makes that every change to the store is noticed, too."""
        ...

    def decode(self, data: bytes, /) -> bytes:
        """What `encode` was given; any exception where the key is another, or the data was changed."""
        ...


def check_codec(codec: Any, what: str) -> Codec | None:
    """The codec if it is one, tried once, or None. ConfigurationError otherwise, which shows nothing of it."""
    if codec is None:
        return None
    name = getattr(codec, "name", None)
    methods = callable(getattr(codec, "encode", None)) and callable(getattr(codec, "decode", None))
    if not methods or not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigurationError(
            f"{what}=…): got a {type(codec).__name__}; give an object with a name, encode(bytes) and decode(bytes)"
        )
    try:
        there_and_back = codec.decode(codec.encode(b"loopguard"))
    except Exception as exc:  # the codec is the user's
        raise ConfigurationError(f"{what}=…): the codec {name!r} failed on a trial: {type(exc).__name__}") from exc
    if there_and_back != b"loopguard":
        raise ConfigurationError(f"{what}=…): what the codec {name!r} encodes doesn't come back from it")
    checked: Codec = codec
    return checked


class Settings:
    """The settings in force. Changed only through `configure`."""

    def __init__(self) -> None:
        self.require_run: bool = False
        self.judge_model: str | None = None
        self.prices: Any = None
        """Where `meter` takes prices from by default: a PriceSource, or what makes a PriceBook."""
        self.redact: Callable[[str, Any], Any] | None = None
        self.version = 0
        """Counts the changes: what was compiled under older settings is compiled again."""
        self.on_event: tuple[Callable[[Any], object], ...] = ()
        """Users' callbacks: they get redacted events, and their failures change nothing."""
        self.listeners: tuple[Callable[[Any], object], ...] = ()
        """Subscribers of loopguard's own: they get the events as they are, and never raise."""
        self.watchers: tuple[tuple[Callable[[], bool], Callable[[Any], object]], ...] = ()
        """Renderers of loopguard's own, the log and the metrics: (whether anybody wants it now, listener)."""
        self.prompt_snapshots: bool = False
        self.store: Any = None
        """Where runs of loops are kept by default: a URL, or an object that keeps journals."""
        self.durability: str = "normal"
        self.codec: Codec | None = None
        self.redact_payloads: bool = False


settings = Settings()


def configure(
    *,
    require_run: bool | None = None,
    redact: Callable[[str, Any], Any] | None = None,
    on_event: Callable[[Any], object] | None = None,
    judge_model: str | None = None,
    prices: Any = None,
    prompt_snapshots: bool | None = None,
    store: Any = None,
    durability: str | None = None,
    codec: Codec | None = None,
    redact_payloads: bool | None = None,
) -> None:
    """Set process-wide defaults; what isn't given stays as it is.

    - ``require_run``: refuse tool calls outside any run (code ``no_run``).
    - ``redact``: ``fn(name, value)`` returns what people and exporters may see instead of value, or
      None to leave it to the built-in rules.
    - ``judge_model``: the model that `until_llm` asks by default.
    - ``prices``: the prices that `meter` uses by default, a PriceBook or what makes one.
    - ``prompt_snapshots``: keep the messages of each metered model call in its ModelCalled event.
    - ``store``: where runs of loops are kept, such as ``sqlite:///runs.db``; see `loopguard.journal`.
    - ``durability``: ``normal`` (what is acknowledged survives the death of the process) or ``full`` (a power
      loss, too).
    - ``codec``: what encrypts what is confidential in stores: arguments, results, states, reasons and answers.
      See `loopguard.typing.Codec`.
    - ``redact_payloads``: store those with secrets masked, as people see them. A run that is kept so can be looked
      at, verified and exported, but never resumed.
    - ``on_event``: subscribe to the events of every run that starts from now on.

    Raises ConfigurationError for a value of the wrong type.
    """
    if require_run is not None:
        if not isinstance(require_run, bool):
            raise ConfigurationError(f"require_run={require_run!r}: give True or False")
        settings.require_run = require_run
    if prompt_snapshots is not None:
        if not isinstance(prompt_snapshots, bool):
            raise ConfigurationError(f"prompt_snapshots={prompt_snapshots!r}: give True or False")
        settings.prompt_snapshots = prompt_snapshots
    if judge_model is not None:
        if not isinstance(judge_model, str) or not judge_model:
            raise ConfigurationError(f"judge_model={judge_model!r}: give a model's name")
        settings.judge_model = judge_model
    if prices is not None:
        settings.prices = prices
    if redact_payloads is not None and not isinstance(redact_payloads, bool):
        raise ConfigurationError(f"redact_payloads={redact_payloads!r}: give True or False")
    codec = check_codec(codec, "configure(codec")
    if durability is not None and durability not in ("normal", "full"):
        raise ConfigurationError(f"durability={durability!r}: give 'normal' or 'full'")
    for name, fn in (("redact", redact), ("on_event", on_event)):
        if fn is not None and not callable(fn):
            raise ConfigurationError(f"{name}={fn!r}: give a callable")
    if isinstance(store, str) and "://" not in store:
        raise ConfigurationError(f"configure(store={store!r}): give a URL, such as sqlite:///runs.db")
    settings.version += 1
    if store is not None:
        settings.store = store
    if durability is not None:
        settings.durability = durability
    if codec is not None:
        settings.codec = codec
    if redact_payloads is not None:
        settings.redact_payloads = redact_payloads
    if redact is not None:
        settings.redact = redact
    if on_event is not None:
        settings.on_event = (*settings.on_event, on_event)
