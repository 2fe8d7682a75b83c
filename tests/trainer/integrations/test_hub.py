"""What goes to a hub, and when: models with their cards, and completions. The hub is a server on this machine."""

import io
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml
from transformers import TrainerCallback

from covey import EvalSuite
from covey.algorithms import ADVANTAGES, LOSS_TYPES
from covey.core.findings import CheckWarning
from covey.runtime.files import LOCK
from covey.trainer.integrations.model_card import hub_id, model_card, shown_settings
from tests.support import runs, tiny
from tests.support.fake_hub import FakeHub


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub.constants
    import transformers.utils.hub

    one = FakeHub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", one.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # made anew, for this server
    yield one
    one.close()
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)


PUSHED = {
    "push_to_hub": True,
    "hub_model_id": "me/small",
    "hub_token": "hf_secret",
    "save_strategy": "steps",
    "save_steps": 1,
}


def files_of(hub, kind="model"):
    return [(message, sorted(files)) for one, _, message, files in hub.commits if one == kind]


def last(hub, path):
    return [files[path] for _, _, _, files in hub.commits if path in files][-1].decode()


def metadata(card):
    return yaml.safe_load(card.split("---")[1])


@pytest.mark.slow
def test_the_model_is_pushed_at_every_checkpoint_with_its_card(tmp_path, hub):
    suite = EvalSuite(tiny.rows(2), num_generations=2, pass_at=1)
    parts = {"eval_dataset": {"sums": suite}}
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = runs.trainer(tmp_path, parts=parts, hub_always_push=True, **settings, **PUSHED)
    assert hub.created == [("model", "me/small", False)]
    trainer.train()
    assert [message for message, _ in files_of(hub)] == ["Training in progress, step 1", "Training in progress, step 2"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "training_args.bin"} <= set(
        files_of(hub)[0][1]
    )
    assert not any(LOCK in paths for _, paths in files_of(hub))  # the run would hold it no longer
    assert hub.tokens == {"hf_secret"}
    card = last(hub, "README.md")
    reward = runs.history(trainer, "eval_sums_reward")[-1]
    assert f"| evaluation sums, reward | {reward:.4g} |" in card and "evaluation sums, pass@1 (95% interval)" in card
    assert all(b"hf_secret" not in content for _, _, _, files in hub.commits for content in files.values())


class At(TrainerCallback):
    """Calls a function when the checkpoint of a step is complete, before it is uploaded."""

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_push_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.call()

    def on_train_end(self, args, state, control, **kwargs):
        if self.step is None:
            self.call()


def pushed_codes(recorded):
    found = [one.message.finding for one in recorded if isinstance(one.message, CheckWarning)]
    return [one.evidence.split(" was")[0] for one in found if one.code == "push-failed"]


def saved_weights(folder, step):
    return (folder / f"checkpoint-{step}" / "model.safetensors").read_bytes()


def pushed_weights(hub, path="model.safetensors"):
    return [files[path] for _, _, _, files in hub.commits if path in files]


@pytest.mark.slow
def test_a_late_upload_has_the_files_of_its_own_checkpoint(tmp_path, hub):
    """The first upload begins when the second checkpoint is there, as under load."""
    hub.open.clear()
    parts = {"callbacks": [At(2, hub.open.set)]}
    runs.trainer(tmp_path, parts=parts, hub_always_push=True, **PUSHED).train()
    assert [message for message, _ in files_of(hub)] == ["Training in progress, step 1", "Training in progress, step 2"]
    assert pushed_weights(hub) == [saved_weights(tmp_path, 1), saved_weights(tmp_path, 2)]
    assert not (tmp_path / "_hub").exists()


@pytest.mark.slow
def test_the_last_checkpoint_is_pushed_though_another_is_under_way(tmp_path, hub):
    hub.open.clear()
    parts = {"callbacks": [At(None, hub.open.set)]}
    runs.trainer(tmp_path, parts=parts, max_steps=3, **PUSHED).train()
    steps = [message[-1] for message, _ in files_of(hub)]
    assert steps == ["1", "3"]  # the second is left out, as in transformers
    assert pushed_weights(hub) == [saved_weights(tmp_path, step) for step in (1, 3)]


