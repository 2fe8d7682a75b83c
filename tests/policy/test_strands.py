"""Rollouts of several strands against a forward pass of each strand by itself, in float64."""

import os
import random
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.algorithms import grpo
from covey.core.batch import collate, join
from covey.core.engine import SamplingParams
from covey.core.losses import BatchCounts, token_weights
from covey.core.objective import policy_loss
from covey.core.packing import computed_tokens
from covey.core.records import FinishReason, PromptSample, Rollout
from covey.core.strands import even_shares, longest, unfolded
from covey.engines.native.engine import NativeEngine
from covey.policy.layouts import LAYOUTS
from covey.policy.scoring import TokenScorer
from covey.rollout.agents.session import AgentSession, ChatRequest, join_strands
from covey.rollout.collector import Collector
from covey.rollout.prompts import PromptCodec
from covey.rollout.runner import RolloutSpec
from covey.rollout.tools.turn_template import TurnTemplates
from covey.rollout.user_functions import RolloutFunction, RolloutValidator
from covey.trainer.distributed.exchange import RolloutIndex, join_indexes
from covey.trainer.microbatches import micro_batch_tokens
from tests.support import runs, tiny
from tests.support.exact import KeepFloat64
from tests.support.playing import TOKENIZER

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


def mean_of_means(terms, parts, normalize_over):
    """Mean over the strands or turns of a rollout, or over itself alone, of the mean over their tokens."""
    runs = []
    for one, own in parts:
        mask = one.sampled[own - len(one.prompt_ids) :]
        turns = [len(list(run)) for by_policy, run in groupby(mask) if by_policy]
        runs += {"rollout": [], "strand": [sum(turns)], "turn": turns}[normalize_over]
    return torch.stack([run.mean() for run in terms.split(runs or len(terms))]).mean()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("loss_type", "normalize_over"), [("grpo", "rollout"), ("grpo", "strand"), ("grpo", "turn"), ("dapo", "rollout")]
)
def test_loss_and_gradient_are_those_of_each_strand_alone(layout, loss_type, normalize_over):
    """The literal formula: grpo is the mean over rollouts of the mean over their tokens, dapo the mean over tokens."""
    policy, scorer = model(), TokenScorer(lambda model: model, temperature=0.8, layout=layout)
    advantages = torch.tensor([0.7, -1.3, 0.4, 0.9], dtype=torch.float64)
    batch = collate([joined(parts) for parts in AGENTS])
    batch.advantages = torch.repeat_interleave(advantages, batch.lengths)
    config = runs.config("unused", "grpo", loss_type=loss_type, num_generations=4, per_device_train_batch_size=4)
    algorithm = grpo.algorithm(config)
    tokens = batch.sampled_lengths.float()
    counts = BatchCounts(tokens, micro_batch_tokens(tokens, 4), 4, int(batch.sampled.sum()), 1, 6)
    batch.weights = token_weights(algorithm.weighting, counts, batch.sampled, batch.lengths)
    parameters = list(policy.parameters())
    if normalize_over != "rollout":
        batch.weights = batch.weights * even_shares(batch, turns=normalize_over == "turn")
    with KeepFloat64():
        slow = [slow_logprobs(policy, parts) for parts in AGENTS]
        with torch.no_grad():
            batch.old_logprobs = torch.zeros(batch.num_tokens, dtype=torch.float64)
            batch.old_logprobs[batch.sampled] = torch.cat(slow).detach() + 0.05
        scores = scorer(policy, batch)
        loss = policy_loss(batch, *scores[:2], algorithm.objective, 0.0).loss
        ratios = [(one - (one.detach() + 0.05)).exp() for one in slow]
        terms = [
            -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) for ratio, a in zip(ratios, advantages, strict=True)
        ]
        means = [mean_of_means(one, parts, normalize_over) for one, parts in zip(terms, AGENTS, strict=True)]
        expected = torch.stack(means).mean() if loss_type == "grpo" else torch.cat(terms).mean()
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


def test_micro_batches_are_normalised_as_the_config_says(tmp_path):
    """BRANCHING has strands of 2, 2, 2 and 1 tokens; the first of them has two turns."""
    found = {}
    for normalize_over in ("rollout", "strand", "turn"):
        batch = collate([joined(BRANCHING)])
        batch.weights = torch.where(batch.sampled, 1 / 7, 0.0)
        runner = runs.trainer(tmp_path, normalize_over=normalize_over).updates.runner
        (planned,) = runner.plan(batch, rows=4)
        found[normalize_over] = planned.weights[planned.sampled].tolist()
    assert found["rollout"] == pytest.approx([1 / 7] * 7)
    assert found["strand"] == pytest.approx([1 / 8] * 6 + [1 / 4])
    assert found["turn"] == pytest.approx([1 / 5] * 2 + [1 / 10] * 4 + [1 / 5])


