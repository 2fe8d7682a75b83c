"""`covey rewards test`: checks of a reward function on completions, each a line of a table."""

import json
import math
import re
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from covey.cli import parsers
from covey.core.findings import CheckError
from covey.core.records import FinishReason, Rollout
from covey.observability.record_files import FOLDER, files, read_rows, read_run
from covey.rewards import RewardContext, RewardError, RewardSuite, completion_text, resolve_reward
from covey.rewards.contract import MissingArgument
from covey.runtime.definitions import script_of_run
from covey.runtime.files import read_text
from covey.runtime.user_code import report

CONTEXT = RewardContext(None, lambda column, values: None, lambda name, value: None)
Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    given = parsers.rewards().parse_args(list(argv))
    if given.limit < 1:
        raise ValueError(f"--limit {given.limit} leaves no completions: give a number of at least 1.")
    rows = (_logged(given.run) if given.run else _lines(given.completions))[: given.limit]
    usable = (
        isinstance(row, dict) and "prompt" in row and isinstance(row.get("completion"), str | list) for row in rows
    )
    if not rows or not all(usable):
        raise ValueError(f"{given.run or given.completions} must hold rows with `prompt` and `completion`.")
    with script_of_run(_script_of(given.run, given.function)):
        function = resolve_reward(given.function)
    with closing(_suite(function, given.timeout)) as suite:
        report(suite.check_columns({column for row in rows for column in row}))
        table = examine(suite, rows)
    for verdict, check, result in table:
        print(f"{verdict:<6} {check:<24} {result}")
    return int(any(verdict == "WRONG" for verdict, _, _ in table))


def _suite(function: Any, timeout: float) -> RewardSuite:
    """The function in a process of its own, which it may end or crash, if it can be sent to one."""
    try:
        return RewardSuite(function, timeout=timeout, isolation="process")
    except CheckError:  # it cannot be sent
        return RewardSuite(function, timeout=timeout)


def _script_of(run: Path | None, function: str) -> str | None:
    """The script of a recorded run, where the function stands in it."""
    with suppress(ValueError):  # it has no record
        script = None if run is None else (read_run(run).get("parts") or {}).get("script")
        return script if script == str(Path(function.rpartition(":")[0]).resolve()) else None
    return None


def _lines(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):  # texts may hold other breaks
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}") from error
    return rows


def _logged(run: Path) -> list[Row]:
    """Completions of a run with the columns of their rows, from its record; without one, from its log."""
    import pyarrow.parquet as pq

    if recorded := files(run / FOLDER):
        rows = [row for path in recorded[-1:] for row in read_rows(path)]
        given = [{"prompt": "", **(row["data"] or {}), "completion": row["completion"]} for row in rows]
        for one, row in zip(given, rows, strict=True):
            if row["prompt"] is not None:  # of an environment; elsewhere the row has it
                one["prompt"] = row["prompt"]
        return [row for row in given if isinstance(row["completion"], str | list)]
    logs = sorted((run / "completions").glob("completions_*.parquet"), key=lambda log: (len(log.name), log.name))
    rows = [row for log in logs[-1:] for row in pq.read_table(log).to_pylist()]
    return [{**row, "completion": json.loads(row.get("messages") or "null") or row["completion"]} for row in rows]


