"""Samples of an engine that differs from the trainer: what they weigh, what that costs, and what is logged."""

import math
from dataclasses import replace

import pytest
import torch

from covey.core.batch import segment_sum
from covey.core.engine import EngineTraits
from covey.trainer import experience
from tests.support import runs, tiny
from tests.support.foreign import perturbed, sample_from

ON_POLICY: dict = {}
OFF_POLICY = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2}
CORRECTED = {"correct_built_in_engine": True, "engine_parity": "off"}
PREFIX = "sampling/importance_sampling_ratio"


def foreign(tmp_path, method="grpo", *, model=None, engine=None, **settings):
    """A trainer whose engine samples from a perturbed copy of the model."""
    model = model or tiny.model()
    settings = {"vllm_importance_sampling_mode": "token_truncate", "max_steps": 1, **CORRECTED, **settings}
    trainer = runs.trainer(tmp_path, method, parts={"model": model}, **settings)
    return sample_from(trainer, model=perturbed(model), **(engine or {}))


def counted(trainer):
    """How many tokens each scoring pass without gradient has seen."""
    score, seen = trainer.batch_scorer.logprobs, []

    def counting(model, batch, *settings):
        seen.append(batch.num_tokens)
        return score(model, batch, *settings)

    trainer.batch_scorer.logprobs = counting
    return seen


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ON_POLICY, OFF_POLICY], ids=["on-policy", "off-policy"])
def test_token_weights_are_trainer_over_engine_probabilities(tmp_path, policy):
    trainer = foreign(tmp_path, vllm_importance_sampling_clip_max=1.5, vllm_importance_sampling_clip_min=0.8, **policy)
    kept, surrogate, used = runs.scored(trainer), trainer.run.algorithm.objective.surrogate, []

    def watching(x):
        used.append(x.mismatch_weights)
        return surrogate(x)

    objective = replace(trainer.run.algorithm.objective, surrogate=watching)
    trainer.run.method.algorithm = replace(trainer.run.algorithm, objective=objective)
    trainer.train()
    (batch, scored), *_ = kept
    expected = (scored - batch.engine_logprobs).exp().clamp(0.8, 1.5)
    weights = torch.cat(used)
    assert weights.min() >= 0.8 and weights.max() <= 1.5
    assert weights.std() > 0.05
    if policy:
        torch.testing.assert_close(batch.mismatch_weights, expected)
    else:
        assert batch.mismatch_weights is None
        torch.testing.assert_close(weights.sort().values, expected.sort().values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss_type", ["dapo", "vespo", "gmpo"])
def test_training_and_scoring_pass_give_the_same_update(tmp_path, monkeypatch, loss_type):
    results = []
    for before in (False, True):
        trainer = foreign(tmp_path, loss_type=loss_type, optim="sgd", max_grad_norm=0)
        monkeypatch.setattr(experience, "has_dropout", lambda policy, before=before: before)
        scored = counted(trainer)
        trainer.train()
        assert bool(scored) == before
        results.append(runs.weights(trainer))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_micro_batches_do_not_change_the_corrected_update(tmp_path):
    results = []
    for rows, steps in ((16, 1), (2, 8)):
        trainer = foreign(
            tmp_path,
            vllm_importance_sampling_mode="sequence_truncate",
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=steps,
            optim="sgd",
            max_grad_norm=0,
        )
        trainer.train()
        results.append(runs.weights(trainer))
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(whole, cut, rtol=1e-5, atol=1e-6)


def test_a_mask_that_drops_everything_changes_no_weight(tmp_path):
    # every log-prob is reported 5 nats too low: ρ is around e^5 and beyond the bound of 3
    model = tiny.model()
    trainer = runs.trainer(
        tmp_path, parts={"model": model}, vllm_importance_sampling_mode="token_mask", max_steps=1, **CORRECTED
    )
    sample_from(trainer, report=lambda logprobs: [logprob - 5 for logprob in logprobs])
    before = runs.weights(trainer)
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, runs.weights(trainer), strict=True))
    assert runs.history(trainer, f"{PREFIX}/outside") == [1.0]
    assert runs.history(trainer, f"{PREFIX}/max") == [0.0]
    assert runs.history(trainer, "sampling/sampling_logp_difference/mean") == [pytest.approx(5, abs=1e-4)]


