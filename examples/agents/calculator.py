"""An agent of the standard library alone, which knows nothing of Covey: it asks a model, adds, and asks again.

It reads a task from standard input and talks to OPENAI_BASE_URL. After every answer it throws its history away but for
one line, so each request is a conversation of its own; Covey trains on the tokens of all of them, once.
"""

import json
import os
import re
import sys
import urllib.request


def ask(messages):
    """The text of the model's reply."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": "any", "messages": messages, "max_tokens": 24}).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def main():
    task = json.load(sys.stdin)
    note = "nothing yet"
    for _ in range(2):
        asked = f"{task['question']} You know: {note}. Write two numbers to add, or the answer."
        reply = ask([{"role": "user", "content": asked}])
        numbers = [int(number) for number in re.findall(r"\d{1,9}", reply)]
        note = f"the sum is {sum(numbers)}"
    with open(os.environ["COVEY_REWARD"], "w") as file:
        file.write(str(float(task["answer"] in numbers)))


if __name__ == "__main__":
    main()
