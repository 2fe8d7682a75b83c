"""Mistakes in configs, in run files and when resuming."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import torch
from peft import LoraConfig

from covey.cli.config_file import load_run
from covey.runtime.files import seal
from covey.trainer.checkpoint import STATE_FILE
from tests.support import tiny
from tests.support.mistakes.cases import CONFIG, TRAINING, Mistake


def setting(what, settings, *says, kind=ValueError, method="grpo"):
    return Mistake(what, lambda b: b.config(method, **settings), says, CONFIG, kind)


SETTINGS = [
    setting(
        "Chose batch sizes that do not divide into groups",
        {"num_generations": 3},
        "rollout batch of 8 completions",
        "groups of num_generations=3",
        "num_generations: 2 or 4; per_device_train_batch_size: 3 or 6",
    ),
    setting(
        "Chose a generation_batch_size that is no multiple of the micro-batches",
        {"generation_batch_size": 7},
        "generation_batch_size=7 is not a whole number of micro-batches of 4",
        "generation_batch_size: 4 or 8",
    ),
    setting(
        "Gave generation_batch_size and steps_per_generation that contradict each other",
        {"generation_batch_size": 8, "steps_per_generation": 4},
        "generation_batch_size=8 and steps_per_generation=4 contradict",
        "Give one of the two",
    ),
    setting(
        "Set a number to NaN",
        {"weight_decay": float("nan")},
        "weight_decay=nan is not a number: give a number",
    ),
    setting(
        "Asked for one completion per prompt",
        {"num_generations": 1},
        "num_generations=1",
        "must be at least 2",
        "4 to 16 are usual",
    ),
    setting(
        "Chose a negative learning rate",
        {"learning_rate": -1e-6},
        "learning_rate=-1e-06 is out of range: it must be 0 or more",
        "1e-6 to 1e-5 are usual",
    ),
    setting("Wrote a number as text", {"beta": "0,1"}, "beta='0,1' must be a number, but is a str", "without quotes"),
    setting("Gave a fraction where a count is meant", {"top_k": 1.5}, "top_k=1.5 must be a whole number"),
    setting("Gave a count of 0", {"num_iterations": 0}, "num_iterations=0 is out of range: it must be 1 or more"),
    setting(
        "Asked for no training",
        {"num_train_epochs": 0, "max_steps": -1},
        "num_train_epochs=0 and max_steps=-1: nothing would be trained",
        "Set one of them above 0",
    ),
    setting(
        "Chose greedy sampling",
        {"temperature": 0},
        "temperature=0 is out of range: it must be 1e-05 or more",
        "every advantage is 0; 1.0 is usual",
    ),
    setting(
        "Chose a top_p of 0",
        {"top_p": 0.0},
        "top_p=0.0 is out of range: it must be above 0 and at most 1",
        "1.0 keeps all tokens",
    ),
    setting(
        "Misspelt a loss type or another word",
        {"loss_type": "dr-grpo"},
        "loss_type='dr-grpo' is not known; choose one of: bnpo, cispo, clip_cov",
        "Did you mean 'dr_grpo'",
    ),
    setting(
        "Misspelt a loss type or another word",
        {"scale_rewards": "grup"},
        "scale_rewards='grup' is not known; choose one of: group, batch, none",
        "Did you mean 'group'",
    ),
    setting(
        "Gave neither steps nor outcomes any weight",
        {"process_weight": 0.0, "outcome_weight": 0.0},
        "process_weight=0 and outcome_weight=0 leave no advantage to learn from",
        "set one of them above 0",
    ),
    setting(
        "Misspelt a field",
        {"lerning_rate": 1e-6},
        "GRPOConfig has no field `lerning_rate`",
        "Did you mean `learning_rate`",
        kind=TypeError,
    ),
    setting(
        "Used a field's old name",
        {"kl_coef": 0.1},
        "`kl_coef` is called `beta` here",
        kind=FutureWarning,
    ),
    setting(
        "Wrote JSON that is not JSON",
        {"generation_kwargs": "{top_p: 1}"},
        r"generation_kwargs='\{top_p: 1\}' is not JSON",
        "write it like '{\"key\": 1}'",
    ),
    setting(
        "Gave a field another value in generation_kwargs",
        {"generation_kwargs": {"top_p": 0.9}, "top_p": 0.8},
        r"generation_kwargs\['top_p'\]=0.9 and top_p=0.8 differ",
        "leave one out",
    ),
    Mistake(
        "Put something into generation_kwargs that the engine does not know",
        lambda b: b.build({"generation_kwargs": {"num_beams": 4}}),
        (r"generation_kwargs=\{'num_beams': 4\}", "no setting 'num_beams'", "It knows stop, "),
    ),
    setting(
        "Used sync_ref_model without a KL penalty",
        {"sync_ref_model": True},
        "sync_ref_model=True needs a reference model, and beta=0 loads none",
        "Set beta above 0",
    ),
    setting(
        "Used dr_grpo without a maximal length",
        {"loss_type": "dr_grpo", "max_completion_length": None},
        "loss_type='dr_grpo' divides by max_completion_length, which is None",
        "Set it, or use loss_type='dapo'",
    ),
    setting(
        "Asked for fewer than no rounds of resampling",
        {"dynamic_sample": True, "max_resample_times": -1},
        "max_resample_times=-1 is out of range: it must be 0 or more",
        "0 never refills; 3 is usual",
    ),
    setting(
        "Chose a difficulty_floor of 0",
        {"prompt_sampler": "difficulty", "difficulty_floor": 0.0},
        r"difficulty_floor=0\.0 is out of range: it must be between 0\.01 and 1",
        "would never come again",
    ),
    setting(
        "Bounded the correction of an engine away from 1",
        {"vllm_importance_sampling_clip_min": 1.5, "correct_built_in_engine": True},
        r"vllm_importance_sampling_clip_min=1\.5 and vllm_importance_sampling_clip_max=3\.0",
        "must lie on either side of 1",
        r"0\.5 and 3 are usual",
    ),
    setting(
        "Corrected an engine by sequences with vespo",
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_truncate", "correct_built_in_engine": True},
        "vllm_importance_sampling_mode='sequence_truncate' with loss_type='vespo'",
        "'token_truncate' is used",
        kind=UserWarning,
    ),
    setting(
        "Kept sampling masks with vLLM",
        {"keep_sampling_mask": True, "top_p": 0.9, "use_vllm": True},
        "keep_sampling_mask=True with use_vllm=True",
        "only the built-in engine returns which tokens it sampled from",
        "Leave one of the two out",
    ),
    setting(
        "Kept sampling masks with lenient reuse",
        {"keep_sampling_mask": True, "top_p": 0.9, "speculative_reuse": "lenient"},
        "keep_sampling_mask=True with speculative_reuse='lenient'",
        "its probability would be 0",
        "Set speculative_reuse='exact'",
    ),
    setting(
        "Used speculative_reuse with a repetition penalty",
        {"speculative_reuse": "exact", "repetition_penalty": 1.1},
        r"speculative_reuse='exact' with repetition_penalty=1\.1",
        "cannot be checked in one pass",
        "Leave one of the two out",
    ),
    setting(
        "Used speculative_reuse with another engine",
        {"speculative_reuse": "lenient", "use_vllm": True},
        "speculative_reuse='lenient' with use_vllm=True",
        "only the built-in engine can check earlier completions",
        "Leave one of the two out",
    ),
    setting(
        "Asked for fewer than no steps of staleness",
        {"max_staleness": -1},
        "max_staleness=-1 is out of range: it must be 0 or more",
        "1 samples one step ahead",
    ),
    setting(
        "Sampled ahead of training with vLLM in the trainer's process",
        {"max_staleness": 1, "use_vllm": True},
        "max_staleness=1 with vllm_mode='colocate'",
        "Set vllm_mode='server', or max_staleness=0",
    ),
    setting(
        "Sampled ahead of training with transformers' continuous batching",
        {"max_staleness": 1, "use_transformers_continuous_batching": True},
        "use_transformers_continuous_batching=True: it samples with the very weights",
        "Sample with a server, or set max_staleness=0",
    ),
    setting(
        "Sampled ahead of training with speculative_reuse",
        {"max_staleness": 1, "speculative_reuse": "exact"},
        "max_staleness=1 with speculative_reuse='exact'",
        "Leave one of the two out",
    ),
    setting(
        "Sampled ahead of training without a correction",
        {"max_staleness": 1, "vllm_importance_sampling_correction": False},
        "as if they were fresh",
        "Leave the correction on",
        kind=UserWarning,
    ),
    setting(
        "Sampled ahead of training with servers that sleep",
        {"max_staleness": 1, "use_vllm": True, "vllm_mode": "server", "vllm_enable_sleep_mode": True},
        "so they hardly sleep",
        "Leave it False",
        kind=UserWarning,
    ),
    setting(
        "Gave weights that are no list of numbers, or all 0",
        {"reward_weights": 2.0},
        r"reward_weights=2\.0",
        "a list of one finite number per reward function",
    ),
    setting(
        "Gave weights that are no list of numbers, or all 0",
        {"reward_weights": [0.0]},
        r"reward_weights=\[0\.0\]",
        "at least one of them not 0",
    ),
    setting(
        "Gave a reward_clip_range that is upside down",
        {"reward_clip_range": (1.0, -1.0)},
        r"reward_clip_range=\(1, -1\)",
        "first number must be smaller",
        method="rloo",
    ),
    setting(
        "Set an option that has no effect",
        {"vespo_k_pos": 1.0},
        "`vespo_k_pos=1.0` has no effect: loss_type='dapo' does not read it",
        kind=UserWarning,
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
    Mistake(
        "Started a run in the output_dir of one that is running",
        beside_another,
        (r"in use by process \d+ on \S+, since", "Choose another output_dir, or end that run first"),
        TRAINING,
    ),
    Mistake(
        "Saved a checkpoint on a full disk",
        on_a_full_disk,
        (r"checkpoint-1 could not be written into \S+: the disk is full", "Earlier checkpoints are whole"),
        TRAINING,
        OSError,
    ),
    Mistake(
        "Trained in the output_dir of an earlier run",
        lambda b: (b.checkpoint(), b.train({"save_strategy": "steps", "save_steps": 1})),
        (r"output_dir='\S+' holds files of an earlier run: checkpoint-1", "Choose another output_dir"),
        TRAINING,
        UserWarning,
    ),
    Mistake(
        "Resumed from a folder that is no checkpoint",
        lambda b: b.resume("./no/such/checkpoint"),
        (r"'\./no/such/checkpoint' is not a checkpoint", "output_dir holds none either", "or True for the last one"),
        TRAINING,
    ),
    Mistake(
        "Resumed from a folder that is no checkpoint",
        lambda b: b.resume(b.checkpoint() + "0"),
        (
            "checkpoint-10' is not a checkpoint",
            r"output_dir holds \S+checkpoint-1\.",
            "Give the folder of a checkpoint",
        ),
        TRAINING,
    ),
    Mistake(
        "Resumed from a checkpoint that is damaged",
        lambda b: b.resume(damaged(b, max_steps=2)),
        (r"checkpoint-2' is damaged: optimizer\.pt has 100 bytes instead of", r"Resume from \S+checkpoint-1'"),
        TRAINING,
    ),
    Mistake(
        "Resumed from a checkpoint that is damaged",
        lambda b: b.resume(damaged(b)),
        (r"checkpoint-1' is damaged: optimizer\.pt has 100 bytes", "holds no other that is whole: start from the"),
        TRAINING,
    ),
    Mistake(
        "Resumed from a checkpoint that is damaged",
        lambda b: b.resume("auto", {"max_steps": 3}) if damaged(b, max_steps=2) else None,
        (r"checkpoint-2' is damaged: .*so the run goes on from \S+checkpoint-1'",),
        TRAINING,
        UserWarning,
    ),
    Mistake(
        "Resumed a run that has no checkpoint yet",
        lambda b: b.resume(True),
        ("resume_from_checkpoint=True", "holds no checkpoint", "leave it out to start from the beginning"),
        TRAINING,
    ),
    Mistake(
        "Resumed with other batch sizes or another number of processes",
        lambda b: b.resume(b.checkpoint(), {"per_device_train_batch_size": 8}),
        (r"was made with per_device_train_batch_size=4 \(now 8\)", DOES_NOT_FIT, "begin a new run from its weights"),
        TRAINING,
    ),
    Mistake(
        "Resumed with other batch sizes or another number of processes",
        lambda b: b.resume(of_two_processes(b)),
        (r"was made with world_size=2 \(now 1\)", DOES_NOT_FIT, "Resume with the same numbers"),
        TRAINING,
    ),
    Mistake(
        'Resumed a run with dynamic_sample or prompt_sampler="difficulty" on a dataset of another length',
        lambda b: b.resume(b.checkpoint(dynamic_sample=True), {"dynamic_sample": True}, train_dataset=tiny.rows(9)),
        ("a training dataset of 8 rows and this one has 9", "Resume with the same dataset"),
        TRAINING,
    ),
    Mistake(
        "Resumed with another model",
        lambda b: b.resume(b.checkpoint(), model=tiny.model(hidden_size=64)),
        ("do not fit this model", "Resume with the model that the run began with", "size mismatch"),
        TRAINING,
    ),
    Mistake(
        "Resumed with another model",
        lambda b: b.resume(b.checkpoint(peft_config=LoraConfig(target_modules=["q_proj"])), model=tiny.model()),
        ("do not fit this model", "Resume with the model that the run began with", "adapter_model.*with `peft_config`"),
        TRAINING,
    ),
    Mistake(
        "Resumed with another model",
        lambda b: b.resume(b.checkpoint(), peft_config=LoraConfig(target_modules=["q_proj"])),
        (
            "do not fit this model",
            "Resume with the model that the run began with",
            r"model\.safetensors.*without `peft",
        ),
        TRAINING,
    ),
    Mistake(
        "Resumed with another model",
        lambda b: b.resume(b.checkpoint(**adapter()), model=tiny.model(seed=1), **adapter()),
        ("holds an adapter that was trained on another base model", "Resume with the base model that the run began"),
        TRAINING,
    ),
    Mistake(
        "Resumed with another optimizer",
        lambda b: b.resume(b.checkpoint(), {"optim": "sgd"}),
        ("holds the state of optim='adamw_torch", "optim='sgd' cannot go on from", "begin a new run from its weights"),
        TRAINING,
    ),
    Mistake(
        "Resumed from a checkpoint saved with save_only_model",
        lambda b: b.resume(b.checkpoint(save_only_model=True)),
        ("holds weights but not Covey's state", "goes on from the weights", "save_only_model=True"),
        TRAINING,
        UserWarning,
    ),
]


def run_file(what, text, *says, kind=ValueError, needs=()):
    return Mistake(what, lambda b: load_run(b.write(text)).require(*needs), says, CONFIG, kind)


RUN_FILES = [
    Mistake(
        "Named a run file that does not exist",
        lambda b: load_run(b.path / "nowhere.yaml"),
        (r"there is no run file '.*nowhere\.yaml'",),
        CONFIG,
        FileNotFoundError,
    ),
    run_file("Wrote YAML that cannot be read", "beta: [0.1\n", r"run\.yaml cannot be read", "line 2"),
    run_file(
        "Wrote a key twice", "beta: 0.1\nbeta: 0\n", r"run\.yaml cannot be read", "`beta` is in line 1 and in line 2"
    ),
    run_file("Wrote a run file without fields", "- beta\n", "must hold `field: value` lines, but holds a list"),
    run_file(
        "Misspelt a key of a run file", "modle: x\n", "`modle` is no setting", "Did you mean `model`", kind=TypeError
    ),
    run_file("Wrote a word where a run file needs a number", "beta: high\n", "beta='high' cannot be read"),
    run_file("Chose a method that does not exist", "method: ppo\n", "method='ppo' is not known", "one of: grpo, rloo"),
    run_file(
        "Named no model or no dataset in a run file",
        "model: x\n",
        "the run names no `dataset`",
        "or pass `--dataset",
        needs=("model", "dataset"),
    ),
]
