"""Scoring: every layout gives the naive log-probs, entropies and gradients."""

import random
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, MistralConfig, Qwen2Config, Qwen3Config

from covey.core.batch import collate
from covey.core.records import FinishReason, Rollout
from covey.policy.scoring import TokenScorer
from tests.support import tiny

VOCABULARY = 104


def rollouts(lengths=((3, [4, 0, 6]), (9, [2, 1]), (1, [5])), seed=0):
    """Groups as (prompt length, completion lengths)."""
    chance = random.Random(seed)

    def ids(n):
        return [chance.randrange(VOCABULARY) for _ in range(n)]

    out = []
    for group, (prompt_length, completions) in enumerate(lengths):
        prompt = ids(prompt_length)
        for length in completions:
            out.append(Rollout(prompt, ids(length), [True] * length, None, "", FinishReason.STOP, group=group))
    return out


def scorer(layout="packed", temperature=1.0, **settings):
    return TokenScorer(lambda m: m, temperature=temperature, layout=layout, **settings)


def naive(model, episodes, temperature):
    """Log-probs and entropies one sequence at a time, straight from the model's logits."""
    logprobs, entropies = [], []
    for episode in episodes:
        logits = model(torch.tensor([episode.prompt_ids + episode.completion_ids])).logits[0] / temperature
        for i, token in enumerate(episode.completion_ids):
            row = logits[len(episode.prompt_ids) - 1 + i].log_softmax(-1)
            logprobs.append(row[token])
            entropies.append(-(row.exp() * row).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def gradients(model, logprobs, entropies):
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs)) + 0.3 * entropies.square()).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("chunk_size", [4, 1024])
def test_scores_and_gradients_equal_the_naive_ones(layout, checkpointing, chunk_size):
    model = tiny.model().double().train()
    episodes = rollouts()
    expected = naive(model, episodes, 0.7)
    expected_gradients = gradients(model, *expected)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    scores = scorer(layout, 0.7, chunk_size=chunk_size)(model, collate(episodes), entropy=True)
    torch.testing.assert_close(scores.logprobs, expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(scores.entropies, expected[1], rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(gradients(model, *scores[:2]), expected_gradients, strict=True):
        # Llama normalises in float32 even so; a shared prompt adds gradients up before that rounding, not after.
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=3e-6)


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
OTHERS = [
    Qwen2Config(**SMALL),
    Qwen3Config(**SMALL),
    GemmaConfig(**SMALL),
    MistralConfig(**SMALL, sliding_window=4),
]


@pytest.mark.parametrize("config", OTHERS, ids=lambda config: config.model_type)
def test_other_decoders_pack_too(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    batch = collate(rollouts())
    expected, _ = naive(model, rollouts(), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        automatic = scorer("auto")
        torch.testing.assert_close(automatic(model, batch).logprobs, expected, rtol=1e-4, atol=1e-4)
    assert automatic.layout == "shared_prefix"
    torch.testing.assert_close(scorer("packed")(model, batch).logprobs, expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_cannot_pack_is_padded_with_a_warning():
    model = tiny.model()
    original = model.model.forward

    def forgets_packing(*args, token_tree=None, **kwargs):
        return original(*args, **kwargs)

    model.model.forward = forgets_packing
    automatic = scorer("auto")
    with pytest.warns(UserWarning, match="LlamaForCausalLM cannot use the packed layouts"):
        scores = automatic(model, collate(rollouts()))
    assert automatic.layout == "padded"
    torch.testing.assert_close(scores.logprobs, naive(model, rollouts(), 1.0)[0], rtol=1e-4, atol=1e-4)


def test_an_attention_the_user_chose_is_left_alone():
    model = tiny.model()
    model.set_attn_implementation("eager")
    automatic = scorer("auto")
    automatic(model, collate(rollouts()))
    assert automatic.layout == "padded"
    assert model.config._attn_implementation == "eager"


def test_an_unknown_head_is_refused():
    class Shifted(type(tiny.model())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 1.5
            return output

    torch.manual_seed(0)
    model = Shifted(tiny.config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    with pytest.raises(ValueError, match="differ by"):
        scorer()(model, collate(rollouts()))


def test_scores_do_not_depend_on_other_rollouts(tiny_model):
    episodes = rollouts()
    together = scorer()(tiny_model, collate(episodes)).logprobs
    alone = torch.cat([scorer()(tiny_model, collate([e])).logprobs for e in episodes if e.completion_ids])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_a_batch_without_completions_still_has_a_graph(tiny_model):
    scores = scorer()(tiny_model, collate(rollouts([(3, [0, 0])])), entropy=True)
    assert scores.logprobs.shape == (0,)
    scores.logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in tiny_model.parameters())


@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
@pytest.mark.parametrize("share", [0.5, 0.0])
def test_unlearned_tokens_are_context_without_scores(tiny_model, layout, share):
    batch = collate(rollouts())
    every = scorer(layout)(tiny_model, batch, entropy=True)
    batch.sampled = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(3)) < share
    some = scorer(layout)(tiny_model, batch, entropy=True)
    for mine, all_of_them in zip(some[:2], every[:2], strict=True):
        torch.testing.assert_close(mine, torch.where(batch.sampled, all_of_them, 0.0))
    (some.logprobs.sum() + some.entropies.sum()).backward()
    assert all((p.grad != 0).any() == batch.sampled.any() for p in tiny_model.parameters())


def test_splitting_changes_nothing(tiny_model):
    batch = collate(rollouts())
    with torch.no_grad():
        whole = scorer()(tiny_model, batch, entropy=True)
        parts = [scorer()(tiny_model, part, entropy=True) for part in batch.split(2)]
    torch.testing.assert_close(torch.cat([p.logprobs for p in parts]), whole.logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([p.entropies for p in parts]), whole.entropies, rtol=1e-4, atol=1e-4)


def test_a_float32_head_is_used_when_asked_for():
    model = tiny.model().bfloat16()
    batch = collate(rollouts())
    exact = scorer(float32_head=True)(model, batch).logprobs
    assert exact.dtype == torch.float32
    assert not torch.equal(exact, scorer()(model, batch).logprobs)


def test_a_shared_prompt_is_computed_once(tiny_model):
    batch = collate(rollouts([(50, [3, 2, 4])]))
    widths = {}
    for layout in ("shared_prefix", "packed", "padded"):
        seen = []
        handle = tiny_model.model.layers[0].register_forward_hook(
            lambda m, args, out, seen=seen: seen.append(args[0].shape)
        )
        scorer(layout)(tiny_model, batch)
        handle.remove()
        widths[layout] = seen[-1][0] * seen[-1][1]
    assert widths == {"shared_prefix": 50 + 9, "packed": 3 * 50 + 9, "padded": 3 * (50 + 4)}


def test_rollouts_of_a_group_need_not_be_adjacent(tiny_model):
    batch = collate(rollouts())
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    mixed = batch.select(order)
    expected = scorer("padded")(tiny_model, mixed).logprobs
    torch.testing.assert_close(scorer("shared_prefix")(tiny_model, mixed).logprobs, expected, rtol=1e-4, atol=1e-4)


def test_one_rollout_alone_is_packed_too(tiny_model):
    automatic = scorer("auto")
    automatic(tiny_model, collate(rollouts([(3, [4])])))
    assert automatic.layout == "shared_prefix"
