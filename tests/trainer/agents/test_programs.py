"""Training inside programs: seats, versions of tokens, and what the trainer makes of `agent`."""

import aiohttp
import pytest

from covey.core.records import PromptSample
from covey.rollout.agents import AgentProgram
from tests.support import runs, tiny
from tests.support.engines import CopyEngine

ASKED = {"role": "user", "content": "2+2="}


async def asks_two_seats(row, base_url, api_key):
    """The policy, and the one that it was."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        for model in ("old", "policy"):
            body = {"model": model, "messages": [ASKED], "max_tokens": 8}
            async with client.post(f"{base_url}/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                said.setdefault(model, []).append((await response.json())["choices"][0]["message"]["content"])


said: dict[str, list[str]] = {}


def test_a_frozen_seat_stays_as_the_policy_was(tmp_path):
    """The same samples again after a large step: those of the policy differ, those of the frozen one do not."""
    said.clear()
    agent = AgentProgram(asks_two_seats, seats={"old": "frozen"})
    parts = {"agent": agent, "train_dataset": [{"prompt": None}] * 4, "reward_funcs": runs.longer}
    made = runs.trainer(tmp_path, parts=parts, max_steps=1, learning_rate=0.5, max_completion_length=8)
    before = completions(made)
    made.train()
    after = completions(made)
    assert before["old"] == after["old"] and before["policy"] != after["policy"]
    assert len(set(before["old"])) > 1
    assert agent.seats["old"]._engine._model() is not made.model


def completions(made):
    said.clear()
    draws = [PromptSample({"prompt": None}, 0, sample) for sample in range(4)]
    rollouts = made.collector.collect(draws, made.rollouts.params, ("again",))
    assert all(rollout.error is None and rollout.num_turns == 1 for rollout in rollouts)
    return {name: sorted(texts) for name, texts in said.items()}


async def rewrites(row, base_url, api_key):
    """Three conversations, the last of which continues with the second."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        messages = []
        for asked in ("a", "b", "c"):
            messages = [*(messages if asked == "c" else []), {"role": "user", "content": asked}]
            body = {"messages": messages, "max_tokens": 4}
            async with client.post(f"{base_url}/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                messages = [*messages, (await response.json())["choices"][0]["message"]]


@pytest.mark.slow
def test_the_versions_of_all_tokens_are_known_ahead(tmp_path):
    """One step ahead: each sampled token, of whichever strand, is at most one step old, and later ones really are."""
    model = tiny.model()
    parts = {"agent": AgentProgram(rewrites), "train_dataset": [{"prompt": None}] * 4, "reward_funcs": runs.longer}
    parts |= {"model": model, "engine": CopyEngine(model)}
    made = runs.trainer(tmp_path, parts=parts, max_steps=4, max_staleness=1, max_completion_length=40)
    gather, found = made.credit.gather, []

    def noting(rollouts, behaviour, mode):
        found.append((made.state.global_step, rollouts.rollouts))
        return gather(rollouts, behaviour, mode)

    made.credit.gather = noting
    made.train()
    assert [step for step, _ in found] == [0, 1, 2, 3]
    ages = set()
    for step, rollouts in found:
        for rollout in rollouts:
            assert rollout.error is None and rollout.versions is not None and len(rollout.strands) == 1
            sampled = zip(rollout.versions, rollout.sampled, strict=True)
            ages |= {step - version for version, by_policy in sampled if by_policy}
    assert ages == {0, 1}
