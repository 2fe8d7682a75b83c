"""Several tasks in one dataset: each reward function scores its own rows and returns None for the others.

None means "not applicable": it counts neither as 0 nor against the completion.
"""

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import completion_text, numeric_match_reward

NUMERALS = ["river", "stone", "cloud", "ember", "maple", "north", "quiet", "harbor"]
MATHS = [{**row, "task": "maths"} for row in SUMS[:40:5]]
WRITING = [
    {
        "prompt": [{"role": "user", "content": f"Write one sentence with the word {word}."}],
        "answer": word,
        "task": "writing",
    }
    for word in NUMERALS
]


def maths(completions, answer, task, **kwargs):
    scores = numeric_match_reward(completions, answer=answer)
    return [score if name == "maths" else None for score, name in zip(scores, task, strict=True)]


def writing(completions, answer, task, **kwargs):
    return [
        float(word in completion_text(completion)) if name == "writing" else None
        for completion, word, name in zip(completions, answer, task, strict=True)
    ]


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=[maths, writing],
        args=GRPOConfig(**settings(options)),
        train_dataset=MATHS + WRITING,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
