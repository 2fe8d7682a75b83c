"""`covey rewards test` finds what is wrong with a reward function before a model does."""

import json

import pytest

from covey.cli.main import main

ROWS = [
    {"prompt": "2+2=", "completion": "It is 4", "answer": "4"},
    {"prompt": "2+3=", "completion": "It is 4", "answer": "5"},
    {"prompt": "2+4=", "completion": "It is six", "answer": "6"},
]
# They import nothing of Covey, as each test starts a process.
FUNCTIONS = """
import itertools, time

COUNT = itertools.count()

def right(completions, answer, **kwargs):
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(text.split()[-1:] == [one]) for text, one in zip(texts, answer)]

def counts(completions, **kwargs):
    return [float(next(COUNT)) for _ in completions]

def by_place(completions, **kwargs):
    return [float(index) for index, _ in enumerate(completions)]

def strict(completions, **kwargs):
    return [float(text.endswith("4")) for text in completions]

def long(completions, **kwargs):
    return [float(len(text)) for text in completions]

def likes_nothing(completions, **kwargs):
    return [1.0 if not text else 0.5 * ("4" in text) for text in completions]

def fails(completions, **kwargs):
    return [1.0 / ("six" not in text) for text in completions]

def ends_its_process(completions, **kwargs):
    import os
    os._exit(3)

def counts_keywords(completions, **kwargs):
    return [float(sum(word in text for word in ("It", "is", "4", "six"))) for text in completions]

def prefers_an_answer(completions, answer, **kwargs):
    return [float(one in text) for text, one in zip(completions, answer)]

def counts_repetitions(completions, **kwargs):
    return [min(text.count("4"), 5.0) / 5 for text in completions]

def cannot_read(completions, **kwargs):
    return [float(text.encode("latin-1") != b"It is six") for text in completions]

made = [lambda completions, answer, **kwargs: right(completions, answer)]  # which no pickle can hold
unsendable = made[0]

def jitters(completions, **kwargs):
    return [("4" in text) + next(COUNT) * 1e-9 for text in completions]

def ranks(completions, **kwargs):
    return [float(sorted(completions).index(text)) for text in completions]

def slow(completions, **kwargs):
    time.sleep(1.01 * (len(completions) == 1))
    return [float("six" in text) for text in completions]

def is_the_same(completions, **kwargs):
    return [1.0 for _ in completions]

def abstains(completions, answer, **kwargs):
    return [None if one == "6" else float(one in text) for text, one in zip(completions, answer)]
"""


@pytest.fixture
def examined(tmp_path, capsys):
    """`examined(name, rows)` -> the exit status, and the verdict of each check."""

    def run(name, rows=ROWS):
        (tmp_path / "functions.py").write_text(FUNCTIONS)
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        arguments = [
            "rewards",
            "test",
            f"{tmp_path}/functions.py:{name}",
            "--completions",
            str(tmp_path / "rows.jsonl"),
        ]
        status = main(arguments)
        lines = capsys.readouterr().out.splitlines()
        return status, {line[7:31].strip(): line[:7].strip() for line in lines}

    return run


def test_a_sound_function_passes(examined):
    status, verdicts = examined("right")
    assert status == 0 and set(verdicts.values()) == {"ok", "note"}
    assert [check for check, verdict in verdicts.items() if verdict == "note"] == ["only the answer"]


def test_a_function_that_cannot_be_sent_is_examined_in_this_process(examined):
    assert examined("unsendable")[0] == 0


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("counts", "called again"),
        ("by_place", "in another order"),
        ("strict", "with a space at the end"),
        ("long", "100,000 characters"),
        ("likes_nothing", "an empty completion"),
        ("fails", "no reward"),
        ("counts_keywords", "every word at once"),
        ("is_the_same", "range"),
        ("cannot_read", "odd characters"),
        ("jitters", "called again"),
    ],
)
def test_each_fault_is_found(examined, name, wrong):
    status, verdicts = examined(name)
    assert status == 1 and verdicts[wrong] == "WRONG"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "noted"),
    [
        ("counts_repetitions", "ten times over"),
        ("ranks", "one at a time"),
        ("slow", "time, one at a time"),
        ("prefers_an_answer", "only the answer"),
    ],
)
def test_what_may_be_meant_is_noted(examined, name, noted):
    assert examined(name)[1][noted] == "note"


