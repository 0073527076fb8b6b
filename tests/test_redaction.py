"""Redaction: what is masked, what stays, and that nothing hostile gets past it or blocks it."""

from __future__ import annotations

import copy
import itertools
import sys
import time
import unicodedata
from collections import OrderedDict, deque
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopguard._config import settings as configured
from loopguard.exceptions import ConfigurationError
from loopguard.redaction import (
    check_id,
    display,
    display_name,
    display_value,
    mask,
    redact,
    redact_error,
    redact_text,
    safe_url,
)

HIDDEN = "[hidden, 7 characters]"  # what stands for "hunter2"


@pytest.fixture
def _no_redactor() -> Iterator[None]:
    before = configured.redact
    yield
    configured.redact = before


# --- Names -----------------------------------------------------------------------------------------------------

SECRET_NAMES = [
    *("api_key", "apiKey", "APIKey", "apikey", "API_KEY", "x-api-key", "X-Api-Key", "openai_api_key", "api_key_2"),
    *("authorization", "Authorization", "Proxy-Authorization", "password", "DB_PASSWORD", "dbPassword", "passwd"),
    *("user.password", "password_hash", "passphrase", "secret", "client_secret", "clientSecret", "secrets"),
    *("secret_key", "SECRET-KEY", "access_token", "accessToken", "refresh_token", "id_token", "token", "OAuthToken"),
    *("private_key", "aws_secret_access_key", "credentials", "cookie", "Set-Cookie", "auth", "basic_auth", "jwt"),
    *("access_tokens", "api_keys"),
]
OPEN_NAMES = [
    *("max_tokens", "tokens", "maxTokens", "input_tokens", "token_count", "secretary", "passwordless_login_enabled"),
    *("next_page_token", "nextToken", "tokenizer", "author", "authors", "authentic", "key", "keys", "keyboard"),
    *("monkey", "primary_key", "password_length", "password_policy", "secret_name", "cost_per_token", "compass"),
    *("", "name", "query", "accession", "description", "tokens_per_second", "bearer_type"),
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_values_under_secret_names_are_masked(name: str) -> None:
    """Whatever stands under a name with such a word in it is hidden, in every spelling."""
    assert redact({"a": [{name: "hunter2"}]}) == {"a": [{name: HIDDEN}]}
    assert redact({name: {"a": 1}, "b": 1}) == {name: "[hidden]", "b": 1}
    assert redact({name: 1234}) == {name: "[hidden]"}
    assert redact({name: None}) == {name: None}
    assert redact({name.encode(): b"hunter2"}) == {name.encode(): "[hidden, 7 bytes]"}


@pytest.mark.parametrize("name", OPEN_NAMES)
def test_values_under_other_names_stay(name: str) -> None:
    """Words that only contain such a word, or only speak of it, hide nothing."""
    assert redact({name: "hunter2"}) == {name: "hunter2"}
    assert redact_text(f"{name}=hunter2") == f"{name}=hunter2"


# --- Texts -----------------------------------------------------------------------------------------------------

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc=\n-----END RSA PRIVATE KEY-----"
SECRETS = [
    *("sk-" + "a1B2" * 8, "sk-ant-api03-" + "aB3_" * 8, "sk-proj-" + "abcdefghijklmnopqrst", "sk_live_" + "a1" * 10),
    *("ghp_" + "a1B2" * 9, "github_pat_" + "a1B2_" * 9, "glpat-" + "a1B2" * 5, "AKIA" + "ABCDEFGHIJ234567"),
    *("xoxb-" + "123456-abcdef", "AIza" + "a1B2" * 9, "hf_" + "aBcD" * 8, JWT, PEM),
]
PLAIN = [
    *("", "sk", "risk-assessment-of-everything", "sk-learn-compatible-estimators", "task-sk", "a = b", "max_tokens=5"),
    *(
        "AKIA",
        "the bearer of news",
        "use bearer tokens.",
        "basic understanding of it",
        "eyJ.eyJ.eyJ",
        "mail me@example.com",
        "10:30",
    ),
    *("https://example.com/a@b", "http://localhost:8080/@user", "https://example.com?q=a@b", "std::string @x"),
    *("0123456789abcdef0123456789abcdef01234567", "-----BEGIN CERTIFICATE-----\nMIIE", "password reset", "secret: "),
]


@pytest.mark.parametrize("secret", SECRETS, ids=itertools.count())
def test_what_looks_like_a_secret_is_masked(secret: str) -> None:
    """Keys and tokens are hidden wherever they stand in a text, and the rest of the text stays."""
    assert redact_text(f"before ({secret}) after") == f"before ({mask(secret)}) after"
    assert redact([secret, {"a": (secret,)}]) == [mask(secret), {"a": (mask(secret),)}]
    assert secret not in str(redact({secret: 1}))


@pytest.mark.parametrize("text", PLAIN, ids=itertools.count())
def test_plain_text_stays(text: str) -> None:
    """Words, hashes, addresses and paths are no secrets."""
    assert redact_text(text) == text
    assert redact([text])[0] is text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Bearer abc.def-123", "Bearer [hidden, 11 characters]"),
        ("Bearer abcdefgh", "Bearer [hidden, 8 characters]"),
        ("bearer abc.def.ghi", "bearer [hidden, 11 characters]"),
        ("authorization: Basic dXNlcjpwYXNz", "authorization: Basic [hidden, 12 characters]"),
        ("Authorization: Bearer abc", "Authorization: Bearer [hidden, 3 characters]"),
        ("password=hunter2", f"password={HIDDEN}"),
        ("--api-key=hunter2 --verbose", f"--api-key={HIDDEN} --verbose"),
        ("{'password': 'hunter2', 'user': 'me'}", f"{{'password': '{HIDDEN}', 'user': 'me'}}"),
        ('{"api_key": "hunter2"}', f'{{"api_key": "{HIDDEN}"}}'),
        ("Login(user='me', password='hunter2')", f"Login(user='me', password='{HIDDEN}')"),
        ("failed: url=https://x.y/?token=hunter2&a=b", f"failed: url=https://x.y/?token={HIDDEN}&a=b"),
        ("error: password=hunter2", f"error: password={HIDDEN}"),
        ('password="hun\\"er2" x', 'password="[hidden, 8 characters]" x'),
        ("postgres://me:pw@db/x", "postgres://[hidden, 5 characters]@db/x"),
        ("postgres://me:p@w@db/x", "postgres://[hidden, 6 characters]@db/x"),
        ("postgres://me:p/w@db/x", "postgres://[hidden, 6 characters]@db/x"),
        (
            "a https://token@h/ b https://u:p@h",
            "a https://[hidden, 5 characters]@h/ b https://[hidden, 3 characters]@h",
        ),
        ("-----BEGIN PRIVATE KEY-----\ncut off", "[hidden, 35 characters]"),
    ],
    ids=itertools.count(),
)
def test_secrets_in_a_text_are_masked_and_nothing_else(text: str, shown: str) -> None:
    """Only the secret part of a header, a setting, a URL or a block gives way."""
    assert redact_text(text) == shown
    assert redact_text(shown) == shown


