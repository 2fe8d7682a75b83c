"""Mistakes in configs, in run files and when resuming."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import torch
from peft import LoraConfig

from covey.cli.config_file import load_run
from covey.core.findings import CheckError, CheckWarning
from covey.runtime.files import seal
from covey.runtime.user_code import report
from covey.trainer.checkpoint import STATE_FILE
from tests.support import tiny
from tests.support.mistakes.cases import CONFIG, TRAINING, Mistake, checked


def setting(what, settings, code, *says, kind=CheckError, method="grpo"):
    return checked(what, lambda b: b.config(method, **settings), code, *says, when=CONFIG, kind=kind)


def doubtful(what, settings, code, *says):
    return setting(what, settings, code, *says, kind=CheckWarning)


SETTINGS = [
    setting(
        "Chose batch sizes that do not divide into groups",
        {"num_generations": 3},
        "batch-groups",
        " 8 completions",
        "num_generations=3",
        "num_generations: 2 or 4; per_device_train_batch_size: 3 or 6",
    ),
    setting(
        "Chose a generation_batch_size that is no multiple of the micro-batches",
        {"generation_batch_size": 7},
        "batch-micro-batches",
        "generation_batch_size=7 .* 4 ",
        "generation_batch_size: 4 or 8",
    ),
    setting(
        "Gave generation_batch_size and steps_per_generation that contradict each other",
        {"generation_batch_size": 8, "steps_per_generation": 4},
        "settings-contradict",
        r"generation_batch_size=8 .*steps_per_generation=4 .* 16\.",
    ),
    setting("Set a number to NaN", {"weight_decay": float("nan")}, "setting-range", "weight_decay=nan"),
    setting("Asked for one completion per prompt", {"num_generations": 1}, "group-of-one", "num_generations=1", " 2;"),
    setting(
        "Chose a negative learning rate",
        {"learning_rate": -1e-6},
        "setting-range",
        "learning_rate=-1e-06",
        "1e-6 to 1e-5",
    ),
    setting("Wrote a number as text", {"beta": "0,1"}, "setting-type", "beta='0,1' .* str"),
    setting("Gave a fraction where a count is meant", {"top_k": 1.5}, "setting-type", "top_k=1.5"),
    setting("Gave a count of 0", {"num_iterations": 0}, "setting-range", "num_iterations=0 .* 1 "),
    setting(
        "Asked for no training",
        {"num_train_epochs": 0, "max_steps": -1},
        "nothing-trained",
        "num_train_epochs=0",
        "max_steps=-1",
    ),
    setting("Chose greedy sampling", {"temperature": 0}, "setting-range", "temperature=0 .* 1e-05"),
    setting("Chose a top_p of 0", {"top_p": 0.0}, "setting-range", r"top_p=0\.0 .* 0 .* 1\. "),
    setting(
        "Misspelt a loss type or another word",
        {"loss_type": "dr-grpo"},
        "setting-word",
        "loss_type='dr-grpo' .* bnpo, cispo, clip_cov",
        "'dr_grpo'",
    ),
    setting(
        "Misspelt a loss type or another word",
        {"scale_rewards": "grup"},
        "setting-word",
        "scale_rewards='grup' .* group, batch, none",
        "'group'",
    ),
    setting(
        "Gave neither steps nor outcomes any weight",
        {"process_weight": 0.0, "outcome_weight": 0.0},
        "nothing-trained",
        "process_weight=0 ",
        "outcome_weight=0 ",
    ),
    Mistake(
        "Misspelt a field",
        lambda b: b.config(lerning_rate=1e-6),
        ("`lerning_rate`", "`learning_rate`"),
        when=CONFIG,
        kind=TypeError,
    ),
    Mistake(
        "Used a field's old name",
        lambda b: b.config(kl_coef=0.1),
        ("`kl_coef`", "`beta`"),
        when=CONFIG,
        kind=FutureWarning,
    ),
    setting(
        "Wrote JSON that is not JSON",
        {"generation_kwargs": "{top_p: 1}"},
        "setting-format",
        r"generation_kwargs='\{top_p: 1\}'",
    ),
    setting(
        "Gave a field another value in generation_kwargs",
        {"generation_kwargs": {"top_p": 0.9}, "top_p": 0.8},
        "settings-contradict",
        r"generation_kwargs\['top_p'\]=0.9 and top_p=0.8",
    ),
    checked(
        "Put something into generation_kwargs that the engine does not know",
        lambda b: b.build({"generation_kwargs": {"num_beams": 4}}),
        "setting-word",
        r"generation_kwargs=\{'num_beams': 4\}",
        "stop, ",
    ),
    setting("Used sync_ref_model without a KL penalty", {"sync_ref_model": True}, "reference-missing", "beta=0 "),
    setting(
        "Used dr_grpo without a maximal length",
        {"loss_type": "dr_grpo", "max_completion_length": None},
        "loss-length",
        "max_completion_length",
        "loss_type='dapo'",
    ),
    setting(
        "Asked for fewer than no rounds of resampling",
        {"dynamic_sample": True, "max_resample_times": -1},
        "setting-range",
        "max_resample_times=-1 .* 0 ",
    ),
    setting(
        "Chose a difficulty_floor of 0",
        {"prompt_sampler": "difficulty", "difficulty_floor": 0.0},
        "setting-range",
        r"difficulty_floor=0\.0 .*0\.01 and 1",
    ),
    setting(
        "Bounded the correction of an engine away from 1",
        {"vllm_importance_sampling_clip_min": 1.5, "correct_built_in_engine": True},
        "correction-bounds",
        r"vllm_importance_sampling_clip_min=1\.5 and vllm_importance_sampling_clip_max=3\.0",
    ),
    doubtful(
        "Corrected an engine by sequences with vespo",
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_truncate", "correct_built_in_engine": True},
        "correction-level",
        "vllm_importance_sampling_mode='sequence_truncate' with loss_type='vespo'",
        "'token_truncate'",
    ),
    setting(
        "Rounded the engine's weights to a format that vLLM does not offer",
        {"engine_dtype": "int8", "use_vllm": True},
        "engine-dtype",
        "engine_dtype='int8' with use_vllm=True",
        "bfloat16, float8",
    ),
    doubtful(
        "Rounded the engine's weights without a correction",
        {"engine_dtype": "int8", "vllm_importance_sampling_correction": False},
        "engine-dtype-uncorrected",
        "engine_dtype='int8' with vllm_importance_sampling_correction=False",
    ),
    setting(
        "Kept sampling masks with vLLM",
        {"keep_sampling_mask": True, "top_p": 0.9, "use_vllm": True},
        "sampling-mask",
        "keep_sampling_mask=True with use_vllm=True",
    ),
    setting(
        "Kept sampling masks with lenient reuse",
        {"keep_sampling_mask": True, "top_p": 0.9, "speculative_reuse": "lenient"},
        "sampling-mask",
        "keep_sampling_mask=True with speculative_reuse='lenient'",
        "speculative_reuse='exact'",
    ),
    setting(
        "Replayed routes of a compiled model",
        {"routing_replay": "R3", "torch_compile": True},
        "routing-replay",
        "routing_replay='R3' with torch_compile=True",
    ),
    setting(
        "Replayed routes of vLLM in the trainer's process",
        {"routing_replay": "R3", "use_vllm": True},
        "routing-replay",
        "vllm_mode='server'",
        "--enable-return-routed-experts",
    ),
    setting(
        "Used speculative_reuse with a repetition penalty",
        {"speculative_reuse": "exact", "repetition_penalty": 1.1},
        "draft-reuse",
        r"speculative_reuse='exact' with repetition_penalty=1\.1",
    ),
    setting(
        "Used speculative_reuse with another engine",
        {"speculative_reuse": "lenient", "use_vllm": True},
        "draft-reuse",
        "speculative_reuse='lenient' with use_vllm=True",
    ),
    setting(
        "Asked for fewer than no steps of staleness",
        {"max_staleness": -1},
        "setting-range",
        "max_staleness=-1 .* 0 ",
    ),
    setting(
        "Sampled ahead of training with vLLM in the trainer's process",
        {"max_staleness": 1, "use_vllm": True},
        "async-sampling",
        "max_staleness=1 with vllm_mode='colocate'",
        "vllm_mode='server'",
    ),
    setting(
        "Sampled ahead of training with transformers' continuous batching",
        {"max_staleness": 1, "use_transformers_continuous_batching": True},
        "async-sampling",
        "max_staleness=1 with use_transformers_continuous_batching=True",
    ),
    setting(
        "Sampled ahead of training with speculative_reuse",
        {"max_staleness": 1, "speculative_reuse": "exact"},
        "async-sampling",
        "max_staleness=1 with speculative_reuse='exact'",
    ),
    doubtful(
        "Sampled ahead of training without a correction",
        {"max_staleness": 1, "vllm_importance_sampling_correction": False},
        "async-uncorrected",
        "max_staleness=1 with vllm_importance_sampling_correction=False",
    ),
    doubtful(
        "Sampled ahead of training with servers that sleep",
        {"max_staleness": 1, "use_vllm": True, "vllm_mode": "server", "vllm_enable_sleep_mode": True},
        "async-sleep",
        "vllm_enable_sleep_mode=True with max_staleness=1",
    ),
    setting(
        "Gave weights that are no list of numbers, or all 0",
        {"reward_weights": 2.0},
        "reward-weights",
        r"reward_weights=2\.0",
    ),
    setting(
        "Gave weights that are no list of numbers, or all 0",
        {"reward_weights": [0.0]},
        "reward-weights",
        r"reward_weights=\[0\.0\]",
    ),
    setting(
        "Gave a reward_clip_range that is upside down",
        {"reward_clip_range": (1.0, -1.0)},
        "setting-range",
        r"reward_clip_range=\(1, -1\)",
        method="rloo",
    ),
    doubtful(
        "Set an option that has no effect",
        {"vespo_k_pos": 1.0},
        "setting-unread",
        "`vespo_k_pos=1.0` .*loss_type='dapo'",
    ),
]


def of_two_processes(bench):
    """A checkpoint that says it was made by two processes."""
    checkpoint = bench.checkpoint()
    path = os.path.join(checkpoint, STATE_FILE.format(rank=0))
    state = torch.load(path, weights_only=True)
    state["batches"]["world_size"] = 2
    torch.save(state, path)
    seal(Path(checkpoint))
    return checkpoint


def mixed(b, sources):
    """A run of two sources, resumed with others."""
    saves = {"save_strategy": "steps", "save_steps": 1}
    b.train(saves, train_dataset={"a": tiny.rows(8), "b": tiny.rows(8)})
    return b.resume(str(b.output_dir / "checkpoint-1"), train_dataset=sources)


def damaged(bench, **settings):
    """A checkpoint whose optimizer was cut off, as by a full disk."""
    checkpoint = bench.checkpoint(**settings)
    last = os.path.join(os.path.dirname(checkpoint), f"checkpoint-{settings.get('max_steps', 1)}")
    os.truncate(os.path.join(last, "optimizer.pt"), 100)
    return last


HOLDS = (
    "import sys, time; from pathlib import Path; from covey.runtime.files import locked\n"
    "with locked(Path(sys.argv[1])): print(flush=True); time.sleep(60)"
)


def beside_another(bench):
    """A run in a folder that another process works in."""
    bench.output_dir.mkdir()
    command = [sys.executable, "-c", HOLDS, str(bench.output_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            bench.train()
        finally:
            other.kill()


def on_a_full_disk(bench):
    def save_pretrained(folder, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = tiny.model()
    model.save_pretrained = save_pretrained
    bench.train({"save_strategy": "steps", "save_steps": 1}, model=model)


DOES_NOT_FIT = "its buffered completions and its place in the data do not fit this run"


def adapter():
    return {"peft_config": LoraConfig(target_modules=["q_proj"])}


RESUMING = [
    Mistake("Started a run in the output_dir of one that is running", beside_another, ("output_dir",), when=TRAINING),
    Mistake("Saved a checkpoint on a full disk", on_a_full_disk, ("checkpoint-1",), when=TRAINING, kind=OSError),
    Mistake(
        "Trained in the output_dir of an earlier run",
        lambda b: (b.checkpoint(), b.train({"save_strategy": "steps", "save_steps": 1})),
        (r"output_dir='\S+'",),
        when=TRAINING,
        kind=UserWarning,
    ),
    Mistake(
        "Resumed from a folder that is no checkpoint",
        lambda b: b.resume("./no/such/checkpoint"),
        (r"'\./no/such/checkpoint'", "output_dir"),
        when=TRAINING,
    ),
    Mistake(
        "Resumed from a folder that is no checkpoint",
        lambda b: b.resume(b.checkpoint() + "0"),
        ("10", "output_dir"),
        when=TRAINING,
    ),
    Mistake(
        "Resumed from a checkpoint that is damaged",
        lambda b: b.resume(damaged(b, max_steps=2)),
        (r"optimizer\.pt", "100"),
        when=TRAINING,
    ),
    Mistake(
        "Resumed from a checkpoint that is damaged",
        lambda b: b.resume(damaged(b)),
        (r"optimizer\.pt", "100"),
        when=TRAINING,
    ),
    Mistake(
        "Resumed from a checkpoint that is damaged",
        lambda b: b.resume("auto", {"max_steps": 3}) if damaged(b, max_steps=2) else None,
        (r"checkpoint-2' is damaged: .*so the run continues from \S+checkpoint-1'",),
        when=TRAINING,
        kind=UserWarning,
    ),
    Mistake(
        "Resumed a run that has no checkpoint yet",
        lambda b: b.resume(True),
        ("resume_from_checkpoint=True",),
        when=TRAINING,
    ),
    Mistake(
        "Resumed with other batch sizes or another number of processes",
        lambda b: b.resume(b.checkpoint(), {"per_device_train_batch_size": 8}),
        ("per_device_train_batch_size=4",),
        when=TRAINING,
    ),
    Mistake(
        "Resumed with other batch sizes or another number of processes",
        lambda b: b.resume(of_two_processes(b)),
        ("world_size=2",),
        when=TRAINING,
    ),
    Mistake(
        'Resumed a run with dynamic_sample or prompt_sampler="difficulty" on a dataset of another length',
        lambda b: b.resume(b.checkpoint(dynamic_sample=True), {"dynamic_sample": True}, train_dataset=tiny.rows(9)),
        ("8 rows", "9"),
        when=TRAINING,
    ),
    Mistake(
        "Resumed a run with other sources",
        lambda b: mixed(b, {"a": tiny.rows(8), "c": tiny.rows(8)}),
        ("the sources a, b, and this run a, c", "in the same order"),
        TRAINING,
    ),
    Mistake(
        "Resumed a run with other sources",
        lambda b: mixed(b, {"a": tiny.rows(8), "b": tiny.rows(8), "c": tiny.rows(8)}),
        ("sources that the checkpoint has not: c", "resume_sources=True"),
        TRAINING,
    ),
    Mistake(
        "Resumed a run with other sources",
        lambda b: mixed(b, {"a": tiny.rows(8), "b": tiny.rows(9)}),
        ("'b' has other rows", "8 then, 9 now"),
        TRAINING,
    ),
    Mistake(
        "Resumed with another model",
        lambda b: b.resume(b.checkpoint(), model=tiny.model(hidden_size=64)),
        ("size mismatch",),
        when=TRAINING,
    ),
    Mistake(
        "Resumed with another model",
        lambda b: b.resume(b.checkpoint(peft_config=LoraConfig(target_modules=["q_proj"])), model=tiny.model()),
        ("adapter_model", "`peft_config`"),
        when=TRAINING,
    ),
    Mistake(
        "Resumed with another model",
        lambda b: b.resume(b.checkpoint(), peft_config=LoraConfig(target_modules=["q_proj"])),
        (r"model\.safetensors",),
        when=TRAINING,
    ),
    Mistake(
        "Resumed with another model",
        lambda b: b.resume(b.checkpoint(**adapter()), model=tiny.model(seed=1), **adapter()),
        ("base_model",),
        when=TRAINING,
    ),
    Mistake(
        "Resumed with another optimizer",
        lambda b: b.resume(b.checkpoint(), {"optim": "sgd"}),
        ("adamw_torch", "optim='sgd'"),
        when=TRAINING,
    ),
    Mistake(
        "Resumed from a checkpoint saved with save_only_model",
        lambda b: b.resume(b.checkpoint(save_only_model=True)),
        ("save_only_model=True",),
        when=TRAINING,
        kind=UserWarning,
    ),
]


def run_file(what, text, code, *says):
    return checked(what, lambda b: load_run(b.write(text)), code, *says, when=CONFIG)


RUN_FILES = [
    Mistake(
        "Named a run file that does not exist",
        lambda b: load_run(b.path / "nowhere.yaml"),
        (r"'.*nowhere\.yaml'",),
        when=CONFIG,
        kind=FileNotFoundError,
    ),
    run_file("Wrote YAML that cannot be read", "beta: [0.1\n", "run-file", r"run\.yaml ", "line 2"),
    run_file("Wrote a key twice", "beta: 0.1\nbeta: 0\n", "run-file", r"run\.yaml ", "`beta` .* 1 .* 2"),
    run_file("Wrote a run file without fields", "- beta\n", "run-file", r"run\.yaml .* list"),
    Mistake(
        "Misspelt a key of a run file",
        lambda b: load_run(b.write("modle: x\n")),
        ("`modle`", "`model`"),
        when=CONFIG,
        kind=TypeError,
    ),
    run_file("Wrote a word where a run file needs a number", "beta: high\n", "setting-format", "beta='high'"),
    run_file("Chose a method that does not exist", "method: ppo\n", "setting-word", "method='ppo'", "grpo, rloo"),
    checked(
        "Named no model or no dataset in a run file",
        lambda b: report(load_run(b.write("model: x\n")).missing("model", "dataset")),
        "run-incomplete",
        "`dataset`",
        "--dataset",
        when=CONFIG,
    ),
]
