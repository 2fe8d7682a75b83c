"""The kinds of reward functions that a user's guide shows, each run through the suite."""

import asyncio
import re

from covey.rewards import RewardSuite

PROMPTS = ["The sky is", "The sun is"]
COMPLETIONS = [" blue.", " in the sky."]
IDS = [[6303, 13], [304, 279, 12884, 13]]


def test_longer_completions_by_either_spelling_of_the_argument(score):
    def by_old_name(completions_ids, **kwargs):
        return [float(len(ids)) for ids in completions_ids]

    def by_new_name(completion_ids, **kwargs):
        assert kwargs["completions_ids"] is completion_ids
        return [float(len(ids)) for ids in completion_ids]

    rewards, _ = score(RewardSuite([by_old_name, by_new_name]), COMPLETIONS, PROMPTS, IDS)
    assert rewards == [[2.0, 2.0], [4.0, 4.0]]


def test_longer_completions_in_characters(score):
    def characters(completions, **kwargs):
        return [float(len(completion)) for completion in completions]

    assert score(RewardSuite(characters), COMPLETIONS, PROMPTS, IDS)[0] == [[6.0], [12.0]]


def test_a_format_of_messages(score):
    def tagged(completions, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", content) else 0.0 for content in contents]

    prompts = [[{"role": "user", "content": "What is (1 + 2) * 4?"}], [{"role": "user", "content": "(3 + 1) * 2?"}]]
    completions = [
        [{"role": "assistant", "content": "<think>3 times 4</think><answer>12</answer>"}],
        [{"role": "assistant", "content": "4 times 2 is 8"}],
    ]
    assert score(RewardSuite(tagged), completions, prompts)[0] == [[1.0], [0.0]]


def test_a_reference_from_a_dataset_column(score):
    def boxed(completions, ground_truth, **kwargs):
        found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
        contents = [match.group(1) if match else "" for match in found]
        return [1.0 if content == truth else 0.0 for content, truth in zip(contents, ground_truth, strict=True)]

    completions = [r" The solution is \boxed{2}.", r" The solution is \boxed{6}."]
    assert score(RewardSuite(boxed), completions, ground_truth=["2", "5"])[0] == [[1.0], [0.0]]


def test_functions_of_a_multi_task_run_abstain_on_the_other_task(score):
    def math_reward(prompts, completions, task, **kwargs):
        return [
            (1.0 if text == "4" else -1.0) if t == "math" else None for text, t in zip(completions, task, strict=True)
        ]

    def coding_reward(prompts, completions, task, **kwargs):
        return [
            (1.0 if "return" in text else -1.0) if t == "code" else None
            for text, t in zip(completions, task, strict=True)
        ]

    suite = RewardSuite([math_reward, coding_reward])
    rewards, stats = score(suite, ["4", "return a + b", "5", "pass"], task=["math", "code", "math", "code"])
    assert rewards == [[1.0, None], [None, 1.0], [-1.0, None], [None, -1.0]]
    assert stats["rewards/math_reward/failures"] == 0  # abstaining is no failure


def test_async_and_sync_functions_in_one_list(score):
    async def non_empty(prompts, completions, **kwargs):
        await asyncio.sleep(0.01)
        return [1.0 if completion else 0.0 for completion in completions]

    def length(completions, **kwargs):
        return [len(completion) for completion in completions]

    class Remote:
        async def __call__(self, completions, **kwargs):
            await asyncio.sleep(0)
            return [0.5] * len(completions)

    suite = RewardSuite([non_empty, length, Remote()])
    assert suite.names == ["non_empty", "length", "Remote"]
    assert score(suite, ["", "ab"])[0] == [[0.0, 0.0, 0.5], [1.0, 2.0, 0.5]]