@pytest.mark.parametrize("weighs", [True, False])
@pytest.mark.parametrize("policy", [ON_POLICY, OFF_POLICY], ids=["on-policy", "off-policy"])
def test_completions_are_rejected_by_their_geometric_mean(tmp_path, policy, weighs):
    settings = {"geometric_mask_min": 0.95, "vllm_importance_sampling_correction": weighs}
    trainer = foreign(tmp_path, vllm_importance_sampling_clip_max=None, **settings, **policy)
    kept, surrogate, used = runs.scored(trainer), trainer.run.algorithm.objective.surrogate, []

    def watching(x):
        used.append((x.mismatch_weights, x.sampled))
        return surrogate(x)

    objective = replace(trainer.run.algorithm.objective, surrogate=watching)
    trainer.run.method.algorithm = replace(trainer.run.algorithm, objective=objective)
    trainer.train()
    (batch, scored), *_ = kept
    difference = scored - batch.engine_logprobs
    means = (segment_sum(difference, batch.lengths) / batch.lengths).exp()
    outside = (means < 0.95).float().mean().item()
    assert 0 < outside < 1
    assert runs.history(trainer, "sampling/geometric_ratio/outside")[0] == pytest.approx(outside)
    stays = (means >= 0.95).repeat_interleave(batch.lengths)
    expected = torch.where(stays, difference.exp() if weighs else 1.0, 0.0)
    weights = torch.cat([weight for weight, _ in used])
    if policy:
        torch.testing.assert_close(batch.mismatch_weights, expected)
    else:
        torch.testing.assert_close(weights.sort().values, expected.sort().values, rtol=1e-4, atol=1e-4)


# ---- metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ON_POLICY, OFF_POLICY], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_are_those_of_the_difference(tmp_path, policy, level):
    trainer = foreign(
        tmp_path, vllm_importance_sampling_mode=f"{level}_truncate", vllm_importance_sampling_clip_max=2.0, **policy
    )
    kept = runs.scored(trainer)
    trainer.train()
    (batch, scored), *_ = kept
    difference = scored - batch.engine_logprobs
    log_rho = difference if level == "token" else segment_sum(difference, batch.lengths)
    rho = log_rho.exp()
    logged = trainer.state.log_history[0]
    assert logged["sampling/sampling_logp_difference/mean"] == pytest.approx(difference.abs().mean().item(), rel=1e-4)
    assert logged["sampling/sampling_logp_difference/max"] == pytest.approx(difference.abs().max().item(), rel=1e-4)
    assert logged[f"{PREFIX}/min"] == pytest.approx(rho.clamp(max=2).min().item(), rel=1e-4)
    assert logged[f"{PREFIX}/mean"] == pytest.approx(rho.clamp(max=2).mean().item(), rel=1e-4)
    assert logged[f"{PREFIX}/max"] == pytest.approx(rho.clamp(max=2).max().item(), rel=1e-4)
    assert logged[f"{PREFIX}/outside"] == pytest.approx((rho > 2).float().mean().item())


def test_an_evaluation_weighs_and_logs_as_well(tmp_path):
    model = tiny.model()
    trainer = runs.trainer(
        tmp_path,
        parts={"model": model, "eval_dataset": tiny.rows(4)},
        per_device_eval_batch_size=4,
        **CORRECTED,
    )
    metrics = sample_from(trainer, model=perturbed(model)).evaluate()
    assert metrics["eval_sampling/sampling_logp_difference/mean"] > 0.01


# ---- when it is done, and what it costs ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ON_POLICY, OFF_POLICY], ids=["on-policy", "off-policy"])
def test_the_built_in_engine_is_not_corrected_unless_asked_for(tmp_path, policy):
    trainer = runs.trainer(tmp_path, engine_parity="off", **policy)
    passes = counted(trainer)
    trainer.train()
    assert trainer.run.algorithm.objective.correction is None
    assert len(passes) == (1 if policy else 0)
    assert runs.history(trainer, f"{PREFIX}/mean") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings", "passes"),
    [
        ("grpo", {"max_steps": 2}, 0),  # two rollout batches, each compared in its training passes
        ("grpo", {"max_steps": 2, "loss_type": "vespo"}, 0),
        ("grpo", {**OFF_POLICY, "max_steps": 4}, 1),  # one rollout batch, whose old log-probs are scored anyway
        ("rloo", {"beta": 0.0}, 0),
        ("rloo", {"beta": 0.05}, 2),  # those of the KL penalty: policy and reference
    ],
)
def test_the_correction_costs_no_pass_of_its_own(tmp_path, method, settings, passes):
    for name, correction in (("without", {}), ("with", {"correct_built_in_engine": True})):
        trainer = runs.trainer(
            tmp_path / name, method, engine_parity="off", **{"max_steps": 1, **settings}, **correction
        )
        seen = counted(trainer)
        trainer.train()
        assert len(seen) == passes
    assert runs.history(trainer, f"{PREFIX}/mean") != []


