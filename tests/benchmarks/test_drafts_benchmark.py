"""Drafts for the last sequences, on texts short enough to check by eye."""

import pytest

from covey.core.engine import SampleRequest, SamplingParams
from covey.engines.native.engine import NativeEngine

drafts = pytest.importorskip("benchmarks.drafts")


def group(prompt, *completions, decoded=0):
    made = drafts.Group(list(prompt), [list(tokens) for tokens in completions])
    for sequence in made.sequences:
        sequence.decode(decoded, drafts.Rates())
    return made


def test_a_draft_follows_the_longest_match():
    # "2" continued with 9 most recently, but "1 2" with 3
    (sequence,) = group([5], [1, 2, 3, 7, 2, 9, 1, 2, 3, 7, 8], decoded=8).sequences
    match = sequence.match()
    assert (match.text[match.after], match.length) == (3, 2)
    assert sequence.holds() == 2  # 3 7, and then 2 where the completion has 8
    assert sequence.holds(most=1) == 1


@pytest.mark.parametrize(("prompt", "first"), [([4, 5, 6], [5, 7]), ([5, 7, 6], [8, 8])])
def test_matches_in_the_prompt_and_in_the_group_count(prompt, first):
    made = group(prompt, first, [5, 7], decoded=1)
    made.sequences[0].decode(1, drafts.Rates())
    assert made.sequences[1].holds() == 1  # 7 followed 5 in the other completion, or in the prompt


def test_tokens_of_others_that_are_not_decoded_yet_are_unknown():
    made = group([4], [5, 7], [5, 7], decoded=1)
    assert [sequence.holds() for sequence in made.sequences] == [0, 0]


def test_acceptance_is_counted_by_sequences_left():
    # step 1: two left, nothing known. Steps 2 to 4: one left, after 1; 1 1; 1 1 1: drafts of nothing, 1 and 1 1.
    found = drafts.acceptance([group([9], [1, 1, 1, 1], [2])])
    assert (found[2].tokens, found[2].matched, found[2].held[1]) == (2, 0, 0)
    assert (found[1].tokens, found[1].matched, found[1].held[1]) == (3, 2, 2)


def test_a_draft_goes_on_into_itself():
    (sequence,) = group([9], [1, 2, 1, 2, 1, 2, 1, 2, 1, 3], decoded=4).sequences
    assert sequence.draft() == [1, 2, 1, 2, 1, 2, 1, 2]
    assert sequence.holds() == 5


@pytest.mark.parametrize(("price", "length"), [(0.0, 8), (2.0, 0)])
def test_drafts_are_as_long_as_pays(price, length):
    (sequence,) = group([9], [1] * 40, decoded=30).sequences
    rates = drafts.Rates()
    rates.tries, rates.hits = [10.0] * 9, [9.0] * 9  # nine of ten right
    assert rates.best_length([sequence], lambda size, count: 1 + price * (count - 1)) == length


def test_free_drafts_bound_the_passes_of_a_tail():
    batch = [9], [[1, 2, 3] * 8, [7, 4, 6, 8]]

    def passes(kind):
        return len(list(drafts.decode_tail([drafts.Group(*batch)], 1, lambda size, count: 1 + 0.1 * count, kind)))

    assert passes("plain") == 20  # 24 tokens, 4 of them sampled before one sequence is left
    assert passes("free") == 3  # 8 drafted tokens and one more: 9, 9, 2
    assert passes("free") <= passes("drafts") < 20


@pytest.mark.slow
def test_the_engine_draws_its_own_completions_again(tiny_model):
    engine = NativeEngine(lambda: tiny_model, eos_token_ids={1, 40, 41}, pad_token_id=0)
    params = SamplingParams(max_tokens=12)
    requests = [SampleRequest([5, 6, 7, start], 3, params, [1, 2, 3 + start]) for start in (8, 9)]
    completions = drafts.sample(engine, requests)
    assert drafts.verified(engine, requests, completions) == 6
    assert drafts.verified(engine, requests, completions[::-1]) < 6  # it counts those that are equal
    seconds = drafts.pass_times(engine, tiny_model, [5, 6, 7, 8], rounds=1)
    assert min(seconds.values()) > 0
    assert len(drafts.cost_table(seconds).splitlines()) == 2 + len(drafts.LEFT)


def test_costs_between_the_measured_ones_are_interpolated():
    seconds = {(size, count): float(size * count) for size in drafts.LEFT for count in (1, 2, 3, 5, 9)}
    assert drafts.interpolated(seconds, 3, 4) == 12.0


def test_the_report_of_two_completions():
    lines = drafts.report([([9], [[1, 1, 1, 1], [2]])], lambda size, count: 1.0).splitlines()
    # One left: after 1 nothing is known, after 1 1 both tokens hold that are left, after 1 1 1 the last one.
    assert lines[3:5] == [
        "| to 1 | 3 | 0.67 | 0.67 | 1.00 | 1.00 | 1.00 |",
        "| to 2 | 2 | 0.00 | 0.00 | 0.00 | 0.00 | 0.00 |",
    ]
    # No match was right before it is needed, so nothing is drafted. Free drafts: two tokens singly, then two at once.
    assert lines[-1] == "| 16 | 4 | 4.0 | 4, 0 | 1.00 | 3 | 1.33 |"
