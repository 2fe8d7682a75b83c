"""Images, as vLLM's own request class reads them."""

import base64
import io
import json

import pytest
from PIL import Image

import tiny_vision
from covey.core.media import Media
from covey.rollout.engine import SampleRequest, SamplingParams
from covey.rollout.engines.remote.vllm_images import body_of

pytestmark = pytest.mark.vllm


def test_vllm_reads_tokens_images_and_settings_from_the_request():
    """Token 9 four times stands for a picture; unexpanded it is token 7."""
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    picture = tiny_vision.picture(0)
    media = Media((picture,), {}, {}, start=1, length=4, short_ids=(7,))
    asked = SampleRequest([5, 9, 9, 9, 9, 6], 2, SamplingParams(4, top_k=5), [3, 4], media=(media,))
    read = GenerateRequest.model_validate(json.loads(json.dumps(body_of(asked, "m", frozenset({1})))))
    assert read.token_ids == [5, 7, 6] and read.return_token_ids
    settings = read.sampling_params
    assert (settings.n, settings.seed, settings.max_tokens, settings.top_k, settings.logprobs) == (2, 3, 4, 5, 0)
    assert settings.stop_token_ids == [1] and settings.ignore_eos and not settings.detokenize
    (part,) = read.content_parts
    assert Image.open(io.BytesIO(base64.b64decode(part["url"].partition(",")[2]))).tobytes() == picture.tobytes()
