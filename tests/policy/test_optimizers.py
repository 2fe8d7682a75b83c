"""Muon with AdamW as one optimizer, and AdamW that rounds bfloat16 by chance."""

import copy
import math

import peft
import pytest
import torch
from torch.optim import AdamW

from covey.policy.optimizers import Muon, StochasticAdamW, drawn_noise, hidden_matrices, mixed, rounded
from tests.support import tiny

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")


def names_of(model):
    hidden = {id(weight) for weight in hidden_matrices(model)}
    return {name for name, weight in model.named_parameters() if id(weight) in hidden}


def test_hidden_matrices_are_those_of_attention_and_mlp():
    assert {name.split(".")[-2] for name in names_of(tiny.model())} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert not {name for name in names_of(tiny.model()) if "embed" in name or "lm_head" in name or "norm" in name}


def test_frozen_matrices_are_left_out():
    model = tiny.model()
    model.model.layers[0].requires_grad_(False)
    assert not {name for name in names_of(model) if ".layers.0." in name} and names_of(model)


def test_both_matrices_of_an_adapter_are_hidden_but_not_those_of_the_embedding():
    setting = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens", "lm_head"], task_type="CAUSAL_LM")
    found = names_of(peft.get_peft_model(tiny.model(), setting))
    layers = range(tiny.config().num_hidden_layers)
    assert found == {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.default.weight"
        for layer in layers
        for half in "AB"
    }


def small_model():
    """A matrix of a hidden layer, an embedding with a head, and a vector, with gradients."""
    torch.manual_seed(0)
    weights = {"matrix": torch.randn(6, 4), "embedding": torch.randn(5, 4), "vector": torch.randn(4)}
    made = {name: torch.nn.Parameter(value) for name, value in weights.items()}
    for value in made.values():
        value.grad = torch.randn_like(value)
    return made


def muon_of(made, **settings):
    groups = [
        {"params": [made["matrix"], made["embedding"]], "weight_decay": 0.1},
        {"params": [made["vector"]], "weight_decay": 0.0},
    ]
    return Muon(groups, hidden=[id(made["matrix"])], lr=1e-2, **settings)


def test_matrices_move_as_by_torchs_muon_and_all_else_as_by_adamw():
    ours, theirs = small_model(), small_model()
    optimizer = muon_of(ours, betas=(0.8, 0.9), momentum=0.9)
    muon = torch.optim.Muon([theirs["matrix"]], lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    decayed = AdamW([theirs["embedding"]], lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
    others = AdamW([theirs["vector"]], lr=1e-2, betas=(0.8, 0.9), weight_decay=0.0)
    for _ in range(3):
        optimizer.step()
        for one in (muon, decayed, others):
            one.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_matrix_moves_as_far_as_by_adamw():
    """Root mean square of Muon's update: 0.2 sqrt(max(m, n)) / sqrt(max(m, n)) = 0.2 learning rates, roughly."""
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.zeros(64, 256))
    matrix.grad = torch.randn_like(matrix)
    Muon([matrix], hidden=[id(matrix)], lr=1.0).step()
    assert 0.12 < matrix.pow(2).mean().sqrt().item() < 0.28  # its iteration makes singular values of 0.7 to 1.2


@pytest.mark.parametrize("hidden", [True, False])
def test_one_of_the_two_parts_may_be_empty(hidden):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    optimizer = Muon([weight], hidden=[id(weight)] if hidden else [], lr=0.1)
    optimizer.step()
    assert (weight != 1).all() and ("momentum_buffer" in optimizer.state[weight]) == hidden


def test_groups_have_the_learning_rate_of_a_schedule():
    made = small_model()
    optimizer = muon_of(made)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = {name: value.detach().clone() for name, value in made.items()}
    optimizer.step()
    schedule.step()
    assert all(torch.equal(before[name], made[name]) for name in made)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0] * 3


def bf16_model():
    torch.manual_seed(0)
    half = torch.nn.Parameter(torch.randn(7, 5).to(torch.bfloat16))
    whole = torch.nn.Parameter(torch.randn(3))
    return {"half": half, "whole": whole}


def fresh_gradients(made, step):
    generator = torch.Generator().manual_seed(step)
    for value in made.values():
        value.grad = torch.randn(value.shape, generator=generator).to(value.dtype)


