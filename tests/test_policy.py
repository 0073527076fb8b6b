"""Guard.from_toml: policies as data, read strictly."""

from __future__ import annotations

import hashlib
import inspect
import re
import tomllib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loopguard import Budget, BudgetExceeded, ConfigurationError, Guard, MaxSteps, ToolCallRefused, ask_in_terminal
from loopguard._policy import APPROVERS, KINDS, schema
from loopguard._tool import DEFAULTS
from tests.conftest import Install

POLICIES = sorted(Path(__file__).parents[1].joinpath("examples", "policies").glob("*.toml"))
EVERYTHING = next(path for path in POLICIES if path.stem == "everything")

# What a constructor takes and data can't express, and what a file writes in another form.
CODE = {"timer"}
OTHERWISE = {"Budget": {"units"}}

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a policy file."""

    def write(text: str) -> Path:
        path = tmp_path / "policy.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# --- what a file says ----------------------------------------------------------------------------


def test_a_policy_is_the_guard_that_python_would_make(write: Write) -> None:
    """Tables become guardrails, in the order of the file, arrays several of a kind."""
    guard = Guard.from_toml(
        write(
            """
            mode = "observe"
            max_refusals = 3
            [[MaxSteps]]
            n = 20
            [[MaxSteps]]
            n = 5
            only = "search_*"
            [LoopLimit]
            [ApproveTool]
            approver = "terminal"
            only = ["issue_*", "pay"]
            [Budget]
            usd = 0.1
            units = { credits = 7 }
            """
        )
    )
    assert repr(guard) == (
        "Guard(MaxSteps(20), MaxSteps(5, only='search_*'), LoopLimit(3), "
        "ApproveTool(ask_in_terminal, only='issue_*, pay'), Budget(usd=0.1, credits=7))"
    )
    assert guard.mode == "observe"
    assert guard.max_refusals == 3
    assert guard.guardrails[3].approver is ask_in_terminal


def test_a_policy_limits_as_it_says(write: Write) -> None:
    """Floats of TOML are exact amounts, and [tools] gives its options to functions that are wrapped."""
    guard = Guard.from_toml(write('[Budget]\nusd = 0.3\n[tools."search_*"]\ncost = 0.1\n'))
    search = guard.wrap({"search_web": lambda query: query})["search_web"]
    with guard.scope() as run:
        for query in "abc":
            search(query)
        with pytest.raises(BudgetExceeded):
            search("d")
        assert run.spent() == Decimal("0.3")


def test_an_empty_policy_is_an_empty_guard(write: Write) -> None:
    """No table is needed; what isn't said is inherited or has its default."""
    guard = Guard.from_toml(write(""))
    assert guard.guardrails == ()
    assert type(guard.max_refusals) is type(Guard().max_refusals)


def test_the_hash_names_the_text_of_the_policy(write: Write) -> None:
    """Who records a run can say which policy it ran under; a guard made in Python has none."""
    text = "[MaxSteps]\nn = 1  # ü\n"
    path = write(text)
    assert Guard.from_toml(str(path)).policy_hash == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    assert Guard(MaxSteps(1)).policy_hash is None


