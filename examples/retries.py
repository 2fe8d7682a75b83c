"""Retries with feedback: the policy answers, gets a verifier's feedback, and may try again.

A rollout function runs one rollout, as plain code around `await episode.sample()`; all rollouts of a batch run
concurrently. The policy's answers are trained on, the verifier's feedback is not. `tries`, given to `done`, reaches the
reward function under that name: the sooner an answer is right, the more it is worth.
"""

import re

from common import SUMS, parser, settings
from covey import EpisodeEngine, GRPOConfig, GRPOTrainer, Rollout

TRIES = 3


def objection(text, answer):
    """Error in an answer, or None."""
    numbers = re.findall(r"\d+", text)
    if not numbers:
        return "I see no number. Try again."
    if numbers[-1] == answer:
        return None
    return f"{numbers[-1]} is too {'small' if int(numbers[-1]) < int(answer) else 'large'}. Try again."


async def with_feedback(row: dict, engine: EpisodeEngine) -> Rollout:
    episode = engine.begin()
    for number in range(1, TRIES + 1):
        reply = await episode.sample(max_tokens=24)
        wrong = objection(reply.text, row["answer"])
        if wrong is None:
            return episode.done(tries=number)
        if number == TRIES or not episode.write(wrong):  # False: no room is left for another try
            break
    return episode.done(tries=None)


def sooner_is_better(completions, tries, **kwargs):
    """1 for the first try, half as much for each further one, 0 for never."""
    return [0.0 if number is None else 0.5 ** (number - 1) for number in tries]


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=sooner_is_better,
        args=GRPOConfig(**{**settings(options), "max_completion_length": 160}),
        train_dataset=SUMS,
        rollout_func=with_feedback,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
