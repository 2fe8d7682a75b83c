"""Evaluation suites: sampling of their own, estimates by eye, and what is refused."""

import math
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from covey import EvalSuite
from covey.core.estimates import interval_of_share
from covey.core.findings import CheckError
from covey.core.transcript import Counts, RolloutSummary
from covey.observability.record_files import evaluation_files, read_rows
from covey.rewards import answers, numeric_match_reward
from covey.trainer.evaluation.phase import EvaluationPhase
from covey.trainer.evaluation.suites import Graded, estimates, suite_of
from tests.support import runs, tiny

SETTINGS = {"per_device_eval_batch_size": 4, "num_generations_eval": 2}


@answers(lambda completion: completion[:1] or None)
def even(completions, **kwargs):
    """1 where the first character has an even code."""
    return [float(text != "" and ord(text[0]) % 2 == 0) for text in completions]


def evaluated(tmp_path, suites, reward_funcs=even, **settings):
    trainer = runs.trainer(
        tmp_path, parts={"eval_dataset": suites, "reward_funcs": reward_funcs}, **{**SETTINGS, **settings}
    )
    return trainer, trainer.evaluate()


def verdicts(prompt, *pairs):
    return [Graded(prompt, float(bool(right)), right, answer) for right, answer in pairs]


def test_estimates_by_eye():
    graded = verdicts(0, (True, "4"), (False, "5"))  # pass@1 .5, pass@2 1, a tie: maj@2 .5
    graded += verdicts(1, (False, "4"), (False, "4"))  # all 0
    graded += verdicts(2, (True, "4"), (None, None))  # one could not be judged: pass@1 1, nothing for pairs
    found = estimates(EvalSuite([], num_generations=2, pass_at=(1, 2), maj_at=2), 2, graded)
    assert found["pass@1"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert found["pass@2"] == pytest.approx((1 + 0) / 2)
    assert found["maj@2"] == pytest.approx((0.5 + 0) / 2)
    assert found["prompts"] == 3
    for name in ("pass@1", "pass@2", "maj@2"):
        assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]


def test_overlapping_subsets_of_samples_count_as_fewer_trials():
    graded = []
    for prompt in range(3):  # one of four right: half of the pairs hold it, and two pairs have no sample in common
        graded += verdicts(prompt, (True, "4"), (False, "5"), (False, "6"), (False, "7"))
    found = estimates(EvalSuite([], num_generations=4, pass_at=2), 4, graded)
    assert (found["pass@2_low"], found["pass@2_high"]) == pytest.approx(interval_of_share([1.0, 0.0] * 3))


def test_a_rollout_that_failed_is_wrong(tmp_path):
    async def rollout(row, engine):
        if row["answer"] in "04":  # those of two of four prompts
            raise TimeoutError("the sandbox takes too long")
        episode = engine.begin()
        await episode.sample()
        return episode.done()

    def always(completions, answer, **kwargs):
        return [None if one == "2" else 1.0 for one in answer]  # the grader cannot judge a third prompt

    parts = {
        "eval_dataset": EvalSuite(tiny.rows(4), num_generations=2, pass_at=(1, 2)),
        "reward_funcs": always,
        "rollout_func": rollout,
    }
    with pytest.warns(UserWarning, match="rollouts failed"):
        found = runs.trainer(tmp_path, parts=parts, **SETTINGS).evaluate()
    assert found["eval_pass@1"] == found["eval_pass@2"] == pytest.approx(1 / 3)
    assert found["eval_rollouts/failed"] == 0.5


def test_a_reward_at_the_threshold_is_right(tmp_path):
    def nearly(completions, **kwargs):
        return [0.7] * len(completions)  # rewards are float32, in which that is less than 0.7

    suite = EvalSuite(tiny.rows(2), num_generations=2, pass_at=1, success_threshold=0.7)
    assert evaluated(tmp_path, suite, nearly)[1]["eval_pass@1"] == 1.0


