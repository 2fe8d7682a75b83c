"""`covey explain`: what it says about runs whose answers are known."""

import re
from dataclasses import replace

import pytest
from transformers import LlamaConfig, MambaConfig

from covey.cli.explain.command import explain, main
from covey.cli.explain.model import ModelPlan
from covey.config.grpo import GRPOConfig
from covey.config.rloo import RLOOConfig
from covey.sizing.step_cost import MACHINES
from tests.support import tiny, tiny_vision


def words(text):
    """The text without its line breaks, for comparing sentences."""
    return " ".join(text.split())


@pytest.fixture
def run_file(tmp_path):
    LlamaConfig(
        vocab_size=100,
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


def test_an_on_policy_run_is_told_that_nothing_clips():
    text = words(explain(GRPOConfig()))
    assert "On-policy (gradient_accumulation_steps=1, steps_per_generation * num_iterations=1)" in text
    assert "all importance ratios are exactly 1 and nothing can clip: clip_ratio/* stays 0" in text
    assert "One generation: 1 prompt, 8 completions each, 8 completions in all" in text
    assert "One optimizer update per generation." in text


def test_an_off_policy_run_is_told_what_clips():
    text = words(explain(GRPOConfig(num_iterations=2, epsilon_high=0.28)))
    assert "Off-policy (gradient_accumulation_steps=1, steps_per_generation * num_iterations=2)" in text
    assert "Tokens whose ratio has left [0.8, 1.28]" in text
    assert "2 optimizer updates per generation." in text


def test_refills_and_prompts_by_difficulty_are_told_where_they_are_on():
    text = words(explain(GRPOConfig(dynamic_sample=True, max_resample_times=2, prompt_sampler="difficulty")))
    assert "in up to 2 rounds (max_resample_times): a generation samples at most 24 completions and trains on 8" in text
    assert "comes about 0.1 times as often as one that is solved half of the time" in text
    assert "dynamic_sample" not in explain(GRPOConfig())


def test_rewards_beside_sampling_are_told_where_they_are_on():
    text = words(explain(GRPOConfig(stream_rewards=True, reward_timeout=20)))
    assert "reward functions see one group at a time and have 20 seconds (reward_timeout) for each" in text
    assert "stream_rewards" not in explain(GRPOConfig())


def test_what_becomes_of_earlier_completions_is_told_where_they_are_reused():
    exact = words(explain(GRPOConfig(speculative_reuse="exact")))
    assert "its last completions are drafts (speculative_reuse=exact): they are checked in one pass" in exact
    assert "a prompt keeps its seeds from epoch to epoch" in exact
    assert "sampling/reused_token_fraction says what share of the tokens was not decoded" in exact
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
        (GRPOConfig(num_iterations=2), "starts near 0 on each generation"),
        (RLOOConfig(), "The loss is 0 up to rounding"),
    ],
)
def test_the_loss_to_expect_depends_on_the_loss_type(args, sentence):
    assert sentence in words(explain(args))


def test_a_kl_penalty_is_where_its_method_puts_it():
    assert "0.04 * KL to the reference model is added to the loss (k3)" in words(explain(GRPOConfig(beta=0.04)))
    assert "0.05 * KL to the reference model is subtracted from the reward" in words(explain(RLOOConfig()))
    assert "no reference model in memory" in words(explain(GRPOConfig()))


def test_masking_truncated_completions_explains_the_empty_update():
    text = words(explain(GRPOConfig(mask_truncated_completions=True)))
    assert "If all of an update are cut off" in text


def test_groups_of_two_are_told_about_their_scale():
    assert "always +0.71 and -0.71" in words(explain(GRPOConfig(num_generations=2)))
    assert "always +0.71" not in words(explain(GRPOConfig(num_generations=4)))


def test_tokens_are_counted():
    # 8 completions of up to 100 tokens: 800 sampled; with prompts of 20, 8 * 120 = 960 read
    text = words(explain(GRPOConfig(max_completion_length=100), prompt_tokens=20))
    assert "samples at most 800 tokens" in text
    assert "960 in all" in text


def test_evaluation_that_would_fail_is_said_beforehand():
    args = GRPOConfig(num_generations=6, per_device_train_batch_size=6)
    assert "None: no eval_dataset" in words(explain(args))
    assert "This will fail: An evaluation batch of 8" in words(explain(args, has_eval=True))


