"""Trains a tiny model for a few steps, in this process or under torchrun, and gives losses and weights.

Usage under a launcher: two_processes.py OUTPUT CASES_AS_JSON, a dictionary from names to settings. One launch runs all.
"""

import json
import math
import sys

import torch

from covey import EvalSuite
from tests.support import mixtures, runs, tiny
from tests.support.engines import CopyEngine
from tests.support.players import PLAYERS, game


def first(text):
    """The vote of a completion."""
    return text[:1] or None


def longer_for_odd(prompts, completion_ids, **kwargs):
    """Prompts of even numbers give no signal."""
    return [float(sum(ids) % 7 * (int(p[0]) % 2)) for p, ids in zip(prompts, completion_ids, strict=True)]


def rewarded_by_steps(completion_ids, **kwargs):
    """Steps for some completions, numbers for others, None for a few."""

    def judge(ids):
        if sum(ids) % 5 == 0:
            return None
        return [(0, ids[0] % 2), (len(ids) - 1, 1)] if sum(ids) % 3 else float(sum(ids) % 7)

    return [judge(ids) for ids in completion_ids]


def run_out_of_memory(trainer):
    """The last process cannot run two rollouts at a time, and says so halfway through the backward pass."""
    if trainer.accelerator.process_index != trainer.accelerator.num_processes - 1:
        return
    compute, several = trainer.compute_loss, [False]

    def compute_loss(model, inputs, *args, **kwargs):
        several[0] = len(inputs.lengths) > 1
        return compute(model, inputs, *args, **kwargs)

    def fail(parameter):
        if several[0]:
            raise torch.OutOfMemoryError("injected")

    trainer.compute_loss = compute_loss
    list(trainer.policy.parameters())[5].register_post_accumulate_grad_hook(fail)


def perturb_reports(trainer):
    """The engine finds each token more or less probable than it is, by its id."""
    collect = trainer.collector.collect

    def perturbing(*args, **kwargs):
        rollouts = collect(*args, **kwargs)
        for rollout in rollouts:
            pairs = zip(rollout.logprobs, rollout.completion_ids, strict=True)
            rollout.logprobs = [logprob + 0.2 * (token % 5 - 2) for logprob, token in pairs]
        return rollouts

    trainer.collector.collect = perturbing


def act_as_environments(trainer):
    """Completions of a group begin in three ways, and each gets text after its first token that it did not sample."""
    collect = trainer.collector.collect

    def interrupted(values, inserted):
        return None if values is None else values[:1] + inserted + values[1:]

    def collecting(draws, *args, **kwargs):
        rollouts = collect(draws, *args, **kwargs)
        for draw, rollout in zip(draws, rollouts, strict=True):
            inserted = [50 + draw.sample] * (1 + draw.sample % 4)
            rollout.prompt_ids = [*rollout.prompt_ids, 60 + draw.sample % 3]
            rollout.completion_ids = interrupted(rollout.completion_ids, inserted)
            rollout.sampled = interrupted(rollout.sampled, [False] * len(inserted))
            rollout.entropies = interrupted(rollout.entropies, [math.nan] * len(inserted))
            rollout.logprobs = None
        return rollouts

    trainer.collector.collect = collecting


NAMES = (
    *("loss", "aux_loss", "reward", "grad_norm", "num_tokens", "entropy", "kl", "completions/mean_length"),
    *("source/a/prompts", "source/a/epoch", "source/b/reward", "source/b/weight", "source/c/tokens"),
    *("dynamic_sampling/first_signal", "dynamic_sampling/cost", "difficulty/chance"),
    *("sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/max"),
    *("rollouts/turns", "rollouts/failed", "sampling/staleness/mean", "sampling/staleness/max"),
    *("steps/per_completion", "frac_reward_zero_std", "frac_advantage_zero"),
    *("roles/first/reward", "roles/second/reward_std", "roles/first/baseline", "games/length"),
    *("teacher/loss", "teacher/kl", "teacher/tokens", "teacher/fraction", "teacher/old/kl"),
)