def test_a_process_that_ends_at_every_call_is_said_once(tmp_path, capsys):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    function = f"{tmp_path}/functions.py:ends_its_process"
    assert main(["rewards", "test", function, "--completions", str(tmp_path / "rows.jsonl")]) == 1
    shown = capsys.readouterr()
    assert shown.err.count("its process exited with 3") == 1
    assert " ".join(shown.out.split()) == "WRONG no reward 1 of 1, 1 failed or late"


def test_abstaining_is_noted_and_does_not_count_as_change(examined):
    status, verdicts = examined("abstains")
    assert status == 0 and verdicts["no reward"] == "note" and verdicts["called again"] == "ok"


def test_conversations_are_edited_in_their_text(examined):
    rows = [
        {
            **row,
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
        for row in ROWS
    ]
    assert examined("right", rows) == examined("right")


def test_completions_of_a_run_are_read(tmp_path, capsys):
    from covey.observability.completions import CompletionLog

    log = CompletionLog(tmp_path, export=True)
    texts = {name: [row[name] for row in ROWS] for name in ("prompt", "completion")}
    log.add(
        1,
        prompts=texts["prompt"],
        completions=texts["completion"],
        rewards={"r": [1.0, 0.0, 0.0]},
        advantages=[0.0] * 3,
    )
    log.publish(100_000)
    log.rows.clear()
    log.write(99_999)  # an earlier one, though its name comes later
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    assert main(["rewards", "test", f"{tmp_path}/functions.py:likes_nothing", "--run", str(tmp_path)]) == 1
    assert "1 of 3" not in capsys.readouterr().out.splitlines()[0]


def test_rows_without_completions_are_an_error(examined, capsys):
    assert examined("right", [{"prompt": "2+2="}])[0] == 2


def test_a_column_that_the_rows_lack_is_one_error(examined, capsys):
    assert examined("right", [{"prompt": "2+2=", "completion": "4"}] * 3) == (2, {})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"prompt": "a\u2028b", "completion": "4", "answer": "4"}\n\n', None),  # JSON allows that break in a text
        ('{"prompt": "a", "completion": 4}', "must hold rows with `prompt` and `completion`"),
        ("[1]", "must hold rows with `prompt` and `completion`"),
        ('\n{"prompt"', "rows.jsonl, line 2, is not JSON"),
        ("\udce9", "rows.jsonl is not UTF-8 text"),
    ],
)
def test_lines_are_read_as_json_lines(tmp_path, capsys, text, error):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8", errors="surrogateescape")
    arguments = [f"{tmp_path}/functions.py:right", "--completions", str(tmp_path / "rows.jsonl")]
    assert main(["rewards", "test", *arguments]) == (2 if error else 0)
    assert (error or "") in capsys.readouterr().err


def record_of(folder, rows):
    """The record of a run with a rollout batch: `data` holds the columns of the dataset."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from covey.observability.record_files import AS_JSON

    (folder / "record").mkdir(parents=True)
    written = [
        {
            **dict.fromkeys(AS_JSON, "null"),
            "data": json.dumps({"prompt": row["prompt"], "answer": row["answer"]}),
            "prompt": json.dumps(row["prompt"]),
            "completion": json.dumps(row["completion"]),
        }
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(written), folder / "record" / "generation_00000.parquet")


@pytest.mark.parametrize(("name", "status"), [("right", 0), ("is_the_same", 1), ("never", 1)])
def test_a_run_gives_the_columns_of_its_rows(tmp_path, capsys, name, status):
    (tmp_path / "f.py").write_text(
        FUNCTIONS + "\ndef never(completions, **kwargs):\n    return [None] * len(completions)\n"
    )
    record_of(tmp_path / "run", ROWS)
    found = main(["rewards", "test", f"{tmp_path}/f.py:{name}", "--run", str(tmp_path / "run")])
    said = capsys.readouterr()
    verdicts = {line[7:31].strip(): line[:6].strip() for line in said.out.splitlines()}
    assert verdicts["range"] == ("WRONG" if status else "ok"), said.out
    assert found == int("WRONG" in verdicts.values())


def test_a_repeated_prompt_that_holds_the_answer_is_no_fault(examined):
    """As where a number is to be found in a text; elsewhere it is one (`strict` likes what ends with 4)."""
    texts = [
        {"prompt": f"Order {n} is late.", "completion": f"{n if n > 7 else 1}", "answer": str(n)} for n in (7, 8, 9)
    ]
    assert examined("prefers_an_answer", texts)[1]["the prompt repeated"] == "note"
    without = [{**row, "prompt": f"{row['prompt']}4", "answer": "six"} for row in ROWS]
    assert examined("strict", without)[1]["the prompt repeated"] == "WRONG"