def test_a_function_that_raises_has_found_no_answer(tmp_path):
    def last_word(completion):
        raise IndexError("list index out of range")

    suite = EvalSuite(tiny.rows(2), num_generations=2, pass_at=1, maj_at=1, answer=last_word)
    with pytest.warns(UserWarning, match="IndexError: list index out of range .*counts as no answer"):
        metrics = evaluated(tmp_path, suite)[1]
    assert metrics["eval_maj@1"] == 0.0 and "eval_pass@1" in metrics


def test_a_reward_that_fails_on_a_batch_logs_no_answers_for_it(tmp_path):
    calls = []

    def logs(completions, log_extra, **kwargs):
        calls.append(None)
        if len(calls) > 1:
            raise RuntimeError("the service is away")
        log_extra("first", [text[:1] for text in completions])
        return even(completions)

    suite = EvalSuite(tiny.rows(4), num_generations=2, pass_at=1, maj_at=2, answer="first")
    with pytest.warns(UserWarning, match="the service is away"):
        metrics = evaluated(tmp_path, suite, logs)[1]
    assert metrics["eval_prompts"] == 4 and "eval_maj@2" in metrics


def test_every_suite_is_sampled_in_its_own_way(tmp_path):
    asked = {}

    suites = {
        "greedy": EvalSuite(tiny.rows(3), temperature=0, pass_at=1),
        "many": EvalSuite(
            tiny.rows(2), num_generations=6, temperature=0.5, top_k=7, max_completion_length=3, pass_at=(1, 6)
        ),
        "plain": tiny.rows(2),
    }
    trainer = runs.trainer(tmp_path, parts={"eval_dataset": suites, "reward_funcs": even}, **SETTINGS)
    generate = trainer.collector.engine.generate

    async def spy(request):
        asked.setdefault(request.params.temperature, []).append(request)
        return await generate(request)

    trainer.collector.engine.generate = spy
    metrics = trainer.evaluate()
    greedy, many, plain = asked[0], asked[0.5], asked[1.0]
    assert [request.n for request in greedy] == [1] * 3
    assert [(request.n, request.params.top_k, request.params.max_tokens) for request in many] == [(6, 7, 3)] * 2
    assert [(request.n, request.params.top_k, request.params.max_tokens) for request in plain] == [(2, 0, 6)] * 2
    assert metrics["eval_many_completions/max_length"] <= 3
    assert metrics["eval_greedy_pass@1"] == metrics["eval_greedy_reward"]  # rewards are 0 or 1
    assert metrics["eval_many_pass@1"] == pytest.approx(metrics["eval_many_reward"])
    assert metrics["eval_many_pass@6"] in (0.0, 0.5, 1.0)  # of two prompts
    assert "eval_plain_loss" in metrics and "eval_many_loss" not in metrics
    assert metrics["eval_many_prompts"] == 2 and trainer.rollouts.params.temperature == 1.0


@pytest.mark.slow
def test_suites_are_evaluated_while_training_and_logged(tmp_path, capsys):
    suites = {"letters": EvalSuite(tiny.rows(4), num_generations=4, pass_at=(1, 4), maj_at=(1, 3))}
    trainer = runs.trainer(
        tmp_path, parts={"eval_dataset": suites, "reward_funcs": even}, eval_strategy="steps", eval_steps=1, **SETTINGS
    )
    trainer.train()
    assert len(runs.history(trainer, "eval_letters_pass@4")) == 2
    entry = trainer.state.log_history[-2]
    assert entry["eval_letters_maj@1"] == pytest.approx(entry["eval_letters_pass@1"])  # one vote decides
    low, high = entry["eval_letters_pass@1_low"], entry["eval_letters_pass@1_high"]
    assert f"pass@1 {entry['eval_letters_pass@1']:.1%} ({100 * low:.1f} to {100 * high:.1f})" in capsys.readouterr().out


