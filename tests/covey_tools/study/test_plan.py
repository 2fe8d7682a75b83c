"""Plans of studies: the variants that they name, and what is wrong with a plan in one sentence."""

import json
import re

import pytest
import yaml

from covey.cli.main import main
from covey_tools.study.plan import Halving, halving_of, variants_of
from tests.support import tiny
from tests.support.studies import study

RANGE = {"min": 0.1, "max": 0.2}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"variants": ["a"]}, r"variants=\['a'\] must be a mapping, such as \{small"),
        ({"variants": {"a": 3}}, "variants: a=3 must be a mapping of settings"),
        ({"variants": {"a": ["beta"]}}, r"a=\['beta'\] must be a mapping of settings"),
        ({"variants": {True: {}}}, "name of a variant is read as True: put it in quotes"),
        ({"variants": {None: {}}}, "name of a variant is read as None"),
        ({"variants": {"beta=1": {}}, "grid": {"beta": [1]}}, "two variants are called 'beta=1'"),
        ({"grid": {"beta": [1, 1]}}, "two variants are called 'beta=1'"),
        ({"grid": [1]}, r"grid=\[1\] must be a mapping"),
        ({"grid": {"beta": []}}, "grid: beta=.. has no values"),
        ({"random": [1]}, r"random=\[1\] must be a mapping"),
        ({"random": {"cuont": 3, "beta": [1]}}, "cuont: 3 is no range.*Did you mean 'count'"),
        ({"random": {"count": 3}}, "names no setting to draw"),
        ({"random": {"count": 2.5, "beta": [1]}}, "count=2.5, seed=0: both are whole numbers"),
        ({"random": {"count": 0, "beta": [1]}}, "count 1 or more"),
        ({"random": {"seed": [1], "beta": [1]}}, r"seed=\[1\]: both are whole"),
        ({"random": {"beta": []}}, "is no range"),
        ({"random": {"beta": {"min": 0.2, "max": 0.1}}}, "is no range"),
        ({"random": {"beta": {**RANGE, "logg": True}}}, "there is no 'logg'; .* Did you mean 'log'"),
        ({"random": {"beta": {**RANGE, "log": "yes"}}}, "is no range"),
        ({"random": {"count": 3, "beta": [1, 2]}}, "only 2 further variants were found in 300 draws"),
        ({"variants": {"beta=1": {}}, "random": {"count": 2, "beta": [1, 2]}}, "only 1 further variants"),
    ],
)
def test_what_is_wrong_with_a_plan_is_named(plan, message):
    with pytest.raises(ValueError, match=message):
        variants_of(plan)


def test_random_draws_are_as_many_as_asked_for():
    assert len(variants_of({"random": {"count": 6, "beta": [1, 2, 3], "peft.r": [2, 4]}})) == 6


def test_halving_is_a_share_or_its_settings():
    assert halving_of(0.25) == halving_of({"keep": 0.25}) == Halving(0.25)
    assert halving_of(True) == Halving() and halving_of(None) is halving_of(False) is None
    for given, message in (
        (0, "keep=0 is the share"),
        ({"kep": 0.5}, "there is no 'kep'; there are keep, certain. Did you mean 'keep'"),
        ({"certain": "no"}, "certain='no' must be true or false"),
    ):
        with pytest.raises(ValueError, match=message):
            halving_of(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_steps": 5}, "eval_steps=5 with max_steps=2: `halving` stops variants at evaluations before"),
        ({"eval_steps": [2, 3]}, "with max_steps=2"),
        ({"eval_dataset": tiny.rows(1)}, "`eval_dataset` has 1 rows: .* `halving` 2 or more"),
        ({"save_rounds": [1]}, r"save_rounds=\[1\] must be a whole number"),
    ],
)
def test_halving_that_would_never_act_is_refused(tmp_path, given, message):
    whole = {"max_steps": 2, "eval_steps": 1, "eval_dataset": tiny.rows(2), "halving": Halving()}
    with pytest.raises(ValueError, match=message):
        study(tmp_path, {"a": {}, "b": {}}, **{**whole, **given})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learnig_rate": 1}, "variant a: GRPOConfig has no field .learnig_rate.. Did you mean .learning_rate.. A"),
        ({"peft": {"lora_alfa": 4}}, "variant a: `peft` has no field 'lora_alfa'. Did you mean 'lora_alpha'"),
        ({"peft": {"r": 2.5}}, "variant a: peft: r=2.5 must be a whole number"),
        ({"reward_funcs": "no_such.module:reward"}, "variant a: .*no_such"),
    ],
)
def test_an_error_names_the_variant_that_has_it(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        study(tmp_path, {"a": changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"study": None}, "the file has no key `study`"),
        ({"study": {"variant": {}}}, "study: there is no 'variant'; .* Did you mean 'variants'?"),
        ({"learnig_rate": 1}, "`learnig_rate` is no setting of a GRPO run"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, capsys, changes, message):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1="}))
    run = {"model": str(tmp_path), "dataset": str(tmp_path / "rows.jsonl"), "reward_funcs": ["numeric_match_reward"]}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({**run, "study": {"variants": {"a": {}}}, **changes}))
    assert main(["study", str(tmp_path / "study.yaml")]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, said), said


def test_a_misspelt_command_is_no_file(capsys):
    assert main(["study", "stopp", "a"]) == 2
    assert "'stopp' is neither a file nor one of" in (said := capsys.readouterr().err) and "mean 'stop'?" in said


def test_eight_draws_are_the_most_where_no_count_is_given():
    assert set(variants_of({"random": {"beta": [0.1, 0.2, 0.1]}})) == {"beta=0.1", "beta=0.2"}
