"""A support agent written by hand on the anthropic SDK, and what loopguard adds to it: the lines with `# +`.

Without them it is an ordinary agent. With them it can't repeat itself for ever, pay a refund that nobody
approved, or spend more than 30 cents. Each time the model is told why, as an error of its tool, and goes on.

It is offline: a scripted model behind a real HTTP server answers the real SDK. With ANTHROPIC_API_KEY set
the real model does. What you see on the screen is made in backstage.py.

Prints:

    ...
    iteration 4 of 10
      ✗ track_parcel(parcel='P-77') was refused: loop_limit
          you are looping: track_parcel was already called 2 times with these same
          arguments and nothing new came of it, ...
    iteration 5 of 10
      ? issue_refund(order='A-1042', amount=899) needs a yes
      ✗ issue_refund(order='A-1042', amount=899) was refused: approval_denied
          more than $100 is a manager's decision
    ...
    iteration 7 of 10
      ✗ search_depots(parcel='P-77') was refused: budget
          search_depots may cost ..., but only $0.24 is left of the budget of ...
    iteration 8 of 10
    <BLANKLINE>
    support completed after 8 iterations (until, $0.06)
    ...
"""

import anthropic
import backstage

from loopguard import ApproveTool, Budget, Guard, LoopLimit, MaxSteps, configure_telemetry, loop, tool  # +

client = backstage.client()

policy = Guard(  # +
    MaxSteps(20),  # + tool calls in one run
    LoopLimit(2),  # + the same call twice; then something new has to happen
    Budget(usd=0.30),  # + for one run, reserved before each call
    ApproveTool(backstage.approver(), only="issue_*"),  # + nothing else is a yes
    on_event=backstage.show,  # + live progress
)  # +


@tool(cost=0.01)  # +
def look_up_order(order: str) -> str:
    """What was ordered, for how much, and its parcel."""
    return f"{order}: a coffee machine, $899, parcel P-77"


@tool(cost=0.02)  # +
def track_parcel(parcel: str) -> str:
    """Where the parcel was scanned last."""
    return f"{parcel}: last scan in Leipzig, nine days ago"


@tool(cost=0.01, approve=True)  # +
def issue_refund(order: str, amount: int) -> str:
    """Send this many dollars back to the customer."""
    return f"{amount} dollars are on their way for {order}"


@tool(cost=0.50)  # +
def search_depots(parcel: str) -> str:
    """Have people look for the parcel in every depot."""
    return f"{parcel} was found in Halle"


TOOLS = {fn.__name__: fn for fn in (look_up_order, track_parcel, issue_refund, search_depots)}


def use(block: anthropic.types.ToolUseBlock) -> dict:
    """Run the tool that the model asks for; whatever it raises is for the model to know."""
    try:
        content, failed = TOOLS[block.name](**block.input), False
    except Exception as error:
        content, failed = str(error), True
    return {"type": "tool_result", "tool_use_id": block.id, "content": content, "is_error": failed}


def answered(messages: list) -> bool:
    return messages[-1]["role"] == "assistant"


@loop(max=10, until=answered, guard=policy)  # +
def support(messages: list) -> list:
    """One turn: the model speaks, its tools run."""
    reply = client.messages.create(
        model="claude-haiku-5-5",
        max_tokens=1000,
        tools=[anthropic.beta_tool(fn).to_dict() for fn in TOOLS.values()],
        messages=messages,
    )
    messages = [*messages, {"role": "assistant", "content": reply.content}]
    if results := [use(block) for block in reply.content if block.type == "tool_use"]:
        messages = [*messages, {"role": "user", "content": results}]
    return messages


if __name__ == "__main__":
    configure_telemetry("support-agent", console=True)  # +
    with backstage.performance():
        # Before, this said: while not answered(messages): messages = support(messages)
        result = support.run([{"role": "user", "content": "Order A-1042 never came. I want my money back."}])
        print(f"\n{result}\n", flush=True)
        if result.completed:
            print("".join(block.text for block in result.value[-1]["content"] if block.type == "text"), end="\n\n")