@given(st.text(st.characters(), max_size=60) | st.text("sk-=:/@ '\"\\eyJ.1passwordBearer[hidden, 5 characters]\n"))
@settings(max_examples=300)
def test_redaction_settles(text: str) -> None:
    """Any text can be redacted, and a second time changes nothing more."""
    once = redact_text(text)
    assert redact_text(once) == once
    assert redact({"a": text, "password": text}) == redact(redact({"a": text, "password": text}))


HOSTILE_PARTS = [
    *("a", " ", "-", "=", ":", '"', "'", "\\", "@", "://", "://a:", "://a:b/", "a://", "eyJ", "eyJ-", "eyJaaaaaaaaa."),
    *("sk-", "a-", "a.", "a=", 'a="', 'password="', "password='\\", "password=", "password: ", "-----BEGIN "),
    *("-----BEGIN PRIVATE KEY-----", "-----END ", "Bearer ", "bearer", "SG.", "SG.aaaaaaaaaaaaaaaaaa", "AKIA", "xoxb-"),
    *("\u202e", "\ud83d", "A", "aB", "[hidden, ", "Basic \t", "token ", "a\n"),
]


@pytest.mark.parametrize("part", HOSTILE_PARTS, ids=itertools.count())
def test_a_megabyte_is_redacted_in_bounded_time(part: str) -> None:
    """No text makes the patterns go back and forth."""
    text = part * (1_000_000 // len(part))
    start = time.process_time()
    redact_text(text)
    redact_text(text + "@")
    assert time.process_time() - start < 8


def test_long_names_are_looked_at_in_bounded_time() -> None:
    """A name of a megabyte is no name, and isn't remembered."""
    start = time.process_time()
    assert redact({"aB" * 500_000 + "_password": "hunter2"})["aB" * 500_000 + "_password"] == HIDDEN
    assert time.process_time() - start < 8


# --- Values ----------------------------------------------------------------------------------------------------


class Login(NamedTuple):
    user: str
    password: str


class Leaf:
    """An object whose methods all break."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no eq")

    __hash__ = object.__hash__


class Unhashable(str):
    armed = False
    __slots__ = ()

    def __hash__(self) -> int:
        if Unhashable.armed:
            raise RuntimeError("no hash")
        return 1


def test_the_caller_keeps_the_originals() -> None:
    """Redaction copies containers, changes none of them, and keeps the leaves as they are."""
    leaf = Leaf()
    value = {"a": [1, {"password": "hunter2"}], "b": (leaf, b"x"), "c": {1, 2}, 4: frozenset({"x"})}
    before = copy.copy(value)
    shown = redact(value)
    assert shown is not value
    assert shown["a"] == [1, {"password": HIDDEN}]
    assert shown["b"][0] is leaf
    assert shown["c"] == {1, 2}
    assert shown["c"] is not value["c"]
    assert shown[4] == frozenset({"x"})
    assert value.keys() == before.keys()
    assert value["a"] == [1, {"password": "hunter2"}]


def test_subclasses_and_other_containers_are_looked_into() -> None:
    """A container that only derives from a builtin one hides no secrets from redaction."""
    assert redact(OrderedDict(password="hunter2")) == {"password": HIDDEN}
    assert redact(MappingProxyType({"password": "hunter2"})) == {"password": HIDDEN}
    assert redact(deque([{"password": "hunter2"}])) == [{"password": HIDDEN}]
    assert redact(Login("me", "hunter2")) == Login("me", HIDDEN)
    assert isinstance(redact(Login("me", "hunter2")), Login)
    assert redact({SECRETS[0], "a"}) == {mask(SECRETS[0]), "a"}


def test_masked_keys_do_not_swallow_entries() -> None:
    """Two secret keys of one length leave two entries."""
    assert sorted(redact({SECRETS[0]: 1, SECRETS[0][:-1] + "X": 2, ("a", SECRETS[0]): 3}).values()) == [1, 2, 3]


def test_values_of_broken_objects_are_redacted() -> None:
    """Keys and members whose methods raise cost nobody the rest."""
    mapping = {Unhashable("a"): "hunter2", "password": "hunter2"}
    members = {Unhashable("b"), 1}
    Unhashable.armed = True
    try:
        shown = redact({"m": mapping, "s": members})
    finally:
        Unhashable.armed = False
    assert sorted(shown["m"].values()) == [HIDDEN, "hunter2"]
    assert len(shown["s"]) == 2


def test_cycles_and_sharing_survive() -> None:
    """A cycle stays a cycle in the copy, a shared part is copied once, a tuple on a cycle is cut."""
    value: dict[str, Any] = {"password": "hunter2"}
    value["self"] = [value, value]
    shown = redact(value)
    assert shown["self"][0] is shown
    assert shown["password"] == HIDDEN
    inside: list[Any] = []
    around = (inside,)
    inside.append(around)
    shown = redact(inside)
    assert shown[0][0] is shown
    assert redact(around) == (["[circular]"],)
    shared: list[Any] = ["x"]
    for _ in range(100):
        shared = [shared, shared]
    shown = redact(shared, extra=lambda name, value: None)
    assert shown[0] is shown[1]


def test_depth_is_no_limit() -> None:
    """A secret at the bottom of ten thousand levels is masked."""
    value: Any = {"password": "hunter2"}
    for level in range(10_000):
        value = [value] if level % 2 else {"a": value}
    shown = redact(value)
    for level in reversed(range(10_000)):
        shown = shown[0] if level % 2 else shown["a"]
    assert shown == {"password": HIDDEN}
    assert display_value(value).endswith(" more characters")


def test_a_redactor_decides_first() -> None:
    """What the user's function returns is shown, None leaves it to the rules, and they hold for all it returns."""

    def hide(name: str, value: Any) -> Any:
        return {"ssn": "***", "wide": ["hunter2", {"password": "hunter2"}], "leak": SECRETS[0]}.get(name)

    value = {"ssn": 123, "a": [{"ssn": {"b": 1}}], "wide": 1, "leak": 1, "password": "hunter2"}
    shown = redact(value, hide)
    assert shown == {
        "ssn": "***",
        "a": [{"ssn": "***"}],
        "wide": ["hunter2", {"password": HIDDEN}],
        "leak": mask(SECRETS[0]),
        "password": HIDDEN,
    }


def test_what_a_redactor_cannot_judge_is_hidden() -> None:
    """An exception in the user's function hides the value that it was asked about, and only that."""

    def broken(name: str, value: Any) -> Any:
        if name == "a":
            raise RuntimeError("no opinion")

    assert redact({"a": "hunter2", "b": "hunter2", "c": {"a": [1]}}, broken) == {
        "a": HIDDEN,
        "b": "hunter2",
        "c": {"a": "[hidden]"},
    }


def test_a_redactor_that_nests_for_ever_ends() -> None:
    """What a redactor returned isn't given to it again."""
    assert redact({"a": 1}, lambda name, value: {"more": value}) == {"more": {"a": 1}}


def test_shared_parts_are_judged_under_each_of_their_names() -> None:
    """A list that stands under two names is shown as each name wants it."""
    part = ["hunter2"]
    shown = redact(
        {"a": part, "b": part}, lambda name, value: "***" if name == "b" and isinstance(value, str) else None
    )
    assert shown == {"a": ["hunter2"], "b": ["***"]}


@pytest.mark.usefixtures("_no_redactor")
def test_the_configured_redactor_is_the_default() -> None:
    """The function given to configure is asked where none is given, for texts on their own too."""
    configured.redact = lambda name, value: value.replace("Bob", "***") if isinstance(value, str) else None
    assert redact({"a": "Bob"}) == {"a": "***"}
    assert redact_text("Bob, password=hunter2") == f"***, password={HIDDEN}"
    assert redact_error(ValueError("Bob")) == "ValueError: ***"
    assert display_value("Bob") == '"***"'
    configured.redact = lambda name, value: 1 / 0
    assert redact_text("hunter2") == HIDDEN


def test_masks_tell_the_size_of_texts_only() -> None:
    """A mask says how long a text was, and of anything else only that it is hidden."""
    assert mask("hunter2") == HIDDEN
    assert mask("x") == "[hidden, 1 character]"
    assert mask("x" * 12345) == "[hidden, 12,345 characters]"
    assert mask(b"xy") == "[hidden, 2 bytes]"
    assert mask([1]) == mask(Leaf()) == mask(10**5000) == "[hidden]"
    assert mask(HIDDEN) == HIDDEN
    assert mask(HIDDEN + "x") != HIDDEN + "x"


def test_errors_are_told_without_secrets_and_without_raising() -> None:
    """The text of an exception is redacted, and one that breaks has a placeholder."""
    assert redact_error(ValueError("password=hunter2")) == f"ValueError: password={HIDDEN}"
    assert redact_error(ValueError()) == "ValueError"
    assert redact_error(KeyError(Leaf())) == "KeyError: <its text can't be read>"


def test_an_interrupt_passes_through() -> None:
    """Ctrl-C in code of the user's is not swallowed."""

    class Impatient(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

        __repr__ = __str__

    def impatient(name: str, value: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        redact_error(Impatient())
    with pytest.raises(KeyboardInterrupt):
        redact([1], impatient)
    with pytest.raises(KeyboardInterrupt):
        display_value(Impatient())


# --- The terminal ----------------------------------------------------------------------------------------------

ANY_VALUE: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary() | st.builds(Leaf),
    lambda below: st.lists(below) | st.tuples(below) | st.dictionaries(st.text(st.characters()) | st.integers(), below),
    max_leaves=10,
)


def is_visible(text: str) -> bool:
    """Whether a terminal shows every character of a text, on one line, and obeys none."""
    return all(
        unicodedata.category(char)[0] not in "CZ" or char == " " for char in text if not "\ufe00" <= char <= "\ufe0f"
    ) and not any("\ufe00" <= char <= "\ufe0f" for char in text)


@given(st.text(st.characters()))
@settings(max_examples=200)
def test_nothing_invisible_is_displayed(text: str) -> None:
    """Whatever the text, a terminal gets visible characters of one line, that tell texts apart."""
    assert is_visible(display(text))
    assert is_visible(display_name(text))
    assert display(text, None) != display(text + "\u200b", None)
    assert set(display(text, multiline=True)) <= set(display(text)) | {"\n"}


@given(ANY_VALUE)
@settings(max_examples=100)
def test_every_value_is_displayed(value: Any) -> None:
    """Any value has a text of one visible line, within the limit and what says how much is missing."""
    assert is_visible(display_value(value))
    assert len(display_value(value, 20)) <= 20 + len("… more than 1,000,000 more characters")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain – naïve ☃", "plain – naïve ☃"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("a\\nb", r"a\\nb"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("a\u200bb\ufeff\u00ad", r"a\u200bb\ufeff\xad"),
        ("\ud83d\x9b", r"\ud83d\x9b"),
        ("a\u3164\u2800\ufe0f\U000e0101\U000e0041", r"a\u3164\u2800\ufe0f\U000e0101\U000e0041"),
        ("a\u00a0b\u2028", r"a\xa0b\u2028"),
        ("[bold]x[/bold]", "[bold]x[/bold]"),
    ],
    ids=itertools.count(),
)
def test_display_escapes_what_cannot_be_seen(text: str, shown: str) -> None:
    """Control, bidi, zero-width and other invisible characters are spelled out."""
    assert display(text) == shown


