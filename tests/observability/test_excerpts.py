"""Excerpts of conversations: the most informative entries, in order, within a width."""

from hypothesis import given
from hypothesis import strategies as st

from covey.core.transcript import Entry, Kind, entries
from covey.observability.excerpts import excerpt
from covey.runtime.safe_text import shorten
from tests.support.messages import assistant, call, result, rounds


def test_an_excerpt_keeps_first_call_first_error_and_answer():
    texts = [entry.text for entry in excerpt(entries(rounds(12)), 500)]
    assert '  → search(query="q0")' in texts
    assert "  ✗ search: Error: KeyError: 'x'" in texts
    assert texts[-1] == "assistant: So it is 42."
    assert any("more" in text for text in texts) and len("\n".join(texts)) <= 500


def test_a_short_conversation_is_shown_whole():
    conversation = entries([assistant("", call("add", a=1)), result("2"), assistant("2")])
    assert excerpt(conversation, 600) == conversation


def test_one_long_entry_does_not_push_out_the_others():
    messages = [assistant("Thinking " * 200, call("add", a=1)), result("2"), assistant("It is 2.")]
    shown = excerpt(entries(messages), 300)
    assert [entry.text for entry in shown[1:]] == ["  → add(a=1)", "  ← search: 2", "assistant: It is 2."]
    assert shown[0].text.startswith("assistant: Think") and "…" in shown[0].text
    assert 280 <= len("\n".join(entry.text for entry in shown)) <= 300


ENTRIES = st.lists(st.builds(Entry, st.sampled_from(list(Kind)[:4]), st.text("ab", max_size=300).map("x: ".__add__)))


@given(ENTRIES, st.integers(1, 800))
def test_an_excerpt_is_in_order_and_within_its_width(conversation, width):
    shown = excerpt(conversation, width)
    gaps = [int(entry.text.split()[1]) for entry in shown if entry.kind is Kind.GAP]
    assert len(shown) - len(gaps) + sum(gaps) == len(conversation)  # what is left out is counted
    place = 0
    for entry in shown:
        if entry.kind is Kind.GAP:
            place += int(entry.text.split()[1])
        else:
            whole = conversation[place].text
            assert entry.kind is conversation[place].kind and entry.text == shorten(whole, len(entry.text))
            place += 1
    if width >= 100:
        assert sum(len(entry.text) + 1 for entry in shown) - 1 <= width