def test_what_was_answered_is_written_down(tmp_path):
    suite = EvalSuite(tiny.rows(3), num_generations=2, pass_at=1, maj_at=2)
    _, metrics = evaluated(tmp_path, {"me/letters": suite})
    rows = read_rows(tmp_path / "record" / "evaluations" / "eval_me-letters_00000.parquet")
    assert [row["data"]["prompt"] for row in rows] == [row["prompt"] for row in tiny.rows(3) for _ in range(2)]
    assert [float(row["right"]) for row in rows] == [row["reward/even"] for row in rows]
    assert sum(row["reward/even"] for row in rows) / 6 == pytest.approx(metrics["eval_me/letters_pass@1"])
    assert [row["answer"] for row in rows] == [row["completion"][:1] or None for row in rows]
    assert {(row["fate"], row["advantage"]) for row in rows} == {("evaluated", None)}


def test_absent_rollouts_are_not_written_down():
    """A padded game of three of which the second is absent; as the table gets it."""
    added = []
    log = SimpleNamespace(enabled=True, add=lambda step, **table: added.append(table))
    phase = SimpleNamespace(
        run=SimpleNamespace(step=0), rollouts=SimpleNamespace(rewards=SimpleNamespace(names=["even"]))
    )
    grades = [Graded(0, 1.0, True, "4"), Graded(0, math.nan, None, None), Graded(0, 0.0, False, "5")]
    shown = [
        RolloutSummary(len(text), "2+2=", text, finish, Counts(1, 0, 0), None, [], {}, None)
        for text, finish in (("4", "stop"), ("", "absent"), ("5", "stop"))
    ]
    EvaluationPhase._log(phase, log, grades, torch.tensor([[1.0], [math.nan], [0.0]]), shown)
    (table,) = added
    assert table["completions"] == ["4", "5"] and table["rewards"] == {"even": [1.0, 0.0]}
    assert table["extras"] == {"right": [True, False], "answer": ["4", "5"]}
    EvaluationPhase._log(phase, log, grades[1:2], torch.tensor([[math.nan]]), shown[1:2])
    assert len(added) == 1


@pytest.mark.slow
def test_training_is_the_same_with_suites_as_without(tmp_path):
    ends = []
    for suites in (None, {"greedy": EvalSuite(tiny.rows(3), temperature=0.0, max_completion_length=3)}):
        settings = {"eval_strategy": "steps", "eval_steps": 1} if suites else {}
        trainer = runs.trainer(tmp_path, parts={"eval_dataset": suites}, **settings, **SETTINGS)
        trainer.train()
        ends.append(runs.weights(trainer))
    assert all((a == b).all() for a, b in zip(*ends, strict=True))


def test_votes_come_from_the_reward_a_function_or_a_column(tmp_path):
    def logs(completions, log_extra, **kwargs):
        log_extra("first", [text[:1] for text in completions])
        return even(completions)

    rows, ways = tiny.rows(3), []
    for reward, answer in ((even, None), (logs, "first"), (logs, lambda completion: completion[:1])):
        suite = EvalSuite(rows, num_generations=4, maj_at=3, answer=answer)
        ways.append(evaluated(tmp_path, suite, reward)[1]["eval_maj@3"])
    assert ways[0] == ways[1] == ways[2]


def test_predict_takes_a_suite_and_names_its_metrics(tmp_path):
    trainer, _ = evaluated(tmp_path, tiny.rows(2))
    result = trainer.predict(EvalSuite(tiny.rows(3), temperature=0, pass_at=1))
    assert result.predictions is None and "test_pass@1" in result.metrics
    assert result.metrics["test_prompts"] == 3


def test_the_built_in_rewards_say_what_an_answer_is():
    assert numeric_match_reward.extract("so 1,234.50 in all") * 2 == 2469
    assert numeric_match_reward.extract("no idea") is None


def two(completions, **kwargs):
    return [0.0] * len(completions)


