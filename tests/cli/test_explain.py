"""Sentences and figures of `covey explain` for runs whose answers are known."""

import json
import re
from dataclasses import replace

import pytest
from transformers import LlamaConfig, MambaConfig

from covey.cli.explain.command import explain as explain_run
from covey.cli.explain.run import Cluster, ExplainedRun, ModelPlan, Start, source_lines
from covey.cli.main import main as covey
from covey.config.algebra import planning_for
from covey.config.grpo import GRPOConfig
from covey.config.rloo import RLOOConfig
from covey.data.sources import Source, Sources, SourceSettings
from covey.engines.native import number_formats
from covey.runtime.waiting import CHOSEN
from covey.sizing.memory import ShardCounts
from covey.sizing.step_cost import MACHINES
from tests.support import tiny, tiny_vision


def words(text):
    """The text without its line breaks, for comparing sentences."""
    return " ".join(text.split())


def main(argv):
    return covey(["explain", *argv])


def explain(args, **facts):
    return explain_run(ExplainedRun(args, **facts))


@pytest.fixture
def run_file(tmp_path):
    LlamaConfig(
        vocab_size=104,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ).save_pretrained(tmp_path / "model")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {tmp_path / 'model'}\nnum_generations: 4\nper_device_train_batch_size: 4\n"
        "gradient_accumulation_steps: 2\nlearning_rate: 1e-5\n"
    )
    return str(path)


def test_on_policy_nothing_clips():
    text = words(explain(GRPOConfig()))
    assert "On-policy (gradient_accumulation_steps=1, steps_per_generation * num_iterations=1)" in text
    assert "all importance ratios are exactly 1 and nothing can clip: clip_ratio/* stays 0" in text
    assert "One rollout batch: 1 prompt, 8 completions each, 8 completions in all" in text
    assert "One optimizer update per rollout batch." in text


def test_off_policy_ratios_clip():
    text = words(explain(GRPOConfig(num_iterations=2, epsilon_high=0.28)))
    assert "Off-policy (gradient_accumulation_steps=1, steps_per_generation * num_iterations=2)" in text
    assert "Tokens whose ratio has left [0.8, 1.28]" in text
    assert "2 optimizer updates per rollout batch." in text


def test_dynamic_sampling_and_difficulty_are_explained():
    text = words(explain(GRPOConfig(dynamic_sample=True, max_resample_times=2, prompt_sampler="difficulty")))
    assert (
        "in up to 2 rounds (max_resample_times): a rollout batch samples at most 24 completions and trains on 8" in text
    )
    assert "comes about 0.1 times as often as one that is solved half of the time" in text
    assert "dynamic_sample" not in explain(GRPOConfig())


def test_streamed_rewards_are_explained():
    text = words(explain(GRPOConfig(stream_rewards=True, reward_timeout=20)))
    assert "reward functions receive one group at a time and have 20 seconds (reward_timeout) for each" in text
    assert "stream_rewards" not in explain(GRPOConfig())


def test_reuse_of_completions_is_explained():
    exact = words(explain(GRPOConfig(speculative_reuse="exact")))
    assert "its last completions are drafts (speculative_reuse=exact): one forward pass checks them" in exact
    assert "a prompt keeps its seeds from epoch to epoch" in exact
    assert "sampling/reused_token_fraction" in exact
    lenient = GRPOConfig(speculative_reuse="lenient", speculative_lenience=1.2, max_completion_length=None)
    text = words(explain(lenient))
    assert "probability min(1, lenience * p_now / p_then), with speculative_lenience=1.2" in text
    assert "speculative_reuse" not in explain(GRPOConfig())


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (GRPOConfig(loss_type="grpo"), "The loss is 0 up to rounding"),
        (GRPOConfig(loss_type="dapo"), "The loss is close to 0 and may be negative"),
        (GRPOConfig(loss_type="vespo"), "vespo logs advantage times log-probability"),
        (GRPOConfig(num_iterations=2), "starts near 0 on each rollout batch"),
        (RLOOConfig(), "The loss is 0 up to rounding"),
    ],
)
def test_the_loss_to_expect_depends_on_the_loss_type(args, sentence):
    assert sentence in words(explain(args))


def test_the_kl_penalty_is_in_the_loss_or_the_reward():
    assert "0.04 * KL to the reference model is added to the loss (k3)" in words(explain(GRPOConfig(beta=0.04)))
    assert "0.05 * KL to the reference model is subtracted from the reward" in words(explain(RLOOConfig()))
    assert "no reference model in memory" in words(explain(GRPOConfig()))


