"""Special tokens around and in texts: once in front, shown where they are marks, thinking found where it is opened."""

import warnings

import pytest

from covey.core.special_tokens import CompletionDecoder, opened_thinking
from tests.support import tiny

MARKS = ["<think>", "</think>", "<answer>", "</answer>", "<|mark|>", "<|start|>"]


@pytest.fixture(scope="module")
def marked():
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    return tokenizer


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_paired_marks_are_shown_and_other_special_tokens_left_out(marked):
    ids = [*ids_of(marked, "<think>2+2</think><|mark|><answer>4</answer>"), marked.eos_token_id]
    assert CompletionDecoder(marked)(ids) == "<think>2+2</think><answer>4</answer>"
    assert CompletionDecoder(marked, {"<|mark|>"})(ids) == "<think>2+2</think><|mark|><answer>4</answer>"


def test_without_marks_decoding_is_the_tokenizers():
    tokenizer = tiny.tokenizer()
    ids = [*ids_of(tokenizer, "2+2=4"), tokenizer.eos_token_id]
    assert not CompletionDecoder(tokenizer).shown
    assert CompletionDecoder(tokenizer)(ids) == tokenizer.decode(ids, skip_special_tokens=True) == "2+2=4"


@pytest.mark.parametrize("text, opening", [("a<think>\n", "<think>\n"), ("a<think>b", ""), ("<think>a</think>", "")])
def test_thinking_is_open_where_the_tokens_before_a_turn_end_with_its_mark(text, opening, marked):
    assert opened_thinking(marked, ids_of(marked, text)) == opening
    assert opened_thinking(tiny.tokenizer(), []) == ""


def test_a_token_that_the_tokenizer_lacks_is_named_once():
    text_of = CompletionDecoder(tiny.tokenizer())
    size = len(text_of.tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert text_of([size - 1]) and text_of([]) == ""
    with pytest.warns(UserWarning, match=rf"sampled token {size + 3}\b") as caught:
        assert text_of([5, size + 3, 6]) == text_of([5, 6]) == text_of([5, size + 4, 6])
    assert len(caught) == 1
