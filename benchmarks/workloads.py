"""The work that is measured: how long prompts and completions are, and which groups carry a signal.

Completions are sampled for real, at temperature 1, but their lengths are forced: what a model happens to say would
otherwise decide how much work a step is. Lengths, prompts and rewards depend on the workload and the round alone, so
every library does the same work. Pure Python; to add a workload, add a row to `WORKLOADS`.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand"
    " part place case week company system program question work government number night point home water room mother"
    " area money story fact month lot right study book eye job word business issue side kind head house service friend"
    " father power hour game line end member law car city community name president team minute idea kid body"
    " information back parent face level office door health person art war history party result change morning reason"
    " research girl guy moment air teacher force education"
)


WARM_UP_TOKENS = 8
"""Length of prompts and completions in first steps that are not measured: one allocates the optimizer's state."""

WARM_UPS = 2
"""First, tiny steps. Covey compares the log-probs of a run's first two rollout batches with the trainer's."""


@dataclass(frozen=True)
class Workload:
    """One optimizer step: `groups` prompts, `group_size` completions each.

    Attributes:
        name: of the row in the table.
        prompt_tokens: exact length of every prompt.
        groups: prompts a step.
        group_size: completions a prompt.
        completion_tokens: exact length of every completion, or the mean of a geometric law where `cap` is given.
        cap: longest completion of the geometric law; None where all lengths are equal.
        with_signal: of how many successive prompts one gives different rewards: 1 is all of them, 2 every other one.

    Example:
        >>> Workload("W1", 64, 8, 8, 128).completions
        64
    """

    name: str
    prompt_tokens: int
    groups: int
    group_size: int
    completion_tokens: int
    cap: int | None = None
    with_signal: int = 1

    @property
    def completions(self) -> int:
        """Completions of one step."""
        return self.groups * self.group_size

    @property
    def longest(self) -> int:
        """The limit given to the libraries as `max_completion_length`."""
        return self.cap or self.completion_tokens

    def lengths(self, step: int) -> list[int]:
        """The length of every completion of a step, group by group.

        The geometric law P(L = l) = (1 - q) q^(l - 1) has mean 1 / (1 - q); a uniform u in (0, 1] is turned into
        ceil(log u / log q), and lengths beyond the cap are cut to it.
        """
        if self.cap is None:
            return [self.completion_tokens] * self.completions
        chance = random.Random(f"{self.name} {step}")
        q = 1 - 1 / self.completion_tokens
        draws = (math.ceil(math.log(1 - chance.random()) / math.log(q)) for _ in range(self.completions))
        return [min(max(draw, 1), self.cap) for draw in draws]

    def warm_up(self) -> list[int]:
        """Completion lengths of a step that is not measured."""
        return [min(WARM_UP_TOKENS, self.longest)] * self.completions

    def grouped(self, lengths: list[int]) -> list[list[int]]:
        """Lengths of a step, cut into groups."""
        return [lengths[i : i + self.group_size] for i in range(0, len(lengths), self.group_size)]

    def signals(self) -> list[bool]:
        """For each group of a step, whether its rewards differ."""
        return [group % self.with_signal == 0 for group in range(self.groups)]

    def describe(self) -> str:
        """One line for the table."""
        law = f"geometric, mean {self.completion_tokens}, cap {self.cap}" if self.cap else f"{self.completion_tokens}"
        signal = "all groups with signal" if self.with_signal == 1 else f"1 group in {self.with_signal} with signal"
        size = f"{self.groups} x {self.group_size}"
        return f"prompts of {self.prompt_tokens} tokens, {size} completions of {law} tokens, {signal}"


WORKLOADS = {
    "W1": Workload("W1", 64, 8, 8, 128),
    "W2": Workload("W2", 512, 4, 16, 64),
    "W3": Workload("W3", 128, 8, 8, 48, cap=256, with_signal=2),
}

TRIED_IN_CONTINUOUS_BATCHES = ("W1", "W3")
"""Where transformers' continuous batching runs. Every row attends to the pages of all: three times the time of
`generate` on W1, and four minutes a round with W2's prompts, whose equal lengths leave it nothing to gain."""


def rows(workload: Workload, tokenizer: Callable[..., Any], steps: int, warm_ups: int = 1) -> list[dict[str, Any]]:
    """Dataset rows for warm-up steps and `steps` measured ones, in order.

    Prompts are plain text of exactly `prompt_tokens` tokens (`WARM_UP_TOKENS` in a warm-up); no two are alike.

    Raises:
        ValueError: the tokenizer gives a prompt another length.
    """
    words = [word for word in WORDS.split() if len(tokenizer(" " + word)["input_ids"]) == 1]
    chance = random.Random(workload.name)
    made = []
    for step in range(warm_ups + steps):
        wanted = min(WARM_UP_TOKENS, workload.prompt_tokens) if step < warm_ups else workload.prompt_tokens
        for signal in workload.signals():
            prompt = "".join(" " + word for word in chance.choices(words, k=wanted))
            if (length := len(tokenizer(prompt)["input_ids"])) != wanted:
                raise ValueError(f"a prompt became {length} tokens rather than {wanted}: {prompt!r}")
            made.append({"prompt": prompt, "signal": signal})
    return made


def reward_for(workload: Workload) -> Callable[..., list[float]]:
    """A reward function that depends on a completion's place in its group alone, and is constant without signal."""

    def by_place(completions: list[Any], signal: list[bool], **columns: Any) -> list[float]:
        places = [index % workload.group_size for index in range(len(completions))]
        return [place / workload.group_size if wanted else 0.5 for place, wanted in zip(places, signal, strict=True)]

    return by_place