def test_dropout_takes_a_pass_without_it(tmp_path):
    trainer = foreign(tmp_path, model=tiny.model(attention_dropout=0.2), gradient_accumulation_steps=1)
    passes, kept = counted(trainer), runs.scored(trainer)
    trainer.train()
    (batch, scored), *_ = kept
    assert len(passes) == 2  # one of them by `gathered`
    torch.testing.assert_close(batch.mismatch_weights, (scored - batch.engine_logprobs).exp().clamp(max=3))


@pytest.mark.slow
@pytest.mark.parametrize("reuse", ["exact", "lenient"])
def test_drafts_are_reported_as_the_current_policy_sees_them(tmp_path, reuse):
    trainer = runs.trainer(tmp_path, speculative_reuse=reuse, correct_built_in_engine=True, max_steps=6)
    trainer.train()
    assert max(runs.history(trainer, "sampling/reused_token_fraction")) > 0
    assert max(runs.history(trainer, "sampling/sampling_logp_difference/max")) < 1e-3


def test_vespo_takes_its_ratios_token_by_token(tmp_path):
    trainer = runs.trainer(tmp_path, loss_type="vespo", correct_built_in_engine=True)
    assert trainer.args.vllm_importance_sampling_mode == "sequence_mask"
    assert trainer.run.algorithm.objective.correction.keywords["mode"] == "token_mask"


def test_switched_off_nothing_is_weighed(tmp_path, recwarn):
    trainer = runs.trainer(tmp_path, vllm_importance_sampling_correction=False)
    sample_from(trainer, model=perturbed(tiny.model()))
    assert trainer.run.algorithm.objective.correction is None


# ---- what cannot be compared -----------------------------------------------------------------------------------------


def test_log_probs_after_and_before_a_cut_are_not_compared(tmp_path):
    trainer = runs.trainer(tmp_path, top_k=5, correct_built_in_engine=True, off_policy_mask_threshold=0.1, **OFF_POLICY)
    with pytest.warns(UserWarning, match="not corrected: it reports log-probs after top_k had their effect"):
        sample_from(
            trainer,
            report=lambda logprobs: [logprob / 2 for logprob in logprobs],
            traits=EngineTraits(reports_after_cut=True),
        )
    kept = runs.scored(trainer)
    trainer.train()
    assert trainer.run.algorithm.objective.correction is None
    assert all(batch.engine_logprobs is None for batch, _ in kept)


def test_without_a_cut_the_engine_is_corrected_like_others(tmp_path):
    trainer = runs.trainer(tmp_path, temperature=0.8)
    sample_from(trainer, traits=EngineTraits(reports_after_cut=True))
    assert trainer.run.algorithm.objective.correction is not None


@pytest.mark.parametrize("extra", ["logit_bias", "presence_penalty", "structured_outputs"])
def test_engine_settings_may_reshape_the_distribution_too(tmp_path, extra):
    trainer = runs.trainer(tmp_path)
    trainer.rollouts.params = replace(trainer.rollouts.params, extra={extra: 1, "skip_special_tokens": False})
    with pytest.warns(UserWarning, match=f"after {extra} had"):
        sample_from(trainer, traits=EngineTraits(reports_after_cut=True))


def test_an_engine_that_reports_nothing_is_pointed_out_once(tmp_path):
    trainer = sample_from(runs.trainer(tmp_path), report=lambda logprobs: None)
    with pytest.warns(UserWarning, match="reported no log-probs for") as caught:
        trainer.train()
    assert len([w for w in caught if "reported no log-probs" in str(w.message)]) == 1
    assert runs.history(trainer, f"{PREFIX}/mean") == []


def test_missing_log_probs_count_as_agreement(tmp_path):
    def without_the_first(logprobs):
        return [math.nan, *logprobs[1:]]

    trainer = foreign(tmp_path, engine={"report": without_the_first}, gradient_accumulation_steps=1)
    with pytest.warns(UserWarning, match="reported no log-probs for 4 of"):
        trainer.train()
    assert math.isfinite(runs.history(trainer, "loss")[0])
    assert all(parameter.isfinite().all() for parameter in runs.weights(trainer))
