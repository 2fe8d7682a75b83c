"""Sub-agents: the policy asks two advisers a question of its own, and answers with what they said.

An adviser is a conversation apart, `engine.generate`: here with the same model, elsewhere with whatever a function can
call. It is sampled beside everything else and not trained on. What is trained on are the policy's own two turns, the
question and the answer, both for how good the answer is.
"""

import asyncio
import random

from common import parser, settings
from covey import EpisodeEngine, GRPOConfig, GRPOTrainer, Rollout
from covey.rewards import numeric_match_reward

ROLES = ["You calculate step by step, and are brief.", "You check calculations, and are brief."]
chance = random.Random(0)
TERMS = [[chance.randint(1, 20) for _ in range(3)] for _ in range(200)]
TASKS = [
    {
        "prompt": [
            {"role": "user", "content": f"We need {a} + {b} + {c}. First ask your advisers one short question."}
        ],
        "answer": str(a + b + c),
    }
    for a, b, c in TERMS
]


async def advised(row: dict, engine: EpisodeEngine) -> Rollout:
    episode = engine.begin()
    question = await episode.sample(max_tokens=32)
    asked = [
        engine.generate(
            [{"role": "system", "content": role}, {"role": "user", "content": question.text}], max_tokens=32
        )
        for role in ROLES
    ]
    advice = " ".join([reply.text.strip() for (reply,) in await asyncio.gather(*asked)])
    if episode.write(f"They say: {advice} What is the sum? Only the number."):
        await episode.sample(max_tokens=16)
    return episode.done(advice=advice)


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(**{**settings(options), "max_completion_length": 192}, log_completions=True),
        train_dataset=TASKS,
        rollout_func=advised,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
