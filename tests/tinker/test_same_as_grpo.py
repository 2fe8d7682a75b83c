"""Steps of a program on the samples of `covey grpo` give the adapter that `covey grpo` has after its steps."""

import pytest
import torch
from peft import LoraConfig

from covey.tinker.adapter import Adapter, AdapterSpec
from tests.support import tinkering
from tests.support.runs import experiences, longer, trainer
from tests.support.tinkering import datum
from tests.tinker.test_service import adapter_of, logprobs

pytestmark = pytest.mark.slow

GROUP, LENGTH = 4, 6
SETTINGS = {  # what a program of the client does: advantages without a scale, a sum of token losses, plain AdamW
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "beta": 0.0,
    "max_grad_norm": 0.0,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "learning_rate": 1e-3,
    "num_generations": GROUP,
    "max_completion_length": LENGTH,
}


def run_of_covey(folder, start, steps):
    """The adapter after steps of `GRPOTrainer`, and the samples of each: (prompt, completion)."""
    adapter = LoraConfig(r=start.spec.rank, lora_alpha=32, target_modules=list(start.matrices))
    made = trainer(folder, parts={"peft_config": adapter}, max_steps=steps, **SETTINGS)
    trained = {
        name.replace(".default", ""): parameter
        for name, parameter in made.model.named_parameters()
        if parameter.requires_grad
    }
    assert trained.keys() == start.saved().keys()
    with torch.no_grad():
        for name, value in start.saved().items():
            trained[name].copy_(value)
    batches = experiences(made)
    made.train()
    assert len(batches) == steps
    return [samples_of(batch) for batch in batches], {name: one.detach() for name, one in trained.items()}


def samples_of(batch):
    prompts = [one.tolist() for one in batch.prompts()]
    completions = [one.tolist() for one in batch.token_ids.split(batch.lengths.tolist())]
    return [(prompts[group], one) for group, one in zip(batch.groups.tolist(), completions, strict=True)]


@pytest.mark.parametrize("steps", [1, 3])
def test_steps_from_the_same_samples_give_the_same_adapter(steps, tmp_path):
    spec = AdapterSpec(4, seed=1)
    start = Adapter.new(tinkering.base().model, spec)
    sampled, expected = run_of_covey(tmp_path / "covey", start, steps)

    async def step(client, model, samples):
        groups = torch.tensor(longer([completion for _, completion in samples])).view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten() / (len(samples) * LENGTH)
        whole = [datum([*prompt, *completion]) for prompt, completion in samples]
        told = logprobs(await client.result(client.forward_backward(model, whole, forward_only=True)))
        data = []
        for (prompt, completion), advantage, own in zip(samples, advantages.tolist(), told, strict=True):
            before = len(prompt) - 1
            inputs = {
                "logprobs": [0.0] * before + own[before:].tolist(),
                "advantages": [0.0] * before + [advantage] * len(completion),
            }
            data.append(datum([*prompt, *completion], **inputs))
        await client.result(client.forward_backward(model, data, "importance_sampling"))
        await client.result(client.step(model, learning_rate=SETTINGS["learning_rate"], beta2=0.95, eps=1e-8))

    async def program(service, client):
        model = await client.create(rank=spec.rank, seed=spec.seed)
        for samples in sampled:
            await step(client, model, samples)
        return (await client.save(model, "end"))["path"]

    found = adapter_of(tmp_path / "tinker", tinkering.run(tmp_path / "tinker", program))
    moved = max(float((value - start.saved()[name]).abs().max()) for name, value in expected.items())
    assert moved > 0.9 * SETTINGS["learning_rate"]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)
