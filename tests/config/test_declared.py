"""Fields as the source declares them are the fields of the classes."""

import dataclasses

import pytest

from covey.cli.config_file import config_of
from covey.config.base import OLD
from covey.config.declared import METHODS, field_groups, field_names


@pytest.mark.parametrize("method", METHODS)
def test_declared_fields_are_those_of_the_class(method):
    fields = {field.name: field for field in dataclasses.fields(config_of(method)) if field.name not in OLD}
    declared = {field.name: field for group in reversed(field_groups(method)) for field in group.fields}
    assert set(field_names(method)) == set(declared) == set(fields)
    for name, field in fields.items():
        default = None if field.default is dataclasses.MISSING else field.default
        assert declared[name].default == ("unset" if default is None else repr(default)), name
        assert declared[name].help == " ".join(field.metadata.get("help", "").split()), name


def test_groups_come_in_the_order_in_which_python_looks_names_up():
    names = [group.name for group in field_groups("rloo")]
    mro = [kind.__name__ for kind in config_of("rloo").__mro__]
    assert names == [name for name in mro if name in names]


def test_types_are_written_as_a_user_would():
    types = {field.name: field.type for group in field_groups("grpo") for field in group.fields}
    assert types["reward_weights"] == "list"
    assert types["model_init_kwargs"] == "dict | str"
    assert types["bf16"] == "bool"
