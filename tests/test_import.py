"""`import covey` costs nothing, and promises only what is there."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "datasets", "peft", "vllm", "sglang", "deepspeed", "wandb", "matplotlib", "rich")


# transformers' own Trainer imports peft where it is installed
OPTIONAL = ("vllm", "sglang", "deepspeed", "wandb", "trackio", "swanlab", "math_verify", "matplotlib")


def modules_after(statement):
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    return {*subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()}


def test_importing_covey_loads_nothing_heavy():
    assert modules_after("import covey").isdisjoint(HEAVY)


@pytest.mark.slow
def test_importing_trainers_loads_nothing_optional():
    loaded = modules_after("from covey import GRPOTrainer, GRPOConfig, RLOOTrainer, RLOOConfig")
    assert "torch" in loaded and loaded.isdisjoint(OPTIONAL)


def test_public_names_are_there():
    import covey

    for name in covey.__all__:
        assert getattr(covey, name) is not None
    assert set(covey.__all__) <= set(dir(covey))
