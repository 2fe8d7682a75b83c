"""Images, as vLLM's own request class reads them, and a server that samples from prompts with images."""

import base64
import io
import json

import pytest
from PIL import Image

from covey import GRPOConfig, GRPOTrainer
from covey.core.engine import SampleRequest, SamplingParams
from covey.core.media import Media
from covey.engines.servers.vllm.api import image_request
from tests.support import tiny_vision

pytestmark = pytest.mark.vllm


def test_vllm_reads_tokens_images_and_settings_from_the_request():
    """Token 9 four times stands for a picture; unexpanded it is token 7."""
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    picture = tiny_vision.picture(0)
    media = Media((picture,), {}, {}, start=1, length=4, short_ids=(7,))
    asked = SampleRequest([5, 9, 9, 9, 9, 6], 2, SamplingParams(4, top_k=5), [3, 4], media=(media,))
    read = GenerateRequest.model_validate(json.loads(json.dumps(image_request(asked, "m", frozenset({1})))))
    assert read.token_ids == [5, 7, 6] and read.return_token_ids
    settings = read.sampling_params
    assert (settings.n, settings.seed, settings.max_tokens, settings.top_k, settings.logprobs) == (2, 3, 4, 5, 0)
    assert settings.stop_token_ids == [1] and settings.ignore_eos and not settings.detokenize
    (part,) = read.content_parts
    assert Image.open(io.BytesIO(base64.b64decode(part["url"].partition(",")[2]))).tobytes() == picture.tobytes()


def length_reward(completions, **kwargs):
    return [float(len(one[0]["content"])) for one in completions]


def test_training_samples_from_prompts_with_images(start_server, tmp_path):
    """What the server sampled is as probable to it as to the trainer, before and after updates of the vision tower."""
    if not tiny_vision.HAS_TORCHVISION:
        pytest.skip("Qwen2-VL's processor needs torchvision: tools/install_torchvision.py")
    folder = str(tmp_path / "model")
    for part in tiny_vision.make_wide():
        part.save_pretrained(folder)
    server = start_server("--max-model-len", "512", "--enable-scale-out", model=folder)
    ask = [{"role": "user", "content": "What?"}]
    rows = [
        {"prompt": ask, "image": tiny_vision.picture(0)},
        {"prompt": ask, "images": [tiny_vision.picture(1, (40, 16)), tiny_vision.picture(2)]},
        {"prompt": ask, "image": None},
    ]
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), use_vllm=True, vllm_mode="server", vllm_server_base_url=[server.url],
        per_device_train_batch_size=12, gradient_accumulation_steps=1, num_generations=4, max_completion_length=6,
        max_steps=3, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none", bf16=False,
        use_cpu=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(model=folder, reward_funcs=length_reward, args=args, train_dataset=rows)
    trainer.train()
    differences = [
        entry["sampling/sampling_logp_difference/max"]
        for entry in trainer.state.log_history
        if "sampling/sampling_logp_difference/max" in entry
    ]
    assert len(differences) == 3 and max(differences) < 1e-3
