"""Sub-agents: the policy asks two others for an opinion on its answer, and answers again with their replies.

An adviser is a conversation apart, `engine.generate`: here with the same model, elsewhere with whatever a function can
call. It is sampled concurrently and not trained on. Only the policy's own two turns are trained on, the
first answer and the last, both for how good the last one is.
"""

import asyncio

from common import SUMS, parser, settings
from covey import EpisodeEngine, GRPOConfig, GRPOTrainer, Rollout
from covey.rewards import numeric_match_reward

ROLES = ["You calculate step by step.", "You check what others have calculated."]


async def advised(row: dict, engine: EpisodeEngine) -> Rollout:
    episode = engine.begin()
    first = await episode.sample(max_tokens=20)
    question = row["prompt"][-1]["content"]
    turn = {"role": "user", "content": f"{question} Somebody says: {first.text.strip()}"}
    asked = [
        engine.generate([{"role": "system", "content": role}, turn], max_tokens=20, temperature=0.0) for role in ROLES
    ]
    advice = " / ".join([reply.text.strip() for (reply,) in await asyncio.gather(*asked)])
    if episode.write(f"Others say: {advice}\n{question}"):
        await episode.sample(max_tokens=20)
    return episode.done(advice=advice)


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(**{**settings(options), "max_completion_length": 160}),
        train_dataset=SUMS,
        rollout_func=advised,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
