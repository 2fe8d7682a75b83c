"""float16's loss scaling, by accelerate's own path and torch's scaler for CPUs."""

import pytest
import torch
from transformers import TrainerCallback

from tests.support import runs


class Rates(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(kwargs["lr_scheduler"].get_last_lr()[0])


@pytest.fixture
def scaled(tmp_path, monkeypatch):
    """Makes a trainer that computes in float16 and scales its loss, as `fp16=True` does on a GPU."""

    def make(scale, **settings):
        # Not fused: accelerate cannot tell that a fused optimizer has skipped its step.
        trainer = runs.trainer(tmp_path / str(scale), optim="sgd", **settings)
        monkeypatch.setitem(trainer.accelerator.state.__dict__, "_mixed_precision", "fp16")
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        return trainer

    return make


@pytest.mark.slow
def test_the_scale_of_the_loss_is_taken_out_of_the_gradient(scaled):
    norms = []
    for trainer in (scaled(2.0**10, max_steps=1), scaled(2.0**14, max_steps=1)):
        trainer.train()
        norms += runs.history(trainer, "grad_norm")
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)  # 16 times apart, were they scaled; they round differently


def test_an_overflow_skips_the_step_and_halves_the_scale(scaled):
    rates = Rates()
    trainer = scaled(2.0**40, parts={"callbacks": [rates]}, max_steps=3, lr_scheduler_type="linear")
    before = runs.weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 3 and trainer.accelerator.scaler.get_scale() == 2.0**37
    assert all(torch.equal(a, b) for a, b in zip(before, runs.weights(trainer), strict=True))
    assert rates.seen == [1e-2] * 3  # the schedule waits for a step that is taken


@pytest.mark.slow
def test_training_begins_once_the_scale_fits(scaled):
    rates = Rates()
    trainer = scaled(2.0**22, parts={"callbacks": [rates]}, max_steps=12, lr_scheduler_type="linear")
    before = runs.weights(trainer)
    trainer.train()
    taken = len(set(rates.seen) - {1e-2})
    skipped = 12 - taken
    assert taken > 0 and trainer.accelerator.scaler.get_scale() == 2.0 ** (22 - skipped)
    assert not all(torch.equal(a, b) for a, b in zip(before, runs.weights(trainer), strict=True))
    assert rates.seen[-1] == pytest.approx(1e-2 * (1 - taken / 12))
