"""A step speaks through arguments and returned values: no object assigns an attribute of another."""

import pytest

from covey.core.records import Rollout
from tests.support import assignments, runs, tiny
from tests.support.engines import CopyEngine

# Everything that a step enters but `observability`, whose displays fill in their own tables.
PACKAGES = tuple(
    f"covey.{name}."
    for name in ("algorithms", "core", "data", "engines", "policy", "rewards", "rollout", "runtime", "trainer")
)
SETTINGS = {
    "on policy": {},
    "off policy": {"num_iterations": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 2},
    "two rollout batches a step": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "entropy bonus and reference": {"entropy_coef": 0.1, "beta": 0.1, "top_entropy_quantile": 0.5},
    "dynamic sampling": {"dynamic_sample": True},
    "sampled ahead": {"max_staleness": 1},
    "evaluations": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_no_object_assigns_an_attribute_of_another_in_a_step(tmp_path, settings):
    parts = {"eval_dataset": tiny.rows(2), "reward_funcs": runs.digits}
    if "max_staleness" in settings:
        parts["engine"] = CopyEngine(tiny.model())
    trainer = runs.trainer(tmp_path, parts=parts, max_steps=3, **settings)
    with assignments.noted(*PACKAGES) as found:
        trainer.train()
    assert found == [] and trainer.state.global_step == 3


def test_assignments_by_others_are_noted():
    sample = Rollout([1], [2], [True], None, "", "stop")
    source = compile("def other(it):\n    it.group = 3", assignments.SOURCE + "/made_up.py", "exec")
    made: dict = {}
    exec(source, made)
    with assignments.noted("covey.core.") as found:
        made["other"](sample)
        sample.__init__([1], [2], [True], None, "", "stop")
    assert found == ["made_up.py:2 other assigns Rollout.group"]