def test_display_keeps_newlines_only_when_asked() -> None:
    """Several lines are an offer of the caller, and nothing else comes with it."""
    assert display("a\nb\r\nc\x1b", multiline=True) == "a\nb\\r\nc\\x1b"


def test_nothing_is_cut_without_saying_so() -> None:
    """A text beyond the limit ends with how much more there was."""
    assert display("x" * 2000) == "x" * 2000
    assert display("x" * 3234) == "x" * 2000 + "… 1,234 more characters"
    assert display("abc", 2) == "ab… 1 more character"
    assert display("\x1b" * 3, 2) == r"\x1b\x1b… 1 more character"
    assert display("x" * 5000, None) == "x" * 5000
    assert display("abc", 0) == display("abc", -1) == "… 3 more characters"


def test_names_that_are_not_ascii_are_flagged() -> None:
    """A look-alike in the name of a tool is spelled out beside it."""
    assert display_name("pay") == "pay"
    assert display_name("p\u0430y") == "p\u0430y ⚠ not ASCII: p\\u0430y"
    assert display_name("pay\u200b") == "pay\\u200b ⚠ not ASCII: pay\\u200b"
    assert display_name("pay\x1b") == "pay\\x1b"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"query": "x", "n": [1, 2.5, None, True]}, '{"query": "x", "n": [1, 2.5, None, True]}'),
        ({"password": "hunter2"}, f'{{"password": "{HIDDEN}"}}'),
        (((1,), (), {1}, [], {}, {(1, 2): 3}), "((1,), (), {1}, [], {}, {(1, 2): 3})"),
        ('say "hi"\n\\', r'"say \"hi\"\n\\"'),
        (b"\x00", r"b'\x00'"),
        (Leaf(), "<Leaf>"),
        (Login("me", "hunter2"), f'("me", "{HIDDEN}")'),
    ],
    ids=itertools.count(),
)
def test_values_are_displayed_compactly(value: Any, shown: str) -> None:
    """Arguments are shown on one line, redacted, every text quoted."""
    assert display_value(value) == shown


