"""Mistakes of users and the bench on which they are made; the other modules of this package are the catalogue.

To add a mistake, append it to a catalogue and its advice to `advice.py`, then run `python tools/troubleshooting.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey import GRPOTrainer, RLOOTrainer
from covey.core.findings import CheckError
from tests.support import runs, tiny

CONFIG, CONSTRUCTION, TRAINING = "config", "construction", "training"

SIZES = {
    name: getattr(tiny.config(), name)
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "pad_token_id",
        "eos_token_id",
        "bos_token_id",
    )
}
"""Of models of other architectures that go with the tiny tokenizer."""


@dataclass(frozen=True)
class Mistake:
    """One wrong input, and how it shows.

    Attributes:
        what: the heading in docs/troubleshooting.md: what the user did. Several mistakes may share one; the page shows
            the message of the first.
        make: does it on a bench; an error is raised on the way, or a warning is given and the run continues.
        says: patterns that the message contains: with a `code`, names and values alone.
        when: the step that notices it.
        kind: class of the exception or warning.
        code: of the one finding that it must carry; "" where no check finds the mistake.
    """

    what: str
    make: Callable[["Bench"], Any]
    says: tuple[str, ...]
    when: str = CONSTRUCTION
    kind: type[Warning] | type[Exception] = ValueError
    code: str = ""


def checked(
    what: str,
    make: Callable[["Bench"], Any],
    code: str,
    *says: str,
    when: str = CONSTRUCTION,
    kind: type[Warning] | type[Exception] = CheckError,
) -> Mistake:
    """A mistake that a check finds, with the code and the values of its finding."""
    return Mistake(what, make, says, when, kind, code)


class Bench:
    """Makes configs and trainers as a user would, and knows how far it has come.

    Args:
        path: an empty folder for this mistake.
        folder: a saved model with its tokenizer.
    """

    def __init__(self, path: Path, folder: str):
        self.path = path
        self.folder = folder
        self.stage = CONFIG

    @property
    def output_dir(self) -> Path:
        return self.path / "run"

    def config(self, method: str = "grpo", **settings: Any) -> Any:
        return runs.config(self.output_dir, method, **{"max_steps": 1, **settings})

    def build(
        self, settings: dict[str, Any] | None = None, method: str = "grpo", trainer: Any = None, **parts: Any
    ) -> Any:
        """A trainer of a tiny model; `parts` are its arguments, `settings` config fields, `trainer` another class."""
        defaults: dict[str, Any] = {
            "model": tiny.model(),
            "reward_funcs": runs.longer,
            "train_dataset": tiny.rows(),
            "processing_class": tiny.tokenizer(),
        }
        if "args" not in parts:
            parts["args"] = self.config(method, **(settings or {}))
        self.stage = CONSTRUCTION
        made = (trainer or (GRPOTrainer if method == "grpo" else RLOOTrainer))(**{**defaults, **parts})
        self.stage = TRAINING
        return made

    def train(self, settings: dict[str, Any] | None = None, **parts: Any) -> Any:
        trainer = self.build(settings, **parts)
        trainer.train()
        return trainer

    def save(self, name: str, *parts: Any) -> str:
        """A folder with models and tokenizers saved into it."""
        for part in parts:
            part.save_pretrained(self.path / name)
        return str(self.path / name)

    def checkpoint(self, peft_config: Any = None, **settings: Any) -> str:
        """The checkpoint of a run that stopped after one step."""
        self.train({"save_strategy": "steps", "save_steps": 1, **settings}, peft_config=peft_config)
        return str(self.output_dir / "checkpoint-1")

    def resume(self, checkpoint: str | bool, settings: dict[str, Any] | None = None, **parts: Any) -> Any:
        trainer = self.build({"max_steps": 2, **(settings or {})}, **parts)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    def write(self, text: str, name: str = "run.yaml") -> str:
        (self.path / name).write_text(text)
        return str(self.path / name)
