"""`covey doctor` reads records of every kind, and says what it could not examine."""

import json
import warnings

import pytest
import torch
from transformers import TrainerCallback

from covey.cli.main import main as covey
from covey.core.findings import Effect, Finding, ranked
from covey.core.likeness import common_share
from covey.core.records import FinishReason, PromptSample, Rollout, RolloutBatch, absent_rollout
from covey.observability.findings import write_findings
from covey.observability.record_files import FOLDER, WARNINGS, read_run
from covey_tools.doctor import course
from covey_tools.doctor.command import main
from covey_tools.doctor.course import findings as course_of
from covey_tools.doctor.recorded import PastRun, equal_weights, warned
from tests.support import runs, tiny


def digits(completions, **kwargs):
    """The share of digits; a function that can be found again by its name."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


class Counting:
    """An environment that ends after a turn."""

    def reset(self, **row):
        return "Write digits."

    def step(self, text):
        return "", float(len(text) % 3), True, {}


KINDS = {
    "texts": {"record": "rollouts", "max_steps": 4},
    "tokens": {"record": "tokens"},
    "RLOO": {"method": "rloo", "record": "rollouts", "max_steps": 4},
    "several updates of a batch": {"num_iterations": 2, "max_steps": 4},
    "several batches of a step": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "conversations": {"parts": {"train_dataset": tiny.rows(conversational=True)}},
    "a reward without a name": {"parts": {"reward_funcs": lambda completions, **kwargs: [1.0] * len(completions)}},
    "no rewards": {"parts": {"reward_funcs": lambda completions, **kwargs: [None] * len(completions)}},
    "groups of two": {"num_generations": 2},
}


@pytest.mark.slow
def test_an_environment_without_a_name_is_not_left_out(tmp_path, capsys):
    """The run cannot be made again without it: what is examined would be another run."""
    parts = {"environment_factory": lambda: Counting(), "train_dataset": tiny.rows(conversational=True)}
    train(tmp_path, parts=parts, max_steps=2)
    assert doctor(tmp_path / "run", capsys)[2]["rebuilt"] is False


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_a_run_without_rewards_lacks_none(tmp_path, capsys, named):
    """Its teacher alone says what is learnt; without a name of a part, only the record is read."""
    settings = {"max_steps": 1, "teacher": "follower", "num_generations": 1, "record": "tokens"}
    train(tmp_path, parts={"reward_funcs": None}, **settings)
    if not named:
        path = tmp_path / "run/record/run.json"
        described = json.loads(path.read_text())
        path.write_text(json.dumps({**described, "parts": {**described["parts"], "unnamed": ["tools"]}}))
    _, codes, summary = doctor(tmp_path / "run", capsys)
    assert not {"reward-failing", "signal-sparse", "groups-small", "learning-rate-low"} & {*codes}
    assert summary["rebuilt" if not named else "signal"] is named
    assert summary["not_examined"]["reward-failing"] == "taught"


def doctor(folder, capsys, seconds="6"):
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status = main([str(folder), "--json", "--seconds", seconds])
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    return status, [finding["code"] for finding in shown["findings"]], shown["summary"]


def train(folder, method="grpo", parts=None, **settings):
    model = tiny.folder(folder / "model")
    trained = runs.trainer(
        folder / "run", method, parts={"model": str(model), "reward_funcs": digits, **(parts or {})}, **settings
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained.train()
    return trained


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_record_of_any_kind_is_read(kind, tmp_path, capsys):
    train(tmp_path, **KINDS[kind])
    status, codes, summary = doctor(tmp_path / "run", capsys)
    assert status == int(summary["verdict"] != "examined") and summary["rollout_batches"]
    if "parts" in KINDS[kind] and "reward_funcs" in KINDS[kind]["parts"]:
        assert summary["rebuilt"] is False and summary["not_examined"]["reward-order"] == "part"
        assert codes[0] == ("signal-sparse" if kind == "a reward without a name" else "reward-failing")


@pytest.mark.slow
def test_a_resumed_run_whose_last_file_is_broken_is_read(tmp_path, capsys):
    train(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    again = runs.trainer(
        tmp_path / "run", parts={"model": str(tmp_path / "model"), "reward_funcs": digits}, max_steps=4
    )
    again.train(resume_from_checkpoint=True)
    last = sorted((tmp_path / "run" / "record").glob("generation_*.parquet"))[-1]
    last.write_bytes(last.read_bytes()[:100])
    assert doctor(tmp_path / "run", capsys)[2]["rollout_batches"] == 3


def test_a_folder_without_rollouts_cannot_be_examined(tmp_path):
    train(tmp_path, record="off")
    assert covey(["doctor", str(tmp_path / "run")]) == 2
    (tmp_path / "run" / "record").mkdir()
    (tmp_path / "run" / "record" / "run.json").write_text("{")
    assert covey(["doctor", str(tmp_path / "run")]) == 2


def test_a_run_that_learnt_nothing_has_the_findings_it_warned_of(tmp_path):
    """Where examining the record finds nothing else."""
    died = Finding.warning("reward-lost", "it was 0.06 at step 1, and is 0.", "Lower learning_rate.")
    write_findings(tmp_path / FOLDER / WARNINGS, [died, Finding.warning("setting-range", "", "")])
    assert [(one.code, one.level, one.evidence) for one in warned(tmp_path)] == [
        ("reward-lost", "warning", died.evidence)
    ]


@pytest.mark.slow
def test_without_time_a_run_is_not_called_healthy(tmp_path, capsys):
    train(tmp_path, record="tokens")
    status, codes, summary = doctor(tmp_path / "run", capsys, "0.01")
    assert status == 1 and summary["not_examined"]["learning-rate-low"] == "time"
    assert summary["verdict"] == ("incomplete" if not codes else summary["verdict"])


def recorded(folder, answers, rewards, right, entropies):
    """The record of a run of two prompts each step, whose completions and rewards are made up."""
    rows = [{"prompt": f"question {number}", "answer": text} for number, text in enumerate(right)]
    trained = train(folder, parts={"train_dataset": rows}, max_steps=len(answers), record="rollouts")
    assert trained.state.global_step == len(answers)
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path, texts, values in zip(sorted((folder / "run/record").glob("g*.parquet")), answers, rewards, strict=True):
        table = pq.read_table(path).to_pydict()
        table["completion"] = [json.dumps(texts[number % len(texts)]) for number in range(len(table["row"]))]
        table["reward/digits"] = [values[number % len(values)] for number in range(len(table["row"]))]
        pq.write_table(pa.table(table), path)
    lines = [{"step": step, "entropy": value} for step, value in enumerate(entropies, 1)]
    (folder / "run/record/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return PastRun(folder / "run", read_run(folder / "run"))


VARIED = ["red", "blue", "green", "white"]
EACH = [0.0, 0.5, 0.5, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "rewards", "entropies", "code"),
    [
        (["red"], [0.5], [2.0] * 6, "collapse"),
        (["red"], [0.0, 0.0], [2.0, 2.0, 0.01, 0.01, 0.01, 0.01], "learning-rate-high"),
        (VARIED, [0.0], [2.0] * 6, "reward-lost"),
        (VARIED, EACH, [2.0] * 6, None),
    ],
)
def test_the_course_of_a_run_is_looked_at_first(tmp_path, last, rewards, entropies, code):
    """Six rollout batches of two prompts, whose right answers differ; entropies are from metrics.jsonl."""
    answers, of_each = [VARIED] * 2 + [last] * 4, [EACH] * 2 + [rewards] * 4
    read = recorded(tmp_path, answers, of_each, VARIED * 3, entropies)
    assert [point.entropy for point in read.points] == entropies
    assert [one.code for one in course_of(read, None)] == ([code] if code else [])


@pytest.mark.slow
def test_a_constant_answer_is_no_collapse_where_it_is_right(tmp_path):
    answers, rewards = [VARIED] * 2 + [["red"]] * 4, [EACH] * 2 + [[1.0]] * 4
    read = recorded(tmp_path, answers, rewards, ["red"] * 12, [2.0] * 6)
    assert [*course_of(read, None)] == []


def test_no_fix_is_proposed_that_its_experiment_refutes():
    worse, better = Effect(0.25, 0.22), Effect(0.25, 0.5)
    given = [Finding("groups-small", "warning", "", "more", effect=effect) for effect in (worse, better)]
    assert ranked(given[:1]) == [] and ranked(given[1:]) == given[1:]
    (kept,) = ranked([Finding("signal-sparse", "error", "", "more", effect=worse, otherwise="other prompts")])
    assert kept.fix == "other prompts"
    assert not Effect(1.0, float("nan")).improves and Effect(2.0, 1.0, higher_is_better=False).improves


def test_a_role_in_which_nothing_is_learnt_is_found():
    """Of four logs: the judge's rollouts never have an advantage, the solver's mostly do."""
    lines = [{"roles/judge/advantage_zero": 1.0, "roles/solver/advantage_zero": 0.25, "reward": 0.5}] * 4
    (found,) = course.silent_roles(lines)
    assert found.code == "role-silent" and "'judge' (100%)" in found.evidence and "solver" not in found.evidence
    assert [*course.silent_roles(lines[:2])] == []
    assert [*course.silent_roles([{"reward": 0.5}] * 4)] == []


def test_absent_rollouts_give_no_answer():
    """A source of smaller groups, whose only answer is "yes": 2 of 4, and 2 absent, in each of 4 groups."""
    samples = [PromptSample({"prompt": str(number // 4)}, number // 4, number % 4) for number in range(16)]
    said = [Rollout([0], [5], [True], None, "yes", FinishReason.STOP) for _ in range(2)]
    rollouts = [*said, absent_rollout([0], ""), absent_rollout([0], "")] * 4
    scored = RolloutBatch(samples, rollouts, torch.ones(16, 1), {}, [{}] * 16)
    point = course.Point(0, 1, torch.ones(4, 4), scored, None)
    assert point.answers == ["yes"] * 8 and point.prompts == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert common_share(point.answers, point.prompts) == 1.0


def put_back(folder, **settings):
    """A run whose weights a callback sets to those of the beginning after each step."""
    trained = train(folder, max_steps=3, parts={"callbacks": [PutBack()]}, **settings)
    trained.save_model()


class PutBack(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.kept = {name: weight.clone() for name, weight in model.state_dict().items()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.load_state_dict(self.kept)


def test_equal_weights_are_told_from_others(tmp_path):
    tiny.folder(tmp_path / "a"), tiny.folder(tmp_path / "b"), tiny.folder(tmp_path / "c", seed=1)
    assert equal_weights(tmp_path / "a", tmp_path / "b") > 10
    assert equal_weights(tmp_path / "a", tmp_path / "c") == equal_weights(tmp_path / "a", tmp_path / "none") == 0


@pytest.mark.slow
def test_weights_that_are_put_back_are_found(tmp_path, capsys):
    put_back(tmp_path)
    assert "weights-frozen" in doctor(tmp_path / "run", capsys, "20")[1]
