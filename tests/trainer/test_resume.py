"""A run that was stopped and resumed ends where an uninterrupted one does, bit by bit."""

import contextlib
import os
import re
import shutil
import time
import warnings

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from covey import GRPOTrainer
from covey.rewards import RewardError
from covey.trainer.checkpoint import superfluous_checkpoints
from tests.support import runs, tiny

VARIANTS = {
    "between rollout batches": {},
    "in the middle of a rollout batch": {
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "num_iterations": 2,
    },
    "with a reference that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "with a teacher that follows": {"teacher": "follower", "teacher_mixup_alpha": 0.3, "teacher_sync_steps": 2},
    "in the middle of a generation with a teacher": {
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "teacher": "start",
        "teacher_loss": "divergence",
    },
    "in the middle of a generation with a teacher over the whole vocabulary": {
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "teacher": "start",
        "teacher_loss": "divergence",
        "teacher_top_k": -1,
        "teacher_beta": 0.5,
    },
    "with an adaptive entropy bonus": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 9.0},
    "in the second epoch": {"max_steps": 7},
    "with dynamic sampling": {"dynamic_sample": True},
    "with prompts by difficulty": {"prompt_sampler": "difficulty", "dynamic_sample": True},
    "in the middle of a refilled rollout batch": {
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "dynamic_sample": True,
        "prompt_sampler": "difficulty",
    },
    "in the middle of a rollout batch whose engine is corrected": {
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "correct_built_in_engine": True,
    },
    "with muon": {"optim": "muon", "weight_decay": 0.1},
    "with weights in bfloat16 that are rounded by chance": {
        "optim": "adamw_stochastic",
        "learning_rate": 1e-4,
        "dtype": torch.bfloat16,
    },
    "with rollout batches that share an optimizer step": {
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
        "prompt_sampler": "difficulty",
    },
}


