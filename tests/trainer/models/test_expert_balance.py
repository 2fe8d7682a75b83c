"""Training mixtures of experts with their load-balancing loss: one loss for an optimizer step, however it is cut."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from covey.core.batch import TrainBatch
from covey.policy.moe import load_balancing_loss
from covey.trainer.loss_terms import ExpertBalance, load_survey
from tests.support import mixtures, runs, tiny
from tests.trainer.test_micro_batches import gradients_of_one_step

COEF = 0.5


def same_rewards(completion_ids, **kwargs):
    return [1.0] * len(completion_ids)


def mixture(**changes):
    return mixtures.model("Qwen3Moe", **changes).double()


def step(folder, prepare=lambda trainer: None, **changes):
    """A step that only the load-balancing loss has a gradient in."""
    parts = {"model": mixture(), "reward_funcs": same_rewards}
    settings = {"router_aux_loss_coef": COEF, "gradient_accumulation_steps": 2, "attn_layout": "shared_prefix"}
    return gradients_of_one_step(folder, prepare, parts=parts, **{**settings, **changes})


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The step in a single pass, and the loss of its tokens by transformers' formula."""
    seen = []

    def watch(trainer):
        of_step = trainer.balance.of_step

        def watching(share, batch, scorer, micro_batches):
            assert share == micro_batches == 1
            seen.append(batch)
            return of_step(share, batch, scorer, micro_batches)

        trainer.balance.of_step = watching

    trainer, gradients = step(tmp_path_factory.mktemp("whole"), watch, max_tokens_per_micro_batch=10**6)
    return trainer, gradients, seen[0]


@pytest.mark.slow
def test_the_step_has_the_loss_of_all_its_tokens(reference):
    trainer, gradients, batch = reference
    assert isinstance(batch, TrainBatch) and len(batch) == 8  # rollouts without advantage are not left out
    model = mixture()
    _, loads = trainer.scorer.with_loads(model, batch, 2)
    loss = load_balancing_loss(loads, loads)
    (COEF * loss).backward()
    logged = runs.history(trainer, "aux_loss")
    assert logged == pytest.approx([loss.item()], rel=1e-5)
    assert runs.history(trainer, "loss") == pytest.approx([COEF * loss.item()], rel=1e-5)
    scale = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
    for ours, parameter in zip(gradients, model.parameters(), strict=True):
        theirs = torch.zeros_like(ours) if parameter.grad is None else parameter.grad
        assert (ours - theirs).abs().max() <= 1e-5 * scale


CUTS = {
    "passes of a rollout or two": {"max_tokens_per_micro_batch": 16},
    "other layouts": {"max_tokens_per_micro_batch": 40, "attn_layout": "padded"},
    "other micro-batches": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", CUTS.values(), ids=CUTS)
def test_how_a_step_is_cut_changes_nothing(tmp_path, reference, changes):
    trainer, gradients = step(tmp_path, **changes)
    scale = max(grad.abs().max().item() for grad in reference[1])
    for ours, expected in zip(gradients, reference[1], strict=True):
        assert (ours - expected).abs().max() <= 1e-5 * scale
    assert runs.history(trainer, "aux_loss") == pytest.approx(runs.history(reference[0], "aux_loss"), rel=1e-5)


@pytest.mark.slow
def test_a_micro_batch_that_runs_out_of_memory_has_the_same_gradient(tmp_path, reference):
    def fail_once(trainer):
        compute, left = trainer.compute_loss, [True]

        def computing(model, inputs, *args, **kwargs):
            loss = compute(model, inputs, *args, **kwargs)
            if left.pop() if left else False:
                raise torch.OutOfMemoryError("injected")
            return loss

        trainer.compute_loss = computing

    trainer, gradients = step(tmp_path, fail_once, max_tokens_per_micro_batch=10**6)
    assert trainer.updates.runner.limit is not None
    scale = max(grad.abs().max().item() for grad in reference[1])
    assert all((a - b).abs().max() <= 1e-5 * scale for a, b in zip(gradients, reference[1], strict=True))


@pytest.mark.slow
def test_the_loss_is_over_all_rollout_batches_of_a_step(tmp_path):
    losses = []

    def watch(trainer):
        of_step = trainer.balance.of_step

        def watching(share, batch, scorer, micro_batches):
            assert (share, len(batch)) == (1.0, 8)  # two rollout batches of 4
            loads = load_survey(scorer, trainer.balance.top_k, batch)
            losses.append(load_balancing_loss(loads, loads).item())
            return of_step(share, batch, scorer, micro_batches)

        trainer.balance.of_step = watching

    trainer, _ = step(tmp_path, watch, gradient_accumulation_steps=2, steps_per_generation=1)
    assert runs.history(trainer, "aux_loss") == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asks", "given", "coef"), [(False, None, 0.001), (True, None, 0.001), (True, 0.0, 0.0), (False, 0.2, 0.2)]
)
def test_the_weight_is_the_configs_or_the_models_own(tmp_path, asks, given, coef):
    model = mixtures.model("Mixtral", output_router_logits=asks)
    trainer = runs.trainer(tmp_path, "rloo", parts={"model": model}, router_aux_loss_coef=given, max_steps=1)
    assert trainer.balance.coef == coef
    trainer.train()
    assert ("aux_loss" in {name for log in trainer.state.log_history for name in log}) == (coef > 0)
    trainer.save_model(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved.get("output_router_logits", False) == asks


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(("name", "coef"), [("Qwen3Moe", 0.001), ("GptOss", 0.001), ("DeepseekV3", 0.0)])
def test_models_bring_their_own_weight(name, coef, adapter):
    model = mixtures.model(name)
    policy = get_peft_model(model, LoraConfig(target_modules=["o_proj"])) if adapter else model
    assert model.config.to_dict().get("output_router_logits", False) is False
    assert ExpertBalance(SimpleNamespace(router_aux_loss_coef=None), policy).coef == coef


def test_a_dense_model_has_no_such_loss():
    assert ExpertBalance(SimpleNamespace(router_aux_loss_coef=None), tiny.model()).coef == 0


@pytest.mark.slow
def test_loads_become_even(tmp_path):
    parts = {"model": mixtures.model("Qwen3Moe"), "reward_funcs": same_rewards}
    settings = {"per_device_train_batch_size": 16, "router_aux_loss_coef": 1.0, "max_steps": 12, "learning_rate": 2e-3}
    trainer = runs.trainer(tmp_path, parts=parts, **settings)
    trainer.train()
    losses = runs.history(trainer, "aux_loss")
    # 2 is the least: two of four experts for each token.
    assert 2 <= sum(losses[-4:]) / 4 < 2 + 0.5 * (sum(losses[:4]) / 4 - 2)


def test_an_evaluation_has_it_as_well(tmp_path):
    parts = {"model": mixtures.model("Qwen3Moe"), "reward_funcs": same_rewards, "eval_dataset": tiny.rows(4)}
    trainer = runs.trainer(
        tmp_path, parts=parts, router_aux_loss_coef=0.5, per_device_eval_batch_size=8, max_tokens_per_micro_batch=30
    )
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(0.5 * metrics["eval_aux_loss"], rel=1e-4)
    assert metrics["eval_aux_loss"] > 2
