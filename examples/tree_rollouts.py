"""Trees: a first turn is explored in several branches, in one of two ways.

`--train all`: a function plays all n completions of a prompt together, as branches of two stems, and all of them are
trained on (as in TreePO, arXiv 2508.17445). The tokens of a stem are credited with the mean of its branches'
advantages: it is learned which stem was the better one.

`--train best`: every completion is a tree of its own, of which the best branch is kept. Only that one is trained on. It
is no fair sample of the policy, but the best of several: the policy is pulled towards what turned out well and learns
little from what did not, which is nearer to rejection sampling than to a policy gradient.
"""

import asyncio

from common import SUMS, parser, settings
from covey import Episode, EpisodeEngine, GRPOConfig, GRPOTrainer, Rollout
from covey.rewards import numeric_match_reward

STEMS, BRANCHES = 2, 3


async def answer(branch: Episode) -> Episode:
    if branch.write("So? Only the number."):
        await branch.sample(max_tokens=12)
    return branch


async def all_branches(row: dict, engine: EpisodeEngine, n: int) -> list[Rollout]:
    stems = [engine.begin() for _ in range(STEMS)]
    await asyncio.gather(*(stem.sample(max_tokens=24) for stem in stems))
    forks = [stems[place % STEMS].fork() for place in range(n)]
    branches = await asyncio.gather(*map(answer, forks))
    return [branch.done() for branch in branches]


async def best_branch(row: dict, engine: EpisodeEngine) -> Rollout:
    stem = engine.begin()
    await stem.sample(max_tokens=24)
    branches = await asyncio.gather(*(answer(stem.fork()) for _ in range(BRANCHES)))
    scores = numeric_match_reward([branch.messages for branch in branches], answer=[row["answer"]] * BRANCHES)
    best = max(range(BRANCHES), key=lambda place: scores[place] or 0.0)
    return branches[best].done(right=sum(score or 0.0 for score in scores))


def main():
    options = parser(__doc__)
    options.add_argument("--train", choices=["all", "best"], default="all", help="Which branches are trained on.")
    options = options.parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(**{**settings(options), "max_completion_length": 128}),
        train_dataset=SUMS,
        rollout_func=all_branches if options.train == "all" else best_branch,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
