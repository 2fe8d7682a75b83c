"""Completions reach the disk, the console and the trackers as they were."""

import json
import os
import sys
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from covey.core.transcript import as_text
from covey.observability.completions import CompletionLog
from covey.runtime.safe_text import shorten


def filled(tmp_path, **options) -> CompletionLog:
    log = CompletionLog(tmp_path, **{"export": True, **options})
    log.add(
        3,
        ["2+2=", "2+2="],
        ["4", "five"],
        rewards={"right": [1.0, None]},
        advantages=[0.5, -0.5],
        extras={"parsed": ["4", None]},
        finish=["stop", "length"],
        lengths=[1, 2],
    )
    return log


def read(path) -> dict[str, list]:
    return pq.read_table(path).to_pydict()


def rendered(table, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_the_file_holds_every_column_in_order(tmp_path):
    path = filled(tmp_path).write(7)
    assert path == tmp_path / "completions" / "completions_00007.parquet"
    columns = read(path)
    assert list(columns) == ["step", "prompt", "completion", "right", "parsed", "advantage", "finish", "length"]
    assert columns["right"] == [1.0, None]
    assert columns["step"] == [3, 3]
    assert list(path.parent.iterdir()) == [path]


def test_only_the_latest_rows_are_kept(tmp_path):
    log = filled(tmp_path, limit=2)
    log.add(4, ["a", "b"], ["c", "d"], rewards={"right": [0.0, 0.0]}, advantages=[0.0, 0.0])
    assert [row["prompt"] for row in log.rows] == ["a", "b"]


def test_only_the_latest_files_are_kept(tmp_path):
    log = filled(tmp_path, total_limit=2)
    written = [log.write(step) for step in (99_999, 100_000, 3)]  # the last by a run that was resumed
    assert sorted(written[0].parent.iterdir()) == sorted(written[1:])


def test_a_clock_set_back_costs_no_new_files(tmp_path):
    log = filled(tmp_path, total_limit=2)
    written = [log.write(1), log.write(2)]
    for path in written:
        os.utime(path, (2**32, 2**32))
    last = log.write(3)
    assert sorted(last.parent.iterdir()) == [written[1], last]


def test_files_of_sets_with_like_names_are_counted_apart(tmp_path):
    logs = [filled(tmp_path, total_limit=1, name=name) for name in ("eval", "eval_easy", "eval_easy_2")]
    for step in (1, 2):
        last = [log.write(step) for log in logs]
    assert sorted(last[0].parent.iterdir()) == sorted(last)


def test_messages_become_text(tmp_path):
    log = CompletionLog(tmp_path, export=True)
    log.add(0, [[{"role": "user", "content": "Hi"}]], [[{"role": "assistant", "content": "Yo"}]], {}, [0.0])
    columns = read(log.write(0))
    assert columns["prompt"] == ["user: Hi"] and columns["completion"] == ["Yo"]


SEARCH = {"type": "function", "function": {"name": "search", "arguments": {"query": "covey"}}}
CONVERSATION = [
    {"role": "assistant", "content": "I look it up.", "tool_calls": [SEARCH]},
    {"role": "tool", "name": "search", "content": "Error: TimeoutError: no answer"},
    {"role": "assistant", "content": "A flock of partridges."},
]


def test_conversations_have_columns_for_people_and_for_programs(tmp_path):
    log = CompletionLog(tmp_path, export=True)
    lone = [{"role": "assistant", "content": "Birds."}]
    log.add(0, ["p", "p"], [CONVERSATION, lone], {}, [0.5, -0.5], finish=["tool_budget", "stop"], lengths=[9, 2])
    columns = read(log.write(0))
    assert columns["completion"] == [as_text(CONVERSATION), "Birds."]
    assert [json.loads(text) for text in columns["messages"]] == [CONVERSATION, lone]
    assert (columns["turns"], columns["calls"], columns["failed_calls"]) == ([2, 1], [1, 0], [1, 0])
    assert columns["finish"] == ["tool_budget", "stop"]
    text = rendered(log.table())
    assert '→ search(query="covey")' in text and "✗ search: Error:" in text and "[tool_budget]" in text


def test_console_shows_first_call_and_answer_of_conversations(tmp_path):
    middle = [{"role": "tool", "name": "search", "content": "words " * 200}, {"role": "assistant", "content": "Hm."}]
    log = CompletionLog(tmp_path, export=True)
    log.add(0, ["p"], [[CONVERSATION[0], *middle * 20, CONVERSATION[-1]]], {}, [0.0])
    text = " ".join(rendered(log.table()).split())
    assert '→ search(query="covey")' in text and "more" in text and "A flock of partridges." in text
    assert max(len(line) for line in rendered(log.table()).splitlines()) <= 100


def test_text_that_cannot_be_encoded_does_not_stop_the_run(tmp_path):
    log = CompletionLog(tmp_path, export=True)
    log.add(0, ["a", "b"], ["fine", "half \ud800"], {}, [0.0, 0.0])
    assert read(log.write(0))["completion"] == ["fine", "half ?"]


def test_a_record_that_cannot_be_written_ends_no_run(tmp_path):
    (tmp_path / "completions").write_text("a file where the folder should be")
    log = filled(tmp_path)
    with pytest.warns(
        UserWarning, match=r"completions of step 3 could not be written into '.*completions': .*continues"
    ):
        assert log.publish(3) is None
    (tmp_path / "completions").unlink()
    log.add(4, ["a"], ["b"], rewards={"ri\ud800": [1.0]}, advantages=[0.0])
    assert read(log.publish(4))["ri?"] == [None, None, 1.0]


def test_what_names_hold_reaches_no_terminal_raw(tmp_path):
    log = CompletionLog(tmp_path, export=True)
    texts = {"finish": ["\x1b[31m"], "errors": ["\x9b2J"]}
    log.add(1, ["\u202e"], ["\x1b]52;c;x\x07"], rewards={"r\x1b[2J": [1.0]}, advantages=[0.0], **texts)
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(rendered(log.table()))


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([10**30, 1], ["1" + "0" * 30, "1"]),
        ([{}, {}], ["{}", "{}"]),
        ([[{"a": {}}], None], ['[{"a": {}}]', None]),
        ([{1: 2}, {}], ['{"1": 2}', "{}"]),
        (["half \ud800", "whole"], ["half ?", "whole"]),
        ([["half \ud800"], []], ['["half ?"]', "[]"]),
        ([{"a": 1}, {}], [{"a": 1}, {"a": None}]),
    ],
)
def test_what_no_column_can_hold_is_written_as_text(tmp_path, values, written):
    log = CompletionLog(tmp_path, export=True)
    log.add(0, ["p", "q"], ["a", "b"], rewards={}, advantages=[0.0, 0.0], extras={"extra": values})
    assert read(log.write(0))["extra"] == written


