"""Runs of a tiny model whose weights are the same however many processes hold them, and in which way.

Usage under a launcher: sharded_runs.py OUTPUT CASE [CASE ...]; OUTPUT/model holds a saved model.
"""

import contextlib
import copy
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

import torch
from transformers import BitsAndBytesConfig, LlamaForSequenceClassification

from covey import GRPOTrainer, RLOOTrainer
from covey.core.batch import TrainBatch
from covey.policy import replicas, weights
from covey.policy.sharded_tensors import full_shape, is_sharded
from covey.policy.weights import weight_update
from tests.support import launching, mixtures, runs, tiny
from tests.support.traffic import Traffic

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


def sums_of_odd(prompts, completion_ids, **kwargs):
    """Prompts of even numbers give no signal."""
    return [float(sum(ids) % 7 * (int(p[0]) % 2)) for p, ids in zip(prompts, completion_ids, strict=True)]


def signal_of_seven(prompts, completion_ids, **kwargs):
    """One prompt of eight gives a signal, and of its completions one: most processes have nothing to train on."""
    return [float(p.startswith("7") and sum(ids) % 4 == 1) for p, ids in zip(prompts, completion_ids, strict=True)]


def best_after_two_steps(prompts, completion_ids, trainer_state, **kwargs):
    """Evaluations are best after the second step; what is learned is as always."""
    return [mark + 10 * (trainer_state.global_step == 2) for mark in sums_of_odd(prompts, completion_ids)]


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


