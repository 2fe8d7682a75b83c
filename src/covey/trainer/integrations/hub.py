"""Uploads to the hub: models with their cards, and completions as a dataset; one that fails is tried again.

Uploads run in the background while training changes `output_dir`. So a model is uploaded from a copy of the files as
they were when its checkpoint was complete.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.hub import hf_api

from covey.core.findings import Finding
from covey.runtime.files import written_whole
from covey.runtime.user_code import format_error, report, warn
from covey.trainer.integrations.attributes import as_list
from covey.trainer.integrations.model_card import hub_id, model_card

if TYPE_CHECKING:
    from covey.trainer.trainer import OnlineTrainer

NO_DATA_SETS = ("csv", "json", "pandas", "parquet", "text", "generator")  # names of builders rather than of datasets
PUSH_EVERY = 120.0  # seconds between two uploads of completions; the hub limits the rate of commits


def create_model_card(
    self: "OnlineTrainer",
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | list[str] | None = None,
    language: str | None = None,
    license: str | None = None,
    finetuned_from: str | None = None,
    tasks: str | list[str] | None = None,
    dataset_tags: str | list[str] | None = None,
    dataset: str | list[str] | None = None,
    dataset_args: str | list[str] | None = None,
) -> None:
    """Write the model card, `README.md`, into `output_dir`.

    Args:
        model_name: its hub id; by default `hub_model_id` or the folder's name.
        tags: further tags.
        language, license: of the model, as the hub knows them.
        finetuned_from: hub id of the model that was trained; by default the one it was loaded from.
        tasks, dataset_args: accepted for compatibility with transformers; the task is text generation.
        dataset_tags, dataset, dataset_name: hub ids of datasets; by default that of the training data.
    """
    if not self.is_world_process_zero():
        return
    if not isinstance(model_name, str | None):
        raise TypeError(f"model_name={model_name!r:.80} must be text: the name of the model. Give others by keyword.")
    if idle := [name for name, given in (("tasks", tasks), ("dataset_args", dataset_args)) if given is not None]:
        warn(f"`{'`, `'.join(idle)}` has no effect: the task is text generation.")
    config, folder = self.policy.config, Path(self.args.output_dir or ".")
    base = finetuned_from or hub_id(getattr(config, "_name_or_path", None) or getattr(config, "name_or_path", None))
    trained_on = as_list(getattr(getattr(self.train_dataset, "info", None), "dataset_name", None))
    trained_on = [name for name in trained_on if name not in ("", *NO_DATA_SETS)]
    known = self.hub_model_id or self.args.hub_model_id
    if known and model_name in (None, known.rpartition("/")[2]):  # transformers gives it without its owner
        model_name = str(known)
    datasets = as_list(dataset_name or dataset or dataset_tags) or trained_on
    card = model_card(
        self, model_name or folder.name, base, datasets, as_list(tags), language=language, license=license
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(card, encoding="utf-8")


def init_hf_repo(self: "OnlineTrainer", *args: Any, **kwargs: Any) -> None:
    """Make the repository that the model is pushed to. Raises ValueError if the hub cannot be reached, or refuses.

    Takes the arguments of transformers, whose versions differ: `token`, and later `private`.
    """
    try:
        Trainer.init_hf_repo(self, *args, **kwargs)
    except Exception as error:  # of the hub's client and the libraries below it
        raise ValueError(
            f"push_to_hub=True: the repository {self.args.hub_model_id or self.args.output_dir!r} cannot be made or"
            f" written to: {type(error).__name__}: {error}. Look at the network, log in with a token that may write"
            " (`hf auth login`), or train without it and call `trainer.push_to_hub()` later."
        ) from error


INDEXES = (WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_INDEX_NAME)
ADAPTER_FILES = (ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, ADAPTER_SAFE_WEIGHTS_NAME)
MODEL_FILES = (CONFIG_NAME, GENERATION_CONFIG_NAME, WEIGHTS_NAME, SAFE_WEIGHTS_NAME, *INDEXES, *ADAPTER_FILES)
COPIES = "_hub"  # folder in output_dir for what is being uploaded; uploads leave out "_*"


@dataclass
class Push:
    """An upload of a checkpoint, under way or wanted."""

    checkpoint: Path
    message: str
    jobs: list[Future[Any]] = field(default_factory=list)
    kept: list["Push"] = field(default_factory=list)  # pushes whose checkpoint folders the jobs upload

    @property
    def step(self) -> str:
        return self.checkpoint.name.rpartition("-")[2]

    def error(self) -> BaseException | None:
        """The first error of its jobs, which are waited for."""
        return next((error for job in self.jobs if (error := job.exception()) is not None), None)


class ModelPushes:
    """Uploads of checkpoints to the model's repository, in the background and one after the other.

    With `hub_always_push` each is uploaded; without it one that is complete while another is uploaded is left out, as
    in transformers. The latest of a run is uploaded in any case: `finish` waits for it, and tries it again if it was
    left out or has failed. A failure is a warning with the code "push-failed"; the next checkpoint tries again.
    """

    def __init__(self, args: Any):
        self._args = args
        self._folder = Path(args.output_dir or ".")
        self._under_way: list[Push] = []
        self._missing: dict[Path, Push] = {}  # wanted and not uploaded, by checkpoints in the order of their steps
        self._latest: Path | None = None  # checkpoint of the run

    def push(self, repo: str, checkpoint: Path, message: str) -> None:
        """Upload a complete checkpoint, or leave it out while another is uploaded."""
        self.settle()
        self._latest = checkpoint
        self._missing[checkpoint] = Push(checkpoint, message)
        if self._args.hub_always_push or not self._under_way:
            self._start(repo)

    def settle(self) -> None:
        """Finish the uploads that have ended, and warn of those that have failed."""
        for push in [one for one in self._under_way if all(job.done() for job in one.jobs)]:
            self._end(push, "The next checkpoint tries again.")

    def finish(self, repo: str | None) -> None:
        """Wait for all uploads, and upload the latest checkpoint if that has not been done."""
        for push in list(self._under_way):
            self._end(push, "It is tried again now." if push.checkpoint == self._latest else "")
        if repo is not None and self._missing:
            self._start(repo)
            for push in list(self._under_way):
                self._end(push, "`trainer.push_to_hub()` tries again.")

    def _end(self, push: Push, then: str) -> None:
        error = push.error()
        self._under_way.remove(push)
        shutil.rmtree(self._copy(push), ignore_errors=True)
        with suppress(OSError):  # others are under way
            self._copy(push).parent.rmdir()
        if error is None:
            return
        if push.checkpoint == self._latest or self._keeps_all:  # else a later one is there, or will be
            again = {one.checkpoint: Push(one.checkpoint, one.message) for one in [*push.kept, push]}
            self._missing = {**again, **self._missing}
        kept = f"It is in {os.fspath(push.checkpoint)!r}. " if push.checkpoint.is_dir() else ""
        evidence = f"step {push.step} was not pushed to the hub: {format_error(error)}."
        report([Finding.warning("push-failed", evidence, f"{kept}{then}".strip())])

    @property
    def _keeps_all(self) -> bool:
        return _word(self._args.hub_strategy) == "all_checkpoints"

    def _start(self, repo: str) -> None:
        """Begin to upload the latest checkpoint if it is missing, and folders of missing ones that are to be kept."""
        wanted, self._missing = list(self._missing.values()), {}
        push, args = Push(wanted[-1].checkpoint, wanted[-1].message), self._args
        copy = self._copy(push)
        shutil.rmtree(copy if self._under_way else copy.parent, ignore_errors=True)  # of a run that was killed
        folders: list[tuple[Path, str | None, str]] = []
        if push.checkpoint == self._latest:
            _copy_all(self._files(push.checkpoint), copy / "model")
            folders.append((copy / "model", None, push.message))
        kept = wanted if self._keeps_all else wanted[-1:] if _word(args.hub_strategy) == "checkpoint" else []
        push.kept = kept
        for one in kept:
            name = one.checkpoint.name if self._keeps_all else "last-checkpoint"
            files = [path for path in one.checkpoint.rglob("*") if path.is_file()]
            _copy_all(((path, path.relative_to(one.checkpoint).as_posix(), True) for path in files), copy / name)
            folders.append((copy / name, name, f"{one.message}, checkpoint"))
        push.jobs = [
            hf_api().upload_folder(
                repo_id=repo,
                folder_path=folder,
                path_in_repo=path,
                commit_message=message,
                token=args.hub_token,
                revision=args.hub_revision,
                run_as_future=True,
            )
            for folder, path, message in folders
            if folder.is_dir()  # a checkpoint may be deleted by now
        ]
        self._under_way.append(push)

    def _copy(self, push: Push) -> Path:
        return self._folder / COPIES / push.checkpoint.name

    def _files(self, checkpoint: Path) -> Iterator[tuple[Path, str, bool]]:
        """Files of a push, their names in the repository, and True for those that nothing changes any more.

        They are the files of output_dir, with the checkpoint's model in the place of any earlier one.
        """
        model = {name: checkpoint / name for name in model_files(checkpoint)}
        for path in sorted(path for path in self._folder.rglob("*") if path.is_file()):
            name = path.relative_to(self._folder)
            hidden = any(part.startswith(".") for part in name.parts)  # what is being written
            if not (hidden or name.parts[0].startswith(("_", "checkpoint-")) or name.as_posix() in model):
                yield path, name.as_posix(), path.suffix == ".parquet"  # of the record, which are replaced
        yield from ((path, name, True) for name, path in model.items())


def model_files(checkpoint: Path) -> list[str]:
    """Names of the files of a model or adapter in a checkpoint, the shards of an index among them."""
    found = [name for name in MODEL_FILES if (checkpoint / name).is_file()]
    for name in INDEXES:
        if name in found:
            found += sorted(set(json.loads((checkpoint / name).read_text())["weight_map"].values()))
    return found


def place_model(checkpoint: Path, args: Any, processing_class: Any) -> None:
    """Copy a checkpoint's model into output_dir, with the tokenizer and the settings, as transformers does."""
    folder = Path(args.output_dir or ".")
    for name in model_files(checkpoint):
        with written_whole(folder / name) as new:
            shutil.copy(checkpoint / name, new)
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    torch.save(args, folder / "training_args.bin")