def test_the_repr_of_an_object_is_escaped_and_redacted() -> None:
    """An object's own text obeys the same rules as any other."""

    class Loud:
        def __repr__(self) -> str:
            return "Loud(\x1b[2J, password='hunter2')"

    assert display_value([Loud()]) == rf"[Loud(\x1b[2J, password='{HIDDEN}')]"


def test_monstrous_values_are_displayed_in_bounded_time() -> None:
    """Shared parts, cycles and endless integers are shown as far as the limit goes."""
    value: list[Any] = ["x"]
    for _ in range(100):
        value = [value, value]
    assert display_value(value).endswith("… more than 1,000,000 more characters")
    cycle: list[Any] = [1]
    cycle.append(cycle)
    assert display_value(cycle) == "[1, [circular]]"
    assert display_value(10**5000, 10).startswith("0x")
    assert sys.getrecursionlimit() < 10_000


# --- URLs and ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgres://me:pw@db:5432/x", "postgres://db:5432/x"),
        ("postgres://me:p@w@db/x", "postgres://db/x"),
        ("postgres://me:p/'w?#@db/x", "postgres://db/x"),
        ("redis://:pw@h", "redis://h"),
        ("https://token@h/a@b?c=d@e", "https://h/a@b?c=d@e"),
        ("sqlite:///runs.db", "sqlite:///runs.db"),
        ("https://[::1]:80/x", "https://[::1]:80/x"),
        ("not a url", "not a url"),
    ],
)
def test_urls_are_printed_without_user_info(url: str, shown: str) -> None:
    """User and password go, everything else stays."""
    assert safe_url(url) == shown


@pytest.mark.parametrize("text", ["a", "run-1", "A_b.c:d@e/f-0", "x" * 200])
def test_ids_pass(text: str) -> None:
    """An id of allowed characters is returned as it is."""
    assert check_id(text, "run_id") == text


@pytest.mark.parametrize("text", ["", "a b", "a\n", "\na", "ä", "x" * 201, "a\x00", "٣", None, 1, b"a"])
def test_other_ids_are_a_configuration_error(text: object) -> None:
    """Anything else is refused, naming what it is for and what is allowed, escaped."""
    with pytest.raises(ConfigurationError, match=r"^run_id is .*give 1 to 200 characters") as caught:
        check_id(text, "run_id")
    assert is_visible(str(caught.value))