def sometimes_equal(prompts, completion_ids, **kwargs):
    """Prompts of even numbers give no signal."""
    return [float(sum(ids) % 7 * (int(p[0]) % 2)) for p, ids in zip(prompts, completion_ids, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_resuming_is_exact(tmp_path, method, variant):
    settings = {"max_steps": 5, **VARIANTS[variant]}
    dtype = settings.pop("dtype", torch.float32)
    rewards = {"reward_funcs": sometimes_equal} if {"dynamic_sample", "prompt_sampler"} & set(settings) else {}
    last = settings["max_steps"]
    stop = last - 1 if "epoch" in variant else 3
    saving = {"save_strategy": "steps", "save_steps": stop}

    def parts():
        return {**rewards, "model": tiny.model().to(dtype)}

    straight = runs.trainer(tmp_path, method, parts=parts(), **{**settings, **saving})
    straight.train()
    resumed = runs.trainer(tmp_path, method, parts=parts(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert_alike(straight, resumed)


@pytest.mark.slow
def test_saving_a_checkpoint_changes_nothing(tmp_path):
    settings = {"max_steps": 5, **VARIANTS["in the middle of a refilled rollout batch"]}
    made = []
    for saving in ({}, {"save_strategy": "steps", "save_steps": 2}):
        made.append(runs.trainer(tmp_path, parts={"reward_funcs": sometimes_equal}, **{**settings, **saving}))
        made[-1].train()
    assert_alike(*made)


def assert_alike(one, other):
    for a, b in zip(runs.weights(one), runs.weights(other), strict=True):
        assert torch.equal(a, b)
    for name in ("loss", "reward", "num_tokens", "entropy", "grad_norm", "dynamic_sampling/cost", "difficulty/chance"):
        assert runs.history(one, name) == runs.history(other, name)


@pytest.mark.slow
def test_checkpoints_appear_whole_or_not_at_all(tmp_path):
    trained = runs.trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=3, save_total_limit=2)
    write = trained.checkpoints.before_saving
    seen = []
    trained.checkpoints.before_saving = lambda: seen.append(sorted(os.listdir(tmp_path))) or write()
    trained.train()
    # While checkpoint N is being written, only earlier ones are to be seen.
    assert [[name for name in names if name.startswith("checkpoint")] for names in seen] == [
        [],
        ["checkpoint-1"],
        ["checkpoint-1", "checkpoint-2"],
    ]
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("checkpoint")) == [
        "checkpoint-2",
        "checkpoint-3",
    ]
    assert ".saving" not in os.listdir(tmp_path)


@pytest.mark.slow
def test_the_best_checkpoint_is_found_and_loaded(tmp_path):
    from tests.support import tiny

    trained = runs.trainer(
        tmp_path,
        parts={"eval_dataset": tiny.rows(2)},
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        max_steps=3,
    )
    trained.train()
    best = trained.state.best_model_checkpoint
    assert best and os.path.isdir(best) and ".saving" not in best


@pytest.mark.slow
def test_resuming_a_stream_is_exact(tmp_path):
    from datasets import Dataset

    from tests.support import tiny

    def make(folder, **changes):
        stream = Dataset.from_list(tiny.rows(6)).to_iterable_dataset()
        return runs.trainer(folder, parts={"train_dataset": stream}, max_steps=8, shuffle_dataset=True, **changes)

    straight = make(tmp_path / "a", save_strategy="steps", save_steps=5)  # a pass is three rollout batches
    straight.train()
    resumed = make(tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    for a, b in zip(runs.weights(straight), runs.weights(resumed), strict=True):
        assert torch.equal(a, b)


def test_a_run_can_be_started_again(tmp_path):
    trained = runs.trainer(
        tmp_path, gradient_accumulation_steps=1, steps_per_generation=2, num_iterations=2, max_steps=3
    )
    trained.train()  # ends in the middle of a rollout batch
    trained.train()
    assert trained.state.global_step == 3


def test_the_config_may_say_what_to_resume_from(tmp_path):
    runs.trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=2).train()
    resumed = runs.trainer(tmp_path, max_steps=3, resume_from_checkpoint="true")
    resumed.train()
    steps = [log["step"] for log in resumed.state.log_history if "reward" in log]
    assert resumed._initial_global_step == 2 and steps[-1] == 3


def test_a_run_that_is_resumed_at_its_end_takes_no_step_more(tmp_path):
    ended = runs.trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    ended.train()
    resumed = runs.trainer(tmp_path, max_steps=2)
    with pytest.warns(UserWarning, match="nothing is left to train: the checkpoint is of step 2"):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(ended), runs.weights(resumed), strict=True))