def test_the_command_reads_the_file_and_its_model(run_file, capsys):
    assert main([run_file, "--kl_coef", "0.1"]) == 0
    text = words(capsys.readouterr().out)
    assert "7,888 parameters" in text
    assert "One generation: 2 prompts, 4 completions each, 8 completions in all" in text
    assert "Warnings `kl_coef` is called `beta` here." in text


def test_the_command_plans_for_more_processes(run_file, capsys):
    assert main([run_file, "--world_size", "4", "--prompt_tokens=10"]) == 0
    assert "8 prompts, 4 completions each, 32 completions in all" in words(capsys.readouterr().out)


def test_a_model_without_attention_costs_only_the_memory_estimate(run_file, tmp_path, capsys):
    MambaConfig(vocab_size=100, hidden_size=16, num_hidden_layers=2).save_pretrained(tmp_path / "mamba")
    assert main([run_file, "--model", str(tmp_path / "mamba")]) == 0
    assert "No estimate: mamba has no attention" in words(capsys.readouterr().out)


def test_a_model_that_is_not_here_costs_only_the_memory_estimate(run_file, capsys):
    assert main([run_file, "--model", "nobody/nothing-here"]) == 0
    assert "No estimate: the config of 'nobody/nothing-here' is not on this machine" in words(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere.yaml"], "there is no run file 'nowhere.yaml'"),
        (["--num_generations", "3"], "num_generations: 2 or 4"),
        (["--nm_generations", "3"], "Did you mean `num_generations`?"),
        (["--world_size", "none"], "--world_size must be a whole number"),
        (["--beta", "big"], "invalid float value: 'big'"),
    ],
)
def test_mistakes_end_in_one_line_and_status_two(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("covey explain: ")
    assert message in error


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n' * 7)
    return ["--dataset", "rows.jsonl", "--reward_funcs", "exact_match_reward"]


def test_the_rows_of_local_data_are_counted(run_file, data, capsys):
    # 2 prompts per generation: 7 rows make 3 generations of one update, three times over 9
    assert main(["--config", run_file, *data]) == 0
    text = words(capsys.readouterr().out)
    assert "7 prompts make 3 generations per epoch (1 prompt left over, others each time) and 3 updates" in text
    assert "num_train_epochs=3 makes 9 updates in all" in text
    assert "The dataset was read: 7 prompts." in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "none.jsonl"], "will fail: there is no data file or folder 'none.jsonl'"),
        (["--reward_funcs", "exact_match"], "did you mean 'exact_match_reward'?"),
        (["--reward_funcs", "get_repetition_penalty_reward"], "is a factory"),
        (["--tools", "none.py:add"], "will fail: tool file"),
        (["--quantization", "{load_in_4bit: true}"], "will fail: `quantization` without `peft`"),
        (["--quantization", "{bits: 4}", "--peft", "{r: 2}"], "has bits, which transformers.BitsAndBytesConfig"),
        (["--tools", "os:getcwd", "json:dumps"], "tool 'dumps' cannot be described"),
        (["--rollout_func", "operator.nothing"], "'nothing' does not exist. There: "),
        (["--per_device_train_batch_size", "32"], "has 7 prompt(s) but one generation draws 16"),
    ],
)
def test_a_run_that_would_not_start_is_told_so(run_file, data, capsys, flags, message):
    assert main([run_file, *data, *flags]) == 2
    assert message in words(capsys.readouterr().out)


def test_what_is_not_here_is_named_as_unchecked(run_file, capsys):
    assert main([run_file, "--dataset", "org/data", "--reward_funcs", "org/model"]) == 0
    text = words(capsys.readouterr().out)
    assert "not checked: dataset 'org/data'" in text and "not checked: reward 'org/model'" in text


def test_quantised_weights_and_their_scales_are_counted(run_file, data, capsys):
    # linear layers of two layers: 2 * 2304 numbers in 4 bits, 2304 bytes, and a scale of 4 bytes for each 64 of them,
    # 288; adapters of rank 2 on all 7: per layer 2 * (4 * 16 + 16 + 16 + 8 + 8 + 3 * (16 + 32)) = 512; those, norms
    # 5 * 16, embeddings and head 3200 in float32: (1024 + 80 + 3200) * 4 = 17216. 19808 bytes are 19.3 KiB
    adapter = ["--peft", "{r: 2, target_modules: all-linear}"]
    assert main([run_file, *data, "--quantization", "{load_in_4bit: true}", *adapter]) == 0
    text = words(capsys.readouterr().out)
    assert "8,912 parameters, 1,024 of them trained" in text and "weights 19.3 KiB" in text


def test_what_is_still_to_be_named_is_listed(run_file, capsys):
    assert main([run_file]) == 0
    assert "still to be named: dataset, reward_funcs." in words(capsys.readouterr().out)


