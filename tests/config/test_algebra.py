"""Batch algebra: numbers small enough to divide in one's head."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.config.algebra import BatchAlgebra, nearest, planning_for
from covey.config.grpo import GRPOConfig
from covey.data.sampler import rank_share


def algebra(per_device=4, accumulate=8, steps=8, iterations=1, group=4, world=1, **rest):
    return BatchAlgebra(per_device, accumulate, steps, iterations, group, world, **rest)


def test_eight_processes_with_a_rollout_batch_of_512():
    # 512 / 64 = 8 prompts; 8 processes * 4 = 32 completions a micro-batch; 512 / 32 = 16 micro-batches;
    # one update takes 8 of them: 256 completions, 2 updates per rollout batch, so the second one is off-policy.
    with planning_for(8):
        args = GRPOConfig(
            per_device_train_batch_size=4,
            gradient_accumulation_steps=8,
            generation_batch_size=512,
            num_generations=64,
        )
    a = args.algebra()
    assert args.steps_per_generation == 16
    assert a.prompts_per_rollout_batch == 8
    assert a.completions_per_update == 256
    assert a.updates_per_rollout_batch == 2
    assert not a.on_policy


def test_steps_default_to_gradient_accumulation():
    # 8 completions * 4 micro-batches = 32, one update per rollout batch
    args = GRPOConfig(gradient_accumulation_steps=4)
    assert (args.steps_per_generation, args.generation_batch_size) == (4, 32)
    assert args.algebra().updates_per_rollout_batch == 1
    assert args.algebra().on_policy


def test_generation_batch_size_gives_the_steps():
    # 32 completions / 8 a micro-batch = 4 steps
    assert GRPOConfig(generation_batch_size=32).steps_per_generation == 4


def test_sixteen_steps_by_eight_make_two_updates():
    args = GRPOConfig(steps_per_generation=16, gradient_accumulation_steps=8)
    assert args.generation_batch_size == 128
    assert args.algebra().updates_per_rollout_batch == 2


@pytest.mark.parametrize(
    ("accumulate", "steps", "iterations", "on_policy"),
    [(8, 8, 1, True), (8, 4, 1, True), (8, 16, 1, False), (8, 8, 2, False), (8, 4, 2, True), (8, 3, 1, False)],
)
def test_on_policy_means_whole_rollout_batches_in_each_update(accumulate, steps, iterations, on_policy):
    a = algebra(accumulate=accumulate, steps=steps, iterations=iterations)
    assert a.on_policy is on_policy
    assert a.updates_per_rollout_batch == Fraction(steps * iterations, accumulate)


@given(
    per_device=st.integers(1, 16),
    accumulate=st.integers(1, 16),
    steps=st.integers(1, 16),
    iterations=st.integers(1, 4),
    world=st.integers(1, 8),
)
def test_completions_are_neither_lost_nor_made_up(per_device, accumulate, steps, iterations, world):
    a = algebra(per_device, accumulate, steps, iterations, group=1, world=world)
    seen = a.updates_per_rollout_batch * a.completions_per_update
    assert seen == a.generation_batch_size * iterations


def test_groups_that_do_not_divide_propose_the_nearest_numbers():
    with pytest.raises(ValueError) as error:
        GRPOConfig(num_generations=3)  # 8 completions: groups of 2 or 4 fit, batches of 6 or 9, 3 steps, 3 processes
    message = str(error.value)
    assert "num_generations: 2 or 4" in message
    assert "per_device_train_batch_size: 6 or 9" in message
    assert "gradient_accumulation_steps or steps_per_generation: 3" in message
    assert "the number of processes: 3" in message


def test_every_proposal_works():
    assert GRPOConfig(num_generations=4).algebra().prompts_per_rollout_batch == 2
    assert GRPOConfig(num_generations=3, per_device_train_batch_size=9).algebra().prompts_per_rollout_batch == 3
    assert GRPOConfig(num_generations=3, gradient_accumulation_steps=3).algebra().prompts_per_rollout_batch == 8


def test_a_wrong_generation_batch_size_has_proposals():
    # micro-batches of 8, groups of 8: multiples of 8 around 20
    with pytest.raises(ValueError, match="generation_batch_size: 16 or 24"):
        GRPOConfig(generation_batch_size=20)
    # 24 is three micro-batches, but no whole number of groups of 16: multiples of both around it
    with pytest.raises(ValueError, match="generation_batch_size: 16 or 32; num_generations: 12 or 24"):
        GRPOConfig(generation_batch_size=24, num_generations=16)


def test_contradicting_sizes_are_refused():
    with pytest.raises(ValueError, match=r"generation_batch_size=64 and steps_per_generation=4 contradict"):
        GRPOConfig(generation_batch_size=64, steps_per_generation=4)
    assert GRPOConfig(generation_batch_size=32, steps_per_generation=4).generation_batch_size == 32


def test_other_world_size_keeps_what_the_user_fixed():
    by_steps = GRPOConfig(steps_per_generation=2)
    assert by_steps.algebra(world_size=4).generation_batch_size == 64  # 8 * 4 * 2
    by_total = GRPOConfig(generation_batch_size=64)
    assert by_total.algebra(world_size=4).steps_per_generation == 2  # 64 / (8 * 4)


def test_evaluation_is_checked_only_when_asked():
    args = GRPOConfig(num_generations=6, per_device_train_batch_size=6)  # 8 evaluation completions, groups of 6
    (found,) = args.algebra().check_eval()
    assert found.code == "batch-groups"
    assert "num_generations_eval: 4 or 8; per_device_eval_batch_size: 6 or 12" in found.fix


def test_evaluation_has_its_own_group():
    a = GRPOConfig(num_generations_eval=2).algebra()
    assert not [*a.check_eval()]
    assert (a.eval_batch_size, a.prompts_per_eval_batch) == (8, 4)


def test_nearest_looks_both_ways():
    assert nearest(5, lambda n: n % 4 == 0) == [4, 8]
    assert nearest(3, lambda n: n % 4 == 0) == [4]
    assert nearest(5, lambda n: False) == []


def games(**changes):
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 4}
    sizes |= {"num_iterations": 1, "num_generations": 8, "rollouts_per_game": 2}
    return BatchAlgebra(**{**sizes, **changes})


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_no_game_is_cut_between_processes(processes):
    """8 rollouts of two-player games on 1, 2 and 4 processes: all of them, in order, an even number on each."""
    algebra = games(per_device_train_batch_size=8 // processes, steps_per_generation=1, world_size=processes)
    assert [*algebra.check()] == []
    shares = [rank_share([7], 8, algebra, rank) for rank in range(processes)]
    assert [slot for share in shares for slot in share] == [(7, sample) for sample in range(8)]
    assert all(len(share) % 2 == 0 for share in shares)


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"num_generations": 6, "rollouts_per_game": 4, "per_device_train_batch_size": 6}, ("6", "4", "8")),
        (  # 12 rollouts over 4 processes
            {"per_device_train_batch_size": 3, "steps_per_generation": 1, "num_generations": 6, "world_size": 4},
            ("12 rollouts", "4 processes", "2 rollouts", "1 or 2 or 3"),
        ),
    ],
)
def test_a_game_that_would_be_cut_is_refused_with_numbers(changes, values):
    (found,) = games(**changes).check()
    assert found.code == "game-cut"
    assert all(value in found.sentence for value in values)


def test_a_game_of_an_evaluation_is_not_cut_either():
    assert [*games(num_generations_eval=3).check()] == []
    (found,) = games(num_generations_eval=3, per_device_eval_batch_size=9).check_eval()
    assert found.code == "game-cut"
    assert "num_generations_eval=3" in found.sentence and "2 or 4" in found.sentence
