"""Rollouts of a recorded rollout batch as columns: one value per rollout for lists, values of tokens for a page."""

import functools
import json
import zlib
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from covey.core.transcript import as_text, count
from covey.observability.record_files import REWARD, TERM

Array = NDArray[Any]
EXCERPT = 200  # characters of texts in lists

COLUMNS = {
    "logprobs": ("log-prob", "log-prob of the token as the engine reported it, in nats", "low"),
    "entropies": ("entropy", "entropy of the distribution that the token was drawn from, in nats", "high"),
    "trainer": ("trainer's log-prob", "log-prob by the trainer before its updates, in nats", "low"),
    "gap": ("gap", "trainer's log-prob minus the engine's: 0 where both compute the same", "both"),
    "log_ratios": ("log ratio", "log of the importance ratio in the last update that trained on the token", "both"),
    "ratio": ("ratio", "importance ratio in the last update that trained on the token", "hidden"),
    "clipped": ("clipped", "share of the updates in which a clip or filter removed the token's gradient", "high"),
    "current": ("current log-prob", "log-prob in the last update that trained on the token", "low"),
    "ref_logprobs": ("reference log-prob", "log-prob under the reference", "low"),
    "drift": ("log-prob minus reference", "log-prob minus the reference's: their mean is the KL divergence", "both"),
    "teacher_logprobs": ("teacher's log-prob", "log-prob by the rollout's teacher, in nats", "low"),
    "teacher_gap": (
        "teacher gap",
        "teacher's log-prob minus the policy's: above 0 if the teacher finds the token likelier",
        "both",
    ),
    "advantages": ("advantage", "credit of the token", "both"),
    "weights": ("weight", "share of the token in the loss; 0 where nothing is learned from it", "high"),
    "entropy_weights": ("entropy weight", "share of the token in the entropy bonus", "high"),
    "mismatch_weights": ("mismatch weight", "correction of the engine's distribution", "both1"),
    "versions": ("version", "optimizer steps behind the weights that sampled the token", "each"),
    "turn": ("turn", "turn of the policy", "each"),
}
"""Columns of tokens by name: title, meaning, and which values the colour scale marks."""

OF_TWO = (
    ("gap", "trainer", "logprobs"),
    ("drift", "trainer", "ref_logprobs"),
    ("teacher_gap", "teacher_logprobs", "trainer"),
)
"""Columns that are differences of two other columns."""


def described(name: str) -> tuple[str, str, str]:
    """Title, meaning and scale of a column of tokens."""
    term = name.removeprefix(TERM)
    return COLUMNS.get(name) or (f"weight in {term}", f"share of the token in the term '{term}' of the loss", "high")


class Lists:
    """Columns of lists of a table, as flat arrays."""

    def __init__(self, table: pa.Table, lengths: Array):
        self.table, self.lengths = table, lengths
        self.firsts = lengths.cumsum() - lengths
        self.size = int(lengths.sum())

    def flat(self, name: str) -> Array | None:
        """All values of a column, NaN where a row has no list; None if there is no such column of this size."""
        if name not in self.table.column_names:
            return None
        column = self.table[name].combine_chunks()
        known = column.is_valid().to_numpy(zero_copy_only=False)
        values: Array = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
        if len(values) != int(self.lengths[known].sum()):
            return None
        if known.all():
            return values
        whole = np.full(self.size, np.nan, np.float32)
        whole[np.repeat(known, self.lengths)] = values
        return None if not known.any() else whole


@dataclass(frozen=True)
class TokenUpdate:
    """Values of a rollout batch's tokens in one optimizer step, located by the index of each rollout's first token."""

    step: int
    rows: list[tuple[int, int]]  # (index of a rollout's first token in its rollout batch, its row in the file)
    path: Path
    written: int  # time at which the file was written, a version of its content

    def spread(self, name: str, size: int) -> Array | None:
        """Values [size] of all tokens of the rollout batch, NaN where one was not trained on."""
        lists = _lists_of(self.path, self.written)
        if (values := lists.flat(name)) is None:
            return None
        whole = np.full(size, np.nan, np.float32)
        for first, row in self.rows:
            start, length = lists.firsts[row], lists.lengths[row]
            whole[first : first + length] = values[start : start + length]
        return whole


@functools.lru_cache(maxsize=32)
def _lists_of(path: Path, written: int) -> Lists:
    table = pq.read_table(path)
    return Lists(table, pc.list_value_length(table["logprobs"]).to_numpy().astype(np.int64))


