"""vLLM in this process, shown images: it samples what the trainer scores, while all parts of the model are trained."""

import pytest

from covey import GRPOConfig, GRPOTrainer
from tests.support import tiny_vision

pytest.importorskip("vllm.sampling_params")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not tiny_vision.HAS_TORCHVISION, reason="Qwen2-VL's processor needs torchvision"),
]

ASK = [{"role": "user", "content": "What?"}]
ROWS = [
    {"prompt": ASK, "image": tiny_vision.picture(0)},
    {"prompt": ASK, "images": [tiny_vision.picture(1, (40, 16)), tiny_vision.picture(2)]},
    {"prompt": ASK, "image": None},
]
SETTINGS = {
    "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512, "per_device_train_batch_size": 12,
    "gradient_accumulation_steps": 1, "num_generations": 4, "max_completion_length": 6, "max_steps": 3,
    "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "bf16": False,
    "use_cpu": True, "gradient_checkpointing": False, "disable_tqdm": True,
}  # fmt: skip


def longer(completion_ids, **kwargs):
    return [float(len(set(ids))) for ids in completion_ids]


def trainer(folder, model=None, **changes):
    parts = {key: changes.pop(key) for key in ("rollout_func", "peft_config") if key in changes}
    model, processor = model or tiny_vision.make_wide()
    args = GRPOConfig(output_dir=str(folder), **{**SETTINGS, **changes})
    return GRPOTrainer(model, longer, args, ROWS, processing_class=processor, **parts)


def differences(trained):
    name = "sampling/sampling_logp_difference/max"
    return [entry[name] for entry in trained.state.log_history if name in entry]


def test_vllm_and_trainer_agree_on_log_probs_after_every_update(tmp_path):
    """The tower is trained, and rows come again: what older weights made of an image is not used any more."""
    trained = trainer(tmp_path)
    before = {name: value.clone() for name, value in trained.model.named_parameters()}
    trained.train()
    changed = {name.split(".")[1] for name, value in trained.model.named_parameters() if not value.equal(before[name])}
    assert {"visual", "language_model"} <= changed
    assert len(differences(trained)) == 3 and max(differences(trained)) < 1e-3


def test_images_that_come_in_later_turns_are_seen(tmp_path):
    trained = trainer(tmp_path, rollout_func=shown_later, max_completion_length=64, max_steps=2)
    trained.train()
    assert len(differences(trained)) == 2 and max(differences(trained)) < 1e-3


async def shown_later(row, engine):
    episode = engine.begin()
    await episode.sample(3)
    picture = tiny_vision.picture(len(row["prompt"]) + engine.sibling)
    episode.write({"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "Now?"}]})
    await episode.sample(3)
    return episode.done()


def test_images_that_vllm_expands_otherwise_are_refused(tmp_path):
    trained = trainer(tmp_path, vllm_engine_kwargs={"mm_processor_kwargs": {"max_pixels": 256}})
    with pytest.raises(RuntimeError, match="expands a prompt with images to"):
        trained.train()