def test_the_hash_is_on_the_spans_of_the_runs_it_governs(write: Write, exporter: InMemorySpanExporter) -> None:
    """In Jaeger a run says under which policy it ran, and one of Python's says nothing."""
    for guard in (Guard.from_toml(write("")), Guard()):
        with guard.scope():
            pass
    told = [dict(span.attributes or {}).get("loopguard.policy.hash") for span in exporter.get_finished_spans()]
    assert told == [f"sha256:{hashlib.sha256(b'').hexdigest()}", None]


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_step = 3", r"policy.toml, line 1: unknown key 'max_step'; allowed are: mode, max_refusals, MaxSteps, "),
        ("mode = 'x'", r"policy.toml, line 1: Guard\(mode='x'\): give 'enforce' or 'observe'"),
        ("max_refusals = 0", r"line 1: Guard\(max_refusals=0\): give an int of at least 1"),
        ("[MaxSteps]\n\nn = -1", r"policy.toml, line 3, \[MaxSteps\]: MaxSteps\(n=-1\): give an int of at least 0"),
        ("[MaxSteps]", r"line 1, \[MaxSteps\]: the key 'n' is missing; allowed are: n, only, per"),
        ("MaxSteps = 3", r"line 1, \[MaxSteps\]: 3 is no table"),
        ("[MaxSteps]\nn = 1\n'onyl' = 'x'", r"line 3, \[MaxSteps\]: unknown key 'onyl'; allowed are: n, only, per"),
        ("[[MaxSteps]]\nn = 1\n[[MaxSteps]] # two\nn = true", r"line 4, \[MaxSteps\]: MaxSteps\(n=True\)"),
        ("[WrapTool]\nbefore = 'os:system'", r"line 1: unknown key 'WrapTool'.*written in Python"),
        ("[LoopLimit]\ntimer = 'time:time'", r"line 2, \[LoopLimit\]: unknown key 'timer'"),
        ("[ApproveTool]\nonly = 'x'", r"the key 'approver' is missing"),
        ("[ApproveTool]\napprover = 'os:system'", r"line 2, .*'os:system': give 'inbox', 'terminal'.* import paths"),
        ("[ApproveTool]\napprover = 'os.system'", r"import paths aren't followed"),
        ("[ApproveTool]\napprover = 3", r"approver 3: give 'inbox', 'terminal'"),
        (
            "[ApproveTool]\napprover = 'nobody'",
            r"'nobody': give 'inbox', 'terminal' or.*no installed package",
        ),
        ("[Budget]\nusd = -1", r"line 2, \[Budget\]: Budget\(usd=-1\) is not an amount"),
        ("[Budget]\nusd = nan", r"line 2, \[Budget\]: Budget\(usd=nan\) is not an amount"),
        ("[Budget]\ncredits = 1", r"line 2, \[Budget\]: unknown key 'credits'.*allowed are: .*units"),
        ("[Budget.units]\nusd = 1", r"'usd' is no unit of your own"),
        ("[Budget]\nunits = 3", r"3 is no table"),
        ("[Budget]\nunits = {'a b' = 3}", r"'a b' is no unit"),
        ("[Budget]\nextend = 'terminal'", r"extend= and extend_by= go together"),
        ("[plugins.nobody]", r"line 1, \[plugins.nobody\]: guardrail 'nobody': no installed package has 'nobody'"),
        ("plugins = 1", r"line 1, \[plugins\]: 1 is no table"),
        ("[tools]\nsearch = 1", r"line 2, \[tools.search\]: 1 is no table"),
        ("[tools.'a.b']\nname = 'x'", r"line 2, \[tools.a.b\]: unknown key 'name'; allowed are: cost, approve"),
        ("[tools.x]\ncost = -1", r"line 2, \[tools.x\]: tool\(cost=-1\) is not an amount"),
        (f"[MaxSteps]\nn = 0x{'f' * 6000}", r"line 2, \[MaxSteps\]: n is an integer of 24000 bits: give one of 64"),
        (f"[MaxSteps]\nn{'.a' * 5000} = 1", r"\[MaxSteps\]: tables and arrays stand more than 50 deep"),
        ('[tools."\\u001b[2J"]\ncost = -1', r"\[tools.\\x1b\[2J\]: tool\(cost=-1\)"),
        ("[MaxSteps]\nn = 1\nn = 2\n\n", r"policy.toml is not valid TOML: Cannot overwrite a value \(at line 3"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(write: Write, text: str, message: str) -> None:
    """Every error is a ConfigurationError that names file, line, table and key, and what is allowed."""
    with pytest.raises(ConfigurationError, match=message):
        Guard.from_toml(write(text))


def test_a_file_that_is_not_there_or_not_text_is_told(tmp_path: Path) -> None:
    """No OSError or UnicodeError for the caller to know about."""
    with pytest.raises(ConfigurationError, match="can't be read: No such file"):
        Guard.from_toml(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        Guard.from_toml(tmp_path / "binary.toml")


def test_the_line_of_a_key_is_found_in_its_own_table(write: Write) -> None:
    """A key of the same name in another table, or in a text, isn't taken for it."""
    text = '[Retry]\nmax_retries = 1\nwait = 1\n\n["RateLimit"]\nn = 1\nseconds = 2\nwait = -1\n'
    with pytest.raises(ConfigurationError, match=r"line 8, \[RateLimit\]: RateLimit\(wait=-1\)"):
        Guard.from_toml(write(text))


# --- plugins -------------------------------------------------------------------------------------

PLUGIN = """
from loopguard import MaxSteps, ToolCallRefused


def few(n, only=None):
    return MaxSteps(n, only)


def never(call):
    return False, "never"


class Careful:
    def __call__(self, call):
        return call.arguments["n"] < 3


def wrong():
    return "no guardrail"
"""


@pytest.fixture
def plugin(install: Install) -> None:
    """An installed distribution that brings guardrails and approvers."""
    install(
        "careful-plugin",
        "[loopguard.guardrails]\nfew = careful_plugin:few\nwrong = careful_plugin:wrong\n"
        "[loopguard.approvers]\nnever = careful_plugin:never\ncareful = careful_plugin:Careful\n"
        "terminal = careful_plugin:never",
        PLUGIN,
    )


@pytest.mark.usefixtures("plugin")
def test_guardrails_and_approvers_of_plugins_are_found_by_name(write: Write) -> None:
    """A plugin's guardrail gets its table as keyword arguments; an approver is a function, or a class to make one."""
    guard = Guard.from_toml(
        write(
            """
            [plugins.few]
            n = 2
            [[ApproveTool]]
            approver = "careful"
            only = "count"
            [[ApproveTool]]
            approver = "never"
            only = "pay"
            """
        )
    )
    count = guard.tool(lambda n: n, name="count")
    pay = guard.tool(lambda: 1, name="pay")
    with guard.scope():
        assert count(1) == 1
        with pytest.raises(ToolCallRefused, match="never"):
            pay()
        with pytest.raises(ToolCallRefused, match="not approved"):
            count(3)
        assert count(2) == 2
        with pytest.raises(ToolCallRefused) as caught:
            count(1)
    assert caught.value.code == "max_steps"


@pytest.mark.usefixtures("plugin")
def test_a_plugin_cannot_take_the_name_of_a_builtin_approver(write: Write) -> None:
    """terminal is the terminal, whatever is installed."""
    guard = Guard.from_toml(write("[ApproveTool]\napprover = 'terminal'"))
    assert guard.guardrails[0].approver is ask_in_terminal


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[plugins.fewer]", r"no installed package has 'fewer' in loopguard.guardrails; known: .*few, wrong"),
        ("[plugins.few]\nm = 3", r"line 1, \[plugins.few\]: few\(\) .*'m'"),
        ("[plugins.wrong]", r"policy.toml: Guard\('no guardrail'\) is not a guardrail"),
        ("[ApproveTool]\napprover = 'nevr'", r"known: .*careful, never, terminal"),
    ],
)
def test_what_is_wrong_about_a_plugin_is_told_with_its_place(write: Write, text: str, message: str) -> None:
    """An unknown name lists those that are installed; options that don't fit are told."""
    with pytest.raises(ConfigurationError, match=message):
        Guard.from_toml(write(text))


