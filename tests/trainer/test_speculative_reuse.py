"""Runs that reuse completions of earlier epochs end as runs that do not, and say how much they reused."""

import pytest
import torch

from tests.support import runs, tiny

# 8 prompts, 2 a rollout batch of 8 completions, one update each: an epoch is 4 updates, and these are two epochs.
TWO_EPOCHS = {"max_steps": 8, "speculative_reuse": "exact"}
SHARE = "sampling/reused_token_fraction"


def even(completion_ids, **kwargs):
    """The share of even token ids: completions of a prompt rarely have the same."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def starts_even(completion_ids, **kwargs):
    """Whether the first token is even: often the same for a whole group."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def trainer(folder, *, parts=None, **changes):
    return runs.trainer(folder, parts={"reward_funcs": even, **(parts or {})}, **{**TWO_EPOCHS, **changes})


def watched(folder, *, forget=False, parts=None, **changes):
    """A trainer and, as it trains, what it samples: for each rollout batch, token ids by (prompt, sample)."""
    trained = trainer(folder, parts=parts, **changes)
    rollout_batches = []
    collect = trained.collector.collect

    def note(draws, *args):
        if forget:
            trained.rollouts.speculation.load_state_dict(type(trained.rollouts.speculation)(1).state_dict())
        rollouts = collect(draws, *args)
        rollout_batches.append({(d.prompt, d.sample): r.completion_ids for d, r in zip(draws, rollouts, strict=True)})
        return rollouts

    trained.collector.collect = note
    return trained, rollout_batches


def epochs(rollout_batches):
    """The rollout batches of two epochs, each joined."""
    return [
        {slot: ids for rollout_batch in part for slot, ids in rollout_batch.items()}
        for part in (rollout_batches[:4], rollout_batches[4:])
    ]


@pytest.mark.slow
def test_a_policy_that_hardly_changes_reuses_nearly_everything(tmp_path):
    trained, rollout_batches = watched(tmp_path, learning_rate=1e-9)
    trained.train()
    first, second = epochs(rollout_batches)
    assert len(first) == 8 * 4
    assert second == first
    shares = runs.history(trained, SHARE)
    assert shares[:4] == [0.0] * 4
    assert min(shares[4:]) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [1e-3, pytest.param(1e-2, marks=pytest.mark.slow)])
def test_drafts_change_no_completion_and_no_weight(tmp_path, learning_rate):
    reusing, completions = watched(tmp_path / "a", learning_rate=learning_rate, max_completion_length=12)
    reusing.train()
    fresh, expected = watched(tmp_path / "b", learning_rate=learning_rate, max_completion_length=12, forget=True)
    fresh.train()
    assert completions == expected
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(reusing), runs.weights(fresh), strict=True))
    first, second = epochs(completions)
    assert first != second, "the policy has changed"
    assert 0 < sum(runs.history(reusing, SHARE)[4:]) < 4
    assert runs.history(fresh, SHARE) == [0.0] * 8


@pytest.mark.slow
@pytest.mark.parametrize("choice", [{"dynamic_sample": True}, {"prompt_sampler": "difficulty"}], ids=str)
def test_drafts_change_nothing_where_rewards_choose_prompts(tmp_path, choice):
    settings = {**choice, "parts": {"reward_funcs": starts_even}, "learning_rate": 1e-3}
    reusing, completions = watched(tmp_path / "a", **settings)
    reusing.train()
    fresh, expected = watched(tmp_path / "b", forget=True, **settings)
    fresh.train()
    assert completions == expected
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(reusing), runs.weights(fresh), strict=True))
    assert sum(runs.history(reusing, SHARE)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "lenient"])
def test_resuming_with_drafts_is_exact(tmp_path, kind):
    settings = {"speculative_reuse": kind, "learning_rate": 1e-3}
    straight = trainer(tmp_path / "a", **settings, save_strategy="steps", save_steps=5)
    straight.train()
    resumed = trainer(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(straight), runs.weights(resumed), strict=True))
    for name in ("loss", "reward", "entropy", SHARE):
        assert runs.history(straight, name) == runs.history(resumed, name)
    assert runs.history(straight, SHARE)[-1] > 0


@pytest.mark.slow
def test_reuse_can_be_switched_on_and_off_at_a_checkpoint(tmp_path):
    for before, after in (("exact", None), (None, "exact")):
        folder = tmp_path / str(before)
        trainer(folder, max_steps=1, speculative_reuse=before, save_strategy="steps", save_steps=1).train()
        resumed = trainer(folder, max_steps=2, speculative_reuse=after)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 2


def test_evaluation_samples_afresh(tmp_path):
    trained, rollout_batches = watched(
        tmp_path,
        parts={"eval_dataset": tiny.rows(2)},
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8,
    )
    trained.train()
    kept = trained.rollouts.speculation.state_dict()
    seen = trained.evaluate()
    assert not [name for name in seen if "reused" in name]
    assert len(rollout_batches) == 3
    again = trained.rollouts.speculation.state_dict()
    assert all(torch.equal(kept[name], again[name]) for name in kept), "nothing of it is kept"


@pytest.mark.slow
def test_a_stream_in_the_same_order_finds_its_drafts(tmp_path):
    from datasets import Dataset

    stream = Dataset.from_list(tiny.rows(8)).to_iterable_dataset()
    trained, _ = watched(tmp_path, parts={"train_dataset": stream}, learning_rate=1e-9, shuffle_dataset=False)
    trained.train()
    assert min(runs.history(trained, SHARE)[4:]) > 0.95


def test_a_shuffled_stream_is_told_that_it_will_not(tmp_path):
    from datasets import Dataset

    stream = Dataset.from_list(tiny.rows(8)).to_iterable_dataset()
    with pytest.warns(UserWarning, match=r"`speculative_reuse='exact'` has little effect.*shuffle_dataset=False"):
        watched(tmp_path, parts={"train_dataset": stream})


@pytest.mark.slow
def test_stale_tokens_stay_longer_the_more_lenient(tmp_path):
    shares = []
    for lenience in (0.1, 0.7, 1e6):
        settings = {"speculative_reuse": "lenient", "speculative_lenience": lenience, "learning_rate": 1e-3}
        trained = trainer(tmp_path / str(lenience), max_steps=5, **settings)
        trained.train()
        shares.append(runs.history(trained, SHARE)[4])
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] > 0.9


def test_without_reuse_there_is_no_metric(tmp_path):
    trained = trainer(tmp_path, max_steps=1, speculative_reuse=None)
    trained.train()
    assert not runs.history(trained, SHARE)
