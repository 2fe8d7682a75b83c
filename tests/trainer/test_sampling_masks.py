"""Runs that keep sampling masks train the distribution that was sampled from, whatever happens in between."""

from dataclasses import replace

import pytest
import torch

from covey.core.engine import EngineTraits
from covey.core.records import Rollout
from tests.support import runs, tiny
from tests.support.engines import CopyEngine
from tests.support.players import PLAYERS

KEPT = {"keep_sampling_mask": True, "correct_built_in_engine": True}
DIFFERENCE = "sampling/sampling_logp_difference/max"
QUIET = pytest.mark.filterwarnings("ignore::UserWarning")
FILTERS = {"top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2}


def trained(folder, **settings):
    trainer = runs.trainer(folder, **{**KEPT, **settings})
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("filters", [*({name: value} for name, value in FILTERS.items()), FILTERS], ids=str)
def test_the_ratio_is_1_on_policy(tmp_path, filters):
    trainer = trained(tmp_path, temperature=0.9, max_steps=3, **filters)
    ratios = [runs.history(trainer, f"sampling/importance_sampling_ratio/{which}") for which in ("min", "max")]
    assert torch.tensor(ratios).sub(1).abs().max() < 1e-5
    assert max(runs.history(trainer, DIFFERENCE)) > 0, "two computations were compared"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"attn_layout": "padded", "num_iterations": 2},
        {"attn_layout": "packed", "entropy_coef": 0.01},
        {"gradient_checkpointing": True, "beta": 0.1, "num_iterations": 2},
        {"top_entropy_quantile": 0.5, "dynamic_sample": True},
        {"parts": {"rollout_func": PLAYERS["one rollout"]}, "max_completion_length": 12},
        {"parts": {"rollout_func": PLAYERS["a group"]}, "beta": 0.1},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_options_find_the_distribution_that_was_sampled_from(tmp_path, settings):
    trainer = trained(tmp_path, **FILTERS, **settings)
    assert max(runs.history(trainer, DIFFERENCE)) < 1e-5
    assert all(torch.isfinite(weight).all() for weight in runs.weights(trainer))


@pytest.mark.slow
def test_entropies_are_over_the_kept_tokens(tmp_path):
    # With top_k=2 no entropy exceeds that of two equal chances, measured while sampling and while training alike.
    for number, entropy_coef in enumerate((0.0, 0.01)):
        trainer = trained(tmp_path / str(number), top_k=2, entropy_coef=entropy_coef)
        assert 0 < max(runs.history(trainer, "entropy")) <= torch.tensor(2.0).log() + 1e-6


@pytest.mark.slow
@QUIET
def test_the_reference_is_over_the_kept_tokens(tmp_path):
    # With top_k=1 policy and reference are certain of what comes, so the penalty is 0 whatever their weights.
    trainer = trained(tmp_path, top_k=1, beta=1.0, max_steps=3, num_iterations=2)
    assert runs.history(trainer, "kl") == [0.0] * 3


@pytest.mark.slow
def test_drafts_have_the_masks_of_the_policy_that_verified_them(tmp_path):
    settings = {**FILTERS, "repetition_penalty": 1.0, "speculative_reuse": "exact", "learning_rate": 1e-3}
    trainer = trained(tmp_path, max_steps=8, max_completion_length=12, **settings)
    assert sum(runs.history(trainer, "sampling/reused_token_fraction")[4:]) > 0
    assert max(runs.history(trainer, DIFFERENCE)) < 1e-5


@pytest.mark.slow
@QUIET
@pytest.mark.parametrize("staleness", [0, 1])
def test_masks_of_another_engine_count(tmp_path, staleness):
    engine = CopyEngine(tiny.model())
    engine.traits = EngineTraits(returns_masks=True)
    # Nothing is learned, so stale weights are those of now.
    settings = {"max_staleness": staleness, "learning_rate": 1e-12, "engine_parity": "raise"}
    trainer = trained(tmp_path, parts={"engine": engine}, max_steps=4, **FILTERS, **settings)
    assert max(runs.history(trainer, DIFFERENCE)) < 1e-5


@pytest.mark.slow
def test_resuming_in_the_middle_of_a_rollout_batch_is_exact(tmp_path):
    settings = {**FILTERS, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 4}
    straight = trained(tmp_path / "a", save_strategy="steps", save_steps=1, **settings)
    resumed = runs.trainer(tmp_path / "b", **KEPT, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(straight), runs.weights(resumed), strict=True))


def test_filters_without_the_option_train_the_whole_softmax(tmp_path):
    trainer = runs.trainer(tmp_path, correct_built_in_engine=True, **FILTERS)
    collect, sampled = trainer.collector.collect, []
    trainer.collector.collect = lambda *args: sampled.extend(collect(*args)) or sampled[-8:]
    trainer.train()
    assert sampled and all(rollout.sampling_mask is None for rollout in sampled)
    assert max(runs.history(trainer, DIFFERENCE)) < 1e-5


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_an_engine_that_returns_no_masks_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"keep_sampling_mask=True, and CopyEngine does not say .*returns_masks"):
        runs.trainer(tmp_path, top_p=0.8, keep_sampling_mask=True, parts={"engine": CopyEngine(tiny.model())})


def test_settings_that_a_mask_does_not_tell_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"keep_sampling_mask=True with generation_kwargs=.*only the effects of top_p"):
        runs.trainer(tmp_path, top_p=0.8, keep_sampling_mask=True, generation_kwargs={"presence_penalty": 0.5})
    trained(tmp_path, top_p=0.8, generation_kwargs={"stop": ["7"]}, max_steps=1)


async def without_masks(row, engine):
    episode = engine.begin()
    await episode.sample()
    done = episode.done()
    return Rollout(done.prompt_ids, done.completion_ids, done.sampled, done.logprobs, done.completion, done.finish)


@pytest.mark.parametrize("function", [without_masks, PLAYERS["a rollout batch"]])
def test_rollouts_without_masks_end_the_run(tmp_path, function):
    trainer = runs.trainer(tmp_path, top_p=0.8, keep_sampling_mask=True, parts={"rollout_func": function})
    with pytest.raises(ValueError, match=r"a rollout has no `sampling_mask`"):
        trainer.train()


async def another_tokens_masks(row, engine):
    episode = engine.begin()
    await episode.sample()
    done = episode.done()
    return replace(done, sampling_mask=[[(token + 1) % 50] for token in done.completion_ids])


def test_masks_without_the_sampled_token_end_the_run(tmp_path):
    parts = {"rollout_func": another_tokens_masks}
    trainer = runs.trainer(tmp_path, top_p=0.8, keep_sampling_mask=True, parts=parts)
    with pytest.raises(ValueError, match=r"`sampling_mask` lists 1 tokens .* probability would be 0"):
        trainer.train()


async def its_own_masks(row, engine):
    episode = engine.begin()
    await episode.sample()
    done = episode.done()
    return replace(done, sampling_mask=[[token] for token in done.completion_ids])


def test_masks_that_were_not_asked_for_are_told_and_left_out(tmp_path):
    """Over a mask of one token every probability would be 1, and every gradient 0."""
    trainer = runs.trainer(tmp_path, max_steps=1, parts={"rollout_func": its_own_masks})
    with pytest.warns(UserWarning, match="not used because keep_sampling_mask is False"):
        trainer.train()
    assert runs.history(trainer, "grad_norm")[0] > 0
