"""Lookup of models and datasets on the Hugging Face hub by one request, without the minutes of retries of libraries."""

import difflib
import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

SECONDS = 10.0  # deadline of the request
HOLDS = 60.0  # seconds for which a refusal is cached: the network may come back, or the user may log in
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
MARKS = {"model": ("config.json", "adapter_config.json"), "dataset": ()}
"""Files, any of which shows that a folder is a model."""

Kind = Literal["model", "dataset"]


class NotFound(FileNotFoundError):
    """A name that is neither a local folder nor a repository that can be downloaded."""


def look_up(name: str, kind: Kind = "model", *, called: str = "", **location: Any) -> bool:
    """Check that a name can be loaded: a folder, an earlier download, or a repository on the hub.

    Args:
        name: a hub id or the path of a folder, which may begin with `~`.
        kind: "model" or "dataset".
        called: the name with its setting, for messages; by default `model=...` or `dataset ...`.
        location: `revision`, `token`, `cache_dir` and `local_files_only`, as for `from_pretrained`.

    Returns:
        False if the name must be loaded from an earlier download, because the hub gives no answer.

    Raises:
        NotFound: the name is none of these, or the hub cannot be reached; at most one request is made.
    """
    if os.path.isdir(folder := os.path.expanduser(name)):
        base = _base_of(Path(folder)) if kind == "model" else None
        return base is None or look_up(base, called=f"the base model {base!r} of the adapter {name!r}", **location)
    called = called or (f"model={name!r}" if kind == "model" else f"dataset {name!r}")
    proposal = nearby(name, kind)
    if looks_like_a_path(name):
        wanted = "the folder of a model, which holds config.json" if kind == "model" else "a data file or folder"
        raise NotFound(f"{called}: there is no such folder.{proposal} Give {wanted}, or a hub id.")
    cached = is_cached(name, kind, location.get("cache_dir"))
    if variable := next((one for one in OFFLINE if os.environ.get(one, "").upper() in ("1", "ON", "YES", "TRUE")), ""):
        because = f"with {variable} set the hub is not asked"
    elif location.get("local_files_only"):
        because = "with local_files_only the hub is not asked"
    else:
        reason = _answer(name, kind, location.get("revision"), location.get("token"))
        if reason is None:
            return True
        because, known_missing = reason
        if known_missing and not cached:
            raise NotFound(f"{called} is not a local folder, and {because}.{proposal} Check the spelling.")
    if cached:
        return False
    raise NotFound(
        f"{called} is neither a local folder nor an earlier download, and {because}.{proposal} Give a folder,"
        " or the id of a download."
    )


def _base_of(folder: Path) -> str | None:
    """The base model of the adapter in a folder; None if the folder has a whole model."""
    path = folder / "adapter_config.json"
    if (folder / "config.json").exists() or not path.exists():
        return None
    with suppress(OSError, ValueError, AttributeError):  # loading says what is wrong with it
        base = json.loads(path.read_text()).get("base_model_name_or_path")
        return base if isinstance(base, str) and base else None
    return None


def looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.exists(name)


def nearby(name: str, kind: Kind = "model") -> str:
    """A sentence that proposes the local folder with the most similar name; empty if there is none."""
    path = Path(name).expanduser()
    marks = MARKS[kind]
    try:
        entries = [entry for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, sorted(entry.name for entry in entries), n=3)
    proper = [one for one in close if not marks or any((path.parent / one / mark).exists() for mark in marks)]
    if not proper:
        return ""
    found = str(path.parent / proper[0])
    return f" Did you mean {found if os.sep in found else './' + found!s}?"


def is_cached(name: str, kind: Kind, cache_dir: Any = None) -> bool:
    """True if files of the repository were downloaded before."""
    from huggingface_hub import constants

    repository = name.partition(":")[0]
    folder = f"{kind}s--" + repository.replace("/", "--")
    caches = [cache for cache in (cache_dir, constants.HF_HUB_CACHE) if cache]
    if any(Path(cache, folder, "snapshots").is_dir() for cache in caches):
        return True
    prepared = os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME, "datasets"))
    return kind == "dataset" and Path(prepared, repository.replace("/", "___").lower()).is_dir()


_answers: dict[tuple[Any, ...], tuple[float, tuple[str, bool] | None]] = {}  # when, and the answer


def _answer(*asked: Any) -> tuple[str, bool] | None:
    """Cached answer of `_ask`; a refusal is cached for `HOLDS` seconds only."""
    since, reason = _answers.get(asked, (-math.inf, ("not asked yet", False)))
    if reason is not None and time.monotonic() >= since + HOLDS:
        reason = _ask(*asked)
        _answers[asked] = time.monotonic(), reason
    return reason


def _ask(name: str, kind: Kind, revision: str | None, token: Any) -> tuple[str, bool] | None:
    """None if the hub may have the repository; else the reason, and True if the hub says that it has none."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().repo_info(name.partition(":")[0], repo_type=kind, revision=revision, timeout=SECONDS, token=token)
    except GatedRepoError:
        return None  # loading says how to get access
    except RepositoryNotFoundError:
        return f"the hub has no {kind} of this name (or it is private: `hf auth login`)", True
    except HFValidationError:
        return "it is no hub id, which is written owner/name", True
    except HfHubHTTPError:
        return None  # it is there but busy, or has no such revision: loading tries again, or says so
    except Exception as error:  # of the library for requests
        return f"the hub cannot be reached ({type(error).__name__})", False
    return None
