"""Completions of the same prompts early and late in a run, from its record."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.core.transcript import as_text
from covey.observability.record_files import REWARD, all_files, evaluation_files, number_of, read_rows

MOST = 8  # pairs that a page shows

Row = dict[str, Any]


def pairs(record: Path, weights: Sequence[float] = ()) -> list[tuple[Row | None, Row]]:
    """The first completion of a prompt in the first and in the last of several evaluations, or rollout batches.

    Evaluations are preferred, because they have the same prompts each time; else prompts that training sampled more
    than once are used. Without any pair, the latest completions are returned alone. Each row has its total `reward` by
    the `weights`.
    """
    of_training: dict[int, list[Path]] = {}
    for path in all_files(record):
        of_training.setdefault(number_of(path), []).append(path)
    found: list[tuple[Row | None, Row]] = []
    latest: dict[str, Row] = {}
    for files in (*evaluation_files(record).values(), of_training):
        if not files:
            continue
        firsts, lasts = (_by_prompt(files[number], weights) for number in (min(files), max(files)))
        latest = latest or lasts
        if len(files) > 1:
            found += [(firsts[prompt], lasts[prompt]) for prompt in firsts if prompt in lasts]
    return (found or [(None, row) for row in latest.values()])[:MOST]


def _by_prompt(files: Sequence[Path], weights: Sequence[float]) -> dict[str, Row]:
    """The first row of each prompt, in the order of the files."""
    found: dict[str, Row] = {}
    for row in (row for path in files for row in read_rows(path, of_tokens=False)):
        prompt = row["prompt"] if row["prompt"] is not None else (row["data"] or {}).get("prompt", "")
        rewards = [value for name, value in row.items() if name.startswith(REWARD)]
        shares = weights if len(weights) == len(rewards) else [1.0] * len(rewards)
        known = [share * reward for share, reward in zip(shares, rewards, strict=True) if reward is not None]
        found.setdefault(as_text(prompt), {**row, "prompt": prompt, "reward": sum(known) if known else None})
    return found
