"""An agent of the standard library alone, which asks a model, adds, and asks again.

After every answer it throws its history away but for one line, so each request is a conversation of its own; Covey
trains on the tokens of all of them, once.
"""

import asyncio
import json
import re
import urllib.request

from arithmetic import score


async def play(row, base_url, api_key):
    note = "nothing yet"
    for _ in range(2):
        question = row["prompt"][-1]["content"]
        asked = f"{question} You know: {note}. Write two numbers to add, or the answer."
        reply = await asyncio.to_thread(ask, base_url, api_key, [{"role": "user", "content": asked}])
        numbers = [int(number) for number in re.findall(r"\d{1,9}", reply)]
        note = f"the sum is {sum(numbers)}"
    return score(numbers[-1] if numbers else "", row)


def ask(base_url, api_key, messages):
    """The text of the model's reply."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=json.dumps({"model": "any", "messages": messages, "max_tokens": 24}).encode(),
        headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