@pytest.mark.slow
def test_a_push_that_fails_is_named_and_the_next_checkpoint_is_a_new_try(tmp_path, hub, recwarn):
    def fail_once(trainer):
        trainer.pushes._under_way[0].jobs[0].exception()  # it has ended

    hub.fails = 1
    trainer = runs.trainer(tmp_path, **PUSHED)
    trainer.add_callback(At(2, lambda: fail_once(trainer)))
    trainer.train()
    assert pushed_codes(recwarn) == ["step 1"]
    assert pushed_weights(hub) == [saved_weights(tmp_path, 2)]


@pytest.mark.slow
def test_the_last_push_is_tried_again_at_the_end(tmp_path, hub, recwarn):
    hub.fails = 1
    runs.trainer(tmp_path, max_steps=1, **PUSHED).train()
    assert pushed_codes(recwarn) == ["step 1"]
    assert pushed_weights(hub) == [saved_weights(tmp_path, 1)]


@pytest.mark.slow
def test_a_hub_that_stays_away_costs_no_training(tmp_path, hub, recwarn):
    hub.refuses.add("model")
    trainer = runs.trainer(tmp_path, hub_always_push=True, **PUSHED)
    trainer.train()
    assert trainer.state.global_step == 2 and not hub.commits
    assert pushed_codes(recwarn) == ["step 1", "step 2", "step 2"]
    assert "hf_secret" not in "".join(str(one.message) for one in recwarn)


@pytest.mark.slow
def test_an_earlier_failure_does_not_put_old_weights_in_the_place_of_new_ones(tmp_path, hub, recwarn):
    hub.fails = 1
    hub.open.clear()
    parts = {"callbacks": [At(2, hub.open.set)]}
    runs.trainer(tmp_path, parts=parts, hub_always_push=True, **PUSHED).train()
    assert pushed_codes(recwarn) == ["step 1"]
    assert pushed_weights(hub) == [saved_weights(tmp_path, 2)]


@pytest.mark.slow
def test_each_checkpoint_that_is_to_be_kept_arrives(tmp_path, hub, recwarn):
    hub.fails = 1  # the model of step 1: its folder comes with the next push, again
    hub.open.clear()
    parts = {"callbacks": [At(2, hub.open.set)]}
    runs.trainer(tmp_path, parts=parts, hub_strategy="all_checkpoints", hub_always_push=True, **PUSHED).train()
    for step in (1, 2):
        assert set(pushed_weights(hub, f"checkpoint-{step}/model.safetensors")) == {saved_weights(tmp_path, step)}
    assert pushed_weights(hub)[-1] == saved_weights(tmp_path, 2)


def test_what_a_killed_run_was_pushing_is_removed(tmp_path, hub):
    stale = tmp_path / "_hub" / "checkpoint-9" / "model"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").touch()
    runs.trainer(tmp_path, max_steps=1, **PUSHED).train()
    assert not stale.exists() and not any("_hub" in path for _, paths in files_of(hub) for path in paths)


def test_the_model_is_in_the_output_folder_as_well(tmp_path, hub):
    runs.trainer(tmp_path, max_steps=1, **PUSHED).train()
    assert (tmp_path / "model.safetensors").read_bytes() == saved_weights(tmp_path, 1)
    assert (tmp_path / "tokenizer.json").exists() and (tmp_path / "training_args.bin").exists()


@pytest.mark.slow
def test_push_to_hub_at_the_end(tmp_path, hub):
    trainer = runs.trainer(tmp_path, "rloo", hub_model_id="me/late")
    trainer.train()
    assert not hub.created
    trainer.push_to_hub(tags=["sums"], dataset_name="me/sums")
    (message, files) = files_of(hub)[-1]
    assert message == "End of training"
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    about = metadata(last(hub, "README.md"))
    assert about["tags"][:1] == ["sums"] and "rloo" in about["tags"] and about["datasets"] == ["me/sums"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "folders"), [("end", []), ("checkpoint", ["last-checkpoint"]), ("all_checkpoints", ["checkpoint-1"])]
)
def test_hub_strategies(tmp_path, hub, strategy, folders):
    trainer = runs.trainer(tmp_path, max_steps=1, hub_strategy=strategy, **PUSHED)
    trainer.train()
    trainer._finish_current_push()
    found = {path.split("/")[0] for _, paths in files_of(hub) for path in paths if "/" in path}
    assert sorted(found - {"completions", "record"}) == folders
    if folders:
        assert f"{folders[0]}/trainer_state.json" in [path for _, paths in files_of(hub) for path in paths]