def test_resuming_without_the_buffer_says_what_is_missing(tmp_path):
    cycle = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}
    runs.trainer(tmp_path, save_only_model=True, save_strategy="steps", save_steps=3, **cycle).train()
    resumed = runs.trainer(tmp_path, **cycle)
    with pytest.raises(ValueError, match="save_only_model=True"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.slow
def test_a_clock_that_was_set_back_costs_no_checkpoint(tmp_path):
    cycle = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    runs.trainer(tmp_path, **cycle, max_steps=2).train()
    for path in tmp_path.glob("checkpoint-*"):
        os.utime(path, (time.time() + 3600,) * 2)
    runs.trainer(tmp_path, **cycle, max_steps=4).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize(
    ("limit", "best", "deleted"),
    [(None, None, []), (1, None, [2, 9, 10]), (2, None, [2, 9]), (2, 2, [9, 10]), (1, 10, [2, 9]), (4, None, [])],
)
def test_the_checkpoints_of_the_earliest_steps_are_superfluous(tmp_path, limit, best, deleted):
    for step in (2, 9, 10, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
    keep = [str(tmp_path / "checkpoint-3"), best and str(tmp_path / f"checkpoint-{best}")]  # 3 was just written
    found = superfluous_checkpoints(str(tmp_path), limit, keep)
    assert [int(path.name[11:]) for path in found] == deleted


@pytest.mark.slow
def test_checkpoints_of_an_earlier_run_are_left_alone(tmp_path, capsys):
    """Those of steps 2 and 9; this run replaces its own step 2."""
    cycle = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    runs.trainer(tmp_path, **cycle, max_steps=2).train()
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-9")
    trainer = runs.trainer(tmp_path, **cycle, max_steps=3)
    with pytest.warns(UserWarning, match="holds files of an earlier run: checkpoint-2, checkpoint-9, "):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-9"]
    assert "checkpoint-3, is kept" in trainer.finite._where_to_resume()


def once(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


CHANGES = {
    "nothing": ({}, {}, None),
    "places": ({"save_steps": 9, "logging_steps": 2, "run_name": "again"}, {}, None),
    "settings": (
        {"max_steps": 3, "beta": 0.1, "learning_rate": 1e-5, "weight_decay": 0.1},
        {},
        r"has changed\. Takes effect: beta=0\.1 \(was 0\.0\), max_steps=3 \(was 2\)\. Has no effect: learning_rate=1e-0"
        r"5 \(was 0\.01\), weight_decay=0\.1 \(was 0\.0\), as the checkpoint holds it\.",
    ),
    "rows": (
        {},
        {"train_dataset": tiny.rows()[:-1]},
        r"another dataset \(\d+ rows, now \d+\); the run continues at the same row",
    ),
    "content": ({}, {"train_dataset": tiny.rows()[::-1]}, r"another dataset \(as many rows, other content\)"),
    "reward": ({}, {"reward_funcs": once}, r"Takes effect: other reward functions \(longer, once\)"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run of two steps with a checkpoint after the first, which tests leave as it is."""
    folder = tmp_path_factory.mktemp("saved")
    runs.trainer(folder, save_strategy="steps", save_steps=1, max_steps=2).train()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_changes_since_the_checkpoint_are_listed(saved, tmp_path, name):
    settings, parts, says = CHANGES[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = runs.trainer(tmp_path, parts=parts, **{"save_strategy": "steps", "max_steps": 2, **settings})
        resumed.train(resume_from_checkpoint=str(saved / "checkpoint-1"))
    heard = [str(one.message) for one in caught if "was saved, this run has changed" in str(one.message)]
    assert len(heard) == (says is not None), heard
    assert says is None or re.search(says, heard[0]), heard


PENALISED = {"beta": 0.1, "save_strategy": "steps", "save_steps": 1}
FOLLOWS = {"sync_ref_model": True, "ref_model_sync_steps": 1}


@pytest.mark.slow
def test_another_reference_model_is_refused(tmp_path):
    runs.trainer(tmp_path, **PENALISED, max_steps=1).train()
    for settings in ({}, FOLLOWS):  # it would follow from there
        resumed = runs.trainer(tmp_path, parts={"model": tiny.model(seed=1)}, **PENALISED, **settings, max_steps=2)
        with pytest.raises(ValueError, match=r"another reference model .* such as model\.embed_tokens\.weight"):
            resumed.train(resume_from_checkpoint=True)
    runs.trainer(tmp_path, parts={"model": tiny.model(seed=1)}, max_steps=2).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_reference_that_has_followed_is_the_checkpoints(tmp_path):
    """Also after a resume that has it follow no more, and whatever model is given."""
    runs.trainer(tmp_path, **PENALISED, **FOLLOWS, max_steps=1).train()
    straight = runs.trainer(tmp_path, parts={"model": tiny.model(seed=1)}, **PENALISED, max_steps=3)
    straight.train(resume_from_checkpoint=True)
    resumed = runs.trainer(tmp_path, **PENALISED, max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_alike(straight, resumed)


def lora(**settings):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **settings})


@pytest.fixture(scope="module")
def saved_adapter(tmp_path_factory):
    """A checkpoint of an adapter, which tests leave as it is."""
    folder = tmp_path_factory.mktemp("saved")
    saving = {"save_strategy": "steps", "save_steps": 1}
    runs.trainer(folder, parts={"peft_config": lora(lora_alpha=8)}, **saving, max_steps=1).train()
    return str(folder / "checkpoint-1")


def ready():
    torch.manual_seed(3)
    return get_peft_model(tiny.model(), lora())


@pytest.mark.slow
@pytest.mark.parametrize("began", ["config", "model"])
def test_the_reference_of_an_adapter_is_that_of_the_start(tmp_path, began):
    """A new adapter's is the base, and a given one's the adapter as it was given; a resume may give either."""
    ways = {"config": lambda: {"peft_config": lora()}, "model": lambda: {"model": ready()}}
    straight = runs.trainer(tmp_path, parts=ways[began](), **PENALISED, max_steps=3)
    straight.train()
    for way in ways.values():
        resumed = runs.trainer(tmp_path / "other", parts=way(), **PENALISED, max_steps=3)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert_alike(straight, resumed)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"r": 8}, r"r=4 \(now 8\)"),
        ({"lora_alpha": 32}, r"lora_alpha=8 \(now 32\)"),
        ({"use_rslora": True}, r"use_rslora=False \(now True\)"),
        ({"target_modules": ["k_proj"]}, r"target_modules=\['q_proj', 'v_proj'\] \(now \['k_proj'\]\)"),
        ({"use_dora": True}, r"use_dora=False \(now True\)"),
        ({"trainable_token_indices": [5]}, r"trainable_token_indices=None \(now \[5\]\)"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=None \(now \['lm_head'\]\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_settings_of_an_adapter_are_refused_by_name(saved_adapter, tmp_path, changed, says):
    resumed = runs.trainer(tmp_path, parts={"peft_config": lora(**{"lora_alpha": 8, **changed})}, max_steps=2)
    with pytest.raises(ValueError, match=says):
        resumed.train(resume_from_checkpoint=saved_adapter)


@pytest.mark.slow
def test_settings_of_an_adapter_that_may_change_are_listed(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    ranks = {"rank_pattern": {"v_proj": 2, "q_proj": 4}}  # PEFT writes the names sorted
    runs.trainer(tmp_path, parts={"peft_config": lora(**ranks)}, **saving, max_steps=1).train()
    same = lora(target_modules=r".*\.(q|v)_proj", lora_dropout=0.5, init_lora_weights="gaussian", **ranks)
    resumed = runs.trainer(tmp_path, parts={"peft_config": same}, max_steps=1)
    wanted = (
        r"Takes effect: peft_config\.lora_dropout=0\.5 \(was 0\.0\)\. Has no effect: peft_config\.init_lora_weights='g"
    )
    with pytest.warns(UserWarning, match=wanted):
        resumed.train(resume_from_checkpoint=True)


class Freezing(GRPOTrainer):
    def create_optimizer(self, *given, **named):
        self.model.model.embed_tokens.requires_grad_(False)
        return super().create_optimizer(*given, **named)


class Freezes(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.model.embed_tokens.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Freezing, GRPOTrainer])
def test_a_run_that_freezes_weights_as_it_begins_resumes(tmp_path, kind):
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainers = [runs.trainer(tmp_path, kind=kind, **saving, max_steps=steps) for steps in (2, 3, 3)]
    for trainer in trainers:
        if kind is GRPOTrainer:
            trainer.add_callback(Freezes())
    straight, resumed = trainers[1:]
    trainers[0].train()
    resumed.train(resume_from_checkpoint=True)
    straight.train()
    assert_alike(straight, resumed)


class Moody:
    """Fails on every second completion, or in the steps of an outage on all."""

    def __init__(self, *outage):
        self.__name__, self.outage, self.covey_per_completion = "moody", outage, not outage

    def __call__(self, completion_ids, trainer_state, **kwargs):
        if trainer_state.global_step in self.outage or (not self.outage and sum(completion_ids[0]) % 2 == 0):
            raise ConnectionError("the grader is down")
        return runs.longer(completion_ids)


@pytest.mark.slow
def test_failed_rewards_are_counted_on(tmp_path):
    """Sums over the logs of a run, of which a checkpoint lies in the middle."""
    settings = {"parts": {"reward_funcs": Moody()}, "logging_steps": 3, "max_steps": 6}
    straight = runs.trainer(tmp_path, save_strategy="steps", save_steps=2, **settings)
    straight.train()
    resumed = runs.trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    counts = runs.history(straight, "rewards/moody/failures")
    assert sum(counts) > 5 and counts == runs.history(resumed, "rewards/moody/failures")


@pytest.mark.slow
@pytest.mark.parametrize(("outage", "checkpoint"), [((2, 3), 2), ((1, 2, 3), 3)], ids=["short", "long"])
def test_an_outage_of_a_reward_ends_no_resumed_run_sooner(tmp_path, outage, checkpoint):
    """Two batches without a score are got over, and the third in a row ends a run; a resume counts on."""
    found = []
    for resume in (None, str(tmp_path / f"checkpoint-{checkpoint}")):
        parts = {"reward_funcs": Moody(*outage)}
        trainer = runs.trainer(tmp_path, parts=parts, save_strategy="steps", save_steps=1, max_steps=5)
        with contextlib.suppress(RewardError):
            trainer.train(resume_from_checkpoint=resume)
        found.append(trainer.state.global_step)
    assert found == [5 if len(outage) == 2 else 3] * 2


@pytest.mark.slow
def test_new_steps_of_logs_and_checkpoints_take_effect(tmp_path):
    runs.trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=2).train()
    resumed = runs.trainer(tmp_path, save_strategy="steps", save_steps=1, logging_steps=2, max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in resumed.state.log_history if "reward" in entry] == [1, 2, 4]
    assert sorted(path.name[11:] for path in tmp_path.glob("checkpoint-*")) == ["2", "3", "4"]


WATCHED = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau"}


@pytest.fixture(scope="module")
def began_with(tmp_path_factory):
    """`began_with(settings)` -> the first checkpoint of a run with these, which tests leave as it is."""
    known = {}

    def begin(settings):
        if (key := str(settings)) not in known:
            folder = tmp_path_factory.mktemp("began")
            runs.trainer(folder, parts={"eval_dataset": tiny.rows(3)}, **settings).train()
            known[key] = str(folder / "checkpoint-1")
        return known[key]

    return begin


@pytest.mark.slow
@pytest.mark.parametrize(
    ("began", "goes_on", "says", "rates"),  # rates of steps 2 to 4
    [
        ({"max_steps": 2}, {}, r"Takes effect: max_steps=4 \(was 2\)\.", [0.0075, 0.005, 0.0025]),
        ({}, {"lr_scheduler_type": "constant"}, r"Takes effect: lr_scheduler_type='const", [0.01, 0.01, 0.01]),
        ({}, {"warmup_steps": 3}, r"Takes effect: warmup_steps=3 \(was 0\)\.", [0.01 / 3, 0.02 / 3, 0.01]),
        ({}, {"num_train_epochs": 9}, None, [0.0075, 0.005, 0.0025]),
        (
            {**PLATEAU, "lr_scheduler_kwargs": {"patience": 9}},
            {**PLATEAU, "lr_scheduler_kwargs": {"patience": 0, "threshold": 9.0}},
            r"Has no effect: lr_scheduler_kwargs={'mode': 'max', 'patience': 0",
            [0.01, 0.01, 0.01],
        ),
    ],
    ids=["max_steps", "schedule", "warmup", "num_train_epochs", "kwargs of a plateau"],
)
def test_a_changed_schedule_does_as_is_said(tmp_path, began_with, began, goes_on, says, rates):
    usual = {"max_steps": 4, "lr_scheduler_type": "linear", **WATCHED}
    parts = {"eval_dataset": tiny.rows(3)}
    checkpoint = began_with({**usual, **began})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = runs.trainer(tmp_path, parts=parts, **{**usual, **goes_on})
        resumed.train(resume_from_checkpoint=checkpoint)
    assert runs.history(resumed, "learning_rate")[1:] == pytest.approx(rates)
    heard = [str(one.message) for one in caught if "this run has changed" in str(one.message)]
    assert (says is None) == (not heard) and (says is None or re.search(says, heard[0])), heard


@pytest.mark.slow
def test_more_steps_after_the_end_of_a_schedule_are_all_trained(tmp_path):
    usual = {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 2}
    runs.trainer(tmp_path, max_steps=2, **usual).train()
    resumed = runs.trainer(tmp_path, max_steps=4, **usual)
    resumed.train(resume_from_checkpoint=True)
    assert runs.history(resumed, "learning_rate")[2:] == pytest.approx([0.005, 0.0025])  # 0.01 * (4 - step) / 4


def test_a_schedule_whose_state_is_another_is_refused(tmp_path):
    parts = {"eval_dataset": tiny.rows(3)}
    runs.trainer(tmp_path, parts=parts, max_steps=1, **PLATEAU, **WATCHED).train()
    with pytest.raises(ValueError, match="lr_scheduler_type='reduce_lr_on_plateau', which lr_scheduler_type='linear'"):
        runs.trainer(tmp_path, max_steps=2, lr_scheduler_type="linear").train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_another_optimizer_is_refused_before_training(tmp_path):
    """AdamW's state has no momentum for SGD; a fused AdamW has the same state."""
    runs.trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1, optim="adamw_torch").train()
    for optim in ("sgd", "adafactor"):
        with pytest.raises(
            ValueError, match=rf"optim='adamw_torch', which optim='{optim}' cannot continue from. Resume"
        ):
            runs.trainer(tmp_path, max_steps=2, optim=optim).train(resume_from_checkpoint=True)
    resumed = runs.trainer(tmp_path, max_steps=2, optim="adamw_torch_fused")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2


@pytest.mark.slow
def test_what_is_said_to_have_no_effect_has_none(saved, tmp_path):
    resumed = runs.trainer(
        tmp_path, max_steps=2, learning_rate=1e-5, weight_decay=0.5, adam_beta1=0.1, adam_epsilon=0.1
    )
    resumed.train(resume_from_checkpoint=str(saved / "checkpoint-1"))
    group = resumed.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"][0], group["eps"]) == (0.01, 0.0, 0.9, 1e-8)


@pytest.mark.slow
def test_arguments_of_the_optimizer_stay_those_of_the_checkpoint(tmp_path):
    settings = {"optim": "sgd", "save_strategy": "steps", "save_steps": 1}
    runs.trainer(tmp_path, max_steps=1, optim_args="momentum=0.5", **settings).train()
    resumed = runs.trainer(tmp_path, max_steps=2, optim_args="momentum=0.1", **settings)
    with pytest.warns(UserWarning, match=r"Has no effect: optim_args='momentum=0.1' \(was 'momentum=0.5'\)"):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.optimizer.param_groups[0]["momentum"] == 0.5


@pytest.mark.slow
def test_a_resumed_run_reports_its_own_steps(tmp_path, capsys, monkeypatch):
    runs.trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=2).train()
    assert "trained 2 steps in" in capsys.readouterr().out
    warned: list[str] = []
    monkeypatch.setattr(transformers.trainer.logger, "warning", warned.append)
    runs.trainer(tmp_path, max_steps=3).train(resume_from_checkpoint=True)
    assert "trained 1 step, from 2 to 3, in" in capsys.readouterr().out
    assert warned == []  # the tied head is no missing key
