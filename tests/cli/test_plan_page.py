"""The plan of a 70B model in benchmarks/measured.md is what `covey explain` says of the recipe."""

from pathlib import Path

import pytest
from transformers import Qwen2Config

from covey.cli.explain.command import main
from covey.sizing.model_spec import count_parameters

ROOT = Path(__file__).resolve().parents[2]
QWEN_72B = Qwen2Config(
    vocab_size=152064,
    hidden_size=8192,
    intermediate_size=29568,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    tie_word_embeddings=False,
    architectures=["Qwen2ForCausalLM"],
)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_the_page_has_the_plan_of_the_recipe(tmp_path, capsys, method):
    QWEN_72B.save_pretrained(tmp_path)
    run = [str(ROOT / "examples" / "slurm" / f"{method}_70b.yaml"), "--method", method, "--model", str(tmp_path)]
    main([*run, *["--world_size", "32", "--accelerate_config", "fsdp2", "--gpu", "h100", "--prompt_tokens", "512"]])
    said = capsys.readouterr().out
    plan = said[said.index("Memory\n") : said.index("\n\nEvaluation")]
    assert f"```text\n{plan}\n```" in (ROOT / "benchmarks" / "measured.md").read_text()


def test_its_parameters_are_those_of_the_model():
    assert count_parameters(QWEN_72B).parameters == 72_706_203_648  # as the model's card has it: 72.7 billion