WRONG = {
    "more than are sampled": (lambda: EvalSuite(tiny.rows(2), pass_at=8, success_reward="two"), "suite-setting", "8"),
    "greedy siblings": (lambda: EvalSuite(tiny.rows(2), temperature=0, num_generations=4), "suite-setting", "=4"),
    "no number": (lambda: EvalSuite(tiny.rows(2), pass_at="all"), "suite-setting", "'all'"),
    "a negative temperature": (lambda: EvalSuite(tiny.rows(2), temperature=-1), "setting-range", "temperature=-1"),
    "a temperature below float32": (lambda: EvalSuite(tiny.rows(2), temperature=1e-40), "setting-range", "1e-05"),
    "no probability": (lambda: EvalSuite(tiny.rows(2), top_p=1.5), "setting-range", "top_p=1.5"),
    "no rows": (lambda: EvalSuite([]), "dataset-empty", "eval_dataset"),
    "which reward": (lambda: EvalSuite(tiny.rows(2), pass_at=1), "suite-reward", "even, two"),
    "another reward": (lambda: EvalSuite(tiny.rows(2), pass_at=1, success_reward="eve"), "suite-reward", "'even'"),
    "another reward, unread": (lambda: EvalSuite(tiny.rows(2), success_reward="eve"), "suite-reward", "'even'"),
    "no answers": (lambda: EvalSuite(tiny.rows(2), maj_at=1, success_reward="two"), "suite-answer", "'two'"),
}


DURING = {"eval_strategy": "steps", "eval_steps": 1}
"""An evaluation that is not asked for is not checked."""


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_refused_before_training(tmp_path, name):
    make, code, value = WRONG[name]
    with pytest.raises(CheckError, match=value) as error:
        runs.trainer(
            tmp_path, parts={"eval_dataset": {"one": make()}, "reward_funcs": [even, two]}, **SETTINGS, **DURING
        )
    assert error.value.codes == [code]


def test_everything_wrong_with_a_suite_is_named_at_once():
    with pytest.raises(CheckError) as error:
        EvalSuite(tiny.rows(2), temperature=-1, top_p=1.5, pass_at=0, success_threshold=math.nan)
    assert error.value.codes == ["suite-setting", "setting-range", "setting-range", "suite-setting"]


def test_a_column_that_nobody_logs_is_an_error(tmp_path):
    with pytest.raises(CheckError, match="'parsed'") as error:
        evaluated(tmp_path, EvalSuite(tiny.rows(2), maj_at=1, answer="parsed"))
    assert error.value.codes == ["suite-answer"]


def test_settings_of_run_files():
    suite = suite_of({"num_generations": 4, "pass_at": [4, 1]}, tiny.rows(2))
    assert suite.pass_at == (1, 4)
    with pytest.raises(ValueError, match=r"has no setting 'n_generations'.*Did you mean 'num_generations'"):
        suite_of({"n_generations": 4}, [])


def test_completions_of_evaluations_are_exported(tmp_path):
    settings = {"per_device_eval_batch_size": 4, "export_completions": True, "log_completions_total_limit": 1}
    trainer = runs.trainer(tmp_path, parts={"eval_dataset": {"plain": tiny.rows(2)}}, **settings)
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "eval_plain_00007.parquet").touch()
    trainer.evaluate()
    assert len(list((tmp_path / "evaluations").iterdir())) == 1
    table = pq.read_table(tmp_path / "evaluations" / "eval_plain_00000.parquet")
    assert len(table) == 2 * trainer.run.algebra.eval_group
    assert {"prompt", "completion", "advantage"} <= set(table.column_names)
    (recorded,) = evaluation_files(tmp_path / "record")["eval_plain"][0]
    assert [row["completion"] for row in read_rows(recorded)] == table["completion"].to_pylist()


def test_an_infinite_top_k_is_refused():
    with pytest.raises(ValueError, match=r"EvalSuite\(top_k=inf\) must be a number, whole"):
        EvalSuite(tiny.rows(), top_k=math.inf)
