"""Tools, rollout functions, environments and rewards that misbehave, and what becomes of a run that has them.

Each `Case` is a row of a table in docs/survival.md. The cases are in `hostile_tools`,
`hostile_functions`, `hostile_environments` and `hostile_rewards`; to add one, append it to a list there, and a row with
the same `what` to the page.

What is hostile is so in some rollouts only, which are the same in every run: the others are compared with those of a
run in which nobody is.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.core.records import FinishReason, Rollout
from covey.engines.scripted import ScriptedEngine
from tests.support import runs, tiny
from tests.trainer.agents.test_tools import TEMPLATE

CALL_FAILS = "The call fails"
"""The call fails, the policy reads why, and the rollout continues."""
SHOWN = "The call succeeds"
"""The call succeeds; what comes of its result."""
FAILS = "The rollout fails"
"""It gets no reward and advantage 0; the others of its group are trained on."""
UNSCORED = "No reward"
"""The completion gets none from that function."""
ENDS = "The run ends"
OWN = "It counts as its own rollout"
"""What is returned counts as any other rollout."""
NOTHING = "No effect"
"""It has no effect on anybody else."""

SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 8,
    "max_completion_length": 500,
    "engine_parity": "off",
    "shuffle_dataset": False,
    "tool_timeout": 10.0,
    "rollout_timeout": 60.0,
}
"""Two steps of two prompts with four rollouts each."""


def deadline(name: str, steps: int = 1) -> dict[str, Any]:
    """A short deadline. Every step waits for it, so two are for what may still hold something in the second."""
    return {name: 0.5, "max_steps": steps}


LETTERS = 90
"""Tokens of the tiny tokenizer's printable characters, from 4 on."""


def tokenizer() -> Any:
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


TOKENIZER = tokenizer()


def acting(prompt_ids: Any, seed: int) -> list[int]:
    """The first turn calls the tool `act`, badly in one of four rollouts; the next says letters.

    Which letters is decided by the seed and by every token before them, so that whatever leaks shows.
    """
    if "<tool_call>" not in TOKENIZER.decode(prompt_ids):
        bad = "true" if seed % 4 == 0 else "false"
        call = f'<tool_call>{{"name": "act", "arguments": {{"bad": {bad}}}}}</tool_call>'
        return [*TOKENIZER(call, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    return letters(prompt_ids, seed)


def letters(prompt_ids: Any, seed: int) -> list[int]:
    """One to six, and the end."""
    length, start = 1 + seed % 6, seed // 6 + sum(prompt_ids)
    return [*(4 + (start + place * place) % LETTERS for place in range(length)), TOKENIZER.eos_token_id]


@dataclass
class Scene:
    """One run.

    Attributes:
        path: an empty folder.
        rollout_batches: rollouts of each rollout batch so far, as the trainer got them (copies).
        given: what the second reward function, `longer`, was called with (copies).
        release: set when the test is over: whoever hangs in a way that nobody can stop waits for it.
        kept: whatever the hostile code keeps.
    """

    path: Path
    rollout_batches: list[list[Rollout]] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)
    kept: list[Any] = field(default_factory=list)

    def trainer(self, parts: dict[str, Any], **settings: Any) -> Any:
        """A trainer of a tiny model, sampled by a script; `parts` are its arguments in addition to the usual ones."""
        rewards = parts.pop("reward_funcs", [])
        arguments = {
            "model": tiny.model(max_position_embeddings=1024),
            "processing_class": tokenizer(),
            "train_dataset": tiny.rows(conversational=True),
            "engine": ScriptedEngine(acting if "tools" in parts else letters),
            "reward_funcs": [*rewards, self.longer],
            **parts,
        }
        made = runs.trainer(self.path / "run", parts=arguments, **{**SETTINGS, **settings})
        collect = made.collector.collect

        def noting(*args: Any, **kwargs: Any) -> list[Rollout]:
            rollouts = collect(*args, **kwargs)
            self.rollout_batches.append([copied(rollout) for rollout in rollouts])
            return rollouts

        made.collector.collect = noting
        return made

    def longer(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        """A reward that completions of a group hardly ever share."""
        columns = {name: columns[name] for name in ("answer",)}
        self.given.append(plain({"prompts": prompts, "completions": completions, "ids": completion_ids, **columns}))
        return [len(ids) + sum(ids) % 10 / 10 for ids in completion_ids]


def copied(rollout: Rollout) -> Rollout:
    return Rollout(
        list(rollout.prompt_ids),
        list(rollout.completion_ids),
        list(rollout.sampled),
        None,
        plain(rollout.completion),
        rollout.finish,
        calls=dict(rollout.calls),
        error=rollout.error,
    )


def plain(value: Any) -> Any:
    """A copy of lists and dictionaries of plain values."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def acts_badly(rollout: Rollout) -> bool:
    """Tell whether a rollout of `acting` is hostile."""
    return bool(rollout.completion and rollout.completion[0]["tool_calls"][0]["function"]["arguments"]["bad"])


@dataclass(frozen=True)
class Case:
    """Something hostile.

    Attributes:
        what: the row of the table.
        outcome: what happens, as the row begins.
        parts: the trainer's arguments that make it so.
        says: patterns in the response that the policy reads, or in the error.
        counted: names of metrics above 0.
        kind: of the error that ends the run.
        settings: config fields.
        lingers: a thread or coroutine of it cannot be stopped, and continues until the test is over.
        delays: what others have under way at the same time may be late too.
        harmless: nothing at all differs from the benign run, the weights included.
        benign: of the run to compare with, where that is not the one of its list.
        check: looks further at a hostile rollout, next to the one of the benign run.
        shown_by: the test of a lower layer that shows the same in `make test`; the run, which takes about a second of
            computing, is then one of `make test-slow`.
    """

    what: str
    outcome: str
    parts: Callable[[Scene], dict[str, Any]]
    says: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    kind: type[BaseException] = ValueError
    settings: dict[str, Any] = field(default_factory=dict)
    lingers: bool = False
    delays: bool = False
    harmless: bool = False
    benign: "Case | None" = None
    check: Callable[[Rollout, Rollout], bool] = lambda mine, theirs: True
    shown_by: str = ""

    @property
    def steps(self) -> int:
        """Of the run."""
        return self.settings.get("max_steps", 2)


def failed(rollout: Rollout) -> bool:
    return rollout.finish is FinishReason.ERROR
