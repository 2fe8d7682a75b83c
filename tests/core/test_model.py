import pytest
from torch import nn

from covey.core.model import cache_argument


class Renamed(nn.Module):
    def forward(self, input_ids, cache=None): ...


class Earlier(nn.Module):
    def forward(self, input_ids, past_key_values=None): ...


class StateSpace(nn.Module):
    def forward(self, input_ids, cache_params=None): ...


@pytest.mark.parametrize(
    ("model", "name"), [(Renamed, "cache"), (Earlier, "past_key_values"), (StateSpace, "cache_params")]
)
def test_cache_is_given_under_the_name_of_the_model(model, name):
    assert cache_argument(model()) == name
