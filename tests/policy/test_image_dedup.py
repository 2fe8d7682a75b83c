"""Siblings' images are encoded once: the same log-probs and gradients, with less to encode."""

import pytest
import torch

from covey.core.batch import collate
from covey.policy.adapters import image_encoder
from covey.policy.image_dedup import deduplicated_images
from tests.support import tiny_vision
from tests.trainer.vision.test_vision_training import FAMILIES, rollouts, scores


def counted(model):
    """The rows of pixels of each pass that the encoder's first layer computes."""
    seen = []
    kinds = (torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Linear)
    first = next(module for module in image_encoder(model).modules() if isinstance(module, kinds))
    first.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    return seen


def gradients(model):
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_images_are_encoded_once_with_equal_scores(family):
    """Three siblings of each row: the gradient is the sum of what each gives alone."""
    model, processor = tiny_vision.make(family)
    few = rollouts(model, processor)
    said = ("a", "bc", "def")
    siblings = [one for said in said for one in rollouts(model, processor, [said] * 4)]
    order = [one for i in range(4) for one in siblings[i::4]]
    seen = counted(model)
    for rollout in order:
        scores(model, collate([rollout])).sum().backward()
    alone, rows_alone = gradients(model), sum(seen)
    seen.clear()
    scores(model, collate(few))  # each image once, whatever it takes the encoder to know that it may
    distinct = seen[-1]
    seen.clear()
    scores(model, collate(order)).sum().backward()
    together = gradients(model)
    assert seen == [distinct] and rows_alone >= 3 * distinct
    assert together.keys() == alone.keys()
    for name, gradient in alone.items():
        torch.testing.assert_close(together[name], gradient, atol=1e-4, rtol=1e-4)


class Strange(torch.nn.Module):
    """An encoder that lays all images side by side in one row."""

    def forward(self, pixel_values):
        return pixel_values.flatten(1).flatten()[None]


class Model(torch.nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def get_encoder(self, modality):
        return self.encoder


def test_encoders_that_mix_images_or_use_dropout_are_excluded():
    pixels = torch.ones(3, 2, 2)
    strange = Model(Strange())
    with deduplicated_images(strange):
        assert strange.encoder(pixels).shape == (1, 12)
    assert "forward" not in vars(strange.encoder)
    random = Model(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5)))
    with deduplicated_images(random):
        assert random.encoder(torch.ones(2, 8, 8)).unique(dim=0).shape[0] == 2
