"""Module paths of earlier versions."""

import importlib
import pickle
import sys
import warnings

import pytest

from covey import GRPOConfig
from covey.moved import FOLDERS, MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_module_at_the_new_one(old, monkeypatch):
    for name in (*FOLDERS, *MOVED):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match=MOVED[old]):
        assert importlib.import_module(old) is importlib.import_module(MOVED[old])


def test_a_pickled_config_of_an_earlier_version_loads(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "covey.trainers.grpo_config", raising=False)
    old = pickle.dumps(GRPOConfig, protocol=0).replace(b"covey.config.grpo", b"covey.trainers.grpo_config")
    with pytest.warns(DeprecationWarning, match="covey.config.grpo"):
        assert pickle.loads(old) is GRPOConfig


def test_other_names_are_unknown_as_ever():
    with warnings.catch_warnings(), pytest.raises(ModuleNotFoundError, match=r"covey\.trainers\.nonsense"):
        warnings.simplefilter("error")
        importlib.import_module("covey.trainers.nonsense")
