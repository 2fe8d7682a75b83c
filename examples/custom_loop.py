"""GRPO without a trainer: sample, reward, compare, and take a step, with the parts of the library by hand.

Nothing of Hugging Face's training loop takes part. Change any line of it; `GRPOTrainer` puts the same parts together
with checkpoints, processes and other engines around them.
"""

import asyncio
import itertools
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from common import SUMS, parser
from covey.core.advantages import group_relative
from covey.core.batch import collate, expand
from covey.core.engine import SampleRequest, SamplingParams
from covey.core.losses import clip
from covey.core.objective import Objective, policy_loss
from covey.core.records import Rollout
from covey.engines.native.engine import NativeEngine
from covey.policy.scoring import TokenScorer
from covey.rewards import numeric_match_reward

PROMPTS, GROUP = 4, 4


async def sample(engine, prompts, step):
    """GROUP completions of each prompt, each with a seed of its own."""
    seeds = itertools.count(step * PROMPTS * GROUP)
    requests = [
        SampleRequest(ids, GROUP, SamplingParams(max_tokens=32), list(itertools.islice(seeds, GROUP)))
        for ids in prompts
    ]
    with engine.awake():
        return await asyncio.gather(*map(engine.generate, requests))


def main():
    options = parser(__doc__).parse_args()
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    end = tokenizer.eos_token_id
    engine = NativeEngine(lambda: model, eos_token_ids={end}, pad_token_id=end)
    scorer = TokenScorer(lambda inner: inner, temperature=1.0, pad_token_id=end)
    objective = Objective(surrogate=partial(clip, epsilon_low=0.2, epsilon_high=0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    rows, history = itertools.cycle(SUMS), []
    for step in range(options.max_steps):
        chosen = [next(rows) for _ in range(PROMPTS)]
        prompts = [
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
            for row in chosen
        ]
        groups = asyncio.run(sample(engine, prompts, step))
        completions = [(ids, completion) for ids, group in zip(prompts, groups, strict=True) for completion in group]
        texts = [tokenizer.decode(completion.token_ids, skip_special_tokens=True) for _, completion in completions]
        answers = [row["answer"] for row in chosen for _ in range(GROUP)]
        rewards_PG = torch.tensor(numeric_match_reward(completions=texts, answer=answers)).view(PROMPTS, GROUP)

        batch = collate(
            [
                Rollout(ids, c.token_ids, [True] * len(c.token_ids), None, text, c.finish)
                for (ids, c), text in zip(completions, texts, strict=True)
            ]
        )
        batch.advantages = expand(group_relative(rewards_PG).flatten(), batch.lengths)  # [N]
        batch.weights = torch.full((batch.num_tokens,), 1.0 / batch.num_tokens)  # the mean over all tokens
        loss = policy_loss(batch, scorer(model, batch).logprobs, None, objective).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append({"reward": rewards_PG.mean().item(), "loss": loss.item()})
        print(f"step {step + 1}  reward {history[-1]['reward']:.3f}  loss {history[-1]['loss']:+.4f}")
    return history


if __name__ == "__main__":
    main()