BASE = {
    "max_steps": 5,
    "gradient_accumulation_steps": 2,
    "optim": "adamw_torch",
    "adam_epsilon": 1e-4,  # a step of Adam's is then no sign of noise where a gradient is nearly 0
    "max_grad_norm": 0.5,
    "max_tokens_per_micro_batch": 60,
}
EVALUATED = {"eval_dataset": tiny.rows(3), "eval_strategy": "steps", "eval_steps": 2}
SAVED = {"save_strategy": "steps", "save_steps": 3}
BEST = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_reward",
    "reward_funcs": best_after_two_steps,
    "max_steps": 4,
    "eval_dataset": tiny.rows(4),
    **dict.fromkeys(("eval_strategy", "save_strategy"), "steps"),
    **dict.fromkeys(("eval_steps", "save_steps"), 1),
}
CASES = {
    "grpo": {"beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5, **SAVED},
    "rloo": {
        "method": "rloo",
        "num_iterations": 2,
        "gradient_checkpointing": True,
        "keep_sampling_mask": True,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
    },
    "grpo, lora": {"peft": True, "beta": 0.05, **SAVED},
    "rloo, lora": {"method": "rloo", "peft": True, "beta": 0.05, "gradient_checkpointing": True},
    # 6 prompts are 3 micro-steps: the second update of an epoch has one. 3 prompts of evaluation: the last is alone.
    "uneven last batches": {
        "steps_per_generation": 1,
        "train_dataset": tiny.rows(6),
        "attn_layout": "padded",
        "max_tokens_per_micro_batch": 20,
        **EVALUATED,
    },
    "a rank with no signal": {"reward_funcs": signal_of_seven, "beta": 0.0, "tie_word_embeddings": False},
    "a rank whose completions are all truncated": {"mask_truncated_completions": True, "reward_funcs": runs.longer},
    "entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.01, "method": "rloo"},
    "a head of its own": {"tie_word_embeddings": False, "cast_lm_head_to_fp32": True, "num_generations": 8},
    "sampled in step": {"ds3_gather_for_generation": False, "beta": 0.05, "offload": True, **EVALUATED},
    "evaluated before it is trained": {"evaluate_first": True, "beta": 0.05, "max_steps": 2, **EVALUATED},
    "experts with balanced loads": {"experts": True, "router_aux_loss_coef": 0.2, "max_steps": 3},
    "a model that is read from a folder": {"model": "model", "beta": 0.05, "max_steps": 2},
    "a reward model": {"reward_funcs": "judge", "max_steps": 2},
    "the best weights": {**BEST, "beta": 0.05},
    "the best weights, lora": {**BEST, "peft": True},
    "the best weights, experts": {**BEST, "experts": True},
}
COUNTED = "uneven last batches"
"""Where bytes between processes are counted."""
RESUMED = ("grpo", "grpo, lora", "4 bits as float32", "4 bits as uint8", "FSDP2", "muon", "rounded by chance")
REFUSED = ("grpo, lora", "the best weights", "FSDP2")
"""Where a checkpoint is resumed on other weights: those under an adapter, or those of the reference."""
VARIANTS = {
    "GRPO": {"beta": 0.05},
    "RLOO": {"method": "rloo", "beta": 0.05},
    "GRPO, LoRA": {"peft": True, "beta": 0.05},
    "RLOO, LoRA": {"method": "rloo", "peft": True, "beta": 0.05},
}
CONDITIONS = {
    "as usual": {},
    "uneven last batches": {"steps_per_generation": 1, "train_dataset": tiny.rows(6)},
    "a rank with no signal": {"reward_funcs": signal_of_seven, "beta": 0.0},
    "a rank whose completions are all truncated": CASES["a rank whose completions are all truncated"],
}
MATRIX = {
    f"{name}: {condition}": {**variant, **more}
    for name, variant in VARIANTS.items()
    for condition, more in CONDITIONS.items()
}
SERVED = {
    "a server": {"beta": 0.05},
    "a server, RLOO": {"method": "rloo"},
    "a server, LoRA merged": {"peft": True, "vllm_lora_sync": "merged"},
    "a server, differences": {"vllm_weight_differences": True},
}
"""Sampled from a server at `COVEY_TEST_SERVER`, which has the policy's last weights in the end."""

BY_ARGUMENTS = {
    "FSDP2": {"fsdp": True, "beta": 0.05, **SAVED},
}
"""Sharded as their own arguments say, whoever has launched them."""
OPTIMIZERS = {
    "muon": {"optim": "muon", "weight_decay": 0.1, **SAVED},
    "rounded by chance": {"optim": "adamw_stochastic", "half": True, "learning_rate": 1e-3, **SAVED},
}
"""Optimizers of Covey's own."""
QUANTISED = {
    f"4 bits as {storage}": {"model": "model", "storage": storage, "peft": True, "beta": 0.05, **SAVED}
    for storage in ("float32", "uint8")
}
"""A base in 4 bits, stored as numbers that FSDP2 spreads or as some that it does not."""


def write_models(folder):
    """Write the models that are read."""
    tiny.folder(folder / "model")
    torch.manual_seed(5)
    LlamaForSequenceClassification(tiny.config(num_labels=1)).save_pretrained(folder / "judge")
    tiny.tokenizer().save_pretrained(folder / "judge")


def train(case, output, resume=None, watch=None, seed=0):
    """Train one case in this process or, under a launcher, together with the others.

    From a checkpoint if given; `watch` is shown the model, whose first weights are drawn with `seed`.
    """
    settings = {**BASE, "per_device_train_batch_size": 8 // PROCESSES, "per_device_eval_batch_size": 8 // PROCESSES}
    settings |= copy.deepcopy({**CASES, **MATRIX, **SERVED, **QUANTISED, **BY_ARGUMENTS, **OPTIMIZERS}[case])
    if case in SERVED:
        settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_group_port": 0, "vllm_server_timeout": 30.0}
        settings["vllm_server_base_url"] = os.environ["COVEY_TEST_SERVER"]
    parts = {name: settings.pop(name) for name in ("train_dataset", "eval_dataset", "reward_funcs") if name in settings}
    parts = {"train_dataset": tiny.rows(), "reward_funcs": sums_of_odd, **parts}
    parts["model"] = tiny.model(seed=seed, tie_word_embeddings=settings.pop("tie_word_embeddings", True))
    if settings.pop("half", False):
        parts["model"] = parts["model"].to(torch.bfloat16)
    if settings.pop("experts", False):
        parts["model"] = mixtures.model("Mixtral")
    if "model" in settings:
        parts["model"] = str(output.parent / settings.pop("model"))
    if storage := settings.pop("storage", None):
        bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
        parts["quantization_config"] = BitsAndBytesConfig(**bits, bnb_4bit_quant_storage=storage)
    if settings.pop("peft", False):
        parts["peft_config"] = lora()
    os.environ["FSDP_OFFLOAD_PARAMS"] = str(settings.pop("offload", False)).lower()
    if parts["reward_funcs"] == "judge":
        parts["reward_funcs"] = str(output.parent / "judge")
    first = settings.pop("evaluate_first", False)
    method = settings.pop("method", "grpo")
    args = runs.config(output, method, **settings)
    if args.deepspeed_plugin is not None:  # these weights are so small that ZeRO-3 would leave them whole
        args.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    kind = GRPOTrainer if method == "grpo" else RLOOTrainer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = kind(args=args, processing_class=tiny.tokenizer(), **parts)
        if watch is not None:
            watch(trained.model)
        if first:
            found = trained.evaluate()
            trained.log(found)
        trained.train(resume_from_checkpoint=resume)
        if case in SERVED:
            trained.weight_sync.ensure_current(trained.state.global_step)
            trained.collector.engine.close()
    return trained


def saved_and_resumed(trained, case, output):
    """Save what was trained; how far the run is from one that was interrupted at its checkpoint and resumed."""
    trained.save_model(str(output / "final"))
    again = outcome(train(case, output.with_name(f"{case}, resumed"), str(output / "checkpoint-3")))
    weights = outcome(trained)["weights"]
    return max((again["weights"][name] - tensor).abs().max().item() for name, tensor in weights.items())


def refusal_of_another_base(case, output):
    """Error of a run that resumes a checkpoint with other frozen weights."""
    try:
        train(case, output.with_name(f"{case}, another base"), str(output / "checkpoint-3"), seed=1)
    except ValueError as error:
        return str(error)


class Passes(Traffic):
    """Bytes that a sharded model receives in its passes, and their number, by case.

    Whole weights, put together for sampling, sync and checkpoints, are not counted.
    """

    def __init__(self):
        super().__init__()
        for module in (replicas, weights):
            module.full_tensor = self._not_counting(module.full_tensor)
        self.take()

    def _not_counting(self, whole):
        def uncounted(*args, **kwargs):
            before = self.gathered
            made = whole(*args, **kwargs)
            self.gathered = before
            return made

        return uncounted

    def watch(self, model):
        """Count passes of a model."""

        def count(*args, **kwargs):
            self.passes += torch.is_grad_enabled()
            self.forwards += not torch.is_grad_enabled()

        model.register_forward_pre_hook(count)

    def take(self):
        """Counts since the last call."""
        names = ("gathered", "reduced", "passes", "forwards")
        found = {name: getattr(self, name, 0) for name in names}
        self.gathered = self.reduced = self.passes = self.forwards = 0
        return found


class IdlePasses:
    """Counts those that processes run to keep step with others, by case."""

    def __init__(self):
        self.count = 0
        make = TrainBatch.idle

        def idle(batch):
            self.count += 1
            return make(batch)

        mock.patch.object(TrainBatch, "idle", idle).start()

    def take(self):
        """Numbers of all processes since the last call."""
        found = [None] * PROCESSES
        torch.distributed.all_gather_object(found, self.count)
        self.count = 0
        return found


def outcome(trained):
    """Results that every way of sharding must agree on, and the sharding."""
    policy = trained.policy
    weights = {name: tensor.clone() for name, tensor in weight_update(policy, 0).tensors()}
    names = ("loss", "reward", "grad_norm", "num_tokens", "entropy", "kl", "eval_reward", "eval_loss", "learning_rate")
    names += ("aux_loss",)
    held = sum(part_of(parameter).numel() for parameter in policy.parameters())
    return {
        "weights": weights,
        "frozen": {} if trained.reference and trained.reference.has_moved else trained.checkpoints.frozen,
        "history": {name: runs.history(trained, name) for name in names},
        "sharding": trained.sharding.name,
        "sharded": is_sharded(policy),
        "offload": type(getattr(getattr(trained.accelerator.state, "fsdp_plugin", None), "cpu_offload", None)).__name__,
        "share": held / sum(full_shape(parameter).numel() for parameter in policy.parameters()),
    }


def part_of(parameter):
    """The part of a parameter that this process holds."""
    return getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    launching.in_a_child()
    found, idle, traffic = {}, IdlePasses(), Passes()
    for case in sys.argv[2:]:
        with traffic if case == COUNTED else contextlib.nullcontext():  # which takes as long as all else
            done = train(case, folder / case, watch=traffic.watch)
        found[case] = {**outcome(done), "idle": idle.take(), "traffic": traffic.take()}
        if case.startswith("the best weights"):
            done.save_model(str(folder / case / "final"))
        if case in RESUMED:
            found[case]["resumed"] = saved_and_resumed(done, case, folder / case)
        if case in REFUSED:
            found[case]["refused"] = refusal_of_another_base(case, folder / case)
    if done.accelerator.is_main_process:
        torch.save(found, folder / "result.pt")
    torch.distributed.destroy_process_group()  # gloo's threads must not outlive the interpreter
