"""Rows are found by file, folder or id, and mistakes are told apart."""

import json

import datasets
import pytest

from covey.cli import data
from covey.cli.data import check_prompt_column, load_rows
from covey.core.findings import CheckError
from covey.runtime.hub import NotFound

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_every_file_format_gives_the_same_rows(tmp_path, jsonl):
    data = datasets.Dataset.from_list(ROWS)
    data.to_csv(tmp_path / "rows.csv")
    data.to_csv(tmp_path / "rows.tsv", sep="\t")
    data.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    for suffix in ("jsonl", "json", "csv", "tsv", "parquet"):
        rows = load_rows(str(tmp_path / f"rows.{suffix}"))
        assert rows["prompt"][:2] == ["0+1=", "1+1="], suffix
        assert len(rows) == 10


def test_folders_of_files_and_saved_datasets(tmp_path, jsonl):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text(jsonl.read_text())
    (folder / "test.jsonl").write_text(json.dumps(ROWS[0]))
    assert len(load_rows(str(folder))) == 10
    assert len(load_rows(str(folder), "test")) == 1
    assert len(load_rows(str(folder), None)) == 1  # evaluation looks for other rows than those of training
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert len(load_rows(str(tmp_path / "saved"))) == 10


@pytest.mark.parametrize(
    ("split", "first", "count"),
    [("train[:3]", 0, 3), ("train[7:]", 7, 3), ("train[2:4]", 2, 2), ("train[-2:]", 8, 2), ("train[:20%]", 0, 2)],
)
def test_a_split_can_be_sliced(jsonl, split, first, count):
    rows = load_rows(str(jsonl), split)
    assert len(rows) == count and rows[0]["prompt"] == f"{first}+1="


