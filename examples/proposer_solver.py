"""A team: the policy proposes sums and solves them. Proposers earn most for sums that half of the solvers get right.

Three solvers of one proposed sum are compared with each other, proposers with the proposers of the same prompt.
"""

import asyncio
import re

from common import parser, settings
from covey import GRPOConfig, GRPOTrainer

SOLVERS = 3


async def play(row, engine, n):
    """One game: a proposer and three solvers, each a rollout of its own."""
    proposer = engine.begin(row["prompt"], role="proposer")
    proposal = await proposer.sample()
    terms = [int(term) for term in re.findall(r"\d{1,3}", proposal.text)[:2]]
    task = f"What is {terms[0]} + {terms[1]}? Answer with the number only." if len(terms) == 2 else "Say nothing."
    solvers = [engine.begin([{"role": "user", "content": task}], role="solver") for _ in range(n - 1)]
    answers = await asyncio.gather(*(solver.sample() for solver in solvers))
    right = [len(terms) == 2 and str(sum(terms)) in re.findall(r"\d+", answer.text) for answer in answers]
    share = sum(right) / len(right)
    points = 1 - abs(2 * share - 1) if len(terms) == 2 else -1.0  # 1 where half are right, 0 where all or none are
    solved = [solver.done(points=float(won)) for solver, won in zip(solvers, right, strict=True)]
    return [proposer.done(points=points), *solved]


def points(points, **columns):
    return points


def main():
    options = parser(__doc__).parse_args()
    changes = {
        "num_generations": 2 * (1 + SOLVERS),  # two games of each prompt
        "rollouts_per_game": 1 + SOLVERS,
        "compare": {"proposer": "role", "solver": "episode"},
        "scale_rewards": "none",
    }
    ask = "Write a sum of two numbers, as in 12 + 34, that is neither too easy nor too hard for you."
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=points,
        args=GRPOConfig(**{**settings(options), **changes}),
        train_dataset=[{"prompt": [{"role": "user", "content": ask}]}] * 8,
        rollout_func=play,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
