"""An agent that may read one site and refund small amounts.

Prints:

    <the page at https://docs.python.org/3/>
    fetch was not run: it may reach docs.python.org, not example.net. Use one of these.
    refunded 20 for A-1
    issue_refund was not approved: 5000 is not within 100. It did not run; do something else instead of repeating it.
"""

from loopguard import ApproveTool, Guard, ToolCallRefused, tool
from loopguard_example import AllowedHosts, up_to


@tool
def fetch(url: str) -> str:
    return f"<the page at {url}>"  # imagine a request here


@tool(approve=True)
def issue_refund(order: str, amount: int) -> str:
    return f"refunded {amount} for {order}"


policy = Guard(AllowedHosts("docs.python.org"), ApproveTool(up_to(100), only="issue_*"))

with policy.scope("support"):
    for call in (
        lambda: fetch("https://docs.python.org/3/"),
        lambda: fetch("https://example.net/"),
        lambda: issue_refund("A-1", 20),
        lambda: issue_refund("A-1", 5000),
    ):
        try:
            print(call())
        except ToolCallRefused as refusal:
            print(refusal)
