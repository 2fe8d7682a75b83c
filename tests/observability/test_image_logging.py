"""Images beside completions: in files, on the console, in trackers and in the report."""

from io import BytesIO
from types import SimpleNamespace

import pyarrow.parquet as pq
from PIL import Image
from rich.console import Console

from covey.observability import completions
from covey.observability.completions import CompletionLog
from covey.observability.excerpts import thumbnails
from tests.support import tiny_vision

PNG = thumbnails([tiny_vision.picture(1)])


def log(folder, **changes):
    made = CompletionLog(folder, **changes)
    made.add(1, ["What?", "Say."], ["a", "b"], {"right": [1.0, 0.0]}, [1.0, -1.0], images=[PNG, []])
    return made


def test_thumbnails_are_small_and_made_once():
    large, known = Image.new("RGB", (1000, 500)), {}
    first, second, third = thumbnails([large, tiny_vision.picture(0), large], known)
    assert Image.open(BytesIO(first)).size == (256, 128) and first is third and len(known) == 2
    assert Image.open(BytesIO(second)).size == (20, 28)


def test_files_hold_png_images(tmp_path):
    rows = pq.read_table(log(tmp_path).write(1)).to_pylist()
    assert rows[1]["images"] == []
    (image,) = rows[0]["images"]
    assert Image.open(BytesIO(image)).tobytes() == tiny_vision.picture(1).tobytes()


def test_without_images_there_is_no_column(tmp_path):
    made = CompletionLog(tmp_path)
    made.add(1, ["What?"], ["a"], {"right": [1.0]}, [1.0], images=[[]])
    assert "images" not in made.rows[0]


def test_the_console_says_how_many_images_a_prompt_shows(tmp_path):
    console = Console(width=100, record=True)
    console.print(log(tmp_path).table())
    text = console.export_text()
    assert "[1 image] What?" in text and "[0" not in text


def test_trackers_get_pictures_where_their_tables_hold_them(tmp_path, monkeypatch):
    sent = {}

    def module(name):
        def logged(values, **where):
            sent.setdefault(name, values["completions"])

        table = SimpleNamespace(add=lambda headers, cells: sent.update(swanlab=cells))
        return SimpleNamespace(
            run=True, log=logged, Image=lambda image: image.size, Table=lambda columns, data: data,
            get_run=lambda: True, echarts=SimpleNamespace(Table=lambda: table),
        )  # fmt: skip

    monkeypatch.setattr(completions.importlib, "import_module", module)
    made = log(tmp_path)
    at = [name for name, _ in completions._columns_of([*made.rows])].index("images")
    made.to_trackers(["wandb", "swanlab"], 1)
    assert [row[at] for row in sent["wandb"]] == [[(20, 28)], []]
    assert [row[at] for row in sent["swanlab"]] == ["1 image", None]
