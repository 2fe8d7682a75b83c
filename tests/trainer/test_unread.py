"""Arguments of a trainer that change nothing are pointed out, and a run leaves the model as it was."""

import warnings

import peft
import pytest
import torch
from transformers import TrainerCallback

import covey
from covey.core.findings import CheckWarning
from covey.engines.scripted import ScriptedEngine
from covey.rewards import per_completion
from covey.trainer.checks import MovedWeights
from tests.support import runs, tiny


def said(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, [str(warning.message) for warning in caught]


class Late(TrainerCallback):
    def on_step_ended(self, *args, **kwargs):
        raise AssertionError("no event of this name")


class Own(TrainerCallback):
    """Its own method is named like an event and called from one."""

    def on_step_end(self, *args, **kwargs):
        self.on_tenth_step()

    def on_tenth_step(self):
        pass


def of_class(name):
    return type("Named", (TrainerCallback,), {name: lambda self, *args, **kwargs: None})()


def with_note():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template += "{{ note|default('') }}"
    return tokenizer


def by_answer(completions, answer):
    return [float(len(text)) for text in completions]


def misspelt(completions, answers=None):
    return [float(len(text)) for text in completions]


def alone(completions):
    return [float(len(text)) for text in completions]


@per_completion
def at_the_end(completions, trainer_state, **kwargs):
    return [float(len(text)) for text in completions]


@covey.threaded
def marked_as_tool(completions, **kwargs):
    return [float(len(text)) for text in completions]


@covey.isolated
def marked_as_reward(query: str) -> str:
    """Look it up.

    Args:
        query: What to look for.
    """
    return query


class Told:
    max_turn = 3
    max_turns_of_old = 4

    def reset(self, **row):
        return "go"

    def step(self, text):
        return "on", 1.0, True, {}


class Few(Told):
    max_turns = 3


class Adapter:
    instructions, system = "Say left.", None

    def __call__(self):
        return Few()


def scheduled():
    model = tiny.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))}


MESSAGES = {"train_dataset": tiny.rows(conversational=True)}
WITH_KWARGS = [{**row, "chat_template_kwargs": {"thnking": True}} for row in tiny.rows(conversational=True)]
CLASS = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}
CASES = {
    "on_step_ended": {"parts": {"callbacks": [Late()]}},
    **{f"Named.{name}": {"parts": {"callbacks": [of_class(name)]}} for name in ("stepEnd", "onStepEnd", "step_end")},
    "Named.on_batch_end": {"parts": {"callbacks": [of_class("on_batch_end")]}},
    "lr_scheduler_type": {"parts": scheduled(), "lr_scheduler_type": "cosine"},
    "warmup_steps": {"parts": scheduled(), "lr_scheduler_type": "linear", "warmup_steps": 3},
    "optim=": {"parts": CLASS, "optim": "adafactor"},
    "reward_processing_classes": {"parts": {"reward_processing_classes": tiny.tokenizer()}},
    "'at_the_end' is marked": {"parts": {"reward_funcs": at_the_end}},
    "'marked_as_tool' is marked": {"parts": {"reward_funcs": marked_as_tool}},
    "'marked_as_reward' of": {"parts": {"tools": [marked_as_reward], **MESSAGES}},
    "'answers', and": {"parts": {"reward_funcs": misspelt}},
    "nothing reads: 'answer'": {"parts": {"reward_funcs": alone}},
    "'thnking'": {"parts": {"train_dataset": WITH_KWARGS}},
    "`chat_template_kwargs` has no effect": {
        "parts": {"train_dataset": [{**row, "chat_template_kwargs": {"a": 1}} for row in tiny.rows()]}
    },
    "prompts_as_messages=True": {"prompts_as_messages": True, "parts": MESSAGES},
    "Told.max_turn ": {"parts": {"environment_factory": Told, **MESSAGES}},
    "max_tool_calling_iterations": {
        "max_tool_calling_iterations": 5,
        "parts": {"environment_factory": Few, **MESSAGES},
    },
    "`instructions` of": {"parts": {"environment_factory": Adapter(), **MESSAGES}},
    "max_concurrent_completions": {
        "max_concurrent_completions": 3,
        "parts": {"engine": ScriptedEngine(lambda *given: [1])},
    },
    "'longer": {"parts": {"reward_funcs": [runs.longer, runs.longer]}},
    "'unknown'": {"chat_template_kwargs": {"unknown": 1}},
    "'momentun=0.9'": {"optim": "sgd", "optim_args": "momentun=0.9"},
    "adam_beta1": {"optim": "sgd", "adam_beta1": 0.5},
    "log_multimodal": {"log_multimodal": False},
    "tool_timeout": {"tool_timeout": 5.0},
    "model_init_kwargs": {"model_init_kwargs": {"dtype": "float32"}},
}


