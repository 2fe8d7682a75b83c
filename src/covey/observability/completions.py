"""Output of completions: a table on the console, tables for trackers, and files in TRL's format."""

import importlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from io import BytesIO
from pathlib import Path
from textwrap import dedent
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import rich
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from covey.core.transcript import Counts, Entry, Kind, as_text, count, entries, is_conversation, is_messages, to_json
from covey.observability.excerpts import excerpt
from covey.runtime.files import written_whole
from covey.runtime.safe_text import printable, shorten
from covey.runtime.user_code import format_error, warn

Row = dict[str, Any]

CONVERSATION_COLUMNS = ("messages", "turns", "calls", "failed_calls")
"""Additional columns if completions are conversations: the messages as JSON, and counts of turns and calls."""

FIXED_COLUMNS = (
    *("step", "prompt", "completion", "advantage", "finish", "error", "length", "images"),
    *CONVERSATION_COLUMNS,
)
"""Covey's own columns; a reward function or an extra of such a name gets another column name."""

PROMPT_CHARACTERS, COMPLETION_CHARACTERS, CONVERSATION_CHARACTERS, ERROR_CHARACTERS = 200, 400, 600, 120
"""Most characters of each kind of text in the table; a conversation has several messages or calls a tool."""

STYLES = {Kind.CALL: "cyan", Kind.RESULT: "dim", Kind.FAILURE: "red", Kind.GAP: "dim italic"}


