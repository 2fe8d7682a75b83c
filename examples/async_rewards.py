"""Async rewards: `async def` functions of a run wait concurrently, not one after the other.

The two services below are stand-ins that sleep; a real one would be an HTTP client, created once on first use. A sample
that a service fails on costs that sample, counted in `rewards/{name}/failures`, and nothing waits beyond the deadline.
"""

import asyncio

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import completion_text


async def ask_service(text, question):
    """Simulates a slow grader: 20 ms an answer."""
    await asyncio.sleep(0.02)
    return float(question(text))


async def has_digit(completions, **kwargs):
    texts = map(completion_text, completions)
    return await asyncio.gather(*[ask_service(text, lambda t: any(c.isdigit() for c in t)) for text in texts])


async def is_brief(completions, **kwargs):
    texts = map(completion_text, completions)
    return await asyncio.gather(*[ask_service(text, lambda t: len(t) < 20) for text in texts])


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=[has_digit, is_brief],
        args=GRPOConfig(**settings(options), reward_timeout=30),
        train_dataset=SUMS,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
