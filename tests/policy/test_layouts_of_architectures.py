"""Every layout gives the same log-probs and gradients, in float64, for windows, caps, sinks and experts alike."""

import random
import warnings

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from covey.core.batch import collate
from covey.core.records import FinishReason, Rollout
from covey.policy.loading import keep_soft_caps
from covey.policy.scoring import TokenScorer
from tests.support import hybrids, mixtures
from tests.support.exact import KeepFloat64

VOCABULARY = 97
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
BOTH_KINDS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

PACKABLE = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": HEADS,
    "Qwen3Moe": {**HEADS, **EXPERTS},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 16, "use_sliding_window": True, **BOTH_KINDS},
    "Mistral": {**HEADS, "sliding_window": 5},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "Gemma": HEADS,
    "Gemma2": {**HEADS, **BOTH_KINDS, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "Gemma3Text": {**HEADS, **BOTH_KINDS, "query_pre_attn_scalar": 8},
    "Phi": {},
    "Phi3": {"sliding_window": 6},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": BOTH_KINDS,
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {**mixtures.SETTINGS["DeepseekV3"], "n_routed_experts": 4},
    "Granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0},
    "GptOss": {**HEADS, **BOTH_KINDS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Cohere": {"logit_scale": 0.5},
    "Starcoder2": {"sliding_window": 6},
    "GPTNeoX": {},
    "Glm4": HEADS,
    "GPT2": {},
}
"""transformers' name of the architecture and what its tiny model has besides `COMMON`."""


@pytest.fixture(autouse=True)
def _keep_float64():
    with KeepFloat64():
        yield


def tiny_of(name, **changes):
    """A random float64 model whose attention is far from uniform."""
    torch.manual_seed(0)
    settings = {**COMMON, **PACKABLE.get(name, {}), **changes}
    config = getattr(transformers, f"{name}Config")(**settings)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    keep_soft_caps(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in name:
                parameter.normal_(std=0.2)
    return model


def ragged_batch():
    """Prompts of one token, below and beyond the windows; completions empty, short and beyond them; order mixed."""
    chance = random.Random(0)

    def ids(count):
        return [chance.randrange(3, VOCABULARY) for _ in range(count)]

    rollouts = []
    for group, (prompt_length, lengths) in enumerate([(1, [9, 0, 1]), (13, [3, 8]), (4, [0]), (6, [2])]):
        prompt = ids(prompt_length)
        for length in lengths:
            rollouts.append(Rollout(prompt, ids(length), [True] * length, None, "", FinishReason.STOP, group=group))
    batch = collate(rollouts)
    return batch.select(torch.tensor([6, 0, 3, 1, 5, 2, 4]))


def scored(model, batch, layout):
    """Log-probs and the gradients of a sum that weighs every token differently."""
    model.zero_grad()
    scorer = TokenScorer(lambda m: m, temperature=0.9, layout=layout)
    logprobs = scorer(model, batch).logprobs
    (logprobs * torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model, batch):
    expected, expected_gradients = scored(model, batch, "padded")
    for layout in ("shared_prefix", "packed"):
        logprobs, gradients = scored(model, batch, layout)
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-10)
        assert gradients.keys() == expected_gradients.keys()
        for name, theirs in expected_gradients.items():
            # The bias of a key moves all scores of a query alike: its gradient is 0 but for rounding.
            assert (gradients[name] - theirs).norm() <= 1e-8 * theirs.norm() + 1e-12, (layout, name)


@pytest.mark.parametrize("name", PACKABLE)
def test_layouts_agree(name):
    assert_same(tiny_of(name), ragged_batch())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_layouts_agree_where_layers_are_recomputed(name):
    model = tiny_of(name).train()
    recomputing = {"use_reentrant": False, "context_fn": lambda: (KeepFloat64(), KeepFloat64())}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=recomputing)
    assert_same(model, ragged_batch())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3", "Gemma2"])
def test_layouts_agree_with_lora(name):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_of(name), settings).double()
    assert_same(model, ragged_batch())
    _, gradients = scored(model, ragged_batch(), "shared_prefix")
    assert gradients and all("lora" in name for name in gradients)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss", "Mistral"])
def test_auto_layout_is_shared_prefix_without_warnings(name):
    automatic = TokenScorer(lambda m: m, temperature=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        automatic(tiny_of(name), ragged_batch())
    assert automatic.layout == "shared_prefix"


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
def test_ordinary_calls_work_under_the_packed_attention(name):
    model = tiny_of(name)
    ids = torch.arange(3, 15)[None]
    expected = model(ids).logits
    continued = model.generate(ids, max_new_tokens=4, do_sample=False)
    TokenScorer(lambda m: m, temperature=1.0)(model, ragged_batch())
    assert model.config._attn_implementation == "covey_packed"
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-10)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), continued)


UNPACKABLE = {**hybrids.SETTINGS, "StableLm": {}}
"""Decoders with state that runs along the row, and one whose attention is not told where sequences end."""


def tiny_unpackable(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **UNPACKABLE[name]})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", UNPACKABLE)
def test_models_that_mix_sequences_are_padded_with_one_warning(name):
    model, batch = tiny_unpackable(name), ragged_batch()
    before = model.config._attn_implementation
    automatic = TokenScorer(lambda m: m, temperature=1.0)
    with pytest.warns(UserWarning, match=f"{type(model).__name__} cannot use the packed layouts") as warned:
        mine = automatic(model, batch).logprobs
        automatic(model, batch)
    assert len([w for w in warned if "packed layouts" in str(w.message)]) == 1
    assert automatic.layout == "padded" and model.config._attn_implementation == before
    alone = torch.cat([automatic(model, one).logprobs for one in batch.split(1)])
    torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["shared_prefix", "packed"])
@pytest.mark.parametrize("name", ["Lfm2", "StableLm"])
def test_insisting_on_a_layout_that_would_be_wrong_is_an_error(name, layout):
    insisting = TokenScorer(lambda m: m, temperature=1.0, layout=layout)
    with pytest.raises(ValueError, match=f"attn_layout='{layout}' is wrong for {name}ForCausalLM"):
        insisting(tiny_unpackable(name), ragged_batch())


def test_every_model_has_its_own_layout():
    scorer = TokenScorer(lambda m: m, temperature=1.0)
    policy, reference, batch = tiny_of("Llama"), tiny_unpackable("Lfm2"), ragged_batch()
    assert scorer.layout_of(policy, batch) == "shared_prefix"
    with pytest.warns(UserWarning, match="Lfm2ForCausalLM cannot"):
        assert scorer.layout_of(reference, batch) == "padded"
    assert scorer.layout == "shared_prefix"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss", "Qwen3"])
def test_rounding_is_no_difference(name, dtype):
    assert (
        TokenScorer(lambda m: m, temperature=1.0).layout_of(tiny_of(name).to(dtype), ragged_batch()) == "shared_prefix"
    )


def test_half_precision_does_not_hide_that_sequences_mix():
    """Every token sees a little of the token before it in its row: less than rounding between layouts may amount to."""
    model = tiny_of("Llama").bfloat16()

    def mix(module, args, output):
        return output + 0.02 * torch.nn.functional.pad(output[:, :-1], (0, 0, 1, 0))

    model.model.embed_tokens.register_forward_hook(mix)
    with pytest.warns(UserWarning, match="when another rollout of the row changes"):
        assert TokenScorer(lambda m: m, temperature=1.0).layout_of(model, ragged_batch()) == "padded"
