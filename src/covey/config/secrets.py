"""Configs without the servers' keys in logs, trackers and checkpoints, which may be pushed to a hub."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from transformers import TrainingArguments

from covey.runtime.safe_text import without_secrets

KEYS = ("vllm_server_api_key", "sglang_api_key")
DICT_FIELDS = (
    "model_init_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
    "transformers_continuous_batching_config",
    "vllm_engine_kwargs",
    "sglang_server_args",
)


class HidesSecrets(TrainingArguments):
    """Training arguments that are printed, logged and pickled without secrets."""

    def to_dict(self) -> dict[str, Any]:
        """Every field, as trackers and logs show it: with placeholders for the servers' keys."""
        shown = {**super().to_dict(), **self._public_dicts()}
        for name in KEYS:
            if shown.get(name) is not None:
                shown[name] = f"<{name.upper()}>"
        return shown

    @contextmanager
    def without_keys(self) -> Iterator[None]:
        """Remove the servers' keys within this context, in which others write the config to a file."""
        public = {**dict.fromkeys(KEYS), **self._public_dicts()}
        private = {name: getattr(self, name) for name in public}
        try:
            self.__dict__.update(public)
            yield
        finally:
            self.__dict__.update(private)

    def _public_dicts(self) -> dict[str, Any]:
        return {name: without_secrets(getattr(self, name)) for name in DICT_FIELDS}

    def __str__(self) -> str:
        with self.without_keys():
            return super().__str__()

    __repr__ = __str__

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **self._public_dicts(), **dict.fromkeys((*KEYS, "hub_token"))}

    def __copy__(self) -> Self:  # copies within the process keep the secrets, which `__getstate__` would drop
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied
