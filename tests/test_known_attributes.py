"""Tests cannot replace what is not there."""

import ast
import re
from pathlib import Path

import pytest

from covey.core import losses
from covey.trainer.microbatches import RolloutBuffer
from covey.trainer.rollout_reports import RewardLog
from tests.support import known_attributes

TESTS = Path(__file__).parent
MAYBE_ASSIGNED = re.compile(r"\b[A-Z]\w*\.\w+[^\n=]*=(?!=)")  # files without a match need no parsing


def test_an_unknown_attribute_of_an_object_is_refused():
    for made in (RolloutBuffer(), RewardLog()):
        with pytest.raises(AttributeError, match=r"assigns \w+\.with_signal, which does not exist"):
            made.with_signal = None


def test_an_unknown_attribute_of_a_module_is_refused():
    with pytest.raises(AttributeError, match=r"assigns covey\.core\.losses\.mean_of_all"):
        losses.mean_of_all = None


def test_known_attributes_can_be_replaced():
    made = RolloutBuffer()
    made.take = list
    assert made.take() == []


def test_a_subclass_of_a_test_has_attributes_of_its_own():
    class Counting(RolloutBuffer):
        def __init__(self):
            super().__init__()
            self.count = 1

    assert Counting().count == 1


def test_classes_are_changed_through_monkeypatch_alone():
    # `TrainBatch.idel = ...` raises nothing, as a class takes any name; monkeypatch and mock.patch.object look first.
    found = [place for path in TESTS.rglob("*.py") for place in assignments_to_imported(path)]
    assert found == []


def assignments_to_imported(path: Path) -> list[str]:
    """Where a file assigns an attribute of something that it imported from Covey by a capitalised name."""
    text = path.read_text()
    if not MAYBE_ASSIGNED.search(text):
        return []
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imports = [node for node in imports if (node.module or "").partition(".")[0] == "covey"]
    classes = {alias.asname or alias.name for node in imports for alias in node.names if alias.name[0].isupper()}
    return [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id in classes
    ]


def test_new_modules_are_guarded_before_each_test():
    assert {"covey.core.losses", "covey.trainer.microbatches"} <= known_attributes._seen
