"""Recipes of the cookbook, unmodified, two steps each: a small random model with the tokenizer of SmolLM2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from covey.cli.demo import model_folder
from tests.tinker.test_client import PYTHONS

KNOWN = "Qwen/Qwen3-4B-Instruct-2507"  # a name that recipes without a flag for the renderer know

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.slow,
    pytest.mark.skipif(not Path(PYTHONS["newest"]).exists(), reason="`make test-tinker` installs the cookbook"),
]

MODEL = ["model_name=./model", "renderer_name=qwen3_instruct"]
GRADER = [
    *("grader_llm_name=./model", "grader_renderer_name=qwen3_instruct"),
    *("train_jsonl_path=rubric.jsonl", "test_jsonl_path=rubric.jsonl"),
]
TEACHERS = [
    *("deepmath_teacher_model=./model", "tulu3_teacher_model=./model"),
    *("deepmath_groups_per_batch=1", "tulu3_groups_per_batch=1"),
]
RECIPES = {  # module, flags, and the operations of a client that each of its steps has
    "arithmetic": (
        "math_rl.train",
        [*MODEL, "env=arithmetic", "loss_fn=importance_sampling", "groups_per_batch=4", "group_size=4", "save_every=1"],
    ),
    "rl_loop": (
        "rl_loop",
        [f"model_name={KNOWN}", "loss_fn=importance_sampling", "batch_size=2", "group_size=2", "max_tokens=8"],
    ),
    "sl_loop": ("sl_loop", [f"model_name={KNOWN}", "batch_size=4"]),
    # its batches cannot be made smaller by flags: one step of 16 prompts, which are all there are
    "rl_basic": ("rl_basic", [f"model_name={KNOWN}", "max_tokens=4", "loss_fn=importance_sampling"]),
    "guess_number": (
        "multiplayer_rl.guess_number.train",
        [*MODEL, "group_size=2", "batch_size=2", "max_tokens=4", "eval_every=0"],
    ),
    "text_arena": (
        "multiplayer_rl.text_arena.train",
        [*MODEL, "test_opponent=random", "batch_size=4", "num_test_datapoints=4", "max_tokens=4", "eval_every=0"],
    ),
    "shorter": ("preference.shorter.train", [*MODEL, "batch_size=2", "group_size=2", "max_tokens=8", "eval_every=0"]),
    "prompt_distillation": (
        "prompt_distillation.train",
        [*MODEL, "file_path=talk.jsonl", "batch_size=4", "eval_every=0"],
    ),
    "gsm8k": (
        "math_rl.train",
        [*MODEL, "env=gsm8k", "loss_fn=importance_sampling", "groups_per_batch=2", "group_size=2"],
    ),
    "chat_sl": ("chat_sl.train", [*MODEL, "dataset=talk.jsonl", "batch_size=4"]),
    "dpo": ("preference.dpo.train", [*MODEL, "batch_size=2"]),
    "rubric": (
        "rubric.train",
        [*MODEL, *GRADER, "groups_per_batch=2", "train_group_size=2", "max_tokens=4", "eval_every=0"],
    ),
    "sdft": ("sdft.train", [*MODEL, "groups_per_batch=2", "max_tokens=4", "topk=5", "eval_every=0"]),
    "on_policy_distillation": (
        "distillation.on_policy_distillation",
        [*MODEL, "teacher_model=./model", "groups_per_batch=2", "group_size=2", "max_tokens=4", "eval_every=0"],
    ),
    "on_policy_multi_teacher": (
        "distillation.on_policy_multi_teacher",
        [*MODEL, *TEACHERS, "group_size=2", "max_tokens=4", "eval_every=0"],
    ),
    "off_policy_reasoning": (
        "distillation.off_policy_reasoning",
        [*MODEL, "batch_size=4", "buffer_size=16", "max_prompts=16"],
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with a model, a link under a known name, and data in the form of the recipes' datasets."""
    folder = tmp_path_factory.mktemp("cookbook")
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / KNOWN).parent.mkdir()
    (folder / KNOWN).symlink_to(folder / "model")
    talk = [{"role": "user", "content": "Say a word."}, {"role": "assistant", "content": "Word, word and word."}]
    (folder / "talk.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(16)))
    sums = [{"question": f"What is {n} + {n}?", "answer": f"It is twice. #### {2 * n}"} for n in range(16)]
    dataset(folder / "openai/gsm8k", "main", {"train": sums, "test": sums[:2]})
    dataset(
        folder / "HuggingFaceH4/no_robots",
        "default",
        {"train": [{"messages": talk}] * 16, "test": [{"messages": talk}]},
    )
    pairs = [
        {"chosen": f"{turn}: It is.", "rejected": f"{turn}: No idea."}
        for turn in (f"\n\nHuman: Is {n} even?\n\nAssistant" for n in range(16))
    ]
    dataset(folder / "Anthropic/hh-rlhf", "default", {"train": pairs, "test": pairs[:2]})
    dataset(folder / "zwhe99/DeepMath-103K", "default", {"train": sums})
    dataset(folder / "allenai/tulu-3-sft-mixture", "default", {"train": [{"messages": talk}] * 16})
    turns = [{"from": "human", "value": "Say a word."}, {"from": "gpt", "value": "Word."}]
    dataset(folder / "open-thoughts/OpenThoughts3-1.2M", "default", {"train": [{"conversations": turns}] * 16})
    choices = {"choices": {"label": ["A", "B"], "text": ["yes", "no"]}, "answerKey": "A", "type": "mcq-4-choices"}
    asked = {"domain": "Chemistry", "details": {"level": "L3"}, **choices}
    dataset(folder / "hicai-zju/SciKnowEval", "default", {"test": [{**one, **asked} for one in sums]})
    item = {"rubric_str": "Is it right?", "extraction_regex": "(.*)", "grader_output_format_instruction": "Say it."}
    graded = [{"convo": talk[:1], "rubric_items": [item]}] * 8
    (folder / "rubric.jsonl").write_text("".join(json.dumps(one) + "\n" for one in graded))
    return folder


def dataset(folder, name, splits):
    folder.mkdir(parents=True)
    files = "\n".join(f"  - split: {split}\n    path: {split}.jsonl" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}\n---\n")
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_takes_two_steps(recipe, place):
    module, flags = RECIPES[recipe]
    log, states = place / f"{recipe}.log", place / f"{recipe}-states"
    served = ["--model", "model", "--as", "./model", "--as", KNOWN, "--checkpoints", str(states), "--log", str(log)]
    # the hosted loss is the default where a recipe has no flag for it
    served += ["--substitute", "stable_reinforce=importance_sampling"]
    ways = [] if module in ("rl_loop", "sl_loop", "rl_basic") else ["behavior_if_log_dir_exists=delete"]
    program = [PYTHONS["newest"], "-m", f"tinker_cookbook.recipes.{module}", *flags, "max_steps=2", *ways]
    command = [
        sys.executable,
        "-m",
        "covey.cli.main",
        "tinker-serve",
        *served,
        "--",
        "env",
        "-u",
        "PYTHONPATH",
        *program,
    ]
    own = {"TINKER_COOKBOOK_RUNS_DIR": str(place / f"{recipe}-runs"), "HF_DATASETS_CACHE": str(place / "cache")}
    done = subprocess.run(
        [*command, f"log_path={place / recipe}"], cwd=place, env=os.environ | own, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = log.read_text()
    assert "failed" not in lines
    if recipe not in ("rl_loop", "rl_basic"):  # whose groups have equal rewards with a random model, and are dropped
        assert lines.count(" optim_step ") == 2
    assert list(states.glob("*/weights/final"))