def test_masking_truncated_completions_is_explained():
    text = words(explain(GRPOConfig(mask_truncated_completions=True)))
    assert "If all of an update are cut off" in text


def test_groups_of_two_have_fixed_advantages():
    assert "always +0.71 and -0.71" in words(explain(GRPOConfig(num_generations=2)))
    assert "always +0.71" not in words(explain(GRPOConfig(num_generations=4)))


@pytest.mark.parametrize(
    ("advantages", "said"),
    [(None, "has advantages of 0 and teaches nothing"), ("reinforce_plus_plus", "teaches too")],
)
def test_what_equal_rewards_teach_follows_from_the_baseline(advantages, said):
    assert said in words(explain(GRPOConfig(advantages=advantages)))


def test_tokens_are_counted():
    # 8 completions of up to 100 tokens: 800 sampled; with prompts of 20, 8 * 120 = 960 read
    text = words(explain(GRPOConfig(max_completion_length=100), prompt_tokens=20))
    assert "samples at most 800 tokens" in text
    assert "960 in all" in text


def test_an_evaluation_that_would_fail_is_announced():
    args = GRPOConfig(num_generations=6, per_device_train_batch_size=6)
    assert "None: no eval_dataset" in words(explain(args))
    assert "This will fail: An evaluation batch of 8" in words(explain(args, evaluations={"": "rows.jsonl"}))


def test_the_command_reads_the_file_and_its_model(run_file, capsys):
    assert main([run_file, "--kl_coef", "0.1"]) == 0
    text = words(capsys.readouterr().out)
    assert "8,016 parameters" in text
    assert "One rollout batch: 2 prompts, 4 completions each, 8 completions in all" in text
    assert "Warnings `kl_coef` is called `beta` here." in text


def test_the_command_plans_for_more_processes(run_file, capsys):
    assert main([run_file, "--world_size", "4", "--prompt_tokens=10"]) == 0
    assert "8 prompts, 4 completions each, 32 completions in all" in words(capsys.readouterr().out)


def test_a_model_without_attention_has_no_memory_estimate(run_file, tmp_path, capsys):
    MambaConfig(vocab_size=104, hidden_size=16, num_hidden_layers=2).save_pretrained(tmp_path / "mamba")
    assert main([run_file, "--model", str(tmp_path / "mamba")]) == 0
    assert "No estimate: mamba has no attention" in words(capsys.readouterr().out)