# --- the schema ----------------------------------------------------------------------------------


def test_the_schema_is_a_schema() -> None:
    """It follows JSON Schema's own."""
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_the_examples_fit_the_schema_and_are_read(path: Path) -> None:
    """What an editor accepts by the schema, the reader accepts too."""
    jsonschema.Draft202012Validator(schema()).validate(tomllib.loads(path.read_text(encoding="utf-8")))
    assert Guard.from_toml(path).guardrails


def test_the_pages_policy_is_read_as_it_stands(write: Write) -> None:
    """docs/policy-files.md shows a file that works."""
    page = POLICIES[0].parents[2].joinpath("docs", "policy-files.md").read_text(encoding="utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0]
    jsonschema.Draft202012Validator(schema()).validate(tomllib.loads(text))
    assert len(Guard.from_toml(write(text)).guardrails) == 3


def test_one_example_has_every_key_of_the_schema() -> None:
    """So that the test above reads each of them."""
    document = tomllib.loads(EVERYTHING.read_text(encoding="utf-8"))
    known = schema()
    assert {*document, "plugins"} == set(known["properties"])
    for name in KINDS:
        tables = document[name] if isinstance(document[name], list) else [document[name]]
        assert {key for table in tables for key in table} == set(known["$defs"][name]["properties"]), name
    assert set(document["tools"]["search_*"]) == set(known["$defs"]["tool"]["properties"])


@pytest.mark.parametrize("name", KINDS)
def test_the_schema_knows_every_parameter_of_a_guardrail(name: str) -> None:
    """A parameter that is added later is added to policy files, too."""
    parameters = inspect.signature(KINDS[name]).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    assert set(schema()["$defs"][name]["properties"]) - OTHERWISE.get(name, set()) == named - CODE
    required = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    assert set(schema()["$defs"][name].get("required", ())) == required


def test_the_schema_knows_every_option_of_a_tool_that_is_data() -> None:
    """What [tools] leaves out needs code, or is its key."""
    assert set(DEFAULTS) - set(schema()["$defs"]["tool"]["properties"]) == {"name", "raises", "self_key"}


def test_the_schema_names_the_approvers() -> None:
    """Who writes a policy reads there whom it can ask."""
    for name in APPROVERS:
        assert name in schema()["$defs"]["approver"]["description"]


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        "[MaxSteps]",
        "[MaxSteps]\nn = -1",
        "[Budget]\ncredits = 1",
        "[Budget]\nextend = 'terminal'",
        "[ApproveTool]\napprover = 'os:system'",
        "[tools.x]\nname = 'y'",
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(write: Write, text: str) -> None:
    """An editor shows the mistake before the program does."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema()).validate(tomllib.loads(text))
    with pytest.raises(ConfigurationError):
        Guard.from_toml(write(text))


# --- Guard(tools=) -------------------------------------------------------------------------------


def test_the_options_of_tools_may_stand_in_the_guard() -> None:
    """By name or pattern, later ones over earlier ones; they hold for foreign tools, too."""
    guard = Guard(Budget(usd=1), tools={"*": {"cost": 0.5}, "cheap_*": {"cost": 0.25, "approve": True}})
    with guard.scope() as run:
        guard.foreign("search", cost=0.75).call({}, dict)
        assert run.spent() == Decimal("0.5")
        with pytest.raises(ToolCallRefused, match="explicit yes"):
            guard.wrap({"cheap_one": lambda: 1})["cheap_one"]()


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], r"Guard\(tools=\[\]\): give {name or pattern: options}"),
        ({"x": 1}, r"Guard\(tools={'x': 1}\)"),
        ({"": {}}, r"Guard\(tools={'': {}}\)"),
        ({"x": {"name": "y"}}, r"Guard\(tools={'x': …}\) has unknown options 'name'; allowed are: cost, "),
        ({"x": {"cost": -1}}, r"tool\(cost=-1\) is not an amount"),
    ],
)
def test_wrong_options_of_tools_are_found_when_the_guard_is_made(tools: Any, message: str) -> None:
    """Not at the first call, which may come late."""
    with pytest.raises(ConfigurationError, match=message):
        Guard(tools=tools)


def test_no_policy_message_shows_a_path_twice(write: Write) -> None:
    """The file is named once, at the beginning."""
    with pytest.raises(ConfigurationError) as caught:
        Guard.from_toml(write("[tools.x]\ncost = 'dear'"))
    assert len(re.findall(r"policy\.toml", str(caught.value))) == 1
