"""What is made of the measurements, from measurements made up."""

import pytest
from benchmarks.growth import fit_line
from benchmarks.growth import summary as growth_summary
from benchmarks.learn import mean_curve, seconds_to_reach
from benchmarks.learn import summary as learn_summary
from benchmarks.pool import Worker
from benchmarks.records import Records
from benchmarks.report import page, script_table
from benchmarks.script import SCRIPT
from benchmarks.script import summary as script_summary
from benchmarks.step import summary as step_summary
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import Workload

from tests.support import tiny

CONFIG = {
    "hidden_size": 4,
    "intermediate_size": 5,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 7,
}
WORK = Workload("W", 8, 2, 4, 5)


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path / "records.jsonl")


def add_step(records, contender, number, seconds, peak_bytes=1000):
    records.add(
        part="step",
        workload="W",
        contender=contender,
        round=number,
        seconds=seconds,
        peak_bytes=peak_bytes,
        peak_flops=1e6,
        bandwidth=1e6,
        phases={"generate": seconds / 2, "train": seconds / 2},
        positions={"generate": 100, "train": 50},
        settings={"per_device_train_batch_size": 8, "gradient_checkpointing": False},
    )


def test_ratios_are_taken_round_by_round(records):
    for number, (ours, theirs) in enumerate([(1.0, 3.0), (2.0, 8.0), (10.0, 20.0)]):
        add_step(records, "covey_best", number, ours)
        add_step(records, "trl_best", number, theirs, peak_bytes=4000)
    add_step(records, "covey_best", 3, 0.001)  # a round that TRL has not run
    found = step_summary(records, CONFIG, [WORK])["W"]
    assert found["trl_over_covey_best"] == 3.0  # the median of 3, 4 and 2
    assert found["memory_covey_over_trl"] == {"default": None, "best": 0.25}
    assert found["trl_over_covey_default"] is None


def test_efficiency_is_least_work_over_peak_and_time(records):
    from benchmarks.flops import minimum_flops, size_of

    add_step(records, "covey_best", 0, 2.0)
    least = minimum_flops(size_of(CONFIG), 8, [[5] * 4] * 2, [True, True])
    found = step_summary(records, CONFIG, [WORK])["W"]
    assert found["efficiency"]["covey_best"] == pytest.approx(sum(least.values()) / (1e6 * 2.0))


def test_a_script_is_compared_round_by_round(records):
    for number, (ours, theirs) in enumerate([(1.0, 3.0), (2.0, 8.0), (10.0, 20.0)]):
        records.add(part="script", library="covey", round=number, seconds=ours, peak_bytes=2 << 30)
        records.add(part="script", library="trl", round=number, seconds=theirs, peak_bytes=4 << 30)
    found = script_summary(records)
    assert (found["trl_over_covey"], found["memory_covey_over_trl"]) == (3.0, 0.5)
    assert "| ratio | 3.00 | 0.50 |" in script_table(found)


@pytest.mark.slow
def test_a_script_for_trl_runs_with_its_import_changed(tmp_path):
    tiny.model(max_position_embeddings=512).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    worker = Worker.running("covey", SCRIPT, str(tmp_path / "model"), ["4"], tmp_path / "log", threads=1)
    try:
        measured = worker.ask(lengths=[])
    finally:
        worker.close()
    assert measured["seconds"] > 0 and measured["peak_bytes"] > 2**20
    assert worker.settings["gradient_accumulation_steps"] == 8


def test_a_workload_without_measurements_is_left_out(records):
    assert step_summary(records, CONFIG, [WORK]) == {}


def test_time_to_an_accuracy_is_interpolated():
    curve = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.8)]
    assert seconds_to_reach(curve, 0.6) == 15.0
    assert seconds_to_reach(curve, 0.1) == 0.0
    assert seconds_to_reach(curve, 0.9) is None


def test_mean_curve_is_point_by_point():
    assert mean_curve([[(1.0, 0.0), (2.0, 1.0)], [(3.0, 0.5), (4.0, 0.0)]]) == [(2.0, 0.25), (3.0, 0.5)]


def add_learning(records, library, seconds, seed=0):
    """A run of three steps, each as long as given."""
    points = [{"step": i, "seconds": i * seconds, "accuracy": a} for i, a in enumerate([0.0, 0.5, 0.8, 0.8])]
    records.add(part="learn", library=library, seed=seed, steps=3, accuracy=points, reward=[], seconds=3 * seconds)


def test_learning_compares_times_to_the_accuracy_trl_ends_with(records):
    for library, seconds in (("covey", 10.0), ("trl", 30.0)):
        add_learning(records, library, seconds)
    found = learn_summary(records)
    assert found["trl_over_covey"] == pytest.approx(3.0)
    assert found["mean_of_seeds"]["accuracy"] == pytest.approx(0.8)


def test_learning_runs_of_other_lengths_are_not_mixed(records):
    add_learning(records, "covey", 10.0)
    add_learning(records, "trl", 30.0)
    points = [{"step": 0, "seconds": 0.0, "accuracy": 0.0}, {"step": 1, "seconds": 9.0, "accuracy": 0.1}]
    records.add(part="learn", library="covey", seed=0, steps=1, accuracy=points, reward=[], seconds=9.0)
    assert learn_summary(records, 3)["trl_over_covey"] == pytest.approx(3.0)
    latest = learn_summary(records)
    assert [run["steps"] for run in latest["runs"]["covey"]] == [1] and "trl" not in latest["runs"]
    assert learn_summary(records, 5) == {}


def test_growth_separates_prompt_from_completions(records):
    for size in (2, 4, 8):  # 5 s of prompts, 1 s for each completion, 2 s whatever happens
        records.add(part="growth", library="covey", curve="G", at=size, seconds=7.0 + size)
        records.add(part="growth", library="covey", curve="G, no prompt", at=size, seconds=2.0 + size)
    found = growth_summary(records)
    assert found["prompt_seconds"] == {2: 5.0, 4: 5.0, 8: 5.0}
    assert found["curves"]["covey: G"]["seconds_each"] == pytest.approx(1.0)


def test_a_line_is_found():
    assert fit_line({1: 3.0, 2: 5.0, 4: 9.0}) == pytest.approx((1.0, 2.0))


def test_phases_inside_others_pause_them():
    now = [0.0]
    watch = Stopwatch(clock=lambda: now[0])

    class Engine:
        def generate(self):
            now[0] += 3.0

    engine = Engine()
    watch.wrap(engine, "generate", "generate")
    with watch.phase("train"):
        now[0] += 1.0
        engine.generate()
        now[0] += 1.0
    seconds, _ = watch.drain()
    assert seconds == {"train": 2.0, "generate": 3.0}


def test_the_page_names_what_failed_and_shows_the_rest(records):
    add_step(records, "covey_default", 0, 1.0)
    machine = {
        "processor": "a processor",
        "instructions": ["avx2"],
        "cores": 2,
        "threads": 2,
        "memory_GiB": 8,
        "system": "Linux x86_64",
        "dtype": "float32",
        "date": "2026-01-01",
        "versions": {"torch": "2"},
    }
    results = {
        "machine": machine,
        "failures": {"learn": "WorkerFailed: out of memory\ntraceback"},
        "step": step_summary(records, CONFIG, [WORK]),
        "learn": learn_summary(records),
        "growth": growth_summary(records),
    }
    text = page(results, "")
    assert "**failed**: learn: WorkerFailed: out of memory" in text
    assert "traceback" not in text
    assert "Covey, defaults" in text
