"""Reading text out of whatever a completion is."""

import pytest

from covey.rewards import completion_text
from covey.rewards.text import describe_sample


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "one"}], "one"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "ab"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
        ([{"role": "assistant", "content": "call"}, {"role": "tool", "content": "4"}], "call"),
        (
            [
                {"role": "assistant", "content": "call"},
                {"role": "tool", "content": "4"},
                {"role": "assistant", "content": "It is 4"},
            ],
            "It is 4",
        ),
        ([{"role": "tool", "content": "4"}], "4"),
        ([], ""),
    ],
)
def test_completion_text(completion, text):
    assert completion_text(completion) == text


def test_long_samples_are_shown_shortened():
    shown = describe_sample("start " + "x" * 5000 + " end", None)
    assert len(shown) < 400 and "start" in shown and " end" in shown and "…" in shown


def test_a_sample_of_messages_says_how_to_read_it():
    shown = describe_sample("2+2=", [{"role": "assistant", "content": "4"}])
    assert "completion: '4' (a list of messages: covey.rewards.completion_text gives its text)" in shown
    assert "completion_text" not in describe_sample([{"role": "user", "content": "2+2="}], "4")
