"""A curriculum of three sources: easy sums first, then harder ones, and a little writing throughout.

Every rollout batch has exactly its shares of the sources; the weights of the first two change with the optimizer step.
Writing has a reward and a shorter limit of its own, and an average of its own, so that it counts by its prompts.
"""

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import completion_text, numeric_match_reward

NAMES = ["river", "stone", "cloud", "ember", "maple", "north", "quiet", "harbor"]
HARDER = [
    {"prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}], "answer": str(a + b)}
    for a in range(11, 20)
    for b in range(11, 20)
]
WRITING = [
    {"prompt": [{"role": "user", "content": f"Write one short sentence with {n}."}], "word": n, "level": len(n)}
    for n in NAMES
]


def has_word(completions, word, **kwargs):
    return [float(one in completion_text(text)) for text, one in zip(completions, word, strict=True)]


def main():
    options = parser(__doc__).parse_args()
    steps = options.max_steps
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(**{**settings(options), "gradient_accumulation_steps": 4, "steps_per_generation": 4}),
        train_dataset={"easy": SUMS, "harder": HARDER, "writing": WRITING},
        sources={
            "easy": {"weight": [[0, 5], [steps, 1]], "sampler": "difficulty"},
            "harder": {"weight": [[0, 1], [steps, 5]], "gates": {"max_truncated": 0.75}},
            "writing": {
                "weight": 2,
                "sampler": {"order": "level"},
                "reward_funcs": has_word,
                "max_completion_length": 24,
                "average": "own",
            },
        },
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "source/easy/prompts" in entry:
            shares = {name: entry.get(f"source/{name}/prompts", 0.0) for name in ("easy", "harder", "writing")}
            print(f"step {entry['step']}: {', '.join(f'{name} {share:.0%}' for name, share in shares.items())}")
    return trainer


if __name__ == "__main__":
    main()