def train(output, settings):
    """Train one case; its history, layout and weights."""
    settings = dict(settings)
    method = settings.pop("method")
    flags = ("lora", "settled", "out_of_memory", "perturbed", "by_steps", "pads_at_the_last", "environments")
    flags += ("experts", "suites", "sources", "unequal", "taught")
    chosen = {name for name in flags if settings.pop(name, False)}
    player = settings.pop("player", None)
    parts = {}
    if settings.get("max_staleness"):
        parts["engine"] = CopyEngine(tiny.model())
    if "lora" in chosen:
        from peft import LoraConfig

        parts["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    if "experts" in chosen:
        parts["model"] = mixtures.model("Qwen3Moe")
    if "suites" in chosen:
        parts["eval_dataset"] = {
            "few": EvalSuite(
                tiny.rows(3), num_generations=3, pass_at=(1, 2), maj_at=3, success_threshold=6.5, answer=first
            ),
            "greedy": EvalSuite(tiny.rows(5), temperature=0, pass_at=1, success_threshold=6.5),
        }
    if "sources" in chosen:
        rows = tiny.rows(16)
        parts["train_dataset"] = {"a": rows[:8], "b": rows[8:12], "c": rows[12:]}
        parts["sources"] = {
            "a": {"weight": [[0, 2], [2, 1]], "sampler": "difficulty", "gates": {"signal": True}},
            "b": {"weight": 1, "reward_funcs": rewarded_by_steps, "scale_rewards": "batch", "average": "own"},
            "c": {"weight": 1, "max_completion_length": 3, "mask_truncated_completions": True},
        }
    if "unequal" in chosen:
        rows = tiny.rows(16)
        parts["train_dataset"] = {"a": rows[:8], "b": rows[8:]}
        parts["sources"] = {"a": {"weight": 1, "num_generations": 4}, "b": {"weight": 1}}
    if "settled" in chosen:
        parts["reward_funcs"] = longer_for_odd
    if "taught" in chosen:  # rows with and without a teacher, at one process more than at the other
        who = ["old", "hinted", "old", "hinted"]
        rows = [
            {**row, "teacher": who[number % 4] if number % 8 else None, "privileged_context": "9"}
            for number, row in enumerate(tiny.rows())
        ]
        parts["train_dataset"] = rows
    if "by_steps" in chosen:
        parts["reward_funcs"] = [rewarded_by_steps, runs.longer]
    if player:
        parts["rollout_func"] = (PLAYERS | {"a game": game})[player]
    trained = runs.trainer(output, method, parts=parts, **settings)
    for name, change in (
        ("out_of_memory", run_out_of_memory),
        ("perturbed", perturb_reports),
        ("environments", act_as_environments),
    ):
        if name in chosen:
            change(trained)
    last = trained.accelerator.process_index == trained.accelerator.num_processes - 1
    if "pads_at_the_last" in chosen and last:
        trained.scorer._try_layouts = lambda model, device: "padded"
    trained.train()
    evaluated = trained.evaluate() if "suites" in chosen else {}
    if settings.get("load_best_model_at_end"):
        assert 0 < trained.state.best_global_step < trained.state.global_step, "not the last one, which all have anyway"
        sums = trained.collectives.gather(sum(p.sum().item() for p in trained.policy.parameters()), "compare weights")
        assert len(set(sums)) == 1, "every process loads the best weights"
    timeless = {name: [x] for name, x in evaluated.items() if not name.endswith(("second", "seconds", "runtime"))}
    return {
        "history": {name: runs.history(trained, name) for name in NAMES} | timeless,
        "layout": trained.scorer.layout,
        "weights": [parameter.detach().clone() for parameter in trained.policy.parameters()],
    }


if __name__ == "__main__":
    output, cases = sys.argv[1], json.loads(sys.argv[2])
    tiny.quick()
    found = {case: train(f"{output}/{case}", settings) for case, settings in cases.items()}
    if torch.distributed.get_rank() == 0:
        torch.save(found, f"{output}/result.pt")
    torch.distributed.destroy_process_group()  # gloo's threads must not outlive the interpreter
