"""Weights that teachers take, known before one is loaded, as the trainer then loads or shares them."""

import json

from covey import GRPOConfig
from covey.trainer.teacher_weights import PolicyWeights, planned_teacher_bytes, teacher_bytes, weights_of_teachers
from tests.support import runs, tiny

EACH = 4 * tiny.model().num_parameters()  # bytes of a model in float32


def adapter(folder, base, **settings):
    folder.mkdir()
    described = {"base_model_name_or_path": str(base), "peft_type": "LORA", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)


def config_of(folder):
    config = tiny.config()
    config.save_pretrained(folder)
    config._name_or_path = str(folder)
    return config


def test_adapters_on_one_base_load_it_once(tmp_path):
    config, other = config_of(tmp_path / "base"), tmp_path / "other"
    config_of(other)
    teachers = {name: adapter(tmp_path / name, other) for name in ("a", "b")}
    teachers["c"] = adapter(tmp_path / "c", tmp_path / "base")
    args, peft = GRPOConfig(teacher=teachers), {"r": 4}
    loaded = [one.loaded for one in weights_of_teachers(args, PolicyWeights(config, peft))]
    assert loaded == [str(other), None, None]  # the base of the last is the policy's
    loaded = [one.loaded for one in weights_of_teachers(args, PolicyWeights(config, None))]
    assert loaded == [str(other), None, str(tmp_path / "base")]  # which is trained
    sharded = PolicyWeights(config, peft, shards=2)
    assert None not in [one.loaded for one in weights_of_teachers(args, sharded)]
    assert teacher_bytes(args, sharded) == 3 * EACH // 2


def test_a_base_that_cannot_be_shared_is_loaded(tmp_path):
    config = config_of(tmp_path / "base")
    args = GRPOConfig(teacher=adapter(tmp_path / "a", tmp_path / "base"))
    assert teacher_bytes(args, PolicyWeights(config, {"r": 4})) == 0
    assert teacher_bytes(args, PolicyWeights(config, {"r": 4, "init_lora_weights": "pissa"})) == EACH
    assert teacher_bytes(args, PolicyWeights(config, {"r": 4}, in_eight_bits=True)) == EACH
    pissa = GRPOConfig(teacher=adapter(tmp_path / "b", tmp_path / "base", init_lora_weights="pissa"))
    assert teacher_bytes(pissa, PolicyWeights(config, {"r": 4})) == EACH


def test_a_model_whose_config_is_elsewhere_counts_nothing():
    assert teacher_bytes(GRPOConfig(teacher="nobody/such-a-model"), PolicyWeights(tiny.config(), None)) == 0


def test_a_trainer_plans_for_its_teacher(tmp_path):
    """A model that is given counts as it is."""
    trainer = runs.trainer(tmp_path / "run", teacher=tiny.folder(tmp_path / "teacher", seed=1))
    assert trainer.run.teacher_bytes == EACH
    given = tiny.model(seed=1).bfloat16()
    assert planned_teacher_bytes(trainer.args, trainer.policy, 1, given) == EACH // 2
