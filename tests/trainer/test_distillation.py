"""Runs without rewards: a teacher alone, one completion of each prompt, and TRL's class of that name."""

import pytest
import torch

from covey import DistillationConfig, DistillationTrainer
from covey.core.findings import CheckError
from tests.support import runs, tiny


def settings(folder, **changes):
    given = {**runs.DEFAULTS, "num_generations": 1, "output_dir": str(folder), **changes}
    return DistillationConfig(**given)


def trainer(folder, taught_by=None, rows=None, parts=None, **changes):
    return DistillationTrainer(
        model=tiny.model(),
        teacher_model=taught_by,
        args=settings(folder, **changes),
        train_dataset=tiny.rows() if rows is None else rows,
        processing_class=tiny.tokenizer(),
        **(parts or {}),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("error:no reward function scored")
@pytest.mark.parametrize(
    "changes",
    [{}, {"teacher_top_k": 0}, {"teacher_top_k": 64}, {"beta": 0.5}, {"beta": 0.0}, {"num_generations": 4}],
    ids=str,
)
def test_a_policy_becomes_its_teacher_without_rewards(tmp_path, changes):
    trained = trainer(tmp_path, tiny.model(seed=1), max_steps=10, learning_rate=3e-3, **changes)
    trained.train()
    kl = runs.history(trained, "teacher/kl")
    assert sum(kl[-3:]) < 0.85 * sum(kl[:3])
    last = trained.state.log_history[-2]
    assert not {"reward", "frac_advantage_zero", "frac_reward_zero_std"} & {*last}


@pytest.mark.slow
def test_a_folder_and_a_model_are_the_same_teacher(tmp_path):
    tiny.model(seed=1).save_pretrained(tmp_path / "teacher")
    tiny.tokenizer().save_pretrained(tmp_path / "teacher")
    made = [trainer(tmp_path / "a", tiny.model(seed=1)), trainer(tmp_path / "b", str(tmp_path / "teacher"))]
    for one in made:
        one.train()
    assert all(map(torch.equal, *map(runs.weights, made)))


@pytest.mark.slow
def test_any_trainer_learns_from_a_teacher_alone(tmp_path):
    trained = runs.trainer(tmp_path, "rloo", parts={"reward_funcs": None}, teacher="start", max_steps=2)
    trained.train()
    assert runs.history(trained, "teacher/kl")


def test_with_rewards_the_teacher_is_added_to_them(tmp_path):
    trained = trainer(tmp_path, tiny.model(seed=1), parts={"reward_funcs": runs.longer}, num_generations=4)
    trained.train()
    assert runs.history(trained, "reward") and runs.history(trained, "teacher/kl")


def test_the_keyword_of_trl_is_the_divergence(tmp_path):
    args = settings(tmp_path, beta=0.25)
    assert (args.teacher_beta, args.beta) == (0.25, 0.0)
    copied = args.with_changes(seed=3)
    assert (copied.teacher_beta, copied.beta, copied.seed) == (0.25, 0.0, 3)
    assert (settings(tmp_path).teacher_beta, settings(tmp_path).teacher_top_k) == (1.0, -1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"teacher_model_name_or_path": "a"}, "teacher", "a"),
        ({"teacher_model_server_url": "http://a:1/", "teacher_top_k": 20}, "teacher", "http://a:1"),
        ({"teacher_server_urls": {"default": "http://a:1"}, "teacher_top_k": 20}, "teacher", "http://a:1"),
        (
            {"teacher_server_urls": {"a": "http://a:1", "b": "http://b:1"}, "teacher_top_k": 20},
            "teacher",
            {"a": "http://a:1", "b": "http://b:1"},
        ),
        ({"teacher_model_kind": "ema"}, "teacher", "follower"),
        ({"teacher_update_rate": 0.05, "teacher": "follower"}, "teacher_mixup_alpha", 0.05),
        ({"teacher_model_kind": "ema"}, "teacher_mixup_alpha", 0.05),
        ({"teacher_model_kind": "ema", "teacher_update_rate": 0.2}, "teacher_mixup_alpha", 0.2),
        ({"teacher_model_kind": "ema", "teacher_mixup_alpha": 1.0}, "teacher_mixup_alpha", 1.0),
        ({"gkd_logits_topk": 20}, "teacher_top_k", 20),
        ({"gkd_logits_topk": None}, "teacher_top_k", -1),
        ({"loss_top_k": 0}, "teacher_top_k", -1),
        ({"lmbda": 1.0, "seq_kd": False, "loss_add_tail": True, "num_loss_tokens_to_skip": 0}, "teacher_top_k", -1),
        ({"teacher_kl_coef": 0.5}, "teacher_coef", 0.5),
        ({"distillation_alpha": 0.5}, "teacher_beta", 0.5),
    ],
)
def test_names_of_others_are_taken(tmp_path, given, name, value):
    assert getattr(settings(tmp_path, **given), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("loss_add_tail", False), ("lmbda", 0.5), ("use_uld_loss", True), ("teacher_model_server", "http://a:1")],
        *[("distillation_is_clip", 2.0), ("max_reprompt_len", 99), ("teacher_temperature", 1.0), ("sft_alpha", 0.1)],
    ],
)
def test_what_there_is_not_is_refused_by_name(tmp_path, name, value):
    with pytest.raises(TypeError, match=name) as error:
        settings(tmp_path, **{name: value})
    assert "Did you mean" not in str(error.value)


def codes(make):
    with pytest.raises(CheckError) as error:
        make()
    return {finding.code for finding in error.value.findings}


def test_what_cannot_work_is_refused(tmp_path):
    assert codes(lambda: trainer(tmp_path)) == {"reward-missing"}
    assert codes(lambda: trainer(tmp_path, "a", teacher="b")) == {"settings-contradict"}
    rewarded = {"parts": {"reward_funcs": runs.longer}}
    assert codes(lambda: trainer(tmp_path, tiny.model(seed=1), **rewarded)) == {"group-of-one"}
    pools = {"pools": {"hard": [0.5, 1.0], "easy": [None, 0.5]}}
    for choice in ({"dynamic_sample": True}, {"gates": {"reward_range": {"above": 0}}}, {"prompt_sampler": pools}):
        assert codes(lambda choice=choice: trainer(tmp_path, tiny.model(seed=1), **choice)) == {"reward-missing"}
    assert codes(lambda: runs.trainer(tmp_path, parts={"reward_funcs": None})) == {"reward-missing"}
