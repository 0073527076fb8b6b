"""A loop: what the function returns is its next argument, until it is good enough, or ten times at most.

Prints:

    refining until quality >= 90
      pass 1 → quality 30
      pass 2 → quality 60
      pass 3 → quality 90
    done: {"text": "draft refined (quality 90)", "quality": 90}
"""

import json

from loopguard import loop


def show(draft: dict, number: int) -> None:
    print(f"  pass {number} → quality {draft['quality']}")


@loop(max=10, until=lambda draft: draft["quality"] >= 90, on_iteration=show)
def refine(draft: dict) -> dict:
    quality = draft["quality"] + 30
    return {"text": f"draft refined (quality {quality})", "quality": quality}


print("refining until quality >= 90")
print("done:", json.dumps(refine({"text": "draft", "quality": 0})))
