"""Reading of JSON requests: each value is checked, and a refusal names it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from covey.core.engine import SamplingParams
from covey.tinker.adapter import AdapterSpec
from covey.tinker.errors import Refusal
from covey.tinker.learner import AdamParams
from covey.tinker.wire import WireTensor

Body = Mapping[str, Any]

LARGEST = 1 << 63  # whole numbers are below it
LONGEST = 100 * 365.25 * 86400.0  # seconds that anything is kept, at most
MAX_TOKEN = 1 << 31  # ids of tokens are below it
MAX_TOP = 100  # most tokens of a position that log-probs are given for
MOST_STOPS = 128  # texts or tokens that end a sample
LONGEST_STOP = 1000  # most characters of such a text
_KINDS: dict[type, tuple[str, Any]] = {
    int: ("a whole number", int),
    float: ("a number", (int, float)),
    str: ("a text", str),
    bool: ("true or false", bool),
    dict: ("an object", dict),
    list: ("a list", list),
}


def value_of(body: Body, name: str, kind: type, default: Any = ..., least: float = -math.inf) -> Any:
    """A value of a request, or its default where it is absent or null; Refusal for another type or a smaller number."""
    value = body.get(name)
    if value is None:
        if default is ...:
            raise Refusal(f"{name} is missing.")
        return default
    text, kinds = _KINDS[kind]
    right = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
    if right and kind in (int, float):
        lowest = max(least, -LARGEST)
        right = lowest <= value < LARGEST if isinstance(value, int) else math.isfinite(value) and value >= least
        text += "" if least == -math.inf else f", {least:g} or more"
    if not right:
        raise Refusal(f"{name}={value!r:.80} must be {text}.")
    return value


def whole(text: str) -> int | None:
    """The number that digits from 0 to 9 stand for; None for other text, or more than nine of them."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def lifetime(body: Body) -> float | None:
    """Seconds that a saved state is kept; None for no end."""
    seconds: float | None = value_of(body, "ttl_seconds", float, None, 0)
    if seconds is not None and seconds > LONGEST:
        raise Refusal(f"ttl_seconds={seconds:g}: at most {LONGEST:g} are possible; leave it out for no end.")
    return seconds


def adapter_spec(body: Body, seed: int, most: int) -> AdapterSpec:
    """Settings of a new adapter; `seed` unless the request has one."""
    given = value_of(body, "lora_config", dict, {})
    rank = value_of(given, "rank", int, 32, 1)
    if rank > most:
        raise Refusal(f"rank={rank}: this server takes at most {most}. Start it with --max-rank {rank}.")
    if (family := value_of(value_of(body, "optimizer_config", dict, {}), "type", str, "adamw")) != "adamw":
        raise Refusal(f"the optimizer {family!r} is not served here; the one that is: adamw.")
    switches = {name: value_of(given, name, bool, True) for name in ("train_attn", "train_mlp", "train_unembed")}
    return AdapterSpec(rank, value_of(given, "seed", int, seed), **switches)


def adam_params(body: Body) -> AdamParams:
    """Settings of a step."""
    given = body.get("adam_params", body.get("optimizer_params"))
    if not isinstance(given, dict):
        raise Refusal("adam_params is missing.")
    if (family := given.get("type", "adamw")) != "adamw":
        raise Refusal(f"the optimizer {family!r} is not served here; use AdamParams.")
    known = [one.name for one in fields(AdamParams)]
    if unknown := [name for name in given if name not in (*known, "type")]:
        raise Refusal(f"adam_params has no setting {unknown[0]!r}; it has {', '.join(known)}.")
    params = AdamParams(
        **{name: float(value_of(given, name, float, None, 0)) for name in known if given.get(name) is not None}
    )
    if not (params.beta1 < 1 and params.beta2 < 1):
        raise Refusal(f"adam_params: beta1={params.beta1} and beta2={params.beta2} must be below 1.")
    return params


@dataclass(frozen=True)
class SampleAsked:
    """A request of samples of one prompt."""

    prompt: list[int]
    n: int
    params: SamplingParams
    seed: int | None
    prompt_logprobs: bool
    last_n: int | None  # log-probs of so many last tokens of the prompt alone
    top_prompt: int
    top_sampled: int
    targets: WireTensor | None  # [prompt - 1, K] tokens to score at each position but the first; -1 for none


