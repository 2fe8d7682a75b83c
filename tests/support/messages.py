"""Messages of conversations with tools."""


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content, *calls):
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def result(content, name="search"):
    return {"role": "tool", "name": name, "content": content}


def rounds(number):
    """A conversation with `number` searches, the second of which fails, and an answer."""
    messages = []
    for i in range(number):
        answer = "Error: KeyError: 'x'" if i == 1 else f"page {i} " + "words " * 50
        messages += [assistant(f"Search {i}.", call("search", query=f"q{i}")), result(answer)]
    return [*messages, assistant("So it is 42.")]