class RecordedBatch:
    """One file of rollouts in a record, with the updates that trained on them."""

    def __init__(self, table: pa.Table, updates: list[TokenUpdate]):
        self.table, self.updates = table, updates
        self.names = [name for name in table.column_names if name.startswith(REWARD)]
        self.has_tokens = "token_ids" in table.column_names
        lengths = pc.list_value_length(table["token_ids"]) if self.has_tokens else table["length"]
        self.lengths = lengths.to_numpy().astype(np.int64)
        self.lists = Lists(table, self.lengths)
        self.values = self._values() if self.has_tokens else {}

    def _values(self) -> dict[str, Array]:
        """Columns [N] of all tokens; NaN where a value is not known."""
        lists, size = self.lists, self.lists.size
        of_terms = [name for name in lists.table.column_names if name.startswith(TERM)]
        names = (*COLUMNS, *of_terms)
        found = {name: values for name in names if (values := lists.flat(name)) is not None}

        def in_updates(name: str) -> list[Array]:
            return [values for one in self.updates if (values := one.spread(name, size)) is not None]

        raw = lists.flat("sampled")
        self.sampled = np.ones(size, bool) if raw is None else raw.astype(bool)
        old, trained = lists.flat("old_logprobs"), in_updates("logprobs")
        if old is not None or trained:
            found["trainer"] = trained[0] if old is None else old
        if "entropies" not in found and (measured := in_updates("entropies")):
            found["entropies"] = measured[0]
        if old is not None and trained:
            found["current"] = _latest(trained)
            ratios = in_updates("log_ratios")
            found["log_ratios"] = _latest(ratios) if ratios else found["current"] - old
            with np.errstate(over="ignore"):
                found["ratio"] = np.exp(found["log_ratios"])
            if clipped := in_updates("clipped"):
                found["clipped"] = np.nan_to_num(np.stack(clipped)).mean(0)
        for name, one, other in OF_TWO:
            if one in found and other in found:
                found[name] = found[one] - found[other]
        turns = self.table["turn_ends"].to_pylist()
        if any(len(ends) > 1 for ends in turns):
            pairs = zip(turns, self.lengths, strict=True)
            found["turn"] = np.concatenate(
                [np.searchsorted(ends, np.arange(n)).astype(np.float32) + 1 for ends, n in pairs]
            )
        for name in set(found) - {"advantages", "weights", "entropy_weights", "versions", *of_terms}:
            found[name] = np.where(self.sampled, found[name], np.nan)
        return {name: found[name] for name in names if name in found}

    def tokens_of(self, row: int) -> slice:
        return slice(int(self.lists.firsts[row]), int(self.lists.firsts[row] + self.lengths[row]))

    def block(self, reward_weights: list[float]) -> dict[str, Any]:
        """One value of each column for every rollout."""
        table, rows = self.table, range(self.table.num_rows)
        rewards = {name.removeprefix(REWARD): _numbers(table[name].to_pylist()) for name in self.names}
        completions = [json.loads(text) for text in table["completion"].to_pylist()]
        texts = [as_text(completion) for completion in completions]
        counts = [count(completion) for completion in completions]
        columns: dict[str, list[Any]] = {name: table[name].to_pylist() for name in LISTED}
        if "role" in table.column_names and any(roles := table["role"].to_pylist()):
            columns |= {"role": roles, "game": table["game"].to_pylist(), "group": self._games_together(columns)}
        if "source" in table.column_names:
            columns["source"] = table["source"].to_pylist()
        columns["advantage"] = _numbers(columns["advantage"])
        columns["length"] = self.lengths.tolist()
        columns["reward"] = _totals([*rewards.values()], reward_weights)
        columns["excerpt"] = [text[:EXCERPT] for text in texts]
        columns["text"] = [zlib.crc32(text.encode("utf-8", "replace")) for text in texts]
        columns["turns"] = [max(one.turns, 1) for one in counts]
        columns["calls"] = [one.calls for one in counts]
        columns["failed_calls"] = [one.failed_calls for one in counts]
        if self.has_tokens:
            of_each = [self._summary(self.tokens_of(row)) for row in rows]
            columns |= {name: [one[name] for one in of_each] for name in of_each[0]} if of_each else {}
        else:
            taught = zip(columns["fate"], columns["length"], strict=True)
            columns["sampled"] = columns["length"]
            if "entropy" in table.column_names:
                columns["entropy"] = _numbers(table["entropy"].to_pylist())
            columns["taught"] = [length if fate == "trained" else 0 for fate, length in taught]
        return {"columns": columns, "rewards": rewards}

    @staticmethod
    def _games_together(columns: dict[str, list[Any]]) -> list[int]:
        """Group of each rollout: one for all samples of a row, even if seats of a game have prompts of their own."""
        pairs = [*zip(columns["row"], columns["sample"], strict=True)]
        begins = [
            index == 0 or row != pairs[index - 1][0] or sample <= pairs[index - 1][1]
            for index, (row, sample) in enumerate(pairs)
        ]
        return (np.cumsum(begins) - 1).tolist()

    def _summary(self, part: slice) -> dict[str, Any]:
        """Means over a rollout's tokens, and the most extreme tokens."""
        chosen, values = self.sampled[part], {name: column[part] for name, column in self.values.items()}
        found: dict[str, Any] = {"sampled": int(chosen.sum())}
        weights, advantages = (values.get(name, np.zeros(len(chosen))) for name in ("weights", "advantages"))
        taught = (weights != 0) & (advantages != 0)
        for name in values:
            taught |= (values[name] != 0) if name.startswith(TERM) else False
        found["taught"] = int(taught.sum())
        for name, title in (("logprobs", "logprob"), ("entropies", "entropy"), ("drift", "drift")):
            known = values[name][~np.isnan(values[name])] if name in values else chosen[:0]
            found[title] = _number(known.mean()) if len(known) else None
        for name, title in (("gap", "gap"), ("log_ratios", "log_ratio")):
            sizes = np.nan_to_num(np.abs(values[name]), nan=-1.0) if name in values else np.zeros(0)
            at = int(sizes.argmax()) if len(sizes) and sizes.max() >= 0 else None
            found[title] = None if at is None else _number(values[name][at])
            found[f"{title}_at"] = at
        clipped = values.get("clipped")
        found["clipped"] = None if clipped is None else int((clipped > 0).sum())
        found["clipped_at"] = int(clipped.argmax()) if found["clipped"] and clipped is not None else None
        return found

    def firsts(self) -> list[int]:
        """Rows of the first rollout of each group."""
        _, rows = np.unique(self.table["group"].to_numpy(), return_index=True)
        return sorted(rows.tolist())

    def prompts(self, text_of: Callable[[Any], str] = as_text) -> list[str]:
        """Text of the prompt at the first rollout of each group, nothing at the others."""
        firsts = {*self.firsts()}
        return [text_of(self.prompt(row)) if row in firsts else "" for row in range(self.table.num_rows)]

    def prompt(self, row: int) -> Any:
        own = json.loads(self.table["prompt"][row].as_py())
        return json.loads(self.table["data"][row].as_py()).get("prompt", "") if own is None else own

    def rollout(self, row: int, key: str, vocabulary: list[bytes]) -> dict[str, Any]:
        """Everything that is recorded about a rollout."""
        names = [name for name in (*WHOLE, *self.names) if name in self.table.column_names]
        cell = {name: self.table[name][row].as_py() for name in names}
        data = {name: value for name, value in json.loads(cell.pop("data")).items() if name != "prompt"}
        return {
            **{name: value for name, value in cell.items() if name not in self.names},
            "id": f"{key}.{row}",
            "prompt": self.prompt(row),
            "completion": json.loads(cell["completion"]),
            "data": data,
            "columns": json.loads(cell["columns"]),
            "steps": json.loads(cell["steps"]),
            "rewards": {name.removeprefix(REWARD): cell[name] for name in self.names},
            "tokens": self._tokens(row, vocabulary) if self.has_tokens else None,
        }

    def _tokens(self, row: int, vocabulary: list[bytes]) -> dict[str, Any]:
        ids, prompt = (self.table[name][row].values.to_numpy() for name in ("token_ids", "prompt_ids"))
        pieces = {}
        for number in np.unique(np.concatenate([ids, prompt])).tolist():
            piece = vocabulary[number] if number < len(vocabulary) else f"⟨{number}⟩".encode()
            try:
                pieces[number] = piece.decode()
            except UnicodeDecodeError:
                pieces[number] = list(piece)
        part, columns = self.tokens_of(row), []
        for name, values in self.values.items():
            title, meaning, scale = described(name)
            packed = _packed(values[part], "<f4")
            columns.append({"name": name, "title": title, "meaning": meaning, "scale": scale, "values": packed})
        return {
            "ids": _packed(ids, "<i4"),
            "prompt_ids": _packed(prompt, "<i4"),
            "sampled": _packed(self.sampled[part], "u1"),
            "pieces": pieces,
            "updates": [update.step for update in self.updates],
            "columns": columns,
        }


