"""How much memory vLLM gets in the trainer's process: arithmetic that can be checked by eye."""

import pytest

from covey.sizing import memory, vllm_memory
from covey.sizing.model_spec import ModelSpec
from covey.sizing.vllm_memory import CONTEXT, GIB, DoesNotFit, EngineMemory, cpu_cache_bytes, usable, utilization
from tests.support import runs, tiny

RUN = memory.MemoryEstimate(
    weights=4 * GIB,
    reference=0,
    gradients=4 * GIB,
    optimizer=8 * GIB,
    activations=10 * GIB,
    logits=2 * GIB,
    kv_cache=0,
    packed=0,
    parameters=10**9,
    trainable=10**9,
)
ENGINE = EngineMemory(weights=2 * GIB, working=1 * GIB, cache=7 * GIB, smallest_cache=GIB // 2)


def settings(tmp_path, **changes):
    return runs.config(tmp_path, **{"use_vllm": True, "vllm_gpu_memory_utilization": "auto", **changes})


def test_an_engine_that_stays_awake_gets_what_training_leaves(tmp_path):
    # training: 4 weights + 4 gradients + 8 optimizer + 10 activations + 2 logits = 28 GiB; of 40 GiB 5% and 1 GiB are
    # spared: 40 * 0.95 - 1 - 28 = 9 GiB < the 10 wanted; 9 / 40 = 0.225, rounded down
    share, sentence = utilization(RUN, ENGINE, settings(tmp_path), 40 * GIB)
    assert share == 0.22
    assert "28.0 GiB are taken" in sentence
    assert "of which 9.0 GiB are free" in sentence


def test_no_more_is_taken_than_there_is_use_for(tmp_path):
    share, sentence = utilization(RUN, ENGINE, settings(tmp_path), 80 * GIB)
    assert share == 0.13  # 10 / 80 = 0.125
    assert "is 0.13 of 80.0 GiB" in sentence
    assert "all of it" in sentence


def test_a_sleeping_engine_shares_with_resident_memory(tmp_path):
    # weights and optimizer, 12 GiB; 20 * 0.95 - 1 - 12 = 6 GiB; 6 / 20 = 0.3
    asleep = settings(tmp_path, vllm_enable_sleep_mode=True)
    assert utilization(RUN, ENGINE, asleep, 20 * GIB)[0] == 0.3
    # without the optimizer 4 GiB stay and all 10 wanted are there: 10 / 20
    parked = settings(tmp_path, vllm_enable_sleep_mode=True, offload_optimizer=True)
    share, sentence = utilization(RUN, ENGINE, parked, 20 * GIB)
    assert share == 0.5
    assert "4.0 GiB are taken" in sentence
    assert "the optimizer being in host memory" in sentence
    both = settings(tmp_path, vllm_enable_sleep_mode=True, offload_optimizer=True, offload_model=True)
    assert "0 B are taken" in utilization(RUN, ENGINE, both, 20 * GIB)[1]


@pytest.mark.parametrize(
    ("changes", "gpu", "message"),
    [
        ({}, 24, r"28.0 GiB are taken by training.*at least 3.5 GiB.*Set vllm_enable_sleep_mode=True"),
        ({"vllm_enable_sleep_mode": True}, 16, r"12.0 GiB are taken.*Set offload_optimizer=True"),
        # the hand-over: 12 GiB still lie there and vLLM's 2 come on top, with 14 * 0.95 - 1 = 12.3 to lie in
        ({"vllm_enable_sleep_mode": True, "offload_optimizer": True, "offload_model": True}, 14, "1.7 GiB are missing"),
    ],
)
def test_too_little_memory_has_advice(tmp_path, changes, gpu, message):
    with pytest.raises(DoesNotFit, match=message):
        utilization(RUN, ENGINE, settings(tmp_path, **changes), gpu * GIB)


def test_memory_of_vllm_is_counted_from_the_config(tmp_path):
    # tiny: 2 layers, 2 key heads of 8, float32: a token's keys and values are 2 * 2 * 16 * 4 = 256 bytes.
    # A process samples 4 * 2 = 8 completions of 6 tokens and 2 prompts of 10: 68 tokens.
    args = settings(tmp_path)
    estimate = memory.estimate(tiny.config(), args, prompt_tokens=10)
    engine = vllm_memory.engine_memory(estimate, tiny.config(), args, prompt_tokens=10)
    assert engine.cache == 68 * 256
    assert engine.smallest_cache == 16 * 256
    assert engine.weights == estimate.parameters * 4
    halved = vllm_memory.engine_memory(
        estimate, tiny.config(), settings(tmp_path, vllm_tensor_parallel_size=2), prompt_tokens=10
    )
    assert halved.weights == engine.weights // 2


def test_another_engine_replaces_the_built_in_cache(tmp_path):
    own = memory.estimate(tiny.config(), runs.config(tmp_path))
    other = memory.estimate(tiny.config(), settings(tmp_path))
    assert own.kv_cache > 0
    assert (other.kv_cache, other.packed) == (0, 0)
    assert other.training == own.training


def test_the_counts_of_a_model_stand_in_for_building_one(tmp_path):
    args = settings(tmp_path)
    counted = memory.estimate(tiny.config(), args, counts=ModelSpec(1000, 10, 0), peft={})
    assert (counted.weights, counted.gradients, counted.reference) == (4000, 40, 0)


@pytest.mark.parametrize(("free", "expected"), [(400 * GIB, 7 * GIB), (8 * GIB, 2 * GIB), (GIB, GIB // 2)])
def test_the_cache_on_a_cpu_is_at_most_a_quarter_of_memory(free, expected):
    assert cpu_cache_bytes(ENGINE, free) == expected


def test_the_context_and_a_margin_are_spared():
    assert usable(100 * GIB) == 95 * GIB - CONTEXT