def _copy_all(files: Iterable[tuple[Path, str, bool]], folder: Path) -> None:
    """Copy files under these names into a folder; those that nothing changes are linked where that is possible."""
    for path, name, links in files:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if links:
            with suppress(OSError):  # a file system without links
                os.link(path, place)
                continue
        with suppress(FileNotFoundError):  # it has been removed meanwhile
            shutil.copy(path, place)


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


class PushCompletions(TrainerCallback):
    """Uploads the files of completions to a dataset on the hub during training."""

    def __init__(self, repo: str, folder: Path, token: str | None = None, private: bool | None = None):
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        self._api = HfApi(token=token, library_name="covey")
        self._folder = folder
        self._pushed = self._stamps()
        self._under_way: Any = None
        self._last = -PUSH_EVERY
        try:
            self._repo = self._api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True).repo_id
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise ValueError(
                f"log_completions_hub_repo={repo!r} cannot be created or written to: {error} Give the id of a data set,"
                " such as 'me/completions', and log in with a token that may write (`hf auth login`, or hub_token)."
            ) from error

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run uploads all files, as its last upload may not have finished."""
        if state.global_step:
            self._pushed = {}

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = self._under_way is None or self._under_way.done()
        if done and time.monotonic() - self._last >= PUSH_EVERY:
            self._push(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._push(state.global_step)
        self._settle()

    def _push(self, step: int) -> None:
        from huggingface_hub import CommitOperationAdd

        self._settle()
        new = {path: stamp for path, stamp in self._stamps().items() if self._pushed.get(path) != stamp}
        if not new:
            return
        self._last = time.monotonic()
        self._sending = new
        files = [CommitOperationAdd(f"completions/{path.name}", path) for path in sorted(new)]
        message = f"Completions up to step {step}"
        self._under_way = self._api.create_commit(
            self._repo, files, commit_message=message, repo_type="dataset", run_as_future=True
        )

    def _settle(self) -> None:
        if self._under_way is None:
            return
        error = self._under_way.exception()
        self._under_way = None
        if error is None:
            self._pushed.update(self._sending)
        else:
            warn(
                f"completions were not pushed to {self._repo!r}: {error} They are in {os.fspath(self._folder)!r}.",
            )

    def _stamps(self) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in self._folder.glob("completions_*.parquet")}
