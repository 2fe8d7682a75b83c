"""Rows that a model or a reward function could not use are named before training."""

import pytest

from covey.core.findings import CheckError
from covey.data.sampler import PromptDataset
from covey.data.validation import check_dataset


def messages(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"prompt": "half \ud83d"}, "prompt-surrogate"),
        ({"prompt": messages("half \ud83d")}, "prompt-surrogate"),
        ({"prompt": messages([{"type": "text", "text": "half \ud83d"}])}, "prompt-surrogate"),
        ({"prompt": '[{"role": "user", "content": "hi"}]'}, "prompt-json"),
        ({"prompt": "[{'role': 'user', 'content': 'hi'}]"}, "prompt-json"),
        ({"prompt": '\ufeff {"name": "x", "role": "user", "content": "hi"}'}, "prompt-json"),
        ({"prompt": '{"messages": [{"content": "hi", "role": "user"}]}'}, "prompt-json"),
        ({"prompt": '[{"from": "human", "value": "hi"}]'}, "prompt-json"),
        ({"prompt": '[{"role": "User", "content": "hi"}]'}, "prompt-json"),
        ({"prompt": "({'role': 'user', 'content': 'hi'},)"}, "prompt-json"),
        ({"prompt": messages([3])}, "prompt-type"),
        ({"prompt": messages([{"type": "text"}])}, "prompt-type"),
        ({"prompt": messages([None])}, "prompt-type"),
        ({"prompt": messages([{"type": "text", "text": None}])}, "prompt-type"),
        ({"prompt": "a", 3: "b"}, "row-type"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row, code):
    """The bad row comes last, and its number is in the message."""
    good = {"prompt": "a" if isinstance(row["prompt"], str) else messages("a")}
    (found,) = check_dataset([good, good, row], "train_dataset")
    assert (found.level, found.code) == ("error", code)
    assert "row 2" in found.evidence


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
def test_a_role_that_is_nearly_known_is_pointed_out_once(role, known):
    (found,) = check_dataset([{"prompt": [{"role": role, "content": "a"}, *messages("b")]}] * 3, "train_dataset")
    assert (found.level, found.code) == ("warning", "prompt-role")
    assert repr(role) in found.evidence
    assert repr(known) in found.fix


def test_a_role_of_some_template_is_left_alone():
    assert not [*check_dataset([{"prompt": [{"role": "ipython", "content": "a"}, *messages("b")]}], "train_dataset")]


class Rows:
    def __len__(self):
        return 9

    def __getitem__(self, number):
        return [{"prompt": "a"}][number]


def test_a_dataset_with_fewer_rows_than_it_says_is_named():
    for read in (lambda: [*check_dataset(Rows(), "")], lambda: PromptDataset(Rows()).__getitems__([(0, 0), (1, 0)])):
        with pytest.raises(CheckError, match=r"row 1 .* 9 .*IndexError") as raised:
            read()
        assert raised.value.codes == ["row-unread"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("2+2=", "str: '2+2='"),
        (None, "NoneType"),
        ([1, 2], "list"),
        ({"prompt": "a", 3: "b"}, " 3,"),
    ],
)
@pytest.mark.parametrize(
    "kind", [PromptDataset, lambda rows: PromptDataset(dict(enumerate(rows)))], ids=["map", "stream"]
)
def test_a_bad_row_after_those_looked_at_is_named(kind, row, said):
    with pytest.raises(CheckError, match="row 20 of `dataset`") as error:
        kind([{"prompt": "a"}] * 20 + [row]).__getitems__([(19, 0), (20, 0)])
    assert error.value.codes == ["row-type"]
    assert said in str(error.value)


@pytest.mark.parametrize(
    "prompts",
    [
        ['Complete the JSON: [{"role":', "[1, 2]"],
        ['[{"from": "Oslo", "value": 3}]', '{"role": "admin"}'],
        [messages("ünïcode 🙂")],
        [messages([{"type": "image", "text": None}, "and text"])],
    ],
)
def test_text_that_merely_looks_alike_is_a_prompt(prompts):
    assert not [*check_dataset([{"prompt": prompt} for prompt in prompts], "train_dataset")]
