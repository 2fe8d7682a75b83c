"""What is plain comes back from a checkpoint; what is not is named."""

import io
from collections import Counter
from enum import StrEnum

import numpy as np
import pytest
import torch

from covey.runtime.checkpointable import odd_part


class Colour(StrEnum):
    RED = "red"


PLAIN = {"a": [1, 2.5, None, True, "é"], "b": ({1, 2}, {"c": []}), 3: torch.ones(2)}


def test_plain_values_come_back_from_a_file_that_may_run_no_code():
    assert odd_part(PLAIN, "value") is None
    file = io.BytesIO()
    torch.save(PLAIN, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)
    assert back.pop(3).equal(torch.ones(2)) and back == {name: PLAIN[name] for name in "ab"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "value is a object"),
        ({"a": [1, np.float64(2.0)]}, r"value\['a'\]\[1\] is a float64"),
        ({"a": Colour.RED}, r"value\['a'\] is a Colour"),
        ({Colour.RED: 1}, "a key of value is a Colour"),
        ([{"b": Counter()}], r"value\[0\]\['b'\] is a Counter"),
        ((1, (2, PLAIN, print)), r"value\[1\]\[2\] is a builtin_function_or_method"),
    ],
)
def test_what_is_not_plain_is_named(value, said):
    import re

    assert re.fullmatch(said, odd_part(value, "value"))
