"""What people and exporters get to see: secrets are masked, and nothing steers the terminal.

Best effort: a secret is known by the name it stands under or by what it looks like. The caller's own
objects are never changed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from loopguard._config import settings
from loopguard.exceptions import ConfigurationError

__all__ = [
    "Redactor",
    "check_id",
    "display",
    "display_name",
    "display_value",
    "mask",
    "redact",
    "redact_error",
    "redact_text",
    "safe_url",
]

Redactor = Callable[[str, Any], Any]
"""``(name, value)`` to what may be seen instead of value, or None to leave it to the built-in rules.

The name is the key that a value stands under, at any depth, and empty for a text on its own. What it returns
passes the built-in rules too; where it raises, the value is hidden.
"""

# --- Names -----------------------------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_NAME = re.compile(  # over the words of a name, in lower case
    r"""\b(?: passwords? | passwd | passphrase | passcode | pwd | secrets? | credentials? | authorization
    | (?:api|access|private|secret|signing|encryption|ssh|auth|account|master|shared)[ ]?keys?
    | (?:access|refresh|auth|session|bearer)[ ]?tokens? | client[ ]?secret
    | (?:token|auth|cookies?|jwt|bearer)(?=[ \d]*\Z) )\b""",
    re.VERBOSE,
)
_OPEN_NAME = re.compile(  # a password's length is no password, and a page's token no secret
    r"""\b(?: (?:count|length|size|limit|policy|type|name|path|file|enabled|required|expir\w+|ttl)
    | (?:next|page|continuation|sync|per|max|min|stop|pad|eos|bos|unk|sep|cls|mask)[ ]token )\Z""",
    re.VERBOSE,
)


@lru_cache(4096)
def _sensitive(name: str) -> bool:
    words = " ".join(_WORD.findall(name)).lower()
    return _SECRET_NAME.search(words) is not None and _OPEN_NAME.search(words) is None


def _is_sensitive(name: str) -> bool:
    return _sensitive(name[-200:])  # longer ones aren't names, and the cache would keep them


# --- Texts -----------------------------------------------------------------------------------------------------

_HIDDEN = r"\[hidden(?:, [\d,]{1,20} (?:character|byte)s?)?\]"
_IS_HIDDEN = re.compile(_HIDDEN)

# Every repetition is bounded, possessive, or can't start again inside what it has passed over: linear time.
_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]{0,60}-----|\Z)", re.DOTALL
)
_USER_INFO = re.compile(
    r"""(?<=://)(?:[^\s/?#"'<>\\]*(?=@)"""
    # A password with a raw slash in it; what follows host:port is a path.
    r"""|[^\s/?#:@"'<>\\]*+:(?!\d{1,5}[/?#])[^\s:@"'<>\\]{0,256}+(?=@))"""
)
_LOGIN = re.compile(r"\A(?:[^/?#]*|[^/?#:@]*:(?!\d{1,5}[/?#])[^@]*)@")  # the same, where only a URL is expected
_KEY = re.compile(
    r"""(?<![A-Za-z0-9_])(?:
      sk-[\w-]{16,} | (?:sk|rk|pk)_(?:live|test)_\w{10,} | whsec_\w{10,}
    | gh[opsur]_\w{20,} | github_pat_\w{20,} | glpat-[\w-]{16,}
    | (?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9]) | AIza[\w-]{30,} | ya29\.[\w-]{20,}
    | xox[a-z]-[\w-]{10,} | xapp-[\w-]{10,} | SG\.[\w-]{16,}+\.[\w-]{16,}
    | hf_[A-Za-z0-9]{20,} | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{40,}
    | (?<!-)eyJ[\w-]{8,}+\.[\w-]{8,}+\.[\w-]*
    | (?P<scheme>(?i:bearer|basic)[ \t]{1,4})(?P<credential>[\w.~+/=-]{6,})
    )""",
    re.VERBOSE | re.ASCII,
)
_WORDS = re.compile(r"[A-Za-z]?[a-z]{0,14}(?:-[a-z]{0,15})*+\.?")  # "basic arithmetic", "sk-learn-compatible"
_NAMED = re.compile(r"""(?<![\w.-])([\w.-]{1,64}+)["']?[ \t]{0,3}(?:=|:(?!//))[ \t]{0,3}""")
_VALUE = re.compile(
    r"""(?P<quote>["'])(?P<quoted>(?:(?!(?P=quote))[^\\\n]|\\.)*+)(?P=quote)"""
    rf"""|(?:(?i:bearer|basic|token|digest)[ \t]{{1,4}})?+(?P<bare>(?!{_HIDDEN})[^\s,;&"'<>)\]}}]+)"""
)