def test_a_model_of_the_hub_has_no_memory_estimate(run_file, capsys):
    assert main([run_file, "--model", "nobody/nothing-here"]) == 0
    assert "No estimate: the config of 'nobody/nothing-here' is not on this machine" in words(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere.yaml"], "there is no run file 'nowhere.yaml'"),
        (["--num_generations", "3"], "num_generations: 2 or 4"),
        (["--nm_generations", "3"], "Did you mean `num_generations`?"),
        (["--world_size", "none"], "--world_size: 'none' is not a whole number"),
        (["--beta", "big"], "invalid float value: 'big'"),
    ],
)
def test_mistakes_end_in_one_line_and_status_two(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("covey: error: ")
    assert message in error


OWN_REWARDS = """
def strip(completions, topic):
    return [float(text.strip() == "") for text in completions]

def fail(completions, **kwargs):
    return [float(text["content"] == "") for text in completions]

def brief(completions, kind, **kwargs):
    return [-float(len(text)) for text in completions]
"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n' * 7)
    (tmp_path / "own.py").write_text(OWN_REWARDS)
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return ["--dataset", "rows.jsonl", "--reward_funcs", "exact_match_reward"]


def test_names_of_columns_cannot_steer_a_terminal(run_file, data, capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prom\x1b[2Jpt": "x"}) + "\n")
    assert main([run_file, *data]) == 2
    printed = capsys.readouterr().out
    assert r"prom\x1b[2Jpt" in printed and "\x1b" not in printed


def test_the_rows_of_local_data_are_counted(run_file, data, capsys):
    # 2 prompts per rollout batch: 7 rows make 3 of one update, three times over 9
    assert main(["--config", run_file, *data]) == 0
    text = words(capsys.readouterr().out)
    assert "7 prompts make 3 rollout batches per epoch (1 prompt left over) and 3 updates." in text
    assert "num_train_epochs=3 makes 9 updates in all" in text
    assert "The dataset was read: 7 prompt(s)." in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "none.jsonl"], "will fail: there is no data file or folder 'none.jsonl'"),
        (["--reward_funcs", "exact_match"], "did you mean 'exact_match_reward'?"),
        (["--reward_funcs", "get_repetition_penalty_reward"], "is a factory"),
        (["--tools", "none.py:add"], "will fail: tool file"),
        (["--quantization", "{load_in_4bit: true}"], "`quantization` without `peft`): quantised weights"),
        (["--quantization", "{bits: 4}", "--peft", "{r: 2}"], "has bits, which transformers.BitsAndBytesConfig"),
        (["--tools", "os:getcwd", "json:dumps"], "tool 'dumps' cannot be described"),
        (["--rollout_func", "operator.nothing"], "'nothing' does not exist. There: "),
        (["--reward_funcs", "own.py:strip"], "[data-columns]"),
        (["--reward_funcs", "own.py:fail"], "reward function 'fail' failed on all 2 samples"),
        (["--reward_weights", "1", "2"], "2 reward weights for 1 reward functions"),
        (["--metric_for_best_model", "eval_x", "--eval_dataset", "{a: rows.jsonl}"], "[best-metric]"),
        (["--per_device_train_batch_size", "32"], "[dataset-small]"),
    ],
)
def test_a_run_that_would_not_start_has_status_two(run_file, data, capsys, flags, message):
    assert main([run_file, *data, *flags]) == 2
    assert message in words(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reward_funcs", "own.py:fail"], "reward function 'fail' failed on all 2 samples"),
        (["--reward_funcs", "own.py:strip"], "[data-columns]"),
        (["--eval_dataset", "{dataset: rows.jsonl, pass_at: 1, success_reward: best}"], "Choose one of: exact_match"),
        (["--metric_for_best_model", "eval_x", "--eval_dataset", "{a: rows.jsonl}"], "[best-metric]"),
    ],
)
def test_a_model_of_the_hub_hides_no_other_mistake(run_file, data, capsys, flags, message):
    """All that needs no tokenizer is checked before a model is downloaded."""
    assert main([run_file, "--model", "none/here", *data, *flags]) == 2
    assert message in words(capsys.readouterr().out)


def test_rewards_are_tried_without_a_tokenizer(run_file, data, capsys):
    assert main([run_file, "--model", "none/here", *data]) == 0
    assert "exact_match_reward 0.000 1.000 The solution is" in words(capsys.readouterr().out)


def test_a_model_folder_without_tokenizer_does_not_start(run_file, data, capsys, tmp_path):
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert main([run_file, *data]) == 2
    assert "will fail: no tokenizer could be loaded from" in words(capsys.readouterr().out)


def test_the_first_prompt_lengths_and_rewards_are_shown(run_file, data, capsys, tmp_path):
    rows = [{"prompt": "1" * size, "solution": "2"} for size in (4, 6, 5, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    functions = ["--reward_funcs", "exact_match_reward", "own.py:fail_on_empty"]
    functions += ["--keep_sampling_mask", "True", "--top_p", "0.9"]  # which needs an engine that returns masks
    (tmp_path / "own.py").write_text(
        "def fail_on_empty(completions, **kwargs): return [1 / len(c) for c in completions]"
    )
    assert main([run_file, *data, *functions]) == 0
    text = words(capsys.readouterr().out)
    assert "as the model reads it: | 1111 Tokens of 4 prompts: from 4 to 9, median 5." in text
    assert "empty solution exact_match_reward 0.000 1.000 fail_on_empty none 1.000" in text
    assert "The solution is the text of the first row's 'solution': '2'." in text
    assert "with prompts of 9 tokens" in text  # in the place of the assumed 256
    assert "counted in rewards/fail_on_empty/failures" in text and "Environments are not played" not in text


def test_an_environment_that_nobody_played_in_rewards_nothing(run_file, data, capsys, tmp_path):
    (tmp_path / "own.py").write_text(
        """
class Room:
    def reset(self, **row):
        open("called", "w").close()
        return "go"

    def step(self, action):
        return "", 1.0, True

    def get_reward(self):
        return 1.0
"""
    )
    assert main([run_file, *data[:2], "--environment_factory", "own.py:Room", "--prompts_as_messages", "True"]) == 0
    text = words(capsys.readouterr().out)
    assert "as the model reads it:" in text and "Room" not in text and "no reward function" not in text
    assert "Environments are not played here: what they add to prompts" in text and not (tmp_path / "called").exists()


def test_prompts_that_leave_no_room_are_counted(run_file, data, capsys, tmp_path):
    # a context of 2048: 2040 and 300 tokens with completions of 256
    rows = [{"prompt": "1" * size, "solution": "2"} for size in (2040, 4, 5, 300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([run_file, *data, "--max_completion_length", "256"]) == 0
    assert "1 of them leave less room than max_completion_length=256 in the model's" in words(capsys.readouterr().out)


def test_text_that_a_reward_asks_for_is_the_solution(run_file, data, capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "kind": "sum"}\n' * 7)
    assert main([run_file, *data, "--reward_funcs", "own.py:brief"]) == 0
    assert "brief 0.000 -3.000 The solution is the text of the first row's 'kind'" in words(capsys.readouterr().out)


def test_a_number_that_a_reward_asks_for_is_the_solution(run_file, data, capsys, tmp_path):
    """As a CSV gives it: a reward that compares it with text shows 0 for its own solution."""
    (tmp_path / "rows.csv").write_text("prompt,total\n" + "1+1=,2\n" * 7)
    (tmp_path / "own.py").write_text(
        "def right(completions, total, **kwargs): return [float(a == b) for a, b in zip(completions, total)]"
    )
    assert main([run_file, "--dataset", "rows.csv", "--reward_funcs", "own.py:right"]) == 0
    text = words(capsys.readouterr().out)
    assert "right 0.000 0.000 The solution is the text of the first row's 'total': '2'" in text


def test_ids_of_the_hub_are_listed_as_unchecked(run_file, capsys):
    assert main([run_file, "--dataset", "org/data", "--reward_funcs", "org/model"]) == 0
    text = words(capsys.readouterr().out)
    assert "not checked: dataset 'org/data'" in text and "not checked: reward 'org/model'" in text


def test_quantised_weights_and_their_scales_are_counted(run_file, data, capsys):
    # linear layers of two layers: 2 * 2304 numbers in 4 bits, 2304 bytes, and a scale of 4 bytes for each 64 of them,
    # 288; adapters of rank 2 on all 7: per layer 2 * (4 * 16 + 16 + 16 + 8 + 8 + 3 * (16 + 32)) = 512; those, norms
    # 5 * 16, embeddings and head 3328 in float32: (1024 + 80 + 3328) * 4 = 17728. 20320 bytes are 19.8 KiB
    adapter = ["--peft", "{r: 2, target_modules: all-linear}"]
    assert main([run_file, *data, "--quantization", "{load_in_4bit: true}", *adapter]) == 0
    text = words(capsys.readouterr().out)
    assert "9,040 parameters, 1,024 of them trained" in text and "weights 19.8 KiB" in text


def test_missing_parts_of_a_run_are_listed(run_file, capsys):
    assert main([run_file]) == 0
    assert "still to be named: dataset, reward_funcs." in words(capsys.readouterr().out)


def test_an_unknown_setting_names_the_method(run_file, capsys):
    assert main(["--config", run_file, "--learnig_rate", "1"]) == 2
    assert "no setting of a GRPO run. Did you mean `learning_rate`?" in capsys.readouterr().err


def test_help_says_how_to_call_it(capsys):
    assert main(["--help"]) == 0
    assert "usage: covey explain [--config] CONFIG" in capsys.readouterr().out


def test_the_correction_of_the_engine_is_explained():
    weighed = "is weighed by trainer probability over engine probability"
    text = words(explain(GRPOConfig(correct_built_in_engine=True)))
    assert f"Each sequence {weighed} (sequence_mask); above 3.0 it is dropped." in text
    assert "compares log-probabilities that training computes anyway: no additional pass" in text
    bounds = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_mode": "token_truncate"}
    text = words(explain(GRPOConfig(correct_built_in_engine=True, num_iterations=2, **bounds)))
    assert f"Each token {weighed} (token_truncate); below 0.5 or above 3.0 it counts as the bound." in text
    assert "reads the log-probabilities of the additional pass" in text
    assert weighed not in words(explain(GRPOConfig()))


def test_rejection_is_explained_with_its_bounds():
    rejected = "tokens, is outside of these bounds (geometric_mask_min=0.99, geometric_mask_max=None)"
    args = GRPOConfig(correct_built_in_engine=True, geometric_mask_min=0.99)
    assert rejected in words(explain(args)) and "geometric" not in words(explain(GRPOConfig()))


def test_it_says_how_threads_wait():
    assert f"Between two operations threads wait {CHOSEN}." in words(explain(GRPOConfig(use_cpu=True)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        # 2^-20 <= 1e-6 < 2^-19: numbers of bfloat16 in [2^-12, 2^-11) are 2^-19 apart, and half of that is moved
        (
            {"model_init_kwargs": {"dtype": "bfloat16"}, "learning_rate": 1e-6},
            "rounded away from weights of 0.00049 or",
        ),
        ({"model_init_kwargs": {"dtype": "float16"}, "learning_rate": 1e-6}, "rounded away from weights of 0.0039 or"),
        ({"model_init_kwargs": {"dtype": "bfloat16"}, "optim": "adamw_stochastic"}, "no update is lost in the mean"),
    ],
)
def test_weights_in_half_precision_are_explained(settings, said):
    text = words(explain(GRPOConfig(**settings), model=ModelPlan(tiny.config())))
    assert said in text
    plain = words(explain(GRPOConfig(learning_rate=1e-6), model=ModelPlan(tiny.config())))
    assert "rounded away" not in plain and "lost in the mean" not in plain


class Refused(number_formats.FloatProduct):
    """A product that the machine's library refuses."""

    def __call__(self, x, scales):
        raise RuntimeError("there is none")


def test_a_run_without_rewards_starts_and_its_loss_is_the_teachers(run_file, tmp_path, capsys):
    tiny.folder(tmp_path / "policy")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n' * 8)
    settings = {"model": tmp_path / "policy", "dataset": tmp_path / "rows.jsonl", "teacher": "start"}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    assert main([run_file, *flags, "--num_generations", "1", "--use_cpu", "true"]) == 0
    text = words(capsys.readouterr().out)
    assert "There are no rewards" in text and "`reward` is what should rise" not in text
    assert "no_reward" not in text


def test_a_divergence_is_part_of_the_loss():
    both = words(explain(GRPOConfig(teacher="start", teacher_loss="divergence")))
    assert "teacher/loss is this part alone" in both and "stays around 0" not in both
    assert "stays around 0" in words(explain(GRPOConfig(teacher="start")))


def test_the_weights_of_a_teacher_are_memory(tmp_path):
    """float32 by default; in half precision half as many bytes, and none of a server."""
    tiny.config().save_pretrained(tmp_path)
    numbers = tiny.model().num_parameters()

    def teachers(**settings):
        run = ExplainedRun(GRPOConfig(**settings), ModelPlan(tiny.config()))
        return run.memory.teachers, run.memory.peak

    (none, alone), (whole, peak) = teachers(), teachers(teacher=str(tmp_path))
    assert (none, whole, peak - alone) == (0, 4 * numbers, 4 * numbers)
    assert teachers(teacher=str(tmp_path), teacher_model_init_kwargs={"dtype": "bfloat16"})[0] == 2 * numbers
    assert teachers(teacher="http://localhost:8000")[0] == 0
    assert teachers(teacher={"a": str(tmp_path), "b": "start"})[0] == 4 * numbers


@pytest.mark.parametrize(
    "of_teacher, of_policy, said",
    [
        ({}, {}, "whose base is the policy's"),
        ({"init_lora_weights": "pissa"}, {}, "and its own base"),
        ({"bias": "all"}, {}, "and its own base"),
        ({}, {"init_lora_weights": "pissa"}, "since the policy's adapter changes the policy's own"),
    ],
)
def test_a_base_that_no_policy_shares_is_in_the_memory_of_a_teacher(tmp_path, of_teacher, of_policy, said):
    config = tiny.config()
    config.save_pretrained(tmp_path / "base")
    config._name_or_path = str(tmp_path / "base")
    adapter = {"base_model_name_or_path": str(tmp_path / "base"), "peft_type": "LORA", **of_teacher}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    text = words(explain(GRPOConfig(teacher=str(tmp_path)), model=ModelPlan(config, peft={"r": 4, **of_policy})))
    assert "and memory: the adapter" in text and said in text
    assert ("whose base is the policy's" in text) is not bool(of_teacher or of_policy)


def test_sampling_in_fewer_bits_is_explained_with_what_it_gains_here(monkeypatch):
    corrected = "the loss is corrected for the difference"
    for able in (True, False):
        for name in ("int8", "bfloat16"):
            kind = number_formats.FloatProduct
            monkeypatch.setitem(number_formats.FAST, ("cpu", name), (lambda able=able: able, kind))
        auto, named = (
            words(explain(GRPOConfig(engine_dtype=name, bf16=False, use_cpu=True))) for name in ("auto", "int8")
        )
        assert ("a decoding step of the model is measured" in auto) is able is (corrected in auto)
        assert ("changes nothing on this machine" in auto) is not able
        assert ("int8: this processor multiplies no int8 (it has neither AMX nor VNNI)" in auto) is not able
        assert "rounds weights and inputs of linear layers to int8" in named and corrected in named
        assert ("does not make decoding faster here" in named) is not able
    monkeypatch.setitem(number_formats.FAST, ("cpu", "bfloat16"), (lambda: False, number_formats.FloatProduct))
    monkeypatch.setitem(number_formats.FAST, ("cpu", "int8"), (lambda: True, Refused))
    auto = words(explain(GRPOConfig(engine_dtype="auto", use_cpu=True)))
    assert "int8: oneDNN has no fast or right product of int8" in auto and "neither AMX nor VNNI" not in auto
    assert "started with quantization=fp8" in words(explain(GRPOConfig(engine_dtype="float8", use_vllm=True)))
    assert "fewer bits" not in words(explain(GRPOConfig())) and corrected not in words(explain(GRPOConfig()))


def test_async_rollouts_are_explained_with_their_age():
    text = words(explain(GRPOConfig(max_staleness=1)))
    assert "up to 1 optimizer step older than those that training on a rollout batch begins with" in text
    assert "While one rollout batch is trained on, the next one is sampled." in text
    assert "token_truncate keeps more" in text
    assert "every gradient is computed with the weights that sampled" not in text
    text = words(explain(GRPOConfig(max_staleness=3, vllm_importance_sampling_mode="token_mask")))
    assert "up to 3 more are sampled" in text and "token_truncate keeps more" not in text
    text = words(explain(GRPOConfig(max_staleness=1, num_iterations=4)))
    assert "the next is sampled only during the last 1 update of them; max_staleness=4 would overlap them all" in text
    assert "Async rollouts" not in words(explain(GRPOConfig()))


def colocated(**changes):
    """A run with vLLM in the trainer's process on a GPU of 24 GiB, explained."""
    settings = {"use_vllm": True, "vllm_gpu_memory_utilization": "auto", **changes}
    args = GRPOConfig(report_to="none", bf16=False, **settings)
    return words(explain(args, model=ModelPlan(tiny.config()), gpu=24 * 1024**3))


def test_the_share_of_vllm_is_derived():
    text = colocated()
    assert re.search(r"vllm_gpu_memory_utilization=auto is 0\.0\d of 24\.0 GiB: .* are taken by training", text)
    assert "for the keys and values of all completions at once), all of it." in text
    assert "vLLM stays awake" in text
    assert "KV cache" not in text, "that of the built-in engine is not there"


def test_a_given_share_is_compared_with_the_demand():
    text = colocated(vllm_gpu_memory_utilization=0.3)
    assert "vLLM takes 7.2 GiB (vllm_gpu_memory_utilization=0.3 of 24.0 GiB) and can use" in text
    assert "'auto' would be 0.0" in text


def test_the_sleep_of_vllm_is_explained():
    text = colocated(vllm_enable_sleep_mode=True, offload_model=True, offload_optimizer=True, vllm_sleep_level=2)
    assert "taken by weights, reference and optimizer, which stay while vLLM is awake, the policy and optimizer" in text
    assert "(vllm_sleep_level=2): its weights are discarded" in text
    assert "While vLLM samples, the model and the optimizer wait in host memory" in text


def test_without_a_gpu_the_cache_is_given():
    args = GRPOConfig(report_to="none", bf16=False, use_cpu=True, use_vllm=True)
    text = words(explain(args, model=ModelPlan(tiny.config())))
    assert "on this CPU, a cache of 64.0 MiB" in text
    assert "VLLM_CPU_KVCACHE_SPACE" in text


def test_servers_are_listed_with_their_load():
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": ["http://a:1", "http://b:2"]}
    text = words(explain(GRPOConfig(**settings, temperature=0.8)))
    assert "2 vLLM servers: http://a:1, http://b:2" in text
    assert "at most 512 at a time" in text and "waits 240 s" in text
    assert "processed_logprobs" in text


def test_the_transfer_of_weights_to_vllm_is_explained():
    server = {"use_vllm": True, "vllm_mode": "server"}
    text = words(explain(GRPOConfig(**server, vllm_group_port=5000)))
    assert "connecting to this machine at port 5000" in text and "temporary folder" in text
    text = words(explain(GRPOConfig(**server, vllm_weight_transfer="disk", vllm_weight_folder="/shared")))
    assert "are sent as files in /shared (vllm_weight_folder) (vllm_weight_transfer='disk')" in text


def test_differences_and_a_changing_pool_are_explained(tmp_path):
    path = tmp_path / "servers.txt"
    path.write_text("http://a:1\nhttp://b:2\n")
    server = {"use_vllm": True, "vllm_mode": "server", "server_pool_file": str(path)}
    text = words(explain(GRPOConfig(**server, vllm_weight_differences=True)))
    assert "2 vLLM servers: http://a:1, http://b:2" in text and "read again before each rollout batch" in text
    assert "positions and values of the numbers that changed" in text
    assert "vllm_weight_differences=True sends what changed" in words(explain(GRPOConfig(**server)))
    path.unlink()
    assert "cannot be read" in words(explain(GRPOConfig(**server)))


def test_sglang_servers_are_listed_or_started():
    text = words(explain(GRPOConfig(use_sglang=True, sglang_base_url="http://a:1,http://b:2")))
    assert "2 SGLang servers: http://a:1, http://b:2" in text and "at most 512 at a time" in text
    assert "starts on cuda:1" in words(explain(GRPOConfig(use_sglang=True, sglang_device="cuda:1")))


def test_shards_have_traffic_and_a_gpu_has_seconds(run_file, capsys):
    words_of = ["--world_size", "2", "--accelerate_config", "fsdp2", "--gpu", "h100", "--prompt_tokens", "4"]
    assert main([run_file, *words_of, "--max_completion_length", "8"]) == 0
    text = words(capsys.readouterr().out)
    assert "weights, gradients, optimizer sharded over 2 processes (fsdp2)" in text
    assert "Operations and communication One optimizer step, all 2 processes, full completions:" in text
    assert "gather weights" in text and "add up gradients 15.7 KiB" in text  # half of 8016 gradients of 4 bytes, once
    assert "On h100 GPUs, at 40% of their operations in training" in text and "sampling and training in turns" in text


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("flags", [["--gpu", "a100"], ["--gpu_memory", "24"]], ids=" ".join)
def test_a_gpu_is_planned_in_its_own_precision(run_file, capsys, monkeypatch, flags, here):
    """With and without bfloat16 on this machine, and a config that asks for neither type."""
    monkeypatch.setattr("covey.config.base.multiplies_bf16", lambda use_cpu: here)
    assert main([run_file, *flags]) == 0
    assert "computing in bfloat16" in words(capsys.readouterr().out)
    assert main([run_file, *flags, "--fp16", "true"]) == 0
    shown = words(capsys.readouterr().out)
    assert "computing in float16" in shown and "fp16" not in shown.partition("Warnings")[2]


def test_a_planned_gpu_changes_neither_later_configs_nor_this_machine(monkeypatch):
    monkeypatch.setattr("covey.config.base.multiplies_bf16", lambda use_cpu: False)
    with planning_for(None, gpu=True):
        planned = GRPOConfig()
    assert planned.bf16 and planned.with_changes(bf16=None, beta=0.1).bf16
    assert not GRPOConfig().bf16


def test_a_run_too_large_for_the_gpu_is_announced(run_file, capsys, monkeypatch):
    # 7888 parameters of 16 bytes, with gradients and the optimizer's state: more than 64 KiB
    monkeypatch.setitem(MACHINES, "h100", replace(MACHINES["h100"], memory=2**16))
    assert main([run_file, "--gpu", "h100"]) == 0
    shown = words(capsys.readouterr().out)
    assert "error memory: the run does not fit into memory" in shown and "there are 64.0 KiB" in shown
    assert main([run_file, "--gpu", "a100"]) == 0
    assert "does not fit" not in capsys.readouterr().out


def test_micro_batches_of_a_gpu_grow_with_its_memory(monkeypatch):
    # 8 groups of a prompt of 256 and 8 completions of 512, 4352 tokens each; 8 padded rollouts take 6144
    def planned():
        cluster = Cluster(ShardCounts(), "h100")
        args = GRPOConfig(bf16=False, gradient_accumulation_steps=8, max_completion_length=512)
        return ExplainedRun(args, model=ModelPlan(tiny.config()), cluster=cluster).memory

    assert planned().micro_batch_tokens == 3 * 4352  # at most 16,384
    monkeypatch.setitem(MACHINES, "h100", replace(MACHINES["h100"], memory=2**20))
    assert planned().micro_batch_tokens == 4352


def test_without_a_cluster_there_is_no_communication(run_file, capsys):
    assert main([run_file]) == 0
    assert "Operations and communication" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpu", "h1000"], "--gpu: 'h1000' is not known; it is one of a100, h100, h200. Did you mean 'h100'?"),
        (["--accelerate_config", "fsdp1"], "'fsdp1' is neither a file nor a config that comes with Covey; those are"),
        (["--accelerate_config"], "--accelerate_config: expected one argument"),
        (["--accelerate_config", "old.yaml"], "shares the model as 'fsdp1', which Covey does not train with"),
        (["--accelerate_config", "no.yaml"], "'no.yaml' cannot be read as a config of accelerate"),
        (["--image_size", "640"], "--image_size: '640' is not width x height in pixels, as in 640x480."),
        (["--images", "-1"], "--images: '-1' is not a whole number, 0 or more"),
    ],
)
def test_a_cluster_that_is_not_known_is_refused(run_file, capsys, argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\n")
    (tmp_path / "no.yaml").write_text("a list: [1\n")
    assert main([run_file, *argv]) == 2
    assert message in capsys.readouterr().err


def test_an_accelerate_config_gives_the_processes(run_file, capsys, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\nnum_processes: 2\n")
    assert main([run_file, "--accelerate_config", str(own), "--max_completion_length", "8"]) == 0
    assert "gradients, optimizer sharded over 2 processes (zero2)" in words(capsys.readouterr().out)
    assert main([run_file, "--accelerate_config", str(own), "--num_processes", "4"]) == 0
    assert "sharded over 4 processes (zero2)" in words(capsys.readouterr().out)


def test_images_are_counted_by_the_processor_of_the_model(run_file, capsys, tmp_path):
    model, processor = tiny_vision.make("gemma3")
    model.save_pretrained(tmp_path / "vlm")
    assert main([run_file, "--model", str(tmp_path / "vlm")]) == 0
    assert "Images are not counted: its processor cannot be used here" in words(capsys.readouterr().out)
    processor.save_pretrained(tmp_path / "vlm")
    assert main([run_file, "--model", str(tmp_path / "vlm"), "--images", "2"]) == 0
    text = words(capsys.readouterr().out)
    assert "A prompt has 2 image(s) of 512 x 512 pixels (--images, --image_size)" in text and "32 patches for" in text
    assert re.search(r"encoder\s+[1-9]", text)


def test_layers_that_keep_their_activations_are_counted(run_file, capsys, monkeypatch):
    for available, sentence in (
        (0, "All 2 layers recompute their activations in a micro-batch of"),
        (79_000_000, "The last 1 of 2 layers keep their activations in a micro-batch of"),
        (2**40, "All 2 layers keep their activations in a micro-batch of"),
    ):
        monkeypatch.setattr("covey.cli.explain.run.available_memory", lambda available=available: available)
        assert main([run_file, "--use_cpu", "true", "--bf16", "false"]) == 0
        assert sentence in words(capsys.readouterr().out)
    assert main([run_file, "--gradient_checkpointing", "false"]) == 0
    assert "their activations" not in words(capsys.readouterr().out)


def test_a_run_is_planned_for_the_containers_memory(tmp_path, monkeypatch):
    """A model that fits into the machine and not into its control group; no advice changes what the run learns."""
    from covey.cli.explain.figures import fit
    from covey.runtime import process_memory

    monkeypatch.setattr(process_memory, "GROUPS", tmp_path / "self")
    monkeypatch.setattr(process_memory, "MOUNT", tmp_path)
    (tmp_path / "self").write_text("0::/\n")
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    run = ExplainedRun(GRPOConfig(max_completion_length=4096, use_cpu=True, bf16=False), ModelPlan(config))
    assert run.memory is not None
    (tmp_path / "memory.max").write_text(f"{run.memory.peak * 4}\n")
    assert [*fit(run)] == []
    (tmp_path / "memory.max").write_text(f"{run.memory.peak // 2}\n")
    (found,) = fit(run)
    assert found.code == "memory" and "max_completion_length" not in found.fix + found.proof


def test_sources_are_a_table_with_their_denominators():
    rows = [Source("a", [{}] * 20, SourceSettings(weight=3)), Source("b", [{}] * 16, SourceSettings(1, average="own"))]
    args = GRPOConfig(num_generations=4, generation_batch_size=16, per_device_train_batch_size=4)
    _, first, second, *others = source_lines(args, args.algebra(), Sources(rows))
    assert first.split() == ["a", "20", "3", "75.0%", "3", "3", "26.7"]  # 20 / 3 batches of 4 updates each
    assert second.split() == ["b", "16", "1", "25.0%", "1", "1", "64"]
    assert any("b is averaged by itself" in line for line in others)


def test_sizes_of_rollout_batches_are_bounds_where_a_source_has_smaller_groups():
    args = GRPOConfig(num_generations=8, generation_batch_size=64)
    assert "8 prompts, 8 completions each, 64 completions in all" in words(explain(args, start=Start()))
    text = words(explain(args, start=Start(group_sizes={"small": 4})))
    assert "8 prompts, at most 8 completions each, at most 64 completions in all" in text


def test_opponents_are_counted(run_file, capsys):
    """One copy of the policy as it was and five of earlier steps, of a model whose weights are shown, too."""
    main(["--config", str(run_file)])
    before = capsys.readouterr().out
    main(["--config", str(run_file), "--seats", "{first: frozen, second: policy:7}"])
    after = capsys.readouterr().out
    found = [re.search(r"\n +opponents +\S", text) for text in (before, after)]
    assert found[0] is None and found[1] is not None
