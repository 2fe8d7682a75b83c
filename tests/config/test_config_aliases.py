"""Old names: each is accepted once with one warning, wherever it is written."""

import dataclasses
import inspect
import warnings

import pytest
from transformers import HfArgumentParser

from covey.config.aliases import ALIASES, HINTS
from covey.config.grpo import GRPOConfig
from covey.config.rloo import RLOOConfig

# old name, value, new field, its value
RENAMED = [
    ("wandb_log_unique_prompts", False, "log_unique_prompts", False),
    ("vllm_importance_sampling_cap", 2.0, "vllm_importance_sampling_clip_max", 2.0),
    ("rloo_k", 4, "num_generations", 4),
    ("cliprange", 0.1, "epsilon", 0.1),
    ("kl_coef", 0.3, "beta", 0.3),
    ("exp_name", "mine", "run_name", "mine"),
    ("normalize_reward", True, "normalize_advantages", True),
    ("num_ppo_epochs", 4, "num_iterations", 4),
    ("num_mini_batches", 2, "steps_per_generation", 2),
    ("response_length", 53, "max_completion_length", 53),
    ("overlong_filter", True, "mask_truncated_completions", True),
    ("epsilon_low", 0.1, "epsilon", 0.1),
    ("sleep_level", 0, "vllm_enable_sleep_mode", False),
    ("sleep_level", 2, "vllm_enable_sleep_mode", True),
    ("dataset_shuffle", False, "shuffle_dataset", False),
    ("async_generate", True, "max_staleness", 1),
    ("async_generate", "true", "max_staleness", 1),
    ("async_generate", False, "max_staleness", 0),
]
DROPPED = [name for name, alias in ALIASES.items() if alias.new is None]


def warned(make, category=FutureWarning):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, [str(w.message) for w in caught if w.category is category]


@pytest.mark.parametrize(("old", "value", "new", "new_value"), RENAMED)
def test_old_name_sets_the_new_field_with_one_warning(old, value, new, new_value):
    args, messages = warned(lambda: RLOOConfig(**{old: value}))
    assert getattr(args, new) == new_value
    assert len(messages) == 1
    assert f"`{old}` is called `{new}`" in messages[0]


@pytest.mark.parametrize("old", DROPPED)
def test_dropped_name_warns_once_and_says_what_to_do(old):
    _, messages = warned(lambda: GRPOConfig(**{old: 1}))
    assert len(messages) == 1
    assert messages[0].startswith(f"`{old}` has no effect here and is dropped: ")


def test_every_new_name_is_a_field():
    fields = {f.name for f in dataclasses.fields(RLOOConfig)}
    assert {alias.new for alias in ALIASES.values() if alias.new} <= fields


def test_total_episodes_becomes_max_steps():
    # max_steps = total_episodes / gradient_accumulation_steps = 1000 / 4
    args, messages = warned(lambda: RLOOConfig(total_episodes=1000, gradient_accumulation_steps=4))
    assert args.max_steps == 250
    assert "max_steps" in messages[0]


def test_old_names_meet_the_warning_about_the_new_name():
    new = ALIASES["use_transformers_paged"].new
    with pytest.warns(FutureWarning, match=new), pytest.warns(UserWarning, match=f"`{new}=True` has no effect"):
        GRPOConfig(use_transformers_paged=True)


def test_contradicting_names_are_refused():
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match=r"`kl_coef=0.1` and `beta=0.2` contradict"):
        GRPOConfig(kl_coef=0.1, beta=0.2)
    assert warned(lambda: GRPOConfig(kl_coef=0.1, beta=0.1))[0].beta == 0.1


def test_unknown_keyword_proposes_the_closest_field():
    with pytest.raises(TypeError, match=r"GRPOConfig has no field `num_generation`. Did you mean `num_generations`\?"):
        GRPOConfig(num_generation=4)


def test_all_unknown_keywords_are_named_at_once():
    with pytest.raises(TypeError, match=r"no field `bta`. Did you mean `beta`\?.*no field `torch_dtype`: .*model_init"):
        GRPOConfig(bta=1, torch_dtype="bfloat16")


@pytest.mark.parametrize("name", HINTS)
def test_names_that_change_training_are_refused_with_advice(name):
    with pytest.raises(TypeError, match=f"no field `{name}`: .{{10,}}"):
        RLOOConfig(**{name: 7})


def test_a_ratio_of_warmup_is_a_fraction_of_steps():
    assert warned(lambda: GRPOConfig(warmup_ratio=0.1))[0].warmup_steps == 0.1


def test_name_of_a_field_that_the_method_lacks_is_refused():
    with pytest.warns(FutureWarning), pytest.raises(TypeError, match="GRPOConfig has no such field"):
        GRPOConfig(normalize_reward=True)


def test_advantage_estimator_must_agree_with_the_class():
    _, messages = warned(lambda: RLOOConfig(advantage_estimator="rloo"))
    assert len(messages) == 1
    with pytest.raises(ValueError, match="Use RLOOConfig and RLOOTrainer"):
        GRPOConfig(advantage_estimator="rloo")
    with pytest.raises(ValueError, match="choose one of: grpo, rloo"):
        GRPOConfig(advantage_estimator="gae")


def test_classes_derived_by_users_take_old_names_too():
    @dataclasses.dataclass
    class Mine(GRPOConfig):
        favourite: int = 3

    args, _ = warned(lambda: Mine(kl_coef=0.1, favourite=4))
    assert (args.beta, args.favourite) == (0.1, 4)


class Scheduled(GRPOConfig):
    def __init__(self, *args, decay_power=2, **keywords):
        super().__init__(*args, **keywords)
        self.decay_power = decay_power


def test_a_class_with_an_init_of_its_own_takes_its_own_and_old_names():
    args, messages = warned(lambda: Scheduled(decay_power=3, kl_coef=0.1))
    assert (args.decay_power, args.beta, len(messages)) == (3, 0.1, 1)
    with pytest.raises(TypeError, match=r"Scheduled has no field `bta`. Did you mean `beta`"):
        Scheduled(bta=0.1)


def test_a_value_is_read_under_the_old_name_that_it_was_given_by():
    given = {"max_prompt_length": 128, "warmup_ratio": 0.1, "evaluation_strategy": "no", "tau_pos": 1.0}
    args, _ = warned(lambda: GRPOConfig(**given))
    assert {name: getattr(args, name) for name in given} == given


@pytest.mark.parametrize(
    "flags", [["--max_prompt_length", "128"], ["--warmup_ratio", "0.1"], ["--group_by_length"], ["--use_liger_loss"]]
)
def test_parsers_of_fields_take_old_names(flags):
    name, value = flags[0][2:], [*flags, True][1]
    parser = HfArgumentParser(GRPOConfig)
    flags = ["--output_dir", "out", *flags]
    (args,), messages = warned(lambda: parser.parse_args_into_dataclasses(flags, look_for_args_file=False))
    assert str(getattr(args, name)) == str(value) and len(messages) == 1
    (read,), _ = warned(lambda: parser.parse_dict({"output_dir": "out", name: getattr(args, name)}))
    assert getattr(read, name) == getattr(args, name)


def test_warning_points_at_the_line_that_used_the_old_name():
    with pytest.warns(FutureWarning) as caught:
        GRPOConfig(kl_coef=0.1)
    assert caught[0].filename == __file__


def test_signature_lists_the_fields():
    assert "num_generations" in inspect.signature(GRPOConfig).parameters