def mask(value: Any) -> str:
    """What stands in for a hidden value: ``[hidden, 12 characters]``, or ``[hidden]`` for what isn't a text."""
    kind = type(value)
    if issubclass(kind, str):
        text = str.__str__(value)
        return text if _IS_HIDDEN.fullmatch(text) else f"[hidden, {_count(len(text), 'character')}]"
    if issubclass(kind, bytes):
        return f"[hidden, {_count(bytes.__len__(value), 'byte')}]"
    return "[hidden]"


def redact_text(text: str) -> str:
    """The text with keys, tokens, passwords and the user info of URLs masked, the rest as it is."""
    shown = _asked(settings.redact, "", text) if settings.redact is not None else text
    return _scrubbed(str.__str__(shown)) if issubclass(type(shown), str) else mask(text)


def _scrubbed(text: str) -> str:
    if len(text) < 5:
        return text
    if "://" in text:
        text = _USER_INFO.sub(lambda found: mask(found[0]), text)
    if "-----BEGIN" in text:
        text = _PEM.sub(lambda found: mask(found[0]), text)
    text = _KEY.sub(_masked_key, text)
    return _masked_pairs(text) if "=" in text or ":" in text else text


def _masked_key(found: re.Match[str]) -> str:
    scheme = found["scheme"] or ""
    key = found["credential"] or found[0]
    wordy = not scheme.startswith("Bearer") if scheme else key.startswith("sk-")
    return found[0] if wordy and _WORDS.fullmatch(key) else scheme + mask(key)


def _masked_pairs(text: str) -> str:
    """Texts like ``password=…`` and ``"api_key": "…"`` with the value masked."""
    pieces: list[str] = []
    done = 0
    for found in _NAMED.finditer(text):
        if found.start() < done or not _is_sensitive(found[1]):
            continue
        value = _VALUE.match(text, found.end())
        if value is None:
            continue
        group = "bare" if value["quote"] is None else "quoted"
        if value[group]:
            pieces += text[done : value.start(group)], mask(value[group])
            done = value.end(group)
    return "".join([*pieces, text[done:]])


def redact_error(exc: BaseException) -> str:
    """``ValueError: the text`` of an exception, redacted. Never raises."""
    name = _type_name(exc)
    try:
        text = str(exc)
    except Exception:  # a user's __str__, or the __repr__ of what the exception carries
        text = "<its text can't be read>"
    return f"{name}: {redact_text(text)}" if text else name


def safe_url(url: str) -> str:
    """The URL without user info."""
    scheme, mark, rest = url.partition("://")
    return scheme + mark + _LOGIN.sub("", rest)


# --- Values ----------------------------------------------------------------------------------------------------

_CONTAINERS = (dict, list, tuple, set, frozenset, deque, MappingProxyType)
_OPEN = object()  # what a container is until it has been copied


def redact(value: Any, extra: Redactor | None = None) -> Any:
    """A copy of the builtin containers in value, with secrets masked; other objects stay as they are.

    ``extra`` is asked first about every value; it defaults to the one given to `configure`. Subclasses of
    dict, list and set become their base, mappings and deques become dicts and lists. Never raises.
    """
    walk = _Redaction(settings.redact if extra is None else extra)
    answer = walk.leaf("", value)
    if answer is not _OPEN:
        return answer
    stack = [walk.copy("", value)]
    answer = None
    while stack:
        try:
            name, part = stack[-1].send(answer)
        except StopIteration as done:
            stack.pop()
            answer = done.value
            continue
        answer = walk.known(name, part)
        if answer is None:
            stack.append(walk.copy(name, part))
    return answer


def _builtin_rules(name: str, value: Any) -> None:
    """A Redactor without an opinion."""