@dataclass(eq=False)
class CompletionLog:
    """The latest completions, published at every log."""

    output_dir: str | Path
    _: KW_ONLY
    limit: int | None = None  # maximum number of stored rows, usually those of one rollout batch; None stores all
    total_limit: int | None = None  # maximum number of files, of the latest steps; None keeps all
    export: bool = False  # write a parquet file when published
    show: bool = False  # print a table, and send one to trackers, when published
    num_to_print: int | None = None  # maximum rows of the printed table; None prints all
    unique_prompts: bool = False  # one row per prompt in printed and sent tables
    report_to: Sequence[str] = ()  # names of trackers, as in `TrainingArguments`; those without tables are skipped
    sent_as: str = "completions"  # name of the table in trackers
    folder: Path = Path("completions")  # of the files, in the output folder
    name: str = "completions"  # of the files; a slash, as in hub ids, is written as a dash
    enabled: bool = True  # False: ignore rows (processes other than the first)
    reward_names: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.output_dir, self.folder)
        self.name = self.name.replace("/", "-").replace(os.sep, "-")
        self.rows: deque[Row] = deque(maxlen=self.limit)
        self._unpublished = False

    def add(
        self,
        step: int,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        rewards: Mapping[str, Sequence[float | None]],
        advantages: Sequence[float] | None = None,
        extras: Mapping[str, Sequence[Any]] | None = None,
        finish: Sequence[str] | None = None,
        lengths: Sequence[int] | None = None,
        counts: Sequence[Counts] | None = None,
        errors: Sequence[str | None] | None = None,
        images: Sequence[Sequence[bytes]] | None = None,
    ) -> None:
        """Add rollouts of a step (from 1), or of an evaluation; a reward is None where its function abstained.

        Prompts and completions are texts or message lists. If a completion has several turns or calls a tool, all rows
        get the `CONVERSATION_COLUMNS`; `counts` are by default counted from the messages.
        """
        self.reward_names = [_free_name(name, "reward") for name in rewards]
        given: dict[str, Sequence[Any] | None] = {
            "prompt": [*map(as_text, prompts)],
            "completion": [*map(as_text, completions)],
            **dict(zip(self.reward_names, rewards.values(), strict=True)),
            **{_free_name(name, "extra", self.reward_names): values for name, values in (extras or {}).items()},
            "advantage": advantages,
            "finish": finish,
            "error": errors if any(errors or ()) else None,
            "length": lengths,
            "images": images if any(images or ()) else None,
            **_conversation_columns(completions, counts),
        }
        columns = {name: values for name, values in given.items() if values is not None}
        for cells in zip(*columns.values(), strict=True):
            self.rows.append({"step": step, **dict(zip(columns, cells, strict=True))})
        self._unpublished = True

    def publish(self, step: int) -> Path | None:
        """Write a file and show a table, as set, if rows were added since the last call."""
        if not (self.enabled and self._unpublished):
            return None
        self._unpublished = False
        path: Path | None = None
        try:
            path = self.write(step) if self.export else None
        except (OSError, UnicodeError) as error:  # a full disk, say; the next checkpoint names it, too
            warn(
                f"the completions of step {step} could not be written into {str(self.folder)!r}:"
                f" {format_error(error)}. The run continues without them.",
            )
        if self.show:
            with suppress(SystemExit, OSError):  # a closed pipe, or a full disk
                if self.num_to_print != 0:
                    rich.get_console().print(self.table(self.num_to_print, self.unique_prompts))
            self.to_trackers(self.report_to, step)
        return path

    def write(self, step: int) -> Path:
        """Write all stored rows to `{folder}/{name}_{step:05d}.parquet`; the file appears complete or not at all."""
        columns = _columns_of([*self.rows])
        table = pa.table({_as_word(name): _arrow_column(name, values, self.reward_names) for name, values in columns})
        with written_whole(path := self.folder / f"{self.name}_{step:05d}.parquet") as new:
            pq.write_table(table, new)
        if self.total_limit:  # by step and not by clock; a resumed run may find files of later steps
            named = [(file, *file.stem.rpartition("_")[::2]) for file in self.folder.glob("*.parquet")]
            own = [(int(at) <= step, int(at), file) for file, name, at in named if name == self.name and at.isdecimal()]
            for _, _, old in sorted(own)[: -self.total_limit]:
                old.unlink()
        return path

    def table(self, num: int | None = None, unique_prompts: bool = False) -> Any:
        """A `rich.table.Table` of the latest rows, or `num` of them evenly spread, that is readable in 100 columns."""
        rows, names = self._chosen(unique_prompts), self.reward_names
        num = len(rows) if num is None else min(num, len(rows))
        shown = [rows[index * len(rows) // num] for index in range(num)]
        steps = sorted({row["step"] for row in shown})
        when = f", step {steps[0]}" if len(steps) == 1 else f", steps {steps[0]} to {steps[-1]}" if steps else ""
        count = f"{len(shown)} of {len(rows)} completions" if len(shown) < len(rows) else f"{len(rows)} completions"
        table = Table(title=count + when, box=box.SIMPLE_HEAD, title_justify="left", show_lines=True, expand=True)
        table.add_column("prompt", ratio=2, overflow="fold")
        table.add_column("completion", ratio=3, overflow="fold")
        separate = len(names) <= 3  # more share one column, for which a console is wide enough
        for name in names if separate else ["rewards"]:
            wide = 9 if separate else 22
            header = escape(printable(name).removesuffix("_reward").replace("_", " "))  # wraps between its words
            table.add_column(header, justify="right" if separate else "left", width=wide, overflow="fold")
        table.add_column("advantage", justify="right", width=9)
        for row in shown:
            values = [_number(row.get(name)) for name in names]
            listed = "\n".join(f"{shorten(name, 15)} {value}" for name, value in zip(names, values, strict=True))
            colour = "green" if row["advantage"] > 0 else "red" if row["advantage"] < 0 else "dim"
            images = None if "<image>" in row["prompt"] else _counted(None, row.get("images"))
            table.add_row(
                Text((f"[{images}] " if images else "") + shorten(printable(row["prompt"]), PROMPT_CHARACTERS)),
                _completion(row, Text(_ending(row), style="yellow")),
                *(values if separate else [escape(listed)]),
                Text(_number(row["advantage"], signed=True), style=colour),
            )
        return table

    def to_trackers(self, report_to: Sequence[str], step: int) -> None:
        """Send the rows as a table to every tracker in `report_to` that supports tables."""
        rows = self._chosen(self.unique_prompts)
        for name in report_to:
            if name in TRACKERS and rows:
                headers = [column for column, _ in _columns_of(rows)]
                module = importlib.import_module(name)
                picture = _wandb_images if name == "wandb" else _counted
                cells = [
                    [picture(module, row.get(h)) if h == "images" else _cell(row.get(h)) for h in headers]
                    for row in rows
                ]
                try:
                    TRACKERS[name](module, self.sent_as, headers, cells, step)
                except Exception as error:
                    warn_of_tracker(name, error)

    def _chosen(self, unique_prompts: bool) -> list[Row]:
        return list({row["prompt"]: row for row in self.rows}.values()) if unique_prompts else list(self.rows)


def warn_of_tracker(name: str, error: Exception) -> None:
    """Warn that a tracker failed; Python's filter shows equal warnings once."""
    warn(
        f"{name} could not log ({format_error(error)}). The run continues without it; its metrics are in"
        " trainer_state.json of every checkpoint and its completions in the output folder.",
    )


def _conversation_columns(completions: Sequence[Any], counts: Sequence[Counts] | None) -> dict[str, list[Any]]:
    if counts is None:
        counts = [count(completion) for completion in completions]
    if not (any(map(is_conversation, completions)) or any(one.turns > 1 or one.calls for one in counts)):
        return {}
    return {
        "messages": [to_json(completion) if is_messages(completion) else None for completion in completions],
        "turns": [one.turns for one in counts],
        "calls": [one.calls for one in counts],
        "failed_calls": [one.failed_calls for one in counts],
    }


def _columns_of(rows: list[Row]) -> list[tuple[str, list[Any]]]:
    """Columns in order of first occurrence, with the fixed last ones at the end; None where a row lacks one."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    last = [name for name in FIXED_COLUMNS[3:] if name in names]
    return [(name, [row.get(name) for row in rows]) for name in [n for n in names if n not in last] + last]


def _free_name(name: str, kind: str, taken: Sequence[str] = ()) -> str:
    return f"{name}_{kind}" if name in FIXED_COLUMNS or name in taken else name


def _arrow_column(name: str, values: list[Any], reward_names: list[str]) -> Any:
    if name in reward_names:
        return pa.array(values, pa.float64())
    if name == "images":
        return pa.array(values, pa.list_(pa.binary()))
    with suppress(UnicodeEncodeError, OverflowError, pa.ArrowException):  # values that fit no type, or not together
        array = pa.array(values)
        if _has_fields(array.type):
            return array
    return pa.array([None if value is None else _as_word(value) for value in values], pa.string())


def _has_fields(kind: Any) -> bool:
    """True unless a dictionary in a column is always empty, which parquet files cannot hold."""
    fields = [kind.field(number) for number in range(kind.num_fields)]
    return not (pa.types.is_struct(kind) and not fields) and all(_has_fields(field.type) for field in fields)


def _as_word(value: Any) -> str:
    word = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return word.encode("utf-8", "replace").decode()  # half of a surrogate pair, from whatever wrote the text


def _cell(value: Any) -> Any:
    """A table cell that every tracker can show."""
    return value if value is None or isinstance(value, str | int | float | bool) else _as_word(value)


def _counted(module: Any, images: Sequence[bytes] | None) -> str | None:
    """Text with the number of images, for trackers whose tables have no images."""
    return f"{len(images)} image{'s' if len(images) > 1 else ''}" if images else None


def _wandb_images(wandb: Any, images: Sequence[bytes] | None) -> list[Any]:
    from PIL import Image

    return [wandb.Image(Image.open(BytesIO(image))) for image in images or ()]


def _to_wandb(wandb: Any, table: str, headers: list[str], cells: list[list[Any]], step: int) -> None:
    if wandb.run is not None:
        wandb.log({table: wandb.Table(columns=headers, data=cells), "train/global_step": step})


def _to_trackio(trackio: Any, table: str, headers: list[str], cells: list[list[Any]], step: int) -> None:
    import pandas as pd

    trackio.log({table: trackio.Table(dataframe=pd.DataFrame(cells, columns=headers)), "train/global_step": step})


def _to_swanlab(swanlab: Any, table: str, headers: list[str], cells: list[list[Any]], step: int) -> None:
    try:
        run = swanlab.get_run()
    except RuntimeError:  # since 0.9, where there is none
        return
    if run is not None:
        made = swanlab.echarts.Table()
        made.add(headers, cells)
        swanlab.log({table: made}, step=step)


def _to_mlflow(mlflow: Any, table: str, headers: list[str], cells: list[list[Any]], step: int) -> None:
    if mlflow.active_run() is not None:
        columns = {header: [row[number] for row in cells] for number, header in enumerate(headers)}
        mlflow.log_table(columns, artifact_file=f"completions/{table}_{step:05d}.json")


Send = Callable[[Any, str, list[str], list[list[Any]], int], None]  # module, table's name, headers, rows and step
TRACKERS: dict[str, Send] = {"wandb": _to_wandb, "trackio": _to_trackio, "swanlab": _to_swanlab, "mlflow": _to_mlflow}
"""Trackers that support tables."""


def _ending(row: Row) -> str:
    if row.get("finish") in (None, "stop"):
        return ""
    error = row.get("error")
    shown = f"{row['finish']}: {shorten(str(error), ERROR_CHARACTERS)}" if error else row["finish"]
    return f" [{printable(shown)}]"


def _completion(row: Row, ending: Any) -> Any:
    messages = json.loads(row.get("messages") or "[]")
    if not is_conversation(messages):
        return Text(shorten(printable(row["completion"]), COMPLETION_CHARACTERS)) + ending
    shown = [replace(one, text=printable(one.text)) for one in excerpt(entries(messages), CONVERSATION_CHARACTERS)]
    texts = [_styled(entry) for entry in shown]
    texts[-1] += ending
    indents = [0 if entry.kind is Kind.MESSAGE else 2 for entry in shown]  # also where their lines are wrapped
    return Group(*(Padding(text, (0, 0, 0, indent)) for text, indent in zip(texts, indents, strict=True)))


def _styled(entry: Entry) -> Any:
    if entry.kind is not Kind.MESSAGE:
        return Text(dedent(entry.text), style=STYLES[entry.kind])
    who, colon, what = entry.text.partition(":")
    return Text.assemble((who + colon, "bold"), what)


def _number(value: float | None, signed: bool = False) -> str:
    if value is None or value != value:
        return "–"
    return ("+" if signed and value > 0 else "") + decimal(value, 2)


def decimal(value: float, digits: int) -> str:
    """A number with `decimals` decimals, or as a power of ten if they would all be 0."""
    text = f"{value:.{digits}f}"
    return text if float(text) or not value else f"{value:.1e}"