def test_what_strands_have_in_common_is_computed_once():
    """BRANCHING has 5 + 5 tokens, and 2 + 2 more that its later strands do not share."""
    rows, owners, _ = unfolded(collate([joined(BRANCHING)]))
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


@settings(max_examples=int(os.environ.get("COVEY_CONVERSATIONS", "150")), deadline=None)
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


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(conversations(), min_size=1, max_size=4))
def test_the_tokens_of_a_micro_batch_are_those_that_it_computes(programs):
    """Counted in the inputs of the model; the index of rollouts knows the same, also with those of another process."""
    batch = collate([joined(parts) for parts in programs])
    batch.advantages = torch.ones(batch.num_tokens)
    other = collate([joined(PLAIN)])
    other.advantages = torch.ones(other.num_tokens)
    index = join_indexes([RolloutIndex.of(other, 1), RolloutIndex.of(batch)])
    for layout in ("packed", "padded"):
        for rows in (range(len(batch)), [len(batch) - 1]):
            chosen = batch.select(torch.tensor(list(rows)))
            shown = chosen if chosen.jumps is None else unfolded(chosen)[0]
            computed = LAYOUTS[layout](shown, 0).kwargs["input_ids"].numel()
            assert computed_tokens(batch, rows, layout) == computed
            assert computed_tokens(index, [row + 1 for row in rows], layout) == computed
        assert computed_tokens(index, [0], layout) == 4


def test_prompts_that_strands_shorten_are_counted():
    """Shared, 12 + 2 tokens, and 10 of the prompt again for two strands of 2 + 1 tokens; a fourth continues there."""
    prompt = list(range(10, 22))
    parts = [(part(prompt, [30, 31]), 12), *((part([*prompt[:10], 40 + i], [50, 51]), 11) for i in range(2))]
    parts.append((part([*prompt[:10], 40], [50, 51], (52,), [53]), 13))
    batch = collate([joined(parts)])
    inputs = LAYOUTS["shared_prefix"](unfolded(batch)[0], 0)
    computed = 12 + 2 + 10 + 3 + 3 + 2
    assert computed_tokens(batch, [0], "shared_prefix") == computed
    assert computed <= inputs.kwargs["input_ids"].numel() <= computed + 3  # branches of few tokens are not shared


@pytest.mark.slow
def test_engine_and_trainer_agree_on_every_strand():
    """A program that asks for two choices, continues with one, cuts its history and begins another conversation."""
    policy = tiny.model(scale=3.0, max_position_embeddings=512)

    async def agent(row, engine):
        session = AgentSession(engine)

        async def ask(*messages, n=1):
            texts = [
                message if isinstance(message, dict) else {"role": "user", "content": message} for message in messages
            ]
            return [one.message for one in await session.answer(ChatRequest(texts, [], n=n, max_tokens=9))]

        (first,) = await ask("go")
        _, second = await ask("go", first, "on", n=2)
        await ask("go", first, "on", second, "more")
        await ask("go", {**first, "content": first["content"][:2]}, "on")
        await ask("sum: " + first["content"][:3])
        return session.rollout()

    engine = NativeEngine(lambda: policy, eos_token_ids={TOKENIZER.eos_token_id}, pad_token_id=0)
    codec = PromptCodec(TOKENIZER, None, 512)
    play = RolloutFunction(agent, 60, RolloutValidator(len(TOKENIZER), 512))
    collector = Collector(engine, codec, 0, RolloutSpec(play, TurnTemplates(codec, [TOKENIZER.eos_token_id]), 60))
    samples = [PromptSample({"prompt": None}, 0, index) for index in range(3)]
    rollouts = collector.collect(samples, SamplingParams(max_tokens=300), ("test", 0))
    assert [one.error for one in rollouts] == [None] * 3 and all(len(one.strands) >= 3 for one in rollouts)
    batch = collate(rollouts)
    assert batch.engine_logprobs is not None
    for layout in LAYOUTS:
        with torch.no_grad():
            scored = TokenScorer(lambda model: model, temperature=1.0, layout=layout)(policy, batch).logprobs
        assert (scored - batch.engine_logprobs)[batch.sampled].abs().max() < 1e-4
