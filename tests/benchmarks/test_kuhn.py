"""Kuhn poker: values that are known exactly, games against enumeration, and self-play that becomes less exploitable."""

from fractions import Fraction

import pytest
import torch
from benchmarks.claims.games import KuhnBed
from benchmarks.claims.records import ClaimRecords
from benchmarks.claims.table import claim
from benchmarks.kuhn import CLAIM, COMPARED, main, of_claim, play, plot, table, train
from benchmarks.poker import DEALS, VALUE, against_even, best_replies, nash_conv, value_of, winnings

HALF = [Fraction(1, 2)] * 12


def equilibrium(alpha):
    """Kuhn's family: the first seat bets a jack with alpha and a king with three times that."""
    first = [alpha, 0, 3 * alpha, 0, alpha + Fraction(1, 3), 1]
    return [Fraction(one) for one in [*first, Fraction(1, 3), 0, 1, 0, Fraction(1, 3), 1]]


@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(1, 6), Fraction(1, 3)])
def test_equilibria_have_their_value_and_no_better_reply(alpha):
    policy = equilibrium(alpha)
    assert value_of(policy) == Fraction(-1, 18) and pytest.approx(VALUE) == -1 / 18
    assert best_replies(policy) == (Fraction(-1, 18), Fraction(-1, 18))
    assert nash_conv(policy) == 0


def test_the_uniform_policy_gives_away_eleven_twelfths():
    assert value_of(HALF) == Fraction(1, 8)
    assert best_replies(HALF) == (Fraction(1, 2), Fraction(-5, 12))
    assert nash_conv(HALF) == Fraction(11, 12)


def test_games_are_those_that_the_value_is_of():
    """Of every pure policy of a few: what is played pays what the value says, without any chance but the deal."""
    for number in (0, 5, 511, 1365, 2730, 4095):
        policy = [(number >> place) & 1 for place in range(12)]
        decided, chosen, payoffs = play(torch.tensor(policy).double(), 1, torch.Generator().manual_seed(0))
        assert payoffs.mean().item() == pytest.approx(float(value_of(policy)))
        assert len(payoffs) == len(DEALS) and ((decided[:, 2] >= 0) == (chosen[:, 0] == 0) * (chosen[:, 1] == 1)).all()


def test_kuhn_poker_pays_as_its_rules_say():
    king_first = (2, 0)
    assert winnings(king_first, opens=False, calls=False, replies=False) == 1  # both pass: the higher card wins
    assert winnings(king_first, opens=False, calls=False, replies=True) == -1  # folds
    assert winnings(king_first, opens=True, calls=False, replies=True) == 2


def test_tossing_coins_wins_nothing_against_tossing_coins():
    assert against_even(HALF) == 0


@pytest.mark.slow
def test_a_tiny_model_is_judged_after_each_step():
    found = KuhnBed(steps=2).train({"compare": "role"}, seed=0)["curves"]
    assert len(found["NashConv"]) == 2 and all(0 <= one <= 3 for one in found["NashConv"])
    assert all(-2 <= one <= 2 for one in found["value for the first seat"])


def test_curves_of_the_tiny_model_are_those_of_its_claim(tmp_path):
    records = ClaimRecords(tmp_path / "claims.jsonl")
    for seed in (1, 0, 8):  # the claim has eight seeds, and more if these do not decide it
        curves = {
            "NashConv": [1.0, 0.5 + seed],
            "value for the first seat": [0.1, -0.1 * seed],
            "against a coin": [0, 0],
        }
        records.add_run(claim(CLAIM), "role", seed, {"curves": curves}, seconds=1.0)
    found = of_claim(records, seeds=8)
    assert found == {"role": [{"curve": [1.0, 0.5], "value": 0.0}, {"curve": [1.0, 1.5], "value": -0.1}]}
    plot({"tiny": (2, found)}, tmp_path / "kuhn.png")
    assert (tmp_path / "kuhn.png").stat().st_size > 1000


def test_a_curve_of_one_point_is_drawn(tmp_path):
    plot({"tiny": (1, {"role": [{"curve": [0.9], "value": 0.0}]})}, tmp_path / "kuhn.png")
    assert (tmp_path / "kuhn.png").stat().st_size > 1000


@pytest.mark.parametrize("given", ["--player tiny --steps 9", "--player tiny --seeds 2", "--steps 0", "--seeds 0"])
def test_options_that_nothing_would_read_are_refused(monkeypatch, capsys, given):
    monkeypatch.setattr("sys.argv", ["kuhn", *given.split()])
    with pytest.raises(SystemExit):
        main()
    assert "--steps and --seeds" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("compare", COMPARED)
def test_self_play_becomes_less_exploitable(compare):
    """150 updates instead of the benchmark's: from 11/12 to less than half of that, whatever is compared."""
    found = train(compare, seed=0, steps=150)
    assert found["curve"][0] == pytest.approx(11 / 12)
    assert found["curve"][-1] < 0.45
    assert found["value"] == pytest.approx(VALUE, abs=0.1)
    assert found == train(compare, seed=0, steps=150)  # by its seed alone
    assert compare in table({compare: [found]})
