"""Two processes on gloo give the losses and weights of one."""

import json
import sys
import warnings

import pytest
import torch

from tests.support.launching import HERE, free_port, once
from tests.support.launching import run as launch
from tests.support.two_processes import train

CASES = {
    "grpo": {"method": "grpo", "beta": 0.05},
    "rloo, suites that do not divide, and the best model": {
        "method": "rloo",
        "num_iterations": 2,
        "suites": True,
        "max_steps": 4,
        "learning_rate": 0.1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_few_reward",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    },
    "a group over both processes": {"method": "grpo", "num_generations": 8, "loss_type": "grpo"},
    "steps of a group over both processes, with refills": {
        "method": "rloo",
        "num_generations": 8,
        "by_steps": True,
        "step_discount": 0.9,
        "dynamic_sample": True,
        "prompt_sampler": "difficulty",
    },
    "two rollout batches a step": {"method": "grpo", "steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "lora": {"method": "grpo", "lora": True},
    "checkpointed layers": {"method": "grpo", "gradient_checkpointing": True},
    "dynamic sampling": {"method": "grpo", "dynamic_sample": True, "settled": True},
    "dynamic sampling by difficulty, a group over both processes": {
        "method": "rloo",
        "num_generations": 8,
        "dynamic_sample": True,
        "prompt_sampler": "difficulty",
        "settled": True,
    },
    "three sources": {"method": "grpo", "sources": True, "max_steps": 3, "loss_type": "dapo"},
    "groups of two sizes, the end of the small ones at the other process": {
        "method": "grpo",
        "num_generations": 8,
        "unequal": True,
        "loss_type": "grpo",
        "max_steps": 3,
    },
    "drafts, some of them at the other process": {"method": "grpo", "speculative_reuse": "exact", "max_steps": 6},
    "memory running out on one process": {"method": "grpo", "out_of_memory": True, "gradient_accumulation_steps": 2},
    "a process without signal": {"method": "grpo", "settled": True, "max_tokens_per_micro_batch": 30},
    "an engine that is corrected, a process without signal": {
        "method": "grpo",
        "settled": True,
        "perturbed": True,
        "correct_built_in_engine": True,
        "engine_parity": "off",
        "vllm_importance_sampling_mode": "sequence_truncate",
    },
    "environments, a group over both processes": {
        "method": "grpo",
        "beta": 0.05,
        "num_generations": 8,
        "environments": True,
    },
    "rollout functions, a group over both processes": {
        "method": "grpo",
        "num_generations": 8,
        "player": "one rollout",
        "max_completion_length": 16,
    },
    "games, a group over both processes": {
        "method": "grpo",
        "num_generations": 8,
        "player": "a game",
        "rollouts_per_game": 2,
        "compare": "role_average",
        "max_completion_length": 16,
        "max_steps": 3,
    },
    "trees, sampled ahead": {
        "method": "rloo",
        "player": "a group",
        "max_staleness": 2,
        "max_steps": 5,
        "max_completion_length": 16,
    },
    "sampling ahead": {"method": "grpo", "max_staleness": 2, "max_steps": 5},
    "sampling ahead, with refills by difficulty": {
        "method": "grpo",
        "max_staleness": 1,
        "max_steps": 5,
        "dynamic_sample": True,
        "prompt_sampler": "difficulty",
        "settled": True,
    },
    "experts with balanced loads, a process without signal": {
        "method": "grpo",
        "experts": True,
        "router_aux_loss_coef": 0.5,
        "settled": True,
        "max_tokens_per_micro_batch": 30,
    },
    "sampling masks, a group over both processes": {
        "method": "grpo",
        "num_generations": 8,
        "num_iterations": 2,
        "max_steps": 3,
        "beta": 0.05,
        "keep_sampling_mask": True,
        "top_p": 0.8,
        "repetition_penalty": 1.2,
        "settled": True,
    },
    "teachers of some rows, an answer of the group that lies at the other process": {
        "method": "grpo",
        "num_generations": 8,
        "taught": True,
        "teacher": {"old": "start", "hinted": "policy"},
        "teacher_prompt_template": "{prompt}{solution}",
        "teacher_success_reward": 0.0,
        "teacher_loss": "divergence",
        "settled": True,
        "max_steps": 3,
        "num_iterations": 2,
        "loss_type": "grpo",
    },
    "a teacher's gap as an advantage, two generations a step": {
        "method": "rloo",
        "taught": True,
        "teacher": {"old": "follower", "hinted": "start"},
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
    },
    "tokens chosen by covariance": {
        "method": "grpo",
        "loss_type": "clip_cov",
        "cov_share": 0.3,
        "clip_cov_low": 0.0,
        "num_generations": 8,
        "advantages": "otb",
    },
    "an entropy quantile and bonus": {"method": "grpo", "top_entropy_quantile": 0.5, "entropy_coef": 0.01},
}


SLOW = (
    "steps of a group over both processes, with refills",
    "two rollout batches a step",
    "checkpointed layers",
    "dynamic sampling",
    "an engine that is corrected, a process without signal",
    "rollout functions, a group over both processes",
    "sampling ahead",
    "tokens chosen by covariance",
    "an entropy quantile and bonus",
)
"""Cases that have most in common with another."""
QUICK = [case for case in CASES if case not in SLOW]
PADDED = "a layout that suits the last process alone"
MICRO = {"gradient_accumulation_steps": 1, "max_steps": 2, "optim": "sgd"}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A case by this process alone, once."""
    folder, found = tmp_path_factory.mktemp("one"), {}
    torch.set_num_threads(1)

    def run(case):
        if case not in found:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[case] = train(folder / case, {**MICRO, "per_device_train_batch_size": 8, **CASES[case]})
        return found[case]

    return run


def train_two(cases, folder):
    """Cases by two processes, in one launch by torchrun."""
    settings = {case: {**MICRO, "per_device_train_batch_size": 4, **more} for case, more in cases.items()}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    launch([*launcher, str(HERE / "two_processes.py"), str(folder), json.dumps(settings)], 900)
    return torch.load(folder / "result.pt", weights_only=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    cases = {case: CASES[case] for case in QUICK} | {PADDED: {"method": "grpo", "pads_at_the_last": True}}
    folder = once(tmp_path_factory, "two_processes", lambda folder: train_two(cases, folder))
    return torch.load(folder / "result.pt", weights_only=True)


def assert_equal(one, two):
    for name, values in one["history"].items():
        assert two["history"][name] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    for a, b in zip(one["weights"], two["weights"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK)
def test_two_processes_equal_one(one, two, case):
    assert_equal(one(case), two[case])


@pytest.mark.slow
def test_two_processes_equal_one_in_other_cases_too(one, tmp_path):
    found = train_two({case: CASES[case] for case in SLOW}, tmp_path)
    for case in SLOW:
        assert_equal(one(case), found[case])


@pytest.mark.slow
def test_processes_take_the_layout_that_suits_all_of_them(two, tmp_path):
    alone = train(tmp_path, {**MICRO, "per_device_train_batch_size": 8, "method": "grpo"})
    assert (alone["layout"], two[PADDED]["layout"]) == ("shared_prefix", "padded")
    assert two[PADDED]["history"]["loss"] == pytest.approx(alone["history"]["loss"], rel=1e-4, abs=1e-6)
    for a, b in zip(alone["weights"], two[PADDED]["weights"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