@pytest.mark.parametrize("named", CASES)
def test_what_changes_nothing_is_pointed_out_once(named, tmp_path):
    _, messages = said(lambda: runs.trainer(tmp_path, **CASES[named]))
    assert len([text for text in messages if named in text]) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"optim": "sgd", "optim_args": "momentum=0.9"},
        {"optim": "adafactor"},
        {"adam_beta1": 0.5},
        {"parts": {"callbacks": [TrainerCallback()]}},
        {"chat_template_kwargs": {"note": "x"}, "parts": {"processing_class": with_note(), **MESSAGES}},
        {"parts": {"callbacks": [Own()]}},
        {"parts": {"reward_funcs": by_answer}},
    ],
)
def test_what_has_an_effect_is_not_pointed_out(settings, tmp_path):
    _, usual = said(lambda: runs.trainer(tmp_path))
    _, changed = said(lambda: runs.trainer(tmp_path, **settings))
    assert set(changed) <= set(usual)


def test_settings_of_an_optimizer_that_is_given(tmp_path):
    model = tiny.model()
    parts = {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}
    _, messages = said(lambda: runs.trainer(tmp_path, parts=parts, weight_decay=0.1))
    assert [text for text in messages if "weight_decay=0.1" in text and "an optimizer" in text]


@pytest.mark.parametrize("strategy", ["eval_strategy", "save_strategy", "logging_strategy"])
def test_epochs_of_a_stream_have_no_known_end(strategy, tmp_path):
    from datasets import Dataset

    parts = {"train_dataset": Dataset.from_list(tiny.rows()).to_iterable_dataset(), "eval_dataset": tiny.rows(2)}
    settings = {strategy: "epoch", "per_device_eval_batch_size": 4}
    _, messages = said(lambda: runs.trainer(tmp_path, parts=parts, **settings))
    assert len([text for text in messages if f"`{strategy}='epoch'`" in text]) == 1


@pytest.mark.parametrize("setting", [{"eval_strategy": "steps"}, {"eval_on_start": True}])
def test_an_evaluation_needs_data(setting, tmp_path):
    with pytest.raises(ValueError, match=f"{next(iter(setting))}=.*`eval_dataset`"):
        runs.trainer(tmp_path, **setting)


def test_an_evaluation_that_is_not_asked_for_is_not_checked(tmp_path):
    settings = {"num_generations": 3, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 1}
    made = runs.trainer(tmp_path, parts={"eval_dataset": tiny.rows(4)}, **settings)
    with pytest.raises(ValueError, match="evaluation batch of 8"):
        made.evaluate()


@pytest.mark.slow
def test_another_seed_of_the_data_is_another_order_of_prompts(tmp_path):
    def order(**settings):
        seen = []

        def look(prompts, completion_ids, **kwargs):
            seen.extend(prompts[::4])
            return runs.longer(completion_ids=completion_ids)

        parts = {"reward_funcs": look, "train_dataset": tiny.rows(16)}
        runs.trainer(tmp_path, parts=parts, max_completion_length=2, **settings).train()
        return seen

    first = order(seed=0, data_seed=1)
    assert first == order(seed=5, data_seed=1) != order(seed=0, data_seed=2)
    assert order(seed=7) == order(seed=0, data_seed=7)


@pytest.mark.parametrize("adapter", [None, "adapter"])
@pytest.mark.parametrize("training", [True, False])
def test_a_run_leaves_the_model_as_it_was(adapter, training, tmp_path):
    model = tiny.model().train(training)
    model.config.use_cache = True
    parts = {"model": model, **({"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj"])} if adapter else {})}
    run = runs.trainer(tmp_path, parts=parts, gradient_checkpointing=True)
    before = state_of(run.model)
    assert model.config.use_cache is True
    run.train()
    assert state_of(run.model) == before
    run.save_model(str(tmp_path / "saved"))
    if adapter is None:
        assert type(model).from_pretrained(tmp_path / "saved").config.use_cache is True


def state_of(model):
    modules = list(model.modules())
    recomputed = [getattr(module, "gradient_checkpointing", None) for module in modules]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    return model.training, recomputed, hooks, trained, model.config.use_cache