@pytest.mark.slow
def test_completions_are_pushed_as_a_data_set(tmp_path, hub):
    old = tmp_path / "completions"
    old.mkdir()
    (old / "completions_00007.parquet").write_bytes(b"of an earlier run")
    trainer = runs.trainer(tmp_path, log_completions_hub_repo="me/said", hub_private_repo=True)
    assert hub.created == [("dataset", "me/said", True)]
    trainer.train()
    commits = files_of(hub, "dataset")
    assert [message for message, _ in commits] == ["Completions up to step 1", "Completions up to step 2"]
    assert [files for _, files in commits] == [[f"completions/completions_0000{n}.parquet"] for n in (1, 2)]
    (content,) = [files["completions/completions_00002.parquet"] for _, _, _, files in hub.commits[-1:]]
    assert {"prompt", "completion", "longer"} <= set(pq.read_table(io.BytesIO(content)).column_names)


@pytest.mark.slow
def test_a_hub_that_fails_costs_no_training(tmp_path, hub):
    trainer = runs.trainer(tmp_path, log_completions_hub_repo="me/said")
    hub.refuses.add("dataset")
    with pytest.warns(UserWarning, match="completions were not pushed to 'me/said'"):
        trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.slow
def test_a_resumed_run_pushes_what_had_not_been(tmp_path, hub):
    settings = {"log_completions_hub_repo": "me/said", "save_strategy": "steps", "save_steps": 1}
    hub.refuses.add("dataset")
    with pytest.warns(UserWarning, match="completions were not pushed"):
        runs.trainer(tmp_path, max_steps=1, **settings).train()
    hub.refuses.clear()
    runs.trainer(tmp_path, max_steps=2, **settings).train(resume_from_checkpoint=True)
    pushed = {name for _, files in files_of(hub, "dataset") for name in files}
    assert pushed == {"completions/completions_00001.parquet", "completions/completions_00002.parquet"}


def test_a_data_set_that_cannot_be_had_is_refused_at_once(tmp_path, hub):
    with pytest.raises(ValueError, match="log_completions_hub_repo='a/b/c' cannot be created"):
        runs.trainer(tmp_path, log_completions_hub_repo="a/b/c")


@pytest.mark.parametrize("gone", [True, False])
def test_a_repository_that_cannot_be_had_is_refused_at_once(tmp_path, hub, gone):
    if gone:
        hub.close()
    with pytest.raises(ValueError, match="push_to_hub=True: the repository") as error:
        runs.trainer(tmp_path, **{**PUSHED, "hub_model_id": "me/small" if gone else "no/id/at/all"})
    assert "hf_secret" not in str(error.value)


def test_the_card_tells_what_the_model_is(tmp_path):
    model = tiny.model()
    model.config._name_or_path = "org/base"
    trainer = runs.trainer(tmp_path, "grpo", parts={"model": model}, loss_type="gmpo", hub_token="hf_secret", beta=0.25)
    trainer.train()
    trainer.create_model_card(license="mit")
    card = (tmp_path / "README.md").read_text()
    about = metadata(card)
    assert about["base_model"] == "org/base" and about["license"] == "mit" and about["library_name"] == "transformers"
    assert {"covey", "grpo", "generated_from_trainer"} <= set(about["tags"])
    for number in ("2402.03300", "2507.20673"):  # the method's paper and the loss's
        assert f"https://arxiv.org/abs/{number}" in card and f"eprint = {{{number}}}" in card
    assert "| `beta` | 0.25 |" in card and "`longer`" in card and "- transformers " in card
    first, latest = runs.history(trainer, "reward")
    assert (
        f"| training reward, step 1 | {first:.4g} |" in card and f"| training reward, step 2 | {latest:.4g} |" in card
    )
    assert "hf_secret" not in card and str(tmp_path) not in card


def test_the_card_of_a_vision_language_model_shows_it_images(tmp_path):
    from tests.support import tiny_vision

    model, processor = tiny_vision.make("gemma3")
    trainer = runs.trainer(tmp_path, parts={"model": model, "processing_class": processor}, max_steps=1)
    trainer.create_model_card(model_name="me/eyes")
    card = (tmp_path / "README.md").read_text()
    assert metadata(card)["pipeline_tag"] == "image-text-to-text" and "# me/eyes" in card
    lines = card.partition("```python\n")[2].partition("```")[0]
    trainer.save_model()
    lines = lines.replace("me/eyes", str(tmp_path)).replace('"url": "..."', '"image": picture')
    exec(lines.replace("max_new_tokens=256", "max_new_tokens=2"), {"picture": tiny_vision.picture()})


