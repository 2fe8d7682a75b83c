"""What comes with later versions is refused with a word about it, never ignored."""

from types import SimpleNamespace

import pytest
import runs

import tiny
from covey.trainers import assembly


@pytest.mark.parametrize("column", ["image", "images"])
def test_pictures_are_refused(tmp_path, column):
    rows = [{**row, column: ["a picture"]} for row in tiny.rows()]
    with pytest.raises(ValueError, match=f"pictures in column '{column}'.*text alone"):
        runs.trainer(tmp_path, parts={"train_dataset": rows})


@pytest.mark.parametrize(("kind", "name"), [("is_fsdp_enabled", "FSDP"), ("is_deepspeed_enabled", "DeepSpeed")])
def test_sharding_is_refused(kind, name):
    trainer = SimpleNamespace(**{"is_fsdp_enabled": False, "is_deepspeed_enabled": False, kind: True})
    with pytest.raises(ValueError, match=f"{name} is not yet supported"):
        assembly.refuse_sharding(trainer)


def test_the_load_balancing_loss_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.1 is not yet supported"):
        runs.config(tmp_path, router_aux_loss_coef=0.1)
