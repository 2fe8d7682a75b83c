"""What a step costs, against operations that are counted and steps small enough to do by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from covey.config.grpo import GRPOConfig
from covey.config.rloo import RLOOConfig
from covey.sizing.memory import ShardCounts, estimate
from covey.sizing.model_spec import unit_parameters
from covey.sizing.step_cost import MACHINES, Machine, ModelSize, forward_flops, step_costs, step_times

TINY = LlamaConfig(
    vocab_size=100,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
SIZE = 7888  # parameters: 3216 outside of the layers, 2336 in each


def run(config=TINY, kind=GRPOConfig, way="fsdp2", processes=2, **changes):
    """A run of 4 completions of 8 tokens for each of 2 prompts of 4, on each process; its costs and memory."""
    base = {"bf16": False, "use_cpu": True, "max_completion_length": 8, "num_generations": 4, "report_to": "none"}
    args = kind(**{**base, "gradient_checkpointing": False, **changes})
    spread = ShardCounts.of(way, processes)
    memory = estimate(config, args, prompt_tokens=4, spread=spread)
    return step_costs(config, args, memory, spread, prompt_tokens=4), memory, spread


def counted(config, length, backward=False):
    """Operations that torch counts in matrix products and attention of one sequence, from first token to last.

    Rotary angles do not count, which transformers 5.17 computes by a product.
    """
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = torch.ones(1, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.model.rotary_emb(torch.ones(1, 1, 1), torch.arange(length)[None])
    angles = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=tokens).logits.sum()
        if backward:
            loss.backward()
    return counter.get_total_flops() - angles


@pytest.mark.parametrize("config", [TINY, Qwen2Config(**{**TINY.to_dict(), "tie_word_embeddings": True})])
def test_operations_of_a_forward_pass_are_those_torch_counts(config):
    # One completion of 2 tokens after a prompt of 19: 20 positions are run. Eager attention multiplies all pairs, 400,
    # where causal ones are 210; and its head all positions, where 2 are wanted.
    size, length = ModelSize.of(config), 20
    ours = forward_flops(size, length - 1, [2])
    pairs = 4 * size.layers * size.width * (length**2 - length * (length + 1) // 2)
    assert ours + pairs + 2 * size.head * (length - 2) == counted(config, length)


def test_forward_and_backward_are_three_forwards():
    assert counted(TINY, 20, backward=True) == 3 * counted(TINY, 20)


def test_a_step_by_hand():
    # 2 processes with 8 completions each are 4 groups; a group has 4 + 4 * 7 = 32 positions, 29 with logits, and
    # 10 + 4 * (7 * 4 + 28) = 234 pairs. Body 2 * 2304 (a layer without its norms), head 1600, width 16.
    forward = 4 * (2 * 4608 * 32 + 2 * 1600 * 29 + 4 * 2 * 16 * 234)
    costs, memory, _ = run()
    assert (costs.training_flops, costs.scoring_flops, costs.sampling_flops) == (3 * forward, 0, forward)
    assert costs.sampled_tokens == 16 * 8
    checkpointed, _, _ = run(gradient_checkpointing=True)
    assert checkpointed.training_flops == 4 * forward - 4 * 2 * 1600 * 29  # the head is not run again
    assert memory.micro_batches == 1
    # half of all weights is the other's: twice, but those outside of the layers once; gradients once
    assert (costs.gathered, costs.reduced) == (2 * SIZE * 2 - 3216 * 2, SIZE * 2)
    assert (costs.refreshed, costs.sync_gathered, costs.sync_sent) == (0, 0, 0)


@pytest.mark.parametrize(
    ("way", "gathered", "reduced", "refreshed"),
    [
        ("multi_gpu", 0, 2 * 3, 0),  # an all-reduce over 4 receives 3/4 of the gradients twice
        ("zero1", 0, 2 * 3, 3),
        ("zero2", 0, 3, 3),
        ("zero3", None, 3, 0),
    ],
)
def test_traffic_depends_on_sharding(way, gathered, reduced, refreshed):
    costs, _, _ = run(way=way, processes=4)
    assert (costs.reduced, costs.refreshed) == (reduced * SIZE, refreshed * SIZE)  # 4 bytes each, of 4 processes
    assert gathered is None or costs.gathered == gathered


def test_one_process_receives_nothing():
    costs, _, _ = run(way="multi_gpu", processes=1)
    assert costs.gathered == costs.reduced == costs.refreshed == costs.sync_gathered == 0


def test_a_penalty_costs_forward_passes():
    plain, _, _ = run()
    once, _, _ = run(beta=0.1)
    assert once.scoring_flops == plain.sampling_flops
    assert once.gathered == plain.gathered + SIZE * 2  # its forward pass gathers the reference
    twice, _, _ = run(kind=RLOOConfig, beta=0.1)  # the policy's own, too: the penalty is in the reward
    assert twice.scoring_flops == 2 * plain.sampling_flops


def test_servers_are_sent_weights_that_all_processes_gather():
    costs, _, _ = run(use_vllm=True, vllm_mode="server")
    assert (costs.sync_gathered, costs.sync_sent) == (SIZE * 2, SIZE * 4)


def test_units_are_layers_and_the_rest():
    assert unit_parameters(TINY) == (3216, 2336)


def test_seconds_by_hand():
    # A machine of 1e6 operations, 1e6 bytes read and 1e5 bytes received a second, all of which it reaches.
    machine = Machine(1e6, 1e9, 1e6, 1e5, 1e4, training=1.0, decoding=1.0)
    costs, memory, spread = run(use_vllm=True, vllm_mode="server")
    times = step_times(
        *(costs, memory, ModelSize.of(TINY), machine, spread), cache_bytes=256, prompt_tokens=4, sampling_gpus=1
    )
    assert times.training == pytest.approx(costs.training_flops / 2 / 1e6)
    assert times.moving == pytest.approx((costs.gathered + costs.reduced) / 1e5)
    assert times.sync == pytest.approx(SIZE * 2 / 1e5 + SIZE * 4 / 1e4)
    # 16 rows at once; each of 8 tokens reads all weights and 16 caches of 4 + 4 tokens, or multiplies 16 * 2 * 6208
    assert times.sampling == pytest.approx(8 * max((SIZE * 4 + 16 * 8 * 256) / 1e6, 16 * 2 * 6208 / 1e6))
    assert times.step == pytest.approx(times.sampling + max(times.training, times.moving) + times.sync)
    across = step_times(
        *(costs, memory, ModelSize.of(TINY), machine, spread),
        **{"cache_bytes": 256, "prompt_tokens": 4, "sampling_gpus": 1, "gpus_of_node": 1, "overlaps": True},
    )
    assert across.moving == pytest.approx(10 * times.moving)  # over the network
    assert across.step == pytest.approx(across.sync + max(across.sampling, across.training, across.moving))


def test_a_cache_too_small_for_all_rows_takes_rounds():
    costs, memory, spread = run(use_vllm=True, vllm_mode="server")
    size, rows = ModelSize.of(TINY), 4
    room = (SIZE * 4 + rows * 12 * 256) / 0.9  # the weights, and 4 rows of 4 + 8 tokens
    machine = Machine(1e9, room, 1e6, 1e5, 1e4, training=1.0, decoding=1.0)
    times = step_times(costs, memory, size, machine, spread, cache_bytes=256, prompt_tokens=4, sampling_gpus=1)
    assert times.sampling == pytest.approx(4 * 8 * (SIZE * 4 + rows * 8 * 256) / 1e6)


def test_machines_are_faster_within_than_between_nodes():
    assert all(machine.link > machine.network for machine in MACHINES.values())
