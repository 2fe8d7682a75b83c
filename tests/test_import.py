"""`import covey` costs nothing, and promises only what is there."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "datasets", "peft", "vllm", "sglang", "deepspeed", "wandb", "matplotlib", "rich")


# transformers' own Trainer imports peft where it is installed
OPTIONAL = ("vllm", "sglang", "deepspeed", "wandb", "trackio", "swanlab", "math_verify", "matplotlib")


def test_imports_load_nothing_heavy_or_optional():
    statements = ("import covey", "from covey import GRPOTrainer, GRPOConfig, RLOOTrainer, RLOOConfig")
    code = "import sys\n" + "".join(f"{statement}\nprint(*sys.modules)\n" for statement in statements)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for_covey, for_trainers = map(str.split, done.stdout.splitlines())
    assert set(for_covey).isdisjoint(HEAVY)
    assert "torch" in for_trainers and set(for_trainers).isdisjoint(OPTIONAL)


def test_public_names_are_there():
    import covey

    for name in covey.__all__:
        assert getattr(covey, name) is not None
    assert set(covey.__all__) <= set(dir(covey))
