"""Two processes that share the weights of a vision-language model train as one that has them all."""

import pytest
import torch

from tests.support import vision_runs
from tests.support.launching import HERE, accelerate

WAYS = [pytest.param("fsdp2", marks=pytest.mark.slow), pytest.param("zero3", marks=pytest.mark.deepspeed)]


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_on_images_and_text_as_one_does(tmp_path, way):
    """Passes of text beside passes with images: encoding images takes both processes, so both do it in every pass."""
    alone = vision_runs.train(tmp_path / "alone")
    accelerate(way, str(HERE / "vision_runs.py"), str(tmp_path), seconds=300)
    shared = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert shared.keys() == alone.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(shared[name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