@pytest.mark.parametrize("kind", ["muon", "stochastic"])
def test_a_loaded_state_continues_bit_by_bit(kind):
    def make():
        made = small_model() if kind == "muon" else bf16_model()
        optimizer = muon_of(made) if kind == "muon" else StochasticAdamW([*made.values()], lr=1e-3, seed=7)
        return made, optimizer

    def train(made, optimizer, steps):
        for step in steps:
            fresh_gradients(made, step)
            optimizer.step()

    whole, optimizer = make()
    train(whole, optimizer, range(6))
    first, optimizer = make()
    train(first, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    second, optimizer = make()
    for name, value in second.items():
        value.data.copy_(first[name].data)
    optimizer.load_state_dict(saved)
    torch.rand(5)  # other numbers are drawn in between
    train(second, optimizer, range(3, 6))
    assert all(torch.equal(whole[name], second[name]) for name in whole)


# ---- rounding by chance ----------------------------------------------------------------------------------------------


EVERY = torch.arange(2**16, dtype=torch.int32)  # values of the noise


@pytest.mark.parametrize("value", [1 + 0.25 / 128, -(1 + 0.25 / 128), math.pi, -1e-30, 3e38, 1.0, 2**-130])
def test_numbers_are_rounded_to_their_neighbours_in_the_mean_to_themselves(value):
    number = torch.tensor(value)
    found = rounded(number.expand(2**16), EVERY).double()
    assert found.mean().item() == number.double().item()  # sums of 16 digits are exact
    low, high = found.min().item(), found.max().item()
    assert torch.tensor([low, high]).to(torch.bfloat16).double().tolist() == [low, high]
    assert low <= number.item() <= high and len(found.unique()) <= 2


def test_a_quarter_of_the_distance_goes_up_in_a_quarter():
    # bfloat16 has 128 numbers in [1, 2)
    found = rounded(torch.full((2**16,), 1 + 0.25 / 128), EVERY).float()
    assert found.unique(return_counts=True)[0].tolist() == [1.0, 1 + 1 / 128]
    assert found.unique(return_counts=True)[1].tolist() == [3 * 2**14, 2**14]


def test_noise_takes_every_value():
    noise = drawn_noise(torch.empty(2**20), seed=3)
    counts = torch.bincount(noise.long(), minlength=2**16)
    assert len(counts) == 2**16 and counts.float().mean() == 16 and counts.max() < 50
    assert torch.equal(noise, drawn_noise(torch.empty(2**20), seed=3))
    assert not torch.equal(noise, drawn_noise(torch.empty(2**20), seed=4))


def test_numbers_that_bfloat16_has_stay_and_so_does_what_is_not_finite():
    exact = torch.randn(1000).to(torch.bfloat16).float()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    assert torch.equal(rounded(exact, EVERY[-1000:]).float(), exact)
    found = rounded(special, EVERY[-5:]).float()
    assert found[:4].tolist() == special[:4].tolist() and found[4].isnan()


def test_updates_below_the_distance_of_numbers_add_up():
    """200 updates of 1/1000 of the distance to the next number move weights by a fifth of it in the mean."""
    step = 1 / 128
    for kind, moved in ((AdamW, 0.0), (StochasticAdamW, 0.2 * step)):
        weight = torch.nn.Parameter(torch.full((20_000,), 1.5, dtype=torch.bfloat16))
        optimizer = kind([weight], lr=step / 1000, weight_decay=0.0)
        for _ in range(200):
            weight.grad = torch.full_like(weight, -1.0)  # Adam's update is the learning rate
            optimizer.step()
        mean = (weight.detach().double() - 1.5).mean().item()
        assert mean == pytest.approx(moved, abs=0.02 * step)  # 7 standard deviations


def test_weights_in_float32_move_as_by_torchs_adamw():
    ours, theirs = small_model(), small_model()
    optimizer = StochasticAdamW([*ours.values()], lr=1e-2, weight_decay=0.1)
    adamw = AdamW([*theirs.values()], lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        optimizer.step()
        adamw.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_rounding_depends_on_seed_step_and_weight_alone():
    def after(seed):
        made = bf16_model()
        optimizer = StochasticAdamW([*made.values()], lr=1e-3, seed=seed)
        fresh_gradients(made, 0)
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), state)
        return made["half"].detach()

    assert torch.equal(after(0), after(0)) and not torch.equal(after(0), after(1))


def test_seeds_of_neighbours_differ_and_fit():
    seeds = {mixed(seed, step, place) for seed in range(4) for step in range(20) for place in range(20)}
    assert len(seeds) == 1600 and all(0 <= seed < 2**63 for seed in seeds)
    assert mixed(1, 2) != mixed(2, 1)


def test_moments_are_kept_in_float32():
    made = bf16_model()
    optimizer = StochasticAdamW([*made.values()], lr=1e-3)
    fresh_gradients(made, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    again = StochasticAdamW([*bf16_model().values()], lr=1e-3)
    again.load_state_dict(copy.deepcopy(saved))
    for one in (optimizer, again):
        assert {value.dtype for state in one.state.values() for value in state.values()} == {torch.float32}
