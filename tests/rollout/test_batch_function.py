"""Functions of the user's own that play a whole rollout batch: `(prompts, trainer) -> dict`."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from covey.core.engine import SamplingParams
from covey.core.records import FinishReason
from covey.engines.scripted import ScriptedEngine
from covey.rollout.collector import Collector, PromptSample, RolloutSpec
from covey.rollout.prompts import PromptCodec
from covey.rollout.tools.turn_template import TurnTemplates
from covey.rollout.user_batch_function import BatchFunction
from covey.rollout.user_functions import RolloutError, RolloutValidator
from tests.support import tiny

TOKENIZER = tiny.tokenizer()
EOS = TOKENIZER.eos_token_id
PARAMS = SamplingParams(max_tokens=8)


def letters(prompt_ids, seed):
    """Three letters that the seed decides."""
    return [14 + seed % 7, 14 + seed // 7 % 7, 14 + seed // 49 % 7, EOS]


def tokens(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def collector(function, engine=None, timeout=60.0):
    """With a function `(prompts, complete) -> dict`: `complete` is what `trainer.generate_completions` calls."""
    codec = PromptCodec(TOKENIZER, None, None)
    limits = RolloutValidator(tiny.config().vocab_size, None)
    play = BatchFunction(
        lambda prompts, _: function(prompts, play.generate_completions), None, timeout, codec, limits, {EOS}
    )
    agency = RolloutSpec(play, TurnTemplates(codec, [EOS]), timeout)
    return Collector(engine or ScriptedEngine(letters), codec, 7, agency)


def draws(prompts=2, group=2):
    return [PromptSample({"prompt": f"{p}+{p}="}, p, s) for p in range(prompts) for s in range(group)]


def sampled(prompts, complete, **changes):
    completions = complete(prompts, **changes)
    return {
        "prompt_ids": [one["prompt_ids"] for one in completions],
        "completion_ids": [one["completion_ids"] for one in completions],
        "logprobs": None,
    }


def test_every_prompt_comes_as_often_as_it_is_to_be_completed():
    seen = []

    def function(prompts, complete):
        seen.append((prompts, threading.current_thread() is threading.main_thread()))
        return {**sampled(prompts, complete), "place": list(range(len(prompts)))}

    engine = ScriptedEngine(letters)
    rollouts = collector(function, engine).collect(draws(), PARAMS, ("train", 0))
    assert seen == [(["0+0=", "0+0=", "1+1=", "1+1="], True)]
    assert [one.request.n for one in engine.served] == [2, 2]
    assert [one.group for one in rollouts] == [0, 0, 1, 1]
    assert [one.extras for one in rollouts] == [{"place": i} for i in range(4)]
    assert len({tuple(one.completion_ids) for one in rollouts}) == 4
    assert all(one.finish is FinishReason.STOP and one.sampled == [True] * 4 for one in rollouts)


def test_processes_that_share_a_group_sample_differently():
    everything = [PromptSample({"prompt": "1+1="}, 0, sample) for sample in range(4)]
    ranks = [collector(sampled).collect(share, PARAMS, ("train", 0)) for share in (everything[:2], everything[2:])]
    assert len({tuple(one.completion_ids) for share in ranks for one in share}) == 4


def test_sampling_settings_can_be_changed_unknown_ones_raise():
    engine = ScriptedEngine(letters)

    def function(prompts, complete):
        for wrong in ({"heat": 2.0}, {"temperature": -1.0}, {"max_tokens": 2.5}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                complete(prompts, **wrong)
        return sampled(prompts, complete, temperature=0.5, max_tokens=2)

    rollouts = collector(function, engine).collect(draws(), PARAMS, ("train", 0))
    assert [one.request.params for one in engine.served] == [SamplingParams(2, temperature=0.5)] * 2
    assert all(one.finish is FinishReason.LENGTH for one in rollouts)


def test_env_mask_marks_sampled_tokens_and_ends_of_turns():
    def function(prompts, complete):
        count = len(prompts)
        return {
            "prompt_ids": [tokens("2+2=")] * count,
            "completion_ids": [[*tokens("ab"), *tokens("??"), *tokens("c"), EOS]] * count,
            "logprobs": [[[-0.5, -2.0]] * 6] * count,
            "env_mask": [[1, 1, 0, 0, 1, 1]] * count,
        }

    rollout = collector(function).collect(draws(), PARAMS, ("train", 0))[0]
    assert rollout.sampled == [True, True, False, False, True, True]
    assert rollout.turn_ends == [1, 5] and rollout.num_turns == 2
    assert rollout.logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5] and rollout.completion == "ab??c"
    assert "env_mask" not in rollout.extras


@pytest.mark.parametrize("placeholder", [None, float("nan"), 1.0, [], "tool"])
def test_tokens_that_were_not_sampled_have_no_logprobs(placeholder):
    def function(prompts, complete):
        count = len(prompts)
        return {
            "prompt_ids": [tokens("2+2=")] * count,
            "completion_ids": [[*tokens("ab"), *tokens("?"), EOS]] * count,
            "logprobs": [[-0.5, -2.0, placeholder, -1.0]] * count,
            "env_mask": [[1, 1, 0, 1]] * count,
        }

    rollout = collector(function).collect(draws(), PARAMS, ("train", 0))[0]
    assert rollout.logprobs == [-0.5, -2.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"completion_ids": [[5]]}, r"returned 1 elements in 'completion_ids' for 4 prompts"),
        ({"score": 3}, r"returned int elements in 'score' for 4 prompts"),
        ({"logprobs": [[0.0]] * 4}, r"returned 1 logprobs for the 2 completion_ids of prompt 0"),
        ({"env_mask": [[1, 0, 1]] * 4}, r"returned 3 env_mask for the 2 completion_ids of prompt 0"),
        ({"completion_ids": [[5, 1000]] * 4}, r"token 1000 of a rollout"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(changes, error):
    def function(prompts, complete):
        return {"prompt_ids": [[5]] * 4, "completion_ids": [[5, 6]] * 4, "logprobs": None, **changes}

    with pytest.raises(RolloutError, match=error):
        collector(function).collect(draws(), PARAMS, ("train", 0))


def test_prompts_are_the_functions_own():
    def function(prompts, complete):
        for prompt in prompts:
            prompt[0]["content"] = "mine"
        return sampled(prompts, complete)

    some = [PromptSample({"prompt": [{"role": "user", "content": "2+2="}]}, 0, s) for s in range(2)]
    collector(function).collect(some, PARAMS, ("train", 0))
    assert some[0].row["prompt"][0]["content"] == "2+2="


def test_rollout_batches_that_are_sampled_at_once_do_not_meet():
    """Each function asks while the other runs, and the first ends before the second asks again."""
    turns = threading.Barrier(2, timeout=600)
    first_is_done = threading.Event()

    def function(prompts, complete):
        turns.wait()
        returned = sampled(prompts, complete)
        if prompts[0] != "0+0=":
            assert first_is_done.wait(20)
            returned = sampled(prompts, complete)
        return returned

    made = collector(function)

    async def both():
        one = asyncio.ensure_future(made.sample(draws(1), PARAMS, ("train", 0)))
        other = asyncio.ensure_future(made.sample(draws(2)[2:], PARAMS, ("train", 1)))
        await one
        first_is_done.set()
        return await one, await other

    one, other = asyncio.run(both())
    assert [TOKENIZER.decode(rollouts[0].prompt_ids) for rollouts in (one, other)] == ["0+0=", "1+1="]


def test_a_function_may_ask_from_threads_of_its_own():
    def function(prompts, complete):
        with ThreadPoolExecutor(2) as pool:
            return pool.submit(sampled, prompts, complete).result()

    assert len(collector(function).collect(draws(), PARAMS, ("train", 0))) == 4


def test_completions_are_there_only_while_the_function_runs():
    kept = []

    def function(prompts, complete):
        kept.append(complete)
        return sampled(prompts, complete)

    collector(function).collect(draws(), PARAMS, ("train", 0))
    with pytest.raises(RolloutError, match="only while rollout_func runs"):
        kept[0](["2+2="])


def test_what_it_raises_and_a_late_answer_end_the_batch():
    with pytest.raises(ZeroDivisionError):
        collector(lambda prompts, complete: 1 / 0).collect(draws(), PARAMS, ("train", 0))
    with pytest.raises(RolloutError, match="rollout_func raised SystemExit: 0"):  # which would end the program silently
        collector(lambda prompts, complete: sys.exit(0)).collect(draws(), PARAMS, ("train", 0))
    late = threading.Event()
    with pytest.raises(RolloutError, match=r"longer than rollout_timeout=0.2 s for 4 prompts"):
        collector(lambda prompts, complete: late.wait(5), timeout=0.2).collect(draws(), PARAMS, ("train", 0))
    late.set()


def test_completions_have_the_limit_of_their_prompts_source():
    """2 tokens of one source and 8 of the run; a prompt that continues another one has what is left of its limit."""
    lengths = []

    def function(prompts, complete):
        first = complete(prompts)
        lengths.append([len(one["completion_ids"]) for one in first])
        more = [one["prompt_ids"] + one["completion_ids"][:1] for one in first]
        lengths.append([len(one["completion_ids"]) for one in complete(more)])
        lengths.append([len(one["completion_ids"]) for one in complete(prompts, max_tokens=1)])
        return sampled(prompts, complete)

    rows = [("1+", 2), ("1+2=", None), ("3+", 2)]  # the second begins with the first, and is not of its source
    samples = [PromptSample({"prompt": text}, number, 0, max_tokens=most) for number, (text, most) in enumerate(rows)]
    collector(function).collect(samples, PARAMS, ("train", 0))
    assert lengths == [[2, 4, 2], [1, 4, 1], [1, 1, 1]]
