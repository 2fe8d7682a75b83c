"""Conversations of one rollout, joined to strands in which each sampled token comes once."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from covey.core.records import FinishReason, Rollout


def join_strands(parts: Sequence[tuple[Rollout, int]]) -> tuple[Rollout, dict[tuple[int, int], int]]:
    """One rollout of several, and the last token of each turn by (part, number of the turn, from 1).

    Each part comes with the number of its first tokens, prompt included, that an earlier part has sampled or read. A
    part shares at least these, and at most the tokens before its own first sampled one: equal tokens that were sampled
    twice are trained on twice.
    """
    whole: list[int] = []  # tokens of the rollout, with its prompt
    found: list[tuple[np.ndarray, np.ndarray]] = []  # tokens of each part, and their positions in `whole`
    ends: dict[tuple[int, int], int] = {}
    strands: list[tuple[int, int]] = []
    sampled: list[bool] = []
    fields: dict[str, Any] = {name: [] for name in ("logprobs", "entropies", "versions", "sampling_mask")}
    first = parts[0][0]
    prompt = len(first.prompt_ids)
    for number, (part, own) in enumerate(parts):
        tokens = np.array([*part.prompt_ids, *part.completion_ids], dtype=np.int64)
        mask = [*[False] * len(part.prompt_ids), *part.sampled]
        if number == 0:
            shared, position = prompt, np.arange(prompt)
            whole += part.prompt_ids
        else:
            begins = next(index for index in range(own, len(mask)) if mask[index])
            lengths = [_common(tokens[:begins], other) for other, _ in found]
            best = max(range(len(found)), key=lengths.__getitem__)
            shared, position = lengths[best], found[best][1][: lengths[best]]
            follows = int(position[-1]) if shared else -1
            if follows != len(whole) - 1:
                strands.append((len(whole) - prompt, follows))
        position = np.concatenate([position, np.arange(len(whole), len(whole) + len(tokens) - shared)])
        found.append((tokens, position))
        whole += tokens[shared:].tolist()
        sampled += mask[shared:]
        skipped = shared - len(part.prompt_ids)
        for name, values in fields.items():
            given = getattr(part, name)
            if values is None or given is None:
                fields[name] = None
                continue
            filler: Any = [] if name == "sampling_mask" else (given or [0])[0] if name == "versions" else 0.0
            values += given[skipped:] if skipped >= 0 else [*[filler] * -skipped, *given]
        for turn, end in enumerate(part.turn_ends, 1):
            if end + len(part.prompt_ids) >= own:
                ends[number, turn] = int(position[end + len(part.prompt_ids)]) - prompt
    fields |= {"completion": "", "finish": FinishReason.STOP, "strands": strands, "media": first.media}
    return Rollout(first.prompt_ids, whole[prompt:], sampled, **fields), ends


def _common(tokens: np.ndarray, others: np.ndarray) -> int:
    """Number of first tokens that are equal."""
    size = min(len(tokens), len(others))
    differ = np.flatnonzero(tokens[:size] != others[:size])
    return int(differ[0]) if len(differ) else size
