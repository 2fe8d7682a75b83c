"""Claims: the statistic and its verdicts, the protocols, the records, and the page that is rendered from them."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.claims import losses, page, recipes, simulation
from benchmarks.claims.beds import DistillationBed, StudyBed, TinyBed, WeightsBed, history_logs
from benchmarks.claims.claim import (
    Best,
    Claim,
    Condition,
    Count,
    Enumerated,
    Part,
    Shares,
    answers,
    arms_of,
    verdict_of,
)
from benchmarks.claims.engines import RoundedEngine
from benchmarks.claims.exact import Exact
from benchmarks.claims.games import KuhnBed
from benchmarks.claims.measures import (
    Arrival,
    AtEqualScore,
    EntropyLaw,
    Fall,
    Growth,
    HardestThird,
    Logged,
    PassAt,
    Reach,
    Score,
    at_rewards,
    running,
)
from benchmarks.claims.records import ClaimRecords
from benchmarks.claims.statistic import (
    FAILS,
    HOLDS,
    OPEN,
    Interval,
    crossed,
    fisher,
    median,
    ratio_of_means,
    seeds_to_decide,
    student_t,
    verdict,
    weakest,
)
from benchmarks.claims.table import CLAIMS, NOT_TESTED
from benchmarks.claims.table import claim as claim_of

from benchmarks import letters, process_supervision
from covey import GRPOConfig
from covey.algorithms import ADVANTAGES, LOSS_TYPES
from covey.config.choosing import SAMPLER_FORMS, SAMPLERS
from covey.core.engine import WeightUpdate
from covey_tools.study.variants import settings_of
from tests.algorithms.test_algorithms import BUILT_IN

ROOT = Path(__file__).parents[2]


# ---- the statistic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.706), (3, 3.182), (10, 2.228), (1e6, 1.960)])
def test_quantiles_of_students_t_are_those_of_the_tables(freedom, value):
    assert student_t(0.95, freedom) == pytest.approx(value, abs=1e-3)


def test_one_number_a_seed_gives_students_t():
    # mean 2.5, deviation of 1, 2, 3, 4 is 1.291, half width 3.182 · 1.291 / 2 = 2.054
    found = crossed(np.array([[1.0], [2.0], [3.0], [4.0]]))
    assert (found.mean, found.low, found.high) == pytest.approx((2.5, 0.446, 4.554), abs=1e-3)


def test_prompts_that_all_seeds_find_alike_widen_the_interval():
    """Differences of 0 and 2 on two prompts, at each of four seeds: another choice of prompts would change the mean."""
    found = crossed(np.array([[0.0, 2.0]] * 4))
    # M_prompt = 4 · 2 = 8, M_seed = M_rest = 0: V = 8 / 8 = 1, with 1 degree of freedom: 12.706
    assert (found.mean, found.half) == pytest.approx((1.0, 12.706), abs=1e-3)


def test_an_interval_over_one_seed_is_refused():
    with pytest.raises(ValueError, match="2 seeds"):
        crossed(np.zeros((1, 5)))


def test_medians_have_an_interval_only_from_enough_seeds():
    assert median([3.0, 1.0, 2.0, 4.0]) == Interval(2.5, -math.inf, math.inf)  # the range covers 87.5%
    assert median([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == Interval(3.5, 1.0, 6.0)  # 96.9%
    assert median([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.975).low == -math.inf


def test_a_ratio_of_equal_pairs_is_one():
    found = ratio_of_means(np.array([2.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0]))
    assert (found.mean, found.low, found.high) == pytest.approx((math.log(2),) * 3)


@pytest.mark.parametrize(
    ("kind", "low", "high", "word"),
    [
        ("superiority", 0.01, 0.2, HOLDS),
        ("superiority", -0.01, 0.04, FAILS),
        ("superiority", -0.01, 0.06, OPEN),
        ("superiority", -0.3, -0.1, FAILS),
        ("non-inferiority", -0.04, 0.1, HOLDS),
        ("non-inferiority", -0.2, -0.01, FAILS),
        ("non-inferiority", -0.08, -0.01, OPEN),  # mean -.045 is above -.05
        ("equivalence", -0.04, 0.04, HOLDS),
        ("equivalence", 0.01, 0.2, FAILS),
        ("equivalence", -0.01, 0.2, OPEN),
        ("difference", -0.3, -0.1, HOLDS),
        ("difference", -0.04, 0.04, FAILS),
        ("difference", -0.04, 0.2, OPEN),
    ],
)
def test_verdicts_follow_from_the_interval(kind, low, high, word):
    assert verdict(kind, Interval((low + high) / 2, low, high), 0.05) == word


def test_the_weakest_part_decides():
    assert weakest([HOLDS, HOLDS]) == HOLDS
    assert weakest([HOLDS, OPEN]) == OPEN
    assert weakest([OPEN, FAILS, HOLDS]) == FAILS


@pytest.mark.slow
def test_seeds_that_would_decide_are_more_than_there_are():
    assert seeds_to_decide("superiority", Interval(0.1, -0.02, 0.22), 0.05, 4) == 5
    assert seeds_to_decide("superiority", Interval(0.049, -0.3, 0.4), 0.05, 4) == 80
    assert seeds_to_decide("superiority", Interval(0.025, -9.0, 9.05), 0.05, 4) is None


def test_intervals_cover_as_often_as_they_say():
    """All sizes and spreads, in 4,000 repetitions each: `python -m benchmarks.claims.simulation`."""
    found = json.loads(simulation.RESULTS.read_text())
    assert found["repetitions"] >= 4000
    assert min(found["coverage"].values()) >= 0.93
    assert max(found["coverage"].values()) <= 0.97
    assert max(found["false"].values()) <= 0.06
    assert max(found["wider"].values()) > 0.99  # the rule that was given up


def test_a_simulation_is_repeated_from_its_seed():
    random = np.random.default_rng(0)
    drawn = simulation.tables(random, 2000, 4, 32, simulation.SPREADS["seed"])
    assert (abs(drawn.mean((1, 2))) <= simulation.half_widths(drawn)).mean() == pytest.approx(0.95, abs=0.015)


# ---- measures --------------------------------------------------------------------------------------------------------


def study_run(scores, **logs):
    """A run with the mean scores of two prompts at steps 2, 4, ..., and metrics at steps 1, 2, ..."""
    evaluations = [[2 * (n + 1), [score, score]] for n, score in enumerate(scores)]
    return {"evaluations": evaluations, "logs": {k: [[n + 1, x] for n, x in enumerate(v)] for k, v in logs.items()}}


def test_scores_are_the_last_ones_or_the_mean_of_all():
    run, other = study_run([0.2, 0.6]), study_run([0.1, 0.1])
    assert Score()(run, other, []) == pytest.approx([0.5, 0.5])
    assert Score("auc")(run, other, []) == pytest.approx([0.3, 0.3])


def test_pass_at_k_counts_completions():
    run = {"evaluations": [[8, [0.5, 0.0]]]}  # 2 of 4 are right: a pair is without one in 1 of 6 cases
    assert PassAt(2, 4)(run, None, []) == pytest.approx([5 / 6, 0.0])
    assert PassAt(1, 4)(run, None, []) == pytest.approx([0.5, 0.0])


def test_arrival_is_a_running_mean_at_a_share_of_the_pilots_score():
    pilot = study_run([0.0, 1.0])  # threshold .8
    fast, never = study_run([0.5, 0.9, 0.9, 0.9]), study_run([0.0, 0.1, 0.2, 0.3])
    # means of two: .7, .9 at step 6; never: 8 + 1
    assert Arrival()(never, fast, [pilot]) == pytest.approx([math.log(9 / 6)])


def test_metrics_are_compared_at_equal_reward():
    slow = study_run([], reward=[0.0, 0.0, 0.0, 0.3], entropy=[2.0, 2.0, 2.0, 2.0])
    fast = study_run([], reward=[0.0, 0.3, 0.9, 0.9], entropy=[2.0, 1.0, 0.0, 0.0])
    # running means: slow reaches .1; fast has 0, .15: two thirds of the way, where its entropy goes from 2 to 1.5
    assert AtEqualScore("entropy")(slow, fast, []) == pytest.approx([2 - (2 - 0.5 * 2 / 3)])


def test_metrics_of_several_updates_are_compared_at_the_first_of_each_rollout_batch():
    run = study_run([], entropy=[2.0, 9.0, 1.0, 9.0])
    run["logs"]["reward"] = [[1, 0.0], [3, 0.5]]
    assert at_rewards(run, "entropy") == [2.0, 1.0]
    same = study_run([], reward=[0.0, 0.5], entropy=[2.0, 1.0])
    assert AtEqualScore("entropy")(run, same, []) == [0.0]
    assert EntropyLaw()(run, None, []) == EntropyLaw()(same, None, [])


def test_logged_metrics_are_means_of_the_last_quarter():
    assert Logged("entropy")(study_run([], entropy=[9, 9, 9, 9, 9, 9, 1, 3]), None, []) == [2.0]


def test_log_odds_of_shares_are_bounded():
    assert Logged("cut", logit=True)(study_run([], cut=[0.5]), None, []) == [0.0]
    assert Logged("cut", logit=True)(study_run([], cut=[0.0]), None, []) == pytest.approx([math.log(0.005 / 0.995)])


def test_the_hardest_third_is_chosen_by_the_pilot():
    scores = ([0.9, 0.8, 0.7, 0.1, 0.2, 0.9], [0.5] * 6)
    run, other = ({"evaluations": [[16, one]]} for one in scores)
    pilot = {"evaluations": [[1, [0.5, 0.5, 0.5, 0.0, 0.1, 0.5]]]}
    assert HardestThird()(run, other, [pilot]) == pytest.approx([-0.4, -0.3])  # prompts 3 and 4


def tiny_run(**curves):
    return {"curves": {name.replace("_", " "): values for name, values in curves.items()}}


def test_growth_ends_where_either_run_has_learnt_the_task():
    long = tiny_run(wrong_length=[1.0, 2.0, 3.0, 4.0, 99.0], accuracy=[0.5, 0.5, 0.5, 0.5, 0.5])
    learnt = tiny_run(wrong_length=[1.0, 1.0, 1.0, 1.0, 1.0], accuracy=[0.5, 0.5, 0.5, 0.95, 1.0])
    assert Growth("wrong length", window=1, while_in=("accuracy", 0.9))(long, learnt, []) == [2.0]


def test_reach_counts_steps_to_a_share_of_the_pilots_end():
    pilot, slow, fast = (tiny_run(accuracy=curve) for curve in ([0.0, 1.0], [0.1] * 4, [0.5, 0.8, 0.9, 0.9]))
    # threshold .8: at step 2, and never: 4 + 1
    assert Reach("accuracy", window=1)(slow, fast, [pilot]) == pytest.approx([math.log(5 / 2)])
    assert Reach("accuracy", window=1, price=2.0)(slow, fast, [pilot]) == pytest.approx([math.log(5 / 4)])


def test_a_fall_is_from_the_best_running_mean():
    rising, fallen = tiny_run(accuracy=[0.1, 0.5, 0.9]), tiny_run(accuracy=[0.1, 0.9, 0.5])
    assert Fall("accuracy", 0.1, 1)(rising, None, [])[0] < 0 < Fall("accuracy", 0.1, 1)(fallen, None, [])[0]


def test_the_law_of_entropy_beats_lines_where_it_is_true():
    entropy = np.linspace(3, 0.2, 30) ** 2 / 3
    exact = study_run([], entropy=list(entropy), reward=[1 - 0.02 * math.exp(one) for one in entropy])
    line = study_run([], entropy=list(entropy), reward=[1 - 0.2 * one for one in entropy])
    assert EntropyLaw()(exact, None, [])[0] > 0 > EntropyLaw()(line, None, [])[0]
    assert running([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_logs_keep_what_is_read_and_finite():
    assert history_logs([{"step": 1, "reward": 0.5, "loss": 1.0}, {"step": 2, "reward": math.nan}]) == {
        "reward": [[1, 0.5]]
    }


# ---- Kuhn poker ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_self_play_is_judged_after_each_step():
    found = KuhnBed(steps=2).train({"compare": "role"}, seed=0)
    assert [len(curve) for curve in found["curves"].values()] == [2, 2, 2]
    assert all(0 <= one <= 3 for one in found["curves"]["NashConv"])


# ---- claims and their verdicts ---------------------------------------------------------------------------------------


def made(**changes):
    part = Part("H1", "a is better", "superiority", 0.05, Score(), "a", "b")
    arms = {"a": {}, "b": {"learning_rate": 1e-5}}
    given = {"bed": TinyBed(), "arms": arms, "parts": (part,), "seeds": 2, **changes}
    return Claim(0, "a statement", "a paper", other_reading="chance", minutes=1, **given)


def runs_of(differences):
    """Runs of arms a and b whose scores on two prompts differ so much at each seed."""
    found = {}
    for seed, difference in enumerate(differences):
        for arm, score in (("a", 0.5 + difference), ("b", 0.5)):
            found[arm, seed] = {"evaluations": [[16, [score - 0.001 * seed, score]]]}
    return found


def test_a_claim_is_decided_once_all_its_seeds_have_run():
    claim = made()
    assert answers(claim, runs_of([0.3]), {})[0].verdict is None
    (one,) = answers(claim, runs_of([0.3, 0.3]), {})
    assert (one.verdict, one.seeds) == (HOLDS, 2)
    assert verdict_of(claim, [one], []) == HOLDS
    (against,) = answers(claim, runs_of([-0.3, -0.3]), {})
    assert verdict_of(claim, [against], []) == FAILS
    for each in (one, against):
        assert verdict_of(claim, [each], ["a precondition: 0"]) == OPEN


def test_an_undecided_claim_looks_once_more_and_a_decided_one_does_not():
    unclear, same = [0.3, -0.1], [0.1] * 4
    assert answers(made(), runs_of(unclear), {})[0].verdict == OPEN
    assert answers(made(), runs_of([*unclear, 0.1, 0.1]), {})[0].seeds == 4
    (decided,) = answers(made(), runs_of([*same[:2], -9.0, -9.0]), {})
    assert (decided.verdict, decided.seeds) == (HOLDS, 2)


def test_the_best_arm_is_chosen_on_seeds_that_are_not_compared():
    scores = {("x", 0): 0.9, ("y", 0): 0.1, ("x", 1): 0.4, ("y", 1): 0.8, ("x", 2): 0.4, ("y", 2): 0.8}
    runs = {key: {"evaluations": [[16, [score]]]} for key, score in scores.items()}
    runs |= {("b", seed): {"evaluations": [[16, [0.1]]]} for seed in range(3)}
    part = Part("H1", "the best one is better", "superiority", 0.05, Score(), Best(("x", "y"), (0,)), "b")
    claim = made(parts=(part,), arms={"x": {}, "y": {}, "b": {}}, seeds=3, extends=False)
    (one,) = answers(claim, runs, {})
    assert one.interval is not None and one.interval.mean == pytest.approx(0.3)  # x at seeds 1 and 2
    assert "best: x" in one.sentence


def test_seeds_are_counted_against_a_bound():
    part = Count("H1", "at least 2 of 3", Score(), "a", at_least=2, above=0.6)
    claim = made(parts=(part,), seeds=3)
    assert answers(claim, runs_of([0.3, 0.3, 0.0]), {})[0].verdict == HOLDS
    assert answers(claim, runs_of([0.3, 0.0, 0.0]), {})[0].verdict == FAILS


def test_shares_of_seeds_are_compared_by_fishers_test():
    # all four of one arm and none of the other: 1 of C(8, 4) = 70 ways
    assert fisher(4, 0, 4) == pytest.approx(1 / 70)
    part = Shares("H1", "a is above .6 more often", Score(), "a", "b", above=0.6)
    assert answers(made(parts=(part,), seeds=4, extends=False), runs_of([0.3] * 4), {})[0].verdict == HOLDS
    assert answers(made(parts=(part,), seeds=4), runs_of([0.3] * 4), {})[0].verdict == OPEN  # two looks, at 1.25% each
    assert answers(made(parts=(part,), seeds=4), runs_of([0.0] * 4), {})[0].verdict == FAILS  # neither ever is


def test_pilots_that_no_part_compares_run_once():
    claim = made(arms={"a": {}, "b": {}, "start": {}}, pilots=("start",), seeds=1)
    assert claim.planned(1) == [("start", 99), ("a", 0), ("b", 0)]


def test_preconditions_are_means_over_an_arms_seeds():
    claim = made(conditions=(Condition("b scores at least .6", Score(), "b", 0.6),))
    assert page.failed_conditions(claim, runs_of([0.3, 0.3])) == ["b scores at least .6: 0.5"]
    assert page.failed_conditions(claim, {}) == []


def test_enumerations_decide_by_their_records():
    claim = made(parts=(Enumerated("H1", "exactly", lambda: Exact(True, {}, "")),), bed=None, arms=None)
    (one,) = answers(claim, {}, {"H1": Exact(True, {"x": 1.0}, "x is 1")})
    assert (one.verdict, one.sentence) == (HOLDS, "x is 1")


def test_records_of_another_protocol_are_not_used(tmp_path):
    claim, records = made(), ClaimRecords(tmp_path / "claims.jsonl")
    for (arm, seed), result in runs_of([0.3, 0.3]).items():
        records.add_run(claim, arm, seed, result, seconds=1.0)
    changed = dataclasses.replace(claim, seeds=3)
    assert len(records.runs(claim)) == 4 and records.superseded(claim) == 0
    assert records.runs(changed) == {} and records.superseded(changed) == 4
    assert dataclasses.replace(claim, other_reading="another word").digest == claim.digest


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.fixture
def registered():
    """Losses and advantages of claims, for one test."""
    losses.register()
    yield
    for name in losses.LOSSES_OF_CLAIMS:
        LOSS_TYPES.pop(name)
    for name in losses.ADVANTAGES_OF_CLAIMS:
        ADVANTAGES.pop(name)


WITH_ARMS = [claim for claim in CLAIMS if claim.arms]


@pytest.mark.filterwarnings("ignore")  # arms without a correction are warned of, and a bed's settings fit most arms
@pytest.mark.parametrize("claim", WITH_ARMS, ids=lambda claim: str(claim.number))
def test_every_arm_is_a_valid_config(claim, registered, tmp_path):
    for changes in claim.arms.values():
        if isinstance(claim.bed, StudyBed):
            settings_of(claim.bed.config({}), changes, tmp_path)
        elif isinstance(claim.bed, TinyBed | WeightsBed | KuhnBed):
            GRPOConfig(output_dir=str(tmp_path), **claim.bed.config(changes))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: str(claim.number))
def test_parts_name_arms_that_there_are(claim):
    arms = set(claim.arms or ())
    named = {one for part in claim.parts if not isinstance(part, Enumerated) for one in arms_of(part)}
    named |= {one.arm for one in claim.conditions} | set(claim.pilots)
    assert named <= arms
    assert claim.parts or claim.missing
    assert bool(arms) == (claim.bed is not None)
    assert len({part.name for part in (*claim.parts, *claim.notes)}) == len(claim.parts) + len(claim.notes)


def test_every_method_with_a_paper_has_a_claim_or_a_reason():
    """All losses, all advantages and all samplers of the library."""
    own = [name for name, function in ADVANTAGES.items() if function.__module__ == "covey.algorithms.published"]
    wanted = {f"loss_type={name}" for name in BUILT_IN} | {f"advantages={name}" for name in own}
    wanted |= {f"prompt_sampler={name}" for name in (*SAMPLERS, *SAMPLER_FORMS)} | {"dynamic_sample"}
    claimed = {method for claim in CLAIMS for method in claim.methods}
    assert sorted(wanted - claimed - set(NOT_TESTED)) == []
    assert sorted(claimed & set(NOT_TESTED)) == []
    assert sorted(set(NOT_TESTED) - wanted) == []


# ---- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_is_what_the_records_say():
    """Write it with `python -m benchmarks.claims --write`."""
    assert (ROOT / "docs" / "claims.md").read_text() == page.render(ClaimRecords())


@pytest.mark.slow
def test_recipes_are_what_the_records_say():
    assert (ROOT / "docs" / "recipes.md").read_text() == recipes.render(ClaimRecords())


def test_a_verdict_picks_the_advice(tmp_path, monkeypatch):
    recipe = recipes.Recipe("situation", 4, "the usual", "if it holds", "if it fails", best=("G ",))
    records, chosen = ClaimRecords(tmp_path / "claims.jsonl"), {}
    for word in (HOLDS, FAILS, OPEN, None):
        monkeypatch.setattr(recipes.page, "standing", lambda *_, word=word: page.Standing(word, (), ()))
        chosen[word] = recipes.row(recipe, records).split(" | ")[2]
    assert chosen == {HOLDS: "if it holds", FAILS: "if it fails", OPEN: "the default (undecided)", None: "the default"}


def test_the_best_arm_is_shown_once_it_has_four_seeds(tmp_path):
    claim, records = claim_of(4), ClaimRecords(tmp_path / "claims.jsonl")
    for arm, score in (("G 2", 0.5), ("G 8", 0.25)):
        for seed in range(4):
            assert recipes.best(claim, "G ", records) in ("", "2 (score 0.50)")
            records.add_run(claim, arm, seed, {"evaluations": [[16, [0.0, 2 * score]]]}, seconds=1.0)
    assert recipes.best(claim, "G ", records) == "2 (score 0.50)"


@pytest.mark.slow
def test_verdicts_in_the_docs_of_methods_are_those_of_the_page():
    """Every claim about a setting has a line on the page of that setting; claim 17 is about no setting of its own."""
    linked, records = set(), ClaimRecords()
    for path in (ROOT / "docs").glob("*.md"):
        text = path.read_text()
        assert page.with_verdicts(text, records) == text, path.name
        linked |= {int(number) for _, number, _ in page.VERDICT_ELSEWHERE.findall(text)}
    assert {claim.number for claim in CLAIMS if claim.methods and claim.number != 17} - linked == set()


def test_pictures_of_the_page_are_there():
    text = (ROOT / "docs" / "claims.md").read_text()
    for path in re.findall(r"\]\((claims/[^)]+\.png)\)", text):
        assert (ROOT / "docs" / path).is_file()


@pytest.mark.slow
def test_enumerations_on_record_are_those_of_now():
    records = ClaimRecords()
    for claim in CLAIMS:
        found = records.enumerated(claim)
        for part in (*claim.parts, *claim.notes):
            if isinstance(part, Enumerated):
                now = part.check()
                assert now.holds == found[part.name].holds
                assert now.figures == pytest.approx(found[part.name].figures, rel=1e-6, abs=1e-12)


def test_a_picture_has_a_line_for_each_arm(tmp_path):
    claim, records = made(), ClaimRecords(tmp_path / "claims.jsonl")
    for (arm, seed), result in runs_of([0.3, 0.3]).items():
        records.add_run(claim, arm, seed, result, seconds=1.0)
    assert {arm: len(curves) for arm, curves in page.picture_data(claim, records).items()} == {"a": 2, "b": 2}
    page.draw(claim, records, tmp_path / "claim.png")
    assert (tmp_path / "claim.png").stat().st_size > 1000


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tiny_run_has_a_curve_for_each_step(registered):
    found = TinyBed(reward="first", tokens=4, steps=2).train({"loss_type": "grpo"}, seed=0)
    assert [len(found["curves"][name]) for name in ("accuracy", "wrong length")] == [2, 2]
    assert [step for step, _ in found["logs"]["entropy"]] == [1, 2]


@pytest.mark.slow
def test_a_teacher_is_trained_once_and_teaches(registered, tmp_path):
    bed = DistillationBed("share", 4, 2, teacher_steps=1)
    arms = {"teacher": {"teacher": "trained", "teacher_loss": "divergence", "advantages": "no_rewards"}}
    found = bed.run(arms, [("teacher", 0)], str(tmp_path / "run"))
    assert len(found["teacher", 0]["curves"]["accuracy"]) == 2
    assert (tmp_path / "teacher" / "config.json").is_file()


@pytest.mark.slow
def test_a_rounded_engine_differs_from_the_trainer_and_a_copy_does_not(registered):
    differences = []
    for bits in (None, 4):
        bed = TinyBed("share", 4, 1, copies=True, bits=bits, settings={"engine_parity": "off"})
        logs = bed.train({}, seed=0)["logs"]
        differences.append(logs["engine difference"][0][1])
    assert differences[0] < 1e-5 < 1e-3 < differences[1]


@pytest.mark.parametrize("mixture", [False, True])
def test_a_rounded_copy_follows_the_model(mixture):
    model = losses.tiny_mixture() if mixture else letters.tiny_llama(process_supervision.VOCABULARY)
    exact, coarse = (
        RoundedEngine(model, letters.tokenizer(process_supervision.VOCABULARY), bits) for bits in (None, 8)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1)
    for engine in (exact, coarse):
        engine.load_weights(WeightUpdate(3, (), lambda: iter(())))
        assert engine.version == 3
    for weight, same, near in zip(*(one.parameters() for one in (model, exact.model, coarse.model)), strict=True):
        assert torch.equal(weight, same)
        torch.testing.assert_close(near, weight, atol=float(weight.abs().max()) / 127, rtol=0)
        assert torch.equal(near, weight) == (weight.dim() == 1)
