"""Six commit messages become a weekly report: the evaluator says what is wrong with it, until nothing is.

The model would rather write prose. Each time it gets the same commits again, with what it wrote and why that
was not accepted. One that never complies ends the loop after two retries; what happens then is for the caller
to choose: an exception, the best there is, or something else.

It is offline: a scripted model behind a real HTTP server answers the real SDK.

Prints:

    a model that learns
      ready → running (start)
      running → retry (reject)
        because: There is no JSON object in the answer. Answer with one. It needs: summary, modules.
      retry → running (next)
      running → retry (reject)
        because: There is no JSON object in the answer. Answer with one. It needs: summary, modules.
      retry → running (next)
      running → success (complete)
    write completed after 3 iterations (evaluated)
    summary: Logins are safer, invoices round correctly, exports stream.
    modules: auth, billing, export
    <BLANKLINE>
    a model that doesn't, and on_failure="raise"
      ready → running (start)
      running → retry (reject)
        because: There is no JSON object in the answer. Answer with one. It needs: summary, modules.
      retry → running (next)
      running → retry (reject)
        because: There is no JSON object in the answer. Answer with one. It needs: summary, modules.
      retry → running (next)
      running → retry (reject)
        because: There is no JSON object in the answer. Answer with one. It needs: summary, modules.
      retry → failed (fail)
    EvaluationFailed: write stopped after 3 iterations (evaluation_failed)
    <BLANKLINE>
    the same with on_failure="return", best=len
    A quiet week, but for logins and invoices.
    warning: loop write: the evaluators rejected the last 3 values; this is the best
    <BLANKLINE>
    the same with a fallback
    {'summary': '6 commits, see the log', 'modules': ['auth', 'billing', 'export']}
    warning: loop write: the evaluators rejected the last 3 values; this is the fallback's value
"""

import anthropic

from loopguard import EvaluationFailed, LoopResult, Transition, current_run, loop
from loopguard.context import feedback_messages
from loopguard.evaluators import JSONFields
from loopguard.testing import MessagesServer

COMMITS = [
    "auth: refuse reused refresh tokens",
    "auth: lock an account after ten failures",
    "billing: round half to even",
    "billing: print the VAT id",
    "export: stream large tables",
    "export: name the columns",
]
LEARNS = [
    "A good week! Logins got safer, and invoices round correctly.",
    "Of course: summary, logins are safer; modules, {auth, billing, export}.",
    """Here it is:
```json
{
  "summary": "Logins are safer, invoices round correctly, exports stream.",
  "modules": ["auth", "billing", "export"]
}
```""",
]
NEVER_LEARNS = ["A good week.", "A quiet week, but for logins and invoices.", "As I said, a good week."]


def show(step: Transition) -> None:
    """Each change of state, and why a report was rejected."""
    print(f"  {step.source} → {step.target} ({step.trigger})")
    if step.trigger == "reject":
        print(f"    because: {current_run().feedback}")


def write_report(answers: list[str], **options: object) -> LoopResult:
    """Run the loop with a model that gives these answers."""
    with MessagesServer(answers) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none")

        @loop(max=10, evaluate=JSONFields("summary", "modules"), max_retries=2, **options)
        def write(commits: list[str]) -> str:
            task = "Sum up this week as JSON with a summary and the modules:\n" + "\n".join(commits)
            messages = [{"role": "user", "content": task}, *feedback_messages(current_run().history)]
            return client.messages.create(model="writer", max_tokens=1000, messages=messages).content[0].text

        return write.run(COMMITS)


def count(result: LoopResult) -> dict:
    """A report that needs no model."""
    return {"summary": f"{len(COMMITS)} commits, see the log", "modules": sorted({c.split(":")[0] for c in COMMITS})}


print("a model that learns")
result = write_report(LEARNS, on_transition=show)
print(result)
print("summary:", result.value["summary"])
print("modules:", ", ".join(result.value["modules"]))

print('\na model that doesn\'t, and on_failure="raise"')
try:
    write_report(NEVER_LEARNS, on_transition=show)
except EvaluationFailed as failure:
    print(f"{type(failure).__name__}: {failure}")

print('\nthe same with on_failure="return", best=len')
result = write_report(NEVER_LEARNS, on_failure="return", best=len)
print(result.value)
print("warning:", *result.warnings)

print("\nthe same with a fallback")
result = write_report(NEVER_LEARNS, fallback=count)
print(result.value)
print("warning:", *result.warnings)
