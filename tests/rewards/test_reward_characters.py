"""Ends in characters become tokens exactly, whatever the tokenizer and however characters lie across tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from covey.core.special_tokens import CompletionDecoder
from covey.rewards.steps import CharacterEnds
from tests.support import tiny

TEXTS = ["naïve café", "日本語 text", "👍🏽 ok", "e\u0301a", "a  b\n\nc", "x = 1, y = 2", "...", " lead"]


def byte_level():
    """GPT-2's kind: every byte a token, and merges learned from a few texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<pad>", "<eos>"]
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def byte_fallback():
    """Llama 2's kind: characters, and bytes for those that are not there; a blank before the text is taken away."""
    names = [
        "<pad>",
        "<eos>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz=1é",
    ]
    made = Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def word_pieces():
    """BERT's kind: words with blanks between them that belong to no token, pieces that continue them."""
    names = ["<pad>", "<eos>", "<unk>", "nai", "##ve", "##fé", "ca", "x", "=", "1", ",", ".", "日", "##本"]
    made = Tokenizer(models.WordPiece({name: id for id, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


TOKENIZERS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(),
    "word pieces": word_pieces(),
    "characters": tiny.tokenizer(),
}
each_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)


def first_complete(tokenizer, ids, text, characters):
    """Token by token: the first with which the decoded text begins with these characters."""
    begun = [tokenizer.decode(ids[: t + 1], skip_special_tokens=True)[:characters] for t in range(len(ids))]
    return begun.index(text[:characters])


@each_tokenizer
@given(data=st.data())
def test_a_character_ends_with_the_token_that_completes_it(kind, data):
    """Random tokens: bytes of a character may lie in several of them, some are none, special tokens are skipped."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=12))
    if data.draw(st.booleans()):
        ids += tokenizer(data.draw(st.sampled_from(TEXTS)))["input_ids"]
    ends = CharacterEnds(CompletionDecoder(tokenizer), ids)
    assert ends.text == tokenizer.decode(ids, skip_special_tokens=True)
    whole = [n for n in range(1, len(ends.text) + 1) if "�" not in ends.text[:n]]  # malformed bytes: see below
    assert [ends.token(n) for n in whole] == [first_complete(tokenizer, ids, ends.text, n) for n in whole]
    found = [ends.token(n) for n in range(1, len(ends.text) + 1)]
    assert found == sorted(found)


def test_text_that_streams_is_not_decoded_again(monkeypatch):
    tokenizer = TOKENIZERS["byte level"]
    ends = CharacterEnds(CompletionDecoder(tokenizer), tokenizer("naïve café")["input_ids"])  # "naïve", " café"
    monkeypatch.setattr(ends, "_decode", None)
    assert [ends.token(n) for n in (1, 5, 6, 10)] == [0, 0, 1, 1]


def test_a_character_of_four_tokens_ends_with_the_last_of_them():
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [
        tokenizer.convert_tokens_to_ids(name) for name in ("a", "<0xF0>", "<0x9F>", "<0x91>", "<0x8D>", "b", "<eos>")
    ]
    ends = CharacterEnds(CompletionDecoder(tokenizer), ids)
    assert ends.text == "a👍b"
    assert [ends.token(n) for n in (1, 2, 3)] == [0, 4, 5]


def test_characters_before_half_of_another_are_complete():
    """This kind of tokenizer decodes a row of bytes as text or not at all: 00 C2 is none, 00 C2 80 is."""
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [tokenizer.convert_tokens_to_ids(name) for name in ("<0x00>", "<0xC2>", "<0x80>", "a", "<0xFF>", "<0x41>")]
    ends = CharacterEnds(CompletionDecoder(tokenizer), ids)
    assert ends.text == "\x00\x80a��"
    assert [ends.token(n) for n in (1, 2, 3, 4, 5)] == [0, 2, 3, 4, 5]


def test_bytes_that_are_no_character_end_where_they_end():
    """E3 81 begin a character that x breaks off: one replacement character, which ends with the second byte."""
    tokenizer = TOKENIZERS["byte level"]
    ids = [tokenizer.convert_tokens_to_ids(name) for name in ("ã", "ģ", "x", "ÿ")]  # GPT-2's names of these bytes
    ends = CharacterEnds(CompletionDecoder(tokenizer), ids)
    assert ends.text == "�x�"
    assert [ends.token(n) for n in (1, 2, 3)] == [1, 2, 3]
