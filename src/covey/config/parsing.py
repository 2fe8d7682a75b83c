"""Values of fields as users write them (JSON text, booleans, lists), in the form that the code reads."""

import json
import re
from contextlib import suppress
from typing import Any

from covey.runtime.safe_text import is_secret, without_secrets

DICT_FIELDS = (
    "model_init_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
    "transformers_continuous_batching_config",
    "vllm_engine_kwargs",
    "sglang_server_args",
)  # those that accept JSON


FILE_FIELDS = ("accelerator_config", "deepspeed", "fsdp_config")  # those that accept the path of a JSON file, too


def as_dict(name: str, value: dict[str, Any] | str | None, others: str = "") -> dict[str, Any] | None:
    """The value of field `name`, which accepts a dict or JSON text, and what the message names as `others`."""
    if isinstance(value, str):
        text = value
        try:
            value = json.loads(text, object_pairs_hook=unique)
        except ValueError as error:
            shown = "..." if any(map(is_secret, re.findall(r"[\w-]+", text))) else repr(text)
            raise ValueError(
                f"{name}={shown} is not JSON ({error}); write it like '{{\"key\": 1}}'{others}."
            ) from error
    if value is None or isinstance(value, dict):
        return value
    shown = repr(without_secrets(value))
    raise ValueError(f"{name}={shown} must be a dict, or JSON text of one, but is a {type(value).__name__}.")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ValueError for a name that is there twice, of which Python would take the last."""
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"`{twice}` is there twice. Leave one out.")
    return dict(pairs)


def as_urls(name: str, value: str | list[str] | None) -> str | None:
    """The URLs of field `name` (one, several with commas between them, or a list) with commas between them."""
    if not value:
        return None
    if not isinstance(value, str | list | tuple):
        raise ValueError(
            f"{name}={value!r} must be the URL of a server, or a list of such, as in http://127.0.0.1:8000."
        )
    urls = value.split(",") if isinstance(value, str) else list(value)
    urls = [str(url).strip().rstrip("/") for url in urls if str(url).strip()]
    for url in urls:
        if "@" in url or without_secrets(url) != url:  # not shown
            raise ValueError(
                f"{name} names a server with a user or password in its URL, which would show in every message. Write"
                " http://HOST:PORT, and give the key as vllm_server_api_key or sglang_api_key."
            )
        if not re.fullmatch(r"https?://[^/\s]+", url):
            raise ValueError(
                f"{name}={value!r}: {url!r} is not the URL of a server. Write http://HOST:PORT, without a"
                " path, as in http://127.0.0.1:8000."
            )
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise ValueError(f"{name} names {twice} twice: list each server once.")
    return ",".join(urls)


def as_memory_share(value: float | str | None) -> float | str:
    """`vllm_gpu_memory_utilization` as a number or "auto"."""
    if value in (None, "auto"):
        return "auto"
    with suppress(TypeError, ValueError):
        if 0 < float(value) <= 1:
            return float(value)
    raise ValueError(
        f"vllm_gpu_memory_utilization={value!r} is out of range: it must be above 0 and at most 1, or 'auto', which"
        " works it out (`covey explain` shows how)."
    )


def as_range(value: object) -> tuple[float, float] | None:
    """`reward_clip_range` as two numbers, from a pair or from text like "-1,1" or "[-1, 1]"."""
    if value is None:
        return None
    if isinstance(value, tuple) and all(isinstance(part, str) and len(part) == 1 for part in value):
        value = "".join(value)  # argparse makes a tuple of characters of such text
    parts = value.strip("()[] ").split(",") if isinstance(value, str) else value
    try:
        low, high = (float(part) for part in parts)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward_clip_range={value!r} is not a pair of numbers; give the smallest and the largest reward, as in "
            "(-1.0, 1.0)."
        ) from error
    if not low < high:
        raise ValueError(
            f"reward_clip_range=({low:g}, {high:g}): the first number must be smaller than the second, or every "
            "reward becomes the same."
        )
    return low, high


SAMPLING_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length"),
}
"""Keys of `generation_kwargs` that set a field."""


def set_fields_from_generation_kwargs(args: Any) -> None:
    """Move keys that are fields into these; ValueError where a field was given another value."""
    given = dict(args.generation_kwargs or {})
    for key in SAMPLING_FIELDS.keys() & given:
        name, value = SAMPLING_FIELDS[key], given.pop(key)
        if (current := getattr(args, name)) not in (value, type(args).__dataclass_fields__[name].default):
            raise ValueError(f"generation_kwargs[{key!r}]={value!r} and {name}={current!r} differ: leave one out.")
        setattr(args, name, value)
        args.generation_kwargs = given
