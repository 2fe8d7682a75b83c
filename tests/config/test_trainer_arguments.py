"""Keyword arguments that a trainer does not have are renamed or explained, under the name of the trainer."""

import inspect
import re
import warnings

import pytest
from transformers import TrainerCallback

from covey import GRPOConfig, GRPOTrainer, RLOOTrainer
from covey.trainer.build import as_callbacks
from tests.support import runs, tiny


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tokenizer", "it is called 'processing_class'"),
        ("reward_func", "it is called 'reward_funcs'"),
        ("ref_policy", "the reference is made from `model`"),
        ("data_collator", "there is none"),
        ("beta", r"args=GRPOConfig\(beta=...\)"),
        ("train_datasets", "did you mean 'train_dataset'"),
        ("zzz", "It has: model, reward_funcs, args"),
    ],
)
def test_an_unknown_argument_is_explained(name, hint):
    with pytest.raises(TypeError, match=f"GRPOTrainer has no argument '{name}'.*{hint}"):
        GRPOTrainer(model="m", **{name: 1})


def test_old_names_of_rloo_are_taken_with_a_warning_each(tmp_path):
    with pytest.warns(FutureWarning, match="'policy' is called 'model' in RLOOTrainer") as caught:
        trainer = RLOOTrainer(
            config=runs.config(tmp_path, "rloo"),
            policy=tiny.model(),
            reward_model=runs.longer,
            train_dataset=tiny.rows(),
            processing_class=tiny.tokenizer(),
        )
    assert trainer.rewards.names == ["longer"]
    assert [w.filename for w in caught if w.category is FutureWarning] == [__file__] * 3


def test_warnings_of_a_trainers_parts_stand_at_the_users_line(tmp_path):
    """Of a model's context, of a vocabulary, of settings of agents and of the optimizer: some dozen calls deep."""
    args = runs.config(tmp_path, max_completion_length=300, max_turn_length=2, optim="sgd", optim_args="beta=1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GRPOTrainer(
            args=args,
            model=tiny.model(vocab_size=9999),
            reward_funcs=runs.longer,
            train_dataset=tiny.rows(),
            processing_class=tiny.tokenizer(),
        )
    assert len(caught) >= 4 and {warning.filename for warning in caught} == {__file__}


def test_an_old_and_a_new_name_together_are_refused():
    with pytest.raises(TypeError, match="given both; keep 'model'"):
        RLOOTrainer(model="m", policy="m")


def test_a_trainer_needs_a_model():
    with pytest.raises(TypeError, match="RLOOTrainer needs `model`"):
        RLOOTrainer(reward_funcs=runs.longer)


def test_the_signature_is_the_documented_one():
    assert list(inspect.signature(GRPOTrainer).parameters)[:3] == ["model", "reward_funcs", "args"]


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_help_describes_every_argument(kind):
    assert set(inspect.signature(kind).parameters) <= set(re.findall(r"^ {4}(\w+): .", kind.__doc__, re.MULTILINE))


def test_a_field_that_was_assigned_later_is_checked_too(tmp_path):
    args = runs.config(tmp_path)
    args.temperature = 0.0
    with pytest.raises(ValueError, match=r"temperature=0\.0 is out of range"):
        GRPOTrainer(model="no-such/model", reward_funcs=runs.longer, args=args, train_dataset=tiny.rows())


def test_none_is_taken_where_earlier_releases_had_it():
    config = GRPOConfig(top_k=None, report_to=None)
    assert config.top_k == 0 and config.report_to == GRPOConfig(report_to="none").report_to


def test_callbacks_are_given_in_a_list_or_alone():
    alone = TrainerCallback()
    assert as_callbacks(None) == [] and as_callbacks(alone) == as_callbacks((alone,)) == [alone]
    assert as_callbacks([TrainerCallback]) == [TrainerCallback]
    with pytest.raises(TypeError, match=r"`callbacks` holds 3, a int\. Give a list"):
        as_callbacks([3])