class _Redaction:
    """One copy being made: each container once, however often it is referred to, so cycles stay cycles."""

    __slots__ = ("copies", "redactor")

    def __init__(self, redactor: Redactor | None) -> None:
        self.redactor = None if redactor is _builtin_rules else redactor
        self.copies: dict[tuple[int, str], tuple[Any, Any]] = {}  # the original too: so its id stays its own

    def _key(self, name: str, value: Any) -> tuple[int, str]:
        return id(value), name if self.redactor is not None else ""

    def known(self, name: str, value: Any) -> Any:
        """The copy of a container that was met before, or None."""
        found = self.copies.get(self._key(name, value))
        return None if found is None else found[1]

    def leaf(self, name: str, value: Any) -> Any:
        """What is seen of a value, or _OPEN if it is a container and has to be copied."""
        if self.redactor is not None:
            answer = _asked(self.redactor, name, value)
            if answer is not value:
                value = answer
                if not _is_sensitive(name):
                    return redact(value, _builtin_rules)
        if value is None or value is True or value is False:
            return value
        if _is_sensitive(name):
            return mask(value)
        kind = type(value)
        if issubclass(kind, str):
            plain = str.__str__(value)
            shown = self.scrubbed(value, plain) if len(plain) > 1000 else _scrubbed(plain)
            return value if shown == plain else shown
        return _OPEN if issubclass(kind, _CONTAINERS) else value

    def scrubbed(self, value: str, plain: str) -> str:
        """A long text without its secrets, looked through once wherever it stands."""
        key = id(value), ""
        if key not in self.copies:
            self.copies[key] = value, _scrubbed(plain)
        return str(self.copies[key][1])

    def copy(self, name: str, value: Any) -> Generator[tuple[str, Any], Any, Any]:
        """The copy of a container, asking for the copies of the containers in it."""
        key = self._key(name, value)
        kind = type(value)
        try:
            items = _items(value)
        except Exception:  # a subclass with broken insides, or a container that changes under our hands
            return mask(value)
        made: dict[Any, Any] | list[Any]
        if issubclass(kind, dict | MappingProxyType):
            made = {}
            self.copies[key] = value, made
            for label, part in items:
                shown = self.leaf(_label(label), part)
                if shown is _OPEN:
                    shown = yield _label(label), part
                _put(made, label, shown)
            return made
        made = []
        mutable = issubclass(kind, list | deque)
        self.copies[key] = value, made if mutable else "[circular]"
        for label, part in items:
            shown = self.leaf(label or name, part)
            made.append((yield label or name, part) if shown is _OPEN else shown)
        if not mutable:
            self.copies[key] = value, _rebuilt(kind, made)
        return self.copies[key][1]


def _asked(redactor: Redactor, name: str, value: Any) -> Any:
    try:
        answer = redactor(name, value)
    except Exception:  # the user's function: what it can't judge is hidden
        return mask(value)
    return value if answer is None else answer


def _items(value: Any) -> list[tuple[Any, Any]]:
    """(key or field name, value) of all that a container holds, past methods of a subclass."""
    kind = type(value)
    if issubclass(kind, dict):
        return [*dict.items(value)]
    if kind is MappingProxyType:
        return [*value.items()]
    base = next(base for base in _CONTAINERS if issubclass(kind, base))
    parts = [*base.__iter__(value)]
    fields = getattr(kind, "_fields", None) if base is tuple and kind is not tuple else None
    if type(fields) is tuple and len(fields) == len(parts):
        return [(_label(field), part) for field, part in zip(fields, parts, strict=True)]
    return [("", part) for part in parts]


def _label(key: Any) -> str:
    kind = type(key)
    if issubclass(kind, str):
        return str.__str__(key)
    return bytes.decode(key, "latin-1") if issubclass(kind, bytes) else ""


def _put(made: dict[Any, Any], key: Any, shown: Any) -> None:
    """Add an entry under its key, which may be a secret itself, or break when it is hashed."""
    kind = type(key)
    seen = redact(key, _builtin_rules) if issubclass(kind, str | tuple | frozenset) else key
    try:
        free = seen is key or seen not in made
        made[seen if free else f"{seen} ({len(made) + 1})"] = shown
    except Exception:  # a __hash__ or __eq__ of the user's
        made[f"<{_type_name(key)} {len(made) + 1}>"] = shown


def _rebuilt(kind: type, parts: list[Any]) -> Any:
    """A tuple, a named tuple or a set of these parts; a list where they can't be members."""
    try:
        if issubclass(kind, tuple):
            return tuple.__new__(kind if hasattr(kind, "_fields") else tuple, parts)
        return frozenset(parts) if issubclass(kind, frozenset) else set(parts)
    except Exception:  # a __hash__ of the user's, or a metaclass
        return parts


# --- The terminal ----------------------------------------------------------------------------------------------