def sample_asked(body: Body, most_tokens: int, vocabulary: int, ends: set[int], most_samples: int) -> SampleAsked:
    """Read a request of samples; Refusal for what cannot be sampled."""
    prompt = _tokens(value_of(body, "prompt", dict), vocabulary)
    if not 0 < len(prompt) < most_tokens:
        raise Refusal(f"the prompt has {len(prompt)} tokens; from 1 to {most_tokens - 1} are possible.")
    n = value_of(body, "num_samples", int, 1, 1)
    if n > most_samples:
        raise Refusal(f"num_samples={n}: at most {most_samples} are possible at once.")
    if value_of(body, "prompt_alt_tokens_k", int, 0, 0):
        raise Refusal("prompt_alt_tokens_k is not served here; leave it out.")
    given = value_of(body, "sampling_params", dict, {})
    room = most_tokens - len(prompt)
    wanted = value_of(given, "max_tokens", int, room, 1)
    temperature = float(value_of(given, "temperature", float, 1.0, 0))
    top_p, top_k = float(value_of(given, "top_p", float, 1.0, 0)), value_of(given, "top_k", int, -1)
    if not 0 < top_p <= 1:
        raise Refusal(f"top_p={top_p} must be above 0 and at most 1.")
    if 0 < temperature < 1e-5:
        raise Refusal(f"temperature={temperature} must be 0 (greedy), or 1e-05 or more.")
    params = SamplingParams(min(wanted, room), temperature, max(0, top_k), top_p, extra=_stops(given.get("stop"), ends))
    top_prompt = value_of(body, "topk_prompt_logprobs", int, 0, 0)
    top_sampled = value_of(body, "topk_sample_logprobs", int, 0, 0)
    if (most := max(top_prompt, top_sampled)) > min(MAX_TOP, vocabulary):
        raise Refusal(f"{most} most probable tokens: at most {min(MAX_TOP, vocabulary)} are possible.")
    scored = value_of(body, "prompt_logprobs", bool, False)
    last_n = value_of(body, "prompt_logprobs_last_n", int, None, 1)
    if last_n is not None and (not scored or last_n > len(prompt) - 1):
        raise Refusal(
            f"prompt_logprobs_last_n={last_n} needs prompt_logprobs, and is at most {len(prompt) - 1} for this prompt."
        )
    targets = _targets(body.get("target_prompt_logprobs"), len(prompt), vocabulary)
    return SampleAsked(
        prompt, n, params, value_of(given, "seed", int, None), scored, last_n, top_prompt, top_sampled, targets
    )


def _tokens(prompt: Body, vocabulary: int) -> list[int]:
    tokens: list[int] = []
    for chunk in value_of(prompt, "chunks", list):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            kind = chunk.get("type") if isinstance(chunk, dict) else chunk
            raise Refusal(f"the prompt holds {kind!r:.80}; this server reads text (encoded_text) alone.")
        tokens += value_of(chunk, "tokens", list)
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise Refusal(f"the token {token!r:.80} is not in the vocabulary, which has {vocabulary:,} tokens.")
    return tokens


def _stops(stop: Any, ends: set[int]) -> dict[str, Any]:
    """Settings of the engine. The model's own end tokens end a sample, in addition to `stop`; `[]` is no end at all."""
    if stop is None:
        return {}
    given = [stop] if isinstance(stop, str) else stop
    if given == []:
        return {"eos_token_id": []}
    if isinstance(given, list) and len(given) > MOST_STOPS:
        raise Refusal(f"stop has {len(given):,} entries; at most {MOST_STOPS} are possible.")
    if isinstance(given, list) and all(isinstance(one, str) and one for one in given):
        _check_texts(given)
        return {"stop": given}
    if isinstance(given, list) and all(type(one) is int and 0 <= one < MAX_TOKEN for one in given):
        return {"eos_token_id": sorted({*given, *ends})}
    raise Refusal(f"stop={stop!r:.80} must be texts, or tokens, or [] for none.")


def _check_texts(stops: list[str]) -> None:
    """Refuse texts that no completion can hold, or that are so long that looking for them holds up all samples."""
    for one in stops:
        if len(one) > LONGEST_STOP:
            raise Refusal(f"a stop text has {len(one):,} characters; at most {LONGEST_STOP:,} are possible.")
        try:
            one.encode()
        except UnicodeEncodeError:
            raise Refusal(f"the stop text {one!r:.80} holds half a surrogate pair, which no sample can hold.") from None


def _targets(given: Any, prompt: int, vocabulary: int) -> WireTensor | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise Refusal("target_prompt_logprobs must be a tensor.")
    numbers = {name: value_of(given, name, list, None) for name in ("data", "shape")}
    sparse = [value_of(given, f"sparse_{name}_indices", list, None) for name in ("crow", "col")]
    try:
        values = np.asarray(numbers["data"] or [], np.int64)
        shape = tuple(map(int, numbers["shape"] or [len(values)]))
        rows, columns = (None if one is None else np.asarray(one, np.int64) for one in sparse)
        tensor = WireTensor(values, shape, rows, columns)
        fits = len(shape) == 2 and shape[0] == prompt - 1 and 0 < shape[1] <= MAX_TOP and tensor.fits
        dense = tensor.dense(-1) if fits else values
    except (TypeError, ValueError, IndexError, OverflowError):
        raise Refusal("target_prompt_logprobs cannot be read as a tensor of whole numbers.") from None
    if not fits or dense.min(initial=0) < -1 or dense.max(initial=0) >= vocabulary:
        raise Refusal(
            f"target_prompt_logprobs has shape {list(shape)}; for this prompt it is [{prompt - 1}, K], K at most"
            f" {MAX_TOP}, with tokens of the vocabulary, or -1 for none."
        )
    return tensor
