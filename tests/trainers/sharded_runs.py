"""Runs of a tiny model whose weights are the same however many processes hold them, and in which way.

Usage under a launcher: sharded_runs.py OUTPUT CASE [CASE ...]; OUTPUT/model holds a saved model.
"""

import importlib
import inspect
import os
import sys
import warnings
from pathlib import Path

import runs
import torch

import mixtures
import tiny
from covey import GRPOTrainer, RLOOTrainer
from covey.core.batch import TrainBatch
from covey.policy.weights import is_sharded, weight_update, whole_shape

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


def sums_of_odd(prompts, completion_ids, **kwargs):
    """Prompts of even numbers give no signal."""
    return [float(sum(ids) % 7 * (int(p[0]) % 2)) for p, ids in zip(prompts, completion_ids, strict=True)]


def signal_of_seven(prompts, completion_ids, **kwargs):
    """One prompt of eight gives a signal, and of its completions one: most processes have nothing to train on."""
    return [float(p.startswith("7") and sum(ids) % 4 == 1) for p, ids in zip(prompts, completion_ids, strict=True)]


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
CASES = {
    "grpo": {"beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5, **SAVED},
    "rloo": {"method": "rloo", "num_iterations": 2, "gradient_checkpointing": True},
    "grpo, lora": {"peft": True, "beta": 0.05, **SAVED},
    "rloo, lora": {"method": "rloo", "peft": True, "beta": 0.05, "gradient_checkpointing": True},
    # 6 prompts are 3 micro-steps: the second update of an epoch has one. 3 prompts of evaluation: the last is alone.
    "uneven last batches": {
        "steps_per_generation": 1,
        "train_dataset": tiny.rows(6),
        "attn_layout": "padded",
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
}
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
}
"""Sampled from a server at `COVEY_TEST_SERVER`, which has the policy's last weights in the end."""


def train(case, output, resume=None, watch=None):
    """Train one case in this process or, under a launcher, together with the others.

    From a checkpoint if given; `watch` is shown the model.
    """
    settings = {**BASE, "per_device_train_batch_size": 8 // PROCESSES, "per_device_eval_batch_size": 8 // PROCESSES}
    settings |= {**CASES, **MATRIX, **SERVED}[case]
    if case in SERVED:
        settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_group_port": 0, "vllm_server_timeout": 30.0}
        settings["vllm_server_base_url"] = os.environ["COVEY_TEST_SERVER"]
    parts = {name: settings.pop(name) for name in ("train_dataset", "eval_dataset", "reward_funcs") if name in settings}
    parts = {"train_dataset": tiny.rows(), "reward_funcs": sums_of_odd, **parts}
    parts["model"] = tiny.model(tie_word_embeddings=settings.pop("tie_word_embeddings", True))
    if settings.pop("experts", False):
        parts["model"] = mixtures.model("Mixtral")
    if "model" in settings:
        parts["model"] = str(output.parent / settings.pop("model"))
    if settings.pop("peft", False):
        parts["peft_config"] = lora()
    os.environ["FSDP_OFFLOAD_PARAMS"] = str(settings.pop("offload", False)).lower()
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
            trained.sharded_at_first = is_sharded(trained.policy)
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


class Traffic:
    """Counts bytes that this process receives in passes over a sharded model, and the passes, by case.

    Whole weights for sampling and sync travel by other calls and are not counted.
    """

    def __init__(self):
        self.take()
        # torch 2.13 has renamed both
        self._count(["all_gather_single", "all_gather_into_tensor"], "gathered", lambda made, own: made - own)
        self._count(["reduce_scatter_single", "reduce_scatter_tensor"], "reduced", lambda made, own: own - made)

    def _count(self, names, what, received):
        name = next(name for name in names if hasattr(torch.distributed, name))
        call = getattr(torch.distributed, name)
        signature = inspect.signature(call)

        def counting(*args, **kwargs):
            made, own = list(signature.bind(*args, **kwargs).arguments.values())[:2]
            if max(made.nbytes, own.nbytes) > 8192:  # the smallest unit is larger, and what metrics exchange smaller
                self.found[what] += received(made.nbytes, own.nbytes)
            return call(*args, **kwargs)

        setattr(torch.distributed, name, counting)

    def watch(self, model):
        """Count passes of a model."""

        def count(*args, **kwargs):
            self.found["passes" if torch.is_grad_enabled() else "forwards"] += 1

        model.register_forward_pre_hook(count)

    def take(self):
        """What was counted since the last time."""
        found = getattr(self, "found", None)
        self.found = {"gathered": 0, "reduced": 0, "passes": 0, "forwards": 0}
        return found


class IdlePasses:
    """Counts those that processes run to keep step with others, by case."""

    def __init__(self):
        self.count = 0
        make = TrainBatch.idle

        def idle(batch):
            self.count += 1
            return make(batch)

        TrainBatch.idle = idle

    def take(self):
        """How many there were at any process since the last time."""
        found = [None] * PROCESSES
        torch.distributed.all_gather_object(found, self.count)
        self.count = 0
        return found


def outcome(trained):
    """What every way of holding the weights must agree on, and how they were held."""
    policy = trained.policy
    weights = {name: tensor.clone() for name, tensor in weight_update(policy, 0).tensors()}
    names = ("loss", "reward", "grad_norm", "num_tokens", "entropy", "kl", "eval_reward", "eval_loss", "learning_rate")
    names += ("aux_loss",)
    held = sum(part_of(parameter).numel() for parameter in policy.parameters())
    return {
        "weights": weights,
        "history": {name: runs.history(trained, name) for name in names},
        "sharding": trained.sharding.name,
        "sharded": is_sharded(policy),
        "offload": type(getattr(getattr(trained.accelerator.state, "fsdp_plugin", None), "cpu_offload", None)).__name__,
        "share": held / sum(whole_shape(parameter).numel() for parameter in policy.parameters()),
    }


def part_of(parameter):
    """What this process holds of a parameter."""
    return getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    tiny.quick()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        of_processes = importlib.import_module("deepspeed.comm.torch")
        of_processes.build_shm_op = lambda: None  # takes minutes to compile; gloo does the same
    found, idle, traffic = {}, IdlePasses(), Traffic()
    for case in sys.argv[2:]:
        traffic.take()
        done = train(case, folder / case, watch=traffic.watch)
        found[case] = {**outcome(done), "idle": idle.take(), "traffic": traffic.take()}
        if "save_steps" in CASES.get(case, {}):
            found[case]["resumed"] = saved_and_resumed(done, case, folder / case)
    if done.accelerator.is_main_process:
        torch.save(found, folder / "result.pt")
    torch.distributed.destroy_process_group()  # gloo's threads must not outlive the interpreter
