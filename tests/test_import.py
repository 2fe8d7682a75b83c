"""`import covey` costs nothing, and promises only what is there."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "datasets", "peft", "vllm", "sglang", "deepspeed", "wandb", "matplotlib", "rich")


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_covey_loads_nothing_heavy():
    assert loaded_by("import covey").isdisjoint(HEAVY)


def test_importing_the_trainers_loads_no_optional_package():
    # transformers' own Trainer imports peft where it is installed
    optional = {"vllm", "sglang", "deepspeed", "wandb", "trackio", "swanlab", "math_verify", "matplotlib"}
    assert loaded_by("from covey import GRPOTrainer, GRPOConfig, RLOOTrainer, RLOOConfig").isdisjoint(optional)


def test_public_names_are_there():
    import covey

    for name in covey.__all__:
        assert getattr(covey, name) is not None
    assert set(covey.__all__) <= set(dir(covey))