def test_unknown_settings_are_told_under_the_method_of_the_run(run_file, capsys):
    assert main(["--config", run_file, "--learnig_rate", "1"]) == 2
    assert "no setting of a GRPO run. Did you mean `learning_rate`?" in capsys.readouterr().err


def test_help_says_how_to_call_it(capsys):
    assert main(["--help"]) == 0
    assert "usage: covey explain [--config] CONFIG" in capsys.readouterr().out


def test_what_the_correction_of_the_engine_does_and_costs_is_told_where_it_is_on():
    weighed = "is weighed by trainer probability over engine probability"
    text = words(explain(GRPOConfig(correct_built_in_engine=True)))
    assert f"Each sequence {weighed} (sequence_mask); above 3.0 it is dropped." in text
    assert "compares log-probabilities of the training passes: no extra pass" in text
    bounds = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_mode": "token_truncate"}
    text = words(explain(GRPOConfig(correct_built_in_engine=True, num_iterations=2, **bounds)))
    assert f"Each token {weighed} (token_truncate); below 0.5 or above 3.0 it counts as the bound." in text
    assert "reads the log-probabilities of the pass just mentioned" in text
    assert weighed not in words(explain(GRPOConfig()))


def test_what_is_sampled_ahead_is_told_with_its_age():
    text = words(explain(GRPOConfig(max_staleness=1)))
    assert "up to 1 optimizer step older than those a generation's training begins with" in text
    assert "While one generation is trained on, the next one is sampled." in text
    assert "token_truncate keeps more" in text
    assert "every gradient is computed with the weights that sampled" not in text
    text = words(explain(GRPOConfig(max_staleness=3, vllm_importance_sampling_mode="token_mask")))
    assert "up to 3 more are sampled" in text and "token_truncate keeps more" not in text
    text = words(explain(GRPOConfig(max_staleness=1, num_iterations=4)))
    assert "the next is sampled during the last 1 update of them alone; max_staleness=4 would overlap them all" in text
    assert "Sampling runs ahead" not in words(explain(GRPOConfig()))


def colocated(**changes):
    """A run with vLLM in the trainer's process on a GPU of 24 GiB, explained."""
    settings = {"use_vllm": True, "vllm_gpu_memory_utilization": "auto", **changes}
    args = GRPOConfig(report_to="none", bf16=False, **settings)
    return words(explain(args, model=ModelPlan(tiny.config()), gpu=24 * 1024**3))


def test_the_share_of_vllm_is_told_with_how_it_came_about():
    text = colocated()
    assert re.search(r"vllm_gpu_memory_utilization=auto is 0\.0\d of 24\.0 GiB: .* are taken by training", text)
    assert "for the keys and values of all completions at once), all of it." in text
    assert "vLLM stays awake" in text
    assert "KV cache" not in text, "that of the built-in engine is not there"


def test_a_share_that_was_given_is_compared_with_what_there_is_use_for():
    text = colocated(vllm_gpu_memory_utilization=0.3)
    assert "vLLM takes 7.2 GiB (vllm_gpu_memory_utilization=0.3 of 24.0 GiB); it has use for" in text
    assert "'auto' would be 0.0" in text


def test_sleep_and_what_makes_room_for_it_are_told():
    text = colocated(vllm_enable_sleep_mode=True, offload_model=True, offload_optimizer=True, vllm_sleep_level=2)
    assert "taken by weights, reference and optimizer, which stay while vLLM is awake, the policy and optimizer" in text
    assert "(vllm_sleep_level=2): its weights are forgotten" in text
    assert "While vLLM samples, the model and the optimizer wait in host memory" in text


def test_without_a_gpu_the_cache_is_told():
    args = GRPOConfig(report_to="none", bf16=False, use_cpu=True, use_vllm=True)
    text = words(explain(args, model=ModelPlan(tiny.config())))
    assert "on this CPU, a cache of 64.0 MiB" in text
    assert "VLLM_CPU_KVCACHE_SPACE" in text


def test_servers_are_named_with_what_each_gets_and_what_is_waited_for():
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": ["http://a:1", "http://b:2"]}
    text = words(explain(GRPOConfig(**settings, temperature=0.8)))
    assert "2 vLLM servers: http://a:1, http://b:2" in text
    assert "at most 512 at a time" in text and "waits 240 s" in text
    assert "processed_logprobs" in text