@pytest.mark.slow
def test_weights_that_rounding_keeps_are_logged_and_pointed_out(tmp_path):
    def held():
        return {"model": tiny.model().to(torch.bfloat16)}

    _, messages = said(lambda: runs.trainer(tmp_path, parts=held(), learning_rate=1e-6))
    assert [text for text in messages if "bfloat16" in text and "1e-06" in text]
    _, messages = said(lambda: runs.trainer(tmp_path, parts=held(), learning_rate=0.1))
    assert not [text for text in messages if "bfloat16" in text]
    settings = {"optim": "sgd", "learning_rate": 1e-7, "max_steps": 6}  # updates are seen when they are made
    run, messages = said(lambda: runs.trainer(tmp_path, parts=held(), **settings))
    assert not [text for text in messages if "bfloat16" in text]
    _, messages = said(run.train)
    assert len([text for text in messages if "bfloat16" in text]) == 1
    assert all(share < 0.1 for share in runs.history(run, "updates/weights_moved"))


@pytest.mark.slow
def test_weights_that_are_rounded_by_chance_are_not_pointed_out(tmp_path):
    settings = {"optim": "adamw_stochastic", "learning_rate": 1e-6, "max_steps": 6}
    run, messages = said(lambda: runs.trainer(tmp_path, parts={"model": tiny.model().to(torch.bfloat16)}, **settings))
    before = runs.weights(run)
    _, more = said(run.train)
    assert not [text for text in messages + more if "bfloat16" in text]
    assert any(not torch.equal(*pair) for pair in zip(before, runs.weights(run), strict=True))


@pytest.mark.parametrize(
    ("optim", "parts", "told"),
    [
        ("adamw_stochastic", lambda: {}, True),
        ("adamw_stochastic", lambda: {"model": tiny.model().to(torch.bfloat16)}, False),
        ("muon", lambda: {}, False),
        ("muon", lambda: {"peft_config": peft.LoraConfig(r=2, target_modules=["embed_tokens"])}, True),
        ("muon", lambda: {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj"])}, False),
    ],
)
def test_an_optimizer_that_does_as_adamw_for_this_model_is_pointed_out(tmp_path, recwarn, optim, parts, told):
    runs.trainer(tmp_path, parts=parts(), optim=optim, learning_rate=0.1)
    said_of = [one.message.finding for one in recwarn if isinstance(one.message, CheckWarning)]
    assert any(one.code == "setting-unread" and f"optim='{optim}'" in one.evidence for one in said_of) == told


def test_arguments_of_muon_that_are_its_own_are_pointed_out(tmp_path, recwarn):
    runs.trainer(tmp_path, optim="muon", optim_args="momentum=0.95,ns_steps=4", adam_beta1=0.8)
    said_of = [one.message.finding.evidence for one in recwarn if isinstance(one.message, CheckWarning)]
    assert not [text for text in said_of if "ns_steps" in text or "adam_beta1" in text]


def test_weights_in_float32_are_not_watched(tmp_path):
    run = runs.trainer(tmp_path)
    assert not [one for one in run.callback_handler.callbacks if isinstance(one, MovedWeights)]
    run = runs.trainer(tmp_path, parts={"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj"])})
    assert not [one for one in run.callback_handler.callbacks if isinstance(one, MovedWeights)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "mine"])
def test_the_best_adapter_is_loaded_whatever_its_name(name, tmp_path):
    setting = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny.model(), setting, adapter_name=name)
    scores = iter([0.1, 0.9, 0.3])

    def score(prompts, completion_ids, **kwargs):
        if prompts[0] == "held out":
            return [next(scores)] * len(prompts)
        return runs.longer(completion_ids=completion_ids)

    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    parts = {"model": model, "reward_funcs": score, "eval_dataset": [{"prompt": "held out"}]}
    run = runs.trainer(tmp_path, parts=parts, load_best_model_at_end=True, per_device_eval_batch_size=4, **settings)
    run.train()
    assert run.state.best_global_step == 2
    folder = tmp_path / "checkpoint-2" / ("" if name == "default" else name)
    best = peft.PeftModel.from_pretrained(tiny.model(), folder)
    loaded = {key.replace(f".{name}.", "."): value for key, value in run.model.state_dict().items() if "lora" in key}
    saved = {key.replace(".default.", "."): value for key, value in best.state_dict().items() if "lora" in key}
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[key], saved[key]) for key in loaded)
    assert [name for name, weight in run.model.named_parameters() if weight.requires_grad]
