"""Warnings of chat templates, and rows of every format."""

import numpy as np
import pytest
import torch
from datasets import Dataset

from covey.data.rows import plain_row
from covey.data.templates import check_template
from covey.data.validation import check_dataset, first_rows
from covey.rollout.prompts import PromptCodec
from tests.support import tiny

TURN = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
BEGIN = "{% if add_generation_prompt %}[assistant]{% endif %}"
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is two"}]
SCHEMA = {"type": "function", "function": {"name": "look", "parameters": {}}}


def said(template, prompt=CHAT, **columns):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    found = [*check_template({0: {"prompt": prompt, **columns}}, "", PromptCodec(tokenizer, None, None))]
    assert {one.code for one in found} <= {"template"}
    return len(found)


@pytest.mark.parametrize(
    "template, count",
    [
        (TURN + BEGIN, 0),
        (TURN, 1),  # no generation prompt
        ("{% for m in messages %}{{ m.content }}{% endfor %}", 0),  # nothing stands before an answer
        ("{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }};{% endfor %}" + BEGIN, 1),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content | upper }};{% endfor %}" + BEGIN, 2),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }};{% endfor %}" + BEGIN, 0),
    ],
)
def test_a_template_that_changes_the_prompt_warns(template, count):
    assert said(template) == count


def test_tools_that_no_prompt_shows_warn():
    shows = "{% if tools %}{{ tools | tojson }}{% endif %}" + TURN + BEGIN
    assert said(shows, tools=[SCHEMA]) == said(TURN + BEGIN, tools=None) == 0
    assert said(TURN + BEGIN, tools=[SCHEMA]) == said(shows, tools=["look"]) == said(shows, "text", tools=[SCHEMA]) == 1


@pytest.mark.parametrize("kind", [None, "numpy", "torch", "pandas", "arrow"])
def test_prompts_are_plain_in_every_format(kind):
    rows = [{"prompt": [{"role": "user", "content": f"{i}"}], "n": i} for i in range(2)]
    dataset = Dataset.from_list(rows).with_format(kind)
    assert not [*check_dataset(dataset, "train_dataset")]
    assert [row["prompt"] for row in first_rows(dataset)] == [row["prompt"] for row in rows]
    assert [int(row["n"]) for row in first_rows(dataset)] == [0, 1]


def test_columns_that_no_template_reads_keep_their_type():
    row = plain_row({"prompt": np.str_("2+2="), "n": torch.tensor([1])})
    assert type(row["prompt"]) is str and isinstance(row["n"], torch.Tensor)