_INVISIBLE = frozenset(  # printable to Unicode, but nothing that a person sees
    map(chr, [0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0])
) | frozenset(map(chr, [*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]))
_AT_MOST = 1_000_000  # characters made of a value beyond the limit, only to count them


def display(text: str, limit: int | None = 2000, *, multiline: bool = False) -> str:
    r"""The text as it may go to a terminal: what can't be seen is escaped, a backslash doubled.

    Control, bidi, zero-width and other invisible characters and lone surrogates show as ``\x1b`` or ``\u202e``;
    ``multiline=True`` keeps newlines. Beyond ``limit`` characters it says how many more there are.
    """
    return _cut(str.__str__(text), limit, lambda part: _escaped(part, "\n" if multiline else ""))


def display_name(name: str) -> str:
    """The name of a tool for the terminal; one that isn't ASCII is flagged, and spelled out."""
    shown = display(name, 200)
    if name.isascii():
        return shown
    return f"{shown} ⚠ not ASCII: {_cut(str.__str__(name), 200, _spelled)}"


def display_value(value: Any, limit: int | None = 2000, extra: Redactor | None = None) -> str:
    """A value on one line of the terminal, redacted. Never raises."""
    pieces: list[str] = []
    length = 0
    for piece in _rendered(redact(value, extra)):
        pieces.append(piece)
        length += len(piece)
        if limit is not None and length > limit + _AT_MOST:
            return f"{''.join(pieces)[:limit]}… more than {_AT_MOST:,} more characters"
    return _cut("".join(pieces), limit, str)


def _cut(text: str, limit: int | None, show: Callable[[str], str]) -> str:
    limit = len(text) if limit is None else max(limit, 0)
    more = len(text) - limit
    return show(text) if more <= 0 else f"{show(text[:limit])}… {_count(more, 'more character')}"


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}" if number == 1 else f"{number:,} {unit}s"


def _spelled(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")


def _escaped(text: str, keep: str = "") -> str:
    if text.isascii() and text.isprintable() and "\\" not in text:
        return text
    return "".join(
        [
            char if char in keep or (char.isprintable() and char != "\\" and char not in _INVISIBLE) else _spelled(char)
            for char in text
        ]
    )


def _rendered(value: Any) -> Iterator[str]:
    """The text of a value in pieces, without recursion."""
    stack: list[tuple[int, Iterator[Any]]] = [(0, iter([[value]]))]
    above = {0}
    while stack:
        here, pieces = stack[-1]
        piece = next(pieces, None)
        if piece is None:
            stack.pop()
            above.discard(here)
        elif type(piece) is str:
            yield piece
        elif not issubclass(type(piece[0]), _CONTAINERS):
            yield _leaf(piece[0])
        elif id(piece[0]) in above:
            yield "[circular]"
        else:
            above.add(id(piece[0]))
            stack.append((id(piece[0]), _pieces(piece[0])))


def _pieces(value: Any) -> Iterator[Any]:
    """A container as texts and, each in a list of one, the values between them."""
    kind = type(value)
    opening, closing = "[]" if kind is list else "()" if issubclass(kind, tuple) else "{}"
    yield opening
    for number, (key, part) in enumerate(_items(value)):
        if number:
            yield ", "
        if kind is dict:
            yield [key]
            yield ": "
        yield [part]
    if opening == "(" and len(value) == 1:
        yield ","
    yield closing


def _leaf(value: Any) -> str:
    kind = type(value)
    if issubclass(kind, str):
        return '"' + _escaped(str.__str__(value)).replace('"', '\\"') + '"'
    try:
        text = repr(value)
    except Exception:  # a __repr__ of the user's, or an integer too long for digits
        return f"{value:#x}" if kind is int else f"<{_escaped(_type_name(value))}>"
    return _escaped(_scrubbed(str.__str__(text)), "\\")


_name_of: Callable[[type], str] = type.__dict__["__name__"].__get__


def _type_name(value: object) -> str:
    return _name_of(type(value))


# --- Ids -------------------------------------------------------------------------------------------------------

_ID = re.compile(r"[A-Za-z0-9_.:@/-]{1,200}")


def check_id(text: object, what: str) -> str:
    """The text, if it may be an id or a key; else a ConfigurationError that names ``what``."""
    if isinstance(text, str) and _ID.fullmatch(text):
        return str.__str__(text)
    raise ConfigurationError(
        f"{what} is {display_value(text, 80)}: give 1 to 200 characters of A-Z, a-z, 0-9 and _ . : @ / -"
    )
