"""Rows that a model or a reward function could not use are named before training."""

import pytest

from covey.data.sampler import PromptDataset
from covey.data.validation import check_dataset


def messages(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "half \ud83d"}, "half of a surrogate pair"),
        ({"prompt": messages("half \ud83d")}, "half of a surrogate pair"),
        ({"prompt": messages([{"type": "text", "text": "half \ud83d"}])}, "half of a surrogate pair"),
        ({"prompt": '[{"role": "user", "content": "hi"}]'}, "json.loads"),
        ({"prompt": "[{'role': 'user', 'content': 'hi'}]"}, "json.loads"),
        ({"prompt": '\ufeff {"name": "x", "role": "user", "content": "hi"}'}, "json.loads"),
        ({"prompt": '{"messages": [{"content": "hi", "role": "user"}]}'}, "json.loads"),
        ({"prompt": '[{"from": "human", "value": "hi"}]'}, "json.loads"),
        ({"prompt": '[{"role": "User", "content": "hi"}]'}, "json.loads"),
        ({"prompt": "({'role': 'user', 'content': 'hi'},)"}, "json.loads"),
        ({"prompt": messages([3])}, "must be a string or a non-empty list of messages"),
        ({"prompt": messages([{"type": "text"}])}, "must be a string or a non-empty list of messages"),
        ({"prompt": messages([None])}, "must be a string or a non-empty list of messages"),
        ({"prompt": messages([{"type": "text", "text": None}])}, "must be a string or a non-empty list of messages"),
        ({"prompt": "a", 3: "b"}, "column 3"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row, said):
    """The bad row comes last, and its number is in the message."""
    good = {"prompt": "a" if isinstance(row["prompt"], str) else messages("a")}
    with pytest.raises(ValueError) as error:
        check_dataset([good, good, row], "train_dataset")
    assert said in str(error.value)
    assert "row 2" in str(error.value)


@pytest.mark.parametrize(
    ("role", "known"),
    [
        ("User", "user"),
        ("user ", "user"),
        ("SYSTEM", "system"),
        ("Assistant", "assistant"),
        ("human", "user"),
        ("Human", "user"),
        ("gpt", "assistant"),
    ],
)
def test_a_role_that_is_nearly_known_is_pointed_out_once(role, known, recwarn):
    check_dataset([{"prompt": [{"role": role, "content": "a"}, *messages("b")]}] * 3, "train_dataset")
    check_dataset([{"prompt": [{"role": "ipython", "content": "a"}, *messages("b")]}], "train_dataset")
    (warning,) = recwarn
    assert f"role {role!r}, which chat templates seldom know: write {known!r}" in str(warning.message)


class Rows:
    def __len__(self):
        return 9

    def __getitem__(self, number):
        return [{"prompt": "a"}][number]


def test_a_dataset_with_fewer_rows_than_it_says_is_named():
    with pytest.raises(ValueError, match="row 1 of a dataset that says it has 9 cannot be read: IndexError"):
        check_dataset(Rows(), "train_dataset")
    with pytest.raises(ValueError, match="row 1 of a dataset that says it has 9 cannot be read: IndexError"):
        PromptDataset(Rows()).__getitems__([(0, 0), (1, 0)])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("2+2=", "must be a dictionary of columns, such as {'prompt': ...}, got str: '2+2='"),
        (None, "got NoneType"),
        ([1, 2], "got list"),
        ({"prompt": "a", 3: "b"}, "has a column 3"),
    ],
)
@pytest.mark.parametrize(
    "kind", [PromptDataset, lambda rows: PromptDataset(dict(enumerate(rows)))], ids=["map", "stream"]
)
def test_a_bad_row_after_those_looked_at_is_named(kind, row, said):
    with pytest.raises(ValueError, match="row 20 of `dataset`") as error:
        kind([{"prompt": "a"}] * 20 + [row]).__getitems__([(19, 0), (20, 0)])
    assert said in str(error.value)


def test_text_that_merely_looks_alike_is_a_prompt():
    check_dataset([{"prompt": 'Complete the JSON: [{"role":'}, {"prompt": "[1, 2]"}], "train_dataset")
    check_dataset([{"prompt": '[{"from": "Oslo", "value": 3}]'}, {"prompt": '{"role": "admin"}'}], "train_dataset")
    check_dataset([{"prompt": messages("ünïcode 🙂")}], "train_dataset")
    check_dataset([{"prompt": messages([{"type": "image", "text": None}, "and text"])}], "train_dataset")
