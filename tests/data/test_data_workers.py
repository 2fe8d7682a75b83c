"""Processes that read data have a deadline."""

import time

import pytest

from covey.config.algebra import BatchAlgebra
from covey.data.sampler import train_loader

pytestmark = pytest.mark.slow


class Hanging:
    """A dataset whose third row never comes."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            time.sleep(600)
        return {"prompt": str(index)}


def test_a_row_that_never_comes_ends_the_run():
    algebra = BatchAlgebra(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=2,
        world_size=1,
        per_device_eval_batch_size=2,
        num_generations_eval=None,
    )
    loader = train_loader(Hanging(), algebra, 0, shuffle=False, seed=0, workers=1, timeout=3)
    steps = iter(loader)
    assert [draw.prompt for draw in next(steps).samples] == [0, 0]
    assert [draw.prompt for draw in next(steps).samples] == [1, 1]
    with pytest.raises(RuntimeError, match="timed out after 3 seconds"):
        next(steps)
