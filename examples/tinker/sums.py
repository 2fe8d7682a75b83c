"""One-digit sums, learned through the `tinker` client.

`covey tinker-serve --model FOLDER -- python sums.py --model FOLDER` runs it. The program samples answers, rewards the
right ones, and takes a step on the difference from the mean of each group.
"""

import argparse
import random
import re

from transformers import AutoTokenizer

import tinker
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="folder of the model, by the name that the server has it under")
parser.add_argument("--max_steps", type=int, default=16)
parser.add_argument("--prompts", type=int, default=8, help="of a step")
parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
parser.add_argument("--learning_rate", type=float, default=3e-4)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--held_out", type=int, default=40, help="sums to measure with, four answers each")
parser.add_argument("--max_tokens", type=int, default=32)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
chance = random.Random(options.seed)
sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
chance.shuffle(sums)
held_out, train = sums[: options.held_out], sums[options.held_out :]


def prompt_of(pair: tuple[int, int]) -> list[int]:
    messages = [{"role": "user", "content": f"What is {pair[0]} + {pair[1]}?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def reward_of(pair: tuple[int, int], tokens: list[int]) -> float:
    """1 if the last number of the answer is the sum."""
    numbers = re.findall(r"-?\d+", tokenizer.decode(tokens, skip_special_tokens=True))
    return float(bool(numbers) and int(numbers[-1]) == sum(pair))


def answers(sampler: tinker.SamplingClient, pairs: list[tuple[int, int]], count: int) -> list[list]:
    params = types.SamplingParams(max_tokens=options.max_tokens, temperature=1.0)
    asked = [sampler.sample(types.ModelInput.from_ints(prompt_of(pair)), count, params) for pair in pairs]
    return [one.result().sequences for one in asked]


def accuracy(sampler: tinker.SamplingClient) -> float:
    groups = answers(sampler, held_out, 4)
    right = [reward_of(pair, one.tokens) for pair, group in zip(held_out, groups, strict=True) for one in group]
    return sum(right) / len(right)


def datum_of(prompt: list[int], answer: types.SampledSequence, advantage: float) -> types.Datum:
    """An answer to learn from: the prompt's positions have log-prob and advantage 0, so that they do not count."""
    tokens, before = [*prompt, *answer.tokens], len(prompt) - 1
    inputs = {
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64"),
        "logprobs": types.TensorData(data=[0.0] * before + list(answer.logprobs), dtype="float32"),
        "advantages": types.TensorData(data=[0.0] * before + [advantage] * len(answer.tokens), dtype="float32"),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


service = tinker.ServiceClient()
training = service.create_lora_training_client(base_model=options.model, rank=options.rank, seed=options.seed)
training = training.result() if hasattr(training, "result") else training  # clients before 0.30 return it at once
sampler = training.save_weights_and_get_sampling_client()
sampler = sampler.result() if hasattr(sampler, "result") else sampler
print(f"before: {accuracy(sampler):.3f} of {4 * len(held_out)} answers are right", flush=True)
for step in range(options.max_steps):
    pairs = chance.sample(train, options.prompts)
    data, rewards = [], []
    for pair, group in zip(pairs, answers(sampler, pairs, options.group), strict=True):
        scores = [reward_of(pair, one.tokens) for one in group]
        rewards += scores
        mean = sum(scores) / len(scores)
        data += [datum_of(prompt_of(pair), one, score - mean) for one, score in zip(group, scores, strict=True)]
    gradient = training.forward_backward(data, "importance_sampling")
    update = training.optim_step(types.AdamParams(learning_rate=options.learning_rate, eps=1e-8))
    gradient.result(), update.result()
    sampler = training.save_weights_and_get_sampling_client()
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    print(f"step {step + 1}: mean reward {sum(rewards) / len(rewards):.3f}", flush=True)
print(f"after: {accuracy(sampler):.3f} of {4 * len(held_out)} answers are right")
print(training.save_state("sums").result().path)
