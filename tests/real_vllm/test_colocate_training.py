"""Training with vLLM in this process: the reward rises, and vLLM stays in step with the policy."""

import asyncio
import math
import re

import pytest
import torch

from covey import GRPOConfig, GRPOTrainer
from tests.real_vllm import colocated
from tests.real_vllm.colocated import greedy, request
from tests.support import tiny

pytest.importorskip("vllm.sampling_params")

pytestmark = pytest.mark.vllm

PROMPT = tiny.tokenizer()("3+4=").input_ids

SETTINGS = {
    "per_device_train_batch_size": 16,
    "num_generations": 8,
    "max_completion_length": 12,
    "max_steps": 20,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "use_vllm": True,
    "vllm_mode": "colocate",
}


def digits(completions, **kwargs):
    """The share of digits: learnt in a few steps."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def trainer(folder, *, reward=digits, peft_config=None, **changes):
    return GRPOTrainer(
        model=colocated.model(scale=2.0),
        args=GRPOConfig(output_dir=str(folder), **{**SETTINGS, **changes}),
        reward_funcs=reward,
        train_dataset=tiny.rows(32),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
    )


def history(trained, name):
    return [entry[name] for entry in trained.state.log_history if name in entry]


def engines_choice(trained, tokens=12):
    """What the trainer's engine writes greedily, once it has the newest weights."""
    engine = trained.collector.engine
    trained.weight_sync.ensure_current(trained.state.global_step)

    async def go():
        with engine.awake():
            return await engine.generate(request(PROMPT, [0], tokens, temperature=0.0))

    return asyncio.run(go())[0].token_ids


def test_the_reward_rises_and_vllm_follows_the_policy(tmp_path):
    trained = trainer(tmp_path)
    trained.train()
    reward = history(trained, "reward")
    assert len(reward) == 20
    assert sum(reward[-5:]) / 5 > sum(reward[:5]) / 5 + 0.1, reward
    assert max(history(trained, "sampling/sampling_logp_difference/max")) < 1e-3
    assert len(history(trained, "sync/bytes")) == 20, "every update is handed over"
    assert engines_choice(trained) == greedy(trained.policy, PROMPT, 12)


def test_greedy_output_is_that_of_transformers_after_each_sync(tmp_path):
    compared = []

    def compare(completions, **kwargs):
        # called between sampling and the update: the engine has the weights that transformers has
        compared.append((engines_choice(run), greedy(run.policy, PROMPT, 12)))
        return digits(completions)

    run = trainer(tmp_path, reward=compare, max_steps=4)
    run.train()
    assert len(compared) == 4
    assert all(ours == theirs for ours, theirs in compared)
    assert len({tuple(theirs) for _, theirs in compared}) > 1, "the policy has changed"


def test_an_adapter_is_handed_over_alone(tmp_path):
    from peft import LoraConfig

    adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = trainer(tmp_path, peft_config=adapter, max_steps=6, vllm_lora_sync="adapter", learning_rate=1e-2)
    trained.train()
    assert max(history(trained, "sampling/sampling_logp_difference/max")) < 1e-3
    parameters = [p for p in trained.policy.parameters() if p.requires_grad]
    assert history(trained, "sync/bytes")[-1] == sum(p.numel() * 4 for p in parameters)
    assert engines_choice(trained) == greedy(trained.policy, PROMPT, 12)


def test_temperature_and_cuts_keep_engine_and_trainer_comparable(tmp_path):
    warm = trainer(tmp_path / "warm", max_steps=2, temperature=0.7)
    warm.train()
    assert max(history(warm, "sampling/sampling_logp_difference/max")) < 1e-3
    cut = trainer(tmp_path / "cut", max_steps=2, top_p=0.8, top_k=20)
    cut.train()
    assert max(history(cut, "sampling/sampling_logp_difference/max")) < 1e-3, "reported from before the cut"


def test_every_completion_matches_the_regex(tmp_path):
    seen = []

    def keep(completions, **kwargs):
        seen.extend(completions)
        return [float(text[0]) for text in completions]

    with pytest.warns(UserWarning, match="mismatch is not corrected.*vllm_structured_outputs_regex"):
        trained = trainer(tmp_path, reward=keep, max_steps=2, vllm_structured_outputs_regex="[0-9]{2}(yes|no)")
    trained.train()
    assert len(seen) == 32
    assert all(re.fullmatch("[0-9]{2}(yes|no)", text) for text in seen), seen
    assert all(math.isfinite(loss) for loss in history(trained, "loss"))


def test_threads_and_accelerates_state_are_as_without_vllm(tmp_path):
    threads = torch.get_num_threads()
    trained = trainer(tmp_path, max_steps=1)
    trained.train()
    assert torch.get_num_threads() == threads
    assert (trained.accelerator.num_processes, trained.accelerator.use_distributed) == (1, False)