def test_mixed_types_are_written_as_text(tmp_path):
    log = CompletionLog(tmp_path, export=True)
    log.add(0, ["a", "b", "c"], ["d", "e", "f"], {}, [0.0, 0.0, 0.0], extras={"x": [1, "one", None], "y": [{}, 2, []]})
    columns = read(log.write(0))
    assert columns["x"] == ["1", "one", None]
    assert columns["y"] == ["{}", "2", "[]"]


def test_names_that_are_taken_get_a_suffix(tmp_path):
    log = CompletionLog(tmp_path, export=True)
    extras = {"prompt": [1], "right": [2]}
    log.add(0, ["a"], ["b"], {"length": [1.0], "right": [0.0]}, [0.0], extras=extras, lengths=[9])
    columns = read(log.write(0))
    assert columns["length_reward"] == [1.0] and columns["length"] == [9]
    assert columns["prompt_extra"] == [1] and columns["right_extra"] == [2] and columns["right"] == [0.0]


def test_a_column_of_some_rollout_batches_is_null_elsewhere(tmp_path):
    log = filled(tmp_path)
    log.add(4, ["a"], ["b"], rewards={"right": [0.0]}, advantages=[0.0])
    assert read(log.write(4))["parsed"] == ["4", None, None]


def test_publishing_twice_writes_once(tmp_path):
    log = filled(tmp_path)
    assert log.publish(5) is not None
    assert log.publish(6) is None


def test_a_disabled_log_leaves_no_trace(tmp_path):
    assert filled(tmp_path, enabled=False).publish(1) is None
    assert not (tmp_path / "completions").exists()


def test_the_console_table_fits_and_shows_both_ends_of_texts(tmp_path):
    log = CompletionLog(tmp_path, export=True)
    log.add(0, ["begin" + "x" * 900 + "end"], ["[bold]" + "y" * 2000 + "done"], {"right": [0.25]}, [1.5])
    text = rendered(log.table())
    assert max(len(line) for line in text.splitlines()) <= 100
    flat = "".join(line.replace(" ", "") for line in text.splitlines())
    assert "begin" in flat and "[bold]" in flat and "…" in flat and "0.25" in flat and "+1.50" in flat


def test_many_reward_functions_share_a_column(tmp_path):
    log = CompletionLog(tmp_path, export=True)
    log.add(0, ["p"], ["c"], {f"reward_{i}": [float(i)] for i in range(6)}, [0.0])
    text = rendered(log.table())
    assert "reward_5 5.00" in text and max(len(line) for line in text.splitlines()) <= 100


def test_unique_prompts_and_a_number_choose_rows(tmp_path):
    log = filled(tmp_path)
    log.add(3, ["a"], ["b"], rewards={"right": [0.0]}, advantages=[0.0])
    assert log.table().row_count == 3
    assert log.table(unique_prompts=True).row_count == 2
    assert log.table(num=1).row_count == 1


def test_shown_completions_go_to_the_console_and_the_trackers(tmp_path, monkeypatch, capsys):
    sent = []
    wandb = SimpleNamespace(
        run=object(), log=sent.append, Table=lambda columns, data: {"columns": columns, "data": data}
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    filled(tmp_path, show=True, report_to=["wandb", "tensorboard"]).publish(3)
    assert "five" in capsys.readouterr().out
    assert sent[0]["completions"]["columns"][:3] == ["step", "prompt", "completion"]
    assert sent[0]["completions"]["data"][0][:3] == [3, "2+2=", "4"]
    assert sent[0]["train/global_step"] == 3


def test_trackio_and_swanlab_get_their_own_kind_of_table(tmp_path, monkeypatch):
    sent = {}
    trackio = SimpleNamespace(log=lambda entry: sent.update(trackio=entry), Table=lambda dataframe: dataframe)
    table = SimpleNamespace(rows=None)
    table.add = lambda headers, rows: setattr(table, "rows", (headers, rows))
    swanlab = SimpleNamespace(
        get_run=lambda: object(),
        echarts=SimpleNamespace(Table=lambda: table),
        log=lambda entry, step: sent.update(swanlab=(entry, step)),
    )
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)
    filled(tmp_path).to_trackers(["trackio", "swanlab"], 3)
    assert list(sent["trackio"]["completions"]["completion"]) == ["4", "five"]
    assert sent["swanlab"] == ({"completions": table}, 3)
    assert table.rows[0][0] == "step"


def test_shortening_keeps_both_ends_and_the_width():
    assert shorten("short", 5) == "short"
    assert shorten("abcdefghij", 5) == "ab…ij"
    assert len(shorten("x" * 100, 8)) == 8
