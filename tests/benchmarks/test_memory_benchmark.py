"""The memory that `covey explain` foretells, against what runs take: the real model, minutes each."""

import pytest

memory = pytest.importorskip("benchmarks.memory")
ENOUGH = ("full", "full, checkpointed layers", "full, a reference, several passes", "LoRA")


@pytest.mark.slow
@pytest.mark.parametrize("name", ENOUGH)
def test_the_predicted_peak_is_within_15_percent(name):
    from covey.cli.demo import model_folder

    found = memory.measure(str(model_folder()), memory.CONFIGURATIONS[name])
    measured = max(found["sampling"], found["training"])
    assert found["predicted"]["peak"] == pytest.approx(measured, rel=0.15), found["each"]


def test_a_row_of_the_table():
    mib = 2**20
    found = {"sampling": 80 * mib, "training": 100 * mib}
    found["predicted"] = {"sampling": 70 * mib, "training": 90 * mib, "peak": 90 * mib}
    assert memory.line("full", found) == "| full | 70 / 80 | 90 / 100 | 90 / 100 | -10% |"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["0.5B full, no checkpointing", "1.5B LoRA"])
def test_the_plan_is_within_a_tenth_of_what_a_gpu_gave_out(name, tmp_path):
    from benchmarks.gpu.jobs import Job
    from benchmarks.gpu.memory import measure

    found = measure(Job("memory", name, ["plan"], "cuda", folder=str(tmp_path)), "plan")
    assert abs(found["off"]) < 0.1
