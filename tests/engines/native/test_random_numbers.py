"""Counter-based noise: uniform, without visible structure between seeds, steps and slots, and never moving."""

import torch

from covey.engines.native.sampling import _between_0_and_1, uniforms

FIRST = [[0.8833108082136427, 0.43152799704851], [0.6356976666959193, 0.9151738591662648]]


def table(seeds: int, steps: int, count: int) -> torch.Tensor:
    """[seeds, steps, count] numbers of consecutive seeds and steps, the hardest inputs for a hash."""
    seed, step = torch.meshgrid(torch.arange(seeds), torch.arange(steps), indexing="ij")
    return uniforms(seed.flatten(), step.flatten(), count).view(seeds, steps, count)


def test_numbers_lie_strictly_between_zero_and_one():
    numbers = table(50, 50, 50)
    assert numbers.min() > 0 and numbers.max() < 1
    assert numbers.unique().numel() == numbers.numel()


def test_extreme_hashes_give_neither_zero_nor_one():
    # A race takes the logarithm of them, and one minus them.
    lowest, highest = _between_0_and_1(torch.tensor([0, 2**52 - 1])).tolist()
    assert lowest == 2**-53 and highest == 1 - 2**-53


def test_numbers_never_change_between_versions():
    # Any change of the hash would change every sample of every recorded run.
    numbers = uniforms(torch.tensor([0, -1]), torch.tensor([0, 3]), 2)
    torch.testing.assert_close(numbers, torch.tensor(FIRST, dtype=torch.float64), rtol=0, atol=1e-15)


def test_numbers_are_uniform_over_every_axis():
    numbers = table(60, 60, 60)
    for whole in (numbers.flatten(), numbers[7], numbers[:, 7], numbers[:, :, 7]):
        counts = torch.histc(whole, 50, 0, 1)
        expected = whole.numel() / 50
        statistic = ((counts - expected) ** 2 / expected).sum().item()
        assert statistic < 49 + 4 * 98**0.5  # 49 degrees of freedom, four standard deviations


def test_neighbours_are_uncorrelated():
    numbers = table(64, 64, 64) - 0.5
    bound = 4 / numbers.numel() ** 0.5  # the correlation of independent numbers has standard deviation n^-1/2
    for dim in range(3):
        for lag in (1, 2, 8):
            n = numbers.shape[dim] - lag
            product = numbers.narrow(dim, 0, n) * numbers.narrow(dim, lag, n)
            assert abs(product.mean().item() * 12) < bound * 1.2


def test_pairs_of_neighbours_are_uniform():
    numbers = table(64, 64, 64)
    for a, b in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1]), (numbers[..., 1:], numbers[..., :-1])):
        cells = (a * 16).long() * 16 + (b * 16).long()
        counts = torch.bincount(cells.flatten(), minlength=256).double()
        expected = counts.sum() / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 4 * 510**0.5


def test_every_input_bit_moves_half_of_the_output_bits():
    seeds = torch.tensor([12345]).expand(63)
    flipped = seeds ^ (1 << torch.arange(63))
    zero = torch.zeros(63, dtype=torch.int64)
    for pair in (
        (uniforms(seeds, zero, 8), uniforms(flipped, zero, 8)),
        (uniforms(zero, seeds, 8), uniforms(zero, flipped, 8)),
    ):
        a, b = ((x * 2**52).long() for x in pair)
        changed = torch.stack([((a ^ b) >> bit) & 1 for bit in range(52)]).double().mean()
        assert abs(changed - 0.5) < 0.01


def test_negative_steps_give_other_numbers():
    seeds = torch.arange(100)
    forward, backward = uniforms(seeds, seeds, 4), uniforms(seeds, -1 - seeds, 4)
    assert not torch.isin(forward, backward).any()
