"""Rollouts of several strands against a forward pass of each strand by itself, in float64."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.algorithms import grpo
from covey.core.batch import collate, join
from covey.core.objective import policy_loss
from covey.core.records import FinishReason, Rollout
from covey.core.strands import longest, unfolded
from covey.policy.layouts import LAYOUTS
from covey.policy.scoring import TokenScorer
from covey.rollout.agents.session import join_strands
from covey.trainer.microbatches import weigh
from tests.support import runs, tiny
from tests.support.exact import KeepFloat64

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}


def part(prompt, *turns):
    """A conversation: what the policy sampled, and, in tuples, what was written between."""
    ids = [token for turn in turns for token in turn]
    sampled = [isinstance(turn, list) for turn in turns for _ in turn]
    ends = [sum(len(one) for one in turns[: i + 1]) - 1 for i, turn in enumerate(turns) if isinstance(turn, list)]
    return Rollout(list(prompt), ids, sampled, [-0.5] * len(ids), "", FinishReason.STOP, turn_ends=ends)


# Thinking (30 ...) is dropped from earlier turns: every turn is a strand of its own.
DROPPING = [
    (part([10, 11], [30, 31, 12]), 2),
    (part([10, 11, 12, 13], [32, 14]), 4),
    (part([10, 11, 12, 13, 14, 15], [33, 34, 16]), 6),
]
# Two turns, then a summary of them in the place of the conversation, and two turns after that.
COMPACTING = [(part([20, 21], [22, 23], (24,), [25, 26]), 2), (part([20, 50, 51], [27], (28, 29), [22]), 3)]
# A sub-agent with a prompt that has nothing in common, and a turn that is continued in two ways.
BRANCHING = [
    (part([40, 41], [42], (43,), [44]), 2),
    (part([60, 61, 62], [63, 64]), 3),
    (part([40, 41], [42], (43, 45), [44, 46]), 3),
    (part([60, 61, 62], [63, 64], (65,), [66]), 5),
]
PLAIN = [(part([10, 11], [70, 71]), 2)]
AGENTS = [DROPPING, COMPACTING, BRANCHING, PLAIN]


def joined(parts):
    return join_strands(parts)[0]


def model():
    return tiny.model(scale=8.0, **SIZES).double()


def own_tokens(parts):
    """(context, token) of each token that a part sampled itself, in the order of the rollout."""
    for one, own in parts:
        tokens = [*one.prompt_ids, *one.completion_ids]
        first = len(one.prompt_ids)
        for index, sampled in enumerate(one.sampled):
            if sampled and first + index >= own:
                yield tokens[: first + index], tokens[first + index]


def slow_logprobs(policy, parts):
    """One forward pass for each sampled token, of nothing but the tokens before it."""
    found = []
    for context, token in own_tokens(parts):
        logits = policy(input_ids=torch.tensor([context])).logits[0, -1] / 0.8
        found.append(logits.log_softmax(-1)[token])
    return torch.stack(found)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_loss_and_gradient_are_those_of_each_strand_alone(layout, loss_type):
    """The literal formula: grpo is the mean over rollouts of the mean over their tokens, dapo the mean over tokens."""
    policy, scorer = model(), TokenScorer(lambda model: model, temperature=0.8, layout=layout)
    advantages = torch.tensor([0.7, -1.3, 0.4, 0.9], dtype=torch.float64)
    batch = collate([joined(parts) for parts in AGENTS])
    batch.advantages = torch.repeat_interleave(advantages, batch.lengths)
    config = runs.config("unused", "grpo", loss_type=loss_type, num_generations=4, per_device_train_batch_size=4)
    algorithm = grpo.algorithm(config)
    weigh(
        batch,
        algorithm.weighting,
        rows_per_part=4,
        total_rows=4,
        total_tokens=int(batch.sampled.sum()),
        total_parts=1,
        updates=1.0,
        max_completion_length=6,
        entropy_bonus=False,
    )
    parameters = list(policy.parameters())
    with KeepFloat64():
        slow = [slow_logprobs(policy, parts) for parts in AGENTS]
        with torch.no_grad():
            batch.old_logprobs = torch.zeros(batch.num_tokens, dtype=torch.float64)
            batch.old_logprobs[batch.sampled] = torch.cat(slow).detach() + 0.05
        scores = scorer(policy, batch)
        loss = policy_loss(batch, *scores, algorithm.objective, 0.0).loss
        ratios = [(one - (one.detach() + 0.05)).exp() for one in slow]
        terms = [
            -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) for ratio, a in zip(ratios, advantages, strict=True)
        ]
        expected = torch.stack([one.mean() for one in terms]).mean() if loss_type == "grpo" else torch.cat(terms).mean()
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        wanted = torch.autograd.grad(expected, parameters)
    assert batch.weights is not None
    torch.testing.assert_close(scores.logprobs[batch.sampled], torch.cat(slow), rtol=0, atol=1e-9)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-7)  # weights are float32
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    if loss_type == "grpo":  # each rollout weighs as much as any other, whatever its number of strands
        weights = [part.sum().item() for part in batch.weights.split(batch.lengths.tolist())]
        assert weights == pytest.approx([0.25] * 4)


def test_what_strands_have_in_common_is_computed_once():
    """BRANCHING has 5 + 5 tokens, and 2 + 2 more that its later strands do not share."""
    rows, owners = unfolded(collate([joined(BRANCHING)]))
    inputs = LAYOUTS["shared_prefix"](rows, 0)
    assert owners.tolist() == [0, 0, 0, 0]
    once = len(BRANCHING[0][0].prompt_ids) + len(joined(BRANCHING).completion_ids)
    repeated = sum(len(one.prompt_ids) + len(one.completion_ids) for one, _ in BRANCHING)
    assert once <= inputs.kwargs["input_ids"].shape[1] < repeated


def test_strands_survive_selection_joining_and_storing():
    batch = collate([joined(parts) for parts in AGENTS])
    again = join([batch.select(torch.tensor([2, 0])), batch.select(torch.tensor([1, 3]))])
    again = type(batch).of_state(again.state())
    order = [2, 0, 1, 3]
    for index, rollout in enumerate(order):
        ours, theirs = (unfolded(b.select(torch.tensor([i])))[0] for b, i in ((again, index), (batch, rollout)))
        assert [one.tolist() for one in ours.completions()] == [one.tolist() for one in theirs.completions()]
        assert [one.tolist() for one in ours.prompts()] == [one.tolist() for one in theirs.prompts()]


@st.composite
def conversations(draw):
    """Parts of a random program: each continues, forks or rewrites an earlier one; few tokens, so that many agree."""
    rng = random.Random(draw(st.integers(0, 2**32)))

    def words(least):
        return [rng.randrange(3) for _ in range(rng.randrange(least, 4))]

    made: list = []
    for _ in range(rng.randrange(1, 6)):
        if made and rng.random() < 0.5:
            prompt, turns, _ = rng.choice(made)
            kept = [i + 1 for i, turn in enumerate(turns) if isinstance(turn, list)]
            turns = turns[: rng.choice(kept)]
            own = len(prompt) + sum(map(len, turns))
        else:
            prompt, turns = words(1), []
            own = len(prompt)
        for _ in range(rng.randrange(1, 3)):
            turns = [*turns, *([tuple(words(0))] if turns else []), words(1)]
        made.append((prompt, turns, own))
    return [(part(prompt, *turns), own) for prompt, turns, own in made]


@settings(max_examples=150, deadline=None)
@given(conversations())
def test_every_sampled_token_comes_once_after_its_own_context(parts):
    """The strands' rows hold every (context, token) that was sampled, and no more."""
    rollout, ends = join_strands(parts)
    expected = list(own_tokens(parts))
    assert sum(rollout.sampled) == len(expected)
    batch = collate([rollout])
    rows = batch if batch.jumps is None else unfolded(batch)[0]
    found, begin = [], 0
    for group, row in zip(rows.groups.tolist(), rows.completions(), strict=True):
        context = rows.prompts()[group].tolist()
        for index, token in enumerate(row.tolist()):
            if rows.sampled[begin + index]:
                found.append(([*context, *row.tolist()[:index]], token))
        begin += len(row)
    assert found == expected
    assert all(rollout.sampled[end] for end in ends.values())
    size = max(len(one.prompt_ids) + len(one.completion_ids) for one, _ in parts)
    assert longest(len(rollout.prompt_ids), len(rollout.completion_ids), rollout.strands) == size