def test_how_weights_get_to_vllm_servers_is_said():
    server = {"use_vllm": True, "vllm_mode": "server"}
    text = words(explain(GRPOConfig(**server, vllm_group_port=5000)))
    assert "connecting to this machine at port 5000" in text and "temporary folder" in text
    text = words(explain(GRPOConfig(**server, vllm_weight_transfer="disk", vllm_weight_folder="/shared")))
    assert "travel as files in /shared (vllm_weight_folder) (vllm_weight_transfer='disk')" in text


def test_sglang_servers_are_named_or_said_to_be_started():
    text = words(explain(GRPOConfig(use_sglang=True, sglang_base_url="http://a:1,http://b:2")))
    assert "2 SGLang servers: http://a:1, http://b:2" in text and "at most 512 at a time" in text
    assert "starts on cuda:1" in words(explain(GRPOConfig(use_sglang=True, sglang_device="cuda:1")))


def test_processes_hold_shares_and_send_them_and_a_named_gpu_gives_seconds(run_file, capsys):
    words_of = ["--world_size", "2", "--accelerate_config", "fsdp2", "--gpu", "h100", "--prompt_tokens", "4"]
    assert main([run_file, *words_of, "--max_completion_length", "8"]) == 0
    text = words(capsys.readouterr().out)
    assert "weights, gradients, optimizer shared out over 2 processes (fsdp2)" in text
    assert "Operations and communication One optimizer step, all 2 processes, full completions:" in text
    assert "gather weights" in text and "add up gradients 15.4 KiB" in text  # half of 7888 gradients of 4 bytes, once
    assert "On h100 GPUs, at 40% of their operations in passes" in text and "sampling and training in turns" in text


def test_a_run_that_does_not_fit_a_named_gpu_is_told_so(run_file, capsys, monkeypatch):
    # 7888 parameters of 16 bytes, with gradients and the optimizer's state: more than 64 KiB
    monkeypatch.setitem(MACHINES, "h100", replace(MACHINES["h100"], memory=2**16))
    assert main([run_file, "--gpu", "h100"]) == 0
    assert "That does not fit: a h100 has 64.0 KiB." in words(capsys.readouterr().out)
    assert main([run_file, "--gpu", "a100"]) == 0
    assert "does not fit" not in capsys.readouterr().out


def test_without_processes_or_a_gpu_nothing_is_said_of_communication(run_file, capsys):
    assert main([run_file]) == 0
    assert "Operations and communication" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpu", "h1000"], "--gpu 'h1000' is not known; it is one of a100, h100, h200. Did you mean 'h100'?"),
        (["--accelerate_config", "fsdp1"], "'fsdp1' is neither a file nor a config that comes with Covey; those are"),
        (["--accelerate_config"], "--accelerate_config needs a value after it."),
        (["--accelerate_config", "old.yaml"], "shares the model as 'fsdp1', which Covey does not train with"),
        (["--accelerate_config", "no.yaml"], "'no.yaml' cannot be read as a config of accelerate"),
        (["--image_size", "640"], "--image_size must be width x height in pixels, as in 640x480, not '640'."),
        (["--images", "-1"], "--images must be a whole number, 0 or more"),
    ],
)
def test_a_cluster_that_is_not_known_is_refused(run_file, capsys, argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\n")
    (tmp_path / "no.yaml").write_text("a list: [1\n")
    assert main([run_file, *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_config_of_accelerate_says_how_many_processes_there_are(run_file, capsys, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\nnum_processes: 2\n")
    assert main([run_file, "--accelerate_config", str(own), "--max_completion_length", "8"]) == 0
    assert "gradients, optimizer shared out over 2 processes (zero2)" in words(capsys.readouterr().out)
    assert main([run_file, "--accelerate_config", str(own), "--num_processes", "4"]) == 0
    assert "shared out over 4 processes (zero2)" in words(capsys.readouterr().out)


def test_images_are_counted_by_the_processor_of_the_model(run_file, capsys, tmp_path):
    model, processor = tiny_vision.make("gemma3")
    model.save_pretrained(tmp_path / "vlm")
    assert main([run_file, "--model", str(tmp_path / "vlm")]) == 0
    assert "Images are not counted: its processor cannot be used here" in words(capsys.readouterr().out)
    processor.save_pretrained(tmp_path / "vlm")
    assert main([run_file, "--model", str(tmp_path / "vlm"), "--images", "2"]) == 0
    text = words(capsys.readouterr().out)
    assert "A prompt shows 2 images of 512 x 512 pixels (--images, --image_size)" in text and "32 patches of" in text
    assert re.search(r"encoder\s+[1-9]", text)