def test_the_name_that_is_given_is_that_of_the_card(tmp_path):
    trainer = runs.trainer(tmp_path, hub_model_id="me/one")
    for given, told in ((None, "me/one"), ("one", "me/one"), ("you/two", "you/two")):
        trainer.create_model_card(model_name=given)
        assert metadata((tmp_path / "README.md").read_text())["model_name"] == told


@dataclass
class Config:
    method: str
    config: dict
    world_size: int = 1

    def to_dict(self):
        return self.config


def card_of(config, method="rloo", **policy):
    trainer = SimpleNamespace(
        args=Config(method, config),
        policy=SimpleNamespace(**policy),
        rewards=SimpleNamespace(names=["r"]),
        state=SimpleNamespace(log_history=[]),
        collector=SimpleNamespace(codec=SimpleNamespace(vision=None)),
    )
    return model_card(trainer, "me/it", None, [])


def test_cards_without_results_or_a_base():
    card = card_of({"loss_type": "rloo"}, peft_config={})
    assert "## Results" not in card and "base_model" not in card and metadata(card)["library_name"] == "peft"
    assert "2402.14740" in card and "2402.03300" not in card


def test_a_loss_of_ones_own_has_no_citation():
    assert card_of({"loss_type": "mine"}).count("@misc") == 1


@pytest.mark.parametrize("name", sorted({*LOSS_TYPES, *ADVANTAGES} - {"grpo", "bnpo"}))  # bnpo is not its paper's
def test_a_published_method_is_cited(name):
    assert card_of({"loss_type": name, "advantages": name}, "grpo").count("@misc") == 2


def test_ratios_of_sequences_are_gspos():
    assert "2507.18071" in card_of({"importance_sampling_level": "sequence"}, "grpo")


def test_places_and_secrets_are_not_told():
    told = {
        "beta": 0.1,
        "output_dir": "/home/me",
        "hub_token": "t",
        "vllm_server_host": "10.0.0.1",
        "logging_dir": "/x",
    }
    assert shown_settings(told, dict.fromkeys(told)) == {"beta": 0.1}


def test_functions_of_files_are_told_without_their_folder():
    config = {"loss_type": "/home/me/mine.py:loss", "advantages": "mine.py:mean"}
    shown = shown_settings(config, {"advantages": None})
    assert shown == {"loss_type": "mine.py:loss", "advantages": "mine.py:mean"}


def test_what_may_be_a_hub_id(tmp_path):
    assert [hub_id(one) for one in ("org/base", "gpt2", "", None, str(tmp_path), "/gone/away", "./here")] == [
        "org/base", "gpt2", None, None, None, None, None
    ]  # fmt: skip


def test_a_config_is_written_without_its_secrets(tmp_path):
    import copy

    nested = {"pairs": [("token", "hf_secret")], "url": "https://me:hf_secret@host/"}
    place = "me/x?token=hf_secret"
    config = runs.config(tmp_path, hub_token="hf_secret", chat_template_kwargs=nested, trackio_space_id=place)
    assert b"hf_secret" not in pickle.dumps(config) and "hf_secret" not in f"{config}{config.to_dict()}"
    assert copy.copy(config).hub_token == copy.deepcopy(config).hub_token == "hf_secret"
    assert pickle.loads(pickle.dumps(config)).num_generations == config.num_generations


def test_a_token_among_the_models_arguments_is_never_shown(tmp_path, tiny_folder):
    settings = {
        "model_init_kwargs": {"token": "hf_secret", "dtype": "float32"},
        "save_strategy": "steps",
        "max_steps": 1,
    }
    trainer = runs.trainer(tmp_path, parts={"model": tiny_folder}, **settings)
    trainer.train()
    trainer.create_model_card()
    assert "| `model_init_kwargs` | {'dtype': 'float32'} |" in (tmp_path / "README.md").read_text()
    assert "hf_secret" not in str(trainer.args) + str(trainer.args.to_dict())
    assert trainer.args.model_init_kwargs["token"] == "hf_secret"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "training_args.bin" for path in files)
    assert not any(b"hf_secret" in path.read_bytes() for path in files)


def test_a_card_names_no_settings_that_are_as_always(tmp_path):
    trainer = runs.trainer(tmp_path)
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "[]" not in card and "accelerator_config" not in card