def examine(suite: RewardSuite, rows: list[Row]) -> list[tuple[str, str, str]]:
    """Verdict (ok, note or WRONG), check and result of each line of the table."""
    first, failures = _score(suite, rows)
    size, known = len(rows), [value for value in first if not math.isnan(value)] or [0.0]
    lowest, best = min(known), max(known)
    unscored, worst = sum(map(math.isnan, first)), "WRONG" if failures else "note"
    table = [(worst if unscored else "ok", "no reward", f"{unscored} of {size}, {failures} failed or late")]
    if failures == size:
        return table

    def compare(check: str, scores: list[float], verdict: str = "WRONG", allowed: float = 0.0) -> None:
        pairs, tolerance = zip(first, scores, strict=True), allowed * (best - lowest)
        changed = size - sum(abs(a - b) <= tolerance or (a != a and b != b) for a, b in pairs)
        table.append((verdict if changed else "ok", check, f"{changed} of {size} rewards changed"))

    def try_hack(check: str, texts: list[str], verdict: str = "WRONG", allowed: float = 0.0) -> None:
        scores, failures = _score(suite, rows, texts)
        high = sum(score > best or score >= best > lowest for score in scores)
        result = f"{high} of {size} rewarded as the best completion, {failures} failed or late"
        table.append((verdict if high > allowed * size or failures else "ok", check, result))

    if unscored == size:
        table.append(("WRONG", "range", "no completion gets a reward, so nothing can be learnt from it"))
        return table
    alike = "" if best > lowest else ": every completion gets the same, so nothing can be learnt from it"
    shown = f"{lowest:g} to {best:g}, {len(set(known))} different{alike}"
    table.append(("ok" if best > lowest else "WRONG" if size > 1 else "note", "range", shown))

    compare("called again", _score(suite, rows, quiet=True)[0])
    compare("in another order", _score(suite, rows[::-1], quiet=True)[0][::-1])
    alone, times = [], []
    for row in rows:
        started = time.perf_counter()
        alone += _score(suite, [row], quiet=True)[0]
        times.append((time.perf_counter() - started) * 1e3)
    compare("one at a time", alone, "note")
    p95 = sorted(times)[math.ceil(0.95 * (size - 1))]
    slow = "note" if p95 > 1e3 else "ok"
    table.append((slow, "time, one at a time", f"median {statistics.median(times):.1f} ms, p95 {p95:.1f} ms"))
    texts = [completion_text(row["completion"]) for row in rows]
    compare("with a space at the end", _score(suite, rows, [f"{text} " for text in texts])[0], allowed=0.1)
    compare("in upper case", _score(suite, rows, [text.upper() for text in texts])[0], "note", 0.1)
    try_hack("an empty completion", [""] * size)
    asked = [completion_text(row["prompt"]) for row in rows]
    held = sum(_holds_a_value(row, prompt) for row, prompt in zip(rows, asked, strict=True)) >= size / 2
    try_hack("the prompt repeated", asked, "note" if held else "WRONG")  # an answer that stands in the prompt is in it
    try_hack("100,000 characters", ["so " * 33_333] * size)
    words = " ".join(sorted({word for text in texts for word in text.split()}))
    try_hack("every word at once", [words] * size, allowed=0.5)  # some references come last by chance
    longer = _score(suite, rows, [f"{text}\n" * 10 for text in texts])[0]
    gained = sum(b > a for a, b in zip(first, longer, strict=True))
    table.append(("note" if gained else "ok", "ten times over", f"{gained} of {size} rewards are higher"))
    try_hack("odd characters", ["\0\t\ufeff{]\\\u202e\U0001f600" * 9] * size)
    for name in sorted({"solution", "answer", "ground_truth"} & rows[0].keys()):
        try_hack(f"only the {name}", [str(row[name]) for row in rows], "note")
    return table


def _holds_a_value(row: Row, prompt: str) -> bool:
    """True if a value of another column stands in the prompt, as the answer to a question about a text does."""
    columns = (str(row[name]).strip() for name in row if name not in ("prompt", "completion"))
    return any(value and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", prompt) for value in columns)


def _score(
    suite: RewardSuite, rows: list[Row], texts: list[str] | None = None, quiet: bool = False
) -> tuple[list[float], int]:
    """Rewards of completions or `texts`, and how many failed or were late; the first is printed unless `quiet`."""
    rollouts = []
    for index, row in enumerate(rows):
        completion = row["completion"]
        if texts is not None:
            plain = isinstance(completion, str)
            completion = texts[index] if plain else [{"role": "assistant", "content": texts[index]}]
        ids = list(completion_text(completion).encode())  # bytes: there is no tokenizer
        rollouts.append(Rollout([0], ids, [True] * len(ids), None, completion, FinishReason.STOP))
    with warnings.catch_warnings(action="ignore" if quiet else "once"):
        try:
            result = suite(rows, rollouts, CONTEXT)
        except MissingArgument:  # of the rows, for which the function is not to blame
            raise
        except RewardError as error:  # on all samples
            if not quiet:
                print(f"covey: {error}", file=sys.stderr)
            return [math.nan] * len(rows), len(rows)
    failed = [result.stats[f"rewards/{suite.names[0]}/{kind}"].value() for kind in ("failures", "timeouts")]
    return result.rewards[:, 0].tolist(), int(sum(failed))