def test_a_missing_file_is_named_with_its_neighbour(tmp_path, jsonl):
    with pytest.raises(FileNotFoundError, match=r"did you mean '.*rows\.jsonl'"):
        load_rows(str(tmp_path / "row.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*nowhere' either"):
        load_rows(str(tmp_path / "nowhere" / "rows.jsonl"))


def test_a_hub_id_that_cannot_be_reached(monkeypatch):
    def offline(name, config):
        raise ConnectionError("offline")

    with pytest.raises(NotFound, match="org/nothing"):  # HF_HUB_OFFLINE is set
        load_rows("org/nothing")
    monkeypatch.setattr(data, "look_up", lambda name, kind: True)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(FileNotFoundError, match=r"'org/nothing' is no file or folder here"):
        load_rows("org/nothing")


def test_a_hub_id_may_name_a_configuration(monkeypatch):
    asked = []
    monkeypatch.setattr(data, "look_up", lambda name, kind: True)

    def load(name, config):
        asked.append((name, config))
        return datasets.DatasetDict(test=datasets.Dataset.from_list(ROWS))

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(load_rows("org/name:main", "test")) == 10
    load_rows("org/name", None)
    assert asked == [("org/name", "main"), ("org/name", None)]
    with pytest.raises(CheckError, match=r"'train'.*: test") as raised:
        load_rows("org/name")
    assert raised.value.codes == ["dataset-split"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.jsonl", "", "is empty"),
        ("broken.jsonl", '{"prompt": "a"}\n{"prompt": ', "holds no rows that can be read"),
        ("rows.txt", "hello", "is not a data file that Covey reads"),
        ("header.csv", "prompt,answer\n", "holds no rows that can be read"),
        ("sheet.csv", "PK\x03\x04 of a spreadsheet", "holds no rows that can be read"),
        ("twice.csv", "prompt,answer,answer\na,1,2\n", "two columns are named 'answer'"),
        ("empty.json", "[]", "rows"),
        ("other.csv", "question,answer\n1,2\n", "its columns are: question, answer. If 'question' holds them"),
        ("typo.csv", "promt,answer\n1,2\n", "write `columns: {promt: prompt}` into the run file"),
    ],
)
def test_unusable_files_say_why(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        load_rows(str(path))
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_a_file_that_is_not_utf8_is_named(tmp_path, name):
    row = b'{"prompt": "caf\xe9"}' if name == "rows.jsonl" else b"prompt\ncaf\xe9"
    (tmp_path / name).write_bytes(row + b"\n")
    with pytest.raises(ValueError, match=rf"(?i){name}' holds no rows that can be read: .*UTF-?8.*read as UTF-8\."):
        load_rows(str(tmp_path / name))


def test_a_name_with_brackets_is_a_name(tmp_path):
    (tmp_path / "data[1].jsonl").write_text('{"prompt": "a"}\n')
    assert load_rows(str(tmp_path / "data[1].jsonl"))["prompt"] == ["a"]


def test_a_suffix_may_be_in_capitals(tmp_path):
    (tmp_path / "ROWS.JSONL").write_text('{"prompt": "a"}\n')
    assert load_rows(str(tmp_path / "ROWS.JSONL"))["prompt"] == ["a"]


def test_a_device_is_no_data_file():
    with pytest.raises(CheckError, match="'/dev/null'") as raised:
        load_rows("/dev/null")
    assert raised.value.codes == ["dataset-type"]


def test_a_part_of_a_file_is_no_data_set_of_the_hub(jsonl, monkeypatch):
    monkeypatch.chdir(jsonl.parent)
    with pytest.raises(CheckError, match="'test'") as raised:
        load_rows("rows.jsonl:test")
    assert raised.value.codes == ["dataset-split"]


@pytest.mark.parametrize("split", ["train[10:]", "train[5:3]"])
def test_a_slice_without_rows_is_named(jsonl, split):
    with pytest.raises(CheckError) as raised:
        load_rows(str(jsonl), split)
    assert raised.value.codes == ["dataset-empty"]


@pytest.mark.parametrize("split", ["train[3]", "train[a:b]", "train[:3"])
def test_a_slice_that_cannot_be_read(jsonl, split):
    with pytest.raises(CheckError) as raised:
        load_rows(str(jsonl), split)
    assert raised.value.codes == ["dataset-split"]


def test_without_a_likely_column_the_message_says_what_to_add():
    with pytest.raises(CheckError) as raised:
        check_prompt_column("x", ["a", "b"])
    assert raised.value.codes == ["column-prompt"]


def test_columns_are_renamed_where_they_are(tmp_path, jsonl):
    path = tmp_path / "own.csv"
    path.write_text("question,label\n2+2=,4\n")
    names = {"question": "prompt", "label": "answer"}
    assert load_rows(str(path), columns=names)[0] == {"prompt": "2+2=", "answer": 4}
    with pytest.warns(UserWarning, match="has no column 'question' to rename"):  # it has the new names already
        assert load_rows(str(jsonl), columns=names)[0] == ROWS[0]


def test_columns_that_cannot_be_renamed(jsonl):
    with pytest.raises(CheckError, match=r"'label'.*: prompt, answer") as raised:
        load_rows(str(jsonl), columns={"label": "solution"})
    assert raised.value.codes == ["column-names"]
    with pytest.raises(CheckError, match="'answer'") as raised:
        load_rows(str(jsonl), columns={"prompt": "answer"})
    assert raised.value.codes == ["column-names"]


def test_columns_may_change_places(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("prompt,question\nold,new\n")
    assert load_rows(str(path), columns={"question": "prompt", "prompt": "id"})[0] == {"id": "old", "prompt": "new"}


def test_a_system_prompt_precedes_each_prompt(tmp_path):
    system, user = ({"role": role, "content": role} for role in ("system", "user"))
    own = [{"role": "system", "content": "own"}, user]
    path = tmp_path / "data.py"
    path.write_text(f"def text():\n    return [{{'prompt': 'user'}}]\ndef chat():\n    return [{{'prompt': {own}}}]\n")
    assert load_rows(f"{path}:text", system_prompt="system")[0]["prompt"] == [system, user]
    assert load_rows(f"{path}:chat", system_prompt="system")[0]["prompt"] == own


def test_a_system_prompt_before_an_image_has_parts(tmp_path):
    path = tmp_path / "data.py"
    path.write_text("def rows():\n    return [{'prompt': [{'role': 'user', 'content': [{'type': 'image'}]}]}]\n")
    first = load_rows(f"{path}:rows", system_prompt="Look.")[0]["prompt"][0]
    assert first == {"role": "system", "content": [{"type": "text", "text": "Look."}]}


FUNCTIONS = """
import datasets

def rows():
    return ({"prompt": str(number)} for number in range(4))

def splits():
    return datasets.DatasetDict(train=datasets.Dataset.from_list(list(rows())))

def nothing():
    return None

def of(number):
    return []

def fails():
    yield {"prompt": "a"}
    raise KeyError("b")

def leaves():
    raise SystemExit(0)
"""


def test_a_function_returns_rows_or_splits(tmp_path):
    path = tmp_path / "data.py"
    path.write_text(FUNCTIONS)
    assert load_rows(f"{path}:rows", "train[1:]")["prompt"] == ["1", "2", "3"]
    assert len(load_rows(f"{path}:splits", None)) == 4
    with pytest.raises(ValueError, match=r"nothing' returned NoneType: None; it must return a `datasets.Dataset`"):
        load_rows(f"{path}:nothing")
    with pytest.raises(ValueError, match=r"'row' does not exist. There: fails, leaves, nothing, of, rows, splits"):
        load_rows(f"{path}:row")


@pytest.mark.parametrize(
    ("name", "says"), [("of", "TypeError: of\\(\\) missing 1"), ("fails", "KeyError: 'b'"), ("leaves", "SystemExit: 0")]
)
def test_a_function_that_raises_is_named(tmp_path, name, says):
    path = tmp_path / "data.py"
    path.write_text(FUNCTIONS)
    with pytest.raises(ValueError, match=rf"{name}', called without arguments, raised {says}"):
        load_rows(f"{path}:{name}")
