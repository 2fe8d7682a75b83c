"""Models that SDPA does not suit are sampled from as they are, also after training has changed their attention."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig

from tests.support import runs

pytestmark = pytest.mark.slow

SMALL = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
CONFIGS = [
    Gemma2Config(**SMALL, attn_logit_softcapping=5.0, query_pre_attn_scalar=8),
    GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_every_rollout_batch_is_sampled_from_the_policy(tmp_path, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in name:
                parameter.normal_(std=0.2)
    trained = runs.trainer(tmp_path, parts={"model": model}, max_steps=3)
    scored = runs.scored(trained)
    trained.train()
    gaps = [(own - batch.engine_logprobs)[batch.sampled].abs().max().item() for batch, own in scored]
    assert trained.scorer.layout == "shared_prefix" and model.config._attn_implementation == "covey_packed"
    assert len(gaps) == 3 and max(gaps) < 1e-3


def test_an_engine_wrong_after_the_first_rollout_batch_is_detected(tmp_path):
    trained = runs.trainer(tmp_path)
    collect, calls = trained.collector.collect, []

    def collect_from_another_policy(*args, **kwargs):
        rollouts = collect(*args, **kwargs)
        calls.append(1)
        for rollout in rollouts if len(calls) > 1 else []:
            rollout.logprobs = [logprob - 0.5 for logprob in rollout.logprobs]
        return rollouts

    trained.collector.collect = collect_from_another_policy
    with pytest.raises(ValueError, match=r"differ from the model's own by 0\.5"):
        trained.train()
    assert len(calls) == 2
