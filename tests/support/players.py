"""Rollout functions for the tests in this folder."""

import asyncio


async def twice(row, engine):
    """Two turns, the second after a word that the policy did not say."""
    episode = engine.begin()
    await episode.sample(max_tokens=3)
    if episode.write("so "):
        await episode.sample()
    return episode.done(turns=len(episode.turn_ends))


async def tree(row, engine, n):
    """A stem and n branches of it."""
    stem = engine.begin()
    await stem.sample(max_tokens=2)
    branches = [stem.fork() for _ in range(n)]
    await asyncio.gather(*(branch.sample() for branch in branches))
    return [branch.done() for branch in branches]


async def game(row, engine, n):
    """Two seats of one game, in prompts of their own; the role is the seat's."""
    seats = {role: engine.begin(f"{row['prompt']} {role}") for role in ("first", "second")}
    await asyncio.gather(*(episode.sample() for episode in seats.values()))
    return [episode.done(role=role) for role, episode in seats.items()]


def drafts(prompts, trainer):
    """The second of two completions of every prompt."""
    trainer.generate_completions(prompts, max_tokens=2)
    completions = trainer.generate_completions(prompts)
    fields = {name: [one[name] for one in completions] for name in ("prompt_ids", "completion_ids", "logprobs")}
    return {**fields, "place": list(range(len(prompts)))}


PLAYERS = {"one rollout": twice, "a group": tree, "a rollout batch": drafts}
