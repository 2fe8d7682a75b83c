"""The least work of a step, by hand."""

import pytest
from benchmarks.flops import (
    ModelSize,
    forward_flops,
    least_seconds,
    minimum_flops,
    needed_positions,
    positions,
    size_of,
)

TOY = ModelSize(body=100, head=10, layers=2, width=3)


def test_size_is_read_from_the_config_of_the_model():
    # attention: 4 * 2 * (2 * 2 + 2 * 1) = 48 for q, o (2 heads of 2) and k, v (1 head of 2); MLP: 3 * 4 * 5 = 60
    config = {
        "hidden_size": 4,
        "intermediate_size": 5,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 7,
    }
    assert size_of(config) == ModelSize(body=3 * 108, head=28, layers=3, width=4)


def test_prompts_count_once_and_last_tokens_never():
    assert positions(5, [3, 1]) == 5 + 2 + 0


def test_forward_flops_by_hand():
    # prompt 2, completions of 3 and 1 tokens: positions 2 + 2 = 4, head at 1 + 2 = 3
    # attention pairs: prompt 1 + 2; the first completion's fed tokens see 2 + 1 and 2 + 2
    assert forward_flops(TOY, 2, [3, 1]) == 2 * 100 * 4 + 2 * 10 * 3 + 4 * 2 * 3 * (3 + 7)


def test_groups_without_signal_are_sampled_but_not_trained():
    one = forward_flops(TOY, 2, [3, 1])
    assert minimum_flops(TOY, 2, [[3, 1], [3, 1]], [True, False]) == {"generate": 2 * one, "train": 3 * one}
    assert needed_positions(2, [[3, 1], [3, 1]], [False, True]) == {"generate": 8, "train": 4}


def test_sharing_a_prompt_saves_all_copies_but_one():
    shared = forward_flops(TOY, 50, [4] * 8)
    apart = 8 * forward_flops(TOY, 50, [4])
    body_of_copies = 7 * 50 * 2 * TOY.body
    assert apart - shared > body_of_copies


def test_decoding_takes_the_peak_or_the_reading_of_weights():
    groups, signals = [[3, 1]], [True]
    computed = least_seconds(TOY, 2, groups, signals, peak=1.0, bandwidth=1e9)
    assert computed == pytest.approx(minimum_flops(TOY, 2, groups, signals))
    # two decode steps read 110 weights of 4 bytes each
    read = least_seconds(TOY, 2, groups, signals, peak=1e12, bandwidth=1.0)
    assert read["generate"] == pytest.approx(2 * 4 * 110)
