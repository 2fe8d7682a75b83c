"""Conversations as text: everything that happened is there."""

import doctest
import json

import pytest

from covey.core import transcript
from covey.core.transcript import Counts, as_text, count, to_json
from tests.support.messages import assistant, call, result, rounds


def test_examples():
    assert doctest.testmod(transcript).failed == 0


def test_calls_results_and_errors_stand_in_their_order():
    messages = [
        assistant("Two things.", call("add", a=1, b=[2.5, None]), call("find", text='say "hi"')),
        result("3.5", "add"),
        result("Error: there is no tool 'find'", "find"),
        {"role": "user", "content": "Go on."},
        assistant("Done."),
    ]
    assert as_text(messages).split("\n") == [
        "assistant: Two things.",
        "  → add(a=1, b=[2.5, null])",
        '  → find(text="say \\"hi\\"")',
        "  ← add: 3.5",
        "  ✗ find: Error: there is no tool 'find'",
        "user: Go on.",
        "assistant: Done.",
    ]


def test_lines_of_a_result_stay_below_it():
    assert as_text([assistant("", call("ls")), result("a\nb", "ls")]) == "assistant:\n  → ls()\n  ← ls: a\n    b"


def test_images_are_named():
    seen = [{"type": "image", "image": object()}, {"type": "text", "text": "a cat"}]
    assert as_text([assistant("Look."), result(seen, "camera")]) == "assistant: Look.\n  ← camera: <image>a cat"


@pytest.mark.parametrize(
    ("one", "shown"),
    [
        ({"name": "f", "arguments": {"a": 1}}, "f(a=1)"),
        ({"function": {"name": "f", "arguments": '{"a": 1}'}}, "f(a=1)"),
        ({"function": {"name": "f", "arguments": "{broken"}}, "f({broken)"),
        ({"function": {"name": "f", "arguments": [1]}}, "f([1])"),
        ({"function": {"name": "f"}}, "f()"),
        ("gibberish", '"gibberish"'),
    ],
)
def test_a_call_of_any_shape_is_shown(one, shown):
    assert as_text([assistant("", one)]) == f"assistant:\n  → {shown}"


def test_turns_calls_and_failures_are_counted():
    # Two turns call, one of them twice; the last call's turn ran out of budget, so it has no answer.
    messages = [
        assistant("", call("a"), call("b")),
        result("1"),
        result("Error: 2"),
        assistant("", call("c")),
    ]
    assert count(messages) == Counts(turns=2, calls=3, failed_calls=1)
    # What could not be read is no call of the message, and has an answer.
    assert count([assistant("", call("a")), result("1"), result("Error: no JSON"), assistant("4")]) == Counts(2, 2, 1)
    assert count("4") == count([assistant("4")]) == Counts(1, 0, 0)


def test_what_is_no_call_is_no_failure():
    assert count([assistant("Error: I cannot."), {"role": "user", "content": "Error: try again"}]).failed_calls == 0


def test_messages_as_json_are_those_that_were_given():
    messages = rounds(2)
    assert json.loads(to_json(messages)) == messages


def test_images_and_keys_that_are_no_text_do_not_stop_json():
    class Image:
        size = (640, 480)

    [message] = json.loads(to_json([result([{"type": "image", "image": Image()}])]))
    assert message["content"] == [{"type": "image", "image": {"type": "Image", "size": [640, 480]}}]
    assert json.loads(to_json([{"role": "tool", "content": "4", ("a", "b"): 1}])) == [{"role": "tool", "content": "4"}]
