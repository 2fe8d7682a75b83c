"""Model cards, and upload of completions to a dataset on the hub, which is tried again at the next log if it fails."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback

from covey.runtime.user_code import warn
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


def init_hf_repo(self: "OnlineTrainer", token: str | None = None, private: bool | None = None) -> None:
    """Make the repository that the model is pushed to. Raises ValueError if the hub cannot be reached, or refuses."""
    try:
        Trainer.init_hf_repo(self, token, private)
    except Exception as error:  # of the hub's client and the libraries below it
        raise ValueError(
            f"push_to_hub=True: the repository {self.args.hub_model_id or self.args.output_dir!r} cannot be made or"
            f" written to: {type(error).__name__}: {error}. Look at the network, log in with a token that may write"
            " (`hf auth login`), or train without it and call `trainer.push_to_hub()` later."
        ) from error


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