LISTED = ("step", "generation", "row", "sample", "group", "finish", "fate", "error", "advantage", "images", "seconds")
WHOLE = (
    *("step", "generation", "row", "sample", "source", "group", "role", "game", "data", "completion", "steps"),
    *("columns", "finish", "error", "fate", "advantage", "seconds", "tool_seconds", "calls", "image_files", "reused"),
    *("turn_ends", "strands"),
)


def _latest(columns: list[Array]) -> Array:
    """The last value that is known of each token."""
    latest = columns[0].copy()
    for column in columns[1:]:
        latest = np.where(np.isnan(column), latest, column)
    return latest


def _totals(rewards: list[list[float | None]], weights: list[float]) -> list[float | None]:
    """Weighted sums of rewards, without functions that abstained; None if all did."""
    weights = weights if len(weights) == len(rewards) else [1.0] * len(rewards)
    totals: list[float | None] = []
    for cells in zip(*rewards, strict=True):
        known = [weight * cell for weight, cell in zip(weights, cells, strict=True) if cell is not None]
        totals.append(sum(known) if known else None)
    return totals


def _numbers(values: list[float | None]) -> list[float | None]:
    return [None if value is None else _number(value) for value in values]


def _number(value: Any) -> float | None:
    """A number for JSON, rounded to the digits that are shown; None for NaN and infinity."""
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _packed(values: Array, kind: str) -> str:
    return b64encode(np.ascontiguousarray(values).astype(kind).tobytes()).decode()
